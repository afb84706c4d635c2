"""Checks and conversions of a record's JSON values: ids, texts, metadata, messages and answer forms.

>>> messages_of([{"role": "user", "content": [{"type": "text", "text": "Why?"}]}])
({'role': 'user', 'content': 'Why?'},)

All raise RecordError with one line that says what was expected. Source of the field names: OpenAI's API reference; vLLM
0.32, renderers/chat_utils.py and sampling_params.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ragspec.errors import RecordError, did_you_mean
from ragspec.json_text import ExactFloat, JSONDecodeError, loads

EXACT = 1 << 53  # floats below this represent whole numbers exactly


class Base64(str):
    """Binary data as base64. A table may hold it, but no field that ragspec reads as text may."""


def id_text(given: Any) -> str | None:
    """Return a record's id in one form (1, 1.0 and "1" are the same), None without one.

    pandas turns whole numbers in a column with gaps into floats, and the gaps into NaN.
    """
    if given is None or (isinstance(given, float) and math.isnan(given)):
        return None
    if isinstance(given, float) and given.is_integer() and abs(given) < EXACT and not isinstance(given, ExactFloat):
        given = int(given)
    if isinstance(given, bool | Base64) or not isinstance(given, str | int) or given == "":
        raise RecordError(f'"id" must be a non-empty string or a whole number, got {kind(given)}')
    return str(given)


def is_text(value: Any) -> bool:
    """Return whether a value is text rather than base64 of binary data."""
    return isinstance(value, str) and not isinstance(value, Base64)


def holds_binary(value: Any) -> bool:
    """Return whether a value contains binary data (base64) at any depth."""
    if isinstance(value, dict):
        return any(map(holds_binary, value.values()))
    if isinstance(value, list):
        return any(map(holds_binary, value))
    return isinstance(value, Base64)


def text_of(value: Any, name: str) -> str:
    """Return a non-blank text. name: its field."""
    if not is_text(value):
        raise RecordError(f'"{name}" must be a string, got {kind(value)}')
    if not value.strip():
        raise RecordError(f'no prompt: "{name}" is empty')
    return str(value)


def kind(value: Any) -> str:
    """Return a value's type in words, for a message."""
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
    """Return a record's other fields merged with those of its `metadata`.

    If both have a name with different values, the record's field wins and the other is kept under "metadata".
    """
    if not isinstance(given, dict):
        return found if given is None else {**found, "metadata": given}
    twice = {key: field for key, field in given.items() if key in found and found[key] != field}
    if not twice:
        return found | given
    twice |= {key: field for key, field in given.items() if key == "metadata"}
    return {**found, **{key: field for key, field in given.items() if key not in twice}, "metadata": twice}


# -- chat messages ---------------------------------------------------------------------------------

CARRIED = ("name", "tool_call_id", "reasoning", "reasoning_content")  # passed to the template unchanged

TEXT_PARTS = ("text", "input_text", "output_text")  # types of content parts


def messages_of(value: Any) -> tuple[dict[str, Any], ...]:
    """Return a record's messages as chat templates expect them. Raises RecordError.

    As in vLLM 0.32: text parts are joined by line ends, the arguments of tool calls become objects, and a missing
    content beside tool calls becomes an empty text.
    """
    if not isinstance(value, list) or not value:
        raise RecordError(f'"messages" must be a non-empty list of {{"role", "content"}}, got {kind(value)}')
    return tuple(_message(item, f'"messages" item {position}') for position, item in enumerate(value, 1))


