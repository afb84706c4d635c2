"""`prompt.order: shared`: rows are read in windows, and the passages of a window's records are ordered together.

A window is so many rows of the input, whichever of them have answers already and however many are asked for: a record's
prompt is the same in a resumed run, on any number of workers, and with any --limit. A window without anything to answer
is passed over. Limit: from a pipe, --limit ends the window too; an input that grows changes its last window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

from ragspec.inputs.base import InputRow, Source
from ragspec.inputs.feed import Feed, Pollable, Spread
from ragspec.prompts.passage_order import PassageNumbers, PassagePlan, shared_order
from ragspec.retrieval.stage import Stage
from ragspec.run.answering import RecordTask, with_contexts
from ragspec.run.record_reader import ReadRow, RecordReader
from ragspec.run.session import Session

Say = Callable[[str], None]


def ignore_note(said: str) -> None:
    """Nobody listens."""


@dataclass(slots=True)
class PassageTally:
    """Characters of passages: all of them, those to be computed as planned, and those by rank."""

    total: int = 0
    computed: int = 0
    by_rank: int = 0

    def add(self, plan: PassagePlan) -> None:
        """Count a window."""
        self.total += plan.total
        self.computed += plan.computed
        self.by_rank += plan.by_rank


class Ordering(Protocol):
    """What a pass asks for, one after the other."""

    def asked(self) -> Feed[RecordTask]:
        """Return what the input asks for; close it after use."""

    def retrieval(self) -> dict[str, Any] | None:
        """Return what the searches took that were made here, None where none were."""

    def notes(self) -> list[str]:
        """Return what the user should know."""


def ordering_of(
    session: Session, source: Source, record_reader: RecordReader, limit: int | None, say: Say = ignore_note
) -> Ordering:
    """Return the ordering that a config asks for. limit: rows that are to be answered. say: is told of the plan."""
    if session.config.prompt.order == "shared":
        return SharedOrder(session, source, record_reader, limit, say)
    return InputOrder(source, record_reader, limit)


class InputOrder:
    """Records in the order of their rows, passages as each record's own prompt has them."""

    def __init__(self, source: Source, record_reader: RecordReader, limit: int | None) -> None:
        self._rows: Feed[InputRow] = Feed(source, limit)
        self._record_reader = record_reader

    def asked(self) -> Feed[RecordTask]:
        return Feed(Spread(self._rows, self._record_reader.asked))

    def retrieval(self) -> dict[str, Any] | None:
        return None

    def notes(self) -> list[str]:
        return []


class SharedOrder:
    """Windows, each planned before its first record is answered."""

    def __init__(
        self, session: Session, source: Source, record_reader: RecordReader, limit: int | None, say: Say
    ) -> None:
        config = session.config.prompt
        self._config = config
        self._tokenizer = session.runner.tokenizer
        self._record_reader = record_reader
        self._say = say
        self._limit = limit
        rows = iter(source)
        self._rows: Feed[InputRow] = Feed(rows, _rows_read(limit, config.order_window, isinstance(rows, Pollable)))
        self._numbers = count(1)
        self._read: list[ReadRow] = []  # of the window that is being read
        self._filled: list[ReadRow] = []  # of it, those with contexts
        self._left: list[int] = []  # of each window under way, how many lack contexts still
        self._stage = Stage(session.retriever, _query_of, _with_hits) if session.retriever else None
        self._tally = PassageTally()
        self._ratio = 0.0  # tokens of a character

    def asked(self) -> Feed[RecordTask]:
        read: Feed[ReadRow] = Feed(Spread(self._rows, self._take, self._window))
        if self._stage is not None:
            read = Feed(self._stage.fill(read))
        return Feed(Spread(read, self._fill))

    def retrieval(self) -> dict[str, Any] | None:
        return self._stage.to_json() if self._stage is not None else None

    def notes(self) -> list[str]:
        return [self._told("was")] if self._tally.total else []

    # -- windows ------------------------------------------------------------------------------------------------------

    def _take(self, row: InputRow) -> Iterable[ReadRow]:
        """Take in a row; return its window if it is the last of one."""
        number = next(self._numbers)
        within = self._limit is None or number <= self._limit
        read = self._record_reader.read(row) if within else self._record_reader.beyond(row)
        if read is not None:
            self._read.append(read)
        return self._window() if number % self._config.order_window == 0 else []

    def _window(self) -> list[ReadRow]:
        """Return the window that was read, if anything in it wants an answer."""
        window, self._read = self._read, []
        if not any(read.wanted for read in window):
            return []
        self._left.append(len(window))
        return window

    def _fill(self, read: ReadRow) -> list[RecordTask]:
        """Take in a record that has its contexts; return those to answer if it is the last of its window."""
        self._filled.append(read)
        if len(self._filled) < self._left[0]:
            return []
        del self._left[0]
        window, self._filled = self._filled, []
        return self._ordered(window)

    def _ordered(self, window: list[ReadRow]) -> list[RecordTask]:
        """Return what a window asks for, those records together that begin alike."""
        passages = PassageNumbers()
        records = [passages.of(read.asked.record, self._config.max_passages) for read in window]
        plan = shared_order(records, passages.weights, self._config.keep_first)
        self._tally.add(plan)
        if not self._ratio and self._tally.total:
            self._ratio = passages.tokens_per_character(self._tokenizer)
            self._say(self._told("is"))
        return [
            _arranged(window[i].asked, passages, records[i], plan.orders[i]) for i in plan.sequence if window[i].wanted
        ]

    def _told(self, verb: str) -> str:
        tally = self._tally
        saved = round((tally.by_rank - tally.computed) * self._ratio)
        return (
            f"prompt.order shared: {tally.computed / tally.total:.0%} of the passages' text {verb} computed, in place "
            f"of {tally.by_rank / tally.total:.0%} in rank order: some {saved:,} tokens fewer"
        )


def _rows_read(limit: int | None, window: int, keeps_waiting: bool) -> int | None:
    """Return how many rows are read for `limit` answers: whole windows; of a pipe no more than are answered."""
    return limit if limit is None or keeps_waiting else -(-limit // window) * window


def _arranged(asked: RecordTask, passages: PassageNumbers, own: list[int], order: list[int]) -> RecordTask:
    return replace(asked, record=passages.arranged(asked.record, own, order))


def _query_of(read: ReadRow) -> str | None:
    return read.asked.query


def _with_hits(read: ReadRow, hits: list[Any]) -> ReadRow:
    return replace(read, asked=replace(with_contexts(read.asked, hits), query=None))
