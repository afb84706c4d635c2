"""The driver's side of one worker: its actor, what it has said, and what it did in all its lives."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Self

from ragspec import __version__
from ragspec.config.sections import ScaleConfig
from ragspec.errors import ConfigError, ModelError
from ragspec.run.ray.cluster import Cluster
from ragspec.run.ray.leases import DEATH, SILENCE
from ragspec.run.ray.messages import End, LoadReport, WorkerLocation, WorkerMessage, pack, unpack
from ragspec.run.ray.worker import Worker
from ragspec.run.session import Session
from ragspec.stats import WorkerSummary

FIRST = 16  # records that wait at a worker at first
MOST = 4096
WAIT_S = 0.5  # that a worker waits for something to say


class WorkerHandle:
    """One of the `workers` of a run. A worker that dies is replaced: another actor in the same hand.

    state: placing, checked, loading, answering, dead, gone (for good). wants: records that should wait at it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.summary = WorkerSummary(name=name)
        self.actor: Any = None
        self.place: WorkerLocation | None = None
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
        self._report = LoadReport()  # the last of its actor's

    def begin(self, actor: Any) -> None:
        """Take a new actor, and let it look around."""
        self.actor, self.place, self.state = actor, None, "placing"
        self.wants, self.waiting = FIRST, 0
        self._report = LoadReport()
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

    def hear(self, word: WorkerMessage) -> None:
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

    def take_report(self, report: LoadReport) -> None:
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


# -- the workers of a run: placed, looked at, loaded, listened to, replaced when they die, and let go -----------------
#
# with WorkerPool(session, scale) as crew:
#     crew.load(records)
#     for event in crew.listen(): ...


TRIES = 3  # deaths in a row without a line, after which a worker is not replaced
PLACING_S = 300.0  # a busy machine takes minutes to start a process that imports torch
LOADING = 10  # times the timeout, while a model loads
ASKED = 4  # times in that time
PAUSE_S = 0.1  # before a message that was lost is sent again
LEAVING_S = 30.0  # for workers to free what they hold


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """What a worker has said."""

    handle: WorkerHandle
    word: WorkerMessage


@dataclass(frozen=True, slots=True)
class LostWorker:
    """A worker that is dead, or taken for dead. suspicion: that what it had is the reason (leases.py)."""

    handle: WorkerHandle
    why: str
    suspicion: int


