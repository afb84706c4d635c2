"""Parquet, Arrow, CSV and several files: the same records whatever they are kept in, and one line for what is wrong."""

import csv
import json
from datetime import date, datetime, timedelta
from decimal import Decimal
from uuid import UUID

import pytest

from ragspec.config.io import ColumnNames, InputConfig
from ragspec.config.load import build_config, load_config
from ragspec.errors import ConfigError, RecordError
from ragspec.inputs.base import plain
from ragspec.inputs.columns import Columns
from ragspec.inputs.record import parse_record
from ragspec.inputs.sources import MemorySource, digest, files_of, kind_of, open_source
from ragspec.run.generate import generate
from ragspec.run.inspect import inspect
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


@pytest.mark.parametrize("saved", [True, False])
def test_a_datasets_times_and_binary_data_are_those_of_its_files(tmp_path, saved):
    datasets = pytest.importorskip("datasets")
    import pyarrow.parquet

    times = pa.array([1, None], pa.time64("ns"))
    table = pa.table({"query": [b"Why?", b"\xff"], "at": pa.array([NS, 0], pa.timestamp("ns", "UTC")), "t": times})
    (tmp_path / "data").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "data" / "a.parquet")
    expected = [row.value for row in rows(tmp_path / "data" / "a.parquet")]
    assert expected[0] == {"query": "Why?", "at": "2024-05-01T12:00:00.123456789+00:00", "t": "00:00:00.000000001"}
    if saved:
        datasets.Dataset(table).save_to_disk(str(tmp_path / "saved"))
        found = rows(tmp_path / "saved")
    else:
        found = rows(tmp_path / "data", format="dataset", split="train")
    assert [row.value for row in found] == expected
    assert [row.number for row in found] == [1, 2]


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
    names = ["a.jsonl.gz", "a.JSONL.XZ", "a.txt", "a.Parquet", "a.tsv.Bz2", "x.feather", "-", "a.json"]
    kinds = ["jsonl", "jsonl", "text", "parquet", "tsv", "arrow", "jsonl", "json"]
    assert [kind_of(name) for name in names] == kinds


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
    with pytest.raises(ConfigError, match="is inside the input's folder"):
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


def test_keys_of_datasets_are_refused_for_files(tmp_path):
    with pytest.raises(ConfigError, match="split: is for datasets"):
        build_config({"runner": "fake", "input": {"path": "a.parquet", "split": "test"}})


def test_inspect_suggests_only_what_makes_a_record(tmp_path):
    as_parquet(tmp_path / "a.parquet", [{"id": "1", "question": "Why?", "context": "one text"}])
    mapping = inspect(InputConfig(path=[str(tmp_path / "a.parquet")])).mapping
    assert mapping == {"query": "question", "contexts": "context"}
    as_parquet(tmp_path / "a.parquet", [{"id": "1", "question": "Why?", "context": 3}])
    assert inspect(InputConfig(path=[str(tmp_path / "a.parquet")])).mapping == {"query": "question"}


# -- text stays text ---------------------------------------------------------------------------------------------------

CELLS = ["[1]", '{"a":1}', "[]", '["x"]', "true", "null", "NaN", "1.0", "007", " x "]


@pytest.mark.parametrize("make", [as_delimited, as_tsv])
@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_of_text_is_that_text_whatever_it_looks_like(tmp_path, make, cell):
    make(tmp_path / "a", [{"id": cell, "query": cell, "reference": cell, "contexts": ["one"]}])
    with open_source(InputConfig(path=[str(tmp_path / "a")])) as source:
        (row,) = source
    assert row.value == {"id": cell, "query": cell, "reference": cell, "contexts": ["one"]}
    make(tmp_path / "a", [{"qid": cell, "q": cell, "p": cell, "contexts": ["one"]}])
    for mapping in ({"id": "qid", "query": "q"}, {"id": "qid", "prompt": "p"}, {"id": "qid", "reference": "p"}):
        (row,) = rows(tmp_path / "a", columns=mapping)
        assert [row.value[ours] for ours in mapping] == [cell] * 2


