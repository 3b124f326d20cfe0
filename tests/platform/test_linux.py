"""The number of threads and the memory of machines of every kind, from made-up trees of the files in which Linux describes them."""

import sys
from pathlib import Path

import pytest

from cpuspec.platform import SYSTEM, Memory
from cpuspec.platform.linux import read_memory, read_settings, read_topology

CPU, NODE, GROUP = "sys/devices/system/cpu", "sys/devices/system/node", "sys/fs/cgroup"


def tree(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def siblings(*groups: str) -> dict[str, str | bytes]:
    """thread_siblings_list of every processor of these groups, each the two ends of a list."""
    return {f"{CPU}/cpu{cpu}/topology/thread_siblings_list": group + "\n" for group in groups for cpu in group.split(",")}


def laptop() -> dict[str, str | bytes]:
    """Six quick cores with two hardware threads each, processors 0 to 11, and eight slow ones, 12 to 19."""
    files = siblings(*(f"{2 * n},{2 * n + 1}" for n in range(6)), *map(str, range(12, 20)))
    files |= {f"{CPU}/cpu{cpu}/cpufreq/cpuinfo_max_freq": "5000000\n" if cpu < 12 else "3800000\n" for cpu in range(20)}
    return files | {f"{CPU}/online": "0-19\n", "sys/devices/cpu_core/cpus": "0-11\n", "sys/devices/cpu_atom/cpus": "12-19\n"}


def server() -> dict[str, str | bytes]:
    """Two sockets of 32 cores with two hardware threads each; the second threads are numbered from 64 on."""
    files = siblings(*(f"{n},{n + 64}" for n in range(64))) | {f"{CPU}/online": "0-127\n", f"{NODE}/has_memory": "0-1\n"}
    for node, cpus in enumerate(("0-31,64-95", "32-63,96-127")):
        memory = f"Node {node} MemTotal:       131072 kB\nNode {node} MemFree: 5 kB\n"
        files |= {f"{NODE}/node{node}/cpulist": cpus + "\n", f"{NODE}/node{node}/meminfo": memory}
    return files


def test_a_hybrid_laptop_uses_each_core_once(tmp_path: Path) -> None:
    found = read_topology(tree(tmp_path, laptop()), set(range(20)))
    assert found.usable_cores == 14
    assert [core.kind for core in found.cores] == ["core"] * 6 + ["atom"] * 8
    assert [core.speed for core in found.cores] == [1.0] * 6 + [0.76] * 8
    assert found.cores[0].cpus == (0, 1)


def test_cores_of_low_power_are_left_out_and_the_schedulers_capacity_counts_before_the_clock(tmp_path: Path) -> None:
    files = laptop() | {"sys/devices/cpu_atom/cpus": "12-17\n", "sys/devices/cpu_lowpower/cpus": "18-19\n"}
    files |= {f"{CPU}/cpu{cpu}/cpu_capacity": "1024\n" if cpu < 12 else "512\n" for cpu in range(20)}
    found = read_topology(tree(tmp_path, files), set(range(20)))
    assert found.usable_cores == 12
    assert [core.speed for core in found.cores] == [1.0] * 6 + [0.5] * 8
    assert read_topology(tmp_path, {18, 19}).usable_cores == 2  # unless there is nothing else


def test_a_server_with_two_sockets_has_two_nodes(tmp_path: Path) -> None:
    found = read_topology(tree(tmp_path, server()), set(range(128)))
    assert found.usable_cores == 64
    assert [(node.number, len(node.cpus), node.memory_bytes) for node in found.nodes] == [(0, 64, 1 << 27), (1, 64, 1 << 27)]


def test_an_affinity_mask_limits_cores_and_nodes(tmp_path: Path) -> None:
    found = read_topology(tree(tmp_path, server()), {0, 64, 1, 2})
    assert (found.usable_cores, found.cores[0].cpus) == (3, (0, 64))
    assert [node.cpus for node in found.nodes] == [(0, 1, 2, 64), ()]


def test_a_processor_that_is_offline_does_not_count(tmp_path: Path) -> None:
    files = siblings(*map(str, range(4))) | {f"{CPU}/online": "0-1,3\n"}
    assert read_topology(tree(tmp_path, files), set(range(4))).usable_cores == 3


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({f"{GROUP}/cpu.max": "250000 100000\n"}, 2.5),
        ({f"{GROUP}/cpu.max": "50000 100000\n"}, 0.5),
        ({f"{GROUP}/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", f"{GROUP}/a/b/cpu.max": "max 100", f"{GROUP}/a/cpu.max": "300 100"}, 3.0),
        ({"proc/self/cgroup": "0::/a/b\n", f"{GROUP}/a/b/cpu.max": "200 100", f"{GROUP}/a/cpu.max": "300 100"}, 2.0),
        ({"proc/self/cgroup": "0::/../../x\n", f"{GROUP}/cpu.max": "200000 100000\n"}, None),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/1\n3:memory:/\n",
                f"{GROUP}/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
                f"{GROUP}/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            2.5,
        ),
        ({"proc/self/cgroup": "4:cpu:/", f"{GROUP}/cpu/cpu.cfs_quota_us": "-1", f"{GROUP}/cpu/cpu.cfs_period_us": "100"}, None),
    ],
)  # fmt: skip
def test_a_quota_limits_the_threads(tmp_path: Path, files: dict[str, str | bytes], quota: float | None) -> None:
    found = read_topology(tree(tmp_path, siblings(*map(str, range(8))) | files), set(range(8)))
    assert found.quota == quota
    assert found.usable_cores == (8 if quota is None else max(1, int(quota)))


