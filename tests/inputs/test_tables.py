"""Parquet, Arrow, CSV and several files: the same records whatever they are kept in, and one line for what is wrong."""

import csv
import json
from datetime import date, datetime, timedelta
from decimal import Decimal
from uuid import UUID

import pytest

from ragspec.config.load import build_config, load_config
from ragspec.config.places import ColumnNames, InputConfig
from ragspec.errors import ConfigError, RecordError
from ragspec.inputs.columns import Columns
from ragspec.inputs.files import digest, files_of, kind_of
from ragspec.inputs.opening import open_source
from ragspec.inputs.plain import plain
from ragspec.run.generate import generate
from ragspec.run.inspection import inspect
from tests.cli.test_cli import ragspec
from tests.conftest import SAMPLE, read_jsonl, write_jsonl

pa = pytest.importorskip("pyarrow")
RECORDS = read_jsonl(SAMPLE)[:6]
FIELDS = ("id", "query", "contexts")


def as_parquet(path, records):
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.Table.from_pylist(records), path, row_group_size=2)


def as_arrow(path, records, make=None):
    import pyarrow.ipc

    table = pa.Table.from_pylist(records)
    with pa.OSFile(str(path), "wb") as file, (make or pyarrow.ipc.new_file)(file, table.schema) as writer:
        writer.write_table(table, 2)


def as_stream(path, records):
    import pyarrow.ipc

    as_arrow(path, records, pyarrow.ipc.new_stream)


def as_delimited(path, records, delimiter=","):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, records[0], delimiter=delimiter)
        writer.writeheader()
        for record in records:
            writer.writerow({**record, "contexts": json.dumps(record["contexts"])})


def as_tsv(path, records):
    as_delimited(path, records, "\t")


MAKE = {
    "a.jsonl": write_jsonl,
    "a.parquet": as_parquet,
    "a.arrow": as_arrow,
    "a.ipc": as_stream,
    "a.csv": as_delimited,
    "a.tsv": as_tsv,
}


def rows(path, **more):
    with open_source(InputConfig(path=[str(path)] if not isinstance(path, list) else path, **more)) as source:
        return list(source)


def answers(path, tmp_path, **more):
    out = tmp_path / "out.jsonl"
    source = {"path": str(path), **more}
    config = build_config({"runner": "fake", "input": source, "output": str(out), "sampling": {"max_new_tokens": 60}})
    summary = generate(config, resume=False)
    lines = [{key: line[key] for key in ("id", "output", "contexts") if key in line} for line in read_jsonl(out)]
    return lines, summary


@pytest.mark.parametrize("name", MAKE)
def test_the_same_records_have_the_same_answers_whatever_they_are_kept_in(name, tmp_path):
    expected, _ = answers(SAMPLE, tmp_path)
    records = [{key: record[key] for key in FIELDS} for record in RECORDS]
    MAKE[name](tmp_path / name, records)
    found, summary = answers(tmp_path / name, tmp_path)
    assert found == expected[: len(RECORDS)]
    assert len(found) == 6
    assert summary.failed == 0
    renamed = [{"qid": r["id"], "question": {"text": r["query"]}, "contexts": r["contexts"]} for r in records]
    if name.endswith(("csv", "tsv")):
        renamed = [{**record, "question": json.dumps(record["question"])} for record in renamed]
    MAKE[name](tmp_path / name, renamed)
    found, _ = answers(tmp_path / name, tmp_path, columns={"id": "qid", "query": "question.text"})
    assert found == expected[: len(RECORDS)]


def test_rows_are_numbered_and_counted(tmp_path):
    as_parquet(tmp_path / "a.parquet", RECORDS)
    found = rows(tmp_path / "a.parquet")
    assert [row.number for row in found] == [1, 2, 3, 4, 5, 6]
    with open_source(str(tmp_path / "a.parquet")) as source:
        assert source.count() == 6
        assert source.where(3) == f"{tmp_path / 'a.parquet'}: row 3"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_rows_of_delimited_files_are_counted_as_they_are_read(tmp_path, end):
    lines = ["id,query", "a,plain", "", 'b,"two', 'lines, ""quoted"""', "c,it's 5\" wide", "d,a,b", "e,last"]
    path = tmp_path / "in.csv"
    path.write_bytes(end.join(lines).encode())
    with open_source(str(path)) as source:
        assert source.count() == len(list(source)) == source.count() == 5
    (tmp_path / "in.tsv").write_text("query\nwho?\nwhat?\n")
    with open_source(str(tmp_path / "in.tsv")) as source:
        assert source.count() == 2
    path.write_bytes(b"query\n" + b"a\n" * 10_000 + b"\xff\n")
    with open_source(str(path)) as source:
        assert source.count() is None


