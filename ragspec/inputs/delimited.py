"""CSV and TSV: a header line, then a record per row.

>>> for row in DelimitedSource("questions.csv", Columns({})): row.value["query"]

Every cell is text, except one that holds a JSON list or object (contexts, messages, metadata). A cell may hold line
ends, in quotes. An empty cell is null. Source: Python's csv module; RFC 4180. Limit: UTF-8.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import orjson

from ragspec.errors import ConfigError, RecordError
from ragspec.inputs.base import Row
from ragspec.inputs.columns import Columns
from ragspec.inputs.rows import NumberedRows
from ragspec.inputs.storage import is_url, local_path, missing, open_binary

WIDEST = 256 << 20  # characters of a cell
COUNTED = 1 << 30  # bytes of a file whose rows are counted: it takes some ten seconds


class DelimitedSource(NumberedRows):
    """The rows of one file; a line end may be part of a cell. delimiter: between cells."""

    def __init__(
        self, path: str, columns: Columns, delimiter: str = ",", options: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(path, columns, options)
        csv.field_size_limit(WIDEST)
        self._delimiter = delimiter
        with ExitStack() as stack:
            self._open(delimiter, stack)
            self._check()
            self._stack = stack.pop_all()

    def _open(self, delimiter: str, stack: ExitStack) -> None:
        try:
            file = stack.enter_context(open_binary(self._path, self._options))
            self._reader = _reader(file, delimiter)
            self._names: list[str] = next(self._reader, [])
        except FileNotFoundError as error:
            raise ConfigError(f"{self._path}: {missing(error)}") from None
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"{self._path}: cannot be read as text with a header line ({error})") from None

    def _check(self) -> None:
        twice = [name for name in self._names if self._names.count(name) > 1]
        if twice:
            raise ConfigError(f'{self._path}: two columns are called "{twice[0]}"')
        if self._names:
            self._columns.check(self._names, self._path)

    def __iter__(self) -> Iterator[Row]:
        number = 0
        while True:
            number += 1
            try:
                cells = next(self._reader, None)
            except (OSError, UnicodeDecodeError, csv.Error) as error:
                raise ConfigError(f"{self.where(number)}: cannot be read ({error})") from None
            if cells is None:
                return
            if not cells:  # an empty line
                number -= 1
            elif len(cells) != len(self._names):
                raw = orjson.dumps(cells)
                yield Row(number, raw, RecordError(f"has {len(cells)} cells, the header has {len(self._names)}"))
            else:
                value = {name: _cell(cell) for name, cell in zip(self._names, cells, strict=True)}
                yield self._row(number, value)

    def count(self) -> int | None:
        """Return how many rows a file here has; None for one elsewhere, and where counting would take long."""
        path = Path(local_path(self._path))
        if is_url(self._path) or not path.is_file() or path.stat().st_size > COUNTED:
            return None
        try:
            with path.open("rb") as file:
                rows = _reader(file, self._delimiter)
                next(rows, None)
                return sum(1 for cells in rows if cells)
        except (OSError, UnicodeDecodeError, csv.Error):  # it breaks off there, which whoever reads it says
            return None


def _reader(file: IO[bytes], delimiter: str) -> Any:
    return csv.reader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), delimiter=delimiter, strict=True)


def _cell(text: str) -> Any:
    """Return a cell's value: text, or the JSON list or object that it holds; None for an empty one."""
    if text[:1] in ("[", "{"):
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError:
            return text
    return text or None
