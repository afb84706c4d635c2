"""A JSON schema as other libraries wrap it -> the schema.

>>> unwrapped({"name": "answer", "strict": True, "schema": {"type": "boolean"}})
{'type': 'boolean'}

OpenAI's `json_schema` and `response_format`, its functions and tools, Anthropic's and MCP's `input_schema`, Ollama's
`format`, vLLM's `guided_json` and `structured_outputs`, TGI's `grammar`. What stands beside a wrapped schema is known,
or an error: nothing is dropped. Limit: a schema of these very words must say what it is ("type", "properties", ...).
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from ragspec.errors import RecordError
from ragspec.json_text import JSONDecodeError, loads

CARRIERS = (
    "json_schema", "schema", "guided_json", "json", "format", "value", "parameters", "input_schema", "inputSchema",
    "response_schema", "function", "response_format", "structured_outputs", "structured", "text",
)  # fmt: skip
SAFE = ("schema", "json_schema", "guided_json", "response_schema", "response_format", "structured_outputs")
LABELS = {"name", "title", "description", "strict"}  # beside a wrapped schema
WRAPPERS = {"json_schema", "json_object", "json", "function", "json-schema", "custom"}  # as a "type"
TYPES = {"object", "array", "string", "number", "integer", "boolean", "null"}
DEMANDS = {
    "$ref", "$dynamicRef", "additionalProperties", "allOf", "anyOf", "const", "contains", "dependentRequired",
    "dependentSchemas", "dependencies", "else", "enum", "exclusiveMaximum", "exclusiveMinimum", "if", "items",
    "maxContains", "maxItems", "maxLength", "maxProperties", "maximum", "minContains", "minItems", "minLength",
    "minProperties", "minimum", "multipleOf", "not", "oneOf", "pattern", "patternProperties", "prefixItems",
    "properties", "propertyNames", "required", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
}  # fmt: skip
ANNOTATIONS = {
    "$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$quote", "$schema", "$vocabulary", "additionalItems",
    "contentEncoding", "contentMediaType", "contentSchema", "default", "definitions", "deprecated", "description",
    "discriminator", "example", "examples", "externalDocs", "format", "id", "nullable", "readOnly", "title", "type",
    "writeOnly", "xml",
}  # fmt: skip
WORDS = DEMANDS | ANNOTATIONS
NEAR = 0.8  # likeness from which an unknown word is a misspelt one


def unwrapped(value: Any) -> Any:
    """Return the schema that `value` wraps, or `value`, a schema itself. Raises RecordError."""
    while isinstance(value, dict) and not is_schema(value):
        key = _carrier(value)
        if not key and value.get("type") != "json_object":
            _check_annotations(value)
            return value
        beside = sorted(each for each in value.keys() - LABELS - {key, "type"} if value[each] is not None)
        if beside or str(value.get("type", "json")) not in WRAPPERS:
            raise RecordError(
                f'structured.json_schema: "{(beside or ["type"])[0]}" beside "{key or "type"}" is not known; '
                "json_schema takes the schema alone"
            )
        if not key:
            return {"type": "object"}
        value = _parsed(value[key]) if isinstance(value[key], str) else value[key]
    if isinstance(value, dict) and (also := [key for key in SAFE if isinstance(value.get(key), dict)]):
        raise RecordError(
            f'structured.json_schema: has "{also[0]}" beside the words of a schema; which of them is meant?'
        )
    return value


def _carrier(value: dict[str, Any]) -> str:
    """Return under which key the schema is, "" if under none. Some are also what a schema says about a text."""
    kinds = {key: dict if key in ("format", "text", "value") else (dict, str) for key in CARRIERS}
    return next((key for key, kind in kinds.items() if isinstance(value.get(key), kind)), "")


def _check_annotations(value: dict[str, Any]) -> None:
    """Raise RecordError if something in a schema that demands nothing was perhaps meant to."""
    if unknown := sorted(key for key in value if key not in WORDS and not key.startswith(("x-", "$"))):
        raise RecordError(
            f'structured.json_schema: "{unknown[0]}" is no word of JSON Schema, and nothing else in it demands anything'
        )


def is_schema(value: dict[str, Any]) -> bool:
    """Return whether an object demands something of a text, as a schema does."""
    kinds = value.get("type")
    typed = all(isinstance(kind, str) and kind in TYPES for kind in (kinds if isinstance(kinds, list) else [kinds]))
    return typed or bool(DEMANDS & value.keys())


def check_words(schema: dict[str, Any], where: str) -> None:
    """Raise RecordError for a word that is none of JSON Schema's and close to one: it would demand nothing."""
    for key in schema.keys() - WORDS:
        if not key.startswith(("x-", "$")) and (near := get_close_matches(key, WORDS, n=1, cutoff=NEAR)):
            raise RecordError(f'structured.json_schema: {where}: "{key}" is not known; did you mean "{near[0]}"?')


def _parsed(text: str) -> Any:
    try:
        return loads(text)
    except JSONDecodeError as error:
        raise RecordError(f"structured.json_schema: the schema is not JSON ({error})") from None
