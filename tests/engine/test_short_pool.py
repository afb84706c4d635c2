"""Requests of all kinds over too few blocks: what each gets is what it gets alone."""

import random

import pytest
import torch

from ragspec.engine.engine import Engine, EngineSettings
from ragspec.engine.kv.budget import KvBudget
from ragspec.engine.kv.paged_cache import PagedCache
from ragspec.engine.profiler import probe
from ragspec.engine.proposers.base import NoProposer, RowProposer
from ragspec.engine.proposers.draft_model import DraftModel
from ragspec.engine.scheduler import Scheduler, new_row
from ragspec.models.logits_processors import GenerationRules
from ragspec.records import Request, Sampling
from ragspec.speculation.drafters.base import NoDrafter
from ragspec.speculation.drafters.context import ContextDrafter
from ragspec.structured.form import Form
from ragspec.structured.grammars import Grammars
from tests.conftest import wide
from tests.engine.test_engine import loaded, plain, requests_for  # noqa: F401
from tests.engine.test_paged import SIZE, paged, poisoned, short_of_blocks  # noqa: F401

EOS = 0
SAMPLINGS = [
    {},
    {"logprobs": 2},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.3, "top_k": 20, "logprobs": 1},
    {"presence_penalty": 0.9, "repetition_penalty": 1.2},
]
GRAMMAR = Form("regex", r"[a-e]{3,30} (yes|no)( or (yes|no)){0,9}").grammar([])


