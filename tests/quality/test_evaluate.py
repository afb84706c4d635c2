"""`ragspec evaluate` on files: references here and there, two runs, and what cannot be scored."""

import csv
import json
import re

import pytest
from typer.testing import CliRunner

from ragspec.cli import app
from ragspec.config.io import InputConfig
from ragspec.config.load import build_config
from ragspec.errors import ConfigError
from ragspec.quality.evaluate import evaluate
from ragspec.run.generate import generate
from tests.conftest import read_jsonl, write_jsonl
from tests.inputs.test_tables import as_parquet

REFERENCES = ["Ann Smith", ["1911", "in 1911"], "salt", "nobody"]


def lines(texts, **more):
    return [
        {"id": f"q{i}", "output": text, "output_tokens": len(text), "contexts": ["d1", "d2"], "metadata": metadata}
        for i, (text, metadata) in enumerate(zip(texts, more.pop("metadata"), strict=True))
    ]


def referred(texts, references=REFERENCES, **more):
    return lines(texts, metadata=[{"reference": reference, **more} for reference in references])


def test_a_run_is_scored_and_compared_with_another(tmp_path):
    one = write_jsonl(tmp_path / "one.jsonl", referred(["Ann Smith", "in 1911", "I don't know.", "somebody"]))
    two = write_jsonl(tmp_path / "two.jsonl", referred(["Ann", "1911", "salt", "nobody"])[:3])
    (tmp_path / "one.stats.json").write_text('{"tokens_per_s": 30.0}')
    (tmp_path / "two.stats.json").write_text('{"tokens_per_s": 20.0}')
    found = evaluate(one, against=two)
    assert found.scores["exact_match"].mean == 50.0
    assert found.scores["f1"].mean == 50.0
    assert found.scores["refusals"].mean == 25.0
    assert found.pairs == 3
    assert found.differences["exact_match"].mean == pytest.approx(100 * (1 + 0 - 1) / 3)
    assert found.differences["f1"].mean == pytest.approx(100 * ((1 - 2 / 3) + 0 - 1) / 3)
    assert found.differences["f1"].low < found.differences["f1"].mean < found.differences["f1"].high
    assert found.speed == 1.5
    assert any("1 records are in only one of the runs" in note for note in found.notes)


def test_citations_are_scored_where_answers_cite(tmp_path):
    texts = ["Ann Smith [1]", "1911 [1, 2]", "salt", "nobody [2]"]
    found = evaluate(write_jsonl(tmp_path / "out.jsonl", referred(texts, gold_doc_ids=["d1"])))
    assert found.scores["citation_recall"].mean == 50.0
    assert found.scores["citation_precision"].mean == pytest.approx((100 + 50 + 0 + 0) / 4)
    plain = evaluate(write_jsonl(tmp_path / "plain.jsonl", referred(["a", "b", "c", "d"], gold_doc_ids=["d1"])))
    assert "citation_recall" not in plain.scores


@pytest.mark.parametrize("gold", [["d1"], "d1", '["d1"]', ["d1", "d1"]])
@pytest.mark.parametrize("name", ["gold_ids", "gold_doc_ids"])
def test_gold_ids_are_a_list_a_text_of_one_or_a_single_id(tmp_path, gold, name):
    (line,) = referred(["Ann Smith [1, 2]"], ["Ann Smith"], **{name: gold})
    found = evaluate(write_jsonl(tmp_path / "out.jsonl", [line])).scores
    assert (found["citation_precision"].mean, found["citation_recall"].mean) == (50.0, 100.0)


@pytest.mark.parametrize("gold", [[], "[]"])
def test_an_empty_list_of_gold_ids_scores_no_citations(tmp_path, gold):
    (line,) = referred(["Ann Smith [1, 2]"], ["Ann Smith"], gold_ids=gold)
    assert "citation_recall" not in evaluate(write_jsonl(tmp_path / "out.jsonl", [line])).scores


