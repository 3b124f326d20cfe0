"""Describes the machine: processor, memory, the kernels chosen for them, versions, and cached files."""

import os
import platform
from collections import Counter
from contextlib import suppress
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import typer

from cpuspec import __version__
from cpuspec.backends import OWN_SETTINGS
from cpuspec.backends.numa import nodes_to_use
from cpuspec.backends.packed import packed_directory, packed_files
from cpuspec.cli import options
from cpuspec.cli.console import Report, counted, exit_codes, print_facts, print_report, size
from cpuspec.cli.models import known_models
from cpuspec.cli.progress import busy
from cpuspec.environment import cache_dir, commit, default_prefix_cache_bytes, packed_limit_bytes, usable_cores
from cpuspec.metrics import read_bandwidth
from cpuspec.platform import SYSTEM
from cpuspec.settings import EngineConfig

# The features that decide how fast kernels are, of the hundred that a processor has: LLVM's names.
TELLING_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avxvnni",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512vnni",
    "avx512bf16",
    "amx-int8",
    "amx-bf16",
)

_PREFERRED = ("avx512vnni", "avxvnni")  # how kernels like to multiply bytes, best first


_KernelOption = Annotated[
    str,
    typer.Option(
        "--kernel", metavar="FORMAT", help="Print the instructions that multiply weights of this format, and nothing else."
    ),
]
_RowsOption = Annotated[int, typer.Option("--rows", min=1, max=16, help="How many rows --kernel multiplies.")]


@exit_codes()
def info(as_json: options.JsonOption = False, kernel: _KernelOption = "", rows: _RowsOption = 1) -> None:
    """Show what cpuspec makes of this machine: processor, kernels chosen for it, memory, versions, caches."""
    if kernel:
        from cpuspec.kernels.linear import assembly  # imports numba

        print(assembly(kernel, rows))
        return
    with busy("measuring this machine's memory bandwidth"):
        report = describe_machine()
    print_report(report, as_json, show_machine)


def describe_machine() -> Report:
    """Everything that a speed or an error report should come with. Takes some seconds: the bandwidth is measured."""
    from cpuspec import kernels  # imports numba

    directory = kernels.kernel_directory()
    return {
        **describe_hardware(),
        "read_bandwidth": [{"threads": n, "bytes_per_s": read_bandwidth(n)} for n in sorted({1, usable_cores()})],
        "versions": versions(),
        "platform": platform.platform(),
        "cache_directory": str(cache_dir()),
        "kernel_directory": str(directory),
        "kernels_compiled": kernels.compiled_before(),
        "kernels_passed_over": kernels.passed_over(),
        "kernel_bytes": _bytes_under(directory),
        "packed_directory": str(packed_directory()),
        "packed_limit_bytes": packed_limit_bytes(),
        "packed": [{"name": path.name, "bytes": num_bytes} for path, num_bytes in packed_files()],
        "models": [{name: row[name] for name in ("name", "bytes", "path")} for row in known_models()[0] if row["fetched"]],
    }


def describe_hardware() -> Report:
    """The processor, its memory, and the kernels chosen for them. It measures nothing."""
    from cpuspec.kernels import isa  # imports numba

    topology, memory = SYSTEM.topology(), SYSTEM.memory()
    threads = topology.usable_cores
    return {
        "processor": SYSTEM.processor_name(),
        "logical_cpus": os.cpu_count(),
        "usable_cores": threads,
        "default_threads": threads,
        "cores": [
            {"kind": kind, "speed": speed, "count": count}
            for (kind, speed), count in Counter((core.kind, round(core.speed, 2)) for core in topology.cores).items()
        ],
        "cpu_quota": topology.quota,
        "memory_nodes": [{"number": node.number, "bytes": node.memory_bytes, "cpus": len(node.cpus)} for node in topology.nodes],
        "nodes_in_use": list(nodes_to_use(topology)),
        "features": sorted(isa.features()),
        "isa": isa.dot_isa(),
        "isa_reason": _why(isa.dot_isa(), isa.features()),
        "lookup_isa": isa.lookup_isa(),
        "tile_registers": isa.has_tiles(),
        "memory_bytes": memory.total,
        "available_memory_bytes": memory.available,
        "memory_limit_bytes": memory.limit,
        "prefix_cache_bytes": default_prefix_cache_bytes(),
    }


