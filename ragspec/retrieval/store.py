"""The index on disk: one LanceDB table of passages, with full-text search and, where a model made them, vectors.

Lance keeps versions: a build writes new ones, and only its last act moves the tag `ready`, which readers follow. So a
build that dies leaves the index as it was, and the next one begins by going back to `ready`.
Source: LanceDB 0.40, tables, tags and full-text search. Limit: one build at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson

from ragspec.errors import ConfigError
from ragspec.suggest import did_you_mean

TABLE = "chunks"
READY = "ready"
SETTINGS = b"ragspec"
FORMAT = 1
VECTORS_INDEXED_FROM = 100_000  # rows; fewer are compared one by one, exactly
KEPT = timedelta(days=7)  # of old versions, for readers that began before a build
DELETED_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Settings:
    """What an index was built with. Another one is another index."""

    chunk_size: int
    chunk_overlap: int
    tokenizer: str
    language: str
    embedding_model: str | None = None
    dimension: int | None = None
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class Chunk:
    """A passage on its way into the index."""

    id: str
    document: str
    digest: str  # of its document
    title: str | None
    text: str


def connect(uri: str, options: dict[str, Any] | None = None) -> Any:
    """Return the database at a folder or an object store's address. Raises ConfigError."""
    library = _library()
    try:
        return library.connect(uri, storage_options=options or None)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f'retrieval.index: "{uri}": cannot be opened ({_line(error)})') from None


class Index:
    """A finished index, open for reading. Raises ConfigError where there is none."""

    def __init__(self, uri: str, options: dict[str, Any] | None = None) -> None:
        missing = f'retrieval.index: "{uri}": no index there; build one: ragspec index --corpus FILES --output {uri}'
        if is_local(uri) and not Path(uri).is_dir():
            raise ConfigError(missing)
        database = connect(uri, options)
        try:
            self._table = database.open_table(TABLE)
            self._table.checkout(READY)
        except (OSError, ValueError, RuntimeError):
            raise ConfigError(missing) from None
        self.uri = uri
        self.settings = settings_of(self._table, uri)
        self.rows: int = self._table.count_rows()

    @property
    def identity(self) -> dict[str, Any]:
        """What an answer made from this index depends on."""
        stamp = next((v["timestamp"] for v in self._table.list_versions() if v["version"] == self._table.version), "")
        return {"version": self._table.version, "built": str(stamp), "rows": self.rows}

    def match(self, query: str, count: int) -> list[dict[str, Any]]:
        """Return the `count` best rows by BM25."""
        from lancedb.query import MatchQuery

        search = self._table.search(MatchQuery(query, "text"), query_type="fts")
        return self._rows(search, "_score", count)

    def near(self, vector: Any, count: int) -> list[dict[str, Any]]:
        """Return the `count` rows whose vectors are nearest; `score` is the cosine."""
        search = self._table.search(vector, vector_column_name="vector").distance_type("dot")
        rows = self._rows(search, "_distance", count)
        return [row | {"score": 1.0 - row["score"]} for row in rows]

    def fused(self, query: str, vector: Any, count: int) -> list[dict[str, Any]]:
        """Return the `count` best of each search, in the order of reciprocal rank fusion."""
        from lancedb.query import MatchQuery
        from lancedb.rerankers import RRFReranker

        search = self._table.search(query_type="hybrid", vector_column_name="vector", fts_columns="text")
        search = search.vector(vector).text(MatchQuery(query, "text")).distance_type("dot").rerank(RRFReranker())
        return [_row(row, "_relevance_score") for row in search.limit(count).to_list()]

    def _rows(self, search: Any, score: str, count: int) -> list[dict[str, Any]]:
        found = search.select(["id", "document", "title", "text", score]).limit(count).to_list()
        return [_row(row, score) for row in found]


