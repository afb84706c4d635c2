"""Lines without contexts -> the same lines with them, searched in batches on a thread of its own, ahead of the model.

A line keeps its raw bytes, so a resumed run knows it again. Lines with contexts, and those without a query, pass as
they are. Lines are read on the reader's own thread, so an interruption finds nobody else in the input.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from ragspec.errors import ConfigError
from ragspec.jsonl import Line
from ragspec.records import Passage
from ragspec.retrieval.search import Hit, Retriever

BATCH = 16  # lines whose questions are searched together
AHEAD = 16  # batches that may wait for the model


@dataclass(slots=True)
class Batch:
    """Lines under way: `found` is for those at `places`, in order."""

    lines: list[Line]
    places: list[int]
    found: Future[list[list[Hit]]] | None


class Stage:
    """Fills contexts in, and counts what it cost.

    `search_s`: seconds of the searches; `waited_s`: those that the reader lost by them. The first batch is not counted
    there: nobody can have it sooner.
    """

    def __init__(self, retriever: Retriever, wanted: Callable[[Line], bool] = lambda _: True) -> None:
        self.queries = 0
        self.search_s = 0.0
        self.waited_s = 0.0
        self._retriever = retriever
        self._wanted = wanted  # whether a line matters: one that was answered before does not

    def fill(self, lines: Iterable[Line]) -> Iterator[Line]:
        """Yield `lines` in order, those that lack contexts with what was found for them.

        Where the input breaks off, what came before the break is yielded first, then its ConfigError raised.
        """
        waiting: deque[Batch] = deque()
        source, broken = iter(lines), None
        ended, first = False, True
        pool = ThreadPoolExecutor(1, "retrieval")
        try:
            while waiting or not ended:
                while not ended and len(waiting) < AHEAD:
                    batch: list[Line] = []
                    try:
                        while len(batch) < BATCH and (line := next(source, None)) is not None:
                            batch.append(line)
                    except ConfigError as error:
                        broken = error
                    ended = len(batch) < BATCH
                    waiting.append(self._submit(batch, pool))
                yield from self._finish(waiting.popleft(), first)
                first = False
        finally:
            pool.shutdown(cancel_futures=True)
        if broken:
            raise broken

    def to_json(self) -> dict[str, Any]:
        """Return what the statistics say of the searches."""
        each = round(1000 * self.search_s / self.queries, 2) if self.queries else None
        return {
            "mode": self._retriever.mode,
            "queries": self.queries,
            "search_s": round(self.search_s, 4),
            "ms_per_query": each,
            "waited_s": round(self.waited_s, 4),
        }

    def _submit(self, lines: list[Line], pool: ThreadPoolExecutor) -> Batch:
        places = [place for place, line in enumerate(lines) if lacks_contexts(line.value) and self._wanted(line)]
        queries = [lines[place].value["query"] for place in places]
        return Batch(lines, places, pool.submit(self._search, queries) if queries else None)

    def _search(self, queries: list[str]) -> list[list[Hit]]:
        started = time.perf_counter()
        found = self._retriever.search(queries)
        self.search_s += time.perf_counter() - started
        self.queries += len(queries)
        return found

    def _finish(self, batch: Batch, first: bool) -> list[Line]:
        if batch.found is None:
            return batch.lines
        started = time.perf_counter()
        found = batch.found.result()
        if not first:
            self.waited_s += time.perf_counter() - started
        for place, hits in zip(batch.places, found, strict=True):
            line = batch.lines[place]
            contexts = [_context(hit.passage) for hit in hits]
            batch.lines[place] = replace(line, value={**line.value, "contexts": contexts})
        return batch.lines


def lacks_contexts(value: Any) -> bool:
    """Return whether a line's value has a question and no contexts: an empty list of them is a wish for none."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("query"), str)
        and bool(value["query"].strip())
        and value.get("contexts") is None
    )


def _context(passage: Passage) -> dict[str, Any]:
    title = {"title": passage.title} if passage.title else {}
    return {"id": passage.id, **title, "text": passage.text, "score": passage.score}
