"""How many draft tokens to verify, per row and step: those that raise the expected tokens per second.

    (rows + sum of chosen survivals) / cost(rows + chosen)

Survival never rises along a chain, so the best M of all slots are prefixes of chains: sort them, and look at every M,
for the cost curve is not convex (two tokens may cost as much as eight). In a step that computes prompts too, which must
be paid anyway, a draft token has to earn its own seconds at the rate of a step without prompts.
Prior art: SmartSpec (arXiv:2406.14066), AdaServe (arXiv:2501.12162).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

LEAST_GAIN = 1.02  # below this, not speculating is as good
LEARN = 0.1  # weight of a new observation
TRUST = 8.0  # observations after which a bucket's own correction counts half


class Cost(Protocol):
    """What a step takes, in seconds."""

    def __call__(self, tokens: int, rows: int, reach: int) -> float:
        """Return seconds for `tokens` in all, on `rows` rows of up to `reach` slots."""

    def marginal(self, tokens: int, reach: int) -> float:
        """Return seconds that one token more costs in a step of `tokens` that also computes prompts."""


class StepCost:
    """Seconds of one target step: a curve over tokens, plus attention over the cache, corrected as the run goes on.

    points: (tokens, seconds) at short context, rising tokens. per_slot: seconds per token and slot that it attends to;
    per_row_slot: seconds per row and slot, whatever the tokens.
    """

    def __init__(self, points: Sequence[tuple[int, float]], per_slot: float = 0.0, per_row_slot: float = 0.0) -> None:
        self._tokens = [float(tokens) for tokens, _ in points]
        self._seconds: list[float] = []
        for _, seconds in points:  # a step of more tokens is never cheaper; noise may say so
            self._seconds.append(max([seconds, *self._seconds[-1:]]))
        self._per_slot = per_slot
        self._per_row_slot = per_row_slot
        self._scale = 1.0
        self._beside = 0.0  # seconds per token of steps that also compute prompts
        self._buckets: dict[int, list[float]] = {}  # tokens, in steps of 4 -> [correction, observations]
        self._curve: dict[int, float] = {}

    @property
    def points(self) -> list[tuple[int, float]]:
        """The probed curve: (tokens, seconds) of steps at short context."""
        return [(int(tokens), seconds) for tokens, seconds in zip(self._tokens, self._seconds, strict=True)]

    def anew(self) -> StepCost:
        """Return the cost as it was probed, without what was learnt since."""
        return StepCost(self.points, self._per_slot, self._per_row_slot)

    def __call__(self, tokens: int, rows: int, reach: int) -> float:
        """Return seconds for `tokens` in all, on `rows` rows of up to `reach` slots."""
        return self._expected(tokens, rows, reach) * self._correction(tokens)

    def _expected(self, tokens: int, rows: int, reach: int) -> float:
        return self._base(tokens) + reach * (rows * self._per_row_slot + tokens * self._per_slot)

    def marginal(self, tokens: int, reach: int) -> float:
        """Return seconds that one token more costs in a step of `tokens` that also computes prompts."""
        linear = max(0.0, self._base(tokens + 16) - self._base(tokens)) / 16
        return (max(linear, self._beside) + reach * self._per_slot) * self._scale

    def observe_beside(self, tokens: int, seconds: float) -> None:
        """Learn from a step that also computed prompts: there, a token more is about as dear as those before it."""
        share = seconds / tokens / self._scale
        self._beside += (LEARN if self._beside else 1.0) * (share - self._beside)

    def observe(self, tokens: int, rows: int, reach: int, seconds: float) -> None:
        """Learn from a step that took `seconds`. A step that was interrupted by something else counts little."""
        ratio = min(2.0, max(0.5, seconds / self._expected(tokens, rows, reach) / self._scale))
        self._scale *= 1 + LEARN / 2 * (ratio - 1)
        bucket = self._buckets.setdefault(tokens >> 2, [1.0, 0.0])
        bucket[0] += LEARN * (ratio - bucket[0])
        bucket[1] += 1

    def _correction(self, tokens: int) -> float:
        own, seen = self._buckets.get(tokens >> 2, (1.0, 0.0))
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


def allocate(survivals: Sequence[Sequence[float]], cost: Cost, reach: int, besides: int = 0) -> list[int]:
    """Return how many tokens of each row's chain to verify.

    survivals: per row, the probability of each prefix of its chain. reach: slots of the longest row. besides: tokens
    in the step that are not these rows' (prefill).
    """
    rows = len(survivals)
    slots = [(-value, depth, row) for row, chain in enumerate(survivals) for depth, value in enumerate(chain)]
    slots.sort()  # of equals the shallower first: each choice is prefixes of chains
    plain = rows / cost(rows, rows, reach)
    taken = [0] * rows
    best, rate = _best(slots, rows, cost, reach, plain * LEAST_GAIN)
    if besides:
        least = rate * cost.marginal(besides + rows, reach)
        best = sum(-value > least for value, _, _ in slots)
    for _, _, row in slots[:best]:
        taken[row] += 1
    return taken


def _best(
    slots: Sequence[tuple[float, int, int]], rows: int, cost: Cost, reach: int, least_rate: float
) -> tuple[int, float]:
    """Return how many of the slots, best first, make the most tokens per second, and how many that is.

    0 and `least_rate` where none makes more than that.
    """
    best, best_rate = 0, least_rate
    expected = float(rows)
    for chosen, (value, _, _) in enumerate(slots, 1):
        expected -= value
        rate = expected / cost(rows + chosen, rows, reach)
        if rate > best_rate:
            best, best_rate = chosen, rate
    return best, best_rate
