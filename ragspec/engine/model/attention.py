"""Attention of packed rows over the ragged cache, plugged in through transformers.AttentionInterface.

Grouped heads share their keys without copies: a group's queries become further queries of one head or, where torch
applies the causal mask itself, keys are expanded without being repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

from ragspec.engine.kv.cache import LayerCache, RaggedCache
from ragspec.engine.model import masks
from ragspec.engine.model.layer_graph import CAPTURING
from ragspec.engine.model.layout import Alone, Layout, Run
from ragspec.engine.model.masks import MaskRule, Unsupported

NAME = "ragspec"


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer turns queries and keys into weights.

    cap: scores become cap * tanh(score / cap); None: unchanged. sinks: (heads,) a score per head that takes weight but
    has no value; None: none.
    """

    scaling: float | None
    cap: float | None
    sinks: torch.Tensor | None

    @property
    def plain(self) -> bool:
        """Whether torch's own attention can compute them."""
        return self.cap is None and self.sinks is None


def register() -> None:
    """Register the function with transformers as `attn_implementation` "ragspec"."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    masks.register(NAME)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: MaskRule | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return (1, T, heads, head_dim) for queries of (1, heads, T, head_dim), attending to the rows' cached past too.

    key, value: (1, kv_heads, T, head_dim), of this forward's tokens. attention_mask: what masks.py made of the model's
    mask; a window passed only as an argument is ignored, as torch's own attention ignores it. Raises Unsupported for
    any other mask, and for anything but self-attention.
    """
    if kwargs.get("position_bias") is not None:
        raise Unsupported("adds a bias to its scores by position")
    if attention_mask is not None and not isinstance(attention_mask, MaskRule):
        raise Unsupported("builds its own attention mask")
    parts = CAPTURING.get()
    if parts is not None:
        return parts.attend(query, key, value, s_aux, Attend(scaling, softcap)), None
    return _attend_now(scaling, softcap, query, key, value, s_aux, attention_mask), None


@dataclass(frozen=True, slots=True)
class Attend:
    """A layer's attention with its parameters. scaling, cap: as in Scores."""

    scaling: float | None
    cap: float | None

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        rule: MaskRule | None,
    ) -> torch.Tensor:
        """Return (1, T, heads, head_dim)."""
        return _attend_now(self.scaling, self.cap, query, key, value, sinks, rule)


def _attend_now(
    scaling: float | None,
    cap: float | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    rule: MaskRule | None,
) -> torch.Tensor:
    """Return (1, T, heads, head_dim), using the cache of the forward in progress."""
    step = ATTENDING.get(None)
    if step is None:
        raise Unsupported("attends to more than its own tokens")
    return step.attend(query, key, value, Scores(scaling, cap, sinks), rule)


class StepAttention(Protocol):
    """The attention of the forward in progress."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, rule: MaskRule | None
    ) -> torch.Tensor:
        """Write keys and values, (1, kv_heads, T, head_dim), and return what queries, (1, heads, T, head_dim), see.

        Returns:
            (1, T, heads, head_dim).
        """


ATTENDING: ContextVar[StepAttention] = ContextVar("ATTENDING")


@contextmanager
def attending(step: StepAttention) -> Iterator[None]:
    """Let the model's attention be computed by `step`."""
    token = ATTENDING.set(step)
    try:
        yield
    finally:
        ATTENDING.reset(token)


class PackedAttention:
    """Attention of packed rows over the ragged cache."""

    def __init__(self, cache: RaggedCache, layout: Layout) -> None:
        self._cache = cache
        self._layout = layout

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, rule: MaskRule | None
    ) -> torch.Tensor:
        """See StepAttention."""
        cache, layout = self._cache, self._layout
        if key.shape[2] != layout.tokens + layout.padding:
            raise Unsupported("attends to more than its own tokens")
        layer = cache.write(key, value)
        if layout.watch is None:
            return _attend_all(cache, layer, layout, query, scores, rule)
        slot = sum(store.shape[0] * store.shape[3] * store.element_size() for store in (layer.keys, layer.values))
        return layout.watch.attend(layout, query, slot, partial(_attend_all, cache, layer, layout, query, scores, rule))


def _attend_all(
    cache: RaggedCache,
    layer: LayerCache,
    layout: Layout,
    query: torch.Tensor,
    scores: Scores,
    rule: MaskRule | None,
) -> torch.Tensor:
    """Return (1, T, heads, head_dim); zeros for padding tokens."""
    heads, tokens, _ = query.shape[1:]
    groups = heads // layer.keys.shape[0]
    queries = query[0].reshape(-1, groups, tokens, query.shape[3])  # (kv_heads, groups, T, head_dim)
    out = query.new_empty(tokens, heads, layer.values.shape[3])
    out[layout.tokens :] = 0
    if _is_for_kernels(layer, layout, query, scores, rule):
        _attend_in_pieces(layer, layout, query[0], scores, out)
        return out[None]
    cache.settle()
    for run in layout.runs:
        out[run.target] = _attend_together(layer, run, queries, scores, rule)
    for alone in layout.alone:
        out[alone.packed] = _attend_alone(layer, alone, queries, scores, rule)
    return out[None]


