"""Ratios of paired passes with a confidence interval.

Two passes that ran one after the other saw the same machine, so ratios are taken pair by pair. Speeds are products of
many causes, so the interval is Student's t on logarithms. Limit: a few pairs say little, and the interval shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, log, sqrt
from statistics import mean, median, stdev

# two-sided 95% quantiles of Student's t for 1, 2, ... degrees of freedom
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
NORMAL95 = 1.960


def paired(mine: Sequence[float | None], theirs: Sequence[float | None]) -> list[float]:
    """Return the ratio of each pair of passes whose speeds are both known; passes without a partner are left out."""
    return [one / other for one, other in zip(mine, theirs, strict=False) if one and other]


def interval(ratios: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return the median of positive ratios and a 95% interval of their geometric mean; None for one ratio alone.

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
    """Return what the ratio is at least and at most: anything, where one pair alone tells."""
    _, low, high = interval(ratios)
    return (0.0, inf) if low is None or high is None else (low, high)


def told(ratios: Sequence[float]) -> str:
    """Return the median for a reader, with its interval: 1.50x (1.40 to 1.60)."""
    middle, low, high = interval(ratios)
    return f"{middle:.2f}x ({'one pass' if low is None or high is None else f'{low:.2f} to {high:.2f}'})"


def _quantile(freedom: int) -> float:
    """Beyond the table, the first term of the Cornish-Fisher expansion: within 0.01."""
    if freedom <= len(T95):
        return T95[freedom - 1]
    return NORMAL95 + (NORMAL95**3 + NORMAL95) / (4 * freedom)
