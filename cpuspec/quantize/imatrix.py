"""Importance matrices: for each matrix the mean squares of its inputs over a calibration text, and llama.cpp's two files of them.

GGUF (llama.cpp since 2025): `NAME.in_sum2` [matrices, K] and `NAME.counts` [matrices, 1] in f32 for the tensor NAME of the model.
A tensor of experts has a row and a count for each; other tensors of several matrices may have all values in one row.
Legacy (.dat): i32 number of entries; each an i32 length and a name, i32 calls, i32 number of values, f32 values, which are calls
times the mean squares, matrix by matrix, and calls for each input of an expert without tokens; then i32 calls, i32 length and name
of the text. (llama.cpp, tools/imatrix.)
"""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np

from cpuspec.checkpoints.gguf_file import MAGIC, GgufFile, Value, read_gguf
from cpuspec.checkpoints.gguf_writer import TensorInfo, entry, write_gguf
from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.files import read_file, replacing
from cpuspec.formats import get_format
from cpuspec.formats.tensor import F32, U8
from cpuspec.model.batch import I32
from cpuspec.quantize.calibration import run
from cpuspec.quantize.weights import Weights

_MOST_BYTES = 1 << 33  # DeepSeek-V3 has a gigabyte
_MOST_ENTRIES = 1 << 16
_LONGEST_NAME = 1 << 12
_AT_ONCE = 4096  # tokens that go through the model together


@dataclass(frozen=True, eq=False)
class Importance:
    """Mean squares of the inputs of matrices, by names in GGUF files.

    means: [matrices, K], a row for each expert; counts: [matrices], the rows of inputs that each mean is of. Where a file does not
    tell them apart, means is [1, matrices * K] with one count. chunks: of how many pieces of text, 0 if unknown.
    """

    means: Mapping[str, F32]
    counts: Mapping[str, F32]
    chunks: int = 0
    chunk_size: int = 0
    dataset: str = ""

    @property
    def num_unreached(self) -> int:
        """The experts' matrices that saw no token of the text."""
        return sum(int((counts == 0).sum()) for counts in self.counts.values())


