"""An output as a Lance table, which readers see as a whole: all answers of a run appear in one commit at its end.

    answers.lance/            the table
    answers.lance.lines.jsonl finished lines of a run that has not ended

    >>> lancedb.connect("out").open_table("answers").to_pandas()

A finished line is in the spool, a local file; the end of a run commits all of them as one version and empties it. A run
killed in between leaves lines in both, and the next one drops them from the spool. A table that is started over keeps
its old rows until the commit that replaces them. Needs lancedb. Limit: local tables.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ragspec.errors import ConfigError, flat
from ragspec.host.files import open_private, sync_folder
from ragspec.inputs.record_ids import KeySet
from ragspec.json_text import dumps, loads
from ragspec.outputs.base import Change
from ragspec.outputs.codecs import FINISHED, LANCE, Parquet, finished_of, line_of, row_of
from ragspec.outputs.ledger import Drop, Finished
from ragspec.outputs.line_file import LineFile, Spill, free_number

SPOOL, REPLACING = ".lines.jsonl", ".replacing"
KEY = "fingerprint"
BATCH = 1000  # rows


class LanceTable:
    """A store in the table at `path`, NAME.lance. Raises ConfigError without lancedb."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._schema = Parquet().schema
        self._tables = Tables(path)
        # exists while a table that is started over waits for the commit that replaces its rows
        self._replacing = path.with_name(path.name + REPLACING)
        self._spool = LineFile(path.with_name(path.name + SPOOL))
        self._retried = False  # whether lines of the spool take the place of rows

    @property
    def begun(self) -> bool:
        """Return whether there are lines."""
        return bool(self._spool.size) or (not self._replacing.exists() and self._tables.open() is not None)

    def finished(self, drop: Drop | None = None) -> Iterator[Finished]:
        """Yield what the table and the spool finish; drop from the spool what the table has.

        Rows to `drop`, and error rows that the spool answers, stay in the table until the commit that replaces them.
        """
        self._spool.cut_torn_line()
        answered = KeySet()
        for _, line in self._spool:
            found = Finished.of(line)
            if found.key is not None and not found.failed:
                answered.add(found.key)
        committed = KeySet()
        for found in self._rows():
            replaced = (drop is not None and drop(found)) or (found.failed and found.key in answered)
            self._retried |= replaced
            if found.key is not None and not replaced:
                committed.add(found.key)
                yield found
        yield from self._spool.keep_only(lambda found: found.key not in committed and not (drop and drop(found)))

    def _rows(self) -> Iterator[Finished]:
        table = None if self._replacing.exists() else self._tables.open()
        if table is None:
            return
        with failing(self.path):
            for batch in table.search().select(FINISHED).to_batches():
                yield from map(finished_of, batch.to_pylist())

    def append(self, line: bytes) -> None:
        """Write a line to the spool."""
        self._spool.append(line)

    def set_aside(self, spill: Spill | None) -> None:
        """Start over: the table keeps its rows until the commit that replaces them."""
        number = free_number(self._spool.path, *([spill.path] if spill else []))
        if spill:
            spill.set_aside(number)
        if self._spool.size:
            self._spool.move_aside(number)
        open_private(self._replacing).close()
        sync_folder(self.path.parent)

    def finish(self) -> None:
        """Commit all lines as one version of the table, and empty the spool."""
        if not self._spool.size and not self._replacing.exists():
            return
        self._spool.sync()
        before = self._files()
        with failing(self.path):
            if self._replacing.exists():
                self._tables.create(self._batches(), replace=True)
            elif (table := self._tables.open()) is None:
                self._tables.create(self._batches())
            elif self._retried:
                rows = table.merge_insert(KEY).when_matched_update_all().when_not_matched_insert_all()
                rows.execute(self._batches())
            else:
                table.add(self._batches())
        _sync(self._files() - before)
        self._replacing.unlink(missing_ok=True)
        sync_folder(self.path.parent)
        self._spool.empty()

    def rewrite(self, change: Change, more: Iterable[bytes]) -> None:
        """Replace all rows in one commit by what `change` makes of their lines, and the rows of `more`."""
        if self._spool.size:  # a run killed between the commit and emptying the spool must not find changed lines there
            self._replace(self._lines())
            self._spool.empty()
        self._replace(chain((new for line in self._lines() if (new := change(line)) is not None), more))

    def _lines(self) -> Iterator[bytes]:
        """Yield all lines in the order of `finished`."""
        answered = {found.key for found in (Finished.of(line) for _, line in self._spool) if not found.failed}
        if not self._replacing.exists() and self._tables.open() is not None:
            for row in rows_of(self.path):
                if row["error"] is None or row[KEY] not in answered:
                    yield dumps(line_of(row)) + b"\n"
        yield from (line for _, line in self._spool)

    def _replace(self, lines: Iterable[bytes]) -> None:
        before = self._files()
        self._tables.create(self._batches(lines), replace=self._tables.open() is not None)
        _sync(self._files() - before)
        self._replacing.unlink(missing_ok=True)
        sync_folder(self.path.parent)
        self._retried = False

    def _batches(self, lines: Iterable[bytes] | None = None) -> Any:
        """Return lines, by default the spool's, as a stream of record batches."""
        import pyarrow

        lines_left = iter(lines if lines is not None else (line for _, line in self._spool))

        def batches() -> Iterator[Any]:
            while batch := list(islice(lines_left, BATCH)):
                yield pyarrow.RecordBatch.from_pylist([row_of(loads(line)) for line in batch], schema=self._schema)

        return pyarrow.RecordBatchReader.from_batches(self._schema, batches())

    def _files(self) -> set[Path]:
        return {path for path in self.path.rglob("*") if path.is_file()} if self.path.is_dir() else set()

    def sync(self) -> None:
        """Make the spool survive a power failure; the table does."""
        self._spool.sync()

    def close(self) -> None:
        """Close the spool, and delete it if empty."""
        self._spool.close_or_remove()


class Tables:
    """The database that holds the table at `path`."""

    def __init__(self, path: Path) -> None:
        try:
            import lancedb
        except ImportError:
            raise ConfigError('output: a Lance table needs lancedb: pip install "ragspec[lance]"') from None
        self._path = path
        self._name = path.name.removesuffix(LANCE)
        with failing(path):
            self._database = lancedb.connect(path.absolute().parent)

    def open(self) -> Any:
        """Return the table, None if there is none. Raises OSError."""
        if not (self._path / "_versions").is_dir():  # a killed first commit leaves a folder without
            return None
        with failing(self._path):
            return self._database.open_table(self._name)

    def create(self, batches: Any, *, replace: bool = False) -> None:
        """Create the table in one commit. replace: with these rows instead of its own. Raises OSError."""
        with failing(self._path):
            self._database.create_table(self._name, data=batches, mode="overwrite" if replace else "create")


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table. Raises ConfigError."""
    try:
        table = Tables(path).open()
        if table is None:
            raise ConfigError(f"{path}: no table yet; it appears when its run ends")
        with failing(path):
            for batch in table.search().to_batches():
                yield from batch.to_pylist()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


@contextmanager
def failing(path: Path) -> Iterator[None]:
    """Convert an error of LanceDB to an OSError."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError) as error:
        raise OSError(errno.EIO, flat(error, 200), str(path)) from None


def _sync(paths: set[Path]) -> None:
    """Let new files survive a power cut."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for folder in {path.parent for path in paths}:
        sync_folder(folder)