def test_gold_ids_that_are_a_printed_python_list_are_named(tmp_path):
    (line,) = referred(["Ann Smith [1]"], ["Ann Smith"], gold_ids="['d1']")
    found = evaluate(write_jsonl(tmp_path / "out.jsonl", [line]))
    assert "citation_recall" not in found.scores
    assert found.scores["f1"].mean > 0
    assert '1 records have unusable references (q0: "gold_ids" is a text that looks like a list' in found.notes[0]


def test_a_run_that_cites_nothing_loses_what_the_other_gains_by_it(tmp_path):
    citing = write_jsonl(tmp_path / "a.jsonl", referred(["Ann [1]", "x [1]", "y [1]", "z [1]"], gold_doc_ids=["d1"]))
    silent = write_jsonl(tmp_path / "b.jsonl", referred(["Ann", "x", "y", "z"], gold_doc_ids=["d1"]))
    assert evaluate(silent, against=citing).differences["citation_recall"].mean == -100.0
    assert evaluate(citing, against=silent).differences["citation_recall"].mean == 100.0


@pytest.mark.parametrize("where", ["ids", "places"])
def test_a_reference_counts_passages_as_its_record_does(tmp_path, where):
    """In the prompt they stood the other way round."""
    names = ["d1", "d2"] if where == "ids" else ["1", "2"]
    line = {"id": "q", "output": "salt [2]", "output_tokens": 3, "contexts": names[::-1], "metadata": {}}
    contexts = [{"id": name, "text": "x"} if where == "ids" else "x" for name in names]
    record = {"id": "q", "query": "?", "contexts": contexts, "reference": "salt [1]"}
    files = [write_jsonl(tmp_path / f"{i}.jsonl", [row]) for i, row in enumerate([line, record])]
    found = evaluate(files[0], references=files[1])
    assert found.scores["citation_recall"].mean == 100.0


def test_of_a_structured_answer_the_answer_is_scored(tmp_path):
    line = {"id": "q0", "output": '{"answer": "salt", "sources": ["d1"]}', "metadata": {"reference": "salt"}}
    line |= {"contexts": ["d1", "d2"], "parsed": json.loads(line["output"])}
    line["metadata"]["gold_ids"] = ["d1"]
    found = evaluate(write_jsonl(tmp_path / "out.jsonl", [line, {**line, "id": "q1", "parsed": None}]))
    assert found.scores["exact_match"].mean == 50.0
    assert found.scores["citation_precision"].mean == 50.0


def test_of_several_structured_answers_the_first_is_scored(tmp_path):
    """In one file, `sampling.n` answers; in the other, the first of them alone."""
    first, second = ({"answer": answer, "sources": [source]} for answer, source in (("salt", "d1"), ("x", "d2")))
    line = {"id": "q0", "output": json.dumps(first), "valid": True, "contexts": ["d1", "d2"]}
    line["metadata"] = {"reference": "salt", "gold_ids": ["d1"]}
    one = write_jsonl(tmp_path / "one.jsonl", [line | {"parsed": first}])
    both = {"outputs": [json.dumps(first), json.dumps(second)], "parsed": [first, second]}
    found = evaluate(write_jsonl(tmp_path / "two.jsonl", [line | both]))
    assert found.scores == evaluate(one).scores
    assert found.scores["exact_match"].mean == found.scores["citation_precision"].mean == 100.0


def test_references_come_from_a_file_too(tmp_path):
    answers = write_jsonl(tmp_path / "out.jsonl", lines(["salt", "x"], metadata=[{}, {}]))
    given = write_jsonl(tmp_path / "in.jsonl", [{"id": "q0", "query": "?", "reference": "salt"}, {"query": "no id"}])
    found = evaluate(answers, references=given)
    assert (found.scores["f1"].mean, found.scores["f1"].count) == (100.0, 1)
    assert any("1 of 2 answers have no reference" in note and "q1" in note for note in found.notes)


