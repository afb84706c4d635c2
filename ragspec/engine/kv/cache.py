"""The KV cache of all rows: a token's slot is its position in the row.

Every row has its own length; nothing is realigned. Stale slots beyond that length are masked, and overwritten when the
row gets there. A block of a prefix that rows share is in the slots of one of them (block_pool.RowBlocks). Limit: every
row has room for as many tokens as the longest needs (budget.py), though memory that is never written costs nothing.
"""

from __future__ import annotations

import errno
import math
import mmap
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import torch

from ragspec.engine.kv.block_pool import MOST_ROWS, ROW_BLOCK, BlockCopy, BlockTables, Part, RowBlocks
from ragspec.engine.model.layout import Layout


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
    _tables: BlockTables

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

    # -- copies of a row's tokens ------------------------------------------------------------------

    def slots_of(self, row: int, first: int, last: int) -> list[int]:
        """Return the places in flat() of a row's tokens from `first` to before `last`."""
        raise NotImplementedError

    def flat(self) -> list[torch.Tensor]:
        """Return keys and values of all layers, each (kv_heads, places, head_dim)."""
        raise NotImplementedError

    @torch.inference_mode()
    def read(self, row: int, first: int, last: int) -> list[torch.Tensor]:
        """Return a copy of a row's tokens on the CPU: keys and values of all layers, (kv_heads, tokens, head_dim)."""
        places = self.slots_of(row, first, last)
        return [each.index_select(1, torch.tensor(places, device=each.device)).cpu() for each in self.flat()]

    @torch.inference_mode()
    def fill(self, row: int, first: int, tensors: Sequence[torch.Tensor]) -> None:
        """Write a copy of tokens to a row, which has room for them, from its token `first` on."""
        last = first + tensors[0].shape[1]
        self.reserve_row(row, first, last)
        stores, slots = self.flat(), torch.tensor(self.slots_of(row, first, last))
        places = {device: slots.to(device) for device in {each.device for each in stores}}
        for each, new in zip(stores, tensors, strict=True):
            each.index_copy_(1, places[each.device], new.to(each.device))

    @torch.inference_mode()
    def erase(self, row: int, start: int = 0) -> None:
        """Overwrite a row's tokens from `start` on, where no other uses them.

        Masked slots take part in the arithmetic with a weight of 0, so none may hold what is no number.
        """
        spans = [(max(start, first), last) for first, last in self._tables.own(row) if start < last]
        places = torch.tensor([place for first, last in spans for place in self.slots_of(row, first, last)])
        for each in self.flat() if len(places) else ():
            each.index_fill_(1, places.to(each.device), 0)

    def bytes_by_device(self) -> Counter[torch.device]:
        """Return the bytes of one token on each device; nothing before the first forward."""
        found = Counter[torch.device]()
        for each in self.flat():
            found[each.device] += each.shape[0] * each.shape[2] * each.element_size()
        return found

    def reserve_row(self, row: int, first: int, end: int) -> Any:
        """Make sure that a row has blocks of its own for its tokens from `first` to before `end`."""
        raise NotImplementedError


