"""Keep a bounded number of requests in flight in one vLLM engine, and convert requests and outputs.

    >>> for outcome in Stream(engine, proposer, tokenizer, rows=16, ...).run(requests): ...

The engine is driven step by step: `LLM.generate` returns only at the end, and one refused prompt aborts all others.
Source: vLLM 0.32, v1/engine/llm_engine.py, sampling_params.py and v1/spec_decode.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from ragspec.engine.kv.prefix_blocks import grouped, largest_first
from ragspec.errors import ModelError
from ragspec.inputs.feed import Feed
from ragspec.models.stopping import ends_with_stop, stop_strings_from, trim
from ragspec.records import Failure, Generation, Request, Sampling, Tokenizer, TokenLogprob, record_seed
from ragspec.runners.vllm.config import one_line
from ragspec.runners.vllm.patches.steps import written_in
from ragspec.runners.vllm.patches.undrafted import UndraftedRequests
from ragspec.speculation.methods import PLAIN
from ragspec.stats import SpecStats


def settings_of(sampling: Sampling, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams. extra: arguments that override the record's own."""
    greedy = sampling.temperature == 0
    ours = {
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": min(sampling.min_new_tokens, sampling.max_new_tokens),  # vLLM refuses more
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "temperature": sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p,
        "top_k": 0 if greedy else sampling.top_k,
        "min_p": 0.0 if greedy else sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": dict(sampling.logit_bias) or None,
        "logprobs": sampling.logprobs,
        "stop": list(sampling.stop) or None,
    }
    return ours | dict(extra)


def finds_stops_here(request: Request) -> bool:
    """Return whether we search for stop strings: vLLM would also find them in the model's reasoning."""
    return request.thinking is not None and bool(request.sampling.stop)


def sampling_params(kind: Any, request: Request, settings: Mapping[str, Any]) -> Any:
    """Return SamplingParams (of class `kind`) for a request."""
    from vllm.sampling_params import RequestOutputKind

    kept = RequestOutputKind.FINAL_ONLY
    if finds_stops_here(request):
        settings, kept = {**settings, "stop": None}, RequestOutputKind.CUMULATIVE
    seed = None if request.sampling.temperature == 0 else record_seed(request.sampling.seed, request.id)
    if request.grammar:
        from vllm.sampling_params import StructuredOutputsParams

        settings = {**settings, "structured_outputs": StructuredOutputsParams(grammar=request.grammar)}
    return kind(**{"seed": seed, "output_kind": kept} | dict(settings))


def is_requests_fault(error: Exception) -> bool:
    """Return whether vLLM refused the request, as opposed to an engine failure."""
    from vllm import exceptions

    return isinstance(error, ValueError | getattr(exceptions, "VLLMClientError", ValueError))


def logprobs_of(reported: Sequence[Mapping[int, Any]], token_ids: Sequence[int], most: int) -> tuple[TokenLogprob, ...]:
    """Return the logprob of each token and of the `most` likeliest alternatives. reported: vLLM's, per token."""
    found = []
    for ids, token in zip(reported, token_ids, strict=False):
        ranked = sorted(((other, one.logprob) for other, one in ids.items()), key=lambda pair: -pair[1])
        found.append(TokenLogprob(ids[token].logprob, tuple(ranked[:most])))
    return tuple(found)


def spec_stats(metrics: Any, written: int, output_tokens: int) -> SpecStats:
    """Return one request's counts. vLLM lists only the steps that drafted; patches/steps.py counts all.

    written: tokens that vLLM returned. output_tokens: those up to the end of the answer. Without the patch, every
    other step is assumed to have generated one token, and the last draft not to have run past the answer.
    """
    stats = SpecStats()
    if metrics is not None:
        for drafted, accepted in zip(metrics.per_step_drafted, metrics.per_step_accepted, strict=True):
            if drafted:
                stats.record(drafted, accepted)
    steps = written_in(metrics)
    if steps is None:  # the step that computes the prompt never drafts
        steps = stats.steps + max(min(1, written), written - stats.accepted - stats.steps)
    stats.steps = steps
    stats.end(output_tokens)
    return stats


