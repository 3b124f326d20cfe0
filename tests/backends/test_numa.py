"""Weights on memory nodes: spread where there are several, left alone where there is one or the system has no nodes."""

import ctypes
import errno
import logging
import mmap
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from cpuspec.backends import make_backend, numa
from cpuspec.backends.numa import copy_of_processor, interleave_pages, new_pages_on, nodes_to_use
from cpuspec.formats.packing import aligned_bytes, paged_bytes
from cpuspec.platform import SYSTEM, Node, System, Topology
from cpuspec.settings import EngineConfig
from tests.backends.models import forward, tiny

ONE = Topology((), (Node(0, (0, 1), None),), None)
TWO = replace(ONE, nodes=(Node(0, (0,), 1 << 30), Node(1, (1,), 1 << 30)))
MPOL_DEFAULT, MPOL_INTERLEAVE = 0, 3
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
def test_the_pages_that_the_system_tells_of_are_told_and_bytes_stay() -> None:
    data = aligned_bytes((3, 1_000_000))
    data[:] = np.random.default_rng(0).integers(0, 256, data.shape, np.uint8)
    before = data.copy()
    whole = (data.ctypes.data + data.nbytes) // mmap.PAGESIZE - -(-data.ctypes.data // mmap.PAGESIZE)
    here = tuple(node.number for node in SYSTEM.topology().nodes)
    for nodes in (here, (0,), (0, 900)):
        pages = interleave_pages([data], nodes)
        assert not pages or sum(pages.values()) == whole
        assert set(pages) <= set(here)
        assert np.array_equal(data, before)
    assert not interleave_pages([data], (900,))  # there is no such node


class _TwoNodes:
    """A system with two nodes and all pages on the first; some are mapped by another process, too, and others not there."""

    def __init__(self, pages: np.ndarray) -> None:
        self.node = dict.fromkeys(pages.tolist(), 0)
        self.shared: set[int] = set()
        self.moves = 0

    def move_pages(self, count: int, pages: int, wanted: int | None, told: int) -> None:
        status = np.frombuffer((ctypes.c_int32 * count).from_address(told), np.int32)
        for n, page in enumerate((ctypes.c_uint64 * count).from_address(pages)):
            if wanted is not None and page not in self.shared and self.node[page] >= 0:
                self.node[page] = (ctypes.c_int32 * count).from_address(wanted)[n]
                self.moves += 1
            status[n] = -errno.EACCES if wanted is not None and page in self.shared else self.node[page]

    def table(self) -> System:
        return replace(SYSTEM, why_pages_stay=lambda: "", move_pages=self.move_pages)


def test_pages_that_are_there_move_in_runs_once_and_what_cannot_move_is_told(monkeypatch) -> None:
    data = paged_bytes((64 << 20,))
    pages = np.arange(data.ctypes.data, data.ctypes.data + data.nbytes, mmap.PAGESIZE)
    system = _TwoNodes(pages)
    monkeypatch.setattr(numa, "SYSTEM", system.table())
    halves = [data[: 32 << 20], data[32 << 20 :]]
    assert interleave_pages(halves, (0, 1)) == {0: len(pages) // 2, 1: len(pages) // 2}
    runs = pages // (2 << 20)
    assert all(len({system.node[page] for page in pages[runs == run].tolist()}) == 1 for run in np.unique(runs))
    moved = system.moves
    assert interleave_pages(halves, (0, 1)) == {0: len(pages) // 2, 1: len(pages) // 2}
    assert system.moves == moved
    system = _TwoNodes(pages)
    monkeypatch.setattr(numa, "SYSTEM", system.table())
    system.shared.update(pages.tolist())
    system.node[int(pages[7])] = -errno.ENOENT
    assert interleave_pages(halves, (0, 1)) == {0: len(pages) - 1}


@pytest.mark.skipif(not LINUX, reason="memory policies are Linux's")
def test_new_memory_follows_a_policy_only_while_weights_are_made() -> None:
    def policy() -> int:
        mode = ctypes.c_int(-1)
        get_mempolicy = 239  # on x86-64
        ctypes.CDLL(None).syscall(get_mempolicy, ctypes.byref(mode), None, 0, None, 0)
        return mode.value

    before = policy()
    with new_pages_on((0,)):
        inside = policy()
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(policy).result() == inside
    assert inside in ((MPOL_INTERLEAVE, before) if before == MPOL_DEFAULT else (before,))  # a container may forbid it
    assert policy() == before
    with pytest.raises(ZeroDivisionError), new_pages_on((0, 1)):
        raise ZeroDivisionError
    with new_pages_on(()):
        assert policy() == before


@pytest.mark.parametrize(
    ("how", "memory_bytes", "copies"),
    [
        ("auto", 1 << 30, 2),
        ("auto", None, 1),
        ("auto", 1000, 1),
        ("copies", None, 2),
        ("interleave", 1 << 30, 1),
        ("off", 1 << 30, 1),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
def test_weights_lie_where_they_are_wanted_and_every_copy_gives_the_same_bits(
    tmp_path_factory, monkeypatch, caplog, how: str, memory_bytes: int | None, copies: int, family: str
) -> None:
    caplog.set_level(logging.INFO)
    path, plain = tiny(tmp_path_factory, architecture=family), EngineConfig(threads=1, max_rows=8, numa="off", keep_packed=False)
    wanted = _logits(make_backend("numba", path, plain))
    nodes = replace(TWO, nodes=tuple(replace(node, memory_bytes=memory_bytes) for node in TWO.nodes))
    system = replace(
        SYSTEM, topology=lambda: nodes, why_pages_stay=lambda: "", place_new_pages=lambda nodes: True, move_pages=_on_node_one
    )
    for module in ("numa", "numba_backend"):
        monkeypatch.setattr(f"cpuspec.backends.{module}.SYSTEM", system)
    backend = make_backend("numba", path, replace(plain, numa=how))
    assert ("pages of weights on memory nodes: {1: " in caplog.text) == (how != "off")
    matrices = backend.matrices.values()
    assert {matrix.copies_apart > 0 for matrix in matrices} == {copies > 1}
    if copies == 1:
        assert backend._copy_of is None
    else:
        for number in range(copies):
            backend._copy_of[:] = number  # as if the thread ran near this copy
            assert np.array_equal(_logits(backend), wanted)
        matrix = backend.matrices["layers.0.o"]
        ctypes.memset(matrix.data.ctypes.data + matrix.copies_apart, 0, matrix.nbytes)  # read by no other processor
        is_told_apart = bool(SYSTEM.processor_function)  # Windows' threads all read the first copy
        assert np.array_equal(_logits(backend), wanted) != is_told_apart
        backend._copy_of[:] = 0
        assert np.array_equal(_logits(backend), wanted)


def _on_node_one(count: int, pages: int, wanted: int | None, told: int) -> None:
    ctypes.memmove(told, (ctypes.c_int32 * count)(*[1] * count), 4 * count)


def _logits(backend) -> np.ndarray:
    return forward(backend, backend.new_cache(1, 8), {0: [1, 2, 3]}).logits.copy()


def test_a_processor_reads_the_copy_of_its_node() -> None:
    nodes = (Node(0, (0, 2), None), Node(1, (), None), Node(4, (1, 3, 8191, 9000), None))
    copies = copy_of_processor(replace(ONE, nodes=nodes))
    assert copies[[0, 1, 2, 3, 8191]].tolist() == [0, 1, 0, 1, 1]
    assert copies.sum() == 3
