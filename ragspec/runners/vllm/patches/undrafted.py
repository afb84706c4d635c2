"""Records that vLLM would get wrong while it speculates, answered without drafts by the same engine.

    undrafted = UndraftedRequests.within(engine)        # None where the engine cannot be reached
    engine.add_request(name, prompt, undrafted.params(logit_bias={7: 2.0}))

A row without a draft is sampled as in plain decoding, whatever the others do: so the drafts of such rows are dropped,
the processors that vLLM leaves out of an engine that speculates are put back (min_p, logit_bias), and its check, which
refuses them for the whole engine, is passed. Source: vLLM 0.32, v1/sample/rejection_sampler.py, sampling_params.py.
Limit: the model runner "V1" in this process, one device, without asynchronous scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ragspec.runners.vllm.patches import Patch

if TYPE_CHECKING:
    import torch


PATCH = Patch(
    changes=(
        "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids",
        "vllm.sampling_params:SamplingParams._validate_spec_decode",
        "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
        "vllm.v1.sample.rejection_sampler:apply_sampling_constraints",
    ),
    versions="0.32",
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
    """Return what of SamplingParams' arguments vLLM would not do right while speculating, "" if there is nothing."""
    wrong = [key for key in ("logit_bias", "min_p") if settings.get(key)]
    if on_cpu and settings.get("temperature"):
        wrong.append("temperature")
    return f"{wrong[0]}: {LOST[wrong[0]]}" if wrong else ""


def can_be_undrafted(config: Any) -> bool:
    """Return whether an engine of this VllmConfig could be reached."""
    from vllm import envs

    one = config.parallel_config.world_size == 1 and not envs.VLLM_ENABLE_V1_MULTIPROCESSING
    return bool(one and not config.scheduler_config.async_scheduling and not config.use_v2_model_runner)


def reached(engine: Any) -> tuple[Any, Any] | None:
    """Return the core and the model runner of an engine in this process, None where they cannot be reached."""
    core = getattr(engine.engine_core, "engine_core", None)
    if core is None or not can_be_undrafted(engine.vllm_config):
        return None
    found = engine.collective_rpc(lambda worker: worker.model_runner)
    return (core, found[0]) if len(found) == 1 else None


def drop_drafts(scheduler: Any, dropped: Callable[[str], bool]) -> None:
    """Let vLLM's scheduler forget what was drafted for the records that are `dropped`, by name, whoever drafted it."""
    update = scheduler.update_draft_token_ids

    def update_some(drafted: Any) -> None:
        ids = [[] if dropped(name) else ids for name, ids in zip(drafted.req_ids, drafted.draft_token_ids, strict=True)]
        update(type(drafted)(drafted.req_ids, ids))

    scheduler.update_draft_token_ids = update_some


class UndraftedRequests:
    """What has been changed in an engine. params: makes the SamplingParams of a record without drafts."""

    def __init__(self, core: Any, model_runner: Any, *, on_cpu: bool) -> None:
        self.params = _unchecked_params()
        scheduler = core.scheduler
        drop_drafts(scheduler, lambda name: self._is_undrafted(scheduler.requests.get(name)))
        _restore_processors(model_runner)
        if on_cpu:
            _mend_cpu_sampling()

    @classmethod
    def within(cls, engine: Any, *, on_cpu: bool) -> UndraftedRequests | None:
        """Return what makes undrafted records possible in an engine that speculates, None where nothing can."""
        found = reached(engine)
        return cls(*found, on_cpu=on_cpu) if found else None

    def _is_undrafted(self, request: Any) -> bool:
        return request is not None and isinstance(request.sampling_params, self.params)


def _unchecked_params() -> Any:
    """Return SamplingParams that vLLM does not check for speculation."""
    from vllm import SamplingParams

    class Params(SamplingParams):  # type: ignore[misc]
        def _validate_spec_decode(self, speculative_config: Any) -> None: ...

    return Params


def _restore_processors(model_runner: Any) -> None:
    """Give an engine that speculates the processors of one that does not; drafts do not pass through them."""
    from vllm.utils.torch_utils import PIN_MEMORY
    from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS

    there = model_runner.input_batch.logitsprocs
    for kind in BUILTIN_LOGITS_PROCESSORS:
        if not any(isinstance(one, kind) for one in there.all):
            made = kind(model_runner.vllm_config, model_runner.device, PIN_MEMORY)
            (there.argmax_invariant if made.is_argmax_invariant() else there.non_argmax_invariant).append(made)


def _mend_cpu_sampling() -> None:
    """Let sampled rows without drafts be in a batch of vLLM's CPU build, beside greedy ones that have some.

    Its kernel fills a copy that is dropped, and greedy drafts would be judged by what is in memory; top_k without any
    draft in the batch ends the engine, as the most of no numbers is asked for.
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
    """Return each row's number once per draft token. x: (rows,). cu_num_tokens: (rows,) running sums of draft tokens.

    `replace_from` becomes `replace_to`.
    """
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, torch.full_like(x, replace_to), x).repeat_interleave(counts)
