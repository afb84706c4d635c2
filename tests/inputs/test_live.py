"""A pipe that is kept open: whoever writes a question only after the last answer is not kept waiting."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ragspec.config.load import build_config
from ragspec.errors import ConfigError
from ragspec.inputs.feed import MOST, Feed
from ragspec.inputs.text import TextSource
from ragspec.run.generate import generate as run
from tests.cli.test_cli import RAGSPEC, start_interruptible
from tests.conftest import read_jsonl
from tests.retrieval.test_retrieval import built

PATIENCE_S = 200


class Partner(threading.Thread):
    """Writes each part of a script into a pipe once the output has as many lines as all parts before it."""

    def __init__(self, pipe, output, script):
        super().__init__(daemon=True)
        self.answered = 0  # parts whose answers came while the pipe was open
        self._pipe = pipe
        self._output = output
        self._script = script

    def run(self):
        with open(self._pipe, "wb") as pipe:
            wanted = 0
            for part in self._script:
                pipe.write(part)
                pipe.flush()
                wanted += part.count(b"\n")
                if not self._wait_for(wanted):
                    return
                self.answered += 1

    def _wait_for(self, wanted):
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if self._output.exists() and self._output.read_bytes().count(b"\n") >= wanted:
                return True
            time.sleep(0.01)
        return False


def question(key, text="Why is the sky blue?", **more):
    return json.dumps({"id": key, "query": text, **more}).encode() + b"\n"


SCRIPT = [
    question("a"),
    question("b") + question("c", "How does a pump work?") + question("d", "Who was it?"),
    question("e") + b"no json\n",  # nothing after an error line is waited for
    question("a"),  # an id again: an error line alone
    question("f"),
]
IDS = ["a", "b", "c", "d", "e", "6", "a", "f"]


def converse(tmp_path, raw, script=SCRIPT):
    """Answer a partner's questions and return the partner and the summary."""
    pipe, output = tmp_path / "pipe", tmp_path / "out.jsonl"
    os.mkfifo(pipe)
    partner = Partner(pipe, output, script)
    partner.start()
    summary = run(build_config({"input": str(pipe), "output": str(output), **raw}))
    partner.join(PATIENCE_S)
    return partner, summary


RUNNERS = {
    "fake": {"runner": "fake"},
    "fake, one by one": {"runner": "fake", "runner_args": {"batch_size": 1}},
    "engine": {"speculation": {"method": "context"}, "runner_args": {"engine": "ragspec"}},
    "engine, two rows": {"runner_args": {"engine": "ragspec", "batch_size": 2, "lookahead": 3}},
    "stock": {"runner_args": {"engine": "transformers"}},
    "stock, drafting": {"speculation": {"method": "prompt_lookup"}, "runner_args": {"engine": "transformers"}},
}


@pytest.mark.parametrize("order", ["input", "finish"])
@pytest.mark.parametrize("name", RUNNERS)
def test_a_partner_that_waits_for_each_answer_gets_it(tmp_path, tiny, name, order):
    raw = {"model": tiny, "sampling": {"max_new_tokens": 4}, "order": order, **RUNNERS[name]}
    if raw.get("runner") == "fake":
        del raw["model"]
    partner, summary = converse(tmp_path, raw)
    assert partner.answered == len(SCRIPT)
    written = [line["id"] for line in read_jsonl(tmp_path / "out.jsonl")]
    assert written == IDS if order == "input" else sorted(written) == sorted(IDS)
    assert (summary.records, summary.failed) == (6, 2)
    assert not [thread for thread in threading.enumerate() if thread.name == "input"]


@pytest.mark.wide
@pytest.mark.vllm
def test_a_partner_of_vllm_gets_each_answer(tmp_path, demo):
    args = {"enforce_eager": True, "max_model_len": 512, "batch_size": 4, "kv_cache_memory_bytes": 36 << 20}
    raw = {"model": demo, "runner": "vllm", "sampling": {"max_new_tokens": 4}, "runner_args": args}
    partner, _ = converse(tmp_path, raw)
    assert partner.answered == len(SCRIPT)
    assert [line["id"] for line in read_jsonl(tmp_path / "out.jsonl")] == IDS


@pytest.mark.slow
def test_a_partner_gets_each_answer_with_contexts_found_on_the_fly(tmp_path):
    built(tmp_path)
    raw = {"runner": "fake", "retrieval": {"index": str(tmp_path / "idx"), "top_k": 1}}
    script = [question("a", "owls"), question("b", "lamp") + question("c", "x", contexts=[]), question("d", "pump")]
    partner, summary = converse(tmp_path, raw, script)
    assert partner.answered == len(script)
    found = {line["id"]: line["contexts"] for line in read_jsonl(tmp_path / "out.jsonl")}
    assert found == {"a": ["owl"], "b": ["lamp"], "c": [], "d": ["pump"]}
    assert summary.retrieval["queries"] == 3


def test_lines_that_were_answered_before_keep_nobody_waiting(tmp_path):
    raw = {"runner": "fake"}
    converse(tmp_path, raw, SCRIPT[:2])
    (tmp_path / "pipe").unlink()
    again = [SCRIPT[0] + SCRIPT[1], question("new") + SCRIPT[0].replace(b"a", b"z"), question("end")]
    partner, summary = converse(tmp_path, raw, again)
    assert partner.answered == 3
    assert (summary.records, summary.skipped) == (3, 4)


