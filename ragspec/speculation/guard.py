"""Never slower than off: drafts are judged by what steps really take, and paused where they lose.

    >>> if guard.allows(rows, expected_s): drafts = ...
    >>> guard.observe(rows, drafted, tokens=written, seconds=spent, expected_s=expected_s, asking_s=asking)
    >>> guard.observe_beside(rows, accepted, seconds=spent, expected_s=expected_s, asking_s=asking)

A step that drafts is compared with plain steps: those in which nothing was worth drafting, and one now and then for
which the guard itself asks. What plain steps take is known by how far they were off what was expected of them, so that
steps of another number of rows tell it too; what is expected must not learn from steps that draft. What counts is the
seconds saved, with an interval: drafts are paused once even its upper end is a loss, and tried again after a while.
Asking for drafts takes time even where nothing comes of it: a step that asked in vain lost exactly that time, and all
steps that asked are judged together too.
A step that also computes prompts says nothing about plain ones and is never asked to be one. There it is judged whether
asking takes longer than all that comes of it would have taken, and such steps have pauses of their own. Pure.
"""

from __future__ import annotations

from math import inf
from typing import Any

from ragspec.speculation.plain_steps import WILD, PlainSteps
from ragspec.speculation.savings import Savings

SOON = 3  # steps that draft, before anything is judged by them
SURE = 1.1  # times as fast, from which on plain steps may be rare
EVERY, RARE = 32, 256  # steps that draft for each plain one: at first, and where drafts clearly win
KEPT = 5.0  # steps' weight that is left after a pause
PAUSE, LONGEST, LONGER = 64, 4096, 4  # steps: the first pause, and the longest; each so many times the one before
TRIED, WITNESSES = 8, 256  # steps that asked for drafts, and rows in them, before asking is judged
TRIFLE = 0.005  # of the time, that asking may surely lose: it finds out when drafts begin to pay


class _Pauses:
    """The pauses of one kind of step."""

    def __init__(self) -> None:
        self.left = 0  # steps of the present one
        self.count = 0
        self._length = PAUSE  # of the next one

    def begin(self) -> None:
        """Begin a pause, longer than the one before."""
        self.left, self._length = self._length, min(LONGEST, LONGER * self._length)
        self.count += 1

    def shorten(self) -> None:
        """Whatever lost before does so no longer."""
        self._length = PAUSE


class _Asking:
    """Steps of one kind that asked for drafts, whether or not any came of it."""

    def __init__(self) -> None:
        self.savings = Savings()
        self._steps = self._rows = 0  # since the latest pause

    def loses(self, rows: int, would: float, took: float) -> bool:
        """Take in a step of `rows` rows; return whether all of them surely lose.

        would: seconds that what it wrote would have taken without asking. took: those that it took.
        """
        self.savings.add(would, took)
        self._steps += 1
        self._rows += rows
        enough = self._steps >= TRIED and self._rows >= WITNESSES
        return enough and self.savings.interval[1] < 1 - TRIFLE

    def forget(self) -> None:
        """Keep little of what was learnt: a pause begins."""
        self._steps = self._rows = 0
        self.savings.forget(KEPT)


class Guard:
    """Judges one method in one run. plain: what it is judged by."""

    def __init__(self, plain: PlainSteps | None = None) -> None:
        self.plain = PlainSteps() if plain is None else plain
        self._pauses, self._pauses_beside = _Pauses(), _Pauses()  # of all steps, and of those that compute prompts
        self._asking, self._asking_beside = _Asking(), _Asking()  # of the other steps, and of those
        self._savings = Savings()  # of the steps that drafted
        self._every = EVERY
        self._paused = self._asked = 0
        self._wait = SOON  # steps that draft, before the next judgement
        self._catches_up = False  # the first step after a pause, which a drafter may need to see what it missed

    def allows(self, rows: int, expected_s: float, mixed: bool = False) -> bool:
        """Return whether the coming step of `rows` rows may draft. mixed: it computes prompts too.

        expected_s: of a plain step of these rows.
        """
        for pauses in (self._pauses, self._pauses_beside) if mixed else (self._pauses,):
            if pauses.left:
                pauses.left -= 1
                self._paused += 1
                return False
        if not mixed and self.plain.wanted(rows, self._every):
            self._asked += 1
            return False
        return True

    def observe(
        self, rows: int, drafted: int, tokens: int, seconds: float, expected_s: float, asking_s: float = 0.0
    ) -> None:
        """Learn from a step of decoding alone: `drafted` tokens verified, `tokens` written, drafting included.

        asking_s: seconds of it that making the drafts, or finding none, took; 0 where nobody was asked.
        """
        if not drafted:
            without = seconds - asking_s
            self.plain.learn(rows, without, expected_s)
            if asking_s and self._catches_up:
                self._catches_up = False
            elif asking_s and self._asking.loses(rows, without, min(seconds, WILD * without)):
                self._rest()
            return
        self.plain.drafted(rows)
        plain = self.plain.seconds(rows, expected_s)
        if self._catches_up:
            self._catches_up = False
        elif plain is not None:
            usual = max(plain, self._savings.mean_s or inf)
            would, took = tokens * plain / rows, min(seconds, WILD * usual)
            if self._asking.loses(rows, would, took):
                self._rest()
            else:
                self._judge(would, took)

    def observe_beside(self, rows: int, accepted: int, seconds: float, expected_s: float, asking_s: float) -> None:
        """Learn from a step that computed prompts too: `accepted` tokens of drafts were right.

        seconds, asking_s: of the step, drafting included, and of asking. expected_s: of a plain step of these rows.
        What verifying takes is not known here and is left out: what loses even so surely loses.
        """
        if not asking_s:
            return
        if self._catches_up:
            self._catches_up = False
            return
        without = seconds - asking_s
        plain = self.plain.seconds(rows, expected_s)
        worth = accepted / rows * (without if plain is None else min(plain, without))  # a plain one takes no longer
        if self._asking_beside.loses(rows, without + worth, min(seconds, WILD * without)):
            self._pauses_beside.begin()
            self._asking_beside.forget()
        elif self._asking_beside.savings.interval[0] > SURE:
            self._pauses_beside.shorten()

    def _judge(self, would: float, took: float) -> None:
        """Take in a step in place of which plain ones would have taken `would` seconds."""
        self._savings.add(would, took)
        self._wait -= 1
        if self._wait > 0:
            return
        low, high = self._savings.interval
        if high < 1:
            self._rest()
        elif low > SURE:
            self._pauses.shorten()
            if self._savings.steps > self._every / 2:
                self._every = min(RARE, 2 * self._every)

    def _rest(self) -> None:
        """Begin a pause of all steps."""
        self._pauses.begin()
        self._every, self._wait, self._catches_up = EVERY, SOON, True
        self._savings.forget(KEPT)
        self._asking.forget()

    @property
    def knows(self) -> bool:
        """Whether any step that drafted has been compared with plain ones."""
        return self._savings.ratio is not None

    @property
    def pausing(self) -> bool:
        """Whether the method is paused."""
        return self._pauses.left > 0

    def about(self) -> dict[str, Any]:
        """Return what the statistics say: what was decided, and by what."""
        ratios = {
            "ratio": self._savings.ratio,
            "ratio_asked": self._asking.savings.ratio,
            "ratio_asked_beside": self._asking_beside.savings.ratio,
        }
        return {name: None if ratio is None else round(ratio, 3) for name, ratio in ratios.items()} | {
            "pauses": self._pauses.count + self._pauses_beside.count,
            "paused_steps": self._paused,
            "plain_steps": self._asked,
        }
