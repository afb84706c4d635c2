"""Which method is the fastest here: a few steps of decoding for each in turn, again and again, then the best.

    speculation: {method: auto}

    >>> drafts = trial.ask(lambda name: proposers[name].propose(rows), lambda name: proposers[name].watch(rows))
    >>> trial.observe(tokens=written, seconds=spent)

Turns are interleaved, so that growing answers and a noisy machine affect all methods alike. A method that is far behind
twice in a row has no more turns. Nothing is thrown away: whichever method drafted, the step's tokens are the answer's.
Drafters learn as they go, so the choice is made twice, among all of them.
Both engines, ours and vLLM, are driven by this one class.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, TypeVar

BLOCK = 4  # steps of one method before the next has its turn
ROUNDS = 4  # turns of each
TRIALS = 2
PAUSE = 2  # between the trials, in lengths of a trial
LEAST_GAIN = 1.02  # over the first, below which the first is as good
BEHIND = 0.75  # of the fastest method's turn: what is slower in two rounds on end is out

Drafts = TypeVar("Drafts")


class Trial:
    """names: the methods, the plainest first. The latest answer is in `chosen`, None before there is one."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._pause = PAUSE * BLOCK * ROUNDS * len(self._names)
        self._left = TRIALS if len(self._names) > 1 else 0
        self._steps = 0  # of this turn, or of the pause between the trials
        self._watching = 0.0  # seconds of this step that are not the current method's
        self._pausing = not self._left  # the chosen one has all turns
        self._choices: list[str] = []
        self._figures: dict[str, float] = {}  # of the last trial that was finished
        self._took = 0  # steps of it
        self._begin()
        self.chosen: str | None = None if self._left else self._names[0]

    def _begin(self) -> None:
        """Begin a trial, with all methods."""
        self._racing = list(self._names)
        self._turn = 0  # whose it is, in `_racing`
        self._turns: dict[str, list[tuple[int, float]]] = {name: [] for name in self._names}  # tokens and seconds

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
        return self._racing[self._turn]

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
        self._steps += 1
        if self._pausing:
            if self._steps == self._pause:
                self._steps, self._pausing = 0, False
                self._begin()
            return
        turns = self._turns[self.current]
        if self._steps == 1:
            turns.append((0, 0.0))
        turns[-1] = turns[-1][0] + tokens, turns[-1][1] + seconds - self._watching
        if self._steps == BLOCK:
            self._steps, self._turn = 0, self._turn + 1
            if self._turn == len(self._racing):
                self._end_round()

    def _end_round(self) -> None:
        rounds, self._turn = len(self._turns[self._racing[0]]), 0
        if rounds > 1:
            behind = [self._behind(-1), self._behind(-2)]
            self._racing = [name for name in self._racing if not all(name in late for late in behind)]
        if rounds == ROUNDS or len(self._racing) == 1:
            self._decide()

    def _behind(self, turn: int) -> set[str]:
        """Return the methods that were far behind the fastest in a turn."""
        rates = {name: _rate([self._turns[name][turn]]) for name in self._racing}
        return {name for name, rate in rates.items() if rate < BEHIND * max(rates.values())}

    def _decide(self) -> None:
        rates = self._figures = self._rates()
        best = max(rates, key=lambda name: rates[name])
        self.chosen = best if rates[best] > rates[self._names[0]] * LEAST_GAIN else self._names[0]
        self._choices.append(self.chosen)
        self._took = BLOCK * sum(map(len, self._turns.values()))
        self._left -= 1
        self._steps, self._pausing = 0, True

    def _rates(self) -> dict[str, float]:
        return {name: _rate(turns) for name, turns in self._turns.items() if sum(seconds for _, seconds in turns)}

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
        return f"method auto: {self.chosen} (decode tokens/s in {self._took} steps, taken in turn: {shown}{before})"


def _rate(turns: Sequence[tuple[int, float]]) -> float:
    """Return tokens per second over all turns; infinite where they took no time."""
    tokens, seconds = (sum(each) for each in zip(*turns, strict=True))
    return tokens / seconds if seconds else inf