def template_args_of(value: Any, name: str = "chat_template_kwargs") -> dict[str, Any]:
    """Return the arguments of a record's chat template. name: their field. Raises RecordError."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RecordError(f'"{name}" must be an object, got {kind(value)}')
    return dict(value)


def _message(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        raise RecordError(f'{where} must be an object with "role" and "content"')
    message = {"role": item["role"], "content": _content(item, where)}
    for key in CARRIED:
        if item.get(key) is not None:
            if not isinstance(item[key], str):
                raise RecordError(f'{where}: "{key}" must be a string, got {kind(item[key])}')
            message[key] = item[key]
    if item.get("tool_calls"):
        message["tool_calls"] = _tool_calls(item["tool_calls"], where)
    return message


def _content(item: dict[str, Any], where: str) -> str:
    content = item.get("content")
    if content is None and item.get("tool_calls"):
        return ""
    if isinstance(content, list):  # content parts
        parts = [text for part in content if isinstance(text := _part_text(part), str)]
        if len(parts) < len(content):
            raise RecordError(f'{where}: only content parts with "type": "text" are supported')
        content = "\n".join(parts)
    if not isinstance(content, str):
        raise RecordError(f'{where}: "content" must be a string, got {kind(content)}')
    return content


def _part_text(part: Any) -> Any:
    """Return the text of a content part; None for another kind of part, such as an image with a caption."""
    if not isinstance(part, dict):
        return part
    return part.get("text") if part.get("type", "text") in TEXT_PARTS else None


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise RecordError(f'{where}: "tool_calls" must be a list, got {kind(value)}')
    return [_tool_call(call, where) for call in value]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) and call.get("type", "function") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RecordError(f'{where}: a tool call must be {{"type": "function", "function": {{"name", "arguments"}}}}')
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = loads(arguments)
        except JSONDecodeError as error:
            raise RecordError(f'{where}: the "arguments" of a tool call are not JSON ({error})') from None
    if not isinstance(arguments, dict):
        raise RecordError(f'{where}: the "arguments" of a tool call must be an object, got {kind(arguments)}')
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


# -- answer forms ----------------------------------------------------------------------------------

FORM_FIELDS = ("structured", "response_format", "structured_outputs")
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
NAMES = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}
SCHEMA = '"response_format": {"type": "json_schema", "json_schema": {"schema": ...}}'
# fields that other servers read from a body, and what to write instead
OTHERS = {
    "format": SCHEMA,
    "json_schema": SCHEMA,
    "schema": SCHEMA,
    "response_schema": SCHEMA,
    "regex": '"structured_outputs": {"regex": ...}',
    "ebnf": '"structured_outputs": {"grammar": ...}',
    "grammar": '"structured_outputs": {"grammar": ...}',
}
OLLAMA = {"format": '"structured": {"json_schema": ...}'}  # in our records the other names may be metadata
FORMS = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema", "schema", "name", "strict", "description"),
}
OURS = tuple(NAMES.values())


def structured_of(given: Mapping[str, Any], prefix: str = "") -> dict[str, Any] | None:
    """Return the `structured` section that a record's fields mean; None without such a field, {} for plain text.

        >>> structured_of({"structured_outputs": {"choice": ["yes", "no"]}})
        {'choice': ['yes', 'no']}

    Reads OpenAI's `response_format`, vLLM's `structured_outputs` and our `structured`. prefix: of the fields' names in
    messages.
    """
    for old, now in GUIDED.items():
        if given.get(old) is not None:
            raise RecordError(
                f'"{prefix}{old}" has been removed from vLLM, which ignores it; write '
                f'"structured_outputs": {{"{now}": ...}}'
            )
    for other, now in (OTHERS if prefix else OLLAMA).items():
        if given.get(other) is not None and (prefix or isinstance(given[other], dict)):
            raise RecordError(f'"{prefix}{other}" belongs to another library; write {now}')
    present = [field for field in FORM_FIELDS if given.get(field) is not None]
    if len(present) > 1:
        raise RecordError(f'"{prefix}{present[0]}" and "{prefix}{present[1]}" say the same thing; keep one of them')
    if not present:
        return None
    field, value = present[0], given[present[0]]
    if field == "structured" and value == "json_object":
        return {"json_object": True}
    if not isinstance(value, dict):
        raise RecordError(f'"{prefix}{field}" must be an object, got {kind(value)}')
    found = _READERS[field](value, f"{prefix}{field}")
    if isinstance(schema := found.get("json_schema"), str):
        found["json_schema"] = _parsed(schema, f"{prefix}{field}")
    return found


def _response_format(value: dict[str, Any], name: str) -> dict[str, Any]:
    form = value.get("type")
    if not isinstance(form, str) or form not in FORMS:
        raise RecordError(f'"{name}.type": {form!r} is not supported; known: {", ".join(FORMS)}')
    if unknown := sorted(key for key in value if key not in ("type", *FORMS[form]) and value[key] is not None):
        raise RecordError(f'"{name}.{unknown[0]}" is not allowed with "type": "{form}"')
    if form == "text":
        return {}
    if form == "json_object" and value.get("schema") is None:
        return {"json_object": True}
    inner = value.get("json_schema") if form == "json_schema" else value
    inner = value if inner is None and value.get("schema") is not None else inner
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        raise RecordError(f'"{name}.json_schema.schema" must be an object, got {kind(schema)}')
    if unknown := sorted((inner or {}).keys() - {"type", "name", "strict", "schema", "description"}):
        raise RecordError(f'"{name}.json_schema.{unknown[0]}" is not known; the schema is under "schema"')
    return {"json_schema": schema}


def _structured_outputs(value: dict[str, Any], name: str) -> dict[str, Any]:
    given = {key: field for key, field in value.items() if field not in (None, False)}
    if unknown := [key for key in given if key not in NAMES]:
        raise RecordError(f'"{name}.{unknown[0]}" is not supported{did_you_mean(unknown[0], NAMES)}')
    return {NAMES[key]: field for key, field in given.items()}


def _structured(value: dict[str, Any], name: str) -> dict[str, Any]:
    wrapped = not value.keys() & set(OURS) or "type" in value  # config/structured.py finds the schema in it
    if not wrapped and (unknown := [key for key in value if key not in OURS]):
        raise RecordError(f'"{name}.{unknown[0]}" is not known{did_you_mean(unknown[0], OURS)}')
    return dict(value)


def _parsed(text: str, name: str) -> Any:
    """Return a schema given as JSON text; a path is not opened."""
    try:
        schema = loads(text)
    except JSONDecodeError as error:
        raise RecordError(f'"{name}": its schema is not JSON ({error})') from None
    if not isinstance(schema, dict):
        raise RecordError(f'"{name}": its schema must be an object, got {kind(schema)}')
    return schema


_READERS = {"response_format": _response_format, "structured_outputs": _structured_outputs, "structured": _structured}
