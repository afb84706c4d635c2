"""Several files as one source, read one after the other.

>>> for row in Several([partial(JsonlSource, "a.jsonl"), partial(JsonlSource, "b.jsonl")]): row.number
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Self

from ragspec.inputs.base import Row, Source


class Several:
    """Rows are numbered through. Every file is opened at once, to see that it can be, and again when its turn comes.

    once: whether they would have to be sent again. Limit: no pipes.
    """

    def __init__(self, openers: Sequence[Callable[[], Source]], *, once: bool = False) -> None:
        self._openers = list(openers)
        self._once = once
        self._begins: list[int] = []  # the number of the row before each file's first
        self._where: list[Callable[[int], str]] = []
        for opener in reversed(self._openers):  # what is wrong with one is known at once
            with opener() as first:
                self._where_first = first.where

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __iter__(self) -> Iterator[Row]:
        number = 0
        self._begins, self._where = [], []
        for opener in self._openers:
            with opener() as source:
                self._begins.append(number)
                self._where.append(source.where)
                for row in source:
                    number = self._begins[-1] + row.number
                    yield replace(row, number=number)

    def reopen(self) -> Several | None:
        """Return the same source, to be read once more; None if its files would have to be sent again."""
        return None if self._once else copy(self)

    def count(self) -> int | None:
        """Return how many rows there are, None if one of the files does not know."""
        total = 0
        for opener in self._openers:
            with opener() as source:
                rows = source.count()
            if rows is None:
                return None
            total += rows
        return total

    def where(self, number: int) -> str:
        """Return the file and the number that the row has in it."""
        if not self._begins:
            return self._where_first(number)
        at = max(0, bisect_right(self._begins, number - 1) - 1)
        return self._where[at](number - self._begins[at])