class Writer:
    """A build under way. `finish` makes it the index; without that nothing has changed for readers."""

    def __init__(self, uri: str, options: dict[str, Any] | None, settings: Settings) -> None:
        self._uri = uri
        self._database = connect(uri, options)
        self._settings = settings
        self._table: Any = None
        self._fresh = True  # whether the table is to be written anew
        try:
            table = self._database.open_table(TABLE)
            tags = table.tags.list()
        except (OSError, ValueError, RuntimeError):
            return
        if READY not in tags:
            return
        if table.version != tags[READY]["version"]:  # a build died here
            table.checkout(READY)
            table.restore()
        self._table = table
        self._fresh = settings_of(table, uri) != settings

    @property
    def begins_anew(self) -> bool:
        """Whether what was there, if anything, was built with other settings."""
        return self._fresh

    @property
    def rows(self) -> int:
        """How many passages there are now."""
        return 0 if self._table is None else int(self._table.count_rows())

    def known(self) -> Iterator[tuple[str, str]]:
        """Yield (document, digest) of every passage that may stay."""
        if not self._fresh:
            for batch in self._table.search().select(["document", "digest"]).to_batches():
                yield from zip(batch["document"].to_pylist(), batch["digest"].to_pylist(), strict=True)

    def add(self, chunks: Sequence[Chunk], vectors: Any = None) -> None:
        """Write passages, with their vectors (len(chunks), dimension) if this index has any."""
        import pyarrow as pa

        schema = _schema(self._settings)
        columns: list[Any] = [
            [chunk.id for chunk in chunks],
            [chunk.document for chunk in chunks],
            [chunk.digest for chunk in chunks],
            [chunk.title or "" for chunk in chunks],
            [searched(chunk.title, chunk.text) for chunk in chunks],
        ]
        if vectors is not None:
            flat = pa.array(vectors.reshape(-1), type=pa.float32())
            columns.append(pa.FixedSizeListArray.from_arrays(flat, self._settings.dimension))
        data = pa.table(columns, schema=schema)
        if self._fresh:
            self._table = self._database.create_table(TABLE, data, mode="overwrite")
            self._fresh = False
        else:
            self._table.add(data)

    def remove(self, digests: Iterable[str]) -> None:
        """Take out the passages of documents with these digests."""
        stale = sorted(set(digests))
        for start in range(0, len(stale), DELETED_AT_ONCE):
            names = ", ".join(f"'{digest}'" for digest in stale[start : start + DELETED_AT_ONCE])
            self._table.delete(f"digest IN ({names})")

    def finish(self) -> None:
        """Bring the search structures up to date and show the result to readers."""
        from lancedb.index import FTS, IvfFlat

        table = self._table
        have = {name for index in table.list_indices() for name in index.columns}
        if "text" not in have:
            stems = self._settings.language != "none"
            language = self._settings.language if stems else "English"
            config = FTS(base_tokenizer="icu", language=language, stem=stems, remove_stop_words=stems)
            table.create_index("text", config=config)
        if self._settings.dimension and "vector" not in have and table.count_rows() >= VECTORS_INDEXED_FROM:
            table.create_index("vector", config=IvfFlat(distance_type="dot"))
        table.optimize(cleanup_older_than=timedelta(days=36500))  # what is new enters the indexes; nothing is deleted
        if READY in table.tags.list():
            table.tags.update(READY, table.version)
        else:
            table.tags.create(READY, table.version)
        table.optimize(cleanup_older_than=KEPT)


@contextmanager
def building(uri: str) -> Iterator[None]:
    """Hold the index for one build. Raises ConfigError where another one does; object stores have no such lock."""
    if not is_local(uri):
        yield
        return
    import fcntl

    folder = Path(uri)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"--output: {uri}: cannot be written ({error.strerror}); choose another folder") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"--output: {uri}: another build is writing it; wait for it") from None
        yield


def check_language(name: str) -> None:
    """Raise ConfigError where LanceDB has no stemmer for a language."""
    known = ["none", *_library().index.lang_mapping.values()]
    if name not in known:
        raise ConfigError(f'retrieval.language: "{name}": is not known{did_you_mean(name, known)}')


def is_local(uri: str) -> bool:
    """Return whether `uri` is a folder, not an object store's address."""
    return "://" not in uri


def settings_of(table: Any, uri: str) -> Settings:
    """Return what a table was built with. Raises ConfigError for what is not ours."""
    try:
        return Settings(**orjson.loads((table.schema.metadata or {})[SETTINGS]))
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f'retrieval.index: "{uri}": not an index of this version of ragspec; build it again in another folder'
        ) from None


def searched(title: str | None, text: str) -> str:
    """Return what is searched and embedded of a passage: its title, a line of its own, and its text."""
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


def _schema(settings: Settings) -> Any:
    import pyarrow as pa

    fields = [(name, pa.string()) for name in ("id", "document", "digest", "title", "text")]
    if settings.dimension:
        fields.append(("vector", pa.list_(pa.float32(), settings.dimension)))
    return pa.schema(fields, metadata={SETTINGS: orjson.dumps(asdict(settings))})


def _library() -> Any:
    os.environ.setdefault("LANCEDB_LOG", "error")  # its warnings are for its programmers
    try:
        import lancedb
        import lancedb.index
    except ImportError:
        raise ConfigError('retrieval.index: needs LanceDB: pip install "ragspec[retrieval]"') from None
    return lancedb


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
