"""Names of models on the hub, the files that they stand for, and those of them in huggingface_hub's cache.

huggingface_hub is not imported, because that takes 0.4 s. The layout of its cache, which llama.cpp shares, is that of its guide
"Understand caching": models--OWNER--NAME/refs/REVISION has a commit, and models--OWNER--NAME/snapshots/COMMIT/FILE links to a blob.
"""

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol

from cpuspec.checkpoints.safetensors import INDEX, read_index
from cpuspec.environment import cache_dir, has_proxy, hub_cache_dir, hub_endpoint
from cpuspec.errors import CheckpointError, ConfigError, DownloadError
from cpuspec.files import write_file
from cpuspec.platform import SYSTEM

SAFETENSORS = "safetensors"  # in place of a quantization: the repository's safetensors instead of its GGUF files

_OWNER_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_REVISION = r"refs/pr/[0-9]+|[A-Za-z0-9][A-Za-z0-9._-]{0,199}"
_FILE = r"[^/\\:?\s][^\\:?]{0,500}"
_HUB_NAME = re.compile(
    rf"(?P<prefix>hf://|hf:|(?:https?://)?(?:hf\.co|huggingface\.co)/)?(?P<repository>{_OWNER_NAME})(?:@(?P<revision>{_REVISION}))?"
    rf"(?:/(?:resolve|blob|tree)/(?P<url_revision>[A-Za-z0-9][A-Za-z0-9._-]*))?(?:/(?P<file>{_FILE}))?"
    r"(?::(?P<quantization>[A-Za-z0-9][A-Za-z0-9._-]{0,99}))?(?:\?.*)?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})")
_QUANTIZATION = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q[0-9]\w*|TQ[0-9]\w*|(?:BF|FP|F)(?:16|32)|MXFP4\w*|NVFP4\w*))$", re.IGNORECASE
)
# Weights of something else than a model: llama.cpp's list (common/download.cpp), but drafts by how names begin: models with a layer
# for prediction are published as ...-MTP-Q4_K_M.gguf.
_DRAFTS = ("mtp-", "eagle3-", "dflash-", "dspark-")
_DEFAULTS = ("Q4_K_M", "Q8_0")  # the quantization of a name without one, in this order, as in llama.cpp
# Every file that readers of a directory open beside its weights, config.json first. Patterns are those of fnmatch.
MODEL_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("quantize_config.json", "quant_config.json", "hf_quant_config.json"),  # of GPTQ, AWQ and ModelOpt
    "1_Pooling/config.json",  # of models that make embeddings
    *("added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model"),
    *("chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja"),
    "mask_embedding.pt",  # which a draft head is refused for; nothing reads it
)
# Why a repository has no model that could be read, by a pattern of its files.
_NOT_READ = (
    ("adapter_model.*", "it is a LoRA adapter: fetch it with another program, and give its directory with --lora beside its model"),
    ("consolidated*.safetensors", "its consolidated.safetensors are in Mistral's own layout, which is not read"),
    ("*.onnx", "its weights are ONNX files, which are not read"),
    ("*.mlpackage/*", "its weights are Core ML's, which are not read"),
    ("openvino_*.xml", "OpenVINO's files are read from a directory; fetch it with another program"),
    ("*.safetensors", f"none of its safetensors is model.safetensors, and it has no {INDEX}"),
    ("*.gguf", "its GGUF files are of something else than a model, as of images or drafts; name one, as hf:OWNER/NAME/FILE"),
    *((f"*{end}", "its weights are pickles, which can run code and are never read") for end in (".bin", ".pth", ".pt", ".ckpt")),
)
HUB_TIMEOUT_S = 6.0  # a hub that is not there should cost seconds
_SPARE_BYTES = 64 << 20  # left free on a disk
_MOST_NAMED = 20
_MOST_FILES = 10_000  # files that are listed in a snapshot, and repositories in a cache


class Progress(Protocol):
    """Is told how far a fetch is, about ten times a second at most."""

    def __call__(self, done_bytes: int, total_bytes: int, what: str) -> None:
        """what: the source that is used now, or why one has failed."""


@dataclass(frozen=True)
class HubModel:
    """A model of a hub repository: a file of it, a quantization of it, or, without either, its main model."""

    repository: str  # owner/name
    file: str = ""  # path inside the repository; of several parts the first
    quantization: str = ""  # as in Q4_K_M, or SAFETENSORS
    revision: str = "main"  # a branch, tag or commit

    def __str__(self) -> str:
        revision = "" if self.revision == "main" else f"@{self.revision}"
        rest = f"/{self.file}" if self.file else f":{self.quantization}" if self.quantization else ""
        return f"{'hf:' if self.file else ''}{self.repository}{revision}{rest}"


