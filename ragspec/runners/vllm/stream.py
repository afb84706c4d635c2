"""Keep a bounded number of requests in flight in one vLLM engine, and convert requests and outputs.

    >>> for outcome in Stream(engine, tokenizer, plan).run(requests): ...

The engine is driven step by step: `LLM.generate` returns only at the end, and one refused prompt aborts all others.
Requests are read beside an engine in a process of its own, a few at a time while it computes.
Source: vLLM 0.32, v1/engine/llm_engine.py, sampling_params.py and v1/spec_decode.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from ragspec.config.redaction import revealed
from ragspec.engine.kv.common_prefix import grouped, largest_first
from ragspec.errors import ModelError
from ragspec.inputs.feed import Feed
from ragspec.models.stopping import ends_with_stop, stop_strings_from, trim
from ragspec.records import Copied, Failure, Generation, Request, Sampling, Tokenizer, TokenLogprob, record_seed
from ragspec.runners.vllm.config import one_line
from ragspec.runners.vllm.engine import Engine, EngineDied
from ragspec.runners.vllm.patches import KEY
from ragspec.runners.vllm.patches.steps import verified_in
from ragspec.runners.vllm.patches.undrafted import unchecked_params
from ragspec.speculation.copied_spans import CopiedSpans
from ragspec.speculation.drafters.base import Draft
from ragspec.speculation.methods import PLAIN
from ragspec.stats import SpecStats

if TYPE_CHECKING:
    from ragspec.runners.vllm.plan import Plan

T = TypeVar("T")


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
    reads_text = bool(settings.get("stop"))  # all else is decided by tokens, and text is decoded here
    return kind(**{"seed": seed, "output_kind": kept, "detokenize": reads_text} | dict(settings))


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


def drafted_in(
    request: Request, accepted: Iterable[tuple[int, Sequence[int | None]]], token_ids: Sequence[int]
) -> tuple[bytes, tuple[Copied, ...]]:
    """Return which tokens of an answer were drafts, a byte each, and what it copied from its passages.

    accepted: positions in the answer, and the prompt positions of the draft tokens accepted from there on.
    """
    guessed = bytearray(len(token_ids))
    sources: list[int | None] = [None] * len(token_ids)
    for start, several in accepted:
        for position, source in enumerate(several[: max(0, len(token_ids) - start)], start):
            guessed[position], sources[position] = 1, source
    spans = CopiedSpans(request.token_ids, request.passages)
    spans.note(0, Draft(list(token_ids), sources=sources), token_ids)
    return bytes(guessed), spans.worth_citing(token_ids)


def spec_stats(
    verified: Iterable[Sequence[int]], written: int, output_tokens: int, steps: int | None = None
) -> SpecStats:
    """Return one request's counts.

    Args:
        verified: The (drafted, accepted) tokens of the steps that drafted.
        written: Tokens that vLLM returned.
        output_tokens: Those up to the end of the answer.
        steps: In how many steps tokens were generated. None: every step that did not draft is assumed to have
            generated one token, and the last draft not to have run past the answer.
    """
    stats = SpecStats()
    for drafted, accepted in verified:
        if drafted:
            stats.record(drafted, accepted)
    if steps is None:  # the step that computes the prompt never drafts
        steps = stats.steps + max(min(1, written), written - stats.accepted - stats.steps)
    stats.steps = steps
    stats.end(output_tokens)
    return stats


# -- stream ----------------------------------------------------------------------------------------
log = logging.getLogger(__name__)
AHEAD = 2  # requests submitted per row of the engine's batch, so that no row waits for one
LOOK_S = 5.0  # between two thoughts on whether another engine would be faster
ENDING_S = 60.0  # for an engine that gives its requests up
READ = 4  # requests read at a time while the engine computes, so that its answers are not kept waiting


@dataclass(slots=True)
class _Submitted:
    request: Request
    at: float
    undrafted: str = ""  # why it gets no drafts
    seen: int = 0  # answer tokens already searched for stop strings


class Stream:
    """One run of requests through an engine.

    Args:
        engine: The running engine.
        tokenizer: The target's.
        plan: What the engine is.
        reconsider: Called with the number of outcomes, every few seconds; returns the plan of an engine to go on with,
            None to stay.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        plan: Plan,
        reconsider: Callable[[int], Plan | None] = lambda finished: None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._plan = plan
        self._reconsider = reconsider
        self._rows = plan.rows
        self._lookahead = plan.args.lookahead
        self._sampling_args = dict(revealed(plan.args.sampling_args))
        self.masked_logprobs = False  # whether logprobs of structured answers were returned
        self.kept_prefixes = False  # whether prompts of an earlier run were still in the engine's prefix cache
        self.restarted = ""  # why the engine was started again, "" if it was not
        self.prompt_tokens = self.output_tokens = 0  # of finished answers
        self.finished = 0  # answers
        self._next_look = perf_counter() + LOOK_S
        self._in_flight: dict[str, _Submitted] = {}
        self._grouped: deque[Request] = deque()  # to submit next
        self._read: list[Request] = []  # behind those, not grouped yet
        self._is_dry = False  # whether no more requests had arrived when they were last asked for

    def run(self, requests: Iterable[Request]) -> Iterator[Generation | Failure]:
        """Yield outcomes as they finish. Raises ModelError if the engine itself fails."""
        self.kept_prefixes = self._recovering(self._engine.reset) is False
        feed = Feed(requests)
        try:
            while True:
                while len(self._in_flight) < AHEAD * self._rows and (request := self._next(feed)) is not None:
                    if (refused := self._submit(request)) is not None:
                        yield refused
                if not self._in_flight:
                    return
                if self._engine.own_process and self._read_beside(feed):
                    continue
                for output in self._step():
                    if self._was_abandoned(output):
                        continue  # it is answered once the engine has been started again
                    if output.finished or self._has_stopped(output):
                        yield self._outcome(self._in_flight.pop(output.request_id), output)
                if perf_counter() > self._next_look:
                    self._look()
        finally:  # if the caller stops early, these answers must not show up in the next run
            if self._in_flight:
                with suppress(EngineDied):
                    self._engine.abort(list(self._in_flight))

    def _look(self) -> None:
        """Go on with another engine, if that is worth it."""
        plan = self._recovering(lambda: self._reconsider(self.finished))
        if plan is not None:
            self._plan = plan
            arguments = revealed(plan.engine_args)
            self._begin_again(
                lambda: self._engine.replace(arguments, own_process=plan.own_process, additions=plan.additions)
            )
        self._next_look = perf_counter() + LOOK_S

    # -- requests ----------------------------------------------------------------------------------

    def _next(self, feed: Feed[Request]) -> Request | None:
        """Return the request to submit next, None if there is none yet."""
        if not self._grouped and (self._read or not self._in_flight or not self._engine.own_process):
            if not self._read:
                # an engine that computes elsewhere starts with a batch; one of this process waits for them all anyway
                most = min(self._rows, self._lookahead) if self._engine.own_process else self._lookahead
                self._read = feed.take(most, wait=not self._in_flight)
            elif not self._is_dry and len(self._read) < self._lookahead and self._has_spare():
                return None  # the more that are grouped together, the more prefixes are shared
            self._grouped.extend(_by_prefix(self._read))
            self._read = []
        return self._grouped.popleft() if self._grouped else None

    def _has_spare(self) -> bool:
        """Return whether the engine has enough requests for its next rows."""
        return len(self._in_flight) > self._rows + self._rows // 2

    def _read_beside(self, feed: Feed[Request]) -> bool:
        """Read a few requests if more are wanted and no outputs wait, or the engine runs short; return whether any."""
        room = self._lookahead - len(self._grouped) - len(self._read)
        if room <= 0 or (self._has_spare() and not self._engine.is_computing()):
            return False
        found = feed.take(min(READ, room), wait=False)
        self._is_dry = not found
        self._read += found
        return bool(found)

    def _submit(self, request: Request) -> Failure | None:
        settings = settings_of(request.sampling, self._sampling_args)
        lost = self._plan.lost(settings)
        if lost and not self._plan.undraftable:
            return Failure(request.index, f"{lost}; use method: none, or remove it")
        name = str(request.index)
        self._in_flight[name] = _Submitted(request, perf_counter(), lost)
        try:
            self._recovering(lambda: self._add(request, lost))
        except ModelError:
            raise
        except Exception as error:  # a refused request fails alone
            log.debug("vLLM refuses a record", exc_info=error)
            del self._in_flight[name]
            return Failure(
                request.index,
                f"vLLM rejects it: {one_line(error)}",
                "RecordError" if is_requests_fault(error) else "BackendError",
            )
        return None

    def _add(self, request: Request, lost: str) -> None:
        """Submit a request to the engine. lost: why it gets no drafts."""
        from vllm import SamplingParams

        kind, settings = unchecked_params() if lost else SamplingParams, dict(self._sampling_args)
        if self._plan.method != PLAIN and (lost or request.passages):  # for our part of the engine
            told = {"drafts": not lost, "passages": [list(span) for span in request.passages]}
            settings["extra_args"] = {**(settings.get("extra_args") or {}), KEY: told}
        params = sampling_params(kind, request, settings_of(request.sampling, settings))
        self._engine.add(str(request.index), {"prompt_token_ids": request.token_ids}, params)

    # -- the engine --------------------------------------------------------------------------------

    def _step(self) -> list[Any]:
        try:
            return self._recovering(self._engine.step) or []
        except ModelError:
            raise
        except Exception as error:  # after a failed step the engine's requests are lost
            self._in_flight.clear()
            raise self._stopped(one_line(error)) from error

    def _recovering(self, call: Callable[[], T]) -> T | None:
        """Return what `call` returns; None if the engine had died and was started again with what it had to answer."""
        try:
            return call()
        except EngineDied as died:
            if self.restarted:
                self._in_flight.clear()
                raise self._stopped(f"{died} again, after a restart") from died
            self.restarted = str(died)
            log.debug("restarting", exc_info=died)
            self._begin_again(self._engine.restart)
            return None

    def _begin_again(self, start: Callable[[], None]) -> None:
        """Start a new engine with what is in flight. Raises ModelError."""
        try:
            start()
        except Exception as error:  # anything may stop an engine from starting
            self._in_flight.clear()
            raise self._stopped(f"it cannot be restarted: {one_line(error)}") from error
        try:
            for each in self._in_flight.values():
                each.seen = 0
                self._add(each.request, each.undrafted)
        except EngineDied as died:
            self._in_flight.clear()
            raise self._stopped(f"{died} as it started again") from died

    def _stopped(self, why: str) -> ModelError:
        kept = "finished answers are kept, run again to continue"
        return ModelError(f"vLLM's engine stopped (method {self._plan.method}): {why}; {kept}")

    def _was_abandoned(self, output: Any) -> bool:
        """Return whether an engine that is told to end (SIGTERM) gave a request up. We hear of no abort of our own."""
        return output.finished and output.outputs[0].finish_reason == "abort" and self._engine.has_ended(ENDING_S)

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
        with suppress(EngineDied):  # the next step says so
            self._engine.abort([output.request_id])
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
        known = (output.kv_transfer_params or {}).get(KEY) or self._engine.ended(output.request_id)
        # vLLM's own metrics come with the last output, which an answer that a stop string ended has none of
        verified = known.get("verified") or verified_in(answer.spec_decode_metrics)
        guessed, copied = drafted_in(request, known["accepted"], token_ids) if "accepted" in known else (b"", ())
        if reason not in ("stop", "length"):
            if request.grammar:
                return Failure(request.index, "structured: vLLM cannot continue with its grammar", "RecordError")
            return Failure(request.index, f"vLLM ended it with {reason!r}")
        first, most = self._engine.first_token_at(output.request_id), request.sampling.logprobs
        self.finished += 1
        self.prompt_tokens += len(request.token_ids)
        self.output_tokens += len(token_ids)
        self.masked_logprobs |= most is not None and bool(request.grammar)
        return Generation(
            request.index,
            token_ids,
            reason,
            spec_stats(verified, len(written), len(token_ids), known.get("steps")),
            latency_s=perf_counter() - submitted.at,
            time_to_first_token_s=None if first is None else max(0.0, first - submitted.at),
            cached_prompt_tokens=output.num_cached_tokens or 0,
            guessed=guessed,
            copied=copied,
            logprobs=() if most is None else logprobs_of(answer.logprobs, token_ids, most),
            undrafted=submitted.undrafted,
        )


def _by_prefix(requests: list[Request]) -> list[Request]:
    """Return the requests grouped by common prefix for the prefix cache, largest saving first."""
    prompts = [array("i", request.token_ids) for request in requests]
    return [requests[index] for group in largest_first(grouped(prompts), prompts) for index in group]
