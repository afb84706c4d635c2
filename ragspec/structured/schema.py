"""JSON schemas: unwrapped from other libraries' formats, completed by a record, and checked for a grammar.

>>> unwrapped({"name": "answer", "strict": True, "schema": {"type": "boolean"}})
{'type': 'boolean'}

Reads OpenAI's `json_schema` and `response_format`, its functions and tools, Anthropic's and MCP's `input_schema`,
Ollama's `format`, vLLM's `guided_json` and `structured_outputs`, TGI's `grammar`. Unknown keys beside a wrapped schema
are errors. Limit: a schema whose properties have these names must declare itself ("type", "properties", ...).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from decimal import Decimal
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from ragspec.errors import RecordError
from ragspec.json_text import ExactFloat, JSONDecodeError, dumps, loads, number_of
from ragspec.records import Passage
from ragspec.structured.grammars import is_complete

CARRIERS = (
    "json_schema", "schema", "guided_json", "json", "format", "value", "parameters", "input_schema", "inputSchema",
    "response_schema", "function", "response_format", "structured_outputs", "structured", "text",
)  # fmt: skip
SAFE = ("schema", "json_schema", "guided_json", "response_schema", "response_format", "structured_outputs")
LABELS = {"name", "title", "description", "strict"}  # allowed beside a wrapped schema
WRAPPERS = {"json_schema", "json_object", "json", "function", "json-schema", "custom"}  # values of a wrapper's "type"
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
SCHEMA_WORDS = DEMANDS | ANNOTATIONS
NEAR = 0.8  # similarity above which an unknown keyword counts as misspelt


def unwrapped(value: Any) -> Any:
    """Return the schema that `value` wraps, or `value` if it is a schema. Raises RecordError."""
    while isinstance(value, dict) and not is_schema(value):
        key = _carrier(value)
        if not key and value.get("type") != "json_object":
            _check_annotations(value)
            return value
        extra = sorted(each for each in value.keys() - LABELS - {key, "type"} if value[each] is not None)
        if extra or str(value.get("type", "json")) not in WRAPPERS:
            raise RecordError(
                f'structured.json_schema: "{(extra or ["type"])[0]}" is not allowed next to "{key or "type"}"; '
                "json_schema takes only the schema"
            )
        if not key:
            return {"type": "object"}
        value = _parsed(value[key]) if isinstance(value[key], str) else value[key]
    if isinstance(value, dict) and (also := [key for key in SAFE if isinstance(value.get(key), dict)]):
        raise RecordError(
            f'structured.json_schema: has both "{also[0]}" and keywords of JSON Schema; keep only one of them'
        )
    return value


def _carrier(value: dict[str, Any]) -> str:
    """Return the key that holds the schema, "" without one. Some of these keys may also be annotations."""
    kinds = {key: dict if key in ("format", "text", "value") else (dict, str) for key in CARRIERS}
    return next((key for key, kind in kinds.items() if isinstance(value.get(key), kind)), "")


def _check_annotations(value: dict[str, Any]) -> None:
    """Raise RecordError for an unknown keyword in a schema that demands nothing; it was probably meant to."""
    if unknown := sorted(key for key in value if key not in SCHEMA_WORDS and not key.startswith(("x-", "$"))):
        raise RecordError(
            f'structured.json_schema: "{unknown[0]}" is not a JSON Schema keyword, and nothing else in the schema '
            "constrains the answer"
        )


def is_schema(value: dict[str, Any]) -> bool:
    """Return whether an object constrains a value, as a schema does."""
    kinds = value.get("type")
    typed = all(isinstance(kind, str) and kind in TYPES for kind in (kinds if isinstance(kinds, list) else [kinds]))
    return typed or bool(DEMANDS & value.keys())


def check_words(schema: dict[str, Any], where: str) -> None:
    """Raise RecordError for a misspelt keyword, which would have no effect."""
    for key in schema.keys() - SCHEMA_WORDS:
        if not key.startswith(("x-", "$")) and (near := get_close_matches(key, SCHEMA_WORDS, n=1, cutoff=NEAR)):
            raise RecordError(f'structured.json_schema: {where}: "{key}" is not known; did you mean "{near[0]}"?')


def _parsed(text: str) -> Any:
    try:
        return loads(text)
    except JSONDecodeError as error:
        raise RecordError(f"structured.json_schema: the schema is not JSON ({error})") from None


# -- completion and checks -------------------------------------------------------------------------

CONTEXTS, QUOTE = "$contexts", "$quote"
DEEPEST = 100  # levels of a schema
FIELDS = ("id", "title")  # fields of a passage that {"$contexts": ...} can refer to
VALUES = ("const", "enum")
LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # mappings name -> schema
# keywords without effect on answers, including OpenAPI's, which schema generators write (pydantic: "discriminator")
ANNOTATION_WORDS = (
    *("default", "examples", "description", "title", "$comment"),
    *("discriminator", "example", "externalDocs", "xml"),
)
# formats that JSON Schema defines; others, such as password or binary, describe a text's use, not its form
FORMATS = {
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri",
    "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex",
}  # fmt: skip
EXACT = 1 << 53  # largest integer that is exact as a double, which llguidance uses
FARTHEST = 400  # decimal places that a double can have before its first or after its last digit
LARGEST = ((1 << 63) - 1, (1 << 64) - 1)  # llguidance caps limits at the first of these
ENDLESS_RECURSION = range(-(1 << 63), -(1 << 63) + 1025)  # numbers at which llguidance 1.7 overflows the stack
MOST_ITEMS = 30_000  # llguidance writes a rule per item and has room for 65,525
ENDLESS = (1 << 31) - 1  # schema generators write this or more for "no limit"
SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def completed(schema: Any, passages: Sequence[Passage]) -> Any:
    """Return a schema with references to passages replaced by the record's values. Raises RecordError.

        >>> completed({"enum": {"$contexts": "id"}}, [Passage("p1", "..."), Passage("p2", "...")])
        {'enum': ['p1', 'p2']}

    Unknown formats, which only annotate, are removed, since llguidance refuses them. OpenAPI 3.0's `nullable` becomes a
    null type.
    """
    _check(schema)
    return _completed(schema, passages)


def _check(schema: Any, *, endless: bool = True) -> None:
    """Raise RecordError for what a grammar cannot express. endless: very large limits mean no limit."""
    _check_depth(schema)
    for where, node in _schemas(schema, "$"):
        check_words(node, where)
        _check_required(node, where)
        _check_nullable(node, where)
        _check_numbers(node, where)
        _check_counts(node, where, endless=endless)


def _completed(schema: Any, passages: Sequence[Passage]) -> Any:
    if isinstance(schema, list):
        return [_completed(each, passages) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            found[key] = {name: _completed(inner, passages) for name, inner in value.items()}
        elif key == "enum" and isinstance(value, dict):  # a reference
            found[key] = _values(value, passages)
        elif key in (*VALUES, *ANNOTATION_WORDS) or key.startswith("x-"):
            found[key] = value
        elif key == "type" and schema.get("nullable") is True:
            found[key] = list(dict.fromkeys([*_types(schema), "null"]))
        elif not _is_endless(key, value) and (key != "format" or not isinstance(value, str) or value in FORMATS):
            found[key] = _completed(value, passages)
    return found


def check_schemas_in(grammar: str) -> None:
    """Raise RecordError for a schema after `%json` in a Lark grammar that llguidance cannot hold."""
    for word in re.finditer(r"%json\s*", grammar):
        with suppress(ValueError, RecursionError):  # llguidance reports it
            _check(json.JSONDecoder(parse_float=number_of).raw_decode(grammar, word.end())[0], endless=False)


def quotes(schema: Any) -> bool:
    """Return whether a schema contains quotes."""
    return any(QUOTE in node for node in nodes(schema))


def nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects in a schema."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
        waiting += _inside(node)


def _inside(node: Any) -> list[Any]:
    return list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []


def _check_depth(schema: Any) -> None:
    """Raise RecordError for nesting so deep that it could crash the process."""
    layer, depth = [schema], 0
    while layer:
        layer, depth = [inner for node in layer for inner in _inside(node)], depth + 1
        if depth > DEEPEST:
            raise RecordError(f"structured.json_schema: nested deeper than {DEEPEST} levels")


def _schemas(schema: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the subschemas of a schema with their paths, skipping annotations."""
    if isinstance(schema, list):
        for at, inner in enumerate(schema):
            yield from _schemas(inner, f"{where}[{at}]")
    if not isinstance(schema, dict):
        return
    yield where, schema
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            for name, inner in value.items():
                yield from _schemas(inner, f"{where}.{key}.{name}")
        elif key not in (*VALUES, *LIMITS, *ANNOTATION_WORDS) and not key.startswith("x-"):
            yield from _schemas(value, f"{where}.{key}")


