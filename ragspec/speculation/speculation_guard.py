"""Pause drafting while it is slower than plain decoding, judged by measured step times. Pure.

    >>> if guard.allows(rows, expected_s): drafts = ...
    >>> guard.observe(rows, drafted, tokens=written, seconds=spent, expected_s=expected_s, asking_s=asking)
    >>> guard.observe_beside(rows, accepted, seconds=spent, expected_s=expected_s, asking_s=asking)

Steps with drafts are compared with plain ones: steps in which nothing was worth drafting, and occasional ones that the
guard requests. Plain times are stored relative to an expected time, so that they apply to other numbers of rows; the
expectation must not learn from steps with drafts. Where the next plain step is started before the last is read, only
such steps count: plain ones are requested in a row, of which the first teaches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, log, sqrt
from typing import Any

FADE = 0.98  # weight of the past per step
ENOUGH = 6  # steps from which the spread is nearly as reliable as from many
SIDE = 2.0  # standard errors for many steps; more for few


class Savings:
    """Seconds saved relative to plain steps: a fading mean and its interval."""

    def __init__(self) -> None:
        self._weight = self._weight2 = 0.0  # sums of weights and of squared weights
        self._saved = self._spread = 0.0  # mean seconds saved, and weighted squared deviations from it
        self._plain_s = self._step_s = 0.0  # seconds of the plain steps replaced, and of these steps

    def add(self, plain_s: float, step_s: float) -> None:
        """Add a step of `step_s` seconds that replaces `plain_s` seconds of plain steps."""
        self._weight = FADE * self._weight + 1
        self._weight2 = FADE**2 * self._weight2 + 1
        self._plain_s = FADE * self._plain_s + plain_s
        self._step_s = FADE * self._step_s + step_s
        away = plain_s - step_s - self._saved
        self._saved += away / self._weight
        self._spread = FADE * self._spread + away * (plain_s - step_s - self._saved)

    def forget(self, kept: float) -> None:
        """Reduce the weight of the past to `kept` steps."""
        share = min(1.0, kept / self._weight) if self._weight else 1.0
        self._weight *= share
        self._weight2 *= share**2
        self._spread *= share
        self._plain_s *= share
        self._step_s *= share

    @property
    def steps(self) -> float:
        """Return the effective number of steps."""
        return self._weight**2 / self._weight2 if self._weight2 else 0.0

    @property
    def mean_s(self) -> float | None:
        """Return the mean seconds of a step, None before the first."""
        return self._step_s / self._weight if self._weight else None

    @property
    def ratio(self) -> float | None:
        """Return the speed relative to plain steps, None before the first step."""
        return self._plain_s / self._step_s if self._step_s else None

    @property
    def interval(self) -> tuple[float, float]:
        """Return the likely range of the ratio."""
        if not self._step_s:
            return 0.0, inf
        spread = sqrt(self._spread / self._weight / max(1.0, self.steps - 1))
        few = ENOUGH / self.steps
        error = SIDE * (1 + max(few, few**2)) * spread * self._weight
        saved = self._saved * self._weight
        return 1 + (saved - error) / self._step_s, 1 + (saved + error) / self._step_s


# -- plain steps -----------------------------------------------------------------------------------

LEARN = 0.25  # weight of a new plain step in the mean for its number of rows
NEAR = 1.15  # ratio of numbers of rows up to which one mean applies to the other
LONE = 4  # plain steps that were not started ahead, after which such a step has to do
TRUSTED = 2  # plain steps before their mean is used
ELSEWHERE = 16  # steps with drafts, far from any known number of rows, before a plain step is requested
WILD = 3.0  # times the usual seconds; longer steps were interrupted by something else


@dataclass(slots=True)
class _Plain:
    """Plain steps of one number of rows. off: fading mean of actual over expected seconds. count: steps."""

    off: float
    count: int = 0


@dataclass(slots=True)
class PlainSteps:
    """Times of plain steps, shared by everything that is compared with them.

    overlaps: whether a plain step is started before the plain one before it is read. ago: steps with drafts since the
    latest plain step. elsewhere: those of them far from any known number of rows. in_a_row: latest steps that did not
    ask for drafts.
    """

    overlaps: bool = False
    ago: int = 0
    elsewhere: int = 0
    in_a_row: int = 0
    _alone: int = 0  # latest plain steps that were not started ahead
    _alone_s: float = 0.0  # per row: what a plain step takes longer if it is not started ahead
    _known: dict[int, _Plain] = field(default_factory=dict)  # by rows

    def learn(self, rows: int, seconds: float, expected_s: float) -> None:
        """Add a step of `rows` rows without drafts, unless plain ones would have been faster."""
        if self.overlaps and self.in_a_row < 2:
            known = self.seconds(rows, expected_s)
            if self.in_a_row and known is not None:
                alone_s = max(0.0, min(seconds, WILD * known) - known) / rows
                self._alone_s += (LEARN if self._alone_s else 1.0) * (alone_s - self._alone_s)
            self._alone += 1
            if self._alone < LONE:  # beyond, plain steps seem to come one at a time, between those with prompts
                return
            seconds = max(0.0, seconds - self.hidden(rows))
        self._alone = 0
        off = seconds / expected_s
        plain = self._known.setdefault(_bucket(rows), _Plain(off))
        if plain.count < TRUSTED:
            plain.off = min(plain.off, off)  # one of the first may have been interrupted
        else:
            plain.off += LEARN * (min(off, WILD * plain.off) - plain.off)
        plain.count += 1
        self.ago = 0
        if plain.count >= TRUSTED:
            self.elsewhere = 0

    def drafted(self, rows: int) -> None:
        """Count a step with drafts."""
        self.ago += 1
        self.elsewhere += not self._near(rows)

    def wanted(self, rows: int, every: int) -> bool:
        """Return whether the coming step should be plain. every: steps with drafts per plain step."""
        known = self._nearest(rows)
        return known is None or self.ago >= every or (self.elsewhere >= ELSEWHERE and not self._near(rows))

    def more(self, rows: int) -> int:
        """Return how many plain steps should follow a first one that is requested."""
        known = self._known.get(_bucket(rows))
        return max(1, TRUSTED - (known.count if known else 0)) if self.overlaps else 0

    def without(self, rows: int, expected_s: float, seconds: float, asking_s: float) -> float:
        """Return what a step that asked for drafts in vain, for `asking_s`, would have taken as a plain one."""
        known = self.seconds(rows, expected_s) if self.overlaps and asking_s else None
        return seconds - asking_s if known is None else min(seconds - asking_s, known)

    def hidden(self, rows: int) -> float:
        """Return what a step takes less if it is started before the one before it is read."""
        return rows * self._alone_s

    def seconds(self, rows: int, expected_s: float) -> float | None:
        """Return the seconds of a plain step whose expectation is `expected_s`, None if unknown."""
        known = self._nearest(rows)
        return None if known is None else self._known[known].off * expected_s

    def _nearest(self, rows: int) -> int | None:
        """Return the bucket of known numbers of rows that is nearest to `rows`."""
        trusted = (other for other, plain in self._known.items() if plain.count >= TRUSTED)
        return min(trusted, key=lambda other: abs(other - _bucket(rows)), default=None)

    def _near(self, rows: int) -> bool:
        return self._nearest(rows) == _bucket(rows)


def _bucket(rows: int) -> int:
    """Return the number of a range of rows, whose ends differ by NEAR."""
    return round(log(rows, NEAR))


# -- guard -----------------------------------------------------------------------------------------

SOON = 3  # steps with drafts before the first judgement
SURE = 1.1  # speed from which plain steps may be rare
EVERY, RARE = 32, 256  # steps with drafts per plain step: at first, and when drafts clearly win
KEPT = 5.0  # steps' weight kept after a pause
PAUSE, LONGEST, LONGER = 64, 4096, 4  # steps of the first and of the longest pause; growth factor
TRIED, WITNESSES = 8, 256  # steps that asked for drafts, and rows in them, before asking is judged
TRIFLE = 0.005  # share of the time that asking may lose, since it finds out when drafts begin to pay


class _Pauses:
    """The pauses of one kind of step."""

    def __init__(self) -> None:
        self.left = 0  # steps left in the current pause
        self.count = 0
        self._length = PAUSE  # of the next pause

    def begin(self) -> None:
        """Begin a pause, longer than the one before."""
        self.left, self._length = self._length, min(LONGEST, LONGER * self._length)
        self.count += 1

    def shorten(self) -> None:
        """Reset the length of the next pause."""
        self._length = PAUSE


class _Asking:
    """Steps of one kind that asked for drafts, with or without result."""

    def __init__(self) -> None:
        self.savings = Savings()
        self._steps = self._rows = 0  # since the last pause

    def loses(self, rows: int, plain_s: float, step_s: float) -> bool:
        """Add a step of `rows` rows; return whether these steps certainly lose.

        plain_s: seconds that its tokens would have taken without asking. step_s: its seconds.
        """
        self.savings.add(plain_s, step_s)
        self._steps += 1
        self._rows += rows
        enough = self._steps >= TRIED and self._rows >= WITNESSES
        return enough and self.savings.interval[1] < 1 - TRIFLE

    def forget(self) -> None:
        """Discard most of the past at the beginning of a pause."""
        self._steps = self._rows = 0
        self.savings.forget(KEPT)


class SpeculationGuard:
    """Decides whether one method may draft. plain: the plain steps to compare with.

    Drafts are paused when even the upper end of the interval of the seconds saved is a loss, and tried again later.
    Asking for drafts in vain loses exactly the time of asking, so all steps that asked are also judged together. A step
    with prefill says nothing about plain steps and is never requested as one. There the question is whether asking
    takes longer than the accepted tokens would have; such steps have their own pauses. Where plain steps are started
    ahead, a step that asks takes longer than one that does not, and several in vain are enough for a pause.
    """

    def __init__(self, plain: PlainSteps | None = None) -> None:
        self.plain = PlainSteps() if plain is None else plain
        self._pauses, self._pauses_beside = _Pauses(), _Pauses()  # of all steps, and of steps with prefill
        self._asking, self._asking_beside = _Asking(), _Asking()  # without prefill, and with it
        self._savings = Savings()  # of steps with drafts
        self._every = EVERY
        self._paused = self._plain_requests = 0
        self._more_plain = 0  # requested steps that are to come
        self._vain_steps = self._vain_rows = 0  # latest steps with prefill that asked, and brought nothing
        self._wait = SOON  # steps with drafts before the next judgement
        self._catches_up = False  # whether the next step is the first after a pause, in which drafters catch up

    def allows(self, rows: int, expected_s: float, mixed: bool = False) -> bool:
        """Return whether the coming step of `rows` rows may draft.

        expected_s: seconds of a plain step of these rows. mixed: the step also computes prompts.
        """
        for pauses in (self._pauses, self._pauses_beside) if mixed else (self._pauses,):
            if pauses.left:
                pauses.left -= 1
                self._paused += 1
                return False
        if self._more_plain:
            self._more_plain -= 1
        elif not mixed and self.plain.wanted(rows, self._every):
            self._more_plain = self.plain.more(rows)
        else:
            return True
        self._plain_requests += 1
        return False

    def observe(
        self, rows: int, drafted: int, tokens: int, seconds: float, expected_s: float, asking_s: float = 0.0
    ) -> None:
        """Learn from a step without prefill: `drafted` tokens verified, `tokens` emitted.

        seconds: of the step, drafting included. asking_s: the part spent on drafts, found or not; 0 if not asked.
        """
        self.plain.in_a_row = 0 if drafted or asking_s else self.plain.in_a_row + 1
        if not drafted:
            without = self.plain.without(rows, expected_s, seconds, asking_s)
            self.plain.learn(rows, seconds - asking_s, expected_s)
            if asking_s and self._catches_up:
                self._catches_up = False
            elif asking_s and self._asking.loses(rows, without, min(seconds, WILD * without)):
                self._pause()
            return
        self.plain.drafted(rows)
        plain = self.plain.seconds(rows, expected_s)
        if self._catches_up:
            self._catches_up = False
        elif plain is not None:
            usual = max(plain, self._savings.mean_s or inf)
            plain_s, step_s = tokens * plain / rows, min(seconds, WILD * usual)
            if self._asking.loses(rows, plain_s, step_s):
                self._pause()
            else:
                self._judge(plain_s, step_s)

    def observe_beside(self, rows: int, accepted: int, seconds: float, expected_s: float, asking_s: float) -> None:
        """Learn from a step with prefill, in which `accepted` draft tokens were right.

        seconds, asking_s: of the step, drafting included, and of asking. expected_s: of a plain step of these rows.
        asking_s has the time of verification too, as far as the engine knows it: what loses without it certainly loses.
        """
        self.plain.in_a_row = 0 if asking_s else self.plain.in_a_row + 1
        if not asking_s:
            return
        if self._catches_up:
            self._catches_up = False
            return
        without = seconds - asking_s
        plain = self.plain.seconds(rows, expected_s)
        worth = accepted / rows * (without if plain is None else min(plain, without))  # a plain step is not longer
        saved = max(0.0, without - self.plain.hidden(rows)) + worth
        self._vain_steps, self._vain_rows = (0, 0) if accepted else (self._vain_steps + 1, self._vain_rows + rows)
        vain = self.plain.overlaps and self._vain_steps >= TRIED and self._vain_rows >= WITNESSES
        if self._asking_beside.loses(rows, saved, min(seconds, WILD * without)) or vain:
            self._vain_steps = self._vain_rows = 0
            self._pauses_beside.begin()
            self._asking_beside.forget()
        elif self._asking_beside.savings.interval[0] > SURE:
            self._pauses_beside.shorten()

    def _judge(self, plain_s: float, step_s: float) -> None:
        """Add a step that replaces `plain_s` seconds of plain steps, and decide."""
        self._savings.add(plain_s, step_s)
        self._wait -= 1
        if self._wait > 0:
            return
        low, high = self._savings.interval
        if high < 1:
            self._pause()
        elif low > SURE:
            self._pauses.shorten()
            if self._savings.steps > self._every / 2:
                self._every = min(RARE, 2 * self._every)

    def _pause(self) -> None:
        """Begin a pause of all steps."""
        self._pauses.begin()
        self._every, self._wait, self._catches_up = EVERY, SOON, True
        self._savings.forget(KEPT)
        self._asking.forget()

    @property
    def knows(self) -> bool:
        """Return whether any step with drafts was compared with plain ones."""
        return self._savings.ratio is not None

    @property
    def pausing(self) -> bool:
        """Return whether the method is paused."""
        return self._pauses.left > 0

    def rests(self, mixed: bool = False) -> bool:
        """Return whether the coming step is to be a plain one. mixed: it is expected to compute prompts."""
        return self.pausing or self._more_plain > 0 or (mixed and self._pauses_beside.left > 0)

    def about(self) -> dict[str, Any]:
        """Return the statistics: speeds, pauses, and steps without drafts."""
        ratios = {
            "ratio": self._savings.ratio,
            "ratio_asked": self._asking.savings.ratio,
            "ratio_asked_beside": self._asking_beside.savings.ratio,
        }
        return {name: None if ratio is None else round(ratio, 3) for name, ratio in ratios.items()} | {
            "pauses": self._pauses.count + self._pauses_beside.count,
            "paused_steps": self._paused,
            "plain_steps": self._plain_requests,
        }