def test_what_cannot_be_scored_is_counted_and_named(tmp_path):
    answers = referred(["a", "b", "c", "d"], [{"not": "a text"}, None, "c", 5])
    answers.append({"id": "q9", "error": {"type": "RecordError", "message": "no"}})
    found = evaluate(write_jsonl(tmp_path / "out.jsonl", answers))
    assert (found.records, found.failed, found.scores["f1"].count) == (4, 1, 2)
    notes = " | ".join(found.notes)
    assert "1 records have unusable references (q0:" in notes
    assert "2 of 4 answers have no reference" in notes
    assert "1 records failed, and are not scored (q9)" in notes


def test_of_two_answers_with_one_id_the_last_counts_and_a_note_says_so(tmp_path):
    old = [{"id": "a", "output": "x", "valid": False, "metadata": {}}, {"id": "b", "output": "x", "metadata": {}}]
    new = [{"id": "a", "output": "salt", "metadata": {"reference": "salt"}}]
    found = evaluate(write_jsonl(tmp_path / "out.jsonl", [*old, *new]))
    assert (found.records, found.scores["f1"].mean, found.scores["f1"].count) == (2, 100.0, 1)
    assert found.notes == [
        "1 of 2 answers have no reference, and are not scored against one (b)",
        "1 answers are replaced by later ones with the same id (a)",
    ]
    other = write_jsonl(tmp_path / "other.jsonl", new)
    compared = evaluate(other, against=str(tmp_path / "out.jsonl"))
    assert f"{tmp_path / 'out.jsonl'}: 1 answers are replaced by later ones with the same id (a)" in compared.notes


def test_structured_answers_that_are_not_valid_are_counted(tmp_path):
    whole = {"output": '{"answer": "salt"}', "valid": True, "parsed": {"answer": "salt"}}
    cut = {"output": '{"answer": "sa', "valid": False, "parsed": None}
    found = [{"id": f"q{i}", **(cut if i < 2 else whole), "metadata": {"reference": "salt"}} for i in range(5)]
    out = write_jsonl(tmp_path / "out.jsonl", found)
    other = write_jsonl(tmp_path / "other.jsonl", [*found[1:], {"id": "q0", "output": "salt", "metadata": {}}])
    both = evaluate(out, against=other).notes
    assert "2 of 5 structured answers are cut off or invalid, and are scored as text (q0, q1)" in both
    assert f"{other}: 1 of 4 structured answers are cut off or invalid, and are scored as text (q1)" in both
    fine = write_jsonl(tmp_path / "fine.jsonl", found[2:])
    assert not [note for note in evaluate(fine).notes if "structured" in note]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_invalid_answers_are_counted_in_tables_too(tmp_path, ending):
    shape = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    records = write_jsonl(tmp_path / "in.jsonl", [{"id": "q0", "query": "?", "reference": "salt"}])
    given = {
        "model": "demo",
        "input": records,
        "output": str(tmp_path / f"out.{ending}"),
        "structured": {"json_schema": shape},
        "sampling": {"max_new_tokens": 2},
    }
    generate(build_config(given, "config"))
    (note,) = [note for note in evaluate(str(tmp_path / f"out.{ending}")).notes if "structured" in note]
    assert note == "1 of 1 structured answers are cut off or invalid, and are scored as text (q0)"


def test_lines_of_openais_form_are_answers_too(tmp_path):
    body = {"choices": [{"message": {"content": "salt"}}]}
    answers = write_jsonl(tmp_path / "out.jsonl", [{"custom_id": "q0", "response": {"body": body}, "error": None}])
    given = write_jsonl(tmp_path / "in.jsonl", [{"id": "q0", "query": "?", "reference": "salt"}])
    assert evaluate(answers, references=given).scores["exact_match"].mean == 100.0


@pytest.mark.parametrize(
    ("content", "said"),
    [('{"id": "q1", "query": "a record"}\n', "not an output"), ("", "no answers"), ("[1]\n", "not a JSON object")],
)
def test_what_is_no_output_is_said_in_one_line(tmp_path, content, said):
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        evaluate(str(path))


