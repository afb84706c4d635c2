"""How well an index answers questions whose documents are known: recall, mean reciprocal rank, time."""

from __future__ import annotations

import time
from collections.abc import Iterable
from statistics import mean, median
from typing import Any

from ragspec.errors import ConfigError
from ragspec.inputs.base import Row
from ragspec.retrieval.search import Retriever

GOLD = "gold_doc_ids"
CUTS = (5, 10)
DEPTH = 50  # passages: several may be of one document


def evaluate(rows: Iterable[Row], retriever: Retriever) -> dict[str, Any]:
    """Return recall at 5 and 10, MRR (at 10), the number of queries, and the median milliseconds of one.

    Each row has a `query` and `gold_doc_ids`; those without are not counted. Recall is the share of a query's gold
    documents among its first k documents, averaged over queries. Raises ConfigError if there is none to count.
    """
    recalls: dict[int, list[float]] = {cut: [] for cut in CUTS}
    ranks, times, left_out = [], [], 0
    for row in rows:
        value = row.value
        gold = value.get(GOLD) if isinstance(value, dict) else None
        if not (isinstance(gold, list) and gold and isinstance(value.get("query"), str)):
            left_out += 1
            continue
        started = time.perf_counter()
        hits = retriever.search([value["query"]], DEPTH)[0]
        times.append(1000 * (time.perf_counter() - started))
        ranked = list(dict.fromkeys(hit.document for hit in sorted(hits, key=lambda hit: -(hit.passage.score or 0))))
        wanted = {str(name) for name in gold}
        for cut, found in recalls.items():
            found.append(len(wanted.intersection(ranked[:cut])) / len(wanted))
        ranks.append(next((1 / rank for rank, name in enumerate(ranked[: max(CUTS)], 1) if name in wanted), 0.0))
    if not times:
        raise ConfigError(f'--evaluate: no line with a "query" and its "{GOLD}" (ids of the documents that answer it)')
    result: dict[str, Any] = {f"recall@{cut}": round(mean(found), 4) for cut, found in recalls.items()}
    result |= {"mrr": round(mean(ranks), 4), "queries": len(times), "ms_per_query": round(median(times), 2)}
    return result | ({"left_out": left_out} if left_out else {}) | {"mode": retriever.mode}
