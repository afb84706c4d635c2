"""Which method is the fastest here: one drafts, the others have a turn now and then, and whoever is faster takes over.

    speculation: {method: auto}

    >>> if trial.allows(rows, expected_s): drafts = trial.ask(lambda name: ..., lambda name: ...)
    >>> trial.observe(rows, drafted, tokens=written, seconds=spent, expected_s=expected_s, asking_s=asking)
    >>> trial.observe_beside(rows, accepted, seconds=spent, expected_s=expected_s, asking_s=asking)

All methods are judged beside the same plain steps (guard.py), so what was measured at different times can be compared,
and the one that drafts is paused where it loses. Turns are paid for out of a small share of the time, to which their
gains come back: a run too short to learn from them has none, and a method that is worse costs little. Whichever method
drafted, the step's tokens are the answer's. Both engines, ours and vLLM, are driven by this one class.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeVar

from ragspec.speculation.guard import Guard
from ragspec.speculation.plain_steps import WILD, PlainSteps
from ragspec.speculation.savings import Savings

SHARE = 0.02  # of the time, that turns of other methods may lose
TURN = 5  # steps of a turn; the first is not judged, for a drafter may have something to catch up with
UNKNOWN = 1.0  # of a turn's plain steps: what one is taken to lose, before the first, and what ends one
LEAST = 0.02  # of a turn's plain steps: what one may lose by chance
TURNS = 3  # after which a method may take over, or is out
LEAST_GAIN = 1.02  # over the one that drafts, to take over

Drafts = TypeVar("Drafts")


@dataclass(slots=True)
class _Method:
    """What is known of one. savings: of all its steps, those in which it drafted nothing too. lost_s: in its turns."""

    guard: Guard
    savings: Savings = field(default_factory=Savings)
    steps: int = 0
    turns: int = 0
    lost_s: float = 0.0


class Trial:
    """names: the methods; the first drafts from the beginning. `chosen` is who drafts at present."""

    def __init__(self, names: Sequence[str]) -> None:
        self.plain = PlainSteps()
        self._methods = {name: _Method(Guard(self.plain)) for name in names}
        self.chosen, *self._others = names
        self.current = self.chosen  # who drafts in the coming step
        self._left = 0  # steps of a turn
        self._turn = ""  # whose it is
        self._turn_lost_s = 0.0
        self._asked = self._in_turn = False  # whether the coming step is the current method's, and one of its turn
        self._saved_up_s = 0.0
        self._watching_s = 0.0  # of this step, that are not the current method's
        self._first = self.chosen

    @property
    def candidates(self) -> list[str]:
        """The methods that may still draft."""
        return [self.chosen, *self._others]

    def allows(self, rows: int, expected_s: float, mixed: bool = False) -> bool:
        """Return whether the coming step of `rows` rows may draft, and choose who does. mixed: it computes prompts too.

        expected_s: of a plain step of these rows.
        """
        self._watching_s = 0.0
        if not self._left and not mixed:
            self._begin(rows, expected_s)
        self._in_turn = self._left > 0 and not mixed  # one that computes prompts is no part of a turn
        self.current = self._turn if self._in_turn else self.chosen
        self._asked = self._in_turn or self._methods[self.chosen].guard.allows(rows, expected_s, mixed)
        return self._asked

    def _begin(self, rows: int, expected_s: float) -> None:
        """Begin the turn of the method that had fewest, if it can be paid for."""
        plain = self.plain.seconds(rows, expected_s)
        if not self._others or plain is None:
            return
        name = min(self._others, key=lambda other: self._methods[other].turns)
        method, step = self._methods[name], TURN * plain
        if self._saved_up_s >= (max(LEAST * step, method.lost_s / method.turns) if method.turns else UNKNOWN * step):
            self._turn, self._left, self._turn_lost_s = name, TURN, 0.0
            method.turns += 1

    def ask(self, propose: Callable[[str], Drafts], watch: Callable[[str], object]) -> Drafts:
        """Return what `propose` gives for the current method; `watch` lets each of the others look on, and learn."""
        drafts = propose(self.current)
        started = time.perf_counter()
        for name in self.candidates:
            if name != self.current:
                watch(name)
        self._watching_s = time.perf_counter() - started
        return drafts

    def observe(
        self, rows: int, drafted: int, tokens: int, seconds: float, expected_s: float, asking_s: float = 0.0
    ) -> None:
        """Take in a step of decoding alone: `drafted` tokens verified, `tokens` written, drafting included.

        asking_s: seconds of it in which all methods were asked for drafts.
        """
        method = self._methods[self.current]
        seconds, asking_s = self._own(seconds, asking_s)
        plain = self.plain.seconds(rows, expected_s) if drafted else seconds - asking_s
        if plain is not None:
            seconds = min(seconds, WILD * max(plain, method.savings.mean_s or inf))  # more was something else's
            asking_s = asking_s if drafted else seconds - plain
        self._saved_up_s += SHARE * seconds
        if self._asked and plain is not None:
            would = tokens * plain / rows
            if not self._in_turn:
                method.savings.add(would, seconds)
            else:
                self._count(method, would, seconds, UNKNOWN * TURN * plain)
            method.steps += 1
        self._asked = self._in_turn = False
        method.guard.observe(rows, drafted, tokens, seconds, expected_s, asking_s)

    def observe_beside(self, rows: int, accepted: int, seconds: float, expected_s: float, asking_s: float) -> None:
        """Take in a step that computed prompts too, of whose drafts `accepted` tokens were right; as observe()."""
        seconds, asking_s = self._own(seconds, asking_s)
        self._asked = False
        self._methods[self.current].guard.observe_beside(rows, accepted, seconds, expected_s, asking_s)

    def _own(self, seconds: float, asking_s: float) -> tuple[float, float]:
        """Return the seconds of a step that ends, and of asking in it, without those of methods that looked on."""
        watching_s, self._watching_s = self._watching_s, 0.0
        return seconds - watching_s, max(0.0, asking_s - watching_s)

    def _count(self, method: _Method, would: float, seconds: float, most_s: float) -> None:
        """Take in a step of a turn. most_s: what a turn may lose until it ends early."""
        if self._left < TURN:
            method.savings.add(would, seconds)
        saved = would / self._usual() - seconds  # beside what the chosen method would have taken
        method.lost_s -= saved
        self._saved_up_s += saved
        self._turn_lost_s -= saved
        self._left = 0 if self._turn_lost_s > most_s else self._left - 1
        if not self._left and method.turns >= TURNS:
            self._decide(method)

    def _usual(self) -> float:
        """Return how fast steps of the chosen method are, in plain ones."""
        chosen = self._methods[self.chosen]
        return 1.0 if chosen.guard.pausing else max(1.0, chosen.savings.ratio or 1.0)

    def _decide(self, method: _Method) -> None:
        """Let the method whose turn ended take over, or leave it out, where that is clear."""
        (low, high), usual = method.savings.interval, self._usual()
        if low > usual and (method.savings.ratio or 0.0) > LEAST_GAIN * usual:
            before = self._methods[self.chosen]
            before.turns, before.lost_s = 0, 0.0
            self._others[self._others.index(self._turn)] = self.chosen
            self.chosen = self._turn
        elif high < usual:
            self._others.remove(self._turn)

    def _ratios(self) -> dict[str, float]:
        found = {name: method.savings.ratio for name, method in self._methods.items()}
        return {name: ratio for name, ratio in found.items() if ratio is not None}

    def about(self) -> dict[str, Any]:
        """Return what the statistics say: who drafts, and how fast each was, in plain steps."""
        ratios = {name: round(ratio, 3) for name, ratio in self._ratios().items()}
        return {"method": self.chosen, "trial": ratios, "guard": self._methods[self.chosen].guard.about()}

    def note(self) -> str:
        """Return who drafts, and by which figures, with their intervals."""
        shown = [f"{name} {self._told(name)}" for name in self._ratios()]
        if not shown:
            return f"method auto: {self.chosen}; too few steps to compare it with others"
        before = f"; at first {self._first}" if self.chosen != self._first else ""
        return f"method auto: {self.chosen} (compared with plain decoding: {', '.join(shown)}{before})"

    def _told(self, name: str) -> str:
        method = self._methods[name]
        low, high = method.savings.interval
        return f"{method.savings.ratio or 0.0:.2f}x ({max(0.0, low):.2f} to {high:.2f}) in {method.steps} steps"
