"""Ids: those that users gave come before those that are made, however they are written and wherever they stand."""

import json
import os

import orjson
import pytest

from ragspec.config.load import build_config
from ragspec.errors import RecordError
from ragspec.inputs.record_ids import RecordIds
from ragspec.inputs.sources import MemorySource, open_source
from ragspec.inputs.values import id_text
from ragspec.json_text import loads
from ragspec.outputs.ledger import fingerprint
from ragspec.run.generate import generate
from tests.conftest import read_jsonl, write_jsonl
from tests.inputs.test_live import converse, question
from tests.inputs.test_tables import as_parquet

MIXED = [{"query": "a"}, {"id": "1", "query": "b"}, {"id": 4, "query": "c"}, {"query": "d"}, {"query": "e"}]
NAMED = ["line-1", "1", "4", "line-4", "5"]


def as_csv(path, records):
    rows = [f"{record.get('id', '')},{record['query']}" for record in records]
    path.write_text("\n".join(["id,query", *rows]))


def as_array(path, records):
    path.write_text(json.dumps(records))


KINDS = {"a.jsonl": write_jsonl, "a.csv": as_csv, "a.json": as_array}


def answered(tmp_path, source, **more):
    limit = more.pop("limit", None)
    out = tmp_path / "out.jsonl"
    raw = {"runner": "fake", "input": source, "output": str(out), "sampling": {"max_new_tokens": 1}, **more}
    summary = generate(build_config(raw), limit=limit)
    return [line["id"] for line in read_jsonl(out)], summary


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("order", ["input", "finish"])
def test_ids_that_users_gave_come_before_made_ones(tmp_path, name, order):
    KINDS[name](tmp_path / name, MIXED)
    ids, summary = answered(tmp_path, str(tmp_path / name), order=order)
    assert sorted(ids) == sorted(NAMED)
    assert (summary.records, summary.failed, summary.notes) == (5, 0, [])


def test_several_files_and_values_in_memory_are_looked_through_too(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", MIXED[:1])
    write_jsonl(tmp_path / "b.jsonl", MIXED[1:])
    assert answered(tmp_path, [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])[0] == NAMED
    with MemorySource(MIXED) as source:
        ids = RecordIds(source)
        assert [ids.of(row) for row in source] == NAMED


def test_a_mapped_id_is_one_that_users_gave(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"query": "a"}, {"query": "b", "meta": {"key": 1}}])
    source = {"path": str(tmp_path / "a.jsonl"), "columns": {"id": "meta.key"}}
    assert answered(tmp_path, source)[0] == ["line-1", "1"]


def test_without_a_clash_a_made_id_is_the_lines_number(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"query": "a"}, {"id": "7", "query": "b"}, {"query": "c"}])
    assert answered(tmp_path, str(tmp_path / "a.jsonl"))[0] == ["1", "7", "3"]


def test_a_made_id_is_nobodys_own_whatever_ids_look_like(tmp_path):
    own = ["1", "line-1", "line-line-1", "line-4", "01"]
    write_jsonl(tmp_path / "a.jsonl", [{"query": "a"}, *({"id": name, "query": "b"} for name in own)])
    assert answered(tmp_path, str(tmp_path / "a.jsonl"))[0] == ["line-line-line-1", *own]


def test_error_lines_take_no_id_of_a_records(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        'no json\n{"id": "1", "query": "a"}\n{"id": true, "query": "b"}\n{"id": 3, "query": "c"}\n'
    )
    ids, summary = answered(tmp_path, str(tmp_path / "a.jsonl"))
    assert ids == ["line-1", "1", "line-3", "3"]
    assert (summary.records, summary.failed) == (2, 2)


def test_an_id_that_users_gave_twice_is_an_error_line_of_that_id(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"id": 1, "query": "a"}, {"id": "1", "query": "b"}, {"id": 1.0, "query": "c"}])
    ids, summary = answered(tmp_path, str(tmp_path / "a.jsonl"))
    assert ids == ["1", "1", "1"]
    assert (summary.records, summary.failed) == (1, 2)


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        ({"id": "a", "query": ""}, {"id": "a", "query": "b"}),
        ({"custom_id": "a", "body": {"messages": []}}, {"custom_id": "a", "body": {"prompt": "b", "max_tokens": 1}}),
    ],
)
@pytest.mark.parametrize("format", ["jsonl", "openai"])
def test_an_id_given_twice_is_an_error_also_if_its_first_record_failed(tmp_path, bad, good, format):
    write_jsonl(tmp_path / "a.jsonl", [bad, good, {"id": "b", "query": "c"}])
    output = {"path": str(tmp_path / "out.jsonl"), "format": format}
    raw = {"runner": "fake", "input": str(tmp_path / "a.jsonl"), "output": output, "sampling": {"max_new_tokens": 1}}
    summary = generate(build_config(raw))
    assert (summary.records, summary.failed) == (1, 2)
    lines = read_jsonl(tmp_path / "out.jsonl")
    assert 'a.jsonl:2: id "a" appears twice; only the first record with that id counts' in json.dumps(
        lines[1]["error"]
    ).replace('\\"', '"')
    for retry in (False, True):  # a resumed run finds the same rows finished or failing
        again = generate(build_config(raw), retry_failed=retry)
        assert (again.records, again.failed) == (0, 2 * retry)
        assert len(read_jsonl(tmp_path / "out.jsonl")) == 3


