"""What an index of many passages takes: python benchmarks/retrieval_scale.py CORPUS.jsonl QUERIES.jsonl 100000 FOLDER

Passages are words drawn from the corpus in the corpus's own lengths, so that term frequencies are real; vectors are
random, as search time does not depend on what they mean (their recall is against an exact scan of the same ones).
"""

import json
import random
import resource
import sys
import time
from pathlib import Path
from statistics import median

import numpy

from ragspec.retrieval.index import Chunk, Index, Settings, Writer

DIMENSION = 384
STEP = 10_000


def unit(rng, count):
    """Return random vectors of length 1: (count, DIMENSION)."""
    vectors = rng.standard_normal((count, DIMENSION), dtype=numpy.float32)
    return vectors / numpy.linalg.norm(vectors, axis=1, keepdims=True)


def timed(search, items):
    """Return the median milliseconds of a search."""
    for item in items[:5]:
        search(item)
    took = []
    for item in items:
        started = time.perf_counter()
        search(item)
        took.append(1000 * (time.perf_counter() - started))
    return round(median(took), 2)


def main(corpus, queries, count, folder):
    """Build an index of `count` passages in `folder` and print what it takes."""
    texts = [json.loads(line)["text"].split() for line in Path(corpus).read_text().splitlines()]
    asked = [json.loads(line)["query"] for line in Path(queries).read_text().splitlines()][:100]
    words, lengths = [word for text in texts for word in text], [len(text) for text in texts]
    rng, vectors = random.Random(0), numpy.random.default_rng(0)
    writer = Writer(folder, None, Settings(512, 64, "words", "English", "random", DIMENSION))
    started = time.perf_counter()
    for begin in range(0, count, STEP):
        size = min(STEP, count - begin)
        chunks = [
            Chunk(
                f"d{begin + i}",
                f"d{begin + i}",
                f"{begin + i:024x}",
                None,
                " ".join(rng.choices(words, k=rng.choice(lengths))),
            )
            for i in range(size)
        ]
        writer.add(chunks, unit(vectors, size))
    written = time.perf_counter()
    writer.finish()
    ended = time.perf_counter()
    index, points = Index(folder), list(unit(vectors, len(asked)))
    exact = [{row["id"] for row in _exact(index, point)} for point in points[:20]]
    near = [{row["id"] for row in index.near(point, 10)} for point in points[:20]]
    print(
        json.dumps(
            {
                "passages": index.rows,
                "write_s": round(written - started, 1),
                "index_s": round(ended - written, 1),
                "disk_mb": round(sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file()) / 1e6),
                "bm25_ms": timed(lambda query: index.match(query, 5), asked),
                "dense_ms": timed(lambda point: index.near(point, 5), points),
                "hybrid_ms": timed(lambda pair: index.fused(*pair, 50), list(zip(asked, points, strict=True))),
                "dense_recall@10": round(numpy.mean([len(a & b) / 10 for a, b in zip(exact, near, strict=True)]), 3),
                "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
        )
    )


def _exact(index, point):
    search = index._table.search(point, vector_column_name="vector").distance_type("dot").bypass_vector_index()
    return search.select(["id", "_distance"]).limit(10).to_list()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
