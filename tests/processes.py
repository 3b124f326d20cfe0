"""Real `cpuspec` processes for tests: interruptible wherever the tests run, and ended whatever a test does."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import cpuspec

ROOT = Path(cpuspec.__file__).parent.parent
make_pipe = getattr(os, "mkfifo", os.mkdir)  # of a path; Windows' pipes have no place among files, and a directory is as irregular
HANG_S = 900.0  # a process that lives for longer hangs; no loaded machine is that slow


@contextmanager
def interruptible_children() -> Iterator[None]:
    """Let children start with the default SIGINT, also where this process ignores it, as a shell's background job does.

    A child inherits "ignore"; a handler of this process becomes the default in the child.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def started(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m cpuspec ARGUMENTS` with a pipe for every stream that `options` of Popen do not name; killed at the end."""
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with interruptible_children():
        process = subprocess.Popen([sys.executable, "-m", "cpuspec", *arguments], **{"cwd": ROOT, **streams, **options})
    guard = threading.Timer(HANG_S, process.kill)
    guard.daemon = True
    guard.start()
    try:
        yield process
    finally:
        guard.cancel()
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None and not stream.closed:
                # What a broken pipe did not take is lost on purpose.
                with suppress(BrokenPipeError):
                    stream.close()


def interrupt(process: subprocess.Popen[bytes], number: int = signal.SIGINT) -> None:
    """Send Ctrl-C to a process, or another signal that ends it. Windows has Ctrl-C alone, of a console for all its processes."""
    if sys.platform != "win32":
        process.send_signal(number)
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        os.kill(0, signal.CTRL_C_EVENT)
        time.sleep(0.5)
    except (OSError, SystemError):
        pytest.skip("there is no console that sends Ctrl-C")
    finally:
        signal.signal(signal.SIGINT, before)


def wait_for(stream: Any, text: bytes) -> None:
    """Read lines of a process until one has `text`; it must come before the stream ends."""
    seen = []
    for line in iter(stream.readline, b""):
        seen.append(line)
        if text in line:
            return
    raise AssertionError(f"{text!r} did not come: {b''.join(seen)!r}")
