"""Seconds of a target step: the Cost protocol, StepCost for an engine that can be probed, FittedCost for others. Pure.

>>> StepCost([(1, 0.020), (8, 0.024)])(tokens=8, rows=4, reach=0)
0.024
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

import numpy as np

LEARN = 0.1  # weight of a new observation
BUCKET = 4  # consecutive step sizes, in tokens, that share a correction
TRUST = 8.0  # observations at which a bucket's correction counts half
CHUNK_SLOPE = 16  # tokens over which the curve's slope is taken for steps with prefill


class Cost(Protocol):
    """Seconds of a step. reach: slots that each row attends to, on average."""

    def __call__(self, tokens: int, rows: int, reach: int) -> float:
        """Return the seconds of a step of `tokens` in all, on `rows` rows of `reach` slots each."""

    def marginal(self, tokens: int, reach: int) -> float:
        """Return the seconds of one more token in a step of `tokens` with prefill."""


def costs_of(cost: Cost, first: int, last: int, rows: int, reach: int) -> np.ndarray:
    """Return the seconds of steps of `first` to `last` tokens: at once if the cost has a method `costs`."""
    several = getattr(cost, "costs", None)
    if several is None:
        return np.array([cost(tokens, rows, reach) for tokens in range(first, last + 1)])
    found: np.ndarray = several(first, last, rows, reach)
    return found


class StepCost:
    """Seconds of a step, probed before the first record and corrected by every step after it.

        cost      = (curve(tokens) + reach x (rows x read x per_row_slot + tokens x per_slot)) x scale x own
        marginal  = (max(slope of the curve, beside) + reach x per_slot) x scale

    curve: probed at short context, interpolated between the points and extrapolated beyond the last.
    per_slot, per_row_slot: attention over the cache, per token and slot and per row and slot; probed, never corrected.
    read: share of the rows' slots that a step reads, since shared blocks are read once; set by the engine.
    scale: the machine's slowdown since probing; every step updates it.
    own: the remaining correction for a bucket of sizes, weighted by observations; unseen sizes keep the curve's shape.
    beside: seconds per prefill token, before scale, beyond those of a step of the other rows. Such steps are far larger
    than the curve's and say nothing about those, so they correct only the marginal cost.

    points: (tokens, seconds) by rising tokens.
    """

    def __init__(self, points: Sequence[tuple[int, float]], per_slot: float = 0.0, per_row_slot: float = 0.0) -> None:
        self._tokens = [float(tokens) for tokens, _ in points]
        self._seconds: list[float] = []
        for _, seconds in points:  # cost is monotonic in tokens; measurements may not be
            self._seconds.append(max([seconds, *self._seconds[-1:]]))
        self._per_slot = per_slot
        self._per_row_slot = per_row_slot
        self.read = 1.0
        self._scale = 1.0
        self._beside = 0.0
        self._buckets: dict[int, list[float]] = {}  # tokens // BUCKET -> [correction, observations]
        self._curve: dict[int, float] = {}  # cache of interpolated values
        self._sizes: np.ndarray = np.zeros(0)  # 0, 1, 2 ...
        self._curve_to: np.ndarray = np.zeros(0)  # interpolated values of these sizes
        self._own = np.ones(0)  # per bucket, its correction weighted by observations

    @property
    def points(self) -> list[tuple[int, float]]:
        """Return the probed curve: (tokens, seconds) of steps at short context."""
        return [(int(tokens), seconds) for tokens, seconds in zip(self._tokens, self._seconds, strict=True)]

    def anew(self) -> StepCost:
        """Return a copy as probed, without later corrections."""
        return StepCost(self.points, self._per_slot, self._per_row_slot)

    def __call__(self, tokens: int, rows: int, reach: int) -> float:
        """Return the seconds of a step of `tokens` in all, on `rows` rows of `reach` slots each."""
        return self._expected(tokens, rows, reach) * self._correction(tokens)

    def _expected(self, tokens: int, rows: int, reach: int) -> float:
        return self._base(tokens) + reach * (rows * self.read * self._per_row_slot + tokens * self._per_slot)

    def marginal(self, tokens: int, reach: int) -> float:
        """Return the seconds of one more token in a step of `tokens` with prefill."""
        slope = max(0.0, self._base(tokens + CHUNK_SLOPE) - self._base(tokens)) / CHUNK_SLOPE
        return (max(slope, self._beside) + reach * self._per_slot) * self._scale

    def observe_beside(self, prefill_tokens: int, tokens: int, rows: int, reach: int, seconds: float) -> None:
        """Learn from a step with prefill what a token of it takes. Outliers are clipped.

        tokens, rows, reach: of the rows that decode, which would have taken a step of their own.
        """
        if not self._beside and prefill_tokens < CHUNK_SLOPE:
            return
        share = max(0.0, seconds / self._scale - self._expected(tokens, rows, reach)) / prefill_tokens
        if self._beside:
            share = min(share, 2 * self._beside)
        weight = LEARN * prefill_tokens / (prefill_tokens + tokens)  # next to many others, a few tokens tell little
        self._beside += (weight if self._beside else 1.0) * (share - self._beside)

    def observe(self, tokens: int, rows: int, reach: int, seconds: float) -> None:
        """Learn from a step without prefill. Outliers are clipped."""
        ratio = min(2.0, max(0.5, seconds / self._expected(tokens, rows, reach) / self._scale))
        self._scale *= 1 + LEARN / 2 * (ratio - 1)
        bucket = self._buckets.setdefault(tokens // BUCKET, [1.0, 0.0])
        bucket[0] += LEARN * (ratio - bucket[0])
        bucket[1] += 1
        number = tokens // BUCKET
        self._own = _grown(self._own, number + 1)
        self._own[number] = self._weighted(number)

    def costs(self, first: int, last: int, rows: int, reach: int) -> np.ndarray:
        """Return the seconds of steps of `first` to `last` tokens, each as a call returns them."""
        if len(self._curve_to) <= last:
            self._sizes = np.arange(2.0 * last + 1)
            self._curve_to = self._interpolate_all(self._sizes)
        self._own = _grown(self._own, last // BUCKET + 1)
        read = rows * self.read * self._per_row_slot
        attention = reach * (read + self._sizes[first : last + 1] * self._per_slot)
        own = (self._scale * self._own[first // BUCKET : last // BUCKET + 1]).repeat(BUCKET)[first % BUCKET :]
        found: np.ndarray = (self._curve_to[first : last + 1] + attention) * own[: last + 1 - first]
        return found

    def _correction(self, tokens: int) -> float:
        return self._scale * self._weighted(tokens // BUCKET)

    def _weighted(self, number: int) -> float:
        own, seen = self._buckets.get(number, (1.0, 0.0))
        trust = seen / (seen + TRUST)
        return 1 + trust * (own - 1)

    def _base(self, tokens: int) -> float:
        known = self._curve.get(tokens)
        if known is None:
            known = self._curve[tokens] = self._interpolate(float(tokens))
        return known

    def _interpolate(self, tokens: float) -> float:
        xs, ys = self._tokens, self._seconds
        if len(xs) == 1:
            return ys[0]
        right = min(max(bisect_right(xs, tokens), 1), len(xs) - 1)
        left = right - 1
        slope = (ys[right] - ys[left]) / (xs[right] - xs[left])
        return max(ys[0], ys[left] + slope * (tokens - xs[left]))

    def _interpolate_all(self, tokens: np.ndarray) -> np.ndarray:
        xs, ys = np.array(self._tokens), np.array(self._seconds)
        if len(xs) == 1:
            return np.full(len(tokens), ys[0])
        right = np.searchsorted(xs, tokens, "right").clip(1, len(xs) - 1)
        left = right - 1
        slope = (ys[right] - ys[left]) / (xs[right] - xs[left])
        found: np.ndarray = np.maximum(ys[0], ys[left] + slope * (tokens - xs[left]))
        return found


def _grown(values: np.ndarray, count: int) -> np.ndarray:
    """Return an array of at least `count` values, the new ones 1."""
    return values if len(values) >= count else np.append(values, np.ones(2 * count - len(values)))


# -- fitted cost -----------------------------------------------------------------------------------

FADE = 0.98  # weight of the past per observation
RIDGE_ROWS = 64.0  # squared deviation of rows at which the fitted slope counts half
RIDGE_DRAFTS = 512.0  # the same for draft tokens: the prior is good, and steps are few and noisy
PRIOR_TOKENS = 16.0  # assumed fixed cost of a step, in tokens


class FittedCost:
    """A Cost fitted during the run by fading least squares, for an engine that cannot be probed.

        seconds = a + b x rows + c x draft tokens

    Rows and drafts are separate because a row's own token also pays for reading its KV cache. Limit: linear; adapts to
    the cache's length only because the past fades.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._rows = self._drafts = self._seconds = 0.0  # means
        self._spread_rows = self._spread_drafts = self._common = 0.0  # weighted sums of products of deviations
        self._rows_seconds = self._drafts_seconds = 0.0
        self._slopes = (0.0, 0.0)

    def observe(self, tokens: int, rows: int, seconds: float) -> None:
        """Learn from a step of `tokens` on `rows` rows. Outliers are clipped."""
        if self._weight:
            expected = self(tokens, rows)
            seconds = min(2 * expected, max(expected / 2, seconds))
        self._weight = FADE * self._weight + 1
        row, draft, late = rows - self._rows, tokens - rows - self._drafts, seconds - self._seconds  # deviations
        self._rows += row / self._weight
        self._drafts += draft / self._weight
        self._seconds += late / self._weight
        late = seconds - self._seconds
        self._spread_rows = FADE * self._spread_rows + row * (rows - self._rows)
        self._spread_drafts = FADE * self._spread_drafts + draft * (tokens - rows - self._drafts)
        self._common = FADE * self._common + row * (tokens - rows - self._drafts)
        self._rows_seconds = FADE * self._rows_seconds + row * late
        self._drafts_seconds = FADE * self._drafts_seconds + draft * late
        self._slopes = self._fit()

    def _fit(self) -> tuple[float, float]:
        """Return seconds per row and per draft token: least squares with a prior (ridge regression)."""
        prior = self._seconds / (PRIOR_TOKENS + self._rows + self._drafts)
        rows, drafts = self._spread_rows + RIDGE_ROWS, self._spread_drafts + RIDGE_DRAFTS
        by_rows, by_drafts = self._rows_seconds + RIDGE_ROWS * prior, self._drafts_seconds + RIDGE_DRAFTS * prior
        determinant = rows * drafts - self._common**2
        per_row = (by_rows * drafts - by_drafts * self._common) / determinant
        per_draft = (by_drafts * rows - by_rows * self._common) / determinant
        return max(0.0, per_row), max(0.0, per_draft)

    def __call__(self, tokens: int, rows: int, reach: int = 0) -> float:
        """Return the seconds for `tokens` in all on `rows` rows; in arbitrary units before the first observation."""
        if not self._weight:
            return PRIOR_TOKENS + tokens
        per_row, per_draft = self._slopes
        drafts = tokens - rows
        line = self._seconds + per_row * (rows - self._rows) + per_draft * (drafts - self._drafts)
        return max(line, per_row * rows + per_draft * drafts, self._seconds / 8)

    def costs(self, first: int, last: int, rows: int, reach: int = 0) -> np.ndarray:
        """Return the seconds of steps of `first` to `last` tokens, each as a call returns them."""
        tokens = np.arange(first, last + 1)
        if not self._weight:
            return PRIOR_TOKENS + tokens
        per_row, per_draft = self._slopes
        drafts = tokens - rows
        line = self._seconds + per_row * (rows - self._rows) + per_draft * (drafts - self._drafts)
        found: np.ndarray = np.maximum(np.maximum(line, per_row * rows + per_draft * drafts), self._seconds / 8)
        return found

    def marginal(self, tokens: int = 0, reach: int = 0) -> float:
        """Return the seconds of one more draft token."""
        return self._slopes[1]
