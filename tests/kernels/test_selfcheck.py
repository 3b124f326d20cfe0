"""A kernel that computes something wrong is found when it is compiled, and passed over."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpuspec.cli import doctor
from cpuspec.errors import BackendError
from cpuspec.kernels import attention, attention_bf16, embed, isa, latent, linear, machine_code, selfcheck, superblocks, team, tiles
from cpuspec.kernels.machine_code import KernelDiffersError, address, function, kernel_directory, passed_over
from tests.kernels.conftest import kept

needs_tiles = pytest.mark.skipif(not isa.has_tiles(), reason="this processor has no tile registers")
needs_bf16_tiles = pytest.mark.skipif(not isa.has_bf16_tiles(), reason="this processor has no bf16 tile registers")
KERNELS: tuple[Any, ...] = (
    linear.linear_kernel,
    attention.attend_kernel,
    attention_bf16.attend_kernel,
    latent.attend_kernel,
    embed.row_decoder,
)


def start_anew() -> None:
    """Forget what this process compiled and found, as a new one has not."""
    for kernel in KERNELS:
        kernel.cache_clear()
    machine_code._differing.clear()
    machine_code._tell_of_passing_over.cache_clear()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    """Machine code of other tests is not seen here, and none of here by other tests."""
    start_anew()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPUSPEC_CACHE", str(tmp_path))
        yield tmp_path
    start_anew()


def doubled(a):  # type: ignore[no-untyped-def]
    return 2 * a


def checked(check: Callable[[int], str]) -> int:
    return function(address("doubled", 1, lambda: doubled, True, check), 1, True)(21)


def is_42(address: int) -> str:
    return "" if function(address, 1, True)(21) == 42 else "21 doubled is not 42"


def is_odd(address: int) -> str:
    return "the result is even"


def test_a_kernel_is_checked_when_it_is_compiled_and_never_again(compiles: list[object]) -> None:
    asked: list[int] = []

    def check(address: int) -> str:
        asked.append(address)
        return is_42(address)

    assert checked(check) == checked(check) == 42
    assert len(asked) == len(compiles) == 1
    assert kept() == ["doubled.o"]
    assert passed_over() == {}


def test_a_verdict_is_kept_with_the_machine_code(compiles: list[object]) -> None:
    for _ in range(2):  # starts
        for _ in range(2):
            with pytest.raises(KernelDiffersError, match=r"the kernel doubled, compiled for .*: the result is even; use"):
                checked(is_odd)
        assert passed_over() == {"doubled": "the result is even"}
        start_anew()
    assert len(compiles) == 1
    assert kept() == ["doubled.differs"]


def test_a_verdict_that_cannot_be_kept_holds_for_the_process(cache: Path, monkeypatch, compiles: list[object]) -> None:  # type: ignore[no-untyped-def]
    (cache / "file").touch()
    monkeypatch.setenv("CPUSPEC_CACHE", str(cache / "file"))
    for _ in range(2):
        with pytest.raises(KernelDiffersError):
            checked(is_odd)
    assert passed_over() == {"doubled": "the result is even"}
    assert len(compiles) == 1


def test_a_verdict_that_is_damaged_is_found_anew(compiles: list[object]) -> None:
    with pytest.raises(KernelDiffersError):
        checked(is_odd)
    start_anew()
    (kernel_directory() / "doubled.differs").write_bytes(b"the result is even")
    assert checked(is_42) == 42
    assert len(compiles) == 2
    assert passed_over() == {}


def test_an_interrupted_check_is_made_anew() -> None:
    def interrupted(address: int) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checked(interrupted)
    assert not kept()
    assert checked(is_42) == 42


ENDED = """
import os
from tests.kernels.test_selfcheck import checked
checked(lambda address: os._exit(3))
"""


def test_a_kernel_in_which_a_process_ended_is_not_run_again(compiles: list[object]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", ENDED], env=environment, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 3
    with pytest.raises(KernelDiffersError, match="a process ended while it ran the kernel for the first time"):
        checked(is_42)
    assert compiles == []
    (kernel_directory() / "doubled.differs").unlink()  # as `doctor` says
    assert checked(is_42) == 42


def test_doctor_says_which_kernels_are_not_used_and_what_to_do() -> None:
    assert not any("not used" in finding.fact for finding in doctor.kernels())
    with pytest.raises(KernelDiffersError):
        checked(is_odd)
    [finding] = [finding for finding in doctor.kernels() if "not used" in finding.fact]
    assert (finding.state, finding.fact) == ("slow", "doubled is not used: the result is even")
    assert str(kernel_directory() / "doubled.differs") in finding.remedy


def products_are_right(kernel: int, format_name: str, encoding: str) -> bool:
    return selfcheck.linear(format_name, encoding, kernel) == ""


@needs_tiles
@pytest.mark.parametrize(("name", "encoding"), [("q4_0", "int8"), ("q6_k", "int14")])
def test_a_wrong_constant_in_tiles_is_found_and_vectors_multiply_instead(  # type: ignore[no-untyped-def]
    monkeypatch, compiles: list[object], caplog, name: str, encoding: str
) -> None:
    own, in_planes = tiles._minus_bytes, superblocks._in_planes
    monkeypatch.setattr(superblocks, "_in_planes", lambda group: in_planes(replace(group, zero=group.zero + 1)))
    monkeypatch.setattr(tiles, "_minus_bytes", lambda codes, zero: own(codes, zero + 1))
    for _ in range(2):  # starts
        assert products_are_right(linear.linear_kernel(name, encoding), name, encoding)
        assert list(passed_over()) == [f"linear-{name}-{encoding}-tiles"]
        [record] = [record for record in caplog.records if record.levelname == "WARNING"]
        assert f"the kernel linear-{name}-{encoding}-tiles" in record.getMessage()
        assert "a slower one is used" in record.getMessage()
        caplog.clear()
        start_anew()
    assert len(compiles) == 2
    [finding] = [finding for finding in doctor.kernels() if "not used" in finding.fact]
    assert finding.fact.startswith(f"linear-{name}-{encoding}-tiles is not used: 130 rows are ")


def wrong_reader(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let every instruction set read the scales of a format as a thousandth more than they are."""
    readers = dict(linear.READERS)
    own = readers[name]

    def read(*operands: Any) -> Any:
        group = own(*operands)
        return replace(group, scales=[scale * 1.001 for scale in group.scales])

    readers[name] = read
    for module in (linear, tiles, linear.ymm):
        monkeypatch.setattr(module, "READERS", readers)


