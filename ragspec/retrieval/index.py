"""The index on disk: a LanceDB table of passages with full-text search and, with an embedding model, vectors.

Lance keeps versions: a build writes new ones, and its last step moves the tag `ready`, which readers follow. A build
that dies leaves the index unchanged, and the next one starts by restoring `ready`.
Source: LanceDB 0.40, tables, tags and full-text search. Limit: one build at a time.
"""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from operator import mul
from pathlib import Path
from typing import Any

import orjson

from ragspec.config.redaction import revealed
from ragspec.errors import ConfigError, flat

TABLE = "chunks"
READY = "ready"
SETTINGS, PROBE = b"ragspec", b"ragspec.probe"
FORMAT = 2  # 1: searches missed the stop words of all languages
# partitions of the vector index per search; with LanceDB's 20, half of the nearest of 300,000 rows are missed
PROBES = 64
SAME_MODEL = 0.9995  # cosine of its own vectors of one text; bfloat16 in place of float32 makes it 0.99995
RRF_K = 60  # as in the paper and in LanceDB
MOST_TIES = 10_000  # of more passages that match equally well, the choice is LanceDB's
COLUMNS = ["id", "document", "title", "text"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What an index was built with. Different settings need a new index."""

    chunk_size: int
    chunk_overlap: int
    tokenizer: str
    language: str
    embedding_model: str | None = None
    dimension: int | None = None
    format: int = FORMAT


def connect(uri: str, options: dict[str, Any] | None = None) -> Any:
    """Return the database in a folder or at an object store's URL. Raises ConfigError."""
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
        self._probe = probe_of(self._table)

    def check_model(self, name: str, probe: Sequence[float]) -> None:
        """Raise ConfigError if the index's vectors are another model's. probe: this one's vector of the fixed text."""
        if not same_model(self._probe, probe):
            raise ConfigError(
                f'retrieval.index: "{self.uri}": its vectors were made with another model than the one that is now '
                f'"{name}"; build the index again with `ragspec index`, or bring back that model'
            )

    @property
    def identity(self) -> dict[str, Any]:
        """Return what identifies the index's content: version, build time and number of rows."""
        version = self._table.version
        built = next(v["timestamp"] for v in self._table.list_versions() if v["version"] == version)
        return {"version": version, "built": built.astimezone(UTC).isoformat(), "rows": self.rows}

    @property
    def outdated(self) -> str:
        """Return a note for the user if the index's keyword search misses words, "" if not."""
        if self.settings.format >= FORMAT or self.settings.language == "none":
            return ""
        return (
            f'{self.uri}: built by an earlier version, whose keyword search does not find words such as "war", "cat" '
            'or "sea"; run `ragspec index` again'
        )

    def match(self, query: str, count: int) -> list[dict[str, Any]]:
        """Return the `count` best rows by BM25."""
        from lancedb.query import MatchQuery

        search = self._table.search(MatchQuery(query, "text"), query_type="fts")
        return self._rows(search, "_score", count, descending=True)

    def near(self, vector: Any, count: int) -> list[dict[str, Any]]:
        """Return the `count` rows whose vectors are nearest; `score` is the cosine."""
        search = self._table.search(vector, vector_column_name="vector").distance_type("dot").nprobes(PROBES)
        rows = self._rows(search, "_distance", count, descending=False)
        return [row | {"score": 1.0 - row["score"]} for row in rows]

    def fused(self, query: str, vector: Any, count: int) -> list[dict[str, Any]]:
        """Return the best `count` of both searches combined by reciprocal rank fusion (Cormack et al. 2009)."""
        found: dict[str, dict[str, Any]] = {}
        scores: defaultdict[str, float] = defaultdict(float)
        for rows in (self.near(vector, count), self.match(query, count)):
            for rank, row in enumerate(rows, start=1):
                found[row["id"]] = row
                scores[row["id"]] += 1 / (RRF_K + rank)
        best = sorted(scores, key=lambda one: (-scores[one], one))[:count]
        return [found[one] | {"score": scores[one]} for one in best]

    def _rows(self, search: Any, score: str, count: int, *, descending: bool) -> list[dict[str, Any]]:
        """Return the `count` best rows of a search; equal ones by id, as LanceDB returns them in no fixed order."""
        sign = -1 if descending else 1
        count = min(count, self.rows)  # LanceDB refuses numbers that no index reaches
        with failing(self.uri, "searched"):
            limit = count + 1
            rows = search.select([*COLUMNS, score]).limit(limit).to_list()
            while len(rows) == limit < MOST_TIES and rows[count - 1][score] == rows[-1][score]:
                limit = min(4 * limit, MOST_TIES)
                rows = search.select(["id", score]).with_row_id(True).limit(limit).to_list()
            rows.sort(key=lambda row: (sign * row[score], row["id"]))
            rows = rows[:count]
            if limit > count + 1:
                rows = self._with_texts(rows)
        return [_row(row, score) for row in rows]

    def _with_texts(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return rows found without their texts, which are too many to read while most rows only tie with others."""
        whole = self._table.take_row_ids([row["_rowid"] for row in rows]).select(COLUMNS).with_row_id().to_list()
        by_row = {row["_rowid"]: row for row in whole}
        return [row | by_row[row["_rowid"]] for row in rows]


@contextmanager
def failing(uri: str, what: str) -> Iterator[None]:
    """Convert LanceDB's errors to a one-line ConfigError."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f'retrieval.index: "{uri}": cannot be {what} ({flat(error, 200)}); if it is damaged, delete it and run '
            "`ragspec index` again"
        ) from error


def open_table(database: Any) -> Any:
    """Return the latest version of the table of passages, None without one."""
    page = None
    while True:
        found = database.list_tables(page_token=page)
        if TABLE in found.tables:
            return database.open_table(TABLE)
        page = found.page_token
        if not page:
            return None


def is_local(uri: str) -> bool:
    """Return whether `uri` is a folder rather than an object store's URL."""
    return "://" not in uri


def settings_of(table: Any, uri: str) -> Settings:
    """Return the settings of a table. Raises ConfigError if it is not ragspec's."""
    try:
        return Settings(**orjson.loads((table.schema.metadata or {})[SETTINGS]))
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f'retrieval.index: "{uri}": contains no index that this version of ragspec can read; choose another folder'
        ) from None


