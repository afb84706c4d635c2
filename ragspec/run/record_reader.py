"""Rows -> what is asked: records that have no line yet, each id once. The others become lines here, or need none."""

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
    """What a row asks for. wanted: whether it has no line yet, and is among the rows that are to have one."""

    asked: RecordTask
    wanted: bool


class FinishedRows(Protocol):
    """Who knows which rows are finished: the desk."""

    def has(self, index: int, key: str) -> bool: ...

    def has_another(self, record_id: str) -> bool: ...

    def fail(self, index: int, failed: FailedRecord) -> None: ...


class _NothingPending:
    """Books in which all is finished; they only say which rows were asked for."""

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
    """Return what the first `limit` rows of an input are recognised by in its output."""
    keys = _NothingPending()
    record_reader = RecordReader(config, keys, source)
    for row in islice(source, limit):
        record_reader.read(row)
    return keys.found


class RecordReader:
    """Reads the rows of one pass over `source`, in order."""

    def __init__(self, config: RunConfig, writer: FinishedRows, source: Source) -> None:
        self._form = config.prompt.source
        self._searches = config.retrieval is not None
        self._writer = writer
        self._ids = RecordIds(source)
        self._seen = KeySet()
        self._numbers = count()
        self._changed = 0

    def asked(self, row: InputRow) -> list[RecordTask]:
        """Return what a row asks for; nothing if it needs no answer any more, or can have none."""
        read = self.read(row)
        return [read.asked] if read is not None and read.wanted else []

    def read(self, row: InputRow) -> ReadRow | None:
        """Return what a row asks for, wanted or not; None if it can have no answer."""
        index, given = next(self._numbers), None
        try:
            given = self._ids.given(row)
            # not the generated id: it may change when the input grows, and older versions used the number
            key = fingerprint(row, given or str(row.number))
            record = self._record(row, given)
            wanted = not self._writer.has(index, key)
            self._changed += wanted and self._writer.has_another(record.id)
            return ReadRow(self._asked(index, key, row, record), wanted)
        except RecordError as error:
            key = fingerprint(row, None)
            if not self._writer.has(index, key):
                name = given or self._ids.generated(row)
                self._writer.fail(index, FailedRecord(name, key, "RecordError", str(error), row.number))
            return None

    def beyond(self, row: InputRow) -> ReadRow | None:
        """Return what a row asks for that is read but not answered; it may be nothing, and costs no line."""
        try:
            return ReadRow(self._asked(-1, "", row, self._record(row, self._ids.given(row))), wanted=False)
        except RecordError:
            return None

    def _asked(self, index: int, key: str, row: InputRow, record: Record) -> RecordTask:
        searches = self._searches and record.query is not None and lacks_contexts(row.value)
        return RecordTask(index, key, row.number, record, row.value["query"] if searches else None)

    def notes(self) -> list[str]:
        """Return what the user should know about the rows that were read."""
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
        """Return the record that a row is. given: its id. Raises RecordError, also for a duplicate id."""
        if isinstance(row.value, RecordError):
            raise row.value
        record = parse_record(row.value, row.number, self._form)
        if given is None:
            return replace(record, id=self._ids.generated(row))
        if not self._seen.add(given):
            raise RecordError(f'id "{given}" appears twice; only the first record with that id is answered')
        return record
