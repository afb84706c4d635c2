"""The chart of docs/results.md, an SVG drawn from benchmarks/results/ and, for the GPU, from the table in the log."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from results import RESULTS

PLAIN = [  # (file, records, at once): `context` and plain decoding on the same engine
    ("3-one-at-a-time", "QuoteSum", 1),
    ("3b-quotesum-4-8", "QuoteSum", 4),
    ("3b-quotesum-4-8", "QuoteSum", 8),
    ("1c-quotesum-auto", "QuoteSum", 16),
    ("4-pubmedqa", "PubMedQA", 16),
    ("2-shared", "XQuAD, shared passages", 16),
    ("4d-specbench-16", "Spec-Bench, RAG part", 16),
    ("2b-shared-64", "XQuAD, shared passages", 64),
]
VLLM = [  # `context` and the faster of vLLM's methods
    ("5-vllm", "QuoteSum", 16),
    ("5b-vllm-shared", "XQuAD, shared passages", 16),
    ("5c-vllm-long", "long documents, shared", 8),
    ("5d-vllm-pubmedqa", "PubMedQA", 16),
    ("5e2-vllm-specbench-16", "Spec-Bench, RAG part", 16),
]
GPU = [  # records, at once, tokens/s of `context` inside vLLM and of vLLM's fastest method: the log of 2026-11-26
    ("QuoteSum", 1, 312, 435),
    ("QuoteSum", 16, 1830, 2063),
    ("QuoteSum", 64, 2578, 3717),
    ("long passages", 16, 889, 1187),
    ("long passages", 64, 1180, 1795),
    ("short prompts", 256, 4590, 8996),
]
WIDTH, LEFT, RIGHT, STEP, TOP = 780, 256, 64, 22, 14
LOW, HIGH = 0.5, 2.0  # of the axis, which is logarithmic: twice as fast and half as fast are equally far from even
TICKS = (0.5, 0.7, 1.0, 1.5, 2.0)
GAIN, EVEN, LOSS = "#0b7285", "#6b7280", "#c2410c"


class Point(NamedTuple):
    """A ratio, with its interval where there is one."""

    label: str
    middle: float
    low: float | None
    high: float | None


def _ratio(file: str, records: str, at_once: int, *, beside_vllm: bool) -> Point:
    """Return how many times as fast as its baseline `context` is, end to end."""
    results = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))
    runs = [run for run in results["runs"] if run["batch_size"] == at_once or run["peer"]]
    (ours,) = {run["name"] for run in runs if run["method"] == "context" and not run["peer"]}
    if beside_vllm:
        rivals = {run["name"] for run in runs if run["name"].startswith("peer-vllm")}
    else:
        rivals = {run["name"] for run in runs if run["method"] == "none" and not run["peer"]}
    found = [r for r in results["ratios"] if r["name"] == ours and r["baseline"] in rivals]
    least = min((r for r in found if r["metric"] == "tokens_per_s"), key=lambda r: r["median"])
    return Point(f"{records}, {at_once} at once", least["median"], least["low"], least["high"])


def _groups() -> Iterator[tuple[str, list[Point]]]:
    yield (
        "Drafts, against plain decoding on the same engine (2 CPU cores)",
        [_ratio(*row, beside_vllm=False) for row in PLAIN],
    )
    yield (
        "ragspec with drafts, against vLLM's faster method (2 CPU cores)",
        [_ratio(*row, beside_vllm=True) for row in VLLM],
    )
    yield (
        "Drafts inside vLLM, against vLLM's fastest method (H100, one pass)",
        [Point(f"{records}, {at_once} at once", ours / best, None, None) for records, at_once, ours, best in GPU],
    )


def _x(ratio: float) -> float:
    share = math.log(min(max(ratio, LOW), HIGH) / LOW) / math.log(HIGH / LOW)
    return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)


def colour(point: Point) -> str:
    """Return a gain's or a loss's colour where the interval excludes 1, or where there is none."""
    if (point.low or point.middle) > 1:
        return GAIN
    return LOSS if (point.high or point.middle) < 1 else EVEN


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" {more}>{escape(text)}</text>'


def chart() -> str:
    """Return the chart as SVG."""
    drawn: list[str] = []
    y = TOP
    for title, points in _groups():
        y += 12
        drawn.append(_text(12, y, title, 'font-weight="600" fill="#111827"'))
        for point in points:
            y += STEP
            stroke = colour(point)
            drawn.append(_text(LEFT - 14, y + 4, point.label, 'text-anchor="end"'))
            if point.low and point.high:
                drawn.append(
                    f'<line x1="{_x(point.low)}" y1="{y}" x2="{_x(point.high)}" y2="{y}" stroke="{stroke}" '
                    'stroke-width="3" stroke-opacity="0.35"/>'
                )
            drawn.append(f'<circle cx="{_x(point.middle)}" cy="{y}" r="4.5" fill="{stroke}"/>')
            drawn.append(_text(WIDTH - 10, y + 4, f"{point.middle:.2f}x", f'text-anchor="end" fill="{stroke}"'))
        y += STEP + 8
    bottom = y - 8
    grid = [
        f'<line x1="{_x(tick)}" y1="{TOP + 20}" x2="{_x(tick)}" y2="{bottom}" '
        f'stroke="{"#9ca3af" if tick == 1 else "#e5e7eb"}"/>'
        for tick in TICKS
    ]
    ticks = [_text(_x(tick), bottom + 16, f"{tick:g}x", 'text-anchor="middle" fill="#6b7280"') for tick in TICKS]
    axis = _text(_x(1), bottom + 34, "times as fast, end to end (logarithmic)", 'text-anchor="middle" fill="#6b7280"')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 44}" width="{WIDTH}" '
        f'height="{bottom + 44}" font-family="system-ui, sans-serif" font-size="12.5" fill="#374151" role="img">'
    )
    title = "<title>How many times as fast ragspec is with drafts, end to end</title>"
    ground = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([head, title, ground, *grid, *drawn, *ticks, axis, "</svg>"]) + "\n"
