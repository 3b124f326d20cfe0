"""GGUF models in several files, NAME-00001-of-00003.gguf and so on, as llama-gguf-split writes them: all mapped, read as one file.

Every part has split.no (counted from 0), split.count, and split.tensors.count, which counts the tensors of all parts. The model's
own metadata is in the first (llama.cpp, tools/gguf-split).
"""

import hashlib
import re
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from cpuspec.checkpoints.gguf_file import GgufFile, read_gguf
from cpuspec.errors import CheckpointError
from cpuspec.formats import QuantTensor

_NAME = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL | re.IGNORECASE)


def read_parts(path: Path, mmap: bool = True) -> GgufFile:
    """The file at `path`, or, if it is the first part of several, the metadata of that and the tensors of all.

    mmap: as in `cpuspec.checkpoints.mapped.map_file`.
    Raises CheckpointError naming the part that is missing, or that does not belong to the others.
    """
    first = read_gguf(path, mmap)
    count = _number(first, "split.count", 1)
    if count in (0, 1):  # a model that was never split may carry the keys, too
        return first
    paths = part_paths(path)
    if count != len(paths):
        raise CheckpointError(
            f"{path} says that it is one of {count} parts, and its name says 1 of {len(paths)}; "
            "give the first part under its own name, as in NAME-00001-of-00003.gguf"
        )
    total = _number(first, "split.tensors.count")
    tensors: dict[str, QuantTensor] = {}
    arrays: dict[str, NDArray] = {}
    vision_audio: tuple[str, ...] = ()
    for number, part_path in enumerate(paths):
        part = first if number == 0 else read_gguf(part_path, mmap)
        for key, wanted in (("split.no", number), ("split.count", count), ("split.tensors.count", total)):
            if (got := _number(part, key)) != wanted:
                raise CheckpointError(
                    f"{part_path}: {key} is {got}, wanted {wanted}; the part belongs to another model, or elsewhere"
                )
        if twice := (tensors.keys() | arrays.keys()) & (part.tensors.keys() | part.arrays.keys()):
            raise CheckpointError(f"{part_path}: tensor {min(twice)} is in an earlier part, too")
        tensors |= part.tensors
        arrays |= part.arrays
        vision_audio += part.vision_audio
    if total != (got := len(tensors) + len(arrays) + len(vision_audio)):
        raise CheckpointError(f"{path}: its {count} parts have {got} tensors, wanted {total}, as split.tensors.count says")
    return GgufFile(path, first.metadata, tensors, arrays, vision_audio, first.remarks)


def part_paths(path: Path) -> list[Path]:
    """The paths of a model's parts, by the name of its first. For any other file: only its own path.

    Raises CheckpointError for another part than the first, and if one is not there.
    """
    name = _NAME.fullmatch(path.name)
    if name is None:
        return [path]
    count = int(name["count"])
    if int(name["number"]) != 1:
        first = path.with_name(f"{name['stem']}-00001-of-{name['count']}.gguf")
        raise CheckpointError(f"{path} is part {int(name['number'])} of {count}; give the first, {first}")
    paths = [path, *(path.with_name(f"{name['stem']}-{number:05}-of-{name['count']}.gguf") for number in range(2, count + 1))]
    for number, part in enumerate(paths, 1):
        if not part.exists():
            raise CheckpointError(f"{part}, part {number} of {count}, is missing; put all parts into one directory")
    return paths


def _number(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.metadata.get(key, default)
    if type(value) is not int:
        raise CheckpointError(f"{file.path}: {key} is {'missing' if value is None else type(value).__name__}, wanted an integer")
    return value


def file_identity(path: Path) -> list[dict[str, Any]]:
    """Name, size in bytes and sha256 of each file of a model: the parts of a GGUF model, or a directory's weights and settings."""
    files = (
        part_paths(path)
        if path.is_file()
        else sorted(file for pattern in ("*.safetensors", "*.json", "openvino_model.*") for file in path.glob(pattern))
    )
    found = []
    for file in files:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        found.append({"name": file.name, "bytes": file.stat().st_size, "sha256": digest})
    return found
