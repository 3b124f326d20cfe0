"""Prints results, notes, progress and tables, and turns errors into exit codes. It knows nothing of commands.

Exit codes: 0 done, 1 an error that cpuspec reports, 2 wrong usage, 130 interrupted, 141 the reader of the output has gone.
"""

import errno
import io
import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO, cast

import typer

from cpuspec.cli import INTERRUPTED, INTERRUPTS, end_at_once
from cpuspec.errors import CpuspecError, printable
from cpuspec.platform import SYSTEM

ERROR, BROKEN_PIPE = 1, 141

Report = Any  # plain data as JSON has it: the findings of a command, to be printed either way

# Characters that a terminal may obey: C0 without tab and newline, DEL, C1 (ECMA-48).
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def emit(text: str) -> None:
    """Write to stdout and flush."""
    sys.stdout.write(text)
    sys.stdout.flush()


def emit_json(value: Report) -> None:
    """Write one line of JSON, in ASCII: the same line in whatever encoding stdout has."""
    emit(json.dumps(value) + "\n")


def emit_generated(text: str) -> None:
    """Write generated text to stdout. A terminal gets control characters as visible escapes, so that it does not obey them."""
    emit(_OBEYED.sub(lambda found: printable(found[0]), text) if sys.stdout.isatty() else text)


def emit_apart(text: str) -> None:
    """Write on stderr the generated text that is no part of the answer."""
    sys.stderr.write(_OBEYED.sub(lambda found: printable(found[0]), text))
    sys.stderr.flush()


def note(text: str) -> None:
    """A line on stderr."""
    print(printable(text), file=sys.stderr, flush=True)


class _Stream:
    """A standard stream. After a failed write every later one raises the exception that `lost` returned, if it returned one."""

    def __init__(self, stream: TextIO | None, descriptor: int, lost: Callable[[OSError], Exception | None]) -> None:
        # A stream that was closed before the start is None. The null device takes its number, so that no file gets it.
        self._stream = stream or open(os.devnull, encoding="utf-8")  # noqa: SIM115
        self._descriptor, self._lost = descriptor, lost
        self._failure: Exception | None = None

    def write(self, text: str) -> int:
        """Write the text, as TextIO does."""
        self._do(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        self._do(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _do(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._descriptor)  # Python writes the rest of its buffer there when it ends
            os.close(null)
            self._failure = self._failure or self._lost(error)
        # It is raised at every write: libraries try a stream with an empty text, and ignore the error of that.
        if self._failure:
            raise self._failure


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Within this context, an output that cannot be written ends the command with an exit code; a note that cannot is dropped."""
    before = sys.stdout, sys.stderr
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if SYSTEM.pipe_encoding and hasattr(stream, "reconfigure") and not stream.isatty():
            stream.reconfigure(encoding=SYSTEM.pipe_encoding)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal's encoding lacks must not end an answer
    sys.stdout = cast(TextIO, _Stream(sys.stdout, 1, _end_without_output))
    sys.stderr = cast(TextIO, _Stream(sys.stderr, 2, lambda error: None))
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout, sys.stderr = before


def _end_without_output(error: OSError) -> Exception:
    if error.errno in (errno.EPIPE, errno.EINVAL):
        return typer.Exit(BROKEN_PIPE)
    why = "stdout is closed" if isinstance(error, io.UnsupportedOperation) else error.strerror or error
    note(f"error: the output cannot be written: {why}")
    return typer.Exit(ERROR)


@contextmanager
def interruptible() -> Iterator[None]:
    """Within this context Ctrl-C raises KeyboardInterrupt, so that a command can tidy up. Outside, it ends the process at once.

    It changes nothing in tests and in a background job, which ignores Ctrl-C.
    """
    if signal.getsignal(signal.SIGINT) is not end_at_once:
        yield
        return
    for number in INTERRUPTS:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in INTERRUPTS:
            signal.signal(number, end_at_once)


def deliver_again(lost: Any) -> None:
    """A `sys.unraisablehook`: Ctrl-C that a callback of a library has swallowed comes again a moment later."""
    if lost.exc_type is KeyboardInterrupt:
        # A moment later, so that the same callback does not swallow it again; and to the main thread, which may be waiting.
        threading.Timer(0.01, SYSTEM.interrupt_main).start()
    else:
        sys.__unraisablehook__(lost)


class _LogHandler(logging.Handler):
    """Shows what the package logs as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        note(f"warning: {record.getMessage()}" if record.levelno >= logging.WARNING else record.getMessage())
        if record.exc_info:
            note(logging.Formatter().formatException(record.exc_info))


_NOTES = _LogHandler()


def show_log() -> None:
    """From now on show what the package logs, as that it compiles kernels. Calling it again changes nothing."""
    logger = logging.getLogger("cpuspec")
    logger.setLevel(logging.INFO)
    logger.addHandler(_NOTES)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn an error of a command into one line on stderr and an exit code, without a traceback."""
    try:
        with interruptible():
            yield
    except CpuspecError as error:
        note(f"error: {error}")
        raise typer.Exit(ERROR) from None
    except OSError as error:  # a name that no file can have, a disk that fails
        name = f"{str(error.filename)[:200]}: " if error.filename else ""
        note(f"error: {name}{error.strerror or error}")
        raise typer.Exit(ERROR) from None
    except MemoryError:
        note("error: not enough memory; use a smaller model or a smaller --context-length")
        raise typer.Exit(ERROR) from None
    except KeyboardInterrupt:
        note("interrupted")
        raise typer.Exit(INTERRUPTED) from None


def print_report(report: Report, as_json: bool, show: Callable[[Any], None]) -> None:
    """Print a report, as JSON or as `show` prints it."""
    if as_json:
        emit_json(report)
    else:
        show(report)


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Print a report's facts, a name and a value in each line; facts without a value are left out.

    A line without a name continues the one above.
    """
    print_table(("", ""), [(name, str(value)) for name, value in facts if value not in (None, "")])


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Aligned columns (a heading that ends in > is aligned to the right). Without a terminal, lines are as long as they need."""
    from rich.console import Console  # here: `cpuspec --version` needs none of it
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=any(columns))
    for name in columns:
        right = name.endswith(">")
        table.add_column(name.rstrip(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(printable, row))
    terminal = Console()
    # Into a text first, because `emit` handles output that cannot be written.
    out = io.StringIO()
    console = Console(file=out, highlight=False, markup=False, width=terminal.width if terminal.is_terminal else 1000)
    console.print(table)
    emit("".join(line.rstrip() + "\n" for line in out.getvalue().splitlines()))


def counted(number: int, what: str) -> str:
    """A number of things, as `2 threads`."""
    return f"{number} {what}{'s' * (number != 1)}"


def accepted(num_accepted: int, num_drafted: int) -> str:
    """The fate of drafted tokens, in words."""
    return f"{num_accepted} of {num_drafted} drafted tokens accepted"


def size(num_bytes: float) -> str:
    """Bytes for people, in powers of 1000 as disks and bandwidths are given."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} bytes"
    power = 1 if num_bytes < 999.5e3 else 2 if num_bytes < 999.5e6 else 3
    value = num_bytes / 1000**power
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {'kMG'[power - 1]}B"
