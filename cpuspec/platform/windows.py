"""Windows: calls of kernel32 by their documentation (learn.microsoft.com, Win32 API).

Tried with Windows' Python under Wine, not on Windows itself.
"""

import ctypes
import platform
import signal
import struct
import subprocess
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import IO, Any

from cpuspec.platform import generic
from cpuspec.platform.topology import Core, Memory, Topology

_ctypes: Any = ctypes  # other systems' ctypes lack its Windows half

_RELATION_PROCESSOR_CORE = 0
_CORE_HEADER, _GROUP_AFFINITY = 32, 16  # bytes before a core's masks, and of one mask with its group
_JOB_LIMITS, _JOB_LIMIT_BYTES, _JOB_TIME, _PROCESS_MEMORY, _JOB_MEMORY = 9, 144, 4, 0x100, 0x200
_COMMIT, _RESERVE, _DECOMMIT, _RELEASE, _READ_WRITE = 0x1000, 0x2000, 0x4000, 0x8000, 4  # of VirtualAlloc and VirtualFree
_NO_WINDOW = 0x08000000  # a console of its own, which nobody sees: the terminal's Ctrl-C and Ctrl-Break do not reach it
_TILES = 0b11 << 17  # the state of tile registers, by its bits in XCR0
_EXCLUSIVE, _AT_ONCE = 2, 1  # flags of LockFileEx
_FAR = 1 << 62  # the byte that is locked: beyond any file's end, since nobody can read a locked byte through another handle
_LOCK_VIOLATION = 33


def topology() -> Topology:
    """The cores that this process may use. Windows tells neither their speeds nor a quota."""
    try:
        return Topology(tuple(_cores(_processor_information(), _allowed())))
    except (AttributeError, OSError, struct.error):
        return generic.topology()


def _cores(information: bytes, allowed: dict[int, int]) -> Iterator[Core]:
    """The cores in an array of SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX. allowed: a mask of processors by group; none for all."""
    by_class: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    at = 0
    while at + _CORE_HEADER <= len(information):
        relation, size = struct.unpack_from("<II", information, at)
        if relation == _RELATION_PROCESSOR_CORE:
            efficiency, groups = struct.unpack_from("<xB20xH", information, at + 8)
            cpus = []
            for group_at in range(at + _CORE_HEADER, at + _CORE_HEADER + groups * _GROUP_AFFINITY, _GROUP_AFFINITY):
                mask, group = struct.unpack_from("<QH", information, group_at)
                mask &= allowed.get(group, 0) if allowed else mask
                cpus += [64 * group + bit for bit in range(64) if mask >> bit & 1]
            if cpus:
                by_class[efficiency].append(tuple(cpus))
        at += max(size, 1)
    # A higher class is faster. Processors with three have cores of low power beside the memory controller.
    kinds = {1: ("",), 2: ("core", "atom")}.get(len(by_class), ("core", *["atom"] * (len(by_class) - 2), "lowpower"))
    for kind, efficiency in zip(kinds, sorted(by_class, reverse=True), strict=True):
        yield from (Core(cpus, kind=kind) for cpus in by_class[efficiency])


