"""The messages between driver and workers, and the queues on the worker's side.

By default pickle reads a dataclass's state through Python code, which would be most of a message's cost; here each
dataclass is reduced to its class and its fields.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from io import BytesIO
from operator import attrgetter
from threading import Condition
from typing import Any, Literal, Self

from ragspec.outputs.answers import FailedRecord
from ragspec.records import Passage, Record
from ragspec.run.answering import RecordResult, RecordTask
from ragspec.stats import SpecStats

Reduction = Callable[[Any], tuple[type, tuple[Any, ...]]]
NESTED = 10_000  # calls that suffice to pickle whatever JSON is read: it has at most 1,024 levels


@dataclass(slots=True)
class WorkerLocation:
    """Where a worker runs and what is installed there. node: Ray's node id. problem: why it cannot work, "" if it can.

    identity: what its answers depend on; must equal the driver's.
    """

    host: str
    node: str
    python: str
    versions: dict[str, str]
    problem: str = ""
    identity: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class WorkerMessage:
    """A worker's reply to an exchange.

    waiting: records its runner has not taken. dry: whether the runner ran out of records. returned: line indexes of
    records it gives back. state: loading, answering or ended.
    """

    lines: list[RecordResult]
    failures: list[tuple[int, FailedRecord]]
    waiting: int
    dry: bool
    returned: list[int]
    state: str


@dataclass(slots=True)
class LoadReport:
    """A worker's own measurements, once its model is loaded."""

    method: str = "none"
    load_s: float = 0.0
    warmup_s: float = 0.0
    prefill_s: float | None = None
    decode_s: float | None = None
    decode_tokens: int = 0
    peak_memory_gib: float = 0.0
    retrieval: dict[str, Any] | None = None
    about: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def pack(message: Any) -> bytes:
    """Return a message of builtin types and the dataclasses below as bytes."""
    try:
        return _packed(message)
    except RecursionError:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(max(limit, NESTED))
        try:
            return _packed(message)
        finally:
            sys.setrecursionlimit(limit)


def _packed(message: Any) -> bytes:
    found = BytesIO()
    _Pickler(found, pickle.HIGHEST_PROTOCOL).dump(message)
    return found.getvalue()


def unpack(packed: bytes) -> Any:
    """Return the message that was packed."""
    return pickle.loads(packed)  # noqa: S301 - as Ray itself does; both ends are ragspec


def _by_fields(kind: type) -> Reduction:
    values = attrgetter(*(each.name for each in fields(kind)))
    return lambda found: (kind, values(found))


class _Pickler(pickle.Pickler):
    dispatch_table = {
        kind: _by_fields(kind)
        for kind in (RecordTask, Record, Passage, RecordResult, SpecStats, FailedRecord, WorkerMessage)
    }


# -- queues ----------------------------------------------------------------------------------------


End = Literal["pass", "run"]
LINGER_S = 0.02  # a first line waits this long for others, so that lines travel together


class Mailbox:
    """Records on their way to the runner (a Pollable, see inputs/feed.py), added while it works.

    over: whether the last pass has ended; if not, the mailbox may be iterated again for the next pass.
    """

    def __init__(self) -> None:
        self.over = False
        self._waiting: deque[RecordTask | End] = deque()
        self._changed = Condition()
        self._dry = False  # whether the runner found nothing since the last look

    def add(self, tasks: list[RecordTask], end: End | None = None) -> None:
        """Add records. end: what ends with them, if anything."""
        with self._changed:
            self._waiting.extend(tasks)
            if end:
                self._waiting.append(end)
            self._changed.notify()

    def take_back(self, most: int) -> list[int]:
        """Remove the last `most` records that the runner has not taken; return their line indexes."""
        found: list[int] = []
        with self._changed:
            while len(found) < most and self._waiting and not isinstance(last := self._waiting[-1], str):
                self._waiting.pop()
                found.append(last.index)
        return found

    def look(self) -> tuple[int, bool]:
        """Return how many records wait, and whether the runner found none since the last call."""
        with self._changed:
            dry, self._dry = self._dry, False
            return sum(not isinstance(each, str) for each in self._waiting), dry

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RecordTask:
        with self._changed:
            while not self._waiting:
                self._dry = True
                self._changed.wait()
            return self._next()

    def poll(self) -> RecordTask | None:
        """Return the next record, None if there is none yet. Raises StopIteration at the end of a pass."""
        with self._changed:
            if self._waiting:
                return self._next()
            self._dry = True
            return None

    def _next(self) -> RecordTask:
        found = self._waiting.popleft()
        if isinstance(found, str):
            self.over = found == "run"
            raise StopIteration
        return found


class ResultBuffer:
    """Lines and failures on their way to the driver: a ResultSink (run/answering.py)."""

    def __init__(self) -> None:
        self._lines: list[RecordResult] = []
        self._failures: list[tuple[int, FailedRecord]] = []
        self._closed = False
        self._changed = Condition()

    def put(self, result: RecordResult) -> None:
        """Add a line."""
        with self._changed:
            self._lines.append(result)
            self._changed.notify()

    def fail(self, index: int, failed: FailedRecord) -> None:
        """Add a failure."""
        with self._changed:
            self._failures.append((index, failed))
            self._changed.notify()

    def close(self) -> None:
        """Mark the end, so that take() returns at once."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self, wait_s: float) -> tuple[list[RecordResult], list[tuple[int, FailedRecord]]]:
        """Remove and return what is there; wait up to `wait_s` seconds for something."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: self._closed or self._lines or self._failures, wait_s)
            closed = self._closed
        if arrived and not closed:
            time.sleep(min(LINGER_S, wait_s))
        with self._changed:
            taken = self._lines, self._failures
            self._lines, self._failures = [], []
            return taken
