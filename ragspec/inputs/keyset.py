"""Ids of records, in little memory however many there are.

>>> keys = KeySet(); keys.add("a"), keys.add("a"), "b" in keys
(True, False, False)
"""

from __future__ import annotations

import re
import sqlite3
from contextlib import suppress

from ragspec.errors import ConfigError, RecordError
from ragspec.inputs.base import Row, Source
from ragspec.inputs.record import given_id

MADE = re.compile(r"(line-)*[0-9]+")  # what a made id looks like


class KeySet:
    """Strings or bytes, at about 3 microseconds each. The file is SQLite's own and is gone with the process."""

    def __init__(self, cache_mib: int = 16) -> None:
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.execute("PRAGMA journal_mode = OFF")
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.execute(f"PRAGMA cache_size = -{cache_mib * 1024}")
        self._db.execute("CREATE TABLE keys (key PRIMARY KEY) WITHOUT ROWID")
        self._db.execute("BEGIN")

    def add(self, key: str | bytes) -> bool:
        """Add `key`; return whether it is new."""
        return self._db.execute("INSERT OR IGNORE INTO keys VALUES (?)", (key,)).rowcount == 1

    def __contains__(self, key: object) -> bool:
        return self._db.execute("SELECT 1 FROM keys WHERE key = ?", (key,)).fetchone() is not None


class RecordIds:
    """Gives each row of a source its id: its own, else its number, in a form that no row's own id has.

    Own ids of rows to come are found by reading the source a second time, once a row without one is met. A source that
    is read only once (a pipe) has shown only those of earlier rows: there, `clashes` counts own ids that an earlier row
    was given.
    """

    def __init__(self, source: Source) -> None:
        self.clashes = 0
        self._source = source
        self._own = KeySet()  # those that may be taken for made ones
        self._made = KeySet()
        self._looked = False

    def own(self, row: Row) -> str | None:
        """Return a row's own id, None if it has none. Raises RecordError."""
        found = given_id(row.value)
        if found is not None and MADE.fullmatch(found):
            self.clashes += found in self._made
            self._own.add(found)
        return found

    def made(self, row: Row) -> str:
        """Return the id of a row that has none of its own."""
        if not self._looked:
            self._looked = True
            self._look_ahead()
        name = str(row.number)
        while name in self._own:
            name = f"line-{name}"
        self._made.add(name)
        return name

    def of(self, row: Row) -> str:
        """Return a row's id, whether or not it is a record."""
        try:
            return self.own(row) or self.made(row)
        except RecordError:
            return self.made(row)

    def _look_ahead(self) -> None:
        """Take in the own ids of all rows, where they can be read once more."""
        again = self._source.again()
        if again is None:
            return
        with suppress(ConfigError), again:  # what cannot be read is told where it is read to be answered
            for row in again:
                with suppress(RecordError):
                    if (own := given_id(row.value)) is not None and MADE.fullmatch(own):
                        self._own.add(own)
