"""Workers die, fall silent, and come back; machines come and go. Nothing is lost, and nothing is there twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ragspec.errors import ModelError
from tests.conftest import ROOT, read_jsonl, write_jsonl
from tests.processes import actors, start_interruptible
from tests.run.ray.helpers import answered, lines_of, once, records, scaled, settings, until, while_it_runs

pytestmark = pytest.mark.ray

SLOW = {"runner_args": {"delay_s": 0.1, "batch_size": 4}}


def test_what_a_killed_worker_had_is_answered_by_others(tmp_path, address):
    source = write_jsonl(tmp_path / "in.jsonl", records(200))
    thread = while_it_runs(tmp_path / "out.jsonl", lambda: os.kill(actors()[0], signal.SIGKILL))
    summary, _ = answered(tmp_path, "out", source, order="finish", **SLOW, **scaled(address))
    thread.join()
    assert once(tmp_path / "out.jsonl") == summary.records == 200
    assert sum(part["deaths"] for part in summary.to_json()["workers"]) == 1
    assert any("died" in note for note in summary.notes)


@pytest.mark.wide
def test_a_worker_that_falls_silent_is_taken_for_dead_and_not_listened_to_any_more(tmp_path, address):
    source = write_jsonl(tmp_path / "in.jsonl", records(200))
    stopped = []

    def stop():
        stopped.append(actors()[0])
        os.kill(stopped[0], signal.SIGSTOP)
        time.sleep(5)
        os.kill(stopped[0], signal.SIGCONT)

    thread = while_it_runs(tmp_path / "out.jsonl", stop)
    summary, _ = answered(tmp_path, "out", source, order="finish", **SLOW, **scaled(address, workers=1, timeout_s=2.0))
    thread.join()
    assert once(tmp_path / "out.jsonl") == summary.records == 200
    assert any("said nothing for 2 s" in note for note in summary.notes)


def test_a_record_that_kills_two_workers_becomes_an_error_line(tmp_path, address):
    source = write_jsonl(tmp_path / "in.jsonl", records(60))
    summary, _ = answered(
        tmp_path, "out", source, runner_args={"exit_ids": ["q20"], "batch_size": 4}, **scaled(address)
    )
    lines = {line["id"]: line for line in read_jsonl(tmp_path / "out.jsonl")}
    assert once(tmp_path / "out.jsonl") == 60
    assert [name for name, line in lines.items() if "error" in line] == ["q20"]
    assert lines["q20"]["error"]["type"] == "WorkerError"
    assert "workers died while answering it" in lines["q20"]["error"]["message"]
    assert sum(part["deaths"] for part in summary.to_json()["workers"]) == 2


@pytest.mark.wide
def test_a_worker_that_dies_of_every_record_is_not_replaced_for_ever(tmp_path, address):
    source = write_jsonl(tmp_path / "in.jsonl", records(4))
    summary, _ = answered(
        tmp_path, "out", source, runner_args={"exit_ids": [f"q{i}" for i in range(4)]}, **scaled(address, workers=1)
    )
    assert summary.failed == 4
    assert summary.to_json()["workers"][0]["deaths"] <= 8


def test_no_worker_left_is_the_end(tmp_path, address, monkeypatch):
    monkeypatch.setattr("ragspec.run.ray.crew.TRIES", 1)
    source = write_jsonl(tmp_path / "in.jsonl", records(8))
    with pytest.raises(ModelError, match="no worker is left"):
        answered(tmp_path, "out", source, runner_args={"exit_ids": ["q0"]}, **scaled(address, workers=1))


@pytest.mark.wide
def test_a_machine_that_vanishes_loses_nothing_and_one_that_joins_is_used(tmp_path):
    from ray.cluster_utils import Cluster

    source, config = write_jsonl(tmp_path / "in.jsonl", records(300)), tmp_path / "c.yaml"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        first = cluster.add_node(num_cpus=1, object_store_memory=150 << 20)
        slow = {"runner_args": {"delay_s": 0.2, "batch_size": 4}}
        config.write_text(
            json.dumps(settings(tmp_path, "out", source, order="finish", **slow, **scaled(cluster.address)))
        )
        run = subprocess.Popen([sys.executable, "-m", "ragspec", "generate", "-c", config], cwd=ROOT)
        try:
            until(lambda: lines_of(tmp_path / "out.jsonl") > 20)
            cluster.add_node(num_cpus=1, object_store_memory=150 << 20)
            until(lambda: len(actors()) == 2)
            time.sleep(2)
            cluster.remove_node(first, allow_graceful=False)
            assert run.wait(120) == 0
        finally:
            run.kill()
    finally:
        cluster.shutdown()
    stats = json.loads((tmp_path / "out.stats.json").read_text())
    assert once(tmp_path / "out.jsonl") == stats["records"] == 300
    assert any("room for 1 of 2 workers" in note for note in stats["notes"])
    assert all(part["records"] > 0 for part in stats["workers"])
    assert sum(part["deaths"] for part in stats["workers"]) == 1


def command(tmp_path, source, output, *more):
    config = tmp_path / "config.yaml"
    config.write_text(
        json.dumps({"runner": "fake", "order": "finish", "runner_args": {"delay_s": 0.3, "batch_size": 4}})
    )
    return [
        *(sys.executable, "-m", "ragspec", "generate", "-c", str(config), "-i", source, "-o", str(output)),
        *("--workers", "2", *more),
    ]


def test_an_interruption_ends_the_workers_and_leaves_a_file_that_resumes(tmp_path, address):
    source = write_jsonl(tmp_path / "in.jsonl", records(300))
    output = tmp_path / "out.jsonl"
    run = start_interruptible(command(tmp_path, source, output), cwd=ROOT)
    until(lambda: lines_of(output) > 20)
    workers = actors(run.pid)
    assert workers
    run.send_signal(signal.SIGINT)
    said = run.communicate(timeout=60)[1]
    assert run.returncode == 130
    assert "interrupted" in said
    assert "Traceback" not in said
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 30)
    begun = len(read_jsonl(output))
    assert 0 < begun < 300
    done = subprocess.run(
        [*command(tmp_path, source, output), "--ray-address", address, "--set", "runner_args.delay_s=0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert once(output) == 300
