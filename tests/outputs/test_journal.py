import json
import tracemalloc

import pytest

from ragspec.config.io import OutputConfig
from ragspec.errors import ConfigError
from ragspec.inputs.base import InputRow
from ragspec.outputs.journal import Journal, whereabouts
from ragspec.outputs.ledger import fingerprint
from ragspec.outputs.target import target_of
from tests.conftest import read_jsonl

IDENTITY = {"model": "m", "sampling": {"seed": 0}}


def answer(key, **more):
    return {"id": key, "output": "x", "fingerprint": f"f-{key}", **more}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out" / "answers.jsonl"


def write(path, *lines, **options):
    with Journal(str(path), IDENTITY, **options) as journal:
        for index, line in enumerate(lines):
            journal.put(index, line)


def test_lines_come_out_in_input_order_whatever_order_they_finish_in(path):
    with Journal(str(path), IDENTITY) as journal:
        for index in (2, 0, 3, 1):
            journal.put(index, answer(str(index)))
            written = [line["id"] for line in read_jsonl(path)]
            assert written == sorted(written)
    assert [line["id"] for line in read_jsonl(path)] == ["0", "1", "2", "3"]


def test_finish_order_writes_at_once(path):
    with Journal(str(path), IDENTITY, order="finish") as journal:
        journal.put(5, answer("late"))
        assert read_jsonl(path)[0]["id"] == "late"


def test_resume_knows_finished_lines_and_appends(path):
    write(path, answer("a"), answer("b"))
    with Journal(str(path), IDENTITY) as journal:
        assert "f-a" in journal.ledger
        assert "f-c" not in journal.ledger
        journal.put(0, answer("c"))
    assert [line["id"] for line in read_jsonl(path)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "torn", [b'{"id": "c", "outp', b"\x00\x00\x00", b'{"id": "c", "fingerprint": "f-c"}', b"x" * 200_000]
)
def test_a_torn_last_line_is_cut_off_and_nothing_else(path, torn):
    write(path, answer("a"), answer("b"))
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    with Journal(str(path), IDENTITY) as journal:
        assert "f-c" not in journal.ledger
    assert path.read_bytes() == whole


def test_a_file_of_one_torn_line_becomes_empty(path):
    write(path)
    path.write_bytes(b'{"id": "a"')
    write(path)
    assert path.read_bytes() == b""


def test_a_changed_config_refuses_to_mix_and_names_the_key(path):
    write(path, answer("a"))
    with pytest.raises(ConfigError, match=r"sampling\.seed: was 0, is now 1"):
        Journal(str(path), {"model": "m", "sampling": {"seed": 1}})
    assert len(read_jsonl(path)) == 1


def test_a_file_of_unknown_origin_is_not_appended_to(path):
    path.parent.mkdir()
    path.write_text('{"precious": true}\n')
    with pytest.raises(ConfigError, match="does not say which config wrote them"):
        Journal(str(path), IDENTITY)
    assert path.read_text() == '{"precious": true}\n'


def test_no_resume_keeps_the_old_file_as_a_copy(path):
    write(path, answer("a"))
    write(path, answer("b"), resume=False)
    write(path, answer("c"), resume=False)
    assert [read_jsonl(f"{path}{end}")[0]["id"] for end in (".1", ".2", "")] == ["a", "b", "c"]


def test_retry_failed_drops_error_lines_only(path):
    write(
        path, answer("a"), {"id": "b", "error": {"message": "no"}, "fingerprint": "f-b"}, answer("c", output='"error":')
    )
    with Journal(str(path), IDENTITY, retry_failed=True) as journal:
        assert "f-a" in journal.ledger
        assert "f-b" not in journal.ledger
        journal.put(0, answer("b"))
    assert [line["id"] for line in read_jsonl(path)] == ["a", "c", "b"]


@pytest.mark.parametrize("call", ["open", "replace"])
def test_retry_failed_that_dies_midway_loses_no_answer(path, monkeypatch, call):
    write(path, answer("a"), {"id": "b", "error": {"message": "no"}, "fingerprint": "f-b"}, answer("c"))
    from pathlib import Path

    original = getattr(Path, call)

    def die(self, *args, **kwargs):
        if self.name.endswith(".draft"):
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, call, die)
        with pytest.raises(KeyboardInterrupt):
            Journal(str(path), IDENTITY, retry_failed=True)
    write(path, retry_failed=True)
    assert [line["id"] for line in read_jsonl(path)] == ["a", "c"]


@pytest.mark.parametrize("foreign", ['not json "error": x', '{"fingerprint": ["x"], "id": {}}', "[]", '{"error": 1}'])
@pytest.mark.parametrize("retry", [False, True])
def test_a_line_of_somebody_elses_in_the_output_stays_and_stops_nothing(path, foreign, retry):
    write(path, answer("a"))
    with path.open("a") as file:
        file.write(f"{foreign}\n")
    with Journal(str(path), IDENTITY, retry_failed=retry) as journal:
        assert "f-a" in journal.ledger
        (note,) = journal.notes()
    assert foreign in path.read_text()
    assert note.startswith(f"{path}: lines that are damaged, or not ragspec's: 1; they stay")


def test_a_line_that_is_no_json_is_refused_before_anything_is_written(path):
    deep = []
    for _ in range(400):
        deep = [deep]
    with Journal(str(path), IDENTITY) as journal:
        with pytest.raises(TypeError):
            journal.put(0, answer("a", metadata=deep))
        journal.put(0, answer("b"))
    assert [line["id"] for line in read_jsonl(path)] == ["b"]


def test_two_runs_cannot_write_one_output(path):
    with Journal(str(path), IDENTITY), pytest.raises(ConfigError, match="another run is writing it"):
        Journal(str(path), IDENTITY)


def test_an_output_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        Journal(str(tmp_path / "file" / "a.jsonl"), IDENTITY)


def test_fingerprint_changes_with_content_and_name():
    line = InputRow(1, json.dumps({"id": "a"}).encode(), None)
    other = InputRow(2, b"{}", None)
    keys = {fingerprint(line, "a"), fingerprint(line, None), fingerprint(other, "a"), fingerprint(other, None)}
    assert len(keys) == 4


def test_a_message_says_where_finished_lines_are(path):
    again, target = "run the same command again to continue", target_of(OutputConfig(path=str(path)))
    for stream in ("-", "/dev/null"):
        assert whereabouts(target_of(OutputConfig(path=stream))) == "finished answers have been written"
    assert whereabouts(target) == f"nothing was finished yet; {again}"
    with Journal(str(path), IDENTITY) as journal:
        journal.put(1, answer("b"))
        waiting = f"{path.parent / 'answers.pending.jsonl'} (answers waiting for earlier ones)"
        assert whereabouts(target) == f"finished answers are kept in {waiting}; {again}"
        journal.put(0, answer("a"))
        journal.put(3, answer("d"))
        assert whereabouts(target) == f"finished answers are kept in {path} and {waiting}; {again}"
        journal.put(2, answer("c"))
        assert whereabouts(target) == f"finished answers are kept in {path}; {again}"


def test_lines_that_are_skipped_behind_an_unfinished_one_take_no_memory(path):
    with Journal(str(path), IDENTITY) as journal:
        tracemalloc.start()
        try:
            for index in range(1, 100_001):
                if index % 50_000:
                    journal.skip(index, "f")
            assert tracemalloc.get_traced_memory()[1] < 100_000
        finally:
            tracemalloc.stop()
        for index in (100_000, 50_000, 0):
            journal.put(index, answer(str(index)))
        assert [line["id"] for line in read_jsonl(path)] == ["0", "50000", "100000"]
