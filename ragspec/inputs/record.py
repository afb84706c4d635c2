"""One input line's JSON value -> Record. Raises RecordError with one line that says what was expected.

The forms: `query` (+ `contexts`), `messages`, `prompt`, or an OpenAI batch line (`custom_id` + `body`).
If a line has several, the first of them in that order is used, unless `prompt.source` names another.
"""

from __future__ import annotations

from typing import Any

from ragspec.errors import RecordError
from ragspec.inputs.base import Row
from ragspec.records import Passage, Record

OWN_FIELDS = {"id", "query", "contexts", "messages", "prompt", "metadata"}
SOURCES = ("query", "messages", "prompt")
BATCH_ENVELOPE = {"custom_id", "body", "method", "url"}
# what an OpenAI body may ask for -> our sampling key
BODY_SAMPLING = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "stop": "stop",
    "seed": "seed",
}
BODY_HARMLESS = {"model", "messages", "prompt", "user", "metadata", "stream", "store"}


def parse_record(value: Any, line: int, source: str = "auto") -> Record:
    """Return the Record that the JSON `value` of line `line` means."""
    if not isinstance(value, dict):
        raise RecordError(f"must be a JSON object, got {_kind(value)}")
    present = [key for key in SOURCES if value.get(key) is not None]
    if "body" in value and not present:
        return _parse_batch_line(value)
    failed = value.get("error")
    if isinstance(failed, dict) and isinstance(failed.get("message"), str) and not present:
        raise RecordError(f"failed in an earlier step: {failed['message']}")  # an error line of an earlier command
    wanted = present[0] if source == "auto" and present else source
    if wanted not in present:
        missing = '"query", "messages" or "prompt"' if source == "auto" else f'"{source}" (prompt.source)'
        raise RecordError(f"no prompt: the record needs {missing}, it has {_names(value)}")
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
        query=_text(value["query"], "query") if wanted == "query" else None,
        messages=_messages(value["messages"]) if wanted == "messages" else None,
        prompt=_text(value["prompt"], "prompt") if wanted == "prompt" else None,
        contexts=_contexts(value.get("contexts")) if wanted == "query" else (),
        metadata=metadata,
    )


def record_id(given: Any, line: int) -> str:
    """Return the record's id, the line number standing in for a missing one."""
    if given is None:
        return str(line)
    if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
        raise RecordError(f'"id" must be a non-empty string or a whole number, got {_kind(given)}')
    return str(given)


def line_id(row: Row) -> str:
    """Return the id to put on the error line of a row that may not be a record at all."""
    value = row.value if isinstance(row.value, dict) else {}
    given = value.get("id", value.get("custom_id"))
    return str(given) if isinstance(given, str | int) and given != "" else str(row.number)


def _parse_batch_line(value: dict[str, Any]) -> Record:
    """Read an OpenAI batch line: {"custom_id", "method", "url", "body": {"messages" | "prompt", ...}}."""
    body = value.get("body")
    if not isinstance(body, dict):
        raise RecordError(f'"body" must be an object with "messages" or "prompt", got {_kind(body)}')
    if value.get("custom_id") is None:
        raise RecordError('"custom_id" is missing; a line with "body" needs one')
    if body.get("n") not in (None, 1):
        raise RecordError(f'"body.n" must be 1, got {body["n"]}: ragspec gives one answer per record')
    unknown = sorted(set(body) - set(BODY_SAMPLING) - BODY_HARMLESS - {"n"})
    if unknown:
        raise RecordError(f'"body.{unknown[0]}" is not supported; known: {", ".join(sorted(BODY_SAMPLING))}')
    sampling = {BODY_SAMPLING[key]: field for key, field in body.items() if key in BODY_SAMPLING and field is not None}
    record_key = record_id(value["custom_id"], 0)
    metadata = {key: field for key, field in value.items() if key not in BATCH_ENVELOPE}
    if body.get("messages") is not None:
        messages = _messages(body["messages"])
        return Record(id=record_key, messages=messages, sampling=sampling, metadata=metadata)
    if body.get("prompt") is not None:
        prompt = _text(body["prompt"], "body.prompt")
        return Record(id=record_key, prompt=prompt, sampling=sampling, metadata=metadata)
    raise RecordError(f'no prompt: "body" needs "messages" or "prompt", it has {_names(body)}')


def _contexts(value: Any) -> tuple[Passage, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RecordError(f'"contexts" must be a list of strings or objects, got {_kind(value)}')
    return tuple(_passage(item, position) for position, item in enumerate(value, 1))


def _passage(item: Any, position: int) -> Passage:
    where = f'"contexts" item {position}'
    if isinstance(item, str):
        return Passage(id=str(position), text=item)
    if not isinstance(item, dict):
        raise RecordError(
            f'{where} must be a string or an object {{"id", "title", "text", "score"}}, got {_kind(item)}'
        )
    text, title, score, key = item.get("text"), item.get("title"), item.get("score"), item.get("id")
    if not isinstance(text, str):
        raise RecordError(f'{where}: "text" must be a string, got {_kind(text)}')
    if title is not None and not isinstance(title, str):
        raise RecordError(f'{where}: "title" must be a string, got {_kind(title)}')
    if score is not None and (isinstance(score, bool) or not isinstance(score, int | float)):
        raise RecordError(f'{where}: "score" must be a number, got {_kind(score)}')
    if key is not None and (isinstance(key, bool) or not isinstance(key, str | int)):
        raise RecordError(f'{where}: "id" must be a string or a whole number, got {_kind(key)}')
    return Passage(
        id=str(position) if key is None else str(key),
        text=text,
        title=title,
        score=None if score is None else float(score),
    )


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise RecordError(f'"messages" must be a non-empty list of {{"role", "content"}}, got {_kind(value)}')
    return tuple(_message(item, position) for position, item in enumerate(value, 1))


def _message(item: Any, position: int) -> dict[str, str]:
    where = f'"messages" item {position}'
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        raise RecordError(f'{where} must be an object with "role" and "content"')
    content = item.get("content")
    if isinstance(content, list):  # OpenAI's content parts
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise RecordError(f'{where}: only content parts with "type": "text" are supported')
        content = "".join(part for part in parts if part)
    if not isinstance(content, str):
        raise RecordError(f'{where}: "content" must be a string, got {_kind(content)}')
    return {"role": item["role"], "content": content}


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RecordError(f'"{name}" must be a string, got {_kind(value)}')
    if not value.strip():
        raise RecordError(f'no prompt: "{name}" is empty')
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "nothing"}
    if value == "" or value == []:
        return "an empty one"
    return names.get(type(value), "a number")


def _names(value: dict[str, Any]) -> str:
    return ", ".join(f'"{key}"' for key in list(value)[:8]) or "nothing"
