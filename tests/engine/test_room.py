"""Memory: how many rows of how many tokens, what a failure costs, and how rows come back."""

import logging
from dataclasses import replace

import pytest
import torch

from ragspec.engine.engine import Engine, EngineSettings
from ragspec.engine.kv.budget import AHEAD, PATIENCE, Backoff, KvBudget
from ragspec.engine.kv.cache import RaggedCache
from ragspec.engine.model import forward
from ragspec.engine.model.layout import Segment
from ragspec.engine.proposers.base import NoProposer, RowProposer
from ragspec.engine.scheduler import Scheduler
from ragspec.records import Failure, Request, Sampling
from ragspec.speculation.drafters.context import ContextDrafter
from tests.engine.test_engine import NEW, answers, ids, loaded, plain, requests_for  # noqa: F401 (fixtures)
from tests.engine.test_linear import llama

# -- arithmetic -------------------------------------------------------------------------------------------------------


def test_rows_and_slots_share_the_budget():
    room = KvBudget(bytes_per_token=10, budget=10_000)
    for rows in range(1, 40):
        slots = room.slots(rows)
        assert rows * slots * 10 <= 10_000 < rows * (slots + 1) * 10
        assert room.rows(slots) >= rows
    assert room.rows(1001) == 0
    assert "1,001 tokens" in room.why(1001)
    assert KvBudget().rows(1 << 40) > 1_000_000


@pytest.mark.parametrize(
    ("slots", "rows", "prompt", "coming", "expected"),
    [
        (110, 4, 90, 310, int(AHEAD * 110)),
        (110, 4, 150, 310, int(AHEAD * 150)),
        (110, 4, 90, 120, 120),  # no more than anybody will need
        (110, 4, 0, 0, 110),
        (110, 1, 90, 310, 110),  # a row alone asks for its own need
        (240, 4, 200, 310, 250),  # all that there is
        (251, 4, 200, 310, 0),
    ],
)
def test_a_cache_grows_for_those_who_come_next_too(slots, rows, prompt, coming, expected):
    assert KvBudget(bytes_per_token=1, budget=1000).ahead(slots, rows, prompt, coming) == expected


def test_failures_halve_and_calm_brings_back():
    backoff = Backoff(16)
    backoff.failed(16)
    assert backoff.limit == 8
    for _ in range(PATIENCE):
        assert backoff.limit == 8
        backoff.succeeded()
    assert backoff.limit == 16
    backoff.failed(16)  # it was too early: the next try comes later
    for _ in range(2 * PATIENCE):
        assert backoff.limit == 8
        backoff.succeeded()
    assert backoff.limit == 16
    for count in (16, 8, 4, 2, 1, 1):
        backoff.failed(count)
    assert backoff.limit == 1


# -- the cache --------------------------------------------------------------------------------------------------------


def test_a_cache_that_is_resized_keeps_what_fits():
    cache = RaggedCache(3)
    cache.reserve(64)
    keys, values = torch.randn(2, 2, 3, 64, 4)
    layer = cache.layer_of(2, 4, keys)
    layer.keys.copy_(keys)
    layer.values.copy_(values)
    for row in range(3):
        cache.reserve_row(row, 0, 64)
    cache.resize(5, 128)
    assert layer.keys.shape == (2, 5, 128, 4)
    assert torch.equal(layer.keys[:, :3, :64], keys)
    assert torch.equal(layer.values[:, :3, :64], values)
    assert not layer.keys[:, 3:].any()
    assert not layer.keys[:, :, 64:].any()
    cache.resize(2, 64)
    assert torch.equal(layer.values, values[:, :2])


@pytest.mark.parametrize("most", [1 << 20, 100])
def test_memory_is_kept_for_the_next_run_where_it_is_little(monkeypatch, most):
    monkeypatch.setattr(forward, "keepable", lambda device: most)
    model = forward.Model(llama(), 3)

    def run(rows, tokens):
        model.resize(rows)
        model.logits([Segment(rows - 1, 0, tokens, alone=True)], [5] * tokens, [tokens - 1])
        logits = model.logits([Segment(0, 0, 1), Segment(rows - 1, tokens, 1)], [6, 7], [0, 1])
        return logits, [store.data_ptr() for store in model.cache.memory()]

    first, places = run(3, 100)
    with torch.inference_mode():
        for store in model.cache.memory():
            store.fill_(torch.nan)  # the next run must not see what was left
    model.rest()
    assert (model.kept_bytes.total() > 0) is (most > 100)
    again, same = run(2, 100)
    assert torch.allclose(first, again, atol=1e-5)
    assert (same == places) is (most > 100)
    model.rest()
    assert run(4, 300)[1] != same  # it is too small
    assert not model.cache.kept


