"""Fetches models of the hub through huggingface_hub, into its own cache.

The library transfers, retries, keeps the cache, and finds the user's token and proxy. This module chooses the files, compares their
hashes with the hub's metadata (the library compares only lengths), and turns failures into one line. It is apart from `hub` because
huggingface_hub takes 0.4 s to import.
"""

import errno
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, errors, hf_hub_download

from cpuspec.checkpoints.heads import is_named_head
from cpuspec.checkpoints.hub import (
    HUB_TIMEOUT_S,
    HubModel,
    Progress,
    check_room,
    choose,
    memory_note,
    remember,
    shards_of,
    snapshot_dir,
    write_ref,
)
from cpuspec.checkpoints.huggingface import read_config, read_fields
from cpuspec.checkpoints.safetensors import INDEX
from cpuspec.environment import hub_cache_dir, hub_endpoint
from cpuspec.errors import DownloadError, in_one_line

_REPORT_EVERY_S = 0.1
_MOST_NAMED = 4  # files
_MOST_QUOTED = 200  # characters of the library's message
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)
_LOGIN = "run `hf auth login`, or set HF_TOKEN"


def download(model: HubModel, report: Progress, hashes: Mapping[str, str]) -> Path:
    """The file or directory of `model` in huggingface_hub's cache, as the hub has it now. Files in the cache are not fetched.

    hashes: sha256 that large files must have, by name; "" is the file that is opened.
    Raises DownloadError if the hub cannot be asked or delivers something else, ConfigError if the name stands for no file of its
    repository, CheckpointError if its config.json is not supported, and OSError if the disk cannot take it.
    """
    endpoint = hub_endpoint()
    with _explained(model), _warnings(lambda: None):
        info = HfApi(endpoint, library_name="cpuspec").model_info(
            model.repository, revision=model.revision, timeout=HUB_TIMEOUT_S, files_metadata=True
        )
        files = {one.rfilename: one for one in info.siblings or [] if _is_safe(one.rfilename)}
        sizes = {name: int(file.size or 0) for name, file in files.items()}
        commit = str(info.sha)
    if not re.fullmatch("[0-9a-f]{40}", commit):
        raise DownloadError(f"says that {model.revision} is the commit {commit[:50]!r}; wanted 40 hexadecimal digits")
    snapshot = snapshot_dir(model.repository, commit)

    def fetch(name: str, progress: _Total) -> None:
        with _explained(model), _warnings(progress.interrupted):
            _remove(snapshot / name)  # cut short, or grown
            path = hf_hub_download(
                *(model.repository, name),
                revision=commit,
                cache_dir=hub_cache_dir(),
                endpoint=endpoint,
                etag_timeout=HUB_TIMEOUT_S,
                library_name="cpuspec",
                tqdm_class=progress.bar(),
            )
        _check(Path(path), files[name])

    def read_shards() -> list[str]:
        if not _is_there(snapshot / INDEX, sizes[INDEX]):
            fetch(INDEX, _Total(_silent, "", 0))
        return shards_of(snapshot)

    choice = choose(model, sizes, read_shards)
    for name, wanted in hashes.items():
        file = files.get(name or choice.opened)
        if file is None:
            raise DownloadError(f"has no file {name}, which the recipe names")
        if (got := _sha256(file)) is None:
            raise DownloadError(f"tells no sha256 of {name or choice.opened}, as of all small files; leave it out of the recipe")
        if got != wanted:
            raise DownloadError(f"offers other bytes{f' of {name}' if name else ''}: sha256 {got}, wanted {wanted}")
    missing = [name for name in choice.files if not _is_there(snapshot / name, sizes[name])]
    if missing:
        check_room(sum(sizes[name] for name in missing), hub_cache_dir(), "HF_HOME")
    progress = _Total(report, f"hub {model.repository}", sum(sizes[name] for name in choice.files))
    if missing:
        progress.say(memory_note(progress.total_bytes))
    for name in choice.files:
        if name in missing:
            fetch(name, progress)
        progress.file_done(sizes[name])
        # An unsupported model is refused before its weights are fetched.
        if name == "config.json" and not is_named_head(fields := read_fields(snapshot)):
            read_config(fields)
    write_ref(model, commit)
    remember(model, choice)
    if missing:
        delivered = [f"{name} sha256 {sha256}" for name in choice.files if (sha256 := _sha256(files[name]))]
        progress.say(f"hub {model.repository} verified: commit {commit}, {', '.join(delivered[:_MOST_NAMED])}")
    return snapshot / choice.opened


@contextmanager
def _explained(model: HubModel) -> Iterator[None]:
    """Turn whatever the library raises into DownloadError, or into OSError if the disk is at fault."""
    try:
        yield
    except Exception as error:  # errors of its HTTP client, another one in each of its major versions, have no base in the library
        raise _problem(model, error) from error


