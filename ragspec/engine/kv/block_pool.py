"""Blocks of keys and values: which row uses which, with counted references. Pure.

    >>> tables = BlockTables(BlockPool(8), rows=2, size=4)
    >>> tables.reserve(0, 0, 6)  # row 0 writes its tokens 0 to 5
    []
    >>> tables.share(0, 1, 5)  # row 1 starts with five of them: one block in common, and a copy of one token
    [BlockCopy(source=2, target=3, tokens=1)]
    >>> tables.of(0), tables.of(1)
    ([1, 2], [1, 3])

A block holds tokens at the same positions for all of its rows, since a prefix is shared from its first token on. Shared
blocks are never written. Source: Kwon et al. 2023, PagedAttention, arXiv:2309.06180.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PADDING = 0  # the block that padding is written to; it belongs to no row


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The first `tokens` tokens of block `source`, to be copied to block `target`."""

    source: int
    target: int
    tokens: int


class BlockPool:
    """Blocks, and how many rows use each."""

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

    def take(self) -> int:
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


class BlockTables:
    """The blocks of each row, in the order of its tokens. size: tokens of a block.

    Attributes:
        array: (rows, W), the same tables as numbers; 0 where a row has fewer blocks.
    """

    def __init__(self, pool: BlockPool, rows: int, size: int) -> None:
        self.size = size
        self._pool = pool
        self._tables: list[list[int]] = [[] for _ in range(rows)]
        self.array = np.zeros((rows, 1), dtype=np.int64)

    def of(self, row: int) -> list[int]:
        """Return a row's blocks."""
        return self._tables[row]

    def resize(self, rows: int, tokens: int | None = None) -> None:
        """Change the number of rows; blocks of rows that go are released, and of others what is beyond `tokens`."""
        for row, table in enumerate(self._tables):
            self._release(row, 0 if row >= rows else len(table) if tokens is None else -(-tokens // self.size))
        kept = self.array[:rows]
        self._tables = self._tables[:rows] + [[] for _ in range(rows - len(self._tables))]
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
        self._release(row)
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
        table, blocks = self._tables[row], -(-end // self.size)
        others = [at for at in range(first // self.size, min(len(table), blocks)) if self._pool.shared(table[at])]
        missing = max(0, blocks - len(table))
        self._pool.check(len(others) + missing)  # before anything changes
        copies = [copy for at in others for copy in self._own(row, at, self.size)]
        for _ in range(missing):
            self._append(row, self._pool.take())
        return copies

    def _own(self, row: int, index: int, tokens: int) -> list[BlockCopy]:
        """Replace a block that others use too by one of the row's own."""
        table = self._tables[row]
        block = table[index]
        if not self._pool.shared(block):
            return []
        table[index] = self.array[row, index] = self._pool.take()
        self._pool.release(block)
        return [BlockCopy(block, table[index], tokens)]

    def _append(self, row: int, block: int) -> None:
        table, width = self._tables[row], self.array.shape[1]
        if len(table) == width:
            self.array = np.pad(self.array, ((0, 0), (0, width)))
        self.array[row, len(table)] = block
        table.append(block)

    def _release(self, row: int, kept: int = 0) -> None:
        """Release all but the first `kept` blocks of a row."""
        table = self._tables[row]
        self.array[row, kept:] = 0
        while len(table) > kept:
            self._pool.release(table.pop())
