"""CSV as an output: every line comes back, and a killed run goes on."""

import csv

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.config.load import build_config
from ragspec.errors import ConfigError
from ragspec.json_text import dumps
from ragspec.outputs.csv_file import COLUMNS, CsvFile, cells_of, decoded, encoded, line_of
from ragspec.outputs.ledger import Finished
from ragspec.outputs.reader import answer_lines
from ragspec.quality.evaluate import evaluate
from ragspec.run.generate import generate
from tests.conftest import write_jsonl

TEXTS = ['say "a"\nor b, then\r\nc', "plain", "", 'é "', "\n", '"""']
RECORDS = [
    {
        "id": f"q{i}",
        "query": f"{text} ?",
        "contexts": [{"id": "d", "title": "T", "text": text or "x"}],
        "reference": "x",
    }
    for i, text in enumerate(TEXTS)
]


def run(tmp_path, records=RECORDS, **output):
    source = write_jsonl(tmp_path / "in.jsonl", records)
    raw = {"runner": "fake", "input": source, "output": {"path": str(tmp_path / "a.csv"), **output}}
    return generate(build_config(raw))


def rows(tmp_path):
    with open(tmp_path / "a.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_row_has_the_question_and_its_passages_where_they_are_asked_for(tmp_path):
    run(tmp_path, include=["query", "contexts"])
    found = rows(tmp_path)
    assert [row["query"] for row in found] == [record["query"] for record in RECORDS]
    assert found[0]["passages"] == dumps(RECORDS[0]["contexts"]).decode()
    run(tmp_path.joinpath("b"), include=[]) if (tmp_path / "b").mkdir() is None else None
    assert not {"query", "passages"} & set(rows(tmp_path / "b")[0])


def test_rows_behind_an_open_quote_are_not_removed(tmp_path):
    """A quote that a hand opens makes one row of all that follow, which looks like a torn last row."""
    run(tmp_path, [{"id": f"q{i}", "prompt": "Why?"} for i in range(6)])
    whole = [{**row, "output": "Ann.", "details": ""} for row in rows(tmp_path)]  # no cell needs quotes
    edited = encoded(whole[0]) + b"".join(encoded(row.values()) for row in whole)
    edited = edited.replace(b"\nq2,", b'\nq2,"', 1)
    (tmp_path / "a.csv").write_bytes(edited)
    with pytest.raises(ConfigError, match=r"a.csv:4: a quote that opens in this row is never closed"):
        run(tmp_path, [{"id": f"q{i}", "prompt": "Why?"} for i in range(6)])
    assert (tmp_path / "a.csv").read_bytes() == edited


@pytest.mark.parametrize("content", [b"id,answer\nq0,Ann", "id,output\nq0,Ann\n".encode("utf-16")])
def test_a_file_whose_header_is_not_ours_stays_as_it_is(tmp_path, content):
    run(tmp_path)
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ConfigError, match="its header is no longer ragspec's"):
        run(tmp_path)
    assert (tmp_path / "a.csv").read_bytes() == content


@pytest.mark.parametrize("torn", range(30, 300, 23))
def test_half_a_row_is_not_read_as_an_answer(tmp_path, torn):
    run(tmp_path)
    answers = [line["output"] for line in answer_lines(str(tmp_path / "a.csv"))]
    (tmp_path / "a.csv").write_bytes((tmp_path / "a.csv").read_bytes()[:-torn])
    found = []
    with pytest.raises(ConfigError, match=r"a.csv:\d+: the row that ends here is not whole .*cut off"):
        found.extend(line["output"] for line in answer_lines(str(tmp_path / "a.csv")))
    assert found == answers[: len(found)]


@pytest.mark.parametrize("torn", range(1, 300, 23))
def test_a_torn_row_is_answered_again(tmp_path, torn):
    run(tmp_path)
    whole = (tmp_path / "a.csv").read_bytes()
    (tmp_path / "a.csv").write_bytes(whole[:-torn])
    summary = run(tmp_path)
    assert summary.records + summary.skipped == len(RECORDS)
    assert 1 <= summary.records <= 3
    assert [row["id"] for row in rows(tmp_path)] == [record["id"] for record in RECORDS]


def test_failed_rows_are_retried_and_the_others_kept(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [{"id": "a", "query": ""}, {"id": "b", "query": "x"}])
    raw = {"runner": "fake", "input": source, "output": str(tmp_path / "a.csv")}
    assert generate(build_config(raw)).failed == 1
    assert "is empty" in rows(tmp_path)[0]["error"]
    summary = generate(build_config(raw), retry_failed=True)
    assert (summary.failed, summary.skipped) == (1, 1)
    assert sorted(row["id"] for row in rows(tmp_path)) == ["a", "b"]


def test_a_file_keeps_the_columns_it_has(tmp_path):
    run(tmp_path, RECORDS[:2])
    run(tmp_path, include=["query"])
    assert len(rows(tmp_path)) == len(RECORDS)
    assert "query" not in rows(tmp_path)[0]


