"""Kernels come from the disk at the second start, and only whole."""

import inspect
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from cpuspec import config
from cpuspec.environment import sources_digest
from cpuspec.errors import BackendError
from cpuspec.kernels import machine_code
from cpuspec.kernels.linear import linear_kernel
from cpuspec.kernels.machine_code import address, compiled_before, function, kernel_directory
from cpuspec.platform import SYSTEM
from tests.kernels.conftest import kept

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


def value() -> int:
    return function(address("weighted", 2, lambda: weighted, returns=True), 2, returns=True)(3, 4)


def test_a_second_start_compiles_nothing(compiles: list[object]) -> None:
    assert value() == weighted(3, 4) == 12
    assert compiles == [weighted]
    compiles.clear()
    assert value() == 12
    assert compiles == []


ELSEWHERE = """
from tests.kernels.test_machine_code import weighted
from cpuspec.kernels.machine_code import address
address("weighted", 2, lambda: weighted, True)
"""


@pytest.mark.parametrize(("code", "here"), [(ELSEWHERE, []), ("raise SystemExit(1)", [weighted])], ids=["done", "failed"])
def test_what_another_process_compiles_is_waited_for_and_made_here_if_it_fails(
    cache: Path, compiles: list[object], monkeypatch, code: str, here: list[object]
) -> None:
    monkeypatch.setattr(machine_code, "_elsewhere", {})
    monkeypatch.setattr(machine_code, "usable_cores", lambda: 2)
    monkeypatch.chdir(Path(__file__).parents[2])
    machine_code.compile_elsewhere("weighted", f"import sys; sys.path.insert(0, '.')\n{code}")
    assert value() == 12
    assert compiles == here


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
    assert {path.name for path in files[0] if path.suffix != ".lock"} == {"weighted.o", "raising.o"}
    assert files[1] == files[0]


def test_a_kernel_that_would_need_an_allocator_is_found_when_it_is_compiled() -> None:
    def allocating(count):
        room = np.zeros(count)
        for i in range(count):
            room[i] = i
        return int(room.sum())

    with pytest.raises(BackendError, match="kernels get memory from their callers"):
        address("allocating", 1, lambda: allocating, returns=True)


def flip(at: int) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        data = bytearray(content)
        data[at] ^= 1
        return bytes(data)

    return change


@pytest.mark.parametrize("at", [40, -100], ids=["name", "code"])
def test_a_file_with_another_bit_is_compiled_again(compiles: list[object], at: int) -> None:
    """What else may happen to a file: `tests/faults`."""
    value()
    path = kernel_directory() / "weighted.o"
    path.write_bytes(flip(at)(path.read_bytes()))
    compiles.clear()
    assert value() == 12
    assert value() == 12
    assert compiles == [weighted]


def test_an_unfinished_file_is_not_left_behind(monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fail)
    assert value() == 12
    assert kept() == []


def test_a_machine_has_its_kernels_once_the_step_is_there() -> None:
    assert not compiled_before()
    value()
    assert not compiled_before()
    (kernel_directory() / "run.o").touch()
    assert compiled_before()


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What is told, as if this process had told nothing yet."""
    machine_code._tell_of_compiling.cache_clear()
    machine_code._warn_of.cache_clear()
    caplog.set_level("INFO", "cpuspec")
    yield caplog
    machine_code._tell_of_compiling.cache_clear()
    machine_code._warn_of.cache_clear()


def test_a_cache_that_cannot_be_written_is_told_with_its_remedy(cache: Path, monkeypatch, logged) -> None:
    (cache / "file").touch()
    monkeypatch.setenv("CPUSPEC_CACHE", str(cache / "file" / "below"))
    assert value() == value() == 12
    [record] = logged.records
    assert "at every start, because" in record.getMessage()
    assert "set CPUSPEC_CACHE" in record.getMessage()


def make_foreign(path: Path, monkeypatch) -> None:
    """Let a path seem to be another user's."""
    status = os.stat_result

    def foreign(real: Callable) -> Callable:
        def changed(which, *rest, **options):
            found = real(which, *rest, **options)
            if (found.st_dev, found.st_ino) != identity:
                return found
            fields = list(found)
            fields[4] = 12345
            return status(fields)

        return changed

    identity = path.stat().st_dev, path.stat().st_ino
    for name in ("lstat", "stat", "fstat"):
        monkeypatch.setattr(os, name, foreign(getattr(os, name)))


def others_can_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(0o1777 if path.is_dir() else 0o666)


posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="directories have no mode here")


@posix
@pytest.mark.parametrize(
    ("harm", "says"),
    [(others_can_write, "can be written by others (mode 1777)"), (make_foreign, "belongs to another user (id 12345)")],
)
@pytest.mark.parametrize("is_link", [False, True])
def test_machine_code_is_neither_loaded_from_nor_left_in_a_directory_that_others_can_fill(
    compiles: list[object], logged, monkeypatch, cache: Path, harm: Callable, says: str, is_link: bool
) -> None:
    value()
    directory = kernel_directory()
    if is_link:
        directory.rename(cache / "elsewhere")
        directory.symlink_to(cache / "elsewhere")
        assert value() == 12
        assert compiles == [weighted]
    before = {path: path.read_bytes() for path in directory.iterdir()}
    private = directory.with_name(f"{directory.name}-{os.geteuid()}")
    for one, where in ((directory, f"in {private}"), (private, "in memory, at every start: remove it, or set CPUSPEC_CACHE to")):
        harm(one, monkeypatch)
        compiles.clear()
        machine_code._warn_of.cache_clear()
        assert value() == value() == 12
        assert compiles == [weighted] * (1 if one is directory else 2)
        assert kernel_directory() == private
        assert f"{directory}, because it {says}; it is kept {where}" in logged.text
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


