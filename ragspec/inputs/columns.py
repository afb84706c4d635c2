"""Which of a row's fields mean what: `columns: {query: question, contexts: retrieval.passages}`.

>>> Columns({"query": "q.text"}).of({"q": {"text": "Why?"}, "lang": "en"})
{'q': {'text': 'Why?'}, 'lang': 'en', 'query': 'Why?'}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ragspec.errors import ConfigError, RecordError
from ragspec.inputs.record import SOURCES

OPTIONAL = {"id", "contexts", "reference", "metadata"}
SHOWN = 12  # names in a message


class Columns:
    """A mapping from ragspec's fields to a row's own, which may lie inside others ("a.b")."""

    def __init__(self, mapping: Mapping[str, str]) -> None:
        self._mapping = dict(mapping)

    def of(self, value: Any) -> Any:
        """Return a row's JSON value with ragspec's own fields. Raises RecordError for a field that is not there.

        A field that was mapped by its whole name is renamed, one inside another stays where it is too. A field of the
        row that has one of ragspec's names, and is not what the mapping means, gives way; so does another prompt.
        """
        if not self._mapping or not isinstance(value, dict):
            return value
        found = {ours: _look_up(value, path, ours) for ours, path in self._mapping.items()}
        found |= dict.fromkeys(value.keys() & SOURCES - found.keys()) if found.keys() & SOURCES else {}
        renamed = set(self._mapping.values())
        return {key: field for key, field in value.items() if key not in renamed and key not in found} | found

    def check(self, names: Collection[str], where: str) -> None:
        """Raise ConfigError for a column that a table does not have."""
        for ours, path in self._mapping.items():
            if path not in names and path.partition(".")[0] not in names:
                raise ConfigError(f'input.columns.{ours}: {where} has no column "{path}"; it has {listed(names)}')


ALL = Columns({})  # as they are called


def listed(names: Collection[str]) -> str:
    """Return names for a message."""
    shown = ", ".join(list(names)[:SHOWN])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > SHOWN else shown or "none"


def _look_up(value: dict[str, Any], path: str, ours: str) -> Any:
    if path in value:  # a name may have a dot in it
        return value[path]
    found: Any = value
    for name in path.split("."):
        if not isinstance(found, dict) or name not in found:
            if ours in OPTIONAL:
                return None
            raise RecordError(f'input.columns.{ours}: the record has no "{path}"; it has {listed(value)}')
        found = found[name]
    return found