def _processor_information() -> bytes:
    size = ctypes.c_uint32(0)
    ask = _kernel32().GetLogicalProcessorInformationEx
    ask(_RELATION_PROCESSOR_CORE, None, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _check(ask(_RELATION_PROCESSOR_CORE, buffer, ctypes.byref(size)))
    return buffer.raw[: size.value]


def _allowed() -> dict[int, int]:
    """The processors of this process's affinity mask by group; none if it may use all of several groups."""
    kernel, count, group = _kernel32(), ctypes.c_uint16(1), ctypes.c_uint16(0)
    process = ctypes.c_void_p(kernel.GetCurrentProcess())
    own, whole = ctypes.c_size_t(0), ctypes.c_size_t(0)
    _check(kernel.GetProcessAffinityMask(process, ctypes.byref(own), ctypes.byref(whole)))
    # A process in several groups has no mask, or since Windows 11 that of its first group, which is then complete.
    if kernel.GetActiveProcessorGroupCount() > 1 and own.value == whole.value:
        return {}
    if not kernel.GetProcessGroupAffinity(process, ctypes.byref(count), ctypes.byref(group)):
        return {}
    return {group.value: own.value}


def memory() -> Memory:
    """The machine's memory, and the limit of the job that this process is in."""

    class Status(ctypes.Structure):
        _fields_ = (
            *((name, ctypes.c_uint32) for name in ("size", "load")),
            *((name, ctypes.c_uint64) for name in ("total", "available", *(f"other_{n}" for n in range(5)))),
        )

    status = Status(size=ctypes.sizeof(Status))
    try:
        _check(_kernel32().GlobalMemoryStatusEx(ctypes.byref(status)))
    except (AttributeError, OSError):
        return Memory()
    return Memory(status.total, status.available, _job_limit())


def _job_limit() -> int | None:
    """The least limit of memory in JOBOBJECT_EXTENDED_LIMIT_INFORMATION; None for no job or no limit."""
    buffer = ctypes.create_string_buffer(_JOB_LIMIT_BYTES)
    with suppress(AttributeError):
        if not _kernel32().QueryInformationJobObject(None, _JOB_LIMITS, buffer, len(buffer), None):
            return None
    (flags,) = struct.unpack_from("<I", buffer, 16)
    limits = struct.unpack_from("<QQ", buffer, 112)
    held = [limit for limit, flag in zip(limits, (_PROCESS_MEMORY, _JOB_MEMORY), strict=True) if flags & flag]
    return min(held, default=None)


def processor_name() -> str:
    try:
        winreg: Any = __import__("winreg")
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
            return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    except (ImportError, OSError):
        return platform.processor() or platform.machine()


def enable_tile_registers() -> bool:
    """Windows 11 and Server 2022 keep the state of these registers for processes that have asked for it; older ones never."""
    kernel = _kernel32()
    try:
        kernel.GetEnabledXStateFeatures.restype = ctypes.c_uint64
        has_tiles = kernel.GetEnabledXStateFeatures() & _TILES == _TILES
        return has_tiles and bool(kernel.EnableProcessOptionalXStateFeatures(ctypes.c_uint64(_TILES)))
    except AttributeError:
        return False


def reserved_pages(num_bytes: int) -> "ctypes.Array[ctypes.c_uint8]":
    """They are given back with the object."""
    kernel = _kernel32()
    address = kernel.VirtualAlloc(None, ctypes.c_size_t(num_bytes), _RESERVE, _READ_WRITE)
    _check(address)
    pages = (ctypes.c_uint8 * num_bytes).from_address(address)
    # Not at the exit of the process: threads may use the memory until then.
    weakref.finalize(pages, kernel.VirtualFree, ctypes.c_void_p(address), ctypes.c_size_t(0), _RELEASE).atexit = False
    return pages


def commit_pages(address: int, num_bytes: int) -> None:
    _check(_kernel32().VirtualAlloc(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _COMMIT, _READ_WRITE))


def decommit_pages(address: int, num_bytes: int) -> None:
    _check(_kernel32().VirtualFree(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _DECOMMIT))


def start_helper(
    arguments: Sequence[str], cpu_s: int | None, memory_bytes: int, stdout: int, stderr: int
) -> subprocess.Popen[bytes]:
    """The limits are a job's. The time is that of user mode."""
    # The python.exe of a virtual environment only starts this one, which could begin before the job holds.
    python = getattr(sys, "_base_executable", None) or sys.executable
    child = subprocess.Popen([python, *arguments], stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, creationflags=_NO_WINDOW)
    try:
        handle: int = vars(child)["_handle"]
        _limit(ctypes.c_void_p(handle), cpu_s, memory_bytes)
    except BaseException:
        child.kill()
        child.communicate()
        raise
    return child


def _limit(process: ctypes.c_void_p, cpu_s: int | None, memory_bytes: int) -> None:
    """Put a process into a new job, which lasts as long as the processes in it."""
    limits = ctypes.create_string_buffer(_JOB_LIMIT_BYTES)  # a JOBOBJECT_EXTENDED_LIMIT_INFORMATION
    struct.pack_into("<8xQI", limits, 0, 10**7 * (cpu_s or 0), _JOB_MEMORY | (_JOB_TIME if cpu_s else 0))
    struct.pack_into("<Q", limits, 120, memory_bytes)
    kernel = _kernel32()
    job = ctypes.c_void_p(kernel.CreateJobObjectW(None, None))
    try:
        _check(kernel.SetInformationJobObject(job, _JOB_LIMITS, limits, len(limits)))
        _check(kernel.AssignProcessToJobObject(job, process))
    finally:
        kernel.CloseHandle(job)


def try_lock(file: IO[bytes]) -> bool:
    msvcrt: Any = __import__("msvcrt")
    overlapped = ctypes.create_string_buffer(struct.pack("<QQQQ", 0, 0, _FAR, 0), 32)
    handle = ctypes.c_void_p(msvcrt.get_osfhandle(file.fileno()))
    if _kernel32().LockFileEx(handle, _EXCLUSIVE | _AT_ONCE, 0, 1, 0, overlapped):
        return True
    if (error := _ctypes.get_last_error()) == _LOCK_VIOLATION:
        return False
    raise _ctypes.WinError(error)


def cache_home(variables: Mapping[str, str]) -> Path:
    local = variables.get("LOCALAPPDATA")
    return (Path(local) if local else Path.home() / "AppData" / "Local") / "cpuspec" / "cache"


@cache
def _kernel32() -> Any:
    library = _ctypes.WinDLL("kernel32", use_last_error=True)
    for name in ("GetCurrentProcess", "VirtualAlloc", "CreateJobObjectW"):
        getattr(library, name).restype = ctypes.c_void_p
    return library


def _check(done: int | None) -> None:
    """Raise OSError for the error of a call that returned 0."""
    if not done:
        raise _ctypes.WinError(_ctypes.get_last_error())


SYSTEM = replace(
    generic.SYSTEM,
    topology=topology,
    memory=memory,
    processor_name=processor_name,
    enable_tile_registers=enable_tile_registers,
    reserved_pages=reserved_pages,
    commit_pages=commit_pages,
    decommit_pages=decommit_pages,
    start_helper=start_helper,
    try_lock=try_lock,
    cache_home=cache_home,
    pipe_encoding="utf-8",
    end_signals=(*generic.SYSTEM.end_signals, *filter(None, [getattr(signal, "SIGBREAK", None)])),
    yield_function="SwitchToThread",
    sleep="WaitOnAddress",
)