@posix
@pytest.mark.parametrize("harm", [others_can_write, make_foreign])
def test_a_file_that_could_be_somebody_elses_is_compiled_again(compiles: list[object], monkeypatch, harm: Callable) -> None:
    value()
    path = kernel_directory() / "weighted.o"
    compiles.clear()
    harm(path, monkeypatch)
    assert value() == 12
    assert value() == 12
    assert compiles == [weighted]


@posix
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_what_this_package_keeps_itself_is_trusted_under_every_umask(compiles: list[object], umask: int) -> None:
    old = os.umask(umask)
    try:
        value()
        value()
    finally:
        os.umask(old)
    assert compiles == [weighted]


def test_compiling_is_announced_whenever_it_happens_and_once(logged) -> None:
    value()
    path = kernel_directory() / "weighted.o"
    assert [record.getMessage() for record in logged.records] == [
        "compiling kernels for this processor: some seconds, on the first run only"
    ]
    logged.clear()
    machine_code._tell_of_compiling.cache_clear()
    value()
    assert logged.records == []
    (path.parent / "run.o").touch()
    path.write_bytes(b"damaged")
    value()
    address("raising", 1, lambda: raising, returns=True)
    assert len(logged.records) == 1


def test_a_kernel_that_cannot_be_compiled_is_an_error_with_words() -> None:
    def wrong(count):
        return count.nothing

    said = r"the kernel wrong cannot be compiled for .*; use --backend numpy and report this: TypingError: "
    with pytest.raises(BackendError, match=said):
        address("wrong", 1, lambda: wrong, returns=True)
    for format_name, encoding in (("q8_0", "f32"), ("f16", "int8"), ("nl4_i", "int8"), ("bf16", "f32"), ("q4_k", "nothing")):
        with pytest.raises(BackendError, match=f"{format_name} weights are multiplied with .* activations, got {encoding}"):
            linear_kernel(format_name, encoding)


def test_the_name_of_machine_code_covers_all_that_makes_it() -> None:
    """Modules that machine code takes constants from, by what kernels import. Others make none."""
    covered = {"kernels", "formats", "platform", "config"}
    imported = set()
    for source in Path(machine_code.__file__).parent.glob("*.py"):
        imported |= set(re.findall(r"^from cpuspec\.(\w+)", source.read_text(), re.M))
    assert imported - covered == {"environment", "errors", "files"}
    (arguments,) = re.findall(r"sources_digest\((.*)\)", inspect.getsource(machine_code._fingerprint))
    assert set(arguments.split(", ")) == covered


def test_a_digest_of_sources_sees_every_table_and_name(tmp_path: Path) -> None:
    package, digests = tmp_path / "package", list[str]()
    package.mkdir()
    for name, content in (
        ("__init__.py", ""),
        ("grids.json", "[1]"),
        ("grids.json", "[2]"),
        ("other.py", "[2]"),
        ("README.md", ""),
    ):
        (package / name).write_text(content)
        of = ModuleType("package")
        of.__file__ = str(package / "__init__.py")
        digests.append(sources_digest(of, config))
    assert len(set(digests)) == 4
    assert digests[-1] == digests[-2]
    assert sources_digest(of) != digests[-1]


def test_directories_of_other_sources_are_removed_when_there_are_many(cache: Path, monkeypatch) -> None:
    monkeypatch.setattr(machine_code, "_MOST_DIRECTORIES", 2)
    for number in range(5):
        (cache / "kernels" / f"{number:016x}").mkdir(parents=True)
        (cache / "kernels" / f"{number:016x}" / "run.o").touch()
        os.utime(cache / "kernels" / f"{number:016x}", (number, number))
    os.utime(cache / "kernels" / f"{1:016x}", (9, 9))  # as a start does that uses it
    (cache / "kernels" / "notes").mkdir()
    (cache / "kernels" / f"{3:016x}").rename(cache / "kernels" / f"{3:016x}-1000")
    machine_code._note_use.cache_clear()
    before = time.time()
    assert value() == 12
    names = {path.name for path in (cache / "kernels").iterdir()}
    assert names == {kernel_directory().name, "notes", f"{1:016x}", f"{4:016x}"}
    os.utime(kernel_directory(), (1, 1))
    machine_code._note_use.cache_clear()
    assert value() == 12
    assert kernel_directory().stat().st_mtime > before - 60


def test_a_process_that_holds_a_lock_and_never_ends_is_not_waited_for(cache: Path, compiles: list[object], monkeypatch) -> None:
    monkeypatch.setattr(machine_code, "_LONGEST_WAIT_S", 0.1)
    kernel_directory().mkdir(parents=True)
    with (kernel_directory() / "weighted.lock").open("wb") as lock:
        assert SYSTEM.try_lock(lock)
        assert value() == 12
        assert compiles == [weighted]
        assert not SYSTEM.try_lock((kernel_directory() / "weighted.lock").open("wb")), "the lock is still the other's"
