"""The same records on several workers: ragspec's own, and Ray Data's map_batches over the same engine.

    python benchmarks/ray_data.py CONFIG INPUT [--workers 2] [--batch 16] [--kill] [--repeat 3]

Prints one JSON line for each pass, the two in turn: output tokens/s from the first worker's being loaded, prompt tokens
that were computed (not found in a cache), and how many records have no answer. --kill: an actor is killed after a third
of the records. Needs `pip install "ragspec[ray]"` and pandas.
"""

import argparse
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from ragspec.config.load import load_config
from ragspec.config.run import RunConfig
from ragspec.run.generate import generate
from ragspec.run.local import Pipeline


class Answer:
    """Ray Data's actor: one loaded model, a batch of input lines at a time."""

    def __init__(self, config: RunConfig) -> None:
        self._pipeline = Pipeline(config)
        self._pipeline.__enter__()

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Return the output lines of a batch of input lines."""
        records = [json.loads(line) for line in batch["line"]]
        return {"answer": [json.dumps(answer) for answer in self._pipeline.answers(records)]}


def ray_data(config: RunConfig, lines: list[str], workers: int, batch: int, kill: bool) -> dict[str, Any]:
    """Answer through Ray Data; return the figures."""
    import ray

    ray.init(address="local", num_cpus=workers + 1, log_to_driver=False, logging_level="error", include_dashboard=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.from_items([{"line": line} for line in lines], override_num_blocks=max(1, len(lines) // batch))
    answered = rows.map_batches(
        Answer, fn_constructor_args=(config,), batch_size=batch, concurrency=workers, num_cpus=1
    )
    found: list[dict[str, Any]] = []
    thread = killer("MapWorker|Answer", lambda: len(found) >= len(lines) // 3) if kill else None
    begun = 0.0
    try:
        for row in answered.iter_rows():
            found.append(json.loads(row["answer"]))
            begun = begun or time.perf_counter() - found[0].get("latency_s", 0.0)
    finally:
        seconds = time.perf_counter() - begun
        if thread:
            thread.join()
        ray.shutdown()
    return figures("ray data", found, lines, seconds)


def ours(config: RunConfig, lines: list[str], workers: int, kill: bool) -> dict[str, Any]:
    """Answer on ragspec's workers; return the figures."""
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        source.write_text("".join(f"{line}\n" for line in lines))
        given = config.as_given() | {"input": str(source), "output": str(output)}
        given["scale"] = {"workers": workers, "cpus_per_worker": 1}
        thread = None
        if kill:
            thread = killer("Worker", lambda: output.exists() and output.read_bytes().count(b"\n") >= len(lines) // 3)
        summary = generate(RunConfig.model_validate(given))
        if thread:
            thread.join()
        found = [json.loads(line) for line in output.read_text().splitlines()]
    return figures("ragspec", found, lines, summary.generate_s)


def figures(who: str, found: list[dict[str, Any]], lines: list[str], seconds: float) -> dict[str, Any]:
    """Return what a pass comes to."""
    answers = [line for line in found if "error" not in line]
    tokens = sum(line["output_tokens"] for line in answers)
    computed = sum(line["prompt_tokens"] - line["cached_prompt_tokens"] for line in answers)
    return {
        "who": who,
        "seconds": round(seconds, 1),
        "output_tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 1),
        "prompt_tokens_computed": computed,
        "records_without_answer": len(lines) - len({line["id"] for line in answers}),
        "records_twice": len(found) - len({line["id"] for line in found}),
    }


def killer(pattern: str, due: Any) -> threading.Thread:
    """Kill one actor as soon as it is due."""

    def wait() -> None:
        deadline = time.monotonic() + 600
        while not due() and time.monotonic() < deadline:
            time.sleep(0.05)
        command = ["/usr/bin/env", "pgrep", "-f", f"ray::({pattern})"]
        pids = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        os.kill(int(pids.split()[0]), signal.SIGKILL)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def main() -> None:
    """Time both in turn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("input", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--kill", action="store_true")
    args = parser.parse_args()
    config, _ = load_config(args.config)
    lines = args.input.read_text().splitlines()
    for _ in range(args.repeat):
        print(json.dumps(ours(config, lines, args.workers, args.kill)), flush=True)
        print(json.dumps(ray_data(config, lines, args.workers, args.batch, args.kill)), flush=True)


if __name__ == "__main__":
    main()
