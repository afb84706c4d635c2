"""Blocks of keys and values: which row uses which, with counted references. Pure.

    >>> tables = BlockTables(BlockPool(8), rows=2, size=4)
    >>> tables.reserve(0, 0, 6)  # row 0 writes its tokens 0 to 5
    []
    >>> tables.share(0, 1, 5)  # row 1 starts with five of them: one block in common, and a copy of one token
    [BlockCopy(source=2, target=3, tokens=1)]
    >>> tables.of(0), tables.of(1)
    ([1, 2], [1, 3])

A block holds tokens at the same positions for all of its rows, since a prefix is shared from its first token on. Shared
blocks are never written. Where the blocks are is the pool's affair: anywhere (BlockPool), or in rows (RowBlocks).
Source: Kwon et al. 2023, PagedAttention, arXiv:2309.06180.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Part = tuple[int, int, int]  # row that holds some tokens of a row, first slot, end slot
Span = tuple[int, int, int]  # row, first token to write, end
PADDING = 0  # the block that padding is written to; it belongs to no row
MOST_ROWS = 1 << 20
ROW_BLOCK = 64  # tokens of a block in a row
NOTHING = 0, 0


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The first `tokens` tokens of block `source`, to be copied to block `target`."""

    source: int
    target: int
    tokens: int


class Blocks(Protocol):
    """Blocks, and how many rows use each."""

    def check(self, blocks: int) -> None:
        """Raise MemoryError if fewer than `blocks` blocks are free."""

    def take(self, row: int, index: int) -> int:
        """Return a free block for the tokens of a row's block `index`, with one reference."""

    def hold(self, block: int) -> None:
        """Add a reference."""

    def release(self, block: int) -> None:
        """Drop a reference; a block without any is free."""

    def shared(self, block: int) -> bool:
        """Return whether several rows use a block."""


class BlockPool:
    """Blocks of which any serves any row."""

    def __init__(self, blocks: int) -> None:
        self._references = [0] * blocks
        self._free = list(range(blocks - 1, PADDING, -1))  # the last one is taken next

    @property
    def blocks(self) -> int:
        """Number of blocks, the one for padding included."""
        return len(self._references)

    @property
    def free(self) -> int:
        """Number of blocks that no row uses."""
        return len(self._free)

    def grow(self, blocks: int) -> None:
        """Add free blocks, up to `blocks` in all."""
        before = len(self._references)
        self._references += [0] * (blocks - before)
        self._free[:0] = range(blocks - 1, before - 1, -1)

    def check(self, blocks: int) -> None:
        """Raise MemoryError if fewer than `blocks` blocks are free."""
        if len(self._free) < blocks:
            raise MemoryError(f"all {len(self._references) - 1} blocks of the KV cache are in use")

    def take(self, row: int, index: int) -> int:
        """Return a free block with one reference. Raises MemoryError if there is none."""
        self.check(1)
        block = self._free.pop()
        self._references[block] = 1
        return block

    def hold(self, block: int) -> None:
        """Add a reference."""
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference; a block without any is free."""
        self._references[block] -= 1
        if not self._references[block]:
            self._free.append(block)

    def shared(self, block: int) -> bool:
        """Return whether several rows use a block."""
        return self._references[block] > 1


class RowBlocks:
    """Blocks in rows that are each in one piece: a row's block is at its own place there or, while others use that one,
    at the same place in another row. One is always free, since each row uses one block of a place at most.

    A block's number is its place times MOST_ROWS, plus the row that it is in.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._references: list[list[int]] = []  # by place and row

    def resize(self, rows: int) -> None:
        """Change the number of rows; none of those that go may hold a block."""
        self._references = [(counts + [0] * rows)[:rows] for counts in self._references]
        self._rows = rows

    def check(self, blocks: int) -> None:
        """Do nothing: there are enough."""

    def take(self, row: int, index: int) -> int:
        """Return a free block with one reference, in `row` if possible."""
        while len(self._references) <= index:
            self._references.append([0] * self._rows)
        counts = self._references[index]
        home = counts.index(0) if counts[row] else row
        counts[home] = 1
        return index * MOST_ROWS + home

    def hold(self, block: int) -> None:
        """Add a reference."""
        index, home = divmod(block, MOST_ROWS)
        self._references[index][home] += 1

    def release(self, block: int) -> None:
        """Drop a reference."""
        index, home = divmod(block, MOST_ROWS)
        self._references[index][home] -= 1

    def shared(self, block: int) -> bool:
        """Return whether several rows use a block."""
        index, home = divmod(block, MOST_ROWS)
        return self._references[index][home] > 1


