"""The drafters in C++ draft what the ones in Python draft, and the latter are used where nothing can be compiled."""

import itertools
import json
import operator
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.engine.proposers.base import RowProposer
from ragspec.host import compiler
from ragspec.speculation.draft_length import allocate
from ragspec.speculation.drafters import context, native
from ragspec.speculation.drafters.base import Draft
from ragspec.speculation.drafters.calibration import follow_to, judged
from ragspec.speculation.drafters.context import ContextDrafter
from ragspec.speculation.drafters.native import NativeDrafter, native_context, native_lookup
from ragspec.speculation.drafters.prompt_lookup import PromptLookup
from ragspec.speculation.methods import HF, DrafterSettings, drafters_on, notes_on
from ragspec.speculation.step_cost import StepCost

SAMPLES = Path(__file__).resolve().parents[2] / "sample_data" / "questions.jsonl"
COMPILED = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
PAIRS = {
    "context": (ContextDrafter, native_context),
    "isolated": (lambda: ContextDrafter(isolate=True), lambda: native_context(isolate=True)),
    "lookup": (PromptLookup, native_lookup),
    "lookup 2-4": (lambda: PromptLookup(2, 4), lambda: native_lookup(2, 4)),
    "lookup 3-1": (lambda: PromptLookup(3, 1), lambda: native_lookup(3, 1)),
}


class Both:
    """A drafter in Python and its like in C++, asked for the same."""

    def __init__(self, name):
        self.drafters = [make() for make in PAIRS[name]]
        self.rows = {}
        self.drafted = 0

    def open(self, key, prompt, passages=()):
        self.close(key)
        self.rows[key] = [drafter.open(prompt, passages) for drafter in self.drafters]

    def close(self, key):
        for row in self.rows.pop(key, ()):
            row.close()

    def drop(self, key):
        self.rows.pop(key, None)

    def extend(self, key, token_ids):
        for row in self.rows[key]:
            row.extend(token_ids)

    def follow_to(self, least):
        for drafter in self.drafters:
            follow_to(drafter, least)

    def propose(self, limits):
        """Compare the drafts of all rows. limits: by key of a row."""
        expected = {key: self.rows[key][0].propose(limit) for key, limit in limits.items()}
        found = self.drafters[1].propose_all([self.rows[key][1] for key in limits], list(limits.values()))
        assert len(found) == len(limits)
        for draft, wanted in zip(found, expected.values(), strict=True):
            assert draft.token_ids == wanted.token_ids
            assert draft.sources == wanted.sources
            assert draft.cumulative_acceptance == pytest.approx(wanted.cumulative_acceptance, abs=1e-12, rel=0)
            self.drafted += len(wanted.token_ids)
        return expected

    def settle(self):
        self.drafters[1].settle()

    def compare_statistics(self):
        expected, found = (drafter.calibration for drafter in self.drafters)
        assert (found.trials, found.hits) == (expected.trials, expected.hits)
        assert found.error == (None if expected.error is None else pytest.approx(expected.error, abs=1e-12))
        assert judged(self.drafters[0]) == judged(self.drafters[1])


WORDS = st.lists(st.integers(0, 5), min_size=1, max_size=4)  # of few tokens, so that texts repeat


@st.composite
def texts(draw, least=0):
    """Texts that repeat pieces of themselves."""
    words = draw(st.lists(WORDS, min_size=1, max_size=4))
    chosen = draw(st.lists(st.sampled_from(range(len(words))), min_size=least, max_size=24))
    return [token for number in chosen for token in words[number]]


KEYS = st.integers(0, 3)
ACTIONS = st.one_of(
    st.tuples(
        st.just("open"), KEYS, texts(), st.lists(st.tuples(st.integers(-2, 40), st.integers(-2, 60)), max_size=3)
    ),
    st.tuples(st.just("extend"), KEYS, texts()),
    st.tuples(st.just("extend"), KEYS, WORDS),
    st.tuples(st.just("accept"), KEYS, st.integers(0, 5)),
    st.tuples(st.just("close"), KEYS),
    st.tuples(st.just("drop"), KEYS),
    st.tuples(st.just("settle")),
    st.tuples(st.just("follow"), st.sampled_from([0.0, 0.05, 0.3, 0.7])),
    st.tuples(st.just("propose"), st.lists(st.integers(-1, 40), min_size=4, max_size=4)),
)


@COMPILED
@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=60)
@given(st.lists(ACTIONS, max_size=60))
def test_drafts_are_equal_whatever_happens(name, actions):
    both, drafts = Both(name), {}
    for action, *values in actions:
        if action == "open":
            both.open(*values)
        elif action == "follow":
            both.follow_to(*values)
        elif action == "settle":
            both.settle()
        elif action == "propose":
            drafts = both.propose({key: values[0][key] for key in both.rows})
        elif values[0] not in both.rows:
            continue
        elif action == "accept":  # what was drafted is what the model writes, and one token more
            key, other = values
            both.extend(key, [*drafts.get(key, Draft()).token_ids[:5], other])
        else:
            getattr(both, action)(*values)
    both.propose(dict.fromkeys(both.rows, 9))
    both.compare_statistics()


