"""Variants that are faster but may change answers, timed beside the fastest lossless config with their quality.

Variants: another order of passages, fewer passages, 16-bit arithmetic, and quantised weights where the stack quantises
at load. None is chosen unless the user says how much quality it may cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ragspec.benchmark.comparison import format_ratio, paired, sides
from ragspec.benchmark.plan import Candidate
from ragspec.benchmark.results import Quality
from ragspec.config.load import build_config
from ragspec.config.run import RunConfig

TRIES = ("order", "passages", "dtype", "quantization")
SCORE = "f1"


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate's speed and quality.

    ratio: its speed to the lossless config's; at least `low`. speed: the same with its interval, as text.
    """

    candidate: Candidate
    ratio: float
    quality: Quality | None
    lossless: bool = False
    low: float = 0.0
    speed: str = "1.00x"

    @property
    def loss(self) -> float | None:
        """The most F1 points that it may lose, by the far end of the interval; None if unknown."""
        if self.lossless:
            return 0.0
        apart = self.quality.differences.get(SCORE) if self.quality else None
        return None if apart is None or apart.low is None else max(0.0, -apart.low)

    def formatted(self, *, best: bool) -> str:
        """Return a line about it. best: whether it is on the frontier."""
        quality = self.quality
        score = "" if quality is None or SCORE not in quality.scores else f", F1 {quality.scores[SCORE].formatted()}"
        apart = quality.differences.get(SCORE) if quality is not None else None
        against = "" if apart is None else f", {apart.formatted(sign=True)} against the lossless one"
        kind = "lossless" if self.lossless else "changes answers"
        return f"{self.candidate.name}: {self.speed}{score}{against}; {kind}{', on the frontier' * best}"


def variants(winner: Candidate, tries: Sequence[str], passages: int, *, on_gpu: bool) -> list[Candidate]:
    """Return the variants of the winner to try. passages: the most that a record has."""
    config, found = winner.config, []
    if "order" in tries and config.prompt.order != "shared":
        found.append(_changed(winner, "shared-order", prompt={"order": "shared"}))
    if "passages" in tries:
        most = min(passages, config.prompt.max_passages or passages)
        for count in dict.fromkeys((most - most // 4, most // 2)):
            if 0 < count < most:
                found.append(_changed(winner, f"{count}-passages", prompt={"max_passages": count}))
    if "dtype" in tries and config.runner_args.get("dtype") != "bfloat16":
        found.append(_changed(winner, "bfloat16", runner_args={"dtype": "bfloat16"}))
    if "quantization" in tries and config.runner == "vllm" and on_gpu:  # vLLM quantises at load on GPUs only
        found.append(_changed(winner, "fp8", runner_args={"quantization": "fp8"}))
    return found


def _changed(winner: Candidate, name: str, **sections: dict[str, Any]) -> Candidate:
    raw = winner.config.model_dump()
    for section, keys in sections.items():
        raw[section] = raw[section] | keys
    config: RunConfig = build_config(raw, f"--try {name}")
    return Candidate(f"{winner.name}-{name}", config, winner.batch_size, winner.num_tokens)


def points(
    winner: Candidate,
    others: Sequence[Candidate],
    speeds: Mapping[str, Sequence[float | None]],
    quality: Mapping[str, Quality],
) -> list[Point]:
    """Return the winner and its variants as points, by the passes that ran in pairs."""
    found = [Point(winner, 1.0, quality.get(winner.name), lossless=True)]
    for candidate in others:
        ratios = paired(speeds[candidate.name], speeds[winner.name])
        if ratios:
            low, _ = sides(ratios)
            found.append(
                Point(candidate, median(ratios), quality.get(candidate.name), low=low, speed=format_ratio(ratios))
            )
    return found


def frontier(given: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in both speed and F1, slowest first."""

    def score(point: Point) -> float:
        scored = point.quality is not None and SCORE in point.quality.scores
        return point.quality.scores[SCORE].mean if scored and point.quality is not None else float("-inf")

    kept = []
    for point in given:
        beaten = any(
            other is not point
            and other.ratio >= point.ratio
            and score(other) >= score(point)
            and (other.ratio, score(other)) != (point.ratio, score(point))
            for other in given
        )
        if not beaten:
            kept.append(point)
    return sorted(kept, key=lambda point: point.ratio)


def allowed(given: Sequence[Point], max_loss: float | None) -> Point:
    """Return the fastest point that loses no more than `max_loss` points of F1; the lossless one if that is None.

    A variant has to be faster by its whole interval.
    """
    fit = [point for point in given if point.lossless or (max_loss is not None and _within(point, max_loss))]
    return max(fit, key=lambda point: point.ratio)


def _within(point: Point, max_loss: float) -> bool:
    return point.loss is not None and point.loss <= max_loss and point.low > 1
