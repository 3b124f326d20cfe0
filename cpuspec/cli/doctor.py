"""`cpuspec doctor`: whether cpuspec can run here, what makes it slow, and what to do about each."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import typer

from cpuspec.backends.numa import nodes_to_use
from cpuspec.checkpoints.download import find_fetched
from cpuspec.checkpoints.recipes import Recipe, find_named
from cpuspec.cli import options
from cpuspec.cli.console import Report, counted, exit_codes, print_facts, print_report, size
from cpuspec.cli.opening import about_chain, measured_chains
from cpuspec.cli.progress import busy
from cpuspec.environment import cache_dir, offline, packed_limit_bytes, who_else_writes
from cpuspec.errors import CpuspecError
from cpuspec.files import why_unwritable
from cpuspec.metrics import read_bandwidth
from cpuspec.platform import SYSTEM, System

_LITTLE_MEMORY, _LITTLE_DISK = 2 * 10**9, 5 * 10**9
_SLOW_MEMORY = 6e9  # bytes a second and thread: two channels of DDR4 give a core twice as many


@dataclass(frozen=True)
class Finding:
    """A fact about this machine. state: "wrong" where nothing runs for it, "slow" where it costs time; then with a remedy."""

    about: str
    state: Literal["ok", "slow", "wrong"]
    fact: str
    remedy: str = ""


def _judged(about: str, fact: str, is_slow: bool, remedy: str) -> Finding:
    return Finding(about, "slow", fact, remedy) if is_slow else Finding(about, "ok", fact)


@exit_codes()
def doctor(as_json: options.JsonOption = False) -> None:
    """Tell whether cpuspec can run on this machine, what is slow there and why, and what to do. Exits with 1 where it cannot."""
    with busy("examining this machine"):
        found = [
            *kernels(),
            *processors(SYSTEM, os.getloadavg()[0] if hasattr(os, "getloadavg") else 0),
            *memory(SYSTEM),
            *cache(),
            *chains(),
        ]
    print_report({"findings": [asdict(one) for one in found]}, as_json, _show)
    if any(one.state == "wrong" for one in found):
        raise typer.Exit(1)


def _show(report: Report) -> None:
    marks = {"ok": "", "slow": "slow: ", "wrong": "WRONG: "}
    facts = []
    for one in report["findings"]:
        facts.append((one["about"], f"{marks[one['state']]}{one['fact']}"))
        if one["remedy"]:
            facts.append(("", f"  to do: {one['remedy']}"))
    print_facts(facts)


def kernels() -> Iterator[Finding]:
    """Whether the default backend can compile and run its kernels."""
    try:
        from cpuspec.kernels import compiled_before, isa, kernel_directory, passed_over  # imports numba

        isa.check_processor()
    except CpuspecError as error:
        fact, _, remedy = str(error).rpartition("; ") if "; " in str(error) else str(error).rpartition(": ")
        yield Finding("kernels", "wrong", fact or str(error), remedy or "use --backend numpy")
        return
    multiplied = f"{SYSTEM.processor_name()} multiplies with {isa.dot_isa()}{' and AMX' if isa.has_tiles() else ''}"
    if isa.dot_isa() == "avx2":
        yield Finding("processor", "slow", f"{multiplied}, and has no VNNI", "drafts and prompts gain less here; nothing to do")
    else:
        yield Finding("processor", "ok", multiplied)
    if isa.dot_isa() == "avx512_vnni":
        faster = "2.5" if isa.has_tiles() else "1.26"
        yield Finding(
            "many clients",
            "ok",
            f"64 answers together are some {faster} times as fast with `cpuspec serve MODEL --quantization nl4_i` as from Q4_K_M "
            "(KL divergence .03; cast in minutes, once)",
        )
    if compiled_before():
        yield Finding("kernels", "ok", "compiled before: a start compiles only what a new model needs besides")
    else:
        yield Finding("kernels", "ok", "not compiled yet: the first start takes about half a minute longer")
    for name, why in passed_over().items():
        remedy = f"report this; once {kernel_directory() / name}.differs is removed, the kernel is compiled and checked again"
        yield Finding("kernels", "slow", f"{name} is not used: {why}", remedy)


def processors(system: System, load: float) -> Iterator[Finding]:
    """Which cores compute, and why not others. load: processes that want a processor, on average of the last minute."""
    topology = system.topology()
    threads, cores = topology.usable_cores, topology.cores
    yield Finding("threads", "ok", f"{counted(threads, 'thread')} by default, on {counted(len(cores), 'core')} that may be used")
    if (quota := topology.quota) is not None and threads < len(cores):
        fact = f"control groups grant {quota:g} processors' time"
        fact += f", and {quota - threads:g} of them go unused" if quota > threads else ""
        yield Finding("quota", "slow", fact, "give the container whole processors, and more")
    if left_out := sum(core.kind == "lowpower" for core in cores):
        yield Finding("cores", "ok", f"{counted(left_out, 'core')} of low power are left out: the others would wait for them")
    if slowest := min((core.speed for core in cores if core.speed < 0.9), default=0.0):
        yield Finding(
            "cores",
            "slow",
            f"the slowest has {slowest:.0%} of the fastest's clock; they share work by what each gets done",
            "compare with --threads of the fast cores only (`cpuspec bench --threads N`)",
        )
    if shared := sum(len(core.cpus) > 1 for core in cores):
        yield Finding("SMT", "ok", f"{counted(shared, 'core')} with two hardware threads use one: the second adds nothing")
    if (there := os.cpu_count() or 0) > (mine := sum(len(core.cpus) for core in cores)):
        yield Finding("affinity", "slow", f"{mine} of {there} logical processors may be used", "widen the affinity mask or cpuset")
    if load > max(len(cores) - threads, 0) + 0.5:
        yield Finding(
            "load", "slow", f"{load:.1f} processes want a processor besides", "end them, or leave them cores by a lower --threads"
        )
    if (governor := system.settings().get("governor", "")) in ("powersave", "conservative", "ondemand"):
        yield Finding(
            "clock", "slow", f"the clock's governor is {governor}, which may start slowly", "cpupower frequency-set -g performance"
        )


def memory(system: System) -> Iterator[Finding]:
    """How much memory there is, how fast it is, and where it lies."""
    there, topology = system.memory(), system.topology()
    if there.usable is None:
        yield Finding("memory", "ok", "the system does not tell how much there is")
    else:
        limited = " by its control group" if there.limit == there.usable else ""
        fact = f"this process may use {size(there.usable)}{limited}" + (
            f", of which {size(there.available)} are available" if there.available is not None else ""
        )
        little = there.usable < _LITTLE_MEMORY or (there.available or there.usable) < there.usable // 4
        yield _judged("memory", fact, little, "raise the limit or end other programs: weights that do not fit are read again")
    bandwidth, threads = read_bandwidth(topology.usable_cores), topology.usable_cores
    fact = (
        f"{bandwidth / 1e9:.1f} GB/s with {counted(threads, 'thread')}, which is as many tokens/s of a model with 1 GB of weights"
    )
    is_slow = bandwidth < _SLOW_MEMORY * min(threads, 2)
    yield _judged("reading", fact, is_slow, "use fewer bits a weight and drafts; on a laptop fill both memory slots")
    if system.settings().get("huge_pages") == "never":
        yield Finding(
            "huge pages",
            "slow",
            "transparent huge pages are off, so working memory has small pages",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    if nodes := nodes_to_use(topology):
        why, where = system.why_pages_stay(), f"{len(nodes)} memory nodes"
        fact = (
            f"weights are not spread over {where}: {why}" if why else f"weights are copied to each of {where}, or spread over them"
        )
        yield _judged("nodes", fact, bool(why), "allow it, or use numactl")


def cache() -> Iterator[Finding]:
    """Whether models, kernels and packed weights can be kept."""
    directory = cache_dir()
    if why := why_unwritable(directory):
        fact = f"{directory} cannot be written ({why}): every start compiles kernels and packs weights"
        yield Finding("cache", "slow", fact, "set CPUSPEC_CACHE to a directory that can be")
        return
    if others := who_else_writes(directory.stat()):
        yield Finding("cache", "slow", f"{directory} {others}: machine code is not trusted", "set CPUSPEC_CACHE to one of your own")
        return
    free = shutil.disk_usage(Path(directory)).free
    yield _judged(
        "cache", f"{directory}, with {size(free)} left", free < _LITTLE_DISK, "make room, or set CPUSPEC_CACHE to another disk"
    )
    if not packed_limit_bytes():
        yield Finding("packed weights", "slow", "CPUSPEC_PACKED_GB is 0: every start packs them anew", "unset it")
    if offline():
        yield Finding("network", "ok", "CPUSPEC_OFFLINE forbids downloads")


def chains() -> Iterator[Finding]:
    """Faster ways to run models that are here: with drafts."""
    for chain in measured_chains():
        target = find_named(chain.target)
        if isinstance(target, Recipe) and find_fetched(target):
            yield Finding("drafts", "ok", about_chain(chain))
