"""Weights spread over the memory nodes of a machine with several.

Runs of 2 MB lie on the nodes in turns, so that all nodes' memory is read at once whatever thread takes which tiles, and no copy is
made. A copy for each node would read nearby memory only, and takes the model's size once more for each node.

Memory that is new follows the thread's policy (`spread_new_pages`). Pages that are there already, as those that an earlier start
left in the page cache, are moved (`interleave_pages`): a policy for the range moves none of a shared mapping. A page that another
process has mapped, too, stays. Speed is not measured: the machines at hand have one node.
"""

import mmap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats.tensor import U8
from cpuspec.platform import SYSTEM, Topology

_RUN_BYTES = 2 << 20  # a huge page
_AT_ONCE = 1 << 18  # pages that one call asks for
_UNEVEN = 0.1  # a node may have so much less or more than its share before pages are moved

Pages = NDArray[np.uint64]


def nodes_to_use(topology: Topology) -> tuple[int, ...]:
    """The nodes near the processors that may be used, where there are several; else none."""
    nodes = tuple(node.number for node in topology.nodes if node.cpus)
    return nodes if len(nodes) > 1 else ()


@contextmanager
def spread_new_pages(nodes: Sequence[int]) -> Iterator[None]:
    """Take memory from the nodes in turns, in this thread and those that it starts, where the user gave no policy of their own."""
    changed = bool(nodes) and not SYSTEM.why_pages_stay() and SYSTEM.place_new_pages(nodes)
    try:
        yield
    finally:
        if changed:
            SYSTEM.place_new_pages(())


def interleave_pages(arrays: Iterable[U8], nodes: Sequence[int]) -> Mapping[int, int]:
    """Move the whole pages of these bytes to the nodes in turns, unless each node has about its share of them.

    Returns how many pages lie on each node afterwards, as the system tells; nothing where it does not, or where none may be moved:
    the user gave the process a memory policy, as with numactl, which stands, or the system denies the calls.
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
    return dict(sorted(Counter(place for place in _places(pages).tolist() if place >= 0).items()))


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
