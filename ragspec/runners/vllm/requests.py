"""A request in vLLM's words, and its counts in ours. Source: vLLM 0.32, sampling_params.py and v1/spec_decode."""

from __future__ import annotations

from typing import Any

from ragspec.records import Request, record_seed
from ragspec.stats import SpecStats


def sampling_params(request: Request, extra: dict[str, Any]) -> Any:
    """Return vLLM's SamplingParams for `request`. extra: arguments that win over the request's own."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    greedy = sampling.temperature == 0
    ours = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p,
        "top_k": 0 if greedy else sampling.top_k,
        "min_p": 0.0 if greedy else sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop": list(sampling.stop) or None,
        "seed": None if greedy else record_seed(sampling.seed, request.id),
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    return SamplingParams(**ours | extra)


def spec_stats(metrics: Any, written: int, output_tokens: int) -> SpecStats:
    """Return one request's counts. vLLM lists the steps that drafted; the others wrote one token each.

    written: tokens that vLLM returned. output_tokens: those of them up to the end of the answer.
    """
    stats = SpecStats()
    if metrics is not None:
        for drafted, accepted in zip(metrics.per_step_drafted, metrics.per_step_accepted, strict=True):
            if drafted:
                stats.record(drafted, accepted)
    # the step that computes the prompt never drafts; where none is left for it, the last draft outran the answer
    stats.steps += max(min(1, written), written - stats.accepted - stats.steps)
    stats.end(output_tokens)
    return stats
