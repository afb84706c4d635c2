"""What a run says on stderr: lines and JSON objects, more or less of them, and how it ends at SIGTERM."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from typer.testing import CliRunner

from ragspec.cli import app, main
from ragspec.cli.run_log import FORMAT, Terminated, terminable
from ragspec.outputs.journal import Interruptions
from tests.conftest import ROOT, read_jsonl, wide, write_jsonl


@pytest.fixture(autouse=True)
def _forget_format(monkeypatch):
    monkeypatch.setenv(FORMAT, "text")
    monkeypatch.delenv(FORMAT)


@pytest.fixture
def questions(tmp_path):
    return write_jsonl(tmp_path / "in.jsonl", [{"id": f"q{i}", "query": f"question {i}"} for i in range(20)])


def ran(tmp_path, questions, *args, delay_s=0.0, fail="[]"):
    config = tmp_path / "c.yaml"
    config.write_text(f"runner: fake\nrunner_args: {{batch_size: 4, delay_s: {delay_s}, fail_ids: {fail}}}\n")
    output = tmp_path / f"out{len(list(tmp_path.glob('out*')))}.jsonl"
    done = CliRunner().invoke(app, ["generate", "-c", str(config), "-i", questions, "-o", str(output), *args])
    assert not isinstance(done.exception, AssertionError)
    return done


def events(done):
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_without_a_terminal_a_line_tells_from_time_to_time_how_far_a_run_is(tmp_path, questions):
    said = ran(tmp_path, questions, "--log-every", "0.05", delay_s=0.2).stderr
    assert "/20, " in said
    assert "tokens/s, 0:0" in said
    assert "/20, " not in ran(tmp_path, questions, "--log-every", "0", delay_s=0.05).stderr


def test_every_message_is_an_object_with_json(tmp_path, questions):
    args = ("--log-format", "json", "--log-every", "0.05", "-v", "--save-config", str(tmp_path / "saved.yaml"))
    found = events(ran(tmp_path, questions, *args, delay_s=0.2, fail="[q3]"))
    assert {each["event"] for each in found} >= {"progress", "record", "finished"}
    assert all({"time", "level", "event", "message"} <= each.keys() for each in found)
    records = {each["id"]: each for each in found if each["event"] == "record"}
    assert len(records) == 20
    assert records["q3"]["level"] == "warning"
    (last,) = [each for each in found if each["event"] == "finished"]
    assert (last["records"], last["failed"]) == (19, 1)


def test_an_error_is_an_object_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ragspec", "generate", "--log-format", "json", "-c", str(tmp_path / "no.yaml")])
    with pytest.raises(SystemExit):
        main()
    found = json.loads(capsys.readouterr().err)
    assert (found["level"], found["event"]) == ("error", "error")
    assert "no.yaml" in found["message"]


def test_quiet_says_nothing_unless_something_fails(tmp_path, questions):
    assert ran(tmp_path, questions, "-q", "--log-every", "0.05", delay_s=0.1).stderr == ""
    done = ran(tmp_path, questions, "-q", fail="[q3, q4]")
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert "2 records: the fake runner is configured to fail here" in done.stderr


def test_verbose_names_every_record(tmp_path, questions):
    said = ran(tmp_path, questions, "-v", fail="[q3]").stderr.splitlines()
    assert sum(line.startswith("q") for line in said) == 20
    assert "q3: failed: the fake runner is configured to fail here" in said


@pytest.mark.slow
@pytest.mark.parametrize(("form", "ignores_ctrl_c"), [("text", True), *wide(("json", False))])
def test_sigterm_ends_a_run_with_a_line_and_the_statistics_of_what_is_there(tmp_path, form, ignores_ctrl_c):
    """A shell starts a job in the background with SIGINT ignored."""
    source = write_jsonl(tmp_path / "in.jsonl", [{"id": f"q{i}", "query": f"question {i}"} for i in range(500)])
    (tmp_path / "c.yaml").write_text("runner: fake\nrunner_args: {delay_s: 0.05, batch_size: 1}\n")
    output = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "ragspec", "generate", "-c", tmp_path / "c.yaml", "-i", source, "-o", output]
    how = signal.SIG_IGN if ignores_ctrl_c else signal.default_int_handler
    run = subprocess.Popen(
        [*map(str, command), "--log-format", form],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, how),
    )
    while run.poll() is None and not (output.exists() and output.read_bytes().count(b"\n") > 3):
        time.sleep(0.05)
    run.terminate()
    said = run.communicate(timeout=120)[1].splitlines()
    assert run.returncode == 143
    finished = len(read_jsonl(output))
    last = said[-1] if form == "text" else json.loads(said[-1])["message"]
    assert last.startswith(f"stopped by SIGTERM at {finished}/500, ")
    assert last.endswith("run the same command again to continue")
    statistics = json.loads((tmp_path / "out.stats.json").read_text())
    assert (statistics["state"], statistics["records"]) == ("stopped", finished)


@pytest.fixture
def default_sigterm():
    """SIGTERM as in a fresh process; libraries of earlier tests may have set a handler."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("default_sigterm")
def test_sigterm_waits_until_a_line_is_counted_and_is_left_to_others_later():
    with terminable(), Interruptions() as interruptions:
        counted = False
        with pytest.raises(Terminated), interruptions.held_back():  # noqa: PT012
            os.kill(os.getpid(), signal.SIGTERM)
            counted = True
        assert counted
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_run_on_a_thread_leaves_signals_alone():
    before = signal.getsignal(signal.SIGTERM)
    found = []

    def look():
        with terminable():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]
