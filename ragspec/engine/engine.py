"""The engine loop: admit, plan, forward, accept, commit. A finished request makes room for the next one at once.

    >>> for outcome in Engine(model, NoProposer(), tokenizer, eos).run(requests): ...

Prompts are computed in chunks, in the same forwards in which other rows decode. A forward that runs out of memory is
retried with fewer rows; a row that does not fit even alone only fails its own record. Limit: of the devices that a
model is spread over, one computes at a time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from ragspec.engine.acceptance import StepOutput, accept, needs_logits
from ragspec.engine.backends.paged_attention import TILE
from ragspec.engine.block_space import BlockSpace
from ragspec.engine.constraint import Constraint
from ragspec.engine.drafting import Drafting
from ragspec.engine.kv.budget import KvBudget
from ragspec.engine.model.forward import Model
from ragspec.engine.model.result import NOT_A_NUMBER, StepResult
from ragspec.engine.notes import Notes
from ragspec.engine.oom_policy import OomPolicy
from ragspec.engine.profiler import Clock, StepTimer
from ragspec.engine.proposers.base import LONGEST, NoProposer, Proposer
from ragspec.engine.request_state import RequestState, ScheduledRequest, Start, without_draft
from ragspec.engine.scheduler import PrefixGroups, Scheduler, new_row
from ragspec.engine.step_ahead import StepAhead, start_ahead
from ragspec.engine.stored_prefixes import StoredPrefixes
from ragspec.models.logits_processors import NO_NUMBERS, Processors
from ragspec.models.memory import MAY_BE_MEMORY, free_memory, out_of_memory
from ragspec.models.stopping import ends_with_stop, stop_strings_from, trim
from ragspec.records import Failure, Generation, Request, Tokenizer
from ragspec.speculation.drafters.base import Draft
from ragspec.speculation.method_selector import MethodSelector
from ragspec.speculation.step_cost import StepCost
from ragspec.structured.grammars import Grammars, begin

CHUNK = 512  # tokens of a step that computes prompts; more is no faster on a CPU, and delays the other rows
CHUNK_CUDA = 2048  # the same on a GPU
LOOKAHEAD = 4096  # requests read ahead to find shared prefixes


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How an engine runs.

    Attributes:
        room: Memory for the KV cache.
        cost: Updated by every step, if drafts are as long as pays.
        chunk, lookahead: As the constants above.
        processors: Returns a request's logits processors, None for none.
        refusal: Returns why a request cannot be answered, or "".
        trial: Judges drafts against what `plain` expects of plain steps.
        plain: Expected cost of plain steps.
        grammars: Builds the tokenizer's grammars.
        stored: Prefixes of earlier runs.
    """

    room: KvBudget = field(default_factory=KvBudget)
    cost: StepCost | None = None
    chunk: int = CHUNK
    lookahead: int = LOOKAHEAD
    processors: Callable[[Request], Processors | None] | None = None
    refusal: Callable[[Request], str] | None = None
    trial: MethodSelector | None = None
    plain: StepCost | None = None
    grammars: Callable[[], Grammars] | None = None
    stored: StoredPrefixes | None = None


