"""How the command line speaks: results, notes, progress, and errors as exit codes. Knows nothing of commands.

Exit codes: 0 done, 1 an error that cpuspec reports, 2 wrong usage, 130 interrupted, 141 the reader of the output has gone.
"""

import errno
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column, Table

from cpuspec.errors import CpuspecError

ERROR, INTERRUPTED, BROKEN_PIPE = 1, 130, 141


def emit(text: str) -> None:
    """Write to stdout and flush. Exits the command where nobody reads on, or where the output cannot be stored."""
    if sys.stdout is None:
        note("error: the output cannot be written: stdout is closed")
        raise typer.Exit(ERROR)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EINVAL):
            raise typer.Exit(BROKEN_PIPE) from None
        note(f"error: the output cannot be written: {error.strerror or error}")
        raise typer.Exit(ERROR) from None


def note(text: str) -> None:
    """A line on stderr. Where stderr is gone, nothing: what matters is on stdout."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)


class _Notes(logging.Handler):
    """Shows what the package logs as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        note(f"warning: {record.getMessage()}" if record.levelno >= logging.WARNING else record.getMessage())


_NOTES = _Notes()


def show_log() -> None:
    """From now on show what the package logs, as that it compiles kernels. Calling it again changes nothing."""
    logger = logging.getLogger("cpuspec")
    logger.setLevel(logging.INFO)
    logger.addHandler(_NOTES)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn what goes wrong in a command into one line on stderr and an exit code, never a traceback."""
    try:
        yield
    except CpuspecError as error:
        note(f"error: {error}")
        raise typer.Exit(ERROR) from None
    except MemoryError:
        note("error: not enough memory; use a smaller model or a smaller --context-length")
        raise typer.Exit(ERROR) from None
    except KeyboardInterrupt:
        note("interrupted")
        raise typer.Exit(INTERRUPTED) from None


def stderr_console() -> Console:
    """Rich's view of stderr, as it is now."""
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Show on a terminal that something is going on; elsewhere say nothing."""
    console = stderr_console()
    with ExitStack() as stack:
        if _is_live(console):
            stack.enter_context(console.status(what))
        yield


class FetchProgress:
    """Tells how far a download is: a bar on a terminal, a line for each new thing elsewhere. Nothing if nothing is fetched."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._console = stderr_console()
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._last = ""

    def __enter__(self) -> "FetchProgress":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done_bytes: int, total_bytes: int, what: str) -> None:
        """What `cpuspec.checkpoints.download.Progress` asks for."""
        if not _is_live(self._console):
            if what != self._last:
                note(f"fetching {self._name}: {what} ({size(done_bytes)} of {size(total_bytes)})")
        elif self._bar is None:
            self._bar = Progress(
                TextColumn("fetching {task.fields[name]}", markup=False, table_column=Column(no_wrap=True)),
                BarColumn(bar_width=20),
                DownloadColumn(table_column=Column(no_wrap=True)),
                TransferSpeedColumn(table_column=Column(no_wrap=True)),
                TimeRemainingColumn(),
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
                console=self._console,
            )
            self._bar.start()
            # Told where it starts, the bar does not count a resumed part as this run's speed.
            self._task = self._bar.add_task(what, name=self._name, total=total_bytes, completed=done_bytes)
        else:
            self._bar.update(self._task, description=what, completed=done_bytes, total=total_bytes)
        self._last = what


class StepProgress:
    """Tells how far a measurement is: a bar on a terminal, a line for each new thing elsewhere.

    The bar is drawn when there is something to tell and at no other time: a thread that draws would take turns with those measured.
    """

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._last = ""

    def __enter__(self) -> "StepProgress":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        """What `cpuspec.evaluate.parity.OnProgress` asks for."""
        console = stderr_console()
        if not _is_live(console):
            if what != self._last:
                note(what)
        else:
            if self._bar is None:
                columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), MofNCompleteColumn())
                self._bar = Progress(*columns, console=console, auto_refresh=False)
                self._bar.start()
            if what != self._last:
                self._task = self._bar.add_task(what, total=total)
            self._bar.update(self._task, completed=done, refresh=True)
        self._last = what


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Aligned columns (a heading that ends in > is aligned to the right). Without a terminal, lines are as long as they need."""
    table = Table(box=None, pad_edge=False, show_header=any(columns))
    for name in columns:
        right = name.endswith(">")
        table.add_column(name.rstrip(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=1000)
    with console.capture() as captured:
        console.print(table)
    emit("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))


def size(num_bytes: float) -> str:
    """Bytes for people, in powers of 1000 as disks and bandwidths are given."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} bytes"
    power = 1 if num_bytes < 999.5e3 else 2 if num_bytes < 999.5e6 else 3
    value = num_bytes / 1000**power
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {'kMG'[power - 1]}B"


def _is_live(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal
