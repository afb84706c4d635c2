"""The order of a pass's tasks: as the rows come, or in windows (`prompt.order: shared`) that share passages.

A window is a fixed number of input rows, answered before or not and within --limit or not. So a record's prompt is the
same in a resumed run, on any number of workers, and with any --limit. A window with nothing to answer is skipped.
Limit: on a pipe, --limit also ends the window; if the input grows, its last window changes.
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


def ignore_note(note: str) -> None:
    """Ignore a note: the default for `say`."""


@dataclass(slots=True)
class PassageTally:
    """Characters of passages: all, those to compute in shared order, and those to compute in rank order."""

    total: int = 0
    computed: int = 0
    by_rank: int = 0

    def add(self, plan: PassagePlan) -> None:
        """Add a window's plan."""
        self.total += plan.total
        self.computed += plan.computed
        self.by_rank += plan.by_rank


class Ordering(Protocol):
    """The order in which a pass answers its tasks."""

    def tasks(self) -> Feed[RecordTask]:
        """Return the tasks of the input. Close the feed after use."""

    def retrieval(self) -> dict[str, Any] | None:
        """Return the statistics of the searches made here, None if there were none."""

    def notes(self) -> list[str]:
        """Return notes for the user."""


def ordering_of(
    session: Session, source: Source, record_reader: RecordReader, limit: int | None, say: Say = ignore_note
) -> Ordering:
    """Return the ordering that a config asks for. limit: rows to answer. say: receives the note on savings."""
    if session.config.prompt.order == "shared":
        return SharedOrder(session, source, record_reader, limit, say)
    return InputOrder(source, record_reader, limit)


class InputOrder:
    """Records in row order, with passages as each record has them."""

    def __init__(self, source: Source, record_reader: RecordReader, limit: int | None) -> None:
        self._rows: Feed[InputRow] = Feed(source, limit)
        self._record_reader = record_reader

    def tasks(self) -> Feed[RecordTask]:
        return Feed(Spread(self._rows, self._record_reader.tasks))

    def retrieval(self) -> dict[str, Any] | None:
        return None

    def notes(self) -> list[str]:
        return []


class SharedOrder:
    """Windows of rows, each planned before its first record is answered."""

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
        self._read: list[ReadRow] = []  # rows of the window being read
        self._filled: list[ReadRow] = []  # rows of the oldest window that have their contexts
        self._missing: list[int] = []  # rows of each open window, oldest first
        self._stage = Stage(session.retriever, lambda read: read.task.query, _with_hits) if session.retriever else None
        self._tally = PassageTally()
        self._ratio = 0.0  # tokens per character

    def tasks(self) -> Feed[RecordTask]:
        read: Feed[ReadRow] = Feed(Spread(self._rows, self._read_row, self._end_window))
        if self._stage is not None:
            read = Feed(self._stage.fill(read))
        return Feed(Spread(read, self._collect))

    def retrieval(self) -> dict[str, Any] | None:
        return self._stage.to_json() if self._stage is not None else None

    def notes(self) -> list[str]:
        return [self._savings("was")] if self._tally.total else []

    # -- windows -----------------------------------------------------------------------------------

    def _read_row(self, row: InputRow) -> Iterable[ReadRow]:
        """Add a row; return its window if the row completes it."""
        number = next(self._numbers)
        within = self._limit is None or number <= self._limit
        read = self._record_reader.read(row) if within else self._record_reader.read_past_limit(row)
        if read is not None:
            self._read.append(read)
        return self._end_window() if number % self._config.order_window == 0 else []

    def _end_window(self) -> list[ReadRow]:
        """Return the window that was read, or nothing if none of it is to be answered."""
        window, self._read = self._read, []
        if not any(read.wanted for read in window):
            return []
        self._missing.append(len(window))
        return window

    def _collect(self, read: ReadRow) -> list[RecordTask]:
        """Add a row that has its contexts; return its window's tasks if the row completes it."""
        self._filled.append(read)
        if len(self._filled) < self._missing[0]:
            return []
        del self._missing[0]
        window, self._filled = self._filled, []
        return self._ordered(window)

    def _ordered(self, window: list[ReadRow]) -> list[RecordTask]:
        """Return a window's tasks in shared order: records that start alike are adjacent."""
        passages = PassageNumbers()
        records = [passages.of(read.task.record, self._config.max_passages) for read in window]
        plan = shared_order(records, passages.weights, self._config.keep_first)
        self._tally.add(plan)
        if not self._ratio and self._tally.total:
            self._ratio = passages.tokens_per_character(self._tokenizer)
            self._say(self._savings("is"))
        wanted = [(window[i].task, records[i], plan.orders[i]) for i in plan.sequence if window[i].wanted]
        return [replace(task, record=passages.arranged(task.record, own, order)) for task, own, order in wanted]

    def _savings(self, verb: str) -> str:
        tally = self._tally
        saved = round((tally.by_rank - tally.computed) * self._ratio)
        return (
            f"prompt.order shared: {tally.computed / tally.total:.0%} of the passages' text {verb} computed, in place "
            f"of {tally.by_rank / tally.total:.0%} in rank order: some {saved:,} tokens fewer"
        )


def _rows_read(limit: int | None, window: int, keeps_waiting: bool) -> int | None:
    """Return how many rows to read for `limit` answers: whole windows, but from a pipe only `limit`."""
    return limit if limit is None or keeps_waiting else -(-limit // window) * window


def _with_hits(read: ReadRow, hits: list[Any]) -> ReadRow:
    return replace(read, task=replace(with_contexts(read.task, hits), query=None))
