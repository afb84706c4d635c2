"""Let our proposer do what the next drafts do not need while the device computes a step.

    settle_beside(model_runner, proposer)

vLLM launches a step's forward, and then asks for its samples, which waits for it. In between there is nothing to do.
Source: vLLM 0.32, v1/worker/gpu_model_runner.py (execute_model, sample_tokens). Limit: a CPU has computed
it before.
"""

from __future__ import annotations

from typing import Any

from ragspec.runners.vllm.patches import Patch

PATCH = Patch(
    changes=("vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",),
    versions=("0.32", "0.33"),
    why="a custom proposer is only called when the next step waits for its drafts",
    upstream="",
    until="a custom proposer learns of new requests before their first token",
)


def settle_beside(model_runner: Any, proposer: Any) -> None:
    """Call `proposer.settle()` before samples are asked for."""
    sample = model_runner.sample_tokens

    def settled(*arguments: Any, **named: Any) -> Any:
        proposer.settle()
        return sample(*arguments, **named)

    model_runner.sample_tokens = settled