def test_the_command_prints_one_object(tmp_path):
    answers = write_jsonl(tmp_path / "out.jsonl", referred(["Ann Smith", "1911", "salt", "x"]))
    done = CliRunner().invoke(app, ["evaluate", answers, "--against", answers, "--refusal", "^x$"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["scores"]["exact_match"]["mean"] == 75.0
    assert found["scores"]["refusals"]["mean"] == 25.0
    assert found["against"]["differences"]["f1"] == {"mean": 0.0, "low": 0.0, "high": 0.0, "count": 4}
    assert CliRunner().invoke(app, ["evaluate", answers, "--refusal", "("]).exit_code != 0


IDS = ["1", 1, 1.0]


@pytest.mark.parametrize("answered", IDS)
@pytest.mark.parametrize("given", IDS)
@pytest.mark.parametrize("name", ["ref.jsonl", "ref.parquet", "ref.json"])
def test_ids_match_however_they_are_written(tmp_path, answered, given, name):
    out = write_jsonl(tmp_path / "out.jsonl", [{"id": answered, "output": "salt", "metadata": {}}])
    records = [{"id": given, "reference": "salt"}, {"id": None, "reference": "pepper"}]
    if name.endswith("parquet"):
        as_parquet(tmp_path / name, records)
    elif name.endswith("json"):
        (tmp_path / name).write_text(json.dumps(records))
    else:
        write_jsonl(tmp_path / name, records)
    assert evaluate(out, references=str(tmp_path / name)).scores["exact_match"].mean == 100.0


def test_records_without_ids_match_by_the_ids_that_a_run_makes(tmp_path):
    records = [{"query": "a", "reference": "one"}, {}, {"id": "1", "query": "b", "reference": "two"}, {"query": "c"}]
    text = "\n".join(json.dumps(record) if record else "" for record in records)  # an empty line counts, too
    (tmp_path / "in.jsonl").write_text(text)
    raw = {"runner": "fake", "input": str(tmp_path / "in.jsonl"), "output": str(tmp_path / "out.jsonl")}
    generate(build_config(raw))
    lines = read_jsonl(tmp_path / "out.jsonl")
    assert [line["id"] for line in lines] == ["line-1", "1", "4"]
    write_jsonl(
        tmp_path / "out.jsonl",
        [{**line, "output": text} for line, text in zip(lines, ["one", "two", "x"], strict=True)],
    )
    found = evaluate(str(tmp_path / "out.jsonl"), references=str(tmp_path / "in.jsonl"))
    assert found.scores["exact_match"].mean == 100.0
    assert found.scores["exact_match"].count == 2


def evaluated(*args):
    return CliRunner().invoke(app, ["evaluate", *map(str, args)])


def test_a_note_says_that_references_are_matched_by_number(tmp_path):
    """The ids of these answers begin at 0 and are in `qid`, so each but the first meets the next one's reference."""
    out = write_jsonl(tmp_path / "out.jsonl", [{"id": i, "output": str(i)} for i in range(3)])
    given = write_jsonl(tmp_path / "ref.jsonl", [{"qid": i, "reference": str(i)} for i in range(3)])
    note = evaluate(out, references=given).notes[0]
    assert note.startswith("3 records of --references have no id, and are matched by their number in the file; if the")
    named = InputConfig(path=[given], columns={"id": "qid"})
    found = evaluate(out, references=named)
    assert (found.notes, found.scores["exact_match"].mean) == ([], 100.0)


def test_references_of_other_columns_are_mapped(tmp_path):
    out = write_jsonl(tmp_path / "out.jsonl", [{"id": "a", "output": "salt", "metadata": {}}])
    given = write_jsonl(tmp_path / "ref.jsonl", [{"qid": "a", "meta": {"gold": ["salt", "NaCl"]}}])
    done = evaluated(out, "--references", given, "--columns", "id=qid", "--columns", "reference=meta.gold")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["scores"]["exact_match"]["mean"] == 100.0


@pytest.mark.parametrize(
    ("record", "read"),
    [
        ({"id": "a", "question": "?", "answer": "salt"}, "answer as reference"),
        ({"qid": "a", "Ground_Truth": ["salt", "NaCl"]}, "qid as id, Ground_Truth as reference"),
        ({"id": "a", "answer": "pepper", "reference": "salt"}, ""),
        ({"id": "a", "uid": "b", "metadata": {"target": "salt"}}, "target as reference"),
        ({"id": "a", "answers": ["salt"], "answer": "pepper"}, ""),
    ],
)
def test_references_under_usual_names_are_read_with_a_note(tmp_path, record, read):
    out = write_jsonl(tmp_path / "out.jsonl", [{"id": "a", "output": "salt", "metadata": {}}])
    key = "id" if "id" in record else "qid"
    given = write_jsonl(tmp_path / "ref.jsonl", [record, {**record, key: "b"}, {key: "c"}])
    done = evaluated(out, "--references", given)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    note = f"--references: reads {read}, by the columns' names (--columns FIELD=NAME says otherwise)"
    assert (found["notes"], found["scores"]["exact_match"]["mean"]) == ([note] if read else [], 100.0)


def test_numbers_under_a_usual_name_of_ids_are_not_taken_where_the_records_numbers_are_ids_too(tmp_path):
    out = write_jsonl(tmp_path / "out.jsonl", [{"id": str(i), "output": str(i)} for i in (1, 2)])
    given = write_jsonl(tmp_path / "ref.jsonl", [{"uid": 2, "reference": "1"}, {"uid": 1, "reference": "2"}])
    found = evaluate(out, references=given)
    assert found.scores["exact_match"].mean == 100.0
    assert found.notes[0].startswith("2 records of --references have no id, and are matched by their number")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "none of its ids is one of"),
        (["--columns", "id=kye"], 'input.columns.id: .* none of the first 1 records has "kye"; did you mean "key"'),
        (["--columns", "idd=key"], '"columns.idd" is not a known key; did you mean "id"'),
        (["--columns", "id"], '"id" is not FIELD=NAME'),
    ],
)
def test_references_of_other_records_are_one_line(tmp_path, more, message):
    out = write_jsonl(tmp_path / "out.jsonl", [{"id": "a", "output": "salt", "metadata": {}}])
    given = write_jsonl(tmp_path / "ref.jsonl", [{"key": "a", "reference": "salt"}])
    done = evaluated(out, "--references", given, *more)
    assert isinstance(done.exception, ConfigError)
    assert re.search(message, str(done.exception))


