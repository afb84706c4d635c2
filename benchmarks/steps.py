"""What a forward costs on this machine, and what it costs at least.

    python benchmarks/steps.py [--model demo] [--bfloat16] [--keep NAME]

Times steps of 1, 8, 16 and 64 rows that each see 300 tokens, and 512 tokens of a prompt: without our kernels, with our
kernels, and with each layer as one call of them, in turn, and prints the medians in milliseconds. The bound is that of
`ragspec benchmark --profile`: each part's weights, keys and values read once, or its arithmetic, whichever is more.
--bfloat16: with weights rounded to it, which our kernels keep in 16 bits. --keep: writes the table to
benchmarks/results/NAME.json as well.
"""

import argparse
import json
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ragspec.benchmark.details import roofline
from ragspec.engine.model.compiled import compile_layers
from ragspec.engine.model.forward import Model
from ragspec.engine.model.layout import Segment
from ragspec.engine.model.loaded import prepare
from ragspec.engine.profiler import Profiler, occupy
from ragspec.host.machine import machine
from ragspec.models.resolve import resolve

RESULTS = Path(__file__).resolve().parent / "results"
REACH, PROMPT, PASSES = 300, 512, 15
STEPS = {f"{rows} at once": [Segment(row, REACH, 1) for row in range(rows)] for rows in (1, 8, 16, 64)}
CASES = STEPS | {f"{PROMPT} prompt tokens": [Segment(0, 0, PROMPT, alone=True)]}
COLUMNS = ("ms", "without our kernels", "with them", "a layer as one call", "bound", "of the bound")


def main() -> None:
    """Time, print and keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--keep", metavar="NAME")
    args = parser.parse_args()
    models = [
        loaded(args.model, native, compiled, args.bfloat16)
        for native, compiled in ((False, False), (True, False), (True, True))
    ]
    best = roofline("cpu", "float32")
    assert best is not None
    rows = []
    for name, segments in CASES.items():
        seconds = [median(each) for each in in_turn(models, segments)]
        least = bound(models[1], segments, best.bytes_per_s, best.flops_per_s)
        rows.append([name, *(f"{each * 1e3:.1f}" for each in (*seconds, least)), f"{seconds[-1] / least:.2f}x"])
        print(dict(zip(COLUMNS, rows[-1], strict=True)), flush=True)
    if args.keep:
        keep(args.keep, args.model, rows, f"{best.bytes_per_s / 1e9:.0f} GB/s, {best.flops_per_s / 1e9:.0f} GFLOP/s")


def loaded(name: str, native: bool, compiled: bool, bfloat16: bool) -> Model:
    """Return the model ready for the engine, with or without our kernels and compiled layers."""
    inner = AutoModelForCausalLM.from_pretrained(resolve(name).path, dtype=torch.float32).eval()
    if bfloat16:
        inner = inner.bfloat16().float()
    notes: list[str] = []
    model = prepare(inner, notes, native)
    if compiled:
        compile_layers(model, 8, None, "on", notes)
    for note in notes:
        print(note, flush=True)
    occupy(model, max(len(segments) for segments in CASES.values()), REACH + 1)
    return model


def in_turn(models: list[Model], segments: list[Segment]) -> list[list[float]]:
    """Return each model's seconds for the same forward, the models one after another in each pass."""
    seconds: list[list[float]] = [[] for _ in models]
    for _ in range(PASSES + 1):
        for model, mine in zip(models, seconds, strict=True):
            started = time.perf_counter()
            forward(model, segments)
            mine.append(time.perf_counter() - started)
    return [mine[1:] for mine in seconds]


def forward(model: Model, segments: list[Segment]) -> None:
    """Compute the best next token of each segment."""
    tokens = sum(segment.count for segment in segments)
    model.logits(segments, [1] * tokens, range(tokens - len(segments), tokens)).argmax(-1).tolist()


def bound(model: Model, segments: list[Segment], bytes_per_s: float, flops_per_s: float) -> float:
    """Return the seconds that the forward's linear layers and attention take at least."""
    with Profiler(model, bytes_per_s, flops_per_s) as watch:
        forward(model, segments)
    return sum(part["bound_s"] or 0.0 for phase in watch.to_json().values() for part in phase["parts"].values())


def keep(name: str, model: str, rows: list[list[str]], speeds: str) -> None:
    """Write the table for docs/lab/performance.md."""
    results: dict[str, Any] = {
        "question": "What does a forward pass cost, and what is the lower bound?",
        "input": f"{model}, each row after {REACH} tokens, medians of {PASSES}, in turn; the machine's best: {speeds}",
        "command": "python benchmarks/steps.py",
        "machine": machine(),
        "versions": {package: version(package) for package in ("torch", "transformers")},
        "columns": COLUMNS,
        "rows": rows,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