# -- the engine -------------------------------------------------------------------------------------------------------


def bytes_per_token(model):
    model.logits([Segment(0, 0, 1)], [1], [0])
    return model.cache.bytes_by_device().total()


def run(model, tokenizer, requests, proposer=None, rows=4, room=None, **settings):
    model.resize(rows)
    engine = Engine(
        model, proposer or NoProposer(), tokenizer, frozenset(), EngineSettings(room=room or KvBudget(), **settings)
    )
    outcomes = {outcome.index: outcome for outcome in engine.run(requests)}
    return outcomes, engine


def tokens(outcomes):
    return {index: o.token_ids for index, o in sorted(outcomes.items()) if not isinstance(o, Failure)}


def test_a_long_limit_on_new_tokens_reserves_nothing(loaded, tiny, plain):  # noqa: F811
    """One record may write 100,000 tokens; it writes a few, and the cache is as large as for the others."""
    model, tokenizer = loaded(tiny)
    model.resize(4)
    requests = list(requests_for(tokenizer))
    end = plain[3][6]
    asked = [
        Request(r.index, r.id, r.token_ids, Sampling(max_new_tokens=100_000 if r.index == 3 else NEW)) for r in requests
    ]
    engine = Engine(model, NoProposer(), tokenizer, frozenset([end]))
    outcomes = {outcome.index: outcome for outcome in engine.run(asked)}
    assert outcomes[3].finish_reason == "stop"
    longest = max(len(r.token_ids) for r in requests) + NEW
    assert model.cache.slots <= AHEAD * longest + 64


@pytest.mark.parametrize("fits", [1.0, 1.6, 3.1])
def test_a_record_that_outgrows_the_memory_for_all_is_answered_with_fewer_rows(loaded, tiny, plain, fits):  # noqa: F811
    model, tokenizer = loaded(tiny)
    model.resize(4)
    longest = max(len(r.token_ids) for r in requests_for(tokenizer)) + NEW + 25
    room = KvBudget(bytes_per_token(model), int(fits * longest * bytes_per_token(model)))
    outcomes, _ = run(model, tokenizer, requests_for(tokenizer), RowProposer(ContextDrafter(), 4, None), room=room)
    assert tokens(outcomes) == plain
    assert model.cache.rows * model.cache.slots <= room.slots(1) + 64 * model.cache.rows  # slots come by the 64


def test_a_request_that_no_memory_is_enough_for_is_an_error_and_the_others_are_answered(loaded, tiny, plain):  # noqa: F811
    model, tokenizer = loaded(tiny)
    model.resize(4)
    sizes = sorted(len(r.token_ids) for r in requests_for(tokenizer))
    room = KvBudget(1000, 1000 * (sizes[-2] + 26))
    outcomes, _ = run(model, tokenizer, requests_for(tokenizer), room=room)
    failed = {index: outcome for index, outcome in outcomes.items() if isinstance(outcome, Failure)}
    (index,) = failed
    assert "GiB of keys and values" in failed[index].message
    assert tokens(outcomes) == {i: answer for i, answer in plain.items() if i != index}


def test_an_answer_that_outgrows_all_memory_is_an_error_and_the_others_are_answered(loaded, tiny, plain):  # noqa: F811
    model, tokenizer = loaded(tiny)
    model.resize(4)
    requests = [*requests_for(tokenizer), Request(99, "long", [5, 6, 7], Sampling(max_new_tokens=400))]
    room = KvBudget(1000, 1000 * 240)
    outcomes, _ = run(model, tokenizer, requests, room=room)
    assert isinstance(outcomes[99], Failure)
    assert "GiB of keys and values" in outcomes[99].message
    assert tokens(outcomes) == plain


