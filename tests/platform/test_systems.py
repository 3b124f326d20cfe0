"""Modules import on a system that lacks Linux's; each system's table does what it says where this machine can tell."""

import ctypes
import io
import json
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cpuspec
from cpuspec.backends.kv_memory import KVPlaces
from cpuspec.cli import console
from cpuspec.formats.kv import get_kv_format
from cpuspec.formats.packing import reserved_bytes
from cpuspec.platform import SYSTEM, System, generic, linux, windows

ROOT = Path(cpuspec.__file__).parent
TABLES = {"generic": generic.SYSTEM, "linux": linux.SYSTEM, "windows": windows.SYSTEM}

# Hides what Windows lacks, and imports every module that this installation can import.
HIDDEN = """
import ctypes, importlib, json, mmap, os, signal, sys
import torch, httpx, fastapi, uvicorn, numba, numpy, transformers  # libraries look for what they need themselves
for name in ("resource", "fcntl", "termios", "tty", "pwd", "grp"):
    sys.modules[name] = None
sys.platform = "unknown"
for module, names in (
    (os, "killpg sched_getaffinity geteuid getuid fork sysconf preadv mkfifo O_DIRECT setsid waitid"),
    (signal, "pthread_kill setitimer SIGKILL SIGHUP SIGUSR1 SIGPIPE"),
    (mmap, "MAP_PRIVATE MAP_ANONYMOUS MAP_SHARED MAP_POPULATE PROT_READ MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_DONTNEED"),
):
    for name in names.split():
        delattr(module, name)
class CDLL(ctypes.CDLL):
    def __init__(self, name, *arguments, **options):
        if name is None:
            raise TypeError("a library is a file")
        super().__init__(name, *arguments, **options)
ctypes.CDLL = CDLL
failed = {}
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except Exception as error:
        if getattr(error, "name", "") not in ("ray", "triton", "lm_eval") and "install it with" not in str(error):
            failed[name] = repr(error)
print(json.dumps(failed))
"""


