"""What a step costs on this machine: a few timed forwards before the first record."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ragspec.engine.forward import Model
from ragspec.engine.layout import Segment
from ragspec.speculation.cost import StepCost

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SHORT = 32  # slots that a row sees while the curve is measured
REACHES = (64, 576)  # slots seen; the difference is attention's cost
PER_ROW = 8  # tokens of a row while the curve is measured
REPEATS = 2  # the first of a shape also pays for the libraries' setup


def probe(model: Model, rows: int) -> StepCost:
    """Return the cost of steps of `rows` rows, measured in a few seconds; the cache is empty afterwards."""
    largest = rows * 8
    sizes = [tokens for tokens in TOKENS if tokens <= largest] or [1]
    occupy(model, -(-sizes[-1] // PER_ROW), SHORT + PER_ROW)
    points = [(tokens, _least(model, _spread(tokens))) for tokens in sizes]
    per_slot, per_row_slot = _attention(model, min(rows, 8))
    model.resize(rows)
    return StepCost(points, per_slot, per_row_slot)


def seconds_of(model: Model, rows: int) -> float:
    """Return what a plain step of `rows` rows takes."""
    reach = REACHES[0]
    occupy(model, rows, reach)
    return _least(model, [Segment(row, reach - 1, 1) for row in range(rows)])


def _spread(tokens: int) -> list[Segment]:
    counts = [PER_ROW] * (tokens // PER_ROW) + [tokens % PER_ROW] * (tokens % PER_ROW > 0)
    return [Segment(row, SHORT, count) for row, count in enumerate(counts)]


def _attention(model: Model, rows: int) -> tuple[float, float]:
    """Return seconds per token and slot, and per row and slot, beyond what a short context costs."""
    few, many = 1, PER_ROW
    near, far = REACHES
    occupy(model, rows, far)
    growth = {}
    for count in (few, many):
        seconds = [_least(model, [Segment(row, reach - count, count) for row in range(rows)]) for reach in (near, far)]
        growth[count] = max(0.0, seconds[1] - seconds[0]) / (rows * (far - near))
    per_slot = max(0.0, growth[many] - growth[few]) / (many - few)
    return per_slot, max(0.0, growth[few] - per_slot * few)


def occupy(model: Model, rows: int, slots: int) -> None:
    """Have a cache of `rows` rows and at least `slots` slots, all of it written, as memory is that rows have used."""
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
