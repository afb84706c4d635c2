"""Rotary embeddings whose frequencies depend on how long the text is (dynamic NTK, LongRoPE), token by token.

transformers takes a forward's frequencies from its largest position. When generate() answers one record alone, that is
the prompt's length for every token of the prompt, and each later token's own position. So the length that counts for a
token is known, whatever rows, drafts and chunks share our forward: the model's own code is called once per length, for
its tokens, as if the text were that long.
Source: transformers 5.19, modeling_rope_utils.dynamic_rope_update. Limit: one device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from ragspec.engine.layout import Layout
from ragspec.models.rotary import (
    effective_length,
    forget,
    kind_of,
    kinds_of,
    length_dependent,
    limit_of,
    restart_length,
)


class Frequencies:
    """A model's length-dependent rotary modules, made to work per token; `layout()` says where the tokens are."""

    def __init__(self, inner: Any, layout: Callable[[], Layout | None]) -> None:
        self._layout = layout
        self._modules = length_dependent(inner)
        self.restart = restart_length(inner)
        for module in self._modules:
            module.forward = self._per_token(module, module.forward)

    @property
    def vary(self) -> bool:
        """Whether there is such a module."""
        return bool(self._modules)

    def release(self) -> None:
        """Give the modules back their own forward."""
        for module in self._modules:
            del module.forward
            forget(module)

    def forget(self) -> None:
        """Make the modules forget the texts they saw in transformers' own forwards."""
        for module in self._modules:
            forget(module)

    def of(self, length: int) -> Hashable:
        """Return a key of the frequencies of a text of `length` tokens; equal frequencies have equal keys."""
        return tuple(effective_length(length, kind, limit) for kind, limit in kinds_of(self._modules))

    def agree(self, base: int, other: int, tokens: int) -> bool:
        """Return whether the first `tokens` of two rows that began with `base` and `other` tokens may be shared.

        Tokens of the second that lie beyond its base were computed one by one.
        """
        return not self._modules or self.of(base) == self.of(other) == self.of(max(other, tokens))

    def _per_token(self, module: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        def per_token(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            layout = self._layout()
            if layout is None:
                return forward(x, position_ids, *args, **kwargs)
            kind, limit = kind_of(module), limit_of(module)
            effective = [effective_length(length, kind, limit) for length in layout.lengths]
            lengths = torch.tensor(effective, device=x.device)
            parts = []
            for length in sorted(set(effective)):
                chosen = (lengths == length).nonzero()[:, 0]
                # one more position, the last of the text that counts: the model chooses by it
                last = position_ids.new_full((*position_ids.shape[:-1], 1), length - 1)
                forget(module)
                found = forward(x, torch.cat([position_ids[..., chosen], last], -1), *args, **kwargs)
                parts.append((chosen, found))
            forget(module)
            return _join(parts, len(layout.lengths))

        return per_token


def _join(parts: list[tuple[torch.Tensor, Any]], tokens: int) -> Any:
    """Return the parts' outputs, each (..., n + 1, size) or a tuple of these, joined in packed order."""
    first = parts[0][1]
    if isinstance(first, tuple):
        return tuple(_join([(chosen, found[i]) for chosen, found in parts], tokens) for i in range(len(first)))
    whole = first.new_empty(*first.shape[:-2], tokens, first.shape[-1])
    for chosen, found in parts:
        whole[..., chosen, :] = found[..., :-1, :]
    return whole