def collect(
    weights: Weights, chunks: I32, name_of: Callable[[str], str], on_progress: Callable[[int, int], None] = lambda done, total: None
) -> Importance:
    """Mean squares of the inputs of every matrix but the embedding over the chunks [B, L], a few chunks at a time.

    name_of: canonical name -> name in GGUF files. on_progress: (chunks fed, all chunks).
    """
    count, length = chunks.shape
    sums: dict[str, F32] = {}
    counts: dict[str, F32] = {}

    def add(x: F32, names: tuple[str, ...], expert: int = 0) -> None:
        squares = np.einsum("tk,tk->k", x, x, dtype=np.float32)
        for name, canonical in {
            name_of(canonical): canonical for canonical in names
        }.items():  # several may be one tensor of a file
            if name not in sums:
                tensor = weights.checkpoint.tensors.get(canonical)  # None: a tied output matrix
                matrices = tensor.shape[0] if tensor and len(tensor.shape) == 3 else 1
                sums[name], counts[name] = np.zeros((matrices, len(squares)), np.float32), np.zeros(matrices, np.float32)
            sums[name][expert] += squares
            counts[name][expert] += len(x)

    step = max(1, _AT_ONCE // length)
    for start in range(0, count, step):
        run(weights, chunks[start : start + step], add, {})
        on_progress(min(start + step, count), count)
    return Importance({name: _divided(squares, counts[name]) for name, squares in sums.items()}, counts, count, length)


def _divided(sums: F32, counts: F32) -> F32:
    return (sums / np.maximum(counts, 1)[:, None]).astype(np.float32)


def read_importance(path: Path) -> Importance:
    """Either file. Raises CheckpointError if it is damaged, or holds values that are not finite or below zero."""
    head = read_file(path, _MOST_BYTES, CheckpointError)
    found = _read_gguf(read_gguf(path)) if head[:4] == MAGIC else _read_legacy(path, head)
    if not found.means:
        raise CheckpointError(f"{path} has no entries; wanted an importance matrix, as `cpuspec imatrix` and llama-imatrix write")
    for name, means in found.means.items():
        if not (np.isfinite(means).all() and (means >= 0).all()):
            raise CheckpointError(f"{path}: {name} has a value that is not finite or below zero")
    return found


def write_importance(path: Path, importance: Importance) -> None:
    """A legacy file where the name ends in .dat, else a GGUF file. Raises OSError."""
    with replacing(path) as file:
        if path.suffix == ".dat":
            file.write(_legacy(importance))
            return
        data: dict[str, F32] = {}
        for name, means in importance.means.items():
            counts = importance.counts[name][:, None]
            data |= {f"{name}.in_sum2": means * counts, f"{name}.counts": counts}
        f32 = get_format("f32")
        entries: dict[str, Value] = {
            "general.type": "imatrix",
            "imatrix.datasets": [importance.dataset],
            "imatrix.chunk_count": importance.chunks,
            "imatrix.chunk_size": importance.chunk_size,
        }

        def data_of(name: str) -> U8:
            return np.ascontiguousarray(data[name]).view(np.uint8)

        infos = {name: TensorInfo(f32, values.shape) for name, values in data.items()}
        write_gguf(file, {key: entry(key, value) for key, value in entries.items()}, infos, data_of)


def _read_gguf(file: GgufFile) -> Importance:
    means: dict[str, F32] = {}
    all_counts: dict[str, F32] = {}
    for name, sums in file.tensors.items():
        base, dot, kind = name.rpartition(".")
        if not dot or kind != "in_sum2":
            continue
        found = file.tensors.get(f"{base}.counts")
        rows = 1 if len(sums.shape) == 1 else sums.shape[0]
        if found is None or found.num_values != rows:
            raise CheckpointError(
                f"{file.path}: {base} has sums for {rows} matrices, and counts for another number; wanted as many"
            )
        counts = found.dequantize().reshape(rows)
        if not (np.isfinite(counts).all() and (counts >= 0).all()):
            raise CheckpointError(f"{file.path}: {base} has a count that is not finite or below zero")
        means[base], all_counts[base] = _divided(sums.dequantize().reshape(rows, -1), counts), counts
    whole = {key: value for key in ("chunk_count", "chunk_size") if type(value := file.metadata.get(f"imatrix.{key}")) is int}
    datasets = file.metadata.get("imatrix.datasets")
    dataset = datasets[0] if isinstance(datasets, list) and datasets else ""
    return Importance(means, all_counts, whole.get("chunk_count", 0), whole.get("chunk_size", 0), dataset)


def _read_legacy(path: Path, content: bytes) -> Importance:
    file = BytesIO(content)

    def number(what: str, most: int) -> int:
        data = file.read(4)
        value = struct.unpack("<i", data)[0] if len(data) == 4 else -1
        if not 0 <= value <= most:
            raise CheckpointError(
                f"{path}: {what} is {value}, wanted 0 to {most}; this is not an importance matrix, or a part of one"
            )
        return value

    means: dict[str, F32] = {}
    counts: dict[str, F32] = {}
    for i in range(number("the number of entries", _MOST_ENTRIES)):
        name = file.read(number(f"the length of name {i}", _LONGEST_NAME)).decode("utf-8", "replace")
        calls = number(f"calls of {name[:80]!r}", (1 << 31) - 1)
        count = number(f"the number of values of {name[:80]!r}", (len(content) - file.tell()) // 4 - 1)  # it lies before them
        values = np.frombuffer(file.read(4 * count), "<f4")
        means[name] = (values / max(1, calls)).astype(np.float32)[None]
        counts[name] = np.array([max(1, calls)], np.float32)
    chunks = struct.unpack("<i", data)[0] if len(data := file.read(4)) == 4 else 0
    return Importance(means, counts, max(0, chunks))


def _legacy(importance: Importance) -> bytes:
    calls = max(1, importance.chunks)
    parts = [struct.pack("<i", len(importance.means))]
    for name, means in importance.means.items():
        text, reached = name.encode(), importance.counts[name][:, None] > 0
        values = np.where(reached, means, np.float32(1)) * np.float32(calls)
        parts += [struct.pack("<i", len(text)), text, struct.pack("<ii", calls, means.size), values.astype("<f4").tobytes()]
    text = importance.dataset.encode()
    return b"".join([*parts, struct.pack("<ii", calls, len(text)), text])


def of_matrices(importance: Importance, weights: Weights, name_of: Callable[[str], str]) -> dict[str, F32]:
    """The mean squares by canonical name, of the matrices that have an entry: [K], or of each expert, [E, K].

    An expert that saw no token gets the mean over the tokens of the others; where no expert saw one, all inputs count the same.
    Raises ConfigError if an entry has another number of values than its matrix has inputs, or none belongs to the model.
    """
    found = {}
    for name in weights.matrices:
        entry = name_of(name)
        if entry not in importance.means:
            continue
        shape, means = weights.checkpoint.tensors[name].shape, importance.means[entry]
        matrices, inputs = math.prod(shape[:-2]), shape[-1]
        if means.size not in (inputs, matrices * inputs):
            of_each = f", wanted {inputs} for each of {matrices} matrices" if matrices > 1 else f", which has {inputs} inputs"
            raise ConfigError(f"the importance matrix has {means.size} values for {entry}{of_each}")
        own = means.reshape(-1, inputs).copy()
        counts = np.broadcast_to(importance.counts[entry], len(own))
        unreached = (counts == 0) | (own == 1).all(axis=1)  # as older files have it
        own[unreached] = 1 if unreached.all() else np.average(own[~unreached], axis=0, weights=counts[~unreached])
        found[name] = own if len(own) > 1 else own[0]
    if not found:
        raise ConfigError("the importance matrix has no entry of this model's matrices; it belongs to another model")
    return found
