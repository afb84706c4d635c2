"""Steps of fixed shapes over the paged cache, each captured once and then replayed.

A step has R rows of n tokens. A prompt is cut into rows of up to 64 tokens, and a long draft into several rows too:
rows of one text see each other's keys, since a layer writes before it attends. Shapes are padded up to few sizes, so
that a captured step (a CUDA graph) serves many. Tokens of prompts are packed: only attention sees rows and their
padding. A step reads one buffer that the host fills, and writes its logits to another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple, Protocol

import torch

from ragspec.engine.backends.paged_attention import TILE, Compute, PagedAttention, StepTensors
from ragspec.engine.kv.paged_cache import PagedCache
from ragspec.engine.model.attention import attending
from ragspec.engine.model.layout import Segment
from ragspec.errors import flat
from ragspec.models.memory import MAY_BE_MEMORY, is_out_of_memory, out_of_memory

# Few sizes, since FlexAttention is compiled and a graph captured for each; weights cost more than padding.
TOKENS = (1, 4)  # of a row that decodes or verifies, padding included
ROWS = (1, 4, 16, 64, 96, 128, 192, 256, 384, 512)  # of a step that decodes or verifies, padding included
MOST = 2048  # tokens of a step
PROMPTS = (64, 256, 512, 1024, MOST)  # tokens of a step that computes prompts, padding included
SPARE = 16  # rows of such a step beyond those of full tiles: the last tile of a prompt may have few tokens
EXACT = 4, 64  # tokens of a row, and rows, of a step that decodes, where all steps have one shape
WIDTH = 32  # least width of block tables; larger ones are powers of two
RIDGE = 256  # tokens up to which reading a layer's weights takes longer than multiplying by them, on GPUs of today

# token ids (1, T), positions (1, T), packed indices of the wanted logits or None for all -> logits (wanted, vocab)
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


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
    outputs = StepOutputs(*(each.clone() for each in work()))

    def replay() -> None:
        for mine, new in zip(outputs, work(), strict=True):
            mine.copy_(new)

    return replay, outputs


class CudaGraphs:
    """Captures CUDA graphs, which share their memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> tuple[Callable[[], None], StepOutputs]:
        """Return the graph's replay and its outputs."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compilers and libraries allocate and choose in the first runs
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = work()
        return graph.replay, outputs


# -- shapes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of a step: rows, tokens of each, width of block tables; whether all tokens' logits are wanted, or at
    most one per row; number of tokens if they are packed, otherwise 0."""

    rows: int
    tokens: int
    width: int
    all_logits: bool
    packed: int = 0


@dataclass(slots=True)
class StepRow:
    """A row of a step: `count` tokens of a cache row from position `start`. packed: index of the first among the
    forward's tokens."""

    row: int
    start: int
    count: int
    packed: int


def step_rows(segments: Iterable[tuple[int, Segment]], tokens: int) -> list[StepRow]:
    """Return the rows of segments, each with the packed index of its first token, cut into up to `tokens` tokens."""
    return [
        StepRow(segment.row, segment.start + first, min(tokens, segment.count - first), packed + first)
        for packed, segment in segments
        for first in range(0, segment.count, tokens)
    ]


