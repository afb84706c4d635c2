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
DEEPEST = 100  # levels of a schema
FIELDS = ("id", "title")  # of a passage that an answer may name
SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def completed(schema: Any, passages: Sequence[Passage]) -> Any:
    """Return a schema with the record's values where it refers to its passages. Raises RecordError."""
    _check_depth(schema)
    return _completed(schema, passages)


def _completed(schema: Any, passages: Sequence[Passage]) -> Any:
    if isinstance(schema, list):
        return [_completed(each, passages) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _values(value, passages) if _refers(key, value) else _completed(value, passages)
        for key, value in schema.items()
    }


def quotes(schema: Any) -> bool:
    """Return whether a schema has strings that must be quotes."""
    return any(QUOTE in node for node in nodes(schema))


def nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of a schema."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
        waiting += _inside(node)


def _inside(node: Any) -> list[Any]:
    return list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []


def _check_depth(schema: Any) -> None:
    """Raise RecordError for a schema that is nested so deeply that it could end the process."""
    layer, depth = [schema], 0
    while layer:
        layer, depth = [inner for node in layer for inner in _inside(node)], depth + 1
        if depth > DEEPEST:
            raise RecordError(f"structured.json_schema: nested deeper than {DEEPEST} levels")


def inline(schema: Any) -> str:
    """Return a schema as a part of a grammar. How JSON is spaced is part of it; a schema that says so itself wins."""
    if isinstance(schema, bool):  # anything, or nothing
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise RecordError(f"structured.json_schema: {json.dumps(schema)[:40]} must be an object, true or false")
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
