"""What rows begin with is in memory once: who holds it, who copies it, and that no answer changes."""

import random

import pytest
import torch

from ragspec.engine.engine import Engine, EngineSettings
from ragspec.engine.kv import cache as caches
from ragspec.engine.kv.block_pool import MOST_ROWS, BlockCopy, BlockTables, RowBlocks
from ragspec.engine.kv.cache import RaggedCache
from ragspec.engine.kv.common_prefix import LEAST
from ragspec.engine.model import kv_splits
from ragspec.engine.model import loaded as prepared
from ragspec.engine.model.layout import Layout, Segment
from ragspec.engine.proposers.base import NoProposer
from ragspec.models.tokenizer import HFTokenizer
from ragspec.records import Request, Sampling
from tests.conftest import train_tokenizer, wide
from tests.engine.test_compiled import COMPILER
from tests.engine.test_engine_models import build

ROWS, SLOTS = 5, 64
CPU = torch.device("cpu")


def test_a_block_that_others_use_leaves_its_place_to_them():
    tables = BlockTables(RowBlocks(3), 3, 4)
    assert tables.reserve(0, 0, 8) == []
    assert tables.share(0, 1, 7) == [BlockCopy(source=MOST_ROWS, target=MOST_ROWS + 1, tokens=3)]
    assert tables.of(1) == [0, MOST_ROWS + 1]
    tables.share(0, 0, 0)  # another text begins in row 0, whose first block row 1 goes on using
    tables.reserve(0, 0, 8)
    assert tables.of(0) == [1, MOST_ROWS]
    assert tables.reserve(1, 2, 3) == []  # it has that block for itself now
    assert tables.share(1, 2, 4) == []
    assert tables.reserve(2, 2, 6) == [BlockCopy(source=0, target=2, tokens=2)]


class Rows:
    """Rows of numbers beside a cache that holds them: what each row should read."""

    def __init__(self):
        self.cache = RaggedCache(ROWS)
        self.cache.reserve(SLOTS)
        self.layers = [self.cache.layer_of(heads, 2, torch.zeros(1)) for heads in (1, 2)]
        self.texts = [[] for _ in range(ROWS)]
        self.numbers = 0

    @torch.inference_mode()
    def write(self, row, start, count):
        """Let a row go on from one of its slots, as a forward does."""
        self.cache.reserve_row(row, start, start + count)
        parts = self.cache.parts if self.cache.shares else None
        layout = Layout([Segment(row, start, count)], SLOTS, CPU, parts=parts)
        with self.cache.forward(layout):
            new = [self.numbers + i + 1 for i in range(count)]
            self.numbers += count
            for layer in self.layers:
                for store, sign in ((layer.keys, 1), (layer.values, -1)):
                    heads, rows, slots, size = store.shape
                    filled = sign * torch.tensor(new).float()[None, :, None].expand(heads, -1, size)
                    store.view(heads, rows * slots, size).index_copy_(1, layout.writes, filled)
        self.texts[row] = self.texts[row][:start] + new

    def begin(self, row, donor, tokens):
        """Let another text begin at a row, with what a donor has."""
        self.cache.share_prefix(donor, row, tokens)
        self.texts[row] = self.texts[donor][:tokens]

    def check(self):
        """Every row reads what it should, wherever that is."""
        for row, text in enumerate(self.texts):
            for layer in self.layers:
                for store, sign in ((layer.keys, 1), (layer.values, -1)):
                    parts = self.cache.parts(row, 0, len(text)) if text else []
                    read = torch.cat([store[:, holder, a:b] for holder, a, b in parts] or [store[:, 0, :0]], 1)
                    assert read[..., 0].tolist() == [[sign * number for number in text]] * len(read)
                    assert torch.equal(read[..., 0], read[..., 1])


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    for module in (caches, kv_splits):
        monkeypatch.setattr(module, "ROW_BLOCK", 8)


def shares(rows):
    """Return whether any row reads another's slots."""
    return any(part[0] != row for row in range(ROWS) for part in rows.cache.parts(row, 0, len(rows.texts[row])))