def _problem(model: HubModel, error: Exception) -> Exception:
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    for cause in causes:
        if isinstance(cause, OSError) and cause.errno in _DISK:
            return OSError(cause.errno, os.strerror(cause.errno))
    status = next((one.response.status_code for one in causes if isinstance(one, errors.HfHubHTTPError)), None)
    if any(isinstance(one, errors.OfflineModeIsEnabled) for one in causes):
        return DownloadError("HF_HUB_OFFLINE forbids downloads; unset it")
    if isinstance(error, errors.GatedRepoError) or status == HTTPStatus.FORBIDDEN:
        page = f"{hub_endpoint()}/{model.repository}"
        return DownloadError(f"access is restricted: accept the terms on {page}, then {_LOGIN}")
    if isinstance(error, errors.RevisionNotFoundError):
        return DownloadError(f"there is no revision {model.revision!r}")
    if isinstance(error, errors.RepositoryNotFoundError) or status == HTTPStatus.UNAUTHORIZED:
        return DownloadError(f"there is no such repository, or it is private: check the name; for a private one {_LOGIN}")
    if status is not None:
        known = status in HTTPStatus.__members__.values()
        return DownloadError(f"the hub answered {status}{f' {HTTPStatus(status).phrase}' if known else ''}")
    if any("Timeout" in type(one).__name__ for one in causes):
        return DownloadError("the hub did not answer in time")
    return DownloadError(f"the download broke off ({type(error).__name__}: {in_one_line(str(error), _MOST_QUOTED)})")


def _silent(done_bytes: int, total_bytes: int, what: str) -> None:
    pass


def _is_safe(name: object) -> bool:
    """Whether a file's name stays in its directory and on its line."""
    return isinstance(name, str) and name.isprintable() and len(name) < 500 and not {"", ".", ".."} & set(re.split(r"[/\\]", name))


def _is_there(path: Path, num_bytes: int) -> bool:
    try:
        return path.stat().st_size == num_bytes
    except OSError:
        return False


def _sha256(file: Any) -> str | None:
    """The hash of a large file, as the hub's metadata has it."""
    return getattr(file.lfs, "sha256", None)


def _check(path: Path, file: Any) -> None:
    """Raise DownloadError, and remove the file, if it is not what the hub's metadata says. Small files have git's hash."""
    with path.open("rb") as stream:
        wanted = _sha256(file) or file.blob_id
        if _sha256(file):
            got = hashlib.file_digest(stream, "sha256").hexdigest()
        else:
            content = stream.read()
            got = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    if got != wanted:
        _remove(path)
        raise DownloadError(f"the hub delivered other bytes of {path.name} than it announced: hash {got}, wanted {wanted}")


def _remove(path: Path) -> None:
    """Remove a file of a snapshot with the blob that it links to."""
    path.resolve().unlink(missing_ok=True)
    path.unlink(missing_ok=True)


class _Total:
    """Progress of all files together, added up from the library's progress bars."""

    def __init__(self, report: Progress, what: str, total_bytes: int) -> None:
        self._report, self._what, self.total_bytes = report, what, total_bytes
        self._before = self._of_file = 0
        self._said_s = 0.0

    def say(self, what: str) -> None:
        self._report(min(self._before + self._of_file, self.total_bytes), self.total_bytes, what)

    def interrupted(self) -> None:
        self.say(f"{self._what}, after an interruption")

    def file_done(self, num_bytes: int) -> None:
        self._before, self._of_file = self._before + num_bytes, 0
        self.say(self._what)

    def bar(self) -> type:
        """A class like tqdm's, whose one object counts a file."""
        total = self

        class Bar:
            """Counts bytes that were written; those that come through the network are the same, or fewer."""

            total: float | None = None

            def __init__(self, *_: object, initial: int = 0, **__: object) -> None:
                self.update(initial)

            def __enter__(self) -> "Bar":
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def update(self, num_bytes: float | None = 1) -> None:
                total._of_file += int(num_bytes or 0)
                if time.monotonic() - total._said_s > _REPORT_EVERY_S:
                    total._said_s = time.monotonic()
                    total.say(total._what)

            def ignore(self, *_: object, **__: object) -> None:
                pass

            update_transfer = set_postfix_str = set_transfer_postfix_str = set_description = refresh = close = ignore

        return Bar


@contextmanager
def _warnings(on_retry: Callable[[], None]) -> Iterator[None]:
    """Keep the library's warnings in this thread from stderr: retries, for which `on_retry` is called, and messages of the hub."""
    thread = threading.get_ident()

    def keep(record: logging.LogRecord) -> bool:
        if record.thread == thread and "resume" in record.getMessage():
            on_retry()
        return record.thread != thread

    handlers = list(logging.getLogger("huggingface_hub").handlers)
    for handler in handlers:
        handler.addFilter(keep)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(keep)
