"""Any system that Python runs on: what its standard library offers, and nothing where that offers nothing."""

import _thread
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO

from cpuspec.errors import CpuspecError
from cpuspec.platform.system import System
from cpuspec.platform.topology import Core, Memory, Topology

_seeking = threading.Lock()  # where a read cannot name a place of its own


def topology() -> Topology:
    """Each logical processor as a core."""
    return Topology(tuple(Core((cpu,)) for cpu in range(os.cpu_count() or 1)))


def memory() -> Memory:
    """The machine's memory, as POSIX tells it."""
    try:
        return Memory(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return Memory()


def zeroed_pages(num_bytes: int) -> mmap:
    return mmap(-1, num_bytes)


def populated_file(descriptor: int, num_bytes: int) -> mmap:
    return mmap(descriptor, num_bytes, access=ACCESS_READ)


def open_pages(path: Path) -> int:
    return os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))


def read_at(descriptor: int, into: memoryview, place: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [into], place)
    with _seeking:
        os.lseek(descriptor, place, os.SEEK_SET)
        data = os.read(descriptor, len(into))
    into[: len(data)] = data
    return len(data)


def try_lock(file: IO[bytes]) -> bool:
    """Raises CpuspecError on a system without POSIX locks."""
    try:
        import fcntl
    except ImportError:
        raise CpuspecError(f"files cannot be locked on this system ({platform.system() or 'unknown'})") from None

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def cache_home(variables: Mapping[str, str]) -> Path:
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "cpuspec"


def start_helper(
    arguments: Sequence[str], cpu_s: int | None, memory_bytes: int, stdout: int, stderr: int
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, start_new_session=True
    )


SYSTEM = System(
    topology=topology,
    memory=memory,
    processor_name=lambda: platform.processor() or platform.machine(),
    processor_flags=frozenset,
    settings=dict,
    enable_tile_registers=lambda: False,
    zeroed_pages=zeroed_pages,
    reserved_pages=zeroed_pages,
    commit_pages=lambda address, num_bytes: None,
    decommit_pages=lambda address, num_bytes: None,
    prefer_huge_pages=lambda address, num_bytes: None,
    populated_file=populated_file,
    release_pages=lambda pages, first, num_bytes: None,
    lock_pages=lambda address, num_bytes: False,
    keep_freed_memory=lambda: None,
    may_execute_memory=lambda: True,
    why_pages_stay=lambda: "this system has no calls for it",
    place_new_pages=lambda nodes: False,
    move_pages=lambda count, pages, nodes, result: None,
    open_pages=open_pages,
    read_at=read_at,
    try_lock=try_lock,
    cache_home=cache_home,
    pipe_encoding=None,
    start_helper=start_helper,
    end_session=subprocess.Popen.kill,
    interrupt_main=_thread.interrupt_main,
    end_signals=(signal.SIGTERM, signal.SIGINT),
    has_namespaces=False,
    yield_function="sched_yield",
    processor_function="",
    sleep="",
)
