"""What sources of numbered rows have in common: tables, delimited files, JSON documents and datasets."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Self

from ragspec.errors import RecordError
from ragspec.inputs.base import Row
from ragspec.inputs.columns import Columns
from ragspec.inputs.plain import plain
from ragspec.json_text import dumps


class NumberedRows:
    """Rows of `path` counted from 1; a header is none. What was opened for them is on `_stack`."""

    def __init__(self, path: str, columns: Columns, options: Mapping[str, Any] | None = None) -> None:
        self._path = path
        self._columns = columns
        self._options = options
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def count(self) -> int | None:
        """Return None: the rows would have to be read."""
        return None

    def where(self, number: int) -> str:
        """Return "path: row 3"."""
        return f"{self._path}: row {number}"

    def _row(self, number: int, value: Any) -> Row:
        """Return a table's row."""
        return row_of(number, value, self._columns, typed=True)


def row_of(number: int, value: Any, columns: Columns, *, typed: bool | None = None) -> Row:
    """Return a row; one that JSON cannot hold, or that lacks a field, says so in its value.

    typed: whether a table has lists and objects of its own, or texts that may be some; None for JSON.
    """
    if isinstance(value, RecordError):
        return Row(number, b"", value)
    try:
        found = plain(value)
        if typed is not None and isinstance(found, dict):
            found = columns.with_json(found, typed=typed)
        raw = dumps(found)
    except (TypeError, ValueError, RecursionError) as error:
        return Row(number, b"", RecordError(f"cannot be written as JSON ({error})"))
    try:
        return Row(number, raw, columns.of(found))
    except RecordError as error:
        return Row(number, raw, error)
