"""A request in vLLM's words, and its counts in ours. Source: vLLM 0.32, sampling_params.py and v1/spec_decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ragspec.records import Request, Sampling, TokenLogprob, record_seed
from ragspec.runners.vllm.steps import written_in
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
