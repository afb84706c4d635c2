"""Checks of a record's JSON values, each with one line that says what was expected. All raise RecordError."""

from __future__ import annotations

import math
from typing import Any

from ragspec.errors import RecordError
from ragspec.json_text import ExactFloat

EXACT = 1 << 53  # floats below this are whole numbers of their own


class Base64(str):
    """Binary data that is no text, in base64: a table may have it, but nothing that ragspec reads as text."""


def id_text(given: Any) -> str | None:
    """Return the id that a record gives itself, in one form however it is written (1, 1.0, "1"); None for none.

    pandas makes floats of whole numbers in a column with gaps, and NaN of the gaps.
    """
    if given is None or (isinstance(given, float) and math.isnan(given)):
        return None
    if isinstance(given, float) and given.is_integer() and abs(given) < EXACT and not isinstance(given, ExactFloat):
        given = int(given)
    if isinstance(given, bool | Base64) or not isinstance(given, str | int) or given == "":
        raise RecordError(f'"id" must be a non-empty string or a whole number, got {kind(given)}')
    return str(given)


def record_id(given: Any, line: int) -> str:
    """Return the record's id, the line number standing in for a missing one."""
    own = id_text(given)
    return str(line) if own is None else own


def is_text(value: Any) -> bool:
    """Return whether a value is text, and not binary data in base64."""
    return isinstance(value, str) and not isinstance(value, Base64)


def holds_binary(value: Any) -> bool:
    """Return whether there is binary data, in base64, anywhere in a value."""
    if isinstance(value, dict):
        return any(map(holds_binary, value.values()))
    if isinstance(value, list):
        return any(map(holds_binary, value))
    return isinstance(value, Base64)


def text_of(value: Any, name: str) -> str:
    """Return a text that says something. name: of its field."""
    if not is_text(value):
        raise RecordError(f'"{name}" must be a string, got {kind(value)}')
    if not value.strip():
        raise RecordError(f'no prompt: "{name}" is empty')
    return str(value)


def kind(value: Any) -> str:
    """Return what a value is, for a message."""
    words = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        type(None): "nothing",
        Base64: "binary data that is not UTF-8",
    }
    if value == "" or value == []:
        return "an empty one"
    return words.get(type(value), "a number")


def names(value: dict[str, Any]) -> str:
    """Return an object's first keys, for a message."""
    return ", ".join(f'"{key}"' for key in list(value)[:8]) or "nothing"


def with_metadata(found: dict[str, Any], given: Any) -> dict[str, Any]:
    """Return a record's other fields with those of its `metadata`.

    A name that both have is the record's field; what `metadata` says of it is kept as it was, under "metadata".
    """
    if not isinstance(given, dict):
        return found if given is None else {**found, "metadata": given}
    twice = {key: field for key, field in given.items() if key in found and found[key] != field}
    if not twice:
        return found | given
    twice |= {key: field for key, field in given.items() if key == "metadata"}
    return {**found, **{key: field for key, field in given.items() if key not in twice}, "metadata": twice}
