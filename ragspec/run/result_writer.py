"""Write results and failures to the journal, count them in the totals, and report progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ragspec.config.run import RunConfig
from ragspec.errors import cause_of
from ragspec.inputs.base import Source
from ragspec.outputs.answers import FailedRecord, LineFormat
from ragspec.outputs.journal import Journal
from ragspec.prompts.templates import uses_contexts, uses_metadata
from ragspec.run.answering import RecordResult
from ragspec.run.session import Session
from ragspec.stats import RunSummary

Report = Callable[[RunSummary, int | None], None]  # called after each record with the totals and the input's row count


class Observer(Protocol):
    """Is told of each record once its line is written."""

    def answered(self, result: RecordResult) -> None:
        """Take an answered record."""

    def failed(self, failed: FailedRecord) -> None:
        """Take a failed record."""


@dataclass(slots=True)
class PassageCount:
    """Counts of answered questions and of those whose prompt has no passages.

    without: had none. unfit: none of theirs fits. unread: had none, but a field that looks like passages. beside: other
    records with such a field.
    """

    questions: int = 0
    without: int = 0
    unfit: int = 0
    unread: int = 0
    unread_name: str = ""
    beside: int = 0

    def add(self, passages: tuple[int, int] | None, unread: str) -> None:
        """Count one record. passages: kept and dropped, None if it is no question."""
        if passages is None:
            self.beside += bool(unread)
            return
        kept, dropped = passages
        self.questions += 1
        if kept:
            return
        if dropped:
            self.unfit += 1
            return
        self.without += 1
        self.unread += bool(unread)
        self.unread_name = self.unread_name or unread

    def notes(self, config: RunConfig) -> list[str]:
        """Return notes for the user on questions without passages, if passages were to be expected."""
        found = []
        columns = config.input.columns if config.input else None
        expected = (
            bool(config.retrieval or (columns and columns.contexts))
            or uses_contexts(config.prompt.template)
            or self.without < self.questions / 2
        )
        unread = 0 if uses_metadata(config.prompt.template) else self.unread
        if self.without and (expected or unread):
            field = f'; {unread} with a field "{self.unread_name}" that is not read: see ragspec inspect'
            found.append(f"{self.without} of {self.questions} records have no passages{field if unread else ''}")
        if self.unfit:
            found.append(
                f"{self.unfit} of {self.questions} records were answered without passages, because not even their "
                "first one fits; raise prompt.max_prompt_tokens, lower sampling.max_new_tokens, or give shorter "
                "passages"
            )
        if self.beside:
            found.append(f"{self.beside} records have passages beside messages or a prompt; only `query` uses them")
        return found


class ResultWriter:
    """Writes the lines and keeps the totals of one pass. shape: of the lines. total: expected rows, None if unknown."""

    def __init__(
        self,
        session: Session,
        source: Source,
        journal: Journal,
        shape: LineFormat,
        total: int | None,
        report: Report | None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.summary = RunSummary(method=session.runner.method)
        self.total = total
        self._source = source
        self._journal = journal
        self._ledger = journal.ledger
        self._shape = shape
        self._redact = session.config.redactor()
        self._report = report
        self._observers = observers
        self._config = session.config
        self._passages = PassageCount()

    def expected_rows(self) -> int | None:
        """Return about how many rows still need an answer, None if the total is unknown."""
        return None if self.total is None else max(0, self.total - self._ledger.resumed)

    def has(self, index: int, key: str) -> bool:
        """Return whether an earlier run finished a row; if so, skip its line."""
        self.summary.read += 1
        if key not in self._ledger:
            return False
        self.summary.skipped += 1
        self.summary.failed_before += self._ledger.failed(key)
        self._journal.skip(index, key)
        self._report_progress()
        return True

    def has_another(self, record_id: str) -> bool:
        """Return whether an earlier run answered a row with this id, whatever its content was."""
        return self._ledger.resumed > 0 and self._ledger.answered(record_id)

    def put(self, result: RecordResult) -> None:
        """Write the line of an answered record, and count it."""
        line, config = result.line, self._journal.signature
        if config:
            line = self._shape.signed(line, config)
        self._journal.put(result.index, line, counted=lambda: self._count(result))
        for observer in self._observers:
            observer.answered(result)
        self._report_progress()

    def fail(self, index: int, failed: FailedRecord) -> None:
        """Write the line of a failed record, and count it."""
        message = failed.message if failed.line is None else f"{self._source.where(failed.line)}: {failed.message}"
        failed = replace(failed, message=self._redact(message), config=self._journal.signature)
        self._journal.put(index, self._shape.error(failed), counted=lambda: self._count_failure(failed))
        for observer in self._observers:
            observer.failed(failed)
        self._report_progress()

    def notes(self) -> list[str]:
        """Return notes for the user about the records that were answered."""
        return self._passages.notes(self._config)

    def _count(self, result: RecordResult) -> None:
        summary = self.summary
        self._passages.add(result.passages, result.unread)
        summary.count(result.prompt_tokens, result.costs)
        for cost in result.costs:
            summary.latency_s.add(cost.latency_s)
            if cost.time_to_first_token_s is not None:
                summary.time_to_first_token_s.add(cost.time_to_first_token_s)
            if cost.undrafted:
                self._note_once(f"some records are answered without drafts: {cost.undrafted}")

    def _count_failure(self, failed: FailedRecord) -> None:
        self.summary.failed += 1
        self.summary.failures.add(cause_of(failed.message, failed.name), failed.message)

    def _note_once(self, note: str) -> None:
        if note not in self.summary.notes:
            self.summary.notes.append(note)

    def begin(self) -> None:
        """Report that the run has come further, before any record is finished."""
        if self._report:
            self._report(self.summary, self.total)

    def _report_progress(self) -> None:
        if self.summary.records or self.summary.failed:
            self._journal.keep_spent(self.summary)
        if self._report:
            self._report(self.summary, self.total)
