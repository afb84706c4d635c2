"""Finished means on disk: killed at whatever moment, a run loses no line, and the next one writes none twice."""

import json
import os
import random
import shutil
import signal
from contextlib import suppress
from itertools import permutations
from pathlib import Path

import pytest

from ragspec.outputs import line_file as linefile
from ragspec.outputs import line_file as spill
from ragspec.outputs.journal import Journal
from tests.conftest import read_jsonl
from tests.outputs.test_journal import IDENTITY, answer

COUNT = 5


def error(key):
    return {"id": key, "error": {"type": "BackendError", "message": "no"}, "fingerprint": f"f-{key}"}


def lines_of(path):
    """Return the whole lines of a file as a reader of it may find them."""
    raw = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in raw.splitlines(keepends=True) if line.endswith(b"\n")]


def pending(path):
    return path.with_name("answers.pending.jsonl")


def go(folder, finishing=range(COUNT), *, failing=(), **options):
    """Run over an input of COUNT lines, which finish in this order; return the ids of those that were answered."""
    answered = []
    with Journal(str(folder / "answers.jsonl"), IDENTITY, **options) as journal:
        left = []
        for index in range(COUNT):
            if f"f-{index}" in journal.ledger:
                journal.skip(index, f"f-{index}")
            else:
                left.append(index)
        for index in finishing:
            if index in left:
                journal.put(index, error(str(index)) if index in failing else answer(str(index)))
                answered.append(str(index))
    return answered


def interrupted(path, *indices, failing=()):
    with suppress(KeyboardInterrupt), Journal(str(path), IDENTITY) as journal:
        for index in indices:
            journal.put(index, error(str(index)) if index in failing else answer(str(index)))
        raise KeyboardInterrupt


