"""The process of one candidate, seen from outside (worker.py is the inside)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import orjson
from rich.console import Console

from ragspec.benchmark.plan import Candidate
from ragspec.errors import ConfigError, ModelError


class Worker:
    """Loads the candidate's model; then a pass over the input per measure()."""

    def __init__(self, candidate: Candidate, folder: Path, limit: int | None) -> None:
        self.candidate = candidate
        self.answers = answers_of(candidate, folder)
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

    def details(self) -> dict[str, Any]:
        """Return what is not timed: answers token by token, what a step costs, what the machine could do."""
        self._send(b"details")
        details: dict[str, Any] = self._receive()["details"]
        return details

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


def answers_of(candidate: Candidate, folder: Path) -> Path:
    """Return where the candidate's answers are."""
    return folder / "outputs" / f"{candidate.name}.jsonl"


@contextmanager
def open_worker(candidate: Candidate, folder: Path, limit: int | None, console: Console) -> Iterator[Worker]:
    """Start a worker, and end it afterwards."""
    console.print(f"{candidate.name}: loading ...", markup=False)
    worker = Worker(candidate, folder, limit)
    try:
        yield worker
    finally:
        worker.close()
