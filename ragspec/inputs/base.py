"""What every input shares: the Source protocol, its rows, and table values as JSON.

>>> plain(datetime(2024, 5, 1))
'2024-05-01T00:00:00'

sources.py makes the sources.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from decimal import Decimal
from typing import Any, Protocol, Self
from uuid import UUID

from ragspec.errors import RecordError
from ragspec.inputs.columns import Columns
from ragspec.inputs.values import Base64
from ragspec.json_text import ExactFloat, dumps

SECOND = 10**9  # nanoseconds
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def plain(value: Any) -> Any:
    """Return a table's value as JSON. Raises TypeError for a type without a JSON form.

    Decimals keep their digits as text. Dates, times and timestamps become ISO 8601 with all their digits. Durations
    become seconds, or ISO 8601 where a float would lose digits. Bytes become text if they are UTF-8, else Base64. NaN
    and infinities become null. UUIDs become their usual text. Maps are lists of pairs, as in pyarrow.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if type(value).__module__ == "numpy":
        return _plain_numpy(value)
    if isinstance(value, float):
        return value if math.isfinite(value) or isinstance(value, ExactFloat) else None  # 1e400 is an ExactFloat
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat() if value == value else None  # pandas' NaT is a datetime that does not equal itself
    if isinstance(value, timedelta):
        return duration(_nanoseconds(value))
    if isinstance(value, bytes | bytearray | memoryview):
        return text_or_base64(bytes(value))
    if isinstance(value, Decimal | UUID):
        return str(value)
    if hasattr(value, "isoformat"):  # pandas' nanosecond timestamps
        return value.isoformat()
    raise TypeError(f"a value of type {type(value).__name__}")


def _plain_numpy(value: Any) -> Any:
    """Return a numpy scalar or array as JSON."""
    if value.dtype.kind == "M" and not value.shape:
        return None if value != value else str(value)
    if value.dtype.kind == "m" and not value.shape:
        return None if value != value else duration(int(value.astype("timedelta64[ns]").astype("int64")))
    return plain(list(value) if value.shape else value.item())


def text_or_base64(data: bytes) -> str:
    """Return binary data as text if it is UTF-8, else as Base64."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return Base64(base64.b64encode(data).decode("ascii"))


def duration(nanoseconds: int) -> float | str:
    """Return a duration in seconds, or in ISO 8601 where a float would lose digits."""
    seconds = nanoseconds / SECOND
    if Decimal(repr(seconds)) * SECOND == nanoseconds:
        return seconds
    whole, rest = divmod(abs(nanoseconds), SECOND)
    return f"{'-' if nanoseconds < 0 else ''}PT{whole}{_fraction(rest)}S"


def timestamp(nanoseconds: int, zone: tzinfo | None) -> str:
    """Return nanoseconds since 1970 in ISO 8601. zone: the time zone to show, None for a naive timestamp.

    A year beyond Python's calendar is given in UTC.
    """
    seconds, rest = divmod(nanoseconds, SECOND)
    try:
        local = EPOCH + timedelta(seconds=seconds)
        text = local.astimezone(zone).isoformat() if zone else local.replace(tzinfo=None).isoformat()
    except OverflowError:
        return _far(seconds, "s") + _fraction(rest) + ("+00:00" if zone else "")
    at = len("2024-05-01T12:00:00")
    return text[:at] + _fraction(rest) + text[at:]


def day(days: int) -> str:
    """Return days since 1970 as an ISO 8601 date."""
    try:
        return (EPOCH.date() + timedelta(days=days)).isoformat()
    except OverflowError:
        return _far(days, "D")


def time_of_day(nanoseconds: int) -> str:
    """Return nanoseconds since midnight in ISO 8601."""
    seconds, rest = divmod(nanoseconds, SECOND)
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{_fraction(rest)}"


def _far(count: int, unit: str) -> str:
    """Return a date or timestamp beyond Python's calendar; a year of more than four digits has a sign."""
    import numpy

    text = str(numpy.array(count, f"datetime64[{unit}]"))
    year, rest = text[: text.index("-", 1)], text[text.index("-", 1) :]
    sign = "-" if year.startswith("-") else "+" if len(year) > 4 else ""
    return f"{sign}{year.removeprefix('-'):0>4}{rest}"


def _fraction(nanoseconds: int) -> str:
    """Return a fraction of a second with no, six or nine digits, as Python and pandas write it."""
    if not nanoseconds:
        return ""
    return f".{nanoseconds:09}" if nanoseconds % 1000 else f".{nanoseconds // 1000:06}"


def _nanoseconds(value: timedelta) -> int:
    """Return a duration in nanoseconds, including pandas' nanoseconds."""
    return (value.days * 86_400 + value.seconds) * SECOND + value.microseconds * 1000 + getattr(value, "nanoseconds", 0)


# -- rows and sources ------------------------------------------------------------------------------

# bytes that jsonlines skips before a value: the UTF-8 byte order mark, the mark of a JSON text sequence
MARKS = (b"\xef\xbb\xbf", b"\x1e")


@dataclass(frozen=True, slots=True)
class InputRow:
    """One record of an input, unparsed.

    Attributes:
        number: counted from 1, in the source's order.
        raw: the bytes by which a resumed run recognises the row.
        value: the JSON value of `raw`, or a RecordError if it is invalid.
    """

    number: int
    raw: bytes
    value: Any

    @property
    def text(self) -> bytes:
        """Return `raw` without a leading mark."""
        return next((self.raw[len(mark) :] for mark in MARKS if self.raw.startswith(mark)), self.raw)


class Source(AbstractContextManager["Source"], Protocol):
    """An iterable of rows, read lazily and once. Opened when constructed, so that a missing input fails at once.

    The iterator over a source that can block (a pipe) also has `poll` (feed.py).
    """

    def __iter__(self) -> Iterator[InputRow]: ...

    def count(self) -> int | None:
        """Return the number of rows, for a progress bar; None if it is unknown."""

    def where(self, number: int) -> str:
        """Return the location of row `number` for messages."""

    def reopen(self) -> Source | None:
        """Return a new source of the same rows, None if they can be read only once (a pipe)."""


def within(limit: int | None, count: int | None) -> int | None:
    """Return `count` capped at `limit`; None if `count` is None."""
    return count if limit is None or count is None else min(count, limit)


# -- numbered rows ---------------------------------------------------------------------------------


class NumberedRows:
    """Base of tables and datasets: rows of `path` counted from 1, without the header. `_stack` holds what is open."""

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
        """Return None: counting would mean reading."""
        return None

    def where(self, number: int) -> str:
        """Return "path: row 3"."""
        return f"{self._path}: row {number}"

    def _row(self, number: int, value: Any) -> InputRow:
        """Return a table's row."""
        return row_of(number, value, self._columns, typed=True)


def row_of(number: int, value: Any, columns: Columns, *, typed: bool | None = None) -> InputRow:
    """Return a row; its value is a RecordError if JSON cannot hold it or a mapped field is missing.

    typed: True for a table with list and object types, False for a table of texts that may hold JSON, None for JSON.
    """
    if isinstance(value, RecordError):
        return InputRow(number, b"", value)
    try:
        found = plain(value)
        if typed is not None and isinstance(found, dict):
            found = columns.with_json(found, typed=typed)
        raw = dumps(found)
    except (TypeError, ValueError, RecursionError) as error:
        return InputRow(number, b"", RecordError(f"cannot be written as JSON ({error})"))
    try:
        return InputRow(number, raw, columns.of(found))
    except RecordError as error:
        return InputRow(number, raw, error)
