"""What a table's values are in JSON: `plain(datetime(2024, 5, 1)) == "2024-05-01T00:00:00"`.

decimals: their digits, as text. dates, times, timestamps: ISO 8601, with every digit they have. durations: seconds;
ISO 8601 where a number would lose digits. bytes: text where they are UTF-8, else Base64. NaN and infinities: null.
uuids: their usual text. maps: lists of pairs, as pyarrow has them.
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
    """Return `value` as JSON has it. Raises TypeError for what has no such form."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if type(value).__module__ == "numpy":
        return _plain_numpy(value)
    if isinstance(value, float):
        return value if math.isfinite(value) or isinstance(value, ExactFloat) else None  # 1e400 has its digits
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat() if value == value else None  # pandas' NaT is a datetime, and not equal to itself
    if isinstance(value, timedelta):
        return duration(_nanoseconds(value))
    if isinstance(value, bytes | bytearray | memoryview):
        return text_or_base64(bytes(value))
    if isinstance(value, Decimal | UUID):
        return str(value)
    if hasattr(value, "isoformat"):  # pandas' timestamps, of nanoseconds
        return value.isoformat()
    raise TypeError(f"a value of type {type(value).__name__}")


def _plain_numpy(value: Any) -> Any:
    """Return what a scalar or an array of numpy holds."""
    if value.dtype.kind == "M" and not value.shape:
        return None if value != value else str(value)
    if value.dtype.kind == "m" and not value.shape:
        return None if value != value else duration(int(value.astype("timedelta64[ns]").astype("int64")))
    return plain(list(value) if value.shape else value.item())


def text_or_base64(data: bytes) -> str:
    """Return binary data as the text that it is in UTF-8, else as Base64."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return Base64(base64.b64encode(data).decode("ascii"))


def duration(nanoseconds: int) -> float | str:
    """Return a duration in seconds; in ISO 8601 where a float does not hold all of its digits."""
    seconds = nanoseconds / SECOND
    if Decimal(repr(seconds)) * SECOND == nanoseconds:
        return seconds
    whole, rest = divmod(abs(nanoseconds), SECOND)
    return f"{'-' if nanoseconds < 0 else ''}PT{whole}{_fraction(rest)}S"


def timestamp(nanoseconds: int, zone: tzinfo | None) -> str:
    """Return a time since 1970 in ISO 8601. zone: of the text; None for a time without one.

    A year that Python's calendar lacks is given in UTC.
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
    """Return a date, counted from 1970, in ISO 8601."""
    try:
        return (EPOCH.date() + timedelta(days=days)).isoformat()
    except OverflowError:
        return _far(days, "D")


def time_of_day(nanoseconds: int) -> str:
    """Return a time since midnight in ISO 8601."""
    seconds, rest = divmod(nanoseconds, SECOND)
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{_fraction(rest)}"


def _far(count: int, unit: str) -> str:
    """Return a date, or a date and a time, beyond Python's calendar; years of more than four digits have a sign."""
    import numpy

    text = str(numpy.array(count, f"datetime64[{unit}]"))
    year, rest = text[: text.index("-", 1)], text[text.index("-", 1) :]
    sign = "-" if year.startswith("-") else "+" if len(year) > 4 else ""
    return f"{sign}{year.removeprefix('-'):0>4}{rest}"


def _fraction(nanoseconds: int) -> str:
    """Return a fraction of a second: none, of six or of nine digits, as Python and pandas write it."""
    if not nanoseconds:
        return ""
    return f".{nanoseconds:09}" if nanoseconds % 1000 else f".{nanoseconds // 1000:06}"


def _nanoseconds(value: timedelta) -> int:
    """Return a duration's nanoseconds, pandas' too."""
    return (value.days * 86_400 + value.seconds) * SECOND + value.microseconds * 1000 + getattr(value, "nanoseconds", 0)


# -- what an input is: a source of rows. sources.py makes them --------------------------------------------------------


# marks that jsonlines skips before a value: of a UTF-8 file, of a JSON text sequence
MARKS = (b"\xef\xbb\xbf", b"\x1e")


@dataclass(frozen=True, slots=True)
class InputRow:
    """One record of an input, as it came.

    number: counted from 1, in the source's own order. raw: the bytes by which a resumed run recognises it. value:
    their JSON value, or a RecordError that says why there is none.
    """

    number: int
    raw: bytes
    value: Any

    @property
    def text(self) -> bytes:
        """`raw` without a mark before it."""
        return next((self.raw[len(mark) :] for mark in MARKS if self.raw.startswith(mark)), self.raw)


class Source(AbstractContextManager["Source"], Protocol):
    """Rows, read lazily and once. Opened when it is made, so that a missing input is known at once.

    The iterator over a source that keeps its reader waiting (a pipe) has `poll` (feed.py).
    """

    def __iter__(self) -> Iterator[InputRow]: ...

    def count(self) -> int | None:
        """Return how many rows there are, for a progress bar; None if that is not known beforehand."""

    def where(self, number: int) -> str:
        """Return how messages name row `number`."""

    def reopen(self) -> Source | None:
        """Return the same rows as a source of its own, None where they can be read only once (a pipe)."""


def count_of(source: Source, limit: int | None) -> int | None:
    """Return how many of the first `limit` rows there are; None if that is not known beforehand."""
    return within(limit, source.count())


def within(limit: int | None, count: int | None) -> int | None:
    """Return how many of `count` rows are among the first `limit`; None if it is not known how many there are."""
    return count if limit is None or count is None else min(count, limit)


# -- what sources of numbered rows have in common: tables, delimited files, JSON documents and datasets ---------------


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

    def _row(self, number: int, value: Any) -> InputRow:
        """Return a table's row."""
        return row_of(number, value, self._columns, typed=True)


def row_of(number: int, value: Any, columns: Columns, *, typed: bool | None = None) -> InputRow:
    """Return a row; one that JSON cannot hold, or that lacks a field, says so in its value.

    typed: whether a table has lists and objects of its own, or texts that may be some; None for JSON.
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