def test_a_cell_holds_json_where_a_text_is_not_meant(tmp_path):
    cells = {
        "contexts": ["one"],
        "messages": [{"role": "user", "content": "Why?"}],
        "metadata": {"a": [1]},
        "references": ["a", "b"],
        "answers": {"text": ["a"]},
        "gold_ids": ["d1"],
    }
    with open(tmp_path / "a.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(cells)
        writer.writerow(map(json.dumps, cells.values()))
        writer.writerow(["plain", "", "", "[1]", "[2]", ""])
    first, second = rows(tmp_path / "a.csv")
    assert first.value == cells
    assert second.value == {**dict.fromkeys(cells), "contexts": "plain", "references": "[1]", "answers": "[2]"}


def test_json_text_in_a_column_of_parquet_is_read_where_a_list_is_meant(tmp_path):
    as_parquet(tmp_path / "a.parquet", [{"query": "[1]", "contexts": '["one"]', "note": "[2]"}])
    assert rows(tmp_path / "a.parquet")[0].value == {"query": "[1]", "contexts": ["one"], "note": "[2]"}


BINARY = ["binary", "large_binary", "binary_view", "dictionary", "fixed"]


def as_binary(kind, values):
    types = {"binary": pa.binary(), "large_binary": pa.large_binary(), "binary_view": pa.binary_view()}
    if kind == "fixed":
        return pa.array(values, pa.binary(len(values[0])))
    found = pa.array(values, types.get(kind, pa.binary()))
    return found.dictionary_encode() if kind == "dictionary" else found


@pytest.mark.parametrize("kind", BINARY)
def test_binary_data_is_text_where_it_is_utf8(tmp_path, kind):
    import pyarrow.feather
    import pyarrow.parquet

    columns = {
        name: as_binary(kind, [text.encode(), b"\xff\xfe"[: len(text.encode())]])
        for name, text in {"id": "a1", "query": "Q?", "note": "é"}.items()
    }
    table = pa.table({name: column[:1] for name, column in columns.items()})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert rows(tmp_path / "a.parquet")[0].value == {"id": "a1", "query": "Q?", "note": "é"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", b"\xff"),
        ("query", b"\xff"),
        ("prompt", b"q\xff"),
        ("reference", b"\xff"),
        ("answers", [b"yes", b"\xff"]),
        ("contexts", [b"\xff"]),
        ("contexts", [{"text": b"\xff"}]),
        ("contexts", [{"text": b"x", "title": b"\xff"}]),
        ("contexts", [{"text": b"x", "id": b"\xff"}]),
        ("messages", [{"role": "user", "content": b"\xff"}]),
    ],
)
def test_binary_data_that_is_no_text_is_that_records_error_where_text_is_read(tmp_path, field, value):
    record = {"id": "a", "query": "Why?", field: value}
    if field in ("prompt", "messages"):
        del record["query"]
    as_parquet(tmp_path / "a.parquet", [record])
    (row,) = rows(tmp_path / "a.parquet")
    with pytest.raises(RecordError, match="binary data that is not UTF-8"):
        parse_record(row.value, 1)


def test_binary_data_that_is_no_text_is_base64_in_metadata(tmp_path):
    found = [{"query": "Why?", "hash": b"\x00\xff", "contexts": [{"text": "one", "vector": b"\xff"}]}]
    as_parquet(tmp_path / "a.parquet", found)
    (row,) = rows(tmp_path / "a.parquet")
    record = parse_record(row.value, 1)
    assert record.metadata == {"hash": "AP8="}
    assert json.loads(row.raw)["hash"] == "AP8="


def test_a_binary_prompt_reaches_the_model_as_text(tmp_path):
    as_parquet(tmp_path / "a.parquet", [{"id": b"a", "query": "日本?".encode()}, {"id": b"b", "query": b"q\xff"}])
    lines, summary = answers(tmp_path / "a.parquet", tmp_path)
    assert lines[0]["id"] == "a"
    assert "日本?" in lines[0]["output"]
    assert summary.failed == 1


@pytest.mark.parametrize("make", ["parquet", "arrow", "struct", "csv", "tsv"])
def test_two_columns_of_one_name_are_one_line(tmp_path, make):
    import pyarrow.ipc
    import pyarrow.parquet

    path = tmp_path / "a"
    table = pa.table([["x"], ["y"]], names=["query", "query"])
    if make == "struct":
        kind = pa.struct([pa.field("query", pa.string()), pa.field("query", pa.string())])
        inner = pa.StructArray.from_arrays([pa.array(["x"]), pa.array(["y"])], fields=list(kind))
        table = pa.table({"id": ["1"], "all": pa.ListArray.from_arrays([0, 1], inner)})
    if make == "parquet":
        pyarrow.parquet.write_table(table, path)
    elif make in ("arrow", "struct"):
        with pa.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    else:
        path.write_text("id,query,query\n1,x,y\n".replace(",", "\t" if make == "tsv" else ","))
    with pytest.raises(ConfigError, match='two columns are called "query"; rename one of them'):
        rows(path)