def test_references_without_records_are_refused(tmp_path):
    out = write_jsonl(tmp_path / "out.jsonl", [{"id": "a", "output": "salt", "metadata": {}}])
    with pytest.raises(ConfigError, match=r"--references .*empty.jsonl: contains no records"):
        evaluate(out, references=write_jsonl(tmp_path / "empty.jsonl", []))


def test_a_record_with_an_answer_has_not_failed(tmp_path):
    """It has an error line of an earlier run, or of a later one."""
    answered = {"id": "a", "output": "salt", "metadata": {"reference": "salt"}}
    lines = [{"id": "a", "error": "no"}, answered, {"id": "b", "error": "no"}, {"id": "b", "error": "no"}]
    for given in (lines, lines[::-1]):
        found = evaluate(write_jsonl(tmp_path / "out.jsonl", given))
        assert (found.failed, found.scores["failed"].mean) == (1, 50.0)
        assert found.notes == ["1 records failed, and are not scored (b)"]


@pytest.mark.parametrize(
    "answers",
    [{"text": ["salt", "NaCl"], "answer_start": [3, 4]}, [{"text": "salt", "answer_start": 3}], {"text": "salt"}],
)
def test_squads_answers_are_references(tmp_path, answers):
    line = {"id": "a", "output": "salt", "metadata": {"answers": answers}}
    assert evaluate(write_jsonl(tmp_path / "out.jsonl", [line])).scores["exact_match"].mean == 100.0


@pytest.mark.parametrize("reference", [1911, 1911.0, [1911.0], {"text": [1911.0]}])
@pytest.mark.parametrize("output", ["1911", "In 1911."])
def test_a_whole_number_is_a_reference_however_pandas_writes_it(tmp_path, reference, output):
    line = {"id": "a", "output": output, "metadata": {"reference": reference}}
    found = evaluate(write_jsonl(tmp_path / "out.jsonl", [line]))
    assert found.scores["f1"].mean == (100.0 if output == "1911" else pytest.approx(200 / 3))


