"""Steps of fixed shapes over the paged cache, each captured once and then replayed.

A step has R rows of n tokens. Rows that decode or verify make one step; a prompt is cut into rows of up to 128 tokens,
which see each other's keys, since a layer writes before it attends. Shapes are padded up to few sizes, so that a
captured step (a CUDA graph) serves many. A step reads one buffer that the host fills, and writes its logits to another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from ragspec.engine.backends.paged_attention import QUERIES, Compute, PagedAttention, StepTensors
from ragspec.engine.kv.block_pool import PADDING
from ragspec.engine.kv.paged_cache import PagedCache
from ragspec.engine.model.attention import attending
from ragspec.engine.model.layout import Segment
from ragspec.engine.notes import Notes
from ragspec.errors import flat
from ragspec.models.memory import MAY_BE_MEMORY, is_out_of_memory

TOKENS = (1, 2, 4, 8, 16, 32, QUERIES)  # of a row, padding included
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of a step, padding included
TILES = 32  # most rows of a step that computes prompts
WIDTH = 4  # least width of block tables; larger ones are powers of two

# token ids (1, T), positions (1, T), packed indices of the wanted logits or None for all -> logits (wanted, vocab)
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class Capture(Protocol):
    """Captures work on static tensors."""

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Return what runs the work again, and the tensor that then holds its result."""