NS = 1_714_564_800_123_456_789  # 2024-05-01T12:00:00.123456789
TIMES = [
    (pa.timestamp("ns"), NS, "2024-05-01T12:00:00.123456789"),
    (pa.timestamp("ns"), NS - 789, "2024-05-01T12:00:00.123456"),
    (pa.timestamp("ns"), NS - 123_456_789, "2024-05-01T12:00:00"),
    (pa.timestamp("ns"), -1, "1969-12-31T23:59:59.999999999"),
    (pa.timestamp("ns", "UTC"), NS, "2024-05-01T12:00:00.123456789+00:00"),
    (pa.timestamp("ns", "Europe/Berlin"), NS, "2024-05-01T14:00:00.123456789+02:00"),
    (pa.timestamp("us", "+05:30"), NS // 1000, "2024-05-01T17:30:00.123456+05:30"),
    (pa.timestamp("s"), -62_198_755_200, "-0001-01-01T00:00:00"),
    (pa.timestamp("s"), -62_167_219_200, "0000-01-01T00:00:00"),
    (pa.timestamp("us"), 2**63 - 1, "+294247-01-10T04:00:54.775807"),
    (pa.timestamp("us", "Asia/Tokyo"), 2**63 - 1, "+294247-01-10T04:00:54.775807+00:00"),
    (pa.timestamp("ms"), NS // 10**6, "2024-05-01T12:00:00.123000"),
    (pa.date32(), 19_844, "2024-05-01"),
    (pa.date32(), 2_932_897, "+10000-01-01"),
    (pa.date64(), 86_400_000, "1970-01-02"),
    (pa.time64("ns"), 43_200_000_000_001, "12:00:00.000000001"),
    (pa.time64("us"), 1_500_000, "00:00:01.500000"),
    (pa.time32("s"), 86_399, "23:59:59"),
    (pa.duration("s"), 120, 120.0),
    (pa.duration("ns"), 1, 1e-9),
    (pa.duration("ns"), 2**62 + 1, "PT4611686018.427387905S"),
    (pa.duration("ns"), -(2**62) - 1, "-PT4611686018.427387905S"),
    (pa.duration("s"), 2**60, "PT1152921504606846976S"),
]


@pytest.mark.parametrize(("kind", "value", "told"), TIMES, ids=str)
@pytest.mark.parametrize("shape", ["plain", "list", "struct", "map", "dictionary"])
def test_times_keep_every_digit_their_zone_and_any_year(tmp_path, kind, value, told, shape):
    import pyarrow.ipc

    column = pa.array([value, None], kind)
    column, expected = {
        "plain": lambda: (column, told),
        "list": lambda: (pa.ListArray.from_arrays([0, 1, 2], column), [told]),
        "struct": lambda: (pa.StructArray.from_arrays([column], ["a"]), {"a": told}),
        "map": lambda: (pa.MapArray.from_arrays([0, 1, 2], ["k", "l"], column), [["k", told]]),
        "dictionary": lambda: (column.dictionary_encode(), told),
    }[shape]()
    table = pa.table({"query": ["Why?", "Who?"], "at": column})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    found = rows(tmp_path / "a.arrow")
    assert found[0].value == {"query": "Why?", "at": expected}
    assert json.loads(found[0].raw)["at"] == expected
    assert found[1].value["query"] == "Who?"


def test_records_of_a_data_frame_are_what_a_file_of_them_says():
    pandas = pytest.importorskip("pandas")
    numpy = pytest.importorskip("numpy")
    frame = pandas.DataFrame({"id": [1.0, float("nan")], "query": ["a", "b"], "at": pandas.to_datetime([NS, None])})
    with MemorySource(frame.to_dict("records")) as source:
        first, second = (parse_record(row.value, row.number) for row in source)
    assert (first.id, first.metadata) == ("1", {"at": "2024-05-01T12:00:00.123456789"})
    assert (second.id, second.metadata) == ("2", {"at": None})
    values = {
        "n": numpy.int64(3),
        "x": numpy.float32(0.5),
        "t": numpy.datetime64(NS, "ns"),
        "d": numpy.timedelta64(1, "ns"),
    }
    with MemorySource(
        [{"query": b"Why?", "v": numpy.array([[1, 2]]), **values}, {"query": b"\xff"}, {"x": object()}]
    ) as source:
        good, binary, odd = source
    told = {"n": 3, "x": 0.5, "t": "2024-05-01T12:00:00.123456789", "d": 1e-9, "v": [[1, 2]]}
    assert good.value == {"query": "Why?", **told}
    with pytest.raises(RecordError, match="binary data"):
        parse_record(binary.value, 2)
    assert "cannot be written as JSON (a value of type object)" in str(odd.value)


def test_pandas_times_keep_every_digit():
    pandas = pytest.importorskip("pandas")
    assert plain(pandas.Timestamp(NS, tz="Europe/Berlin")) == "2024-05-01T14:00:00.123456789+02:00"
    assert plain(pandas.Timedelta(2**62 + 1)) == "PT4611686018.427387905S"
    assert plain(pandas.NaT) is None


@pytest.mark.parametrize(
    ("record", "metadata"),
    [
        ({"x": 2, "metadata": {"x": 1, "y": 3}}, {"x": 2, "y": 3, "metadata": {"x": 1}}),
        ({"x": 1, "metadata": {"x": 1, "y": 3}}, {"x": 1, "y": 3}),
        ({"x": 2, "metadata": {"x": 1, "metadata": 5}}, {"x": 2, "metadata": {"x": 1, "metadata": 5}}),
        ({"x": 2, "metadata": "text"}, {"x": 2, "metadata": "text"}),
        ({"x": None, "metadata": {"x": 1}}, {"x": None, "metadata": {"x": 1}}),
    ],
)
def test_metadata_that_has_the_name_of_a_field_is_kept_beside_it(record, metadata):
    assert parse_record({"query": "Why?", **record}, 1).metadata == metadata


# -- columns -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"query": "questoin"}, r'input\.columns\.query: .* has "questoin"; did you mean "question"\?'),
        ({"query": "question", "reference": "gold"}, r'columns\.reference: .* none of the first 3 records has "gold"'),
        ({"query": "question", "contexts": "docs.bodyy"}, r'"docs.bodyy"; did you mean "body"\?'),
        ({"query": "question", "contexts": "found.docs"}, r'"found.docs"; known: id, question, docs, rare'),
        (
            {"query": "question", "contexts": {"path": "docs", "text": "bodyy"}},
            r'input\.columns\.contexts\.text: .* has "bodyy"; did you mean "body"\?',
        ),
        ({"query": "question", "contexts": {"path": "docs", "score": "meta.scor"}}, 'did you mean "score"'),
    ],
)
def test_a_mapped_field_that_no_record_has_is_one_error_for_the_run(tmp_path, mapping, message):
    docs = [{"body": "one", "meta": {"score": 1}}]
    records = [{"id": i, "question": "Why?", "docs": docs} for i in range(2)]
    write_jsonl(tmp_path / "a.jsonl", [*records, {**records[0], "rare": 1}])
    with pytest.raises(ConfigError, match=message):
        rows(tmp_path / "a.jsonl", columns=mapping)
    config = {"runner": "fake", "input": {"path": str(tmp_path / "a.jsonl"), "columns": mapping}}
    with pytest.raises(ConfigError, match=message):
        generate(build_config({**config, "output": str(tmp_path / "out.jsonl")}))
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.arrow"])
def test_a_table_without_a_prompt_is_one_error_for_the_run(tmp_path, name):
    MAKE[name](tmp_path / name, [{"asked": "Why?", "contexts": ["one"]}] * 3)
    raw = {"runner": "fake", "output": str(tmp_path / "out.jsonl"), "input": {"path": str(tmp_path / name)}}
    with pytest.raises(
        ConfigError, match=r"no record can have a prompt.* the columns are asked, contexts; ragspec insp"
    ):
        generate(build_config(raw))
    with pytest.raises(ConfigError, match=r'it needs "messages" \(prompt.source\)'):
        generate(build_config(raw | {"prompt": {"source": "messages"}}))
    raw["input"]["columns"] = {"query": "asked"}
    assert generate(build_config(raw)).records == 3


def test_a_mapped_field_that_some_records_lack_is_no_error(tmp_path):
    records = [{"q": "Why?"}, {"q": "Who?", "docs": []}, {"q": "How?", "docs": [{"body": "one"}], "key": 7}]
    write_jsonl(tmp_path / "a.jsonl", records)
    mapping = {"query": "q", "id": "key", "contexts": {"path": "docs", "text": "body"}}
    found = [parse_record(row.value, row.number) for row in rows(tmp_path / "a.jsonl", columns=mapping)]
    assert [record.id for record in found] == ["1", "2", "7"]
    assert [[passage.text for passage in record.contexts] for record in found] == [[], [], ["one"]]
