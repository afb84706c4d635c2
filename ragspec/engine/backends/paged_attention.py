"""Attention of a step of rows whose keys and values are in blocks: FlexAttention, or torch's own over gathered blocks.

A step has R rows of n tokens each. Everything here is computed from its tensors, so that it can be captured: which
tokens are real, where they are written, which blocks they see.
Source: Dong et al. 2024, FlexAttention, arXiv:2412.05496.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from ragspec.engine.backends.cascade import CascadeTensors
from ragspec.engine.kv.cache import LayerCache
from ragspec.engine.kv.paged_cache import PagedCache
from ragspec.engine.model.attention import Scores, weigh
from ragspec.engine.model.masks import MaskRule, Unsupported, additive, seen
from ragspec.errors import flat

FAR = 1 << 20  # index of a block that is none of a row's; times a block's tokens it is still an int32
QUERIES = 128  # queries of a block of FlexAttention
TILE = 64  # tokens of a prompt in a row: fewer read keys and values more often, more have more padding
# Keys, and queries of many, that a kernel reads at once: as torch chooses, or fewer where a GPU's shared memory is too
# small for that, as one of 99 KiB is for heads of 512.
AT_ONCE = (None, 32, 16)
TOO_MUCH = "out of resource"  # Triton's words for it, which torch passes on
# shapes and masks that it may be compiled for, more than there are: beyond, torch runs it as plain operators, silently
SHAPES = 4096
UNCOMPILED = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"  # torch's switch for calling FlexAttention as plain operators


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What a step computes, on the device.

    Attributes:
        token_ids: (R, n), the row's tokens first; (T + D x m,) if they are packed: without the padding of their rows,
            and behind them those of D more rows of m tokens, padding included.
        starts: (R + D,) position of each row's first token.
        counts: (R + D,) number of its tokens; the rest of the row is padding, and so are rows without any.
        tables: (R + D, W) the row's blocks; the padding block where it has fewer.
        gather: (R, n), of packed tokens: the index of each row's tokens; any for padding. None if they are not packed.
        scatter: (T,), the index of each packed token among those of the rows; one of padding for padding.
        cascade: What rows share; None: each reads all of its blocks.
    """

    token_ids: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    tables: torch.Tensor
    gather: torch.Tensor | None = None
    scatter: torch.Tensor | None = None
    cascade: CascadeTensors | None = None

    def to(self, device: torch.device) -> StepTensors:
        """Return copies on another device."""
        held = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(self, **{name: each.to(device) for name, each in held.items() if each is not None})

    def groups(self) -> list[StepTensors]:
        """Return the rows in groups whose rows have equally many tokens."""
        if self.gather is None or self.scatter is None:
            return [self]
        rows, length = len(self.gather), len(self.scatter)
        tiles = replace(
            self,
            token_ids=self.token_ids[:length],
            starts=self.starts[:rows],
            counts=self.counts[:rows],
            tables=self.tables[:rows],
        )
        if len(self.starts) == rows:
            return [tiles]
        ids = self.token_ids[length:].view(len(self.starts) - rows, -1)
        return [tiles, StepTensors(ids, self.starts[rows:], self.counts[rows:], self.tables[rows:])]


