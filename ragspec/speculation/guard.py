"""Never slower than off: drafts are judged by what steps really take, and paused where they lose.

    >>> if guard.allows(rows): drafts = ...
    >>> guard.observe(rows, drafted, tokens=written, seconds=spent)

A step that drafts is compared with plain steps of as many rows: those in which nothing was worth drafting, and one now
and then for which the guard itself asks. What counts is the seconds saved, with an interval: drafts are paused once
even its upper end is a loss, and tried again after a while. Steps that also compute prompts teach nothing and are not
asked to be plain. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log, sqrt
from typing import Any

FADE = 0.98  # weight of the past at each step that drafts
LEARN = 0.25  # weight of a new plain step in the mean of its number of rows
NEAR = 1.15  # numbers of rows within this ratio of each other take alike
TRUSTED = 2  # plain steps before they are compared with
ENOUGH = 6  # steps that draft, before anything is judged by them
AGAIN = 3  # the same after a pause, when what was learnt before it still counts
SIDE = 2.0  # standard errors, for many steps; more for few, as few say little of their own spread
SURE = 1.1  # times as fast, from which on plain steps may be rare
EVERY, RARE = 32, 256  # steps that draft for each plain one: at first, and where drafts clearly win
KEPT = 5.0  # steps' weight that is left after a pause
PAUSE, LONGEST, LONGER = 64, 4096, 4  # steps: the first pause, and the longest; each so many times the one before
WILD = 3.0  # times the usual: what takes longer was interrupted by something else


@dataclass(slots=True)
class _Plain:
    """Steps without drafts. seconds: a fading mean. count: of them. ago: steps that drafted since the latest."""

    seconds: float
    count: int = 0
    ago: int = 0


class Guard:
    """Judges one method in one run."""

    def __init__(self) -> None:
        self._plain: dict[int, _Plain] = {}  # by rows
        self._pause = 0  # plain steps that are left of a pause
        self._length = PAUSE
        self._every = EVERY
        self._pauses = self._paused = self._asked = 0
        self._wait = ENOUGH  # steps that draft, before the next judgement
        self._catches_up = False  # the first step after a pause, which a drafter may need to see what it missed
        self._weight = self._weight2 = 0.0  # sums of the steps' weights and of their squares
        self._saved = self._spread = 0.0  # mean seconds saved, and the weighted squares about it
        self._would = self._took = 0.0  # seconds that plain steps would have taken, and that these took

    def allows(self, rows: int, mixed: bool = False) -> bool:
        """Return whether the coming step of `rows` rows may draft. mixed: it computes prompts too."""
        if self._pause:
            self._pause -= 1
            self._paused += 1
            return False
        if mixed:
            return True
        plain = self._nearest(rows)
        if plain is None or plain.count < TRUSTED or plain.ago >= self._every:
            self._asked += 1
            return False
        return True

    def observe(self, rows: int, drafted: int, tokens: int, seconds: float) -> None:
        """Learn from a step of decoding alone: `drafted` tokens verified, `tokens` written, drafting included."""
        if not drafted:
            self._learn(self._plain.setdefault(rows, _Plain(seconds)), seconds)
            return
        plain = self._nearest(rows)
        if self._catches_up:
            self._catches_up = False
        elif plain is not None:
            plain.ago += 1
            usual = max(plain.seconds, self._took / self._weight) if self._weight else inf
            self._judge(tokens * plain.seconds / rows, min(seconds, WILD * usual))

    def _learn(self, plain: _Plain, seconds: float) -> None:
        if plain.count < TRUSTED:
            plain.seconds = min(plain.seconds, seconds)  # the first may have been interrupted
        else:
            plain.seconds += LEARN * (min(seconds, WILD * plain.seconds) - plain.seconds)
        plain.count += 1
        plain.ago = 0

    def _judge(self, would: float, took: float) -> None:
        """Take in a step in place of which plain ones would have taken `would` seconds."""
        self._weight = FADE * self._weight + 1
        self._weight2 = FADE**2 * self._weight2 + 1
        self._would = FADE * self._would + would
        self._took = FADE * self._took + took
        away = would - took - self._saved
        self._saved += away / self._weight
        self._spread = FADE * self._spread + away * (would - took - self._saved)
        self._wait -= 1
        if self._wait > 0:
            return
        steps = self._weight**2 / self._weight2
        error = SIDE * (1 + ENOUGH / steps) * sqrt(self._spread / self._weight / max(1.0, steps - 1))
        if self._saved + error < 0:
            self._pause, self._length = self._length, min(LONGEST, LONGER * self._length)
            self._pauses += 1
            self._every, self._wait, self._catches_up = EVERY, AGAIN, True
            self._remember(min(1.0, KEPT / self._weight))
        elif self._would - error * self._weight > SURE * self._took:
            self._length = PAUSE  # whatever lost before does so no longer
            if steps > self._every / 2:
                self._every = min(RARE, 2 * self._every)

    def _remember(self, share: float) -> None:
        """Keep this share of what was learnt: after a pause, a few steps tell whether it still holds."""
        self._weight *= share
        self._weight2 *= share**2
        self._spread *= share
        self._would *= share
        self._took *= share

    def _nearest(self, rows: int) -> _Plain | None:
        """Return what is known of plain steps of about `rows` rows."""
        known = min(self._plain, key=lambda other: abs(log(other / rows)), default=None)
        return None if known is None or abs(log(known / rows)) > log(NEAR) + 1e-9 else self._plain[known]

    @property
    def ratio(self) -> float:
        """Return how fast steps that draft are, in plain ones; infinite before any is known."""
        return self._would / self._took if self._took else inf

    def about(self) -> dict[str, Any]:
        """Return what the statistics say: what was decided, and by what."""
        ratio = None if self.ratio == inf else round(self.ratio, 3)
        return {"ratio": ratio, "pauses": self._pauses, "paused_steps": self._paused, "plain_steps": self._asked}
