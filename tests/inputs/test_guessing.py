"""Columns that are read by their usual names: which, and what a row that is unlike the others changes."""

import time
from pathlib import Path

import pytest

from ragspec.config.load import build_config
from ragspec.inputs.guessing import first_rows, guessed, unread_passages
from ragspec.run.generate import generate
from ragspec.run.inspect import inspect, with_columns
from tests.conftest import read_jsonl, write_jsonl

LONG = "The old tower stands on a hill."
OTHER = "It was built of red stone in 1871."


def config_of(path, **more):
    raw = {"runner": "fake", "input": str(path), "sampling": {"max_new_tokens": 5}} | more
    return build_config(raw | {"output": {"path": str(path.parent / "out.jsonl"), "include": ["query", "contexts"]}})


def mapped(tmp_path, records, **more):
    """Return the mapping of these records, and the note that says it."""
    path = Path(write_jsonl(tmp_path / "in.jsonl", records))
    config, notes = with_columns(config_of(path, **more))
    return config.input.columns.given, " ".join(notes)


def run(path, **more):
    """Return the passages of each answer, the messages of failed records, and the notes."""
    summary = generate(config_of(path, **more))
    lines = read_jsonl(path.parent / "out.jsonl")
    passages = {line["id"]: [each["text"] for each in line["passages"]] for line in lines if "output" in line}
    return passages, {line["id"]: line["error"]["message"] for line in lines if "error" in line}, summary.notes


def asked(count, **fields):
    return [{"id": f"q{i}", "question": f"question {i}", **fields} for i in range(count)]


# -- rows unlike the others --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", ['{"id": "x", "question": "Why?", "score": NaN}', "{", "[1]", '"text"'])
def test_a_row_that_cannot_be_read_fails_alone(tmp_path, odd):
    path = Path(write_jsonl(tmp_path / "in.jsonl", asked(4, contexts=[LONG])))
    path.write_text(path.read_text().replace("\n", f"\n{odd}\n", 1))
    passages, failed, _ = run(path)
    assert passages == {f"q{i}": [LONG] for i in range(4)}
    assert len(failed) == 1


@pytest.mark.parametrize(
    "odd",
    [
        {"ctxs": [{"title": "t", "text": None}]},
        {"ctxs": "['a', 'b']"},
        {"ctxs": [{"text": LONG, "score": "high"}]},
        {"id": ["x"]},
        {"question": None},
        {"question": None, "query": "Why?"},
        {"question": None, "contexts": ["a"]},
    ],
)
def test_an_odd_row_changes_nothing_for_the_others(tmp_path, odd):
    records = asked(6, ctxs=[{"title": "t", "text": LONG, "score": 0.5}])
    records[2] |= odd
    passages, failed, _ = run(Path(write_jsonl(tmp_path / "in.jsonl", records)))
    assert passages == {f"q{i}": [LONG] for i in range(6) if i != 2}
    assert len(failed) == 1


def test_passages_that_only_later_rows_have_are_found(tmp_path):
    records = asked(20, context=None) + [{**each, "id": f"l{i}"} for i, each in enumerate(asked(9, context=LONG))]
    path = Path(write_jsonl(tmp_path / "in.jsonl", records))
    passages, failed, _ = run(path)
    assert not failed
    assert [texts for texts in passages.values() if texts] == [[LONG]] * 9
    assert inspect(config_of(path).input).mapping == {"query": "question", "contexts": "context"}


def test_references_that_only_later_rows_have_are_found(tmp_path):
    records = asked(30, context=LONG, expected_answer=None) + asked(1, context=LONG, expected_answer="Ann")
    assert mapped(tmp_path, records)[0]["reference"] == "expected_answer"


