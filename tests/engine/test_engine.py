"""The batched engine on tiny real models: whatever drafts it gets, the answers are those of plain decoding."""

import random

import pytest
import torch

from ragspec.engine import acceptance as work
from ragspec.engine.engine import Engine, EngineSettings
from ragspec.engine.kv.cache import RaggedCache
from ragspec.engine.model import layout
from ragspec.engine.model.loaded import prepare
from ragspec.engine.proposers.base import NoProposer, RowProposer
from ragspec.engine.proposers.draft_model import DraftModel
from ragspec.models.tokenizer import HFTokenizer
from ragspec.records import Failure, Request, Sampling
from ragspec.speculation.drafters.base import Draft
from ragspec.speculation.drafters.context import ContextDrafter
from ragspec.speculation.drafters.prompt_lookup import PromptLookup
from ragspec.speculation.step_cost import StepCost
from tests.conftest import SAMPLE, read_jsonl, wide

NEW = 24
CHEAP = StepCost([(1, 1.0), (400, 1.01)])  # a machine on which draft tokens cost next to nothing


class Fixed:
    """Drafts what it is told to: `guess(row tokens, limit)`."""

    def __init__(self, guess):
        self.guess = guess

    def open(self, prompt, passages=()):
        return FixedRow(list(prompt), self.guess)


class FixedRow:
    def __init__(self, tokens, guess):
        self.tokens, self.guess, self.prompt_tokens = tokens, guess, len(tokens)

    def propose(self, limit):
        ids = self.guess(self.tokens, self.prompt_tokens)[: max(0, limit)]
        return Draft(ids, [0.9 ** (i + 1) for i in range(len(ids))], [None] * len(ids))

    def extend(self, token_ids):
        self.tokens += token_ids

    def close(self):
        pass


