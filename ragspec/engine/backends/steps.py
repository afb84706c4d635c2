"""Steps of fixed shapes over the paged cache, each captured once and then replayed.

A step reads one buffer that the host fills (step_buffers.py), and writes its logits to another. Its shape is one of a
few (step_shapes.py), so that a captured step (graphs.py) serves many.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from math import inf
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from ragspec.engine.backends.cascade import WORTH, CascadeChoice, SharedPrefix, most_chunks, shared_prefixes
from ragspec.engine.backends.graphs import Capture, StepOutputs
from ragspec.engine.backends.paged_attention import TILE, Compute, PagedAttention
from ragspec.engine.backends.step_buffers import Step, StepWork
from ragspec.engine.backends.step_shapes import TOKENS, StepRow, StepShape, StepShapes, packed, step_rows, tables_width
from ragspec.engine.kv.paged_cache import PagedCache
from ragspec.engine.model.attention import attending
from ragspec.engine.model.layout import Segment
from ragspec.engine.model.result import best_tokens
from ragspec.errors import flat
from ragspec.models.memory import MAY_BE_MEMORY, free_memory, is_out_of_memory

COMPILING_S = 5.0  # of two kernels that no earlier run has left in the cache: the least that a trial may cost
TRIALS = 4  # runs of each way when two are compared; the first captures
# token ids (1, T), positions (1, T), packed indices of the wanted logits or None for all -> logits (wanted, vocab)
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


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

    def __init__(self, parts: Sequence[StepPart], wanted: list[int], device: torch.device) -> None:
        self._parts = parts
        self._wanted = wanted
        self._packed = [packed for part in parts for packed in part.packed]
        self._ordered = self._packed == wanted
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
        several = [(part, part.values.tolist()) for part in self._parts]
        return self._in_order([values[place] for part, values in several for place in part.places])

    def written(self) -> tuple[torch.Tensor, list[int]]:
        """Return best tokens on the device, and the index there of each wanted one's."""
        firsts = accumulate((len(part.best) for part in self._parts), initial=0)
        where = [first + place for first, part in zip(firsts, self._parts, strict=False) for place in part.places]
        best = torch.cat([part.best for part in self._parts]) if len(self._parts) > 1 else self._parts[0].best
        return best, self._in_order(where)

    def logits(self) -> torch.Tensor:
        """Return the logits, (wanted, vocab) in float32, if they were asked for."""
        if len(self._parts) == 1 and self._ordered:
            return self._parts[0].values
        values = torch.cat([part.values for part in self._parts])
        return values[self._in_order(range(len(values)))]

    def _in_order(self, values: Sequence[int]) -> list[int]:
        """Return what belongs to each wanted token, of values in the order of the parts."""
        if self._ordered:
            return list(values)
        found = dict(zip(self._packed, values, strict=True))
        return [found[packed] for packed in self._wanted]


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

    Attributes:
        cascade: Whether prefixes that rows share are read once: "auto" where both ways were timed and that was faster,
            "on" wherever rows share some, "off".
        cascaded: Number of steps that did.
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
        self.shapes = StepShapes(exact)
        self.notes: list[str] = []  # for the user
        self._device = device
        self._forward = forward
        self._compute = compute
        self._capture = capture
        self._weight_bytes = weight_bytes
        self._steps: dict[StepShape, Step] = {}
        self._version = cache.version
        self._width = 0  # of the block tables of all steps
        self._logits = torch.empty(0)  # of the latest captured step: one place for all of them
        self._most_logits = 0  # tokens that the place is to have room for
        self._too_large: float = inf  # tokens of a step from which memory did not suffice to capture it
        self._pads = True
        self.cascade: Literal["auto", "on", "off"] = "off"
        self.cascaded = 0
        self._choice = CascadeChoice()
        self._prefixes: tuple[Any, list[SharedPrefix]] = (None, [])

    @property
    def exact(self) -> bool:
        """Whether all steps have one shape."""
        return self.shapes.exact

    @property
    def captures(self) -> bool:
        """Whether steps are captured."""
        return self._capture is not None

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
        shapes = self.shapes.likely(rows, drafts)
        self._most_logits = max(shape.logits for shape in shapes)
        for shape in sorted(shapes, key=attrgetter("size"), reverse=True):
            if self._capture is None:
                break
            self._run(shape, self._step(shape))  # the largest first: the others use its memory
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

        written: best tokens of an earlier step, and the index there of the only token of each of the first segments,
            whose ids are not yet known here. These must fit in one step.
        """
        self.cache.reserve(max(segment.start + segment.count for segment in segments))
        asked = np.zeros(len(token_ids), dtype=bool)
        asked[wanted] = True
        parts = [
            self._part(rows, shape, token_ids, asked, logits, None if shape.packed and not shape.beside else written)
            for rows, shape in self._shaped(segments)
        ]
        return LaunchedStep(parts, list(wanted), self._device)

    def joins(self, rows: int, tokens: int, *, drafts: bool) -> bool:
        """Return whether so many rows that decode are computed in a step of prompts.

        tokens: of prompts. drafts: whether the rows may verify drafts.
        """
        return self.shapes.joins(rows, self.cache.rows, tokens, TOKENS[-1] if drafts else TOKENS[0])

    @property
    def _token_share(self) -> float:
        """Bytes of a token's keys and values, as a share of the weights'."""
        return self.cache.bytes_per_token / self._weight_bytes

    def _shaped(self, segments: Sequence[Segment]) -> Iterator[tuple[list[StepRow], StepShape]]:
        """Yield the rows of each of the steps for some segments, and its shape, but for the logits that are wanted."""
        width = max(self._width, tables_width(self.cache.slots // self.cache.size))
        if self._pads:
            yield from self.shapes.cut(segments, width, self._token_share, self.cache.rows, captured=self.captures)
            return
        tokens = max(segment.count for segment in segments)
        rows = step_rows(packed(segments), tokens)
        yield rows, StepShape(len(rows), tokens, width, False)

    def _part(
        self,
        rows: Sequence[StepRow],
        shape: StepShape,
        token_ids: Sequence[int],
        asked: np.ndarray,
        logits: bool,
        written: tuple[torch.Tensor, Sequence[int]] | None = None,
    ) -> StepPart:
        """Launch one step, and a copy of what is wanted of it, which the next step overwrites."""
        self.cache.reserve_rows([(row.row, row.start, row.start + row.count) for row in rows])
        tables = self.cache.tables([row.row for row in rows])[:, : shape.width]
        work = StepWork(rows, token_ids, asked, tables, written)
        if shape.tokens == 1 or work.several:
            shape = replace(shape, all_logits=True)
        outputs, places = self._do_best(shape, work)
        packed = work.source[work.wanted].tolist()
        best = outputs.best.clamp(min=0)  # a copy, since the next step may overwrite it; NOT_A_NUMBER is no token there
        if not logits:
            values = torch.empty(best.shape, dtype=best.dtype, pin_memory=best.device.type == "cuda")
            return StepPart(values.copy_(outputs.best, non_blocking=True), places, packed, best)
        if places == list(range(len(places))):
            picked = outputs.logits[: len(places)].to(torch.float32, copy=True)
        else:  # pinned, since a copy of other memory waits for the step
            which = torch.empty(len(places), dtype=torch.long, pin_memory=self._device.type == "cuda")
            which.numpy()[:] = places
            picked = outputs.logits[which.to(self._device, non_blocking=True)].float()
        return StepPart(picked, range(len(places)), packed, best)

    def _do(self, shape: StepShape, work: StepWork) -> tuple[StepOutputs, list[int]]:
        """Launch a step; return its outputs, and the places of the wanted logits among them."""
        step = self._step(shape)
        places = work.fill(step, shape)
        return self._run(shape, step, None if work.written is None else work.written[0]), places

    # -- cascade -----------------------------------------------------------------------------------

    def _do_best(self, shape: StepShape, work: StepWork) -> tuple[StepOutputs, list[int]]:
        """Do the same with cascade attention if that is faster."""
        if self._cascades(shape):
            work.prefixes = self._shared(work, most_chunks(shape.rows))
            if work.prefixes and self._pays(shape, work):
                try:
                    found = self._do(replace(shape, cascade=True), work)
                    self.cascaded += 1
                    return found
                except MAY_BE_MEMORY as error:
                    self._give_up_cascade(error)
        return self._do(shape, work)

    def _cascades(self, shape: StepShape) -> bool:
        """Return whether steps of a shape may read prefixes once."""
        return self.cascade != "off" and self._pads and not self.exact and shape.tokens < TILE and shape.rows > 1

    def _pays(self, shape: StepShape, work: StepWork) -> bool:
        """Return whether a step that shares prefixes is faster with cascade attention; find out once that is due."""
        if self.cascade == "on":
            return True
        token = self.cache.bytes_per_token
        saved = sum(prefix.saved for prefix in work.prefixes) * self.cache.size * token
        read = self._weight_bytes + sum(row.start + row.count for row in work.rows) * token
        if saved < WORTH * read:
            return False
        kind, before = (shape, saved.bit_length()), self._steps.get(shape)
        trial_s = max(COMPILING_S, 2 * before.first_s if before else 0.0)
        if self._choice.due(kind, saved / read, trial_s, time.perf_counter()):
            self._choice.learn(kind, self._faster(replace(shape, cascade=True), shape, work))
        return bool(self._choice.of(kind))

    def _shared(self, work: StepWork, chunks: int) -> list[SharedPrefix]:
        """Return the prefixes that rows share; computed anew when others decode, or have other blocks."""
        key = self.cache.changes, chunks, [row.row for row in work.rows]
        whole = np.array([row.start for row in work.rows]) // self.cache.size
        known, prefixes = self._prefixes
        if known != key or any(prefix.blocks > whole[prefix.rows].min() for prefix in prefixes):
            prefixes = shared_prefixes(work.tables, whole, chunks)
            self._prefixes = key, prefixes
        return prefixes

    def _faster(self, one: StepShape, other: StepShape, work: StepWork) -> bool:
        """Return whether one shape takes less time than another for the same work, which may be done repeatedly."""
        seconds: dict[StepShape, float] = {}
        try:
            for _ in range(TRIALS):
                for shape in (one, other):
                    began = self._settled()
                    self._do(shape, work)
                    seconds[shape] = min(self._settled() - began, seconds.get(shape, float("inf")))
        except MAY_BE_MEMORY as error:
            self._give_up_cascade(error)
            return False
        faster = seconds[one] < seconds[other]
        if not faster:
            self._steps.pop(one)
        return faster

    def _give_up_cascade(self, error: Exception) -> None:
        """Let all rows read their own blocks from now on."""
        self.cascade = "off"
        self._steps = {shape: step for shape, step in self._steps.items() if not shape.cascade}
        free_memory()
        self.notes.append(f"attention: prefixes that requests share are read by each of them: {flat(error, 200)}")

    def _settled(self) -> float:
        """Return the time once the device has nothing to do."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    # -- capture -----------------------------------------------------------------------------------

    def _step(self, shape: StepShape) -> Step:
        """Return the step of a shape, all padding."""
        known = self._version, self._width
        if known != (self.cache.version, shape.width):  # their memory is gone, or all tables are wider from now on
            self._steps.clear()
            self._version, self._width = self.cache.version, shape.width
        step = self._steps.get(shape)
        if step is None:
            step = self._steps[shape] = Step(shape, self._device)
        step.clear()
        return step

    def _run(self, shape: StepShape, step: Step, written: torch.Tensor | None = None) -> StepOutputs:
        """Return a step's outputs; they stay until the next step. written: as Step.load takes it."""
        step.load(written)
        capture = self._capture if self._pads and self.cache.layers and shape.size < self._too_large else None
        if step.replay is None and capture is not None:
            began = time.perf_counter()
            try:
                step.replay, step.outputs = capture(lambda: self._keep(self._work(step)))
            except MAY_BE_MEMORY as error:
                self._steps.pop(shape)
                if shape.cascade:
                    raise
                if is_out_of_memory(error):
                    self._capture_less(shape, error)
                else:
                    self._go_uncaptured(error)
            step.first_s = time.perf_counter() - began
        if step.replay is None or step.outputs is None:
            return self._uncaptured(step)
        step.replay()
        return step.outputs

    def _uncaptured(self, step: Step) -> StepOutputs:
        """Run a step as it is; if memory runs out, again without captured steps and what they keep."""
        try:
            return self._work(step)
        except MAY_BE_MEMORY as error:
            if not self.captured or not is_out_of_memory(error):
                raise
        self._steps.clear()
        free_memory()
        return self._work(step)

    def _keep(self, found: StepOutputs) -> StepOutputs:
        """Return a step's outputs with logits in the place that all captured steps write theirs to."""
        logits, place = found.logits, self._logits
        alike = place.shape[1:] == logits.shape[1:] and (place.dtype, place.device) == (logits.dtype, logits.device)
        if not alike or len(place) < len(logits):  # in a run that warms up, not in a capture
            self._logits = place = logits.new_empty(max(len(logits), self._most_logits), *logits.shape[1:])
        return StepOutputs(place[: len(logits)].copy_(logits), found.best)

    def _work(self, step: Step) -> StepOutputs:
        """Compute a step from its tensors alone."""
        attention = PagedAttention(self.cache, step.tensors, self._compute)
        self.cache.next = 0
        with attending(attention):
            logits = self._forward(step.tensors.token_ids.flatten()[None], attention.positions, step.wanted)
        return StepOutputs(logits, best_tokens(logits))

    def _go_uncaptured(self, error: Exception) -> None:
        """Run all steps uncaptured from now on."""
        self._capture = None
        self._steps.clear()
        self.notes.append(f"graphs: steps run without CUDA graphs, which is slower: {flat(error, 200)}")

    def _capture_less(self, shape: StepShape, error: Exception) -> None:
        """Run steps of this shape's size, and larger ones, uncaptured from now on."""
        if self._too_large == inf:
            self.notes.append(f"graphs: some steps run without CUDA graphs, which is slower: {flat(error, 200)}")
        self._too_large = shape.size
        free_memory()