class RowGroup:
    """Rows of a step with n tokens each: where these are, and which blocks they see."""

    def __init__(self, cache: PagedCache, step: StepTensors) -> None:
        tokens = (step.token_ids if step.gather is None else step.gather).shape[1]
        size, device = cache.size, step.token_ids.device
        offsets = torch.arange(tokens, device=device)
        self.size = size
        self.blocks = cache.blocks
        self.tables = step.tables
        self.cascade = step.cascade
        self.ends = (step.starts + step.counts).clamp(min=1)  # (R,) padding rows see a slot of the padding block
        self.first = step.starts // size  # (R,) the first block that not all queries see
        # padding repeats the position of its row's last token
        self.positions = torch.minimum(step.starts[:, None] + offsets, self.ends[:, None] - 1)  # (R, n)
        self.tokens = step.token_ids.numel()  # of the forward's
        self._gather, self._scatter = step.gather, step.scatter
        self._masks: dict[Hashable, Any] = {}
        real = offsets < step.counts[:, None]
        block = step.tables.gather(1, self.positions // size)
        self.writes = self.packed(torch.where(real, block * size, 0).add_(self.positions % size))

    def packed(self, values: torch.Tensor) -> torch.Tensor:
        """Return the tokens' values, (T, ...), of those of the rows, (R, n, ...)."""
        flat = values.flatten(0, 1)
        return flat if self._scatter is None else flat.index_select(0, self._scatter)

    def by_row(self, queries: torch.Tensor) -> torch.Tensor:
        """Return the rows' queries, (R, heads, n, head_dim), of those of the tokens, (heads, T, head_dim)."""
        if self._gather is not None:
            queries = queries.index_select(1, self._gather.flatten())
        rows, tokens = self.positions.shape
        return queries.reshape(-1, rows, tokens, queries.shape[2]).transpose(0, 1)

    def mask(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return a mask, made once for all layers of the step that ask for the same `key`."""
        if key not in self._masks:
            self._masks[key] = make()
        return self._masks[key]


class PagedAttention:
    """The attention of one step, for layers on its tensors' device and on others. compute: flex() or gathered()."""

    def __init__(self, cache: PagedCache, step: StepTensors, compute: Compute) -> None:
        self.device = step.token_ids.device
        self._cache = cache
        self._step = step
        self._compute = compute
        self._groups = [RowGroup(cache, group) for group in step.groups()]
        self._writes = torch.cat([group.writes for group in self._groups])
        self._written: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, LayerCache]] = {}
        self._elsewhere: dict[torch.device, PagedAttention] = {}

    def on(self, device: torch.device) -> PagedAttention:
        """Return the same for layers on another device, made once for all of them."""
        if device not in self._elsewhere:
            self._elsewhere[device] = PagedAttention(self._cache, self._step.to(device), self._compute)
        return self._elsewhere[device]

    @property
    def positions(self) -> torch.Tensor:
        """Position of every token, (1, T + D x m)."""
        return torch.cat([group.packed(group.positions) for group in self._groups])[None]

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, rule: MaskRule | None
    ) -> torch.Tensor:
        """Write keys and values, (1, kv_heads, T, head_dim), and return what queries, (1, heads, T, head_dim), see.

        Returns:
            (1, T, heads, head_dim).
        """
        if query.device != self.device:
            return self.on(query.device).attend(query, key, value, scores, rule)
        if key.shape[2] != len(self._writes):
            raise Unsupported("attends to more than its own tokens")
        layer = self._write(key, value)
        parts = list(torch.split(query[0], [group.tokens for group in self._groups], dim=1))
        found = [
            group.packed(self._compute(group, layer, group.by_row(queries), scores, rule).transpose(1, 2))
            for group, queries in zip(self._groups, parts, strict=True)
        ]
        # contiguous, as compiled layers expect
        return (torch.cat(found) if len(found) > 1 else found[0])[None].contiguous()

    def _write(self, key: torch.Tensor, value: torch.Tensor) -> LayerCache:
        """Write a layer's keys and values; not again those that an earlier layer wrote, which layers may share."""
        names = id(key), id(value)
        if names not in self._written:
            layer = self._cache.layer(key, value)
            layer.keys.index_copy_(1, self._writes, key[0])
            layer.values.index_copy_(1, self._writes, value[0])
            self._written[names] = key, value, layer
        return self._written[names][2]


Compute = Callable[[RowGroup, LayerCache, torch.Tensor, Scores, MaskRule | None], torch.Tensor]


# -- gathered --------------------------------------------------------------------------------------


