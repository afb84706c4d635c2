"""How long to draft with a model, whose every token takes a forward of its own, and for which rows. Pure.

    >>> pace = Pace(cost)
    >>> pace.ratio(rows=4, reach=500)  # how many times as fast as without drafts, at best
    1.31

A forward of the draft serves all rows at once and is paid for by their chances together; the target's step that
verifies is paid for by `cost`, as everywhere (allocate.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from ragspec.speculation.allocate import LEAST_GAIN
from ragspec.speculation.confidence import Confidence
from ragspec.speculation.cost import Cost

LONGEST = 12
BLIND = 2  # tokens of a draft while it is not known whether it pays: the first shows that, the second what one costs
BLIND_OTHER = 4  # of a draft with other tokens, of which one may be a fraction of the target's
LEARNING_RATE = 0.05
SHARE = 0.01  # of the time, that may be spent on trying again drafts that did not pay
TRIED = 2  # rows that draft meanwhile, of those whose draft has to be read first
NEAR = 8  # tokens: rows with no more to be read cost a forward nothing to speak of, and all of them draft
KNOWN = 16  # tokens that were compared, after which it is known
PATIENCE = 48  # steps after which it is taken for known


class Pace:
    """One draft model in one run. step_s: of a forward of one token for each row; None before it is known.

    fill_s: of one token of what a row's draft has yet to read; None where nothing long was read. blind: BLIND or
    BLIND_OTHER.
    """

    def __init__(self, cost: Cost | None, confidence: Confidence, blind: int = BLIND) -> None:
        self.step_s: float | None = None
        self.fill_s: float | None = None
        self._cost = cost
        self._confidence = confidence
        self._blind = blind
        self._tries = 0  # steps in which it was not known
        self._saved_up_s = 0.0  # for the next try

    def stepped(self, seconds: float) -> None:
        """A forward of one token for each row took `seconds`."""
        self.step_s = seconds if self.step_s is None else self.step_s + LEARNING_RATE * (seconds - self.step_s)

    def filled(self, tokens: int, seconds: float) -> None:
        """A forward of `tokens` that the draft had not read took `seconds`."""
        each = seconds / tokens
        self.fill_s = each if self.fill_s is None else self.fill_s + LEARNING_RATE * (each - self.fill_s)

    def ratio(self, rows: int, reach: int) -> float:
        """Return how many times as fast as plain ones steps with drafts of the best length are, by what is known."""
        if self._cost is None or self.step_s is None:
            return 1.0
        plain = rows / self._cost(rows, rows, reach)
        best, expected, survival = 0.0, 1.0, 1.0
        for length in range(1, LONGEST + 1):
            survival *= self._confidence.mean
            expected += survival
            seconds = self._cost(rows * (1 + length), rows, reach) + length * self.step_s
            best = max(best, expected * rows / seconds)
        return best / plain

    def chosen(self, missing: Sequence[int], left: Sequence[int], reach: int) -> list[int]:
        """Return the rows for which drafts pay, or whose turn it is to show whether they do.

        missing: per row, tokens that its draft has yet to read. left: tokens that its answer may still have.
        """
        rows = len(missing)
        every = list(range(rows))
        if self._cost is None or not every:
            return every
        nearest = sorted(every, key=lambda row: missing[row])
        if not self._known:
            self._tries += 1
            return nearest[:TRIED] + [row for row in nearest[TRIED:] if missing[row] <= NEAR]
        ratio, step = self.ratio(rows, reach), self._cost(rows, rows, reach)
        fill_s = self.fill_s or 0.0  # nothing long was read yet
        if ratio >= LEAST_GAIN:
            saved = step / rows * (1 - 1 / ratio)  # seconds, per token of an answer
            return [row for row in every if (missing[row] - 1) * fill_s <= left[row] * saved]
        self._saved_up_s += SHARE * step
        drafting = self._blind * (self.step_s or step) + self._cost(rows + self._blind, rows, reach) - step
        if self._saved_up_s < drafting + (missing[nearest[0]] - 1) * fill_s:
            return []
        self._saved_up_s = 0.0
        return nearest[:1]

    @property
    def _known(self) -> bool:
        """Whether it is known what drafts cost and bring."""
        return (self._confidence.seen >= KNOWN and self.step_s is not None) or self._tries >= PATIENCE

    def going_on(
        self, survivals: Sequence[float], expected: float, drafted: int, depth: int, rows: int, reach: int
    ) -> list[int]:
        """Return the rows that draft another token: those that, together, gain more by it than it costs.

        survivals: of the rows that may, that their drafts are right so far. expected: tokens that the step is to write
        with what is drafted already. drafted: tokens of all rows' drafts, in `depth` forwards.
        """
        every = list(range(len(survivals)))
        if self._cost is None or not every:
            return every
        if self.step_s is None or not self._known:
            return every if depth < self._blind else []
        step = self._cost(rows + drafted, rows, reach)
        rate = expected / (step + (depth - 1) * self.step_s)
        more = self._cost(rows + drafted + len(survivals), rows, reach) - step
        gains = [survival * self._confidence.mean for survival in survivals]
        going = [row for row in every if gains[row] > rate * more / len(survivals)]
        worth = sum(gains[row] for row in going)
        return going if worth > rate * (self.step_s + more * len(going) / len(survivals)) else []
