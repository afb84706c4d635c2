"""Lance tables as output: seen as a whole or not at all, each record once, whatever is killed."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from ragspec.config.load import build_config
from ragspec.errors import ConfigError
from ragspec.outputs.table import LanceTable
from ragspec.quality.evaluate import evaluate
from ragspec.run.generate import generate
from tests.conftest import ROOT, wide, write_jsonl

lancedb = pytest.importorskip("lancedb")


def rows(folder, name="answers"):
    """Return what a reader sees of a table, None if there is none."""
    database = lancedb.connect(folder)
    if not (folder / f"{name}.lance" / "_versions").exists():
        return None
    return database.open_table(name).to_arrow().to_pylist()


@pytest.fixture
def given(tmp_path):
    def config(count=6, fail=(), **more):
        records = [{"id": f"q{i}", "query": f"question {i}", "reference": f"question {i}"} for i in range(count)]
        source = write_jsonl(tmp_path / "in.jsonl", records)
        args = {"fail_ids": list(fail), "batch_size": 2}
        return build_config(
            {"runner": "fake", "input": source, "output": str(tmp_path / "answers.lance"), "runner_args": args, **more}
        )

    return config


def test_a_run_appears_in_one_commit(tmp_path, given):
    seen = []

    class Reader:
        def answered(self, result):
            seen.append(rows(tmp_path))

        failed = answered

    generate(given(fail=["q3"]), observers=[Reader()])
    assert seen == [None] * 6
    found = rows(tmp_path)
    assert [row["id"] for row in found] == [f"q{i}" for i in range(6)]
    assert found[3]["error"]["message"] == "the fake runner is configured to fail here"
    assert "question 0\n" in found[0]["output"]
    assert lancedb.connect(tmp_path).open_table("answers").version == 1
    assert not list(tmp_path.glob("*.lines.jsonl"))


def test_what_a_longer_input_adds_is_a_second_commit(tmp_path, given):
    generate(given(6))
    assert generate(given(6)).skipped == 6
    assert lancedb.connect(tmp_path).open_table("answers").version == 1
    generate(given(9))
    assert [row["id"] for row in rows(tmp_path)] == [f"q{i}" for i in range(9)]
    assert lancedb.connect(tmp_path).open_table("answers").version == 2


class Stops:
    """Ends a run after so many records."""

    def __init__(self, after):
        self.left = after

    def answered(self, result):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt

    failed = answered


def test_an_interrupted_run_is_not_seen_and_goes_on(tmp_path, given):
    with pytest.raises(KeyboardInterrupt):
        generate(given(), observers=[Stops(3)])
    assert rows(tmp_path) is None
    assert generate(given()).skipped == 3
    assert [row["id"] for row in rows(tmp_path)] == [f"q{i}" for i in range(6)]


def test_retried_records_take_the_place_of_their_errors_at_once(tmp_path, given):
    generate(given(fail=["q1", "q4"]))
    with pytest.raises(KeyboardInterrupt):
        generate(given(), retry_failed=True, observers=[Stops(1)])
    assert sum(row["error"] is not None for row in rows(tmp_path)) == 2  # as before, until all are answered
    summary = generate(given())  # the one that was retried stays answered, without --retry-failed
    assert (summary.records, summary.failed_before) == (0, 1)
    generate(given(), retry_failed=True)
    found = rows(tmp_path)
    assert sorted(row["id"] for row in found) == [f"q{i}" for i in range(6)]
    assert all(row["error"] is None for row in found)


def test_a_table_that_is_started_over_keeps_its_rows_until_it_is_replaced(tmp_path, given):
    generate(given(6))
    other = {"sampling": {"max_new_tokens": 3}}
    with pytest.raises(KeyboardInterrupt):
        generate(given(4, **other), resume=False, observers=[Stops(2)])
    assert len(rows(tmp_path)) == 6
    assert generate(given(4, **other)).skipped == 2  # of the new ones
    found = rows(tmp_path)
    assert [(row["id"], row["output_tokens"]) for row in found] == [(f"q{i}", 3) for i in range(4)]
    old = lancedb.connect(tmp_path).open_table("answers")
    old.checkout(1)
    assert old.count_rows() == 6
    assert generate(given(4, **other)).skipped == 4  # it is not started over once more
    assert list(tmp_path.glob("*.replacing")) == []


def test_a_table_that_is_started_over_with_nothing_has_no_rows(tmp_path, given):
    generate(given(6))
    generate(given(0), resume=False)
    assert rows(tmp_path) == []


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("started_over", [False, True])
def test_a_run_killed_around_its_commit_loses_and_doubles_nothing(tmp_path, given, monkeypatch, where, started_over):
    generate(given(3))
    commit = LanceTable.finish

    class Killed(BaseException):
        pass

    def dies(self):
        def empty():
            raise Killed

        if where == "after":
            self._spool.empty = empty
            commit(self)
        raise Killed

    monkeypatch.setattr(LanceTable, "finish", dies)
    with pytest.raises(Killed):
        generate(given(6), resume=not started_over)
    monkeypatch.setattr(LanceTable, "finish", commit)
    assert generate(given(6)).skipped == 6
    assert [row["id"] for row in rows(tmp_path)] == [f"q{i}" for i in range(6)]


def test_answers_in_a_table_are_evaluated(tmp_path, given):
    generate(given())
    found = evaluate(str(tmp_path / "answers.lance"))
    assert found.records == 6
    assert found.scores["f1"].mean > 0


def test_a_table_of_others_is_left_alone(tmp_path, given):
    lancedb.connect(tmp_path).create_table("answers", data=[{"x": 1}])
    for resume in (True, False):
        with pytest.raises(ConfigError, match=r"answers\.lance: already exists, but has no answers\.lance\.run\.json"):
            generate(given(), resume=resume)
    assert rows(tmp_path) == [{"x": 1}]


@pytest.mark.parametrize("output", [{"path": "s3://b/a.lance"}, {"path": "a.lance", "format": "jsonl"}])
def test_tables_elsewhere_or_of_another_format_are_refused(given, output):
    with pytest.raises(ConfigError, match="a Lance table"):
        generate(given().model_copy(update={"output": build_config({"runner": "fake", "output": output}).output}))


def test_without_its_library_a_table_names_the_extra(given, monkeypatch):
    monkeypatch.setitem(sys.modules, "lancedb", None)
    with pytest.raises(ConfigError, match=r'pip install "ragspec\[lance\]"'):
        generate(given())


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, *wide(12)])
def test_killed_runs_lose_and_double_nothing(tmp_path, kills):
    chance = random.Random(kills)
    (tmp_path / "c.yaml").write_text("runner: fake\nrunner_args: {delay_s: 0.002, batch_size: 1}\n")
    records, killed = 0, 0
    for number in range(10 * kills):
        if not number or killed_while(tmp_path, records, chance) == 0:
            records += 150
            write_jsonl(tmp_path / "in.jsonl", [{"id": f"q{i}", "query": f"question {i}"} for i in range(records)])
        else:
            killed += 1
        if killed == kills:
            break
        check(tmp_path, records)
    assert killed_while(tmp_path, records, None) == 0
    check(tmp_path, records, whole=True)


def killed_while(folder, records, chance):
    """Run, and kill it somewhere if there is a `chance`; return its exit code."""
    command = ["generate", "-c", folder / "c.yaml", "-i", folder / "in.jsonl", "-o", folder / "answers.lance", "-q"]
    run = subprocess.Popen([sys.executable, "-m", "ragspec", *map(str, command)], cwd=ROOT, env={**os.environ})
    if chance is not None:
        spool = folder / "answers.lance.lines.jsonl"
        begin = size_of(spool)
        while run.poll() is None and size_of(spool) <= begin:
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.002 * 1.6 * 150))
        if run.poll() is None:
            run.send_signal(signal.SIGKILL)
    return run.wait(120)


def size_of(path):
    """Return the bytes of a file that another process may remove at any time."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def check(folder, records, *, whole=False):
    """Assert that a reader sees runs as a whole, and each record once."""
    found = rows(folder) or []
    ids = [row["id"] for row in found]
    assert len(set(ids)) == len(ids)
    assert len(ids) % 150 == 0
    assert len(ids) == records if whole else len(ids) <= records
    assert all(f"question {row['id'][1:]}\n" in row["output"] for row in found)


@pytest.mark.parametrize("where", ["rewritten", "begun", "committed", None])
def test_an_update_of_a_table_that_is_started_over_has_the_new_rows_alone(tmp_path, given, monkeypatch, where):
    generate(given(5))
    again = given(4, prompt={"template": "Again: {{ query }}"})

    with pytest.raises(KeyboardInterrupt):
        generate(again, resume=False, observers=[Stops(3)])
    kill = {"begun": "_replace", "rewritten": "finish", "committed": "finish"}.get(where)
    if kill is not None:
        real = getattr(LanceTable, kill)

        def killed(table, *given):
            if where == "committed":
                real(table, *given)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(LanceTable, kill, killed)
            with pytest.raises(KeyboardInterrupt):
                generate(again, update=True)
    generate(again, update=True)
    found = rows(tmp_path)
    assert [row["id"] for row in found] == ["q0", "q1", "q2", "q3"]
    assert all("Again" in row["output"] for row in found)
    assert generate(again).skipped == 4
