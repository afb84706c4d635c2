"""The speed of this checkout against that of another one, pass by pass in turn, on the same records.

    git worktree add ../before COMMIT
    python benchmarks/versions.py ../before RECORDS --methods none context --rows 1 8 16 32 --passes 5

Both run in this environment, in processes of their own, loaded for each case and start. Prints, per case, this
checkout's speed as a share of the other's (median and range over passes) by the processor time of answering, which
other work on the machine changes little, and by the clock; and whether all answers are the same. `--tokens 1` times
prompts. With OMP_NUM_THREADS=1, processor time and clock are alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent


class Version:
    """A checkout's pipeline in a process of its own."""

    def __init__(self, checkout: Path, config: dict[str, Any], records: Path, limit: int) -> None:
        command = [sys.executable, __file__, str(checkout), str(records), "--work", json.dumps(config)]
        self._checkout = checkout
        self._process = subprocess.Popen(
            [*command, "--limit", str(limit)],
            env=os.environ | {"PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.run()  # the first pass warms up

    def run(self) -> dict[str, Any]:
        """Answer all records; return seconds of the processor and of the clock, and the answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self._checkout} ended with exit code {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def work(config: dict[str, Any], records: Path, limit: int) -> None:
    """Answer the records once for each line of stdin."""
    from ragspec.run.local import Pipeline

    rows = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()[:limit]]
    with Pipeline(config) as pipeline:
        for _ in sys.stdin:
            wall, cpu = time.perf_counter(), time.process_time()
            answers = [answer["output"] for answer in pipeline.answers(rows)]
            spent = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
            print(json.dumps(spent | {"answers": answers}), flush=True)


def compare(args: argparse.Namespace, method: str, rows: int) -> dict[str, Any]:
    """Return what one case has shown."""
    config = {
        "model": args.model,
        "runner": "huggingface",
        "runner_args": {"batch_size": rows},
        "sampling": {"max_new_tokens": args.tokens},
        "prompt": {"source": "query"},
        "speculation": {"method": method},
    }
    passes = []
    for _ in range(args.starts):
        versions = [Version(checkout, config, args.records, args.limit) for checkout in (HERE, args.checkout)]
        for number in range(args.passes):
            order = (0, 1) if number % 2 else (1, 0)
            found = {which: versions[which].run() for which in order}
            passes.append((found[0], found[1]))
        for version in versions:
            version.close()
    case: dict[str, Any] = {"method": method, "rows": rows, "tokens": args.tokens}
    for clock in ("cpu_s", "wall_s"):
        ratios = sorted(other[clock] / mine[clock] for mine, other in passes)
        case[clock.replace("_s", "")] = [round(each, 3) for each in (statistics.median(ratios), ratios[0], ratios[-1])]
    return case | {"same": all(mine["answers"] == other["answers"] for mine, other in passes)}


def main() -> None:
    """Compare, or be one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("records", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--methods", nargs="+", default=["none", "context"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--starts", type=int, default=1, help="processes of each: what a warm-up measures differs")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work is not None:
        work(args.work, args.records, args.limit)
        return
    args.checkout = args.checkout.resolve()
    for method in args.methods:
        for rows in args.rows:
            print(json.dumps(compare(args, method, rows)), flush=True)


if __name__ == "__main__":
    main()
