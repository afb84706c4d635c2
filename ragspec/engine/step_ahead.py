"""The next step of rows that decode without drafts, started before the present one is read.

So the device need not wait for the host: the tokens that rows have just written are still there. Chunks of prompts that
are known by then are computed in the same step. A row may turn out to have ended; what is computed for it then is
dropped. Limit: models over a paged cache; greedy rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ragspec.engine.model.forward import Model
from ragspec.engine.model.layout import Segment
from ragspec.engine.model.result import StepResult
from ragspec.engine.request_state import RequestState, ScheduledRequest

UNREAD = -1  # index of the result of tokens that none is wanted of


class StepAhead:
    """A step that has been started.

    Args:
        rows: Those that decode, each with the position of its token, in order.
        prompts: The chunks computed beside them.
        result: The step's, of the rows' tokens and the last one of each chunk that ends a prompt.
    """

    def __init__(
        self, rows: Sequence[tuple[RequestState, int]], prompts: Sequence[ScheduledRequest], result: StepResult
    ) -> None:
        self.prompts = prompts
        self._rows = rows  # alive, so that no other has the same identity
        self._result = result
        self._numbers = {(id(row), start, 1): number for number, (row, start) in enumerate(rows)}
        wanted = len(rows)
        for item in prompts:
            self._numbers[id(item.row), item.start, len(item.token_ids)] = wanted if item.writes else UNREAD
            wanted += item.wanted

    def numbers(self, work: Sequence[ScheduledRequest]) -> list[int | None]:
        """Return where in the result what each item writes is; None for items that were not started."""
        return [self._numbers.get((id(item.row), item.start, len(item.token_ids))) for item in work]

    def joined(
        self, work: Sequence[ScheduledRequest], numbers: Sequence[int | None], rest: StepResult | None
    ) -> JoinedResult:
        """Return the result of `work`, of these numbers. rest: of the items that were not started, in their order."""
        wanted = [number for item, number in zip(work, numbers, strict=True) if item.writes]
        return JoinedResult(self._result, wanted, rest)


class JoinedResult:
    """The result of items of which some were started ahead (model/result.py). numbers: None for the others."""

    def __init__(self, ahead: StepResult, numbers: Sequence[int | None], rest: StepResult | None) -> None:
        self._ahead = ahead
        self._numbers = numbers
        self._rest = rest

    def done(self) -> bool:
        """Return whether it can be read without waiting."""
        return (self._rest or self._ahead).done()  # what was started last is done last

    def best(self) -> list[int]:
        """Return the most likely token after each wanted one."""
        ahead = self._ahead.best()
        if self._rest is None:
            return [ahead[number] for number in self._numbers if number is not None]
        rest = iter(self._rest.best())
        return [next(rest) if number is None else ahead[number] for number in self._numbers]

    def written(self) -> tuple[torch.Tensor, list[int]] | None:
        """Return best tokens on the device, and the index there of each; None if there is no such tensor."""
        ahead = self._ahead.written()
        rest = self._rest.written() if self._rest is not None else None
        if ahead is None or (self._rest is not None and rest is None):
            return None
        tokens, places = ahead
        if rest is None:
            return tokens, [places[number] for number in self._numbers if number is not None]
        others = (len(tokens) + place for place in rest[1])
        found = [next(others) if number is None else places[number] for number in self._numbers]
        return torch.cat([tokens, rest[0]]), found

    def logits(self) -> torch.Tensor:
        """Raise: only best tokens are started ahead."""
        raise NotImplementedError


def start_ahead(
    model: Model, work: Sequence[ScheduledRequest], prompts: Sequence[ScheduledRequest], result: StepResult
) -> StepAhead | None:
    """Start the step after `work`, of which `result` is not read yet; return None if that cannot be.

    work: of rows that have no drafts and need no logits. prompts: chunks that are computed beside.
    """
    written = result.written()
    writing = [item.row for item in work if item.writes]
    going = [at for at, row in enumerate(writing) if row.room > 1]
    rows = [(writing[at], len(writing[at].tokens)) for at in going]
    slots = max([start + 1 for _, start in rows] + [item.slots for item in prompts], default=0)
    if (
        model.steps is None
        or written is None
        or not rows
        or slots > model.cache.slots
        or not model.steps.shapes.one_step(len(rows))
    ):
        return None
    segments = [Segment(row.place, start, 1, False, row.base) for row, start in rows]
    segments += [item.segment for item in prompts]
    token_ids, wanted = [0] * len(rows), list(range(len(rows)))
    for item in prompts:
        token_ids += item.token_ids
        wanted += range(len(token_ids) - item.wanted, len(token_ids))
    sources = written[0], [written[1][at] for at in going]
    return StepAhead(rows, prompts, model.begin_after(segments, token_ids, wanted, sources))