def modules() -> Iterator[str]:
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(("cpuspec", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        if not name.endswith("__main__"):
            yield name


@pytest.mark.skipif(sys.platform != "linux", reason="hides what Linux has")
def test_every_module_imports_without_what_linux_alone_has() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN], input=json.dumps([*modules()]), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_machine_has_cores_a_name_and_memory_it_knows_or_not(table: System) -> None:
    if table is linux.SYSTEM and sys.platform != "linux":
        pytest.skip("reads Linux's files")
    assert table.topology().usable_cores >= 1
    assert isinstance(table.processor_name(), str)
    memory = table.memory()
    assert memory.usable is None or memory.usable > 1 << 20


def test_a_file_is_locked_by_one_handle_wherever_others_stand(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_bytes(b"content")
    with path.open("rb+") as first, path.open("rb+") as second:
        assert SYSTEM.try_lock(first)
        second.seek(3)
        assert not SYSTEM.try_lock(second)
        assert path.read_bytes() == b"content"
    with path.open("rb+") as third:
        assert SYSTEM.try_lock(third)


def test_pages_are_zero_and_a_populated_file_has_the_files_bytes(tmp_path: Path) -> None:
    assert SYSTEM.zeroed_pages(5000)[:] == bytes(5000)
    (tmp_path / "file").write_bytes(b"abc" * 5000)
    with (tmp_path / "file").open("rb") as file:
        pages = SYSTEM.populated_file(file.fileno(), 15000)
    SYSTEM.release_pages(pages, 5000, 4000)
    assert pages[:] == b"abc" * 5000


def is_wine() -> bool:
    return hasattr(ctypes, "WinDLL") and hasattr(ctypes.WinDLL("ntdll"), "wine_get_version")


@pytest.mark.parametrize(
    ("code", "cpu_s", "memory_bytes", "ends"),
    [
        ("bytearray(1 << 30)", None, 1 << 29, True),
        ("bytearray(1 << 30)", None, 1 << 34, False),
        ("while True: pass", 1, 1 << 34, True),
        ("pass", 1, 1 << 30, False),
    ],
)
def test_a_helper_beyond_its_limits_is_ended(code: str, cpu_s: int | None, memory_bytes: int, ends: bool) -> None:
    if ends and (is_wine() or SYSTEM.start_helper is generic.SYSTEM.start_helper):
        pytest.skip("limits of jobs are kept by Windows and not by Wine, and other systems than Linux have none")
    arguments = ["-I", "-c", f"import sys; sys.stdin.read(); {code}; print('done')"]
    with SYSTEM.start_helper(arguments, cpu_s, memory_bytes, subprocess.PIPE, subprocess.DEVNULL) as helper:
        output, _ = helper.communicate(b"")
    assert (helper.returncode != 0, output.strip()) == (ends, b"" if ends else b"done")


def test_reserved_pages_are_zero_once_they_are_committed() -> None:
    pages = np.frombuffer(SYSTEM.reserved_pages(1 << 33), np.uint8)  # 8 GB: the place of some bytes has more than 32 bits
    for first, last in ((4096, 8191), (1 << 32, (1 << 32) + 10), (4096, 8191)):
        SYSTEM.commit_pages(pages[first:].ctypes.data, last - first)
        assert not pages[first:last].any()
        pages[first:last] = 0


def has_huge_pages(first: int) -> bool:
    """Whether /proc/self/smaps says that the memory at an address may be in huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= first < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return " hg" in line
    return False


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no huge pages to ask for")
def test_a_long_context_has_huge_pages_behind_its_first_chunks() -> None:
    layer = SimpleNamespace(attention=SimpleNamespace(dims=128, value_dims=128, kv_heads=2, window=None))
    places = KVPlaces([layer, layer], get_kv_format("f16"))  # type: ignore[list-item]
    memory = places.memory(reserved_bytes((64 * places.chunk_bytes,)), 64)
    addresses = [head.ctypes.data for part in memory for head in part]
    chunk = memory[0].shape[1] // 64
    for last, huge in ((16, False), (17, True)):
        places.commit(memory, last - 1, last)
        assert [has_huge_pages(at + chunk * 16) for at in addresses] == [huge] * 4
        assert [has_huge_pages(at + chunk * 15) for at in addresses] == [False] * 4


def processor(efficiency: int, *masks: tuple[int, int], relation: int = 0) -> bytes:
    """One SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX of a core with masks (group, mask)."""
    groups = b"".join(struct.pack("<QH6x", mask, group) for group, mask in masks)
    return struct.pack("<IIBB20xH", relation, 32 + len(groups), 1, efficiency, len(masks)) + groups


@pytest.mark.parametrize(
    ("information", "allowed", "cores"),
    [
        (processor(0, (0, 0b11)) + processor(0, (0, 0b1100)), {}, [((0, 1), ""), ((2, 3), "")]),
        (processor(0, (0, 0b11)) + processor(0, (0, 0b1100)), {0: 0b1010}, [((1,), ""), ((3,), "")]),
        (processor(0, (0, 0b11)) + processor(0, (0, 0b1100)), {0: 0b11}, [((0, 1), "")]),
        (processor(0, (0, 1)) + processor(1, (0, 2)), {}, [((1,), "core"), ((0,), "atom")]),
        (
            processor(0, (0, 1)) + processor(2, (0, 6)) + processor(1, (0, 8)),
            {},
            [((1, 2), "core"), ((3,), "atom"), ((0,), "lowpower")],
        ),
        (processor(0, (0, 1)) + processor(0, (1, 1)), {}, [((0,), ""), ((64,), "")]),
        (processor(0, (0, 1)) + processor(0, (0, 1), relation=3), {}, [((0,), "")]),
    ],
)
def test_windows_cores_are_read_from_its_records(
    information: bytes, allowed: dict[int, int], cores: list[tuple[tuple[int, ...], str]]
) -> None:
    assert [(core.cpus, core.kind) for core in windows._cores(information, allowed)] == cores


@pytest.mark.skipif(not hasattr(ctypes, "WinDLL"), reason="asks Windows")
def test_windows_tells_its_memory_and_its_cores() -> None:
    assert SYSTEM is windows.SYSTEM
    assert windows._processor_information()
    assert SYSTEM.memory().total


@pytest.mark.parametrize(("encoding", "written"), [("utf-8", "日本é"), (None, "??é")])
def test_a_pipe_gets_every_character_where_the_system_names_an_encoding(
    encoding: str | None, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="cp1252", write_through=True))
    monkeypatch.setattr(console, "SYSTEM", replace(SYSTEM, pipe_encoding=encoding))
    with console.guarded_streams():
        console.emit("日本é")
    assert raw.getvalue().decode(encoding or "cp1252") == written


def test_caches_lie_where_each_system_keeps_them() -> None:
    assert linux.SYSTEM.cache_home({}) == Path.home() / ".cache" / "cpuspec"
    assert windows.SYSTEM.cache_home({"LOCALAPPDATA": "local"}) == Path("local") / "cpuspec" / "cache"
    assert windows.SYSTEM.cache_home({}) == Path.home() / "AppData" / "Local" / "cpuspec" / "cache"
