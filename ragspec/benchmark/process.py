"""The process of one candidate, seen from the benchmark, and the messages between them (worker.py is the other side).

Each message is one JSON line. In: a Task, then "go" per pass, or "details" with or without a profile.
Out: {"value": Ready, Pass or Details}, or {"error", "exit_code"}.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO, Any, TypeVar

from rich.console import Console

from ragspec.benchmark.plan import Candidate
from ragspec.benchmark.results import Details, Pass, parse
from ragspec.config.redaction import Redactor
from ragspec.errors import ConfigError, ModelError
from ragspec.host.files import open_private
from ragspec.json_text import dumps, loads

GO, DETAILS, PROFILE = b"go", b"details", b"details with a profile"


@dataclass(frozen=True, slots=True)
class Task:
    """What a process has to run. config: as the user wrote it, secrets in the clear."""

    name: str
    config: dict[str, Any]
    limit: int | None
    output: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Reported once the model is loaded. about: as in a stats file. remembers: see Runner.remembers."""

    about: dict[str, Any]
    load_s: float
    warmup_s: float
    notes: tuple[str, ...]
    remembers: bool


# -- worker ----------------------------------------------------------------------------------------


T = TypeVar("T")
LOG_S = 5.0  # wait for the last log lines, if a child process keeps stderr open


class Worker:
    """Loads the candidate's model; each measure() is one pass over the input."""

    def __init__(self, candidate: Candidate, folder: Path, limit: int | None) -> None:
        self.candidate = candidate
        self.answers = answers_of(candidate, folder)
        self.log = folder / "logs" / f"{candidate.name}.log"
        self.answers.parent.mkdir(parents=True, exist_ok=True)
        self._limit = limit
        self._passes = 0
        self._start()

    def _start(self) -> None:
        log = open_private(self.log, append=bool(self._passes))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ragspec.benchmark.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._process.stderr is not None
        self._copying = Thread(
            target=copy_log, args=(self._process.stderr, log, self.candidate.config.redactor()), daemon=True
        )
        self._copying.start()
        config = self.candidate.config.as_given()  # passed on stdin, so that no file contains its secrets
        self._send(dumps(Task(self.candidate.name, config, self._limit, str(self.answers))))
        self.ready = self._receive(Ready)

    def measure(self, restart: bool = False) -> Pass:
        """Return the figures of one pass over the input.

        The process is restarted first if `restart` is set, or if the last pass left drafts behind.
        """
        if self._passes and (restart or self.ready.remembers):
            self.close()
            self._start()
        self._passes += 1
        self._send(GO)
        return self._receive(Pass)

    def details(self, profile: bool = False) -> Details:
        """Return what is not timed: sample answers, the cost of a step, the machine's roofline.

        profile: also profile one more pass.
        """
        self._send(PROFILE if profile else DETAILS)
        return self._receive(Details)

    def close(self) -> None:
        """Stop the process."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._copying.join(LOG_S)

    def _send(self, line: bytes) -> None:
        stdin: IO[bytes] | None = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(line + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def _receive(self, kind: type[T]) -> T:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        message = loads(line)
        if "error" in message:
            refused = ConfigError if message["exit_code"] == ConfigError.exit_code else ModelError
            name = f"{self.candidate.name}: "  # errors of the config have it already
            raise refused(f"{name}{message['error'].removeprefix(name)}")
        return parse(kind, message["value"])

    def _died(self) -> ModelError:
        self._copying.join(LOG_S)
        last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
        return ModelError(f"{self.candidate.name}: its process ended ({''.join(last)[:200]}); see {self.log}")


def copy_log(source: IO[bytes], log: IO[bytes], redactor: Redactor) -> None:
    """Copy a process's stderr to its log, with the config's secrets redacted."""
    with source, log:
        for line in source:
            log.write(redactor(line.decode(errors="replace")).encode())
            log.flush()


def answers_of(candidate: Candidate, folder: Path) -> Path:
    """Return the path of the candidate's output."""
    return folder / "outputs" / f"{candidate.name}.jsonl"


@contextmanager
def open_worker(candidate: Candidate, folder: Path, limit: int | None, console: Console) -> Iterator[Worker]:
    """Start a worker; stop it on exit."""
    console.print(f"{candidate.name}: loading ...", markup=False)
    worker = Worker(candidate, folder, limit)
    try:
        yield worker
    finally:
        worker.close()
