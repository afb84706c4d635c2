"""Schemas as other libraries wrap and write them, numbers that no grammar holds, formats that only annotate."""

import json
import re

import pytest

from ragspec.config.load import build_config
from ragspec.errors import ConfigError, RecordError
from ragspec.json_text import loads
from ragspec.run.generate import generate as run
from ragspec.structured.form import Form
from ragspec.structured.grammars import is_complete, problem_of, spaced
from ragspec.structured.schema import unwrapped
from tests.conftest import read_jsonl, write_jsonl

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
WRAPPED = {
    "OpenAI's json_schema": {"name": "answer", "strict": True, "schema": SCHEMA},
    "OpenAI's response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
    "OpenAI's text.format": {"format": {"type": "json_schema", "name": "answer", "strict": True, "schema": SCHEMA}},
    "OpenAI's function": {"name": "f", "description": "d", "parameters": SCHEMA},
    "OpenAI's tool": {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    "Anthropic's tool": {"name": "f", "input_schema": SCHEMA},
    "MCP's tool": {"name": "f", "inputSchema": SCHEMA},
    "json_object with a schema": {"type": "json_object", "schema": SCHEMA},
    "Ollama's format": {"format": SCHEMA},
    "vLLM's guided_json": {"guided_json": SCHEMA},
    "vLLM's guided_json as text": {"guided_json": json.dumps(SCHEMA)},
    "vLLM's structured_outputs": {"structured_outputs": {"json": SCHEMA}},
    "TGI's grammar": {"type": "json", "value": SCHEMA},
    "a schema": SCHEMA,
}


@pytest.mark.parametrize("value", WRAPPED.values(), ids=WRAPPED)
def test_a_wrapped_schema_means_the_schema_in_it(value):
    assert unwrapped(value) == SCHEMA


@pytest.mark.parametrize("value", WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("place", ["config", "file", "record"])
def test_a_wrapped_schema_shapes_answers_wherever_it_stands(value, place, tiny, tmp_path):
    record = {"id": "q", "prompt": "x"}
    raw = {
        "model": tiny,
        "runner": "huggingface",
        "output": str(tmp_path / "out.jsonl"),
        "runner_args": {"compile": "off"},
    }
    if place == "record":
        record["structured"] = {"json_schema": value}
    elif place == "config":
        raw["structured"] = {"json_schema": value}
    else:
        (tmp_path / "s.json").write_text(json.dumps(value))
        raw["structured"] = {"json_schema": str(tmp_path / "s.json")}
    run(build_config(raw | {"input": write_jsonl(tmp_path / "in.jsonl", [record]), "sampling": {"max_new_tokens": 24}}))
    (line,) = read_jsonl(tmp_path / "out.jsonl")
    assert line["parsed"] == {"a": "x"}


@pytest.mark.parametrize("value", [value for value in WRAPPED.values() if value is not SCHEMA])
def test_a_section_may_be_the_wrapping_itself(value):
    config = build_config({"runner": "fake", "structured": value})
    assert config.structured.form.grammar() == Form("json_schema", SCHEMA).grammar()


def test_a_section_that_is_a_schema_says_where_it_belongs():
    with pytest.raises(ConfigError, match=r"structured\.json_schema: the section itself is a schema; move it under"):
        build_config({"runner": "fake", "structured": SCHEMA})


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"name": "a", "schema": SCHEMA, "stric": True}, '"stric" is not allowed next to "schema"'),
        ({"type": "object", "schema": SCHEMA}, 'has both "schema" and keywords of JSON Schema'),
        ({"type": "object", "propertys": {}}, '"propertys" is not known; did you mean "properties"?'),
        (
            {"type": "object", "properties": {"a": {"type": "string", "maxLenght": 3}}},
            r'\$\.properties\.a: "maxLenght"',
        ),
        ({"shape": {"a": "string"}}, '"shape" is not a JSON Schema keyword'),
        ({"schema": "{"}, "the schema is not JSON"),
    ],
)
def test_what_stands_beside_a_schema_is_not_dropped(value, why):
    with pytest.raises(RecordError, match=why):
        Form("json_schema", value).grammar()


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"description": "anything"},
        {"type": "object", "properties": {"schema": {"type": "string"}, "format": {"type": "string"}, "name": {}}},
        {
            "type": "object",
            "x-order": 1,
            "nullable": True,
            "example": {},
            "markdownDescription": "m",
            "errorMessage": "e",
        },
        {"$ref": "#/$defs/A", "$defs": {"A": {"type": "string"}}},
        {"properties": {"propertys": {"type": "string"}}},
        {"type": "string", "x-form": {"requird": True}},
        {"anyOf": [{"type": "string"}], "discriminator": {"propertyName": "kind", "mapping": {"a": "#/$defs/A"}}},
    ],
)
def test_a_schema_that_looks_odd_is_left_alone(schema):
    assert unwrapped(schema) is schema
    Form("json_schema", schema).grammar()