def _is_for_kernels(
    layer: LayerCache, layout: Layout, query: torch.Tensor, scores: Scores, rule: MaskRule | None
) -> bool:
    """Return whether the kernels can compute this layer's attention: no sinks, and a plain causal mask."""
    kernels = layout.kernels
    if kernels is None or scores.sinks is not None or not query.shape[3] == layer.values.shape[3] == kernels.head:
        return False
    if not query.dtype == layer.keys.dtype == layer.values.dtype == torch.float32:
        return False
    return layout.causal(rule)


def _attend_in_pieces(
    layer: LayerCache, layout: Layout, query: torch.Tensor, scores: Scores, out: torch.Tensor
) -> None:
    """Compute queries of (heads, T, head_dim) with the kernels, into `out`."""
    assert layout.kernels is not None
    query = query if query.stride(2) == 1 else query.contiguous()
    scaling = query.shape[2] ** -0.5 if scores.scaling is None else scores.scaling
    layout.kernels.attend(query, layer.keys, layer.values, scaling, layout.pieces, out, scores.cap)


def _attend_together(
    layer: LayerCache, run: Run, queries: torch.Tensor, scores: Scores, rule: MaskRule | None
) -> torch.Tensor:
    """Return (tokens of the run, heads, head_dim)."""
    kv_heads, groups, _, size = queries.shape
    rows = run.rows.stop - run.rows.start
    gathered = queries.index_select(2, run.gather).view(kv_heads, groups, rows, run.longest, size)
    folded = gathered.permute(2, 0, 1, 3, 4).reshape(rows, kv_heads, groups * run.longest, size)
    sight = run.sight(rule, groups, queries.dtype)
    keys = layer.keys[:, run.rows, sight.first : run.reach].transpose(0, 1)  # (rows, kv_heads, slots, head_dim)
    values = layer.values[:, run.rows, sight.first : run.reach].transpose(0, 1)
    out = weigh(folded, keys, values, sight.mask, scores, groups)
    out = out.view(rows, kv_heads, groups, run.longest, -1).permute(0, 3, 1, 2, 4)
    out = out.reshape(rows * run.longest, kv_heads * groups, -1)
    return out if run.keep is None else out[run.keep]


def _attend_alone(
    layer: LayerCache, alone: Alone, queries: torch.Tensor, scores: Scores, rule: MaskRule | None
) -> torch.Tensor:
    """Return (count, heads, head_dim)."""
    segment = alone.segment
    end = segment.start + segment.count
    mine = queries[:, :, alone.packed]  # (kv_heads, groups, count, head_dim)
    kv_heads, groups, count, size = mine.shape
    begins = segment.start == 0 and scores.plain
    if begins and (rule is None or alone.sight(rule, groups, mine.dtype, mine.device).causal):
        shape = (kv_heads, groups, end, -1)
        keys = layer.keys[:, segment.row, None, :end].expand(shape)  # a group's heads share one storage
        values = layer.values[:, segment.row, None, :end].expand(shape)
        out = attention(mine, keys, values, is_causal=True, scale=scores.scaling)
    else:
        folded = mine.reshape(1, kv_heads, groups * count, size)
        sight = alone.sight(rule, groups, mine.dtype, mine.device)
        keys = layer.keys[None, :, segment.row, sight.first : end]
        values = layer.values[None, :, segment.row, sight.first : end]
        out = weigh(folded, keys, values, sight.mask, scores, groups).view(kv_heads, groups, count, -1)
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def weigh(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scores: Scores, groups: int
) -> torch.Tensor:
    """Return the weighted values, (rows, kv_heads, groups x n, head_dim), for queries of that shape.

    keys, values: (rows, kv_heads, slots, head_dim). mask: (rows, 1, groups x n, slots).
    """
    if scores.plain:
        return attention(queries, keys, values, attn_mask=mask, scale=scores.scaling)
    scaling = queries.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
    weights = queries @ keys.transpose(2, 3) * scaling
    if scores.cap is not None:
        weights = scores.cap * torch.tanh(weights / scores.cap)
    weights = (weights + mask).float()
    if scores.sinks is not None:
        kv_heads, count = queries.shape[1], queries.shape[2] // groups
        sinks = scores.sinks.view(kv_heads, groups, 1).expand(-1, -1, count).reshape(1, kv_heads, -1, 1)
        weights = torch.cat([weights, sinks.float().expand(len(queries), -1, -1, -1)], dim=-1)
    weights = weights.softmax(-1)[..., : keys.shape[2]]
    return weights.to(values.dtype) @ values
