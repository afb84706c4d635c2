"""A run in this process: rows -> what is asked -> answers -> output lines, all of it pulled by the runner."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ragspec.inputs.base import Source
from ragspec.inputs.feed import Feed
from ragspec.outputs.answers import Native
from ragspec.outputs.journal import Journal
from ragspec.outputs.shapes import shape_of
from ragspec.records import Request
from ragspec.run.answering import Answering
from ragspec.run.desk import Desk, Report
from ragspec.run.intake import Intake
from ragspec.run.ordering import Say, ordering_of, unheard
from ragspec.run.provenance import peak_memory_gib
from ragspec.run.session import Session

AHEAD = 256  # requests that are looked at before the first: more than any batch


class LocalPass:
    """One pass of a session over a source, in this process. limit: read only this many rows. total: how many will come.

    report: called as records finish. say: is told what `prompt.order` saves, before anything is answered. keep_details:
    also write what an audit and a report need.
    """

    def __init__(
        self,
        session: Session,
        source: Source,
        journal: Journal,
        *,
        limit: int | None = None,
        total: int | None = None,
        report: Report | None = None,
        say: Say = unheard,
        keep_details: bool = False,
    ) -> None:
        shape = Native() if keep_details else shape_of(session.config)
        self._session = session
        self._runner = session.runner
        self._desk = Desk(session, source, journal, shape, total, report)
        self._intake = Intake(session.config, self._desk, source)
        self._ordering = ordering_of(session, source, self._intake, limit, say)
        self._answering = Answering(session, shape, self._desk, details=keep_details)
        self._none = f"{session.config.input}: contains no records; nothing to answer"
        self.summary = self._desk.summary

    def answer(self) -> None:
        """Load the model if there is anything to answer, and answer it."""
        with self._reading() as requests:
            first = next(requests, None)  # errors before it are written without a model
            if first is None:
                if not (self.summary.failed or self.summary.skipped):
                    self.summary.notes.append(self._none)
                return
            requests.put_back([first])
            self._load_and_stream(requests)
        self.summary.notes += self._intake.notes() + self._desk.notes()
        self.summary.notes += self._ordering.notes() + self._answering.notes()

    def about(self) -> dict[str, Any]:
        """Return what identifies the run in its statistics."""
        return self._session.about()

    def _load_and_stream(self, requests: Feed[Request]) -> None:
        summary, runner = self.summary, self._runner
        started = time.perf_counter()
        with runner:
            summary.load_s = time.perf_counter() - started
            started = time.perf_counter()
            runner.warm_up(self._to_come(requests))
            summary.warmup_s = time.perf_counter() - started
            for _ in self._outcomes(requests):
                pass

    def _to_come(self, requests: Feed[Request]) -> int | None:
        """Return how many requests will come, None if nobody knows: a warm-up must not take longer than they do."""
        known = self._desk.to_come()
        if known is not None and known > AHEAD:
            return known
        head = requests.take(AHEAD, wait=False)
        all_there = requests.over
        requests.put_back(head)
        return len(head) if all_there else known

    def stream(self) -> Iterator[None]:
        """Answer the input with a runner that is loaded, and time it; yield after each record that it answered."""
        with self._reading() as requests:
            yield from self._outcomes(requests)

    def _outcomes(self, requests: Feed[Request]) -> Iterator[None]:
        summary, runner = self.summary, self._runner
        prefill_s, decode_s, decode_tokens = runner.prefill_s, runner.decode_s, runner.decode_tokens
        started = time.perf_counter()
        try:
            for _ in self._answering.outcomes(requests):
                summary.generate_s = time.perf_counter() - started
                yield
        finally:
            summary.generate_s = time.perf_counter() - started
            summary.method = runner.method  # a runner may have chosen another one while it loaded
            summary.prefill_s = _since(runner.prefill_s, prefill_s)
            summary.decode_s = _since(runner.decode_s, decode_s)
            summary.decode_tokens = runner.decode_tokens - decode_tokens
            summary.peak_memory_gib = peak_memory_gib()

    @contextmanager
    def _reading(self) -> Iterator[Feed[Request]]:
        """Yield the input as requests; what is read and searched ahead of them ends with this, however it ends."""
        requests = self._answering.requests(self._ordering.asked())
        try:
            yield requests
        finally:
            requests.close()
            self.summary.retrieval = self._ordering.retrieval() or self._answering.retrieval()


def _since(now: float | None, before: float | None) -> float | None:
    return None if now is None or before is None else now - before
