"""`ragspec inspect`: the columns of an input and how ragspec reads them, without a model.

>>> inspect(InputConfig(path=["questions.parquet"])).columns
{'question': 'text', 'passages': 'list of objects'}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from ragspec.config.io import ColumnNames, InputConfig
from ragspec.config.run import RunConfig
from ragspec.config.sections import validate
from ragspec.errors import ConfigError, RecordError
from ragspec.inputs.guessing import FIRST, Mapping, first_rows, guessed, guessed_contexts
from ragspec.inputs.record import SOURCES, lacks_contexts, parse_record
from ragspec.inputs.sources import open_source, size_of
from ragspec.inputs.storage import advising
from ragspec.records import Record

PROMPTS = {*SOURCES, "body"}


@dataclass(frozen=True, slots=True)
class Inspection:
    """What an input contains.

    columns: those of the first rows, each with the kind of its values. record: the first row, parsed. error: why the
    first row is not a record. mapping: `input.columns` that would make it one, if there is such a mapping.
    """

    rows: int | None
    columns: dict[str, str]
    record: Record | None
    error: str
    mapping: Mapping


def inspect(given: InputConfig) -> Inspection:
    """Inspect an input. Raises ConfigError if it cannot be opened."""
    with advising("INPUT takes files, folders, patterns or a dataset", given.path), open_source(given) as source:
        rows = iter(source)
        first = list(islice(rows, 1))
        values = first_rows(row.value for row in chain(first, rows))
        count = source.count()
    columns: dict[str, str] = {}
    for each in values:
        if isinstance(each, dict):
            for name, value in each.items():
                if columns.get(name, "nothing") == "nothing":
                    columns[name] = kind_of(value)
    record, error = None, "" if first else "there are no records"
    if first:
        try:
            if isinstance(first[0].value, RecordError):
                raise first[0].value
            record = parse_record(first[0].value, first[0].number)
        except RecordError as reason:
            error = f"{source.where(first[0].number)}: {reason}"
    done = record is not None and bool(given.columns.given)
    return Inspection(count, columns, record, error, {} if done else guessed(values))


def with_columns(config: RunConfig, earlier: Mapping | None = None) -> tuple[RunConfig, list[str]]:
    """Return a config that reads its input's columns by their names where it maps none, and a note that says how.

    earlier: the mapping of an earlier run, for names that tell nothing.

    Only for files of whose first rows more than half are no records without a mapping, or whose queries have no
    contexts: what runs as it is stays as it is.
    """
    if config.input is None or config.prompt.source != "auto":
        return config, []
    given, notes = with_names(config.input, passages=config.retrieval is None, earlier=earlier)
    return config.model_copy(update={"input": given}), notes


def with_names(
    given: InputConfig, *, passages: bool = True, earlier: Mapping | None = None
) -> tuple[InputConfig, list[str]]:
    """Return what with_columns() does for an input. passages: also of queries, which need no other column."""
    if given.columns.given or size_of(given) is None:
        return given, []
    try:
        with open_source(given) as source:
            values = first_rows(row.value for row in source)
    except ConfigError:  # whoever opens it next says so
        return given, []
    records = [value for value in values if isinstance(value, dict)]
    native = 2 * sum(any(record.get(name) is not None for name in PROMPTS) for record in records) >= len(records)
    mapping = (_of_passages(records) if passages else {}) if native else guessed(records)
    by = "by the columns' names"
    if not mapping and earlier and records and not native:
        mapping, by = earlier, "as the output's other records were"
    if not mapping:
        return given, []
    columns = validate(ColumnNames, mapping, "input.columns")
    read = ", ".join(_said(ours, theirs) for ours, theirs in mapping.items())
    note = f"{given}: reads {read}, {by} (--columns FIELD=NAME says otherwise)"
    return given.model_copy(update={"columns": columns}), [note]


def _of_passages(records: Sequence[dict[str, Any]]) -> Mapping:
    """Return the mapping of queries without contexts to passages under another name."""
    bare = all(record.get("contexts") is None for record in records)
    if bare and 2 * sum(map(lacks_contexts, records)) >= len(records) and (contexts := guessed_contexts(records)):
        return {"contexts": contexts}
    return {}


def _said(ours: str, mapped: str | dict[str, str]) -> str:
    """Return how a field is read, for the note: `docs as contexts (text from chunk)`."""
    fields = {"path": mapped} if isinstance(mapped, str) else {"path": ours, **mapped}
    path = fields.pop("path")
    inside = ", ".join(f"{inner} from {theirs}" for inner, theirs in fields.items())
    return (path if path == ours else f"{path} as {ours}") + (f" ({inside})" if inside else "")


def kind_of(value: Any) -> str:
    """Return a short name for the kind of a JSON value."""
    return _kind(value, 0)


def _kind(value: Any, depth: int) -> str:
    """Return a kind in the singular, at depth 0, or in the plural."""
    if isinstance(value, list):
        inner = {_kind(item, depth + 1) for item in value[:FIRST]}
        return f"list{'s' if depth else ''}{f' of {inner.pop()}' if len(inner) == 1 else ''}"
    names = {dict: "object", str: "text", bool: "boolean", type(None): "nothing"}
    name = names.get(type(value), "number")
    return f"{name}s" if depth and name != "nothing" else name
