"""Never slower than off: what a guard decides, on simulated steps."""

import random

import pytest

from ragspec.speculation.speculation_guard import (
    ELSEWHERE,
    EVERY,
    PAUSE,
    TRIED,
    TRUSTED,
    WITNESSES,
    PlainSteps,
    SpeculationGuard,
)


def plain_s(rows):
    """Return what a plain step of `rows` rows takes."""
    return 0.5 + rows / 16


def simulate(seed, gain, steps, rows=lambda step: 8, noise=0.15, drafts=1.0, expected=plain_s, asking=0.0):
    """Return tokens per second with a guard, over those of plain decoding, and the guard.

    gain: of a step that drafts, on average. rows: of each step. drafts: share of the steps asked in which there are
    any. expected: of plain steps, by rows. asking: what it takes to ask for drafts, in plain steps.
    """
    rng, guard = random.Random(seed), SpeculationGuard()
    plain = seconds = 0.0
    for step in range(steps):
        count = rows(step)
        asked = guard.allows(count, expected(count))
        drafted = asked and rng.random() < drafts
        written = count * (1 + rng.choice([0, 0, 1, 2])) if drafted else count
        mean = plain_s(count) * (1.75 / gain if drafted else 1.0)
        asking_s = asked * asking * plain_s(count)
        took = mean * rng.lognormvariate(0, noise) + asking_s
        guard.observe(count, 3 * drafted * count, written, took, expected(count), asking_s)
        plain += written / count * plain_s(count)
        seconds += took
    return plain / seconds, guard


