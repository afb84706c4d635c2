"""Parse input rows into tasks: the records that have no output line yet, each id once.

A row that is not a record gets its error line here. A row that is finished is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Protocol

from ragspec.config.run import RunConfig
from ragspec.errors import RecordError
from ragspec.inputs.base import InputRow, Source
from ragspec.inputs.record import lacks_contexts, parse_record
from ragspec.inputs.record_ids import KeySet, RecordIds
from ragspec.outputs.answers import FailedRecord
from ragspec.outputs.ledger import fingerprint
from ragspec.records import Record
from ragspec.run.answering import RecordTask


@dataclass(frozen=True, slots=True)
class ReadRow:
    """A parsed row. wanted: whether it has no output line yet and is within the limit."""

    task: RecordTask
    wanted: bool


class FinishedRows(Protocol):
    """Knows which rows are finished, and takes failures: implemented by ResultWriter."""

    def has(self, index: int, key: str) -> bool: ...

    def has_another(self, record_id: str) -> bool: ...

    def fail(self, index: int, failed: FailedRecord) -> None: ...


class _KeyCollector:
    """FinishedRows that calls every row finished and collects the keys that were looked up."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def has(self, index: int, key: str) -> bool:
        self.found.add(key)
        return True

    def has_another(self, record_id: str) -> bool:
        return False

    def fail(self, index: int, failed: FailedRecord) -> None:
        self.found.add(failed.fingerprint)


def keys_of(config: RunConfig, source: Source, limit: int | None) -> set[str]:
    """Return the keys that identify the first `limit` rows of an input in its output."""
    keys = _KeyCollector()
    record_reader = RecordReader(config, keys, source)
    for row in islice(source, limit):
        record_reader.read(row)
    return keys.found


class RecordReader:
    """Reads the rows of one pass over `source`, in order.

    Attributes:
        records: How many rows were records.
        nameless: The numbers of rows that are no records and have no id of their own, as a line that is cut off, by
            the index of their lines. Whose rows they were is not known.
    """

    def __init__(self, config: RunConfig, writer: FinishedRows, source: Source) -> None:
        self._form = config.prompt.source
        self._searches = config.retrieval is not None
        self._writer = writer
        self._ids = RecordIds(source)
        self._seen = KeySet()
        self._numbers = count()
        self._changed = 0
        self.records = 0
        self.nameless: dict[int, int] = {}

    def tasks(self, row: InputRow) -> list[RecordTask]:
        """Return the row's task; empty if it is finished or is not a record."""
        read = self.read(row)
        return [read.task] if read is not None and read.wanted else []

    def read(self, row: InputRow) -> ReadRow | None:
        """Return the parsed row, wanted or not; None if it is not a record, after writing its error line."""
        index, given = next(self._numbers), None
        try:
            given = self._ids.given(row)
            # not the generated id: it may change when the input grows, and older versions used the number
            key = fingerprint(row, given or str(row.number))
            record = self._record(row, given)
            wanted = not self._writer.has(index, key)
            self.records += 1
            self._changed += wanted and self._writer.has_another(record.id)
            return ReadRow(self._task(index, key, row, record), wanted)
        except RecordError as error:
            key = fingerprint(row, None)
            if given is None:
                self.nameless[index] = row.number
            if not self._writer.has(index, key):
                name = given or self._ids.generated(row)
                self._writer.fail(index, FailedRecord(name, key, "RecordError", str(error), row.number))
            return None

    def read_past_limit(self, row: InputRow) -> ReadRow | None:
        """Return a row past the limit, which only counts for its window; None if it is not a record. Writes no line."""
        try:
            return ReadRow(self._task(-1, "", row, self._record(row, self._ids.given(row))), wanted=False)
        except RecordError:
            return None

    def _task(self, index: int, key: str, row: InputRow, record: Record) -> RecordTask:
        searches = self._searches and record.query is not None and lacks_contexts(row.value)
        return RecordTask(index, key, row.number, record, row.value["query"] if searches else None)

    def notes(self) -> list[str]:
        """Return notes for the user about the rows that were read."""
        found = []
        if self._changed:
            found.append(
                f"{self._changed} records changed since they were answered: they are answered again, "
                "and their old lines stay in the output above the new ones"
            )
        if self._ids.clashes:
            found.append(
                f"{self._ids.clashes} records have an id that equals the line number of an earlier record without one, "
                "so two output lines have that id; give every record of a pipe an id"
            )
        return found

    def _record(self, row: InputRow, given: str | None) -> Record:
        """Return the row's record. given: its own id. Raises RecordError, also for a duplicate id."""
        if isinstance(row.value, RecordError):
            raise row.value
        if given is not None and not self._seen.add(given):  # also if the first one is not a record
            raise RecordError(f'id "{given}" appears twice; only the first record with that id counts')
        record = parse_record(row.value, row.number, self._form)
        return record if given is not None else replace(record, id=self._ids.generated(row))