@COMPILED
@pytest.mark.parametrize("name", PAIRS)
def test_drafts_are_equal_over_long_texts(name, monkeypatch):
    """Tables grow, and the pool of shared texts is emptied when it is full."""
    monkeypatch.setattr(context, "SHARED_TOKENS", 3000)
    chance = random.Random(1)
    phrases = [[chance.randrange(2**21 if n % 4 else 40) for _ in range(chance.randint(1, 30))] for n in range(120)]
    both = Both(name)
    for number in range(60):
        prompt = [token for _ in range(30) for token in chance.choice(phrases)]
        edges = sorted(chance.randrange(len(prompt)) for _ in range(4))
        both.open(number % 8, prompt, [(edges[0], edges[1]), (edges[2], edges[3])])
        both.follow_to(chance.choice([0.0, 0.1, 0.4]))
        for _ in range(6):
            for key in both.rows:
                phrase = chance.choice(phrases)
                both.extend(key, phrase[: chance.randint(0, 9)])
            both.propose({key: chance.randint(0, 32) for key in both.rows})
            if chance.random() < 0.5:
                both.settle()
    both.compare_statistics()
    assert both.drafted > 200


@COMPILED
def test_drafts_are_equal_where_matches_would_go_on_in_another_text():
    chance, both = random.Random(2), Both("context")
    for number in range(200):
        prompt = [chance.randrange(6) for _ in range(8)]
        both.open(number % 3, prompt, [(0, 4), (4, 8)])
        both.open(9, [chance.randrange(6) for _ in range(6)])
        both.propose(dict.fromkeys(both.rows, 6))
    assert both.drafted > 500


@COMPILED
@pytest.mark.parametrize("name", ["context", "lookup"])
def test_drafts_are_equal_after_many_wrong_guesses(name):
    """What was learnt long ago fades."""
    chance, both = random.Random(3), Both(name)
    both.open(0, [chance.randrange(4) for _ in range(50)])
    for _ in range(800):
        both.propose({0: 4})
        both.extend(0, [chance.randrange(4)])
    both.compare_statistics()


@COMPILED
@pytest.mark.parametrize("name", PAIRS)
def test_drafts_are_equal_over_real_texts(name):
    """The answers of the records are sentences of their passages; token ids stand for words."""
    ids, both = {}, Both(name)

    def encode(text):
        return [ids.setdefault(word, len(ids)) for word in text.split()]

    records = [json.loads(line) for line in SAMPLES.read_text(encoding="utf-8").splitlines()]
    for number, record in enumerate(records[:60]):
        passages = [passage if isinstance(passage, str) else passage["text"] for passage in record["contexts"]]
        prompt, spans = encode("Answer from these passages"), []
        for passage in passages:
            token_ids = encode(passage)
            spans.append((len(prompt), len(prompt) + len(token_ids)))
            prompt += token_ids
        both.open(number % 4, prompt + encode(record["query"]), spans)
        sentences = ". ".join(passages).split(". ")
        answer = encode(" so ".join(random.Random(number).choices(sentences, k=2)))
        while answer:
            drafts = both.propose(dict.fromkeys(both.rows, 12))
            guess = drafts[number % 4].token_ids
            agreeing = next((n for n, pair in enumerate(zip(guess, answer, strict=False)) if pair[0] != pair[1]), 3)
            both.extend(number % 4, answer[: agreeing + 1])
            answer = answer[agreeing + 1 :]
    both.compare_statistics()
    assert both.drafted > 300


@COMPILED
def test_a_batch_is_cut_as_its_drafts_are():
    chance = random.Random(0)
    drafter = native_context()
    text = [chance.randrange(6) for _ in range(200)]
    rows = [drafter.open(text[: 20 + 7 * number]) for number in range(20)] + [drafter.open([])]
    batch = drafter.propose_all(rows, [9] * len(rows))
    lengths = [chance.randint(0, int(count)) for count in batch.counts]
    assert sum(lengths)
    cut = batch.cut(native.np.array(lengths))
    assert cut == [draft.cut(length) for draft, length in zip(batch, lengths, strict=True)]
    assert batch[0] == rows[0].propose(9)
    assert batch[:2] == list(batch)[:2]


CHAINS = st.lists(st.sampled_from([1.0, 0.9, 0.5, 0.5, 0.25, 0.1]), max_size=6)  # of few values, so that many are equal
COSTS = st.sampled_from(
    [
        StepCost([(1, 0.020), (8, 0.020), (40, 0.024), (60, 0.060)]),
        StepCost([(1, 0.010)], 1e-6, 1e-5),
        StepCost([(1, 0.01), (2, 0.02)]),
    ]
)


