"""OpenAI's bodies: which fields mean what, and which cannot be done."""

import json
import re

import pytest

from ragspec.errors import RecordError
from ragspec.inputs.openai_batch import FIELDS, parse_batch_line
from ragspec.inputs.record import parse_record

USER = {"role": "user", "content": "Why?"}


def chat(**body):
    return parse_record({"custom_id": "c", "body": {"messages": [USER], **body}}, 1)


def complete(prompt, **body):
    return parse_record({"custom_id": "c", "url": "/v1/completions", "body": {"prompt": prompt, **body}}, 1)


SAMPLING = {name: field.key for name, field in FIELDS.items() if field.use == "sampling"}


def body_with(field, value):
    return (
        complete("p", **{field: value}) if field in ("suffix", "best_of", "prompt_embeds") else chat(**{field: value})
    )


def silent(record):
    return not record.sampling and not record.template_args and record.structured is None and record.reasoning


@pytest.mark.parametrize("field", sorted(FIELDS.keys() - {"messages", "prompt"}))
def test_null_means_nothing_in_any_field(field):
    assert silent(body_with(field, None))


@pytest.mark.parametrize(
    ("field", "value"), [(name, value) for name, field in FIELDS.items() for value in field.neutral]
)
def test_a_fields_default_means_nothing(field, value):
    assert silent(body_with(field, value))


NOT_NEUTRAL = [  # a value that counts as nothing elsewhere, and says something here
    ("add_generation_prompt", 0),
    ("echo", 0),
    ("echo", ""),
    ("include_reasoning", 0),
    ("spaces_between_special_tokens", False),
    ("skip_special_tokens", False),
    ("thinking_token_budget", 0),
    ("prompt_logprobs", 0),
    ("prompt_logprobs", False),
    ("truncate_prompt_tokens", 0),
    ("allowed_token_ids", []),
    ("length_penalty", 0),
    ("best_of", 0),
    ("best_of", True),
    ("use_beam_search", 0),
    ("chat_template", ""),
    ("verbosity", "low"),
    ("tool_choice", "required"),
    ("new", False),
    ("new", 0),
    ("new", {}),
]


@pytest.mark.parametrize(("field", "value"), NOT_NEUTRAL, ids=repr)
def test_a_value_that_is_not_the_fields_default_is_not_dropped(field, value):
    with pytest.raises(RecordError, match=f"body.{field}"):
        body_with(field, value)


@pytest.mark.parametrize(("field", "value"), [("include_reasoning", False), ("add_generation_prompt", False)])
def test_a_false_that_says_something_is_kept(field, value):
    record = chat(**{field: value})
    assert record.template_args == ({field: value} if field == "add_generation_prompt" else {})
    assert record.reasoning == (field != "include_reasoning")


@pytest.mark.vllm
def test_all_fields_of_vllms_bodies_are_known_with_their_defaults():
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    for kind in (ChatCompletionRequest, CompletionRequest):
        for name, field in kind.model_fields.items():
            assert name in FIELDS, name
            default = field.default_factory() if name == "bad_words" else field.default
            if FIELDS[name].use == "cannot" and not field.is_required():
                assert default is None or default in FIELDS[name].neutral, name


@pytest.mark.parametrize(
    ("field", "value"),
    [("stream", True), ("suffix", "x"), ("use_beam_search", True), ("bad_words", ["x"]), ("functions", [{}])],
)
def test_a_field_that_cannot_be_done_is_the_records_error(field, value):
    with pytest.raises(RecordError, match=f'"body.{field}" is not supported; remove it, or leave it at '):
        body_with(field, value)


def test_a_misspelt_field_names_the_nearest_one():
    with pytest.raises(RecordError, match=r'"body\.max_token" is not known; did you mean "max_tokens"'):
        chat(max_token=3)
    with pytest.raises(RecordError, match=r"put its keys into"):
        chat(extra_body={"top_k": 1})