class RaggedCache(ModelCache):
    """Keys and values of all rows, each row's in one piece."""

    running: ContextVar[RaggedCache] = ContextVar("running")  # the cache of the forward in progress

    def __init__(self, rows: int, kept: Sequence[torch.Tensor] = ()) -> None:
        """kept: memory of an earlier cache, reused for the first layers if it is large enough."""
        self.kept = list(kept)
        self.rows = rows
        self._pool = RowBlocks(rows)
        self._tables = BlockTables(self._pool, rows, ROW_BLOCK)
        self._parts: dict[int, list[Part]] = {}  # of rows, as far as they are known
        self.shares = True  # False once attention reads rows in place
        self._layers: list[LayerCache] = []  # in the order of attention in a forward
        self._written: dict[tuple[int, int], tuple[Any, Any, LayerCache]] = {}  # by this forward

    @contextmanager
    def forward(self, layout: Layout, attended: int = 0) -> Iterator[None]:
        """Let attention write to this cache as `layout` says. attended: layers before the first that attends."""
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
        slots = -(-slots // ROW_BLOCK) * ROW_BLOCK
        if rows < self.rows:
            self._bring_home()
        used = [min(tokens, slots) for tokens in self._used()[:rows]]
        for layer in self._layers:
            for name in ("keys", "values"):
                old = getattr(layer, name)
                new = zeros(old, (old.shape[0], rows, slots, old.shape[3]))
                for row, tokens in enumerate(used):
                    new[:, row, :tokens] = old[:, row, :tokens]
                setattr(layer, name, new)
        self._tables.resize(rows, slots)
        self._pool.resize(rows)
        self._parts.clear()
        self.rows, self.slots = rows, slots

    def slots_of(self, row: int, first: int, last: int) -> list[int]:
        """See ModelCache."""
        return [
            holder * self.slots + at for holder, begin, end in self.parts(row, first, last) for at in range(begin, end)
        ]

    def flat(self) -> list[torch.Tensor]:
        """See ModelCache."""
        return [store.flatten(1, 2) for layer in self._layers for store in (layer.keys, layer.values)]

    def fill(self, row: int, first: int, tensors: Sequence[torch.Tensor]) -> None:
        """See ModelCache; before the first forward, it makes the layers too."""
        for at in range(2 * len(self._layers), len(tensors), 2):
            keys, values = tensors[at : at + 2]
            self._layers.append(
                LayerCache(*(self._empty(each.shape[0], each.shape[2], each) for each in (keys, values)))
            )
        super().fill(row, first, tensors)

    # -- blocks ------------------------------------------------------------------------------------

    def share_prefix(self, donor: int, row: int, tokens: int) -> int:
        """Start `row` with the first `tokens` tokens of `donor`, which may be the row itself; return how many."""
        self._parts.pop(row, None)
        if self.shares:
            self._copy(self._tables.share(donor, row, tokens))
        else:
            self._tables.reserve(row, 0, tokens)
            if donor != row:
                self._copy_slots(donor, row, 0, tokens)
        return tokens

    def reserve_row(self, row: int, first: int, end: int) -> None:
        """Make sure that a row has blocks of its own for its tokens from `first` to before `end`."""
        table = self._tables.of(row)
        before = table.copy()
        copies = self._tables.reserve(row, first, end)
        if table != before:
            self._parts.pop(row, None)
            self._copy(copies)

    def parts(self, row: int, first: int, last: int) -> list[Part]:
        """Return where a row's tokens from `first` to before `last` are."""
        found = self._all_parts(row)
        if len(found) == 1:
            return [(found[0][0], first, last)]
        cut = ((holder, max(begin, first), min(end, last)) for holder, begin, end in found)
        return [part for part in cut if part[1] < part[2]]

    def _all_parts(self, row: int) -> list[Part]:
        """Return where all blocks of a row are, joined where they are in one row."""
        if row not in self._parts:
            homes = [block % MOST_ROWS for block in self._tables.of(row)]
            ends = [at for at in range(1, len(homes)) if homes[at] != homes[at - 1]]
            cuts = pairwise([0, *ends, len(homes)] if homes else [])
            self._parts[row] = [(homes[a], a * ROW_BLOCK, b * ROW_BLOCK) for a, b in cuts]
        return self._parts[row]

    def settle(self) -> None:
        """Stop sharing slots, since attention reads rows in place from now on."""
        if self.shares:
            self.shares = False
            self._bring_home()
            if self.layout is not None:
                self.layout.forget_parts()

    @torch.inference_mode()
    def _bring_home(self) -> None:
        """Give every row its own copy of what it shares."""
        rows = range(self.rows)
        away = [row for row in rows if any(part[0] != row for part in self._all_parts(row))]
        for layer in self._layers if away else ():
            for store in (layer.keys, layer.values):
                whole = {
                    row: torch.cat([store[:, holder, first:last] for holder, first, last in self._all_parts(row)], 1)
                    for row in away
                }
                for row, tokens in whole.items():
                    store[:, row, : tokens.shape[1]] = tokens
        ends = [len(self._tables.of(row)) * ROW_BLOCK for row in rows]
        self._tables.resize(0)
        self._tables.resize(self.rows)
        for row, end in enumerate(ends):
            self._tables.reserve(row, 0, end)
        self._parts.clear()

    def _used(self) -> list[int]:
        """Return the end of what any row has in each row's slots."""
        used = [0] * self.rows
        for row in range(self.rows):
            for holder, _, end in self._all_parts(row):
                used[holder] = max(used[holder], end)
        return used

    def _copy(self, copies: Iterable[BlockCopy]) -> None:
        for copy in copies:
            at = copy.source // MOST_ROWS * ROW_BLOCK
            self._copy_slots(copy.source % MOST_ROWS, copy.target % MOST_ROWS, at, at + copy.tokens)

    @torch.inference_mode()
    def _copy_slots(self, source: int, target: int, first: int, last: int) -> None:
        """Copy slots of one row to the same slots of another."""
        for layer in self._layers:
            for store in (layer.keys, layer.values):
                store[:, target, first:last] = store[:, source, first:last]

    def __len__(self) -> int:
        return len(self._layers)
