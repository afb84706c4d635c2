"""Which mode of vLLM answers with `method: auto`, and whether it is worth starting the engine again in another. Pure.

    mode, expected = first_mode(rows=256, asynchronous=True, known={})      # ("none", {"none": 1.0, "context": 0.56})
    worth_restarting(ratio=0.9, host_share=0.2, left_s=600, load_s=60)      # True

Plain vLLM schedules asynchronously: the host's part of a step costs it nothing. Our drafter forbids that, so the plain
steps that drafts are compared with in one engine are slower than vLLM's own, and only another engine shows how fast
that is. Before anything was measured here, the number of rows decides, by what an H100 showed (docs/lab/log.md).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log2
from statistics import median
from typing import Any

from ragspec.host.cache import JsonCache
from ragspec.speculation.methods import PLAIN

OURS = "context"
# our drafter's speed by rows, relative to plain vLLM: an 8B on an H100, passages that answers copy from
PRIOR = ((1, 2.5), (16, 1.28), (64, 0.98), (256, 0.56))
MARGIN = 1.03  # over plain decoding; below it, do not speculate
NOISE = 1.1  # between whole runs, for the choice between engines whose plain steps are the same
RECENT = 8  # runs kept per mode
PATIENCE = 1.5  # how often a restart must pay for itself
LEAST_STEPS = 64  # to judge a mode by
MODES = JsonCache("vllm-modes")  # what each mode took, a value per model, machine, version and settings


@dataclass(frozen=True, slots=True)
class ModeRun:
    """What one run of a mode took. rows: most records at once."""

    rows: int
    prompt_tokens: int
    output_tokens: int
    seconds: float

    @property
    def kind(self) -> tuple[int, int]:
        """Runs of equal kinds can be compared: rows, and tokens of prompts to one of an answer, in powers of two."""
        return self.rows.bit_length(), (self.prompt_tokens // max(1, self.output_tokens)).bit_length()

    @property
    def speed(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds


Known = Mapping[str, Sequence[ModeRun]]  # of each mode


def expected_ratios(rows: int, *, asynchronous: bool, known: Known) -> dict[str, float]:
    """Return each mode's expected speed relative to plain vLLM. asynchronous: whether that schedules so."""
    ratios = {PLAIN: 1.0, OURS: _prior(rows) if asynchronous else max(1.0, _prior(rows))}
    for mode in known:
        if mode != PLAIN and (measured := _measured(known.get(PLAIN, ()), known[mode], rows)) is not None:
            ratios[mode] = measured
    return {mode: round(ratio, 3) for mode, ratio in ratios.items()}


def first_mode(rows: int, *, asynchronous: bool, known: Known) -> tuple[str, dict[str, float]]:
    """Return the mode to start in, and what was expected of each.

    Where plain vLLM is not asynchronous either, our drafter's pauses are as fast: it starts unless another is faster.
    """
    ratios = expected_ratios(rows, asynchronous=asynchronous, known=known)
    best = max(ratios, key=lambda mode: ratios[mode])
    if not asynchronous:
        return (best if ratios[best] > NOISE * ratios[OURS] else OURS), ratios
    return (best if ratios[best] > MARGIN else PLAIN), ratios


def worth_restarting(ratio: float | None, host_share: float, left_s: float, load_s: float) -> bool:
    """Return whether plain vLLM would be done sooner, its start included.

    Args:
        ratio: Speed of steps with drafts, relative to plain steps of the same engine; None while unknown.
        host_share: Part of a step's time in which the host schedules, which plain vLLM does beside the device.
        left_s: Seconds that the present mode has yet to run.
        load_s: Seconds that an engine takes to start.
    """
    if ratio is None:
        return False
    relative = max(1.0, ratio) * (1.0 - host_share)  # drafts that lose are paused
    return relative * MARGIN < 1.0 and left_s * (1.0 - relative) > PATIENCE * load_s


def _prior(rows: int) -> float:
    """Return PRIOR at `rows`, between its points by their logarithms."""
    points = [point for point, _ in PRIOR]
    at = bisect_right(points, rows)
    if at == 0 or at == len(points):
        return PRIOR[max(0, at - 1)][1]
    (low, before), (high, after) = PRIOR[at - 1], PRIOR[at]
    return before + (after - before) * log2(rows / low) / log2(high / low)


def _measured(plain: Sequence[ModeRun], mode: Sequence[ModeRun], rows: int) -> float | None:
    """Return the median ratio of runs of one kind, with about as many rows; None without any."""
    near = rows.bit_length()
    ratios = [
        one.speed / other.speed
        for one in mode
        for other in plain
        if one.kind == other.kind and abs(one.kind[0] - near) <= 1 and one.output_tokens and other.output_tokens
    ]
    return median(ratios) if ratios else None


# -- experience ------------------------------------------------------------------------------------


def read_runs(depends: Sequence[object]) -> dict[str, list[ModeRun]]:
    """Return the recent runs of each mode; none for a malformed value."""
    value = MODES.read(*depends)
    try:
        return {str(mode): [_run(each) for each in runs] for mode, runs in value.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _run(value: Any) -> ModeRun:
    rows, prompts, outputs = (int(value[name]) for name in ("rows", "prompt_tokens", "output_tokens"))
    return ModeRun(rows, prompts, outputs, float(value["seconds"]))


def remember_run(mode: str, run: ModeRun, depends: Sequence[object]) -> None:
    """Record a run of a mode."""
    if run.output_tokens <= 0 or run.seconds <= 0:
        return
    known: dict[str, Any] = {each: [asdict(one) for one in runs] for each, runs in read_runs(depends).items()}
    known[mode] = [*known.get(mode, []), asdict(run)][-RECENT:]
    MODES.write(known, *depends)