def mixed(seed, samplings, count=12):
    """Return requests of a few heads of any length, each with its own kind of sampling, some with a grammar."""
    rng = random.Random(seed)
    heads = [[rng.randrange(5, 300) for _ in range(rng.randint(20, 50))] for _ in range(3)]
    for i in range(count):
        head = rng.choice([*heads, []])
        text = head[: rng.randint(len(head) // 2, len(head))] + [
            rng.randrange(5, 300) for _ in range(rng.randint(1, 40))
        ]
        sampling = Sampling(max_new_tokens=rng.choice([5, 60, 60]), **rng.choice(samplings))
        yield Request(i, f"m{i}", text, sampling, grammar=GRAMMAR if rng.random() < 0.3 else "")


def answered(model, tokenizer, requests, rows, proposer=None):
    """Return the answers by index, and how often a request was preempted."""
    model.resize(rows)
    grammars = Grammars(tokenizer.inner, 400, {EOS})
    rules = GenerationRules(model.inner, frozenset([EOS]), EOS)
    settings = EngineSettings(
        room=KvBudget(1, (model.cache.blocks - 1) * SIZE, SIZE),
        chunk=48,
        processors=lambda request: rules.processors(request.sampling, len(request.token_ids)),
        grammars=lambda: grammars,
    )
    engine = Engine(model, proposer or NoProposer(), tokenizer, frozenset([EOS]), settings)
    found = {outcome.index: outcome for outcome in engine.run(iter(requests))}
    assert not list(engine.notes)  # so no lack of blocks has ended a step
    return found, engine._space.preempted  # noqa: SLF001


def flat(outcome):
    """Return an answer's tokens, why it ended, and its log-probabilities as (token, number) pairs or numbers."""
    numbers = [[each.logprob, *(number for _, number in each.likeliest)] for each in outcome.logprobs]
    tokens = [[token for token, _ in each.likeliest] for each in outcome.logprobs]
    return (outcome.token_ids, outcome.finish_reason, tokens), [number for each in numbers for number in each]


@pytest.mark.parametrize("drafts", ["none", "context", "draft_model"])
@pytest.mark.parametrize("seed", [0, *wide(*range(1, 5))])
def test_a_request_gets_what_it_gets_alone_however_few_blocks_there_are(tiny, tiny_draft, seed, drafts):
    rng = random.Random(100 + seed)
    # a sampled row's answer depends on what a model drafts for it
    kinds = SAMPLINGS if drafts != "draft_model" else [each for each in SAMPLINGS if "temperature" not in each]
    some = list(mixed(seed, kinds))
    alone, none = answered(*short_of_blocks(tiny, 400), some, 1)
    assert none == 0
    preempted = 0
    for rows, blocks in ((4, 11), (rng.randint(3, 6), rng.randint(12, 18))):
        draft = paged(tiny_draft)[0]
        draft.resize(rows)
        proposers = {
            "none": NoProposer(),
            "context": RowProposer(ContextDrafter(), 5, None),
            "draft_model": DraftModel(draft, 400, None, 3, None),
        }
        found, count = answered(*short_of_blocks(tiny, blocks), some, rows, proposers[drafts])
        preempted += count
        assert sorted(found) == sorted(alone)
        for index, outcome in found.items():
            (said, numbers), (wanted, expected) = flat(outcome), flat(alone[index])
            assert said == wanted
            assert numbers == pytest.approx(expected, abs=1e-3)
    assert preempted > 0


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_rows_come_back_after_forwards_that_ran_out_of_memory(tiny, plain, monkeypatch, fails):  # noqa: F811
    model, tokenizer = short_of_blocks(tiny, 200)
    tried, begin = [], model.begin

    def short(*args, **kwargs):
        tried.append(1)
        if len(tried) <= fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return begin(*args, **kwargs)

    monkeypatch.setattr(model, "begin", short)
    model.resize(4)
    engine = Engine(model, NoProposer(), tokenizer, frozenset(), EngineSettings(room=KvBudget(1, 10**9, SIZE)))
    assert {outcome.index: outcome.token_ids for outcome in engine.run(requests_for(tokenizer))} == plain


def test_a_prompt_goes_on_in_no_step_that_was_started_before_what_precedes_it_was_computed(tiny, monkeypatch):
    """Memory suffices for three rows at once, and for every other step ahead."""
    model, tokenizer = short_of_blocks(tiny, 400)
    rng = random.Random(3)
    texts = [[rng.randrange(5, 300) for _ in range(150 if i % 3 == 2 else 6)] for i in range(12)]
    requests = [Request(i, str(i), text, Sampling(max_new_tokens=10 + 7 * (i % 4))) for i, text in enumerate(texts)]

    def run(rows):
        model.resize(rows)
        engine = Engine(model, NoProposer(), tokenizer, frozenset(), EngineSettings(chunk=16))
        return {outcome.index: outcome.token_ids for outcome in engine.run(iter(requests))}

    expected = run(1)
    begin, begin_after, ahead = model.begin, model.begin_after, []

    def short(segments, *args, **kwargs):
        if len(segments) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return begin(segments, *args, **kwargs)

    def short_ahead(*args):
        ahead.append(1)
        if len(ahead) % 2 == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return begin_after(*args)

    monkeypatch.setattr(model, "begin", short)
    monkeypatch.setattr(model, "begin_after", short_ahead)
    assert run(5) == expected
    assert len(ahead) > 20


@pytest.mark.parametrize("blocks", [7, 40, 90])
def test_what_steps_cost_is_measured_in_as_many_rows_as_there_are_blocks_for(tiny, blocks):
    model, _ = short_of_blocks(tiny, blocks)
    cost = probe(model, 256)
    assert cost(1, 1, 10) > 0
    assert model.cache.rows == 256


# -- starts from other rows while no block is free --------------------------------------------------------------------


def full(rows, held):
    """Return a cache of blocks of four tokens without a free one. held: tokens by row; each writes its own number."""
    cache = PagedCache(rows, 4)
    cache.layer(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
    cache.allocate(1 + sum(-(-tokens // 4) for tokens in held.values()))
    cache.fixed = True
    for row, tokens in held.items():
        write(cache, row, 0, tokens, row)
    assert cache.free == 0
    return cache


@torch.inference_mode()
def write(cache, row, first, end, number):
    table = cache.reserve_row(row, first, end)
    for at in range(first, end):
        cache.layers[0].keys[0, 4 * table[at // 4] + at % 4] = number


def read(cache, row, tokens):
    table = cache.tables([row])[0]
    return [int(cache.layers[0].keys[0, 4 * table[at // 4] + at % 4]) for at in range(tokens)]


def test_a_row_that_starts_from_itself_gives_up_what_would_need_a_block_that_is_not_there():
    cache = full(3, {0: 8, 2: 8})
    cache.share_prefix(0, 1, 8)
    assert cache.share_prefix(0, 0, 6) == 4  # its second block is another row's too
    assert cache.share_prefix(2, 2, 6) == 6  # this one is its own
    assert (read(cache, 1, 8), read(cache, 0, 4)) == ([0] * 8, [0] * 4)
    cache.drop(2)
    write(cache, 0, 4, 8, 9)
    assert (read(cache, 1, 8), read(cache, 0, 8)) == ([0] * 8, [0] * 4 + [9] * 4)


def test_a_row_gets_no_more_than_its_donor_got_in_the_same_step():
    cache = full(4, {3: 8, 0: 16})
    assert cache.share_prefix(3, 0, 6) == 4
    assert cache.free == 4  # those that the row had before
    assert cache.share_prefix(0, 1, 6) == 4  # as was planned when row 0 was to get as many
    write(cache, 1, 4, 6, 9)
    assert read(cache, 1, 6) == [3] * 4 + [9] * 2


# -- drafters ---------------------------------------------------------------------------------------------------------


def placed(index, tokens, place):
    row = new_row(Request(index, str(index), tokens, Sampling(max_new_tokens=20)))
    row.place = place
    return row


def drafted(proposer, row):
    proposer.admit(row, row.place, 0)
    return proposer.propose([row], 0)[0].token_ids


def test_a_draft_model_knows_how_much_of_a_prefix_it_got(tiny_draft):
    rng = random.Random(5)
    long, other, tail = ([rng.randrange(5, 300) for _ in range(count)] for count in (60, 60, 10))
    proposer, fresh = (DraftModel(paged(tiny_draft)[0], 400, None, 3, None) for _ in range(2))
    proposer.resize(2)
    for place, text in enumerate((long, other)):
        drafted(proposer, placed(place, text, place))
    assert proposer._model.cache.free == 0  # noqa: SLF001
    row = placed(2, long[:50] + tail, 1)
    assert drafted(proposer, row) == drafted(fresh, row)


def test_drafters_do_not_judge_a_preempted_rows_draft_by_what_its_successor_says(tiny, tiny_draft):
    model = DraftModel(paged(tiny_draft)[0], 400, None, 3, None)
    tokenizer = paged(tiny)[1]
    forced = RowProposer(NoDrafter(), 3, None)
    grammar = Form("choice", ["Ann wrote it."]).grammar([])
    grammars = Grammars(tokenizer.inner, 400, {EOS})
    before = model.promise
    for proposer in (model, forced):
        rows = [placed(index, [9, 8, 7 + index], 0) for index in range(2)]
        for row in rows if proposer is forced else ():
            row.grammar = grammars.matcher(grammar)
        assert drafted(proposer, rows[0])
        proposer.admit(rows[1], 0, 0)
        rows[1].tokens.append(11)
        proposer.extend(rows[1], [11])
    assert (model.promise, forced.forced.met) == (before, 0)


def test_a_preempted_row_goes_first_and_its_slot_offers_nothing():
    requests = [Request(i, str(i), [i + 1] * 40, Sampling(max_new_tokens=4)) for i in range(4)]
    scheduler = Scheduler(iter(requests), 2, 4)
    first, second = (start.row for start in scheduler.admit())
    first.computed = second.computed = 40
    place, row = scheduler.preempt_youngest()
    assert (row is second, row.place, row.computed, scheduler.forget_oldest()) == (True, -1, 0, None)
    (again,) = scheduler.admit()
    assert (again.row is second, again.row.place, again.tokens) == (True, place, 0)
