"""The loop: fill free places, draft, one forward over all rows, accept, commit; finished rows make place at once.

    >>> for outcome in Engine(model, NoDrafts(), tokenizer, eos).run(requests): ...

Prompts are computed in chunks, in the same forwards in which other rows decode. A forward that fails is tried again
with fewer rows, and a row that fails alone costs its own record only. Limit: one device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ragspec.drafters.base import Draft
from ragspec.engine.admission import Admission, Start, new_row
from ragspec.engine.allocate import StepCost
from ragspec.engine.forward import Model
from ragspec.engine.layout import Segment
from ragspec.engine.proposers import LONGEST, Proposer
from ragspec.engine.room import PATIENCE, Backoff, Room
from ragspec.engine.row import Row
from ragspec.engine.sampling import draw
from ragspec.engine.verify import agreement, reject
from ragspec.errors import flat
from ragspec.hf.generation import Processors
from ragspec.hf.stopping import ends_with_stop, trim
from ragspec.records import Failure, Generation, Request, Tokenizer

CHUNK = 512  # tokens of a step while prompts are computed; more is no faster on a CPU, and delays the other rows
LOOKAHEAD = 4096  # requests read ahead to find shared prefixes

# what a forward may raise: out of memory (torch's own, and its RuntimeError on a CPU), ids that a model has no row for
FORWARD = (RuntimeError, IndexError, MemoryError)
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Clock:
    """Where the seconds went. A step that decodes and computes prompts is shared between the two by its tokens."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_tokens: int = 0
    drafting_s: float = 0.0  # within the two
    steps: int = 0  # of decode
    drafted_steps: int = 0
    prompt_tokens: int = 0  # computed, prefixes of other rows not counted
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)


@dataclass(slots=True)
class Work:
    """What one row does in a step: its last token and a draft behind it (decodes), or a piece of its text.

    writes: whether the last of `token_ids` is the row's last, so that a token follows.
    """

    row: Row
    token_ids: list[int]
    draft: Draft = field(default_factory=Draft)
    decodes: bool = False
    writes: bool = True

    @property
    def wanted(self) -> int:
        """How many of its last tokens logits are wanted of."""
        return 1 + len(self.draft.token_ids) if self.writes else 0

    @property
    def segment(self) -> Segment:
        """Where its tokens go."""
        row = self.row
        return Segment(row.place, row.computed, len(self.token_ids), alone=not self.decodes, base=row.base)