def _check_required(schema: dict[str, Any], where: str) -> None:
    """Raise RecordError for the boolean `required` of JSON Schema draft 3, which would have no effect."""
    names = schema.get("required", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RecordError(
            f'structured.json_schema: {where}: "required" must be a list of names next to "properties", not '
            f"{json.dumps(names)[:40]}"
        )


def _check_nullable(schema: dict[str, Any], where: str) -> None:
    """Raise RecordError for a `nullable` that other keywords contradict."""
    if schema.get("nullable") is not True:
        return
    values = (
        schema["enum"] if isinstance(schema.get("enum"), list) else [schema[key] for key in VALUES if key in schema]
    )
    if not _types(schema) or (values and None not in values):
        meant = 'add null to the "enum"' if "enum" in schema else 'write "anyOf" with a null'
        raise RecordError(
            f'structured.json_schema: {where}: "nullable" only adds null to a "type", so it has no effect here; '
            f"{meant}, or remove it"
        )


def _types(schema: dict[str, Any]) -> list[Any]:
    """Return the types that a schema names, as written."""
    kinds = schema.get("type", [])
    return kinds if isinstance(kinds, list) else [kinds]


def _check_numbers(schema: dict[str, Any], where: str) -> None:
    """Raise RecordError for a number that the grammar would round, which would change answers."""
    for key in (*VALUES, *LIMITS):
        for number in _numbers(schema.get(key)):
            if not (_is_exact(number) if key in LIMITS else _is_written(dumps(number))):
                raise RecordError(
                    f"structured.json_schema: {where}.{key}: {dumps(number).decode()[:60]} has more digits than a "
                    "grammar can hold exactly; write it as a string, or leave it out"
                )


def _check_counts(schema: dict[str, Any], where: str, *, endless: bool) -> None:
    """Raise RecordError for more items than a grammar can count. endless: very large limits mean no limit."""
    for key in ("minItems", "maxItems"):
        count = schema.get(key)
        if isinstance(count, int) and count > MOST_ITEMS and not (endless and _is_endless(key, count)):
            raise RecordError(
                f"structured.json_schema: {where}.{key}: {count:,} is more than a grammar can count ({MOST_ITEMS:,}); "
                "lower it, or leave it out"
            )


def _is_endless(key: str, value: Any) -> bool:
    """Return whether a limit is so large that it means no limit."""
    return key in ("maxItems", "maxLength", "maxProperties") and isinstance(value, int) and value >= ENDLESS


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    for inner in _inside(value):
        yield from _numbers(inner)


def _is_exact(number: int | float) -> bool:
    """Return whether llguidance, which rounds limits to doubles, keeps a limit exactly."""
    if number in ENDLESS_RECURSION:
        return False
    if isinstance(number, float):
        return not isinstance(number, ExactFloat)
    return abs(number) <= EXACT or number in LARGEST or (abs(number) < 1 << 1000 and float(number) == number)


@lru_cache(maxsize=1024)
def _is_written(number: bytes) -> bool:
    """Return whether llguidance writes this number exactly. Tried out, since it rounds some beyond 53 bits."""
    written = number.decode()
    if len(written) < len(str(EXACT)) and "e" not in written.lower():
        return True
    value, spellings = Decimal(written), {written}
    if value in ENDLESS_RECURSION:
        return False
    if abs(value.adjusted()) < FARTHEST:
        plain = f"{value:f}"
        spellings |= {plain, plain.partition(".")[0] if value == value.to_integral_value() else plain.rstrip("0")}
    return any(is_complete(f'start: %json {{"const": {written}}}', each) for each in spellings)


def inline(schema: Any) -> str:
    """Return a schema as part of a grammar, with its JSON spacing unless the schema sets its own."""
    if isinstance(schema, bool):  # true: anything, false: nothing
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise RecordError(f"structured.json_schema: {json.dumps(schema)[:40]} must be an object, true or false")
    own = schema.get("x-guidance")
    spaced = {**schema, "x-guidance": {**SPACES, **(own if isinstance(own, dict) else {})}}
    return "%json " + dumps(spaced).decode()


def _values(reference: dict[str, Any], passages: Sequence[Passage]) -> list[str]:
    """Return the distinct values that {"$contexts": field} stands for."""
    field = reference.get(CONTEXTS)
    if reference.keys() != {CONTEXTS} or field not in FIELDS:
        known = " or ".join(f'{{"{CONTEXTS}": "{each}"}}' for each in FIELDS)
        raise RecordError(f'"enum": {json.dumps(reference)} must be a list, or {known}')
    found = (getattr(passage, field) for passage in passages)
    values = list(dict.fromkeys(value for value in found if value))
    if not values:
        raise RecordError(
            f'"enum": {json.dumps(reference)}: no passage in the prompt has one, so no answer would be valid'
        )
    return values


SOME = (Passage("1", "A passage.", "A title"),)  # placeholder for a record's passages when only the form is checked
