"""A bounded number of records in flight in one engine, those that begin alike together.

    >>> for outcome in Stream(engine, proposer, tokenizer, rows=16, ...).run(requests): ...

Source: vLLM 0.32, v1/engine/llm_engine.py, driven step by step: `LLM.generate` returns only at the end, and one refused
prompt aborts all that are queued.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from ragspec.engine.prefix import grouped, largest_first
from ragspec.errors import ModelError
from ragspec.inputs.feed import Feed
from ragspec.models.reasoning import unended
from ragspec.models.stopping import ends_with_stop, trim
from ragspec.records import Failure, Generation, Request, Tokenizer
from ragspec.runners.vllm.environment import one_line
from ragspec.runners.vllm.requests import (
    is_requests_fault,
    is_watched,
    logprobs_of,
    sampling_params,
    settings_of,
    spec_stats,
)
from ragspec.runners.vllm.undrafted import Undrafted
from ragspec.speculation.methods import PLAIN

log = logging.getLogger(__name__)
AHEAD = 2  # records submitted per row of the engine's batch, so that a row never waits for one


@dataclass(slots=True)
class _Submitted:
    request: Request
    at: float
    undrafted: str = ""  # why nothing is drafted for it
    seen: int = 0  # tokens of its answer in which a stop string was looked for


class Stream:
    """One run. proposer: our drafter in the engine, or None.

    lost: returns what of a record's settings the engine would not do where it drafts, "" for nothing. undrafted: how it
    answers such records without drafts; None where it cannot. method: what drafts, for messages.
    """

    def __init__(
        self,
        engine: Any,
        proposer: Any,
        tokenizer: Tokenizer,
        *,
        rows: int,
        lookahead: int,
        sampling_args: Mapping[str, Any],
        lost: Callable[[Mapping[str, Any]], str],
        undrafted: Undrafted | None = None,
        method: str = PLAIN,
    ) -> None:
        self._engine = engine
        self._proposer = proposer
        self._tokenizer = tokenizer
        self._rows = rows
        self._lookahead = lookahead
        self._sampling_args = dict(sampling_args)
        self._lost = lost
        self._undrafted = undrafted
        self.tells_masked = False  # whether logprobs were told of structured answers
        self._method = method
        self._flying: dict[str, _Submitted] = {}

    def run(self, requests: Iterable[Request]) -> Iterator[Generation | Failure]:
        """Yield outcomes as they finish. Raises ModelError where the engine itself fails."""
        self._engine.reset_prefix_cache()  # an earlier pass must leave nothing behind
        if self._proposer is not None:
            self._proposer.reset()
        feed, queue = Feed(requests), deque[Request]()
        try:
            while True:
                while len(self._flying) < AHEAD * self._rows:
                    if not queue:
                        queue.extend(_by_prefix(feed.take(self._lookahead, wait=not self._flying)))
                    if not queue:
                        break
                    if (refused := self._submit(queue.popleft())) is not None:
                        yield refused
                if not self._flying:
                    return
                for output in self._step():
                    if output.finished or self._has_stopped(output):
                        yield self._outcome(self._flying.pop(output.request_id), output)
        finally:  # who leaves early must not find these answers in the next run
            if self._flying:
                self._engine.abort_request(list(self._flying))

    def _submit(self, request: Request) -> Failure | None:
        from vllm import SamplingParams

        settings = settings_of(request.sampling, self._sampling_args)
        lost, kind = self._lost(settings), SamplingParams
        if lost:
            if self._undrafted is None:
                return Failure(request.index, f"{lost}; use method: none, or remove it")
            kind = self._undrafted.params
        name = str(request.index)
        prompt = {"prompt_token_ids": request.token_ids}
        try:
            self._engine.add_request(name, prompt, sampling_params(kind, request, settings))
        except Exception as error:  # whatever the engine refuses is this record's failure
            log.debug("vLLM refuses a record", exc_info=error)
            return Failure(
                request.index,
                f"vLLM refuses it: {one_line(error)}",
                "RecordError" if is_requests_fault(error) else "BackendError",
            )
        if self._proposer is not None:
            self._proposer.expect(
                request.token_ids,
                request.passages,
                drafts=not lost,
                grammar=request.grammar,
                most=request.sampling.max_new_tokens,
            )
        self._flying[name] = _Submitted(request, perf_counter(), lost)
        return None

    def _step(self) -> list[Any]:
        try:
            outputs: list[Any] = self._engine.step()
        except Exception as error:  # an engine that fails in a step has lost its rows
            self._flying.clear()
            raise ModelError(
                f"vLLM's engine stopped (method {self._method}): {one_line(error)}; finished answers are kept, "
                "run again to continue"
            ) from error
        return outputs

    def _has_stopped(self, output: Any) -> bool:
        """Return whether an answer that is under way has a stop string, and end it."""
        submitted = self._flying[output.request_id]
        request, answer = submitted.request, output.outputs[0].token_ids
        if not is_watched(request):
            return False
        fresh, submitted.seen = len(answer) - submitted.seen, len(answer)
        least = unended(request, answer, self._tokenizer)
        # only in what is new: a thought has thousands of tokens, and every step would read them all
        if least >= len(answer) or not ends_with_stop(self._tokenizer, answer, fresh, request.sampling.stop, least):
            return False
        self._engine.abort_request([output.request_id])
        return True

    def _trimmed(self, request: Request, answer: Sequence[int]) -> tuple[list[int], str]:
        """Return an answer up to its first stop string: vLLM's ends with a whole step."""
        least = unended(request, answer, self._tokenizer)
        return trim(list(answer), frozenset(), request.sampling.stop, self._tokenizer, least)

    def _outcome(self, submitted: _Submitted, output: Any) -> Generation | Failure:
        request, answer = submitted.request, output.outputs[0]
        written = list(answer.token_ids)
        token_ids, reason = self._trimmed(request, written)
        reason = reason if reason == "stop" else answer.finish_reason
        known = self._proposer.finish(request.token_ids, written) if self._proposer is not None else None
        if reason not in ("stop", "length"):
            if request.grammar:
                return Failure(request.index, "structured: vLLM cannot go on with its grammar", "RecordError")
            return Failure(request.index, f"vLLM ended it with {reason!r}")
        metrics, most = output.metrics, request.sampling.logprobs
        self.tells_masked |= most is not None and bool(request.grammar)
        return Generation(
            request.index,
            token_ids,
            reason,
            spec_stats(answer.spec_decode_metrics, len(written), len(token_ids)),
            latency_s=perf_counter() - submitted.at,
            time_to_first_token_s=metrics.first_token_latency if metrics is not None else None,
            cached_prompt_tokens=output.num_cached_tokens or 0,
            guessed=bytes(known.guessed[: len(token_ids)]) if known else b"",
            copied=known.copies.worth_citing(token_ids) if known else (),
            logprobs=() if most is None else logprobs_of(answer.logprobs, token_ids, most),
            undrafted=submitted.undrafted,
        )


def _by_prefix(requests: list[Request]) -> list[Request]:
    """Return requests ordered for the prefix cache: by prefix, those that save the most first."""
    prompts = [array("i", request.token_ids) for request in requests]
    return [requests[index] for group in largest_first(grouped(prompts), prompts) for index in group]
