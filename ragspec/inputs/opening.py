"""From what a config names to a source: `open_source("questions.parquet")`. A new kind: one file, and a line below."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ragspec.config.places import InputConfig
from ragspec.config.secret import revealed
from ragspec.errors import ConfigError
from ragspec.inputs.base import Source
from ragspec.inputs.columns import Columns
from ragspec.inputs.files import PACKED, files_of, is_saved_dataset, kind_of
from ragspec.inputs.several import Several
from ragspec.inputs.storage import bare


def open_source(given: InputConfig | str) -> Source:
    """Return the source that an input (or a path alone, or - for stdin) means. Raises ConfigError."""
    config = InputConfig(path=[given]) if isinstance(given, str) else given
    columns = Columns(config.columns.given)
    options = revealed(config.storage_options)
    if config.format == "dataset" or (len(config.path) == 1 and is_saved_dataset(config.path[0])):
        return _open_dataset(config, columns)
    openers = [
        partial(_open_file, config.format, columns, options, path) for path in files_of(revealed(config.path), options)
    ]
    return Several(openers) if len(openers) > 1 else openers[0]()


def _open_file(kind: str, columns: Columns, options: Mapping[str, Any], path: str) -> Source:
    kind = kind_of(path) if kind == "auto" else kind
    if kind != "jsonl" and bare(path).endswith(PACKED):
        raise ConfigError(f"{path}: only JSONL can be read compressed; decompress it first")
    if kind in ("csv", "tsv"):
        from ragspec.inputs.delimited import DelimitedSource

        return DelimitedSource(path, columns, "\t" if kind == "tsv" else ",", options)
    if kind in ("parquet", "arrow"):
        from ragspec.inputs.table import TableSource

        return TableSource(path, columns, kind, options)
    from ragspec.inputs.jsonl import JsonlSource

    return JsonlSource(path, columns, options)


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
