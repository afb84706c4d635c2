"""How large a worker is: what the config says, else what the machines have."""

import pytest

from ragspec.config.load import build_config
from ragspec.config.sections import ScaleConfig
from ragspec.errors import ConfigError
from ragspec.run.ray.cluster import Cluster, Node


class There(Cluster):
    """A cluster of these machines: (CPUs, GPUs) each."""

    def __init__(self, scale, *machines):
        super().__init__(ScaleConfig(**scale))
        self.machines = machines

    def nodes(self):
        return [Node(str(n), f"node {n}", cpus, gpus) for n, (cpus, gpus) in enumerate(self.machines)]


@pytest.mark.parametrize(
    ("scale", "machines", "of_engine", "share", "room"),
    [
        ({"workers": 8}, [(64, 8)], 1, (8, 1), 8),
        ({"workers": 4}, [(64, 8)], 2, (16, 2), 4),
        ({"workers": 4, "gpus_per_worker": 1.0}, [(64, 8)], 2, (8, 1), 8),
        ({"workers": 4}, [(0, 0), (16, 0), (16, 0)], 1, (8, 0), 4),
        ({"workers": 1}, [(6, 0)], 1, (6, 0), 1),
        ({"workers": 3}, [(2, 0)], 1, (1, 0), 2),
        ({"workers": 2, "cpus_per_worker": 3}, [(8, 0), (2, 0)], 1, (3, 0), 2),
        ({"workers": 2}, [(4, 0), (8, 1)], 1, (8, 1), 1),
    ],
)
def test_a_worker_gets_its_share_of_a_machine(scale, machines, of_engine, share, room):
    there = There(scale, *machines)
    assert there.share(of_engine) == share
    assert there.room(*share) == room


def test_a_worker_that_fits_nowhere_is_told_what_there_is():
    there = There({"workers": 2}, (8, 1), (8, 0))
    with pytest.raises(
        ConfigError, match="requested: 2 workers of 4 CPUs and 2 GPUs each; available: node 0 has 8 CPUs and 1 GPU"
    ):
        There({"workers": 2, "cpus_per_worker": 4, "gpus_per_worker": 2}, (8, 1), (8, 0)).share(1)
    with pytest.raises(ConfigError, match="no machine of the cluster has room"):
        there.share(2)


def test_an_engine_of_several_gpus_stays_in_its_worker():
    config = build_config(
        {
            "runner": "vllm",
            "model": "m",
            "input": "x.jsonl",
            "output": {"path": "s3://b/o/", "storage_options": {"key": "AKIAABCDEFGHIJKLMNOP"}},
            "runner_args": {"tensor_parallel_size": 2},
            "scale": {"workers": 2},
        }
    )
    found = config.of_workers()
    assert found.devices() == 2
    assert found.runner_args["distributed_executor_backend"] == "mp"
    assert found.input is None
    assert found.scale is None
    assert found.output.storage_options == {}
    own = config.model_copy(update={"runner_args": {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}})
    assert own.of_workers().runner_args["distributed_executor_backend"] == "ray"


@pytest.mark.ray
def test_a_worker_that_ray_kills_for_its_memory_is_a_death(monkeypatch):
    import ray

    there = There({"workers": 2}, (2, 0))
    monkeypatch.setattr(there, "_ray", ray)
    error = ray.exceptions.OutOfMemoryError("1 worker(s) were killed\ndue to the node running low on memory.")
    assert isinstance(error, there.death_errors())
    assert there.reason(error) == "1 worker(s) were killed due to the node running low on memory."
