"""Draft lengths for many rows at once are those of the loop over all candidates."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.speculation.draft_length import LEAST_GAIN, allocate, allocate_flat
from ragspec.speculation.step_cost import FittedCost, StepCost, costs_of

CHANCES = st.sampled_from([0.02, 0.25, 0.5, 0.5, 0.9, 1.0]) | st.floats(0.01, 1)  # some of which tie
CHAINS = st.lists(st.lists(CHANCES, max_size=8).map(lambda chain: list(np.cumprod(chain))), min_size=1, max_size=12)
SECONDS = st.floats(0.001, 0.1)


def allocate_one_by_one(acceptances, cost, reach, prefill_tokens=0):
    """Return what allocate() returns, by a loop over all candidates."""
    rows = len(acceptances)
    candidates = sorted(
        (-value, depth, row) for row, chain in enumerate(acceptances) for depth, value in enumerate(chain)
    )
    best, rate, expected = 0, rows / cost(rows, rows, reach) * LEAST_GAIN, float(rows)
    for chosen, (value, _, _) in enumerate(candidates, 1):
        expected -= value
        if expected / cost(rows + chosen, rows, reach) > rate:
            best, rate = chosen, expected / cost(rows + chosen, rows, reach)
    if prefill_tokens:
        least = rate * cost.marginal(prefill_tokens + rows, reach)
        best = sum(-value > least for value, _, _ in candidates)
    taken = [0] * rows
    for _, _, row in candidates[:best]:
        taken[row] += 1
    return taken


@st.composite
def step_costs(draw):
    """Curves with steps, corrected by steps that were measured."""
    sizes = sorted(draw(st.sets(st.integers(1, 90), min_size=1, max_size=6)))
    points = list(zip(sizes, draw(st.lists(SECONDS, min_size=len(sizes), max_size=len(sizes))), strict=True))
    cost = StepCost(points, draw(st.sampled_from([0.0, 1e-7])), draw(st.sampled_from([0.0, 1e-6])))
    for tokens, seconds in draw(st.lists(st.tuples(st.integers(1, 120), SECONDS), max_size=12)):
        cost.observe(tokens, 1, 10, seconds)
        cost.observe_beside(tokens, 4, 1, 10, seconds)
    return cost


@st.composite
def fitted_costs(draw):
    cost = FittedCost()
    for rows, drafted, seconds in draw(
        st.lists(st.tuples(st.integers(1, 20), st.integers(0, 50), SECONDS), max_size=12)
    ):
        cost.observe(rows + drafted, rows, seconds)
    return cost


class OfOthers:
    """A cost that knows nothing of many sizes at once."""

    def __call__(self, tokens, rows, reach):
        return 0.02 + 0.001 * (tokens // 5) + 1e-6 * rows * reach

    def marginal(self, tokens, reach):
        return 0.001


COSTS = st.one_of(step_costs(), fitted_costs(), st.just(OfOthers()))


@given(COSTS, st.integers(1, 60), st.integers(0, 200), st.integers(1, 30), st.integers(0, 500))
def test_costs_of_many_sizes_are_those_of_each(cost, first, more, rows, reach):
    found = costs_of(cost, first, first + more, rows, reach)
    assert found.tolist() == [cost(tokens, rows, reach) for tokens in range(first, first + more + 1)]


@pytest.mark.parametrize("prefill_tokens", [0, 60])
@given(acceptances=CHAINS, cost=COSTS, reach=st.integers(0, 500))
def test_lengths_are_those_of_a_loop_over_all_candidates(acceptances, cost, reach, prefill_tokens):
    expected = allocate_one_by_one(acceptances, cost, reach, prefill_tokens)
    assert allocate(acceptances, cost, reach, prefill_tokens) == expected
    counts = np.array([len(chain) for chain in acceptances])
    flat = np.array([value for chain in acceptances for value in chain], dtype=float)
    assert allocate_flat(flat, counts, cost, reach, prefill_tokens).tolist() == expected


def test_of_equal_candidates_the_shallower_and_the_earlier_are_chosen():
    seconds = [(3, 1.0), (6, 1.001), (7, 50.0)]  # room for three
    assert allocate([[1.0, 1.0]] * 3, StepCost(seconds), 0) == [1, 1, 1]
    assert allocate([[1.0], [1.0, 1.0, 1.0], [1.0]], StepCost(seconds), 0) == [1, 1, 1]
    assert allocate([[], [1.0, 1.0, 1.0], [1.0]], StepCost(seconds), 0) == [0, 2, 1]
    assert allocate([], StepCost(seconds), 0) == []
