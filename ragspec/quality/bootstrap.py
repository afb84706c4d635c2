"""Intervals of a mean over records, and of the difference of two runs on the same records.

Source: Efron and Tibshirani 1993, percentile bootstrap; paired, as in Koehn 2004. Records are drawn, not words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 2000
SEED = 0
LEVEL = 95  # per cent


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `count` records with its interval; without one for a single record."""

    mean: float
    low: float | None
    high: float | None
    count: int

    def told(self, *, sign: bool = False) -> str:
        """Return it for a reader: -0.4 (-1.9 to +1.0)."""
        form = "+.1f" if sign else ".1f"
        interval = "" if self.low is None else f" ({self.low:{form}} to {self.high:{form}})"
        return f"{self.mean:{form}}{interval}"

    def to_json(self) -> dict[str, float | int | None]:
        """Return the object of a report."""
        low, high = (None if end is None else round(end, 4) for end in (self.low, self.high))
        return {"mean": round(self.mean, 4), "low": low, "high": high, "count": self.count}


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the mean of values, or of paired differences, with its 95% interval; None of no values."""
    if not values:
        return None
    given = np.asarray(values, dtype=float)
    if len(given) == 1:
        return Estimate(float(given[0]), None, None, 1)
    chance = np.random.default_rng(SEED)
    means = [given[chance.integers(len(given), size=len(given))].mean() for _ in range(DRAWS)]
    low, high = np.percentile(means, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return Estimate(float(given.mean()), float(low), float(high), len(given))
