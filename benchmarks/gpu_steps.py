"""What steps of a model take on a GPU, by their shape: captured, uncaptured, and on the host.

    python benchmarks/gpu_steps.py MODEL --shapes 1x1 16x1 64x1 64x4 64x1+500 --context 600

Prints, per shape (rows x tokens of each; "64x1+500": the last row computes a prompt of 500 tokens instead): seconds
until the first step is done (compiling and capturing), milliseconds of the graph alone on the device, and of a whole
step as the engine asks for one. --profile: the kernels of a step.
--shared TOKENS: rows begin with so many tokens in common, which each reads itself, or which are read once.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from typing import Any

import torch

from ragspec.engine.backends.step_shapes import TOKENS
from ragspec.engine.kv.paged_cache import PagedCache
from ragspec.engine.model.forward import Model
from ragspec.engine.model.layout import Segment
from ragspec.engine.model.loaded import prepare

REPEATS = 20
SHAPES = ["1x1", "1x4", "16x1", "16x4", "64x1", "64x4", "256x1", "1x500", "64x1+500", "64x4+500"]


def load(name: str, dtype: str, attention: str, graphs: str) -> tuple[Model, list[str]]:
    """Return the model, ready for the engine, and its notes."""
    from transformers import AutoModelForCausalLM

    notes: list[str] = []
    inner = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype), device_map="cuda").eval()
    return prepare(inner, notes, attention=attention, graphs=graphs), notes  # type: ignore[arg-type]


def times(run: Any) -> tuple[float, float]:
    """Return the median milliseconds of a call: on the device, and on the host's clock until it is done."""
    device, host = [], []
    for _ in range(REPEATS):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        started = time.perf_counter()
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        host.append((time.perf_counter() - started) * 1e3)
        device.append(first.elapsed_time(last))
    return statistics.median(device), statistics.median(host)


def measure(
    model: Model, rows: int, tokens: int, context: int, profile: bool, shared: int = 0, prompt: int = 0
) -> dict[str, Any]:
    """Return the times of a step of `rows` rows of `tokens` tokens after `context` tokens, `shared` of them shared.

    prompt: tokens of a prompt that the last row computes instead; 0 for none.
    """
    assert model.steps is not None
    model.resize(rows)  # steps of prompts have places for all rows
    model.cache.reserve(max(context + tokens, prompt))
    if shared:
        model.cache.reserve_row(0, 0, context)
        for row in range(1, rows):
            model.cache.drop(row)
            assert model.cache.share_prefix(0, row, shared) == shared
    prompts = tokens > TOKENS[-1]
    segments = [Segment(row, context, tokens, alone=prompts) for row in range(rows)]
    wanted = list(range(tokens - 1, rows * tokens, tokens) if prompts else range(rows * tokens))
    total = rows * tokens
    if prompt:
        segments[-1] = Segment(rows - 1, 0, prompt, alone=True)
        total += prompt - tokens
        wanted = [*range((rows - 1) * tokens), total - 1]
    token_ids = [7 + i % 999 for i in range(total)]

    def step() -> None:
        model.logits(segments, token_ids, wanted).argmax(-1).cpu()

    started = time.perf_counter()
    step()
    torch.cuda.synchronize()
    found: dict[str, Any] = {"rows": rows, "tokens": tokens, "context": context, "prompt": prompt}
    if shared:
        found |= {"shared": shared, "cascade": model.steps.cascade == "on"}
    found["first_s"] = round(time.perf_counter() - started, 2)
    _, found["step_ms"] = times(step)
    captured = list(model.steps._steps.values())[-1]
    if captured.replay is not None:
        found["graph_ms"], _ = times(captured.replay)
    if profile:
        work = captured.replay or step
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            work()
            torch.cuda.synchronize()
        print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=22, max_name_column_width=90), flush=True)
    return found


def main() -> None:
    """Measure the shapes that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--shared", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--graphs", default="auto")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", nargs="*", default=[])
    wanted = parser.parse_args()
    started = time.perf_counter()
    model, notes = load(wanted.model, wanted.dtype, wanted.attention, wanted.graphs)
    print(f"ready after {time.perf_counter() - started:.1f} s: {notes}", flush=True)
    started = time.perf_counter()
    if wanted.compile:
        from ragspec.engine.model.compiled import compile_layers

        compile_layers(model, 8, None, "on", notes)
        print(f"compiled after {time.perf_counter() - started:.1f} s: {notes}", flush=True)
    if model.steps is None:
        return
    shapes = {shape: [int(each) for each in re.split("[x+]", shape)] for shape in wanted.shapes}
    rows = max(count for count, *_ in shapes.values())
    longest = max(sum(tokens) for _, *tokens in shapes.values())
    model.resize(rows)
    assert isinstance(model.cache, PagedCache)
    model.cache.allocate(1 + rows * (wanted.context // 128 + 2) + longest // 128 + 1)
    for shape, (count, tokens, *prompt) in shapes.items():
        for way in ("off", "on") if wanted.shared else ("off",):
            model.steps.cascade = way  # type: ignore[assignment]
            profile = shape in wanted.profile
            found = measure(model, count, tokens, wanted.context, profile, wanted.shared, *prompt)
            print(json.dumps({key: round(value, 3) for key, value in found.items()}), flush=True)
    print(f"notes: {notes}", flush=True)


if __name__ == "__main__":
    main()