class Engine:
    """Answers requests with one model. eos: token ids that end an answer. clock: continues an earlier run's counts.

    notes: for the user.
    """

    def __init__(
        self,
        model: Model,
        proposer: Proposer,
        tokenizer: Tokenizer,
        eos: frozenset[int],
        settings: EngineSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or Clock()
        self.notes = Notes()
        self._model = model
        self._proposer = proposer
        self._tokenizer = tokenizer
        self._eos = eos
        self._settings = settings or EngineSettings()
        self._plain = type(proposer) is NoProposer  # no row will ever have a draft
        self._quiet = self._plain  # no row has one in this step or the coming one
        self._ahead: StepAhead | None = None
        self._space = None if model.pool is None else BlockSpace(model.pool)
        self._exact = model.steps is not None and model.steps.exact
        self._sharing = PrefixGroups(model.frequencies.agree)
        self._constraint = Constraint(self.clock)
        self._restart = model.frequencies.restart
        plain, trial = self._settings.plain, self._settings.trial
        # left for the time in which the device computes the next step
        self._unrecorded: list[tuple[ScheduledRequest, int, int, int]] = []  # as RequestState.record takes it
        self._done: deque[RequestState] = deque()  # rows whose outcomes are not yielded yet
        self._drafting = Drafting(proposer, self._restart, self.notes, plain, trial, self._settings.cost)

    def run(self, requests: Iterable[Request]) -> Iterator[Generation | Failure]:
        """Yield one outcome per request, as they finish. Only out of memory is survived; any other error is raised."""
        room = self._settings.room
        scheduler = Scheduler(
            requests,
            self._model.cache.rows,
            self._settings.lookahead,
            start=self._row,
            room=room,
            step=1 + LONGEST,
            agree=self._model.frequencies.agree,
            refusal=self._settings.refusal,
            reads_beside=self._model.steps is not None,
            prompts_only=self._exact,
            beside=self._space.room_beside if self._space else None,
        )
        oom_policy = OomPolicy(self._model, self._proposer, room, self.notes)
        try:
            while True:
                if not scheduler.rows():  # nothing will be computed before the next request arrives
                    yield from self._finished()
                scheduler.widen(oom_policy.most)
                admitted = scheduler.admit()
                yield from (outcome for outcome in admitted if isinstance(outcome, Failure))
                if not scheduler.rows():
                    return
                yield from self._step(scheduler, oom_policy, [start for start in admitted if isinstance(start, Start)])
        except Exception:
            yield from self._finished()
            raise

    def _finished(self) -> Iterator[Generation | Failure]:
        """Record the last step, and yield the outcomes of rows that it finished."""
        for item, at, count, accepted in self._unrecorded:
            item.row.record(item, at, count, accepted)
        self._unrecorded.clear()
        while self._done:
            yield self._done.popleft().outcome()

    def _row(self, request: Request) -> RequestState:
        row = new_row(request)
        row.ends = request.sampling.ends(self._eos)
        if self._settings.processors is not None:
            row.processors = self._settings.processors(request)
        row.grammar = begin(self._settings.grammars, request.grammar)
        return row

    # -- one step ----------------------------------------------------------------------------------

    def _step(
        self, scheduler: Scheduler, oom_policy: OomPolicy, starts: Sequence[Start]
    ) -> Iterator[Generation | Failure]:
        """Run one forward over all rows; yield the records that it finishes."""
        timer, failure, unfit = StepTimer(), None, None
        ahead, self._ahead = self._ahead, None
        try:
            self._begin(scheduler, starts)
            work, later = self._plan(scheduler, ahead)
            timer.planned(self._drafting.asking_s)
            if self._space is not None:
                work, unfit = self._space.make_room(scheduler, work)
                later = [item for item in later if item.row.place >= 0]  # not preempted
            fits = self._grow(scheduler, max((item.slots for item in [*work, *later]), default=0))
        except MAY_BE_MEMORY as error:
            failure = out_of_memory(error)
        if failure is not None:  # outside of the handler, since the error keeps allocations alive
            yield from oom_policy.preempt(scheduler, failure)
        elif unfit is not None:
            yield from oom_policy.refuse(scheduler, unfit)
        elif not fits:
            yield from oom_policy.shrink_batch(scheduler, work)
        else:
            written, failed = yield from self._forward(work, ahead, later, timer, scheduler, oom_policy)
            self._commit(written, timer, scheduler, oom_policy)
            if failed is None:
                oom_policy.succeeded()
            else:
                self._ahead = None
                yield from oom_policy.run_alone(scheduler, *failed)

    def _begin(self, scheduler: Scheduler, starts: Sequence[Start]) -> None:
        """Resize the cache to the number of slots, and start new rows from the prefixes that others have computed."""
        cache, places = self._model.cache, len(scheduler.places)
        if cache.rows != places:
            slots = cache.slots if self._space else min(cache.slots, self._settings.room.slots(places))
            scheduler.forget_beyond(slots)
            cache.resize(places, slots)
            self._proposer.widen(places)
        for start in starts:
            row, shared = start.row, cache.share_prefix(start.donor, start.row.place, start.tokens)
            if shared < start.tokens:
                row.computed, row.cached = shared, min(row.cached, shared)
            self._proposer.admit(row, start.donor, shared)
        if self._settings.stored is not None:
            for start in starts:  # when all have what others computed, since room for more may take that from them
                self._load(scheduler, start.row, self._settings.stored)

    def _load(self, scheduler: Scheduler, row: RequestState, stored: StoredPrefixes) -> None:
        """Keep what a new row shares with others, and load what earlier runs kept of the rest of its prompt."""

        def room(tokens: int) -> bool:
            if self._space is not None:
                return self._space.make_room_for(scheduler, row, tokens)
            return self._grow(scheduler, tokens)

        stored.keep(row, row.computed)
        loaded = stored.load(row, row.computed, room)
        if loaded > row.computed:
            row.computed = loaded
            if not row.written:
                row.cached = loaded

    def _plan(
        self, scheduler: Scheduler, ahead: StepAhead | None
    ) -> tuple[list[ScheduledRequest], list[ScheduledRequest]]:
        """Return what each row does: ready rows decode, the others are filled, oldest first.

        Return also chunks of prompts that are better computed in the next step, beside rows that decode there. ahead:
        what of this step has been started.
        """
        rows = scheduler.rows()
        # where bits count, a prompt's last token is computed with its prompt, whatever is computed already
        last = [row.ready and not (self._exact and row.computed < row.prompt_tokens) for row in rows]
        ready = [row for row, each in zip(rows, last, strict=True) if each]
        filling = sorted((row for row, each in zip(rows, last, strict=True) if not each), key=lambda row: row.started)
        missing = sum(len(row.tokens) - row.computed for row in filling)
        self._expect(ready)
        prefill = min(missing, self._settings.chunk)
        drafts: Sequence[Draft] = self._drafting.drafts(ready, prefill, ahead=ahead is not None)
        self._quiet = self._plain or self._drafting.rests
        joined = bool(filling) and self._model.joins(len(ready), prefill, drafts=not self._quiet)
        if filling and ready and self._model.computes_prompts_apart:
            drafts = self._drafting.fitted(drafts, ready, self._model, prefill, joined)
        work = [
            ScheduledRequest(row, row.computed, row.tokens[-1:] + draft.token_ids, draft, True)
            for row, draft in zip(ready, drafts, strict=True)
        ]
        budget = self._settings.chunk
        if not self._model.computes_prompts_apart:
            budget = max(budget - sum(len(item.token_ids) for item in work), budget // 4)
        begun = {id(row): row.computed for row in filling}
        if ahead is None:
            prompts = self._chunks(filling, begun, budget)
        else:
            prompts = [item for item in ahead.prompts if id(item.row) in begun]
        waits = joined and self._quiet
        if not waits and ahead is None:
            return work + prompts, []
        started = {id(item.row): item.slots for item in prompts}
        later = self._chunks(filling, begun | started, budget)
        if waits and not needs_logits([*work, *prompts, *later]):
            return work + prompts, later
        if ahead is not None:
            prompts += [item for item in later if id(item.row) not in started]
        return work + prompts, []

    def _chunks(self, filling: Sequence[RequestState], begun: Mapping[int, int], budget: int) -> list[ScheduledRequest]:
        """Return the next chunks of prompts, of up to `budget` tokens. begun: what is computed of each, by identity."""
        chunks = []
        for row in filling:
            start = begun[id(row)]
            end = start + budget
            again = self._exact and start >= row.prompt_tokens  # it was preempted
            if self._exact:
                end = min(end, start + TILE if again else row.prompt_tokens)
            piece = row.tokens[start:end]
            if piece:
                writes = start + len(piece) == len(row.tokens)
                chunks.append(ScheduledRequest(row, start, piece, writes=writes, again=again))
            budget -= len(piece)
        return chunks

    def _expect(self, rows: Sequence[RequestState]) -> None:
        """Tell cost models what share of the rows' tokens is read once for all."""
        costs = [cost for cost in (self._settings.cost, self._settings.plain) if cost is not None]
        read = self._sharing.read(rows) if costs and self._model.kernels else 1.0
        for cost in costs:
            cost.read = read

    def _grow(self, scheduler: Scheduler, slots: int) -> bool:
        """Grow the cache to `slots` tokens a row, and some more; return whether there is memory for it."""
        cache = self._model.cache
        if slots > cache.slots:
            rows = 1 if self._space else len(scheduler.places)
            slots = self._settings.room.ahead(slots, rows, *scheduler.coming())
            if not slots:
                return False
            cache.reserve(slots)
        return True

    def _forward(
        self,
        work: Sequence[ScheduledRequest],
        ahead: StepAhead | None,
        later: Sequence[ScheduledRequest],
        timer: StepTimer,
        scheduler: Scheduler,
        oom_policy: OomPolicy,
    ) -> Generator[Generation | Failure, None, tuple[StepOutput, tuple[RequestState, str] | None]]:
        """Yield the last step's outcomes while the device computes; return the target's tokens by row, and the row that
        failed in a forward of its own, if any.

        A forward that runs out of memory is split in half; rows that were not reached are scheduled again next step.
        """
        written: StepOutput = []
        most = oom_policy.together.limit
        parts = [work[at : at + most] for at in range(0, len(work), most)]
        while parts:
            part, failure, result = parts.pop(0), None, None
            try:
                result = self._begin_forward(part, ahead, later)
            except MAY_BE_MEMORY as error:
                failure = out_of_memory(error)
            if result is not None:
                # what is done beside a device that computes is no time lost
                with timer.settling(overlapped=not result.done()):
                    self._drafting.settle()
                with timer.aside() if result.done() else nullcontext():
                    yield from self._finished()
                    scheduler.read_ahead(result.done)
                try:
                    written += self._accept(part, result)
                except MAY_BE_MEMORY as error:
                    failure = out_of_memory(error)
            if failure is None:
                continue
            result = None
            free_memory()
            if len(part) == 1:
                return written, (part[0].row, failure)
            self.notes.add(f"a forward pass with {len(part)} records failed and was retried with fewer: {failure}")
            oom_policy.together.failed(len(part))
            half = len(part) // 2
            parts[:0] = [part[:half], part[half:]]
        oom_policy.together.succeeded()
        return written, None

    def _begin_forward(
        self, work: Sequence[ScheduledRequest], ahead: StepAhead | None, later: Sequence[ScheduledRequest]
    ) -> StepResult:
        """Start what was not started ahead, and the step after it; return the result of `work`, in its order.

        later: chunks of prompts for the step after it.
        """
        bare = not needs_logits(work)
        rest, numbers = work, list[int | None]()
        if ahead is not None and bare:
            numbers = ahead.numbers(work)
            rest = [item for item, number in zip(work, numbers, strict=True) if number is None]
        result = self._launch(rest, logits=not bare) if rest else None
        if ahead is not None and len(rest) < len(work):
            result = ahead.joined(work, numbers, result)
        assert result is not None
        if bare and self._quiet:
            try:
                self._ahead = start_ahead(self._model, work, later, result)
            except MAY_BE_MEMORY as error:
                out_of_memory(error)  # it is started when it is due, and fails then
                self._ahead = None  # what an earlier part started may follow chunks that were not computed yet
        return result

    def _accept(self, work: Sequence[ScheduledRequest], result: StepResult) -> StepOutput:
        """Return the target's tokens by row, computed again without a draft where that overflows.

        What is not a number is none for the tokens before it either, since attention weighs it with 0.
        """
        written = accept(work, result, self._constraint)
        spoilt = [at for at, item in enumerate(work) if item.overflowed and item.draft.token_ids]
        again = [at for at in spoilt if written[at][1][-1] == NOT_A_NUMBER and work[at].draft.probabilities is None]
        for at in spoilt:
            right = 0 if at in again else len(written[at][1])
            self._model.cache.erase(work[at].row.place, work[at].start + right)
        plain = [without_draft(work[at]) for at in again]
        if plain:
            result = self._launch(plain, logits=needs_logits(plain))
            for at, found in zip(again, accept(plain, result, self._constraint), strict=True):
                written[at] = found
        return written

    def _launch(self, work: Sequence[ScheduledRequest], logits: bool) -> StepResult:
        """Start a forward of `work`; return its result, in its order. logits: whether they are needed."""
        token_ids: list[int] = []
        wanted: list[int] = []
        for item in work:
            token_ids += item.token_ids
            wanted += range(len(token_ids) - item.wanted, len(token_ids))
        together = self._sharing.among([item.row for item in work]) if self._model.kernels else []
        segments = [item.segment for item in work]
        return self._model.begin(segments, token_ids, wanted, together, logits=logits)

    # -- tokens ------------------------------------------------------------------------------------

    def _commit(self, written: StepOutput, timer: StepTimer, scheduler: Scheduler, oom_policy: OomPolicy) -> None:
        """Record what rows computed and generated, and its cost; collect the finished answers."""
        finished: list[RequestState] = []
        try:
            tokens = sum(self._extend(item, token_ids, finished) for item, token_ids in written)
            work = [item for item, _ in written]
            seconds = timer.count(work, tokens, self.clock, self._settings.cost)
            self._drafting.observe(work, tokens, seconds, timer.settling_s)
            if self._settings.stored is not None:
                self._settings.stored.observe(work, seconds)
        finally:  # finished answers are yielded even if a later row raises
            for row in finished:
                scheduler.release(row)
                self._proposer.finish(row)
                oom_policy.finished(row)
                self._done.append(row)

    def _extend(self, item: ScheduledRequest, token_ids: list[int], finished: list[RequestState]) -> int:
        """Take what one row computed and generated; return by how many tokens its answer grew, if it decodes."""
        row = item.row
        if not item.writes:
            row.computed += len(item.token_ids)
            return 0
        if token_ids[-1] == NOT_A_NUMBER:
            self._fail(row)
            finished.append(row)
            return 0
        before = len(row.tokens)
        room = row.most_tokens - before
        kept = token_ids[:room]
        if row.ends_early or not row.ends.isdisjoint(kept):
            kept = self._within(row, kept)
        row.tokens += kept
        row.computed = len(row.tokens) - 1
        self._unrecorded.append((item, before - row.prompt_tokens, len(kept), min(len(kept), len(token_ids) - 1)))
        if row.grammar is not None:
            self._follow(row, kept)
        if not self._plain:
            self._proposer.extend(row, kept)
        if row.first_at is None:
            row.first_at = time.perf_counter()
        if row.reason or len(kept) >= room:
            finished.append(row)
        if self._restart is not None and row.base <= self._restart < len(row.tokens):
            row.base, row.computed = len(row.tokens), 0
        return len(kept) if item.decodes else 0

    def _fail(self, row: RequestState) -> None:
        """End an answer whose logits are not numbers, and erase what would make those of later rows none either."""
        row.problem, row.reason, row.computed = NO_NUMBERS, "error", 0  # it lends no prefix
        self._model.cache.erase(row.place)

    def _follow(self, row: RequestState, kept: list[int]) -> None:
        """Advance the row's grammar; end the answer if nothing may follow."""
        assert row.grammar is not None
        forced = row.room == 0 and row.reason == "stop"  # an end token may be forced as the last of all
        row.grammar.take(kept)
        if forced and row.grammar.stuck:
            row.grammar.stuck, row.reason = False, "length"
        if row.grammar.problem:
            row.reason = "error"
        elif row.grammar.endless and row.grammar.complete:
            row.reason = "stop"

    def _within(self, row: RequestState, kept: list[int]) -> list[int]:
        """Return the tokens up to the end of the answer, if it is among them."""
        if not row.ends.isdisjoint(kept):
            end = next(count for count, token in enumerate(kept, 1) if token in row.ends)
            kept, row.reason = kept[:end], "stop"
        if row.grammar is not None and row.grammar.endless and len(kept) > 1:
            # a complete answer ends without an end token; a draft may go on with the tokenizer's
            kept = kept[: row.grammar.until_complete(kept)]
        stop = row.request.sampling.stop
        if stop:
            answer = row.tokens[row.prompt_tokens :] + kept
            least = stop_strings_from(row.request, answer, self._tokenizer)
            if ends_with_stop(self._tokenizer, answer, len(kept), stop, least):
                answer, reason = trim(answer, row.ends, stop, self._tokenizer, least)
                if reason == "stop":
                    kept, row.reason = kept[: max(0, len(answer) - row.written)], reason
        return kept
