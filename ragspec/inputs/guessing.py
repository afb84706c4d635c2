"""Which fields of an input are ragspec's, judged by their usual names and by the first rows.

>>> guessed([{"question": "Why?", "docs": [{"body": "Because it is so."}]}])
{'query': 'question', 'contexts': {'path': 'docs', 'text': 'body'}}

Rows that are no objects say nothing. A row that is unlike the others changes nothing: it fails alone when it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import combinations, islice
from typing import Any

from ragspec.errors import RecordError
from ragspec.inputs.columns import GUESSES, LOOKED_AT, Columns, look_up, plain_name
from ragspec.inputs.passages import LISTED, guessed_fields, passages_of
from ragspec.inputs.record import REFERENCES, SOURCES, parse_record, reference_texts
from ragspec.inputs.values import is_text

Mapping = dict[str, str | dict[str, str]]
FIRST = 20  # rows
OPTIONAL = ("id", "reference")  # keys that a mapping can do without
OTHER_FIELDS = {name for ours, names in GUESSES.items() if ours != "contexts" for name in names}
# parts of the names of lists that are no passages, though their texts may be as long
NO_PASSAGES = (
    *("answer", "choice", "option", "candidate", "distractor", "history", "dialog", "conversation", "turn", "example"),
    *("response", "completion", "solution", "test", "explanation", "rationale", "step", "rubric", "annotation"),
)
LONG = 60  # characters on average; texts of lists under unusual names that are shorter may be labels
# names of passages that often are something else, such as addresses: only what reads as text is taken
VAGUE = {"evidence", "hits", "matches", "sources", "knowledge", "article", "background"}


def first_rows(rows: Iterable[Any]) -> list[Any]:
    """Return the values of the first rows, and later ones that hold what those lack: passages, or a named reference."""
    rest = iter(rows)
    found = list(islice(rest, FIRST))
    added = dict.fromkeys((ours for ours in ("contexts", "reference") if not _hold(found, ours)), 0)
    if not _hold(found, "reference", empty=True):
        added.pop("reference", None)
    for value in islice(rest, LOOKED_AT - FIRST if added else 0):
        held = [ours for ours in added if added[ours] < FIRST and _hold([value], ours)]
        if held:
            found.append(value)
        for ours in held:
            added[ours] += 1
        if all(count == FIRST for count in added.values()):
            break
    return found


def _hold(values: Iterable[Any], ours: str, *, empty: bool = False) -> bool:
    """Return whether one of these rows has a value under a usual name of a field. empty: or only the name."""
    return any(
        plain_name(name) in GUESSES[ours] and (empty or field not in (None, "", [], {}))
        for value in values
        if isinstance(value, dict)
        for name, field in value.items()
    )


def guessed(values: Sequence[Any]) -> Mapping:
    """Return a mapping that turns rows into records; empty if none is needed or found.

    Of the rows, at least half are records with it, unless all its passages are of a form that must be corrected.
    """
    records = [value for value in values if isinstance(value, dict)]
    found = {ours: _name_of(records, ours) for ours in GUESSES}
    names = {name for record in records for name in record}
    if found["prompt"] == "text" and "_id" in names and "title" not in names:  # BEIR's queries
        found |= {"query": found["query"] or "text", "prompt": ""}
    source = next((ours for ours in SOURCES if found[ours]), "")
    if not source or "body" in names:
        return {}
    mapping: Mapping = {ours: found[ours] for ours in ("id", source) if found[ours]}
    contexts = guessed_contexts(records) if source == "query" else ""
    refused = _refused(records) if source == "query" and not contexts else ""
    if contexts or refused:
        mapping["contexts"] = contexts or refused
    if found["reference"] not in ("", *REFERENCES) and _are_references(records, found["reference"]):
        mapping["reference"] = found["reference"]
    mapping = {ours: theirs for ours, theirs in mapping.items() if theirs != ours}
    for count in range(len(OPTIONAL) + 1):
        for left_out in combinations(OPTIONAL, count):
            some = {ours: theirs for ours, theirs in mapping.items() if ours not in left_out}
            if 2 * _parsed(records, some) >= len(records):
                return some
    unread = refused or _context_names(records)  # errors are then about the passages, unless rows have another prompt
    return mapping if unread and _parsed(records, mapping) >= _parsed(records, {}) else {}


def guessed_references(records: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the names under which records that only tell references have them, their ids and questions.

    Without fields that have a name which is read anyway.
    """
    read = {"id": ("id", "custom_id"), "reference": REFERENCES, "query": ("query", "question")}
    found = {
        ours: _name_of(records, ours)
        for ours, names in read.items()
        if all(record.get(name) is None for record in records for name in names)
    }
    if not _are_references(records, found.get("reference", "")):
        found.pop("reference", None)
    return {ours: theirs for ours, theirs in found.items() if theirs not in ("", *read[ours])}


def _name_of(records: Sequence[dict[str, Any]], ours: str) -> str:
    """Return the records' name for a field, "" without one; not one that far more rows have under another."""
    known: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for record in records for name in record):
        known.setdefault(plain_name(name), []).append(name)
    names = [name for guess in GUESSES[ours] for name in sorted(known.get(guess, []), key=lambda each: each != guess)]
    counts = {name: sum(record.get(name) not in (None, "") for record in records) for name in names}
    return next((name for name, count in counts.items() if 2 * count >= max(counts.values())), "")


