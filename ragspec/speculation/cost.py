"""What a step of the target costs: what every cost answers (Cost), and the one that is probed (StepCost).

    >>> StepCost([(1, 0.020), (8, 0.024)])(tokens=8, rows=4, reach=0)
    0.024

A second one, for an engine that cannot be probed, is in fitted_cost.py. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

LEARN = 0.1  # weight of a new observation
BUCKET = 4  # step sizes, in tokens, that share one correction
TRUST = 8.0  # observations after which a bucket's own correction counts half
CHUNK_SLOPE = 16  # tokens over which the curve's slope is taken beside a prompt


class Cost(Protocol):
    """Seconds of a step. reach: slots that a row in it sees, on average."""

    def __call__(self, tokens: int, rows: int, reach: int) -> float:
        """Return seconds for `tokens` in all, on `rows` rows of `reach` slots each."""

    def marginal(self, tokens: int, reach: int) -> float:
        """Return seconds that one more token costs in a step of `tokens` that also computes prompts."""


class StepCost:
    """Seconds of a step, probed before the first record and corrected by every step after it.

        cost      = (curve(tokens) + reach x (rows x read x per_row_slot + tokens x per_slot)) x scale x own
        marginal  = (max(slope of the curve, beside) + reach x per_slot) x scale

    curve: probed at short context; interpolated between the points, extrapolated beyond the last.
    per_slot, per_row_slot: attention over the cache, per token and slot and per row and slot; probed, never corrected.
    read: share of the rows' slots that a step reads, as what they have in common is read once; whoever knows sets it.
    scale: how much slower the machine is now than when it was probed. Every step moves it, whatever its size.
    own: what the scale leaves unexplained at this size (a bucket of sizes each); it counts more the oftener it was
    seen, so a size never met has the curve's own shape.
    beside: seconds per token, before scale, of steps that also computed prompts. These are far larger than the curve's
    steps and teach nothing about them, so they correct the marginal cost only.

    points: (tokens, seconds), rising tokens.
    """

    def __init__(self, points: Sequence[tuple[int, float]], per_slot: float = 0.0, per_row_slot: float = 0.0) -> None:
        self._tokens = [float(tokens) for tokens, _ in points]
        self._seconds: list[float] = []
        for _, seconds in points:  # a step of more tokens is never cheaper; noise may say so
            self._seconds.append(max([seconds, *self._seconds[-1:]]))
        self._per_slot = per_slot
        self._per_row_slot = per_row_slot
        self.read = 1.0
        self._scale = 1.0
        self._beside = 0.0
        self._buckets: dict[int, list[float]] = {}  # tokens // BUCKET -> [correction, observations]
        self._curve: dict[int, float] = {}  # what was interpolated so far

    @property
    def points(self) -> list[tuple[int, float]]:
        """The probed curve: (tokens, seconds) of steps at short context."""
        return [(int(tokens), seconds) for tokens, seconds in zip(self._tokens, self._seconds, strict=True)]

    def anew(self) -> StepCost:
        """Return a copy as it was probed, without what was learnt since."""
        return StepCost(self.points, self._per_slot, self._per_row_slot)

    def __call__(self, tokens: int, rows: int, reach: int) -> float:
        """Return seconds for `tokens` in all, on `rows` rows of `reach` slots each."""
        return self._expected(tokens, rows, reach) * self._correction(tokens)

    def _expected(self, tokens: int, rows: int, reach: int) -> float:
        return self._base(tokens) + reach * (rows * self.read * self._per_row_slot + tokens * self._per_slot)

    def marginal(self, tokens: int, reach: int) -> float:
        """Return seconds that one more token costs in a step of `tokens` that also computes prompts."""
        slope = max(0.0, self._base(tokens + CHUNK_SLOPE) - self._base(tokens)) / CHUNK_SLOPE
        return (max(slope, self._beside) + reach * self._per_slot) * self._scale

    def observe_beside(self, tokens: int, seconds: float) -> None:
        """Learn from a step that also computed prompts, where one more token costs about as much as each before it."""
        share = seconds / tokens / self._scale
        self._beside += (LEARN if self._beside else 1.0) * (share - self._beside)

    def observe(self, tokens: int, rows: int, reach: int, seconds: float) -> None:
        """Learn from a step of decoding alone. One that something else interrupted is clipped."""
        ratio = min(2.0, max(0.5, seconds / self._expected(tokens, rows, reach) / self._scale))
        self._scale *= 1 + LEARN / 2 * (ratio - 1)
        bucket = self._buckets.setdefault(tokens // BUCKET, [1.0, 0.0])
        bucket[0] += LEARN * (ratio - bucket[0])
        bucket[1] += 1

    def _correction(self, tokens: int) -> float:
        own, seen = self._buckets.get(tokens // BUCKET, (1.0, 0.0))
        trust = seen / (seen + TRUST)
        return self._scale * (1 + trust * (own - 1))

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
