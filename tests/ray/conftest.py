"""A cluster of two machines on this one, for tests: the first stays, the second may be killed."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpuspec import LLM
from tests.server.running import load, tiny_model

STORE_BYTES = 100 << 20
# A loaded machine is no reason to replace a process that starts slowly.
PATIENT = (
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S",
)
WHY = "needs Ray: pip install -e '.[ray]'"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A machine with a processor and the resource `front`."""
    ray = pytest.importorskip("ray", reason=WHY)
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    for name in PATIENT:
        os.environ[name] = "300"
    first = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "resources": {"front": 1}, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=first)
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.fixture(scope="module")
def second(cluster: Any) -> Iterator[Any]:
    """Another machine with a processor, which the last test with it may remove."""
    node = cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
    cluster.wait_for_nodes()
    yield node
    if node in cluster.list_all_nodes():
        cluster.remove_node(node)


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def llm(path: Path) -> Iterator[LLM]:
    """The same model in this process."""
    with load(path) as found:
        yield found
