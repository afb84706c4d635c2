"""The mapping from a row's fields to ragspec's: `columns: {query: question, contexts: retrieval.passages}`.

>>> Columns({"query": "q.text"}).of({"q": {"text": "Why?"}, "lang": "en"})
{'q': {'text': 'Why?'}, 'lang': 'en', 'query': 'Why?'}

A dot selects a field inside an object; inside a list, that field of each item.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

from ragspec.errors import ConfigError, RecordError, did_you_mean
from ragspec.inputs.passages import listed as listed_passages
from ragspec.inputs.passages import renamed
from ragspec.inputs.record import REFERENCES, SOURCES, STRUCTURED
from ragspec.inputs.values import is_text
from ragspec.json_text import JSONDecodeError, loads

Mapped = Mapping[str, str | Mapping[str, str]]
OPTIONAL = {"id", "contexts", "reference", "metadata"}
TEXTS = {"id", "custom_id", "query", "prompt", "reference"}  # fields whose cells are never parsed as JSON
SHOWN = 12  # names in a message
LOOKED_AT = 1000  # records that a mapping is checked against before a run
MISSING = object()
# common names of the fields, the likeliest first: what was retrieved before what should have been, and what is expected
# before what some model answered
GUESSES = {
    "id": ("id", "qid", "_id", "question_id", "query_id", "uid", "uuid", "example_id"),
    "query": ("query", "question", "instruction", "input", "user_input", "user_query"),
    "contexts": (
        *("contexts", "retrieved_contexts", "retrieval_context", "retrieved_passages", "retrieved_documents"),
        *("retrieved_docs", "retrieved_chunks", "passages", "context", "passage", "documents", "docs", "ctxs"),
        *("chunks", "source_documents", "source_nodes", "search_results", "search_hits", "hits", "matches", "snippets"),
        *("paragraphs", "positive_passages", "positive_ctxs", "reference_contexts", "evidence", "sources"),
        *("knowledge", "article", "background"),
    ),
    "messages": ("messages", "conversation", "conversations", "chat"),
    "prompt": ("prompt", "text"),
    "reference": (
        *("reference", "references", "ground_truth", "ground_truths", "gold_answer", "gold_answers"),
        *("expected_answer", "expected_output", "answers", "answer", "target"),
    ),
}


class Columns:
    """A mapping from ragspec's fields to paths in a row ("a.b").

    The one of `contexts` may itself be a mapping: `path`, and the fields of a passage.
    """

    def __init__(self, mapping: Mapped) -> None:
        self._paths: dict[str, str] = {}
        self._inside: dict[str, str] = {}  # the same for the fields of a passage
        for ours, theirs in mapping.items():
            if isinstance(theirs, str):
                self._paths[ours] = theirs
            else:
                self._paths[ours] = theirs.get("path", ours)
                self._inside = {inner: path for inner, path in theirs.items() if inner != "path"}

    def __bool__(self) -> bool:
        return bool(self._paths)

    def of(self, value: Any) -> Any:
        """Return a row's JSON value with ragspec's fields. Raises RecordError for a missing field.

        A field mapped by its full name is renamed; one inside another field is copied. A field of the row that already
        has one of ragspec's names but is not the mapped one is replaced; other prompts are set to None.
        """
        if not self._paths or not isinstance(value, dict):
            return value
        found = {ours: _found(value, path, ours) for ours, path in self._paths.items()}
        if self._inside and found.get("contexts") is not None:
            fields = {ours: partial(_or_none, path) for ours, path in self._inside.items()}
            found["contexts"] = renamed(listed_passages(found["contexts"]), fields)
        found |= dict.fromkeys(value.keys() & SOURCES - found.keys()) if found.keys() & SOURCES else {}
        paths = set(self._paths.values())
        return {key: field for key, field in value.items() if key not in paths and key not in found} | found

    def check(self, names: Collection[str], where: str) -> None:
        """Raise ConfigError for a mapped column that a table lacks."""
        for ours, path in self._paths.items():
            if path not in names and path.partition(".")[0] not in names:
                near = did_you_mean(path.partition(".")[0], names)
                known = f"; it has {listed(names)}" if near.startswith("; known") else f"{near} It has {listed(names)}"
                raise ConfigError(f'input.columns.{ours}: {where} has no column "{path}"{known}')

    def makes_records(self, names: Iterable[str]) -> bool:
        """Return whether one of these columns can be a prompt."""
        prompts = {*SOURCES, "body", *GUESSES["query"], *(path.partition(".")[0] for path in self._paths.values())}
        return any(name in prompts or plain_name(name) in prompts for name in names)

    def check_prompts(self, names: Collection[str], where: str, source: str = "auto") -> None:
        """Raise ConfigError if no row of a table can have a prompt. source: `prompt.source`."""
        wanted = {*SOURCES, "body"} if source == "auto" else {source, "body"}
        if wanted.isdisjoint({*names, *self._paths}):
            needed = '"query", "messages" or "prompt"' if source == "auto" else f'"{source}" (prompt.source)'
            raise ConfigError(
                f"{where}: no record can have a prompt: it needs {needed}, the columns are {listed(names)}; ragspec "
                "inspect shows the input.columns to write"
            )

    def check_records(self, values: Iterable[Any], where: str) -> None:
        """Raise ConfigError for a mapped field that none of the first records has. values: unmapped records."""
        missing = {**self._paths, **{f"contexts.{ours}": path for ours, path in self._inside.items()}}
        records: list[dict[str, Any]] = []
        for value in values:
            if not missing:
                return
            if isinstance(value, dict):
                records.append(value)
                missing = {ours: path for ours, path in missing.items() if not self._has(value, ours, path)}
        if missing and records:
            ours, path = next(iter(missing.items()))
            levels = [self._level(record, ours, path) for record in records]
            name, known = max(levels, key=lambda level: len(level[1]), default=(path, []))
            raise ConfigError(
                f'input.columns.{ours}: {where}: none of the first {len(records):,} records has "{path}"'
                f"{did_you_mean(name, list(known)[:SHOWN] or ['nothing'])}"
            )

    def _has(self, value: dict[str, Any], ours: str, path: str) -> bool:
        inside, _, _ = ours.partition(".")
        if inside == ours:
            return look_up(value, path) is not MISSING
        passages = [item for item in self._passages(value) if isinstance(item, dict)]
        return not passages or any(_in_passage(item, path) is not MISSING for item in passages)

    def _level(self, value: dict[str, Any], ours: str, path: str) -> tuple[str, list[str]]:
        """Return the first missing name of a path in a record, and the names at that level."""
        if "." in ours:
            inside = next((item for item in self._passages(value) if isinstance(item, dict)), None)
            value = inside if inside is not None else value
        found: Any = value
        for name in path.split("."):
            while isinstance(found, list):
                found = found[0] if found else None
            if not isinstance(found, dict):
                return name, []
            if name not in found:
                return name, list(found)
            found = found[name]
        return path, list(value)

    def _passages(self, value: dict[str, Any]) -> list[Any]:
        found = look_up(value, self._paths["contexts"])
        try:
            return [] if found is MISSING else listed_passages(found)
        except RecordError:  # reported with the record
            return []

    def with_json(self, row: dict[str, Any], *, typed: bool) -> dict[str, Any]:
        """Return a table's row with JSON lists and objects parsed in the columns that may hold them.

        typed: the table has list and object types (Parquet, not CSV), so only columns that must hold one are parsed;
        else all columns except those that ragspec reads as text.
        """
        return {name: _parsed(cell, name) if self._may_be_json(name, typed) else cell for name, cell in row.items()}

    def _may_be_json(self, name: str, typed: bool) -> bool:
        mapped = {ours for ours, path in self._paths.items() if path == name}
        if any(path.startswith(f"{name}.") for path in self._paths.values()):
            return True
        meant = mapped or {name}
        return bool(meant & STRUCTURED) if typed else not meant & TEXTS


ALL = Columns({})  # no renaming


def plain_name(name: str) -> str:
    """Return a column's name as the usual names are written, in lower case: "User Query" is user_query."""
    return "_".join(name.casefold().split())


