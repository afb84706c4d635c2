import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.stats import Reservoir, RunSummary, SpecStats

STEPS = st.lists(st.integers(0, 9).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))))


def counted(steps):
    stats = SpecStats()
    for drafted, accepted in steps:
        stats.record(drafted, accepted)
    return stats


@given(STEPS, STEPS)
def test_adding_rows_equals_counting_all_their_steps(one, two):
    total = counted(one)
    total.add(counted(two))
    assert total == counted(one + two)


@given(STEPS)
def test_positions_add_up_to_the_accepted_tokens(steps):
    stats = counted(steps)
    assert sum(j * n for j, n in enumerate(stats.accepted_at)) == stats.accepted
    assert sum(j * n for j, n in enumerate(stats.drafted_at)) == stats.drafted
    assert all(0 <= share <= 1 for share in stats.acceptance_by_position)


def test_steps_without_a_draft_count_as_steps_but_not_in_the_acceptance_length():
    stats = counted([(4, 3), (0, 0), (4, 1)])
    assert (stats.steps, stats.drafted_steps) == (3, 2)
    assert stats.mean_acceptance_length == 3.0
    assert stats.acceptance_rate == 0.5
    assert stats.acceptance_by_position == [1.0, 0.5, 0.5, 0.0]


def test_more_accepted_than_drafted_is_refused():
    with pytest.raises(ValueError, match="accepted 2 of 1"):
        SpecStats().record(1, 2)


def test_ratios_of_nothing_are_none():
    assert SpecStats().acceptance_rate is None
    assert SpecStats().mean_acceptance_length is None
    assert RunSummary().tokens_per_s is None
    assert Reservoir().percentiles() is None


def test_reservoir_is_exact_while_small_and_bounded_when_large():
    small = Reservoir(size=100)
    for value in range(100):
        small.add(value)
    assert small.percentiles() == {"p50": 50, "p95": 95, "p99": 99}
    for value in range(100_000):
        small.add(value)
    assert len(small._values) == 100
    assert small.count == 100_100


def test_tokens_per_s_is_total_tokens_over_total_time():
    summary = RunSummary(output_tokens=300, generate_s=2.0, records=3, spec=SpecStats(steps=100))
    assert (summary.tokens_per_s, summary.requests_per_s, summary.tokens_per_step) == (150.0, 1.5, 3.0)