@COMPILED
@settings(max_examples=300)
@given(st.lists(CHAINS, min_size=1, max_size=12), COSTS, st.sampled_from([0, 0, 20]), st.randoms())
def test_lengths_that_pay_are_those_of_python(chains, cost, prefill_tokens, chance):
    acceptances = [list(itertools.accumulate(chain, operator.mul)) for chain in chains]
    counts = native.np.array([len(chain) for chain in chains])
    total = int(counts.sum())
    tokens = native.np.array([chance.randrange(99) for _ in range(total)], native.np.int32)
    sources = native.np.array([chance.randrange(-1, 9) for _ in range(total)], native.np.int32)
    flat = native.np.array([value for chain in acceptances for value in chain], float)
    batch = native.DraftBatch(tokens, flat, sources, counts)
    lengths = allocate(acceptances, cost, 100, prefill_tokens)
    whole = list(batch)
    assert [draft.cumulative_acceptance for draft in whole] == acceptances
    assert batch.paying(cost, 100, prefill_tokens) == [
        draft.cut(length) for draft, length in zip(whole, lengths, strict=True)
    ]


@COMPILED
def test_a_draft_of_a_batch_is_like_any_other():
    kept = native_context().open([5, 6, 7, 5, 6]).propose(3)
    draft = Draft(kept.token_ids, list(kept.cumulative_acceptance), list(kept.sources))
    assert draft.sources == [2, 3, 4]
    assert (kept, kept.cut(2)) == (draft, draft.cut(2))
    assert kept != draft.cut(2)
    assert kept != "a draft"
    with pytest.raises(AttributeError):
        _ = kept.nothing


@COMPILED
@pytest.mark.parametrize("num_tokens", [None, 5])
@pytest.mark.parametrize("forced", [False, True])
def test_a_proposer_drafts_the_same_with_either(num_tokens, forced):
    chance, cost = random.Random(5), StepCost([(1, 0.020), (40, 0.024), (60, 0.060)])
    drafters = [make() for make in PAIRS["context"]]
    proposers = [RowProposer(drafter, num_tokens, cost) for drafter in drafters]
    rows, drafted = [], 0
    for place in range(8):
        prompt = [chance.randrange(9) for _ in range(60)]
        request = SimpleNamespace(token_ids=prompt, passages=[(0, 30)])
        row = SimpleNamespace(request=request, place=place, room=40, grammar=None, written=0, tokens=prompt)
        row.grammar = Forcing() if forced and place % 2 else None
        rows.append(row)
        for proposer in proposers:
            proposer.admit(row, place, 0)
    for step in range(20):
        python, compiled = (proposer.propose(rows, 30 * (step % 2)) for proposer in proposers)
        for draft, wanted in zip(compiled, python, strict=True):
            assert (draft.token_ids, draft.sources) == (wanted.token_ids, wanted.sources)
            assert draft.cumulative_acceptance == pytest.approx(wanted.cumulative_acceptance, abs=1e-12)
            assert draft.probabilities is None
            drafted += len(draft.token_ids)
        guesses = [proposer.guess(rows) for proposer in proposers]
        assert [draft.token_ids for draft in guesses[0]] == [draft.token_ids for draft in guesses[1]]
        for proposer in proposers[step % 3 :]:
            proposer.settle()
        for row, draft in zip(rows, python, strict=True):
            for proposer in proposers:
                proposer.extend(row, [*draft.token_ids[:3], step % 9])
            row.room -= 1
    assert drafted > 100


class Logged:
    """A drafter that writes down what is asked of it."""

    def __init__(self):
        self.log = []

    def open(self, prompt, passages=()):
        self.log.append("open")
        return self

    def propose(self, limit):
        self.log.append("propose")
        return Draft([1])

    def extend(self, token_ids):
        self.log.append(list(token_ids))

    def close(self):
        self.log.append("close")

    def settle(self):
        self.log.append("settle")


def row_of(place, answer=()):
    request = SimpleNamespace(token_ids=[1, 2], passages=[])
    return SimpleNamespace(
        request=request, place=place, room=9, grammar=None, written=len(answer), tokens=[1, 2, *answer], prompt_tokens=2
    )


def test_prompts_are_read_and_answers_shared_while_the_model_computes():
    drafter, row, other = Logged(), row_of(0), row_of(1, [3])
    proposer = RowProposer(drafter, 4, None)
    proposer.admit(row, 0, 0)
    proposer.admit(other, 1, 0)
    assert drafter.log == []
    proposer.propose([row], 0)  # it was ready at once
    assert drafter.log == ["open", "propose"]
    proposer.settle()
    assert drafter.log[2:] == ["open", [3], "settle"]
    proposer.extend(row, [4, 5])
    proposer.finish(row)
    assert drafter.log[5:] == [[4, 5]]
    proposer.settle()
    assert drafter.log[6:] == ["close", "settle"]


