"""Writes the GGUF container, version 3, little-endian: entries of metadata, then tensors one after the other. Knows no model.

Tensors are asked for one at a time, so that a file may be larger than memory. Layout: as in `gguf_file`.
"""

import math
import struct
from collections.abc import Callable, Mapping
from typing import BinaryIO, NamedTuple

import numpy as np

from cpuspec.checkpoints.gguf_file import ARRAY, BOOL, MAGIC, SCALARS, STRING, Value
from cpuspec.errors import CheckpointError
from cpuspec.formats import Format
from cpuspec.formats.tensor import U8

_ALIGNMENT = 32
_ITEM_TYPES = {f"{dtype.kind}{dtype.itemsize}": number for number, dtype in SCALARS.items() if number != BOOL} | {"b1": BOOL}


class TensorInfo(NamedTuple):
    """A tensor to be written: its format and its shape, [K], [N, K], or [E, N, K] of experts."""

    format: Format
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file, without the padding after them."""
        return math.prod(self.shape[:-1]) * self.format.row_bytes(self.shape[-1])

    @property
    def kind(self) -> str:
        """For errors."""
        return self.format.name

    @property
    def gguf_type(self) -> int | None:
        """The number of its type, None where files have none."""
        return self.format.gguf_type


class IdsInfo(NamedTuple):
    """A vector of whole numbers of 64 bits to be written: `length` of them."""

    length: int
    kind: str = "int64"
    gguf_type: int | None = 27  # GGML_TYPE_I64

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the vector."""
        return (self.length,)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file, without the padding after them."""
        return 8 * self.length


def write_gguf(
    file: BinaryIO, entries: Mapping[str, bytes], tensors: Mapping[str, TensorInfo | IdsInfo], data_of: Callable[[str], U8]
) -> None:
    """Write a whole file.

    entries: metadata as `entry` and `GgufFile.entries` give it, by key. tensors: in the order of the file.
    data_of: called once for each tensor, in this order; gives its bytes.
    Raises CheckpointError for a format that GGUF files cannot hold, or bytes of another size.
    """
    infos, offset = [], 0
    for name, info in tensors.items():
        if info.gguf_type is None:
            raise CheckpointError(f"{name}: GGUF files have no type for {info.kind}; choose another format for this tensor")
        dims = info.shape[::-1]
        infos.append(_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, info.gguf_type, offset))
        offset += -(-info.num_bytes // _ALIGNMENT) * _ALIGNMENT
    header = b"".join([MAGIC, struct.pack("<IQQ", 3, len(tensors), len(entries)), *entries.values(), *infos])
    file.write(header + bytes(-len(header) % _ALIGNMENT))
    for name, info in tensors.items():
        data = data_of(name)
        if data.nbytes != info.num_bytes:
            raise CheckpointError(f"{name}: {data.nbytes} bytes came for {info.kind} {list(info.shape)}; wanted {info.num_bytes}")
        file.write(np.ascontiguousarray(data).data)
        file.write(bytes(-data.nbytes % _ALIGNMENT))


def entry(key: str, value: Value) -> bytes:
    """An entry of metadata.

    Whole numbers become u32, or i32 below zero; other numbers f32; arrays keep their type. Larger numbers become 64 bits wide.
    """
    return _string(key) + _value(value)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", BOOL, value)
        case int():
            kinds = [("u4", "I"), ("i4", "i"), ("u8", "Q"), ("i8", "q")]
            kind, code = kinds[(value < 0) + 2 * (not -(1 << 31) <= value < 1 << 32)]
            return struct.pack(f"<I{code}", _ITEM_TYPES[kind], value)
        case float():
            return struct.pack("<If", _ITEM_TYPES["f4"], value)
        case str():
            return struct.pack("<I", STRING) + _string(value)
        case list():
            return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_string, value))
    kind = f"{value.dtype.kind}{value.dtype.itemsize}"
    return struct.pack("<IIQ", ARRAY, _ITEM_TYPES[kind], len(value)) + np.ascontiguousarray(value).tobytes()
