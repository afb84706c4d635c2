"""What rows begin with is in memory once: who holds it, who takes a copy of it, and that no answer changes."""

import random

import pytest
import torch

from ragspec.engine import cache as caches
from ragspec.engine import prepared
from ragspec.engine.admission import Admission
from ragspec.engine.cache import RaggedCache
from ragspec.engine.decode import Engine, EngineSettings
from ragspec.engine.layout import Layout, Segment
from ragspec.engine.loans import LEAST, Loans
from ragspec.engine.proposers import NoDrafts
from ragspec.models.tokenizer import HFTokenizer
from ragspec.records import Request, Sampling
from tests.conftest import train_tokenizer, wide
from tests.engine.test_compiled import COMPILER
from tests.engine.test_engine_models import build

ROWS, SLOTS = 5, 64
CPU = torch.device("cpu")


def test_a_loan_of_a_loan_names_who_holds_it():
    loans = Loans()
    loans.lend(0, 1, 100)
    loans.lend(1, 2, 130)
    assert loans.parts(2, 0, 150) == [(0, 0, 100), (1, 100, 130), (2, 130, 150)]
    assert loans.held() == {0: 100, 1: 130}
    loans.move((0, 20, 100), 2)
    assert loans.parts(2, 0, 150) == [(0, 0, 20), (2, 20, 100), (1, 100, 130), (2, 130, 150)]
    assert loans.parts(1, 10, 30) == [(0, 10, 20), (2, 20, 30)]
    loans.shorten(1, 0)
    assert (loans.end(1), loans.end(2), list(loans)) == (0, 130, [2])


class Rows:
    """Rows of numbers beside a cache that holds them: what each row should read."""

    def __init__(self):
        self.cache = RaggedCache(ROWS)
        self.cache.reserve(SLOTS)
        self.layers = [self.cache.layer_of(heads, 2, torch.zeros(1)) for heads in (1, 2)]
        self.texts = [[] for _ in range(ROWS)]
        self.idle = set()
        self.numbers = 0

    def write(self, row, start, count):
        """Let a row go on from one of its slots, as a forward does."""
        segment = Segment(row, start, count)
        with self.cache.forward(Layout([segment], SLOTS, CPU, loans=self.cache.loans)):
            new = [self.numbers + i + 1 for i in range(count)]
            self.numbers += count
            for layer in self.layers:
                layer.keys[:, row, start : start + count] = torch.tensor(new)[:, None].float()
                layer.values[:, row, start : start + count] = -torch.tensor(new)[:, None].float()
        self.texts[row] = self.texts[row][:start] + new

    def begin(self, row, donor, tokens):
        """Let another text begin at a row, with what a donor has."""
        self.cache.lend(donor, row, tokens)
        self.texts[row] = self.texts[donor][:tokens]
        self.idle.discard(row)
        for other, kept in self.cache.claim(row, tokens, self.idle).items():
            assert other in self.idle
            assert kept < len(self.texts[other])
            del self.texts[other][kept:]

    def check(self):
        """Every row reads what it should, wherever that is."""
        for row, text in enumerate(self.texts):
            for layer in self.layers:
                for store, sign in ((layer.keys, 1), (layer.values, -1)):
                    parts = self.cache.loans.parts(row, 0, len(text))
                    read = torch.cat([store[:, holder, a:b] for holder, a, b in parts] or [store[:, 0, :0]], 1)
                    assert read[..., 0].tolist() == [[sign * number for number in text]] * len(read)
                    assert torch.equal(read[..., 0], read[..., 1])