@pytest.mark.parametrize("header", ["ID,Question,Context", "id,QUESTION,contexts", " id, User Query,context"])
def test_capital_letters_and_spaces_are_no_other_name(tmp_path, header):
    path = tmp_path / "in.csv"
    path.write_text(f"{header}\na,Why?,{LONG}\n")
    assert run(path)[0] == {"a": [LONG]}


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_the_line_in_which_excel_names_the_delimiter_is_no_header(tmp_path, delimiter):
    path = tmp_path / "in.csv"
    path.write_text(f"sep={delimiter}\r\n" + "\r\n".join(delimiter.join(row) for row in [["id", "query"], ["a", "Q"]]))
    assert run(path)[0] == {"a": []}
    assert inspect(config_of(path).input).rows == 1


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("context", "passage", "documents", "retrieval_context", "retrieved_passages", "retrieved_docs"),
        *("retrieved_chunks", "positive_passages", "positive_ctxs", "search_hits", "hits", "snippets", "sources"),
        *("reference_contexts", "knowledge", "article", "background"),
    ],
)
def test_a_query_takes_passages_under_another_name(tmp_path, name):
    path = Path(write_jsonl(tmp_path / "in.jsonl", [{"id": "a", "query": "Why?", name: [LONG]}]))
    passages, _, notes = run(path)
    assert passages == {"a": [LONG]}
    assert any(f"reads {name} as contexts, by the columns' names" in note for note in notes)


@pytest.mark.parametrize(
    ("fields", "taken"),
    [
        ({"context": ["gold"], "retrieval_context": ["found"]}, "retrieval_context"),
        ({"reference_contexts": ["gold"], "retrieved_contexts": ["found"]}, "retrieved_contexts"),
        ({"positive_ctxs": [LONG], "passages": [LONG]}, "passages"),
    ],
)
def test_what_was_retrieved_comes_before_what_should_have_been(tmp_path, fields, taken):
    assert mapped(tmp_path, [{"query": "q", **fields}])[0] == {"contexts": taken}


@pytest.mark.parametrize(
    "record",
    [
        {"query": "q", "contexts": [], "passages": [LONG]},
        {"query": "q", "sources": ["https://example.org/a"]},
        {"query": "q", "documents": [3, 4]},
        {"messages": [{"role": "user", "content": "q"}], "context": LONG},
    ],
)
def test_other_queries_run_as_they_are(tmp_path, record):
    assert mapped(tmp_path, [record]) == ({}, "")


def test_a_query_with_an_index_is_searched_for(tmp_path):
    given = {"retrieval": {"index": str(tmp_path / "index")}}
    assert mapped(tmp_path, [{"query": "q", "passages": [LONG]}], **given) == ({}, "")


@pytest.mark.parametrize("name", ["ground_truth", "ground_truths", "expected_answer", "gold_answer", "expected_output"])
def test_an_expected_answer_comes_before_one_that_a_model_gave(tmp_path, name):
    record = {"question": "q", "answer": "a model's", name: "right"}
    assert mapped(tmp_path, [record])[0] == {"query": "question", "reference": name}


# -- passages ----------------------------------------------------------------------------------------------------------


def test_the_note_names_the_fields_of_passages(tmp_path):
    _, note = mapped(tmp_path, [{"question": "q", "ctxs": [{"doc_id": "d", "chunk": LONG}]}])
    assert "reads question as query, ctxs as contexts (id from doc_id, text from chunk), by the columns" in note
    _, note = mapped(tmp_path, [{"question": "q", "contexts": [{"chunk": LONG}]}])
    assert "reads question as query, contexts (text from chunk), by the columns" in note


def test_rows_are_read_on_only_for_what_is_missing():
    rows = iter([{"query": "q", "contexts": [LONG]}] * 30)
    assert len(first_rows(rows)) == 20
    assert len(list(rows)) == 10


