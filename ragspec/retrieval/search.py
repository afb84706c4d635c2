"""Search an index, and evaluate it: `Retriever(config.retrieval).search(["why?"])` -> a list of passages per query."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from ragspec.config.sections import RetrievalConfig
from ragspec.errors import ConfigError, RecordError
from ragspec.inputs.base import InputRow
from ragspec.inputs.values import id_text
from ragspec.records import Passage
from ragspec.retrieval.embedding import Embedder, Reranker
from ragspec.retrieval.index import Index, searched


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage found by a search, and its document."""

    passage: Passage
    document: str


class Retriever:
    """Searches one index. Raises ConfigError if it is missing or was built with another model.

    Modes: bm25 (words), dense (vectors), hybrid (both, by reciprocal rank fusion: Cormack et al. 2009). `auto` is
    hybrid if the index has vectors, else bm25. A reranker reorders the best `candidates`.
    """

    def __init__(self, config: RetrievalConfig) -> None:
        self._config = config
        self.index = Index(config.index, config.storage_options)
        built_with = self.index.settings.embedding_model
        if config.embedding_model and config.embedding_model != built_with:
            raise ConfigError(
                f'retrieval.embedding_model: "{config.embedding_model}": the index {config.index} was built with '
                f"{built_with or 'none'}; name that one, or build the index again"
            )
        self.mode = config.mode if config.mode != "auto" else "hybrid" if built_with else "bm25"
        if self.mode != "bm25" and not built_with:
            raise ConfigError(
                f'retrieval.mode: "{self.mode}": the index {config.index} has no vectors; build it with '
                "--embedding-model, or use bm25"
            )
        self._embedder = Embedder(built_with) if built_with and self.mode != "bm25" else None
        if built_with and self._embedder:
            self.index.check_model(built_with, self._embedder.probe)
        self._reranker = Reranker(config.reranker_model) if config.reranker_model else None

    def notes(self) -> list[str]:
        """Return notes for the user about the index."""
        return [self.index.outdated] if self.index.outdated and self.mode != "dense" else []

    def search(self, queries: Sequence[str], top_k: int | None = None) -> list[list[Hit]]:
        """Return the best `top_k` passages of each query, in the config's order. top_k: the config's by default."""
        count = top_k or self._config.top_k
        vectors: Any = self._embedder.queries(queries) if self._embedder else [None] * len(queries)
        return [self._one(query, vector, count) for query, vector in zip(queries, vectors, strict=True)]

    def _one(self, query: str, vector: Any, count: int) -> list[Hit]:
        depth = max(count, self._config.candidates)
        if self.mode == "bm25":
            rows = self.index.match(query, depth if self._reranker else count)
        elif self.mode == "dense":
            rows = self.index.near(vector, depth if self._reranker else count)
        else:
            rows = self.index.fused(query, vector, depth)
        if self._reranker and rows:
            scores = self._reranker.scores(query, [searched(row["title"], row["text"]) for row in rows])
            rows = [row | {"score": score} for row, score in zip(rows, scores, strict=True)]
            rows.sort(key=lambda row: -row["score"])
        best = rows[:count]
        if self._config.order == "canonical":  # the same passages make the same prefix, whatever their ranks
            best.sort(key=lambda row: row["id"])
        return [
            Hit(Passage(row["id"], row["text"], row["title"], round(row["score"], 6)), row["document"]) for row in best
        ]


# -- evaluation ------------------------------------------------------------------------------------

GOLD = "gold_doc_ids"
CUTS = (5, 10)
DEPTH = 50  # passages per query, as several may be of one document


def _gold_of(value: dict[str, Any]) -> set[str]:
    """Return the ids of a row's gold documents as the index has them; a single id needs no list."""
    given = value.get(GOLD)
    try:
        ids = map(id_text, given if isinstance(given, list) else [given])
        return {name for name in ids if name is not None}
    except RecordError:
        return set()


def evaluate(rows: Iterable[InputRow], retriever: Retriever) -> dict[str, Any]:
    """Return recall at 5 and 10, MRR at 10, the number of queries, and the median milliseconds per query.

    rows: each with a `query` and `gold_doc_ids`; others are counted as left out. Recall is the share of a query's gold
    documents among its first k documents, averaged over queries. Raises ConfigError if no row counts.
    """
    recalls: dict[int, list[float]] = {cut: [] for cut in CUTS}
    ranks, times, left_out = [], [], 0
    for row in rows:
        value = row.value
        wanted = _gold_of(value) if isinstance(value, dict) else set()
        if not (wanted and isinstance(value.get("query"), str) and value["query"].strip()):
            left_out += 1
            continue
        started = time.perf_counter()
        hits = retriever.search([value["query"]], DEPTH)[0]
        times.append(1000 * (time.perf_counter() - started))
        ranked = list(dict.fromkeys(hit.document for hit in sorted(hits, key=lambda hit: -(hit.passage.score or 0))))
        for cut, found in recalls.items():
            found.append(len(wanted.intersection(ranked[:cut])) / len(wanted))
        ranks.append(next((1 / rank for rank, name in enumerate(ranked[: max(CUTS)], 1) if name in wanted), 0.0))
    if not times:
        raise ConfigError(f'--evaluate: no line with a "query" and its "{GOLD}" (ids of the documents that answer it)')
    result: dict[str, Any] = {f"recall@{cut}": round(mean(found), 4) for cut, found in recalls.items()}
    result |= {"mrr": round(mean(ranks), 4), "queries": len(times), "ms_per_query": round(median(times), 2)}
    return result | ({"left_out": left_out} if left_out else {}) | {"mode": retriever.mode}
