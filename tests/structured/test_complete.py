"""Whether a text is all of an answer, by its grammar alone."""

import pytest

from ragspec.structured.form import Form
from ragspec.structured.grammars import is_complete, spaced

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}, "required": ["a", "n"]}


@pytest.mark.parametrize(
    ("form", "text", "complete"),
    [
        (Form("json_schema", SCHEMA), '{"a": "\u00e9\u6f22", "n": 1}', True),
        (Form("json_schema", SCHEMA), '{"a": "x", "n": 1', False),
        (Form("json_schema", SCHEMA), '{"a": "x"}', False),
        (Form("json_schema", SCHEMA), '{"a": "x", "n": 1.5}', False),
        (Form("json_schema", {"type": "integer"}), "12", True),
        (Form("choice", ["no", "nothing"]), "no", True),
        (Form("choice", ["no", "nothing"]), "noth", False),
        (Form("choice", ["no", "nothing"]), "", False),
        (Form("regex", "[0-9]+"), "12", True),
        (Form("regex", "[0-9]{3}"), "12", False),
        (Form("grammar", 'start: "a" | "a" start'), "aaa", True),
        (Form("grammar", 'start: "a" "b"'), "a", False),
    ],
)
def test_a_text_is_complete_where_its_grammar_admits_an_end(form, text, complete):
    assert is_complete(form.grammar(), text) is complete


def test_json_is_the_same_however_it_is_spaced():
    assert is_complete(Form("json_schema", SCHEMA).grammar(), spaced({"a": "x", "n": 1}))


def test_a_byte_that_ends_halfway_in_a_letter_is_no_answer():
    assert not is_complete(Form("choice", ["\u00e9"]).grammar(), "\ufffd")
