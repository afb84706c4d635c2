"""Ids of records, in constant memory however many there are.

>>> keys = KeySet(); keys.add("a"), keys.add("a"), "b" in keys
(True, False, False)
"""

from __future__ import annotations

import re
import sqlite3
from contextlib import suppress

from ragspec.errors import ConfigError, RecordError
from ragspec.inputs.base import InputRow, Source
from ragspec.inputs.record import given_id

GENERATED = re.compile(r"(line-)*[0-9]+")  # the form of a generated id


class KeySet:
    """A set of strings or bytes on disk, about 3 microseconds per key. SQLite deletes its temporary file at exit."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.execute("PRAGMA journal_mode = OFF")
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.execute("PRAGMA cache_size = -16384")  # KiB
        self._db.execute("CREATE TABLE keys (key PRIMARY KEY) WITHOUT ROWID")
        self._db.execute("BEGIN")

    def add(self, key: str | bytes) -> bool:
        """Add `key`; return whether it is new."""
        return self._db.execute("INSERT OR IGNORE INTO keys VALUES (?)", (key,)).rowcount == 1

    def __contains__(self, key: object) -> bool:
        return self._db.execute("SELECT 1 FROM keys WHERE key = ?", (key,)).fetchone() is not None


class RecordIds:
    """Ids for the rows of a source: the given ones, and generated ones distinct from all given ones.

    A generated id is the row's number, or `line-NUMBER` if another row has that number as its id. The first row without
    an id triggers a second pass over the source that collects the given ids of later rows. Limit: a pipe is read once,
    so only earlier given ids are known; `clashes` counts given ids that were already generated for an earlier row.
    """

    def __init__(self, source: Source) -> None:
        self.clashes = 0
        self._source = source
        self._given = KeySet()  # only ids that look generated
        self._generated = KeySet()
        self._scanned = False

    def given(self, row: InputRow) -> str | None:
        """Return the id in a row, None without one. Raises RecordError for an invalid one."""
        found = given_id(row.value)
        if found is not None and GENERATED.fullmatch(found):
            self.clashes += found in self._generated
            self._given.add(found)
        return found

    def generated(self, row: InputRow) -> str:
        """Return an id for a row without one."""
        if not self._scanned:
            self._scanned = True
            self._scan()
        name = str(row.number)
        while name in self._given:
            name = f"line-{name}"
        self._generated.add(name)
        return name

    def of(self, row: InputRow) -> str:
        """Return a row's id, even if the row is not a valid record."""
        try:
            return self.given(row) or self.generated(row)
        except RecordError:
            return self.generated(row)

    def _scan(self) -> None:
        """Collect the given ids of all rows, if the source can be read twice."""
        source = self._source.reopen()
        if source is None:
            return
        with suppress(ConfigError), source:  # the main pass reports what cannot be read
            for row in source:
                with suppress(RecordError):
                    if (found := given_id(row.value)) is not None and GENERATED.fullmatch(found):
                        self._given.add(found)
