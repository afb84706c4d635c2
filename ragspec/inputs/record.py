"""One input line's JSON value -> Record. Raises RecordError with one line that says what was expected.

The forms: `query` (+ `contexts`), `messages`, `prompt`, or an OpenAI batch line (`custom_id` + `body`).
If a line has several, the first of them in that order is used, unless `prompt.source` names another.
"""

from __future__ import annotations

from typing import Any

from ragspec.errors import RecordError
from ragspec.inputs.base import Row
from ragspec.inputs.messages import messages_of, template_args_of
from ragspec.inputs.openai_batch import parse_batch_line
from ragspec.inputs.structured import FIELDS, structured_of
from ragspec.inputs.values import kind, names, record_id, text_of
from ragspec.records import Passage, Record

OWN_FIELDS = {"id", "query", "contexts", "messages", "prompt", "metadata", "chat_template_kwargs", *FIELDS}
SOURCES = ("query", "messages", "prompt")


def parse_record(value: Any, line: int, source: str = "auto") -> Record:
    """Return the Record that the JSON `value` of line `line` means."""
    if not isinstance(value, dict):
        raise RecordError(f"must be a JSON object, got {kind(value)}")
    present = [key for key in SOURCES if value.get(key) is not None]
    if "body" in value and not present:
        return parse_batch_line(value)
    failed = value.get("error")
    if isinstance(failed, dict) and isinstance(failed.get("message"), str) and not present:
        raise RecordError(f"failed in an earlier step: {failed['message']}")  # an error line of an earlier command
    wanted = present[0] if source == "auto" and present else source
    if wanted not in present:
        missing = '"query", "messages" or "prompt"' if source == "auto" else f'"{source}" (prompt.source)'
        raise RecordError(f"no prompt: the record needs {missing}, it has {names(value)}")
    metadata = {key: field for key, field in value.items() if key not in OWN_FIELDS}
    if wanted != "query" and value.get("contexts") is not None:
        metadata["contexts"] = value["contexts"]  # they go with a query only
    given = value.get("metadata")
    if isinstance(given, dict):
        metadata |= given
    elif given is not None:
        metadata["metadata"] = given
    return Record(
        id=record_id(value.get("id"), line),
        query=text_of(value["query"], "query") if wanted == "query" else None,
        messages=messages_of(value["messages"]) if wanted == "messages" else None,
        prompt=text_of(value["prompt"], "prompt") if wanted == "prompt" else None,
        contexts=_contexts(value.get("contexts")) if wanted == "query" else (),
        metadata=metadata,
        structured=structured_of(value),
        template_args=template_args_of(value.get("chat_template_kwargs")),
    )


def line_id(row: Row) -> str:
    """Return the id to put on the error line of a row that may not be a record at all."""
    value = row.value if isinstance(row.value, dict) else {}
    given = value.get("custom_id") if "body" in value else value.get("id", value.get("custom_id"))
    return str(given) if isinstance(given, str | int) and given != "" else str(row.number)


def lacks_contexts(value: Any) -> bool:
    """Return whether a row's value has a question and no contexts: an empty list asks for none."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("query"), str)
        and bool(value["query"].strip())
        and value.get("contexts") is None
    )


def _contexts(value: Any) -> tuple[Passage, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RecordError(f'"contexts" must be a list of strings or objects, got {kind(value)}')
    return tuple(_passage(item, position) for position, item in enumerate(value, 1))


def _passage(item: Any, position: int) -> Passage:
    where = f'"contexts" item {position}'
    if isinstance(item, str):
        return Passage(id=str(position), text=item)
    if not isinstance(item, dict):
        raise RecordError(f'{where} must be a string or an object {{"id", "title", "text", "score"}}, got {kind(item)}')
    text, title, score, key = item.get("text"), item.get("title"), item.get("score"), item.get("id")
    if not isinstance(text, str):
        raise RecordError(f'{where}: "text" must be a string, got {kind(text)}')
    if title is not None and not isinstance(title, str):
        raise RecordError(f'{where}: "title" must be a string, got {kind(title)}')
    if score is not None and (isinstance(score, bool) or not isinstance(score, int | float)):
        raise RecordError(f'{where}: "score" must be a number, got {kind(score)}')
    if key is not None and (isinstance(key, bool) or not isinstance(key, str | int)):
        raise RecordError(f'{where}: "id" must be a string or a whole number, got {kind(key)}')
    return Passage(
        id=str(position) if key is None else str(key),
        text=text,
        title=title,
        score=None if score is None else float(score),
    )