def test_several_files_are_one_input(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    as_parquet(tmp_path / "in" / "b.parquet", RECORDS[2:4])
    write_jsonl(tmp_path / "in" / "a.jsonl", RECORDS[:2])
    as_delimited(tmp_path / "in" / "deep" / "c.csv", [{key: RECORDS[4][key] for key in FIELDS}])
    (tmp_path / "in" / "README.md").write_text("not records")
    names = [str(tmp_path / "in" / name) for name in ("a.jsonl", "b.parquet", "deep/c.csv")]
    for given in (names, [str(tmp_path / "in")], [names[0], str(tmp_path / "in" / "*.parquet"), names[2]]):
        found = rows(given)
        assert [row.number for row in found] == [1, 2, 3, 4, 5]
        assert [row.value["id"] for row in found] == [record["id"] for record in RECORDS[:5]]
    assert files_of([str(tmp_path / "in" / "*.parquet")]) == [names[1]]
    with open_source(InputConfig(path=names)) as source:
        assert source.count() == 5
        list(source)
        assert [source.where(number) for number in (1, 2, 3, 5)] == [
            *(f"{names[0]}:1", f"{names[0]}:2", f"{names[1]}: row 1", f"{names[2]}: row 1"),
        ]
    with open_source(InputConfig(path=names[:2])) as source:
        assert source.count() == 4


def test_a_run_over_tables_goes_on_where_it_stopped(tmp_path):
    as_parquet(tmp_path / "a.parquet", RECORDS)
    raw = {"runner": "fake", "input": str(tmp_path / "a.parquet"), "output": str(tmp_path / "out.jsonl")}
    assert generate(build_config(raw), limit=2).records == 2
    done = generate(build_config(raw))
    assert (done.skipped, done.records) == (2, 4)
    changed = {**raw, "input": {"path": raw["input"], "columns": {"query": "id"}}}
    with pytest.raises(ConfigError, match="columns"):
        generate(build_config(changed))


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (Decimal("1.50"), "1.50"),
        (datetime(2024, 5, 1, 12), "2024-05-01T12:00:00"),
        (date(2024, 5, 1), "2024-05-01"),
        (timedelta(minutes=2), 120.0),
        (b"\x00\xff", "AP8="),
        (float("nan"), None),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        ({1: (True, [None])}, {"1": [True, [None]]}),
    ],
)
def test_every_type_has_one_form_in_json(value, form):
    assert plain(value) == form


def test_a_value_without_a_form_is_that_rows_error():
    with pytest.raises(TypeError, match="of type object"):
        plain({"a": object()})


@pytest.mark.parametrize("name", ["a.parquet", "a.csv"])
def test_a_column_that_is_not_there_names_those_that_are(name, tmp_path):
    MAKE[name](tmp_path / name, [{key: record[key] for key in FIELDS} for record in RECORDS])
    with pytest.raises(ConfigError, match=r'input\.columns\.query: .* has no column "question"; it has id, query, con'):
        rows(tmp_path / name, columns={"query": "question"})


def test_a_field_that_a_record_lacks_is_that_records_error(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"q": {"text": "Why?"}}, {"q": "Why?"}, {"other": 1}])
    found = rows(tmp_path / "a.jsonl", columns={"query": "q.text"})
    assert found[0].value == {"q": {"text": "Why?"}, "query": "Why?"}
    assert str(found[1].value) == 'input.columns.query: the record has no "q.text"; it has q'
    assert isinstance(found[2].value, RecordError)


def test_a_mapped_field_takes_the_place_of_its_namesake():
    assert Columns({"query": "q"}).of({"q": "a", "query": "b", "x": 1}) == {"x": 1, "query": "a"}
    value = {"a.b": "whole", "a": {"b": "inner"}}
    assert Columns({"query": "a.b"}).of(value) == {"a": {"b": "inner"}, "query": "whole"}


def test_a_parquet_file_cut_off_is_one_line(tmp_path):
    as_parquet(tmp_path / "a.parquet", RECORDS)
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"a\.parquet: cannot be read as parquet"):
        rows(tmp_path / "a.parquet")


