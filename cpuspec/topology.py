"""The processors, caps and memory nodes that this process may use, as Linux tells them in files. It decides the number of threads.

Every file may be missing or hold nonsense, as in containers: what cannot be read is taken as absent. `root` stands for "/", so that
the files of other machines can be read, too.
"""

import os
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_MOST = 1 << 16  # bytes of a file that are read, and the largest number of a processor
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"


@dataclass(frozen=True)
class Core:
    """A physical core. cpus: its logical processors that may be used; speed: its top clock or capacity over the quickest core's.

    kind: "core" and "atom" on Intel's hybrid processors, "lowpower" for atoms beside the memory controller; else "".
    """

    cpus: tuple[int, ...]
    speed: float
    kind: str


@dataclass(frozen=True)
class Node:
    """A memory node: the logical processors near it that may be used, and its memory, None where that is unknown."""

    number: int
    cpus: tuple[int, ...]
    memory_bytes: int | None


@dataclass(frozen=True)
class Topology:
    """What of a machine a process may use. quota: processors' worth of time that its control groups grant, None for no limit."""

    cores: tuple[Core, ...]
    nodes: tuple[Node, ...]
    quota: float | None

    @cached_property
    def usable_cores(self) -> int:
        """The number of threads to compute with by default: one for each physical core, within the quota.

        Second hardware threads of a core add nothing where vector units and memory are the limit. Slow cores take part, because
        work is shared by what each gets done (`kernels.sharing`); those of low power do not. A quota's last fraction is left out:
        a group that uses more than it has stands still until the next period.
        """
        cores = sum(core.kind != "lowpower" for core in self.cores) or len(self.cores)
        return max(1, cores if self.quota is None else min(cores, int(self.quota)))


def read_topology(root: Path = Path("/"), allowed: Set[int] | None = None) -> Topology:
    """The topology in the files under `root`. allowed: logical processors of the affinity mask; None for this process's."""
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    online = _numbers(root / _CPU / "online") & allowed
    cpus = online or set(allowed)
    kinds = {cpu: kind for kind in ("core", "atom", "lowpower") for cpu in _numbers(root / f"sys/devices/cpu_{kind}/cpus")}
    siblings: dict[frozenset[int], list[int]] = {}
    for cpu in sorted(cpus):
        together = _numbers(root / _CPU / f"cpu{cpu}/topology/thread_siblings_list")
        siblings.setdefault(frozenset(together if cpu in together else {cpu}), []).append(cpu)
    speeds = [_speed(root / _CPU / f"cpu{members[0]}") for members in siblings.values()]
    quickest = max(speeds, default=0)
    cores = [
        Core(tuple(members), speed / quickest if speed else 1.0, kinds.get(members[0], ""))
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
    return _whole(cpu / "cpu_capacity") or _whole(cpu / "cpufreq/cpuinfo_max_freq")


def _quota(root: Path) -> float | None:
    """The least quota of this process's control groups, of both versions, from its own up to the root."""
    quotas = []
    for line in _read(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        own = Path("/" + path.lstrip("/"))
        if ".." in own.parts:
            continue
        for group in (own, *own.parents)[:64]:
            below = str(group).lstrip("/")
            if not controllers:
                numbers = _read(root / "sys/fs/cgroup" / below / "cpu.max").split()
            elif "cpu" in controllers.split(","):
                files = [root / "sys/fs/cgroup" / mount / below for mount in ("cpu", "cpu,cpuacct")]
                numbers = [
                    _read(files[0] / f"cpu.cfs_{name}_us") or _read(files[1] / f"cpu.cfs_{name}_us") for name in ("quota", "period")
                ]
            else:
                numbers = []
            if len(numbers) == 2 and all(one.isascii() and one.isdigit() and len(one) < 16 and int(one) for one in numbers):
                quotas.append(int(numbers[0]) / int(numbers[1]))
    return min(quotas, default=None)


def _numbers(path: Path) -> set[int]:
    """The numbers of a list like 0-3,8; none where any of it is nonsense."""
    found: set[int] = set()
    for part in filter(None, _read(path).split(",")):
        match = _RANGE.fullmatch(part)
        if not match or not int(match[1]) <= int(match[2] or match[1]) < _MOST:
            return set()
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def _whole(path: Path) -> int:
    text = _read(path)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


def _read(path: Path) -> str:
    """The beginning of a file, "" where there is none."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST).decode().strip()
    except (OSError, ValueError):
        return ""