# -- stream ----------------------------------------------------------------------------------------
log = logging.getLogger(__name__)
AHEAD = 2  # requests submitted per row of the engine's batch, so that no row waits for one


@dataclass(slots=True)
class _Submitted:
    request: Request
    at: float
    undrafted: str = ""  # why it gets no drafts
    seen: int = 0  # answer tokens already searched for stop strings


class Stream:
    """One run of requests through an engine.

    Args:
        engine: A vLLM LLMEngine.
        proposer: Our proposer inside it, or None.
        tokenizer: The target's.
        rows: Maximum batch size of the engine.
        lookahead: Requests read ahead, to submit those with a common prefix together.
        sampling_args: Arguments of SamplingParams that override a record's own.
        lost: Returns which of a request's settings the engine gets wrong where it drafts, or "".
        undrafted: Marks such requests to run without drafts; None if that is impossible, and they fail.
        method: Name of the speculation method, for messages.
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
        undrafted: UndraftedRequests | None = None,
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
        self.masked_logprobs = False  # whether logprobs of structured answers were returned
        self._method = method
        self._in_flight: dict[str, _Submitted] = {}

    def run(self, requests: Iterable[Request]) -> Iterator[Generation | Failure]:
        """Yield outcomes as they finish. Raises ModelError if the engine itself fails."""
        self._engine.reset_prefix_cache()  # each pass starts cold
        if self._proposer is not None:
            self._proposer.reset()
        feed, queue = Feed(requests), deque[Request]()
        try:
            while True:
                while len(self._in_flight) < AHEAD * self._rows:
                    if not queue:
                        queue.extend(_by_prefix(feed.take(self._lookahead, wait=not self._in_flight)))
                    if not queue:
                        break
                    if (refused := self._submit(queue.popleft())) is not None:
                        yield refused
                if not self._in_flight:
                    return
                for output in self._step():
                    if output.finished or self._has_stopped(output):
                        yield self._outcome(self._in_flight.pop(output.request_id), output)
        finally:  # if the caller stops early, these answers must not show up in the next run
            if self._in_flight:
                self._engine.abort_request(list(self._in_flight))

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
        except Exception as error:  # a refused request fails alone
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
        self._in_flight[name] = _Submitted(request, perf_counter(), lost)
        return None

    def _step(self) -> list[Any]:
        try:
            outputs: list[Any] = self._engine.step()
        except Exception as error:  # after a failed step the engine's requests are lost
            self._in_flight.clear()
            raise ModelError(
                f"vLLM's engine stopped (method {self._method}): {one_line(error)}; finished answers are kept, "
                "run again to continue"
            ) from error
        return outputs

    def _has_stopped(self, output: Any) -> bool:
        """Return whether an unfinished answer contains a stop string, after aborting it in the engine."""
        submitted = self._in_flight[output.request_id]
        request, answer = submitted.request, output.outputs[0].token_ids
        if not finds_stops_here(request):
            return False
        fresh, submitted.seen = len(answer) - submitted.seen, len(answer)
        least = stop_strings_from(request, answer, self._tokenizer)
        # search only the new tokens: reasoning has thousands, and every step would read them all
        if least >= len(answer) or not ends_with_stop(self._tokenizer, answer, fresh, request.sampling.stop, least):
            return False
        self._engine.abort_request([output.request_id])
        return True

    def _trimmed(self, request: Request, answer: Sequence[int]) -> tuple[list[int], str]:
        """Return the answer up to its first stop string; vLLM's ends with a whole step."""
        least = stop_strings_from(request, answer, self._tokenizer)
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
        self.masked_logprobs |= most is not None and bool(request.grammar)
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
    """Return the requests grouped by common prefix for the prefix cache, largest saving first."""
    prompts = [array("i", request.token_ids) for request in requests]
    return [requests[index] for group in largest_first(grouped(prompts), prompts) for index in group]
