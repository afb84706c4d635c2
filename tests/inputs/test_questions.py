"""Plain text: a question a line, whatever it begins with and however its lines end."""

import pytest

from ragspec.errors import RecordError
from ragspec.inputs.sources import open_source

QUESTIONS = ["Who built it?", "When, and why?"]


def read(path):
    with open_source(str(path)) as source:
        found = list(source)
        assert source.count() in (None, len(found))
        return found


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_lines_end_as_any_system_ends_them(tmp_path, end, last, mark):
    path = tmp_path / "in.txt"
    text = f"{mark}{QUESTIONS[0]}{end}{end}{QUESTIONS[1]}{end if last else ''}"
    path.write_text(text, newline="", encoding="utf-8")
    assert [(row.number, row.value) for row in read(path)] == [
        (1, {"query": QUESTIONS[0]}),
        (3, {"query": QUESTIONS[1]}),
    ]


@pytest.mark.parametrize(
    "first", ["[1]", "[1] Who?", "[] or list()?", "{", "{x} Who?", '{"a": 1} is what?', "{a:", '["a"] is?']
)
def test_a_question_may_begin_like_json(tmp_path, first):
    path = tmp_path / "in.txt"
    path.write_text(f"{first}\nWhy?\n")
    assert [row.value for row in read(path)] == [{"query": first}, {"query": "Why?"}]


@pytest.mark.parametrize(
    "text",
    [
        '{"query": "Why?"}\n{"query": "Who?"}\n',
        '[{"query": "Why?"},\n {"query": "Who?"}]',
        '[\n  {\n    "query": "Why?"\n  },\n  {"query": "Who?"}\n]\n',
        "id,query\n1,Why?\n2,Who?\n",
    ],
)
def test_records_are_records_under_any_name(tmp_path, text):
    path = tmp_path / "in.txt"
    path.write_text(text)
    assert [row.value["query"] for row in read(path)] == ["Why?", "Who?"]


def test_a_line_that_is_not_utf_8_costs_only_its_record(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes(b"Why?\ncaf\xe9?\nWho?\n")
    first, second, third = (row.value for row in read(path))
    assert (first, third) == ({"query": "Why?"}, {"query": "Who?"})
    assert isinstance(second, RecordError)
    assert "not UTF-8 (byte 4 is 0xe9)" in str(second)


def test_questions_in_a_file_of_json_lines_say_how_to_read_them(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("Why?\n{bad\n")
    plain, bad = (str(row.value) for row in read(path))
    assert plain.endswith("(input.format: text reads a question a line)")
    assert bad.endswith("each line must be one JSON object")
