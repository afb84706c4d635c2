"""The index on disk: one LanceDB table of passages, with full-text search and, if a model made them, vectors.

Lance keeps versions: a build writes new ones, and only its last act moves the tag `ready`, which readers follow. So a
build that dies leaves the index as it was, and the next one begins by going back to `ready`.
Source: LanceDB 0.40, tables, tags and full-text search. Limit: one build at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path
from typing import Any

import orjson

from ragspec.config.secret import revealed
from ragspec.errors import ConfigError, flat

TABLE = "chunks"
READY = "ready"
SETTINGS = b"ragspec"
FORMAT = 1
# parts of the vector index that a search looks into; LanceDB's 20 miss half of the nearest of 300,000 rows
PROBES = 64
COLUMNS = ["id", "document", "title", "text"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What an index was built with. Other settings make another index."""

    chunk_size: int
    chunk_overlap: int
    tokenizer: str
    language: str
    embedding_model: str | None = None
    dimension: int | None = None
    format: int = FORMAT


def connect(uri: str, options: dict[str, Any] | None = None) -> Any:
    """Return the database at a folder or an object store's address. Raises ConfigError."""
    lancedb = library()
    with failing(uri, "opened"):
        return lancedb.connect(revealed(uri), storage_options=revealed(options) or None)


class Index:
    """A finished index, open for reading. Raises ConfigError if there is none."""

    def __init__(self, uri: str, options: dict[str, Any] | None = None) -> None:
        missing = f'retrieval.index: "{uri}": no index there; build one: ragspec index --corpus FILES --output {uri}'
        if is_local(uri) and not Path(uri).is_dir():
            raise ConfigError(missing)
        with failing(uri, "opened"):
            table = open_table(connect(uri, options))
            if table is None or READY not in table.tags.list():
                raise ConfigError(missing)
            self._table = table
            self._table.checkout(READY)
            self.rows: int = self._table.count_rows()
        self.uri = uri
        self.settings = settings_of(self._table, uri)

    @property
    def identity(self) -> dict[str, Any]:
        """What an answer made from this index depends on."""
        version = self._table.version
        built = next(v["timestamp"] for v in self._table.list_versions() if v["version"] == version)
        return {"version": version, "built": built.astimezone(UTC).isoformat(), "rows": self.rows}

    def match(self, query: str, count: int) -> list[dict[str, Any]]:
        """Return the `count` best rows by BM25."""
        from lancedb.query import MatchQuery

        search = self._table.search(MatchQuery(query, "text"), query_type="fts")
        return self._rows(search, "_score", count)

    def near(self, vector: Any, count: int) -> list[dict[str, Any]]:
        """Return the `count` rows whose vectors are nearest; `score` is the cosine."""
        search = self._table.search(vector, vector_column_name="vector").distance_type("dot").nprobes(PROBES)
        rows = self._rows(search, "_distance", count)
        return [row | {"score": 1.0 - row["score"]} for row in rows]

    def fused(self, query: str, vector: Any, count: int) -> list[dict[str, Any]]:
        """Return the `count` best of each search, in the order of reciprocal rank fusion."""
        from lancedb.query import MatchQuery
        from lancedb.rerankers import RRFReranker

        search = self._table.search(query_type="hybrid", vector_column_name="vector", fts_columns="text")
        search = (
            search.vector(vector)
            .text(MatchQuery(query, "text"))
            .distance_type("dot")
            .nprobes(PROBES)
            .rerank(RRFReranker())
        )
        with failing(self.uri, "searched"):
            return [_row(row, "_relevance_score") for row in search.select(COLUMNS).limit(count).to_list()]

    def _rows(self, search: Any, score: str, count: int) -> list[dict[str, Any]]:
        with failing(self.uri, "searched"):
            return [_row(row, score) for row in search.select([*COLUMNS, score]).limit(count).to_list()]


@contextmanager
def failing(uri: str, what: str) -> Iterator[None]:
    """Turn what LanceDB raises into one line."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f'retrieval.index: "{uri}": cannot be {what} ({flat(error, 200)})') from error


def open_table(database: Any) -> Any:
    """Return the table of passages in its latest version, or None if there is none."""
    page = None
    while True:
        found = database.list_tables(page_token=page)
        if TABLE in found.tables:
            return database.open_table(TABLE)
        page = found.page_token
        if not page:
            return None


def is_local(uri: str) -> bool:
    """Return whether `uri` is a folder, not an object store's address."""
    return "://" not in uri


def settings_of(table: Any, uri: str) -> Settings:
    """Return what a table was built with. Raises ConfigError for what is not ours."""
    try:
        return Settings(**orjson.loads((table.schema.metadata or {})[SETTINGS]))
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f'retrieval.index: "{uri}": contains no index that this version of ragspec can read; choose another folder'
        ) from None


def searched(title: str | None, text: str) -> str:
    """Return the part of a passage that is searched and embedded: its title, on a line of its own, and its text."""
    return f"{title}\n{text}" if title else text


def _row(row: dict[str, Any], score: str) -> dict[str, Any]:
    title = row["title"]
    text = row["text"][len(title) + 1 :] if title else row["text"]
    return {
        "id": row["id"],
        "document": row["document"],
        "title": title or None,
        "text": text,
        "score": float(row[score]),
    }


def library() -> Any:
    """Return the lancedb module, quiet. Raises ConfigError if it is not installed."""
    os.environ.setdefault("LANCEDB_LOG", "error")  # its warnings are for its programmers
    try:
        import lancedb
        import lancedb.index
    except ImportError:
        raise ConfigError('retrieval.index: needs LanceDB: pip install "ragspec[retrieval]"') from None
    return lancedb
