"""Random schemas in other libraries' wrappings, some of them damaged: each means its schema, or is an error.

Through a record's fields, an OpenAI body's and a config's section; never another schema, and never none at all.
"""

import json
import random
from collections import Counter
from pathlib import Path

from ragspec.config.load import build_config
from ragspec.errors import ConfigError, RecordError
from ragspec.inputs.values import FORM_FIELDS as STRUCTURE
from ragspec.inputs.values import structured_of
from ragspec.structured.schema import nodes, unwrapped
from tests.campaign.damage import change_value

SCHEMAS = [
    {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    {"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [{"type": "null"}, {"type": "string", "format": "date"}]}}},
    {
        "type": "object",
        "properties": {"schema": {"type": "string"}, "name": {"type": "string"}, "type": {"const": "t"}},
    },
    {"type": "object", "properties": {"format": {"type": "object", "properties": {"json_schema": {"type": "null"}}}}},
    {"enum": ["yes", "no"]},
    {"type": "string", "format": "password"},
    {"title": "Answer", "description": "d", "type": ["object", "null"], "properties": {}},
]
# as a record's or a config's `structured` says it
WRAPPINGS = {
    "ours": lambda schema: {"json_schema": schema},
    "named": lambda schema: {"name": "answer", "strict": True, "schema": schema},
    "ours, named": lambda schema: {"json_schema": {"name": "answer", "strict": None, "schema": schema}},
    "format": lambda schema: {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    "flat format": lambda schema: {"type": "json_schema", "name": "answer", "strict": True, "schema": schema},
    "json object": lambda schema: {"type": "json_object", "schema": schema},
    "function": lambda schema: {"name": "f", "description": "d", "parameters": schema},
    "tool": lambda schema: {"type": "function", "function": {"name": "f", "parameters": schema}},
    "tool of Anthropic's": lambda schema: {"name": "f", "description": "d", "input_schema": schema},
    "as text": lambda schema: {"json_schema": {"name": "answer", "schema": json.dumps(schema)}},
}
FIELDS = {  # of a record or a body
    "structured": lambda schema: {"structured": {"json_schema": schema}},
    "response_format": lambda schema: {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    },
    "json_object": lambda schema: {"response_format": {"type": "json_object", "schema": schema}},
    "structured_outputs": lambda schema: {"structured_outputs": {"json": schema, "regex": None}},
    "guided_json": lambda schema: {"guided_json": schema},
    "format": lambda schema: {"format": schema},
}
KEYS = ["schema", "json_schema", "name", "strict", "type", "format", "requird", "regex", "properties", "additional", ""]
VALUES = [None, True, 0, "x", "json_schema", "json_object", "object", "text", [], {}, {"type": "null"}, "{", "[1]"]


def campaign(count: int, seed: int, folder: Path) -> dict[str, int]:
    """Wrap `count` schemas; return what became of them."""
    totals: Counter[str] = Counter(wrappings=count)
    for number in range(count):
        chance = random.Random(f"{seed} wrappers {number}")
        schema = chance.choice(SCHEMAS)
        in_config = chance.random() < 0.6
        name = chance.choice(list(WRAPPINGS if in_config else FIELDS))
        given = json.loads(json.dumps((WRAPPINGS if in_config else FIELDS)[name](schema)))
        damaged = chance.random() < 0.5
        for _ in range(chance.choice([1, 1, 2]) if damaged else 0):
            change_value(chance, given, VALUES, KEYS, 0.4)
            if chance.random() < 0.3:
                given.setdefault(chance.choice(KEYS), chance.choice(VALUES))
        where = f"wrapping {number} of seed {seed}, {name}: {json.dumps(given)}"
        totals[_check(given, schema, where, in_config=in_config, damaged=damaged)] += 1
    return dict(totals)


def _check(given: dict, schema: dict, where: str, *, in_config: bool, damaged: bool) -> str:
    grammar, understood, refusal = "", None, ""
    try:
        section = given if in_config else structured_of(given, "" if "structured" in given else "body.")
        form = build_config({"runner": "fake", "structured": section}).structured.form if section else None
        understood = unwrapped(form.spec) if form and form.kind == "json_schema" else None
        grammar = form.grammar() if form else ""
    except (ConfigError, RecordError) as error:
        refusal = str(error)
    if refusal:
        assert "\n" not in refusal, where
        assert damaged or (not in_config and given.keys() & {"guided_json", "format"}), f"{where}: {refusal}"
        return "refused"
    if understood == schema:
        return "understood"
    assert damaged, f"{where}: became {understood}"
    said = given if in_config else {name: given.get(name) for name in STRUCTURE}  # the rest is metadata
    assert section is None or schema not in list(nodes(said)), f"{where}: its schema was dropped for {understood}"
    return "nothing" if not grammar else "something else"
