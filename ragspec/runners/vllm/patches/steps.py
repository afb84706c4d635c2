"""vLLM's steps without drafts that nobody drafted, and counted.

    patch_steps(engine)
    written_in(answer.spec_decode_metrics)      # steps that wrote tokens of a record, None where they are not counted

vLLM fills up a row of which one token is left to compute with drafts of -1, for the shapes of a GPU's graphs; where one
row is too long for the drafter, all verify zeros. Both would count as drafts, and records that are to have none would
be sampled with them. What it says of a record is what each draft was worth, also beyond the end of the answer, so how
many other steps there were cannot be told from it.
Source: vLLM 0.32, v1/core/sched/scheduler.py (schedule, _update_request_with_output), v1/worker/gpu_model_runner.py
(sample_tokens). Limits: those of undrafted.py.
"""

from __future__ import annotations

from typing import Any

from ragspec.runners.vllm.patches import Patch
from ragspec.runners.vllm.patches.undrafted import drop_drafts, reached

PATCH = Patch(
    changes=(
        "vllm.v1.core.sched.scheduler:Scheduler.schedule",
        "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids",
        "vllm.v1.core.sched.scheduler:Scheduler._update_request_with_output",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._input_fits_in_drafter",
    ),
    versions="0.32",
    why="placeholder drafts of -1 and 0 are counted as drafts, and steps without drafts are not counted",
    upstream="",
    until="vLLM's metrics of a request say how many steps wrote its tokens",
)
WRITTEN = "ragspec_steps"  # of vLLM's metrics of a record


def patch_steps(engine: Any) -> None:
    """Change an engine that speculates, if it can be reached."""
    found = reached(engine)
    if found is not None:
        core, model_runner = found
        fill_up_nothing(core.scheduler)
        verify_nothing_unasked(core.scheduler, model_runner)
        count_steps(core.scheduler)


def written_in(metrics: Any) -> int | None:
    """Return in how many steps a record was written, None where nobody counted."""
    return getattr(metrics, WRITTEN, None)


def fill_up_nothing(scheduler: Any) -> None:
    """Let rows begin without drafts: vLLM fills them up as long as it knows of speculation."""
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


def verify_nothing_unasked(scheduler: Any, model_runner: Any) -> None:
    """Let rows verify nothing where the drafter had no room."""
    fits, room = model_runner._input_fits_in_drafter, [True]

    def fits_noted(*arguments: Any) -> bool:
        room[0] = fits(*arguments)
        return room[0]

    model_runner._input_fits_in_drafter = fits_noted
    drop_drafts(scheduler, lambda _: not room[0])


def count_steps(scheduler: Any) -> None:
    """Count the steps in which each record was written."""
    update = scheduler._update_request_with_output

    def update_counted(request: Any, *arguments: Any, **named: Any) -> Any:
        kept, stopped = update(request, *arguments, **named)
        metrics = request.spec_decode_metrics
        if metrics is not None and kept:
            setattr(metrics, WRITTEN, getattr(metrics, WRITTEN, 0) + 1)
        return kept, stopped

    scheduler._update_request_with_output = update_counted