def test_rows_come_back_after_a_failure(loaded, tiny, plain, monkeypatch):  # noqa: F811
    """Memory is short for a moment only: a while later, all rows are there again."""
    model, tokenizer = loaded(tiny)
    original, calls, rows = RaggedCache.update, [], []

    def short(self, *args, **kwargs):
        calls.append(1)
        rows.append(self.rows)
        if self.rows > 1 and 20 < len(calls) < 60:
            raise torch.OutOfMemoryError("no room")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(RaggedCache, "update", short)
    requests = [
        Request(10 * n + r.index, r.id, r.token_ids, r.sampling) for n in range(8) for r in requests_for(tokenizer)
    ]
    outcomes, engine = run(model, tokenizer, requests, rows=4)
    assert tokens(outcomes) == {10 * n + index: answer for n in range(8) for index, answer in plain.items()}
    assert min(rows) == 1
    assert rows[-1] == 4
    assert any("OutOfMemoryError" in note for note in engine.notes)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("boom"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate"),
    ],
)
def test_a_poisoned_record_costs_itself_only(loaded, tiny, plain, monkeypatch, error):  # noqa: F811
    """Whatever batch it is in, its forward fails: it alone becomes an error, and the batch is as wide as before."""
    model, tokenizer = loaded(tiny)
    requests, inner, widths = list(requests_for(tokenizer)), model.inner.forward, []
    used = {token for r in requests for token in r.token_ids} | {token for answer in plain.values() for token in answer}
    poison = next(token for token in range(400) if token not in used)

    def forward(input_ids, **kwargs):
        if (input_ids == poison).any():
            raise error
        widths.append(model.cache.rows)
        return inner(input_ids=input_ids, **kwargs)

    monkeypatch.setattr(model.inner, "forward", forward)
    requests.insert(3, Request(99, "bad", [5, poison, 7], Sampling(max_new_tokens=NEW)))
    outcomes, _ = run(model, tokenizer, requests, RowProposer(ContextDrafter(), 3, None), rows=4)
    assert isinstance(outcomes[99], Failure)
    assert type(error).__name__ in outcomes[99].message
    assert tokens(outcomes) == plain
    assert widths[-1] == 4


def test_a_row_that_fails_as_the_last_other_one_ends_is_retried(loaded, tiny, plain, monkeypatch):  # noqa: F811
    model, tokenizer = loaded(tiny)
    first, second = list(requests_for(tokenizer))[:2]
    first = replace(first, sampling=Sampling(max_new_tokens=5))
    last, begin, tried = len(first.token_ids) + 3, model.begin, []

    def short(segments, *args, **kwargs):
        if tried or (len(segments) == 2 and segments[0].start == last):
            tried.append(len(segments))
        if tried in ([2], [2, 1, 1]):
            raise torch.OutOfMemoryError("no room")
        return begin(segments, *args, **kwargs)

    monkeypatch.setattr(model, "begin", short)
    outcomes, _ = run(model, tokenizer, [first, second], rows=2)
    assert tried[:3] == [2, 1, 1]
    assert tokens(outcomes) == {0: plain[0][:5], 1: plain[1]}


def test_a_row_that_no_memory_is_left_to_begin_costs_itself_only(loaded, tiny, plain, monkeypatch):  # noqa: F811
    """Though no drafter has heard of it yet."""
    model, tokenizer = loaded(tiny)
    share, tried = RaggedCache.share_prefix, []

    def short(self, *args):
        tried.append(1)
        if len(tried) == 2:
            raise MemoryError("no room")
        return share(self, *args)

    monkeypatch.setattr(RaggedCache, "share_prefix", short)
    outcomes, _ = run(model, tokenizer, requests_for(tokenizer), RowProposer(ContextDrafter(), 3, None), rows=1)
    (failed,) = (outcome for outcome in outcomes.values() if isinstance(outcome, Failure))
    assert "no room" in failed.message
    assert tokens(outcomes) == {index: answer for index, answer in plain.items() if index != failed.index}


def test_an_error_of_the_input_ends_the_run_as_itself(loaded, tiny):  # noqa: F811
    model, tokenizer = loaded(tiny)

    def source():
        yield from list(requests_for(tokenizer))[:2]
        raise EOFError("the archive is cut off")

    with pytest.raises(EOFError, match="cut off"):
        run(model, tokenizer, source(), lookahead=1)


