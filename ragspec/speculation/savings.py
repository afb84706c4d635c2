"""Seconds that steps saved beside plain ones, with an interval. Pure."""

from __future__ import annotations

from math import inf, sqrt

FADE = 0.98  # weight of the past at each step
ENOUGH = 6  # steps from which on they tell their own spread about as well as many do
SIDE = 2.0  # standard errors, for many steps; more for few


class Savings:
    """Seconds that steps saved, beside plain ones: a fading mean, and how far it may be off."""

    def __init__(self) -> None:
        self._weight = self._weight2 = 0.0  # sums of the steps' weights and of their squares
        self._saved = self._spread = 0.0  # mean seconds saved, and the weighted squares about it
        self._would = self._took = 0.0  # seconds that plain steps would have taken, and that these took

    def add(self, would: float, took: float) -> None:
        """Take in a step in place of which plain ones would have taken `would` seconds."""
        self._weight = FADE * self._weight + 1
        self._weight2 = FADE**2 * self._weight2 + 1
        self._would = FADE * self._would + would
        self._took = FADE * self._took + took
        away = would - took - self._saved
        self._saved += away / self._weight
        self._spread = FADE * self._spread + away * (would - took - self._saved)

    def forget(self, kept: float) -> None:
        """Keep so many steps' weight of what was learnt."""
        share = min(1.0, kept / self._weight) if self._weight else 1.0
        self._weight *= share
        self._weight2 *= share**2
        self._spread *= share
        self._would *= share
        self._took *= share

    @property
    def steps(self) -> float:
        """How many steps of equal weight what is known is worth."""
        return self._weight**2 / self._weight2 if self._weight2 else 0.0

    @property
    def mean_s(self) -> float | None:
        """What a step takes; None before any is known."""
        return self._took / self._weight if self._weight else None

    @property
    def ratio(self) -> float | None:
        """How fast the steps are, in plain ones; None before any is known."""
        return self._would / self._took if self._took else None

    @property
    def interval(self) -> tuple[float, float]:
        """Between what the ratio probably is."""
        if not self._took:
            return 0.0, inf
        spread = sqrt(self._spread / self._weight / max(1.0, self.steps - 1))
        few = ENOUGH / self.steps
        error = SIDE * (1 + max(few, few**2)) * spread * self._weight
        saved = self._saved * self._weight
        return 1 + (saved - error) / self._took, 1 + (saved + error) / self._took
