"""Scores of one answer, against figures worked out by hand, and intervals."""

import pytest

from ragspec.quality.metrics import cited, estimate, exact_match, f1, precision, recall, rouge_l


@pytest.mark.parametrize(
    ("answer", "references", "exact", "overlap"),
    [
        ("The Ögedei Khan.", ["ögedei khan"], 1.0, 1.0),
        ("It was Ögedei Khan", ["Ögedei Khan"], 0.0, 2 * 2 / (4 + 2)),
        ("a b b c", ["b b d", "nothing"], 0.0, 2 * 2 / (3 + 3)),
        ("", ["x"], 0.0, 0.0),
        ("the", ["a"], 1.0, 1.0),  # articles only: SQuAD compares two empty texts
        ("从《煤钢共同体条约》", ["从 《煤钢共同体条约》"], 1.0, 1.0),
        ("煤钢条约", ["煤钢共同体条约"], 0.0, 2 * 4 / (4 + 7)),
        ("nothing alike", ["x", "y"], 0.0, 0.0),
        ("\u201cKhan\u201d \u2013 a ruler", ["khan ruler"], 1.0, 1.0),  # SQuAD's script leaves curly quotes and dashes
        ("$5 million", ["5 million"], 1.0, 1.0),  # SQuAD takes symbols of ASCII for punctuation
    ],
)
def test_squad_scores(answer, references, exact, overlap):
    assert exact_match(answer, references) == exact
    assert f1(answer, references) == pytest.approx(overlap)


def test_rouge_l_is_the_longest_common_subsequence():
    pytest.importorskip("rouge_score")
    assert rouge_l("the cat sat", ["a dog ran", "the cat ran"]) == pytest.approx(2 / 3)
    assert rouge_l("running", ["runs"]) == 1.0  # stems


def test_citations_by_number_and_by_field():
    contexts = ["d3", "d9", "d4"]
    assert cited("So it is [1], and [2; 3].", None, contexts) == {"d3", "d9", "d4"}
    assert cited("So it is [7].", None, contexts) == {"[7]"}
    assert cited("So it is.", None, contexts) is None
    assert cited("{}", {"answer": "x", "sources": ["d9", "d4"]}, contexts) == {"d9", "d4"}
    assert cited("{}", {"answer": "see [1]"}, contexts) is None
    assert (precision({"a", "b"}, {"b", "c", "d"}), recall({"a", "b"}, {"b", "c", "d"})) == (0.5, pytest.approx(1 / 3))
    assert precision(set(), {"a"}) == 0.0


@pytest.mark.parametrize("name", ["id", "passage", "doc_id", "source"])
def test_citations_that_are_objects_cite_by_their_id(name):
    """As where each has a quote beside it."""
    parsed = {"answer": "x", "citations": [{name: "d9", "quote": "y [1]"}, {name: 4, "quote": "z"}]}
    assert cited("{}", parsed, ["d3", "d9", "4"]) == {"d9", "4"}
    assert cited("{}", {"citations": [{"quote": "y"}]}, ["d3"]) == set()


def test_an_interval_holds_the_mean_and_shrinks_with_more_records():
    few, many = estimate([0.0, 1.0] * 10), estimate([0.0, 1.0] * 1000)
    assert few.low < few.mean == 0.5 < few.high
    assert many.high - many.low < (few.high - few.low) / 5
    assert few == estimate([0.0, 1.0] * 10)
    assert (estimate([]), estimate([3.0]).low) == (None, None)
    assert estimate([1.0] * 50).formatted(sign=True) == "+1.0 (+1.0 to +1.0)"


def test_intervals_hold_what_they_say():
    """Of many samples of a known mean, about 95% have intervals that hold it."""
    import random

    chance = random.Random(1)
    found = [estimate([chance.random() for _ in range(40)]) for _ in range(60)]
    assert sum(one.low <= 0.5 <= one.high for one in found) >= 51  # of 60; fewer is one in a thousand