@pytest.mark.parametrize(
    "word", ["path", "file-path", "password", "binary", "base64", "base64url", "byte", "int64", "ipvanyaddress"]
)
def test_a_format_that_only_annotates_demands_nothing(word, tiny, tmp_path):
    schema = {
        "type": "object",
        "properties": {"p": {"type": "string", "format": word, "maxLength": 4}},
        "required": ["p"],
    }
    schema |= {"additionalProperties": False}
    raw = {
        "model": tiny,
        "runner": "huggingface",
        "output": str(tmp_path / "out.jsonl"),
        "runner_args": {"compile": "off"},
    }
    raw |= {"structured": {"json_schema": schema}, "sampling": {"max_new_tokens": 40}}
    run(build_config(raw | {"input": write_jsonl(tmp_path / "in.jsonl", [{"prompt": "x"}])}))
    (line,) = read_jsonl(tmp_path / "out.jsonl")
    assert line["valid"], line


def test_a_format_inside_a_value_is_part_of_the_value():
    grammar = Form("json_schema", {"const": {"format": "path"}}).grammar()
    assert '"format":"path"' in grammar


def admits(schema, value):
    return is_complete(Form("json_schema", schema).grammar(), spaced(value))


PET = {  # as pydantic writes a union with a discriminator
    "$defs": {
        "Cat": {
            "properties": {"kind": {"const": "cat", "type": "string"}, "meows": {"type": "integer"}},
            "required": ["kind", "meows"],
            "type": "object",
        },
        "Dog": {
            "properties": {"kind": {"const": "dog", "type": "string"}, "barks": {"type": "number"}},
            "required": ["kind", "barks"],
            "type": "object",
        },
    },
    "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"},
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
}


def test_a_union_with_a_discriminator_is_the_union():
    assert admits(PET, {"kind": "dog", "barks": 1.5})
    assert not admits(PET, {"kind": "cat", "barks": 1.5})


@pytest.mark.parametrize("word", ["example", "examples", "default", "externalDocs", "xml", "x-origin", "$comment"])
def test_what_annotates_is_not_read_as_a_schema(word):
    schema = {"type": "integer", word: {"propertie": 1, "enum": {"url": "u"}, "minimum": 2**80 + 1}}
    assert admits(schema, 7)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "nullable": True, "maxLength": 2}, ["ab", None], ["abc", 1]),
        ({"type": ["string", "null"], "nullable": True}, ["ab", None], [1]),
        ({"type": "string", "nullable": True, "enum": ["a", None]}, ["a", None], ["b"]),
        ({"type": "array", "items": {"type": "integer", "nullable": True}}, [[1, None]], [None, ["a"]]),
        ({"type": "string", "nullable": False}, ["ab"], [None]),
        (
            {"type": "object", "properties": {"nullable": {"const": True}}, "required": ["nullable"]},
            [{"nullable": True}],
            [{}, None],
        ),
    ],
)
def test_nullable_allows_null(schema, good, bad):
    assert [admits(schema, value) for value in (*good, *bad)] == [True] * len(good) + [False] * len(bad)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (
            {"type": "string", "nullable": True, "enum": ["a"]},
            r'\$: "nullable" only adds null .*; add null to the "enum"',
        ),
        ({"items": {"$ref": "#/$defs/A", "nullable": True}, "$defs": {"A": {}}}, r'\$\.items: .* write "anyOf" with a'),
        (
            {"type": "object", "properties": {"a": {"type": "string", "required": True}}},
            r'\$\.properties\.a: "required" must be a list of names next to "properties", not true',
        ),
    ],
)
def test_a_word_that_would_demand_nothing_is_refused(schema, why):
    with pytest.raises(RecordError, match=why):
        Form("json_schema", schema).grammar()


@pytest.mark.parametrize("word", ["uuid", "date", "email"])
def test_a_format_that_demands_something_stays(word):
    assert f'"format":"{word}"' in Form("json_schema", {"type": "string", "format": word}).grammar()


# -- numbers ----------------------------------------------------------------------------------------------------------