@pytest.fixture
def moments(tmp_path, monkeypatch):
    """CopiedSpans of the output's folder as a kill before, after or amid each thing done to it would leave it."""
    taken = []
    watching = tmp_path / "run"
    watching.mkdir()
    watch = pytest.MonkeyPatch()
    monkeypatch.setattr(os, "fsync", lambda _: None)  # slow, and of use in a power cut only

    def look(*_):
        copy = tmp_path / "moments" / str(len(taken))
        shutil.copytree(watching, copy)
        taken.append(copy)

    def watched(function):
        def call(*args, **more):
            look()
            result = function(*args, **more)
            look()
            return result

        return call

    write_all = linefile.write_all

    def write_in_halves(file, data):
        look()
        write_all(file, data[: len(data) // 2])
        look()
        write_all(file, data[len(data) // 2 :])
        look()

    watch.setattr(linefile, "write_all", write_in_halves)
    watch.setattr(os, "ftruncate", watched(os.ftruncate))
    for name in ("replace", "rename", "unlink", "open"):
        watch.setattr(Path, name, watched(getattr(Path, name)))
    yield watching, taken, watch.undo
    watch.undo()


@pytest.mark.parametrize("after", ["input", "finish"])
@pytest.mark.parametrize("slack", [0, 1 << 20])
@pytest.mark.parametrize("finishing", random.Random(3).sample(list(permutations(range(COUNT))), 4), ids=str)
def test_killed_at_any_moment_a_run_loses_nothing_and_the_next_one_repeats_nothing(
    moments, monkeypatch, finishing, slack, after
):
    folder, taken, stop = moments
    monkeypatch.setattr(spill, "SLACK", slack)
    go(folder, finishing)
    stop()
    assert len(taken) > 20
    for moment in taken:
        path = moment / "answers.jsonl"
        finished = {line["id"] for line in [*lines_of(path), *lines_of(pending(path))]}
        answered = go(moment, reversed(finishing), order=after)
        assert set(answered) == {str(index) for index in range(COUNT)} - finished
        written = [line["id"] for line in read_jsonl(path)]
        assert written == sorted(written) if after == "input" else True
        assert sorted(written) == [str(index) for index in range(COUNT)]
        assert not pending(path).exists()


@pytest.mark.parametrize("finishing", [(4, 1, 2, 0, 3), (2, 4, 3, 1)], ids=str)
def test_a_retry_that_is_killed_at_any_moment_loses_no_answer(moments, finishing):
    folder, taken, stop = moments
    interrupted(folder / "answers.jsonl", *finishing, failing={1, 4})
    first = {line["id"] for line in lines_of(folder / "answers.jsonl") + lines_of(pending(folder / "answers.jsonl"))}
    assert len(first) == len(finishing)
    before = len(taken)
    go(folder, retry_failed=True)
    stop()
    assert len(taken) > before + 8
    for moment in taken[before:]:
        path = moment / "answers.jsonl"
        good = {line["id"] for line in [*lines_of(path), *lines_of(pending(path))] if "output" in line}
        assert good >= first - {"1", "4"}
        assert set(go(moment, retry_failed=True)).isdisjoint(good)
        assert sorted(line["id"] for line in read_jsonl(path) if "output" in line) == ["0", "1", "2", "3", "4"]
        assert len(read_jsonl(path)) == COUNT


def test_setting_aside_that_is_killed_at_any_moment_loses_no_line(moments):
    folder, taken, stop = moments
    interrupted(folder / "answers.jsonl", 0, 2, 3)
    before = len(taken)
    go(folder, resume=False)
    stop()
    for moment in taken[before:]:
        old = [line for path in moment.glob("answers*jsonl*") for line in lines_of(path)]
        assert {"0", "2", "3"} <= {line["id"] for line in old}
        go(moment)
        assert [line["id"] for line in read_jsonl(moment / "answers.jsonl")] == ["0", "1", "2", "3", "4"]


def test_a_line_ahead_of_its_turn_is_on_disk_at_once_and_in_the_output_at_its_turn(tmp_path):
    path = tmp_path / "answers.jsonl"
    with Journal(str(path), IDENTITY) as journal:
        journal.put(2, answer("2"))
        journal.put(1, answer("1"))
        assert [line["id"] for line in read_jsonl(pending(path))] == ["2", "1"]
        assert read_jsonl(path) == []
        journal.put(0, answer("0"))
        assert [line["id"] for line in read_jsonl(path)] == ["0", "1", "2"]
        assert read_jsonl(pending(path)) == []  # emptied as soon as nothing waits
    assert not pending(path).exists()


def test_a_run_in_whose_order_all_finish_makes_no_such_file(tmp_path):
    path = tmp_path / "answers.jsonl"
    with Journal(str(path), IDENTITY) as journal:
        for index in range(3):
            journal.put(index, answer(str(index)))
            assert not pending(path).exists()


def test_what_waits_does_not_grow_with_what_has_waited(tmp_path, monkeypatch):
    """With some always under way, something always waits: the file must not become as large as the output."""
    monkeypatch.setattr(spill, "SLACK", 2000)
    path = tmp_path / "answers.jsonl"
    largest = 0
    with Journal(str(path), IDENTITY) as journal:
        journal.put(1, answer("1"))
        for index in range(0, 2000, 2):
            journal.put(index + 3, answer(str(index + 3)))
            journal.put(index, answer(str(index)))
            largest = max(largest, pending(path).stat().st_size)
    assert [line["id"] for line in read_jsonl(path)][:2000] == [str(index) for index in range(2000)]
    assert 1000 < largest < 5000


def test_a_run_without_resuming_sets_both_files_aside_under_one_number(tmp_path):
    path = tmp_path / "answers.jsonl"
    interrupted(path, 0, 2)
    (tmp_path / "answers.jsonl.1").write_text("precious")
    go(tmp_path, resume=False)
    assert [line["id"] for line in read_jsonl(tmp_path / "answers.jsonl.2")] == ["0"]
    assert [line["id"] for line in read_jsonl(tmp_path / "answers.pending.jsonl.2")] == ["2"]
    assert len(read_jsonl(path)) == COUNT


def test_what_waits_alone_is_resumed_too(tmp_path):
    interrupted(tmp_path / "answers.jsonl", 3)
    assert (tmp_path / "answers.jsonl").read_bytes() == b""
    assert go(tmp_path) == ["0", "1", "2", "4"]


def test_a_run_over_a_part_of_the_input_leaves_the_rest_waiting(tmp_path):
    path = tmp_path / "answers.jsonl"
    interrupted(path, 3)
    with Journal(str(path), IDENTITY, partial=True) as journal:
        journal.put(0, answer("0"))
    assert [line["id"] for line in read_jsonl(pending(path))] == ["3"]
    assert go(tmp_path) == ["1", "2", "4"]
    assert [line["id"] for line in read_jsonl(path)] == ["0", "1", "2", "3", "4"]


def test_a_line_that_left_the_input_meanwhile_is_kept_at_the_end(tmp_path):
    path = tmp_path / "answers.jsonl"
    interrupted(path, 9)
    go(tmp_path)
    assert [line["id"] for line in read_jsonl(path)] == ["0", "1", "2", "3", "4", "9"]
    assert not pending(path).exists()


@pytest.mark.parametrize("junk", [b"\0\0\0\n", b'{"id": "mine"}\n'])
def test_what_is_not_ours_among_what_waits_is_kept_as_a_copy(tmp_path, junk):
    path = tmp_path / "answers.jsonl"
    interrupted(path, 3)
    before = junk + pending(path).read_bytes() + b'{"torn'
    pending(path).write_bytes(before)
    go(tmp_path)
    assert [line["id"] for line in read_jsonl(path)] == ["0", "1", "2", "3", "4"]
    assert (tmp_path / "answers.pending.jsonl.1").read_bytes() == before.removesuffix(b'{"torn')


def test_an_interruption_while_a_line_is_written_comes_after_it_is_counted(tmp_path, monkeypatch):
    path = tmp_path / "answers.jsonl"
    write_all = linefile.write_all
    counted = []

    def press(file, data):
        signal.raise_signal(signal.SIGINT)
        write_all(file, data)

    monkeypatch.setattr(linefile, "write_all", press)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with suppress(KeyboardInterrupt), Journal(str(path), IDENTITY) as journal:
            journal.put(0, answer("0"), counted=lambda: counted.append("0"))
            counted.append("never")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert [line["id"] for line in read_jsonl(path)] == counted == ["0"]
