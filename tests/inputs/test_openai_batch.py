"""OpenAI's bodies: which fields mean what, and which cannot be done."""

import json
import re

import pytest

from ragspec.errors import RecordError
from ragspec.inputs.openai_batch import NEUTRAL, SAMPLING, parse_batch_line
from ragspec.inputs.record import parse_record

USER = {"role": "user", "content": "Why?"}


def chat(**body):
    return parse_record({"custom_id": "c", "body": {"messages": [USER], **body}}, 1)


def complete(prompt, **body):
    return parse_record({"custom_id": "c", "url": "/v1/completions", "body": {"prompt": prompt, **body}}, 1)


@pytest.mark.parametrize("field", ["tools", "functions", "echo", "suffix", "audio", "prediction", "guided_json", "new"])
@pytest.mark.parametrize("nothing", [None, False, 0, {}, [], ""], ids=repr)
def test_a_value_that_means_nothing_is_accepted_for_any_field(field, nothing):
    assert chat(**{field: nothing}).sampling == {}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in NEUTRAL.items() for value in values])
def test_a_default_is_accepted(field, value):
    assert chat(**{field: value}).sampling == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [("tools", [{"type": "function"}]), ("stream", True), ("new", 1)],
)
def test_a_field_that_cannot_be_done_is_the_records_error(field, value):
    with pytest.raises(RecordError, match=f'"body.{field}" is not supported; known: '):
        chat(**{field: value})


def test_a_zero_that_says_something_is_kept():
    assert chat(temperature=0, seed=0).sampling == {"temperature": 0, "seed": 0}


@pytest.mark.parametrize(
    ("body", "logprobs"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3)],
)
def test_logprobs_of_a_chat(body, logprobs):
    assert chat(**body).sampling.get("logprobs") == logprobs


@pytest.mark.parametrize(("given", "logprobs"), [(None, None), (False, None), (0, 0), (4, 4)])
def test_logprobs_of_a_completion(given, logprobs):
    assert complete("p", logprobs=given).sampling.get("logprobs") == logprobs


def test_likeliest_tokens_need_logprobs():
    with pytest.raises(RecordError, match=r'"body\.top_logprobs" needs "logprobs": true'):
        chat(top_logprobs=2)


def test_settings_are_passed_on():
    body = dict.fromkeys(SAMPLING.keys() - {"max_completion_tokens"}, 3)
    assert chat(**body).sampling == {SAMPLING[key]: 3 for key in body}


def test_a_negative_seed_is_another_one_that_is_not():
    assert 0 <= chat(seed=-1).sampling["seed"] < 1 << 63
    assert chat(seed=-1).sampling != chat(seed=-2).sampling


def test_best_of_as_many_as_are_asked_for_is_all_of_them():
    assert complete("p", n=3, best_of=3).sampling == {"n": 3}


@pytest.mark.parametrize(
    ("given", "prompt", "prompts"),
    [
        ("a", "a", ()),
        (["a"], "a", ()),
        ([1, 2], (1, 2), ()),
        (["a", "b"], "a", ("a", "b")),
        ([[1, 2], [3]], (1, 2), ((1, 2), (3,))),
    ],
)
def test_the_forms_of_a_completions_prompt(given, prompt, prompts):
    record = complete(given)
    assert (record.prompt, record.prompts) == (prompt, prompts)


def test_metadata_and_model_come_along():
    record = chat(model="m", metadata={"a": "b"}, user="u")
    assert (record.metadata, record.model) == ({"a": "b"}, "m")


def test_what_a_template_may_look_at_reaches_it():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "1 + 1?", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "2"}]},
    ]
    found = parse_batch_line({"custom_id": "c", "body": {"messages": messages}}).messages
    assert found == (
        {"role": "user", "content": "1 + 1?", "name": "Ann"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (3, "a tool call must be"),
        ({"type": "custom", "function": {"name": "f"}}, "a tool call must be"),
        ({"function": {"name": "f", "arguments": "{"}}, "are not JSON"),
        ({"function": {"name": "f", "arguments": "[1]"}}, "must be an object, got a list"),
    ],
)
def test_a_tool_call_that_is_none_says_what_was_expected(call, message):
    with pytest.raises(RecordError, match=message):
        chat(messages=[USER, {"role": "assistant", "tool_calls": [call]}])


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("field", "value", "meant"),
    [
        ("response_format", {"type": "text"}, {}),
        ("response_format", {"type": "json_object"}, {"json_object": True}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, SCHEMA),
        ("structured_outputs", {"json": SCHEMA}, SCHEMA),
        ("structured_outputs", {"json": json.dumps(SCHEMA), "regex": None}, SCHEMA),
        ("structured_outputs", {"regex": "a+"}, {"regex": "a+"}),
        ("structured_outputs", {"choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ("structured_outputs", {"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ("structured_outputs", {"json_object": True}, {"json_object": True}),
    ],
)
def test_forms_of_answers(field, value, meant):
    meant = {"json_schema": meant} if meant is SCHEMA else meant
    assert chat(**{field: value}).structured == meant
    assert complete("x", **{field: value}).structured == meant
    assert parse_record({"query": "x", field: value, "note": 1}, 1).structured == meant
    assert parse_record({"query": "x", field: value, "note": 1}, 1).metadata == {"note": 1}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"response_format": {"type": "xml"}}, "\"body.response_format.type\": 'xml' is not supported; known: text"),
        ({"response_format": {"type": "json_schema"}}, '"body.response_format.json_schema.schema" must be an object'),
        ({"response_format": "json"}, '"body.response_format" must be an object, got a string'),
        ({"structured_outputs": {"structural_tag": "x"}}, '"body.structured_outputs.structural_tag" is not supported'),
        ({"structured_outputs": {"json": "{"}}, '"body.structured_outputs": its schema is not JSON'),
        ({"structured_outputs": {"json": "/etc/passwd"}}, '"body.structured_outputs": its schema is not JSON'),
        ({"structured_outputs": {"json": "[]"}}, "its schema must be an object, got an empty one"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            '"body.response_format" and "body.structured_outputs" say the same thing; keep one of them',
        ),
        ({"guided_json": SCHEMA}, '"body.guided_json" has been removed from vLLM, which ignores it; write '),
    ],
)
def test_forms_that_cannot_be_done(body, message):
    with pytest.raises(RecordError, match=re.escape(message)):
        chat(**body)
