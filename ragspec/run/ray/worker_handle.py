"""One worker of a run, as the driver sees it: the calls it has in progress, what it said last, and its totals.

    >>> handle = WorkerHandle("worker 1"); handle.begin(actor); handle.load(1000)

A worker that dies is replaced by another actor under the same handle (worker_pool.py).
"""

from __future__ import annotations

import time
from typing import Any

from ragspec.run.ray.messages import End, LoadReport, WorkerLocation, WorkerMessage, pack
from ragspec.stats import WorkerSummary

FIRST_QUEUE = 16  # initial queue_target
MAX_QUEUE = 4096
WAIT_S = 0.5  # longest wait of a worker for a result


class WorkerHandle:
    """One worker slot.

    state: placing, checked, loading, answering, dead, or gone (not replaced). queue_target: how many records should
    wait at the worker.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.summary = WorkerSummary(name=name)
        self.actor: Any = None
        self.place: WorkerLocation | None = None
        self.state = "placing"
        self.refs: dict[str, Any] = {}  # calls in progress, by method
        self._call_args: dict[str, tuple[Any, ...]] = {}  # of the latest call, by method
        self._messages = 0
        self.queue_target = FIRST_QUEUE
        self.waiting = 0
        self.filled = False  # whether the last send met queue_target
        self.sent = 0.0  # when the last new message was sent, or the actor was started
        self.called = 0.0  # when the last call was made
        self.fruitless_deaths = 0  # in a row, without a result between them
        self.died_of = ""  # why the last actor died
        self._return_count = 0
        self._report = LoadReport()  # the current actor's latest

    def begin(self, actor: Any) -> None:
        """Adopt a new actor, and let it check its machine."""
        self.actor, self.place, self.state = actor, None, "placing"
        self.queue_target, self.waiting = FIRST_QUEUE, 0
        self._report = LoadReport()
        self.refs.clear()
        self.sent = time.monotonic()
        self._call("check")

    def load(self, records: int | None) -> None:
        """Load the model and start answering. records: about how many will come to this worker."""
        self.state = "loading"
        self._call("run", records)

    def send(self, tasks: list[Any], end: End | None = None) -> None:
        """Send records and ask for results. end: what ends with these records, if anything."""
        self._messages += 1
        wait_s = 0.0 if end else WAIT_S  # at an end there are no results to come
        self._call("exchange", self._messages, pack(tasks), end, self._return_count, wait_s)
        self._return_count = 0
        self.sent = time.monotonic()

    def request_return(self, most: int) -> None:
        """Ask with the next message for up to `most` records that have not been started."""
        self._return_count = most

    @property
    def host(self) -> str:
        """The machine's name, for messages."""
        return self.place.host if self.place else "a machine that is gone"

    @property
    def node(self) -> str:
        """Ray's node id."""
        return self.place.node if self.place else ""

    @property
    def retrieval(self) -> dict[str, Any] | None:
        """Its search statistics."""
        return self._report.retrieval

    def update(self, message: WorkerMessage) -> None:
        """Update the handle from a message."""
        if self.state == "loading" and message.state == "answering":
            self.state, self.summary.alive = "answering", True
            self.report()
        if message.dry and self.filled:
            self.queue_target = min(MAX_QUEUE, 2 * self.queue_target)
        self.waiting = message.waiting
        if message.lines or message.failures:
            self.fruitless_deaths = 0

    def report(self) -> None:
        """Ask for a LoadReport."""
        self._call("report")

    def resend(self, what: str) -> None:
        """Repeat a call whose message or result was lost. Workers act on each message once."""
        self._call(what, *self._call_args[what])

    def _call(self, what: str, *args: Any) -> None:
        self._call_args[what] = args
        self.called = time.monotonic()
        self.refs[what] = getattr(self.actor, what).remote(*args)

    def take_report(self, report: LoadReport) -> None:
        """Add what a report has measured since the actor's previous one."""
        summary, before = self.summary, self._report
        summary.host = self.host
        summary.load_s += report.load_s - before.load_s
        summary.warmup_s += report.warmup_s - before.warmup_s
        summary.prefill_s = _sum(summary.prefill_s, report.prefill_s, before.prefill_s)
        summary.decode_s = _sum(summary.decode_s, report.decode_s, before.decode_s)
        summary.decode_tokens += report.decode_tokens - before.decode_tokens
        summary.peak_memory_gib = max(summary.peak_memory_gib, report.peak_memory_gib)
        self._report = report


def _sum(total: float | None, now: float | None, before: float | None) -> float | None:
    return total if now is None else (total or 0.0) + now - (before or 0.0)
