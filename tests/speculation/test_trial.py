"""Method auto: each method has its turn, and the one that writes most per second stays."""

import pytest

from ragspec.engine.proposers import Auto, ByRow, NoDrafts
from ragspec.speculation import trial as trial_module
from ragspec.speculation.trial import BLOCK, PAUSE, ROUNDS, Trial
from tests.engine.test_engine import Fixed, answers, ids, loaded, oracle, plain  # noqa: F401


def feed(trial, rates, steps):
    for _ in range(steps):
        trial.observe(rates[trial.current], 1.0)


def test_methods_take_turns_and_the_fastest_stays():
    trial = Trial(["none", "slow", "fast"])
    rates = {"none": 10, "slow": 9, "fast": 11.5}
    turns = []
    for _ in range(BLOCK * 3 * ROUNDS):
        turns.append(trial.current)
        trial.observe(rates[trial.current], 1.0)
    assert turns[: 3 * BLOCK] == ["none"] * BLOCK + ["slow"] * BLOCK + ["fast"] * BLOCK
    assert {name: turns.count(name) for name in turns} == dict.fromkeys(["none", "slow", "fast"], BLOCK * ROUNDS)
    assert trial.chosen == trial.current == "fast"
    assert "fast (decode tokens/s in 48 steps" in trial.note()
    assert "none 10.0" in trial.note()
    feed(trial, {"fast": 1}, 50)
    assert trial.chosen == "fast"
    assert trial.rates()["fast"] == 11.5


def turns_of(trial, rate):
    """Feed a trial until it chooses; return each method's steps. rate: tokens per second by method and its step."""
    taken = {}
    while trial.chosen is None:
        name = trial.current
        step = taken[name] = taken.get(name, 0) + 1
        trial.observe(rate(name, step), 1.0)
    return taken


def test_a_method_that_is_far_behind_has_two_turns():
    trial = Trial(["none", "hopeless", "fast"])
    taken = turns_of(trial, lambda name, step: {"none": 10, "hopeless": 5, "fast": 12}[name])
    assert taken == {"none": BLOCK * ROUNDS, "hopeless": 2 * BLOCK, "fast": BLOCK * ROUNDS}
    assert trial.chosen == "fast"
    assert f"in {BLOCK * (2 * ROUNDS + 2)} steps" in trial.note()
    assert trial.rates()["hopeless"] == 5


def test_where_only_one_is_left_it_is_chosen_at_once():
    trial = Trial(["none", "far ahead", "slow"])
    taken = turns_of(trial, lambda name, step: {"none": 10, "far ahead": 30, "slow": 7}[name])
    assert set(taken.values()) == {2 * BLOCK}
    assert trial.chosen == trial.current == "far ahead"


@pytest.mark.parametrize(
    "slow", [range(1, BLOCK + 1), range(BLOCK + 1, 2 * BLOCK + 1), range(2 * BLOCK + 1, 2 * BLOCK + 2)]
)
def test_one_bad_turn_is_forgiven(slow):
    """A draft model reads prompts in its first turn; anything may interrupt a later one."""
    trial = Trial(["none", "good"])
    taken = turns_of(trial, lambda name, step: 10 if name == "none" else 5 if step in slow else 13)
    assert taken["good"] == BLOCK * ROUNDS
    assert trial.chosen == "good"


def test_the_choice_is_made_anew_when_drafters_have_learnt_and_then_stays():
    trial, length = Trial(["none", "quick", "slow"]), BLOCK * ROUNDS * 3
    feed(trial, {"none": 14, "quick": 16, "slow": 15}, length)
    assert (trial.chosen, trial.current, trial.settled) == ("quick", "quick", False)
    better = {"none": 14, "quick": 15, "slow": 18}
    for _ in range(PAUSE * length):
        assert trial.current == "quick"
        feed(trial, better, 1)
    turns = set()
    for _ in range(length):
        turns.add(trial.current)
        feed(trial, better, 1)
        assert trial.rates()["slow"] == (18 if trial.settled else 15)  # those that the choice in force was made by
    assert turns == {"none", "quick", "slow"}
    assert (trial.chosen, trial.current, trial.settled) == ("slow", "slow", True)
    assert trial.note().endswith("none 14.0, quick 15.0, slow 18.0; at first quick)")
    feed(trial, {"slow": 1}, 10 * length)
    assert trial.chosen == trial.current == "slow"