class BlockTables:
    """The blocks of each row, in the order of its tokens. size: tokens of a block.

    Attributes:
        array: (rows, W), the same tables as numbers; 0 where a row has fewer blocks.
        changes: Counts how often a row has begun, ended, or got a block in place of one that it had.
    """

    def __init__(self, pool: Blocks, rows: int, size: int) -> None:
        self.size = size
        self._pool = pool
        self._tables: list[list[int]] = [[] for _ in range(rows)]
        self._private = [NOTHING] * rows  # by row: first and end of tokens in blocks known to be its own
        self.array = np.zeros((rows, 1), dtype=np.int64)
        self.changes = 0

    def of(self, row: int) -> list[int]:
        """Return a row's blocks."""
        return self._tables[row]

    def resize(self, rows: int, tokens: int | None = None) -> None:
        """Change the number of rows; blocks of rows that go are released, and of others what is beyond `tokens`."""
        for row, table in enumerate(self._tables):
            self.drop(row, 0 if row >= rows else len(table) if tokens is None else -(-tokens // self.size))
        kept = self.array[:rows]
        self._tables = self._tables[:rows] + [[] for _ in range(rows - len(self._tables))]
        self._private = [NOTHING] * rows
        self.array = np.zeros((rows, kept.shape[1]), dtype=np.int64)
        self.array[: len(kept)] = kept

    def share(self, donor: int, row: int, tokens: int) -> list[BlockCopy]:
        """Start `row` with the first `tokens` tokens of `donor`, which may be the row itself.

        Returns:
            What to copy before the row is written: tokens of a block that is not shared as a whole.

        Raises:
            MemoryError: No block is free.
        """
        whole, rest = divmod(tokens, self.size)
        held = self._tables[donor][: whole + (rest > 0)]
        for block in held:
            self._pool.hold(block)
        self._private[donor] = NOTHING
        self.drop(row)
        for block in held:
            self._append(row, block)
        return self._own(row, whole, rest) if rest else []

    def reserve(self, row: int, first: int, end: int) -> list[BlockCopy]:
        """Give a row blocks of its own for its tokens from `first` to before `end`.

        Returns:
            What to copy before they are written: blocks that others use too.

        Raises:
            MemoryError: No block is free.
        """
        if not self.to_reserve([(row, first, end)]):
            return []
        others, missing = self._to_take(row, first, end)
        self._pool.check(len(others) + len(missing))  # before anything changes
        copies = [copy for at in others for copy in self._own(row, at, first - at * self.size)]
        for index in missing:
            self._append(row, self._pool.take(row, index))
        self._private[row] = first // self.size * self.size, -(-end // self.size) * self.size
        return copies

    def to_reserve(self, spans: Iterable[Span]) -> list[Span]:
        """Return the spans that reserve() may have something to do for: few, as a block serves many steps."""
        own = self._private
        return [span for span in spans if span[1] < own[span[0]][0] or span[2] > own[span[0]][1]]

    def missing(self, spans: Iterable[Span]) -> int:
        """Return how many blocks reserve() would take for spans of different rows."""
        taken = (self._to_take(*span) for span in self.to_reserve(spans))
        return sum(len(others) + len(beyond) for others, beyond in taken)

    def used(self, rows: Sequence[int]) -> int:
        """Return how many blocks these rows use."""
        return len(set().union(*(self._tables[row] for row in rows)))

    def own(self, row: int) -> list[tuple[int, int]]:
        """Return the first token and the end of each block that only this row uses."""
        blocks = enumerate(self._tables[row])
        return [(at * self.size, (at + 1) * self.size) for at, block in blocks if not self._pool.shared(block)]

    def drop(self, row: int, kept: int = 0) -> None:
        """Release all but the first `kept` blocks of a row."""
        table = self._tables[row]
        self.changes += 1
        self._private[row] = NOTHING
        self.array[row, kept:] = 0
        while len(table) > kept:
            self._pool.release(table.pop())

    def _to_take(self, row: int, first: int, end: int) -> tuple[list[int], range]:
        """Return the places of the blocks that a row lacks: those that others use too, and those beyond its table."""
        table, blocks = self._tables[row], -(-end // self.size)
        present = range(first // self.size, min(len(table), blocks))
        return [at for at in present if self._pool.shared(table[at])], range(len(table), blocks)

    def _own(self, row: int, index: int, tokens: int) -> list[BlockCopy]:
        """Replace a block that others use too by one of the row's own, of which it needs the first `tokens` tokens."""
        table = self._tables[row]
        block = table[index]
        if not self._pool.shared(block):
            return []
        table[index] = self.array[row, index] = self._pool.take(row, index)
        self.changes += 1
        self._pool.release(block)
        return [BlockCopy(block, table[index], tokens)] if tokens > 0 else []

    def _append(self, row: int, block: int) -> None:
        table, width = self._tables[row], self.array.shape[1]
        if len(table) == width:
            self.array = np.pad(self.array, ((0, 0), (0, width)))
        self.array[row, len(table)] = block
        table.append(block)
