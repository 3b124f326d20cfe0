"""Model files as read-only bytes that the operating system pages in on first use."""

import mmap
import stat
from pathlib import Path

import numpy as np

from cpuspec.errors import CheckpointError
from cpuspec.formats.tensor import U8


def map_file(path: Path) -> U8:
    """The bytes of a regular file, U8 [size], read-only and memory-mapped; the mapping lives as long as any view of it.

    Whoever shortens a mapped file takes the process down with it (SIGBUS), as with every mapped file.
    Raises CheckpointError if there is no such file, it is not a regular file, or it is empty.
    """
    try:
        # Asked before opening: opening a named pipe would wait for a writer for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        with path.open("rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError:
        # mmap of nothing; also a path with a null byte in it.
        raise CheckpointError(f"{path} is empty or not a path") from None