@pytest.fixture(scope="module")
def loaded():
    """Models by folder, prepared for the engine once."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cache = {}

    def load(folder):
        if folder not in cache:
            inner = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            cache[folder] = prepare(inner), HFTokenizer(AutoTokenizer.from_pretrained(folder))
        return cache[folder]

    return load


def texts(count=9):
    records = read_jsonl(SAMPLE)
    for i in range(count):
        record = records[i % len(records)]
        yield f"{record['contexts'][0]['text'][: 40 + 37 * i]}\n\nQuestion: {record['query']}"


def requests_for(tokenizer, sampling=None, count=9):
    sampling = sampling or Sampling(max_new_tokens=NEW)
    for i, text in enumerate(texts(count)):
        yield Request(i, f"r{i}", tokenizer.encode(text, special_tokens=True), sampling)


def answers(loaded, folder, proposer=None, rows=4, requests=None, sampling=None, eos=(), cost=None, **settings):
    model, tokenizer = loaded(folder)
    model.resize(rows)
    engine = Engine(model, proposer or NoProposer(), tokenizer, frozenset(eos), EngineSettings(cost=cost, **settings))
    outcomes = list(engine.run(requests or requests_for(tokenizer, sampling)))
    assert not [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    answers.engine = engine
    return {outcome.index: outcome for outcome in outcomes}


def ids(outcomes):
    return {index: outcome.token_ids for index, outcome in sorted(outcomes.items())}


@pytest.fixture(scope="module")
def plain(loaded, tiny):
    return ids(answers(loaded, tiny, rows=1))


def oracle(plain, loaded, tiny):
    """Return a guess that is always right, from the answers of plain decoding."""
    whole = {}
    for request in requests_for(loaded(tiny)[1]):
        whole[tuple(request.token_ids)] = plain[request.index]

    def guess(tokens, prompt_tokens):
        return whole[tuple(tokens[:prompt_tokens])][len(tokens) - prompt_tokens :]

    return guess


def ragged(plain, loaded, tiny):
    """Right up to a length that changes from step to step, then wrong."""
    right = oracle(plain, loaded, tiny)

    def guess(tokens, prompt_tokens):
        good = right(tokens, prompt_tokens)[: len(tokens) * 7 % 5]
        return [*good, (tokens[-1] + 1) % 400, 3, 5]

    return guess


GUESSES = {
    "empty": lambda *known: lambda tokens, prompt_tokens: [],
    "wrong": lambda *known: lambda tokens, prompt_tokens: [399 - tokens[-1], 1, 2, 3],
    "oracle": oracle,
    "ragged": ragged,
}


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("num_tokens", [1, 7, None])
@pytest.mark.parametrize("name", [*GUESSES, "context", "lookup"])
def test_no_draft_changes_an_answer(loaded, tiny, plain, name, num_tokens, rows):
    if name in GUESSES:
        drafter = Fixed(GUESSES[name](plain, loaded, tiny))
    else:
        drafter = ContextDrafter() if name == "context" else PromptLookup()
    outcomes = answers(loaded, tiny, RowProposer(drafter, num_tokens, CHEAP), rows, cost=CHEAP)
    assert ids(outcomes) == plain
    spec = [outcome.spec for outcome in outcomes.values()]
    if name == "oracle" and num_tokens == 7:
        assert all(one.accepted == one.drafted and one.steps <= 1 + -(-NEW // 8) for one in spec)
    if name == "wrong":
        assert sum(one.accepted for one in spec) == 0 < sum(one.drafted for one in spec)
    if name == "empty":
        assert all(one.drafted == 0 and one.steps == NEW for one in spec)


@pytest.mark.parametrize("draft", ["tiny", "tiny_draft", "tiny_padded"])
@pytest.mark.parametrize("rows", [*wide(1), 3, *wide(16)])
def test_a_draft_model_changes_no_answer(loaded, tiny, plain, draft, rows, request):
    from transformers import AutoModelForCausalLM

    folder = request.getfixturevalue(draft)
    drafting = prepare(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    drafting.resize(rows)
    outcomes = answers(loaded, tiny, DraftModel(drafting, 400, None, 4, None), rows)
    assert ids(outcomes) == plain
    spec = [outcome.spec for outcome in outcomes.values()]
    assert sum(one.drafted for one in spec) > 0
    if draft == "tiny":  # it is the target: all it says is right, with its cache in step to the end
        assert all(one.accepted == one.drafted for one in spec)


def test_a_verifier_that_believes_everything_is_caught(loaded, tiny, plain, monkeypatch):
    monkeypatch.setattr(work, "agreement", lambda draft, chosen: len(draft))
    drafter = Fixed(GUESSES["wrong"]())
    assert ids(answers(loaded, tiny, RowProposer(drafter, 3, None))) != plain


def test_a_mask_that_shows_a_rejected_draft_is_caught(loaded, tiny, plain, monkeypatch):
    masks, pieces = layout.attention_mask, layout.split_kv

    def too_much(queries, *rest):
        return pieces({row: [(token, seen + 1) for token, seen in who] for row, who in queries.items()}, *rest)

    monkeypatch.setattr(layout, "attention_mask", lambda queries, *rest: masks(queries + 1, *rest))
    monkeypatch.setattr(layout, "split_kv", too_much)
    assert ids(answers(loaded, tiny, RowProposer(Fixed(ragged(plain, loaded, tiny)), 7, None))) != plain


def test_the_answers_are_those_of_stock_generate(loaded, tiny, plain):
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    for request in requests_for(loaded(tiny)[1]):
        prompt = torch.tensor([request.token_ids])
        out = stock.generate(prompt, do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0)
        assert out[0, prompt.shape[1] :].tolist() == plain[request.index]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.3, "min_p": 0.05, "repetition_penalty": 1.2},
        {"temperature": 0.0, "repetition_penalty": 1.3},
    ],
)
def test_sampled_answers_are_the_same_with_and_without_drafts(loaded, tiny, sampling):
    sampling = Sampling(max_new_tokens=NEW, seed=5, **sampling)
    without = ids(answers(loaded, tiny, rows=1, sampling=sampling))
    guess = oracle(without, loaded, tiny)
    for drafter in (Fixed(guess), Fixed(ragged(without, loaded, tiny)), ContextDrafter()):
        outcomes = answers(loaded, tiny, RowProposer(drafter, 5, None), 4, sampling=sampling)
        assert ids(outcomes) == without
        assert sum(outcome.spec.accepted for outcome in outcomes.values()) > 0 or isinstance(drafter, ContextDrafter)


def test_another_seed_gives_another_sample(loaded, tiny):
    one, two = (
        ids(answers(loaded, tiny, sampling=Sampling(max_new_tokens=NEW, temperature=1.0, seed=seed))) for seed in (1, 2)
    )
    assert all(one[index] != two[index] for index in one)


def test_records_of_different_sampling_share_a_batch(loaded, tiny, plain):
    tokenizer = loaded(tiny)[1]
    mixed = [
        Request(r.index, r.id, r.token_ids, Sampling(max_new_tokens=NEW, temperature=float(r.index % 2)))
        for r in requests_for(tokenizer)
    ]
    together = ids(answers(loaded, tiny, rows=9, requests=iter(mixed)))
    assert {i: t for i, t in together.items() if i % 2 == 0} == {i: t for i, t in plain.items() if i % 2 == 0}
    assert all(together[i] != plain[i] for i in together if i % 2)


def test_an_answer_ends_at_the_end_token_inside_a_draft(loaded, tiny, plain):
    guess = oracle(plain, loaded, tiny)
    for index, tokens in plain.items():
        end = tokens[9]
        outcome = answers(loaded, tiny, RowProposer(Fixed(guess), 7, None), eos=[end, 100_000])[index]
        assert outcome.token_ids == tokens[: tokens.index(end) + 1]
        assert outcome.finish_reason == "stop"
        assert outcome.spec.accepted <= len(outcome.token_ids)
        assert counted(outcome)


def counted(outcome):
    """Return whether an outcome's counts add up to its tokens."""
    spec = outcome.spec
    return spec.drafted >= spec.accepted and spec.steps + spec.accepted - spec.cut == len(outcome.token_ids)