def test_a_decimal_is_a_reference_as_it_is_written(tmp_path):
    for output, reference, score in (("3.0", 3.0, 100.0), ("3.5", 3.5, 100.0), ("3", 3.5, 0.0)):
        line = {"id": "a", "output": output, "metadata": {"reference": reference}}
        assert evaluate(write_jsonl(tmp_path / "out.jsonl", [line])).scores["exact_match"].mean == score


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.jsonl.zst", "parts/"])
def test_answers_score_the_same_in_every_form_of_output(tmp_path, name):
    records = [{"id": f"q{i}", "query": f"who {i}?", "reference": f"who {i}?", "topic": {"a": [i]}} for i in range(3)]
    given = {"runner": "fake", "input": write_jsonl(tmp_path / "in.jsonl", [*records, {"id": "bad"}])}
    given |= {"structured": {"json_object": True}, "sampling": {"max_new_tokens": 60}}
    line, other = str(tmp_path / "lines.jsonl"), f"{tmp_path}/{name}"
    for output in (line, other):
        generate(build_config(given | {"output": output}))
    plain, found = evaluate(line), evaluate(other, against=line)
    assert (found.records, found.failed) == (3, 1)
    assert found.notes == [*plain.notes, f"{line}: {plain.notes[-1]}"]  # of structured answers
    assert found.scores == plain.scores
    assert found.scores["f1"].mean > 0
    assert found.pairs == 3
    assert found.speed is not None
    parts = sorted((tmp_path / name).glob("part-*"))
    assert evaluate(str(parts[0])).scores == plain.scores


@pytest.mark.parametrize(
    "more",
    [
        {"copied": [{"start": 0, "end": 4, "context": "d1"}]},
        {"logprobs": [{"token": "salt", "logprob": -0.1}]},
        {"outputs": ["[{}]", "[{}]"], "parsed": [[{}], [{}]]},
        {"parsed": [{"fact": "salt"}]},
    ],
)
@pytest.mark.parametrize("ending", ["jsonl", "txt"])
def test_an_output_of_a_single_record_is_read_as_one(tmp_path, more, ending):
    """A file of one object may also be a document with a list of records."""
    line = {"id": "a", "output": "salt", **more, "metadata": {"reference": "salt"}}
    found = evaluate(write_jsonl(tmp_path / f"out.{ending}", [line]))
    assert (found.records, found.scores["exact_match"].mean) == (1, 100.0)


@pytest.mark.parametrize("metadata", ["a text", '{"reference": "x"', ["reference"], 5, None])
def test_metadata_of_another_kind_holds_no_reference(tmp_path, metadata):
    found = evaluate(write_jsonl(tmp_path / "out.jsonl", [{"id": "q0", "output": "x", "metadata": metadata}]))
    assert "f1" not in found.scores
    assert any("1 of 1 answers have no reference" in note for note in found.notes)


@pytest.mark.parametrize(
    "changed", [{"output_tokens": "many"}, {"output_tokens": float("nan")}, {"contexts": 5}, {"contexts": "d3"}]
)
def test_a_field_that_another_program_changed_costs_its_score_only(tmp_path, changed):
    import pyarrow
    import pyarrow.parquet

    line = {"id": "a", "output": "salt [3]", "metadata": '{"reference": "salt [3]"}'} | changed
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([line]), tmp_path / "out.parquet")
    found = evaluate(str(tmp_path / "out.parquet"))
    assert found.scores["exact_match"].mean == 100.0
    assert "output_tokens" not in found.scores
    assert found.by_record["citation_precision"] == {"a": 100.0}, "the passage is numbered, as in the reference"


