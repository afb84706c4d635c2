"""Passages and a draft model together: the model drafts for the rows for which the passages promise less than it does.

Whichever promises more tokens, by what was learnt of both, is taken whole. Where a row samples, the model's draft is
taken if it was asked for: what it drew must not decide whether it counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from ragspec.engine.draft_model import DraftModel
from ragspec.engine.proposers import ByRow, NoDrafts, cut
from ragspec.engine.row import Row
from ragspec.speculation.cost import Cost
from ragspec.speculation.drafters.base import Draft


class Joined(NoDrafts):
    """The proposer. passages: told of all rows by its owner; here it is only asked."""

    def __init__(self, passages: ByRow, model: DraftModel, cost: Cost | None) -> None:
        self._passages = passages
        self._model = model
        self._cost = cost

    def propose(self, rows: Sequence[Row], besides: int) -> list[Draft]:
        self._passages.follow(rows, besides)
        guesses = self._passages.guess(rows)
        promise = self._model.promise
        asked = [row for row, guess in zip(rows, guesses, strict=True) if sum(guess.survival) < promise]
        drafts = self._model.drafts(rows, asked)
        best = [_better(guess, draft) for guess, draft in zip(guesses, drafts, strict=True)]
        return cut(best, rows, self._cost, besides)

    @property
    def worked(self) -> bool:  # type: ignore[override]
        return self._model.worked

    @property
    def outgrown(self) -> int:
        """Rows that outgrew the draft model."""
        return self._model.outgrown

    def admit(self, row: Row, donor: int, tokens: int) -> None:
        self._model.admit(row, donor, tokens)

    def extend(self, row: Row, token_ids: Sequence[int]) -> None:
        self._model.extend(row, token_ids)

    def finish(self, row: Row) -> None:
        self._model.finish(row)

    def resize(self, rows: int) -> None:
        self._model.resize(rows)

    def widen(self, rows: int) -> None:
        self._model.widen(rows)

    def forget(self) -> None:
        self._model.forget()


def _better(guess: Draft, draft: Draft) -> Draft:
    sampled = draft.probabilities is not None
    return draft if sampled or sum(draft.survival) > sum(guess.survival) else guess