def test_ragged_rows_of_a_csv_are_error_lines(tmp_path):
    text = 'id,query\n1,"two\nlines"\n2\n\n3,plain,more\n4,last\n'
    (tmp_path / "a.csv").write_text(text)
    found = rows(tmp_path / "a.csv")
    assert [row.number for row in found] == [1, 2, 3, 4]
    assert found[0].value == {"id": "1", "query": "two\nlines"}
    assert str(found[1].value) == "has 1 cells, the header has 2"
    assert str(found[2].value) == "has 3 cells, the header has 2"
    assert found[3].value == {"id": "4", "query": "last"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["no-such.parquet"], "no-such.parquet: no such file"),
        (["no-such.csv"], "no-such.csv: no such file"),
        (["none/*.jsonl"], "input: no file matches none/*.jsonl"),
        (["empty"], "empty: the folder has no file that could be records"),
    ],
)
def test_what_is_not_there_is_one_line(given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        rows(given)
    assert str(caught.value).startswith(message)


def test_a_saved_dataset_is_an_input(tmp_path):
    datasets = pytest.importorskip("datasets")
    records = [{key: record[key] for key in FIELDS} for record in RECORDS]
    expected, _ = answers(SAMPLE, tmp_path)
    datasets.Dataset.from_list(records).save_to_disk(str(tmp_path / "one"))
    found, _ = answers(tmp_path / "one", tmp_path)
    assert found == expected[:6]
    with open_source(str(tmp_path / "one")) as source:
        assert source.count() == 6
    renamed = [{"qid": r["id"], "q": {"text": r["query"]}, "contexts": r["contexts"]} for r in records]
    splits = {"dev": datasets.Dataset.from_list(renamed), "test": datasets.Dataset.from_list(renamed[:2])}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "two"))
    found, _ = answers(tmp_path / "two", tmp_path, split="test", columns={"id": "qid", "query": "q.text"})
    assert found == expected[:2]
    with pytest.raises(ConfigError, match=r"input\.split: missing; .*two has dev, test"):
        rows(tmp_path / "two")
    with pytest.raises(ConfigError, match=r'input\.columns\.query: .* has no column "question"; it has qid'):
        rows(tmp_path / "two", split="dev", columns={"query": "question"})


def test_a_dataset_of_files_is_streamed(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "data").mkdir()
    as_parquet(tmp_path / "data" / "train-00000.parquet", [{key: record[key] for key in FIELDS} for record in RECORDS])
    found = rows(tmp_path / "data", format="dataset", split="train")
    assert [row.value["id"] for row in found] == [record["id"] for record in RECORDS]
    with pytest.raises(ConfigError, match="the dataset cannot be opened"):
        rows(tmp_path / "nowhere", format="dataset")


def test_a_flag_or_an_override_changes_a_part_of_the_section(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("runner: fake\ninput: {path: a.parquet, columns: {query: question}}")
    assert load_config(str(config), input="b.parquet")[0].input == InputConfig(
        path=["b.parquet"], columns=ColumnNames(query="question")
    )
    config.write_text("runner: fake\ninput: a.parquet")
    assert load_config(str(config), ["input.columns.query=q"])[0].input == InputConfig(
        path=["a.parquet"], columns=ColumnNames(query="q")
    )


def test_the_kind_of_a_file_is_told_by_its_name():
    names = ["a.jsonl.gz", "a.JSONL.zst", "a.txt", "a.Parquet", "a.tsv", "x.feather", "-"]
    assert [kind_of(name) for name in names] == ["jsonl", "jsonl", "jsonl", "parquet", "tsv", "arrow", "jsonl"]


def test_an_inputs_hash_is_that_of_its_files(tmp_path):
    import hashlib

    (tmp_path / "a.jsonl").write_bytes(b"one\n")
    (tmp_path / "b.jsonl").write_bytes(b"two\n")
    assert digest(InputConfig(path=[str(tmp_path)])) == hashlib.sha256(b"one\ntwo\n").hexdigest()
    assert digest(InputConfig(path=["-"])) is None
    assert digest(InputConfig(path=[str(tmp_path / "no.jsonl")])) is None


def test_inspect_shows_columns_and_the_mapping_to_write(tmp_path):
    as_parquet(tmp_path / "a.parquet", [{"qid": "1", "question": "Why?", "passages": ["one"], "n": 3}])
    found = inspect(InputConfig(path=[str(tmp_path / "a.parquet")]))
    assert found.columns == {"qid": "text", "question": "text", "passages": "list of texts", "n": "number"}
    assert found.mapping == {"id": "qid", "query": "question", "contexts": "passages"}
    assert (found.rows, found.record) == (1, None)
    mapped = inspect(InputConfig(path=[str(tmp_path / "a.parquet")], columns=found.mapping))
    assert (mapped.record.id, mapped.record.query, mapped.record.contexts[0].text) == ("1", "Why?", "one")
    assert mapped.mapping == {}


def test_inspect_prints_a_section_that_can_be_pasted(tmp_path):
    path = tmp_path / "a.parquet"
    as_parquet(path, [{"qid": f"q{i}", "question": f"Why {i}?", "passages": ["Because."]} for i in range(3)])
    shown = ragspec("inspect", path)
    assert shown.returncode == 0, shown.stderr
    assert "question: text" in shown.stderr
    config = tmp_path / "c.yaml"
    config.write_text(shown.stdout + "runner: fake\n")
    done = ragspec("generate", "-c", config)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == ["q0", "q1", "q2"]
    seen = ragspec("inspect", SAMPLE)
    assert (seen.returncode, seen.stdout) == (0, "")
    assert "first record, contexts: 2" in seen.stderr


def test_inspect_says_why_the_first_row_is_no_record(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"title": "x"}])
    seen = ragspec("inspect", tmp_path / "a.jsonl")
    assert seen.returncode == 1
    assert "the first row is not a record" in seen.stderr
    assert 'the record needs "query", "messages" or "prompt"' in " ".join(seen.stderr.split())


