"""From what a config names to a source: files, patterns, folders, archives, datasets, or records in memory.

>>> with open_source("questions.parquet") as source: rows = list(source)

A file's content decides its kind; its name counts only where the content is ambiguous. CONTRIBUTING.md lists what a new
kind needs.
"""

from __future__ import annotations

import glob
import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

from ragspec.config.io import InputConfig
from ragspec.config.redaction import revealed
from ragspec.errors import ConfigError, RecordError
from ragspec.inputs import storage
from ragspec.inputs.base import InputRow, Source, row_of
from ragspec.inputs.columns import ALL, LOOKED_AT, Columns
from ragspec.inputs.content import PACKED, Stream, is_text, opened_archive
from ragspec.inputs.record import parse_record
from ragspec.inputs.storage import is_url
from ragspec.inputs.text import TextSource
from ragspec.json_text import dumps, loads
from ragspec.records import Record

KINDS = {
    "jsonl": (".jsonl", ".ndjson"),
    "json": (".json",),
    "csv": (".csv",),
    "tsv": (".tsv", ".tab"),
    "text": (".txt",),
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".feather", ".ipc"),
}
SAVED = "dataset_info.json", "dataset_dict.json"  # files in a folder written by save_to_disk
# endings of files of records in a folder, where a text may be anything
LISTED = tuple(ending for kind, endings in KINDS.items() if kind != "text" for ending in endings)
SIDECARS = {"run.json", "stats.json", "manifest.json"}  # in a folder of answers of ragspec 0.2 or before


def kind_of(path: str) -> str:
    """Return the kind that a file's name suggests, "jsonl" by default. The content may differ."""
    name = storage.bare(path).lower()
    for ending in PACKED:
        name = name.removesuffix(ending)
    return next((kind for kind, endings in KINDS.items() if name.endswith(endings)), "jsonl")


def is_saved_dataset(path: str) -> bool:
    """Return whether `path` is a folder that a Hugging Face dataset was saved to."""
    return any((Path(path) / name).is_file() for name in SAVED)


def files_of(paths: Iterable[str], options: Mapping[str, Any] | None = None) -> list[str]:
    """Return the files that `paths` name, those of patterns and folders sorted. Raises ConfigError if there are none.

    options: storage options for URLs.
    """
    found: list[str] = []
    for path in map(storage.local_path, paths):
        if storage.is_url(path):
            found += _at_url(path, options)
        elif path == "-" or Path(path).is_file() or not (glob.has_magic(path) or Path(path).is_dir()):
            found.append(path)
        elif Path(path).is_dir():
            found += _in_folder(path)
        else:
            matching = sorted(name for name in glob.glob(path, recursive=True) if Path(name).is_file())
            if not matching:
                raise ConfigError(f"input: no file matches {path}")
            found += matching
    return found


def digest(config: InputConfig | None) -> str | None:
    """Return the SHA-256 of an input's files; None for a pipe, which can be read only once, and for missing files."""
    found = hashlib.sha256()
    files = _local(config)
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                found.update(chunk)
    return found.hexdigest() if files else None


def size_of(config: InputConfig | None) -> int | None:
    """Return the total bytes of an input's files, None if unknown."""
    files = _local(config)
    return sum(path.stat().st_size for path in files) if files else None


def known_rows(config: InputConfig | None) -> int | None:
    """Return the number of an input's rows; None if it is unknown, as that of a pipe, which is not opened."""
    if config is None or size_of(config) is None:
        return None
    try:
        with open_source(config) as source:
            return source.count()
    except ConfigError:  # reported when the input is opened for the run
        return None


def _local(config: InputConfig | None) -> list[Path]:
    """Return an input's files if all are local and can be read again, else an empty list."""
    if config is None or config.is_stdin or config.format == "dataset":
        return []
    if any(map(storage.is_url, config.path)):
        return []
    try:
        files = [Path(path) for path in files_of(config.path)]
    except ConfigError:
        return []
    return files if all(path.is_file() for path in files) else []


