"""`ragspec inspect`, and inputs whose columns have other names: what is suggested is what runs."""

import pytest
import yaml
from typer.testing import CliRunner

from ragspec.cli import app
from ragspec.errors import ConfigError
from tests.conftest import read_jsonl, write_jsonl

CSV = 'question,passage,answer\nWho built it?,"Ann built it, alone.",Ann\nWhen?,"In 1871.",1871\n'
NESTED = {
    "qid": "a",
    "question": "Who?",
    "docs": [{"key": "k1", "body": "Ann built it."}, {"key": "k2", "body": "No."}],
}
KNOWN = ["--columns", "query=question", "--columns", "contexts.text=body", "--columns", "contexts=docs"]


def invoke(*args, **given):
    return CliRunner().invoke(app, [*map(str, args)], **given)


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "q.csv"
    path.write_text(CSV)
    return path


def answered(tmp_path, path, *flags):
    include = ["--include", "query", "--include", "contexts"]
    done = invoke("generate", "--runner", "fake", "-i", path, "-o", tmp_path / "o.jsonl", *include, *flags)
    lines = [line for line in read_jsonl(tmp_path / "o.jsonl") if "output" in line]
    return done, [(line["query"], [passage["text"] for passage in line["passages"]]) for line in lines]


def test_a_suggestion_can_be_pasted_as_flags_and_as_a_config(tmp_path, table):
    shown = invoke("inspect", table)
    flags = shown.stderr.split("or --columns ")[1].partition(":")[0].split(" --columns ")
    assert flags == ["query=question", "contexts=passage", "reference=answer"]
    config = yaml.safe_load(shown.stdout)
    assert config["input"]["columns"] == dict(each.split("=") for each in flags)
    again = invoke("inspect", table, *[part for each in flags for part in ("--columns", each)])
    assert "first record, query: Who built it?" in again.stderr
    assert "1: Ann built it, alone." in again.stderr


def test_a_mapping_is_previewed(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [NESTED])
    assert "k" not in invoke("inspect", path, *KNOWN).stderr.rsplit("contexts: 2", 1)[1], "no id is mapped"
    assert "  k1: Ann built it." in invoke("inspect", path, *KNOWN, "--columns", "contexts.id=key").stderr
    wrong = invoke("inspect", path, "--columns", "query=quest").exception
    assert isinstance(wrong, ConfigError)
    assert 'none of the first 1 records has "quest"; did you mean "question"?' in str(wrong)


def test_obvious_columns_run_as_they_are(tmp_path, table):
    done, found = answered(tmp_path, table)
    assert found == [("Who built it?", ["Ann built it, alone."]), ("When?", ["In 1871."])]
    assert "note: " in done.stderr
    assert "reads question as query, passage as contexts, answer as reference" in done.stderr
    assert read_jsonl(tmp_path / "o.jsonl")[0]["metadata"] == {"reference": "Ann"}


def test_nested_passages_run_as_they_are(tmp_path):
    _, found = answered(tmp_path, write_jsonl(tmp_path / "d.jsonl", [NESTED]))
    assert found == [("Who?", ["Ann built it.", "No."])]


@pytest.mark.parametrize(
    "records",
    [
        [{"query": "Who?", "passages": [3]}],  # runs without: passages are metadata
        [{"question": "Who?"}, {"query": "Why?"}],
        [{"prompt": "Who?", "question": "x"}],
        [{"body": {"prompt": "Who?"}, "custom_id": "a"}],
    ],
)
def test_what_runs_without_a_mapping_gets_none(tmp_path, records):
    done, found = answered(tmp_path, write_jsonl(tmp_path / "d.jsonl", records))
    assert "by the columns' names" not in done.stderr
    assert all(not passages for _, passages in found)


def test_a_mapping_that_is_given_is_the_one(tmp_path, table):
    done, found = answered(tmp_path, table, "--columns", "query=passage")
    assert found[1] == ("In 1871.", [])
    assert "by the columns' names" not in done.stderr


def test_a_pipe_is_not_read_ahead_for_names():
    done = invoke("generate", "--runner", "fake", "-i", "-", input=CSV)
    assert "no record can have a prompt" in str(done.exception) + done.output


def test_kinds_of_nested_lists_are_written_in_the_plural(tmp_path):
    record = {"query": "q", "a": [["x"]], "b": [[{"x": 1}]], "c": ["x"], "d": [None], "e": [1, "x"], "f": [[1, "x"]]}
    shown = invoke("inspect", write_jsonl(tmp_path / "d.jsonl", [record])).stderr.splitlines()
    assert [line.split(": ")[1] for line in shown if line[:3] in {f"  {name}" for name in "abcdef"}] == [
        "list of lists of texts",
        "list of lists of objects",
        "list of texts",
        "list of nothing",
        "list",
        "list of lists",
    ]


def test_a_plan_reads_obvious_columns_too(tmp_path, table, monkeypatch):
    monkeypatch.setenv("RAGSPEC_CACHE", str(tmp_path / "cache"))
    done = invoke("plan", "--runner", "fake", "-i", table, "--format", "csv")
    assert "reads question as query, passage as contexts" in done.stderr
    assert "records,2," in done.stdout


def test_retrieve_reads_obvious_columns_too(tmp_path):
    pytest.importorskip("lancedb")
    (tmp_path / "a.txt").write_text("The mill was built in 1871.")
    assert invoke("index", tmp_path / "a.txt", "-o", tmp_path / "index").exit_code == 0
    path = write_jsonl(tmp_path / "q.jsonl", [{"qid": "a", "question": "When was the mill built?"}])
    done = invoke("retrieve", "--index", tmp_path / "index", path, "-o", tmp_path / "found.jsonl")
    assert "reads qid as id, question as query" in done.stderr
    (line,) = read_jsonl(tmp_path / "found.jsonl")
    assert [passage["text"] for passage in line["contexts"]] == ["The mill was built in 1871."]
    _, found = answered(tmp_path, tmp_path / "found.jsonl")
    assert found == [("When was the mill built?", ["The mill was built in 1871."])]
