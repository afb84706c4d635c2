"""What an answer cites: passages by number in its text ([1], [2, 3]), or by id in the fields of a structured answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

NUMBERS = re.compile(r"\[(\d+(?:\s*[,;]\s*\d+)*)\]")
FIELDS = ("citations", "sources", "cited", "passages")  # of a structured answer, that hold ids


def cited(text: str, parsed: Any, contexts: Sequence[str]) -> set[str] | None:
    """Return the ids of the passages that an answer cites; None if it is not one that cites.

    contexts: ids of the passages in its prompt, in that order. A number that no passage has counts as a wrong id.
    """
    if isinstance(parsed, dict):
        found = [parsed[field] for field in FIELDS if field in parsed]
        return set(_ids(found)) if found else None
    return numbered(text, contexts) or None


def numbered(text: str, contexts: Sequence[str]) -> set[str]:
    """Return the ids of the passages whose numbers stand in brackets in a text."""
    numbers = {int(number) for group in NUMBERS.findall(text) for number in re.split(r"[,;]", group)}
    return {contexts[number - 1] if 0 < number <= len(contexts) else f"[{number}]" for number in numbers}


def _ids(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for each in value:
            yield from _ids(each)
    elif isinstance(value, str | int) and not isinstance(value, bool):
        yield str(value)


def precision(own: set[str], gold: set[str]) -> float:
    """Return the share of cited passages that are gold."""
    return len(own & gold) / len(own) if own else 0.0


def recall(own: set[str], gold: set[str]) -> float:
    """Return the share of gold passages that are cited."""
    return len(own & gold) / len(gold)
