"""Weights on memory nodes: spread where there are several, left alone where there is one or the system has no nodes."""

import platform
import sys
from dataclasses import replace

import numpy as np
import pytest

from cpuspec.backends import make_backend
from cpuspec.backends.numa import interleave_pages, nodes_to_use
from cpuspec.config import EngineConfig
from cpuspec.formats.packing import aligned_bytes
from cpuspec.topology import Node, Topology, read_topology
from tests.backends.models import forward, tiny

ONE = Topology((), (Node(0, (0, 1), None),), None)
TWO = replace(ONE, nodes=(Node(0, (0,), 1 << 30), Node(1, (1,), 1 << 30)))
LINUX = sys.platform == "linux" and platform.machine() == "x86_64"


@pytest.mark.parametrize(
    ("topology", "nodes"),
    [
        (ONE, ()),
        (TWO, (0, 1)),
        (replace(TWO, nodes=(Node(0, (0, 1), None), Node(1, (), None))), ()),  # memory without processors
        (replace(TWO, nodes=()), ()),
        (replace(TWO, nodes=(Node(3, (0,), None), Node(70, (1,), None))), (3, 70)),
    ],
)
def test_nodes_near_usable_processors_are_used_where_there_are_several(topology: Topology, nodes: tuple[int, ...]) -> None:
    assert nodes_to_use(topology) == nodes


@pytest.mark.skipif(not LINUX, reason="memory policies are Linux's")
def test_the_system_takes_the_call_or_declines_and_bytes_stay() -> None:
    data = aligned_bytes((3, 100_000))
    data[:] = np.random.default_rng(0).integers(0, 256, data.shape, np.uint8)
    before = data.copy()
    here = tuple(node.number for node in read_topology().nodes)
    for nodes in (here, (0,), (900,), (0, 900)):
        assert interleave_pages([data], nodes) in (True, False)
        assert np.array_equal(data, before)
    assert not interleave_pages([data], (900,))  # there is no such node


def test_nothing_is_done_without_nodes() -> None:
    assert not interleave_pages([aligned_bytes((10,))], ())


@pytest.mark.parametrize("wanted", [True, False])
def test_a_backend_spreads_its_weights_unless_told_not_to(tmp_path_factory, monkeypatch, wanted: bool) -> None:  # type: ignore[no-untyped-def]
    given = []
    monkeypatch.setattr("cpuspec.backends.numba_backend.read_topology", lambda: TWO)
    monkeypatch.setattr(
        "cpuspec.backends.numba_backend.interleave_pages", lambda arrays, nodes: given.extend((one.nbytes, nodes) for one in arrays)
    )
    backend = make_backend("numba", tiny(tmp_path_factory), EngineConfig(threads=1, max_rows=8, numa_interleave=wanted))
    assert forward(backend, backend.new_cache(1, 8), {0: [1, 2]}).logits.shape[0] == 2
    assert bool(given) == wanted
    assert all(num_bytes and nodes == (0, 1) for num_bytes, nodes in given)