def describe_run(model: str, backend: str, settings: EngineConfig) -> Report:
    """The subject of a measurement: the model, the backend with its settings, the processor."""
    from cpuspec.kernels import isa  # imports numba

    chosen = {name: getattr(settings, name) for name in ("kv_format", *OWN_SETTINGS)}
    return {"model": model, "backend": backend, **chosen, "processor": isa.describe()}


def versions() -> dict[str, str]:
    """The versions of cpuspec and of the packages that its speed depends on."""
    return {
        "cpuspec": __version__,
        **({"commit": commit()} if commit() else {}),
        "python": platform.python_version(),
        **{name: version(name) for name in ("numpy", "numba", "llvmlite")},
    }


def show_machine(report: Report) -> None:
    """Print `describe_machine` as a table."""
    telling = [name for name in TELLING_FEATURES if name in report["features"]]
    limit, quota = report["memory_limit_bytes"], report["cpu_quota"]
    limited = "" if quota is None else f"; a quota of {quota:g} processors limits them"
    memory = [
        ("there", report["memory_bytes"]),
        ("available", report["available_memory_bytes"]),
        ("allowed to this process's group", limit),
    ]
    packed = sum(file["bytes"] for file in report["packed"])
    compiled = "compiled" if report["kernels_compiled"] else "not compiled yet"
    facts = [
        ("processor", report["processor"]),
        ("cores", f"{report['usable_cores']} usable, of {report['logical_cpus']} logical processors"),
        ("features", ", ".join(telling) or "none that the kernels have a use for"),
        ("kernels", f"{report['isa']}: {report['isa_reason']}"),
        ("", f"4-bit codes that stand for values are looked up with {report['lookup_isa']} instructions"),
        ("", f"thirteen rows and more {'are multiplied in' if report['tile_registers'] else 'have no'} tile registers (AMX)"),
        *(("", _kind(one)) for one in report["cores"] if len(report["cores"]) > 1),
        ("threads", f"{report['default_threads']} by default{limited}"),
        ("memory", ", ".join(f"{size(value)} {what}" for what, value in memory if value is not None) or "unknown"),
        ("", _nodes(report)),
        ("", f"{size(report['prefix_cache_bytes'])} by default for the keys and values of finished requests (prefix cache)"),
        *(
            ("", f"reads {one['bytes_per_s'] / 1e9:.1f} GB/s with {counted(one['threads'], 'thread')}")
            for one in report["read_bandwidth"]
        ),
        ("versions", ", ".join(f"{name} {number}" for name, number in report["versions"].items())),
        ("platform", report["platform"]),
        ("machine code", f"{report['kernel_directory']} ({compiled}, {size(report['kernel_bytes'])})"),
        *(("", f"{name} is not used: {why}") for name, why in report["kernels_passed_over"].items()),
        ("packed weights", f"{report['packed_directory']} ({size(packed)} of at most {size(report['packed_limit_bytes'])})"),
        *(("", f"{file['name']} ({size(file['bytes'])})") for file in report["packed"]),
        ("cache", report["cache_directory"]),
        *(("model", f"{model['name']} ({size(model['bytes'])}) {model['path']}") for model in report["models"]),
    ]
    print_facts(facts)


def _why(isa: str, features: frozenset[str]) -> str:
    """Why the kernels multiply bytes as they do: the first of the instructions that they prefer which the processor has."""
    used = isa.replace("_", "")
    missing = " or ".join(takewhile(lambda name: name != used, _PREFERRED))
    if used not in features:
        return f"this processor has no {missing}"
    return f"this processor has {used}" + (f" and no {missing}" if missing else "")


def _kind(cores: Report) -> str:
    """Cores of one kind and speed, on a machine with several."""
    kind = f" of kind {cores['kind']}" if cores["kind"] else ""
    return f"{counted(cores['count'], 'core')}{kind}, {cores['speed']:.0%} of the top speed"


def _nodes(report: Report) -> str:
    """Where weights lie."""
    nodes = report["nodes_in_use"]
    if nodes:
        return f"weights are copied to each of {len(nodes)} memory nodes, or spread over them; a start logs where they lie"
    return "weights lie in one piece: the usable cores are near one memory node"


def _bytes_under(directory: Path) -> int:
    """Bytes of the files below a directory; files that go while it looks are not counted."""
    total = 0
    for path in directory.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total
