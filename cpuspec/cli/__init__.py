"""The command line: thin, and the only package that prints. Results go to stdout, everything else to stderr.

This module is loaded before the first slow import, so that Ctrl-C ends the process quietly during the import.
"""

import os
import signal
from types import FrameType

INTERRUPTED = 130
# Ctrl-C, and Windows' Ctrl-Break. Not asked of `platform`, which would be imported before they are handled.
INTERRUPTS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGBREAK") if hasattr(signal, name))


def main() -> None:
    """Run the `cpuspec` command with this process's arguments, and exit."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background job ignores Ctrl-C, and still does
        for number in INTERRUPTS:
            signal.signal(number, end_at_once)
    from cpuspec.cli.app import run

    run()


def end_at_once(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C where nothing is half done: while modules are imported, and once a command has tidied up."""
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(INTERRUPTED)