@pytest.mark.parametrize("bug", [RuntimeError("shapes differ"), IndexError("no such id"), KeyError("a bug")])
def test_a_forward_that_fails_for_another_reason_ends_the_run_as_itself(loaded, tiny, monkeypatch, bug):  # noqa: F811
    model, tokenizer = loaded(tiny)

    def forward(**kwargs):
        raise bug

    monkeypatch.setattr(model.inner, "forward", forward)
    with pytest.raises(type(bug), match=str(bug)):
        run(model, tokenizer, requests_for(tokenizer))


def test_records_that_finished_beside_an_error_are_handed_on(loaded, tiny, plain):  # noqa: F811
    """All end in one step; taking in the third answer raises, the two before it are there."""
    model, tokenizer = loaded(tiny)
    seen = []

    class Failing(NoProposer):
        def extend(self, row, token_ids):
            if row.room <= 0:
                seen.append(row.request.index)
                if len(seen) == 3:
                    raise ValueError("a drafter that cannot take this")

    requests = [Request(i, f"r{i}", [5, 6, 7 + i], Sampling(max_new_tokens=3)) for i in range(4)]
    model.resize(4)
    answering = Engine(model, Failing(), tokenizer, frozenset()).run(requests)
    outcomes = [next(answering), next(answering)]
    with pytest.raises(ValueError, match="cannot take"):
        next(answering)
    assert [outcome.index for outcome in outcomes] == seen[:2]
    assert len(seen) == 3


class Broken(NoProposer):
    """Runs out of memory whenever it is asked for drafts."""

    def propose(self, rows, prefill_tokens):
        raise torch.OutOfMemoryError("no room to draft")


def test_a_drafter_that_runs_out_of_memory_costs_drafts_and_is_named(loaded, tiny, plain):  # noqa: F811
    model, tokenizer = loaded(tiny)
    outcomes, engine = run(model, tokenizer, requests_for(tokenizer), Broken())
    assert tokens(outcomes) == plain
    assert any("no room to draft" in note for note in engine.notes)


def test_a_forward_without_memory_shows_its_traceback_in_debugging(loaded, tiny, monkeypatch, caplog):  # noqa: F811
    model, tokenizer = loaded(tiny)

    def forward(**kwargs):
        raise torch.OutOfMemoryError("deep inside")

    monkeypatch.setattr(model.inner, "forward", forward)
    with caplog.at_level(logging.DEBUG, "ragspec"):
        run(model, tokenizer, list(requests_for(tokenizer))[:1])
    assert "in forward" in caplog.text
    assert "deep inside" in caplog.text


def test_an_empty_prompt_fails_alone(loaded, tiny, plain):  # noqa: F811
    model, tokenizer = loaded(tiny)
    requests = [Request(99, "empty", [], Sampling(max_new_tokens=NEW)), *requests_for(tokenizer)]
    outcomes, _ = run(model, tokenizer, requests)
    assert outcomes[99].message == "the prompt has no tokens"
    assert tokens(outcomes) == plain


def test_requests_too_long_for_the_others_wait_for_their_end():
    """A long one goes last and alone, and short ones are not held up by it."""
    room = KvBudget(1, 400)
    long = Request(0, "long", [1] * 300, Sampling(max_new_tokens=10))
    short = [Request(i, str(i), [i] * 50, Sampling(max_new_tokens=10)) for i in range(1, 6)]
    scheduler = Scheduler([long, *short], 4, 4096, room=room, step=10)
    order = []
    while (started := scheduler.admit()) or scheduler.rows():
        order.append(sorted(start.row.request.index for start in started))
        for row in scheduler.rows():
            scheduler.release(row)
    assert order == [[1, 2, 3, 4], [5], [0]]
    assert len(scheduler.places) == 1
    assert scheduler.widen(4) == 4


def test_what_a_preempted_request_held_hides_no_other_that_has_its_prefix():
    passage = list(range(1000, 1300))
    requests = [Request(i, f"r{i}", [*passage, *[i] * 200], Sampling(max_new_tokens=9)) for i in range(2)]
    scheduler = Scheduler(requests, 3, 64, reads_beside=True, beside=lambda needs: 10**6)
    for _ in range(3):
        scheduler.admit()
        for row in scheduler.rows():
            row.computed = len(row.tokens) - 1
    _, youngest = scheduler.preempt_youngest()
    (again,) = scheduler.admit()
    assert again.row is youngest
    assert again.tokens == 300
