"""Count vLLM's steps per request, and keep placeholder drafts out of the counts.

    patch_steps(scheduler, model_runner)
    written_in(answer.spec_decode_metrics)      # steps that generated tokens of a request, None if not counted

vLLM pads a row with one token left to compute with drafts of -1, to match the shapes of CUDA graphs; if one row is too
long for the drafter, all rows verify zeros. Both would count as drafts, and records without drafts would be sampled
with them. Its metrics list only steps with drafts, including tokens past the end of the answer, so the number of other
steps cannot be derived from them. Source: vLLM 0.32, v1/core/sched/scheduler.py (schedule,
_update_request_with_output), v1/worker/gpu_model_runner.py (sample_tokens). Limits: those of undrafted.py.
"""

from __future__ import annotations

from typing import Any

from ragspec.runners.vllm.patches import Patch
from ragspec.runners.vllm.patches.undrafted import drop_drafts

PATCH = Patch(
    changes=(
        "vllm.v1.core.sched.scheduler:Scheduler.schedule",
        "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids",
        "vllm.v1.core.sched.scheduler:Scheduler._update_request_with_output",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._input_fits_in_drafter",
    ),
    versions=("0.32", "0.33"),
    why="placeholder drafts of -1 and 0 are counted as drafts, and steps without drafts are not counted",
    upstream="",
    until="vLLM's metrics of a request say how many steps wrote its tokens",
)
WRITTEN = "ragspec_steps"  # attribute added to vLLM's metrics of a request


def patch_steps(scheduler: Any, model_runner: Any) -> None:
    """Patch the scheduler of a speculating engine."""
    skip_placeholders(scheduler)
    drop_unproposed(scheduler, model_runner)
    count_steps(scheduler)


def written_in(metrics: Any) -> int | None:
    """Return in how many steps tokens of a request were generated, None if not counted."""
    return getattr(metrics, WRITTEN, None)


def verified_in(metrics: Any) -> list[tuple[int, int]]:
    """Return the (drafted, accepted) tokens of each step that drafted for a request; [] without metrics."""
    return [] if metrics is None else list(zip(metrics.per_step_drafted, metrics.per_step_accepted, strict=True))


def ask_always(model_runner: Any) -> None:
    """Ask our proposer after every step: it ends each draft at the model's length, and follows the tokens of all rows.

    vLLM asks none in a step in which one row is within a draft of the model's length.
    """
    model_runner._input_fits_in_drafter = lambda metadata: metadata is not None


def skip_placeholders(scheduler: Any) -> None:
    """Start rows without placeholder drafts, which vLLM adds whenever speculation is configured."""
    schedule = scheduler.schedule

    def schedule_unfilled(*arguments: Any, **named: Any) -> Any:
        most, scheduler.num_spec_tokens = scheduler.num_spec_tokens, 0
        try:
            scheduled = schedule(*arguments, **named)
        finally:
            scheduler.num_spec_tokens = most
        scheduled.num_spec_tokens_to_schedule = most
        return scheduled

    scheduler.schedule = schedule_unfilled


def drop_unproposed(scheduler: Any, model_runner: Any) -> None:
    """Drop the zeros that rows would verify if the batch did not fit the drafter."""
    fits, room = model_runner._input_fits_in_drafter, [True]

    def fits_noted(*arguments: Any) -> bool:
        room[0] = fits(*arguments)
        return room[0]

    model_runner._input_fits_in_drafter = fits_noted
    drop_drafts(scheduler, lambda _: not room[0])


def count_steps(scheduler: Any) -> None:
    """Count the steps in which each request got tokens."""
    update = scheduler._update_request_with_output

    def update_counted(request: Any, *arguments: Any, **named: Any) -> Any:
        kept, stopped = update(request, *arguments, **named)
        metrics = request.spec_decode_metrics
        if metrics is not None and kept:
            setattr(metrics, WRITTEN, getattr(metrics, WRITTEN, 0) + 1)
        return kept, stopped

    scheduler._update_request_with_output = update_counted
