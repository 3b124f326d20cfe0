"""Shows progress on stderr: a spinner, the bar of a download, the steps of a measurement."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType

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
from rich.table import Column

from cpuspec.cli.console import note, size
from cpuspec.errors import printable


def stderr_console() -> Console:
    """Rich's view of stderr, as it is now."""
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Show a spinner on a terminal; elsewhere nothing."""
    console = stderr_console()
    with ExitStack() as stack:
        if _is_live(console):
            stack.enter_context(console.status(printable(what)))
        yield


class FetchProgress:
    """Shows the progress of a download: a line for each new file, and on a terminal a line for the first report and then a bar.

    The first report of a recipe's download is its licence. Nothing is shown where nothing is downloaded.
    """

    def __init__(self, name: str) -> None:
        self._name = printable(name)
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
        """Update, as `cpuspec.checkpoints.download.Progress` demands."""
        what = printable(what)
        if not _is_live(self._console) or not self._last:
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
            # The bar gets its start, so that it does not count the resumed part as this run's speed.
            self._task = self._bar.add_task(what, name=self._name, total=total_bytes, completed=done_bytes)
        else:
            self._bar.update(self._task, description=what, completed=done_bytes, total=total_bytes)
        self._last = what


class StepProgress:
    """Shows the progress of a measurement: a bar on a terminal, a line for each new step elsewhere, or for each tenth of it.

    The bar is drawn at each step only: a thread that redraws it would take time from the measured threads.
    """

    def __init__(self, tenths: bool = False) -> None:
        self._tenths = tenths
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._last = ""

    def __enter__(self) -> "StepProgress":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Update, as `cpuspec.evaluate.parity.OnStep` demands."""
        console = stderr_console()
        if not _is_live(console):
            what = f"{what}: {10 * (10 * done // total)} %" if self._tenths and total else what
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


def _is_live(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal
