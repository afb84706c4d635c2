"""Let each request of vLLM's that ends tell what is known of it.

    tell_at_end(scheduler, lambda request: {"steps": 9})
    (output.kv_transfer_params or {}).get(KEY)

It travels as `kv_transfer_params` of the request's last output, the one field there that holds anything. Source: vLLM
0.32, v1/core/sched/scheduler.py. Limit: an aborted request has no last output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ragspec.runners.vllm.patches import KEY, Patch

PATCH = Patch(
    changes=("vllm.v1.core.sched.scheduler:Scheduler._free_request",),
    versions=("0.32", "0.33"),
    why="nothing in a request's output says in how many steps it was written, or which tokens were drafts",
    upstream="",
    until="a proposer can add to a request's output",
)


def tell_at_end(scheduler: Any, known: Callable[[Any], dict[str, Any]]) -> None:
    """Add what `known(request)` returns to the last output of each request."""
    free = scheduler._free_request

    def free_telling(request: Any, *arguments: Any, **named: Any) -> Any:
        given, *others = free(request, *arguments, **named)
        return ({**(given or {}), KEY: known(request)}, *others)

    scheduler._free_request = free_telling
