"""`ragspec retrieve`: copy JSONL with contexts added, or measure how well an index retrieves."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from ragspec.config.io import InputConfig, OutputConfig
from ragspec.config.sections import RetrievalConfig
from ragspec.errors import ConfigError, RecordError
from ragspec.inputs.base import InputRow, Source
from ragspec.inputs.columns import ALL, Columns
from ragspec.inputs.feed import Feed
from ragspec.inputs.record import lacks_contexts
from ragspec.inputs.record_ids import RecordIds
from ragspec.inputs.sources import open_source
from ragspec.inputs.storage import advising
from ragspec.json_text import dumps, loads
from ragspec.outputs.codecs import CSV, LANCE
from ragspec.outputs.journal import Journal
from ragspec.outputs.target import check_name
from ragspec.records import Passage
from ragspec.retrieval.search import Hit, Retriever, evaluate
from ragspec.retrieval.stage import Stage


@dataclass(slots=True)
class RetrieveCounts:
    """Lines by outcome, and notes for the user."""

    searched: int = 0
    untouched: int = 0
    failed: int = 0
    notes: list[str] = field(default_factory=list)


def stream(config: RetrievalConfig, source: InputConfig | str, output: str, limit: int | None = None) -> RetrieveCounts:
    """Copy the lines of `source` to `output` with contexts added; a line that is not JSON becomes an error line."""
    counts = RetrieveCounts()
    _check_output(output)
    columns = Columns(source.columns.given) if isinstance(source, InputConfig) else ALL
    with _opened(source) as lines:
        ids = RecordIds(lines)
        retriever = Retriever(config)
        counts.notes += retriever.notes()
        stage = Stage(retriever, query_of, with_hits)
        with Journal(output, resume=False) as journal, closing(stage.fill(Feed(lines, limit))) as filled:
            for index, line in enumerate(filled):
                if isinstance(line.value, RecordError):
                    counts.failed += 1
                    error = {"type": "RecordError", "message": f"{lines.where(line.number)}: {line.value}"}
                    journal.put(index, {"id": ids.generated(line), "line": line.number, "error": error})
                elif (written := _with_contexts(line, columns)) is not None:
                    counts.searched += 1
                    journal.put(index, written)
                else:
                    counts.untouched += 1
                    journal.put(index, line.text)
    return counts


def _check_output(output: str) -> None:
    """Raise ConfigError for a name whose format has columns for answers, and none for a record's other fields."""
    if output.rstrip("/").lower().endswith((".parquet", CSV, LANCE)):
        raise ConfigError(f"{output}: the output is JSON Lines; choose another name, such as NAME.jsonl")
    check_name(OutputConfig(path=output))


def _opened(source: InputConfig | str) -> Source:
    given = source.path if isinstance(source, InputConfig) else [source]
    with advising("--input takes a file of records with queries, or - for stdin", given):
        return open_source(source)


def query_of(row: InputRow) -> str | None:
    """Return the question to search with, None if the row needs no contexts."""
    return row.value["query"] if lacks_contexts(row.value) else None


def with_hits(row: InputRow, hits: list[Hit]) -> InputRow:
    """Return a row with its hits as contexts; the raw bytes, which identify it to a resumed run, stay."""
    return replace(row, value={**row.value, "contexts": [_context(hit.passage) for hit in hits]})


def _context(passage: Passage) -> dict[str, Any]:
    title = {"title": passage.title} if passage.title else {}
    return {"id": passage.id, **title, "text": passage.text, "score": passage.score}


def _with_contexts(row: InputRow, columns: Columns) -> bytes | None:
    """Return the row's line with contexts added, otherwise byte for byte; None if it was not searched."""
    raw = row.text.strip()
    before: Any = loads(raw)
    if not lacks_contexts(columns.of(before)):
        return None
    contexts = dumps(row.value["contexts"])
    if "contexts" in before:  # null: replaced
        return dumps({**before, "contexts": row.value["contexts"]})
    return raw.removesuffix(b"}").rstrip() + b',"contexts":' + contexts + b"}"


def measure(config: RetrievalConfig, source: InputConfig | str, output: str, limit: int | None = None) -> list[str]:
    """Write one object: how well the index retrieves for the lines of `source`, whose relevant documents are known.

    Return notes for the user.
    """
    _check_output(output)
    with _opened(source) as lines:
        retriever = Retriever(config)
        result = evaluate(islice(lines, limit), retriever)
    with Journal(output, resume=False) as journal:
        journal.put(0, result)
    return retriever.notes()
