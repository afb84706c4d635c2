"""Contexts for records that lack them: queries are searched in batches on a thread, ahead of the model.

Items without a query pass unchanged. A batch is what has arrived so far, so a last item never waits for more.
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
BATCH = 16  # items searched together
AHEAD = 16  # batches searched ahead of the model


@dataclass(slots=True)
class Batch(Generic[T]):
    """Items being searched. `found` holds the hits of the items at `places`, in order."""

    items: list[T]
    places: list[int]
    found: Future[list[list[Hit]]] | None

    @property
    def done(self) -> bool:
        """Return whether the hits are available."""
        return self.found is None or self.found.done()


class Stage(Generic[T]):
    """Searches contexts and counts the time.

    Args:
        retriever: the index.
        query_of: returns an item's query, None if it needs no contexts.
        with_hits: returns an item with its hits.

    `search_s` is the time of the searches; `waited_s` is the time that the reader waited for them, not counting the
    first batch, which cannot be searched ahead.
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
        """Return `items` in order with the hits for their queries. Close it after use.

        If the input fails, its ConfigError is raised after the items before it.
        """
        return Filled(self, Feed(items))

    def to_json(self) -> dict[str, Any]:
        """Return the `retrieval` object of the statistics."""
        return retrieval_statistics(self._retriever.mode, self.queries, self.search_s, self.waited_s)

    def begin(self, items: list[T], pool: ThreadPoolExecutor) -> Batch[T]:
        """Start the search for `items`."""
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
        """Return a batch's items with their hits, waiting for the search if necessary. first: do not count the wait."""
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
    """Return the `retrieval` object of the statistics; see Stage."""
    return {
        "mode": mode,
        "queries": queries,
        "search_s": round(search_s, 4),
        "ms_per_query": round(1000 * search_s / queries, 2) if queries else None,
        "waited_s": round(waited_s, 4),
    }


class Filled(Generic[T]):
    """The items with their contexts, as a Pollable (feed.py)."""

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
        """Return the next item, or None if none is available yet."""
        if not self._ready:
            is_full = self._look_ahead(wait=False)
            if not is_full and not self._items.over and not (self._searched and self._searched[0].done):
                return None
            self._finish()
        return self._ready.popleft()

    def close(self) -> None:
        """Cancel pending searches and close the input."""
        self._pool.shutdown(cancel_futures=True)
        self._items.close()

    def _look_ahead(self, *, wait: bool) -> bool:
        """Start searches for the available items while there is room; return whether there is no room left.

        wait: block for one item if nothing is being searched.
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
        """Make the first batch's items ready. Without a batch, take or raise the input's next item or error."""
        if self._searched:
            self._ready.extend(self._stage.end(self._searched.popleft(), self._first))
            self._first = False
        else:
            self._ready.append(next(self._items))
