"""Models that other programs keep on this machine: Ollama's, LM Studio's, and those in huggingface_hub's cache. Only reads.

Ollama: manifests/HOST/NAMESPACE/NAME/TAG is JSON whose layer of the media type application/vnd.ollama.image.model names
blobs/sha256-..., a GGUF file (ollama/ollama, server/manifest.go); those of the type application/vnd.ollama.image.adapter are LoRA
adapters, GGUF files, too (convert/convert.go). LM Studio: OWNER/REPOSITORY/FILE.gguf. What leads out of these directories, or is no
regular file, counts as missing.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cpuspec.checkpoints.fields import Fields
from cpuspec.checkpoints.hub import cached_models, regular_file, regular_files
from cpuspec.environment import lm_studio_dirs, ollama_dirs
from cpuspec.errors import CheckpointError, ConfigError

_OLLAMA_NAME = re.compile(
    r"(?P<prefix>ollama:)?(?:(?P<host>[A-Za-z0-9][A-Za-z0-9.-]*\.[A-Za-z0-9.-]+)/)?(?:(?P<namespace>[A-Za-z0-9][A-Za-z0-9._-]*)/)?"
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?::(?P<tag>[A-Za-z0-9][A-Za-z0-9._-]*))?"
)
_LM_STUDIO_NAME = re.compile(r"[A-Za-z0-9][^/\\]*/[^/\\]+/[^/\\]+\.gguf", re.IGNORECASE)
_HOST, _NAMESPACE = "registry.ollama.ai", "library"  # which names leave out
_MODEL_LAYER, _ADAPTER_LAYER = "application/vnd.ollama.image.model", "application/vnd.ollama.image.adapter"
_DEPTH = 4  # names in the path of a manifest below "manifests": host, namespace, name, tag


@dataclass(frozen=True)
class LocalModel:
    """A model of another program. name: `find_model` takes it; source: the program; num_bytes: of all its files."""

    name: str
    source: str
    path: Path
    num_bytes: int


def local_models() -> list[LocalModel]:
    """All of them, sorted by program and name. Files that cannot be read are left out."""
    hub = [LocalModel(str(model), "huggingface", path, num_bytes) for model, path, num_bytes in cached_models()]
    return [*hub, *_lm_studio(), *_ollama()]


def find_ollama(text: str) -> Path | None:
    """The file of `ollama:[namespace/]name[:tag]`, or of `name:tag` if Ollama has that; None if `text` is neither.

    Of a model with adapters it is the manifest, which `read_manifest` reads.

    Raises ConfigError for a name with the prefix that Ollama does not have, or whose file is not there.
    """
    found = _OLLAMA_NAME.fullmatch(text.strip())
    if found is None or ".." in text or not (found["prefix"] or (found["tag"] and not found["namespace"] and not found["host"])):
        return None
    place = (found["host"] or _HOST, found["namespace"] or _NAMESPACE, found["name"], found["tag"] or "latest")
    for directory in ollama_dirs():
        path = directory.joinpath("manifests", *place)
        try:
            if regular_file(path, directory) is not None:
                found_files = _files(directory, path)
                return path if found_files.adapters else found_files.model
        except CheckpointError as error:
            raise ConfigError(f"{text}: {error}") from error
    if found["prefix"]:
        raise ConfigError(f"Ollama has no {text.strip().removeprefix('ollama:')!r} here; `cpuspec models` lists what it has")
    return None


def find_lm_studio(text: str) -> Path | None:
    """The file of `owner/repository/file.gguf` if LM Studio has it."""
    if not _LM_STUDIO_NAME.fullmatch(text) or ".." in text:
        return None
    for directory in lm_studio_dirs():
        if regular_file(directory / text, directory) is not None:
            return directory / text
    return None


def _lm_studio() -> Iterator[LocalModel]:
    for directory in lm_studio_dirs():
        files = regular_files(directory, directory, 3)
        for name in sorted(files):
            part = re.fullmatch(r"(.+-)([0-9]{5})(-of-[0-9]{5}\.gguf)", name)
            if _LM_STUDIO_NAME.fullmatch(name) and (part is None or part[2] == "00001"):
                rest = [other for other in files if part and other.startswith(part[1]) and other.endswith(part[3])]
                yield LocalModel(name, "lm studio", directory / name, sum(files[other] for other in rest or [name]))


def _ollama() -> Iterator[LocalModel]:
    for directory in ollama_dirs():
        for manifest in sorted(regular_files(directory / "manifests", directory, 4)):
            place = manifest.split("/")
            if len(place) != 4:
                continue
            host, namespace, name, tag = place
            shown = f"{name}:{tag}" if namespace == _NAMESPACE and host == _HOST else f"{namespace}/{name}:{tag}"
            try:
                files = _files(directory, directory / "manifests" / manifest)
            except CheckpointError:
                continue
            yield LocalModel(f"ollama:{shown if host == _HOST else f'{host}/{shown}'}", "ollama", files.model, files.num_bytes)


class OllamaFiles(NamedTuple):
    """The GGUF files of a model of Ollama's. num_bytes: of all of them."""

    model: Path
    adapters: tuple[Path, ...]
    num_bytes: int


def read_manifest(path: Path) -> OllamaFiles | None:
    """The files that a manifest in Ollama's directory names; None for a file that is no manifest.

    Raises CheckpointError for one that is damaged, and where a file is missing.
    """
    with suppress(OSError):
        if len(path.parents) > _DEPTH and path.parents[_DEPTH - 1].name == "manifests" and path.open("rb").read(1) == b"{":
            return _files(path.parents[_DEPTH], path)
    return None


def _files(directory: Path, manifest: Path) -> OllamaFiles:
    """The files that a manifest names. Raises CheckpointError."""
    fields = Fields.of_file(manifest)
    layers = [Fields(f"{manifest}: layer", layer) for layer in fields.items("layers") if isinstance(layer, dict)]
    models, adapters = (
        [_path(directory, layer) for layer in layers if layer.text("mediaType", "") == kind]
        for kind in (_MODEL_LAYER, _ADAPTER_LAYER)
    )
    if len(models) != 1:
        raise CheckpointError(f"{manifest} has {len(models)} layers of the type {_MODEL_LAYER}, wanted 1")
    num_bytes = 0
    for path in (*models, *adapters):
        size = regular_file(path, directory)
        if size is None:
            raise CheckpointError(f"{path} is not a file in that directory; pull the model again with Ollama")
        num_bytes += size
    return OllamaFiles(models[0], tuple(adapters), num_bytes)


def _path(directory: Path, layer: Fields) -> Path:
    """Where the file of a layer is. Raises CheckpointError."""
    digest = layer.text("digest", "")
    if not re.fullmatch("sha256:[0-9a-f]{64}", digest):
        layer.fail("digest", "sha256: and 64 hexadecimal digits")
    return directory / "blobs" / digest.replace(":", "-")
