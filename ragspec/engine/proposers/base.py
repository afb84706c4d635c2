"""Proposers: the protocol, a drafter per row, and a choice between several. draft_model.py drafts with a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ragspec.engine.request_state import RequestState, reach_of
from ragspec.speculation.draft_length import allocate, least_acceptance
from ragspec.speculation.drafters.base import Draft, Drafter, RowDrafter, propose_all, settle
from ragspec.speculation.drafters.calibration import follow_to
from ragspec.speculation.drafters.native import DraftBatch
from ragspec.speculation.forced_tokens import ForcedTokens
from ragspec.speculation.method_selector import MethodSelector
from ragspec.speculation.step_cost import Cost

LONGEST = 24  # most tokens of a draft whose length is chosen by what pays


class Proposer(Protocol):
    """Drafts for all rows at once, and follows what they generate. worked: whether a model ran for the last drafts."""

    @property
    def worked(self) -> bool: ...

    def admit(self, row: RequestState, donor: int, tokens: int) -> None:
        """Start a row in its slot with the first `tokens` tokens of slot `donor`, which may be its own."""

    def propose(self, rows: Sequence[RequestState], prefill_tokens: int) -> list[Draft]:
        """Return a draft per row, no longer than pays. prefill_tokens: tokens of the step that belong to other rows."""

    def watch(self, rows: Sequence[RequestState]) -> None:
        """Observe a step for which another proposer drafts: guess too if that is cheap, to learn from the result."""

    def settle(self) -> None:
        """Do what the step under way does not need. Called while the model computes."""

    def extend(self, row: RequestState, token_ids: Sequence[int]) -> None:
        """Record that the target generated `token_ids`; row.tokens ends with them already."""

    def finish(self, row: RequestState) -> None:
        """Drop a finished row."""

    def resize(self, rows: int) -> None:
        """Drop all rows; there are `rows` slots now."""

    def widen(self, rows: int) -> None:
        """Change to `rows` slots; rows under way stay."""

    def forget(self) -> None:
        """Recover after propose() failed: what it was computing may be incomplete."""


def cut(drafts: Sequence[Draft], rows: Sequence[RequestState], cost: Cost | None, prefill_tokens: int) -> list[Draft]:
    """Return the drafts of `rows` cut to the length that pays; unchanged if `cost` is None.

    A sampled draft is not cut: a length that depends on the sampled tokens would bias the output distribution.
    """
    if cost is None:
        return list(drafts)
    if isinstance(drafts, DraftBatch):
        return drafts.paying(cost, reach_of(rows), prefill_tokens)
    lengths = allocate([draft.cumulative_acceptance for draft in drafts], cost, reach_of(rows), prefill_tokens)
    return [
        draft if draft.probabilities is not None else draft.cut(length)
        for draft, length in zip(drafts, lengths, strict=True)
    ]


class NoProposer:
    """Plain decoding."""

    worked = False

    def admit(self, row: RequestState, donor: int, tokens: int) -> None: ...

    def propose(self, rows: Sequence[RequestState], prefill_tokens: int) -> list[Draft]:
        return [Draft()] * len(rows)

    def watch(self, rows: Sequence[RequestState]) -> None: ...

    def settle(self) -> None: ...

    def extend(self, row: RequestState, token_ids: Sequence[int]) -> None: ...

    def finish(self, row: RequestState) -> None: ...

    def resize(self, rows: int) -> None: ...

    def widen(self, rows: int) -> None: ...

    def forget(self) -> None: ...


class RowProposer(NoProposer):
    """A drafter without a model, extended by tokens that a row's grammar forces. num_tokens: None: as long as pays.

    Prompts are read, and answers shared, while the model computes.
    """

    def __init__(self, drafter: Drafter, num_tokens: int | None, cost: Cost | None) -> None:
        self.forced = ForcedTokens()
        self._drafter = drafter
        self._num_tokens = num_tokens
        self._cost = cost
        self._open: dict[int, RowDrafter] = {}  # by slot
        self._unread: dict[int, RequestState] = {}  # rows whose prompts were not read yet, by slot
        self._finished: list[RowDrafter] = []  # to be closed

    def admit(self, row: RequestState, donor: int, tokens: int) -> None:
        self._open.pop(row.place, None)
        self._unread[row.place] = row
        self.forced.forget(row.place)  # of a row that was preempted before its draft was judged

    def settle(self) -> None:
        while self._finished:
            self._finished.pop().close()
        for place in list(self._unread):
            self._read(place)
        settle(self._drafter)

    def _read(self, place: int) -> None:
        row = self._unread[place]
        drafter = self._open[place] = self._drafter.open(row.request.token_ids, row.request.passages)
        if row.written:  # it was preempted
            drafter.extend(row.tokens[row.prompt_tokens :])
        del self._unread[place]

    def propose(self, rows: Sequence[RequestState], prefill_tokens: int) -> list[Draft]:
        cost = self.follow(rows, prefill_tokens)
        return cut(self._uncut(rows), rows, cost, prefill_tokens)

    def watch(self, rows: Sequence[RequestState]) -> None:
        self.follow(rows, 0)
        self._uncut(rows)

    def follow(self, rows: Sequence[RequestState], prefill_tokens: int) -> Cost | None:
        """Stop chains where no further token could pay. Return the cost model for that, None for fixed lengths."""
        cost = None if self._num_tokens else self._cost
        if cost is not None:
            follow_to(self._drafter, least_acceptance(len(rows), cost, reach_of(rows), prefill_tokens))
        return cost

    def guess(self, rows: Sequence[RequestState]) -> list[Draft]:
        """Return uncut drafts."""
        return list(self._uncut(rows))

    def _uncut(self, rows: Sequence[RequestState]) -> Sequence[Draft]:
        most = self._num_tokens or LONGEST
        limits = [min(most, row.room - 1) for row in rows]
        if self._unread:
            for row in rows:
                if row.place in self._unread:
                    self._read(row.place)
        drafts = propose_all(self._drafter, [self._open[row.place] for row in rows], limits)
        if all(row.grammar is None for row in rows):
            return drafts
        return [
            draft if row.grammar is None else self.forced.join(row.place, row.grammar, draft, limit)
            for row, draft, limit in zip(rows, drafts, limits, strict=True)
        ]

    def extend(self, row: RequestState, token_ids: Sequence[int]) -> None:
        if row.place not in self._unread:
            self._open[row.place].extend(token_ids)
        if row.grammar is not None:
            self.forced.score(row.place, token_ids)

    def finish(self, row: RequestState) -> None:
        unread, drafter = self._unread.pop(row.place, None), self._open.pop(row.place, None)
        if unread is None and drafter is not None:  # neither if memory ran out before the row was admitted
            self._finished.append(drafter)
        self.forced.forget(row.place)

    def resize(self, rows: int) -> None:
        self._open, self._unread = {}, {}


class AutoProposer(NoProposer):
    """Several proposers, one of which drafts in each step, as the trial decides.

    All of them follow every row, so that each can take over at any time and learn from every step.
    """

    def __init__(self, proposers: Mapping[str, Proposer], trial: MethodSelector) -> None:
        self._proposers = proposers
        self._trial = trial
        self._asked: Proposer = NoProposer()  # the one that drafted last

    @property
    def worked(self) -> bool:  # type: ignore[override]
        return self._asked.worked

    def admit(self, row: RequestState, donor: int, tokens: int) -> None:
        for proposer in self._proposers.values():
            proposer.admit(row, donor, tokens)

    def propose(self, rows: Sequence[RequestState], prefill_tokens: int) -> list[Draft]:
        def ask(name: str) -> list[Draft]:
            self._asked = self._proposers[name]
            return self._asked.propose(rows, prefill_tokens)

        return self._trial.ask(ask, lambda name: self._proposers[name].watch(rows))

    def settle(self) -> None:
        for proposer in self._proposers.values():
            proposer.settle()

    def extend(self, row: RequestState, token_ids: Sequence[int]) -> None:
        for proposer in self._proposers.values():
            proposer.extend(row, token_ids)

    def finish(self, row: RequestState) -> None:
        for proposer in self._proposers.values():
            proposer.finish(row)

    def resize(self, rows: int) -> None:
        for proposer in self._proposers.values():
            proposer.resize(rows)

    def widen(self, rows: int) -> None:
        for proposer in self._proposers.values():
            proposer.widen(rows)

    def forget(self) -> None:
        for proposer in self._proposers.values():
            proposer.forget()
