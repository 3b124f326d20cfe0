"""Model files as read-only bytes that the operating system pages in on first use, or as copies of them in memory."""

import hashlib
import mmap
import os
import re
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from cpuspec.environment import cache_dir, usable_cores
from cpuspec.errors import CheckpointError
from cpuspec.files import write_file
from cpuspec.formats.tensor import U8
from cpuspec.platform import SYSTEM

_READ = mmap.ACCESS_READ

_PART_BYTES = 1 << 25  # that are hashed at once
_DIGEST = re.compile("[0-9a-f]{32}")
_TICK_NS = 2_000_000_000  # more than any file system rounds times to


class _MappedFile(mmap.mmap):
    """A mapping with the identity of its file (`_stamp`), and the hash of its contents once that is computed."""

    stamp: str
    digest = ""


class _ReadFile(bytearray):
    """The bytes of a file in memory, with the same two facts."""

    stamp: str
    digest = ""


def map_file(path: Path, mmap: bool = True) -> U8:
    """The bytes of a regular file, U8 [size], read-only and memory-mapped; the mapping lives as long as any view of it.

    mmap: without it, the file is read into memory. If a mapped file is shortened, every process that reads on is ended (SIGBUS);
    no program can turn that into an error. A file that may be rewritten in place, as on a shared directory, is safe only in memory.
    Raises CheckpointError if there is no such file, it is not a regular file, or it is empty.
    """
    contents: _MappedFile | _ReadFile
    try:
        # Asked before opening: opening a named pipe would wait for a writer for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if mmap:
                contents = _MappedFile(file.fileno(), status.st_size, access=_READ)
            else:
                contents = _ReadFile(status.st_size)
                if not status.st_size or file.readinto(contents) != status.st_size:
                    raise ValueError
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (MemoryError, OverflowError):
        raise CheckpointError(f"{path} has {status.st_size} bytes, more than memory can hold") from None
    except ValueError:
        # mmap of nothing; also a path with a null byte in it.
        raise CheckpointError(f"{path} is empty, not a path, or became shorter while it was read") from None
    contents.stamp = _stamp(status)
    data = np.frombuffer(contents, np.uint8)
    data.flags.writeable = False
    return data


def map_all_pages(file_number: int, num_bytes: int) -> U8:
    """The first `num_bytes` of an open file, read-only and mapped, with all pages there at once where the system can do that.

    Raises OSError or ValueError if they cannot be mapped.
    """
    return np.frombuffer(SYSTEM.populated_file(file_number, num_bytes), np.uint8)


def place_in_file(data: U8) -> tuple[str, int] | None:
    """The place of bytes in a mapped file: a hash of the file's contents, and their offset. None for bytes of no file.

    The hash is that of the bytes, whatever the file's size, date and name. It is kept on disk: an unchanged file
    is hashed once.
    """
    file = _file_of(data)
    if file is None:
        return None
    if not file.digest:
        file.digest = _kept_digest(file)
    return file.digest, _offset(data, file)


def give_back_pages(data: U8) -> None:
    """Stop counting the pages of a view of a mapped file as this process's memory; the next look brings them back.

    For other bytes, and where the system cannot do it, nothing.
    """
    mapping = _file_of(data)
    if isinstance(mapping, _MappedFile):
        SYSTEM.release_pages(mapping, _offset(data, mapping), data.nbytes)


def _file_of(data: U8) -> _MappedFile | _ReadFile | None:
    owner: object = data
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return owner if isinstance(owner, _MappedFile | _ReadFile) else None


def _offset(data: U8, file: _MappedFile | _ReadFile) -> int:
    return data.ctypes.data - np.frombuffer(file, np.uint8).ctypes.data


def _stamp(status: os.stat_result) -> str:
    """Changes whenever a file does: who writes it can set back neither the time of the last change of its inode nor the clock.

    Empty for a file that was changed just now, which may change again within the same tick.
    """
    changed_ns = max(status.st_mtime_ns, status.st_ctime_ns)
    if time.time_ns() - changed_ns < _TICK_NS:
        return ""
    return f"{status.st_dev}-{status.st_ino}-{status.st_size}-{status.st_mtime_ns}-{status.st_ctime_ns}"


def _kept_digest(file: _MappedFile | _ReadFile) -> str:
    """The hash of a file's contents, which is computed once for each stamp."""
    path = cache_dir() / "contents" / hashlib.blake2b(file.stamp.encode(), digest_size=16).hexdigest()
    with suppress(OSError, ValueError):
        if file.stamp and _DIGEST.fullmatch(kept := path.read_text(encoding="ascii")):
            return kept
    digest = _digest(np.frombuffer(file, np.uint8))
    with suppress(OSError):  # a cache that cannot be written
        if file.stamp:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, digest)
    return digest


def _digest(data: U8) -> str:
    """A hash of bytes, by several threads."""
    with ThreadPoolExecutor(usable_cores()) as pool:
        parts = list(pool.map(lambda at: _digest_of_part(data[at : at + _PART_BYTES]), range(0, len(data), _PART_BYTES)))
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


def _digest_of_part(data: U8) -> bytes:
    digest = hashlib.blake2b(data.data, digest_size=16).digest()
    give_back_pages(data)
    return digest