def test_a_prompt_that_could_not_be_read_is_tried_again_with_all_that_was_written_since(monkeypatch):
    drafter, row = Logged(), row_of(0)
    proposer = RowProposer(drafter, 4, None)
    proposer.admit(row, 0, 0)
    with monkeypatch.context() as patched:
        patched.setattr(drafter, "open", lambda *text: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            proposer.settle()
    row.tokens, row.written = [1, 2, 7], 1
    proposer.extend(row, [7])
    proposer.settle()
    assert drafter.log == ["open", [7], "settle"]


class Forcing:
    """A grammar that admits three tokens of a draft and forces two after them."""

    def admitted(self, token_ids):
        return min(3, len(token_ids))

    def forced(self, after=(), end=True):
        return [1, 2] if after else []


@COMPILED
def test_a_closed_row_drafts_nothing_and_takes_nothing():
    drafter = native_context()
    row = drafter.open([1, 2, 3, 1, 2])
    assert row.propose(3).token_ids
    for _ in range(2):
        row.close()
        row.extend([3])
        assert row.propose(3) == Draft()


@COMPILED
def test_a_row_that_is_not_closed_is_released_but_not_shared():
    drafter = native_context()
    first = drafter.open([1])
    first.extend(range(100, 120))
    handle = first.handle
    del first
    other = drafter.open([100, 101, 102])
    assert other.propose(3) == Draft()
    assert drafter.open([2]).handle == handle


@pytest.fixture
def uncompiled(tmp_path, monkeypatch):
    """A machine without a compiler, on which nothing was built before."""
    monkeypatch.setenv("RAGSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    native.built_or_why_not.cache_clear()
    yield
    native.built_or_why_not.cache_clear()


def test_no_compiler_is_one_note_and_python_drafts(uncompiled):
    drafters = drafters_on(HF, "auto", DrafterSettings())
    assert {type(drafter) for drafter in drafters.values()} == {ContextDrafter, PromptLookup}
    assert notes_on(drafters.values()) == [
        "drafting: ragspec's Python code is used, which is slower, because no C++ compiler (g++) was found"
    ]
    assert drafters["context"].open([5, 6, 7, 5, 6]).propose(3).token_ids == [7, 5, 6]


@pytest.mark.slow
def test_a_compiler_that_fails_is_one_note_and_python_drafts(uncompiled, tmp_path, monkeypatch):
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\ntest $1 = --version || { echo no space >&2; exit 1; }\n", encoding="utf-8")
    failing.chmod(0o755)
    monkeypatch.setattr(compiler.shutil, "which", lambda name: str(failing))
    drafters = drafters_on(HF, "auto", DrafterSettings())
    assert {type(drafter) for drafter in drafters.values()} == {ContextDrafter, PromptLookup}
    (note,) = notes_on(drafters.values())
    assert note.endswith("slower, because failing failed: no space")


@COMPILED
@pytest.mark.slow
@pytest.mark.parametrize("cached", ["nowhere", "damaged"])
def test_a_cache_that_cannot_be_used_is_done_without(cached, tmp_path, monkeypatch):
    monkeypatch.setenv("RAGSPEC_CACHE", str(tmp_path / "cache"))
    if cached == "nowhere":
        (tmp_path / "cache").write_text("a file, where no folder can be made")
    else:  # built elsewhere, or half written
        monkeypatch.setattr(compiler, "digest_of", lambda *parts: "library")
        (tmp_path / "cache" / "native").mkdir(parents=True)
        (tmp_path / "cache" / "native" / "library.so").write_text("no library")
    native.built_or_why_not.cache_clear()
    try:
        drafters = drafters_on(HF, "context", DrafterSettings())
        assert type(drafters["context"]) is NativeDrafter
        assert notes_on(drafters.values()) == []
        assert drafters["context"].open([5, 6, 7, 5, 6]).propose(3).token_ids == [7, 5, 6]
    finally:
        native.built_or_why_not.cache_clear()


def test_without_compilation_python_drafts_and_nothing_is_noted(uncompiled):
    drafters = drafters_on(HF, "auto", DrafterSettings(native=False))
    assert {type(drafter) for drafter in drafters.values()} == {ContextDrafter, PromptLookup}
    assert notes_on(drafters.values()) == []


@COMPILED
def test_what_can_be_compiled_is():
    drafters = drafters_on(HF, "auto", DrafterSettings())
    assert {type(drafter) for drafter in drafters.values()} == {NativeDrafter}
    assert notes_on(drafters.values()) == []
