"""The driver's side of one worker: its actor, what it has said, and what it did in all its lives."""

from __future__ import annotations

import time
from typing import Any

from ragspec.run.ray.inbox import End
from ragspec.run.ray.messages import Place, Report, Word, pack
from ragspec.stats import WorkerSummary

FIRST = 16  # records that wait at a worker at first
MOST = 4096
WAIT_S = 0.5  # that a worker waits for something to say


class Hand:
    """One of the `workers` of a run. A worker that dies is replaced: another actor in the same hand.

    state: placing, checked, loading, answering, dead, gone (for good). wants: records that should wait at it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.summary = WorkerSummary(name=name)
        self.actor: Any = None
        self.place: Place | None = None
        self.state = "placing"
        self.refs: dict[str, Any] = {}  # calls under way, by method
        self._said: dict[str, tuple[Any, ...]] = {}  # what they were called with
        self._messages = 0
        self.wants = FIRST
        self.waiting = 0
        self.got_all = False  # whether it got as many records as it wanted, the last time
        self.sent = self.called = 0.0  # when it was last asked something new; and something at all
        self.fruitless = 0  # deaths in a row without a line between them
        self._gives_up = 0
        self._report = Report()  # the last of its actor's

    def begin(self, actor: Any) -> None:
        """Take a new actor, and let it look around."""
        self.actor, self.place, self.state = actor, None, "placing"
        self.wants, self.waiting = FIRST, 0
        self._report = Report()
        self.refs.clear()
        self._call("check")

    def load(self, records: int | None) -> None:
        """Let it load the model, and answer. records: how many will come to it, about."""
        self.state = "loading"
        self._call("run", records)

    def send(self, asked: list[Any], end: End | None = None) -> None:
        """Give it records, and ask what has become of others. end: of what these are the last."""
        self._messages += 1
        self._call("exchange", self._messages, pack(asked), end, self._gives_up, WAIT_S)
        self._gives_up = 0
        self.sent = time.monotonic()

    def ask_back(self, most: int) -> None:
        """Ask with the next message for records that it has not begun."""
        self._gives_up = most

    @property
    def host(self) -> str:
        """The machine, for messages."""
        return self.place.host if self.place else "a machine that is gone"

    @property
    def node(self) -> str:
        """What Ray calls it."""
        return self.place.node if self.place else ""

    @property
    def retrieval(self) -> dict[str, Any] | None:
        """What its searches took."""
        return self._report.retrieval

    def hear(self, word: Word) -> None:
        """Take in what it says."""
        if self.state == "loading" and word.state == "answering":
            self.state, self.summary.alive = "answering", True
            self.report()
        if word.dry and self.got_all:
            self.wants = min(MOST, 2 * self.wants)
        self.waiting = word.waiting
        if word.lines or word.failures:
            self.fruitless = 0

    def report(self) -> None:
        """Ask it to tell of itself."""
        self._call("report")

    def repeat(self, what: str) -> None:
        """Call a method again as before: the message was lost, or its answer. Whoever does know, does it once."""
        self._call(what, *self._said[what])

    def _call(self, what: str, *args: Any) -> None:
        self._said[what] = args
        self.called = time.monotonic()
        self.refs[what] = getattr(self.actor, what).remote(*args)

    def take_report(self, report: Report) -> None:
        """Take in what it tells of itself; the last is the one that counts."""
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