def test_a_limit_changes_no_id(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", MIXED)
    assert answered(tmp_path, str(tmp_path / "a.jsonl"), limit=1)[0] == NAMED[:1]
    ids, summary = answered(tmp_path, str(tmp_path / "a.jsonl"))
    assert ids == NAMED
    assert summary.skipped == 1


def test_ids_are_the_same_when_records_are_ordered_together(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", MIXED)
    assert sorted(answered(tmp_path, str(tmp_path / "a.jsonl"), prompt={"order": "shared"})[0]) == sorted(NAMED)


def test_an_output_of_an_older_version_goes_on(tmp_path):
    """It had answered line 1 under its number, and refused line 2, whose own id that is."""
    write_jsonl(tmp_path / "a.jsonl", MIXED)
    answered(tmp_path, str(tmp_path / "a.jsonl"), limit=1)
    with open_source(str(tmp_path / "a.jsonl")) as source:
        first, second, *_ = source
    line = read_jsonl(tmp_path / "out.jsonl")[0]
    assert line["fingerprint"] == fingerprint(first, "1")
    older = [
        {**line, "id": "1"},
        {
            "id": "1",
            "line": 2,
            "error": {"type": "RecordError", "message": ""},
            "fingerprint": fingerprint(second, None),
        },
    ]
    (tmp_path / "out.jsonl").write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in older))
    ids, summary = answered(tmp_path, str(tmp_path / "a.jsonl"))
    assert ids == ["1", "1", *NAMED[1:]]
    assert (summary.skipped, summary.records, summary.failed) == (1, 4, 0)


def test_of_a_pipe_an_id_that_users_gave_is_kept_and_a_clash_is_told(tmp_path):
    script = [
        b'{"query": "a"}\n',
        question("1"),
        question("4"),
        b'{"query": "d"}\n',
        b'{"query": "e"}\n',
        question("5"),
    ]
    partner, summary = converse(tmp_path, {"runner": "fake"}, script)
    assert partner.answered == len(script)
    assert [line["id"] for line in read_jsonl(tmp_path / "out.jsonl")] == ["1", "1", "4", "line-4", "5", "5"]
    assert summary.failed == 0
    (note,) = summary.notes
    assert note.startswith("2 records have an id that equals the line number of an earlier record without one")


def test_a_pipe_without_a_clash_has_line_numbers_and_no_note(tmp_path):
    partner, summary = converse(tmp_path, {"runner": "fake"}, [b'{"query": "a"}\n', question("x"), b'{"query": "c"}\n'])
    assert partner.answered == 3
    assert [line["id"] for line in read_jsonl(tmp_path / "out.jsonl")] == ["1", "x", "3"]
    assert summary.notes == []


def test_an_input_is_read_once_more_only_where_an_id_is_missing(tmp_path):
    class Counted(MemorySource):
        agains = 0

        def reopen(self):
            Counted.agains += 1
            return super().reopen()

    for records, expected in (([{"id": i, "query": "x"} for i in range(5)], 0), (MIXED, 1)):
        Counted.agains = 0
        with Counted(records) as source:
            ids = RecordIds(source)
            for row in source:
                ids.of(row)
        assert Counted.agains == expected


def test_pandas_floats_are_the_whole_numbers_that_they_were(tmp_path):
    as_parquet(
        tmp_path / "a.parquet", [{"id": 1.0, "query": "a"}, {"id": None, "query": "b"}, {"id": 3.0, "query": "c"}]
    )
    assert answered(tmp_path, str(tmp_path / "a.parquet"))[0] == ["1", "2", "3"]
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"id": [7.0, float("nan")], "query": ["a", "b"]})
    frame.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "out.jsonl").unlink()
    os.unlink(tmp_path / "out.run.json")
    assert answered(tmp_path, str(tmp_path / "a.parquet"))[0] == ["7", "2"]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("1", "1"),
        (1, "1"),
        (1.0, "1"),
        (-0.0, "0"),
        (None, None),
        (float("nan"), None),
        ("1.0", "1.0"),
        (2**70, str(2**70)),
    ],
)
def test_an_id_has_one_form_however_it_is_written(given, name):
    assert id_text(given) == name


NO_IDS = [
    1.5,
    1e300,
    float("inf"),
    True,
    "",
    [],
    {},
    2.0**53,
    loads("9007199254740991.00000001"),
    loads("1.00000000000000000001"),
]


@pytest.mark.parametrize("given", NO_IDS)
def test_what_is_no_id_is_refused(given):
    with pytest.raises(RecordError, match='"id" must be a non-empty string or a whole number'):
        id_text(given)
