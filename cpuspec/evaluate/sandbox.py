"""Programs that a model wrote, run in a process of their own with limits on time, memory, files and network.

By default a program runs in namespaces of its own (`sandbox_child`). Where the kernel has none, nothing runs unless the caller
accepts limits without isolation, as in a disposable container.
"""

import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from cpuspec.errors import ConfigError, in_one_line
from cpuspec.evaluate import sandbox_child
from cpuspec.platform import SYSTEM

_CHILD = Path(sandbox_child.__file__)
_MOST_RESULT_BYTES = 1 << 16


@dataclass(frozen=True)
class Limits:
    """The limits of one program. wall_s is longer than cpu_s, so that a busy machine changes no verdict."""

    cpu_s: int = 10  # of the processor
    wall_s: float = 60.0
    memory_bytes: int = 1 << 29  # of addresses
    disk_bytes: int = 1 << 24  # of its own directory, which lies in memory


@dataclass(frozen=True)
class Outcome:
    """The end of a program: "passed" if it ran to its end, "failed" if it raised or exited, "timeout", "killed"; and the reason."""

    status: str
    reason: str = ""

    @property
    def passed(self) -> bool:
        """Whether it ran to its end."""
        return self.status == "passed"


def run_program(program: str, limits: Limits | None = None, isolated: bool = True) -> Outcome:
    """Run a Python program, which has the standard library only.

    A program shares its process with the code that tells how it ended, so it could say that it passed. One that says so runs once
    more with an end that must fail: where that passes, or fails otherwise, too, it has not run to its end.

    isolated: in namespaces of its own; otherwise it has the limits, and as much of the filter of system calls as there is, and may
    read and write what this user may. Raises ConfigError where it cannot be isolated.
    """
    if not SYSTEM.has_namespaces:
        raise ConfigError("programs of a model are run on Linux only, where they can be shut away; judge these answers there")
    found = _run_once(program, limits or Limits(), isolated)
    if not found.passed:
        return found
    end = secrets.token_hex(16)
    control = _run_once(f"{program}\n\nraise AssertionError({end!r})\n", limits or Limits(), isolated)
    if control == Outcome("failed", f"AssertionError: {end}"):
        return found
    return Outcome("failed", "it says that it passed, and not because it ran to its end") if control.passed else control


def _run_once(program: str, limits: Limits, isolated: bool) -> Outcome:
    token = secrets.token_hex(16)
    with (
        tempfile.TemporaryDirectory(prefix="cpuspec-") as directory,
        tempfile.TemporaryFile() as job,
        tempfile.TemporaryFile() as out,
    ):
        given = {"program": program, "token": token, "isolated": isolated, "directory": directory, **asdict(limits)}
        job.write(json.dumps(given).encode())
        job.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_CHILD)],
            stdin=job,
            stdout=out,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            env={"MIMALLOC_ARENA_RESERVE": "1m"},  # a free-threaded Python takes 1 GiB of addresses otherwise
            start_new_session=True,
        )
        try:
            code = process.wait(limits.wall_s)
        except subprocess.TimeoutExpired:
            return Outcome("timeout", f"it ran for more than {limits.wall_s:g} s")
        finally:
            SYSTEM.end_session(process)
            process.wait()
        out.seek(0)
        found = _result(out.read(_MOST_RESULT_BYTES), token)
    if reason := found.get("refused"):
        raise ConfigError(
            f"this system gives a program no sandbox ({in_one_line(str(reason))}); allow user namespaces, or run cpuspec in a "
            "disposable container, with --no-isolation"
        )
    if found.get("passed") is True:
        return Outcome("passed")
    if "error" in found:
        return Outcome("failed", in_one_line(str(found["error"])))
    if code == sandbox_child.OUT_OF_TIME:
        return Outcome("timeout", f"it took more than {limits.cpu_s} s of the processor")
    if code == sandbox_child.KILLED or code < 0:
        return Outcome("killed", "a signal ended it")
    return Outcome("failed", "it ended without running to its end")


def run_programs(
    programs: Sequence[str],
    limits: Limits | None = None,
    isolated: bool = True,
    workers: int = 1,
    on_outcome: Callable[[int], None] = lambda done: None,
) -> list[Outcome]:
    """The outcomes of programs, in their order, `workers` at once. Raises ConfigError as `run_program` does."""

    def outcomes(pool: ThreadPoolExecutor) -> Iterator[Outcome]:
        # The first one alone: where it is refused, the others are not begun.
        yield from (run_program(program, limits, isolated) for program in programs[:1])
        yield from pool.map(lambda program: run_program(program, limits, isolated), programs[1:])

    found = []
    with ThreadPoolExecutor(workers) as pool:
        for outcome in outcomes(pool):
            found.append(outcome)
            on_outcome(len(found))
    return found


def _result(data: bytes, token: str) -> dict[str, object]:
    """The first line with the token; an empty object without one."""
    for line in data.splitlines():
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and found.get("token") == token:
                return found
    return {}
