"""Tables over both kinds of blocks, in any order of events: no row reads another's tokens, and no reference is lost."""

import random
from collections import Counter

import pytest

from ragspec.engine.kv.block_pool import MOST_ROWS, BlockPool, BlockTables, RowBlocks
from tests.conftest import wide

ROWS, SIZE, LONGEST = 5, 4, 30


class Stress:
    """Tables beside a model of what every block holds: (writer, number) by block and place in it."""

    def __init__(self, pool):
        self.pool = pool
        self.tables = BlockTables(pool, ROWS, SIZE)
        self.held = {}
        self.texts = [[] for _ in range(ROWS)]
        self.events = Counter()

    def copied(self, copies):
        """Copy block after block, as caches do. What is not copied is garbage."""
        self.events["copied"] += len(copies)
        for copy in copies:
            assert copy.source != copy.target
            for at in range(SIZE):
                self.held[copy.target, at] = self.held.get((copy.source, at)) if at < copy.tokens else "stale"

    def write(self, row, first, count):
        before = self.references(), list(self.tables.of(row))
        missing = self.tables.missing([(row, first, first + count)])
        try:
            copies = self.tables.reserve(row, first, first + count)
        except MemoryError:
            assert missing > self.pool.free
            assert (self.references(), self.tables.of(row)) == before
            self.events["refused"] += 1
            return
        assert len(set(self.tables.of(row)) - set(before[1])) == missing
        self.copied(copies)
        for at in range(first, first + count):
            block = self.tables.of(row)[at // SIZE]
            assert not self.pool.shared(block)
            self.events["written"] += 1
            self.held[block, at % SIZE] = row, self.events["written"]
            self.texts[row][at:] = [self.held[block, at % SIZE]]

    def share(self, donor, row, tokens):
        if isinstance(self.pool, BlockPool) and not self.pool.free:
            tokens = tokens // SIZE * SIZE
        self.events["shared"] += donor != row and tokens > 0
        self.copied(self.tables.share(donor, row, tokens))
        self.texts[row] = self.texts[donor][:tokens]

    def references(self):
        """Return how many references each block has, by its number."""
        counts = self.pool._references  # noqa: SLF001
        if isinstance(self.pool, BlockPool):
            return {block: count for block, count in enumerate(counts) if count}
        places = ((i * MOST_ROWS + row, count) for i, rows in enumerate(counts) for row, count in enumerate(rows))
        return {block: count for block, count in places if count}

    def check(self):
        for row, text in enumerate(self.texts):
            table = self.tables.of(row)
            assert [self.held[table[at // SIZE], at % SIZE] for at in range(len(text))] == text
            assert self.tables.array[row].tolist()[: len(table)] == table
            assert not self.tables.array[row, len(table) :].any()
            if isinstance(self.pool, RowBlocks):
                assert [block // MOST_ROWS for block in table] == list(range(len(table)))
        used = Counter(block for row in range(ROWS) for block in self.tables.of(row))
        assert self.references() == used
        assert self.tables.used(range(ROWS)) == len(used)
        if isinstance(self.pool, BlockPool):
            assert self.pool.free == self.pool.blocks - 1 - len(used)


@pytest.mark.parametrize("blocks", [12, 25, 0], ids=["tight", "wide", "rows"])
@pytest.mark.parametrize("seed", [*range(6), *wide(*range(6, 60))])
def test_no_row_reads_anothers_tokens_and_all_references_are_held(seed, blocks):
    rng = random.Random(seed)
    stress = Stress(BlockPool(blocks) if blocks else RowBlocks(ROWS))
    for _ in range(400):
        row, donor, do = rng.randrange(ROWS), rng.randrange(ROWS), rng.random()
        length = len(stress.texts[row])
        if do < 0.5:
            first = length if rng.random() < 0.6 else rng.randint(0, length)
            count = min(rng.randint(1, 9), LONGEST - first)
            if count > 0:
                stress.write(row, first, count)
        elif do < 0.85:
            stress.share(donor, row, rng.randint(0, len(stress.texts[donor])))
        elif do < 0.97:
            stress.tables.drop(row)
            stress.texts[row] = []
        else:
            most = rng.choice([None, 8, 15])
            kept = -(-most // SIZE) * SIZE if most else LONGEST
            stress.tables.resize(ROWS, most)
            stress.texts = [text[:kept] for text in stress.texts]
        stress.check()
    assert stress.events["shared"] > 20
    assert stress.events["copied"] > 10
    assert stress.events["refused"] > 0 or blocks != 12