def listed(names: Collection[str]) -> str:
    """Return names as a list for a message, shortened."""
    shown = ", ".join(list(names)[:SHOWN])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > SHOWN else shown or "none"


def look_up(value: dict[str, Any], path: str) -> Any:
    """Return the value at a path in an object, MISSING without one."""
    if path in value:  # a name may contain a dot
        return value[path]
    found: Any = value
    for name in path.split("."):
        found = _inner(found, name)
    return found


def _inner(found: Any, name: str) -> Any:
    if isinstance(found, dict):
        return found.get(name, MISSING)
    if not isinstance(found, list):
        return MISSING
    items = [_inner(item, name) for item in found]
    if items and all(item is MISSING for item in items):
        return MISSING
    return [None if item is MISSING else item for item in items]


def _found(value: dict[str, Any], path: str, ours: str) -> Any:
    found = look_up(value, path)
    if found is not MISSING:
        return found
    if ours in OPTIONAL:
        return None
    raise RecordError(f'input.columns.{ours}: the record has no "{path}"; it has {listed(value)}')


def _or_none(path: str, item: dict[str, Any]) -> Any:
    found = _in_passage(item, path)
    return None if found is MISSING else found


def _in_passage(item: dict[str, Any], path: str) -> Any:
    """Return the value at a path in a listed passage; LangChain's serialized objects are listed as their `kwargs`."""
    found = look_up(item, path)
    return look_up(item, path.removeprefix("kwargs.")) if found is MISSING else found


def _parsed(cell: Any, name: str) -> Any:
    """Return the JSON list or object in a cell, else the cell. A reference is parsed only if it is a list of texts."""
    if not isinstance(cell, str) or cell[:1] not in ("[", "{"):
        return cell
    try:
        found = loads(cell)
    except JSONDecodeError:
        return cell
    return found if name not in REFERENCES or _are_texts(found) else cell


def _are_texts(found: Any) -> bool:
    texts = found.get("text") if isinstance(found, dict) else found
    return isinstance(texts, list) and all(is_text(each) or isinstance(each, dict) for each in texts)
