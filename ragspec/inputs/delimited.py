"""CSV and TSV: a header line, then a record per row.

>>> for row in DelimitedReader(file, "questions.csv", ALL, ",").rows(): row.value["query"]

A cell is text; a JSON list or object in a cell is parsed in fields that are not text (contexts, messages, metadata).
A quoted cell may contain line ends. An empty cell is null. A line `sep=;` before the header names the delimiter, as in
Excel. Source: Python's csv module; RFC 4180.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ragspec.errors import ConfigError, RecordError
from ragspec.inputs.base import InputRow, row_of
from ragspec.inputs.columns import Columns
from ragspec.inputs.content import DAMAGES, failure_reason
from ragspec.json_text import dumps

COUNTED = 1 << 30  # bytes of the largest file whose rows are counted; that takes about ten seconds
WIDEST = 64 << 20  # bytes of a line, characters of a cell; csv uses four bytes per character


class DelimitedReader:
    """The rows of one text. delimiter: between cells. path: for messages."""

    def __init__(self, file: IO[bytes], path: str, columns: Columns, delimiter: str) -> None:
        csv.field_size_limit(WIDEST)
        file = io.BufferedReader(_Bounded(file))
        self._path = path
        self._columns = columns
        self._reader = csv.reader(
            io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), delimiter=delimiter, strict=True
        )
        try:
            self.names = _header(self._reader)
        except (OSError, *DAMAGES, csv.Error) as error:
            raise ConfigError(f"{path}: cannot be read as text with a header line ({_describe(error)})") from None
        self._check()

    def _check(self) -> None:
        twice = next((name for name in self.names if self.names.count(name) > 1), None)
        if twice == "":
            raise ConfigError(f"{self._path}: two columns have no name; name them, or remove them")
        if twice is not None:
            raise ConfigError(f'{self._path}: two columns are called "{twice}"; rename one of them')
        if self.names:
            self._columns.check(self.names, self._path)

    def where(self, number: int) -> str:
        return f"{self._path}: row {number}"

    def rows(self) -> Iterator[InputRow]:
        number = 0
        while True:
            number += 1
            try:
                cells = next(self._reader, None)
            except (OSError, *DAMAGES, csv.Error) as error:
                raise ConfigError(f"{self.where(number)}: {_describe(error)}") from None
            if cells is None:
                return
            if not cells:  # an empty line
                number -= 1
            elif len(cells) != len(self.names):
                raw = dumps(cells)
                yield InputRow(number, raw, RecordError(f"has {len(cells)} cells, the header has {len(self.names)}"))
            else:
                value = {name: cell or None for name, cell in zip(self.names, cells, strict=True)}
                yield row_of(number, value, self._columns, typed=False)


def rows_in(path: Path, delimiter: str) -> int | None:
    """Return the number of rows of an uncompressed UTF-8 file; None if counting is slow or fails."""
    if path.stat().st_size > COUNTED:
        return None
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, delimiter=delimiter, strict=True)
            _header(rows)
            return sum(1 for cells in rows if cells)
    except (OSError, UnicodeDecodeError, csv.Error):  # reading the rows reports it
        return None


def _header(rows: Iterator[list[str]]) -> list[str]:
    """Return the names of the columns: the first line, or the second if Excel named the delimiter in the first."""
    names = next(rows, [])
    return next(rows, []) if names == ["sep=", ""] else names


class _Bounded(io.RawIOBase):
    """A text that raises csv.Error for a line longer than WIDEST, which csv would read into memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._line = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data: bytes = self._file.read1(len(buffer))  # type: ignore[attr-defined]
        buffer[: len(data)] = data
        end = data.rfind(b"\n")
        self._line = self._line + len(data) if end < 0 else len(data) - end - 1
        if self._line > WIDEST:
            raise csv.Error(f"a line is longer than {WIDEST >> 20} MiB")
        return len(data)


def _describe(error: Exception) -> str:
    return f"cannot be read ({error})" if isinstance(error, csv.Error) else failure_reason(error)
