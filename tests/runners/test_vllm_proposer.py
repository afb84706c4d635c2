"""Our drafters as vLLM calls them: a scripted scheduler moves, preempts and fills rows as vLLM does."""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from ragspec.records import Request, Sampling
from ragspec.runners.vllm import proposer as proposer_module
from ragspec.runners.vllm.proposer import Proposer, least_acceptance
from ragspec.runners.vllm.stream import drafted_in
from ragspec.speculation.drafters.calibration import Calibration
from ragspec.speculation.drafters.prompt_lookup import PromptLookup
from ragspec.speculation.step_cost import FittedCost

LIMIT = 6
LONGEST = 400
VOCABULARY = 1000


def make(method="context", num_tokens=None, isolate=False, reach=LONGEST, native=True):
    settings = {"method": method, "num_tokens": num_tokens, "drafting": {"isolate": isolate, "native": native}}
    proposer = Proposer(
        SimpleNamespace(
            additional_config={"ragspec": settings},
            speculative_config=SimpleNamespace(num_speculative_tokens=LIMIT),
            model_config=SimpleNamespace(max_model_len=reach, get_vocab_size=lambda: VOCABULARY),
        )
    )
    proposer.follow(SimpleNamespace(requests={}, input_batch=SimpleNamespace(req_ids=[], num_logprobs={})))
    return proposer


def place(proposer, *prompts, **told):
    """Put requests into the batch, one a slot, named by its number."""
    runner = proposer.model_runner
    runner.input_batch.req_ids = [str(slot) for slot in range(len(prompts))]
    runner.requests |= {str(slot): request(prompt, **told) for slot, prompt in enumerate(prompts)}


def request(prompt, passages=(), drafts=True):
    """Return a request as vLLM's model runner keeps it."""
    told = {"ragspec": {"passages": [list(span) for span in passages], "drafts": drafts}}
    params = SimpleNamespace(extra_args=told, max_tokens=None, structured_outputs=None)
    return SimpleNamespace(prompt_token_ids=list(prompt), sampling_params=params)


@dataclass(eq=False)
class Job:
    """A record whose answer is known: what the target will write."""

    prompt: list
    answer: list
    written: int = 0
    waiting: int = 0  # steps until its prompt is complete
    drafted: int = 0
    accepted: int = 0
    emissions: list = field(default_factory=list)

    @property
    def name(self):
        return str(id(self))

    @property
    def tokens(self):
        return self.prompt + self.answer[: self.written]


class Scheduler:
    """vLLM's side: a persistent batch of slots, whose rows come, go, move and are told late."""

    def __init__(self, proposer, jobs, slots=4, seed=0, silent=0.0, undrafted=()):
        self.random = random.Random(seed)
        self.proposer, self.line, self.slots = proposer, list(jobs), slots
        self.batch, self.silent = [], silent
        self.moved = self.preempted = 0
        self.done, self.undrafted = [], undrafted
        self.seen = {}  # job -> what the proposer knew at its end
        self.check = lambda job, draft: None

    def run(self):
        for job in self.line:
            told = request(job.prompt, [(0, len(job.prompt))], drafts=job not in self.undrafted)
            self.proposer.model_runner.requests[job.name] = told
        drafts = {}
        while self.line or self.batch:
            self._change_rows(drafts)
            sampled = [self._write(job, drafts.pop(job, [])) for job in self.batch]
            asked = self.random.random() >= self.silent  # vLLM does not ask where rows are near the model's length
            drafts = self._ask(sampled) if asked else {}
            for job in [job for job in self.batch if job.written >= len(job.answer)]:
                self.batch[self.batch.index(job)] = self.batch[-1]  # condensed: the last row takes the free slot
                self.batch.pop()
                self.seen[job] = self.proposer.finish(job.name)
                self.done.append(job)
        return self

    def _change_rows(self, drafts):
        if len(self.batch) > 1 and self.random.random() < 0.3:
            self.random.shuffle(self.batch)
            self.moved += 1
        if len(self.batch) > 1 and self.random.random() < 0.4:
            job = self.batch.pop(self.random.randrange(len(self.batch)))
            drafts.pop(job, None)
            self.line.insert(0, job)
            self.preempted += 1
        while self.line and len(self.batch) < self.slots:
            job = self.line.pop(0)
            job.waiting = self.random.randrange(3)
            self.batch.append(job)

    def _write(self, job, draft):
        if job.waiting:
            job.waiting -= 1
            return []
        right = 0
        rest = job.answer[job.written :]
        while right < len(draft) and right < len(rest) - 1 and draft[right] == rest[right]:
            right += 1
        job.drafted, job.accepted = job.drafted + len(draft), job.accepted + right
        job.written += right + 1
        job.emissions.append(right + 1)
        return rest[: right + 1]

    def names(self):
        return [job.name for job in self.batch]

    def _ask(self, sampled):
        lengths = np.zeros(self.slots, dtype=np.int32)
        tokens = np.full((self.slots, LONGEST), -1, dtype=np.int32)
        for slot, job in enumerate(self.batch):
            lengths[slot] = len(job.tokens)
            tokens[slot, : len(job.tokens)] = job.tokens
        self.proposer.model_runner.input_batch.req_ids = self.names()
        if self.random.random() < 0.5:
            self.proposer.settle()
        proposed = self.proposer.propose(sampled, lengths, tokens)
        assert len(proposed) == len(sampled)
        for job, draft, wrote in zip(self.batch, proposed, sampled, strict=True):
            assert len(draft) <= LIMIT
            assert wrote or not draft
            self.check(job, draft)
        return dict(zip(self.batch, proposed, strict=True))


