"""Files that are read piece by piece and never mapped: past the page cache where the system can, by threads of their own.

A file that is shortened or changed meanwhile is an error of the piece that is read next; a mapped one would end the process.
"""

import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from cpuspec.errors import BackendError
from cpuspec.formats.packing import paged_bytes
from cpuspec.formats.tensor import U8
from cpuspec.platform import SYSTEM

PAGE = 4096  # pieces begin and end at multiples, as reads past the page cache must
_PIECE_BYTES = 4 << 20  # that are read at once


@dataclass(frozen=True)
class DiskReads:
    """What the experts of a model that stay on the disk have cost so far.

    num_bytes: read from the disk. wait_s: the time that forwards waited for that. num_experts: that layers needed; num_found: of
    these, the ones that were in memory by then.
    """

    num_bytes: int = 0
    wait_s: float = 0.0
    num_experts: int = 0
    num_found: int = 0

    def since(self, before: "DiskReads") -> "DiskReads":
        """What was added to earlier figures."""
        return DiskReads(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


def resident_bytes(num_bytes: int) -> U8:
    """Zeros that are in memory now, from the start of a page on. Where the system lets us, they are locked there."""
    memory = paged_bytes((num_bytes,))
    if not SYSTEM.lock_pages(memory.ctypes.data, num_bytes):
        memory[:] = 0
    return memory


def pages_around(start: int, num_bytes: int) -> tuple[int, int]:
    """The whole pages that bytes of a file lie in: where the first begins, and the bytes of all."""
    first = start // PAGE * PAGE
    return first, -(-(start + num_bytes) // PAGE) * PAGE - first


class DiskFile:
    """An open file of whole pages. Threads may read it at once, and so may a forked child."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot be opened."""
        self.path = path
        self._number = SYSTEM.open_pages(path)
        self.status = os.fstat(self._number)

    def __del__(self) -> None:
        if hasattr(self, "_number"):
            os.close(self._number)

    def read(self, start: int, into: U8) -> None:
        """Fill `into`, whole pages at a page's start, with the bytes from `start` on.

        Raises BackendError if the file was changed since it was opened, or cannot be read.
        """
        read = 0
        try:
            while read < len(into):
                piece = into[read : read + _PIECE_BYTES].data
                count = SYSTEM.read_at(self._number, piece, start + read)
                status = os.fstat(self._number)
                if not count or (status.st_size, status.st_mtime_ns) != (self.status.st_size, self.status.st_mtime_ns):
                    raise BackendError(f"{self.path} was changed or shortened while it was in use; load the model again")
                read += count
        except OSError as error:
            raise BackendError(f"{self.path} cannot be read: {error.strerror or error}") from error

    def bytes_at(self, start: int, num_bytes: int) -> U8:
        """Whole pages of the file, in memory of their own. Raises BackendError as `read` does."""
        memory = paged_bytes((num_bytes,))
        self.read(start, memory)
        return memory


class Reading:
    """Pieces of a file on their way to memory, each (place in the file, where to). error: what went wrong with one of them."""

    def __init__(self, pieces: Sequence[tuple[int, U8]]) -> None:
        self.pieces = pieces
        self.num_left = len(pieces)
        self.has_begun = False
        self.error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether every piece is there, or was tried."""
        return self.num_left == 0


class Reader:
    """Threads that read pieces of a file: what is waited for first, then what may be needed."""

    def __init__(self, file: DiskFile, threads: int) -> None:
        self.file, self._num_threads = file, threads
        self.num_bytes = 0  # that were read so far
        self._begin()

    def _begin(self) -> None:
        self._process, self._closed = os.getpid(), False
        self._now: deque[tuple[Reading, int]] = deque()
        self._later: deque[tuple[Reading, int]] = deque()
        lock = threading.Lock()
        self._work, self._arrived = threading.Condition(lock), threading.Condition(lock)
        self._threads: list[threading.Thread] = []

    def notice_fork(self) -> None:
        """In a forked child, in which none of the parent's readings arrives, begin anew."""
        if self._process != os.getpid():
            self._begin()

    def start(self, reading: Reading, is_waited_for: bool) -> None:
        """Begin a reading, before or after the others."""
        with self._work:
            queue = self._now if is_waited_for else self._later
            queue.extend((reading, number) for number in range(len(reading.pieces)))
            self._work.notify(len(reading.pieces))
        while len(self._threads) < self._num_threads:
            thread = threading.Thread(target=self._serve, daemon=True, name=f"cpuspec-disk-{len(self._threads)}")
            self._threads.append(thread)
            thread.start()

    def hurry(self, reading: Reading) -> None:
        """Read what is left of a reading before what may be needed."""
        with self._work:
            self._now.extend(one for one in self._later if one[0] is reading)
            self._later = deque(one for one in self._later if one[0] is not reading)

    def cancel(self, reading: Reading) -> bool:
        """Forget a reading if none of it was read yet. Returns whether it is forgotten."""
        with self._work:
            if not reading.has_begun:
                queues = self._now, self._later
                self._now, self._later = (deque(one for one in queue if one[0] is not reading) for queue in queues)
            return not reading.has_begun

    def wait(self, readings: Sequence[Reading]) -> None:
        """Return when one of the readings is done."""
        with self._arrived:
            self._arrived.wait_for(lambda: any(one.is_done for one in readings))

    def close(self) -> None:
        """End the threads. What they have not begun is not read."""
        with self._work:
            self._closed = True
            self._work.notify_all()

    def _serve(self) -> None:
        work = self._work
        while True:
            with work:
                while not (self._now or self._later or self._closed):
                    work.wait()
                if self._closed:
                    return
                reading, number = (self._now or self._later).popleft()
                reading.has_begun = True
            start, into = reading.pieces[number]
            error: BaseException | None = None
            try:
                self.file.read(start, into)
            except BaseException as raised:  # told to the thread that waits for it
                error = raised
            with work:
                reading.num_left -= 1
                reading.error = reading.error or error
                self.num_bytes += len(into)
                if reading.is_done:
                    self._arrived.notify_all()
