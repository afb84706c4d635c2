"""A request in vLLM's words, and its counts in ours. Source: vLLM 0.32, sampling_params.py and v1/spec_decode."""

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
    """Return arguments of vLLM's SamplingParams. extra: those that win over the record's own."""
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


def is_watched(request: Request) -> bool:
    """Return whether stop strings are looked for here: vLLM would look for them in what the model thinks, too."""
    return request.thinking is not None and bool(request.sampling.stop)


def sampling_params(kind: Any, request: Request, settings: Mapping[str, Any]) -> Any:
    """Return the SamplingParams, of class `kind`, of one request with these settings."""
    from vllm.sampling_params import RequestOutputKind

    kept = RequestOutputKind.FINAL_ONLY
    if is_watched(request):
        settings, kept = {**settings, "stop": None}, RequestOutputKind.CUMULATIVE
    seed = None if request.sampling.temperature == 0 else record_seed(request.sampling.seed, request.id)
    if request.grammar:
        from vllm.sampling_params import StructuredOutputsParams

        settings = {**settings, "structured_outputs": StructuredOutputsParams(grammar=request.grammar)}
    return kind(**{"seed": seed, "output_kind": kept} | dict(settings))


def is_requests_fault(error: Exception) -> bool:
    """Return whether vLLM's own checks refused a request, rather than its engine failed."""
    from vllm import exceptions

    return isinstance(error, ValueError | getattr(exceptions, "VLLMClientError", ValueError))


def logprobs_of(told: Sequence[Mapping[int, Any]], token_ids: Sequence[int], most: int) -> tuple[TokenLogprob, ...]:
    """Return how likely each token was. told: what vLLM says of each token, and of the `most` likeliest beside it."""
    found = []
    for ids, token in zip(told, token_ids, strict=False):
        ranked = sorted(((other, one.logprob) for other, one in ids.items()), key=lambda pair: -pair[1])
        found.append(TokenLogprob(ids[token].logprob, tuple(ranked[:most])))
    return tuple(found)


def spec_stats(metrics: Any, written: int, output_tokens: int) -> SpecStats:
    """Return one request's counts. vLLM lists the steps that drafted; steps.py counts them all.

    written: tokens that vLLM returned. output_tokens: those of them up to the end of the answer. Where nobody counted,
    the other steps wrote a token each, and the last draft is taken not to have outrun the answer.
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


# -- a bounded number of records in flight in one engine, those that begin alike together ----------
#
#     >>> for outcome in Stream(engine, proposer, tokenizer, rows=16, ...).run(requests): ...
#
# Source: vLLM 0.32, v1/engine/llm_engine.py, driven step by step: `LLM.generate` returns only at the end, and one
# refused prompt aborts all that are queued.


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
        least = stop_strings_from(request, answer, self._tokenizer)
        # only in what is new: a thought has thousands of tokens, and every step would read them all
        if least >= len(answer) or not ends_with_stop(self._tokenizer, answer, fresh, request.sampling.stop, least):
            return False
        self._engine.abort_request([output.request_id])
        return True

    def _trimmed(self, request: Request, answer: Sequence[int]) -> tuple[list[int], str]:
        """Return an answer up to its first stop string: vLLM's ends with a whole step."""
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