BIG = 12345678901234567890123


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"const": BIG}, r"\$\.const: 12345678901234567890123"),
        ({"enum": [1, BIG]}, r"\$\.enum: 12345678901234567890123"),
        ({"enum": [9007199254740993]}, r"\$\.enum: 9007199254740993"),
        ({"properties": {"n": {"const": [0, {"m": -BIG}]}}}, r"\$\.properties\.n\.const: -12345678901234567890123"),
        ({"type": "integer", "maximum": (1 << 60) + 1}, r"\$\.maximum: 1152921504606846977"),
        ({"anyOf": [{"const": BIG}]}, r"\$\.anyOf\[0\]\.const"),
        ({"items": {"exclusiveMinimum": BIG}}, r"\$\.items\.exclusiveMinimum"),
        ({"const": loads("1e-5000")}, r"\$\.const: 1e-5000"),
        # those that would end the process: llguidance never comes back from them, or fills the memory
        ({"const": -(1 << 63)}, r"\$\.const: -9223372036854775808"),
        ({"enum": ["x", -(1 << 63) + 2]}, r"\$\.enum: -9223372036854775806"),
        ({"type": "integer", "minimum": -(1 << 63), "maximum": -(1 << 63)}, r"\$\.minimum: -9223372036854775808"),
        ({"type": "array", "maxItems": 10**9}, r"\$\.maxItems: 1,000,000,000 is more than"),
        ({"items": {"type": "array", "minItems": (1 << 63) - 1}}, r"\$\.items\.minItems: 9,223,372,036,854,775,807 is"),
    ],
)
def test_a_number_that_the_grammar_would_round_is_refused_by_name(schema, where):
    with pytest.raises(RecordError, match=where):
        Form("json_schema", schema).grammar()


@pytest.mark.parametrize("schema", ['{"const": -9223372036854775808}', '{"type": "array", "maxItems": 2147483647}'])
def test_so_is_one_inside_a_grammar(schema):
    with pytest.raises(RecordError, match=r"\$\.(const: -9223372036854775808|maxItems: 2,147,483,647)"):
        Form("grammar", f"start: x\nx: %json {schema}").grammar()


@pytest.mark.parametrize("endless", [(1 << 31) - 1, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1])
def test_what_generators_write_for_no_limit_is_none(endless):
    schema = {"type": "array", "maxItems": endless, "items": {"type": "string", "maxLength": endless}}
    grammar = Form("json_schema", schema).grammar()
    assert not problem_of(grammar)
    assert is_complete(grammar, '["a", "b"]')
    assert not is_complete(grammar, "[1]")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "integer", "minimum": 10**18}, r"\$.minimum or \$.maximum: has more digits"),
        ({"type": "number", "maximum": 1e300}, r"\$.minimum or \$.maximum: has more digits"),
        ({"type": "string", "pattern": "(a"}, "regex parse error: unclosed group"),
    ],
)
def test_why_a_grammar_cannot_be_made_is_one_line(schema, said):
    assert re.match(said, problem_of(Form("json_schema", schema).grammar()))


def test_decimals_keep_their_digits_from_yaml_and_files(tmp_path):
    digits = "0.12345678901234567890123"
    path = tmp_path / "c.yaml"
    path.write_text(f"runner: fake\nstructured: {{json_schema: {{const: {digits}}}}}\n")
    from ragspec.config.load import load_config

    with pytest.raises(ConfigError, match=rf"\$\.const: {digits}"):
        load_config(str(path))
    (tmp_path / "s.json").write_text(f'{{"enum": [{digits}]}}')
    with pytest.raises(ConfigError, match=rf"\$\.enum: {digits}"):
        build_config({"runner": "fake", "structured": {"json_schema": str(tmp_path / "s.json")}})


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 9007199254740992},
        {"const": 10**20},
        {"enum": [0.1, 1.5e-7, -3, 123456.789]},
        {"type": "integer", "maximum": (1 << 63) - 1},
        {"type": "integer", "minimum": -(1 << 53)},
        {"type": "integer", "default": BIG, "examples": [BIG], "title": "big"},
        {"properties": {"const": {"type": "integer", "default": BIG}}},
    ],
)
def test_a_number_that_the_grammar_holds_is_no_error(schema):
    Form("json_schema", schema).grammar()


def test_a_number_that_the_grammar_holds_is_written_with_all_its_digits(tiny, tmp_path):
    raw = {
        "model": tiny,
        "runner": "huggingface",
        "output": str(tmp_path / "out.jsonl"),
        "runner_args": {"compile": "off"},
    }
    raw |= {"structured": {"json_schema": {"const": 10**20}}, "sampling": {"max_new_tokens": 40}}
    run(build_config(raw | {"input": write_jsonl(tmp_path / "in.jsonl", [{"prompt": "x"}])}))
    text = (tmp_path / "out.jsonl").read_text()
    assert '"output":"100000000000000000000"' in text
    assert '"parsed":100000000000000000000' in text
