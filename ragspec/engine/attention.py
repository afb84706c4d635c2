"""Attention of packed rows over the ragged cache, in the place that transformers keeps for attention functions.

Grouped heads share their keys without copies: the queries of a group are further queries of one head, or, where torch
masks by itself, the keys are expanded without being repeated. Source of the interface: transformers.AttentionInterface.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as attention

from ragspec.engine.cache import LayerCache
from ragspec.engine.layout import Alone, Layout, Run

NAME = "ragspec"


class Unsupported(Exception):
    """The model asks attention for something that is not here."""


def register() -> None:
    """Make the function known to transformers as `attn_implementation` "ragspec"; no mask is built for it."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: tuple[LayerCache, Layout],
    value: None,
    attention_mask: None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return (1, T, heads, head_dim) for queries of (1, heads, T, head_dim).

    key: what the cache's update() returned. Raises Unsupported for soft-capped scores and attention sinks.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise Unsupported(name)
    layer, layout = key
    heads, tokens, _ = query.shape[1:]
    groups = heads // layer.keys.shape[0]
    queries = query[0].view(-1, groups, *query.shape[2:])  # (kv_heads, groups, T, head_dim)
    out = query.new_empty(tokens, heads, layer.values.shape[3])
    for run in layout.runs:
        out[run.target] = _attend_together(layer, run, queries, scaling, sliding_window)
    for alone in layout.alone:
        out[alone.packed] = _attend_alone(layer, alone, queries, scaling, sliding_window)
    return out[None], None


def _attend_together(
    layer: LayerCache, run: Run, queries: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    """Return (tokens of the run, heads, head_dim)."""
    kv_heads, groups, _, size = queries.shape
    rows = run.rows.stop - run.rows.start
    gathered = queries.index_select(2, run.gather).view(kv_heads, groups, rows, run.longest, size)
    folded = gathered.permute(2, 0, 1, 3, 4).reshape(rows, kv_heads, groups * run.longest, size)
    keys = layer.keys[:, run.rows, : run.reach].transpose(0, 1)  # (rows, kv_heads, reach, head_dim)
    values = layer.values[:, run.rows, : run.reach].transpose(0, 1)
    mask = run.mask(window, groups, queries.dtype)
    out = attention(folded, keys, values, attn_mask=mask, scale=scaling)
    out = out.view(rows, kv_heads, groups, run.longest, -1).permute(0, 3, 1, 2, 4)
    out = out.reshape(rows * run.longest, kv_heads * groups, -1)
    return out if run.keep is None else out[run.keep]


def _attend_alone(
    layer: LayerCache, alone: Alone, queries: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    """Return (count, heads, head_dim)."""
    segment = alone.segment
    end = segment.start + segment.count
    mine = queries[:, :, alone.packed]  # (kv_heads, groups, count, head_dim)
    kv_heads, groups, count, size = mine.shape
    if segment.start == 0 and (window is None or window >= end):
        shape = (kv_heads, groups, end, -1)
        keys = layer.keys[:, segment.row, None, :end].expand(shape)  # a group's heads share one storage
        values = layer.values[:, segment.row, None, :end].expand(shape)
        out = attention(mine, keys, values, is_causal=True, scale=scaling)
    else:
        folded = mine.reshape(1, kv_heads, groups * count, size)
        keys, values = layer.keys[None, :, segment.row, :end], layer.values[None, :, segment.row, :end]
        mask = alone.mask(window, groups, mine.dtype, mine.device)
        out = attention(folded, keys, values, attn_mask=mask, scale=scaling).view(kv_heads, groups, count, -1)
    return out.permute(2, 0, 1, 3).flatten(1, 2)
