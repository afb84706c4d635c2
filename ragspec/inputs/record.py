"""The JSON value of one input row as a Record.

The forms: `query` (with `contexts`), `messages`, `prompt`, or an OpenAI batch line (`custom_id` and `body`). If a row
has several, the first in that order is used, unless `prompt.source` names another.
"""

from __future__ import annotations

from typing import Any

from ragspec.errors import RecordError
from ragspec.inputs.openai_batch import parse_batch_line
from ragspec.inputs.passages import passages_of
from ragspec.inputs.values import (
    FORM_FIELDS,
    holds_binary,
    id_text,
    is_text,
    kind,
    messages_of,
    names,
    structured_of,
    template_args_of,
    text_of,
    with_metadata,
)
from ragspec.records import Record

STRUCTURED = {"contexts", "messages", "metadata", "body", "chat_template_kwargs", *FORM_FIELDS}  # lists and objects
OWN_FIELDS = {"id", "query", "prompt"} | STRUCTURED - {"body"}
SOURCES = ("query", "messages", "prompt")
REFERENCES = ("reference", "references", "answers")  # expected answers; `generate` passes them on


def parse_record(value: Any, line: int, source: str = "auto") -> Record:
    """Return the Record of the JSON value on line `line`. Raises RecordError with what was expected."""
    if not isinstance(value, dict):
        raise RecordError(f"must be a JSON object, got {kind(value)}")
    if binary := next((name for name in ("messages", "body", *REFERENCES) if holds_binary(value.get(name))), None):
        raise RecordError(f'"{binary}" must be text, got binary data that is not UTF-8')
    present = [key for key in SOURCES if value.get(key) is not None]
    if "body" in value and not present:
        return parse_batch_line(value)
    failed = value.get("error")
    if isinstance(failed, dict) and isinstance(failed.get("message"), str) and not present:
        raise RecordError(f"failed in an earlier step: {failed['message']}")  # an error line of another command
    wanted = present[0] if source == "auto" and present else source
    if wanted not in present:
        if empty := next((key for key in SOURCES if key in value and source in ("auto", key)), None):
            raise RecordError(f'no prompt: "{empty}" is empty')
        missing = '"query", "messages" or "prompt"' if source == "auto" else f'"{source}" (prompt.source)'
        raise RecordError(f"no prompt: the record needs {missing}, it has {names(value)}")
    return Record(
        id=given_id(value) or str(line),
        query=text_of(value["query"], "query") if wanted == "query" else None,
        messages=messages_of(value["messages"]) if wanted == "messages" else None,
        prompt=text_of(value["prompt"], "prompt") if wanted == "prompt" else None,
        contexts=passages_of(value.get("contexts")) if wanted == "query" else (),
        metadata=_metadata(value, wanted),
        structured=structured_of(value),
        template_args=template_args_of(value.get("chat_template_kwargs")),
    )


def _metadata(value: dict[str, Any], wanted: str) -> dict[str, Any]:
    """Return a record's metadata: its other fields, and those of its `metadata`."""
    found = {key: field for key, field in value.items() if key not in OWN_FIELDS}
    if wanted != "query" and value.get("contexts") is not None:
        found["contexts"] = value["contexts"]  # only a query uses them as contexts
    return with_metadata(found, value.get("metadata"))


def given_id(value: Any) -> str | None:
    """Return the id in a row's value, None without one. Raises RecordError for an invalid one."""
    if not isinstance(value, dict):
        return None
    return id_text(value.get("custom_id") if "body" in value else value.get("id", value.get("custom_id")))


def reference_texts(value: Any) -> tuple[str, ...] | None:
    """Return the texts of a reference: one, several, or SQuAD's `{"text": [...]}`; None if it holds anything else."""
    found = value.get("text") if isinstance(value, dict) else value
    texts = found if isinstance(found, list) else [found]
    texts = [each["text"] if isinstance(each, dict) and "text" in each else each for each in texts]
    if not all(is_text(text) or (isinstance(text, int | float) and not isinstance(text, bool)) for text in texts):
        return None
    return tuple(written for text in texts for written in _written(text))


def _written(reference: Any) -> tuple[str, ...]:
    """Return a reference as texts: 1911.0 may have been 1911, since pandas makes floats of a column with gaps."""
    if isinstance(reference, float) and reference.is_integer():
        return str(int(reference)), str(reference)
    return (str(reference),)


def lacks_contexts(value: Any) -> bool:
    """Return whether a row's value has a query and no contexts. An empty list counts as contexts."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("query"), str)
        and bool(value["query"].strip())
        and value.get("contexts") is None
    )
