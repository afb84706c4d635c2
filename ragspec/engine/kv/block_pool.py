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

    def take(self) -> int:
        """Return a free block with one reference. Raises MemoryError if there is none."""
        if not self._free:
            raise MemoryError(f"all {len(self._references) - 1} blocks of the KV cache are in use")
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
    """The blocks of each row, in the order of its tokens. size: tokens of a block."""

    def __init__(self, pool: BlockPool, rows: int, size: int) -> None:
        self.size = size
        self._pool = pool
        self._tables: list[list[int]] = [[] for _ in range(rows)]

    def of(self, row: int) -> list[int]:
        """Return a row's blocks."""
        return self._tables[row]

    def resize(self, rows: int) -> None:
        """Change the number of rows; blocks of rows that go are released."""
        for table in self._tables[rows:]:
            self._release(table)
        self._tables = self._tables[:rows] + [[] for _ in range(rows - len(self._tables))]

    def share(self, donor: int, row: int, tokens: int) -> list[BlockCopy]:
        """Start `row` with the first `tokens` tokens of `donor`, which may be the row itself.

        Returns:
            What to copy before the row is written: tokens of a block that is not shared as a whole.

        Raises:
            MemoryError: No block is free.
        """
        whole, rest = divmod(tokens, self.size)
        held, table = self._tables[donor][: whole + (rest > 0)], self._tables[row]
        for block in held:
            self._pool.hold(block)
        self._release(table)
        table.extend(held)
        return self._own(table, whole, rest) if rest else []

    def reserve(self, row: int, first: int, end: int) -> list[BlockCopy]:
        """Give a row blocks of its own for its tokens from `first` to before `end`.

        Returns:
            What to copy before they are written: blocks that others use too.

        Raises:
            MemoryError: No block is free.
        """
        table, copies = self._tables[row], []
        for index in range(first // self.size, min(len(table), -(-end // self.size))):
            copies += self._own(table, index, self.size)
        while len(table) * self.size < end:
            table.append(self._pool.take())
        return copies

    def _own(self, table: list[int], index: int, tokens: int) -> list[BlockCopy]:
        """Replace a block that others use too by one of the row's own."""
        block = table[index]
        if not self._pool.shared(block):
            return []
        table[index] = self._pool.take()
        self._pool.release(block)
        return [BlockCopy(block, table[index], tokens)]

    def _release(self, table: list[int]) -> None:
        """Release all blocks of a row."""
        while table:
            self._pool.release(table.pop())