@pytest.mark.parametrize("path", ["", [], [""]])
def test_an_empty_path_is_refused(path):
    with pytest.raises(ConfigError, match=r"input\.path"):
        build_config({"runner": "fake", "input": {"path": path}})


def test_an_output_inside_the_inputs_folder_is_refused_before_anything_is_written(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", RECORDS)
    config = build_config({"runner": "fake", "input": str(tmp_path), "output": str(tmp_path / "out.jsonl")})
    with pytest.raises(ConfigError, match="lies in the input's folder"):
        generate(config)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_hidden_folders_are_not_read(tmp_path):
    for folder in ("data", "data/.ipynb_checkpoints", "data/_temporary"):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "a.jsonl", RECORDS)
    assert files_of([str(tmp_path / "data")]) == [str(tmp_path / "data" / "a.jsonl")]


def test_a_file_that_is_missing_among_several_is_known_at_once(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", RECORDS)
    with pytest.raises(ConfigError, match=r"b\.jsonl: no such file"):
        open_source(InputConfig(path=[str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]))


def test_an_empty_cell_is_no_context_and_no_error(tmp_path):
    (tmp_path / "a.csv").write_text('question,passages\nWhy?,"[""one""]"\nWho?,\n')
    found, summary = answers(tmp_path / "a.csv", tmp_path, columns={"query": "question", "contexts": "passages"})
    assert [line["contexts"] for line in found] == [["1"], []]
    assert summary.failed == 0


def test_a_mapped_prompt_is_the_prompt_whatever_else_a_row_has(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"full": "all of it", "query": "Why?"}])
    (row,) = rows(tmp_path / "a.jsonl", columns={"prompt": "full"})
    assert row.value == {"query": None, "prompt": "all of it"}


def test_what_cannot_be_read_of_a_table_is_that_rows_error(tmp_path):
    import pyarrow.parquet

    offsets = pa.array([0, 4, 6, 10], pa.int32()).buffers()[1]
    text = pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"Why?\xff\xfeWho?"))
    pyarrow.parquet.write_table(pa.table({"query": text}), tmp_path / "a.parquet")
    found = rows(tmp_path / "a.parquet")
    assert [row.value["query"] for row in (found[0], found[2])] == ["Why?", "Who?"]
    assert "cannot be read" in str(found[1].value)


@pytest.mark.parametrize("name", ["a.csv.gz", "a.parquet.zst"])
def test_only_jsonl_is_read_packed(name, tmp_path):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ConfigError, match="only JSONL can be read compressed"):
        rows(tmp_path / name)


def test_keys_of_datasets_are_refused_for_files(tmp_path):
    with pytest.raises(ConfigError, match="split: is for datasets"):
        build_config({"runner": "fake", "input": {"path": "a.parquet", "split": "test"}})


def test_inspect_suggests_only_what_makes_a_record(tmp_path):
    as_parquet(tmp_path / "a.parquet", [{"id": "1", "question": "Why?", "context": "one text"}])
    assert inspect(InputConfig(path=[str(tmp_path / "a.parquet")])).mapping == {"query": "question"}
