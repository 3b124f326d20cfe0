"""A thread reads and writes a directory of prefixes, so that no step waits for a disk. Reads go first, then writes in their order.

The blocks that wait to be written are bounded. The threads share data by operations that are atomic in Python, and without locks
(`cpuspec.engine.shared` says why).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

from cpuspec.environment import start_thread
from cpuspec.formats.tensor import U8
from cpuspec.speculation.prefix_files import PrefixDirectory, PrefixFiles, PrefixPart

_MOST_BYTES = 1 << 29  # of blocks that wait to be written; one block of a large model may take an eighth of that
_MOST_BLOCKS = 256
_IDLE_S = 5.0  # the thread ends after so long without a job; the next job starts another
_PATIENCE_S = 30.0
_FLUSH_S = 30.0  # the most that closing waits for blocks to be written

_log = logging.getLogger(__name__)


class PrefixRead:
    """Blocks of a prefix that are read one after the other. found: those up to the first that is missing."""

    def __init__(self, files: PrefixFiles, keys: Sequence[bytes]) -> None:
        self.files, self.keys = files, keys
        self.found: list[U8] = []
        self.is_done = False  # or given up
        self.is_missing = False  # whether the block after `found` is not on the disk
        self.begun_s = time.monotonic()


class _Write(NamedTuple):
    """A block to write, unless its file exists. used_ns: returns the time of its last use, which the file gets.

    report: called with whether the file exists in the end.
    """

    files: PrefixFiles
    part: PrefixPart
    used_ns: Callable[[], int]
    report: Callable[[bool], None]


class PrefixQueue:
    """The jobs of one directory. Only the thread that owns the engine adds jobs.

    max_bytes, max_blocks: limits of the blocks that wait to be written. If one more does not fit, the one that has waited longest
    is dropped, and counted in `num_dropped`. patience_s: a disk that takes longer for a job counts as dead, and gets no more reads.
    """

    def __init__(
        self,
        directory: PrefixDirectory,
        max_bytes: int = _MOST_BYTES,
        max_blocks: int = _MOST_BLOCKS,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self.directory = directory
        self.num_dropped = 0
        self._max_bytes, self._max_blocks, self._patience_s = max_bytes, max_blocks, patience_s
        self._reads: deque[PrefixRead] = deque()
        self._removes: deque[tuple[PrefixFiles, bytes]] = deque()
        self._writes: dict[str, _Write] = {}  # by the name of the file, the one that is being written included
        self._order: deque[str] = deque()  # of writes, dropped ones included
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._ended: SimpleQueue[None] = SimpleQueue()  # not empty if a job has ended
        self._busy_since_s: float | None = None
        self._thread: threading.Thread | None = None

    @property
    def waiting_bytes(self) -> int:
        """Bytes of blocks that wait to be written."""
        return sum(job.part.nbytes for job in list(self._writes.values()))

    def read(self, files: PrefixFiles, keys: Sequence[bytes]) -> PrefixRead | None:
        """Begin to read blocks, parents first; None if the disk does not answer."""
        if self._busy_since_s is not None and time.monotonic() - self._busy_since_s > self._patience_s:
            return None
        job = PrefixRead(files, keys)
        self._reads.append(job)
        self._run()
        return job

    def poll(self, job: PrefixRead) -> bool:
        """Continue a read, or give it up if it takes too long; returns whether blocks are still to come."""
        if not job.is_done and time.monotonic() - job.begun_s > self._patience_s:
            _log.warning("the prefix cache %s does not answer; what it holds is computed again", self.directory.path)
            job.is_done = True
        if not job.is_done:
            self._run()
        return not job.is_done

    def write(
        self,
        files: PrefixFiles,
        part: PrefixPart,
        used_ns: Callable[[], int],
        report: Callable[[bool], None],
        is_bounded: bool = True,
    ) -> None:
        """Write a block later. If its file exists, only note when it was used. Any thread may call the functions, `report` once.

        is_bounded: whether blocks are dropped if this is one too many.
        """
        num_bytes, name = part.nbytes, files.name(files.key(part))
        if earlier := self._writes.pop(name, None):  # of another context of the same model
            earlier.report(False)
        self._writes[name] = _Write(files, part, used_ns, report)
        self._order.append(name)
        while is_bounded and len(self._order) > 1:
            if len(self._writes) <= self._max_blocks and self.waiting_bytes <= max(self._max_bytes, num_bytes):
                break
            if not self._drop():
                break
        self._run()

    def remove(self, files: PrefixFiles, key: bytes) -> None:
        """Remove a block's file, or drop the block if it waits to be written."""
        if job := self._writes.pop(files.name(key), None):
            job.report(False)
        self._removes.append((files, key))
        self._run()

    def wait(self, seconds: float) -> None:
        """Wait until a job ends, at most `seconds`."""
        with suppress(Empty):
            self._ended.get(timeout=seconds)

    def flush(self, seconds: float = _FLUSH_S) -> bool:
        """Wait until all jobs are done, at most `seconds`; returns whether they are."""
        end = time.monotonic() + seconds
        while self._reads or self._removes or self._writes or self._busy_since_s is not None:
            if time.monotonic() > end:
                return False
            self._run()
            self.wait(0.05)
        return True

    def close(self, seconds: float = _FLUSH_S) -> None:
        """Wait until all blocks are written, at most `seconds`, and drop the rest."""
        if not self.flush(seconds):
            num_before = self.num_dropped
            while self._drop():
                pass
            lost = self.num_dropped - num_before
            _log.warning("the prefix cache %s is slow: %d blocks were not written within %g s", self.directory.path, lost, seconds)

    def _drop(self) -> bool:
        """Drop the block that has waited longest; returns whether there was one."""
        try:
            job = self._writes.pop(self._order.popleft(), None)
        except IndexError:
            return False
        if job:
            self.num_dropped += 1
            job.report(False)
        return True

    def _run(self) -> None:
        """Wake the thread, or start one."""
        self._wake.put(None)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._serve, name="cpuspec-prefixes", daemon=True)
            try:
                start_thread(self._thread)
            except RuntimeError as error:  # no more threads here: reads are given up, and writes wait until they are dropped
                _log.warning("the prefix cache %s cannot be used: %s", self.directory.path, error)
                while self._reads:
                    self._reads.popleft().is_done = True
                self._thread = None

    def _serve(self) -> None:
        while True:
            self._busy_since_s = time.monotonic()
            try:
                is_idle = not self._do_one()
            except Exception as error:
                self.directory.warn(error)
                is_idle = False
            finally:
                self._busy_since_s = None
            if is_idle:
                try:
                    self._wake.get(timeout=_IDLE_S)
                except Empty:
                    return
            elif self._ended.empty():
                self._ended.put(None)

    def _do_one(self) -> bool:
        """Do the next job, or read the next block; returns whether there was one."""
        if self._reads:
            job = self._reads[0]
            try:
                if not job.is_done:
                    block = self.directory.read(job.files, job.keys[len(job.found)])
                    if block is not None:
                        job.found.append(block)
                    job.is_missing = block is None
                    job.is_done = job.is_done or block is None or len(job.found) == len(job.keys)
            except BaseException:
                job.is_done = True
                raise
            finally:
                if job.is_done:
                    self._reads.popleft()
        elif self._removes:
            self.directory.remove(*self._removes.popleft())
        elif self._order:
            name = self._order.popleft()
            if write := self._writes.get(name):
                is_there = False
                try:
                    used_ns = write.used_ns()
                    there = self.directory.refresh(write.files, write.part, used_ns)
                    is_there = there or self.directory.write(write.files, write.part, used_ns)
                finally:
                    if self._writes.get(name) is write:
                        self._writes.pop(name, None)
                        write.report(is_there)
        else:
            return False
        return True