@pytest.mark.parametrize("new", [1, 2, 5, 8, 9])
def test_an_answer_never_outgrows_its_limit_inside_a_draft(loaded, tiny, plain, new):
    guess = oracle(plain, loaded, tiny)
    outcomes = answers(loaded, tiny, RowProposer(Fixed(guess), 7, None), sampling=Sampling(max_new_tokens=new))
    assert ids(outcomes) == {index: tokens[:new] for index, tokens in plain.items()}
    assert {outcome.finish_reason for outcome in outcomes.values()} == {"length"}


def test_a_stop_string_ends_an_answer_wherever_drafts_cut_it(loaded, tiny, plain):
    tokenizer = loaded(tiny)[1]
    stop = tokenizer.decode(plain[4])[7:12]
    assert stop.isprintable()
    assert len(stop) == 5
    sampling = Sampling(max_new_tokens=NEW, stop=(stop,))
    without = answers(loaded, tiny, sampling=sampling)
    assert without[4].finish_reason == "stop"
    assert stop in tokenizer.decode(without[4].token_ids)
    assert stop not in tokenizer.decode(without[4].token_ids[:-1])
    cut = 0
    for length in (1, 2, 3, 7, 20):
        guess = oracle(plain, loaded, tiny)
        outcomes = answers(loaded, tiny, RowProposer(Fixed(guess), length, None), sampling=sampling)
        assert ids(outcomes) == ids(without)
        assert all(map(counted, outcomes.values()))
        cut += sum(outcome.spec.cut for outcome in outcomes.values())
    assert cut, "no draft outran an answer"


@pytest.mark.parametrize("chunk", [8, 50])
def test_chunks_of_a_prompt_change_nothing(loaded, tiny, plain, chunk):
    assert ids(answers(loaded, tiny, RowProposer(ContextDrafter(), 4, None), rows=5, chunk=chunk)) == plain