def test_the_newer_name_of_a_limit_wins_wherever_it_stands():
    assert chat(max_tokens=5, max_completion_tokens=2).sampling == {"max_new_tokens": 2}
    assert chat(max_completion_tokens=2, max_tokens=5).sampling == {"max_new_tokens": 2}


TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def test_tools_reach_the_template_where_no_call_is_to_be_read():
    assert chat(tools=[TOOL], tool_choice="none").template_args == {"tools": [TOOL]}
    assert chat(tool_choice="auto").template_args == {}
    for body in ({"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "auto"}, {"tool_choice": TOOL}):
        with pytest.raises(RecordError, match=r'"body\.tool_choice" must be "none"'):
            chat(**body)


@pytest.mark.parametrize(
    ("body", "args"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"documents": [{"title": "T", "text": "x"}]}, {"documents": [{"title": "T", "text": "x"}]}),
        ({"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False}),
        ({"reasoning_effort": "low"}, {"enable_thinking": True, "reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "reasoning_effort": "none"}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False, "reasoning_effort": "low"},
        ),
    ],
)
def test_what_a_chat_template_is_called_with(body, args):
    assert chat(**body).template_args == args


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tools": {}, "tool_choice": "none"}, '"body.tools" must be a list of objects'),
        ({"documents": ["x"]}, '"body.documents" must be a list of objects'),
        ({"chat_template_kwargs": []}, '"body.chat_template_kwargs" must be an object'),
        ({"continue_final_message": "yes"}, '"body.continue_final_message" must be true or false'),
        ({"add_special_tokens": True}, '"body.add_special_tokens": a chat template writes its own'),
        ({"prompt": "x"}, '"body.messages" and "body.prompt": keep one of them'),
    ],
)
def test_a_wrong_argument_of_a_template_says_what_was_expected(body, message):
    with pytest.raises(RecordError, match=re.escape(message)):
        chat(**body)


def test_a_completion_says_whether_its_prompt_comes_back_and_how_it_is_encoded():
    assert complete("p", echo=True).echo
    assert not complete("p", add_special_tokens=False).special_tokens
    assert complete("p").special_tokens
    with pytest.raises(RecordError, match=r'"body\.echo": the prompt has no logprobs here'):
        complete("p", echo=True, logprobs=1)


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
    for most in (21, -1):
        with pytest.raises(RecordError, match=rf'"body\.top_logprobs" must be from 0 to 20, got {most}'):
            chat(logprobs=True, top_logprobs=most)


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


@pytest.mark.parametrize(
    ("line", "body", "metadata"),
    [
        ({"lang": "de"}, {"lang": "en", "x": 1}, {"lang": "de", "x": 1, "metadata": {"lang": "en"}}),
        ({"lang": "de"}, {"x": 1}, {"lang": "de", "x": 1}),
        ({}, "a note", {"metadata": "a note"}),
    ],
)
def test_nothing_of_a_lines_metadata_is_lost(line, body, metadata):
    given = {"custom_id": "a", "body": {"prompt": "x", "metadata": body}, **line}
    assert parse_record(given, 1).metadata == metadata


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
        ("response_format", {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA}, SCHEMA),
        ("response_format", {"type": "json_object", "schema": SCHEMA}, SCHEMA),
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
        ({"response_format": {"type": "text", "schema": SCHEMA}}, '"body.response_format.schema" is not allowed with'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "stric": True}}},
            '"body.response_format.json_schema.stric" is not known',
        ),
        ({"format": SCHEMA}, '"body.format" belongs to another library; write "response_format"'),
        ({"regex": "a+"}, '"body.regex" belongs to another library; write "structured_outputs": {"regex": ...}'),
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


def test_all_fields_of_openais_bodies_are_known():
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_params

    of_the_client = {"timeout", "extra_headers", "extra_query", "extra_body"}
    for params in (chat_params.CompletionCreateParamsNonStreaming, completion_create_params.CompletionCreateParamsBase):
        names = params.__required_keys__ | params.__optional_keys__
        assert names - of_the_client <= FIELDS.keys()