def asked_for(job):
    """Return the request that a job answers."""
    return Request(0, "", job.prompt, Sampling(), ((0, len(job.prompt)),))


def jobs(count, seed=0):
    """Prompts of which the answers copy pieces; some records begin alike, and two are the same."""
    chance = random.Random(seed)
    head = [chance.randrange(50) for _ in range(20)]
    made = []
    for number in range(count):
        prompt = (head if number % 2 else []) + [chance.randrange(50) for _ in range(60)]
        answer = []
        while len(answer) < 30:
            start = chance.randrange(len(prompt) - 12)
            answer += [*prompt[start : start + chance.randrange(3, 12)], chance.randrange(50)]
        made.append(Job(prompt, answer[: chance.randrange(2, 30)]))
    made.append(Job(made[0].prompt, made[0].answer))
    return made


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("silent", [0.0, 0.2])
def test_every_row_is_known_by_its_request(seed, silent):
    """Whatever moves, a row's draft is that of its own record: prompt lookup's, made from its tokens alone."""
    with pytest.MonkeyPatch.context() as patch:  # alone, it would be vLLM's own
        patch.setattr(proposer_module, "drafters_on", lambda *given: {"prompt_lookup": PromptLookup()})
        proposer = make("prompt_lookup", num_tokens=LIMIT)
    scheduler = Scheduler(proposer, jobs(12, seed), seed=seed, silent=silent)
    compared = 0

    def check(job, draft):
        nonlocal compared
        fresh = PromptLookup().open(job.prompt)
        fresh.extend(job.tokens[len(job.prompt) :])
        expected = fresh.propose(LIMIT).token_ids
        shorter = min(len(draft), len(expected))  # how far it goes is a matter of calibration
        assert draft[:shorter] == expected[:shorter]
        compared += shorter

    scheduler.check = check
    scheduler.run()
    assert len(scheduler.done) == 13
    assert compared > 100
    assert min(scheduler.moved, scheduler.preempted) > 0
    for job, known in scheduler.seen.items():
        if known is None:
            assert silent  # it wrote its last token, or all, unseen
            continue
        assert known.prompt_tokens == len(job.prompt)
        if not silent:
            assert known.length == len(job.prompt) + len(job.answer)
            guessed, _ = drafted_in(asked_for(job), known.accepted, job.answer)
            assert guessed == b"".join(b"\1" * (n - 1) + b"\0" for n in job.emissions)
    assert not proposer.known


def test_a_row_taken_for_another_would_be_noticed(monkeypatch):
    def mixed_up(scheduler):
        names = [job.name for job in scheduler.batch]
        return names[1:] + names[:1]

    monkeypatch.setattr(Scheduler, "names", mixed_up)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        test_every_row_is_known_by_its_request(1, 0.0)


def test_without_a_model_runner_nothing_is_drafted():
    proposer = make()
    proposer.follow(None)
    assert proposer.propose([[5], [6]], np.array([1, 1]), np.zeros((2, 4), dtype=np.int32)) == [[], []]


