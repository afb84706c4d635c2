"""Questions without contexts -> the same with them, searched in batches on a separate thread, ahead of the model.

What has no question passes unchanged. A batch is what has arrived, so that one which none follows is not kept waiting.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from ragspec.inputs.feed import Feed
from ragspec.retrieval.search import Hit, Retriever

T = TypeVar("T")
BATCH = 16  # items whose questions are searched together
AHEAD = 16  # batches that may wait for the model


@dataclass(slots=True)
class Batch(Generic[T]):
    """Items under way: `found` is for those at `places`, in order."""

    items: list[T]
    places: list[int]
    found: Future[list[list[Hit]]] | None

    @property
    def done(self) -> bool:
        """Whether nobody need wait for it."""
        return self.found is None or self.found.done()


class Stage(Generic[T]):
    """Searches for questions, and counts what it cost.

    `search_s`: seconds of the searches; `waited_s`: those that the reader spent waiting for them. The first batch is
    not counted there: it cannot come sooner. query_of: an item's question, None where it needs no contexts. with_hits:
    an item with what was found for it.
    """

    def __init__(
        self,
        retriever: Retriever,
        query_of: Callable[[T], str | None],
        with_hits: Callable[[T, list[Hit]], T],
    ) -> None:
        self.queries = 0
        self.search_s = 0.0
        self.waited_s = 0.0
        self._retriever = retriever
        self._query_of = query_of
        self._with_hits = with_hits

    def fill(self, items: Iterable[T]) -> Filled[T]:
        """Return `items` in order, those with questions with what was found for them; `close` it after use.

        If the input breaks off, what came before the break is returned first, then its ConfigError is raised.
        """
        return Filled(self, Feed(items))

    def to_json(self) -> dict[str, Any]:
        """Return what the statistics say about the searches."""
        return retrieval_statistics(self._retriever.mode, self.queries, self.search_s, self.waited_s)

    def begin(self, items: list[T], pool: ThreadPoolExecutor) -> Batch[T]:
        """Return `items` with the search for them under way."""
        queries = {place: query for place, item in enumerate(items) if (query := self._query_of(item)) is not None}
        found = pool.submit(self._search, list(queries.values())) if queries else None
        return Batch(items, list(queries), found)

    def _search(self, queries: list[str]) -> list[list[Hit]]:
        started = time.perf_counter()
        found = self._retriever.search(queries)
        self.search_s += time.perf_counter() - started
        self.queries += len(queries)
        return found

    def end(self, batch: Batch[T], first: bool) -> list[T]:
        """Return the items of a batch with what was found; wait for it, if need be."""
        if batch.found is None:
            return batch.items
        started = time.perf_counter()
        found = batch.found.result()
        if not first:
            self.waited_s += time.perf_counter() - started
        for place, hits in zip(batch.places, found, strict=True):
            batch.items[place] = self._with_hits(batch.items[place], hits)
        return batch.items


def retrieval_statistics(mode: str, queries: int, search_s: float, waited_s: float) -> dict[str, Any]:
    """Return what the statistics say about searches: see Stage."""
    return {
        "mode": mode,
        "queries": queries,
        "search_s": round(search_s, 4),
        "ms_per_query": round(1000 * search_s / queries, 2) if queries else None,
        "waited_s": round(waited_s, 4),
    }


class Filled(Generic[T]):
    """The items with their contexts (a Pollable, see feed.py): batches of what has arrived are searched ahead."""

    def __init__(self, stage: Stage[T], items: Feed[T]) -> None:
        self._stage = stage
        self._items = items
        self._ready: deque[T] = deque()
        self._searched: deque[Batch[T]] = deque()
        self._first = True
        self._pool = ThreadPoolExecutor(1, "retrieval")

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if not self._ready:
            self._look_ahead(wait=True)
            self._finish()
        return self._ready.popleft()

    def poll(self) -> T | None:
        """Return the next item, or None if none has arrived, or only ones that are still being searched."""
        if not self._ready:
            pressed = self._look_ahead(wait=False)
            if not pressed and not self._items.over and not (self._searched and self._searched[0].done):
                return None
            self._finish()
        return self._ready.popleft()

    def close(self) -> None:
        """End the searches under way."""
        self._pool.shutdown(cancel_futures=True)
        self._items.close()

    def _look_ahead(self, *, wait: bool) -> bool:
        """Search what has arrived, as far as there is room; return whether there is more.

        wait: for one item, if none is being searched.
        """
        while not self._items.over:
            if len(self._searched) == AHEAD:
                return True
            items = self._items.take(BATCH, wait=wait and not self._searched)
            if items:
                self._searched.append(self._stage.begin(items, self._pool))
            if len(items) < BATCH:
                return False
        return False

    def _finish(self) -> None:
        """Make the rows of the first batch ready. If there is none, raise what ended the input."""
        if self._searched:
            self._ready.extend(self._stage.end(self._searched.popleft(), self._first))
            self._first = False
        else:
            self._ready.append(next(self._items))
