"""The order of passages: always a permutation, never dearer than by rank, and the best one where that can be tried."""

import itertools
import random

import pytest

from ragspec.prompts.passage_order import computed, shared_order

WEIGHTS = {7: 50, 3: 100, 9: 80}


def drawn(seed, records=30, passages=12, most=5):
    chance = random.Random(seed)
    weights = {number: chance.randint(1, 400) for number in range(passages)}
    return [chance.sample(range(passages), chance.randint(0, most)) for _ in range(records)], weights


def test_what_saves_most_goes_first():
    plan = shared_order([[7, 3], [3, 9]], WEIGHTS)
    assert (plan.orders, plan.total, plan.computed, plan.by_rank) == ([[3, 7], [3, 9]], 330, 230, 330)


def test_records_that_begin_alike_follow_each_other():
    plan = shared_order([[7, 3], [9], [3], [7, 3], [9, 3]], WEIGHTS)
    begins = [tuple(plan.orders[i][:1]) for i in plan.sequence]
    assert len([first for first, _ in itertools.groupby(begins)]) == len(set(begins))


@pytest.mark.parametrize("keep_first", [0, 1, 3])
@pytest.mark.parametrize("seed", range(40))
def test_an_order_is_a_permutation_and_costs_no_more_than_by_rank(seed, keep_first):
    records, weights = drawn(seed)
    plan = shared_order(records, weights, keep_first)
    assert [sorted(order) for order in plan.orders] == [sorted(record) for record in records]
    assert sorted(plan.sequence) == list(range(len(records)))
    assert all(o[:keep_first] == r[:keep_first] for o, r in zip(plan.orders, records, strict=True))
    assert plan.computed == computed(plan.orders, weights) <= plan.by_rank == computed(records, weights) <= plan.total


def test_greed_is_near_the_best_of_all_orders():
    dearer = []
    for seed in range(30):
        records, weights = drawn(seed, records=4, passages=5, most=3)
        every = itertools.product(*(list(itertools.permutations(record)) for record in records))
        best = min(computed(orders, weights) for orders in every)
        dearer.append(shared_order(records, weights).computed / best)
    assert min(dearer) == 1.0
    assert sum(dearer) / len(dearer) < 1.02


def test_the_same_records_are_planned_the_same():
    records, weights = drawn(3)
    assert shared_order(records, weights) == shared_order([list(record) for record in records], dict(weights))


def test_nothing_is_no_trouble():
    assert shared_order([], {}).sequence == []
    assert shared_order([[], []], {}).orders == [[], []]