def test_a_kernel_with_no_other_in_reserve_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_reader(monkeypatch, "q4_0")
    with pytest.raises(BackendError, match=r"the kernel linear-q4_0-int8, compiled for .* use --backend numpy, and report this"):
        linear.linear_kernel("q4_0", "int8")
    assert {name.removesuffix("-tiles") for name in passed_over()} == {"linear-q4_0-int8"}


def test_wrong_kernels_of_attention_and_of_embeddings_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    own = attention.fma
    monkeypatch.setattr(attention, "fma", lambda x, y, z: own(x, y, z) * 1.0001)
    monkeypatch.setattr(embed, "_DECODERS", {**embed._DECODERS, "f16": embed._DECODERS["bf16"]})
    for kernel in (
        lambda: attention.attend_kernel("f16", capped=True),
        lambda: latent.attend_kernel("int8", 16),
        lambda: embed.row_decoder("f16"),
    ):
        with pytest.raises(KernelDiffersError):
            kernel()
    monkeypatch.undo()
    for path in kernel_directory().glob("*.differs"):
        path.unlink()
    start_anew()
    assert attention.attend_kernel("f16", capped=True)
    assert latent.attend_kernel("int8", 16)
    assert embed.row_decoder("f16")


@pytest.mark.skipif(
    not isa.has_bf16_dots() or isa.has_bf16_tiles(), reason="this processor multiplies bf16 in tiles, or not at all"
)
@pytest.mark.skipif(
    not isa.has_bf16_dots() or isa.has_bf16_tiles(), reason="this processor multiplies bf16 in tiles, or not at all"
)
def test_a_wrong_kernel_of_attention_in_bf16_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_bf16.attend_kernel("f16")
    start_anew()
    for path in kernel_directory().glob("attend-bf16-*"):
        path.unlink()
    own = attention_bf16.dot_pairs
    monkeypatch.setattr(attention_bf16, "dot_pairs", lambda *operands: own(*operands) * 1.0001)
    with pytest.raises(KernelDiffersError, match="queries are"):
        attention_bf16.attend_kernel("f16")


def does_nothing(team, threads, thread):  # type: ignore[no-untyped-def]
    pass


def test_activations_that_are_not_prepared_right_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = address("idle", 3, lambda: does_nothing)
    assert selfcheck.run(idle) == "activations in int8 differ from numpy's"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CPUSPEC_CACHE")  # where other tests' is
        run = team._entry("run")
    assert selfcheck.run(run) == ""
    wrong = {"SCALE": selfcheck.SHIFT, "MINUS_8_SUMS": selfcheck.MINUS_16_SUMS, "VALUE_SUM": selfcheck.SHIFT}
    for name, place in (wrong | {"MINUS_SUMS": selfcheck.MINUS_LOWER_SUMS, "GROUP_SUMS": 4}).items():
        with monkeypatch.context() as patch:
            patch.setattr(selfcheck, name, place)
            encoding = "int8" if name in wrong else "int14"
            assert selfcheck.run(run) == f"activations in {encoding} differ from numpy's", name
