"""Running a plan: one process per candidate, passes in turn (A B, B A, ...), medians, and ratios pair by pair.

Machines drift; a ratio of two passes that ran one after the other does not. Limit: interleaving needs room for all
candidates' models at once; `sequential` gives that up.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import IO, Any

import orjson
from rich.console import Console

from ragspec.benchmark.plan import BASELINE, Candidate
from ragspec.errors import ConfigError, ModelError
from ragspec.journal import write_json
from ragspec.jsonl import Lines
from ragspec.machine import machine

METRICS = ("tokens_per_s", "decode_tokens_per_s")


class Worker:
    """The process of one candidate."""

    def __init__(self, candidate: Candidate, folder: Path, limit: int | None) -> None:
        self.candidate = candidate
        self.answers = folder / "outputs" / f"{candidate.name}.jsonl"
        self.log = folder / "logs" / f"{candidate.name}.log"
        for path in (self.answers, self.log):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._limit = limit
        self._passes = 0
        self._start()

    def _start(self) -> None:
        self._log_file = self.log.open("ab" if self._passes else "wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ragspec.benchmark.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log_file,
        )
        task = {
            "name": self.candidate.name,
            "config": self.candidate.config.model_dump(mode="json"),
            "limit": self._limit,
            "output": str(self.answers),
        }
        self._send(orjson.dumps(task))
        self.ready = self._receive()

    def measure(self) -> dict[str, Any]:
        """Return the stats of one pass over the input, from a fresh process where the last pass left drafts behind."""
        if self._passes and self.ready["remembers"]:
            self.close()
            self._start()
        self._passes += 1
        self._send(b"go")
        result: dict[str, Any] = self._receive()["result"]
        return result

    def close(self) -> None:
        """End the process."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log_file.close()

    def _send(self, line: bytes) -> None:
        stdin: IO[bytes] | None = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(line + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        message: dict[str, Any] = orjson.loads(line)
        if "error" in message:
            kind = ConfigError if message["exit_code"] == ConfigError.exit_code else ModelError
            raise kind(f"{self.candidate.name}: {message['error']}")
        return message

    def _died(self) -> ModelError:
        last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
        return ModelError(f"{self.candidate.name}: its process ended ({''.join(last)[:200]}); see {self.log}")


def run_benchmark(
    plan: list[Candidate],
    folder: Path,
    *,
    repeat: int,
    limit: int | None,
    sequential: bool,
    console: Console,
) -> dict[str, Any]:
    """Run `plan` and return what `folder`/results.json then holds. Raises ConfigError and ModelError."""
    with Lines(plan[0].config.input or ""):
        pass  # a missing input is known before anything loads
    passes: dict[str, list[dict[str, Any]]] = {candidate.name: [] for candidate in plan}
    ready: dict[str, dict[str, Any]] = {}

    def measure(worker: Worker, number: int) -> None:
        name = worker.candidate.name
        console.print(f"{name}: pass {number} of {repeat} ...", markup=False)
        result = worker.measure()
        if not result["records"]:
            raise ConfigError(f"{name}: no record was answered ({result['failed']} failed); see {worker.answers}")
        if result["failed"]:
            console.print(
                f"{name}: {result['failed']} records failed; see {worker.answers}", markup=False, style="yellow"
            )
        passes[name].append(result)

    if sequential:
        for candidate in plan:
            with _worker(candidate, folder, limit, console) as worker:
                ready[candidate.name] = worker.ready
                for number in range(1, repeat + 1):
                    measure(worker, number)
    else:
        with ExitStack() as stack:
            workers = [stack.enter_context(_worker(candidate, folder, limit, console)) for candidate in plan]
            ready = {worker.candidate.name: worker.ready for worker in workers}
            for number in range(1, repeat + 1):
                for worker in workers if number % 2 else reversed(workers):
                    measure(worker, number)
    results = {
        "machine": machine(),
        "versions": next(iter(ready.values()))["ready"]["versions"],
        "runs": [
            _row(candidate, number, result, ready[candidate.name], identical)
            for candidate, identical in _identical(plan, folder)
            for number, result in enumerate(passes[candidate.name], 1)
        ],
        "ratios": [ratio for candidate in plan for ratio in _ratios(candidate, plan, passes)],
        "notes": sorted({f"{name}: {note}" for name, message in ready.items() for note in message["notes"]}),
    }
    write_json(folder / "results.json", results)
    return results


@contextmanager
def _worker(candidate: Candidate, folder: Path, limit: int | None, console: Console) -> Iterator[Worker]:
    console.print(f"{candidate.name}: loading ...", markup=False)
    worker = Worker(candidate, folder, limit)
    try:
        yield worker
    finally:
        worker.close()


def _row(
    candidate: Candidate, number: int, result: dict[str, Any], ready: dict[str, Any], identical: int
) -> dict[str, Any]:
    spec = result["speculation"]
    return {
        "name": candidate.name,
        "runner": candidate.config.runner,
        "method": candidate.config.speculation.method,
        "batch_size": candidate.batch_size or ready["ready"]["runner"].get("batch_size"),
        "num_tokens": candidate.num_tokens or candidate.config.speculation.num_tokens,
        "repeat": number,
        "records": result["records"],
        "failed": result["failed"],
        "prompt_tokens": result["prompt_tokens"],
        "output_tokens": result["output_tokens"],
        "load_s": round(ready["load_s"], 3),
        "warmup_s": round(ready["warmup_s"], 3),
        "generate_s": result["generate_s"],
        "tokens_per_s": result["tokens_per_s"],
        "decode_tokens_per_s": result["decode_tokens_per_s"],
        "drafted": spec["drafted"],
        "accepted": spec["accepted"],
        "acceptance_rate": spec["acceptance_rate"],
        "mean_acceptance_length": spec["mean_acceptance_length"],
        "tokens_per_step": spec["tokens_per_step"],
        "acceptance_by_position": spec["acceptance_by_position"],
        "latency_s": result["latency_s"],
        "time_to_first_token_s": result["time_to_first_token_s"],
        "identical": identical,
        "peak_memory_gib": result["peak_memory_gib"],
    }


def baseline_of(candidate: Candidate, plan: list[Candidate]) -> Candidate:
    """Return what `candidate` is held against: plain decoding at its batch size, else the plan's first."""
    plain = [other for other in plan if other.config.speculation.method == BASELINE]
    same = [other for other in plain if other.batch_size == candidate.batch_size]
    return (same or plain or plan)[0]


def _ratios(
    candidate: Candidate, plan: list[Candidate], passes: dict[str, list[dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    baseline = baseline_of(candidate, plan)
    if baseline is candidate:
        return
    for metric in METRICS:
        pairs = zip(passes[candidate.name], passes[baseline.name], strict=True)
        ratios = [mine[metric] / theirs[metric] for mine, theirs in pairs if mine[metric] and theirs[metric]]
        if ratios:
            yield {
                "name": candidate.name,
                "baseline": baseline.name,
                "metric": metric,
                "median": round(median(ratios), 4),
                "low": round(min(ratios), 4),
                "high": round(max(ratios), 4),
            }


def _identical(plan: list[Candidate], folder: Path) -> Iterator[tuple[Candidate, int]]:
    """Yield each candidate with the number of its answers that are, token for token, the baseline's."""
    cached: dict[str, dict[str, Any]] = {}

    def answers(name: str) -> dict[str, Any]:
        if name not in cached:
            lines = (folder / "outputs" / f"{name}.jsonl").read_bytes().splitlines()
            records = (orjson.loads(line) for line in lines)
            cached[name] = {record["id"]: record["token_ids"] for record in records if "token_ids" in record}
        return cached[name]

    for candidate in plan:
        mine, theirs = answers(candidate.name), answers(baseline_of(candidate, plan).name)
        yield candidate, sum(theirs.get(key) == tokens for key, tokens in mine.items())
