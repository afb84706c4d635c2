"""Time: of a run by phase, of a model's forwards by part, and of a step by its size.

    with Profiler(model, bytes_per_s, flops_per_s) as profiler: ...    # `ragspec benchmark --profile`

A part's bound is the time to read its weights, keys and values once, or to multiply by them, at the device's peak
speeds, whichever is more (roofline; Williams et al., 2009). Limit: profiling makes steps a little slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch

from ragspec.engine.model.forward import Model
from ragspec.engine.model.layout import Layout, Segment
from ragspec.engine.model.weight_layouts import PackedLinear
from ragspec.engine.native.program import Attention
from ragspec.engine.request_state import ScheduledRequest, reach_of
from ragspec.models.resolve import context_length
from ragspec.speculation.step_cost import StepCost


@dataclass(slots=True)
class Clock:
    """Seconds of a run. A step that decodes and computes prompts is split between the two by its tokens."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_tokens: int = 0
    drafting_s: float = 0.0  # between a step's result and the next launch; included in the two above
    drafting_overlapped_s: float = 0.0  # beside a device that computes
    masks_s: float = 0.0  # of grammars; included in the two above
    steps: int = 0  # that decode
    drafted_steps: int = 0
    prompt_tokens: int = 0  # computed; without prefixes taken from other rows