def probe_of(table: Any) -> list[float] | None:
    """Return the vector that the model of a table's vectors gives the fixed text, None if it is not known."""
    found = (table.schema.metadata or {}).get(PROBE)
    return None if found is None else list(orjson.loads(found))


def same_model(one: Sequence[float] | None, other: Sequence[float] | None) -> bool:
    """Return whether two vectors of one text, of length 1, are of the same model, as far as is known."""
    if one is None or other is None:
        return True
    return len(one) == len(other) and sum(map(mul, one, other)) >= SAME_MODEL


def searched(title: str | None, text: str) -> str:
    """Return the text of a passage for search and embedding: its title on a line of its own, and its text."""
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
    """Return the lancedb module with its warnings off. Raises ConfigError if it is not installed."""
    os.environ.setdefault("LANCEDB_LOG", "error")  # its warnings address its developers
    try:
        import lancedb
        import lancedb.index
    except ImportError:
        raise ConfigError('retrieval.index: needs LanceDB: pip install "ragspec[retrieval]"') from None
    return lancedb


# -- building --------------------------------------------------------------------------------------

# with `icu`, LanceDB's own are those of all its languages at once: "war", "cat", "sea" and "minutes" would find nothing
STOP_WORDS = """
a about after again against all am an and any are as at be been before being below between both but by can did do does
doing down during each few for from further had has have having he her here hers herself him himself his how i if in
into is it its itself just me more most my myself no nor not now of off on once only or other our ours ourselves out
over own same she should so some such than that the their theirs them themselves then there these they this those
through to too under until up very was we were what when where which while who whom why will with you your yours
yourself yourselves
"""
VECTORS_INDEXED_FROM = 100_000  # rows; fewer are compared exactly, one by one
KEPT = timedelta(days=7)  # how long replaced versions stay, for readers that opened them
FOR_EVER = timedelta(days=36500)
PROBED = 32  # words of a passage by which a full-text index is tested
DELETED_AT_ONCE = 1000  # digests per statement


@dataclass(frozen=True, slots=True)
class Chunk:
    """A passage to be written."""

    id: str
    document: str
    digest: str  # the document's
    title: str | None
    text: str


