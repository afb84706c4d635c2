"""What steps without drafts take, learnt from those there are: what drafts are judged by (guard.py, trial.py). Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log

LEARN = 0.25  # weight of a new plain step in the mean of its number of rows
NEAR = 1.15  # numbers of rows within this ratio of each other are off alike
TRUSTED = 2  # plain steps before they are compared with
ELSEWHERE = 16  # steps that draft with a number of rows of which no plain step is known, before one is asked for
WILD = 3.0  # times the usual: what takes longer was interrupted by something else


@dataclass(slots=True)
class _Plain:
    """Plain steps of some number of rows. off: seconds over those expected, a fading mean. count: of them."""

    off: float
    count: int = 0


@dataclass(slots=True)
class PlainSteps:
    """What steps without drafts take, learnt for all who are judged by them. ago: steps that drafted since the latest.

    elsewhere: the same, of those with numbers of rows that no plain step was near.
    """

    ago: int = 0
    elsewhere: int = 0
    _known: dict[int, _Plain] = field(default_factory=dict)  # by rows

    def learn(self, rows: int, seconds: float, expected_s: float) -> None:
        """Take in a step of `rows` rows."""
        off = seconds / expected_s
        plain = self._known.setdefault(rows, _Plain(off))
        if plain.count < TRUSTED:
            plain.off = min(plain.off, off)  # the first may have been interrupted
        else:
            plain.off += LEARN * (min(off, WILD * plain.off) - plain.off)
        plain.count += 1
        self.ago = 0
        if plain.count >= TRUSTED:
            self.elsewhere = 0

    def drafted(self, rows: int) -> None:
        """Take note of a step that drafted."""
        self.ago += 1
        self.elsewhere += not self._near(rows)

    def wanted(self, rows: int, every: int) -> bool:
        """Return whether the coming step should be plain. every: steps that draft for each plain one."""
        known = self._nearest(rows)
        return known is None or self.ago >= every or (self.elsewhere >= ELSEWHERE and not self._near(rows))

    def seconds(self, rows: int, expected_s: float) -> float | None:
        """Return what a plain step takes of which `expected_s` are expected; None where nothing is known."""
        known = self._nearest(rows)
        return None if known is None else self._known[known].off * expected_s

    def _nearest(self, rows: int) -> int | None:
        """Return the number of rows nearest to `rows` of which plain steps are known."""
        trusted = (other for other, plain in self._known.items() if plain.count >= TRUSTED)
        return min(trusted, key=lambda other: abs(log(other / rows)), default=None)

    def _near(self, rows: int) -> bool:
        known = self._nearest(rows)
        return known is not None and abs(log(known / rows)) <= log(NEAR) + 1e-9
