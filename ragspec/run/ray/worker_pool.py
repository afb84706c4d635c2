"""The workers of a run, seen from the driver: start, load, exchange messages, replace the dead, shut down.

with WorkerPool(session, scale) as pool:
    pool.load(records)
    for event in pool.poll_events(): ...
"""

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
from ragspec.run.ray.messages import End, LoadReport, WorkerLocation, WorkerMessage, unpack
from ragspec.run.ray.worker import Worker
from ragspec.run.ray.worker_handle import WAIT_S, WorkerHandle
from ragspec.run.session import Session

TRIES = 3  # deaths in a row without a result, after which a worker is not replaced
PLACING_S = 300.0  # a busy machine takes minutes to start a process that imports torch
GATHERING_S = 30.0  # for the other workers, once one has started: a run takes in those that come later
LOADING_TIMEOUTS = 10  # a loading worker may be silent for this many timeouts
CALLS_PER_TIMEOUT = 4  # times that a silent worker is called
RESEND_PAUSE_S = 0.1  # before a lost message is sent again
REPORT_S = 30.0  # for loaded workers to say what they run
SHUTDOWN_S = 30.0  # for workers to free what they hold


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """A message from a worker."""

    handle: WorkerHandle
    message: WorkerMessage


@dataclass(frozen=True, slots=True)
class LostWorker:
    """A worker that is dead or presumed dead. suspicion: how much its records are suspected (leases.py)."""

    handle: WorkerHandle
    why: str
    suspicion: int


