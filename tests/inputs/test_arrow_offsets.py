"""Damaged offsets of Arrow files: their rows are error lines, all others stay, and the process goes on."""

import struct

import pyarrow as pa
import pytest

from ragspec.errors import RecordError
from ragspec.inputs.arrow_offsets import damaged_rows
from ragspec.inputs.sources import open_source

ROWS = 6
COLUMNS = {
    "text": pa.array([f"text {i}" for i in range(ROWS)]),
    "large": pa.array([f"text {i}" for i in range(ROWS)], pa.large_string()),
    "bytes": pa.array([b"abcdef"] * ROWS),
    "gaps": pa.array(["text 0", None, "", None, "text 4", None]),
    "list": pa.array([[1, 2]] * ROWS),
    "passages": pa.array([[{"id": f"d{i}{j}", "text": f"passage {i}{j}"} for j in range(2)] for i in range(ROWS)]),
    "fixed": pa.array([["ab", "cd"]] * ROWS, pa.list_(pa.string(), 2)),
    "map": pa.array([[("key", "value")]] * ROWS, pa.map_(pa.string(), pa.string())),
    "words": pa.array(["yes", "no", None] * 2).dictionary_encode(),
    "none": pa.nulls(ROWS),
}


def batch_of(columns):
    return pa.record_batch(list(columns.values()), names=list(columns))


def test_sound_rows_are_never_damaged():
    batch = batch_of(COLUMNS)
    for begin in range(ROWS):
        assert damaged_rows(batch.slice(begin)) == damaged_rows(batch.slice(begin, 2)) == set()
    assert damaged_rows(batch.slice(0, 0)) == damaged_rows(pa.RecordBatch.from_pylist([], schema=batch.schema)) == set()


def offsets(*values):
    return struct.pack(f"<{len(values)}i", *values)


@pytest.mark.parametrize("at", range(2, 6))
@pytest.mark.parametrize("value", [2_000_000_000, -5, 1])
@pytest.mark.parametrize(("name", "step"), [("text", 6), ("bytes", 6), ("list", 2)])
def test_a_row_with_damaged_offsets_is_an_error_line_and_others_stay(tmp_path, name, step, at, value):
    batch = batch_of({"id": pa.array([f"record {i}" for i in range(ROWS)]), name: COLUMNS[name]})
    good = [step * i for i in range(ROWS + 1)]
    read = rows_with(tmp_path, batch, offsets(*good), offsets(*good[:at], value, *good[at + 1 :]))
    bad = {number for number, row in enumerate(read) if isinstance(row, RecordError)}
    assert {at - 1, at} <= bad <= {at - 2, at - 1, at}
    sound = rows_with(tmp_path, batch, b"", b"")
    assert [row for number, row in enumerate(read) if number not in bad] == [
        row for number, row in enumerate(sound) if number not in bad
    ]


@pytest.mark.parametrize("value", [2_000_000_000, -5])
def test_damage_inside_of_lists_costs_their_rows_only(tmp_path, value):
    batch = batch_of({"passages": COLUMNS["passages"]})
    good = [10 * i for i in range(2 * ROWS + 1)]  # of the texts of 12 passages
    read = rows_with(tmp_path, batch, offsets(*good), offsets(*good[:4], value, *good[5:]))
    assert [number for number, row in enumerate(read) if isinstance(row, RecordError)] == [1, 2]
    assert "cannot be read (its offsets" in str(read[1])
    assert [row["passages"][0]["text"] for row in read if isinstance(row, dict)] == [
        f"passage {i}0" for i in (0, 3, 4, 5)
    ]


def rows_with(tmp_path, batch, old, new):
    """Return the rows of an Arrow file in which the bytes `old` are `new`."""
    path = tmp_path / "in.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    content = path.read_bytes()
    assert not old or content.count(old) == 1
    path.write_bytes(content.replace(old, new) if old else content)
    with open_source(str(path)) as source:
        return [row.value for row in source]
