"""Every check of the project, one after the other, and a summary: `python tools/check.py` before each commit.

Runs ruff (lint and format), mypy and pytest with the interpreter it was started with. Exits with 1 if any of them failed.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

CHECKS: Mapping[str, tuple[str, ...]] = {
    "lint": ("ruff", "check", "."),
    "format": ("ruff", "format", "--check", "."),
    "types": ("mypy",),
    "tests": ("pytest", "-n", "auto", "--maxprocesses", "4"),  # a process for each core
}
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # of numpy and torch in each of these processes


def main() -> int:
    """Run the checks; returns the exit code."""
    root = Path(__file__).resolve().parent.parent
    failed = []
    for name, (module, *arguments) in CHECKS.items():
        print(f"--- {name}: {' '.join((module, *arguments))}", flush=True)
        if subprocess.run(
            [sys.executable, "-m", module, *arguments], cwd=root, env=os.environ | ONE_THREAD, check=False
        ).returncode:
            failed.append(name)
    for name in CHECKS:
        print(f"{name:<8}{'FAILED' if name in failed else 'passed'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