def gathered(
    step: RowGroup, layer: LayerCache, queries: torch.Tensor, scores: Scores, rule: MaskRule | None
) -> torch.Tensor:
    """Attend to copies of the rows' blocks: slow, but on any device. Returns (R, heads, n, head_dim)."""
    rows, heads, tokens, _ = queries.shape
    kv_heads = layer.keys.shape[0]
    groups = heads // kv_heads

    slots = step.tables.shape[1] * step.size
    own = step.mask(gathered, lambda: torch.arange(slots, device=queries.device) < step.ends[:, None, None])

    def mask() -> torch.Tensor:
        return additive(seen(step.positions, slots, rule) & own, groups, queries.dtype)

    def of_rows(store: torch.Tensor) -> torch.Tensor:
        blocks = store.view(kv_heads, -1, step.size, store.shape[2])[:, step.tables]
        found = blocks.flatten(2, 3).transpose(0, 1)  # (R, kv_heads, slots, head_dim)
        return found.masked_fill(~own[..., None], 0)  # the others may be NaN, which no mask hides

    folded = queries.reshape(rows, kv_heads, groups * tokens, -1)
    sight = step.mask((gathered, rule, groups), mask)
    out = weigh(folded, of_rows(layer.keys), of_rows(layer.values), sight, scores, groups)
    return out.view(rows, heads, tokens, -1)


# -- FlexAttention ---------------------------------------------------------------------------------


def flex(compiled: bool, notes: list[str] | None = None, exact: bool = False) -> Compute:
    """Return attention by FlexAttention.

    Args:
        compiled: By inductor, as it is fast; otherwise as plain operators, for checks. A shape for which it does not
            compile is computed over gathered blocks.
        notes: Receives a note in that case.
        exact: Whether a query's keys are added up in an order that depends on their number alone.

    Raises:
        Unsupported: This torch's FlexAttention cannot be used for rows in blocks.
    """
    from torch._dynamo.exc import TorchDynamoException

    if not takes_block_lists():
        raise Unsupported(f"needs FlexAttention with block lists, which torch {torch.__version__} does not support")
    call: Any = _flex_attention
    cascade: Any = _cascade_attention
    refused: set[torch.Size] = set()  # shapes of queries
    at_once = Counter[tuple[bool, int]]()  # index in AT_ONCE, by whether queries are many and by the size of heads
    if compiled:
        for limit in ("recompile_limit", "accumulated_recompile_limit"):
            setattr(torch._dynamo.config, limit, max(SHAPES, getattr(torch._dynamo.config, limit)))
        call, cascade = (torch.compile(each, dynamic=False) for each in (call, cascade))

    def attend(
        step: RowGroup, layer: LayerCache, queries: torch.Tensor, scores: Scores, rule: MaskRule | None
    ) -> torch.Tensor:
        rows, heads, tokens, _ = queries.shape
        shared = step.cascade if rule is None else None
        if shared is None and queries.shape in refused:
            return gathered(step, layer, queries, scores, rule)
        whole, sinks = queries, scores.sinks
        if tokens < TILE:  # a group's heads as further queries of one: each block is read once for all of them
            queries = queries.reshape(rows, layer.keys.shape[0], -1, queries.shape[3]).contiguous()
        read = [step.mask((flex, rule), lambda: block_lists(step, rule, exact))]
        if shared is not None:
            read.append(step.mask(CascadeTensors, lambda: chunk_lists(step, shared)))
        blocks = [store.view(1, store.shape[0], -1, step.size, store.shape[2]) for store in (layer.keys, layer.values)]
        if compiled:  # once for pools and tables of any size
            growing = [each for lists in read for each in lists.growing]
            for tensor, dimension in ((blocks[0], 2), (blocks[1], 2), *growing):
                torch._dynamo.maybe_mark_dynamic(tensor, dimension)
        given = queries, *blocks, *read
        many = tokens == TILE or queries.shape[2] >= QUERIES
        size = queries.shape[3]

        def options(many: bool) -> dict[str, Any]:
            return _kernel_options(many, exact, AT_ONCE[at_once[many, size]])

        def compute() -> Any:
            if shared is not None:
                cap, lse = scores.cap, sinks is not None
                return cascade(*given, shared, cap, scores.scaling, lse, options(False), options(True))
            see = rule and rule.function
            return call(*given, see, scores.cap, scores.scaling, sinks is not None, options(many))

        try:
            with nullcontext() if compiled else _uncompiled():
                out = compute()
        except TorchDynamoException as error:  # what inductor and Triton raise is one of these
            if shared is not None:
                raise  # steps go on without
            if TOO_MUCH in str(error) and at_once[many, size] + 1 < len(AT_ONCE):
                at_once[many, size] += 1
                return attend(step, layer, whole, scores, rule)
            if notes is not None and not refused:
                less = " and not exact" if exact else ""
                why = flat(error, 300)
                notes.append(f"attention: FlexAttention does not compile for some steps, which are slower{less}: {why}")
            refused.add(whole.shape)
            return gathered(step, layer, whole, scores, rule)
        if sinks is None:
            attended: torch.Tensor = out.reshape(rows, heads, tokens, -1)
            return attended
        # a sink takes weight and has no value: the others' share is exp(lse) / (exp(lse) + exp(sink))
        others, lse = (each.reshape(rows, heads, tokens, -1) for each in out)
        weighed: torch.Tensor = others * torch.sigmoid(lse - sinks.float()[:, None, None])
        return weighed.to(others.dtype)

    return attend