@pytest.mark.parametrize("least", [1, 5, 1000])
@pytest.mark.parametrize("seed", [*range(8), *wide(*range(8, 40))])
def test_every_row_reads_its_own_text_whoever_holds_it(monkeypatch, least, seed):
    monkeypatch.setattr(caches, "LEAST", least)
    rng = random.Random(seed)
    rows, lent = Rows(), 0
    for _ in range(250):
        row, donor = rng.randrange(ROWS), rng.randrange(ROWS)
        text = rows.texts[row]
        do = rng.random()
        if do < 0.45 and row not in rows.idle:
            start = len(text) if rng.random() < 0.8 else rng.randint(0, len(text))  # rarely, it computes its text anew
            count = min(rng.randint(1, 12), SLOTS - start)
            if count > 0:
                rows.write(row, start, count)
        elif do < 0.75:
            rows.begin(row, donor, rng.randint(0, len(rows.texts[donor])))
        elif do < 0.95:
            rows.idle.add(row)
        elif do < 0.97:
            rows.cache.settle()
            assert not rows.cache.loans
            rows.cache.lends = True
        lent += bool(rows.cache.loans)
        rows.check()
    assert (lent > 10) is (least < 1000)


def test_rows_that_hold_what_the_other_needs_are_parted(monkeypatch):
    monkeypatch.setattr(caches, "LEAST", 1)
    rows = Rows()
    rows.write(0, 0, 10)
    rows.write(1, 0, 10)
    for row, donor in ((2, 0), (3, 1), (0, 3), (1, 2)):
        rows.begin(row, donor, 10)
    rows.begin(2, 2, 0)
    rows.begin(3, 3, 0)
    assert [rows.cache.loans.parts(row, 0, 10) for row in (0, 1)] == [[(1, 0, 10)], [(0, 0, 10)]]
    monkeypatch.setattr(caches, "LEAST", 100)
    rows.begin(0, 0, 10)
    assert not rows.cache.loans
    rows.check()


def test_pieces_are_cut_anew_where_a_forward_comes_to_read_rows_where_they_are():
    rows = Rows()
    rows.write(0, 0, 40)
    rows.cache.loans.lend(0, 1, 40)
    layout = Layout([Segment(1, 40, 1)], SLOTS, CPU, loans=rows.cache.loans)
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
    engine = Engine(model, NoDrafts(), words, frozenset(), EngineSettings(lookahead=lookahead))
    return {outcome.index: outcome.token_ids for outcome in engine.run(iter(some))}


def test_what_waiting_requests_may_begin_with_is_not_idle():
    head = list(range(100))
    texts = [[*head, 200 + i] for i in range(3)] + [[7] * 50]
    some = [Request(i, str(i), text, Sampling(max_new_tokens=4)) for i, text in enumerate(texts)]
    admission = Admission(some, 2, 4096)
    starts = admission.admit()
    assert [start.row.request.index for start in starts] == [0, 3]  # the other two wait for the first
    for start in starts:
        start.row.computed = len(start.row.tokens)
        admission.release(start.row)
    assert admission.idle() == [1]
    admission.forget({1: 5})
    assert len(admission.places[1].left) == 5
    assert [(start.row.request.index, start.tokens) for start in admission.admit()] == [(1, 100), (2, 100)]
    assert admission.idle() == []


@COMPILER
@pytest.mark.parametrize("name", [*wide("llama-heads-of-16"), "gemma2-wide"])
def test_no_loan_changes_an_answer(sample_texts, monkeypatch, name):
    words = HFTokenizer(train_tokenizer(300, sample_texts))
    model = prepared.prepare(build(name, words))
    assert model.kernels is not None
    rng = random.Random(0)
    heads = [[rng.randrange(3, 200) for _ in range(LEAST + 30 * i)] for i in range(1, 4)]
    some = requests(heads, 40)
    alone = answered(model, words, some, 1, 1)
    lent, copied = [], []
    lend, copy = Loans.lend, RaggedCache.copy_part

    def lending(self, donor, row, tokens):
        lent.append(tokens if donor != row else 0)
        lend(self, donor, row, tokens)

    def copying(self, part, target):
        copied.append(part)
        copy(self, part, target)

    monkeypatch.setattr(Loans, "lend", lending)
    monkeypatch.setattr(RaggedCache, "copy_part", copying)
    for rows, lookahead in ((2, 4), (8, 40), (8, 5), (5, 3)):
        assert answered(model, words, some, rows, lookahead) == alone
    loans = sum(tokens >= LEAST for tokens in lent)
    assert loans > 20
    if name == "gemma2-wide":
        assert len(copied) == loans  # its window's layers read rows where they are
    else:
        assert 0 < len(copied) < loans / 2