class Writer:
    """A build in progress. Readers see nothing of it before `finish`.

    probe: the vector that the model gives the fixed text. other_model: whether the table's vectors are another model's.
    """

    def __init__(
        self,
        uri: str,
        options: dict[str, Any] | None,
        settings: Settings,
        probe: Sequence[float] | None = None,
    ) -> None:
        self._database = connect(uri, options)
        self._settings = settings
        self._probe = probe
        self.other_model = False
        self._table: Any = None
        self._fresh = True  # whether the table will be rewritten
        table = open_table(self._database)
        if table is None:
            return
        built_with = settings_of(table, uri)  # raises for a table that is not ours
        tags = table.tags.list()
        if READY not in tags:  # a first build died
            return
        if table.version != tags[READY]["version"]:  # a later build died
            table.checkout(READY)
            table.restore()
            built_with = settings_of(table, uri)
        self._table = table
        self.other_model = built_with == settings and not same_model(probe_of(table), probe)
        self._fresh = self.other_model or built_with != settings

    def drop_damaged(self) -> bool:
        """Drop a full-text index that cannot be searched, which `finish` then builds anew; return whether it was."""
        from lancedb.query import MatchQuery

        if self._fresh:
            return False
        some = self._table.search().select(["text"]).limit(1).to_list()
        words = " ".join(some[0]["text"].split()[:PROBED]) if some else "any"
        try:
            self._table.search(MatchQuery(words, "text"), query_type="fts").select(["id"]).limit(1).to_list()
            return False
        except (OSError, ValueError, RuntimeError):  # of LanceDB, which has no names for its errors
            for index in self._table.list_indices():
                if "text" in index.columns:
                    self._table.drop_index(index.name)
            return True

    @property
    def begins_anew(self) -> bool:
        """Return whether the table is written anew, because it is missing or has other settings."""
        return self._fresh

    @property
    def rows(self) -> int:
        """Return the current number of passages."""
        return 0 if self._table is None else int(self._table.count_rows())

    def known(self) -> Iterator[tuple[str, str]]:
        """Yield (document, digest) of every passage that can stay."""
        if not self._fresh:
            for batch in self._table.search().select(["document", "digest"]).to_batches():
                yield from zip(batch["document"].to_pylist(), batch["digest"].to_pylist(), strict=True)

    def add(self, chunks: Sequence[Chunk], vectors: Any = None) -> None:
        """Write passages, with vectors (len(chunks), dimension) if the index has any."""
        import pyarrow as pa

        schema = _schema(self._settings, self._probe)
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
        """Remove the passages of documents with these digests."""
        stale = sorted(set(digests))
        for start in range(0, len(stale), DELETED_AT_ONCE):
            names = ", ".join(f"'{digest}'" for digest in stale[start : start + DELETED_AT_ONCE])
            self._table.delete(f"digest IN ({names})")

    def finish(self) -> None:
        """Update the search indexes and make the result visible to readers."""
        from lancedb.index import FTS, IvfFlat

        table = self._table
        have = {name for index in table.list_indices() for name in index.columns}
        if "text" not in have:
            stems = self._settings.language != "none"
            language = self._settings.language if stems else "English"
            stop = STOP_WORDS.split() if self._settings.language == "English" else []
            config = FTS(
                base_tokenizer="icu", language=language, stem=stems, remove_stop_words=stems, custom_stop_words=stop
            )
            table.create_index("text", config=config)
        if self._settings.dimension and "vector" not in have and table.count_rows() >= VECTORS_INDEXED_FROM:
            table.create_index("vector", config=IvfFlat(distance_type="dot"))
        if READY in table.tags.list():
            table.optimize(cleanup_older_than=FOR_EVER)  # adds new rows to the indexes, deletes nothing
            table.tags.update(READY, table.version)
            stamps = [version["timestamp"] for version in table.list_versions()]
            if age := replaced_age(stamps, datetime.now()):
                table.optimize(cleanup_older_than=age)
        else:  # after a first build no reader uses an older version
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                table.optimize(cleanup_older_than=timedelta(0))
            table.tags.create(READY, table.version)


def replaced_age(stamps: Sequence[datetime], now: datetime) -> timedelta | None:
    """Return the minimum age of versions that were replaced more than `KEPT` ago, None without any.

    stamps: when the versions were made. The time of replacement counts: until then readers may open a version.
    """
    old = [stamp for stamp in stamps if now - stamp >= KEPT]
    if len(old) < 2:
        return None
    return now - max(old) + timedelta(milliseconds=1)


@contextmanager
def building(uri: str) -> Iterator[None]:
    """Lock the index for one build. Raises ConfigError if another build holds it. Object stores are not locked."""
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
            raise ConfigError(f"--output: {uri}: another build is writing it; wait for it to finish") from None
        yield


def check_language(name: str) -> None:
    """Raise ConfigError if LanceDB has no stemmer for a language."""
    known = ["none", *library().index.lang_mapping.values()]
    if name not in known:
        raise ConfigError(f'retrieval.language: "{name}": is not known; choose one of {", ".join(sorted(known))}')


def _schema(settings: Settings, probe: Sequence[float] | None) -> Any:
    import pyarrow as pa

    fields = [(name, pa.string()) for name in ("id", "document", "digest", "title", "text")]
    if settings.dimension:
        fields.append(("vector", pa.list_(pa.float32(), settings.dimension)))
    about = {SETTINGS: orjson.dumps(asdict(settings))}
    if probe is not None:
        about[PROBE] = orjson.dumps([round(value, 6) for value in probe])
    return pa.schema(fields, metadata=about)