def takes_block_lists() -> bool:
    """Return whether masks can be made of lists of blocks alone, as in torch 2.13, and not in 2.6."""
    from torch.nn.attention.flex_attention import BlockMask

    return "compute_q_blocks" in inspect.signature(BlockMask.from_kv_blocks).parameters


class BlockLists(NamedTuple):
    """Which blocks the rows of a step read. Made once for all layers with the same mask.

    Attributes:
        counts, blocks: (R, 1, 1) and (R, 1, 1, W): the row's blocks of which the mask says what is seen.
        full_counts, full_blocks: The same of blocks that are seen in full; None if there is no such list.
        logical: (R, blocks of the pool), which of the row's blocks a block is.
        positions: (R, n), of the queries.
        ends: (R,), number of the row's tokens.
    """

    counts: torch.Tensor
    blocks: torch.Tensor
    full_counts: torch.Tensor | None
    full_blocks: torch.Tensor | None
    logical: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor

    @property
    def growing(self) -> list[tuple[torch.Tensor, int]]:
        """Tensors, and dimensions of theirs that grow with the pool or its tables."""
        tables = [each for each in (self.blocks, self.full_blocks) if each is not None]
        return [(self.logical, 1), *((each, 3) for each in tables)]


def block_lists(step: RowGroup, rule: MaskRule | None, exact: bool = False) -> BlockLists:
    """Return the lists of a step. exact: all blocks in one list, so that they are read in their order.

    Prompts under the plain causal mask see blocks before their first token in full, without a look at the mask. In
    other steps all blocks stand in one list: torch's kernel for few queries divides it among the GPU's cores by its
    length, which it does not do for full blocks. Both lists have one width, since that kernel reads both with the
    strides of the first. (torch 2.13, _inductor/kernel/flex/templates/flex_decode.py.jinja)
    """
    counts, full, covered = (step.ends + step.size - 1) // step.size, None, None
    if rule is None and step.positions.shape[1] == TILE and not exact:
        full = step.first
    elif rule is None and step.cascade is not None:
        covered = step.cascade.covered
    return _lists(step, step.tables, counts, step.positions, step.ends, full, covered)


def chunk_lists(step: RowGroup, shared: CascadeTensors) -> BlockLists:
    """Return the lists of a step's chunks, all of whose queries see all tokens of their blocks."""
    tokens = shared.blocks * step.size
    return _lists(step, shared.tables, shared.blocks, tokens[:, None], tokens, full=shared.blocks)


def _lists(
    step: RowGroup,
    tables: torch.Tensor,
    counts: torch.Tensor,
    positions: torch.Tensor,
    ends: torch.Tensor,
    full: torch.Tensor | None = None,
    covered: torch.Tensor | None = None,
) -> BlockLists:
    """Return lists of `counts` blocks, (R,), of tables, (R, W).

    full: (R,) number of first blocks that are seen in full; None: there is no list of them. covered: (R,) number of
    first blocks that the rows do not read themselves; None: they read all.
    """
    (rows, width), total, device = tables.shape, step.blocks, tables.device
    indices = torch.arange(width, device=device, dtype=torch.int32).expand(rows, width)
    logical = torch.full((rows, total), FAR, device=device, dtype=torch.int32)
    own = indices if covered is None else indices.masked_fill(indices < covered[:, None], FAR)
    logical = logical.scatter_reduce(1, tables, own, "amin")
    blocks = tables = tables.to(torch.int32)
    skipped = full if covered is None else covered
    if skipped is not None:
        counts = counts - skipped
        blocks = tables.gather(1, (skipped[:, None] + indices).clamp(max=width - 1))
    if device.type == "cpu":  # where inductor wants lists as long as the pool
        blocks, tables = (pad(each, (0, max(0, total - width))) for each in (blocks, tables))
    return BlockLists(
        counts.to(torch.int32)[:, None, None].contiguous(),
        blocks[:, None, None].contiguous(),
        None if full is None else full.to(torch.int32)[:, None, None].contiguous(),
        None if full is None else tables[:, None, None].contiguous(),
        logical,
        positions,
        ends,
    )


