"""The tests under Wine: Windows' Python and wheels, on a copy of this checkout.

    python tools/wine_tests.py PYTHON COPY [TEST ...]

PYTHON: a python.exe, or a program that starts one with its arguments; cpuspec's requirements and pytest are installed there.
COPY: a directory of Wine's drive C, into which the files of this checkout are copied first. Drive Z shows Linux's /proc and /sys.
TEST: files or directories of tests; all of them by default. $WINEPREFIX names the prefix, and $CPUSPEC_CACHE, if set, a cache.

Each file of tests has a process of its own: one that hangs or crashes takes no other's results. At the end
there are the totals by directory. Exits with 1 if a test failed.
"""

import argparse
import os
import pty
import shutil
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("passed", "failed", "error", "skipped")
REPORT = "wine-tests.xml"
HANG_S = 600  # of one test: then the process tells where each thread is, and ends
OPTIONS = ("-q", "-p", "no:cacheprovider", "-o", f"faulthandler_timeout={HANG_S}", "-o", "faulthandler_exit_on_timeout=true")
# Intel's OpenMP (torch) asks Wine for calls that it lacks.
ENVIRONMENT = {"PYTHONPATH": ".", "KMP_AFFINITY": "disabled", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
_, TERMINAL = pty.openpty()  # without one, Wine has no console, and no Ctrl-C


def copy_checkout(copy: Path) -> None:
    """Make `copy` hold the files that git knows, or would add, and no other Python file."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    names = {name for name in os.fsdecode(listed.stdout).split("\0") if name and (ROOT / name).is_file()}
    for path in list(copy.rglob("*.py")):
        if str(path.relative_to(copy)) not in names:
            path.unlink()
    for name in names:
        source, target = ROOT / name, copy / name
        if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def test_files(given: list[str]) -> list[str]:
    """The files of tests in these files and directories, relative to the checkout."""
    found = [
        path for name in given for path in ([ROOT / name] if (ROOT / name).is_file() else sorted((ROOT / name).rglob("test_*.py")))
    ]
    return [path.relative_to(ROOT).as_posix() for path in found]


def run(python: str, copy: Path, name: str) -> Iterator[tuple[str, str, str]]:
    """The kind, the name and the reason of each test in a file."""
    report = copy / REPORT
    report.unlink(missing_ok=True)
    command = [*(("wine",) if python.endswith(".exe") else ()), python, "-m", "pytest", *OPTIONS, f"--junitxml={REPORT}", name]
    process = subprocess.Popen(
        command, cwd=copy, env=os.environ | ENVIRONMENT, stdin=TERMINAL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout
    # Until the process ends, not until the pipe does: a server of Wine that it starts holds the pipe open.
    lines: deque[bytes] = deque(maxlen=40)
    threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True).start()
    if process.wait() > 1 or not report.exists():
        yield "error", name, f"exit code {process.returncode}: {os.fsdecode(b''.join(lines))}"
        return
    for case in ET.parse(report).iter("testcase"):
        outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        kind = "passed" if outcome is None else {"failure": "failed"}.get(outcome.tag, outcome.tag)
        yield kind, f"{name}::{case.get('name')}", "" if outcome is None else outcome.get("message", "")


def main() -> int:
    """Run the tests; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", metavar="PYTHON")
    parser.add_argument("copy", metavar="COPY", type=Path)
    parser.add_argument("tests", metavar="TEST", nargs="*", default=["tests"])
    given = parser.parse_args()
    copy_checkout(given.copy)
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    failures = []
    for name in test_files(given.tests):
        start = time.monotonic()
        found = list(run(given.python, given.copy, name))
        counts = Counter(kind for kind, _, _ in found)
        print(f"{name}  {dict(counts)}  {time.monotonic() - start:.0f} s", flush=True)
        failed = [f"{case}: {' '.join(why.split())[:300]}" for kind, case, why in found if kind in ("failed", "error")]
        print("".join(f"    {line}\n" for line in failed), end="", flush=True)
        totals[str(Path(name).parent)] += counts
        failures += failed
    print("\n".join(("", f"{'directory':<24}" + "".join(f"{kind:>9}" for kind in KINDS))))
    for directory, counts in [*totals.items(), ("all", sum(totals.values(), Counter()))]:
        print(f"{directory:<24}" + "".join(f"{counts[kind]:>9}" for kind in KINDS))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