class WorkerPool:
    """The `scale.workers` workers of one session. Raises ConfigError if one would answer differently.

    notes: for the user. about: what workers report of their runner. details: also write what an audit and a report
    need.
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
        self._room = 0  # workers that the cluster has room for
        self._versions = {"ragspec": __version__}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._cluster)
            stack.callback(self._kill_all)
            self._place_all()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def active(self) -> int:
        """Return how many workers answer or soon will."""
        return sum(handle.state in ("checked", "loading", "answering") for handle in self.handles)

    def load(self, records: int | None) -> None:
        """Load models: one per machine first, then at most as many at a time as already answer there.

        records: expected for all workers together, None if unknown.
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
        """Wait until all workers answer: a benchmark measures that many. Raises ConfigError and ModelError."""
        if self._room < len(self.handles):
            raise ConfigError(
                f"scale: the cluster has room for {self._room} of {len(self.handles)} workers; a benchmark needs all "
                "of them"
            )
        self._load_all(records)
        deadline = time.monotonic() + REPORT_S
        while any("report" in handle.refs for handle in self.handles) and time.monotonic() < deadline:
            self._replace_lost()
            self._load_all(records)  # again, if one has died

    def _load_all(self, records: int | None) -> None:
        """Load until all workers answer. Raises ConfigError and ModelError."""
        while any(handle.state != "answering" for handle in self.handles):
            self.load(records)
            self._replace_lost()
            for handle in self.handles:
                if handle.state == "gone":
                    raise ModelError(
                        f"{handle.name} died {TRIES} times before it answered, last because: {handle.died_of}; a "
                        "benchmark needs all of its workers"
                    )
            if any(map(_is_overdue, self.handles)):
                raise ConfigError(
                    f"scale: a worker has not started within {PLACING_S:g} s; if other candidates have taken the "
                    "cluster's room, --sequential loads one at a time"
                )

    def poll_events(self) -> list[WorkerOutput | LostWorker]:
        """Return the events of the next WAIT_S seconds; return early if there are any.

        Raises ConfigError and ModelError.
        """
        events: list[WorkerOutput | LostWorker] = []
        calls = {ref: (handle, what) for handle in self.handles for what, ref in handle.refs.items()}
        for ref in self._cluster.ready(list(calls), WAIT_S) if calls else ():
            handle, what = calls[ref]
            if handle.refs.pop(what, None) is None:  # another call of it has failed meanwhile
                continue
            try:
                said = self._cluster.get(ref)
            except self._cluster.unavailable_error():
                time.sleep(RESEND_PAUSE_S)
                handle.resend(what)
            except self._cluster.death_errors() as error:
                why = self._cluster.reason(error)
                if self._cluster.failed_to_start(error):
                    raise ConfigError(f"{handle.name} cannot start: {why}") from None
                events.append(self._declare_dead(handle, why, 0 if self._cluster.node_is_gone(handle.node) else DEATH))
            else:
                events += self._take(handle, what, said)
        if all(handle.state == "gone" or _is_overdue(handle) for handle in self.handles):
            gone = [handle.name for handle in self.handles if handle.state == "gone"]
            died = f"{', '.join(gone)} died, and no other" if gone else "no"
            raise ConfigError(f"scale: {died} worker has started within {PLACING_S:g} s; see `ray status`")
        return events + self._find_silent()

    def _replace_lost(self) -> None:
        """Handle the next events, while no worker has records."""
        for event in self.poll_events():
            if isinstance(event, LostWorker):
                self.replace(event.handle, event.why, made_progress=False)

    def replace(self, handle: WorkerHandle, why: str, *, made_progress: bool) -> None:
        """Start a new actor for a dead worker. made_progress: do not count this death. Raises ModelError."""
        handle.fruitless_deaths = 0 if made_progress else handle.fruitless_deaths + 1
        if handle.fruitless_deaths < TRIES:
            self.place(handle)
            return
        handle.state = "gone"
        self.note(f"{handle.name} is no longer replaced: it died {TRIES} times without finishing a record")
        if all(each.state == "gone" for each in self.handles):
            raise ModelError(f"no worker is left; {handle.name} on {handle.host} died last: {why}")

    def shut_down(self) -> None:
        """End the run at the workers, and collect their last reports."""
        left = self._send_end("run")
        self._wait_for("run", left)
        for handle in left:
            if handle.state == "answering":
                handle.report()
        self._wait_for("report", left)

    def end_pass(self) -> None:
        """Tell workers that the pass ends, once all records are settled.

        Returns once they have replied: the next pass would start late at a worker that still waits for results.
        """
        left = self._send_end("pass")
        while any("exchange" in handle.refs for handle in left):
            self._replace_lost()

    def _send_end(self, end: End) -> list[WorkerHandle]:
        """Tell workers that the pass or run ends; return those workers."""
        left = [handle for handle in self.handles if handle.state == "answering"]
        for handle in left:
            handle.refs.pop("exchange", None)
            handle.send([], end)
        return left

    def note(self, note: str) -> None:
        """Add a note for the user, once."""
        if note not in self.notes:
            self.notes.append(note)

    # -- start -------------------------------------------------------------------------------------

    def _place_all(self) -> None:
        """Start all workers, and check their machines before any model loads."""
        self._share = self._cluster.share(self._gpus)
        self._room = self._cluster.room(*self._share)
        if self._room < len(self.handles):
            self.note(
                f"the cluster has room for {self._room} of {len(self.handles)} workers; others start when it has more"
            )
        for handle in self.handles:
            self.place(handle)
        while self._placed() == 0:
            self._replace_lost()
        deadline = time.monotonic() + GATHERING_S
        while self._placed() < min(self._room, len(self.handles)) and time.monotonic() < deadline:
            self._replace_lost()

    def _placed(self) -> int:
        """Return how many workers have started."""
        return sum(handle.state != "placing" for handle in self.handles)

    def place(self, handle: WorkerHandle) -> None:
        handle.begin(self._cluster.start(Worker, *self._share, self._config, os.getcwd(), self.details))

    def _accept(self, handle: WorkerHandle, place: WorkerLocation) -> None:
        """Accept a worker that would answer as the others do. Raises ConfigError otherwise."""
        if place.problem:
            raise ConfigError(f"{handle.name} on {place.host}: {place.problem}")
        if place.identity != self._identity:
            keys = ", ".join(key for key, value in self._identity.items() if place.identity.get(key) != value)
            raise ConfigError(
                f"{handle.name} on {place.host} would give different answers from this machine: {keys} differ"
            )
        for name, version in place.versions.items():
            known = self._versions.setdefault(name, version)
            if name == "ragspec" and version != known:
                raise ConfigError(f"{handle.name} on {place.host} has ragspec {version}; this machine has {known}")
            if version != known:
                self.note(f"{place.host} has {name} {version}, others {known}: answers may differ")
        handle.place, handle.state = place, "checked"

    # -- replies -----------------------------------------------------------------------------------

    def _take(self, handle: WorkerHandle, what: str, said: Any) -> list[WorkerOutput | LostWorker]:
        if what == "check":
            self._accept(handle, said)
        elif what == "report":
            self._take_report(handle, said)
        elif what == "exchange":
            message = unpack(said)
            handle.update(message)
            return [WorkerOutput(handle, message)]
        elif said is not None:  # the error that ended run()
            if not any(each.summary.alive for each in self.handles):
                raise type(said)(f"{handle.name} on {handle.host}: {said}")
            return [self._declare_dead(handle, str(said), DEATH)]
        return []

    def _take_report(self, handle: WorkerHandle, report: LoadReport) -> None:
        handle.take_report(report)
        self.method = report.method
        self.about |= {key: report.about[key] for key in ("runner", "versions") if key in report.about}
        for note in report.notes:
            self.note(note)

    # -- deaths ------------------------------------------------------------------------------------

    def _find_silent(self) -> list[WorkerOutput | LostWorker]:
        """Return the workers that have been silent for too long; they are presumed dead.

        Until then they are called again, since messages may get lost.
        """
        now, patience, found = time.monotonic(), self.scale.timeout_s, list[WorkerOutput | LostWorker]()
        for handle in self.handles:
            most = {"answering": patience, "loading": LOADING_TIMEOUTS * patience}.get(handle.state)
            if most is not None and "exchange" in handle.refs and now - handle.sent > most:
                found.append(self._declare_dead(handle, f"it said nothing for {most:g} s", SILENCE))
            elif most is not None and "exchange" in handle.refs and now - handle.called > most / CALLS_PER_TIMEOUT:
                handle.resend("exchange")
        return found

    def _declare_dead(self, handle: WorkerHandle, why: str, suspicion: int) -> LostWorker:
        self._kill(handle)
        handle.state, handle.waiting, handle.died_of = "dead", 0, why
        handle.summary.deaths += 1
        self.note(f"{handle.name} on {handle.host} died: {why}")
        return LostWorker(handle, why, suspicion)

    def _wait_for(self, what: str, handles: list[WorkerHandle]) -> None:
        deadline = time.monotonic() + SHUTDOWN_S
        while any(what in handle.refs for handle in handles) and time.monotonic() < deadline:
            self.poll_events()

    def _kill(self, handle: WorkerHandle) -> None:
        handle.refs.clear()
        if handle.actor is not None:
            self._cluster.kill(handle.actor)
            handle.actor, handle.summary.alive = None, False

    def _kill_all(self) -> None:
        for handle in self.handles:
            self._kill(handle)


def _is_overdue(handle: WorkerHandle) -> bool:
    """Return whether a worker should have started long ago."""
    return handle.state == "placing" and time.monotonic() - handle.sent > PLACING_S
