"""Asking for drafts, so that a drafter that fails costs drafts and no answers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ragspec.engine.notes import Notes
from ragspec.engine.proposers import LONGEST, Proposer
from ragspec.engine.retreat import FORWARD, told
from ragspec.engine.room import PATIENCE
from ragspec.engine.row import Row, reach_of
from ragspec.engine.work import Work
from ragspec.speculation.allocate import hopeless
from ragspec.speculation.cost import Cost
from ragspec.speculation.drafters.base import Draft
from ragspec.speculation.forced import admitted
from ragspec.speculation.trial import Trial

MOST_DOUBLINGS = 6  # of the pause after a failure


class Drafting:
    """One run's drafts. restart: the length at which a row is computed anew (Frequencies.restart), None for never.

    plain: what is expected of plain steps, however drafts turn out. trial: judges by that whether they pay; None where
    they are asked for whatever they cost. cost: of a step, where drafts are as long as pays.
    """

    def __init__(
        self,
        proposer: Proposer,
        restart: int | None,
        notes: Notes,
        plain: Cost | None = None,
        trial: Trial | None = None,
        cost: Cost | None = None,
    ) -> None:
        self._plain = plain
        self._trial = trial
        self._cost = cost
        self._expected_s = 1.0  # of this step without drafts
        self._proposer = proposer
        self._restart = restart
        self._notes = notes
        self._pause = 0  # steps without drafts that are left, after a failure
        self._failures = 0
        self._worked = False  # whether a model ran for this step's drafts
        self._asking_s = 0.0  # that asking for them took

    def drafts(self, rows: Sequence[Row], besides: int) -> list[Draft]:
        """Return a draft per row. besides: tokens of the step that are not these rows'."""
        self._worked, self._asking_s = False, 0.0
        if rows and self._plain is not None:
            self._expected_s = self._plain(len(rows), len(rows), reach_of(rows))
        if not rows or self._pause:
            self._pause = max(0, self._pause - 1)
            return [Draft()] * len(rows)
        if besides and self._cost is not None and hopeless(len(rows), self._cost, reach_of(rows), besides):
            return [Draft()] * len(rows)
        if self._trial is not None and not self._trial.allows(len(rows), self._expected_s, mixed=besides > 0):
            return [Draft()] * len(rows)
        started = time.perf_counter()
        try:
            return self._ask(rows, besides)
        finally:
            self._asking_s = time.perf_counter() - started

    def _ask(self, rows: Sequence[Row], besides: int) -> list[Draft]:
        """Return what the proposer drafts, and the rows' grammars admit."""
        try:
            drafts = self._proposer.propose(rows, besides)
            self._worked = self._proposer.worked
        except FORWARD as error:
            self._failures += 1
            self._pause = PATIENCE << min(self._failures, MOST_DOUBLINGS)
            self._proposer.forget()
            self._notes.add(f"drafting failed and paused for {self._pause} steps: {told(error)}")
            return [Draft()] * len(rows)
        drafts = [
            draft if row.grammar is None else admitted(row.grammar, draft)
            for row, draft in zip(rows, drafts, strict=True)
        ]
        if self._restart is None:
            return drafts
        # a text that outgrows this length is computed anew, so no step may cross it
        lengths = [self._restart - len(row.tokens) if row.base <= self._restart else LONGEST for row in rows]
        return [draft.cut(max(0, length)) for draft, length in zip(drafts, lengths, strict=True)]

    def observe(self, work: Sequence[Work], tokens: int, seconds: float) -> None:
        """A step took `seconds`; those of its rows that decode wrote `tokens`."""
        decoding = [item for item in work if item.decodes]
        rows, measured = len(decoding), (seconds, self._expected_s, self._asking_s)
        if self._trial is None or not rows:
            return
        if rows < len(work):
            self._trial.observe_beside(rows, max(0, tokens - rows), *measured)
        else:
            # a step whose drafts were made and thrown away is no plain one
            drafted = max(sum(len(item.draft.token_ids) for item in work), self._worked)
            self._trial.observe(rows, drafted, tokens, *measured)