Written = list[tuple[Work, list[int]]]  # each row's work and the tokens that the target wrote


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
        self._rows = Backoff(model.cache.rows)
        self._together = Backoff(model.cache.rows)  # rows of one forward
        self._suspect: Row | None = None  # a row that is tried alone
        self._beside = 0  # rows that were there when it became one
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
        while True:
            if self._suspect is None:
                line.widen(self._rows.limit)
            admitted = line.admit()
            yield from (outcome for outcome in admitted if isinstance(outcome, Failure))
            if not line.rows():
                return
            yield from self._step(line, [start for start in admitted if isinstance(start, Start)])

    def _row(self, request: Request) -> Row:
        row = new_row(request)
        if self._processors is not None:
            row.processors = self._processors(request)
        return row

    # -- one step -------------------------------------------------------------------------------------------------

    def _step(self, line: Admission, starts: Sequence[Start]) -> Iterator[Generation | Failure]:
        """Run one forward over all rows; yield the records that are finished."""
        started = time.perf_counter()
        text = None
        try:
            self._begin(line, starts)
            work = self._plan(line)
            drafted = time.perf_counter()
            if not self._reserve(line, work):
                yield from self._narrow(line, work)
                return
        except FORWARD as error:
            text = self._told(error)
        if text is not None:  # out of the handler: the error holds what the forward allocated
            yield from self._give_way(line, text)
            return
        written, blamed = self._forward(work)
        finished: list[Row] = []
        try:
            tokens = sum(self._commit(item, token_ids, finished) for item, token_ids in written)
            self._count([item for item, _ in written], tokens, started, drafted)
        finally:  # what is finished is handed on, whatever became of the others
            for row in finished:
                yield self._outcome(line, row)
        if blamed is not None:
            yield from self._isolate(line, *blamed)
        else:
            self._rows.succeeded()

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
            self.clock.note(f"drafting failed and paused for {self._pause} steps: {self._told(error)}")
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
        slots = max(item.segment.start + item.segment.count for item in work)
        if slots > cache.slots:
            slots = self._room.ahead(slots, len(line.places), line.coming())
            if not slots:
                return False
            cache.reserve(slots)
        return True

    def _forward(self, work: Sequence[Work]) -> tuple[Written, tuple[Row, str] | None]:
        """Return what the target wrote, row by row, and the row that failed in a forward of its own, if one did.

        A forward that fails is parted; rows that it did not come to have their turn in the next step.
        """
        written: Written = []
        most = self._together.limit
        parts = [work[at : at + most] for at in range(0, len(work), most)]
        while parts:
            part, text = parts.pop(0), None
            try:
                written += self._accept(part, self._logits(part))
            except FORWARD as error:
                text = self._told(error)
            if text is None:
                continue
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if len(part) == 1:
                return written, (part[0].row, text)
            self.clock.note(f"a forward of {len(part)} rows failed, and went on with fewer at once: {text}")
            self._together.failed(len(part))
            half = len(part) // 2
            parts[:0] = [part[:half], part[half:]]
        self._together.succeeded()
        return written, None

    def _logits(self, work: Sequence[Work]) -> torch.Tensor:
        """Return the logits that are wanted of `work`, (tokens, vocab), in its order."""
        token_ids: list[int] = []
        wanted: list[int] = []
        for item in work:
            token_ids += item.token_ids
            wanted += range(len(token_ids) - item.wanted, len(token_ids))
        return self._model.logits([item.segment for item in work], token_ids, wanted)

    # -- when a forward fails -------------------------------------------------------------------------------------

    def _told(self, error: Exception) -> str:
        log.debug("a forward failed", exc_info=error)
        return f"{type(error).__name__}: {flat(error, 300)}"

    def _give_way(self, line: Admission, text: str) -> Iterator[Failure]:
        """Go on with half as many rows, the others back in the line; one alone is to blame itself."""
        places = len(line.places)
        if places == 1:
            yield from (self._fail(line, row, text) for row in line.rows())
        else:
            self._rows.failed(places)
            self.clock.note(f"batch_size: went from {places} to {self._rows.limit} rows after {text}")
        self._begin_anew(line, self._rows.limit if places > 1 else 1)

    def _narrow(self, line: Admission, work: Sequence[Work]) -> Iterator[Failure]:
        """Go on with as few rows as there is memory for, now that one of them is so long."""
        longest = max(work, key=lambda item: item.segment.start + item.segment.count)
        slots = longest.segment.start + longest.segment.count
        places = self._room.rows(slots)
        if places:
            self.clock.note(f"batch_size: went from {len(line.places)} to {places} rows for a record of {slots} tokens")
        else:
            yield self._fail(line, longest.row, self._room.why(slots))
        self._begin_anew(line, max(1, places))

    def _isolate(self, line: Admission, row: Row, text: str) -> Iterator[Failure]:
        """Try a row that failed in a forward of its own without any others; if it is alone already, it fails."""
        if len(line.rows()) == 1:
            yield self._fail(line, row, text)
            self._suspect = None
            return
        self._suspect, self._beside = row, len(line.places)
        self._begin_anew(line, 1, first=row)

    def _fail(self, line: Admission, row: Row, text: str) -> Failure:
        line.release(row)
        self._proposer.finish(row)
        return Failure(row.request.index, text)

    def _begin_anew(self, line: Admission, places: int, first: Row | None = None) -> None:
        """Send all rows back to the line, and have an empty cache of `places` rows."""
        line.interrupt(places, first)
        self._model.resize(places)
        self._proposer.resize(places)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # -- tokens ---------------------------------------------------------------------------------------------------

    def _accept(self, work: Sequence[Work], logits: torch.Tensor) -> Written:
        """Return what the target says after each row's tokens, cut at its first disagreement with the draft.

        logits: (sum of what is wanted, vocab), row after row.
        """
        plain = all(item.row.processors is None and not item.row.samples for item in work if item.writes)
        greedy = logits.argmax(-1).tolist() if plain else []
        written: Written = []
        at = 0
        for item in work:
            end = at + item.wanted
            if not item.writes:
                chosen = []
            elif plain:
                chosen = greedy[at:end]
                chosen = chosen[: agreement(item.draft.token_ids, chosen) + 1]
            else:
                chosen = _choose(item, logits[at:end])
            written.append((item, chosen))
            at = end
        return written

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
                answer, row.reason = trim(answer, self._eos, stop, self._tokenizer)
                kept = kept[: max(0, len(answer) - row.written)]
        return kept

    def _outcome(self, line: Admission, row: Row) -> Generation:
        """Return the answer of a finished row, whose place is free from now on."""
        line.release(row)
        self._proposer.finish(row)
        if row is self._suspect:  # with others beside it, it had failed
            self._suspect = None
            self._rows.failed(self._beside)
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

    # -- time -----------------------------------------------------------------------------------------------------

    def _count(self, work: Sequence[Work], written: int, started: float, drafted: float) -> None:
        """Take in a step: what it decoded, what it computed of prompts, and where its seconds went."""
        ended = time.perf_counter()
        clock = self.clock
        decoding = [item for item in work if item.decodes]
        tokens = sum(len(item.token_ids) for item in decoding)
        prefill = sum(len(item.token_ids) for item in work) - tokens
        if not tokens + prefill:
            return
        share = tokens / (tokens + prefill)
        clock.drafting_s += drafted - started
        clock.prompt_tokens += prefill
        clock.decode_s += share * (ended - started)
        clock.prefill_s += (1 - share) * (ended - started)
        clock.decode_tokens += written
        if not decoding:
            return
        clock.steps += 1
        clock.drafted_steps += any(item.draft.token_ids for item in decoding)
        if not prefill:
            self._proposer.observe(written, ended - started)
        if self._cost is not None and prefill:
            self._cost.observe_beside(tokens + prefill, ended - drafted)
        elif self._cost is not None:
            reach = max(len(item.row.tokens) for item in decoding)
            self._cost.observe(tokens, len(decoding), reach, ended - drafted)


def _choose(item: Work, logits: torch.Tensor) -> list[int]:
    """Return what one row writes, by its own processors, and its own noise where it samples."""
    row, guesses = item.row, item.draft.token_ids
    if row.processors is not None:
        logits = row.processors(logits, row.tokens, guesses)
    if not row.samples:
        chosen = logits.argmax(-1).tolist()
    else:
        weights = torch.softmax(logits.double(), dim=-1)
        if item.draft.probabilities is not None:
            return reject(weights, item.draft.probabilities, guesses, row.noise, row.written)
        chosen = draw(weights, [row.noise.at(row.written + i) for i in range(len(guesses) + 1)])
    return chosen[: agreement(guesses, chosen) + 1]
