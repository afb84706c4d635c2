"""Which method is the fastest here: a few steps of decoding for each in turn, again and again, then the best.

    speculation: {method: auto}

    >>> drafts = trial.ask(lambda name: proposers[name].propose(rows), lambda name: proposers[name].watch(rows))
    >>> trial.observe(tokens=written, seconds=spent)

Turns are interleaved, so that growing answers and a noisy machine affect all methods alike. Nothing is thrown away:
whichever method drafted, the step's tokens are the answer's. Drafters learn as they go, so the choice is made twice.
Both engines, ours and vLLM, are driven by this one class.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

BLOCK = 4  # steps of one method before the next has its turn
ROUNDS = 4  # turns of each
TRIALS = 2
PAUSE = 2  # between the trials, in lengths of a trial
LEAST_GAIN = 1.02  # over the first, below which the first is as good

Drafts = TypeVar("Drafts")


class Trial:
    """names: the methods, the plainest first. The latest answer is in `chosen`, None before there is one."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._length = BLOCK * ROUNDS * len(self._names)
        self._left = TRIALS if len(self._names) > 1 else 0
        self._steps = 0  # of this trial, or of the pause after it
        self._watching = 0.0  # seconds of this step that are not the current method's
        self._pausing = not self._left  # the chosen one has all turns
        self._tokens: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._choices: list[str] = []
        self._figures: dict[str, float] = {}  # of the last trial that was finished
        self.chosen: str | None = None if self._left else self._names[0]

    @property
    def settled(self) -> bool:
        """Whether the choice is final."""
        return not self._left

    @property
    def candidates(self) -> list[str]:
        """The methods that may still have a turn."""
        return [self.chosen] if self.settled and self.chosen else self._names

    @property
    def current(self) -> str:
        """The method whose turn it is."""
        if self.chosen and self._pausing:
            return self.chosen
        return self._names[self._steps // BLOCK % len(self._names)]

    def ask(self, propose: Callable[[str], Drafts], watch: Callable[[str], object]) -> Drafts:
        """Return what `propose` gives for the current method; `watch` lets each of the others look on, and learn.

        Nobody looks on once the choice is final.
        """
        current = self.current
        drafts = propose(current)
        started = time.perf_counter()
        for name in self.candidates:
            if name != current:
                watch(name)
        self._watching = time.perf_counter() - started
        return drafts

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in a step of the current method that wrote `tokens`. seconds: all of it; watching is left out here."""
        if self.settled:
            return
        name = self.current
        self._steps += 1
        if self._pausing:
            if self._steps == PAUSE * self._length:
                self._steps, self._pausing = 0, False
            return
        self._tokens[name] = self._tokens.get(name, 0) + tokens
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds - self._watching
        if self._steps == self._length:
            self._decide()

    def _decide(self) -> None:
        rates = self._figures = self._rates()
        best = max(rates, key=lambda name: rates[name])
        self.chosen = best if rates[best] > rates[self._names[0]] * LEAST_GAIN else self._names[0]
        self._choices.append(self.chosen)
        self._left -= 1
        self._steps, self._pausing = 0, True
        self._tokens, self._seconds = {}, {}

    def _rates(self) -> dict[str, float]:
        return {name: self._tokens[name] / seconds for name, seconds in self._seconds.items() if seconds}

    def rates(self) -> dict[str, float]:
        """Return decoded tokens per second of each method in the trial that decided, or in the first so far."""
        return self._figures or self._rates()

    def about(self) -> dict[str, Any]:
        """Return what the statistics say of the choice."""
        return {"method": self.chosen, "trial": {name: round(rate, 2) for name, rate in self.rates().items()}}

    def note(self) -> str:
        """Return what was chosen, and by which figures."""
        shown = ", ".join(f"{name} {rate:.1f}" for name, rate in self.rates().items())
        if self.chosen is None:
            return f"method auto: too few steps to choose by ({shown or 'none'})"
        before = f"; at first {self._choices[0]}" if len(self._choices) > 1 else ""
        return f"method auto: {self.chosen} (decode tokens/s in {self._length} steps, taken in turn: {shown}{before})"
