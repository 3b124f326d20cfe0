"""Weights spread over the memory nodes of a machine with several: Linux's system calls, without a library.

Pages lie on the nodes in turns, so that all nodes' memory is read at once whatever thread takes which tiles, and no copy is made.
A copy for each node would read nearby memory only, and takes the model's size once more for each node.
Not measured: the machines at hand have one node.
"""

import ctypes
import mmap
import platform
import sys
from collections.abc import Iterable, Sequence

from cpuspec.formats.tensor import U8
from cpuspec.topology import Topology

_MBIND, _GET_MEMPOLICY = 237, 239  # on x86-64
_DEFAULT, _INTERLEAVE = 0, 3
_MOVE = 2  # pages that are there already, too: those that an earlier start left in the page cache


def nodes_to_use(topology: Topology) -> tuple[int, ...]:
    """The nodes near the processors that may be used, where there are several; else none."""
    nodes = tuple(node.number for node in topology.nodes if node.cpus)
    return nodes if len(nodes) > 1 else ()


def interleave_pages(arrays: Iterable[U8], nodes: Sequence[int]) -> bool:
    """Place the whole pages of these bytes on the nodes in turns. False where the system does not, and everything stays.

    A memory policy that the user gave the process, as with numactl, stands.
    """
    if not nodes or sys.platform != "linux" or platform.machine() != "x86_64" or sys.maxsize < 1 << 32:
        return False
    system_call = ctypes.CDLL(None).syscall
    system_call.restype = ctypes.c_long
    mode = ctypes.c_int()
    if system_call(_GET_MEMPOLICY, ctypes.byref(mode), None, ctypes.c_long(0), None, ctypes.c_long(0)) or mode.value != _DEFAULT:
        return False
    words = max(nodes) // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    placed = True
    for array in arrays:
        start = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (array.ctypes.data + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if size > 0:
            # The number of bits is one more than those that count (mbind(2), notes).
            arguments = (ctypes.c_long(start), ctypes.c_long(size), _INTERLEAVE, mask, ctypes.c_long(64 * words + 1), _MOVE)
            placed &= system_call(_MBIND, *arguments) == 0
    return placed
