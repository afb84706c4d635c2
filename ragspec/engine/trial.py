"""Which method is the fastest here: a few steps of decoding for each in turn, again and again, then the best. Pure.

    speculation: {method: auto}

The steps are interleaved, so that longer answers and a noisy machine meet all methods alike; whatever method a step
had, its tokens stand in the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BLOCK = 4  # steps of one method before the next has its turn
ROUNDS = 4  # turns of each
LEAST_GAIN = 1.02  # over the first, below which the first is as good


class Trial:
    """names: the methods, the plainest first. The answer is in `chosen` as soon as it is known."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._tokens = dict.fromkeys(self._names, 0)
        self._seconds = dict.fromkeys(self._names, 0.0)
        self._steps = 0
        self.chosen: str | None = self._names[0] if len(self._names) == 1 else None

    @property
    def current(self) -> str:
        """The method whose turn it is."""
        return self.chosen or self._names[self._steps // BLOCK % len(self._names)]

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in a step of the current method that wrote `tokens`."""
        if self.chosen is not None:
            return
        name = self.current
        self._tokens[name] += tokens
        self._seconds[name] += seconds
        self._steps += 1
        if self._steps == BLOCK * ROUNDS * len(self._names):
            self.chosen = self._best()

    def rates(self) -> dict[str, float]:
        """Return decoded tokens per second of each method that had its turn."""
        return {name: self._tokens[name] / seconds for name, seconds in self._seconds.items() if seconds}

    def _best(self) -> str:
        rates = self.rates()
        best = max(rates, key=lambda name: rates[name])
        return best if rates[best] > rates[self._names[0]] * LEAST_GAIN else self._names[0]

    def about(self) -> dict[str, Any]:
        """Return what the statistics say of the choice."""
        return {"method": self.chosen, "trial": {name: round(rate, 2) for name, rate in self.rates().items()}}

    def note(self) -> str:
        """Return what was chosen, and by which figures."""
        shown = ", ".join(f"{name} {rate:.1f}" for name, rate in self.rates().items())
        if self.chosen is None:
            return f"method auto: too few steps to choose by ({shown or 'none'})"
        return f"method auto: {self.chosen} (decode tokens/s in {self._steps} steps, taken in turn: {shown})"
