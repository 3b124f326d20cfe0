"""Kernels come from the disk at the second start, and only whole."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cpuspec.kernels import machine_code
from cpuspec.kernels.machine_code import address, compiled_before, function, kernel_directory

# What a process does that has not loaded Numba's runtime.
FRESH = """
from tests.kernels.test_machine_code import weighted, raising
from cpuspec.kernels.machine_code import address, function
print(function(address("weighted", 2, lambda: weighted, True), 2, True)(3, 4))
print(function(address("raising", 1, lambda: raising, True), 1, True)(5))
"""


def weighted(a, b):
    total = 0
    for i in range(a):
        total += i * b
    return total


def raising(a):
    if a < 0:
        raise ValueError("negative")
    return 2 * a


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def compiles(monkeypatch) -> list[object]:
    """What was compiled since this list was last cleared."""
    done: list[object] = []
    compile_ = machine_code._compile

    def watched(python: Callable, *rest: object) -> object:
        done.append(python)
        return compile_(python, *rest)

    monkeypatch.setattr(machine_code, "_compile", watched)
    return done


def value() -> int:
    return function(address("weighted", 2, lambda: weighted, returns=True), 2, returns=True)(3, 4)


def test_a_second_start_compiles_nothing(compiles: list[object]) -> None:
    assert value() == weighted(3, 4) == 12
    assert compiles == [weighted]
    compiles.clear()
    assert value() == 12
    assert compiles == []


def test_another_process_compiles_nothing_and_needs_nothing_that_this_one_had(cache: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    files = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", FRESH],
            env=environment,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.split() == ["12", "10"], done.stderr
        files.append({path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()})
    assert {path.name for path in files[0]} == {"weighted.o", "raising.o"}
    assert files[1] == files[0]


def test_a_kernel_that_would_need_an_allocator_is_found_when_it_is_compiled() -> None:
    def allocating(count):
        room = np.zeros(count)
        for i in range(count):
            room[i] = i
        return int(room.sum())

    with pytest.raises(AssertionError, match="kernels get memory from their callers"):
        address("allocating", 1, lambda: allocating, returns=True)


def flip(at: int) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        data = bytearray(content)
        data[at] ^= 1
        return bytes(data)

    return change


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[:-1],
    "longer": lambda content: content + b"\0",
    "checksum": flip(0),
    "name": flip(40),
    "code": flip(-100),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_compiled_again(compiles: list[object], damage: str) -> None:
    value()
    [path] = kernel_directory().iterdir()
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    compiles.clear()
    assert value() == 12
    assert value() == 12
    assert compiles == [weighted]


def test_a_cache_that_cannot_be_written_costs_a_compilation(cache: Path, monkeypatch, compiles: list[object]) -> None:
    (cache / "file").touch()
    monkeypatch.setenv("CPUSPEC_CACHE", str(cache / "file"))
    assert value() == 12
    assert compiles == [weighted]


def test_an_unfinished_file_is_not_left_behind(monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fail)
    assert value() == 12
    assert list(kernel_directory().iterdir()) == []


def test_a_machine_has_its_kernels_once_the_step_is_there() -> None:
    assert not compiled_before()
    value()
    assert not compiled_before()
    (kernel_directory() / "run.o").touch()
    assert compiled_before()