@pytest.mark.parametrize(
    "change", [lambda text: text.replace(b",", b";"), lambda text: text.replace(b"output", b"answer")]
)
def test_a_file_that_a_spreadsheet_has_changed_is_left_alone(tmp_path, change):
    run(tmp_path, RECORDS[:3])
    path = tmp_path / "a.csv"
    changed = change(path.read_bytes())
    path.write_bytes(changed)
    with pytest.raises(ConfigError, match=r"a.csv: its header is no longer ragspec's"):
        run(tmp_path)
    assert path.read_bytes() == changed


def test_a_quote_within_a_cell_is_as_other_programs_read_it(tmp_path):
    run(tmp_path)
    path = tmp_path / "a.csv"
    edited = path.read_bytes().replace(b"q1,", b'q1",', 1)
    path.write_bytes(edited)
    assert [row["id"] for row in rows(tmp_path)] == ["q0", 'q1"', "q2", "q3", "q4", "q5"]
    assert run(tmp_path).skipped == len(TEXTS)
    assert path.read_bytes() == edited


def test_an_id_may_be_a_byte_order_mark(tmp_path):
    records = [{"id": "\ufeff", "query": "x"}, {"id": "\ufeffa", "query": "y"}]
    run(tmp_path, records)
    assert run(tmp_path, records).skipped == 2
    assert [line["id"] for line in answer_lines(str(tmp_path / "a.csv"))] == ["\ufeff", "\ufeffa"]


def test_a_file_that_csv_refuses_is_left_alone(tmp_path):
    run(tmp_path)
    path = tmp_path / "a.csv"
    edited = path.read_bytes().replace(b"q1,", b"q1\r,", 1)
    path.write_bytes(edited)
    with pytest.raises(ConfigError, match=r"a\.csv: cannot be read as CSV \(.*; edited\?\)"):
        run(tmp_path)
    assert path.read_bytes() == edited


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_an_answer_that_is_json_stays_a_text(tmp_path, name):
    records = [{"id": "q", "query": '{"a": [1, "\u00e9"]}', "contexts": []}]
    source = write_jsonl(tmp_path / "in.jsonl", records)
    output = {"path": str(tmp_path / name), "include": ["query", "contexts"]}
    raw = {"runner": "fake", "input": source, "output": output, "prompt": {"template": "{{ query }}"}}
    generate(build_config(raw | {"sampling": {"max_new_tokens": 200}}))
    (line,) = answer_lines(str(tmp_path / name))
    assert isinstance(line["output"], str)
    assert not line.get("passages")


def test_answers_in_csv_can_be_evaluated(tmp_path):
    run(tmp_path)
    assert evaluate(str(tmp_path / "a.csv")).scores["exact_match"].count == len(RECORDS)


@given(st.fixed_dictionaries({"id": st.text(min_size=1), "output": st.text(), "copied": st.lists(st.integers())}))
def test_a_line_comes_back(line):
    line |= {"prompt_tokens": 3, "latency_s": 0.5, "contexts": ["1"], "metadata": {"a": [None]}, "fingerprint": "f"}
    found = line_of(dict(zip(COLUMNS, decoded(encoded(cells_of(line, COLUMNS))), strict=True)))
    clean = {
        key: value.encode(errors="replace").decode() if isinstance(value, str) else value for key, value in line.items()
    }
    assert found == clean
    assert Finished.of(dumps(found)) == Finished.of(dumps(clean))


@pytest.mark.parametrize("path", ["a.csv.gz", "a.csv/", "s3://bucket/a.csv"])
def test_csv_is_one_local_file(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot write \.csv"):
        generate(build_config({"runner": "fake", "input": "x.jsonl", "output": path}))


@pytest.mark.parametrize("format", ["jsonl", "openai"])
def test_csv_is_not_the_name_of_lines(tmp_path, format):
    with pytest.raises(ConfigError, match=rf"output\.format: {format}, but .*a\.csv ends in \.csv"):
        run(tmp_path, format=format)


def test_an_empty_store_has_no_header(tmp_path):
    CsvFile(tmp_path / "a.csv").close()
    assert (tmp_path / "a.csv").read_bytes() == b""


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_rows_that_were_doubled_are_told(tmp_path, name):
    path = tmp_path / name
    assert not any("earlier line" in note for note in run(tmp_path, path=str(path)).notes)
    assert not any("earlier line" in note for note in run(tmp_path, path=str(path)).notes)
    path.write_bytes(path.read_bytes() * 2 if name == "a.jsonl" else path.read_bytes() + doubled_rows(path))
    again = run(tmp_path, path=str(path))
    assert again.skipped == 6
    assert [note for note in again.notes if "earlier line" in note] == [
        f"{path}: lines for a record that an earlier line has finished: 6; they stay, and are counted; delete them, or "
        "start over with --no-resume"
    ]


def doubled_rows(path):
    return path.read_bytes().split(b"\n", 1)[1]