class StepTimer:
    """One step, timed from its construction."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._planned, self._asking = self._started, 0.0
        self._aside = 0.0  # seconds of others' work
        self.settling_s = 0.0  # of drafting after the launch, for which the step waits; no part of the forward
        self._overlapped = 0.0  # the same beside a device that computes

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave out the time that the body takes: the step's own begins again after it."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._aside += time.perf_counter() - started

    @contextmanager
    def settling(self, overlapped: bool) -> Iterator[None]:
        """Count the time that the body takes as drafting. overlapped: a device computes beside it."""
        started = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            if overlapped:
                self._overlapped += spent
            else:
                self.settling_s += spent

    def planned(self, asking_s: float) -> None:
        """Mark the start of the forward. asking_s: seconds before it in which drafters were asked."""
        self._planned, self._asking = time.perf_counter(), asking_s

    def count(self, work: Sequence[ScheduledRequest], written: int, clock: Clock, cost: StepCost | None) -> float:
        """Add the step, which ends now, to `clock` and `cost`; return its seconds.

        written: tokens by which the decoding rows' answers grew.
        """
        ended = time.perf_counter() - self._aside
        spent = ended - self._started
        decoding = [item for item in work if item.decodes]
        tokens = sum(len(item.token_ids) for item in decoding)
        prefill = sum(len(item.token_ids) for item in work) - tokens
        if not tokens + prefill:
            return spent
        share = tokens / (tokens + prefill)
        forward_s = ended - self._planned - self.settling_s
        clock.drafting_s += self._asking + self.settling_s
        clock.drafting_overlapped_s += self._overlapped
        clock.prompt_tokens += prefill
        clock.decode_s += share * spent
        clock.prefill_s += (1 - share) * spent
        clock.decode_tokens += written
        if not decoding:
            return spent
        clock.steps += 1
        clock.drafted_steps += any(item.draft.token_ids for item in decoding)
        if cost is not None:
            step = tokens, len(decoding), reach_of([item.row for item in decoding]), forward_s
            cost.observe_beside(prefill, *step) if prefill else cost.observe(*step)
        return spent


# -- profiler --------------------------------------------------------------------------------------
LINEAR, ATTENTION = "linear layers", "attention"
PROMPTS, DECODING = "prompts", "decoding"
FLOAT = 4  # bytes


@dataclass(slots=True)
class Part:
    """A part of some forwards. bound_s: its least possible time, None if unknown."""

    seconds: float = 0.0
    bound_s: float | None = 0.0

    def add(self, seconds: float, bound_s: float | None) -> None:
        self.seconds += seconds
        self.bound_s = None if bound_s is None or self.bound_s is None else self.bound_s + bound_s


@dataclass(slots=True)
class Phase:
    """Forwards of one kind: those that compute prompts (beside decoding rows or not), or those that only decode."""

    steps: int = 0
    seconds: float = 0.0
    parts: dict[str, Part] = field(default_factory=lambda: {LINEAR: Part(), ATTENTION: Part()})

    def to_json(self) -> dict[str, Any]:
        """Return the phase; what is in no part is small operators."""
        rest = self.seconds - sum(part.seconds for part in self.parts.values())
        parts = {name: asdict(part) for name, part in self.parts.items()}
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "parts": parts | {"small operators": {"seconds": rest, "bound_s": None}},
        }


class Profiler:
    """Times a model's forwards while it is entered. bytes_per_s, flops_per_s: the device's peak speeds."""

    def __init__(self, model: Model, bytes_per_s: float, flops_per_s: float) -> None:
        self._model = model
        self._bytes_per_s = bytes_per_s
        self._flops_per_s = flops_per_s
        self._phases = {PROMPTS: Phase(), DECODING: Phase()}
        self._phase = self._phases[DECODING]
        self._started = 0.0
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        self._model.watch = self
        for module in self._model.inner.modules():
            if isinstance(module, PackedLinear | torch.nn.Linear):
                self._hooks.append(module.register_forward_pre_hook(self._begin))
                self._hooks.append(module.register_forward_hook(self._end))
        return self

    def __exit__(self, *exc: object) -> None:
        self._model.watch = None
        for hook in self._hooks:
            hook.remove()

    def to_json(self) -> dict[str, Any]:
        """Return {phase: {steps, seconds, parts: {name: {seconds, bound_s}}}}."""
        return {name: phase.to_json() for name, phase in self._phases.items()}

    @contextmanager
    def forward(self, layout: Layout) -> Iterator[None]:
        """Time the body as one forward of `layout`."""
        self._phase = self._phases[PROMPTS if any(segment.alone for segment in layout.segments) else DECODING]
        started = self._now()
        yield
        self._phase.steps += 1
        self._phase.seconds += self._now() - started

    def attend(self, layout: Layout, query: torch.Tensor, slot: int, do: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run and time one layer's attention of queries (1, heads, T, head_dim). slot: bytes of a token's KV.

        The bound is that of the plain causal mask; sliding windows can be faster.
        """
        started = self._now()
        result = do()
        self._attended(layout, self._now() - started, query.shape[1] * query.shape[3], slot)
        return result

    def layer(self, layout: Layout, shape: Sequence[Any], seconds: Sequence[float]) -> None:
        """Add a layer that ran as one call. shape: as in program.py. seconds: of each of its parts."""
        for part, taken in zip(shape, seconds, strict=True):
            if isinstance(part, Attention):
                self._attended(layout, taken, part.heads * part.size, 2 * part.kv_heads * part.size * FLOAT)
            else:
                bound = sum(self._bound(size, 2 * n * k * layout.tokens) for k, n, size in part)
                self._phase.parts[LINEAR].add(taken, bound)

    def _attended(self, layout: Layout, seconds: float, width: int, slot: int) -> None:
        """Add a layer's attention. width: numbers per query. slot: bytes of a token's keys and values."""
        pairs = sum(s.count * s.start + s.count * (s.count + 1) // 2 for s in layout.segments)
        self._phase.parts[ATTENTION].add(seconds, self._bound(layout.distinct_slots * slot, 4 * width * pairs))

    def _begin(self, module: Any, inputs: tuple[Any, ...]) -> None:
        self._started = self._now()

    def _end(self, module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        seconds = self._now() - self._started
        weights = module.in_features * module.out_features
        tokens = inputs[0].numel() // module.in_features
        packed = getattr(module, "native", None)
        size = inputs[0].element_size() if packed is None else packed.element_size()
        self._phase.parts[LINEAR].add(seconds, self._bound(weights * size, 2 * weights * tokens))

    def _bound(self, size: int, flops: int) -> float:
        return max(size / self._bytes_per_s, flops / self._flops_per_s)

    def _now(self) -> float:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        return time.perf_counter()


# -- step cost -------------------------------------------------------------------------------------


TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SHORT = 32  # context tokens of a row while the curve is measured
REACHES = (64, 576)  # context lengths, less where a model has fewer; their difference is attention's cost
PER_ROW = 8  # tokens per row while the curve is measured
FOUR = 4  # the same for captured steps (backends/step_shapes.py, TOKENS)
REPEATS = 2  # the first run of a shape also pays for libraries' set-up


def probe(model: Model, rows: int) -> StepCost:
    """Return the cost of steps of `rows` rows, measured in a few seconds; the cache is empty afterwards.

    Where the cache cannot grow, of as many of them as it has room for at the greatest reach.
    """
    asked = rows
    rows = model.rows_of(rows, _reaches(model)[1])
    if model.steps is not None:  # few shapes, since each is compiled and captured, and the run's own
        shapes = [(1, 1), (1, FOUR), (min(4, rows), FOUR), (rows, 1), (rows, FOUR), (rows, FOUR**2)]
        segments = {count * tokens: [Segment(row, SHORT, tokens) for row in range(count)] for count, tokens in shapes}
        sizes, few, longest = sorted(segments), rows, FOUR
    else:
        largest = rows * 8
        sizes = [tokens for tokens in TOKENS if tokens <= largest] or [1]
        segments = {tokens: _spread(tokens) for tokens in sizes}
        few, longest = min(rows, 8), PER_ROW
    occupy(model, max(map(len, segments.values())), SHORT + max(PER_ROW, FOUR**2))
    points = [(tokens, _least(model, segments[tokens])) for tokens in sizes]
    per_slot, per_row_slot = _attention(model, few, longest)
    model.resize(asked)
    return StepCost(points, per_slot, per_row_slot)


def seconds_of(model: Model, rows: int) -> float:
    """Return the seconds of a plain step of `rows` rows."""
    reach, _ = _reaches(model)
    occupy(model, rows, reach)
    return _least(model, [Segment(row, reach - 1, 1) for row in range(rows)])


def _spread(tokens: int) -> list[Segment]:
    counts = [PER_ROW] * (tokens // PER_ROW) + [tokens % PER_ROW] * (tokens % PER_ROW > 0)
    return [Segment(row, SHORT, count) for row, count in enumerate(counts)]


def _attention(model: Model, rows: int, many: int) -> tuple[float, float]:
    """Return seconds per token and context slot, and per row and slot, beyond those of a short context.

    many: tokens of a row; the other measurements have one.
    """
    few = 1
    near, far = _reaches(model)
    occupy(model, rows, far)
    growth = {}
    for count in (few, many):
        seconds = [_least(model, [Segment(row, reach - count, count) for row in range(rows)]) for reach in (near, far)]
        growth[count] = max(0.0, seconds[1] - seconds[0]) / (rows * (far - near))
    per_slot = max(0.0, growth[many] - growth[few]) / (many - few)
    return per_slot, max(0.0, growth[few] - per_slot * few)


def _reaches(model: Model) -> tuple[int, int]:
    """Return two context lengths that the model has positions for, since learned ones end with the context, and that a
    cache that cannot grow has room for."""
    longest = context_length(model.inner.config) or REACHES[1]
    if model.pool is not None:
        longest = min(longest, (model.pool.blocks - 1) * model.pool.size)
    return min(REACHES[0], longest // 2), min(REACHES[1], longest)


def occupy(model: Model, rows: int, slots: int) -> None:
    """Make a cache of `rows` rows and at least `slots` slots, all written, like memory that rows have used."""
    model.resize(rows)
    model.logits([Segment(row, slots - 1, 1) for row in range(rows)], [1] * rows, [0])
    model.cache.touch()


def _least(model: Model, segments: Sequence[Segment]) -> float:
    tokens = sum(segment.count for segment in segments)
    least = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        model.logits(list(segments), [1] * tokens, range(tokens)).argmax(-1).tolist()
        least = min(least, time.perf_counter() - started)
    return least
