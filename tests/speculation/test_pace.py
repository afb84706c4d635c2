"""How long a draft model drafts: as long as the next token pays, for the rows that it pays for."""

import pytest

from ragspec.speculation.draft_length import (
    BLIND,
    FIRST,
    KNOWN,
    LONGEST,
    MEMORY,
    PATIENCE,
    SHARE,
    TRIED,
    Confidence,
    DraftLength,
)
from ragspec.speculation.step_cost import StepCost

DEAR = StepCost([(1, 1.0), (64, 1.1), (256, 1.4)])  # a step of the target, whatever is in it


def seasoned(chance, step_s=0.01, fill_s=0.001, cost=DEAR):
    """Return a pace that knows its costs, of a draft that is right with this chance."""
    confidence = Confidence()
    for i in range(400):
        confidence.observe(chance, (i * 7919 % 1000) / 1000 < chance)
    pace = DraftLength(cost, confidence)
    pace.stepped(step_s)
    pace.filled(100, 100 * fill_s)
    return pace


@pytest.mark.parametrize("sure", [0.05, 0.45, 0.92, 0.99])
def test_the_drafts_own_word_counts_until_it_is_known_better(sure):
    confidence = Confidence()
    assert confidence.chance(sure) == pytest.approx(sure)
    for _ in range(200):
        confidence.observe(sure, False)
    assert confidence.chance(sure) < 0.05
    for _ in range(int(3 * MEMORY)):
        confidence.observe(sure, True)
    assert confidence.chance(sure) > 0.8  # the latest counts most
    assert confidence.mean > FIRST


def test_a_draft_that_is_right_and_cheap_pays_and_one_that_is_not_does_not():
    assert seasoned(0.9).ratio(8, 100) > 3
    assert seasoned(0.9, step_s=2.0).ratio(8, 100) < 1
    assert seasoned(0.0).ratio(8, 100) < 1.02


def test_all_rows_draft_where_it_pays_and_one_now_and_then_where_not():
    missing, left = [1, 1, 5, 2], [50] * 4
    assert seasoned(0.9).chosen(missing, left, 100) == [0, 1, 2, 3]
    poor = seasoned(0.0, fill_s=0.1)
    steps = 2000
    tried = [rows for rows in (poor.chosen([40, 30, 50, 60], left, 100) for _ in range(steps)) if rows]
    assert set(map(tuple, tried)) == {(1,)}  # the one that has least to read
    assert 0.5 * SHARE < len(tried) * 29 * 0.1 / steps <= SHARE  # of the time, a step being a second


def test_a_draft_that_says_nothing_is_not_tried_for_ever():
    pace = DraftLength(DEAR, Confidence())
    tried = [pace.chosen([9], [50], 100) for _ in range(4 * PATIENCE)]
    assert sum(map(bool, tried)) < 2 * PATIENCE


def test_a_prompt_is_read_only_where_the_answer_makes_up_for_it():
    pace = seasoned(0.9, fill_s=0.01)
    assert pace.chosen([1, 2000, 2000], [100, 100, 3], 2000) == [0, 1]
    assert seasoned(0.9, fill_s=0.1).chosen([1, 2000, 2000], [100, 100, 3], 2000) == [0]


def test_a_draft_that_has_nothing_to_read_serves_all_rows():
    pace = seasoned(0.9)
    pace.fill_s = None
    assert pace.chosen([1] * 6, [50] * 6, 100) == list(range(6))


def test_few_rows_draft_before_anything_is_known():
    pace = DraftLength(DEAR, Confidence())
    rows = pace.chosen([90, 10, 80, 20, 70, 30], [50] * 6, 100)
    assert rows == [1, 3]
    assert len(rows) == TRIED
    assert pace.going_on([0.5] * 2, 7.0, 2, 1, 6, 100) == [0, 1]
    assert pace.going_on([0.5] * 2, 7.0, 2 * BLIND, BLIND, 6, 100) == []
    assert Confidence().seen < KNOWN


def test_rows_whose_drafts_have_nothing_to_read_show_all_at_once_whether_it_pays():
    pace = DraftLength(DEAR, Confidence())
    assert sorted(pace.chosen([1] * 16, [50] * 16, 100)) == list(range(16))
    assert sorted(pace.chosen([1, 900, 1, 900, 1, 1, 1, 900], [50] * 8, 100)) == [0, 2, 4, 5, 6]


def test_lengths_are_ragged_and_end_where_the_next_token_does_not_pay():
    pace = seasoned(0.8, step_s=0.02, cost=StepCost([(1, 1.0), (8, 1.3), (64, 4.0)]))
    assert pace.going_on([0.9, 0.001, 0.8], 4.7, 3, 1, 3, 100) == [0, 2]
    assert pace.going_on([0.001, 0.001, 0.001], 3.0, 3, 1, 3, 100) == []
    depth, acceptance, expected = 1, 0.8, 1.8
    while depth < 5 * LONGEST and pace.going_on([acceptance], expected, depth, depth, 1, 100):
        depth, acceptance = depth + 1, acceptance * 0.8
        expected += acceptance
    rates = [_rate(count) for count in range(5 * LONGEST)]
    assert abs(depth - rates.index(max(rates))) <= 1  # no other length writes more tokens per second


def _rate(count):
    cost = StepCost([(1, 1.0), (8, 1.3), (64, 4.0)])
    written = sum(0.8**i for i in range(count + 1))
    return written / (cost(1 + count, 1, 100) + 0.02 * max(0, count - 1))


def test_without_costs_all_is_drafted():
    pace = DraftLength(None, Confidence())
    assert pace.chosen([1, 900], [1, 1], 10) == [0, 1]
    assert pace.going_on([0.0, 0.1], 2.1, 100, 50, 2, 10) == [0, 1]
    assert pace.chosen([], [], 0) == []
