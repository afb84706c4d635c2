"""A real cluster on this machine: a head that answers nothing, and two nodes with room for two workers each."""

import pytest


@pytest.fixture(scope="session")
def cluster():
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        found.add_node(num_cpus=2, object_store_memory=150 << 20)
    yield found
    found.shutdown()


@pytest.fixture
def address(cluster):
    return cluster.address
