"""Runs on workers, and what became of them."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from ragspec.config.load import build_config
from ragspec.run.generate import generate
from tests.conftest import ROOT, read_jsonl


def records(count, **more):
    return [
        {"id": f"q{i}", "query": f"question {i}", "contexts": [f"passage {i % 7} " * 20], **more} for i in range(count)
    ]


def settings(tmp_path, name, source, **more):
    return {"runner": "fake", "input": str(source), "output": str(tmp_path / f"{name}.jsonl"), **more}


def scaled(address, workers=2, **more):
    return {"scale": {"address": address, "workers": workers, "cpus_per_worker": 1, **more}}


def answered(tmp_path, name, source, **more):
    summary = generate(build_config(settings(tmp_path, name, source, **more)))
    return summary, (tmp_path / f"{name}.jsonl").read_bytes()


def once(path):
    found = Counter(line["id"] for line in read_jsonl(path))
    assert set(found.values()) == {1}
    return len(found)


def until(done, seconds=90):
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert done()


def lines_of(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def while_it_runs(output, do):
    """Run `do` on a thread, once workers answer."""

    def wait():
        until(lambda: lines_of(output) > 20)
        do()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def ragspec(*args, patience_s=300):
    """Run a command; one that hangs is ended and says where it hung."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ragspec", *map(str, args)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
    )
    try:
        out, err = process.communicate(timeout=patience_s)
    except subprocess.TimeoutExpired:
        for each in (*psutil.Process(process.pid).children(recursive=True), process):  # they print their stacks
            each.send_signal(signal.SIGABRT)
            each.wait(10)
        out, err = process.communicate()
        logs = [path.read_text() for each in args if Path(each).is_dir() for path in Path(each).rglob("*.log")]
        pytest.fail("\n".join([f"hung for {patience_s} s: {process.args}", out, err, *logs]))
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
