"""Strings that must be a verbatim span of a passage: `{"$quote": true, "minLength": 12, "maxLength": 200}`.

A span begins and ends at word boundaries. JSON Schema cannot express "part of this text", so the schema around a quote
becomes grammar rules; the rest stays a JSON schema. Limit: only lists, and objects all of whose properties are
required, may hold quotes; a character that JSON escapes counts as two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from ragspec.errors import RecordError
from ragspec.records import Passage
from ragspec.structured.schema import QUOTE, inline, quotes

# a word is letters and digits; a letter of a script without spaces or case is a word by itself
WORDS = re.compile(r"\s+|[^\W_]+|[\W_]", re.UNICODE)
CASELESS = re.compile(r"[^\W\d_a-zA-Z]", re.UNICODE)
QUOTE_KEYS = {QUOTE, "type", "minLength", "maxLength", "description", "title"}
NO_SPACE_FIRST = r"([^ \\]|\\[^nrtu])"


def quoting(schema: Any, passages: Sequence[Passage]) -> str:
    """Return the grammar of a schema with quotes. Raises RecordError if that is impossible."""
    return _Writer(schema, passages).grammar()


def spans(text: str) -> list[str]:
    """Return a text in parts at whose edges a quote may begin and end, escaped as in JSON."""
    found: list[str] = []
    for part in WORDS.findall(text):
        alone = any(CASELESS.match(letter) and letter.lower() == letter.upper() for letter in part)
        found += part if alone else [part]
    return [json.dumps(part, ensure_ascii=False)[1:-1] for part in found]


class _Writer:
    """Builds the grammar of one schema."""

    def __init__(self, schema: Any, passages: Sequence[Passage]) -> None:
        self._schema = schema
        self._passages = passages
        self._definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        self._lines: list[str] = []
        self._terminals: dict[str, str] = {}  # names of quote terminals by the regular expression of their length

    def grammar(self) -> str:
        start = self._rule(self._schema, "$")
        if not self._passages:
            raise RecordError(f'"{QUOTE}": the record\'s prompt has no passages to quote')
        texts = [f"TEXT_{i}: %regex {_substring(passage.text)}" for i, passage in enumerate(self._passages)]
        texts.append("TEXT: " + " | ".join(f"TEXT_{i}" for i in range(len(self._passages))))
        return "\n".join([f"start: {start}", *self._lines, *texts])

    def _rule(self, schema: Any, where: str) -> str:
        """Return the name of a schema's rule, or the schema inline if it has no quotes."""
        if not quotes(schema):
            return f"({inline({**schema, **self._definitions} if isinstance(schema, dict) else schema)})"
        if QUOTE in schema:
            return self._quote(schema, where)
        kind = schema.get("type")
        if kind == "object":
            body = self._object(schema, where)
        elif kind == "array":
            body = self._array(schema, where)
        else:
            raise RecordError(f'"{QUOTE}": only objects and lists may hold one; {where} is neither')
        name = f"rule_{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def _object(self, schema: dict[str, Any], where: str) -> str:
        properties, required = schema.get("properties"), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise RecordError(f'"{QUOTE}": {where} needs "properties" (an object) and "required" (a list)')
        if loose := [name for name in properties if name not in required]:
            raise RecordError(f'"{QUOTE}": all properties of {where} must be "required"; "{loose[0]}" is not')
        parts = []
        for name, value in properties.items():
            key = json.dumps(json.dumps(name, ensure_ascii=False) + ": ", ensure_ascii=False)
            parts.append(f"{key} {self._rule(value, f'{where}.{name}')}")
        return '"{" ' + ' ", " '.join(parts) + ' "}"'

    def _array(self, schema: dict[str, Any], where: str) -> str:
        if "prefixItems" in schema:
            raise RecordError(f'"{QUOTE}": {where} has "prefixItems"; use "items"')
        item = self._rule(schema.get("items", {}), f"{where}[]")
        least, most = _count(schema, "minItems", where) or 0, _count(schema, "maxItems", where)
        if most == 0:
            return '"[]"'
        if most is not None and most < least:
            raise RecordError(f'"maxItems" at {where} is less than "minItems"')
        more = f'(", " {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'

    def _quote(self, schema: dict[str, Any], where: str) -> str:
        if unknown := sorted(schema.keys() - QUOTE_KEYS):
            raise RecordError(f'"{QUOTE}": "{unknown[0]}" at {where} cannot be combined with it')
        least, most = max(1, _count(schema, "minLength", where) or 0), _count(schema, "maxLength", where)
        length = f"(?s:.{{{least},{'' if most is None else most}}})"
        if length not in self._terminals:
            name = self._terminals[length] = f"QUOTE_{len(self._terminals)}"
            self._lines.append(f'{name}: "\\"" (TEXT & /{NO_SPACE_FIRST}(?s:.*)/ & /{length}/) "\\""')
        return self._terminals[length]


def _count(schema: dict[str, Any], key: str, where: str) -> int | None:
    """Return a limit, None without one."""
    value = schema.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise RecordError(f'"{key}" at {where} must be a whole number, not {json.dumps(value)}')
    return value


def _substring(text: str) -> str:
    return json.dumps({"substring_chunks": spans(text)}, ensure_ascii=False)
