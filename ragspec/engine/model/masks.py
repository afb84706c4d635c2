"""Attention masks by the model's own rules: transformers' mask functions, applied to packed rows.

A model builds its masks (causal, sliding window, chunked, per layer) through transformers.AttentionMaskInterface. There
it gets a MaskRule instead of a tensor, and passes it on to attend() (attention.py). Limit: a mask depends on query and
slot only; no padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


class Unsupported(Exception):
    """The model needs something that attention here cannot do; the message completes a sentence after "it"."""


@dataclass(frozen=True, slots=True, eq=False)
class MaskRule:
    """A mask function of transformers: (batch, head, query position, slot) -> bool."""

    function: Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """The slots that some queries see; none sees any before `first`.

    mask: 0 or -inf, added to scores over the slots from `first` on. causal: whether it is the plain causal mask.
    """

    first: int
    mask: torch.Tensor
    causal: bool


def register(name: str) -> None:
    """Make models with attention implementation `name` build MaskRules."""
    from transformers import AttentionMaskInterface

    AttentionMaskInterface.register(name, mask_rule_of)


def mask_rule_of(
    *, mask_function: Callable[..., torch.Tensor], attention_mask: Any = None, **_: Any
) -> MaskRule | None:
    """Return the rule of one kind of layer; None for the plain causal mask."""
    from transformers.masking_utils import causal_mask_function

    if attention_mask is not None and not attention_mask.all():
        raise Unsupported("masks some of its tokens")  # rows are packed without padding
    return None if mask_function is causal_mask_function else MaskRule(mask_function)


def is_causal(queries: torch.Tensor, reach: int, rule: MaskRule) -> bool:
    """Return whether queries at positions (rows, n) see the same of `reach` slots as under the plain causal mask."""
    return bool(torch.equal(seen(queries, reach, rule), seen(queries, reach, None)))


def seen(queries: torch.Tensor, reach: int, rule: MaskRule | None) -> torch.Tensor:
    """Return which of `reach` slots queries at positions (rows, n) see, (rows, n, reach). rule: None for causal."""
    slots = torch.arange(reach, device=queries.device)
    causal = slots <= queries[..., None]
    if rule is None:
        return causal
    zero = torch.zeros((), dtype=torch.long, device=queries.device)
    return rule.function(zero, zero, queries[..., None], slots).expand_as(causal)


def additive(visible: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 for visible slots, (rows, n, slots), and -inf for others: (rows, 1, groups x n, slots)."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
    return mask[:, None].repeat(1, 1, groups, 1)


def attention_mask(
    queries: torch.Tensor, reach: int, rule: MaskRule | None, groups: int, dtype: torch.dtype
) -> AttentionMask:
    """Return what queries at positions (rows, n) see of `reach` slots; the mask is (rows, 1, groups x n, slots)."""
    first, plain, visible = 0, rule is None, seen(queries, reach, rule)
    if rule is not None:
        plain = bool(torch.equal(visible, seen(queries, reach, None)))
        if not plain:
            first = int(visible.flatten(0, 1).any(0).to(torch.int8).argmax())
            visible = visible[..., first:]
    return AttentionMask(first, additive(visible, groups, dtype), plain)
