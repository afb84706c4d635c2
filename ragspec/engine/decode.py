"""The loop: fill free places, draft, one forward over all rows, accept, emit; finished rows make place at once.

    >>> for outcome in Engine(model, NoDrafts(), tokenizer, eos).run(requests): ...

Prompts are computed in chunks, in the same forwards in which other rows decode. A forward that fails (out of memory)
sends all rows back to the line, keeps what they wrote, and goes on with half as many. Limit: one device.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ragspec.drafters.base import Draft
from ragspec.engine.admission import Admission
from ragspec.engine.allocate import StepCost
from ragspec.engine.forward import Model
from ragspec.engine.layout import Segment
from ragspec.engine.proposers import Proposer
from ragspec.engine.row import Row
from ragspec.engine.sampling import draw, penalise, probabilities
from ragspec.engine.verify import agreement, reject
from ragspec.errors import flat
from ragspec.hf.stopping import ends_with_stop, trim
from ragspec.records import Failure, Generation, Request, Tokenizer

CHUNK = 512  # tokens of a step while prompts are computed; more is no faster on a CPU, and delays the other rows
LOOKAHEAD = 4096  # requests read ahead to find shared prefixes


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


class Engine:
    """Answers requests with one model. eos: ids that end an answer."""

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
    ) -> None:
        self.clock = clock or Clock()
        self._model = model
        self._proposer = proposer
        self._tokenizer = tokenizer
        self._eos = eos
        self._cost = cost
        self._chunk = chunk
        self._lookahead = lookahead

    def run(self, requests: Iterable[Request]) -> Iterator[Generation | Failure]:
        """Yield one outcome per request, as they finish."""
        line = Admission(requests, self._model.cache.rows, self._lookahead)
        while True:
            line.look_ahead()
            try:
                line.fill(self._model.cache, self._proposer)
                if not line.rows():
                    return
                finished = self._step(line)
            except Exception as error:  # whatever it was, fewer rows may do; one alone is to blame itself
                self._model.resize(0)  # free the memory before anything else
                failure = self._back_off(line, error)
                if failure is not None:
                    yield failure
                continue
            for row in finished:
                line.release(row)
                self._proposer.finish(row)
                yield self._outcome(row)

    def _back_off(self, line: Admission, error: Exception) -> Failure | None:
        rows, places = line.rows(), max(1, len(line.places) // 2)
        text = f"{type(error).__name__}: {flat(error, 300)}"
        failure = None
        if len(line.places) > 1:
            self.clock.notes.append(f"batch_size: went from {len(line.places)} to {places} rows after {text}")
        elif rows:
            failure = Failure(rows[0].request.index, text)
            line.release(rows[0])
        else:
            failure = Failure(line.give_up().index, text)
        line.interrupt(places)
        self._model.resize(places)
        self._proposer.resize(places)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return failure

    # -- one step -------------------------------------------------------------------------------------------------

    def _step(self, line: Admission) -> list[Row]:
        """Run one forward; return the rows that are finished."""
        started = time.perf_counter()
        ready = [row for row in line.rows() if row.ready]
        filling = [row for row in line.rows() if not row.ready]
        missing = sum(len(row.tokens) - row.computed for row in filling)
        drafts = self._proposer.propose(ready, min(missing, self._chunk)) if ready else []
        drafted_at = time.perf_counter()
        verified = len(ready) + sum(len(draft.token_ids) for draft in drafts)
        chunks = self._chunks(filling, max(self._chunk - verified, self._chunk // 4))
        prefill = sum(count for _, count in chunks)

        segments: list[Segment] = []
        token_ids: list[int] = []
        wanted: list[int] = []
        for row, draft in zip(ready, drafts, strict=True):
            wanted.extend(range(len(token_ids), len(token_ids) + 1 + len(draft.token_ids)))
            segments.append(Segment(row.place, row.computed, 1 + len(draft.token_ids)))
            token_ids += row.tokens[-1:] + draft.token_ids
        writing = list(zip(ready, drafts, strict=True))
        for row, count in chunks:
            segments.append(Segment(row.place, row.computed, count, alone=True))
            token_ids += row.tokens[row.computed : row.computed + count]
            if row.computed + count == len(row.tokens):
                wanted.append(len(token_ids) - 1)
                writing.append((row, Draft()))
        logits = self._model.logits(segments, token_ids, wanted)
        emitted = self._choose(logits, writing)

        for row, count in chunks:
            row.computed += count
        finished = [row for (row, draft), ids in zip(writing, emitted, strict=True) if self._emit(row, draft, ids)]
        ended = time.perf_counter()
        for row, _ in writing:
            row.first_at = row.first_at or ended
        self._count(started, drafted_at, ended, ready, drafts, prefill, sum(map(len, emitted[: len(ready)])))
        return finished

    def _chunks(self, rows: Sequence[Row], budget: int) -> list[tuple[Row, int]]:
        chunks = []
        for row in sorted(rows, key=lambda row: row.started):
            count = min(budget, len(row.tokens) - row.computed)
            if count <= 0:
                break
            chunks.append((row, count))
            budget -= count
        return chunks

    def _count(
        self,
        started: float,
        drafted_at: float,
        ended: float,
        ready: Sequence[Row],
        drafts: Sequence[Draft],
        prefill: int,
        emitted: int,
    ) -> None:
        clock = self.clock
        clock.drafting_s += drafted_at - started
        clock.prompt_tokens += prefill
        lengths = [len(draft.token_ids) for draft in drafts]
        tokens = len(ready) + sum(lengths)
        share = tokens / (tokens + prefill)
        clock.decode_s += share * (ended - started)
        clock.prefill_s += (1 - share) * (ended - started)
        clock.decode_tokens += emitted
        if not ready:
            return
        clock.steps += 1
        clock.drafted_steps += any(lengths)
        if not prefill:
            self._proposer.observe(emitted, ended - started)
        if self._cost is not None and prefill:
            self._cost.observe_beside(tokens + prefill, ended - drafted_at)
        elif self._cost is not None:
            reach = max(len(row.tokens) for row in ready)
            self._cost.observe(tokens, len(ready), reach, ended - drafted_at)

    # -- tokens ---------------------------------------------------------------------------------------------------

    def _choose(self, logits: torch.Tensor, writing: Sequence[tuple[Row, Draft]]) -> list[list[int]]:
        """Return what each row emits. logits: (sum of 1 + draft, vocab), row after row."""
        plain = all(
            row.request.sampling.temperature == 0 and row.request.sampling.repetition_penalty == 1 for row, _ in writing
        )
        greedy = logits.argmax(-1).tolist() if plain else []
        emitted, at = [], 0
        for row, draft in writing:
            end = at + 1 + len(draft.token_ids)
            if plain:
                chosen = greedy[at:end]
                emitted.append(chosen[: agreement(draft.token_ids, chosen) + 1])
            else:
                emitted.append(self._choose_for(row, draft, logits[at:end]))
            at = end
        return emitted

    def _choose_for(self, row: Row, draft: Draft, logits: torch.Tensor) -> list[int]:
        sampling, guesses = row.request.sampling, draft.token_ids
        if sampling.repetition_penalty != 1:
            seen = [row.tokens + guesses[:i] for i in range(len(guesses) + 1)]
            logits = penalise(logits, sampling.repetition_penalty, seen)
        if sampling.temperature == 0:
            chosen = logits.argmax(-1).tolist()
        else:
            weights = probabilities(logits, sampling)
            if draft.probabilities is not None:
                return reject(weights, draft.probabilities, guesses, row.noise, row.written)
            chosen = draw(weights, [row.noise.at(row.written + i) for i in range(len(guesses) + 1)])
        return chosen[: agreement(guesses, chosen) + 1]

    def _emit(self, row: Row, draft: Draft, token_ids: list[int]) -> bool:
        """Append what the target wrote; return whether the answer is finished."""
        kept = token_ids[: row.room]
        for count, token in enumerate(kept, 1):
            if token in self._eos:
                kept = kept[:count]
                break
        row.copies.note(row.written, draft, kept)
        row.tokens.extend(kept)
        row.computed = len(row.tokens) - 1
        accepted = min(len(kept), len(token_ids) - 1)
        row.spec.record(len(draft.token_ids), accepted)
        row.guessed += b"\1" * accepted + b"\0" * (len(kept) - accepted)
        self._proposer.extend(row, kept)
        if kept[-1] in self._eos or row.room <= 0:
            return True
        stop = row.request.sampling.stop
        return bool(stop) and ends_with_stop(self._tokenizer, row.tokens[row.prompt_tokens :], len(kept), stop)

    def _outcome(self, row: Row) -> Generation:
        ended = time.perf_counter()
        answer = row.tokens[row.prompt_tokens :]
        token_ids, reason = trim(answer, self._eos, row.request.sampling.stop, self._tokenizer)
        first = None if row.first_at is None else row.first_at - row.started
        return Generation(
            row.request.index,
            token_ids,
            reason,
            row.spec,
            latency_s=ended - row.started,
            time_to_first_token_s=first,
            cached_prompt_tokens=row.cached,
            guessed=bytes(row.guessed[: len(token_ids)]),
            copied=row.copies.worth_citing(token_ids),
        )
