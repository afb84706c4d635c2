"""The passages of a record in any of their shapes, and the usual names of their fields.

>>> [passage.text for passage in passages_of({"title": ["A", "B"], "sentences": [["One.", " Two."], ["Three."]]})]
['One. Two.', 'Three.']

The shapes: a text, an object, or a list of them; parallel lists, as in Hugging Face datasets, or as Chroma returns for
one query; HotpotQA's `[title, [sentence, ...]]`; `[passage, score]`; LangChain's serialized objects; texts by their
ids; any of these as JSON in a text. Limit: a text that looks like a list and is not JSON is refused, since it would
become one odd passage.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ragspec.errors import RecordError
from ragspec.inputs.values import id_text, is_text, kind, names
from ragspec.json_text import ExactFloat, JSONDecodeError, loads
from ragspec.records import Passage

FIELDS = ("id", "title", "text", "score")
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")  # as JSON writes one
# common names, the likeliest first; also searched inside objects (LangChain's metadata, LlamaIndex's node)
NAMES = {
    "text": (
        *("text", "body", "content", "page_content", "passage", "passage_text", "chunk", "chunk_text", "document"),
        *("document_text", "paragraph", "paragraph_text", "contents", "snippet", "sentences", "texts", "documents"),
    ),
    "title": ("title", "heading", "name", "document_title", "section", "source", "file_name", "file"),
    "id": (
        *("id", "doc_id", "_id", "docid", "document_id", "passage_id", "pid", "chunk_id", "id_", "node_id", "uuid"),
        *("idx", "source", "ids"),
    ),
    "score": ("score", "similarity", "relevance", "relevance_score", "similarity_score", "_score", "rank_score"),
}
PLURAL = ("texts", "documents")  # of parallel lists, in which each is one text; several may be names of files
SENTENCE = 20  # characters; a field whose texts are shorter on average is not taken for the text
DIGIT = re.compile(r"\d")
MOST_OBJECTS = 16  # names of objects in passages that are searched at each level
CLEARLY = 3  # times longer than others is a text that they are not
# JSON, or a printed Python list
LISTED = re.compile(r"""\s*(?:(?:\[\s*['"\[{]|\{\s*['"]).*[\]}]|\[\s*\])\s*""", re.DOTALL)


def passages_of(value: Any) -> tuple[Passage, ...]:
    """Return the passages of a record's `contexts`. Raises RecordError."""
    items = listed(value)
    return tuple(
        _passage(item, position, name)
        for position, (item, name) in enumerate(zip(items, passage_ids(items), strict=True), 1)
    )


def listed(value: Any) -> list[Any]:
    """Return passages of any shape as a list of texts and objects. Raises RecordError."""
    if value is None:
        return []
    if is_text(value):
        if LISTED.fullmatch(value):
            return listed(_from_json(value))
        return [value] if value.strip() else []
    if isinstance(value, dict) and _are_by_id(value):
        return [{"id": name, "text": text} for name, text in value.items()]
    if isinstance(value, dict):
        value = _of_one_query(value)
        return _transposed(value) if _are_columns(value) else [_plain(value)]
    if not isinstance(value, list):
        raise RecordError(f'"contexts" must be a list of strings or objects, got {kind(value)}')
    return [_plain(item) for item in value]


def _from_json(text: str) -> Any:
    """Return the list or object that a text holds. Raises RecordError, for instance for a printed Python list."""
    try:
        return loads(text)
    except JSONDecodeError:
        raise RecordError(
            f'"contexts" is a text that looks like a list ({text.strip()[:20]}...); write it as JSON'
        ) from None


def _are_by_id(value: dict[str, Any]) -> bool:
    """Return whether an object is a set of texts by their ids, such as {"d1": "...", "d2": "..."}."""
    return bool(value) and all(DIGIT.search(name) and is_text(text) for name, text in value.items())


def passage_ids(items: Sequence[Any]) -> list[str]:
    """Return the ids of passages: the given ones, else positions, made distinct from the given ones."""
    own = [_given_id(item, position) for position, item in enumerate(items, 1)]
    taken = {name for name in own if name is not None}
    found = []
    for position, name in enumerate(own, 1):
        if name is None:
            name = str(position)
            while name in taken:
                name = f"passage-{name}"
            taken.add(name)
        found.append(name)
    return found


def renamed(items: list[Any], fields: Mapping[str, Any]) -> list[Any]:
    """Return passages with ragspec's field names. fields: name -> function that looks the value up in a passage."""
    return [
        {**item, **{ours: look_up(item) for ours, look_up in fields.items()}} if isinstance(item, dict) else item
        for item in items
    ]


def guessed_fields(values: Sequence[Any]) -> dict[str, str]:
    """Return a mapping of the passages' fields, {ragspec's name: path}, without fields that need no mapping.

    values: the passages of some records; those that are not passages are passed over.
    """
    records = []
    for value in values:
        with suppress(RecordError):
            records.append([item for item in listed(value) if isinstance(item, dict)])
    found: dict[str, str] = {}
    for ours in ("text", "id", "title", "score"):
        paths = [path for path in _paths(ours, records, found.get("text")) if path not in found.values()]
        fitting = [path for path in paths if _fits(ours, path, records)]
        if ours == "text":
            fitting = [_text_among(fitting, records) or _longest(records) or ""]
        if fitting and fitting[0]:
            found[ours] = fitting[0]
    return {ours: found[ours] for ours in FIELDS if found.get(ours, ours) not in (ours, "sentences")}


def _paths(ours: str, records: Sequence[Sequence[dict[str, Any]]], text: str | None) -> list[str]:
    """Return the candidate paths of a field: top-level names first, then names one and two levels down.

    text: the path of the text, if known. Two levels down in another object, a name or an id is hardly the passage's.
    """
    items = [item for each in records for item in each]
    outer = _objects_in(items)
    beside = outer if ours == "text" else [name for name in outer if f"{text}".startswith(f"{name}.")]
    inner = [f"{name}.{more}" for name in beside for more in _objects_in([item.get(name) for item in items])]
    return [*NAMES[ours], *(f"{path}.{name}" for paths in (outer, inner) for name in NAMES[ours] for path in paths)]


def _objects_in(items: Sequence[Any]) -> list[str]:
    """Return the names under which some objects hold others; the commonest, since names may be ids."""
    objects = [item for item in items if isinstance(item, dict)]
    counts = Counter(name for item in objects for name, value in item.items() if isinstance(value, dict))
    return sorted(name for name, _ in counts.most_common(MOST_OBJECTS))


def _fits(ours: str, path: str, records: Sequence[Sequence[dict[str, Any]]]) -> bool:
    """Return whether the values at a path have the type of the field, at least half of them.

    Ids must all have it, and be unique in each record.
    """
    columns = [[value for item in items if (value := _at(item, path)) is not None] for items in records]
    values = [value for column in columns for value in column]
    if ours == "id":
        try:
            return bool(values) and all(len(set(map(id_text, column))) == len(column) for column in columns)
        except RecordError:
            return False
    if ours == "score":
        fitting = sum(map(_is_number, values))
    else:
        sentences = ours == "text" and path.rpartition(".")[2] not in PLURAL
        fitting = sum(is_text(value) or (sentences and _are_sentences(value)) for value in values)
    return fitting > 0 and 2 * fitting >= len(values)


def _is_number(value: Any) -> bool:
    try:
        return _score(value, "") is not None
    except RecordError:
        return False


def _at(item: dict[str, Any], path: str) -> Any:
    found: Any = item
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _text_among(paths: Sequence[str], records: Sequence[Sequence[dict[str, Any]]]) -> str | None:
    """Return the first path whose texts can be a passage's: not blank, nor ids or labels beside a field of real texts.

    `text` itself is taken unless another of the usual names has such texts. A text two levels down is not taken beside
    clearly longer ones: it may be that of something else.
    """
    means = {path: _mean_length(path, records) for path in paths}
    usual = max(means.values(), default=0.0)
    longest = max([usual, *_lengths(records).values()])
    for path, mean in means.items():
        best = usual if path == "text" else longest
        doubtful = mean < SENTENCE <= best or path.count(".") > 1
        if mean and not (doubtful and CLEARLY * mean <= best):
            return path
    return None if longest else next(iter(paths), None)


def _mean_length(path: str, records: Sequence[Sequence[dict[str, Any]]]) -> float:
    values = [_at(item, path) for items in records for item in items]
    texts = [_joined(value) if _are_sentences(value) else value for value in values]
    lengths = [len(text.strip()) for text in texts if is_text(text)]
    return sum(lengths) / max(1, len(lengths))


def _lengths(records: Sequence[Sequence[dict[str, Any]]]) -> dict[str, float]:
    """Return the mean length of the fields of passages that may be a text of another name: titles and ids are not."""
    known = {name for ours in ("id", "title", "score") for name in NAMES[ours]}
    names = {name for items in records for item in items for name, value in item.items() if _is_content(value)}
    return {name: _mean_length(name, records) for name in sorted(names - known)}


def _longest(records: Sequence[Sequence[dict[str, Any]]]) -> str | None:
    """Return the field that clearly is the text though its name is unknown; None if that might drop other content.

    Its texts have at least SENTENCE characters on average, and CLEARLY more than all other fields together; long texts
    without a space, such as addresses, are no content.
    """
    items = [item for each in records for item in each]
    totals: dict[str, int] = {}
    texts: dict[str, int] = {}
    for item in items:
        for name, value in item.items():
            if _is_content(value):
                totals[name] = totals.get(name, 0) + len(str(value))
            texts[name] = texts.get(name, 0) + is_text(value)
    longest = max((name for name in totals if texts[name]), key=totals.__getitem__, default=None)
    if longest is None or totals[longest] < SENTENCE * texts[longest] or 2 * texts[longest] < len(items):
        return None
    others = sum(totals.values()) - totals[longest]
    return longest if totals[longest] >= CLEARLY * others else None


def _is_content(value: Any) -> bool:
    """Return whether a value may be content: a text, not a long one without spaces such as an address; or a number."""
    if not is_text(value):
        return isinstance(value, int | float)
    return len(value) < SENTENCE or len(value.split()) > 1 or not value.isascii()


def _are_columns(value: dict[str, Any]) -> bool:
    """Return whether an object is a set of parallel lists, one per field, rather than a passage."""
    sentences = value.get("sentences")
    one = isinstance(sentences, list) and all(map(is_text, sentences)) and not isinstance(value.get("title"), list)
    return bool(value) and all(isinstance(column, list) for column in value.values()) and not one


def _transposed(columns: dict[str, list[Any]]) -> list[Any]:
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        text = ", ".join(f'"{name}" {length}' for name, length in list(lengths.items())[:4])
        raise RecordError(
            f'"contexts" has lists of different lengths ({text}); name the one that holds the passages, like '
            "input.columns.contexts: contexts.NAME"
        )
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _of_one_query(value: dict[str, Any]) -> dict[str, Any]:
    """Return the parallel lists of what Chroma returns, which has each in a list of queries; other objects as given."""
    lists = {
        name: column[0]
        for name, column in value.items()
        if isinstance(column, list) and len(column) == 1 and isinstance(column[0], list)
    }
    return lists if {"ids", "documents"} <= lists.keys() else value


def _plain(item: Any) -> Any:
    """Return a passage of one of the other shapes as a text or an object; what is none of them as given."""
    if isinstance(item, dict):
        return item["kwargs"] if "lc" in item and isinstance(item.get("kwargs"), dict) else item
    if not isinstance(item, list) or len(item) != 2:
        return item
    first, second = item
    if is_text(first) and _are_sentences(second):
        return {"title": first, "sentences": second}
    if is_text(first) and isinstance(second, float):  # a whole number may count sentences
        return {"text": first, "score": second}
    if isinstance(first, dict) and isinstance(second, float | int) and not isinstance(second, bool):
        return {**_plain(first), "score": second}
    return item


def _are_sentences(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


def _given_id(item: Any, position: int) -> str | None:
    given = item.get("id") if isinstance(item, dict) else None
    if given == "":
        return None
    try:
        return id_text(given)
    except RecordError:
        raise RecordError(
            f'"contexts" item {position}: "id" must be a string or a whole number, got {kind(given)}'
        ) from None


def _passage(item: Any, position: int, name: str) -> Passage:
    where = f'"contexts" item {position}'
    if is_text(item):
        return Passage(id=name, text=item)
    if not isinstance(item, dict):
        raise RecordError(f'{where} must be a string or an object {{"id", "title", "text", "score"}}, got {kind(item)}')
    text: Any = item.get("sentences") if item.get("text") is None else item["text"]
    title, score = item.get("title"), item.get("score")
    if _are_sentences(text):
        text = _joined(text)
    if not is_text(text):
        hint = "" if "text" in item else f"; it has {names(item)}: input.columns.contexts.text says which is the text"
        raise RecordError(f'{where}: "text" must be a string, got {kind(text)}{hint}')
    if title is not None and not is_text(title):
        raise RecordError(f'{where}: "title" must be a string, got {kind(title)}')
    return Passage(id=name, text=text, title=title, score=_score(score, where))


def _score(given: Any, where: str) -> float | None:
    """Return a passage's score with all its digits; some retrievers write it as text. NaN is none: it has no rank."""
    try:
        if given is not None and not isinstance(given, bool):
            value = float(given)
            if math.isnan(value):
                return None
            exact = loads(given) if isinstance(given, str) and NUMBER.fullmatch(given) else given
            return exact if isinstance(exact, ExactFloat) or (isinstance(exact, int) and exact != value) else value
    except (TypeError, ValueError, OverflowError):
        pass
    if given is not None:
        raise RecordError(f'{where}: "score" must be a number, got {kind(given)}')
    return None


def _joined(sentences: list[str]) -> str:
    """Return sentences joined by single spaces; in some datasets sentences begin with one."""
    text = ""
    for sentence in sentences:
        apart = text and not text[-1:].isspace() and not sentence[:1].isspace()
        text += f" {sentence}" if apart else sentence
    return text
