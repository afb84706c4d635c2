"""From what a config names to a source: `open_source("questions.parquet")`. A new kind: one file, and a line below.

What a file is, its content says; its name counts where that leaves it open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

from ragspec.config.places import InputConfig
from ragspec.config.secret import revealed
from ragspec.errors import ConfigError
from ragspec.inputs.base import Source
from ragspec.inputs.columns import ALL, LOOKED_AT, Columns
from ragspec.inputs.content import Stream, is_text, opened_archive
from ragspec.inputs.files import files_of, is_saved_dataset, kind_of, records_among
from ragspec.inputs.several import Several
from ragspec.inputs.storage import is_url
from ragspec.inputs.text import TextSource

TABLES = ("parquet", "arrow")


def open_source(given: InputConfig | str) -> Source:
    """Return the source that an input (or a path alone, or - for stdin) means. Raises ConfigError.

    A mapping of columns is tried on the first records, so that a name that none of them has is known at once.
    """
    config = InputConfig(path=[given]) if isinstance(given, str) else given
    columns = Columns(config.columns.given)
    openers = _openers(config, columns)
    source = Several(openers, once=any(map(is_url, config.path))) if len(openers) > 1 else openers[0]()
    if columns and not (config.is_stdin or config.format == "dataset" or getattr(source, "waits", False)):
        try:
            columns.check_records(islice(_values(_openers(config, ALL)), LOOKED_AT), str(config))
        except BaseException:
            source.__exit__(None, None, None)
            raise
    return source


def _values(openers: Iterable[Callable[[], Source]]) -> Iterator[Any]:
    """Yield what rows say, file after file, each opened when its turn comes."""
    for opener in openers:
        with opener() as source:
            yield from (row.value for row in source)


def _openers(config: InputConfig, columns: Columns) -> list[Callable[[], Source]]:
    """Return what opens each of an input's files."""
    options = revealed(config.storage_options)
    if config.format == "dataset" or (len(config.path) == 1 and is_saved_dataset(config.path[0])):
        return [partial(_open_dataset, config, columns)]
    files = files_of(revealed(config.path), options)
    return [partial(_open_file, config.format, columns, options, path) for path in files]


def _open_file(kind: str, columns: Columns, options: Mapping[str, Any], path: str, member: str | None = None) -> Source:
    """Return the source of one file. member: of this zip archive."""
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
    """Return the records of an archive: of its only file, or of those whose names say that they are records."""
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
    return Several([partial(_open_file, kind, columns, options, path, name) for name in found], once=is_url(path))


def _open_dataset(config: InputConfig, columns: Columns) -> Source:
    from ragspec.inputs.dataset import DatasetSource

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
