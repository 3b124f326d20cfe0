"""The safetensors container: one file of named tensors, memory-mapped. Knows no model.

Layout: u64 header length, a JSON header {name: {dtype, shape, data_offsets}}, then the bytes; offsets count from the end of the
header (https://github.com/huggingface/safetensors). The header is checked like any stranger's word before a view is made.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.checkpoints.fields import Fields, parse_json_object, read_json_object
from cpuspec.checkpoints.mapped import map_file
from cpuspec.errors import CheckpointError
from cpuspec.files import replacing
from cpuspec.formats import FORMATS, QuantTensor
from cpuspec.formats.tensor import F32, U8

_FORMATS = {row.safetensors_dtype: row for row in FORMATS.values() if row.safetensors_dtype is not None}
_DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
_INTEGERS = {"BOOL": "u1", "U8": "u1", "I8": "i1", "F8_E4M3": "u1", "F8_E8M0": "u1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}

INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 1 << 25

# As Python objects a header takes up to 25 times its bytes; those of models have less than a megabyte.
_MAX_HEADER_BYTES = 1 << 25


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor as its file has it. `what` names file and tensor in messages."""

    what: str
    dtype: str
    shape: tuple[int, ...]
    data: U8  # all of its bytes, flat

    def floats(self) -> QuantTensor:
        """The vector, the matrix, or those of experts. Raises CheckpointError if it is not f32, f16 or bf16 of these dimensions."""
        if self.dtype not in _FORMATS:
            raise CheckpointError(
                f"{self.what}: dtype is {self.dtype!r}, wanted F32, F16 or BF16: {self.dtype} weights are not supported"
            )
        if len(self.shape) not in (1, 2, 3) or 0 in self.shape:
            raise CheckpointError(
                f"{self.what}: shape is {list(self.shape)}, wanted a vector, a matrix, or one of each expert, that is not empty"
            )
        format = _FORMATS[self.dtype]
        return QuantTensor(format, self.shape, self.data.reshape(*self.shape[:-1], self.shape[-1] * format.block_bytes))

    @property
    def is_array(self) -> bool:
        """Whether it is made of integers or truth values, or is a tensor of floats that is no matrix and no vector."""
        return (self.dtype in _INTEGERS and not self.dtype.startswith("F")) or (self.dtype in _FORMATS and len(self.shape) > 2)

    def numbers_or_integers(self) -> NDArray[Any]:
        """What `is_array`, as an array: numbers in f32."""
        if self.dtype in _FORMATS:
            return _FORMATS[self.dtype].decode(self.data).reshape(self.shape)
        return self.data.view(_INTEGERS[self.dtype]).reshape(self.shape)

    def array(self, dtype: str, dimensions: int) -> NDArray[Any]:
        """Its integers, or the bytes of 8-bit floats. Raises CheckpointError for another type or shape, or if it is empty."""
        if self.dtype != dtype or len(self.shape) != dimensions or 0 in self.shape:
            raise CheckpointError(
                f"{self.what} is {self.dtype} {list(self.shape)}, wanted {dtype} of {dimensions} dimensions, not empty"
            )
        return self.data.view(_INTEGERS[dtype]).reshape(self.shape)

    def numbers(self) -> F32:
        """Its f32, f16 or bf16 numbers, in any shape. Raises CheckpointError for another type, and if one is not finite."""
        if self.dtype not in _FORMATS or 0 in self.shape:
            raise CheckpointError(f"{self.what} is {self.dtype} {list(self.shape)}, wanted F32, F16 or BF16, not empty")
        numbers = _FORMATS[self.dtype].decode(self.data).reshape(self.shape)
        if not np.isfinite(numbers).all():
            raise CheckpointError(f"{self.what} has numbers that are not finite; the file is damaged")
        return numbers


