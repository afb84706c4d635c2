"""`ragspec retrieve`: JSONL in, the same lines with contexts out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from ragspec.config import RetrievalConfig
from ragspec.errors import RecordError
from ragspec.journal import Journal
from ragspec.jsonl import Lines
from ragspec.retrieval.evaluate import evaluate
from ragspec.retrieval.search import Retriever
from ragspec.retrieval.stage import Stage


@dataclass(slots=True)
class Passed:
    """What went through the filter, in lines."""

    searched: int = 0
    untouched: int = 0
    failed: int = 0


def stream(config: RetrievalConfig, source: str, output: str, limit: int | None = None) -> Passed:
    """Copy the lines of `source` to `output`, contexts filled in; a line that is no JSON becomes an error line."""
    passed = Passed()
    with Lines(source) as lines:
        stage = Stage(Retriever(config))
        with Journal(output, resume=False) as journal:
            for index, line in enumerate(stage.fill(islice(lines, limit))):
                if isinstance(line.value, RecordError):
                    passed.failed += 1
                    message = str(line.value)
                    error = {"type": "RecordError", "message": message}
                    journal.put(index, {"id": str(line.number), "line": line.number, "error": error})
                else:
                    journal.put(index, line.value)
                    passed.untouched += 1
    passed.searched = stage.queries
    passed.untouched -= stage.queries
    return passed


def measure(config: RetrievalConfig, source: str, output: str, limit: int | None = None) -> None:
    """Write one object: how well the index answers the lines of `source`, whose documents are known."""
    with Lines(source) as lines:
        result = evaluate(islice(lines, limit), Retriever(config))
    with Journal(output, resume=False) as journal:
        journal.put(0, result)