def tokens_per_row(counts: Sequence[int], blocks: float) -> int:
    """Return into rows of how many tokens to cut the segments of a step, of `counts` tokens, so that it takes least.

    More rows read a text's keys and values more often; longer rows have more padding. A step reads its layers' weights
    once, and takes longer only for more than RIDGE tokens.

    Args:
        counts: Tokens of each segment.
        blocks: Bytes of keys and values that a row reads, as a share of the weights'.
    """
    if max(counts) == 1:
        return 1
    best, least = TOKENS[-1], float("inf")
    for tokens in reversed(TOKENS):
        rows = sum(-(-count // tokens) for count in counts)
        steps, rest = divmod(rows, most_rows(tokens))
        sizes = [most_rows(tokens)] * steps + [padded(rest, ROWS)] * (rest > 0)
        taken = sum(max(1.0, size * tokens / RIDGE) for size in sizes) + rows * blocks
        if taken < least:
            best, least = tokens, taken
    return best


def most_rows(tokens: int) -> int:
    """Return the most rows of a step with rows of so many tokens."""
    return max(rows for rows in ROWS if rows * tokens <= MOST)


def padded(number: int, sizes: Sequence[int]) -> int:
    """Return the least of `sizes` that holds `number`."""
    return next(size for size in sizes if size >= number)


def tables_width(blocks: int) -> int:
    """Return the width of block tables for rows of up to `blocks` blocks."""
    return max(WIDTH, 1 << (blocks - 1).bit_length())


# -- steps -----------------------------------------------------------------------------------------


class Step:
    """A step's static tensors. The host fills the arrays; load() copies them to the device at once.

    Attributes:
        token_ids, starts, counts, tables, gather, scatter: The host's, as in StepTensors; empty if not needed.
        sources: The host's indices of each row's token in what an earlier step wrote, (R,).
        kept: The host's indices of the wanted logits, (R,); empty if all are wanted.
        tensors, wanted: The same on the device. wanted: None for all.
        replay: Computes `outputs` anew, once the step is captured.
    """

    def __init__(self, shape: StepShape, device: torch.device) -> None:
        rows, tokens, length = shape.rows, shape.tokens, shape.packed
        kept = 0 if shape.all_logits else rows
        shapes: list[tuple[int, ...]] = [
            (length,) if length else (rows, tokens),
            (rows,),
            (rows,),
            (rows, shape.width),
            (kept,),
            (rows, tokens) if length else (0,),
            (length,),
            (rows,),
        ]
        ends = [0, *accumulate(map(prod, shapes))]
        self.host = torch.zeros(ends[-1], dtype=torch.long, pin_memory=device.type == "cuda")
        self.device = torch.zeros(ends[-1], dtype=torch.long, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        mine, theirs = (
            [store[first:last].view(shape) for (first, last), shape in zip(pairwise(ends), shapes, strict=True)]
            for store in (self.host, self.device)
        )
        arrays = [each.numpy() for each in mine]
        self.token_ids, self.starts, self.counts, self.tables = arrays[:4]
        self.kept, self.gather, self.scatter, self.sources = arrays[4:]
        self.tensors = StepTensors(*theirs[:4], *(theirs[5:7] if length else ()))
        self._sources = theirs[7]
        self.wanted = None if shape.all_logits else theirs[4]
        self.replay: Callable[[], None] | None = None
        self.outputs: StepOutputs | None = None

    def clear(self) -> None:
        """Make all rows padding, once the device has read what the host wrote before."""
        if self._copied is not None:
            self._copied.synchronize()
        self.host.zero_()
        self.scatter[:] = self.gather.size - 1  # of the last row, which is always padding

    def load(self, written: torch.Tensor | None = None) -> None:
        """Copy the arrays to the device. written: an earlier step's best tokens, of which `sources` are the rows'."""
        self.device.copy_(self.host, non_blocking=True)
        if written is not None:
            torch.index_select(written, 0, self._sources, out=self.tensors.token_ids[:, 0])
        if self._copied is not None:
            self._copied.record()


class StepPart(NamedTuple):
    """What is wanted of one of the steps that make an engine's step: values at `places`, of tokens `packed`.

    values: logits on the device, or best tokens on the host, there once the step is done. best: these on the device.
    """

    values: torch.Tensor
    places: Sequence[int]
    packed: Sequence[int]
    best: torch.Tensor


class LaunchedStep:
    """The result of a step that the device computes (model/result.py)."""

    def __init__(self, parts: Sequence[StepPart], wanted: Sequence[int], device: torch.device) -> None:
        self._parts = parts
        self._wanted = wanted
        self._end = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._end is not None:
            self._end.record()

    def done(self) -> bool:
        """Return whether it can be read without waiting."""
        return self._end is None or bool(self._end.query())  # type: ignore[no-untyped-call]

    def best(self) -> list[int]:
        """Return the most likely token after each wanted one. Only if no logits were asked for."""
        if self._end is not None:
            self._end.synchronize()
        found: dict[int, int] = {}
        for part in self._parts:
            values = part.values.tolist()
            found |= zip(part.packed, [values[place] for place in part.places], strict=True)
        return [found[packed] for packed in self._wanted]

    def written(self) -> tuple[torch.Tensor, list[int]] | None:
        """Return best tokens on the device, and the index there of each wanted one's; None if in several tensors."""
        if len(self._parts) != 1:
            return None
        part = self._parts[0]
        where = dict(zip(part.packed, part.places, strict=True))
        return part.best, [where[packed] for packed in self._wanted]

    def logits(self) -> torch.Tensor:
        """Return the logits, (wanted, vocab) in float32, if they were asked for."""
        packed = [each for part in self._parts for each in part.packed]
        if len(self._parts) == 1 and packed == list(self._wanted):
            return self._parts[0].values
        where = {each: at for at, each in enumerate(packed)}
        return torch.cat([part.values for part in self._parts])[[where[each] for each in self._wanted]]


def _fitting(rows: Sequence[StepRow], tokens: int, most: int) -> list[StepRow]:
    """Return as many of the first rows as have `tokens` tokens, and are fewer than `most`."""
    ends = accumulate(row.count for row in rows)
    return [row for row, end in zip(rows[: most - 1], ends, strict=False) if end <= tokens]


class PagedSteps:
    """Runs a model's forwards as steps over its paged cache.

    Args:
        cache: The model's.
        device: The model's.
        forward: The model.
        compute: How attention is computed (paged_attention.py).
        capture: Captures steps; None: they run as they are.
        weight_bytes: Of the model.
        exact: Whether steps have the same shape whatever they compute, so that the bits of a token's logits depend on
            the tokens before it alone.
    """

    def __init__(
        self,
        cache: PagedCache,
        device: torch.device,
        forward: Forward,
        compute: Compute,
        capture: Capture | None,
        weight_bytes: int,
        exact: bool = False,
    ) -> None:
        self.cache = cache
        self.exact = exact
        self.notes: list[str] = []  # for the user
        self._device = device
        self._forward = forward
        self._compute = compute
        self._capture = capture
        self._weight_bytes = weight_bytes
        self._steps: dict[StepShape, Step] = {}
        self._version = cache.version
        self._pads = True

    @property
    def captured(self) -> int:
        """Number of captured steps."""
        return sum(step.replay is not None for step in self._steps.values())

    def forget(self) -> None:
        """Capture all steps anew, since what they run has changed."""
        self._steps.clear()

    @torch.inference_mode()
    def capture(self, rows: int, drafts: bool) -> int:
        """Capture what a run of `rows` rows is likely to need; return how many steps are captured now.

        drafts: whether rows verify drafts.
        """
        width = tables_width(1)
        shapes = [StepShape(rows, TILE, width, False, length) for length, rows in self._prompt_sizes]
        if self.exact:
            tokens, exact_rows = EXACT
            shapes.append(StepShape(exact_rows, tokens, width, True))
        else:
            for tokens in TOKENS if drafts else TOKENS[:1]:
                most = min(
                    padded(min(rows * (tokens if tokens > 1 else 1 + drafts), ROWS[-1]), ROWS), most_rows(tokens)
                )
                shapes += [StepShape(size, tokens, width, True) for size in ROWS if size <= most]
        for shape in sorted(shapes, key=lambda shape: shape.packed or shape.rows * shape.tokens, reverse=True):
            if self._capture is None:
                break
            try:  # the largest first: the others use its memory
                self._run(shape, self._step(shape))
            except MAY_BE_MEMORY as error:
                reason = out_of_memory(error)
                self.notes.append(f"graphs: steps are captured as they are needed, not ahead, after {reason}")
                break
        return self.captured

    @contextmanager
    def unpadded(self) -> Iterator[None]:
        """Run steps as they come, without padding or capture, so that each of their tokens is one of the forward's."""
        self._pads = False
        try:
            yield
        finally:
            self._pads = True
            self.forget()

    def begin(
        self,
        segments: Sequence[Segment],
        token_ids: Sequence[int],
        wanted: Sequence[int],
        logits: bool,
        written: tuple[torch.Tensor, Sequence[int]] | None = None,
    ) -> LaunchedStep:
        """Start a step; see Model.begin.

        written: best tokens of an earlier step, and the index there of each segment's only token, whose id is not yet
            known here. Such a step must fit in one shape.
        """
        self.cache.reserve(max(segment.start + segment.count for segment in segments))
        asked = set(wanted)
        parts = [self._part(rows, shape, token_ids, asked, logits, written) for rows, shape in self._shaped(segments)]
        return LaunchedStep(parts, wanted, self._device)

    def _shaped(self, segments: Sequence[Segment]) -> Iterator[tuple[list[StepRow], StepShape]]:
        """Yield the rows of each of the steps for some segments, and its shape, but for the logits that are wanted."""
        width = tables_width(self.cache.slots // self.cache.size)
        starts = accumulate((segment.count for segment in segments), initial=0)
        decoding: list[tuple[int, Segment]] = []
        prompts: list[tuple[int, Segment]] = []
        for each in zip(starts, segments, strict=False):
            short = not each[1].alone and (self.exact or each[1].count <= TILE)
            (decoding if short else prompts).append(each)
        if not self._pads:
            tokens = max(segment.count for segment in segments)
            rows = step_rows([*decoding, *prompts], tokens)
            yield rows, StepShape(len(rows), tokens, width, False)
            return
        if decoding:
            reach = sum(segment.start + segment.count for _, segment in decoding) / len(decoding)
            blocks = reach * self.cache.bytes_per_token / self._weight_bytes
            tokens, most = EXACT
            if not self.exact:
                tokens = tokens_per_row([segment.count for _, segment in decoding], blocks)
                most = most_rows(tokens)
            rows = step_rows(decoding, tokens)
            for at in range(0, len(rows), most):
                part = rows[at : at + most]
                yield part, StepShape(most if self.exact else padded(len(part), ROWS), tokens, width, self.exact)
        rows = step_rows(prompts, TILE)
        while rows:
            part = _fitting(rows, *self._prompt_sizes[-1])
            length = sum(row.count for row in part)
            size = next(size for size in self._prompt_sizes if length <= size[0] and len(part) < size[1])
            yield part, StepShape(size[1], TILE, width, False, size[0])
            del rows[: len(part)]

    def one_shape(self, rows: int) -> bool:
        """Return whether so many rows that decode make one step."""
        return rows <= (EXACT[1] if self.exact else most_rows(1))

    @property
    def _prompt_sizes(self) -> list[tuple[int, int]]:
        """Tokens and rows of steps that compute prompts."""
        return [(size, size // TILE + SPARE) for size in (PROMPTS[-1:] if self.exact else PROMPTS)]

    def _part(
        self,
        rows: Sequence[StepRow],
        shape: StepShape,
        token_ids: Sequence[int],
        asked: Collection[int],
        logits: bool,
        written: tuple[torch.Tensor, Sequence[int]] | None = None,
    ) -> StepPart:
        """Launch one step, and a copy of what is wanted of it, which the next step of this shape overwrites."""
        for row in rows:
            self.cache.reserve_row(row.row, row.start, row.start + row.count)
        mine = [
            [row.packed] * (row.packed in asked)
            if row.count == 1
            else [i for i in range(row.packed, row.packed + row.count) if i in asked]
            for row in rows
        ]
        if shape.tokens == 1 or any(len(indices) > 1 for indices in mine):
            shape = replace(shape, all_logits=True)
        step = self._step(shape)
        counts = [row.count for row in rows]
        step.starts[: len(rows)] = [row.start for row in rows]
        step.counts[: len(rows)] = counts
        tables = self.cache.tables([row.row for row in rows])[:, : shape.width]
        step.tables[: len(rows), : tables.shape[1]] = tables
        bases = [at * shape.tokens for at in range(len(rows))]  # of each row's tokens among the step's
        if shape.packed:
            bases = list(accumulate(counts[:-1], initial=0))
            for at, (row, base) in enumerate(zip(rows, bases, strict=True)):
                step.token_ids[base : base + row.count] = token_ids[row.packed : row.packed + row.count]
                step.gather[at, : row.count] = range(base, base + row.count)
                step.scatter[base : base + row.count] = range(at * TILE, at * TILE + row.count)
        elif shape.tokens == 1:
            step.token_ids[: len(rows), 0] = [token_ids[row.packed] for row in rows]
        else:
            for mine_ids, row in zip(step.token_ids, rows, strict=False):
                mine_ids[: row.count] = token_ids[row.packed : row.packed + row.count]
        places: list[int] = []  # of the wanted logits among the step's
        for number, (row, base, indices) in enumerate(zip(rows, bases, mine, strict=True)):
            if shape.all_logits:
                places += [base + index - row.packed for index in indices]
            elif indices:
                step.kept[number] = base + indices[0] - row.packed
                places.append(number)
        if written is not None:
            step.sources[: len(rows)] = written[1]
        outputs = self._run(shape, step, None if written is None else written[0])
        packed = [index for indices in mine for index in indices]
        best = outputs.best.clone()  # the next step of this shape overwrites it
        if not logits:
            values = torch.empty(best.shape, dtype=best.dtype, pin_memory=best.device.type == "cuda")
            return StepPart(values.copy_(best, non_blocking=True), places, packed, best)
        if places != list(range(len(outputs.logits))):
            picked = outputs.logits[torch.tensor(places, dtype=torch.long, device=self._device)].float()
        else:
            picked = outputs.logits.to(torch.float32, copy=True)
        return StepPart(picked, range(len(places)), packed, best)

    # -- capture -----------------------------------------------------------------------------------

    def _step(self, shape: StepShape) -> Step:
        """Return the step of a shape, all padding."""
        if self._version != self.cache.version:  # the memory that steps were captured with is gone
            self._steps.clear()
            self._version = self.cache.version
        step = self._steps.get(shape)
        if step is None:
            step = self._steps[shape] = Step(shape, self._device)
        step.clear()
        return step

    def _run(self, shape: StepShape, step: Step, written: torch.Tensor | None = None) -> StepOutputs:
        """Return a step's outputs; they stay until the next step of this shape. written: as Step.load takes it."""
        step.load(written)
        if step.replay is None and self._capture is not None and self._pads and self.cache.layers:
            try:
                step.replay, step.outputs = self._capture(lambda: self._work(step))
            except MAY_BE_MEMORY as error:
                self._steps.pop(shape)
                if is_out_of_memory(error):
                    raise
                self._go_uncaptured(error)
        if step.replay is None or step.outputs is None:
            return self._work(step)
        step.replay()
        return step.outputs

    def _work(self, step: Step) -> StepOutputs:
        """Compute a step from its tensors alone."""
        attention = PagedAttention(self.cache, step.tensors, self._compute)
        self.cache.next = 0
        with attending(attention):
            logits = self._forward(step.tensors.token_ids.flatten()[None], attention.packed, step.wanted)
        return StepOutputs(logits, logits.argmax(-1))

    def _go_uncaptured(self, error: Exception) -> None:
        """Run all steps uncaptured from now on."""
        self._capture = None
        self._steps.clear()
        self.notes.append(f"graphs: steps run uncaptured, which is slower: {flat(error, 200)}")