@pytest.mark.parametrize(
    ("passages", "texts"),
    [
        ([{"passage": "12", "chunk": LONG}, {"passage": "13", "chunk": OTHER}], [LONG, OTHER]),
        ([{"text": "", "content": LONG}, {"text": "", "content": OTHER}], [LONG, OTHER]),
        ([{"text": " ", "inhalt": LONG}], [LONG]),
        ([{"text": "short", "page_content": LONG}], [LONG]),
        ([{"text": "Paris.", "title": "The capital of France"}], ["Paris."]),
        ([{"content": "Paris.", "url": "https://example.org/articles/paris"}], ["Paris."]),
        ([{"text": "Paris.", "note": "somebody should check this"}], ["Paris."]),
        ([{"nr": 4, "inhalt": LONG, "adresse": "https://example.org/articles/tower"}], [LONG]),
        ({"d1": LONG, "d2": OTHER}, [LONG, OTHER]),
    ],
)
@pytest.mark.parametrize("name", ["contexts", "documents"])
def test_the_text_of_a_passage_is_found(tmp_path, name, passages, texts):
    path = Path(write_jsonl(tmp_path / "in.jsonl", [{"id": "a", "question": "q", name: passages}]))
    assert run(path)[0] == {"a": texts}


def test_texts_by_their_ids_are_passages_with_ids(tmp_path):
    path = Path(write_jsonl(tmp_path / "in.jsonl", [{"query": "q", "contexts": {"d1": LONG, "d2": OTHER}}]))
    run(path)
    assert read_jsonl(tmp_path / "out.jsonl")[0]["contexts"] == ["d1", "d2"]


@pytest.mark.parametrize(
    ("passages", "message"),
    [
        ([{"name": "Kettle", "description": "A steel kettle", "price": 30}], "input.columns.contexts.text says which"),
        ([{"name": "Kettle", "about": LONG, "use": OTHER}], "input.columns.contexts.text says which"),
        ({"Paris": LONG, "Rome": OTHER}, "input.columns.contexts.text says which"),
        ("['a', 'b']", "looks like a list (['a', 'b']...); write it as JSON"),
    ],
)
@pytest.mark.parametrize("name", ["contexts", "documents"])
def test_passages_whose_text_is_not_clear_are_refused_rather_than_cut(tmp_path, name, passages, message):
    path = Path(write_jsonl(tmp_path / "in.jsonl", [{"id": "a", "question": "q", name: passages}]))
    passages, failed, _ = run(path)
    assert not passages
    assert message in failed["a"]


@pytest.mark.parametrize("name", ["query", "question"])
@pytest.mark.parametrize(
    ("text", "texts"),
    [
        ('[["A", ["One.", " Two."]]]', ["One. Two."]),
        ('[{"text": "a"}, "b"]', ["a", "b"]),
        ('{"text": "a"}', ["a"]),
    ],
)
def test_json_in_a_text_is_read(tmp_path, name, text, texts):
    path = Path(write_jsonl(tmp_path / "in.jsonl", [{"id": "a", name: "q", "context": text}]))
    assert run(path)[0] == {"a": texts}


def test_passages_that_cannot_be_read_are_what_the_error_is_about(tmp_path):
    path = Path(write_jsonl(tmp_path / "in.jsonl", asked(3, contexts=[3])))
    _, failed, _ = run(path)
    assert set(failed) == {"q0", "q1", "q2"}
    assert all('"contexts" item 1 must be a string or an object' in message for message in failed.values())


@pytest.mark.parametrize("name", ["question", "input", "instruction"])
@pytest.mark.parametrize("empty", ["", None])
def test_an_empty_column_does_not_take_the_place_of_a_prompt(name, empty):
    row = {"prompt": "Say why.", name: empty, "context": "The tower is old."}
    assert guessed([row] * 3) == {}


@pytest.mark.parametrize("item", [{"a": 1, "b": {"c": 2, "d": {"e": 1}}}, 0.5])
def test_a_long_list_is_judged_by_its_beginning(item):
    started = time.perf_counter()
    assert unread_passages({"trace": [item] * 300_000}) == ""
    assert time.perf_counter() - started < 1  # for each record; all items take several


@pytest.mark.parametrize("matches", [[{"home": "A", "away": "B"}], ["a", "b"], 3])
def test_matches_that_are_no_passages_are_not_read_as_such(matches):
    assert guessed([{"question": "Who won?", "matches": matches}] * 3) == {"query": "question"}
