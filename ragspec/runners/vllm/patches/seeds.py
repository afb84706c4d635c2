"""Seeds in vLLM's CPU build: a sampled record with a chunked prefill would end the engine.

vLLM samples a token after every chunk, drops it, and rewinds the record's generator by its offset, which CPU generators
do not have ("CPU Generator does not use offset"). At that point nothing has been generated, so re-seeding is
equivalent. Source: vLLM 0.32, GPUModelRunner._bookkeeping_sync. Limit: an engine in this process; a record that is
preempted after its first token restarts its noise.
"""

from __future__ import annotations

from typing import Any

from ragspec.runners.vllm.patches import Patch

PATCH = Patch(
    changes=("vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync",),
    versions=("0.32", "0.33"),
    why="a sampled record whose prompt is computed in pieces ends vLLM's CPU engine",
    upstream="https://github.com/vllm-project/vllm/pull/10097",
    until="vLLM rewinds the generators of CPUs too",
)


def patch_seeds() -> None:
    """Allow seeds with chunked prefill, in engines of this process."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    keep_books = GPUModelRunner._bookkeeping_sync
    if keep_books.__module__ == __name__:
        return

    def keep(self: Any, *args: Any, **more: Any) -> Any:
        batch = self.input_batch
        dropped = self.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        held = {row: generator for row in dropped if (generator := batch.generators.pop(row, None)) is not None}
        for generator in held.values():
            generator.manual_seed(generator.initial_seed())
        try:
            return keep_books(self, *args, **more)
        finally:
            batch.generators.update(held)

    GPUModelRunner._bookkeeping_sync = keep