class WorkerPool:
    """`scale.workers` workers of one session. Raises ConfigError where one could not answer as the others do.

    notes: what the user should know. about: what workers say of their runner. details: their lines also say what an
    audit and a report need.
    """

    def __init__(self, session: Session, scale: ScaleConfig, *, details: bool = False) -> None:
        self.handles = [WorkerHandle(f"worker {number}") for number in range(1, scale.workers + 1)]
        self.notes: list[str] = []
        self.about: dict[str, Any] = {}
        self.method = session.runner.method
        self.scale = scale
        self.details = details
        self._cluster = Cluster(scale)
        own = session.config.of_workers()
        self._config, self._identity = own.as_given(), replace(session, config=own).identity()
        self._gpus = own.devices()
        self._share = (1.0, 0.0)  # CPUs and GPUs of a worker
        self._versions = {"ragspec": __version__}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._cluster)
            stack.callback(self._dismiss)
            self._begin()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def able(self) -> int:
        """Return how many workers answer, or soon will."""
        return sum(handle.state in ("checked", "loading", "answering") for handle in self.handles)

    def load(self, records: int | None) -> None:
        """Let models load: one on each machine first, then as many at a time as have loaded there.

        records: how many will come to all workers, None if nobody knows.
        """
        each = None if records is None else -(-records // len(self.handles))
        for handle in self.handles:
            if handle.state == "checked":
                there = [other.state for other in self.handles if other.node == handle.node]
                if there.count("loading") < max(1, there.count("answering")):
                    handle.load(each)
            if handle.state == "loading" and "exchange" not in handle.refs:
                handle.send([])

    def start_workers(self, records: int | None) -> None:
        """Wait until all workers that have a machine are loaded. Raises ConfigError and ModelError."""
        while any(handle.state in ("checked", "loading") for handle in self.handles):
            self.load(records)
            for event in self.poll_events():
                if isinstance(event, LostWorker):
                    self.replace(event.handle, event.why, fruitful=False)

    def poll_events(self, wait_s: float = WAIT_S) -> list[WorkerOutput | LostWorker]:
        """Return what has happened; wait for it, up to `wait_s` seconds. Raises ConfigError and ModelError."""
        events: list[WorkerOutput | LostWorker] = []
        calls = {ref: (handle, what) for handle in self.handles for what, ref in handle.refs.items()}
        for ref in self._cluster.ready(list(calls), wait_s) if calls else ():
            handle, what = calls[ref]
            if handle.refs.pop(what, None) is None:  # it died of another call
                continue
            try:
                said = self._cluster.get(ref)
            except self._cluster.unheard():
                time.sleep(PAUSE_S)
                handle.repeat(what)
            except self._cluster.lost() as error:
                why = self._cluster.reason(error)
                if self._cluster.unfit(error):
                    raise ConfigError(f"{handle.name} cannot start: {why}") from None
                events.append(self._lose(handle, why, 0 if self._cluster.gone(handle.node) else DEATH))
            else:
                events += self._take(handle, what, said)
        return events + self._find_silent()

    def replace(self, handle: WorkerHandle, why: str, *, fruitful: bool) -> None:
        """Place another worker in a dead one's stead. fruitful: it died, but not in vain. Raises ModelError."""
        handle.fruitless = 0 if fruitful else handle.fruitless + 1
        if handle.fruitless < TRIES:
            self.place(handle)
            return
        handle.state = "gone"
        self.note(f"{handle.name} is not replaced any more: it died {TRIES} times without finishing a record")
        if all(each.state == "gone" for each in self.handles):
            raise ModelError(f"no worker is left; {handle.name} on {handle.host} died last: {why}")

    def end(self) -> None:
        """Let workers free what they hold, and tell what they know."""
        left = self.rest("run")
        self._wait_for("run", left)
        for handle in left:
            if handle.state == "answering":
                handle.report()
        self._wait_for("report", left)

    def rest(self, end: End = "pass") -> list[WorkerHandle]:
        """Tell workers, which have answered all that they had, that it was the last of a pass; return them."""
        left = [handle for handle in self.handles if handle.state == "answering"]
        for handle in left:
            handle.refs.pop("exchange", None)
            handle.send([], end)
        return left

    def note(self, note: str) -> None:
        """Keep what the user should know, once."""
        if note not in self.notes:
            self.notes.append(note)

    # -- how workers come ---------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Place workers, and look at the machines that have room for them before a model loads anywhere."""
        self._share = self._cluster.share(self._gpus)
        room = self._cluster.room(*self._share)
        if room < len(self.handles):
            self.note(f"the cluster has room for {room} of {len(self.handles)} workers; others start when it has more")
        for handle in self.handles:
            self.place(handle)
        expected = min(room, len(self.handles))
        deadline = time.monotonic() + PLACING_S
        while sum(handle.state != "placing" for handle in self.handles) < expected and time.monotonic() < deadline:
            for event in self.poll_events():
                if isinstance(event, LostWorker):
                    self.replace(event.handle, event.why, fruitful=False)
        if all(handle.state == "placing" for handle in self.handles):
            raise ConfigError(f"scale: no worker has started within {PLACING_S:g} s, though the cluster has room")

    def place(self, handle: WorkerHandle) -> None:
        handle.begin(self._cluster.start(Worker, *self._share, self._config, os.getcwd(), self.details))

    def _admit(self, handle: WorkerHandle, place: WorkerLocation) -> None:
        """Let a worker take part, if it would answer as the others do. Raises ConfigError if it cannot."""
        if place.problem:
            raise ConfigError(f"{handle.name} on {place.host}: {place.problem}")
        if place.identity != self._identity:
            keys = ", ".join(key for key, value in self._identity.items() if place.identity.get(key) != value)
            raise ConfigError(
                f"{handle.name} on {place.host} would answer differently: {keys} are not those of this machine"
            )
        for name, version in place.versions.items():
            known = self._versions.setdefault(name, version)
            if name == "ragspec" and version != known:
                raise ConfigError(f"{handle.name} on {place.host} has ragspec {version}; here is {known}")
            if version != known:
                self.note(f"{place.host} has {name} {version}, others {known}: answers may differ")
        handle.place, handle.state = place, "checked"

    # -- what they say ------------------------------------------------------------------------------------------------

    def _take(self, handle: WorkerHandle, what: str, said: Any) -> list[WorkerOutput | LostWorker]:
        if what == "check":
            self._admit(handle, said)
        elif what == "report":
            self._take_report(handle, said)
        elif what == "exchange":
            word = unpack(said)
            handle.hear(word)
            return [WorkerOutput(handle, word)]
        elif said is not None:  # of run: why it ended
            if not any(each.summary.alive for each in self.handles):
                raise type(said)(f"{handle.name} on {handle.host}: {said}")
            return [self._lose(handle, str(said), DEATH)]
        return []

    def _take_report(self, handle: WorkerHandle, report: LoadReport) -> None:
        handle.take_report(report)
        self.method = report.method
        self.about |= {key: report.about[key] for key in ("runner", "versions") if key in report.about}
        for note in report.notes:
            self.note(note)

    # -- how they go --------------------------------------------------------------------------------------------------

    def _find_silent(self) -> list[WorkerOutput | LostWorker]:
        """Return the workers that have said nothing for too long: they are taken for dead.

        Before that they are asked again, as messages may get lost.
        """
        now, patience, found = time.monotonic(), self.scale.timeout_s, list[WorkerOutput | LostWorker]()
        for handle in self.handles:
            most = {"answering": patience, "loading": LOADING * patience}.get(handle.state)
            if most is not None and "exchange" in handle.refs and now - handle.sent > most:
                found.append(self._lose(handle, f"it said nothing for {most:g} s", SILENCE))
            elif most is not None and "exchange" in handle.refs and now - handle.called > most / ASKED:
                handle.repeat("exchange")
        return found

    def _lose(self, handle: WorkerHandle, why: str, suspicion: int) -> LostWorker:
        self._leave(handle)
        handle.state = "dead"
        handle.summary.deaths += 1
        self.note(f"{handle.name} on {handle.host} died: {why}")
        return LostWorker(handle, why, suspicion)

    def _wait_for(self, what: str, handles: list[WorkerHandle]) -> None:
        deadline = time.monotonic() + LEAVING_S
        while any(what in handle.refs for handle in handles) and time.monotonic() < deadline:
            self.poll_events()

    def _leave(self, handle: WorkerHandle) -> None:
        handle.refs.clear()
        if handle.actor is not None:
            self._cluster.kill(handle.actor)
            handle.actor, handle.summary.alive = None, False

    def _dismiss(self) -> None:
        for handle in self.handles:
            self._leave(handle)
