"""The comparison report of what is on file: Markdown with its pictures beside it.

    python benchmarks/report.py                                   from benchmarks/results, to report/
    python benchmarks/report.py --results DIR --output DIR

It tells of drafts against plain decoding, peers side by side, what n rows cost, acceptance, memory, quality, tasks and their cost,
and of runs that `cpuspec parity --record` left in results/runs, such as a GPU's beside a CPU's. A part without a result on file
names the command that makes one.
Plots need matplotlib: pip install "cpuspec[report]".
"""

import json
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from report_parts import PARTS, Block, Plot, Table, who_ran

from cpuspec.errors import CpuspecError
from cpuspec.evaluate.parity import Recording
from cpuspec.evaluate.parity_file import read_recording

HERE = Path(__file__).resolve().parent
TITLE = "cpuspec, compared"
QUIET_LOAD, QUIET_STOLEN = 1.0, 0.05  # above the threads of the run; of the processors' time

Result = Mapping[str, Any]
Chapter = tuple[str, list[Block]]


class ReportError(Exception):
    """A file that a report cannot be made of; the text says which and why."""


def main(
    results: Annotated[Path, typer.Option(help="Where the results are; recorded runs in runs/ below it.")] = HERE / "results",
    output: Annotated[Path, typer.Option(help="Directory that report.md and its pictures are written to.")] = Path("report"),
) -> None:
    """Write the report, and say which parts have nothing on file."""
    try:
        if find_spec("matplotlib") is None:
            raise ReportError('plots are drawn by matplotlib, which is not installed; pip install "cpuspec[report]"')
        chapters = make_chapters(read_results(results), read_runs(results / "runs"))
        write_report(chapters, output)
    except (ReportError, CpuspecError, OSError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from error
    print(output / "report.md")


def read_results(directory: Path) -> list[Result]:
    """Every results file, the newest first, with its name as "file". Raises ReportError."""
    if not directory.is_dir():
        raise ReportError(f"there is no directory {directory} of results; name one with --results")
    found: list[Result] = []
    for path in sorted(directory.glob("*.json")):
        try:
            result = json.loads(path.read_text("utf-8"))
        except (ValueError, OSError) as error:
            raise ReportError(f"{path} is not a result: {error}") from None
        if not isinstance(result, dict) or not all(
            isinstance(result.get(key), str) for key in ("benchmark", "model", "date", "command")
        ):
            raise ReportError(
                f"{path} is not a result: wanted an object with benchmark, model, date and command; move it elsewhere"
            )
        if not isinstance(result.get("threads", 1), int):
            raise ReportError(f"{path} has {result['threads']!r} for threads, wanted their number; run its command again")
        found.append(result | {"file": path.name})
    return sorted(found, key=lambda result: str(result["date"]), reverse=True)


def read_runs(directory: Path) -> list[Recording]:
    """Every recorded run. Raises ConfigError for a file that is none."""
    return [read_recording(path) for path in sorted(directory.glob("*.json"))]


def make_chapters(results: Sequence[Result], runs: Sequence[Recording]) -> list[Chapter]:
    """Every part with its blocks; of a part with nothing on file, that and the command. Raises ReportError, naming the part."""
    chapters: list[Chapter] = []
    for part in PARTS:
        try:
            blocks = part.make(results, runs)
        except (KeyError, TypeError, AttributeError, ValueError, IndexError, ZeroDivisionError) as error:
            names = ", ".join(str(result["file"]) for result in results)
            reason = f"{type(error).__name__}: {error}"
            raise ReportError(
                f"{part.title}: a result has not the shape that its benchmark writes ({reason}), among {names}"
            ) from error
        chapters.append((part.title, blocks or ["No result on file. Made by:", *(f"`{command}`" for command in part.commands)]))
    return [*chapters, ("Where this comes from", _sources(results, runs))]


def write_report(chapters: Sequence[Chapter], directory: Path) -> None:
    """Write report.md and its pictures."""
    directory.mkdir(parents=True, exist_ok=True)
    for _, blocks in chapters:
        for block in blocks:
            if isinstance(block, Plot):
                (directory / f"{block.name}.png").write_bytes(block.png)
    (directory / "report.md").write_text(as_markdown(chapters), "utf-8")


def as_markdown(chapters: Sequence[Chapter]) -> str:
    """The report as Markdown; pictures are files beside it."""
    lines = [f"# {TITLE}"]
    for title, blocks in chapters:
        lines.append(f"## {title}")
        for block in blocks:
            match block:
                case Plot():
                    lines.append(f"![{block.caption}]({block.name}.png)\n\n*{block.caption}*")
                case Table():
                    rows = [block.head, ["---"] * block.texts + ["---:"] * (len(block.head) - block.texts), *block.rows]
                    lines.append("\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows))
                case _:
                    lines.append(block)
    return "\n\n".join(lines) + "\n"


def _sources(results: Sequence[Result], runs: Sequence[Recording]) -> list[Block]:
    """What every figure was made of: files, dates, machines, how busy they were, commands."""
    rows = []
    for result in results:
        machine = result.get("machine", {})
        where = ", ".join(str(machine[key]) for key in ("processor", "isa") if key in machine)
        rows.append([str(result["file"]), f"{where}, {machine.get('cores', '?')} cores", result["date"][:10], _busy(result)])
    rows += [
        [f"runs/{run.about['recorded']}", who_ran(run.about), str(run.about.get("date", ""))[:10], "not recorded"] for run in runs
    ]
    commands = list(dict.fromkeys(f"`{result['command']}`" for result in results))
    return [Table(["file", "machine", "date", "was it quiet"], rows, 4), *commands] if rows else ["No result on file."]


def _busy(result: Result) -> str:
    """Whether a run had its machine to itself."""
    load, stolen = result.get("load_average") or [], result.get("stolen") or []
    if not load:
        return "not recorded"
    quiet = max(load) <= result.get("threads", 1) + QUIET_LOAD and max(stolen, default=0) <= QUIET_STOLEN
    taken = f", {max(stolen):.0%} of the processors' time taken by others" if stolen else ""
    return f"{'yes' if quiet else 'NO'}: load average up to {max(load)}{taken}"


if __name__ == "__main__":
    typer.run(main)
