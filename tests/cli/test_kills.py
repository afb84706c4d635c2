"""A run that is killed leaves no process behind, however it is killed and whatever it has started."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, write_jsonl
from tests.processes import birth, family

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc"),
]
PATIENCE_S = 150  # that the last of them may take to end
signals = pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)


def until(done, process=None, seconds=240):
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline and (process is None or process.poll() is None):
        time.sleep(0.05)
    return done()


def killed(tmp_path, how, config, begun, *command, least):
    """Kill a run once `begun`, and return what is left of those whom it has started; `least` is how many these are."""
    path = tmp_path / "c.yaml"
    source = write_jsonl(tmp_path / "in.jsonl", [{"id": f"q{i}", "query": f"question {i}"} for i in range(2000)])
    path.write_text(json.dumps({"input": source, **config}))
    with open(tmp_path / "stderr.txt", "w") as said:
        run = subprocess.Popen(
            [sys.executable, "-m", "ragspec", *(command or ("generate", "-o", str(tmp_path / "out"))), "-c", str(path)],
            cwd=ROOT,
            stderr=said,
        )
    try:
        assert until(lambda: begun(run), run), (tmp_path / "stderr.txt").read_text()
        children = family(run.pid)
        assert len(children) >= least
        run.send_signal(how)
        assert run.wait(PATIENCE_S) in (
            -how,
            how,
            128 + how,
        )  # the others where Ray or a run's own end takes the signal
    finally:
        run.kill()
    until(lambda: not left(children), seconds=PATIENCE_S)
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left(children)}
    for pid in names:
        os.kill(pid, signal.SIGKILL)
    return names


def left(children):
    return [pid for pid, when in children.items() if birth(pid) == when]


def lines(path):
    return lambda run: path.exists() and path.read_bytes().count(b"\n") > 3


@signals
def test_a_killed_run_of_our_engine_leaves_no_process(tmp_path, tiny, how):
    config = {"runner": "huggingface", "model": tiny, "runner_args": {"batch_size": 1, "compile": "off"}}
    assert not killed(tmp_path, how, config, lines(tmp_path / "out"), least=0)


@signals
def test_a_killed_benchmark_leaves_no_process_that_goes_on_with_its_pass(tmp_path, how):
    config = {"runner": "fake", "runner_args": {"delay_s": 0.5, "batch_size": 1}}
    answers = tmp_path / "bench"

    def begun(run):
        return any(found.stat().st_size for found in answers.rglob("*.jsonl")) and family(run.pid)

    assert not killed(tmp_path, how, config, begun, "benchmark", "-o", str(answers), least=1)


@pytest.mark.ray
@pytest.mark.parametrize(
    "how",
    [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.wide)],  # Ray's agents notice it after a minute
    ids=lambda how: how.name,
)
def test_a_killed_run_leaves_neither_workers_nor_their_cluster(tmp_path, how):
    config = {"runner": "fake", "runner_args": {"delay_s": 0.3}, "scale": {"workers": 2, "cpus_per_worker": 1}}
    assert not killed(tmp_path, how, config, lines(tmp_path / "out"), least=4)  # workers, and what Ray starts for them


@pytest.mark.wide
@pytest.mark.vllm
@pytest.mark.parametrize("own_process", [False, True])
@signals
def test_a_killed_run_of_vllm_leaves_no_process_of_its_engine(tmp_path, demo, how, own_process):
    args = {"enforce_eager": True, "max_model_len": 256, "batch_size": 2, "kv_cache_memory_bytes": 36 << 20}
    args["own_process"] = own_process
    config = {"runner": "vllm", "model": demo, "runner_args": args, "sampling": {"max_new_tokens": 4}}
    assert not killed(tmp_path, how, config, lines(tmp_path / "out"), least=int(own_process))