def test_drafts_are_accepted_and_copies_cited():
    proposer = make("context", num_tokens=LIMIT)
    scheduler = Scheduler(proposer, jobs(20)).run()
    drafted, accepted = (sum(getattr(job, name) for job in scheduler.done) for name in ("drafted", "accepted"))
    assert accepted > 60
    assert accepted / drafted > 0.3
    cited = 0
    for job, known in scheduler.seen.items():
        for run in drafted_in(asked_for(job), known.accepted, job.answer)[1]:
            length = run.end - run.start
            assert job.answer[run.start : run.end] == job.prompt[run.source : run.source + length]
            cited += length
    assert cited > 60


def test_the_pool_holds_the_passages_of_other_records_unless_isolated():
    text = list(range(40))
    for isolate, found in ((False, True), (True, False)):
        proposer = make("context", num_tokens=LIMIT, isolate=isolate)
        first, second = [*range(60, 70), *text], [*range(80, 95)]
        place(proposer, first, second)
        proposer.model_runner.requests["0"] = request(first, [(10, 50)])
        tokens = np.full((2, LONGEST), -1, dtype=np.int32)
        for slot, prompt in enumerate((first, second)):
            tokens[slot, : len(prompt) + 1] = [*prompt, 5]
        drafts = proposer.propose([[5], [5]], np.array([len(first) + 1, len(second) + 1]), tokens)
        assert drafts[0][:2] == [6, 7]
        assert (drafts[1][:1] == [6]) == found


def test_drafts_end_at_the_models_length():
    proposer = make("context", num_tokens=LIMIT, reach=54)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 5 + [1, 2]
    place(proposer, prompt)
    tokens = np.zeros((1, LONGEST), dtype=np.int32)
    for length in range(48, 55):
        tokens[0, :length] = [*prompt, 3, 4, 5, 6, 7, 8, 9][:length]
        (draft,) = proposer.propose([[int(tokens[0, length - 1])]], np.array([length]), tokens)
        assert length + len(draft) < 54 or not draft
        assert draft or length > 51


def test_drafts_are_as_long_as_log_probabilities_of_all_rows_have_room(monkeypatch):
    monkeypatch.setattr(proposer_module, "LOGPROBS_BYTES", 8 * proposer_module.NUMBER_BYTES * VOCABULARY)
    passage = list(range(40))
    found = {False: set(), True: set()}  # (rows, longest draft) of steps
    for asked in ({}, {"0": 2}):
        proposer = make(num_tokens=LIMIT)
        proposer.model_runner.input_batch.num_logprobs = asked
        jobs = [Job([*passage, 900 + at], passage[5:30]) for at in range(4)]
        scheduler = Scheduler(proposer, jobs)
        scheduler.check = lambda job, draft, scheduler=scheduler, asked=asked: found[bool(asked)].add(
            (len(scheduler.batch), len(draft))
        )
        scheduler.run()
    assert max(draft for rows, draft in found[False] if rows == 4) == LIMIT
    assert max(draft for rows, draft in found[True] if rows == 4) == 1
    assert all(rows * (1 + draft) <= 8 for rows, draft in found[True])


def test_auto_begins_with_the_passages_and_tries_the_other(monkeypatch):
    monkeypatch.setattr("ragspec.runners.vllm.proposer.time", SimpleNamespace(perf_counter=iter(range(10**6)).__next__))
    monkeypatch.setattr("ragspec.speculation.method_selector.time", SimpleNamespace(perf_counter=lambda: 0.0))
    proposer = make("auto", num_tokens=LIMIT)
    assert proposer.trial.chosen == "context"
    scheduler = Scheduler(proposer, jobs(300), slots=2).run()
    assert set(proposer.about()["trial"]) == {"prompt_lookup", "context"}
    assert len(scheduler.done) == 301
    late = [known for job, known in scheduler.seen.items() if known is not None][-1]
    assert set(late.drafters) == set(proposer.trial.candidates)


def test_the_trial_is_told_what_asking_took(monkeypatch):
    monkeypatch.setattr("ragspec.runners.vllm.proposer.time", SimpleNamespace(perf_counter=iter(range(10**6)).__next__))
    proposer, steps = make("context"), []
    observe = proposer.trial.observe
    monkeypatch.setattr(proposer.trial, "observe", lambda *step: (steps.append(step), observe(*step)))
    Scheduler(proposer, jobs(30), slots=2).run()
    asking = [asking_s for *_, asking_s in steps]
    assert 0 in asking, "nobody is asked in a plain step"
    assert asking.count(1) > len(asking) / 2
    assert all(seconds > asking_s for _, _, _, seconds, _, asking_s in steps)


