"""Every check of the project, one after the other, and a summary: `python tools/check.py` before each commit.

Runs ruff (lint and format), mypy and pytest with the interpreter it was started with, and prints the lines of each package. Exits
with 1 if any of them failed.
`python tools/check.py --all` also runs the tests marked slow: every combination of families, formats, ways and drafters.
`python tools/check.py --changed` prints the tests of the files that have changed since the last commit, and runs nothing.
"""

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

CHECKS: Mapping[str, tuple[str, ...]] = {
    "lint": ("ruff", "check", "."),
    "format": ("ruff", "format", "--check", "."),
    "types": ("mypy",),
    # A process for each core, which has the tests of a file together, with what they share. Preparing assertions to tell their
    # operands would take ten seconds of each process.
    "tests": ("pytest", "-n", "auto", "--maxprocesses", "4", "--dist", "worksteal", "--assert=plain"),
}
AGAIN = ("pytest", "--last-failed", "--last-failed-no-failures=none")  # tells the operands of the assertions that failed
ALL = ("-m", "not real_model")
# One thread for numpy and torch in each of these processes. The bytecode of the package is kept: tests start hundreds of processes.
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}

ROOT = Path(__file__).resolve().parent.parent


def tests_by_path() -> dict[str, str]:
    """The table "I changed X, I run Y" of the contribution guide: for each path below `cpuspec/`, the arguments of pytest."""
    found: dict[str, str] = {}
    for line in (ROOT / ".github" / "CONTRIBUTING.md").read_text("utf-8").splitlines():
        if len(cells := line.split("|")) == 4 and "tests/" in cells[2]:
            found |= dict.fromkeys(re.findall(r"`([\w/.]+)`", cells[1]), " ".join(re.findall(r"tests/[\w/.]+", cells[2])))
    return found


def print_tests_of_changes() -> None:
    """Print a line for each changed file that the table has: its name, and the command that tests it."""
    for name in (line[3:].rpartition(" -> ")[2] for line in _git("status", "--porcelain")):
        inside = name.removeprefix("cpuspec/")
        tests = [given for path, given in tests_by_path().items() if inside.startswith(path) and inside != name]
        if tests or name.startswith("tests/test_"):
            print(f"{name}: python -m pytest -q {' '.join(tests) or name}")


def _git(*words: str) -> list[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def print_lines() -> None:
    """Print the lines of Python of each package, of tests and of tools, and by how many they differ from the last commit."""
    lines: Counter[str] = Counter()
    changes: Counter[str] = Counter()

    def part(name: str) -> str:
        first, *rest = name.split("/")
        return f"cpuspec/{rest[0]}" if first == "cpuspec" and len(rest) > 1 else first

    for name in _git("ls-files", "*.py"):
        if (path := ROOT / name).exists():
            lines[part(name)] += path.read_text("utf-8").count("\n")
    for line in _git("diff", "--numstat", "--no-renames", "HEAD", "--", "*.py"):
        added, removed, name = line.split("\t")
        changes[part(name)] += int(added) - int(removed)
    whole = sum(number for name, number in lines.items() if name.startswith("cpuspec"))
    print(", ".join(f"{name} {number:,} ({changes[name]:+})" for name, number in lines.most_common()))
    print(f"lines of Python: cpuspec {whole:,}, tests {lines['tests']:,}, tools {lines['tools'] + lines['benchmarks']:,}")


def _passes(name: str, *command: str) -> bool:
    print(f"--- {name}: {' '.join(command)}", flush=True)
    return not subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=os.environ | ENVIRONMENT, check=False).returncode


def main() -> int:
    """Run the checks; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--all", action="store_true", help="also run the tests marked slow")
    one.add_argument("--changed", action="store_true", help="print the tests of what has changed, and run nothing")
    one.add_argument("--lines", action="store_true", help="print the lines of each package, and run nothing")
    options = parser.parse_args()
    if options.changed or options.lines:
        (print_tests_of_changes if options.changed else print_lines)()
        return 0
    chosen = ALL if options.all else ()
    failed = [name for name, command in CHECKS.items() if not _passes(name, *command, *(chosen if name == "tests" else ()))]
    if (ROOT / ".git").exists():
        print_lines()
    if "tests" in failed:
        _passes("tests that failed", *AGAIN, *chosen)
    for name in CHECKS:
        print(f"{name:<8}{'FAILED' if name in failed else 'passed'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