MEMINFO = "MemTotal:       1024 kB\nMemFree: 5 kB\nMemAvailable:    512 kB\n"
OLD, NESTED = f"{GROUP}/memory", {"proc/self/cgroup": "0::/a/b\n"}
# A container's view: the hierarchy's part below /docker/1, where the names of groups still begin above it.
MOUNTED = "35 31 0:32 {top} {point} rw,relatime shared:9 - {kind} none rw,{options}\n"


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({f"{GROUP}/memory.max": "700000\n"}, 700_000),
        ({f"{GROUP}/memory.max": "max\n"}, None),
        ({f"{GROUP}/memory.max": "700000\n", f"{GROUP}/memory.high": "600000\n"}, 600_000),
        (NESTED | {f"{GROUP}/a/b/memory.max": "max", f"{GROUP}/a/memory.max": "500000"}, 500_000),
        (NESTED | {f"{GROUP}/a/b/memory.max": "400000", f"{GROUP}/a/memory.max": "500000"}, 400_000),
        (NESTED | {f"{GROUP}/a/b/memory.high": "900000", f"{GROUP}/a/memory.high": "300000"}, 300_000),
        ({"proc/self/cgroup": "4:cpu:/x\n3:memory:/docker/1\n", f"{OLD}/memory.limit_in_bytes": "600000"}, 600_000),
        ({"proc/self/cgroup": "3:memory:/a/b\n", f"{OLD}/a/memory.limit_in_bytes": "500000"}, 500_000),
        ({"proc/self/cgroup": "3:memory:/a\n", f"{OLD}/a/memory.limit_in_bytes": str((1 << 63) - 4096)}, None),
        (
            {
                "proc/self/cgroup": "3:memory:/docker/1/child\n0::/\n",
                "proc/self/mountinfo": MOUNTED.format(top="/docker/1", point="/limits", kind="cgroup", options="memory"),
                "limits/child/memory.limit_in_bytes": "450000",
                "limits/memory.limit_in_bytes": "600000",
            },
            450_000,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/\n0::/a\n",
                "proc/self/mountinfo": MOUNTED.format(top="/", point=f"/{GROUP}/unified", kind="cgroup2", options="nsdelegate"),
                f"{GROUP}/unified/a/memory.max": "350000",
            },
            350_000,
        ),
    ],
)
def test_the_least_limit_of_nested_groups_counts(tmp_path: Path, files: dict[str, str | bytes], limit: int | None) -> None:
    found = read_memory(tree(tmp_path, {"proc/meminfo": MEMINFO} | files))
    assert found == Memory(1 << 20, min(limit or 1 << 19, 1 << 19), limit)
    assert found.usable == (limit or 1 << 20)


@pytest.mark.parametrize(
    ("group", "files"),
    [
        ("0::/a", {"memory.max": "400000", "memory.current": "300000", "memory.stat": "active_file 50000\ninactive_file 25000\n"}),
        (
            "3:memory:/a",
            {
                "memory.limit_in_bytes": "400000",
                "memory.usage_in_bytes": "300000",
                "memory.stat": "active_file 7\ninactive_file 7\ntotal_active_file 50000\ntotal_inactive_file 25000\n",
            },
        ),
    ],
)
def test_what_a_group_has_taken_is_not_available(tmp_path: Path, group: str, files: dict[str, str | bytes]) -> None:
    place = f"{GROUP}/a" if group.startswith("0") else f"{GROUP}/memory/a"
    tree(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": group} | {f"{place}/{name}": text for name, text in files.items()})
    assert read_memory(tmp_path) == Memory(1 << 20, 400_000 - (300_000 - 75_000), 400_000)


GARBAGE = ["", "x", "5-", "9-3", "0-99999999999", "1,,x", "-1", "0 0", "9" * 100, b"\xff\xfe\x00", "0\n" * 5000]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_files_of_nonsense_count_as_missing(tmp_path: Path, garbage: str | bytes) -> None:
    files = dict.fromkeys(
        [*laptop(), *server(), f"{GROUP}/cpu.max", f"{GROUP}/memory.max", "proc/self/cgroup", "proc/self/mountinfo"], garbage
    )
    found = read_topology(tree(tmp_path, files), set(range(6)))
    assert found.usable_cores == 6
    assert all(core.speed == 1.0 for core in found.cores)
    assert found.quota is None
    assert read_memory(tree(tmp_path, {"proc/meminfo": garbage, f"{GROUP}/memory.max": garbage})).total is None
    for name in (f"{CPU}/online", f"{NODE}/has_memory", f"{GROUP}/cpu.max"):
        (tmp_path / name).unlink()
        (tmp_path / name).mkdir()
    assert read_topology(tmp_path, {0, 1}).usable_cores == 2


def test_settings_that_are_there_are_told(tmp_path: Path) -> None:
    huge = "sys/kernel/mm/transparent_hugepage/enabled"
    assert read_settings(tree(tmp_path, {huge: "nonsense\n"})) == {}
    tree(tmp_path, {huge: "always madvise [never]\n", f"{CPU}/cpu0/cpufreq/scaling_governor": "powersave\n"})
    assert read_settings(tmp_path) == {"huge_pages": "never", "governor": "powersave"}


@pytest.mark.skipif(sys.platform != "linux", reason="promises of memory are Linux's")
def test_reserved_pages_may_be_more_than_the_machine_has() -> None:
    """A slot maps its whole capacity, of which most is never written."""
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        pytest.skip("this system promises no more than it has")
    pages = SYSTEM.reserved_pages(1 << 43)
    pages[1 << 42] = 1
    assert pages[(1 << 42) - 1 : (1 << 42) + 2] == b"\0\1\0"
