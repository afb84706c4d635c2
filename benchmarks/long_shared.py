"""Shuffled questions over a few long documents: neighbours of a corpus, joined, and queries about what they hold.

    python benchmarks/long_shared.py corpus.jsonl corpus_queries.jsonl 8 > long.jsonl

Passages are neighbours by their ids. Documents have at least 1,500, 2,500, 3,300 and 4,000 words (2,000 to 6,000
tokens), and as many questions each as asked for. The order is that of seed 0.
"""

import json
import random
import sys
from pathlib import Path

WORDS = [1500, 2500, 3300, 4000]


def main(corpus: str, queries: str, count: int) -> None:
    """Write `count` records for each document to stdout."""
    passages = iter(sorted(_read(corpus), key=lambda passage: passage["id"], reverse=True))
    asked = _read(queries)
    records = []
    for number, words in enumerate(WORDS):
        text, held = "", set[str]()
        while len(text.split()) < words or len(_about(asked, held)) < count:
            passage = next(passages)
            held.add(passage["id"])
            text += f"{passage['text']}\n"
        context = {"id": f"document-{number}", "text": text.strip()}
        records += [
            {"id": query["id"], "query": query["query"], "contexts": [context]} for query in _about(asked, held)[:count]
        ]
    random.Random(0).shuffle(records)
    for record in records:
        print(json.dumps(record, ensure_ascii=True))


def _read(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def _about(queries: list[dict], held: set[str]) -> list[dict]:
    """Return the queries whose passages are all held."""
    return [query for query in queries if held.issuperset(query["gold_doc_ids"])]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
