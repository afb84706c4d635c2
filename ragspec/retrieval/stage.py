"""Rows without contexts -> the same rows with them, searched in batches on a separate thread, ahead of the model.

A row keeps its raw bytes, so a resumed run recognises it. Rows with contexts, and those without a query, pass
unchanged. A batch is what has arrived, so that a row which none follows is not kept waiting.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Self

from ragspec.inputs.base import Row
from ragspec.inputs.feed import Feed
from ragspec.records import Passage
from ragspec.retrieval.search import Hit, Retriever

BATCH = 16  # rows whose questions are searched together
AHEAD = 16  # batches that may wait for the model


@dataclass(slots=True)
class Batch:
    """Rows under way: `found` is for those at `places`, in order."""

    rows: list[Row]
    places: list[int]
    found: Future[list[list[Hit]]] | None

    @property
    def done(self) -> bool:
        """Whether nobody need wait for it."""
        return self.found is None or self.found.done()


class Stage:
    """Fills contexts in, and counts what it cost.

    `search_s`: seconds of the searches; `waited_s`: those that the reader spent waiting for them. The first batch is
    not counted there: it cannot come sooner.
    """

    def __init__(self, retriever: Retriever, wanted: Callable[[Row], bool] = lambda _: True) -> None:
        self.queries = 0
        self.search_s = 0.0
        self.waited_s = 0.0
        self._retriever = retriever
        self._wanted = wanted  # whether a row matters: one that has been answered does not

    def fill(self, rows: Iterable[Row]) -> Filled:
        """Return `rows` in order, those that lack contexts with what was found for them; `close` it after use.

        If the input breaks off, what came before the break is returned first, then its ConfigError is raised.
        """
        return Filled(self, Feed(rows))

    def to_json(self) -> dict[str, Any]:
        """Return what the statistics say about the searches."""
        each = round(1000 * self.search_s / self.queries, 2) if self.queries else None
        return {
            "mode": self._retriever.mode,
            "queries": self.queries,
            "search_s": round(self.search_s, 4),
            "ms_per_query": each,
            "waited_s": round(self.waited_s, 4),
        }

    def begin(self, rows: list[Row], pool: ThreadPoolExecutor) -> Batch:
        """Return `rows` with the search for them under way."""
        places = [place for place, row in enumerate(rows) if lacks_contexts(row.value) and self._wanted(row)]
        queries = [rows[place].value["query"] for place in places]
        return Batch(rows, places, pool.submit(self._search, queries) if queries else None)

    def _search(self, queries: list[str]) -> list[list[Hit]]:
        started = time.perf_counter()
        found = self._retriever.search(queries)
        self.search_s += time.perf_counter() - started
        self.queries += len(queries)
        return found

    def end(self, batch: Batch, first: bool) -> list[Row]:
        """Return the rows of a batch with what was found; wait for it, if need be."""
        if batch.found is None:
            return batch.rows
        started = time.perf_counter()
        found = batch.found.result()
        if not first:
            self.waited_s += time.perf_counter() - started
        for place, hits in zip(batch.places, found, strict=True):
            row = batch.rows[place]
            contexts = [_context(hit.passage) for hit in hits]
            batch.rows[place] = replace(row, value={**row.value, "contexts": contexts})
        return batch.rows


class Filled:
    """The rows with their contexts (a Pollable, see feed.py): batches of what has arrived are searched ahead."""

    def __init__(self, stage: Stage, rows: Feed[Row]) -> None:
        self._stage = stage
        self._rows = rows
        self._ready: deque[Row] = deque()
        self._searched: deque[Batch] = deque()
        self._first = True
        self._pool = ThreadPoolExecutor(1, "retrieval")

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Row:
        if not self._ready:
            self._look_ahead(wait=True)
            self._finish()
        return self._ready.popleft()

    def poll(self) -> Row | None:
        """Return the next row, or None if none has arrived, or only ones that are still being searched."""
        if not self._ready:
            pressed = self._look_ahead(wait=False)
            if not pressed and not self._rows.over and not (self._searched and self._searched[0].done):
                return None
            self._finish()
        return self._ready.popleft()

    def close(self) -> None:
        """End the searches under way."""
        self._pool.shutdown(cancel_futures=True)
        self._rows.close()

    def _look_ahead(self, *, wait: bool) -> bool:
        """Search what has arrived, as far as there is room; return whether there is more.

        wait: for one row, if none is being searched.
        """
        while not self._rows.over:
            if len(self._searched) == AHEAD:
                return True
            rows = self._rows.take(BATCH, wait=wait and not self._searched)
            if rows:
                self._searched.append(self._stage.begin(rows, self._pool))
            if len(rows) < BATCH:
                return False
        return False

    def _finish(self) -> None:
        """Make the rows of the first batch ready. If there is none, raise what ended the rows."""
        if self._searched:
            self._ready.extend(self._stage.end(self._searched.popleft(), self._first))
            self._first = False
        else:
            self._ready.append(next(self._rows))


def lacks_contexts(value: Any) -> bool:
    """Return whether a row's value has a question and no contexts: an empty list asks for none."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("query"), str)
        and bool(value["query"].strip())
        and value.get("contexts") is None
    )


def _context(passage: Passage) -> dict[str, Any]:
    title = {"title": passage.title} if passage.title else {}
    return {"id": passage.id, **title, "text": passage.text, "score": passage.score}
