"""Linux: files of /proc and /sys, and system calls by number on x86-64.

Every file may be missing or hold nonsense, as in containers: a file that cannot be read counts as absent. `root` stands for "/", so
that tests can read the files of other machines.

Sources: Linux's system call table for x86-64, futex(2), mbind(2), move_pages(2), cgroups(7), arch/x86/include/uapi/asm/prctl.h.
"""

import ctypes
import mmap
import os
import platform
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from subprocess import Popen

from cpuspec.platform import generic
from cpuspec.platform.topology import Core, Memory, Node, Topology

_MOST = 1 << 16  # bytes of a file that are read, and the largest number of a processor
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"
_ROOT = Path("/")

_ARCH_PRCTL, _SET_MEMPOLICY, _GET_MEMPOLICY, _MOVE_PAGES = 158, 238, 239, 279
_REQUEST_PERMISSION, _TILE_DATA = 0x1023, 18
_DEFAULT, _INTERLEAVE = 0, 3
_NO_RESERVE = 0x4000  # MAP_NORESERVE, which Python's mmap does not name
_ONLY_OWN = 2  # move pages that only this process has mapped
_RESERVED = (1 << 30) * ("t" in sys.abiflags)  # bytes of addresses that a free-threaded Python takes at its start
_MOST_MAPS, _TRIM_THRESHOLD, _NEVER = -4, -1, 2**31 - 1  # of glibc's mallopt(3)


def read_topology(root: Path = _ROOT, allowed: Set[int] | None = None) -> Topology:
    """The topology in the files under `root`. allowed: logical processors of the affinity mask; None for this process's."""
    if allowed is None:
        allowed = os.sched_getaffinity(0)
    online = _numbers(root / _CPU / "online") & allowed
    cpus = online or set(allowed)
    kinds = {cpu: kind for kind in ("core", "atom", "lowpower") for cpu in _numbers(root / f"sys/devices/cpu_{kind}/cpus")}
    siblings: dict[frozenset[int], list[int]] = {}
    for cpu in sorted(cpus):
        together = _numbers(root / _CPU / f"cpu{cpu}/topology/thread_siblings_list")
        siblings.setdefault(frozenset(together if cpu in together else {cpu}), []).append(cpu)
    speeds = [_speed(root / _CPU / f"cpu{members[0]}") for members in siblings.values()]
    fastest = max(speeds, default=0)
    cores = [
        Core(tuple(members), speed / fastest if speed else 1.0, kinds.get(members[0], ""))
        for members, speed in zip(siblings.values(), speeds, strict=True)
    ]
    return Topology(tuple(cores), tuple(_nodes(root, cpus)), _quota(root))


def _nodes(root: Path, cpus: Set[int]) -> Iterator[Node]:
    """The nodes whose memory may be used; those without processors have memory, too."""
    for number in sorted(_numbers(root / _NODE / "has_memory")):
        near = _numbers(root / _NODE / f"node{number}/cpulist") & cpus
        match = re.search(r"MemTotal:\s*(\d{1,15}) kB", _read(root / _NODE / f"node{number}/meminfo"))
        yield Node(number, tuple(sorted(near)), 1024 * int(match[1]) if match else None)


def _speed(cpu: Path) -> int:
    """A number that grows with the speed of a logical processor, in one unit for all of a machine; 0 where there is none."""
    # The scheduler's measure, which knows more than the clock (Documentation/ABI/testing/sysfs-devices-system-cpu).
    return _whole(_read(cpu / "cpu_capacity")) or _whole(_read(cpu / "cpufreq/cpuinfo_max_freq"))


def read_memory(root: Path = _ROOT) -> Memory:
    """The machine's memory, and the least that this process's control groups leave of it, in the files under `root`."""
    fields, limit = _fields(root / "proc/meminfo", ":"), None

    def field(name: str) -> int | None:
        kilobytes = _whole(fields.get(name, "").strip().removesuffix(" kB"))
        return 1024 * kilobytes if kilobytes else None

    available = field("MemAvailable")
    for version, group in _groups(root, "memory"):
        # A group above `memory.high` is held back until it hardly moves, so that is a limit, too.
        limits = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
        used, prefix = ("memory.current", "") if version == 2 else ("memory.usage_in_bytes", "total_")
        # Version 1 writes "no limit" as the largest number of pages.
        own = min((number for name in limits if 0 < (number := _whole(_read(group / name))) < 1 << 62), default=None)
        if own is not None:
            limit = min(own, own if limit is None else limit)
            # A group takes pages of files back when it needs their room.
            statistics = _fields(group / "memory.stat")
            files = sum(_whole(statistics.get(f"{prefix}{kind}_file", "")) for kind in ("active", "inactive"))
            left = max(own - max(_whole(_read(group / used)) - files, 0), 0)
            available = left if available is None else min(left, available)
    return Memory(field("MemTotal"), available, limit)


