"""JSON schemas that a record completes, and how they are written into a grammar.

>>> completed({"enum": {"$contexts": "id"}}, [Passage("p1", "..."), Passage("p2", "...")])
{'enum': ['p1', 'p2']}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ragspec.errors import RecordError
from ragspec.records import Passage

CONTEXTS, QUOTE = "$contexts", "$quote"
FIELDS = ("id", "title")  # of a passage that an answer may name
SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def completed(schema: Any, passages: Sequence[Passage]) -> Any:
    """Return a schema with the record's values where it refers to its passages. Raises RecordError."""
    if isinstance(schema, list):
        return [completed(each, passages) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _values(value, passages) if _refers(key, value) else completed(value, passages)
        for key, value in schema.items()
    }


def varies(schema: Any) -> bool:
    """Return whether a schema is another one for every record. Raises RecordError for a reference nobody knows."""
    found = False
    for node in nodes(schema):
        for key, value in node.items():
            if _refers(key, value):
                _values(value, SOME)
                found = True
        found = found or QUOTE in node
    return found


def quotes(schema: Any) -> bool:
    """Return whether a schema has strings that must be quotes."""
    return any(QUOTE in node for node in nodes(schema))


def nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of a schema, outer ones first."""
    if isinstance(schema, dict):
        yield schema
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    for each in inner:
        yield from nodes(each)


def inline(schema: Any) -> str:
    """Return a schema as a part of a grammar. How JSON is spaced is part of it; a schema that says so itself wins."""
    if isinstance(schema, bool):  # anything, or nothing
        schema = {} if schema else {"enum": []}
    own = schema.get("x-guidance")
    return "%json " + json.dumps({**schema, "x-guidance": {**SPACES, **(own if isinstance(own, dict) else {})}})


def _refers(key: str, value: Any) -> bool:
    return key == "enum" and isinstance(value, dict)


def _values(reference: dict[str, Any], passages: Sequence[Passage]) -> list[str]:
    """Return the values that {"$contexts": field} stands for, each once."""
    field = reference.get(CONTEXTS)
    if reference.keys() != {CONTEXTS} or field not in FIELDS:
        known = " or ".join(f'{{"{CONTEXTS}": "{each}"}}' for each in FIELDS)
        raise RecordError(f'"enum": {json.dumps(reference)} must be a list, or {known}')
    found = (getattr(passage, field) for passage in passages)
    values = list(dict.fromkeys(value for value in found if value))
    if not values:
        raise RecordError(
            f'"enum": {json.dumps(reference)}: no passage in its prompt has one; the answer could be none'
        )
    return values


SOME = (Passage("1", "A passage.", "A title"),)  # stands for a record's, where only the form is looked at