@dataclass(frozen=True)
class Choice:
    """Files of a repository that make a model. opened: the one to open, of parts the first; "" for the directory of all."""

    files: tuple[str, ...]  # weights last: a cache that has them has all files
    opened: str


@dataclass(frozen=True)
class _Gguf:
    """One GGUF model among files: its parts in order, None where one is missing."""

    stem: str  # the path without the part's number and .gguf
    parts: tuple[str | None, ...]
    num_bytes: int

    @property
    def quantization(self) -> str:
        found = _QUANTIZATION.search(self.stem)
        return found[1].upper() if found else self.stem.rpartition("/")[2]


def read_hub_name(text: str) -> HubModel | None:
    """What `owner/name[@revision][:QUANT]`, `hf:owner/name[@revision]/file` and the addresses of hub pages stand for.

    Without one of the prefixes hf:, hf://, hf.co/ and huggingface.co/ a name has two parts and does not look like a file.
    """
    found = _HUB_NAME.fullmatch(text.strip())
    if found is None or ".." in text or "--" in found["repository"]:
        return None
    repository, file = found["repository"], found["file"] or ""
    if not found["prefix"] and (
        file or found["url_revision"] or re.search(r"\.(gguf|safetensors|toml|py)$", repository, re.IGNORECASE)
    ):
        return None
    if file and found["quantization"]:
        return None
    return HubModel(repository, file, found["quantization"] or "", found["revision"] or found["url_revision"] or "main")


def choose(model: HubModel, files: Mapping[str, int | None], read_shards: Callable[[], Iterable[str]]) -> Choice:
    """The files that `model` stands for among those of its repository, given with their bytes.

    read_shards: the files that the repository's index names; asked only where these are the choice, and may raise.
    Raises ConfigError, naming the choices, where there is none, a part is missing, or several would do.
    """
    if model.file:
        if model.file not in files:
            raise ConfigError(f"{model.repository} has no file {model.file!r}; it has {_choices(files)}")
        found = [gguf for gguf in _ggufs(files, every=True) if model.file in gguf.parts]
        return _whole(model, found[0]) if found else _safetensors(model, files, read_shards)
    ggufs = _ggufs(files)
    if model.quantization.lower() == SAFETENSORS or not (ggufs or model.quantization):
        return _safetensors(model, files, read_shards)
    for wanted in (model.quantization,) if model.quantization else _DEFAULTS:
        matching = [gguf for gguf in ggufs if gguf.quantization == wanted.upper()] or [
            gguf for gguf in ggufs if re.search(rf"(?:^|[-._/]){re.escape(wanted)}(?:[-./]|$)", gguf.stem, re.IGNORECASE)
        ]
        # The same file may lie there in parts, too.
        shortest = [gguf for gguf in matching if len(gguf.parts) == min(len(other.parts) for other in matching)]
        if len(shortest) == 1:
            return _whole(model, shortest[0])
        if shortest:
            names = _listed([f"hf:{model.repository}/{gguf.parts[0]}" for gguf in shortest])
            raise ConfigError(f"{model.repository} has several files for {wanted}; name one: {names}")
    if model.quantization:
        raise ConfigError(f"{model.repository} has no {model.quantization}; it has {_choices(files)}")
    if len(ggufs) == 1:
        return _whole(model, ggufs[0])
    raise ConfigError(f"{model.repository} has several quantizations; name one, as in {model.repository}:QUANT: {_choices(files)}")


def find_cached(model: HubModel, whatever_is_there: bool = False) -> Path | None:
    """The file or directory of `model` in huggingface_hub's cache, if all of it is there.

    whatever_is_there: of a name without a file and a quantization, choose among the files in the cache as among those of the hub.
    Otherwise such a name is what the hub last chose for it (`remember`).
    """
    try:
        if not (model.file or model.quantization or whatever_is_there):
            remembered = _memory(model).read_text("utf-8")
            model = replace(model, file=remembered) if remembered else replace(model, quantization=SAFETENSORS)
        commit = _commit(model)
        snapshot = snapshot_dir(model.repository, commit)
        choice = choose(model, _files_of(snapshot), lambda: shards_of(snapshot))
    except (OSError, ValueError, ConfigError, CheckpointError):
        return None
    return snapshot / choice.opened if choice.opened else snapshot


def remember(model: HubModel, choice: Choice) -> None:
    """Remember the choice for a name without a file and a quantization, so that the next start need not ask the hub."""
    if not (model.file or model.quantization):
        _memory(model).parent.mkdir(parents=True, exist_ok=True)
        write_file(_memory(model), choice.opened)


def write_ref(model: HubModel, commit: str) -> None:
    """Note in the cache which commit the revision is, as huggingface_hub does for what it fetches by revision."""
    if model.revision != commit:
        path = _repository_dir(model.repository) / "refs" / model.revision
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, commit)