def _at_url(url: str, options: Mapping[str, Any] | None) -> list[str]:
    """Return the URLs of the files that a URL, its pattern or its folder names."""
    if url.lower().startswith(("http://", "https://")):  # ? begins a query there, and folders cannot be listed
        return [url]
    system, path = storage.filesystem(url, options)
    try:
        with storage.address_errors(url):
            if glob.has_magic(path):
                found = sorted(name for name in system.glob(path) if not system.isdir(name))
                if not found:
                    raise ConfigError(f"input: no file matches {url}")
            elif system.isdir(path):
                found = _record_files(url, (name.removeprefix(path).lstrip("/") for name in system.find(path)))
                found = [f"{path.rstrip('/')}/{name}" for name in found]
            else:
                return [url]
    except OSError as error:
        raise ConfigError(f"{url}: cannot be listed ({storage.reason(error)})") from None
    return [str(system.unstrip_protocol(name)) for name in found]


def _in_folder(path: str) -> list[str]:
    inside = (str(each.relative_to(path)) for each in Path(path).rglob("*") if each.is_file())
    return [str(Path(path) / name) for name in _record_files(path, inside)]


def _record_files(folder: str, names: Iterable[str]) -> list[str]:
    """Return the names in a folder that may be files of records. Raises ConfigError if there are none."""
    files = records_among(names)
    if not files:
        shown = ", ".join(LISTED)
        raise ConfigError(f"{folder}: the folder has no file that could be records ({shown}, compressed or not)")
    return files


def records_among(names: Iterable[str]) -> list[str]:
    """Return the names of possible files of records, sorted, without hidden files and files of an output."""
    endings = LISTED + tuple(f"{ending}{packed}" for ending in LISTED for packed in PACKED)
    return sorted(
        name
        for name in names
        if name.lower().endswith(endings)
        and name.rpartition("/")[2] not in SIDECARS
        and not any(part.startswith((".", "_")) for part in name.split("/"))
    )


# -- several files ---------------------------------------------------------------------------------


class CombinedSource:
    """Several sources read one after the other, with rows numbered through.

        >>> for row in CombinedSource([partial(TextSource, "a.jsonl"), partial(TextSource, "b.jsonl")]): row.number

    Every file is opened in the constructor, to check it, and again when its turn comes. once: reading again would mean
    another download. Limit: no pipes.
    """

    def __init__(self, openers: Sequence[Callable[[], Source]], *, once: bool = False) -> None:
        self._openers = list(openers)
        self._once = once
        self._begins: list[int] = []  # per file, the number of the row before its first
        self._where: list[Callable[[int], str]] = []
        for opener in reversed(self._openers):  # errors of any file are raised here
            with opener() as first:
                self._where_first = first.where

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __iter__(self) -> Iterator[InputRow]:
        number = 0
        self._begins, self._where = [], []
        for opener in self._openers:
            with opener() as source:
                self._begins.append(number)
                self._where.append(source.where)
                for row in source:
                    number = self._begins[-1] + row.number
                    yield replace(row, number=number)

    def reopen(self) -> CombinedSource | None:
        """Return a second source over the same files; None if they would have to be downloaded again."""
        return None if self._once else copy(self)

    def count(self) -> int | None:
        """Return the number of rows, None if one file does not know its own."""
        total = 0
        for opener in self._openers:
            with opener() as source:
                rows = source.count()
            if rows is None:
                return None
            total += rows
        return total

    def where(self, number: int) -> str:
        """Return the file and the row's number in it."""
        if not self._begins:
            return self._where_first(number)
        at = max(0, bisect_right(self._begins, number - 1) - 1)
        return self._where[at](number - self._begins[at])


# -- opening ---------------------------------------------------------------------------------------

TABLES = ("parquet", "arrow")


def open_source(given: InputConfig | str) -> Source:
    """Return the source of an input, of a path, or of stdin (-). Raises ConfigError.

    A column mapping is checked against the first records, so that a name that none of them has fails at once.
    """
    config = InputConfig(path=[given]) if isinstance(given, str) else given
    columns = Columns(config.columns.given)
    openers = _openers(config, columns)
    source = CombinedSource(openers, once=any(map(is_url, config.path))) if len(openers) > 1 else openers[0]()
    if columns and not (config.is_stdin or config.format == "dataset" or getattr(source, "waits", False)):
        try:
            columns.check_records(islice(_values(_openers(config, ALL)), LOOKED_AT), str(config))
        except BaseException:
            source.__exit__(None, None, None)
            raise
    return source