def test_shared_prefixes_are_computed_once_in_shuffled_input_too(loaded, tiny):
    tokenizer = loaded(tiny)[1]
    heads = [tokenizer.encode(text * 3, special_tokens=True)[:120] for text in texts(4)]
    assert min(map(len, heads)) == 120
    prompts = [head + tokenizer.encode(f" {i} why?", special_tokens=False) for head in heads for i in range(6)]
    random.Random(3).shuffle(prompts)
    sampling = Sampling(max_new_tokens=6)
    requests = [Request(i, str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
    alone = {}
    for request in requests:
        alone |= ids(answers(loaded, tiny, rows=1, requests=iter([request])))
    outcomes = answers(loaded, tiny, rows=4, requests=iter(requests))
    assert ids(outcomes) == alone
    distinct = 4 * 120 + sum(len(prompt) - 120 for prompt in prompts)
    cached = sum(outcome.cached_prompt_tokens for outcome in outcomes.values())
    assert sum(map(len, prompts)) - cached <= distinct
    assert answers.engine.clock.prompt_tokens <= distinct  # the first of a group is waited for


def test_identical_prompts_get_identical_answers(loaded, tiny, plain):
    tokenizer = loaded(tiny)[1]
    request = next(iter(requests_for(tokenizer)))
    copies = [Request(i, f"r{i}", request.token_ids, request.sampling) for i in range(7)]
    outcomes = answers(
        loaded, tiny, RowProposer(ContextDrafter(), None, CHEAP), rows=3, requests=iter(copies), cost=CHEAP
    )
    assert set(map(tuple, ids(outcomes).values())) == {tuple(plain[0])}


@pytest.mark.parametrize("where", ["reserve", "update"])
@pytest.mark.parametrize("fits", [1, 2])
def test_out_of_memory_costs_rows_but_no_record(loaded, tiny, plain, monkeypatch, where, fits):
    original = getattr(RaggedCache, where)
    calls = []

    def short(self, *args, **kwargs):
        calls.append(self.rows)
        if self.rows > fits and len(calls) > 6:
            raise torch.OutOfMemoryError("no room")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(RaggedCache, where, short)
    outcomes = answers(loaded, tiny, RowProposer(ContextDrafter(), 3, None), rows=8)
    assert ids(outcomes) == plain
    assert any("OutOfMemoryError" in note for note in answers.engine.notes)


def test_prompts_that_cannot_be_read_cost_drafts_but_no_record(loaded, tiny, plain):
    class Short(ContextDrafter):
        def open(self, prompt, passages=()):
            raise MemoryError("drafting")

    outcomes = answers(loaded, tiny, RowProposer(Short(), 3, None), rows=8)
    assert ids(outcomes) == plain
    assert 1 <= sum("drafting failed" in note for note in answers.engine.notes) < 4  # pauses grow


def test_what_was_copied_is_cited_with_its_passage(loaded, tiny, plain):
    """Passages made of what the model is going to say are found again, token for token."""
    tokenizer = loaded(tiny)[1]
    request = next(iter(requests_for(tokenizer)))
    prompt = [*request.token_ids[:30], *plain[0][:14], *request.token_ids[30:60]]
    sampling = Sampling(max_new_tokens=NEW)
    told = [Request(0, "r0", prompt, sampling, ((0, 30), (30, 44), (44, len(prompt))))]
    answer = ids(answers(loaded, tiny, requests=iter(told)))[0]
    prompt = [*prompt, *answer]
    told = [Request(0, "r0", prompt, sampling, ((len(prompt) - NEW, len(prompt)),))]
    once = ids(answers(loaded, tiny, requests=iter(told)))[0]
    prompt = [*prompt[:-NEW], *once, *prompt[-20:]]
    told = [Request(0, "r0", prompt, sampling, ((0, 50), (len(prompt) - 20 - NEW, len(prompt) - 20)))]
    outcome = answers(loaded, tiny, RowProposer(ContextDrafter(), 6, None), requests=iter(told))[0]
    for run in outcome.copied:
        assert outcome.token_ids[run.start : run.end] == prompt[run.source : run.source + run.end - run.start]
        start, end = told[0].passages[run.passage]
        assert start <= run.source
        assert run.source + run.end - run.start <= end
