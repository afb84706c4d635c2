"""The loop: fill free places, draft, one forward over all rows, accept, commit; finished rows make place at once.

    >>> for outcome in Engine(model, NoDrafts(), tokenizer, eos).run(requests): ...

Prompts are computed in chunks, in the same forwards in which other rows decode. A forward that fails is tried again
with fewer rows, and a row that fails alone costs its own record only. Limit: one device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from ragspec.engine.admission import Admission, Start, new_row
from ragspec.engine.clock import Clock, StepTimer
from ragspec.engine.forward import Model
from ragspec.engine.proposers import LONGEST, Proposer
from ragspec.engine.retreat import FORWARD, Retreat, free_memory, told
from ragspec.engine.room import PATIENCE, Room
from ragspec.engine.row import Row
from ragspec.engine.work import Work, Written, accept
from ragspec.models.generation import Processors
from ragspec.models.stopping import ends_with_stop, trim
from ragspec.records import Failure, Generation, Request, Tokenizer
from ragspec.speculation.cost import StepCost
from ragspec.speculation.drafters.base import Draft

CHUNK = 512  # tokens of a step while prompts are computed; more is no faster on a CPU, and delays the other rows
LOOKAHEAD = 4096  # requests read ahead to find shared prefixes


class Engine:
    """Answers requests with one model. eos: ids that end an answer. processors: of a request's logits, None for none.

    room: memory for keys and values.
    """

    def __init__(
        self,
        model: Model,
        proposer: Proposer,
        tokenizer: Tokenizer,
        eos: frozenset[int],
        *,
        clock: Clock | None = None,
        cost: StepCost | None = None,
        chunk: int = CHUNK,
        lookahead: int = LOOKAHEAD,
        processors: Callable[[Request], Processors | None] | None = None,
        room: Room | None = None,
    ) -> None:
        self.clock = clock or Clock()
        self._model = model
        self._proposer = proposer
        self._tokenizer = tokenizer
        self._eos = eos
        self._cost = cost
        self._chunk = chunk
        self._lookahead = lookahead
        self._processors = processors
        self._room = room or Room()
        self._pause = 0  # steps without drafts, after a drafter failed
        self._pauses = 0

    def run(self, requests: Iterable[Request]) -> Iterator[Generation | Failure]:
        """Yield one outcome per request, as they finish. Only a forward is tried again: any other error is raised."""
        line = Admission(
            requests,
            self._model.cache.rows,
            self._lookahead,
            start=self._row,
            room=self._room,
            step=1 + LONGEST,
            agree=self._model.frequencies.agree,
        )
        retreat = Retreat(self._model, self._proposer, self._room, self.clock)
        while True:
            line.widen(retreat.most)
            admitted = line.admit()
            yield from (outcome for outcome in admitted if isinstance(outcome, Failure))
            if not line.rows():
                return
            yield from self._step(line, retreat, [start for start in admitted if isinstance(start, Start)])

    def _row(self, request: Request) -> Row:
        row = new_row(request)
        if self._processors is not None:
            row.processors = self._processors(request)
        return row

    # -- one step -------------------------------------------------------------------------------------------------

    def _step(self, line: Admission, retreat: Retreat, starts: Sequence[Start]) -> Iterator[Generation | Failure]:
        """Run one forward over all rows; yield the records that are finished."""
        timer, failure = StepTimer(), None
        try:
            self._begin(line, starts)
            work = self._plan(line)
            timer.drafted()
            fits = self._reserve(line, work)
        except FORWARD as error:
            failure = told(error)
        if failure is not None:  # out of the handler: the error holds what was allocated
            yield from retreat.give_way(line, failure)
            return
        if not fits:
            yield from retreat.narrow(line, work)
            return
        written, failed = self._forward(work, retreat)
        finished: list[Row] = []
        try:
            tokens = sum(self._commit(item, token_ids, finished) for item, token_ids in written)
            seconds = timer.count([item for item, _ in written], tokens, self.clock, self._cost)
            if seconds is not None:
                self._proposer.observe(tokens, seconds)
        finally:  # what is finished is handed on, whatever became of the others
            for row in finished:
                line.release(row)
                self._proposer.finish(row)
                retreat.finished(row)
                yield _outcome(row)
        if failed is None:
            retreat.succeeded()
        else:
            yield from retreat.isolate(line, *failed)

    def _begin(self, line: Admission, starts: Sequence[Start]) -> None:
        """Bring the cache to the places that there are, and to each new row what it shares with another."""
        cache, places = self._model.cache, len(line.places)
        if cache.rows != places:
            slots = min(cache.slots, self._room.slots(places))
            line.forget_beyond(slots)
            cache.resize(places, slots)
            self._proposer.widen(places)
        for start in starts:
            if start.tokens and start.source != start.row.place:
                cache.copy(start.source, start.row.place, start.tokens)
            self._proposer.admit(start.row, start.source, start.tokens)

    def _plan(self, line: Admission) -> list[Work]:
        """Return what each row does: those that are ready decode, prompts go on, the oldest first."""
        rows = line.rows()
        ready = [row for row in rows if row.ready]
        filling = sorted((row for row in rows if not row.ready), key=lambda row: row.started)
        missing = sum(len(row.tokens) - row.computed for row in filling)
        drafts = self._draft(ready, min(missing, self._chunk))
        work = [
            Work(row, row.tokens[-1:] + draft.token_ids, draft, decodes=True)
            for row, draft in zip(ready, drafts, strict=True)
        ]
        budget = max(self._chunk - sum(len(item.token_ids) for item in work), self._chunk // 4)
        for row in filling:
            piece = row.tokens[row.computed : row.computed + budget]
            if piece:
                work.append(Work(row, piece, writes=row.computed + len(piece) == len(row.tokens)))
            budget -= len(piece)
        return work

    def _draft(self, rows: Sequence[Row], besides: int) -> list[Draft]:
        """Return a draft per row. A drafter that fails costs drafts, no answers."""
        if not rows or self._pause:
            self._pause = max(0, self._pause - 1)
            return [Draft()] * len(rows)
        try:
            drafts = self._proposer.propose(rows, besides)
        except FORWARD as error:
            self._pauses += 1
            self._pause = PATIENCE << min(self._pauses, 6)
            self._proposer.forget()
            self.clock.note(f"drafting failed and paused for {self._pause} steps: {told(error)}")
            return [Draft()] * len(rows)
        restart = self._model.frequencies.restart
        if restart is None:
            return drafts
        # a text that outgrows this length is computed anew, so no step may cross it
        lengths = [restart - len(row.tokens) if row.base <= restart else LONGEST for row in rows]
        return [draft.cut(max(0, length)) for draft, length in zip(drafts, lengths, strict=True)]

    def _reserve(self, line: Admission, work: Sequence[Work]) -> bool:
        """Make room for what the rows write, and ahead of it; return whether there is memory for it."""
        cache = self._model.cache
        slots = max(item.slots for item in work)
        if slots > cache.slots:
            slots = self._room.ahead(slots, len(line.places), line.coming())
            if not slots:
                return False
            cache.reserve(slots)
        return True

    def _forward(self, work: Sequence[Work], retreat: Retreat) -> tuple[Written, tuple[Row, str] | None]:
        """Return what the target wrote, row by row, and the row that failed in a forward of its own, if one did.

        A forward that fails is parted; rows that it did not come to have their turn in the next step.
        """
        written: Written = []
        most = retreat.together.limit
        parts = [work[at : at + most] for at in range(0, len(work), most)]
        while parts:
            part, failure = parts.pop(0), None
            try:
                written += accept(part, self._logits(part))
            except FORWARD as error:
                failure = told(error)
            if failure is None:
                continue
            free_memory()
            if len(part) == 1:
                return written, (part[0].row, failure)
            self.clock.note(f"a forward of {len(part)} rows failed, and went on with fewer at once: {failure}")
            retreat.together.failed(len(part))
            half = len(part) // 2
            parts[:0] = [part[:half], part[half:]]
        retreat.together.succeeded()
        return written, None

    def _logits(self, work: Sequence[Work]) -> torch.Tensor:
        """Return the logits that are wanted of `work`, (tokens, vocab), in its order."""
        token_ids: list[int] = []
        wanted: list[int] = []
        for item in work:
            token_ids += item.token_ids
            wanted += range(len(token_ids) - item.wanted, len(token_ids))
        return self._model.logits([item.segment for item in work], token_ids, wanted)

    # -- tokens ---------------------------------------------------------------------------------------------------

    def _commit(self, item: Work, token_ids: list[int], finished: list[Row]) -> int:
        """Take in what a row computed and wrote; return how many tokens its answer grew by, in decoding."""
        row = item.row
        if not item.writes:
            row.computed += len(item.token_ids)
            return 0
        kept = self._within(row, token_ids)
        row.copies.note(row.written, item.draft, kept)
        row.tokens.extend(kept)
        row.computed = len(row.tokens) - 1
        accepted = min(len(kept), len(token_ids) - 1)
        row.spec.record(len(item.draft.token_ids), accepted)
        row.guessed += b"\1" * accepted + b"\0" * (len(kept) - accepted)
        self._proposer.extend(row, kept)
        row.first_at = row.first_at or time.perf_counter()
        if row.reason or row.room <= 0:
            finished.append(row)
        restart = self._model.frequencies.restart
        if restart is not None and row.base <= restart < len(row.tokens):
            row.base, row.computed = len(row.tokens), 0
        return len(kept) if item.decodes else 0

    def _within(self, row: Row, token_ids: list[int]) -> list[int]:
        """Return the tokens up to the end of the answer, if it is among them."""
        kept = token_ids[: row.room]
        for count, token in enumerate(kept, 1):
            if token in self._eos:
                kept, row.reason = kept[:count], "stop"
                break
        stop = row.request.sampling.stop
        if stop:
            answer = row.tokens[row.prompt_tokens :] + kept
            if ends_with_stop(self._tokenizer, answer, len(kept), stop):
                answer, reason = trim(answer, self._eos, stop, self._tokenizer)
                if reason == "stop":
                    kept, row.reason = kept[: max(0, len(answer) - row.written)], reason
        return kept


def _outcome(row: Row) -> Generation:
    """Return the answer of a finished row."""
    answer = row.tokens[row.prompt_tokens :]
    row.spec.end(len(answer))
    return Generation(
        row.request.index,
        answer,
        row.reason or "length",
        row.spec,
        latency_s=time.perf_counter() - row.started,
        time_to_first_token_s=None if row.first_at is None else row.first_at - row.started,
        cached_prompt_tokens=row.cached,
        guessed=bytes(row.guessed),
        copied=row.copies.worth_citing(answer),
    )