def as_cells(path, *records):
    """Write records as CSV, lists and objects as JSON."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(
            {key: cell if isinstance(cell, str) else json.dumps(cell) for key, cell in record.items()}
            for record in records
        )
    return str(path)


@pytest.mark.parametrize(
    "other", [{"reference": "lead"}, {"answers": ["salt", "lead"]}, {"metadata": {"answers": "x"}}]
)
def test_two_references_of_one_id_are_an_error_and_equal_ones_are_not(tmp_path, other):
    out = write_jsonl(tmp_path / "out.jsonl", [{"id": "a", "output": "salt", "metadata": {}}])
    same = [{"id": "a", "reference": "salt"}, {"id": "b"}, {"id": "a", "reference": ["salt"]}, {"id": "a"}]
    file = write_jsonl(tmp_path / "ref.jsonl", same)
    assert evaluate(out, references=file).scores["exact_match"].mean == 100.0
    write_jsonl(tmp_path / "ref.jsonl", [*same, {"id": "a", **other}])
    with pytest.raises(ConfigError, match=r'ref\.jsonl:5: id "a" has other references than at \S+ref\.jsonl:1;'):
        evaluate(out, references=file)


def test_gold_ids_of_one_id_that_differ_are_an_error(tmp_path):
    out = write_jsonl(tmp_path / "out.jsonl", [{"id": "a", "output": "salt", "metadata": {}}])
    file = write_jsonl(tmp_path / "ref.jsonl", [{"id": "a", "gold_ids": [1, 2]}, {"id": "a", "gold_ids": ["2", "1"]}])
    evaluate(out, references=file)
    write_jsonl(tmp_path / "ref.jsonl", [{"id": "a", "gold_ids": [1, 2]}, {"id": "a", "gold_ids": [3]}])
    with pytest.raises(ConfigError, match="has other gold ids than at"):
        evaluate(out, references=file)


@pytest.mark.parametrize("name", ["reference", "references", "answers"])
@pytest.mark.parametrize("given", [{"text": ["Paris is it"]}, ["Paris is it", "x"], "Paris is it"])
def test_references_in_cells_are_read_as_in_json(tmp_path, name, given):
    questions = as_cells(tmp_path / "in.csv", {"id": "a", "query": "Where?", name: given})
    out = tmp_path / "out.jsonl"
    generate(build_config({"runner": "fake", "input": questions, "output": str(out)}))
    (answer,) = read_jsonl(out)
    write_jsonl(out, [answer | {"output": "Paris is it"}])
    for references in (None, questions):
        assert evaluate(str(out), references=references).scores["exact_match"].mean == 100.0


@pytest.mark.parametrize("given", [[], "[ ]", {"text": [], "answer_start": []}, ""])
def test_no_reference_in_a_cell_is_none_as_in_json(tmp_path, given):
    questions = as_cells(tmp_path / "in.csv", {"id": "a", "query": "Where?", "reference": given})
    out = str(tmp_path / "out.jsonl")
    generate(build_config({"runner": "fake", "input": questions, "output": out}))
    for references in (None, questions):
        found = evaluate(out, references=references)
        assert "f1" not in found.scores
        assert found.notes == ["1 of 1 answers have no reference, and are not scored against one (a)"]


@pytest.mark.parametrize("name", ["reference", "references", "answers"])
def test_a_printed_python_list_is_no_reference(tmp_path, name):
    given = as_cells(tmp_path / "ref.csv", {"id": "a", name: "['salt', 'x']"})
    out = write_jsonl(tmp_path / "out.jsonl", lines(["salt"], metadata=[{name: "['salt', 'x']"}]))
    with pytest.raises(ConfigError, match=rf"ref\.csv: row 1: \"{name}\" is a text that looks like a list \(\['salt"):
        evaluate(out, references=given)
    found = evaluate(out)
    assert "f1" not in found.scores
    assert f'1 records have unusable references (q0: "{name}" is a text that looks like a list' in found.notes[0]


def test_of_an_answer_in_json_the_reference_is_a_text(tmp_path):
    answer = {"output": '["Ann", "Bob"]', "parsed": ["Ann", "Bob"], "valid": True}
    line = {"id": "a", **answer, "metadata": {"reference": '["Ann", "Bob"]'}}
    assert evaluate(write_jsonl(tmp_path / "out.jsonl", [line])).scores["exact_match"].mean == 100.0
