"""The next step of rows that decode without drafts, started before the present one is read.

So the device need not wait for the host: the tokens that rows have just written are still there. A row may turn out to
have ended; what is computed for it then is dropped. Limit: models over a paged cache; greedy rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ragspec.engine.model.forward import Model
from ragspec.engine.model.layout import Segment
from ragspec.engine.model.result import StepResult
from ragspec.engine.request_state import RequestState, ScheduledRequest


class StepAhead:
    """A step that has been started. rows: those it computes, each with the length of its text, in order."""

    def __init__(self, rows: Sequence[tuple[RequestState, int]], result: StepResult) -> None:
        self._numbers = {(id(row), length): number for number, (row, length) in enumerate(rows)}
        self._rows = rows  # alive, so that no other has the same identity
        self._result = result

    def number(self, item: ScheduledRequest) -> int | None:
        """Return the index of what an item asks for, None if it was not started."""
        if not item.decodes or item.draft.token_ids:
            return None
        return self._numbers.get((id(item.row), len(item.row.tokens)))

    def joined(self, work: Sequence[ScheduledRequest], rest: StepResult | None) -> JoinedResult:
        """Return the result of `work`. rest: of the items that were not started, in their order."""
        return JoinedResult(self._result, [self.number(item) for item in work], [item.wanted for item in work], rest)


class JoinedResult:
    """The result of items of which some were started ahead (model/result.py). numbers: None for the others."""

    def __init__(
        self, ahead: StepResult, numbers: Sequence[int | None], wanted: Sequence[int], rest: StepResult | None
    ) -> None:
        self._ahead = ahead
        self._numbers = numbers
        self._wanted = wanted
        self._rest = rest

    def done(self) -> bool:
        """Return whether it can be read without waiting."""
        return (self._rest or self._ahead).done()  # what was started last is done last

    def best(self) -> list[int]:
        """Return the most likely token after each wanted one."""
        ahead = self._ahead.best()
        rest = iter(self._rest.best() if self._rest is not None else ())
        found: list[int] = []
        for number, wanted in zip(self._numbers, self._wanted, strict=True):
            found += [next(rest) for _ in range(wanted)] if number is None else [ahead[number]]
        return found

    def written(self) -> tuple[torch.Tensor, list[int]] | None:
        """Return best tokens on the device, and the index there of each; None if they are in several tensors."""
        found = self._ahead.written()
        if self._rest is not None or found is None:
            return None
        return found[0], [found[1][number] for number in self._numbers if number is not None]

    def logits(self) -> torch.Tensor:
        """Raise: only best tokens are started ahead."""
        raise NotImplementedError


def start_ahead(model: Model, work: Sequence[ScheduledRequest], result: StepResult) -> StepAhead | None:
    """Start the step after `work`, of which `result` is not read yet; return None if that cannot be.

    work: rows that decode without drafts and need no logits.
    """
    written = result.written()
    slots = max(item.slots for item in work) + 1
    if (
        model.steps is None
        or written is None
        or slots > model.cache.slots
        or not model.steps.shapes.one_step(len(work))
    ):
        return None
    going = [at for at, item in enumerate(work) if item.row.written + 1 < item.row.request.sampling.max_new_tokens]
    if not going:
        return None
    rows = [(work[at].row, len(work[at].row.tokens) + 1) for at in going]
    segments = [Segment(row.place, length - 1, 1, base=row.base) for row, length in rows]
    sources = written[0], [written[1][at] for at in going]
    found = model.begin_after(segments, sources)
    return StepAhead(rows, found)