def _parsed(records: Sequence[dict[str, Any]], mapping: Mapping) -> int:
    """Return how many rows are records with a mapping."""
    columns, count = Columns(mapping), 0
    for record in records:
        with suppress(RecordError):
            parse_record(columns.of(record), 1)
            count += 1
    return count


def guessed_contexts(records: Sequence[dict[str, Any]]) -> str | dict[str, str]:
    """Return the path of the passages, with the names of their fields where they are unusual; "" if there are none."""
    names = _context_names(records)
    paths = [*names, *(f"{outer}.{inner}" for outer in names for inner in GUESSES["contexts"])]
    found = [(mapping, count) for path in paths for mapping, count in _at(path, records)]
    most = max((count for _, count in found), default=0)
    return next((mapping for mapping, count in found if 2 * count >= most), "")


def _context_names(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return the usual names of passages under which there is something, the likeliest first."""
    held = dict.fromkeys(name for record in records for name, value in record.items() if value)
    known = [name for name in held if plain_name(name) in GUESSES["contexts"]]
    order = GUESSES["contexts"].index
    return sorted(known, key=lambda name: (order(plain_name(name)), name != plain_name(name)))


def _at(path: str, records: Sequence[dict[str, Any]]) -> Iterator[tuple[str | dict[str, str], int]]:
    """Yield a path with the names of the fields there, and how many rows have passages there.

    Nothing unless at least half of what is there are passages.
    """
    holders = [record for record in records if isinstance(look_up(record, path), str | list | dict)]
    mapping, parsed = _read(path, holders)
    texts = [text for contexts in parsed for text in contexts]
    names = plain_name(path) in VAGUE and 2 * sum(map(_is_name, texts)) > len(texts)
    if texts and 2 * len(parsed) >= len(holders) and not names:
        yield mapping, sum(map(bool, parsed))


def _read(path: str, records: Sequence[dict[str, Any]]) -> tuple[str | dict[str, str], list[list[str]]]:
    """Return a path with the names of the fields there, and the passages' texts of each record that can be read."""
    fields = guessed_fields([look_up(record, path) for record in records])
    mapping: str | dict[str, str] = {"path": path, **fields} if fields else path
    columns, parsed = Columns({"contexts": mapping}), []
    for record in records:
        with suppress(RecordError):
            parsed.append([passage.text for passage in passages_of(columns.of(record)["contexts"])])
    return mapping, parsed


def unread_passages(fields: dict[str, Any], *, usual_name: bool = False) -> str:
    """Return the name of a field that looks like passages, "" without one. fields: those that a record did not need.

    usual_name: only if its name is usual for passages.
    """
    named = {plain_name(name): name for name, value in reversed(fields.items()) if _may_be_passages(name, value)}
    usual = next((named[guess] for guess in GUESSES["contexts"] if guess in named), "")
    if usual or usual_name:
        return usual
    return next((name for name, value in fields.items() if _look_like_passages(name, value)), "")


def _look_like_passages(name: str, value: Any) -> bool:
    """Return whether a list under an unusual name holds long texts, or objects of which one field is such a text."""
    plain = plain_name(name)
    if not isinstance(value, list) or plain in OTHER_FIELDS or any(part in plain for part in NO_PASSAGES):
        return False
    value = value[:FIRST]  # there may be very many
    if any(isinstance(item, dict) and "role" in item for item in value):  # messages
        return False
    texts = [text for contexts in _read(name, [{name: value}])[1] for text in contexts]
    return 2 * sum(map(_is_name, texts)) < len(texts) and sum(map(len, texts)) >= LONG * len(texts)


def _may_be_passages(name: str, value: Any) -> bool:
    if not value or not (is_text(value) or isinstance(value, list | dict)):
        return False
    texts = value if isinstance(value, list) else [value]
    return plain_name(name) not in VAGUE or not all(is_text(text) and _is_name(text) for text in texts)


def _is_name(text: str) -> bool:
    """Return whether a text is an address or an identifier rather than something to read."""
    return text.isascii() and len(text.split()) == 1


def _refused(records: Sequence[dict[str, Any]]) -> str:
    """Return the name of passages that ragspec must not guess: printed lists, or objects of which none is the text."""
    for name in _context_names(records):
        values = [record[name] for record in records if record.get(name)]
        refused = sum(_must_be_named(value) for value in values)
        if plain_name(name) not in VAGUE and 2 * refused > len(values):
            return name
    return ""


def _must_be_named(value: Any) -> bool:
    if is_text(value):
        return LISTED.fullmatch(value) is not None
    items = value if isinstance(value, list) else [value]
    return all(isinstance(item, dict) and any(map(is_text, item.values())) for item in items)


def _are_references(records: Sequence[dict[str, Any]], name: str) -> bool:
    values = [record[name] for record in records if record.get(name) is not None]
    return 2 * sum(reference_texts(value) is not None for value in values) >= len(values)