def _quota(root: Path) -> float | None:
    """The least processor quota of this process's control groups; None for no limit."""
    quotas = []
    for version, group in _groups(root, "cpu"):
        if version == 2:
            numbers = _read(group / "cpu.max").split()
        else:
            numbers = [_read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        quota, period = map(_whole, numbers) if len(numbers) == 2 else (0, 0)
        if quota and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """The control groups of this process that a controller may limit, from its own up to the root: their version and directory."""
    mounts = list(_mounts(root))
    for line in _read(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        own = PurePosixPath("/" + path.lstrip("/"))
        if ".." in own.parts or (controllers and controller not in controllers.split(",")):
            continue
        # Where the system does not say where the hierarchy is mounted, at the usual places.
        usual = [("/", f"sys/fs/cgroup/{name}") for name in ((controller, controllers) if controllers else ("",))]
        told = [(top, point) for top, point, names in mounts if (controller if controllers else "") in names]
        for top, point in told or usual:
            # A container may see a part of the hierarchy; the names of its groups begin above it.
            below = own.relative_to(top) if own.is_relative_to(top) else own.relative_to("/")
            for group in (below, *below.parents)[:64]:
                yield 1 if controllers else 2, root / point / group


def _mounts(root: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Each mounted hierarchy of control groups (proc(5)): its top, where it is mounted, its controllers; of version 2 "" alone."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        fields, _, source = line.partition(" - ")
        names, kind = fields.split(" "), source.split(" ")
        if kind[0] in ("cgroup", "cgroup2") and len(names) > 4 and len(kind) > 2:
            yield names[3], names[4].lstrip("/"), kind[2].split(",") if kind[0] == "cgroup" else [""]


def _fields(path: Path, separator: str = " ") -> dict[str, str]:
    """A file of lines that each have a name and a value."""
    return dict(line.partition(separator)[::2] for line in _read(path).splitlines())


def _numbers(path: Path) -> set[int]:
    """The numbers of a list like 0-3,8; none where any of it is nonsense."""
    found: set[int] = set()
    for part in filter(None, _read(path).split(",")):
        match = _RANGE.fullmatch(part)
        if not match or not int(match[1]) <= int(match[2] or match[1]) < _MOST:
            return set()
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def _whole(text: str) -> int:
    """A number of up to 19 digits; 0 for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0


def _read(path: Path) -> str:
    """The beginning of a file, "" where there is none."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST).decode().strip()
    except (OSError, ValueError):
        return ""


def processor_name() -> str:
    """The first processor's name of itself."""
    match = re.search(r"^model name\s*:\s*(.+)", _read(_ROOT / "proc/cpuinfo"), re.M)
    return match[1].strip() if match else generic.SYSTEM.processor_name()


def processor_flags() -> frozenset[str]:
    match = re.search(r"^flags\s*:\s*(.+)", _read(_ROOT / "proc/cpuinfo"), re.M)
    return frozenset(match[1].split()) if match else frozenset()


def read_settings(root: Path = _ROOT) -> dict[str, str]:
    """The clock's governor and the choice of transparent huge pages, in the files under `root`."""
    chosen = re.search(r"\[(\w+)\]", _read(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    found = {"governor": _read(root / _CPU / "cpu0/cpufreq/scaling_governor"), "huge_pages": chosen[1] if chosen else ""}
    return {name: value for name, value in found.items() if value}


def enable_tile_registers() -> bool:
    """The kernel keeps the large state of these registers only for processes that have asked for it."""
    return _knows_calls() and _call(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def zeroed_pages(num_bytes: int) -> mmap.mmap:
    """Without huge pages: the first byte written to one takes two megabytes, and the time to zero them."""
    return _pages(num_bytes)


def _pages(num_bytes: int, flags: int = 0) -> mmap.mmap:
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    with suppress(OSError):  # of a kernel that knows no huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return pages


def reserved_pages(num_bytes: int) -> mmap.mmap:
    """Without a share of what the system promises: most of these pages are never written."""
    return _pages(num_bytes, _NO_RESERVE)


def prefer_huge_pages(address: int, num_bytes: int) -> None:
    """Of the whole pages there."""
    first, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None and first < end:
        advise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_HUGEPAGE)


def populated_file(descriptor: int, num_bytes: int) -> mmap.mmap:
    return mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)


def release_pages(pages: mmap.mmap, first: int, num_bytes: int) -> None:
    start = first // mmap.PAGESIZE * mmap.PAGESIZE
    pages.madvise(mmap.MADV_DONTNEED, start, first + num_bytes - start)


def decommit_pages(address: int, num_bytes: int) -> None:
    """A kernel that refuses keeps them: their contents are never read."""
    if advise := getattr(ctypes.CDLL(None), "madvise", None):
        advise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(mmap.MADV_DONTNEED))


def lock_pages(address: int, num_bytes: int) -> bool:
    """False where that is more than this user may lock."""
    lock = getattr(ctypes.CDLL(None), "mlock", None)
    return lock is not None and lock(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)) == 0


def open_pages(path: Path) -> int:
    """Some file systems, such as those in memory, have no way past the page cache; they tell at the open or at the first read."""
    descriptor = None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        os.preadv(descriptor, [mmap.mmap(-1, mmap.PAGESIZE)], 0)
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return os.open(path, os.O_RDONLY)
    return descriptor


def keep_freed_memory() -> None:
    """Other C libraries than glibc have no such option."""
    with suppress(OSError, AttributeError, TypeError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(_MOST_MAPS, 0)
        set_option(_TRIM_THRESHOLD, _NEVER)


def may_execute_memory() -> bool:
    """Linux's PR_SET_MDWE, seccomp filters as systemd's, and SELinux refuse the second call."""
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
        first = ctypes.c_char.from_buffer(page)
        protect = ctypes.CDLL(None).mprotect
        allowed = not protect(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(page)), mmap.PROT_READ | mmap.PROT_EXEC)
        del first  # a page with views cannot be closed
    return allowed


def why_pages_stay() -> str:
    mode = ctypes.c_int()
    if not _knows_calls():
        return generic.SYSTEM.why_pages_stay()
    if _call(_GET_MEMPOLICY, ctypes.byref(mode), None, 0, None, 0):
        return "the system denies it; a container needs the capability SYS_NICE"
    return "" if mode.value == _DEFAULT else "the process has a memory policy of the user's"


def place_new_pages(nodes: Sequence[int]) -> bool:
    if not nodes:
        return not _call(_SET_MEMPOLICY, _DEFAULT, None, 0)
    mask = (ctypes.c_uint64 * (max(nodes) // 64 + 1))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    # The number of bits is one more than those that count (mbind(2), notes).
    return not _call(_SET_MEMPOLICY, _INTERLEAVE, mask, 64 * len(mask) + 1)


def move_pages(count: int, pages: int, nodes: int | None, result: int) -> None:
    to = None if nodes is None else ctypes.c_void_p(nodes)
    _call(_MOVE_PAGES, 0, count, ctypes.c_void_p(pages), to, ctypes.c_void_p(result), _ONLY_OWN)


def start_helper(arguments: Sequence[str], cpu_s: int | None, memory_bytes: int, stdout: int, stderr: int) -> Popen[bytes]:
    import resource

    child = generic.start_helper(arguments, cpu_s, memory_bytes, stdout, stderr)
    with suppress(ProcessLookupError):
        resource.prlimit(child.pid, resource.RLIMIT_AS, (memory_bytes + _RESERVED,) * 2)
        if cpu_s is not None:
            resource.prlimit(child.pid, resource.RLIMIT_CPU, (cpu_s, cpu_s))
    return child


def end_session(child: Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def interrupt_main() -> None:
    """A signal to the thread itself ends a system call that it waits in."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def _knows_calls() -> bool:
    """Whether the numbers of the system calls above are this machine's."""
    return platform.machine() == "x86_64" and sys.maxsize > 1 << 32


def _call(number: int, *arguments: object) -> int:
    """A system call: 0 where it succeeds, -1 where it fails, other numbers where it says how many pages it left."""
    system_call = ctypes.CDLL(None).syscall
    system_call.restype = ctypes.c_long
    result: int = system_call(ctypes.c_long(number), *(ctypes.c_long(one) if isinstance(one, int) else one for one in arguments))
    return result


SYSTEM = replace(
    generic.SYSTEM,
    topology=read_topology,
    memory=read_memory,
    processor_name=processor_name,
    processor_flags=processor_flags,
    settings=read_settings,
    enable_tile_registers=enable_tile_registers,
    zeroed_pages=zeroed_pages,
    reserved_pages=reserved_pages,
    prefer_huge_pages=prefer_huge_pages,
    populated_file=populated_file,
    decommit_pages=decommit_pages,
    release_pages=release_pages,
    lock_pages=lock_pages,
    keep_freed_memory=keep_freed_memory,
    open_pages=open_pages,
    may_execute_memory=may_execute_memory,
    why_pages_stay=why_pages_stay,
    place_new_pages=place_new_pages,
    move_pages=move_pages,
    start_helper=start_helper,
    end_session=end_session,
    interrupt_main=interrupt_main,
    has_namespaces=True,
    processor_function="sched_getcpu",
    sleep="futex",
)