def test_a_limited_run_ends_without_waiting_for_what_it_does_not_read(tmp_path):
    pipe = Pipe(tmp_path / "pipe")
    pipe.write(SCRIPT[1], keep_open=True)
    config = build_config({"runner": "fake", "input": str(pipe.path), "output": str(tmp_path / "out.jsonl")})
    assert run(config, limit=3).records == 3
    assert not [thread for thread in threading.enumerate() if thread.name == "input"]
    pipe.file.close()


def test_the_filter_passes_on_each_line_as_it_comes(tmp_path):
    built(tmp_path)
    command = [sys.executable, "-m", "ragspec", "retrieve", "--index", str(tmp_path / "idx"), "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        stop = threading.Timer(PATIENCE_S, process.kill)
        stop.start()
        for key, text, wanted in (("a", "owls", ["owl"]), ("b", "lamp", ["lamp"]), ("c", "zzz", [])):
            process.stdin.write(question(key, text))
            process.stdin.flush()
            line = json.loads(process.stdout.readline())
            assert [context["id"] for context in line["contexts"]] == wanted
        process.stdin.close()
        stop.cancel()


class Pipe:
    """A named pipe with a writer in this process."""

    def __init__(self, path):
        os.mkfifo(path)
        self.path = path

    def write(self, data, *, keep_open=False):
        def go():
            self.file = open(self.path, "wb", buffering=0)  # noqa: SIM115
            while self.sent < len(data):
                self.sent += self.file.write(data[self.sent : self.sent + 4096])
            self.written.set()
            if not keep_open:
                self.file.close()

        self.written, self.sent = threading.Event(), 0
        threading.Thread(target=go, daemon=True).start()


def test_a_full_pipe_is_looked_at_as_far_ahead_as_a_file(tmp_path):
    count = 3000
    data = b"".join(question(f"q{i}") for i in range(count))
    assert len(data) > 1 << 16  # more than the pipe itself holds
    pipe = Pipe(tmp_path / "pipe")
    pipe.write(data, keep_open=True)
    with TextSource(str(pipe.path), format="jsonl") as lines:
        feed = Feed(lines)
        feed.put_back([next(feed)])
        assert pipe.written.wait(PATIENCE_S)  # as it is while a model loads
        end = time.monotonic() + PATIENCE_S
        while len(found := feed.take(4096, wait=True)) < count and time.monotonic() < end:
            feed.put_back(found)
            time.sleep(0.01)
        assert len(found) == count
        assert feed.take(4096, wait=False) == []
        feed.close()


def test_no_more_than_a_bound_is_read_ahead(tmp_path):
    pipe = Pipe(tmp_path / "pipe")
    size, held = len(question("q")), 1 << 18  # by the pipe itself, and by what reads and writes it
    pipe.write(question("q") * (3 * MOST))
    assert 2 * MOST * size > held
    with TextSource(str(pipe.path), format="jsonl") as lines:
        live = iter(lines)
        next(live)
        before = -1
        while pipe.sent != before:  # until it is not read any further
            before = pipe.sent
            time.sleep(0.5)
        assert MOST * size < pipe.sent < MOST * size + held
        assert not pipe.written.is_set()
        assert sum(1 for _ in live) == 3 * MOST - 1


def test_half_a_line_is_not_there_yet(tmp_path):
    pipe = Pipe(tmp_path / "pipe")
    pipe.write(question("a") + b'{"id": "b", "que', keep_open=True)
    with TextSource(str(pipe.path), format="jsonl") as lines:
        feed = Feed(lines)
        assert [line.value["id"] for line in feed.take(9, wait=True)] == ["a"]
        assert feed.take(9, wait=False) == []
        pipe.file.write(b'ry": "x"}')
        pipe.file.close()
        assert [line.value["id"] for line in feed.take(9, wait=True)] == ["b"]  # the last line may lack its end


@pytest.mark.parametrize("kind", ["fifo", "file"])
@pytest.mark.parametrize("name", ["fake", "engine", "stock"])
def test_a_damaged_archive_ends_the_run_with_its_own_message_after_what_came_before(tmp_path, tiny, name, kind):
    lines = b"".join(question(f"q{i}", f"Why {i}?") for i in range(30))
    data = gzip.compress(lines, 0)[:-200]  # stored as it is, so the cut is in a line
    path = tmp_path / "in.jsonl.gz"
    if kind == "fifo":
        Pipe(path).write(data)
    else:
        path.write_bytes(data)
    raw = {"input": str(path), "output": str(tmp_path / "out.jsonl"), "sampling": {"max_new_tokens": 4}}
    raw |= {"model": tiny} if name != "fake" else {}
    with pytest.raises(ConfigError, match=r"in.jsonl.gz:\d+: the compressed data is damaged"):
        run(build_config(raw | RUNNERS[name]))
    answered = [line["id"] for line in read_jsonl(tmp_path / "out.jsonl")]
    assert answered == [f"q{i}" for i in range(len(answered))]
    assert len(answered) > 20


def test_an_interruption_while_the_pipe_is_silent_ends_the_run(tmp_path):
    (tmp_path / "c.yaml").write_text("runner: fake\n")
    output = tmp_path / "out.jsonl"
    reading, writing = os.pipe()
    command = [*RAGSPEC, "generate", "-c", str(tmp_path / "c.yaml"), "-i", "-", "-o", str(output)]
    process = start_interruptible(command, stdin=reading)
    os.write(writing, SCRIPT[0] + SCRIPT[1])
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and not (output.exists() and output.read_bytes().count(b"\n") == 4):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    os.close(reading)
    os.close(writing)
    assert process.returncode == 130
    assert len(stderr.strip().splitlines()) == 1, stderr
    assert len(Path(output).read_text().splitlines()) == 4
