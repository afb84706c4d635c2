"""Compare candidates: paired speed ratios with a confidence interval, and answer quality where references exist.

Two passes that ran one after the other saw the same machine, so ratios are taken pair by pair. A speed is a product of
many causes, so the interval is Student's t on logarithms. Limit: a few pairs say little, and the interval is wide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import exp, inf, log, sqrt
from pathlib import Path
from statistics import mean, median, stdev

from ragspec.benchmark.results import Quality
from ragspec.quality.evaluate import Scores, cites, differences, means, scores_of
from ragspec.quality.graded import Answers, read_graded

# two-sided 95% quantiles of Student's t for 1, 2, ... degrees of freedom
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
NORMAL95 = 1.960


def paired(mine: Sequence[float | None], theirs: Sequence[float | None]) -> list[float]:
    """Return the ratio of each pair of passes with two known speeds; unpaired passes are left out."""
    return [one / other for one, other in zip(mine, theirs, strict=False) if one and other]


def interval(ratios: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return the median ratio and a 95% interval of the geometric mean, None for a single ratio.

    If the median lies outside the interval, the interval is widened to include it.
    """
    middle = median(ratios)
    if len(ratios) < 2:
        return middle, None, None
    logs = [log(ratio) for ratio in ratios]
    freedom = len(logs) - 1
    half = _quantile(freedom) * stdev(logs) / sqrt(len(logs))
    return middle, min(middle, exp(mean(logs) - half)), max(middle, exp(mean(logs) + half))


def sides(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the interval: 0 and infinity for a single pair."""
    _, low, high = interval(ratios)
    return (0.0, inf) if low is None or high is None else (low, high)


def format_ratio(ratios: Sequence[float]) -> str:
    """Return the median with its interval as text: 1.50x (1.40 to 1.60)."""
    middle, low, high = interval(ratios)
    return f"{middle:.2f}x ({'one pass' if low is None or high is None else f'{low:.2f} to {high:.2f}'})"


def _quantile(freedom: int) -> float:
    """Return the quantile; beyond the table by the first term of the Cornish-Fisher expansion, within 0.01."""
    if freedom <= len(T95):
        return T95[freedom - 1]
    return NORMAL95 + (NORMAL95**3 + NORMAL95) / (4 * freedom)


# -- quality ---------------------------------------------------------------------------------------


def graded(outputs: Mapping[str, Path], baselines: Mapping[str, str]) -> dict[str, Quality]:
    """Return the quality of each candidate's answers; empty if no record has a reference.

    outputs: by candidate. baselines: candidate -> the candidate to compare it with.
    """
    read: dict[str, Answers] = {}
    for name, path in outputs.items():
        answers = read_graded(str(path))
        if len(answers.without) < len(answers.graded):
            read[name] = answers
    citing = cites(*read.values())
    scores: dict[str, Scores] = {name: scores_of(answers, citing=citing) for name, answers in read.items()}
    found = {}
    for name, own in scores.items():
        other = baselines.get(name)
        apart = differences(own, scores[other]) if other in scores else {}
        found[name] = Quality(means(own), other if apart else None, apart)
    return found


def describe_quality(quality: Mapping[str, Quality]) -> Iterator[str]:
    """Yield F1 scores and differences from the baseline, one line per group of candidates with the same figures."""
    names: dict[str, list[str]] = {}
    for name, own in quality.items():
        apart = own.differences.get("f1")
        against = f", {apart.formatted(sign=True)} against {own.baseline}" if apart is not None else ""
        names.setdefault(f"F1 {own.scores['f1'].formatted()}{against}", []).append(name)
    for words, alike in names.items():
        yield f"{', '.join(alike)}: {words}"
