"""`ragspec inspect`: what an input holds, and how ragspec reads it. No model.

>>> inspect(InputConfig(path=["questions.parquet"])).columns
{'question': 'text', 'passages': 'list of objects'}
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

from ragspec.config.places import InputConfig
from ragspec.errors import RecordError
from ragspec.inputs.columns import Columns
from ragspec.inputs.opening import open_source
from ragspec.inputs.record import SOURCES, parse_record
from ragspec.inputs.storage import advising
from ragspec.records import Record

LOOKED_AT = 20  # rows
# what users call the fields of a record, the likeliest first
NAMES = {
    "id": ("id", "qid", "_id", "question_id", "query_id", "uid", "uuid", "example_id"),
    "query": ("query", "question", "instruction", "input", "user_input", "user_query"),
    "contexts": ("contexts", "passages", "context", "documents", "docs", "ctxs", "retrieved_contexts", "chunks"),
    "messages": ("messages", "conversation", "conversations", "chat"),
    "prompt": ("prompt", "text"),
}


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found. columns: of the first rows, each with the kind of its values. record: the first, as it is read.

    error: why the first row is no record. mapping: `input.columns` that would make it one, where there is one.
    """

    rows: int | None
    columns: dict[str, str]
    record: Record | None
    error: str
    mapping: dict[str, str]


def inspect(given: InputConfig) -> Inspection:
    """Return what the input holds. Raises ConfigError for one that cannot be opened."""
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
    first = rows[0].value if rows else None
    return Inspection(count, columns, record, error, suggestion(columns, first))


def suggestion(columns: dict[str, str], first: Any) -> dict[str, str]:
    """Return the mapping that makes a record of the first row; empty where none is needed, or none is seen."""
    found = {ours: next((name for name in names if name in columns), "") for ours, names in NAMES.items()}
    source = next((ours for ours in SOURCES if found[ours]), "")
    if not source or "body" in columns:
        return {}
    wanted = ["id", source, *(["contexts"] if source == "query" else [])]
    mapping = {ours: found[ours] for ours in wanted if found[ours] and found[ours] != ours}
    for fewer in ([], ["contexts"], ["id"], ["contexts", "id"]):  # contexts that are one text are none, for instance
        some = {ours: name for ours, name in mapping.items() if ours not in fewer}
        try:
            parse_record(Columns(some).of(first), 1)
        except RecordError:
            continue
        return some
    return {}


def kind_of(value: Any) -> str:
    """Return what a JSON value is, in a word or three."""
    if isinstance(value, list):
        inner = {kind_of(item) for item in value[:LOOKED_AT]}
        return f"list of {inner.pop()}s" if len(inner) == 1 else "list"
    names = {dict: "object", str: "text", bool: "boolean", type(None): "nothing"}
    return names.get(type(value), "number")
