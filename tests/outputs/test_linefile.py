import fcntl
import json
import os
import stat
from contextlib import suppress

import pytest

from ragspec.errors import ConfigError
from ragspec.outputs import line_file as linefile
from ragspec.outputs.folder import write_json
from ragspec.outputs.journal import Journal
from ragspec.outputs.line_file import LineFile
from tests.conftest import read_jsonl
from tests.outputs.test_journal import IDENTITY, answer, write


@pytest.fixture
def path(tmp_path):
    return tmp_path / "answers.jsonl"


def test_who_waited_for_a_lock_writes_into_the_file_that_has_the_name_by_then(path, monkeypatch):
    """Another run's --retry-failed puts a new file in the place of the one that is open already."""
    write(path, answer("a"), {"id": "b", "error": {"message": "no"}, "fingerprint": "f-b"})
    flock, calls = fcntl.flock, []

    def late(file, how):
        calls.append(how)
        if len(calls) == 1:
            Journal(str(path), IDENTITY, retry_failed=True).__exit__(None)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with Journal(str(path), IDENTITY) as journal:
        journal.put(0, answer("c"))
    assert [line["id"] for line in read_jsonl(path)] == ["a", "c"]


def test_a_file_that_goes_while_its_lock_is_taken_is_made_anew(path, monkeypatch):
    flock, calls = fcntl.flock, []

    def late(file, how):
        calls.append(how)
        if len(calls) == 1:
            path.unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    file = LineFile(path)
    file.append(b"x\n")
    assert path.read_bytes() == b"x\n"


@pytest.mark.parametrize("options", [{}, {"retry_failed": True}, {"resume": False}], ids=str)
def test_a_link_stays_a_link(tmp_path, options):
    target, link = tmp_path / "disk" / "answers-7.jsonl", tmp_path / "answers.jsonl"
    target.parent.mkdir()
    link.symlink_to(target)
    error = {"id": "b", "error": {"message": "no"}, "fingerprint": "f-b"}
    write(link, answer("a"), error)
    write(link, answer("c"), **options)
    assert link.is_symlink()
    assert {line["id"] for line in read_jsonl(target)} >= {"c"}
    assert (tmp_path / "answers.run.json").exists()  # beside the name that was given, as ever
    old = [line["id"] for file in target.parent.iterdir() for line in read_jsonl(file)]
    assert sorted(old) == (["a", "c"] if options.get("retry_failed") else ["a", "b", "c"])


def test_a_link_to_a_state_file_stays_a_link(tmp_path):
    target, link = tmp_path / "disk" / "stats.json", tmp_path / "stats.json"
    target.parent.mkdir()
    link.symlink_to(target)
    write_json(link, {"a": 1})
    assert link.is_symlink()
    assert json.loads(target.read_bytes()) == {"a": 1}


def test_a_file_that_is_replaced_keeps_its_permissions(path):
    write(path, answer("a"), {"id": "b", "error": {"message": "no"}, "fingerprint": "f-b"})
    path.chmod(0o640)
    write(path, retry_failed=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_half_a_line_that_does_not_fit_is_taken_back(path, monkeypatch):
    file = LineFile(path)
    file.append(b"one\n")
    write_all = linefile.write_all

    def full(raw, data):
        write_all(raw, data[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(linefile, "write_all", full)
    with pytest.raises(OSError, match="No space left"):
        file.append(b"two\n")
    assert path.read_bytes() == b"one\n"


def test_a_taken_output_is_not_touched_by_who_sets_it_aside(path):
    write(path, answer("a"))
    with Journal(str(path), IDENTITY), pytest.raises(ConfigError, match="another run is writing it"):
        Journal(str(path), IDENTITY, resume=False)
    assert [item.name for item in sorted(path.parent.iterdir())] == ["answers.jsonl", "answers.run.json"]


@pytest.fixture
def cut(monkeypatch):
    """What a power cut would leave: names of files and folders that were synced, as of each renaming and at the end."""
    synced, renamed = set(), []
    fsync, replace = os.fsync, linefile.Path.replace

    def noted(descriptor):
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def renaming(self, target):
        renamed.append((str(target), str(self) in synced))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(linefile.Path, "replace", renaming)
    return synced, renamed


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="names of descriptors are read from /proc")
def test_what_takes_a_name_survives_a_power_cut(path, cut):
    synced, renamed = cut
    write_json(path.with_name("some.json"), {})
    assert renamed == [(str(path.with_name("some.json")), True)]
    assert str(path.parent) in synced
    error = {"id": "b", "error": {"message": "no"}, "fingerprint": "f-b"}
    synced.clear()
    write(path, answer("a"), error)
    assert {str(path), str(path.parent)} <= synced  # a run that ends whole is on disk
    del renamed[:]
    write(path, retry_failed=True)
    assert renamed == [(str(path), True), (str(path.with_name("answers.run.json")), True)]


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="names of descriptors are read from /proc")
def test_what_an_interrupted_run_says_it_kept_survives_a_power_cut(path, cut):
    synced, _ = cut
    with suppress(KeyboardInterrupt), Journal(str(path), IDENTITY) as journal:
        journal.put(1, answer("b"))
        synced.clear()
        raise KeyboardInterrupt
    assert {str(path), str(path.with_name("answers.pending.jsonl"))} <= synced
