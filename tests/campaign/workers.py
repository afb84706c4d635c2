"""Break a run on workers in the middle: an actor, a machine, the driver, a silence, lost messages. Nothing is lost."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager

from tests.conftest import ROOT, read_jsonl, write_jsonl
from tests.processes import actors

RECORDS = 2000
TIMEOUT_S = 4.0  # of silence
PATIENCE = 180  # seconds for a run
NODES = 2
INJECTION = "RAY_testing_rpc_failure"
LOST = json.dumps(
    {
        f"CoreWorkerService.grpc_client.{method}": {"num_failures": 60, "req_failure_prob": 5, "resp_failure_prob": 5}
        for method in ("PushTask", "KillActor")
    }
)


def campaign(count, seed, folder):
    """Break `count` runs at random moments; return what there was to see. Raises AssertionError."""
    chance = random.Random(seed)
    source = write_jsonl(
        folder / "in.jsonl",
        [{"id": f"q{i}", "query": f"question {i}", "contexts": [f"passage {i % 50} " * 10]} for i in range(RECORDS)],
    )
    seen, deaths = Counter(), 0
    kinds = [*FAULTS, "messages"]
    for kind in sorted(chance.choice(kinds) for _ in range(count)):
        seen[kind] += 1
    for kind, times in seen.items():
        with cluster(lost=kind == "messages") as there:
            for number in range(times):
                deaths += broken(there, kind, chance, folder / f"{kind}-{number}", source)
    return {"runs": count, **dict(seen), "workers_replaced": deaths}


def broken(there, kind, chance, place, source):
    """Let one run break; return how many of its workers were replaced."""
    place.mkdir()
    order = chance.choice(["input", "finish"])
    config = place / "config.yaml"
    args = {"delay_s": 0.02, "fail_ids": ["q7", "q1203"]}
    scale = {"address": there.address, "workers": NODES, "cpus_per_worker": 1, "timeout_s": TIMEOUT_S}
    raw = {"runner": "fake", "runner_args": args, "input": source, "order": order}
    config.write_text(json.dumps(raw | {"output": str(place / "out.jsonl"), "scale": scale}))
    run = start(config)
    moment = chance.randint(0, RECORDS * 8 // 10)
    written(place / "out.jsonl", moment, run)
    if kind in FAULTS:
        FAULTS[kind](there, run, chance)
    if kind == "driver":
        for workers in (chance.choice(["1", "2", "3"]), chance.choice(["1", "2"])):
            run = start(config, "--workers", workers)
            written(place / "out.jsonl", moment + chance.randint(0, RECORDS // 5), run)
            run.kill()
            run.communicate()
        run = start(config)
    said = run.communicate(timeout=PATIENCE)[1].decode()
    assert run.returncode == 1, f"{kind}: {run.returncode}: {said}"  # two records fail
    check(place, kind, ordered=order == "input")
    stats = json.loads((place / "out.stats.json").read_text())
    return sum(worker["deaths"] for worker in stats.get("workers", ()))


def start(config, *more):
    command = [sys.executable, "-m", "ragspec", "generate", "--config", str(config), *more]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def written(output, lines, run):
    """Wait until so many lines are there, or the run has ended."""
    deadline = time.monotonic() + PATIENCE
    while run.poll() is None and time.monotonic() < deadline:
        if output.exists() and output.read_bytes().count(b"\n") > lines:
            return
        time.sleep(0.02)


def check(place, kind, *, ordered):
    """Every record is there once, in the order asked for, and the statistics add up."""
    lines = read_jsonl(place / "out.jsonl")
    ids = [line["id"] for line in lines]
    expected = [f"q{i}" for i in range(RECORDS)]
    assert sorted(ids) == sorted(expected), f"{kind}: {len(ids)} lines, {len(set(ids))} records"
    assert not ordered or ids == expected, kind
    assert {line["id"] for line in lines if "error" in line} == {"q7", "q1203"}, kind
    stats = json.loads((place / "out.stats.json").read_text())
    assert stats["records"] + stats["failed"] + stats["skipped"] == RECORDS, kind
    workers = stats.get("workers", ())  # none are started where earlier runs left nothing to answer
    for total in ("records", "failed", "prompt_tokens", "output_tokens"):
        assert sum(worker[total] for worker in workers) == stats[total], (kind, total)


# -- what breaks ------------------------------------------------------------------------------------------------------


def kill_actor(there, run, chance):
    if found := actors():
        os.kill(chance.choice(found), signal.SIGKILL)


def kill_machine(there, run, chance):
    node = chance.choice(sorted(there.worker_nodes, key=lambda node: node.unique_id))
    there.remove_node(node, allow_graceful=False)
    there.add_node(num_cpus=1, object_store_memory=150 << 20)


def kill_driver(there, run, chance):
    run.kill()
    run.communicate()


def stop_and_go_on(there, run, chance):
    if found := actors():
        stopped = chance.choice(found)
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(TIMEOUT_S + 2)
        os.kill(stopped, signal.SIGCONT)


FAULTS = {"actor": kill_actor, "machine": kill_machine, "driver": kill_driver, "silence": stop_and_go_on}


@contextmanager
def cluster(*, lost):
    """A head that answers nothing, and machines of one core each. lost: messages get lost among them."""
    from ray.cluster_utils import Cluster

    if lost:
        os.environ[INJECTION] = LOST
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(NODES):
            found.add_node(num_cpus=1, object_store_memory=150 << 20)
        yield found
    finally:
        found.shutdown()
        os.environ.pop(INJECTION, None)