@pytest.mark.parametrize("method", ["context", "auto"])
def test_a_step_of_records_that_nobody_follows_is_not_drafted_for(method):
    proposer = make(method)
    nobody = np.zeros(0, dtype=np.int64), np.zeros((0, LONGEST), dtype=np.int64)
    assert proposer.propose([], *nobody) == []
    assert proposer.drafting_s > 0


def test_the_line_is_found_in_noise():
    chance, cost = random.Random(0), FittedCost()
    for _ in range(200):
        rows, drafts = chance.randrange(8, 17), chance.randrange(24)
        seconds = (0.1 + 0.005 * rows + 0.003 * drafts) * chance.uniform(0.9, 1.1)
        cost.observe(rows + drafts, rows, seconds * (5 if chance.random() < 0.03 else 1))
    assert cost(16, 12) == pytest.approx(0.172, rel=0.12)
    assert cost(32, 16) == pytest.approx(0.228, rel=0.12)
    flat = FittedCost()
    for _ in range(100):
        flat.observe(chance.randrange(8, 40), 8, 0.02)
    assert flat.marginal() < 0.0001


def test_rows_that_come_and_go_do_not_make_drafts_look_dear():
    chance, cost = random.Random(0), FittedCost()
    for _ in range(100):
        rows = chance.randrange(4, 17)
        cost.observe(rows, rows, 0.03 + 0.005 * rows)
    assert cost(8, 8) == pytest.approx(0.07, rel=0.05)
    assert cost(17, 16) - cost(16, 16) < 0.004
    for _ in range(100):
        rows, drafts = chance.randrange(4, 17), chance.randrange(24)
        cost.observe(rows + drafts, rows, 0.03 + 0.005 * rows + 0.002 * drafts)
    assert cost.marginal() == pytest.approx(0.002, rel=0.1)


@pytest.mark.parametrize("method", ["context", "auto"])
def test_chains_are_followed_no_further_than_can_pay(monkeypatch, method):
    """The same drafts of fewer guesses, where a token costs as much as a row; who looks on makes fewer too."""
    guesses = []
    estimate = Calibration.estimate

    def counted(calibration, features):
        guesses.append(features)
        return estimate(calibration, features)

    monkeypatch.setattr(Calibration, "estimate", counted)
    text = list(range(40))
    tokens = np.full((16, LONGEST), -1, dtype=np.int32)
    lengths = np.array([43 + row % 4 for row in range(16)])
    for row, length in enumerate(lengths):
        tokens[row, :length] = [*text, *range(100 + row, 102 + row), *range(10)][:length]
    made = []
    for least in (least_acceptance, lambda rows, cost, reach: 0.0):
        monkeypatch.setattr("ragspec.runners.vllm.proposer.least_acceptance", least)
        drafting = make(method, native=False)  # in C++ guesses cannot be counted
        for count in range(1, 60):
            drafting.cost.observe(2 * count, count, 0.01 * (8 + 2 * count))
        guesses.clear()
        place(drafting, *(tokens[row, : length - 1].tolist() for row, length in enumerate(lengths)))
        sampled = [[int(tokens[row, length - 1])] for row, length in enumerate(lengths)]
        made.append((drafting.propose(sampled, lengths, tokens), len(guesses)))
    (drafts, fewer), (unbounded, more) = made
    assert drafts == unbounded
    assert sum(map(len, drafts)) > 5
    assert fewer < 0.8 * more


def test_before_any_step_a_token_more_is_cheap_beside_a_step():
    cost = FittedCost()
    assert cost(1, 1) < cost(4, 1) < 1.5 * cost(1, 1)
    cost.observe(4, 1, 0.05)
    assert cost(4, 1) == pytest.approx(0.05)
    assert 0.05 < cost(8, 1) < 0.07


@pytest.mark.parametrize("method", ["context", "auto"])
def test_records_that_want_no_drafts_get_none_and_the_others_theirs(method):
    made = jobs(12)[:12]
    scheduler = Scheduler(make(method, num_tokens=LIMIT), made, undrafted=made[::3]).run()
    assert scheduler.preempted > 0
    assert {job.drafted for job in made[::3]} == {0}
    assert sum(job.accepted for job in scheduler.done if job not in made[::3]) > 0