@pytest.mark.parametrize("seed", [*range(8), *wide(*range(8, 40))])
def test_every_row_reads_its_own_text_whoever_holds_it(seed):
    rng = random.Random(seed)
    rows, shared = Rows(), 0
    for _ in range(250):
        row, donor = rng.randrange(ROWS), rng.randrange(ROWS)
        text = rows.texts[row]
        do = rng.random()
        if do < 0.45:
            start = len(text) if rng.random() < 0.8 else rng.randint(0, len(text))  # rarely, it computes its text anew
            count = min(rng.randint(1, 12), SLOTS - start)
            if count > 0:
                rows.write(row, start, count)
        elif do < 0.9:
            rows.begin(row, donor, rng.randint(0, len(rows.texts[donor])))
        elif do < 0.94:
            rows.cache.resize(ROWS + 2, SLOTS)  # more rows, and fewer again
            rows.check()
            rows.cache.resize(ROWS, SLOTS)
        elif do < 0.96:
            rows.cache.settle()
            assert not shares(rows)
            rows.check()
            rows.cache.shares = rng.random() < 0.5
        else:
            rows.cache.shares = True
        shared += shares(rows)
        rows.check()
    assert shared > 10


def test_a_cache_with_fewer_slots_forgets_what_is_beyond():
    rows = Rows()
    rows.write(0, 0, 40)
    rows.begin(1, 0, 33)
    rows.cache.resize(ROWS, 16)
    rows.texts = [text[:16] for text in rows.texts]
    rows.check()
    rows.cache.resize(ROWS, SLOTS)
    rows.write(1, 16, 20)
    rows.write(0, 16, 10)
    rows.check()


def test_pieces_are_cut_anew_where_a_forward_comes_to_read_rows_where_they_are():
    rows = Rows()
    rows.write(0, 0, 40)
    rows.cache.share_prefix(0, 1, 40)
    rows.cache.reserve_row(1, 40, 41)
    layout = Layout([Segment(1, 40, 1)], SLOTS, CPU, parts=rows.cache.parts)
    with rows.cache.forward(layout):
        assert set(layout.pieces.pieces[:, 0].tolist()) == {0, 1}
        rows.cache.settle()
        assert set(layout.pieces.pieces[:, 0].tolist()) == {1}
    rows.texts[1] = rows.texts[0]
    rows.check()


def requests(head, count):
    """Return requests of three heads, in an order that has places taken over from rows that others borrow from."""
    texts = [[*head[i % 3], *(60 + (7 * i + j) % 40 for j in range(1 + i % 5))] for i in range(count)]
    return [Request(i, str(i), text, Sampling(max_new_tokens=4 + 7 * (i % 5))) for i, text in enumerate(texts)]


def answered(model, words, some, rows, lookahead):
    model.resize(rows)
    engine = Engine(model, NoProposer(), words, frozenset(), EngineSettings(lookahead=lookahead))
    return {outcome.index: outcome.token_ids for outcome in engine.run(iter(some))}


@COMPILER
@pytest.mark.parametrize("name", [*wide("llama-heads-of-16"), "gemma2-wide"])
def test_no_shared_block_changes_an_answer(sample_texts, monkeypatch, name):
    words = HFTokenizer(train_tokenizer(300, sample_texts))
    model = prepared.prepare(build(name, words))
    assert model.kernels is not None
    rng = random.Random(0)
    heads = [[rng.randrange(3, 200) for _ in range(LEAST + 30 * i)] for i in range(1, 4)]
    some = requests(heads, 40)
    alone = answered(model, words, some, 1, 1)
    shared, copied = [], []
    share_prefix, copy = RaggedCache.share_prefix, RaggedCache._copy_slots  # noqa: SLF001

    def sharing(self, donor, row, tokens):
        shared.append(tokens if donor != row else 0)
        return share_prefix(self, donor, row, tokens)

    def copying(self, source, target, first, last):
        copied.append(last - first)
        copy(self, source, target, first, last)

    monkeypatch.setattr(RaggedCache, "share_prefix", sharing)
    monkeypatch.setattr(RaggedCache, "_copy_slots", copying)
    for rows, lookahead in ((2, 4), (8, 40), (8, 5), (5, 3)):
        assert answered(model, words, some, rows, lookahead) == alone
    assert sum(tokens >= LEAST for tokens in shared) > 20
    if name == "gemma2-wide":
        assert sum(copied) == sum(shared)  # its window's layers read rows where they are
    else:
        assert 0 < sum(copied) < sum(shared) / 5
