"""What can go wrong, by whose fault. A message says what, got, wanted, remedy; words of others in it are made printable."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_LOG = logging.getLogger(__name__)


class CpuspecError(Exception):
    """Base of every error that cpuspec raises on purpose."""


class ConfigError(CpuspecError, ValueError):
    """An argument or a combination of arguments that cannot be honoured."""


class FormatError(CpuspecError, ValueError):
    """Bytes or shapes that a weight format cannot have."""


class CheckpointError(CpuspecError):
    """A model file or directory that is missing, truncated, hostile or not supported."""


class DownloadError(CpuspecError):
    """A model that no source delivered, or delivered with other bytes than wanted."""


class TokenizerError(CpuspecError, ValueError):
    """A vocabulary or a chat template that cannot be used."""


class CacheError(CpuspecError):
    """A KV-cache request that the cache cannot satisfy."""


class BackendError(CpuspecError):
    """A backend that is not installed, or cannot run this model or batch."""


@contextmanager
def needing(what: str, package: str) -> Iterator[None]:
    """Within this context a module that is not installed is a BackendError, which says how to install what `what` needs."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise BackendError(f"{what} needs {error.name}; install it with: pip install {package}") from None


def printable(text: str) -> str:
    """The text of a stranger with every character written out, as \\x1b, that a terminal may obey or that is not visible.

    Tabs and newlines stay.
    """
    return "".join(char if char.isprintable() or char in "\t\n" else ascii(char)[1:-1] for char in text)


def in_one_line(text: str, most: int = 200) -> str:
    """The text of a stranger in a message: the first `most` characters, printable, with single spaces for all white space."""
    return printable(" ".join(text[:most].split()))


def fault_of_one(error: BaseException) -> CpuspecError:
    """The error that ends one request, and no other, for what its part of the work raised. An interrupt is raised again.

    A panic of a Rust library is no Exception.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    if isinstance(error, CpuspecError):
        return error
    _LOG.error("a request fails, and the others go on", exc_info=error)
    return BackendError(f"this request failed: {type(error).__name__}: {in_one_line(str(error))}")