def revision_of(path: Path) -> str | None:
    """The commit that a file or directory in huggingface_hub's cache belongs to; None for any other path."""
    for directory in (path, *path.parents):
        if _COMMIT.fullmatch(directory.name) and directory.parent.name == "snapshots":
            return directory.name if directory.parent.parent.name.startswith("models--") else None
    return None


def cached_models() -> Iterator[tuple[HubModel, Path, int]]:
    """Every model in huggingface_hub's cache: a name that `find_cached` takes, its path and its bytes."""
    for directory in sorted(islice(hub_cache_dir().glob("models--*--*"), _MOST_FILES)):
        repository = directory.name.removeprefix("models--").replace("--", "/", 1)
        if read_hub_name(repository) is None:
            continue
        named = {commit: name for name in _refs(directory) if (commit := _read_ref(directory / "refs" / name))}
        for snapshot in sorted(islice((directory / "snapshots").glob("*"), _MOST_FILES)):
            if not _COMMIT.fullmatch(snapshot.name):
                continue
            files = _files_of(snapshot)
            revision = named.get(snapshot.name, snapshot.name)
            # The name has the quantization if that is unique, else the file.
            ggufs = _ggufs(files)
            names = [gguf.quantization for gguf in ggufs if _QUANTIZATION.search(gguf.stem)]
            names = [*(name for name in names if names.count(name) == 1), SAFETENSORS]
            candidates = [HubModel(repository, "", name, revision) for name in names]
            candidates += [HubModel(repository, gguf.parts[0], "", revision) for gguf in ggufs if gguf.parts[0]]
            seen: set[str] = set()
            for model in candidates:
                with suppress(ConfigError, CheckpointError):
                    choice = choose(model, files, partial(shards_of, snapshot))
                    if choice.opened not in seen:
                        seen.add(choice.opened)
                        yield model, snapshot / choice.opened, sum(files[file] for file in choice.files)


def check_reachable() -> None:
    """Raise DownloadError within seconds if there is no hub: huggingface_hub, which takes 0.4 s to import, tries again for half a
    minute."""
    import socket
    from urllib.parse import urlsplit

    endpoint = hub_endpoint()
    try:
        parts = urlsplit(endpoint)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        if not parts.hostname:
            raise ValueError
    except (ValueError, KeyError):
        raise DownloadError(f"{endpoint[:200]} is not an http or https address; check HF_ENDPOINT") from None
    if not has_proxy():
        try:
            socket.create_connection((parts.hostname, port), HUB_TIMEOUT_S).close()
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise DownloadError(f"{parts.hostname} cannot be reached ({reason}); check the network, or HF_ENDPOINT") from error


def check_room(num_bytes: int, directory: Path, variable: str) -> None:
    """Raise DownloadError if `directory`, which may not be there yet and `variable` moves, cannot take `num_bytes`."""
    there = next(parent for parent in (directory, *directory.parents) if parent.is_dir())
    free, needed = shutil.disk_usage(there).free, num_bytes + _SPARE_BYTES
    if free < needed:
        raise DownloadError(
            f"needs {needed / 1e6:.0f} MB free in {directory}, which has {free / 1e6:.0f} MB; "
            f"free some, or set {variable} to a directory on another disk"
        )


def memory_note(num_bytes: int) -> str:
    """The memory that a model's weights take, about its files' bytes, beside what programs may use of this machine's."""
    usable = SYSTEM.memory().usable
    beside = "" if usable is None else f", of {usable / 1e9:.1f} GB here{', which is too little' if usable < num_bytes else ''}"
    return f"takes about {num_bytes / 1e9:.2f} GB of memory{beside}, and more for long contexts"


def _ggufs(files: Mapping[str, int | None], every: bool = False) -> list[_Gguf]:
    """The GGUF models among files, the smallest first. every: with those that are no language models."""
    parts: dict[tuple[str, int], dict[int, str]] = {}
    for file in files:
        stem, name = file[: -len(".gguf")], file.rpartition("/")[2].lower()
        if name.endswith(".gguf") and (every or not _is_no_model(name)):
            part = _PART.fullmatch(stem)
            stem, number, count = (part["stem"], int(part["number"]), int(part["count"])) if part else (stem, 1, 1)
            if 1 <= number <= count:
                parts.setdefault((stem, count), {})[number] = file
    found = [
        _Gguf(stem, tuple(of_it.get(number) for number in range(1, count + 1)), sum(files[file] or 0 for file in of_it.values()))
        for (stem, count), of_it in parts.items()
    ]
    return sorted(found, key=lambda gguf: (gguf.num_bytes, gguf.stem))


def _is_no_model(name: str) -> bool:
    """Whether a file's name, in lower case, is of a draft, of a part that sees, or of an importance matrix."""
    is_matrix = "imatrix" in name and not _QUANTIZATION.search(name.removesuffix(".gguf"))
    return name.startswith(_DRAFTS) or "mmproj" in name or is_matrix


