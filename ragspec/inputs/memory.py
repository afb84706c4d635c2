"""An input in memory: records as Python values.

>>> [row.number for row in MemorySource([{"query": "Why?"}])]
[1]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

from ragspec.inputs.base import Row
from ragspec.inputs.columns import ALL
from ragspec.inputs.rows import row_of
from ragspec.json_text import dumps, loads


class MemorySource:
    """The records of an iterable, each what a line of a JSONL file would say."""

    def __init__(self, records: Iterable[Any]) -> None:
        self._records = records

    def __enter__(self) -> MemorySource:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __iter__(self) -> Iterator[Row]:
        for number, record in enumerate(self._records, 1):
            value: Any
            try:
                raw = dumps(record)
                value = loads(raw)  # tuples become lists, as in a file
            except TypeError:  # what a data frame holds, say
                yield row_of(number, record, ALL)
            else:
                yield Row(number, raw, value)

    def count(self) -> int | None:
        """Return how many there are, if that can be told without reading them."""
        return len(self._records) if isinstance(self._records, Sized) else None

    def reopen(self) -> MemorySource | None:
        """Return the same records, None if they are made as they are read."""
        return MemorySource(self._records) if isinstance(self._records, Sequence) else None

    def where(self, number: int) -> str:
        """Return "record 3": there is no file to name."""
        return f"record {number}"
