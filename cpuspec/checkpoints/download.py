"""Brings a recipe's file into the user's cache: resumable, verified by sha256, landed atomically, one process at a time.

A source only has to deliver bytes (`transfer`); whether they are the right ones is decided by the recipe. Sources are tried in
order, and what a broken-off download left behind is continued by the next attempt, also from another source.
"""

import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Protocol

from cpuspec.checkpoints.recipes import Recipe, did_you_mean, load_chains, load_recipes, read_recipe
from cpuspec.environment import cache_dir, offline
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
    if text.strip() and _exists(path):
        return path
    looks_like_a_path = "/" in text or "\\" in text or text.lower().endswith((".gguf", ".safetensors"))
    problem = f"there is no file or directory {text!r}" if looks_like_a_path else f"no model is called {text!r}"
    chains = load_chains()
    if (chain := chains.get(text.strip().lower())) is not None:
        near = f": that is a chain of {chain.target} and drafts for it"
    else:
        near = did_you_mean(text, [*recipes, *chains])
    raise ConfigError(
        f"{problem}{near}; wanted a recipe ({', '.join(recipes)}), "
        "the path of a GGUF file, or the path of a Hugging Face directory; "
        f"LLM and -m also take a chain ({', '.join(chains)})"
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
                from cpuspec.checkpoints.transfer import deliver

                deliver(recipe, path, report)
                _write_marker(recipe, path)
        return path
    except OSError as error:
        raise DownloadError(
            f"{recipe.name} cannot be stored in {path.parent}: {error.strerror or error}; "
            "set CPUSPEC_CACHE to a directory that can be written"
        ) from error


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a null byte
        return False


def _silent(done_bytes: int, total_bytes: int, what: str) -> None:
    pass


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
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if json.loads(_marker(path).read_text()) == seen:
            return True
    with path.open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != recipe.sha256:
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