def _whole(model: HubModel, gguf: _Gguf) -> Choice:
    missing = [number for number, part in enumerate(gguf.parts, 1) if part is None]
    if missing:
        raise ConfigError(f"{model.repository} lacks part {missing[0]} of {len(gguf.parts)} of {gguf.stem}.gguf")
    names = tuple(part for part in gguf.parts if part is not None)
    return Choice(names, names[0])


def shards_of(directory: Path) -> list[str]:
    """The files that the index in a directory names, in the order of their names. Raises CheckpointError."""
    return sorted(set(read_index(directory / INDEX).values()))


def _safetensors(model: HubModel, files: Mapping[str, int | None], read_shards: Callable[[], Iterable[str]]) -> Choice:
    """The repository's safetensors with their configuration and tokenizer; Medusa's have their own name. Raises ConfigError."""
    weights = [file for file in ("medusa_lm_head.safetensors", "model.safetensors") if file in files][:1]
    if "config.json" in files and (weights or INDEX in files):
        if not weights:
            weights = [INDEX, *read_shards()]
            if missing := [name for name in weights if name not in files]:
                raise ConfigError(
                    f"{model.repository} has no whole safetensors model: it lacks {missing[0]}, which its {INDEX} names"
                )
        settings = [name for pattern in MODEL_FILES for name in sorted(files) if fnmatchcase(name, pattern)]
        return Choice((*settings, *weights), "")
    if weights or INDEX in files:
        reasons = ["it has no config.json"]
    else:
        others = [name for name in files if not (name.endswith(".gguf") and _ggufs(files))]
        reasons = [reason for pattern, reason in _NOT_READ if any(fnmatchcase(name, pattern) for name in others)]
    has = f"it has {_choices(files)}" if _ggufs(files) else ""
    what = f"{model.repository} has no {'' if has else 'GGUF file and no '}whole safetensors model"
    raise ConfigError("; ".join([what, *reasons[:1], *filter(None, [has])]))


def _choices(files: Mapping[str, int | None]) -> str:
    return _listed([f"{gguf.quantization} ({gguf.num_bytes / 1e9:.2f} GB)" for gguf in _ggufs(files)]) or "no GGUF file"


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(name[:200] for name in names[:_MOST_NAMED]) + rest


def _repository_dir(repository: str) -> Path:
    return hub_cache_dir() / f"models--{repository.replace('/', '--')}"


def snapshot_dir(repository: str, commit: str) -> Path:
    """Where the cache has the files of a commit."""
    return _repository_dir(repository) / "snapshots" / commit


def _memory(model: HubModel) -> Path:
    return cache_dir() / "hub" / f"{model.repository.replace('/', '--')}@{model.revision.replace('/', '--')}"


def _commit(model: HubModel) -> str:
    """The commit of the revision, as the cache has it. Raises OSError or ValueError."""
    if _COMMIT.fullmatch(model.revision):
        return model.revision
    commit = _read_ref(_repository_dir(model.repository) / "refs" / model.revision)
    if commit is None:
        raise ValueError
    return commit


def _read_ref(path: Path) -> str | None:
    try:
        if not path.is_file() or path.stat().st_size > 100:
            return None
        text = path.read_text("utf-8").strip()
    except (OSError, ValueError):
        return None
    return text if _COMMIT.fullmatch(text) else None


def _refs(directory: Path) -> list[str]:
    """Names of the revisions. main is last, so that of several names for a commit it is the one that counts."""
    names = [path.name for path in islice((directory / "refs").glob("*"), _MOST_FILES) if path.name.isprintable()]
    return sorted(names, key=lambda name: (name == "main", name))


def _files_of(snapshot: Path) -> dict[str, int]:
    return regular_files(snapshot, hub_cache_dir(), 3)


def regular_files(directory: Path, root: Path, depth: int) -> dict[str, int]:
    """Bytes of the files below `directory`, at most `depth` names deep, by path.

    Files that `regular_file` refuses or whose names cannot be printed are left out, and so are those after 10,000.
    """
    found: dict[str, int] = {}
    for folder, folders, names in os.walk(directory):
        at = Path(folder).relative_to(directory)
        if len(at.parts) >= depth - 1:
            folders.clear()
        for name in sorted(names)[: _MOST_FILES - len(found)]:
            shown = (at / name).as_posix()
            if shown.isprintable() and (num_bytes := regular_file(Path(folder) / name, root)) is not None:
                found[shown] = num_bytes
    return found


def regular_file(path: Path, root: Path) -> int | None:
    """The bytes of a regular file; None if there is none, or if it leads out of `root`."""
    try:
        status = path.stat()
        inside = path.resolve().is_relative_to(root.resolve())
    except (OSError, ValueError):  # a link to nothing or to itself, a null byte
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) and inside else None
