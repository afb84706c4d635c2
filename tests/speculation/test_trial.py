"""Method auto: one method drafts, others have turns that a small share of the time pays for, the fastest takes over."""

import random
import re
from types import SimpleNamespace

import pytest

from ragspec.engine.proposers.base import AutoProposer, NoProposer, RowProposer
from ragspec.speculation import method_selector as trial_module
from ragspec.speculation.method_selector import SHARE, TURN, TURNS, UNKNOWN, MethodSelector
from tests.engine.test_engine import Fixed, answers, ids, loaded, oracle, plain  # noqa: F401


class Run:
    """Simulated steps. gains: how fast steps of each method that draft are, in plain ones, on average; may change."""

    def __init__(self, trial, gains, seed=0, noise=0.1, rows=8, drafts=1.0, catching_up=0.0):
        self.trial, self.gains, self.rows, self.drafts, self.noise = trial, gains, rows, drafts, noise
        self.catching_up, self.rng = catching_up, random.Random(seed)
        self.plain = self.seconds = 0.0
        self.who = []  # of each step: the method that drafted, "" for none

    def step(self):
        drafts = self.trial.allows(self.rows, 1.0) and self.rng.random() < self.drafts
        name = self.trial.current
        written = self.rows * (1 + self.rng.choice([0, 0, 1, 2])) if drafts else self.rows
        took = (1.75 / self.gains[name] if drafts else 1.0) * self.rng.lognormvariate(0, self.noise)
        if drafts and name not in (next(iter(self.gains)), *self.who[-1:]):  # the others have their turns seldom
            took += self.catching_up
        self.trial.observe(self.rows, 8 * drafts, written, took, 1.0)
        self.plain += written / self.rows
        self.seconds += took
        self.who.append(name if drafts else "")

    def steps(self, count):
        for _ in range(count):
            self.step()
        return self

    @property
    def ratio(self):
        """How fast the run was, in plain steps."""
        return self.plain / self.seconds