def emulated(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Run the same work again on the same tensors, where there are no graphs: shows whether it may be captured."""
    result = work().clone()

    def replay() -> None:
        result.copy_(work())

    return replay, result


class CudaGraphs:
    """Captures CUDA graphs, which share their memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Return the graph's replay and its result."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compilers and libraries allocate and choose in the first runs
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = work()
        return graph.replay, result


# -- shapes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of a step: rows, tokens of each, width of block tables; whether all tokens' logits are wanted, or at
    most one per row."""

    rows: int
    tokens: int
    width: int
    all_logits: bool

    @property
    def wanted(self) -> int:
        """Number of logits."""
        return self.rows * self.tokens if self.all_logits else self.rows


@dataclass(frozen=True, slots=True)
class StepRow:
    """A row of a step: `count` tokens of a cache row from position `start`. packed: index of the first among the
    forward's tokens."""

    row: int
    start: int
    count: int
    packed: int


def step_rows(segments: Sequence[Segment]) -> tuple[list[StepRow], list[StepRow]]:
    """Return the rows of decoding segments, and those of prompts, which are cut into tiles."""
    decoding: list[StepRow] = []
    prompts: list[StepRow] = []
    packed = 0
    for segment in segments:
        short = not segment.alone and segment.count <= QUERIES
        for first in range(0, segment.count, QUERIES):
            count = min(QUERIES, segment.count - first)
            tile = StepRow(segment.row, segment.start + first, count, packed + first)
            (decoding if short else prompts).append(tile)
        packed += segment.count
    return decoding, prompts


def padded(number: int, sizes: Sequence[int]) -> int:
    """Return the least of `sizes` that holds `number`."""
    return next(size for size in sizes if size >= number)


def tables_width(blocks: int) -> int:
    """Return the width of block tables for rows of up to `blocks` blocks."""
    return max(WIDTH, 1 << (blocks - 1).bit_length())


# -- steps -----------------------------------------------------------------------------------------


class Step:
    """A step's static tensors. The host fills `host`; load() copies it to the device at once."""

    def __init__(self, shape: StepShape, device: torch.device) -> None:
        self.shape = shape
        rows, tokens = shape.rows, shape.tokens
        ends = [0, rows * tokens, rows, rows, rows * shape.width, 0 if shape.all_logits else rows]
        ends = [sum(ends[: i + 1]) for i in range(len(ends))]
        self.host = torch.zeros(ends[-1], dtype=torch.long, pin_memory=device.type == "cuda")
        self.device = torch.zeros(ends[-1], dtype=torch.long, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        parts = [self.device[first:last] for first, last in pairwise(ends)]
        self.tensors = StepTensors(parts[0].view(rows, tokens), parts[1], parts[2], parts[3].view(rows, shape.width))
        self.wanted = None if shape.all_logits else parts[4]
        self.replay: Callable[[], None] | None = None
        self.logits: torch.Tensor | None = None

    def load(self, values: Sequence[int]) -> None:
        """Copy the step's values to the device, in the order of its tensors."""
        if self._copied is not None:
            self._copied.synchronize()  # the copy before this one may still read the host's buffer
        self.host.copy_(torch.tensor(values))
        self.device.copy_(self.host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class PagedSteps:
    """Runs a model's forwards as steps over its paged cache.

    Args:
        cache: The model's.
        device: The model's.
        forward: The model.
        compute: How attention is computed (paged_attention.py).
        capture: Captures steps; None: they run as they are.
    """

    def __init__(
        self, cache: PagedCache, device: torch.device, forward: Forward, compute: Compute, capture: Capture | None
    ) -> None:
        self.cache = cache
        self.notes: Notes | None = None
        self._device = device
        self._forward = forward
        self._compute = compute
        self._capture = capture
        self._steps: dict[StepShape, Step] = {}
        self._version = cache.version

    @property
    def captured(self) -> int:
        """Number of captured steps."""
        return sum(step.replay is not None for step in self._steps.values())

    def logits(self, segments: Sequence[Segment], token_ids: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
        """Return the logits, (wanted, vocab) in float32, of the packed indices `wanted`; see Model.logits."""
        self.cache.reserve(max(segment.start + segment.count for segment in segments))
        decoding, prompts = step_rows(segments)
        asked = set(wanted)
        parts: list[torch.Tensor] = []
        found: list[int] = []  # packed index of each of the parts' logits
        for rows, most in ((decoding, ROWS[-1]), (prompts, TILES)):
            for at in range(0, len(rows), most):
                logits, indices = self._part(rows[at : at + most], token_ids, asked)
                parts.append(logits)
                found += indices
        if len(parts) == 1 and found == list(wanted):
            return parts[0]
        where = {packed: at for at, packed in enumerate(found)}
        return torch.cat(parts)[[where[index] for index in wanted]]

    def _part(
        self, rows: Sequence[StepRow], token_ids: Sequence[int], asked: Collection[int]
    ) -> tuple[torch.Tensor, list[int]]:
        """Run one step; return a copy of the logits that are asked for, in float32, and the packed index of each."""
        tables = [self.cache.reserve_row(row.row, row.start, row.start + row.count) for row in rows]
        mine = [[i for i in range(row.packed, row.packed + row.count) if i in asked] for row in rows]
        shape = StepShape(
            padded(len(rows), ROWS),
            padded(max(row.count for row in rows), TOKENS),
            tables_width(max(map(len, tables))),
            any(len(each) > 1 for each in mine),
        )
        if shape.tokens == 1 and not shape.all_logits:
            shape = StepShape(shape.rows, 1, shape.width, True)
        keep = [0] * shape.rows
        ids, starts, counts, blocks = [0] * (shape.rows * shape.tokens), [0] * shape.rows, [0] * shape.rows, []
        places: list[int] = []  # of the wanted logits among the step's
        for number, (row, table, indices) in enumerate(zip(rows, tables, mine, strict=True)):
            at = number * shape.tokens
            ids[at : at + row.count] = token_ids[row.packed : row.packed + row.count]
            starts[number], counts[number] = row.start, row.count
            blocks += table + [PADDING] * (shape.width - len(table))
            if shape.all_logits:
                places += [at + index - row.packed for index in indices]
            elif indices:
                keep[number] = at + indices[0] - row.packed
                places.append(number)
        blocks += [PADDING] * (shape.width * (shape.rows - len(rows)))
        logits = self._run(shape, ids + starts + counts + blocks + ([] if shape.all_logits else keep))
        found = [index for indices in mine for index in indices]
        if places == list(range(len(logits))):
            return logits.to(torch.float32, copy=True), found
        return logits[places].float(), found

    # -- capture -----------------------------------------------------------------------------------

    def _run(self, shape: StepShape, values: Sequence[int]) -> torch.Tensor:
        """Return a step's logits; they stay until the next step of this shape."""
        if self._version != self.cache.version:  # the memory that steps were captured with is gone
            self._steps.clear()
            self._version = self.cache.version
        step = self._steps.get(shape)
        if step is None:
            step = self._steps[shape] = Step(shape, self._device)
        step.load(values)
        if self._capture is None or not self.cache.layers:
            return self._work(step)
        if step.replay is None:
            try:
                step.replay, step.logits = self._capture(lambda: self._work(step))
            except MAY_BE_MEMORY as error:
                self._steps.pop(shape)
                if is_out_of_memory(error):
                    raise
                self._go_uncaptured(error)
                return self._run(shape, values)
        step.replay()
        assert step.logits is not None
        return step.logits

    def _work(self, step: Step) -> torch.Tensor:
        """Compute a step from its tensors alone."""
        attention = PagedAttention(self.cache, step.tensors, self._compute)
        self.cache.next = 0
        with attending(attention):
            return self._forward(step.tensors.token_ids.flatten()[None], attention.packed, step.wanted)

    def _go_uncaptured(self, error: Exception) -> None:
        """Run all steps uncaptured from now on."""
        self._capture = None
        self._steps.clear()
        if self.notes is not None:
            self.notes.add(f"graphs: steps run uncaptured, which is slower: {flat(error, 200)}")
