"""Select the fastest method during a run: one drafts, the others get occasional turns, and a faster one takes over.

    speculation: {method: auto}

    >>> if selector.allows(rows, expected_s): drafts = selector.ask(lambda name: ..., lambda name: ...)
    >>> selector.observe(rows, drafted, tokens=written, seconds=spent, expected_s=expected_s, asking_s=asking)
    >>> selector.observe_beside(rows, accepted, seconds=spent, expected_s=expected_s, asking_s=asking)

All methods are compared with the same plain steps (speculation_guard.py), so measurements from different times are
comparable, and the active method is paused while it loses. Turns are paid for from a small share of the time, to which
their gains return: a short run has none, and a slow method costs little. Answers do not depend on the method. Both our
engine and vLLM use this class.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeVar

from ragspec.speculation.speculation_guard import WILD, PlainSteps, Savings, SpeculationGuard

SHARE = 0.02  # of the time, that turns of other methods may lose
TURN = 5  # steps of a turn; the first is not counted, since a drafter may have to catch up
UNKNOWN = 1.0  # of a turn's plain steps: the assumed loss of a first turn, and the loss that ends a turn
LEAST = 0.02  # of a turn's plain steps: the least assumed loss of a later turn
TURNS = 3  # turns before a method may take over or is excluded
LEAST_GAIN = 1.02  # over the active method, to take over

Drafts = TypeVar("Drafts")


@dataclass(slots=True)
class _Method:
    """Statistics of one method. savings: over all its steps, with or without drafts. lost_s: seconds lost in turns."""

    guard: SpeculationGuard
    savings: Savings = field(default_factory=Savings)
    steps: int = 0
    turns: int = 0
    lost_s: float = 0.0


class MethodSelector:
    """Selects among `names`; the first drafts from the beginning. `chosen` is the active method.

    overlaps: whether a plain step is started before the plain one before it is read.
    """

    def __init__(self, names: Sequence[str], overlaps: bool = False) -> None:
        self.plain = PlainSteps(overlaps)
        self._methods = {name: _Method(SpeculationGuard(self.plain)) for name in names}
        self.chosen, *self._others = names
        self.current = self.chosen  # the method that drafts in the coming step
        self._left = 0  # steps left in the turn
        self._turn = ""  # the method whose turn it is
        self._turn_lost_s = 0.0
        self._asked = self._in_turn = False  # whether the coming step counts for the current method; in a turn
        self._saved_up_s = 0.0
        self._watching_s = 0.0  # seconds of this step spent by other methods
        self._latest = 1, 1.0  # the latest step's rows, and what a plain step of them is expected to take
        self._first = self.chosen

    @property
    def candidates(self) -> list[str]:
        """Return the methods that may still draft."""
        return [self.chosen, *self._others]

    def rests(self, mixed: bool = False) -> bool:
        """Return whether the coming step is to be a plain one. mixed: it is expected to compute prompts."""
        turn = self._left > 0 or self._next_turn(*self._latest) is not None
        return not turn and self._methods[self.chosen].guard.rests(mixed)

    def allows(self, rows: int, expected_s: float, mixed: bool = False, ahead: bool = False) -> bool:
        """Return whether the coming step may draft, and choose its method in `current`.

        expected_s: seconds of a plain step of these rows. mixed: the step also computes prompts. ahead: it has been
        started without drafts.
        """
        self._watching_s, self._latest = 0.0, (rows, expected_s)
        if not self._left and not mixed:
            self._begin(self._next_turn(rows, expected_s))
        self._in_turn = self._left > 0 and not mixed and not ahead  # a step with prefill is not part of a turn
        self.current = self._turn if self._in_turn else self.chosen
        allowed = self._in_turn or self._methods[self.chosen].guard.allows(rows, expected_s, mixed)
        self._asked = allowed and not ahead
        return self._asked

    def _next_turn(self, rows: int, expected_s: float) -> str | None:
        """Return the method with the fewest turns if a turn of it is affordable, None if not."""
        plain = self.plain.seconds(rows, expected_s) if self._others else None
        if plain is None:
            return None
        name = min(self._others, key=lambda other: self._methods[other].turns)
        method, step = self._methods[name], TURN * plain
        price_s = max(LEAST * step, method.lost_s / method.turns) if method.turns else UNKNOWN * step
        return name if self._saved_up_s >= price_s else None

    def _begin(self, name: str | None) -> None:
        """Begin the turn of a method, if any."""
        if name is not None:
            self._turn, self._left, self._turn_lost_s = name, TURN, 0.0
            self._methods[name].turns += 1

    def ask(self, propose: Callable[[str], Drafts], watch: Callable[[str], object]) -> Drafts:
        """Return the result of `propose` for the current method. watch: lets another method observe the step."""
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
        """Record a step without prefill: `drafted` tokens verified, `tokens` emitted.

        seconds: of the step, drafting included. asking_s: the part of it in which methods were asked for drafts.
        """
        method = self._methods[self.current]
        seconds, asking_s = self._own(seconds, asking_s)
        without = self.plain.without(rows, expected_s, seconds, asking_s)
        plain = self.plain.seconds(rows, expected_s) if drafted else without
        if plain is not None:
            seconds = min(seconds, WILD * max(plain, method.savings.mean_s or inf))  # clip outside interruptions
            asking_s = asking_s if drafted else seconds - plain
        self._saved_up_s += SHARE * seconds
        if self._asked and plain is not None:
            plain_s = tokens * plain / rows
            if not self._in_turn:
                method.savings.add(plain_s, seconds)
            else:
                self._observe_turn(method, plain_s, seconds, UNKNOWN * TURN * plain)
            method.steps += 1
        self._asked = self._in_turn = False
        method.guard.observe(rows, drafted, tokens, seconds, expected_s, asking_s)

    def observe_beside(self, rows: int, accepted: int, seconds: float, expected_s: float, asking_s: float) -> None:
        """Record a step with prefill, in which `accepted` draft tokens were right; see observe()."""
        seconds, asking_s = self._own(seconds, asking_s)
        self._asked = False
        self._methods[self.current].guard.observe_beside(rows, accepted, seconds, expected_s, asking_s)

    def _own(self, seconds: float, asking_s: float) -> tuple[float, float]:
        """Return the seconds of a step and of asking in it, without those of watching methods."""
        watching_s, self._watching_s = self._watching_s, 0.0
        return seconds - watching_s, max(0.0, asking_s - watching_s)

    def _observe_turn(self, method: _Method, plain_s: float, seconds: float, most_s: float) -> None:
        """Record a step of a turn. most_s: the loss that ends the turn early."""
        if self._left < TURN:
            method.savings.add(plain_s, seconds)
        saved = plain_s / self._active_speed() - seconds  # compared with the active method
        method.lost_s -= saved
        self._saved_up_s += saved
        self._turn_lost_s -= saved
        self._left = 0 if self._turn_lost_s > most_s else self._left - 1
        if not self._left and method.turns >= TURNS:
            self._decide(method)

    def _active_speed(self) -> float:
        """Return the speed of the active method relative to plain steps."""
        chosen = self._methods[self.chosen]
        return 1.0 if chosen.guard.pausing else max(1.0, chosen.savings.ratio or 1.0)

    def _decide(self, method: _Method) -> None:
        """Let the method whose turn ended take over, or exclude it, if the result is clear."""
        (low, high), usual = method.savings.interval, self._active_speed()
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
        """Return the statistics: the active method, and each method's speed relative to plain steps."""
        ratios = {name: round(ratio, 3) for name, ratio in self._ratios().items()}
        return {"method": self.chosen, "trial": ratios, "guard": self._methods[self.chosen].guard.about()}

    def note(self) -> str:
        """Return a note on the active method, with speeds and their intervals."""
        shown = [f"{name} {self._speed(name)}" for name in self._ratios()]
        if not shown:
            return f"method auto: {self.chosen}; too few steps to compare it with others"
        before = f"; at first {self._first}" if self.chosen != self._first else ""
        return f"method auto: {self.chosen} (compared with plain decoding: {', '.join(shown)}{before})"

    def _speed(self, name: str) -> str:
        method = self._methods[name]
        low, high = method.savings.interval
        return f"{method.savings.ratio or 0.0:.2f}x ({max(0.0, low):.2f} to {high:.2f}) in {method.steps} steps"
