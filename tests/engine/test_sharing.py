"""What rows have in common is read once, and what a step costs is expected by that."""

import time

import pytest

from ragspec.engine.engine import Engine, EngineSettings
from ragspec.engine.kv.cache import RaggedCache
from ragspec.engine.model import loaded as prepared
from ragspec.engine.proposers.base import NoProposer
from ragspec.engine.scheduler import LEAST, PrefixGroups
from ragspec.models.tokenizer import HFTokenizer
from ragspec.records import Request, Sampling
from ragspec.speculation.step_cost import StepCost
from tests.conftest import train_tokenizer
from tests.engine.test_compiled import COMPILER
from tests.engine.test_engine_models import build
from tests.engine.test_pieces import row

POINTS = [(1, 0.02), (16, 0.035), (32, 0.055)]


def test_the_share_that_is_read_counts_what_is_common_once():
    text = list(range(300))
    rows = [row(0, 0, text, 299), row(1, 1, text[:200] + [7] * 100, 299), row(2, 2, [9] * 300, 299)]
    sharing = PrefixGroups(lambda *_: True)
    assert sharing.read(rows) == pytest.approx(1 - 200 / 900)
    assert PrefixGroups(lambda *_: False).read(rows) == 1
    assert sharing.read([]) == 1


@pytest.mark.parametrize("told", [True, False])
def test_what_a_draft_costs_is_right_where_rows_share_their_prefixes(told):
    true, cost = (StepCost(POINTS, per_slot=0.6e-6, per_row_slot=1.6e-6) for _ in range(2))
    true.read = 1 / 4
    if told:
        cost.read = true.read
    for _ in range(100):
        cost.observe(16, 16, 4000, true(16, 16, 4000))  # without drafts
    expected, drafted = (each(20, 16, 4000) - each(16, 16, 4000) for each in (true, cost))
    assert (drafted == pytest.approx(expected, rel=0.05)) is told


@COMPILER
def test_the_engine_tells_how_much_its_rows_have_in_common(sample_texts):
    words = HFTokenizer(train_tokenizer(300, sample_texts))
    model = prepared.prepare(build("llama-heads-of-16", words))
    assert model.kernels is not None
    model.resize(3)
    cost, plain = (StepCost([(1, 1.0), (64, 2.0)]) for _ in range(2))
    head = [3 + i % 50 for i in range(2 * LEAST)]
    requests = [Request(i, str(i), [*head, 60 + i], Sampling(max_new_tokens=8)) for i in range(3)]
    engine = Engine(model, NoProposer(), words, frozenset(), EngineSettings(cost=cost, plain=plain))
    seen = [(cost.read, plain.read) for _ in engine.run(iter(requests))]
    assert len(seen) == 3
    assert all(one == other for one, other in seen)
    assert seen[0][0] < 0.6  # one of the two that are left reads nothing of the head


def test_what_new_rows_copy_is_no_drafting(sample_texts, monkeypatch):
    words = HFTokenizer(train_tokenizer(300, sample_texts))
    model = prepared.prepare(build("llama-heads-of-16", words))
    model.resize(2)
    copied = []
    original, clock = RaggedCache._copy_slots, time.perf_counter  # noqa: SLF001
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 10_000 * len(copied))

    def slowly(self, source, target, first, last):
        copied.append(last - first)
        original(self, source, target, first, last)

    monkeypatch.setattr(RaggedCache, "_copy_slots", slowly)
    head = [3 + i % 50 for i in range(LEAST // 2)]
    requests = [Request(i, str(i), [*head, 60 + i], Sampling(max_new_tokens=8)) for i in range(2)]
    engine = Engine(model, NoProposer(), words, frozenset())
    assert len(list(engine.run(iter(requests)))) == 2
    assert copied
    assert engine.clock.drafting_s < 5000 < 10_000 <= engine.clock.prefill_s + engine.clock.decode_s
