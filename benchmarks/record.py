"""The common head of all files in `results/`: command, date, machine, load. A benchmark's own figures follow it.

A benchmark that compares engines has them as `figures`: {figure with its unit: {engine: spread}}, and beside them `instructions`:
{engine: the instruction set that cpuspec uses, or that the peer is built for}. `peers.py` has both in `instruction_sets`, by the
name that was asked for. `tools/make_readme_tables.py` makes the tables in `benchmarks/README.md` from these files. No path of a
machine gets into them, and no name of one.
"""

import json
import os
import re
import shlex
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from cpuspec.cli.machine import TELLING_FEATURES, describe_hardware, versions
from cpuspec.metrics import read_bandwidth


class PeerError(Exception):
    """An engine that cannot be measured; the text says why."""


class FigureError(PeerError):
    """One figure that an engine cannot be measured on. Its other figures can be."""


@dataclass
class Rounds:
    """Numbers of rounds, from 0 on. Notes as each begins how busy the machine is and how fast `threads` threads read memory.

    stolen: share of the busy time of all processors that a hypervisor gave to others while the round ran. head: what `record`
    knows before the first round.
    """

    count: int
    threads: int
    head: dict[str, Any] = field(init=False)
    load_average: list[float] = field(default_factory=list)
    stolen: list[float] = field(default_factory=list)
    read_bytes_per_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        hardware = describe_hardware()
        self.head = {
            "command": _command(sys.argv),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {
                "processor": hardware["processor"],
                "cores": hardware["usable_cores"],
                "isa": hardware["isa"] + (", amx" if hardware["tile_registers"] else ""),
                "features": [name for name in TELLING_FEATURES if name in hardware["features"]],
                "memory_bytes": hardware["memory_bytes"],
            },
            "versions": versions(),
            "threads": self.threads,
            "rounds": self.count,
        }

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            self.load_average.append(round(os.getloadavg()[0], 2))
            self.read_bytes_per_s.append(read_bandwidth(self.threads))
            say(f"round {number + 1} of {self.count}, load average {self.load_average[-1]}")
            busy_before, stolen_before = _processor_time()
            yield number
            busy, stolen = _processor_time()
            self.stolen.append(round((stolen - stolen_before) / max(1, busy - busy_before), 4))


def record(benchmark: str, model: str, rounds: Rounds) -> dict[str, Any]:
    """The head of a results file, to be made when the rounds are over."""
    return {
        "benchmark": benchmark,
        "model": model,
        **rounds.head,
        "load_average": rounds.load_average,
        "stolen": rounds.stolen,
        "read_bytes_per_s": spread(rounds.read_bytes_per_s),
    }


def save(result: dict[str, Any], path: Path | None) -> None:
    """Write a result where it was asked for, its texts without the paths of this machine."""
    if path is not None:
        path.write_text(json.dumps(_without_paths(result), indent=2) + "\n", "utf-8")


def spread(values: Sequence[float]) -> dict[str, Any]:
    """{"median", "min", "max", "rounds"}: of rounds, to five digits."""
    figures = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: _rounded(value) for name, value in figures.items()} | {"rounds": [_rounded(value) for value in values]}


def print_figures(figures: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a line for each figure: the median of each engine's spread, with its ends."""
    for name, by_engine in figures.items():
        told = (f"{engine} {one['median']:.4g} ({one['min']:.4g} to {one['max']:.4g})" for engine, one in by_engine.items())
        print(f"{name}: {'; '.join(told)}")


def read_names(text: str, known: Iterable[str]) -> list[str]:
    """Names separated by commas, each once. Raises BadParameter for one that is not known."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not known; wanted some of {', '.join(known)}")
    return list(dict.fromkeys(names))


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


def _command(arguments: Sequence[str]) -> str:
    """The command that started a benchmark, without its --json."""
    program, *rest = arguments
    shown = [f"benchmarks/{Path(program).name}"]
    options = iter(rest)
    for option in options:
        if option == "--json":
            next(options, None)
        elif not option.startswith("--json="):
            shown.append(option)
    return "python " + shlex.join(shown)


def _without_paths(value: Any) -> Any:
    """Of paths elsewhere than in the repository only the last name, in texts and keys at any depth."""
    match value:
        case dict():
            return {_without_paths(name): _without_paths(one) for name, one in value.items()}
        case list():
            return [_without_paths(one) for one in value]
        case str():
            return re.sub(r"(?<![\w./])(/([\w.+@-]+/)+|(\.\./)+([\w.+@-]+/)*)", "", value)
    return value


def _processor_time() -> tuple[int, int]:
    """Ticks since the machine started in which its processors had work, and those of them that a hypervisor took away."""
    try:
        user, nice, system, _, _, interrupts, soft_interrupts, stolen, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    except (OSError, ValueError):  # not Linux
        return 0, 0
    return user + nice + system + interrupts + soft_interrupts + stolen, stolen


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
