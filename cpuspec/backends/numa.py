"""Weights on the memory nodes of a machine with several: a copy on each where there is room, else spread over them.

Copies: threads read the one near the processor that they run on. So all weights come from nearby memory, for their size once more
for each node. Threads need not be pinned: before each matrix they ask where they are.

Spread: runs of 2 MB lie on the nodes in turns, so that all nodes' memory is read at once whatever thread takes which tiles. Memory
that is new follows the thread's policy (`new_pages_on`). Pages that are there already, as those that an earlier start left in the
page cache, are moved (`interleave_pages`): a policy for the range moves none of a shared mapping. A page that another process has
mapped, too, stays.

Speed is not measured: the machines at hand have one node. Where pages lie was counted in a virtual machine of two.
"""

import logging
import mmap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats.packing import PackedTensor, aligned_bytes
from cpuspec.formats.tensor import U8
from cpuspec.kernels.layout import MOST_PROCESSORS
from cpuspec.platform import SYSTEM, Topology

_log = logging.getLogger(__name__)

_RUN_BYTES = 2 << 20  # a huge page
_AT_ONCE = 1 << 18  # pages that one call asks for
_UNEVEN = 0.1  # a node may have so much less or more than its share before pages are moved
_SHARE = 0.5  # of the available memory, and of each node's, that copies may take

Pages = NDArray[np.uint64]


def nodes_to_use(topology: Topology) -> tuple[int, ...]:
    """The nodes near the processors that may be used, where there are several; else none."""
    nodes = tuple(node.number for node in topology.nodes if node.cpus)
    return nodes if len(nodes) > 1 else ()


def copy_of_processor(topology: Topology) -> NDArray[np.int64]:
    """By logical processor, the number of its node among `nodes_to_use`, and so of the copy that is near it."""
    copies = np.zeros(MOST_PROCESSORS, np.int64)
    for number, node in enumerate(node for node in topology.nodes if node.cpus):
        copies[[cpu for cpu in node.cpus if cpu < MOST_PROCESSORS]] = number
    return copies


def placed(matrices: Mapping[str, PackedTensor], topology: Topology, how: str) -> Mapping[str, PackedTensor]:
    """Packed weights on the machine's memory nodes, and a line in the log that says how many pages lie on which.

    how: as in `EngineConfig.numa`. Where the machine has one node, the user gave the process a memory policy, as with numactl, or
    the system denies the calls, nothing is moved.
    """
    nodes = nodes_to_use(topology)
    if not nodes or how == "off":
        return matrices
    why = SYSTEM.why_pages_stay()
    if not why and (how == "copies" or (how == "auto" and _has_room_for_copies(matrices, topology))):
        matrices = _copied(matrices, nodes)
        pages = _count(_places(_pages_of(matrix.data for matrix in matrices.values())))
    else:
        pages = interleave_pages((matrix.data for matrix in matrices.values()), nodes)
    why = why or "the system does not tell where they are"
    _log.info("pages of weights on memory nodes: %s", pages or f"none was moved: {why}")
    return matrices


def _has_room_for_copies(matrices: Mapping[str, PackedTensor], topology: Topology) -> bool:
    num_bytes, available = sum(matrix.nbytes for matrix in matrices.values()), SYSTEM.memory().available
    nodes = [node for node in topology.nodes if node.cpus]
    return (
        available is not None
        and len(nodes) * num_bytes <= _SHARE * available
        and all(node.memory_bytes is not None and num_bytes <= _SHARE * node.memory_bytes for node in nodes)
    )


def _copied(matrices: Mapping[str, PackedTensor], nodes: Sequence[int]) -> dict[str, PackedTensor]:
    """The matrices in new memory, one copy of all of them on each node. Raises MemoryError."""
    starts = np.cumsum([0, *(-(-matrix.nbytes // 64) * 64 for matrix in matrices.values())])
    copies = aligned_bytes((len(nodes), -(-int(starts[-1]) // _RUN_BYTES) * _RUN_BYTES))
    places = dict(zip(matrices, starts.tolist(), strict=False))
    for node, copy in zip(nodes, copies, strict=True):

        def write(name: str, copy: U8 = copy) -> None:
            data = matrices[name].data
            copy[places[name] : places[name] + data.nbytes].reshape(data.shape)[:] = data

        with new_pages_on([node]), ThreadPoolExecutor(4) as pool:
            list(pool.map(write, matrices))
    return {
        name: replace(
            matrix,
            data=copies[0, places[name] : places[name] + matrix.nbytes].reshape(matrix.data.shape),
            copies_apart=copies.strides[0],
        )
        for name, matrix in matrices.items()
    }


@contextmanager
def new_pages_on(nodes: Sequence[int]) -> Iterator[None]:
    """Take memory from the nodes in turns, in this thread and those that it starts, where the user gave no policy of their own."""
    changed = bool(nodes) and not SYSTEM.why_pages_stay() and SYSTEM.place_new_pages(nodes)
    try:
        yield
    finally:
        if changed:
            SYSTEM.place_new_pages(())


def interleave_pages(arrays: Iterable[U8], nodes: Sequence[int]) -> dict[int, int]:
    """Move the whole pages of these bytes to the nodes in turns, unless each node has about its share of them.

    Returns how many pages lie on each node afterwards, as the system tells; nothing where it does not, or where none may be moved.
    """
    if not nodes or SYSTEM.why_pages_stay():
        return {}
    pages = _pages_of(arrays)
    before = _places(pages)
    there = np.isin(before, nodes)
    if not there.any():
        return {}
    share = there.sum() / len(nodes)
    if any(abs((before == node).sum() - share) > _UNEVEN * share for node in nodes):
        wanted = np.array(nodes, np.int32)[pages // np.uint64(_RUN_BYTES) % np.uint64(len(nodes))]
        moved = before != wanted
        _move(pages[moved], wanted[moved])
    return _count(_places(pages))


def _count(places: NDArray[np.int32]) -> dict[int, int]:
    return dict(sorted(Counter(place for place in places.tolist() if place >= 0).items()))


def _pages_of(arrays: Iterable[U8]) -> Pages:
    """The addresses of the whole pages of arrays; a page that two arrays share once."""
    size, found = mmap.PAGESIZE, []
    for array in arrays:
        first, end = -(-array.ctypes.data // size), (array.ctypes.data + array.nbytes) // size
        found.append(np.arange(first, max(first, end), dtype=np.uint64) * np.uint64(size))
    return np.concatenate(found) if found else np.empty(0, np.uint64)


def _places(pages: Pages) -> NDArray[np.int32]:
    """The node of each page; a negative number for a page that is not there, or of which the system does not tell."""
    return _move(pages, None)


def _move(pages: Pages, wanted: NDArray[np.int32] | None) -> NDArray[np.int32]:
    """Move each page to a node, or with None only look where it is. Returns its node, or minus an error."""
    status = np.full(len(pages), -1, np.int32)
    for start in range(0, len(pages), _AT_ONCE):
        some, told = np.ascontiguousarray(pages[start : start + _AT_ONCE]), status[start : start + _AT_ONCE]
        to = None if wanted is None else wanted[start:].ctypes.data
        SYSTEM.move_pages(len(some), some.ctypes.data, to, told.ctypes.data)
    return status