def _values(openers: Iterable[Callable[[], Source]]) -> Iterator[Any]:
    """Yield the values of the rows of all files."""
    for opener in openers:
        with opener() as source:
            yield from (row.value for row in source)


def _openers(config: InputConfig, columns: Columns) -> list[Callable[[], Source]]:
    """Return one opener per file of an input."""
    options = revealed(config.storage_options)
    if config.format == "dataset" or (len(config.path) == 1 and is_saved_dataset(config.path[0])):
        return [partial(_open_dataset, config, columns)]
    files = files_of(revealed(config.path), options)
    return [partial(_open_file, config.format, columns, options, path) for path in files]


def _open_file(kind: str, columns: Columns, options: Mapping[str, Any], path: str, member: str | None = None) -> Source:
    """Return the source of one file. member: the file's name in the zip archive `path`."""
    stream = Stream(path, options, member=member)
    name = kind_of(stream.path)
    if stream.pipe is None:
        try:
            if stream.look().kind == "zip":
                return _open_zip(kind, columns, options, stream)
            table = stream.kind or (kind if kind in TABLES else "")
            if not table and kind == "auto" and name in TABLES and not (stream.head and is_text(stream.head)):
                table = name
            if table and kind in ("auto", *TABLES):
                from ragspec.inputs.table import TableSource

                return TableSource(stream, columns, table if kind == "auto" else kind, options)
        except BaseException:
            stream.__exit__()
            raise
    return TextSource(stream.path, columns, options, format=kind, name=name, stream=stream)


def _open_zip(kind: str, columns: Columns, options: Mapping[str, Any], stream: Stream) -> Source:
    """Return the records of an archive: of its only file, or of the files that are named like records."""
    path = stream.path
    stream.__exit__()
    if stream.packed or stream.is_member:
        raise ConfigError(f"{path}: a zip archive inside another archive; unpack it")
    with opened_archive(path, options) as archive:
        members = [info.filename for info in archive.infolist() if not info.is_dir()]
    if "[Content_Types].xml" in members:
        raise ConfigError(f"{path}: an Office document, not records; save it as CSV")
    shown = [name for name in members if not name.startswith(("__MACOSX/", "."))]
    found = shown if len(shown) == 1 else records_among(shown)
    if not found:
        raise ConfigError(f"{path}: the archive has no file that could be records")
    return CombinedSource(
        [partial(_open_file, kind, columns, options, path, name) for name in found], once=is_url(path)
    )


def _open_dataset(config: InputConfig, columns: Columns) -> Source:
    from ragspec.inputs.table import DatasetSource

    if len(config.path) > 1:
        raise ConfigError("input.path: one dataset at a time")
    (path,) = config.path
    return DatasetSource(
        path,
        columns,
        split=config.split,
        name=config.name,
        revision=config.revision,
        saved=is_saved_dataset(path),
    )


# -- records in memory -----------------------------------------------------------------------------


class MemorySource:
    """The records of an iterable, each like the value of a JSONL line.

    >>> [row.number for row in MemorySource([{"query": "Why?"}])]
    [1]
    """

    def __init__(self, records: Iterable[Any]) -> None:
        self._records = records

    def __enter__(self) -> MemorySource:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __iter__(self) -> Iterator[InputRow]:
        for number, record in enumerate(self._records, 1):
            value: Any
            try:
                raw = dumps(record)
                value = loads(raw)  # tuples become lists, as in a file
            except TypeError:  # types that JSON lacks, such as those of a data frame
                yield row_of(number, record, ALL)
            else:
                yield InputRow(number, raw, value)

    def count(self) -> int | None:
        """Return the number of records, None if they would have to be read."""
        return len(self._records) if isinstance(self._records, Sized) else None

    def reopen(self) -> MemorySource | None:
        """Return the same records, None for a one-time iterable."""
        return MemorySource(self._records) if isinstance(self._records, Sequence) else None

    def where(self, number: int) -> str:
        """Return "record 3"; there is no file to name."""
        return f"record {number}"


def first_records(given: InputConfig, rows: int, form: str) -> list[Record]:
    """Return the valid records among an input's first rows. form: `prompt.source`.

    Raises ConfigError if the input cannot be read.
    """
    records = []
    with open_source(given) as source:
        for row in islice(source, rows):
            with suppress(RecordError):
                records.append(parse_record(row.value, row.number, form))
    return records