def drained(step):
    """Rows of a run whose records end one after the other, again and again."""
    return max(1, 16 - step % 40 // 2)


@pytest.mark.parametrize("gain", [0.5, 0.8, 0.9])
def test_drafts_that_lose_cost_little(gain):
    ratios = sorted(simulate(seed, gain, 1500)[0] for seed in range(20))
    assert ratios[10] > max(0.965, gain)
    assert ratios[1] > 0.94
    _, guard = simulate(1, gain, 1500)
    assert guard.about()["pauses"] >= 2


@pytest.mark.parametrize(("gain", "paused"), [(1.1, 0.1), (1.5, 0.01), (2.5, 0.0)])
def test_drafts_that_win_are_left_alone(gain, paused):
    runs = [simulate(seed, gain, 1500) for seed in range(20)]
    ratios = sorted(ratio for ratio, _ in runs)
    assert ratios[10] > 0.97 * gain
    assert sum(guard.about()["paused_steps"] for _, guard in runs) <= paused * 20 * 1500


def test_drafts_neither_here_nor_there_do_no_harm():
    ratios = sorted(simulate(seed, 1.0, 1000)[0] for seed in range(20))
    assert 0.97 < ratios[10] < 1.02


@pytest.mark.parametrize(("gain", "least"), [(0.7, 0.87), (1.5, 1.40)])
def test_what_some_rows_take_tells_of_others(gain, least):
    """A short run, in which every number of rows comes a few times."""
    ratios = sorted(simulate(seed, gain, 120, drained)[0] for seed in range(20))
    assert ratios[10] > least
    asked = [simulate(seed, 1.5, 120, drained)[1].about()["plain_steps"] for seed in range(20)]
    assert max(asked) <= 12, "one for each number of rows were sixteen, twice"


def test_expectations_that_are_wrong_for_some_rows_are_put_right():
    """Drafts lose, and plain steps of few rows are taken for twice as long as they are."""
    ratios = sorted(
        simulate(seed, 0.8, 1500, drained, expected=lambda rows: plain_s(rows) * (2 if rows < 8 else 1))[0]
        for seed in range(20)
    )
    assert ratios[10] > 0.93


def test_plain_steps_are_asked_for_only_where_there_are_none():
    _, often = simulate(3, 1.2, 800, drafts=1.0)
    _, seldom = simulate(3, 1.2, 800, drafts=0.5)
    assert seldom.about()["plain_steps"] == 2, "the very first ones"
    assert 2 <= often.about()["plain_steps"] <= 800 / EVERY + 1


def test_asking_in_vain_is_given_up():
    ratios = sorted(simulate(seed, 1.0, 1000, lambda step: 64, drafts=0.0, asking=0.05)[0] for seed in range(20))
    assert ratios[10] > 0.98
    assert simulate(1, 1.0, 1000, lambda step: 64, drafts=0.0, asking=0.0025)[1].about()["pauses"] == 0, "a trifle"


@pytest.mark.parametrize("drafts", [0.1, 0.5])
def test_asking_goes_on_where_what_comes_of_it_pays(drafts):
    runs = [simulate(seed, 1.5, 1000, lambda step: 64, drafts=drafts, asking=0.02) for seed in range(20)]
    ratios = sorted(ratio for ratio, _ in runs)
    without = sorted(simulate(seed, 1.5, 1000, lambda step: 64, drafts=drafts)[0] for seed in range(20))
    assert ratios[10] > 0.97 * without[10]


def test_few_rows_are_asked_for_longer():
    guard = known(1, 1.0)
    asked = 0
    while guard.allows(1, 1.0):
        guard.observe(1, 0, 1, 1.1, 1.0, 0.1)
        asked += 1
        assert asked <= WITNESSES
    assert guard.about()["pauses"] == 1
    assert guard.about()["ratio_asked"] == pytest.approx(1 / 1.1, abs=0.001)


def test_what_asking_takes_is_no_part_of_a_plain_step():
    guard = known(4, 1.0)
    for _ in range(20):
        guard.observe(4, 0, 4, 1.5, 1.0, 0.5)
    assert guard.plain.seconds(4, 1.0) == pytest.approx(1.0)


def beside(guard, steps, accepted=0, rows=64, asking=0.02):
    """Run steps that compute prompts too and take two seconds; return whether each was asked for drafts."""
    asked = []
    for _ in range(steps):
        asked.append(guard.allows(rows, 1.0, mixed=True))
        asking_s = asked[-1] * asking
        guard.observe_beside(rows, accepted * asked[-1], 2.0 + asking_s, 1.0, asking_s)
    return asked


def test_asking_in_vain_beside_prompts_is_paused_there_alone():
    guard = known(64, 1.0)
    asked = beside(guard, TRIED + PAUSE + 1)
    assert asked == [True] * TRIED + [False] * PAUSE + [True]
    for _ in range(EVERY):  # in the meantime, others win
        if guard.allows(64, 1.0):
            guard.observe(64, 64, 96, 1.0, 1.0, 0.02)
    about = guard.about()
    assert not guard.pausing
    assert (about["pauses"], about["paused_steps"]) == (1, PAUSE)
    assert about["plain_steps"] == 0
    assert about["ratio_asked_beside"] == pytest.approx(2 / 2.02, abs=0.001)
    assert about["ratio_asked"] > 1.4


def test_what_drafts_win_beside_prompts_is_what_plain_steps_would_have_taken():
    """A 64th of a plain step, of one second, for each token."""
    assert all(beside(known(64, 1.0), 200, accepted=2))
    assert not all(beside(known(64, 1.0), 200, accepted=2, asking=2 * 0.04))
    assert all(beside(known(64, 1.0), 200, accepted=0, asking=0.005)), "a trifle"


def test_where_no_plain_step_is_known_none_takes_longer_than_one_that_computes_prompts():
    assert all(beside(SpeculationGuard(), 200, accepted=1, asking=0.03))
    assert not all(beside(SpeculationGuard(), 200, accepted=1, asking=0.05))


def test_a_pause_of_all_steps_holds_beside_prompts_too():
    guard = known(8, 1.0)
    while guard.allows(8, 1.0):
        guard.observe(8, 8, 8, 2.0, 1.0, 0.02)
    assert beside(guard, 20, rows=8) == [False] * 20
    assert guard.about()["ratio_asked_beside"] is None


def test_an_interruption_beside_prompts_pauses_nothing():
    guard = known(64, 1.0)
    beside(guard, 20, accepted=3)
    beside(guard, 1, asking=100.0)
    assert all(beside(guard, 100, accepted=3))
    assert guard.about()["ratio_asked_beside"] > 1


def test_what_is_made_up_for_after_a_pause_is_not_held_against_asking():
    def asked(made_up_s):
        guard, left = known(64, 1.0), 0
        while not guard.pausing:
            guard.observe(64, 0, 64, 1.02 * guard.allows(64, 1.0), 1.0, 0.02)
        while not guard.allows(64, 1.0):
            guard.observe(64, 0, 64, 1.0, 1.0)
        guard.observe(64, 0, 64, 1.02 + made_up_s, 1.0, 0.02 + made_up_s)
        while guard.allows(64, 1.0):
            guard.observe(64, 0, 64, 1.02, 1.0, 0.02)
            left += 1
        return left

    assert asked(0.5) == asked(0.0) == TRIED


def test_another_number_of_rows_has_a_plain_step_of_its_own_in_time():
    guard = known(16, 1.0)
    assert guard.allows(16, 1.0)
    assert guard.allows(14, 1.0)
    for _ in range(ELSEWHERE):
        assert guard.allows(8, 1.0)
        guard.observe(8, 8, 16, 1.0, 1.0)
    assert guard.allows(8, 1.0, mixed=True), "nothing is learnt from such a step"
    for _ in range(TRUSTED):
        assert not guard.allows(8, 1.0), "nobody knows what eight rows take"
        guard.observe(8, 0, 8, 1.0, 1.0)
    assert guard.allows(8, 1.0)


def test_a_plain_step_that_was_interrupted_hides_no_loss_of_other_rows():
    guard = known(8, 1.0)
    guard.observe(4, 0, 4, 5.0, 1.0)  # the only one of four rows
    for _ in range(30):
        if guard.allows(4, 1.0):
            guard.observe(4, 8, 4, 1.5, 1.0)
    assert guard.about()["pauses"] == 1


def known(rows, seconds):
    guard = SpeculationGuard()
    for _ in range(2):
        guard.observe(rows, 0, rows, seconds, 1.0)
    return guard


def test_a_first_plain_step_that_was_interrupted_is_forgotten():
    guard = SpeculationGuard()
    for seconds in (30.0, 1.0):
        assert not guard.allows(4, 1.0)
        guard.observe(4, 0, 4, seconds, 1.0)
    while guard.allows(4, 1.0):  # a loss, if a step takes one second; a great gain, if it takes thirty
        guard.observe(4, 8, 6, 2.0, 1.0)
    assert guard.about()["pauses"] == 1


def test_a_large_loss_is_not_taken_for_an_interruption():
    guard = known(4, 1.0)
    for _ in range(100):
        drafted = guard.allows(4, 1.0)
        guard.observe(4, 40 * drafted, 14 if drafted else 4, 4.3 if drafted else 1.0, 1.0)
    assert guard.about()["pauses"] >= 1


def test_the_step_that_catches_up_after_a_pause_is_not_judged_and_winning_ends_long_pauses():
    guard = known(4, 1.0)
    lost = won = 0
    for _ in range(3000):
        drafted = guard.allows(4, 1.0)
        pauses = guard.about()["pauses"]
        if drafted and pauses < 2:
            lost += 1
            guard.observe(4, 8, 4, 1.5, 1.0)
        elif drafted:
            won += 1
            guard.observe(4, 8, 8, 9.0 if won == 1 else 1.2, 1.0)
        else:
            guard.observe(4, 0, 4, 1.0, 1.0)
    assert guard.about()["pauses"] == 2
    assert lost < 15
    assert won > 2000


def test_one_step_that_was_interrupted_pauses_nothing():
    guard = SpeculationGuard()
    for at in range(200):
        drafted = guard.allows(4, 1.0)
        guard.observe(4, 8 * drafted, 8 if drafted else 4, 50.0 if at == 100 else 1.3 if drafted else 1.0, 1.0)
    assert guard.about()["pauses"] == 0


def overlapped(gain, steps=1500, seed=5, alone=0.15, beside=0.0):
    """Return tokens per second over plain decoding whose steps are started ahead, and the guard.

    gain: of a step that drafts, over a plain one that is not started ahead, which takes `alone` longer. beside: share
    of steps with prompts, in which drafts win a tenth of that.
    """
    rng, guard, rested = random.Random(seed), SpeculationGuard(PlainSteps(overlaps=True)), False
    plain = seconds = 0.0
    for _ in range(steps):
        mixed = rng.random() < beside and not rested
        asked = guard.allows(8, 1.0, mixed)
        assert not (rested and asked)
        took = 1.0 if rested else 1.0 + alone
        written = 14 if asked and not mixed else 8 + asked
        if asked and not mixed:
            took *= 14 / 8 / gain
        took *= rng.lognormvariate(0, 0.05)
        if mixed:
            guard.observe_beside(8, written - 8, 2 + took, 1.0, 0.01 * asked)
        else:
            guard.observe(8, 16 * asked, written, took, 1.0, 0.01 * asked)
        plain += written / 8
        seconds += took
        rested = not asked and guard.rests()
    return plain / seconds, guard


def test_drafts_are_compared_with_plain_steps_that_are_started_ahead():
    ratio, guard = overlapped(1.05)
    assert guard.about()["pauses"] >= 2  # 5% faster than a plain step alone, 9% slower than plain decoding
    assert ratio > 0.96
    ratio, guard = overlapped(1.4)
    assert guard.about()["pauses"] == 0
    assert ratio > 0.97 * 1.4 / 1.15


def test_drafts_beside_prompts_pay_for_starting_no_step_ahead():
    """A token in eight is worth an eighth of a step; a step that is not started ahead takes more."""
    assert overlapped(1.4, beside=0.5, alone=0.05)[1].about()["pauses"] == 0
    assert overlapped(1.4, beside=0.5, alone=0.3)[1].about()["pauses"] > 0


def test_plain_steps_are_requested_in_a_row_where_the_first_teaches_nothing():
    plain = PlainSteps(overlaps=True)
    guard = SpeculationGuard(plain)
    for seconds in (9.0, 1.0, 1.1):
        assert not guard.allows(4, 1.0)
        assert guard.rests() is (seconds != 1.1)
        guard.observe(4, 0, 4, seconds, 1.0)
    assert guard.allows(4, 1.0)
    assert plain.seconds(4, 1.0) == 1.0


@pytest.mark.parametrize(("overlaps", "paused"), [(True, PAUSE), (False, 0)])
def test_asking_in_vain_beside_prompts_is_paused_where_plain_steps_would_be_started_ahead(overlaps, paused):
    """Even if asking takes next to nothing, and while no plain step is known."""
    guard = SpeculationGuard(PlainSteps(overlaps))
    for _ in range(TRIED):
        assert guard.allows(64, 1.0, mixed=True)
        guard.observe_beside(64, 0, 2.0, 1.0, 1e-6)
    assert guard.rests(mixed=True) is overlaps
    assert not guard.rests()
    asked = [guard.allows(64, 1.0, mixed=True) for _ in range(PAUSE + 1)]
    assert asked == [False] * paused + [True] * (PAUSE + 1 - paused)


def test_plain_steps_that_never_follow_each_other_are_learned_all_the_same():
    """Every third step computes no prompt, and drafts pay."""
    guard = SpeculationGuard(PlainSteps(overlaps=True))
    plain = 0
    for step in range(6000):
        mixed = step % 3 > 0
        asked = guard.allows(8, 1.0, mixed)
        plain += not asked
        if mixed:
            guard.observe_beside(8, 8 * asked, 3.0, 1.0, 0.01 * asked)
        else:
            guard.observe(8, 16 * asked, 16 if asked else 8, 1.2 if asked else 1.1, 1.0, 0.01 * asked)
    assert plain < 200
