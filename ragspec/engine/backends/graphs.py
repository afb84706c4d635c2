"""Work on static tensors, captured once and then run again: as CUDA graphs, or emulated where there are none.

replay, outputs = CudaGraphs()(work)
replay()  # `outputs` now hold what work() computes of the tensors that it reads
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch


class StepOutputs(NamedTuple):
    """What a step computes of its wanted tokens: logits, (wanted, vocab), and the best token of each."""

    logits: torch.Tensor
    best: torch.Tensor


Work = Callable[[], StepOutputs]


class Capture(Protocol):
    """Captures work on static tensors."""

    def __call__(self, work: Work) -> tuple[Callable[[], None], StepOutputs]:
        """Return what runs the work again, and the tensors that then hold its outputs."""


def emulated(work: Work) -> tuple[Callable[[], None], StepOutputs]:
    """Run the same work again on the same tensors, where there are no graphs: shows whether it may be captured."""
    outputs = work()

    def replay() -> None:
        for mine, new in zip(outputs, work(), strict=True):
            mine.copy_(new)

    return replay, outputs


class CudaGraphs:
    """Captures CUDA graphs, which share their memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # one for all captures, since libraries keep a workspace for each stream
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> tuple[Callable[[], None], StepOutputs]:
        """Return the graph's replay and its outputs."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):  # compilers and libraries allocate and choose in the first runs
            for _ in range(2):
                work()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        failure: Exception | None = None
        # other threads, such as one that embeds questions, may use the device meanwhile
        capturing = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")
        try:
            with capturing:
                try:
                    outputs = work()
                except Exception as error:
                    failure = error
                    raise
        except Exception as error:  # ending a capture that failed may raise too, and says less
            raise failure or error from None
        finally:
            torch.cuda.set_stream(current)  # which the end of a failed capture may leave out
        return graph.replay, outputs
