"""Checks of a record's JSON values, each with one line that says what was expected. All raise RecordError."""

from __future__ import annotations

from typing import Any

from ragspec.errors import RecordError


def record_id(given: Any, line: int) -> str:
    """Return the record's id, the line number standing in for a missing one."""
    if given is None:
        return str(line)
    if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
        raise RecordError(f'"id" must be a non-empty string or a whole number, got {kind(given)}')
    return str(given)


def text_of(value: Any, name: str) -> str:
    """Return a text that says something. name: of its field."""
    if not isinstance(value, str):
        raise RecordError(f'"{name}" must be a string, got {kind(value)}')
    if not value.strip():
        raise RecordError(f'no prompt: "{name}" is empty')
    return value


def kind(value: Any) -> str:
    """Return what a value is, for a message."""
    words = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "nothing"}
    if value == "" or value == []:
        return "an empty one"
    return words.get(type(value), "a number")


def names(value: dict[str, Any]) -> str:
    """Return an object's first keys, for a message."""
    return ", ".join(f'"{key}"' for key in list(value)[:8]) or "nothing"
