import pytest

from ragspec.errors import RecordError
from ragspec.inputs.record import parse_record
from ragspec.records import Passage


def test_query_with_both_kinds_of_contexts():
    record = parse_record(
        {"id": 7, "query": "q", "contexts": ["one", {"id": "d", "text": "two", "title": "t", "score": 1}], "tag": "x"},
        1,
    )
    assert record.id == "7"
    assert record.contexts == (Passage("1", "one"), Passage("d", "two", "t", 1.0))
    assert record.metadata == {"tag": "x"}


def test_line_number_stands_in_for_a_missing_id():
    assert parse_record({"prompt": "p"}, 12).id == "12"


def test_prompt_source_chooses_where_a_record_has_several():
    value = {"query": "q", "prompt": "p", "messages": [{"role": "user", "content": "m"}]}
    assert parse_record(value, 1).query == "q"
    assert parse_record(value, 1, "prompt").prompt == "p"
    assert parse_record(value, 1, "messages").messages == ({"role": "user", "content": "m"},)


def test_openai_batch_line_brings_its_own_sampling():
    body = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0.3}
    record = parse_record({"custom_id": "c1", "method": "POST", "url": "/v1/chat/completions", "body": body}, 1)
    assert record.id == "c1"
    assert record.sampling == {"max_new_tokens": 5, "temperature": 0.3}


def test_openai_content_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_record({"messages": [{"role": "user", "content": parts}]}, 1).messages[0]["content"] == "a\nb"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1], "must be a JSON object, got a list"),
        (None, "must be a JSON object, got nothing"),
        ({}, "no prompt"),
        ({"id": "a", "text": "b"}, 'no prompt: the record needs "query", "messages" or "prompt", it has "id", "text"'),
        ({"query": "  "}, '"query" is empty'),
        ({"id": "a", "query": None, "contexts": ["b"]}, 'no prompt: "query" is empty'),  # an empty cell of a table
        ({"query": 3}, '"query" must be a string, got a number'),
        ({"query": "q", "contexts": 3}, '"contexts" must be a list of strings or objects, got a number'),
        ({"query": "q", "contexts": ["a", 3]}, '"contexts" item 2 must be a string or an object'),
        ({"query": "q", "contexts": [{"title": "t"}]}, '"contexts" item 1: "text" must be a string'),
        ({"query": "q", "contexts": [{"text": "t", "score": "high"}]}, '"score" must be a number'),
        ({"id": "", "query": "q"}, '"id" must be a non-empty string'),
        ({"id": True, "query": "q"}, '"id" must be'),
        ({"messages": []}, '"messages" must be a non-empty list'),
        ({"messages": [{"role": "user"}]}, '"messages" item 1: "content" must be a string, got nothing'),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only content parts"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "text": "a caption"}]}]}, "only content parts"),
        ({"custom_id": "c", "body": 3}, '"body" must be an object'),
        ({"custom_id": "c", "body": {"prompt": "p", "tools": [{"type": "function"}]}}, '"body.tool_choice" must be'),
        ({"custom_id": "c", "body": {"prompt": "p", "stream": True}}, '"body.stream" is not supported'),
        ({"custom_id": "c", "body": {"prompt": "p", "echo": 1}}, '"body.echo" must be true or false'),
        ({"custom_id": "c", "body": {"prompt": "p", "best_of": 3}}, '"body.best_of" is not supported'),
        ({"custom_id": "c", "body": {"prompt": "p", "logprobs": True}}, '"body.logprobs" must be a whole number'),
        ({"custom_id": "c", "body": {"messages": [], "top_logprobs": 2}}, '"messages" must be a non-empty list'),
        ({"custom_id": "c", "url": "/v1/embeddings", "body": {"prompt": "p"}}, '"url": '),
        ({"custom_id": "c", "body": {"prompt": ["a", ""]}}, '"body.prompt" is empty'),
        ({"custom_id": "c", "body": {"prompt": [1, -1]}}, '"body.prompt" must be a string, got a number'),
        ({"body": {"prompt": "p"}}, '"custom_id" is missing'),
        ({"custom_id": "c", "body": {}}, 'no prompt: "body" needs'),
    ],
)
def test_a_record_that_is_none_says_what_was_expected(value, message):
    with pytest.raises(RecordError) as caught:
        parse_record(value, 1)
    assert message in str(caught.value)


def test_a_record_without_the_asked_source_is_an_error():
    with pytest.raises(RecordError, match=r'needs "prompt" \(prompt.source\)'):
        parse_record({"query": "q"}, 1, "prompt")
