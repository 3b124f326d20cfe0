"""Shows progress on stderr: a spinner, the bar of a download, the steps of a measurement."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

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

from cpuspec.checkpoints.download import Progress as OnFetch
from cpuspec.cli.console import note, size
from cpuspec.errors import printable

OnStep = Callable[[str, int, int], None]  # the name of a step, the number done, the number of all


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


@contextmanager
def fetch_progress(name: str) -> Iterator[OnFetch]:
    """A function that shows the progress of a download.

    Each new file has a line. On a terminal the first report has a line and later ones move a bar. The first report of a recipe's
    download is its licence. Nothing is shown where nothing is downloaded.
    """
    name, console, bar, task, last = printable(name), stderr_console(), None, TaskID(0), ""

    def show(done_bytes: int, total_bytes: int, what: str) -> None:
        nonlocal bar, task, last
        what = printable(what)
        if not _is_live(console) or not last:
            if what != last:
                note(f"fetching {name}: {what} ({size(done_bytes)} of {size(total_bytes)})")
        elif bar is None:
            bar = Progress(
                TextColumn("fetching {task.fields[name]}", markup=False, table_column=Column(no_wrap=True)),
                BarColumn(bar_width=20),
                DownloadColumn(table_column=Column(no_wrap=True)),
                TransferSpeedColumn(table_column=Column(no_wrap=True)),
                TimeRemainingColumn(),
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
                console=console,
            )
            bar.start()
            stack.callback(bar.stop)
            # The bar gets its start, so that it does not count the resumed part as this run's speed.
            task = bar.add_task(what, name=name, total=total_bytes, completed=done_bytes)
        else:
            bar.update(task, description=what, completed=done_bytes, total=total_bytes)
        last = what

    with ExitStack() as stack:
        yield show


@contextmanager
def step_progress(tenths: bool = True) -> Iterator[OnStep]:
    """A function that shows the progress of steps: their name, the number done, and the number of all.

    On a terminal it moves a bar; elsewhere it prints a line for each tenth, or for each new name. The bar is drawn at each step
    only: a thread that redraws it would take time from the measured threads.
    """
    bar, task, last = None, TaskID(0), ""

    def show(what: str, done: int, total: int) -> None:
        nonlocal bar, task, last
        console = stderr_console()
        if not _is_live(console):
            what = f"{what}: {10 * (10 * done // total)} %" if tenths and total else what
            if what != last:
                note(what)
        else:
            if bar is None:
                columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), MofNCompleteColumn())
                bar = Progress(*columns, console=console, auto_refresh=False)
                bar.start()
                stack.callback(bar.stop)
            if what != last:
                task = bar.add_task(what, total=total)
            bar.update(task, completed=done, refresh=True)
        last = what

    with ExitStack() as stack:
        yield show


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[..., None]]:
    """A function that shows how many of `total` steps of one kind are done; it ignores what else it is told."""
    with step_progress() as show:
        yield lambda done, *_: show(what, done, total)


def _is_live(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal
