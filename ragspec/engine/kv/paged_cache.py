"""The KV cache in blocks: keys and values of all rows in one pool per layer, found through block tables.

A row takes blocks as it grows and shares those of a common prefix (block_pool.py). The pool's memory moves only when it
grows, so captured steps (backends/graphs.py) may keep its addresses until then.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np
import torch

from ragspec.engine.kv.block_pool import BlockCopy, BlockPool, BlockTables, Span
from ragspec.engine.kv.cache import LayerCache, ModelCache

BLOCK = 128  # tokens; the block size of FlexAttention
INDICES = 1 << 31


class PagedCache(ModelCache):
    """Blocks of all layers.

    Attributes:
        rows: Number of rows.
        slots: Tokens that each row may have; reserve() raises it.
        version: Changes whenever memory has moved.
        next: Index of the layer that the running forward writes next.
        bytes_per_token: Bytes of one token in all layers; 0 before the first forward.
        fixed: Whether the pool is not to grow any more: rows then share what there is, up to a MemoryError.
    """

    def __init__(self, rows: int, size: int = BLOCK) -> None:
        self.size = size
        self.rows = rows
        self.version = 0
        self.bytes_per_token = 0
        self.fixed = False
        self.layers: list[LayerCache] = []  # keys, values: (kv_heads, blocks x size, head_dim)
        self._stacks: list[torch.Tensor] = []  # of stores of one size and device: (their number, *their shape)
        self._pool = BlockPool(1)
        self._tables = BlockTables(self._pool, rows, size)

    # -- rows --------------------------------------------------------------------------------------

    def clear(self, rows: int) -> None:
        """Drop all rows; there are `rows` now. The memory stays."""
        self._tables.resize(0)
        self._tables.resize(rows)
        self.rows, self.slots = rows, 0

    def resize(self, rows: int, slots: int) -> None:
        """Change the number of rows, and the tokens that each may have; rows that remain keep theirs."""
        self._tables.resize(rows, slots)
        self.rows, self.slots = rows, 0
        self.reserve(slots)

    def reserve(self, slots: int) -> None:
        """Make sure that every row may have `slots` tokens. Raises MemoryError, or what torch raises."""
        slots = -(-slots // self.size) * self.size
        if slots > self.slots:
            if not self.fixed:
                self.allocate(1 + self.rows * (slots // self.size))
            self.slots = slots

    def share_prefix(self, donor: int, row: int, tokens: int) -> int:
        """Start `row` with the first `tokens` tokens of `donor`; return how many.

        These are whole blocks if none is free, and no more than the donor has blocks for: it may have started in the
        same step, with less than was planned.
        """
        tokens = min(tokens, len(self._tables.of(donor)) * self.size)
        if tokens % self.size and not self.free and (donor != row or self.missing([(row, tokens - 1, tokens)])):
            tokens = tokens // self.size * self.size
        self._copy(self._tables.share(donor, row, tokens))
        return tokens

    def reserve_row(self, row: int, first: int, end: int) -> list[int]:
        """Return a row's blocks, with room of its own for its tokens from `first` to before `end`."""
        copies = self._tables.reserve(row, first, end)
        if copies:
            self._copy(copies)
        return self._tables.of(row)

    def reserve_rows(self, spans: Iterable[Span]) -> None:
        """Give each row room of its own for the tokens of its span."""
        for row, first, end in self._tables.to_reserve(spans):
            self.reserve_row(row, first, end)

    @property
    def free(self) -> int:
        """Number of blocks that no row uses."""
        return self._pool.free

    def missing(self, spans: Iterable[Span]) -> int:
        """Return how many blocks reserve_rows() would take for spans of different rows."""
        return self._tables.missing(spans)

    def rows_of(self, slots: int) -> int:
        """Return how many rows of `slots` tokens a fixed pool has blocks for, one at least."""
        return max(1, (self.blocks - 1) // -(-slots // self.size))

    def room_beside(self, needs: Mapping[int, int]) -> int:
        """Return how many tokens one more row may have, if no rows but these stay. needs: their tokens, by row."""
        there = [row for row in needs if row < self.rows]  # the others are added once all that fit are chosen
        blocks = sum(-(-tokens // self.size) for row, tokens in needs.items() if row >= self.rows)
        missing = sum(max(0, -(-needs[row] // self.size) - len(self._tables.of(row))) for row in there)
        return (self.blocks - 1 - self._tables.used(there) - missing - blocks) * self.size

    def drop(self, row: int) -> None:
        """Forget a row's tokens."""
        self._tables.drop(row)

    @property
    def changes(self) -> int:
        """A number that changes when rows begin or end, and so what they share."""
        return self._tables.changes

    def tables(self, rows: Sequence[int]) -> np.ndarray:
        """Return the tables of rows, (rows, W); 0 where a row has fewer blocks."""
        return self._tables.array[rows]

    # -- memory ------------------------------------------------------------------------------------

    @property
    def blocks(self) -> int:
        """Number of blocks, the one for padding included."""
        return self._pool.blocks

    @property
    def most_blocks(self) -> int:
        """Number of blocks up to which kernels find every value of a layer by a 32-bit index."""
        widest = max((store.shape[0] * store.shape[2] for store in self.memory()), default=1)
        return INDICES // (widest * self.size)

    def memory(self) -> list[torch.Tensor]:
        """Return the memory of all layers."""
        return [store for layer in self.layers for store in (layer.keys, layer.values)]

    @torch.inference_mode()
    def allocate(self, blocks: int) -> None:
        """Have at least `blocks` blocks on every device; what the present ones hold is kept.

        New memory is zero: tokens that a query must not see still take part in the arithmetic, with weight 0.
        """
        if blocks <= self._pool.blocks:
            return
        alike: dict[Hashable, list[tuple[LayerCache, str]]] = {}
        for layer in self.layers:
            for name in ("keys", "values"):
                store = getattr(layer, name)
                alike.setdefault((store.shape[0], store.shape[2], store.dtype, store.device), []).append((layer, name))
        self._stacks = []
        for stores in alike.values():  # one after the other, so that only these exist twice at a time
            olds = [getattr(layer, name) for layer, name in stores]
            heads, slots, size = olds[0].shape
            stack = olds[0].new_zeros(len(stores), heads, blocks * self.size, size)
            for new, old, (layer, name) in zip(stack, olds, stores, strict=True):
                new[:, :slots] = old
                setattr(layer, name, new)
            self._stacks.append(stack)
        self._pool.grow(blocks)
        self.version += 1

    def slots_of(self, row: int, first: int, last: int) -> list[int]:
        """See ModelCache."""
        table = self._tables.of(row)
        return [table[at // self.size] * self.size + at % self.size for at in range(first, last)]

    def flat(self) -> list[torch.Tensor]:
        """See ModelCache."""
        return self.memory()

    def layer(self, keys: torch.Tensor, values: torch.Tensor) -> LayerCache:
        """Return the next layer of a forward with keys and values of (1, kv_heads, T, head_dim), on their device."""
        if self.next == len(self.layers):
            stores = [new.new_zeros(new.shape[1], self.blocks * self.size, new.shape[3]) for new in (keys, values)]
            self.bytes_per_token += sum(each.shape[0] * each.shape[2] * each.element_size() for each in stores)
            self.layers.append(LayerCache(*stores))
            self._stacks = []
            self.version += 1
        self.next += 1
        return self.layers[self.next - 1]

    def touch(self) -> None:
        """Do nothing: all memory has been written."""

    @torch.inference_mode()
    def _copy(self, copies: Iterable[BlockCopy]) -> None:
        stores = self._stacks or [store[None] for store in self.memory()]
        for copy in copies:
            source, target = copy.source * self.size, copy.target * self.size
            for store in stores:
                store[:, :, target : target + copy.tokens] = store[:, :, source : source + copy.tokens]

    def __len__(self) -> int:
        return len(self.layers)