def read_safetensors(path: Path, mmap: bool = True) -> dict[str, StoredTensor]:
    """The tensors of a file by name, as views of its bytes, which are mapped or read.

    Raises CheckpointError on a damaged file.
    """
    data = map_file(path, mmap)
    if len(data) < 8:
        raise CheckpointError(f"{path} has {len(data)} bytes, a safetensors file has at least 8: download it again")
    header_bytes = int.from_bytes(data[:8].tobytes(), "little")
    if header_bytes > min(len(data) - 8, _MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{path}: the header is {header_bytes} bytes long, wanted at most {min(len(data) - 8, _MAX_HEADER_BYTES)}; "
            "the file is truncated or not safetensors"
        )
    payload = data[8 + header_bytes :]
    header = Fields(f"{path}: header", parse_json_object(data[8 : 8 + header_bytes].tobytes(), f"{path}: header"))

    tensors = {}
    extents = []
    for name in header.names():
        if name == "__metadata__":
            continue
        if not name.isprintable():
            raise CheckpointError(f"{path}: a tensor has the name {name[:80]!r}, wanted printable text")
        entry = header.object(name)
        dtype = entry.text("dtype", "")
        if dtype not in _DTYPE_BYTES:
            entry.fail("dtype", f"one of {', '.join(_DTYPE_BYTES)}")
        shape = _naturals(entry, "shape")
        offsets = _naturals(entry, "data_offsets")
        num_bytes = math.prod(shape) * _DTYPE_BYTES[dtype]
        if len(offsets) != 2 or offsets[1] - offsets[0] != num_bytes:
            entry.fail("data_offsets", f"two offsets {num_bytes} bytes apart for {dtype} {list(shape)}")
        start, end = offsets
        if end > len(payload):
            entry.fail("data_offsets", f"an end within the {len(payload)} bytes that the file has; download it again")
        extents.append((start, end, name))
        tensors[name] = StoredTensor(entry.what, dtype, shape, payload[start:end])

    # Tensors follow each other without gaps or overlaps and fill the file: the container's rule.
    reached = 0
    for start, end, name in sorted(extents):
        if start != reached:
            raise CheckpointError(f"{path}: tensor {name} begins at data byte {start}, wanted {reached}, the end of the last")
        reached = end
    if reached != len(payload):
        raise CheckpointError(f"{path}: tensors fill {reached} bytes of data, the file has {len(payload)}; it is damaged")
    return tensors


def _naturals(entry: Fields, key: str) -> tuple[int, ...]:
    """Up to eight integers from 0 to 2^60."""
    values = tuple(value for value in entry.items(key) if type(value) is int and 0 <= value < 1 << 60)
    if len(values) != len(entry.items(key)) or len(values) > 8:
        entry.fail(key, "up to 8 integers that are not negative")
    return values


def header_of(tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str] | None = None) -> bytes:
    """The beginning of a file whose tensors follow in this order: name, dtype, shape and bytes of each."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape, num_bytes in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_arrays(path: Path, arrays: Mapping[str, tuple[str, NDArray[Any]]]) -> None:
    """Write arrays, each with its dtype in the file, in the place of `path`; nobody ever sees half of it. Raises OSError."""
    with replacing(path) as file:
        file.write(header_of((name, dtype, array.shape, array.nbytes) for name, (dtype, array) in arrays.items()))
        for _, array in arrays.values():
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def read_index(path: Path) -> dict[str, str]:
    """An index's weight_map: the file of each tensor, the plain name of one beside the index. Raises CheckpointError."""
    index = Fields(str(path), read_json_object(path, _MAX_INDEX_BYTES))
    weight_map = index.object("weight_map")
    if not weight_map.names():
        index.fail("weight_map", "an object from tensor names to file names")
    files = {name: weight_map.text(name, "") for name in weight_map.names()}
    for name, file_name in files.items():
        # A shard lies beside its index: a name with a separator, a drive or dots could point anywhere.
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,250}\.safetensors", file_name):
            weight_map.fail(name, "the plain name of a .safetensors file in the same directory")
    return files
