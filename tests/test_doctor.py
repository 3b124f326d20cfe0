"""`cpuspec doctor` tells what is slow on machines of every kind, with a remedy, and nothing of a sound one."""

from dataclasses import replace
from pathlib import Path

import pytest

from cpuspec.cli import doctor, opening
from cpuspec.cli.doctor import Finding, memory, processors
from cpuspec.kernels import isa
from cpuspec.platform import SYSTEM, Core, Memory, Node, System, Topology
from tests.command import ok, report_of

CORES = tuple(Core((n,)) for n in range(4))
USUAL, ROOMY = Topology(CORES), Memory(16 * 10**9, 12 * 10**9)
NODES = (Node(0, (0, 1), None), Node(1, (2, 3), None))


@pytest.fixture(autouse=True)
def _a_sound_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "read_bandwidth", lambda threads: 2e10)
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 4)


def machine(topology: Topology = USUAL, there: Memory = ROOMY, why: str = "", **settings: str) -> System:
    return replace(SYSTEM, topology=lambda: topology, memory=lambda: there, settings=lambda: settings, why_pages_stay=lambda: why)


def findings(system: System, load: float = 0.0) -> list[Finding]:
    return [*processors(system, load), *memory(system)]


def test_a_sound_machine_has_nothing_slow() -> None:
    assert {one.state for one in findings(machine())} == {"ok"}


@pytest.mark.parametrize(
    ("system", "load", "about", "said"),
    [
        (machine(Topology(CORES, quota=2.5)), 0, "quota", "0.5 of them go unused"),
        (machine(Topology((*CORES[:3], Core((3,), 0.5)))), 0, "cores", "the slowest has 50%"),
        (machine(Topology(CORES[:2])), 0, "affinity", "2 of 4 logical processors"),
        (machine(), 3.0, "load", "3.0 processes"),
        (machine(governor="powersave"), 0, "clock", "powersave"),
        (machine(there=Memory(16 * 10**9, 10**9, 15 * 10**8)), 0, "memory", "1.50 GB by its control group"),
        (machine(there=Memory(16 * 10**9, 10**9)), 0, "memory", "1.00 GB are available"),
        (machine(huge_pages="never"), 0, "huge pages", "off"),
        (machine(Topology(CORES, NODES), why="the system denies it"), 0, "nodes", "the system denies it"),
    ],
)
def test_what_is_slow_is_told_with_a_remedy(system: System, load: float, about: str, said: str) -> None:
    [slow] = [one for one in findings(system, load) if one.state != "ok"]
    assert slow.about == about
    assert said in slow.fact
    assert slow.remedy


def test_slow_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "read_bandwidth", lambda threads: 3e9)
    assert [one.about for one in findings(machine()) if one.state == "slow"] == ["reading"]


@pytest.mark.parametrize(
    ("topology", "said"),
    [
        (Topology((*CORES[:3], Core((3,), kind="lowpower"))), "1 core of low power are left out"),
        (Topology((Core((0, 1)), Core((2, 3)))), "2 cores with two hardware threads"),
        (Topology(CORES, NODES), "each of 2 memory nodes"),
    ],
)
def test_choices_that_cost_nothing_are_told_as_they_are(topology: Topology, said: str) -> None:
    found = findings(machine(topology))
    assert {one.state for one in found} == {"ok"}
    assert any(said in one.fact for one in found)


def test_the_command_prints_findings_as_text_and_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path / "file" / "below"))
    found = {one["about"]: one for one in report_of("doctor")["findings"]}
    assert found["cache"]["state"] == "slow"
    assert "CPUSPEC_CACHE" in found["cache"]["remedy"]
    text = ok("doctor")
    assert "cannot be written" in text
    assert "to do: set CPUSPEC_CACHE" in text


@pytest.mark.parametrize(
    ("instructions", "tiles", "said"), [("avx512_vnni", True, "2.5"), ("avx512_vnni", False, "1.26"), ("avx2", False, "")]
)
def test_who_serves_many_is_told_of_the_type_made_for_many_rows(
    instructions: str, tiles: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isa, "dot_isa", lambda: instructions)
    monkeypatch.setattr(isa, "has_tiles", lambda: tiles)
    told = [one.fact for one in doctor.kernels() if one.about == "many clients"]
    assert bool(told) == bool(said)
    assert all(f"{said} times" in fact and "--quantization nl4_i" in fact for fact in told)


def test_who_runs_a_target_in_a_terminal_is_told_once_of_its_chain(own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [line] = [opening.about_chain(one) for one in opening.measured_chains() if one.target == "qwen2.5-coder-1.5b-instruct"]
    assert line.startswith("qwen2.5-coder-1.5b-fast is qwen2.5-coder-1.5b-instruct with drafts: the same answers, ")
    assert not [one for one in opening.measured_chains() if one.target == "smollm2-135m-instruct"]
    for name in ("qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-1.5b-instruct", "smollm2-135m-instruct", str(own_cache)):
        opening._tell_chain_once(name)
    assert capsys.readouterr().err == f"note: {line}\n"
