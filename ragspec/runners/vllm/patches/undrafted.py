"""Run single records without drafts in a speculating engine, where vLLM would sample them wrongly with drafts.

    UndraftedRequests(scheduler, model_runner, on_cpu=False)
    engine.add_request(name, prompt, unchecked_params()(logit_bias={7: 2.0}, extra_args=marked))

A row without a draft is sampled as in plain decoding, whatever other rows do. So the drafts of such rows are dropped,
the processors that vLLM leaves out of a speculating engine (min_p, logit_bias) are restored, and its check, which
refuses them for the whole engine, is skipped. Such rows are marked: {"ragspec": {"drafts": False}} in `extra_args`.
Source: vLLM 0.32, v1/sample/rejection_sampler.py, sampling_params.py.
Limit: model runner "V1", one device, no asynchronous scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from ragspec.runners.vllm.patches import KEY, Patch

if TYPE_CHECKING:
    import torch


PATCH = Patch(
    changes=(
        "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids",
        "vllm.sampling_params:SamplingParams._validate_spec_decode",
        "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
        "vllm.v1.sample.rejection_sampler:apply_sampling_constraints",
    ),
    versions=("0.32", "0.33"),
    why="an engine that speculates refuses min_p and logit_bias, and its CPU build samples from uninitialised memory",
    upstream="https://github.com/vllm-project/vllm/issues/42744",
    until="vLLM applies min_p and logit_bias to drafts, or lets a request do without drafts",
)
LOST = {
    "logit_bias": "vLLM does not apply it to drafts",
    "min_p": "vLLM does not apply it to drafts",
    # its expand_kernel writes each token's temperature, top_k and top_p into a copy that is dropped (cpu_triton_utils)
    "temperature": "vLLM 0.32 on a CPU samples from uninitialised memory where it drafts",
}


def lost(settings: Mapping[str, Any], on_cpu: bool) -> str:
    """Return which of SamplingParams' arguments vLLM gets wrong while it speculates, or ""."""
    wrong = [key for key in ("logit_bias", "min_p") if settings.get(key)]
    if on_cpu and settings.get("temperature"):
        wrong.append("temperature")
    return f"{wrong[0]}: {LOST[wrong[0]]}" if wrong else ""


def is_reachable(config: Any) -> bool:
    """Return whether an engine of this VllmConfig can be patched: its model runner is in its own process."""
    one = config.parallel_config.world_size == 1 and config.parallel_config.distributed_executor_backend == "uni"
    return bool(one and not config.scheduler_config.async_scheduling and not config.use_v2_model_runner)


def drop_drafts(scheduler: Any, dropped: Callable[[str], bool]) -> None:
    """Make vLLM's scheduler drop the drafts of requests for which `dropped(request id)` is true."""
    update = scheduler.update_draft_token_ids

    def update_some(drafted: Any) -> None:
        ids = [[] if dropped(name) else ids for name, ids in zip(drafted.req_ids, drafted.draft_token_ids, strict=True)]
        update(type(drafted)(drafted.req_ids, ids))

    scheduler.update_draft_token_ids = update_some


class UndraftedRequests:
    """Patches an engine, in its process."""

    def __init__(self, scheduler: Any, model_runner: Any, *, on_cpu: bool) -> None:
        drop_drafts(scheduler, lambda name: is_undrafted(scheduler.requests.get(name)))
        _restore_processors(model_runner)
        if on_cpu:
            _patch_cpu_sampling()


def is_undrafted(request: Any) -> bool:
    """Return whether a request of vLLM's is marked to run without drafts."""
    told = request is not None and (request.sampling_params.extra_args or {}).get(KEY)
    return bool(told and not told.get("drafts", True))


@cache
def unchecked_params() -> Any:
    """Return a SamplingParams class that skips vLLM's check for speculation."""
    from vllm import SamplingParams

    class Params(SamplingParams):  # type: ignore[misc]
        def _validate_spec_decode(self, speculative_config: Any) -> None: ...

    return Params


def _restore_processors(model_runner: Any) -> None:
    """Add the logits processors that a speculating engine lacks; drafts do not pass through them."""
    from vllm.utils.torch_utils import PIN_MEMORY
    from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS

    there = model_runner.input_batch.logitsprocs
    for kind in BUILTIN_LOGITS_PROCESSORS:
        if not any(isinstance(one, kind) for one in there.all):
            made = kind(model_runner.vllm_config, model_runner.device, PIN_MEMORY)
            (there.argmax_invariant if made.is_argmax_invariant() else there.non_argmax_invariant).append(made)


def _patch_cpu_sampling() -> None:
    """Let sampled rows without drafts share a batch with greedy rows with drafts, in vLLM's CPU build.

    Its kernel writes the sampling settings into a copy that is dropped, so greedy drafts would be verified against
    uninitialised memory; top_k with no draft in the batch fails on the maximum of an empty tensor.
    """
    from vllm.v1.sample import rejection_sampler

    if rejection_sampler.expand_batch_to_tokens is expanded:
        return
    rejection_sampler.expand_batch_to_tokens = expanded
    constrain = rejection_sampler.apply_sampling_constraints
    rejection_sampler.apply_sampling_constraints = lambda logits, *rest: (
        constrain(logits, *rest) if len(logits) else logits
    )


def expanded(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> torch.Tensor:
    """Return each row's number once per draft token, with `replace_from` replaced by `replace_to`.

    x: (rows,). cu_num_tokens: (rows,) running sums of draft tokens.
    """
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, torch.full_like(x, replace_to), x).repeat_interleave(counts)