def middle(run, seeds=20):
    """Return the median of what `run` returns for each seed."""
    return sorted(run(seed) for seed in range(seeds))[seeds // 2]


def started_ahead(gains, steps, seed, alone=0.15):
    """Return the speed over plain decoding whose steps are started ahead, who drafted, and the share of such steps.

    gains: of steps that draft, over a plain one that is not started ahead, which takes `alone` longer.
    """
    trial, rng, ahead = MethodSelector(list(gains), overlaps=True), random.Random(seed), False
    replaced = seconds = started = 0.0
    who = set()
    for _ in range(steps):
        allowed = trial.allows(8, 1.0, ahead=ahead)
        assert not (allowed and ahead)
        took = (1.0 if ahead else 1.0 + alone) * (14 / 8 / gains[trial.current] if allowed else 1.0)
        took *= rng.lognormvariate(0, 0.05)
        trial.observe(8, 16 * allowed, 14 if allowed else 8, took, 1.0, 0.01 * allowed)
        replaced, seconds, started = replaced + (14 / 8 if allowed else 1.0), seconds + took, started + ahead
        who |= {trial.current} if allowed else set()
        ahead = not allowed and trial.rests()
    return replaced / seconds, who, started / steps


def test_where_all_methods_lose_plain_steps_are_started_ahead_between_turns():
    runs = [started_ahead({"first": 0.9, "other": 0.8, "third": 0.9}, 800, seed) for seed in range(10)]
    assert sorted(ratio for ratio, _, _ in runs)[5] > 0.96
    assert all(who == {"first", "other", "third"} for _, who, _ in runs)
    assert min(started for _, _, started in runs) > 0.9


def test_a_method_that_is_faster_takes_over_where_plain_steps_are_started_ahead():
    runs = [started_ahead({"first": 0.9, "other": 1.6}, 3000, seed) for seed in range(10)]
    assert sorted(ratio for ratio, _, _ in runs)[5] > 1.2


def test_a_run_too_short_to_learn_has_no_turns():
    run = Run(MethodSelector(["first", "other"]), {"first": 1.3, "other": 0.3}).steps(
        int(UNKNOWN * TURN / SHARE / 1.75)
    )
    assert set(run.who) == {"first", ""}
    assert "first 1." in run.trial.note()
    assert "other" not in run.trial.note()


@pytest.mark.parametrize("others", [{"a": 0.3}, {"a": 0.3, "b": 0.9, "c": 1.0}])
@pytest.mark.parametrize("steps", [60, 300, 2000])
def test_worse_methods_cost_little_however_long_the_run(steps, others):
    def kept(seed):
        alone = Run(MethodSelector(["first"]), {"first": 1.4}, seed).steps(steps).ratio
        return (
            Run(MethodSelector(["first", *others]), {"first": 1.4, **others}, seed, catching_up=2.0).steps(steps).ratio
            / alone
        )

    assert middle(kept) > 0.96


@pytest.mark.parametrize("catching_up", [0.0, 2.0])
def test_a_faster_method_takes_over_and_stays(catching_up):
    taken = 0
    for seed in range(20):
        run = Run(
            MethodSelector(["first", "better"]), {"first": 1.1, "better": 1.6}, seed, catching_up=catching_up
        ).steps(1500)
        taken += run.trial.chosen == "better"
        assert run.ratio > 1.1
    assert taken >= 19
    assert "; at first first)" in run.trial.note()
    assert run.trial.about()["method"] == "better"


def test_a_method_that_loses_is_paused_and_another_still_found():
    def kept(seed):
        return Run(MethodSelector(["bad", "good"]), {"bad": 0.6, "good": 1.5}, seed).steps(2500).ratio

    assert middle(kept) > 1.2
    lost = Run(MethodSelector(["bad", "worse"]), {"bad": 0.8, "worse": 0.5}).steps(1500)
    assert lost.ratio > 0.95
    assert lost.trial.about()["guard"]["pauses"] >= 2


def test_what_is_clearly_worse_has_no_more_turns_and_is_not_asked_to_look_on():
    trial = MethodSelector(["first", "hopeless"])
    run = Run(trial, {"first": 1.3, "hopeless": 0.4}).steps(6000)
    assert trial.candidates == ["first"]
    assert TURNS <= run.who.count("hopeless") <= TURNS * TURN


def test_between_methods_that_are_as_fast_it_does_not_matter_who_drafts():
    for seed in range(20):
        assert Run(MethodSelector(["first", "same"]), {"first": 1.4, "same": 1.4}, seed).steps(2000).ratio > 1.35


def test_a_method_that_seldom_drafts_is_not_taken_for_fast_by_its_few_drafts():
    """Where it does not draft, the one that would have done better."""
    trial = MethodSelector(["often", "seldom"])
    rng = random.Random(4)
    for _ in range(4000):
        drafts = trial.allows(8, 1.0) and (trial.current == "often" or rng.random() < 0.2)
        took = rng.lognormvariate(0, 0.1) / (1.6 if drafts and trial.current == "seldom" else 1.4 if drafts else 1.0)
        trial.observe(8, 8 * drafts, 8, took, 1.0)
    assert trial.chosen == "often"


def test_a_turn_goes_on_after_steps_that_compute_prompts():
    trial = MethodSelector(["first", "other"])
    run = Run(trial, {"first": 1.2, "other": 1.0})
    while trial.current != "other":
        run.step()
    for _ in range(TURN - 1):
        assert trial.allows(8, 1.0, mixed=True)
        assert trial.current == "first", "nothing is learnt from such a step"
        run.step()
        assert trial.current == "other"


def test_one_method_is_judged_as_any():
    trial = MethodSelector(["context"])
    assert trial.chosen == "context"
    assert Run(trial, {"context": 0.6}).steps(1500).ratio > 0.94
    assert "method auto: context (compared with plain decoding: context 0." in trial.note()
    assert re.search(r"context 0\.\d\dx \(\d\.\d\d to \d\.\d\d\) in \d+ steps", trial.note())


class Clock:
    """Stands still until it is moved on."""

    now = 0.0

    def perf_counter(self):
        return self.now


def test_looking_on_is_not_held_against_the_method_that_drafts(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(trial_module, "time", clock)

    def take(seconds):
        clock.now += seconds

    trial = MethodSelector(["a", "b"])
    for _ in range(50):
        started, drafts = clock.now, trial.allows(1, 1.0)
        if drafts:
            trial.ask(lambda name: take(1), lambda name: take({"a": 0, "b": 8}[name]))  # b looks on for long
        else:
            take(1)
        trial.observe(1, drafts, 2 if drafts else 1, clock.now - started, 1.0)
    assert trial.about()["trial"]["a"] == pytest.approx(2, rel=0.1)


@pytest.fixture
def asked_in_vain(monkeypatch):
    """Return a trial that has asked so many times: for 0.25 s of each step that takes one more, others looking on."""
    clock = Clock()
    monkeypatch.setattr(trial_module, "time", clock)

    def take(seconds):
        clock.now += seconds

    def ask(steps, mixed):
        trial = MethodSelector(["a", "b"])
        for _ in range(steps):
            started = clock.now
            if trial.allows(1, 1.0, mixed=mixed):
                trial.ask(lambda name: take(0.25), lambda name: take(8))
            asking = clock.now - started
            take(1)
            if mixed:
                trial.observe_beside(1, 0, clock.now - started, 1.0, asking)
            else:
                trial.observe(1, 0, 1, clock.now - started, 1.0, asking)
        return trial

    return ask


def test_what_asking_in_vain_takes_counts_against_a_method_and_looking_on_does_not(asked_in_vain):
    trial = asked_in_vain(40, mixed=False)
    assert trial.about()["trial"]["a"] == pytest.approx(0.8)
    assert trial.plain.seconds(1, 1.0) == 1.0


def test_looking_on_in_a_step_that_computes_prompts_is_not_counted_as_asking(asked_in_vain):
    assert asked_in_vain(5, mixed=True).about()["guard"]["ratio_asked_beside"] == 0.8


def test_an_interruption_while_asking_is_no_sign_of_fast_plain_steps():
    trial = MethodSelector(["a"])
    for seconds, asking in [(1.1, 0.1), (10.0, 9.0), (1.1, 0.1)]:
        trial.allows(1, 1.0, mixed=True)
        trial.observe(1, 0, 1, seconds, 1.0, asking)
    assert trial.plain.seconds(1, 1.0) == pytest.approx(1.0)


def test_looking_on_in_a_step_that_computes_prompts_is_not_taken_off_a_later_one(monkeypatch):
    clock = iter(range(0, 10**6, 8)).__next__  # whoever looks on takes eight seconds
    monkeypatch.setattr(trial_module, "time", SimpleNamespace(perf_counter=clock))
    trial = MethodSelector(["a", "b"])
    for _ in range(4):
        trial.allows(8, 1.0, mixed=True)
        trial.ask(lambda name: None, lambda name: None)
        assert not trial.allows(8, 1.0)
        trial.observe(8, 0, 8, 10.0, 1.0)
        if trial.plain.seconds(8, 1.0) is not None:
            break
    assert trial.plain.seconds(8, 1.0) == 10.0


def test_a_step_after_prompts_is_not_booked_as_another_methods_turn():
    """In vLLM it is known only afterwards that a step computed prompts."""
    trial = MethodSelector(["first", "other"])
    run = Run(trial, {"first": 1.2, "other": 1.0})
    while trial.current != "other" or "other" not in trial.note():
        run.step()
    steps = lambda: re.search(r"other .* in (\d+) steps", trial.note())[1]  # noqa: E731
    before = steps()
    for _ in range(3 * TURN):
        trial.allows(8, 1.0, mixed=True)
        trial.observe(8, 8, 8, 1.0, 1.0)
    assert steps() == before
    run.step()
    assert trial.current == "other"


@pytest.mark.parametrize("slow", [30, 300])
def test_a_step_that_was_interrupted_costs_a_method_no_more_than_a_turn(slow):
    for seed in range(10):
        run = Run(MethodSelector(["first", "better"]), {"first": 1.05, "better": 1.5}, seed)
        while run.trial.current != "better":
            run.step()
        run.trial.observe(8, 8, 8, slow, 1.0)
        assert run.steps(1500).trial.chosen == "better"


class Watched(NoProposer):
    """Drafts nothing, and remembers in which steps it was asked and in which it looked on."""

    def __init__(self, seen, name):
        self.seen, self.name = seen, name

    def propose(self, rows, prefill_tokens):
        self.seen.append((self.name, "asked"))
        return super().propose(rows, prefill_tokens)

    def watch(self, rows):
        self.seen.append((self.name, "watched"))


def test_those_who_may_still_have_a_turn_look_on():
    seen = []
    trial = MethodSelector(["a", "b"])
    auto = AutoProposer({name: Watched(seen, name) for name in ("a", "b")}, trial)
    auto.propose([], 0)
    assert sorted(seen) == [("a", "asked"), ("b", "watched")]
    Run(trial, {"a": 1.4, "b": 0.3}).steps(4000)
    seen.clear()
    auto.propose([], 0)
    assert seen == [("a", "asked")]


def test_auto_answers_as_plain_decoding_whoever_drafts(loaded, tiny, plain, monkeypatch):  # noqa: F811
    monkeypatch.setattr(trial_module, "SHARE", 0.5)  # many turns
    proposers = {
        "wrong": RowProposer(Fixed(lambda tokens, prompt_tokens: [399 - tokens[-1], 1]), 2, None),
        "oracle": RowProposer(Fixed(oracle(plain, loaded, tiny)), 7, None),
    }
    trial = MethodSelector(list(proposers))
    for _ in range(20):
        outcomes = answers(loaded, tiny, AutoProposer(proposers, trial), rows=3, trial=trial)
        assert ids(outcomes) == plain
        if trial.chosen == "oracle":
            break
    assert trial.chosen == "oracle"
    assert sum(outcome.spec.accepted for outcome in outcomes.values()) > 0
