import pickle

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.errors import cause_of
from ragspec.stats import Causes, Reservoir, RunSummary, SpecStats, Spent

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


@pytest.mark.parametrize("count", [1, 2, 3, 10, 19, 20, 21, 100, 101])
def test_percentiles_are_those_of_numpys_nearest_rank(count):
    """Of two values, the median is the lower one, not the largest of all."""
    values = [float(value) for value in range(count)]
    found = Reservoir()
    for value in values:
        found.add(value)
    ranks = {f"p{p}": numpy.percentile(values, p, method="inverted_cdf") for p in (50, 95, 99)}
    assert found.percentiles() == ranks


def test_reservoir_is_exact_while_small_and_bounded_when_large():
    small = Reservoir(size=100)
    for value in range(100):
        small.add(value)
    assert small.percentiles() == {"p50": 49, "p95": 94, "p99": 98}
    size = len(pickle.dumps(small))
    for value in range(100_000):
        small.add(value)
    assert len(pickle.dumps(small)) < 2 * size
    assert small.count == 100_100


def test_tokens_per_s_is_total_tokens_over_total_time():
    summary = RunSummary(output_tokens=300, generate_s=2.0, records=3, spec=SpecStats(steps=100))
    assert (summary.tokens_per_s, summary.requests_per_s, summary.tokens_per_step) == (150.0, 1.5, 3.0)


def test_causes_are_bounded_and_none_is_lost_in_the_count():
    causes = Causes()
    for i in range(3 * Causes.MOST):
        causes.add(f"cause {i}", f"message {i}", 1 + (i == 7))
    assert causes.records == 3 * Causes.MOST + 1
    assert causes.ranked()[0] == ("message 7", 2)
    assert len(causes.ranked()) == Causes.RANKED
    assert causes.others == causes.records - sum(count for _, count in causes.ranked())
    both = Causes()
    both.merge(causes)
    both.merge(causes)
    assert (both.records, both.ranked()[0]) == (2 * causes.records, ("message 7", 4))
    told = causes.to_json()["failures"]
    assert (told[-1]["message"], sum(each["records"] for each in told)) == ("other causes", causes.records)
    assert Causes().to_json() == {}


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("in.jsonl:3: the prompt has 5,213 tokens", "dir/other.jsonl:17: the prompt has 612 tokens", True),
        ("q.csv: row 3: bad", "q.csv: row 4: bad", True),
        ("/a/b.txt cannot be read", "/c/d/e.txt cannot be read", True),
        ("s3://a/b cannot be read", "https://c/d?e=f cannot be read", True),
        ("token 0x7fab is wrong", "token 0x12 is wrong", True),
        ("request 3f2a9c1d failed", "request 77deadbeef01 failed", True),
        ("6ba7b810-9dad-11d1-80b4-00c04fd430c8 failed", "6ba7b811-9dad-11d1-80b4-00c04fd430c9 failed", True),
        ('"temperature": too low', '"top_p": too low', False),
        ("out of memory", "the grammar admits no answer at all", False),
        ("facade of tokens/s", "decade of tokens/s", False),
    ],
)
def test_messages_have_one_cause_where_only_numbers_paths_and_hashes_differ(one, other, alike):
    assert (cause_of(one) == cause_of(other)) is alike


def test_a_records_name_is_no_part_of_a_cause():
    assert cause_of('id "alpha" appears twice', "alpha") == cause_of('id "beta" appears twice', "beta")


@pytest.mark.parametrize("value", [None, 3, [], {}, {"load_s": 1}, {"load_s": "x", "warmup_s": 1, "generate_s": 1}])
def test_what_does_not_say_what_runs_took_counts_for_none(value):
    assert Spent.of(value) == Spent()
