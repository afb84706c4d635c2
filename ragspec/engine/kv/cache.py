"""The KV cache of all rows: a token's slot is its position in the row.

Every row has its own length; nothing is realigned. Stale slots beyond that length are masked, and overwritten when the
row gets there. A row's prefix may be in another row's slots (prefix_blocks.py) until that row needs them. Limit: every
row has room for as many tokens as the longest needs (budget.py).
"""

from __future__ import annotations

import errno
import math
import mmap
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch

from ragspec.engine.kv.prefix_blocks import LEAST, Part, PrefixBlocks
from ragspec.engine.model.layout import Layout, Segment


def zeros(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return zeros like `like`, on its device. Raises MemoryError if the system has no room for them.

    On CPUs, pages are only allocated when they are first written. The tensor is aligned to a page, and so to a cache
    line, so that vectors load in one piece.
    """
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or not size:
        return like.new_zeros(shape)
    return torch.frombuffer(_pages(size), dtype=torch.uint8).view(like.dtype).view(shape)


def _pages(size: int) -> mmap.mmap:
    """Return `size` bytes, in small pages.

    With huge pages, a row's first token would allocate and clear the row's whole room, which may never be used;
    attention reads them no faster (docs/lab/log.md).
    """
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"no room for {size:,} bytes") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # kernels without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return pages


# -- cache -----------------------------------------------------------------------------------------
ROUND = 64  # slots are allocated in multiples of this


class LayerCache:
    """One layer. keys, values: (kv_heads, rows, slots, head_dim)."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys = keys
        self.values = values


class ModelCache:
    """Passed to models as their Cache; its update() hands the forward's keys and values straight through.

    Attention writes them instead (attention.py): models may expand, share or split them on the way there. Nothing is
    counted here, since position_ids come with every forward.
    """

    is_compileable = False
    rows = 0
    slots = 0
    next = 0  # index of the layer to write next
    attended = 0  # index after the last layer that attended in the latest forward
    layout: Layout | None = None  # of the forward in progress; steps over blocks have none

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


class RaggedCache(ModelCache):
    """Keys and values of all rows, each row's in one piece."""

    running: ContextVar[RaggedCache] = ContextVar("running")  # the cache of the forward in progress

    def __init__(self, rows: int, kept: Sequence[torch.Tensor] = ()) -> None:
        """kept: memory of an earlier cache, reused for the first layers if it is large enough."""
        self.kept = list(kept)
        self.rows = rows
        self.slots = 0
        self.prefix_blocks = PrefixBlocks()
        self.lends = True  # False once attention reads rows in place
        self._layers: list[LayerCache] = []  # in the order of attention in a forward
        self._written: dict[tuple[int, int], tuple[Any, Any, LayerCache]] = {}  # by this forward
        self.next = 0  # index of the layer to write next
        self.attended = 0  # index after the last layer that attended in the latest forward

    @contextmanager
    def forward(self, layout: Layout, attended: int = 0) -> Iterator[None]:
        """Let attention write to this cache as `layout` says. attended: layers before the first that attends."""
        self._make_way(layout.segments)
        self.layout, self.next = layout, attended
        token = self.running.set(self)
        try:
            yield
        finally:
            self.running.reset(token)
            self.layout, self.attended = None, self.next
            self._written.clear()

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> LayerCache:
        """Write the forward's keys and values, (1, kv_heads, T, head_dim); return the layer with those of all rows.

        Tensors that an earlier layer wrote are not written again, since later layers may share them.
        """
        assert self.layout is not None
        names = id(keys), id(values)
        if names in self._written:
            first, second, layer = self._written[names]
            if first() is keys and second() is values:
                return layer
        if self.next == len(self._layers):
            self._append(keys.shape[1], keys.shape[3], values.shape[3], keys)
        layer = self._take()
        self._store(layer, keys, values)
        self._written[names] = weakref.ref(keys), weakref.ref(values), layer
        return layer

    def layer_of(self, heads: int, size: int, like: torch.Tensor) -> LayerCache:
        """Return the next layer, (heads, rows, slots, size), for a kernel that writes it itself."""
        if self.next == len(self._layers):
            self._append(heads, size, size, like)
        return self._take()

    def _append(self, heads: int, keys: int, values: int, like: torch.Tensor) -> None:
        """Add an empty layer. keys, values: head sizes."""
        self._layers.append(LayerCache(*(self._empty(heads, size, like) for size in (keys, values))))

    def _take(self) -> LayerCache:
        layer = self._layers[self.next]
        if not layer.keys.shape[1:3] == layer.values.shape[1:3] == (self.rows, self.slots):
            raise RuntimeError("the cache has not grown in full")
        self.next += 1
        return layer

    def _store(self, layer: LayerCache, keys: torch.Tensor, values: torch.Tensor) -> None:
        assert self.layout is not None
        kernels, tokens = self.layout.kernels, self.layout.tokens
        alike = keys.shape[3] == values.shape[3] and keys.dtype == values.dtype == torch.float32
        if kernels is not None and alike:
            keys, values = (new[0] if new.stride(3) == 1 else new[0].contiguous() for new in (keys, values))
            kernels.write(keys, values, self.layout.writes, (layer.keys, layer.values))
            return
        for store, new in ((layer.keys, keys), (layer.values, values)):
            heads, rows, slots, size = store.shape
            store.view(heads, rows * slots, size).index_copy_(1, self.layout.writes, new[0, :, :tokens])

    def _empty(self, heads: int, size: int, like: torch.Tensor) -> torch.Tensor:
        shape = heads, self.rows, self.slots, size
        count = math.prod(shape)
        if self.kept and self.kept[0].numel() >= count and self.kept[0].dtype == like.dtype:
            return self.kept.pop(0)[:count].zero_().view(shape)
        self.kept.clear()
        return zeros(like, shape)

    @torch.inference_mode()
    def touch(self) -> None:
        """Write the whole cache, before reads are timed: pages never written all map to one, and are fast."""
        for store in self.memory():
            store.zero_()

    def memory(self) -> list[torch.Tensor]:
        """Return the layers' memory for reuse by another cache: flat, in the order of allocation."""
        return [store.view(-1) for layer in self._layers for store in (layer.keys, layer.values)]

    def reserve(self, slots: int) -> None:
        """Grow every row to at least `slots` slots."""
        if slots > self.slots:
            self.resize(self.rows, slots)

    @torch.inference_mode()
    def resize(self, rows: int, slots: int) -> None:
        """Resize to `rows` rows of `slots` slots, keeping as much of the present rows as fits.

        Layer by layer, so that only one layer exists twice at a time. New room is zero: masked slots still take part in
        the arithmetic and must not hold NaN.
        """
        slots = -(-slots // ROUND) * ROUND
        kept, most = min(rows, self.rows), min(slots, self.slots)
        if kept < self.rows:
            self._part()
        self.rows, self.slots = rows, slots
        for layer in self._layers:
            for name in ("keys", "values"):
                old = getattr(layer, name)
                new = zeros(old, (old.shape[0], rows, slots, old.shape[3]))
                new[:, :kept, :most] = old[:, :kept, :most]
                setattr(layer, name, new)

    # -- shared prefixes ---------------------------------------------------------------------------

    def share_prefix(self, donor: int, row: int, tokens: int) -> None:
        """Start `row` with the first `tokens` tokens of `donor`; call make_writable() before its slots are written."""
        self.prefix_blocks.share_prefix(donor, row, tokens)

    def make_writable(self, row: int, first: int, idle: Collection[int] = ()) -> dict[int, int]:
        """Evict borrowers of a row's slots from `first` on.

        Other rows take a copy, one for all of them; `idle` rows lose theirs, and are returned with the number of tokens
        that they keep. If the row's own shared prefix ends in a short block, or rows are read in place, that block is
        copied too.
        """
        parts = self.prefix_blocks.parts(row, 0, self.prefix_blocks.end(row))
        while parts and (not self.lends or parts[-1][2] - parts[-1][1] < LEAST):
            first = min(first, parts.pop()[1])
        lost = self._vacate(row, first, self.slots, idle)
        for part in self.prefix_blocks.parts(row, first, self.prefix_blocks.end(row)):
            self.copy_part(part, row)
        self.prefix_blocks.shorten(row, first)
        return lost

    def copy(self, donor: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` slots of row `donor` to row `target`."""
        self.copy_part((donor, 0, tokens), target)

    def settle(self) -> None:
        """Stop sharing slots, since attention reads rows in place from now on."""
        self.lends = False
        if self.prefix_blocks:
            self._part()
            if self.layout is not None:
                self.layout.forget_pieces()

    @torch.inference_mode()
    def _part(self) -> None:
        """Give every row its own copy of its shared prefix."""
        for layer in self._layers:
            for store in (layer.keys, layer.values):
                found = {
                    row: self.prefix_blocks.parts(row, 0, self.prefix_blocks.end(row)) for row in self.prefix_blocks
                }
                whole = {
                    row: torch.cat([store[:, holder, first:last] for holder, first, last in parts], 1)
                    for row, parts in found.items()
                }
                for row, tokens in whole.items():
                    store[:, row, : tokens.shape[1]] = tokens
        self.prefix_blocks = PrefixBlocks()

    def _make_way(self, segments: Sequence[Segment]) -> None:
        """Evict borrowers of slots that a forward writes."""
        if not self.prefix_blocks:
            return
        held = self.prefix_blocks.held()
        for segment in segments:
            if segment.start < self.prefix_blocks.end(segment.row):
                self.prefix_blocks.shorten(segment.row, segment.start)
            if segment.start < held.get(segment.row, 0):
                self._vacate(segment.row, segment.start, segment.start + segment.count)

    def _vacate(
        self, row: int, first: int, last: int, idle: Collection[int] = (), waiting: frozenset[int] = frozenset()
    ) -> dict[int, int]:
        """Evict borrowers of these slots of a row. Returns the idle rows that lost them, with the tokens they keep.

        waiting: rows on whose behalf this is done, which cannot take a copy.
        """
        lost = {}
        while found := self.prefix_blocks.from_row(row, first, last):
            for other in found.keys() & set(idle):
                lost[other] = found.pop(other)[0][1]
                self.prefix_blocks.shorten(other, lost[other])
            able = found.keys() - waiting
            if able:  # the row that needs most takes the copy, once its own slots are free
                chosen = max(able, key=lambda other: found[other][-1][2])
                lost |= self._vacate(chosen, found[chosen][0][1], found[chosen][-1][2], idle, waiting | {row})
                for part in self.prefix_blocks.from_row(row, first, last).get(chosen, ()):
                    self.copy_part(part, chosen)
                    self.prefix_blocks.move(part, chosen)
            elif found:  # a cycle: each row holds what another needs
                self._part()
        return lost

    @torch.inference_mode()
    def copy_part(self, part: Part, target: int) -> None:
        """Copy slots of one row to the same slots of another."""
        holder, first, last = part
        if holder == target:
            return
        for layer in self._layers:
            for store in (layer.keys, layer.values):
                store[:, target, first:last] = store[:, holder, first:last]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers; 0 before the first forward."""
        stores = (store for layer in self._layers for store in (layer.keys, layer.values))
        return sum(s.shape[0] * s.shape[3] * s.element_size() for s in stores)

    def __len__(self) -> int:
        return len(self._layers)
