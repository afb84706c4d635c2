"""What a record says its answer is to look like: OpenAI's `response_format`, vLLM's `structured_outputs`, or ours.

>>> structured_of({"structured_outputs": {"choice": ["yes", "no"]}})
{'choice': ['yes', 'no']}

All raise RecordError. Source: OpenAI's API reference; vLLM 0.32, sampling_params.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ragspec.errors import RecordError, did_you_mean
from ragspec.inputs.values import kind
from ragspec.json_text import JSONDecodeError, loads

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
# what other servers read from a body, and what it is here
OTHERS = {
    "format": SCHEMA,
    "json_schema": SCHEMA,
    "schema": SCHEMA,
    "response_schema": SCHEMA,
    "regex": '"structured_outputs": {"regex": ...}',
    "ebnf": '"structured_outputs": {"grammar": ...}',
    "grammar": '"structured_outputs": {"grammar": ...}',
}
OLLAMA = {"format": '"structured": {"json_schema": ...}'}  # in a record of ours, where the others may be metadata
FORMS = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema", "schema", "name", "strict", "description"),
}
OURS = tuple(NAMES.values())


def structured_of(given: Mapping[str, Any], prefix: str = "") -> dict[str, Any] | None:
    """Return the `structured` section that a record's fields mean; None if they say nothing, {} for plain text.

    prefix: of the fields' names in messages.
    """
    for old, now in GUIDED.items():
        if given.get(old) is not None:
            raise RecordError(
                f'"{prefix}{old}" has been removed from vLLM, which ignores it; write '
                f'"structured_outputs": {{"{now}": ...}}'
            )
    for other, now in (OTHERS if prefix else OLLAMA).items():
        if given.get(other) is not None and (prefix or isinstance(given[other], dict)):
            raise RecordError(f'"{prefix}{other}" is another library\'s; write {now}')
    said = [field for field in FORM_FIELDS if given.get(field) is not None]
    if len(said) > 1:
        raise RecordError(f'"{prefix}{said[0]}" and "{prefix}{said[1]}" say the same thing; keep one of them')
    if not said:
        return None
    field, value = said[0], given[said[0]]
    if field == "structured" and value == "json_object":
        return {"json_object": True}
    if not isinstance(value, dict):
        raise RecordError(f'"{prefix}{field}" must be an object, got {kind(value)}')
    found = _READ[field](value, f"{prefix}{field}")
    if isinstance(schema := found.get("json_schema"), str):
        found["json_schema"] = _parsed(schema, f"{prefix}{field}")
    return found


def _response_format(value: dict[str, Any], name: str) -> dict[str, Any]:
    form = value.get("type")
    if not isinstance(form, str) or form not in FORMS:
        raise RecordError(f'"{name}.type": {form!r} is not supported; known: {", ".join(FORMS)}')
    if unknown := sorted(key for key in value if key not in ("type", *FORMS[form]) and value[key] is not None):
        raise RecordError(f'"{name}.{unknown[0]}" is not known beside "type": "{form}"')
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
    """Return a schema that came as a text; never a file's."""
    try:
        schema = loads(text)
    except JSONDecodeError as error:
        raise RecordError(f'"{name}": its schema is not JSON ({error})') from None
    if not isinstance(schema, dict):
        raise RecordError(f'"{name}": its schema must be an object, got {kind(schema)}')
    return schema


_READ = {"response_format": _response_format, "structured_outputs": _structured_outputs, "structured": _structured}