def test_who_was_out_has_its_turns_in_the_next_trial():
    trial = Trial(["none", "late"])
    turns_of(trial, lambda name, step: {"none": 10, "late": 2}[name])
    assert trial.chosen == "none"
    for _ in range(PAUSE * BLOCK * ROUNDS * 2 + 2 * BLOCK * ROUNDS):
        trial.observe({"none": 10, "late": 30}[trial.current], 1.0)
    assert trial.chosen == "late"
    assert trial.settled


def test_where_nothing_is_clearly_faster_the_plainest_stays():
    trial = Trial(["none", "a", "b"])
    feed(trial, {"none": 100, "a": 101, "b": 80}, BLOCK * 3 * ROUNDS)
    assert trial.chosen == "none"


def test_too_few_steps_are_said_to_be_too_few():
    trial = Trial(["none", "a"])
    assert "too few steps" in trial.note()
    feed(trial, {"none": 100, "a": 101}, 5)
    assert trial.chosen is None
    assert "too few steps to choose by (none 100.0, a 101.0)" in trial.note()


def test_one_method_needs_no_trial():
    assert Trial(["context"]).chosen == "context"


class Unhurried(Trial):
    """All steps take the same: what a method is worth is the tokens it writes."""

    def observe(self, tokens, seconds):
        super().observe(tokens, 1.0)


class Watched(NoDrafts):
    """Drafts nothing, and remembers in which steps it was asked and in which it looked on."""

    def __init__(self, seen, name):
        self.seen, self.name = seen, name

    def propose(self, rows, besides):
        self.seen.append((self.name, "asked"))
        return super().propose(rows, besides)

    def watch(self, rows):
        self.seen.append((self.name, "watched"))


def test_those_whose_turn_it_is_not_look_on_until_the_choice_is_final():
    seen = []
    trial = Unhurried(["a", "b"])
    auto = Auto({name: Watched(seen, name) for name in ("a", "b")}, trial)
    for _ in range(10 * BLOCK * ROUNDS * 2):
        seen.clear()
        whose, settled = trial.current, trial.settled
        auto.propose([], 0)
        other = "b" if whose == "a" else "a"
        assert sorted(seen) == sorted([(whose, "asked")] + [(other, "watched")] * (not settled))
        auto.observe(1, 1.0)
    assert settled


def test_looking_on_is_not_held_against_the_method_whose_turn_it_is(monkeypatch):
    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(trial_module, "time", clock)

    def take(seconds):
        clock.now += seconds

    trial = Trial(["a", "b"])
    for _ in range(BLOCK * ROUNDS * 2):
        started = clock.now
        trial.ask(lambda name: take(1), lambda name: take({"a": 0, "b": 8}[name]))  # b looks on for long
        trial.observe(10, clock.now - started)
    assert trial.rates() == pytest.approx({"a": 10, "b": 10})


def test_auto_answers_as_plain_decoding_and_keeps_the_best(loaded, tiny, plain):  # noqa: F811
    proposers = {
        "none": NoDrafts(),
        "wrong": ByRow(Fixed(lambda tokens, prompt_tokens: [399 - tokens[-1], 1]), 2, None),
        "oracle": ByRow(Fixed(oracle(plain, loaded, tiny)), 7, None),
    }
    trial = Unhurried(list(proposers))
    for _ in range(20):
        assert ids(answers(loaded, tiny, Auto(proposers, trial), rows=3)) == plain
        if trial.settled:
            break
    assert trial.chosen == "oracle"
    assert trial.settled
    outcomes = answers(loaded, tiny, Auto(proposers, trial), rows=3)
    assert ids(outcomes) == plain
    assert all(outcome.spec.accepted == outcome.spec.drafted > 0 for outcome in outcomes.values())
