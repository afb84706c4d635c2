"""What an input is: a source of rows. opening.py makes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

# marks that jsonlines skips before a value: of a UTF-8 file, of a JSON text sequence
MARKS = (b"\xef\xbb\xbf", b"\x1e")


@dataclass(frozen=True, slots=True)
class Row:
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

    def __iter__(self) -> Iterator[Row]: ...

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