def _flex_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lists: BlockLists,
    rule: Callable[..., torch.Tensor] | None,
    cap: float | None,
    scale: float | None,
    with_lse: bool,
    options: dict[str, Any],
) -> Any:
    """Call FlexAttention for queries, (R, heads, n, head_dim), over blocks, (1, kv_heads, blocks, size, head_dim)."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    number, size, tokens = queries.shape[2], keys.shape[3], lists.positions.shape[1]

    def visible(b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        slot = lists.logical[b, kv // size] * size + kv % size
        position = lists.positions[b, q % tokens]
        shown = slot <= position if rule is None else rule(b, h, position, slot)
        return torch.logical_and(shown, slot < lists.ends[b])

    def capped(score: torch.Tensor, b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        assert cap is not None
        return cap * torch.tanh(score / cap)

    from_blocks: Any = BlockMask.from_kv_blocks
    attend: Any = flex_attention
    mask = from_blocks(
        lists.counts,
        lists.blocks,
        lists.full_counts,
        lists.full_blocks,
        BLOCK_SIZE=(max(QUERIES, 1 << (number - 1).bit_length()), size),
        mask_mod=visible,
        seq_lengths=(number, keys.shape[2] * size),
        compute_q_blocks=False,
    )
    found = attend(
        queries,
        keys.flatten(2, 3),
        values.flatten(2, 3),
        score_mod=capped if cap else None,
        block_mask=mask,
        scale=scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
        return_aux=AuxRequest(lse=True) if with_lse else None,
        kernel_options=options or None,
    )
    return (found[0], found[1].lse) if with_lse else found


def _cascade_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lists: BlockLists,
    of_chunks: BlockLists,
    shared: CascadeTensors,
    cap: float | None,
    scale: float | None,
    with_lse: bool,
    options: dict[str, Any],
    for_chunks: dict[str, Any],
) -> Any:
    """Return what _flex_attention does, for rows that read some of their blocks together."""
    own = _flex_attention(queries, keys, values, lists, None, cap, scale, True, options)
    together = shared.together(queries)
    prefix = _flex_attention(together, keys, values, of_chunks, None, cap, scale, True, for_chunks)
    merged = shared.merged(own, prefix)
    return merged if with_lse else merged[0]


def _kernel_options(many: bool, exact: bool, at_once: int | None) -> dict[str, Any]:
    """Return options of FlexAttention.

    Args:
        many: Whether there are so many queries that the kernel for few would hold too much at once.
        exact: Whether keys are added up in an order that depends on their number alone.
        at_once: Keys, and queries of many, that are read at once; None: torch's choice.
    """
    options: dict[str, Any] = {}
    if many:
        options["FORCE_USE_FLEX_ATTENTION"] = True
    elif exact:  # the kernel for few queries would divide a row's blocks by their number and the step's rows
        options["SPLIT_KV"] = 1
    if at_once is not None:
        options |= {"BLOCK_N": at_once, "num_stages": 1} | ({"BLOCK_M": at_once} if many else {})
    return options


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Call FlexAttention as plain operators, where torch has the switch."""
    from torch.nn.attention import flex_attention

    before = getattr(flex_attention, UNCOMPILED, None)
    if before is None:
        yield
        return
    setattr(flex_attention, UNCOMPILED, True)
    try:
        yield
    finally:
        setattr(flex_attention, UNCOMPILED, before)
