"""Files of others read within bounds, and files of ours written all at once. Knows no format."""

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from cpuspec.errors import CpuspecError


def read_file(path: Path, max_bytes: int, error: type[CpuspecError], what: str = "") -> bytes:
    """The bytes of a regular file of at most `max_bytes`. Raises `error`, naming the file as `what`, for any other.

    A named pipe is refused before it is opened: opening it would wait for a writer for ever.
    """
    what, content = what or str(path), b""
    try:
        status = path.stat()
        is_regular = stat.S_ISREG(status.st_mode)
        if is_regular and status.st_size <= max_bytes:
            with path.open("rb") as file:
                content = file.read(status.st_size)
    except FileNotFoundError:
        raise error(f"{what} does not exist") from None
    except OSError as problem:
        raise error(f"{what} cannot be read: {problem.strerror or problem}") from problem
    except ValueError:
        raise error(f"{what!r} has a null byte; wanted the name of a file") from None
    if not is_regular:
        raise error(f"{what} is not a regular file")
    if status.st_size > max_bytes:
        raise error(f"{what} has {status.st_size} bytes; wanted at most {max_bytes}")
    return content


def why_unwritable(directory: Path, mode: int = 0o777) -> str:
    """The system's words why no file can be made in a directory; "" if one can. The directory is made with `mode` if need be."""
    from tempfile import TemporaryFile

    try:
        directory.mkdir(mode, parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            return ""
    except OSError as error:
        return error.strerror or str(error)


@contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
    """A file to write and read, which takes the place of `path` when the block ends: nobody ever sees half of it.

    By default no group and nobody else may write it, whatever the umask. Raises OSError; a block that raises leaves nothing
    behind.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with open(unfinished, "xb+", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
        os.replace(unfinished, path)  # closed by now: Windows renames no open file
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_file(path: Path, content: str | bytes) -> None:
    """Put `content`, a text in UTF-8, in the place of `path`, as `replacing` does. Raises OSError."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
