"""Rows -> what is asked: records that have no line yet, each id once. The others become lines here, or need none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from ragspec.config.run import RunConfig
from ragspec.errors import RecordError
from ragspec.inputs.base import Row
from ragspec.inputs.keyset import KeySet
from ragspec.inputs.record import lacks_contexts, line_id, parse_record
from ragspec.outputs.answers import Failed
from ragspec.outputs.ledger import fingerprint
from ragspec.records import Record
from ragspec.run.answering import Asked


@dataclass(frozen=True, slots=True)
class Noted:
    """What a row asks for. wanted: whether it has no line yet, and is among the rows that are to have one."""

    asked: Asked
    wanted: bool


class Books(Protocol):
    """Who knows which rows are finished: the desk."""

    def has(self, index: int, key: str) -> bool: ...

    def has_another(self, record_id: str) -> bool: ...

    def fail(self, index: int, failed: Failed) -> None: ...


class _Keys:
    """Books in which all is finished; they only say which rows were asked for."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def has(self, index: int, key: str) -> bool:
        self.found.add(key)
        return True

    def has_another(self, record_id: str) -> bool:
        return False

    def fail(self, index: int, failed: Failed) -> None:
        self.found.add(failed.fingerprint)


def keys_of(config: RunConfig, rows: Iterable[Row]) -> set[str]:
    """Return what rows, the first ones of an input, are recognised by in its output."""
    keys = _Keys()
    intake = Intake(config, keys)
    for row in rows:
        intake.noted(row)
    return keys.found


class Intake:
    """Reads the rows of one pass, in order."""

    def __init__(self, config: RunConfig, desk: Books) -> None:
        self._form = config.prompt.source
        self._searches = config.retrieval is not None
        self._desk = desk
        self._seen = KeySet()
        self._numbers = count()
        self._changed = 0

    def asked(self, row: Row) -> list[Asked]:
        """Return what a row asks for; nothing if it needs no answer any more, or can have none."""
        noted = self.noted(row)
        return [noted.asked] if noted is not None and noted.wanted else []

    def noted(self, row: Row) -> Noted | None:
        """Return what a row asks for, wanted or not; None if it can have no answer."""
        index, key = next(self._numbers), None
        try:
            record = self._record(row)
            key = fingerprint(row, record.id)
            wanted = not self._desk.has(index, key)
            self._changed += wanted and self._desk.has_another(record.id)
            return Noted(self._asked(index, key, row, record), wanted)
        except RecordError as error:
            key = key or fingerprint(row, None)
            if not self._desk.has(index, key):
                self._desk.fail(index, Failed(line_id(row), key, "RecordError", str(error), row.number))
            return None

    def beyond(self, row: Row) -> Noted | None:
        """Return what a row asks for that is read but not answered; it may be nothing, and costs no line."""
        try:
            return Noted(self._asked(-1, "", row, self._record(row)), wanted=False)
        except RecordError:
            return None

    def _asked(self, index: int, key: str, row: Row, record: Record) -> Asked:
        searches = self._searches and record.query is not None and lacks_contexts(row.value)
        return Asked(index, key, row.number, record, row.value["query"] if searches else None)

    def notes(self) -> list[str]:
        """Return what the user should know about the rows that were read."""
        if not self._changed:
            return []
        return [
            f"{self._changed} records changed since they were answered: they are answered again, "
            "and their old lines stay in the output above the new ones"
        ]

    def _record(self, row: Row) -> Record:
        """Return the record that a row is. Raises RecordError; so for an id that an earlier row had."""
        if isinstance(row.value, RecordError):
            raise row.value
        record = parse_record(row.value, row.number, self._form)
        if not self._seen.add(record.id):
            own = isinstance(row.value, dict) and ("id" in row.value or "custom_id" in row.value)
            clash = "appears twice" if own else "(its line number, as it has no id) is another record's id too"
            raise RecordError(f'id "{record.id}" {clash}; only the first record with that id is answered')
        return record
