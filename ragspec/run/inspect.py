"""`ragspec inspect`: the columns of an input and how ragspec reads them, without a model.

>>> inspect(InputConfig(path=["questions.parquet"])).columns
{'question': 'text', 'passages': 'list of objects'}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any

from ragspec.config.io import ColumnNames, InputConfig
from ragspec.config.run import RunConfig
from ragspec.config.sections import validate
from ragspec.errors import ConfigError, RecordError
from ragspec.inputs.columns import GUESSES, Columns, look_up
from ragspec.inputs.passages import guessed_fields
from ragspec.inputs.record import REFERENCES, SOURCES, parse_record, reference_texts
from ragspec.inputs.sources import open_source, size_of
from ragspec.inputs.storage import advising
from ragspec.records import Record

LOOKED_AT = 20  # rows
PROMPTS = {*SOURCES, "body"}
OPTIONAL = ("contexts", "id", "reference")  # keys that a mapping can do without


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
    mapping: dict[str, str | dict[str, str]]


def inspect(given: InputConfig) -> Inspection:
    """Inspect an input. Raises ConfigError if it cannot be opened."""
    with advising("INPUT takes files, folders, patterns or a dataset", given.path), open_source(given) as source:
        rows = list(islice(source, LOOKED_AT))
        count = source.count()
    columns: dict[str, str] = {}
    for row in rows:
        if isinstance(row.value, dict):
            for name, value in row.value.items():
                if columns.get(name, "nothing") == "nothing":
                    columns[name] = kind_of(value)
    record, error = None, "" if rows else "there are no records"
    if rows:
        try:
            if isinstance(rows[0].value, RecordError):
                raise rows[0].value
            record = parse_record(rows[0].value, rows[0].number)
        except RecordError as reason:
            error = f"{source.where(rows[0].number)}: {reason}"
    done = record is not None and bool(given.columns.given)
    return Inspection(count, columns, record, error, {} if done else suggestion([row.value for row in rows]))


def with_columns(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return a config that reads its input's columns by their names where it maps none, and a note that says how.

    Only for files whose first records are none without a mapping: what runs as it is stays as it is.
    """
    given = config.input
    if given is None or given.columns.given or config.prompt.source != "auto" or size_of(given) is None:
        return config, []
    try:
        with open_source(given) as source:
            values = [row.value for row in islice(source, LOOKED_AT)]
    except ConfigError:  # whoever opens it next says so
        return config, []
    records = [value for value in values if isinstance(value, dict)]
    if len(records) < len(values) or any(not PROMPTS.isdisjoint(record) for record in records):
        return config, []
    mapping = suggestion(values)
    if not mapping:
        return config, []
    columns = validate(ColumnNames, mapping, "input.columns")
    read = ", ".join(f"{_path_of(theirs)} as {ours}" for ours, theirs in mapping.items())
    changed = config.model_copy(update={"input": given.model_copy(update={"columns": columns})})
    return changed, [f"{given}: reads {read}, by the columns' names (--columns FIELD=NAME says otherwise)"]


def _path_of(mapped: str | dict[str, str]) -> str:
    return mapped if isinstance(mapped, str) else mapped["path"]


def suggestion(values: Sequence[Any]) -> dict[str, str | dict[str, str]]:
    """Return a mapping that turns the first row into a record; empty if none is needed or found.

    values: those of the first rows.
    """
    records = [value for value in values if isinstance(value, dict)]
    names = {name for record in records for name in record}
    found = {ours: next((name for name in guesses if name in names), "") for ours, guesses in GUESSES.items()}
    if found["prompt"] == "text" and "_id" in names and "title" not in names:  # BEIR's queries
        found |= {"query": found["query"] or "text", "prompt": ""}
    source = next((ours for ours in SOURCES if found[ours]), "")
    if not source or "body" in names or values[:1] != records[:1]:
        return {}
    mapping: dict[str, str | dict[str, str]] = {ours: found[ours] for ours in ("id", source) if found[ours]}
    if source == "query" and (contexts := _passages(records)):
        mapping["contexts"] = contexts
    if found["reference"] not in ("", *REFERENCES) and _are_references(records, found["reference"]):
        mapping["reference"] = found["reference"]
    mapping = {ours: theirs for ours, theirs in mapping.items() if theirs != ours}
    for count in range(len(OPTIONAL) + 1):
        for left_out in combinations(OPTIONAL, count):
            some = {ours: theirs for ours, theirs in mapping.items() if ours not in left_out}
            try:
                parse_record(Columns(some).of(records[0]), 1)
            except RecordError:
                continue
            return some
    return {}


def _passages(records: Sequence[dict[str, Any]]) -> str | dict[str, str]:
    """Return the path of the passages, with the names of their fields where they are unusual; "" if there are none."""
    names = [name for name in GUESSES["contexts"] if any(record.get(name) for record in records)]
    for path in [*names, *(f"{outer}.{inner}" for outer in names for inner in GUESSES["contexts"])]:
        values = [value for record in records if isinstance(value := look_up(record, path), str | list | dict)]
        try:
            fields = guessed_fields(values)
            mapping: str | dict[str, str] = {"path": path, **fields} if fields else path
            read = Columns({"contexts": mapping})
            parsed = [parse_record({"query": "?", **read.of(record)}, 1) for record in records]
        except RecordError:
            continue
        if any(record.contexts for record in parsed):
            return mapping
    return ""


def _are_references(records: Sequence[dict[str, Any]], name: str) -> bool:
    return all(reference_texts(record[name]) is not None for record in records if record.get(name) is not None)


def kind_of(value: Any) -> str:
    """Return a short name for the kind of a JSON value."""
    if isinstance(value, list):
        inner = {kind_of(item) for item in value[:LOOKED_AT]}
        return f"list of {inner.pop()}s" if len(inner) == 1 else "list"
    names = {dict: "object", str: "text", bool: "boolean", type(None): "nothing"}
    return names.get(type(value), "number")
