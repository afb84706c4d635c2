"""A run in this process: rows -> requests -> a loaded runner -> output lines, all of it pulled by the runner.

Everything is a generator, so memory does not grow with the input.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

from ragspec.errors import RecordError
from ragspec.inputs.base import Row, Source
from ragspec.inputs.feed import Feed, Spread
from ragspec.inputs.record import line_id
from ragspec.inputs.values import record_id
from ragspec.outputs.answers import Failed, Flight, Native, distinct
from ragspec.outputs.journal import Journal
from ragspec.outputs.ledger import fingerprint
from ragspec.outputs.shapes import shape_of
from ragspec.records import Failure, Generation, Request
from ragspec.retrieval.stage import Stage
from ragspec.run.gathering import Gathering
from ragspec.run.provenance import peak_memory_gib
from ragspec.run.reading import Reader
from ragspec.run.session import Session
from ragspec.stats import RunSummary

Report = Callable[[RunSummary, int | None], None]  # called after each record with the totals and the input's lines


class LocalPass:
    """One pass of a session over a source, in this process. limit: read only this many rows. total: how many will come.

    report: called as records finish. keep_details: also write what an audit and a report need.
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
        keep_details: bool = False,
    ) -> None:
        config = session.config
        self.summary = RunSummary(method=session.runner.method)
        self._config = config
        self._source = source
        self._runner = session.runner
        self._journal = journal
        self._ledger = journal.ledger
        self._limit = limit
        self._report = report
        self._keep_details = keep_details
        self._stage = Stage(session.retriever, self._unfinished) if session.retriever else None
        self._total = total
        self._veil = config.veil()
        self._shape = Native() if keep_details else shape_of(config)
        self._gathering = Gathering()
        self._reader = Reader(session)
        self._changed = 0

    def answer(self) -> None:
        """Load the model if there is anything to answer, and answer it."""
        with self._reading() as requests:
            first = next(requests, None)  # errors before it are written without a model
            if first is None:
                if not (self.summary.failed or self.summary.skipped):
                    self.summary.notes.append(f"{self._config.input}: contains no records; nothing to answer")
                return
            requests.put_back([first])
            self._load_and_stream(requests)
        if self._changed:
            self.summary.notes.append(
                f"{self._changed} records changed since they were answered: they are answered again, "
                "and their old lines stay in the output above the new ones"
            )
        self.summary.notes += self._reader.notes()

    def _load_and_stream(self, requests: Feed[Request]) -> None:
        summary, runner = self.summary, self._runner
        started = time.perf_counter()
        with runner:
            summary.load_s = time.perf_counter() - started
            started = time.perf_counter()
            runner.warm_up(self._total)
            summary.warmup_s = time.perf_counter() - started
            for _ in self._outcomes(requests):
                pass

    def stream(self) -> Iterator[None]:
        """Answer the input with a runner that is loaded, and time it; yield after each record that it answered."""
        with self._reading() as requests:
            yield from self._outcomes(requests)

    def _outcomes(self, requests: Feed[Request]) -> Iterator[None]:
        summary, runner = self.summary, self._runner
        prefill_s, decode_s, decode_tokens = runner.prefill_s, runner.decode_s, runner.decode_tokens
        started = time.perf_counter()
        try:
            for outcome in runner.generate(requests):
                self._finish(outcome)
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
        requests = self._requests()
        try:
            yield requests
        finally:
            requests.close()
            if self._stage is not None:
                self.summary.retrieval = self._stage.to_json()

    def _requests(self) -> Feed[Request]:
        """Return the rows as requests. A row that cannot be one becomes an error line on the way."""
        rows: Feed[Row] = Feed(self._source, self._limit)
        if self._stage is not None:
            rows = Feed(self._stage.fill(rows))
        numbers = count()
        return Feed(Spread(rows, lambda row: self._requests_of(next(numbers), row)))

    def _requests_of(self, index: int, row: Row) -> list[Request]:
        """Return the requests that a row is; none if it needs no answer any more, or can have none."""
        key = None
        try:
            record = self._reader.record(row)
            key = fingerprint(row, record.id)
            if key in self._ledger:
                self._skip(index, key)
                return []
            self._changed += self._ledger.resumed > 0 and self._ledger.answered(record.id)
            return self._gathering.requests(self._reader.flight(index, record, key))
        except RecordError as error:
            key = key or fingerprint(row, None)
            if key in self._ledger:
                self._skip(index, key)
            else:
                message = f"{self._source.where(row.number)}: {error}"
                self._fail(index, Failed(line_id(row), key, "RecordError", message, row.number))
            return []

    def _unfinished(self, row: Row) -> bool:
        try:
            return fingerprint(row, record_id(row.value.get("id"), row.number)) not in self._ledger
        except RecordError:
            return False

    def _skip(self, index: int, key: str) -> None:
        self.summary.skipped += 1
        self.summary.failed_before += self._ledger.failed(key)
        self._journal.skip(index, key)
        self._tell()

    def _fail(self, index: int, failed: Failed) -> None:
        line = self._shape.error(replace(failed, message=self._veil(failed.message)))
        self._journal.put(index, line, counted=self._count_failure)
        self._tell()

    def _count_failure(self) -> None:
        self.summary.failed += 1

    def _finish(self, outcome: Generation | Failure) -> None:
        landed = self._gathering.take(outcome)
        if landed is None:
            return
        flight, answers = landed
        name, key = flight.record.id, flight.fingerprint
        if isinstance(answers, Failure):
            self._fail(flight.index, Failed(name, key, answers.kind, answers.message))
            return
        line = self._shape.answer(flight, answers, self._runner, details=self._keep_details)
        try:
            self._journal.put(flight.index, line, counted=lambda: self._count(flight, answers))
        except TypeError as error:  # metadata that can be read but not written back
            self._fail(flight.index, Failed(name, key, "RecordError", f"its metadata cannot be written ({error})"))
            return
        self._tell()

    def _count(self, flight: Flight, answers: list[Generation]) -> None:
        summary = self.summary
        summary.records += 1
        summary.prompt_tokens += flight.prompt_tokens
        for answer in distinct(answers):
            summary.cached_prompt_tokens += answer.cached_prompt_tokens
            summary.output_tokens += len(answer.token_ids)
            summary.spec.add(answer.spec)
            summary.latency_s.add(answer.latency_s)
            if answer.time_to_first_token_s is not None:
                summary.time_to_first_token_s.add(answer.time_to_first_token_s)
            if answer.undrafted:
                self._note_once(f"some records are answered without drafts: {answer.undrafted}")

    def _note_once(self, note: str) -> None:
        if note not in self.summary.notes:
            self.summary.notes.append(note)

    def _tell(self) -> None:
        if self._report:
            self._report(self.summary, self._total)


def _since(now: float | None, before: float | None) -> float | None:
    return None if now is None or before is None else now - before
