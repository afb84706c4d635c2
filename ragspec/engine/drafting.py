"""The drafts of each step: whether the proposer is asked, what of its drafts is verified, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ragspec.engine.kv.budget import PATIENCE
from ragspec.engine.model.forward import Model
from ragspec.engine.notes import Notes
from ragspec.engine.proposers.base import LONGEST, Proposer
from ragspec.engine.request_state import RequestState, ScheduledRequest, reach_of
from ragspec.models.memory import MAY_BE_MEMORY, out_of_memory
from ragspec.speculation.draft_length import hopeless
from ragspec.speculation.drafters.base import Draft
from ragspec.speculation.forced_tokens import admitted
from ragspec.speculation.method_selector import MethodSelector
from ragspec.speculation.step_cost import Cost

MOST_DOUBLINGS = 6  # of the pause after a failure of drafting


class Drafting:
    """One run's drafts. A drafter that runs out of memory costs drafts, not answers.

    Args:
        proposer: Where drafts come from.
        restart: Length at which a row is recomputed (Frequencies.restart), None for never.
        notes: Notes for the user.
        plain: Expected cost of plain steps, whatever drafts do.
        trial: Judges by that whether drafts pay; None: always draft.
        cost: Cost of a step, if drafts are as long as pays.
    """

    def __init__(
        self,
        proposer: Proposer,
        restart: int | None,
        notes: Notes,
        plain: Cost | None = None,
        trial: MethodSelector | None = None,
        cost: Cost | None = None,
    ) -> None:
        self._plain = plain
        self._trial = trial
        self._cost = cost
        self._expected_s = 1.0  # of this step without drafts
        self._proposer = proposer
        self._restart = restart
        self._notes = notes
        self._pause = 0  # remaining steps without drafts, after a failure
        self._failures = 0
        self._worked = False  # whether a model ran for this step's drafts
        self.asking_s = 0.0  # of this step, spent in the proposer
        self._verifying_s = 0.0  # of this step beside prompts, as far as it is known
        self.rests = False  # whether neither this step nor the coming one has drafts

    def drafts(self, rows: Sequence[RequestState], prefill_tokens: int, *, ahead: bool = False) -> list[Draft]:
        """Return a draft per row.

        prefill_tokens: tokens of the step that belong to other rows. ahead: the step has been started without drafts.
        """
        self._worked, self.asking_s, self._verifying_s, self.rests = False, 0.0, 0.0, False
        if rows and self._plain is not None:
            self._expected_s = self._plain(len(rows), len(rows), reach_of(rows))
        if not rows or self._pause:
            self._pause = max(0, self._pause - 1)
            return [Draft()] * len(rows)
        mixed = prefill_tokens > 0
        resting = ahead or (self._trial is not None and self._trial.rests(mixed))
        if (
            mixed
            and not resting
            and self._cost is not None
            and hopeless(len(rows), self._cost, reach_of(rows), prefill_tokens)
        ):
            return [Draft()] * len(rows)
        if self._trial is not None and not self._trial.allows(len(rows), self._expected_s, mixed, ahead):
            self.rests = self._trial.rests(mixed)
            return [Draft()] * len(rows)
        started = time.perf_counter()
        try:
            return self._ask(rows, prefill_tokens)
        finally:
            self.asking_s = time.perf_counter() - started

    def settle(self) -> None:
        """Let drafters do what the step under way does not need."""
        try:
            self._proposer.settle()
        except MAY_BE_MEMORY as error:
            reason = out_of_memory(error)
            if not self._pause:
                self._failed(reason)

    def _failed(self, reason: str) -> None:
        """Pause, longer with each failure."""
        self._failures += 1
        self._pause = PATIENCE << min(self._failures, MOST_DOUBLINGS)
        self._proposer.forget()
        self._notes.add(f"drafting failed and paused for {self._pause} steps: {reason}")

    def _ask(self, rows: Sequence[RequestState], prefill_tokens: int) -> list[Draft]:
        """Return the proposer's drafts, cut to what the rows' grammars allow."""
        try:
            drafts = self._proposer.propose(rows, prefill_tokens)
            self._worked = self._proposer.worked
        except MAY_BE_MEMORY as error:
            self._failed(out_of_memory(error))
            return [Draft()] * len(rows)
        drafts = [
            draft if row.grammar is None else admitted(row.grammar, draft)
            for row, draft in zip(rows, drafts, strict=True)
        ]
        if self._restart is None:
            return drafts
        # a text that outgrows this length is recomputed, so no step may cross it
        lengths = [self._restart - len(row.tokens) if row.base <= self._restart else LONGEST for row in rows]
        return [draft.cut(max(0, length)) for draft, length in zip(drafts, lengths, strict=True)]

    def fitted(
        self, drafts: Sequence[Draft], rows: Sequence[RequestState], model: Model, prefill: int, joined: bool
    ) -> Sequence[Draft]:
        """Return drafts as they fit beside prompts; none if they are not worth what they add to such a step.

        That is the places that it has for them or, where rows are too many for these, a step of their own. prefill:
        tokens of prompts. joined: whether they have places. Sampled drafts are not changed (proposers/base.py).
        """
        if any(draft.probabilities is not None for draft in drafts) or not any(draft.token_ids for draft in drafts):
            return drafts
        if joined:
            counts = model.fitted([1 + len(draft.token_ids) for draft in drafts])
            drafts = [draft.cut(count - 1) for draft, count in zip(drafts, counts, strict=True)]
        cost, reach, count = self._cost, reach_of(rows), len(rows)
        if cost is None:
            return drafts
        token_s, plain_s = cost.marginal(prefill + count, reach), cost(count, count, reach)
        if joined:
            verifying_s = model.places_beside * token_s
        else:
            tokens = count + sum(len(draft.token_ids) for draft in drafts)
            without_s = count * token_s if model.joins(count, prefill, drafts=False) else plain_s
            verifying_s = max(0.0, cost(tokens, count, reach) - without_s)
        if sum(sum(draft.cumulative_acceptance) for draft in drafts) * plain_s / count <= verifying_s:
            return [Draft()] * count
        self._verifying_s = verifying_s
        return drafts

    def observe(self, work: Sequence[ScheduledRequest], tokens: int, seconds: float, settling_s: float) -> None:
        """Report a step to the trial.

        tokens: generated by its decoding rows. seconds: of the whole step. settling_s: those for which it waited while
        drafters settled.
        """
        decoding = [item for item in work if item.decodes]
        asking_s = self.asking_s
        if asking_s:
            asking_s += settling_s
        else:
            seconds -= settling_s
        rows = len(decoding)
        if self._trial is None or not rows:
            return
        if rows < len(work):
            spent = min(seconds, asking_s + self._verifying_s) if asking_s else 0.0
            self._trial.observe_beside(rows, max(0, tokens - rows), seconds, self._expected_s, spent)
        else:
            # a step whose drafts were computed and dropped is not a plain one
            drafted = max(sum(len(item.draft.token_ids) for item in work), self._worked)
            self._trial.observe(rows, drafted, tokens, seconds, self._expected_s, asking_s)
