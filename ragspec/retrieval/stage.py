"""Lines without contexts -> the same lines with them, searched in batches on a thread of its own, ahead of the model.

A line keeps its raw bytes, so a resumed run knows it again. Lines with contexts, and those without a
query, pass as they are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from queue import Full, Queue
from typing import Any, Generic, TypeVar

from ragspec.errors import RagspecError
from ragspec.jsonl import Line
from ragspec.records import Passage
from ragspec.retrieval.search import Retriever

T = TypeVar("T")
BATCH = 16  # questions that are embedded together
AHEAD = 256  # lines that may wait for the model
POLL_S = 0.1


def lacks_contexts(value: Any) -> bool:
    """Return whether a line's value has a question and no contexts: an empty list of them is a wish for none."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("query"), str)
        and bool(value["query"].strip())
        and value.get("contexts") is None
    )


class Stage:
    """Fills contexts in, and counts what it cost: `queries`, and the seconds of the searches in `search_s`."""

    def __init__(self, retriever: Retriever, wanted: Callable[[Line], bool] = lambda _: True) -> None:
        self.queries = 0
        self.search_s = 0.0
        self._retriever = retriever
        self._wanted = wanted  # whether a line matters: one that was answered before does not

    def fill(self, lines: Iterable[Line]) -> Iterator[Line]:
        """Yield `lines` in order, those that lack contexts with what was found for them."""
        batch: list[Line] = []
        for line in lines:
            batch.append(line)
            if len(batch) == BATCH:
                yield from self._filled(batch)
                batch = []
        yield from self._filled(batch)

    def to_json(self) -> dict[str, Any]:
        """Return what the statistics say of the searches."""
        each = round(1000 * self.search_s / self.queries, 2) if self.queries else None
        return {
            "mode": self._retriever.mode,
            "queries": self.queries,
            "search_s": round(self.search_s, 4),
            "ms_per_query": each,
        }

    def _filled(self, batch: list[Line]) -> list[Line]:
        places = [place for place, line in enumerate(batch) if lacks_contexts(line.value) and self._wanted(line)]
        if not places:
            return batch
        started = time.perf_counter()
        found = self._retriever.search([batch[place].value["query"] for place in places])
        self.search_s += time.perf_counter() - started
        self.queries += len(places)
        for place, hits in zip(places, found, strict=True):
            contexts = [_context(hit.passage) for hit in hits]
            batch[place] = replace(batch[place], value={**batch[place].value, "contexts": contexts})
        return batch


def _context(passage: Passage) -> dict[str, Any]:
    title = {"title": passage.title} if passage.title else {}
    return {"id": passage.id, **title, "text": passage.text, "score": passage.score}


class Ahead(Generic[T]):
    """Runs an iterator on a thread, up to `AHEAD` items in front of who reads; `waited_s` is what the reader lost.

    The first item is not counted: nobody can have it sooner. Errors come out where the item would have.
    """

    def __init__(self, items: Iterator[T]) -> None:
        self.waited_s = 0.0
        self._items = items
        self._queue: Queue[tuple[str, Any]] = Queue(AHEAD)
        self._gone = threading.Event()

    def __iter__(self) -> Iterator[T]:
        thread = threading.Thread(target=self._work, name="retrieval", daemon=True)
        thread.start()
        first = True
        try:
            while True:
                started = time.perf_counter()
                kind, item = self._queue.get()
                if not first:
                    self.waited_s += time.perf_counter() - started
                first = False
                if kind == "end":
                    return
                if kind == "error":
                    raise item
                yield item
        finally:
            self._gone.set()

    def _work(self) -> None:
        try:
            for item in self._items:
                if not self._put("item", item):
                    return
            self._put("end", None)
        except RagspecError as error:
            self._put("error", error)
        except Exception as error:
            self._put("error", RagspecError(f"retrieval: {' '.join(str(error).split())[:300]}"))

    def _put(self, kind: str, item: Any) -> bool:
        """Hand over an item; return False where nobody reads any more."""
        while not self._gone.is_set():
            try:
                self._queue.put((kind, item), timeout=POLL_S)
                return True
            except Full:
                continue
        return False
