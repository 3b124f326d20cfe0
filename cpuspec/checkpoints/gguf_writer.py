"""Writes the GGUF container, version 3, little-endian: entries of metadata, then tensors one after the other. Knows no model.

Tensors are asked for one at a time, so that a file may be larger than memory. Layout: as in `gguf_file`.
"""

import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cpuspec.checkpoints.gguf_file import MAGIC, Value
from cpuspec.checkpoints.mapped import map_file
from cpuspec.errors import CheckpointError
from cpuspec.formats import Format
from cpuspec.formats.tensor import U8

_ALIGNMENT = 32
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U64, _I64 = 4, 5, 6, 7, 8, 9, 10, 11
_ITEM_TYPES = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12}
_ITEM_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


class TensorInfo(NamedTuple):
    """A tensor to be written: its format and its shape, [K], [N, K], or [E, N, K] of experts."""

    format: Format
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file, without the gap behind."""
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
        """Bytes in the file, without the gap behind."""
        return 8 * self.length


def write_gguf(
    file: BinaryIO, entries: Mapping[str, bytes], tensors: Mapping[str, TensorInfo | IdsInfo], data_of: Callable[[str], U8]
) -> None:
    """Write a whole file.

    entries: metadata as `entry` and `read_entries` give it, by key. tensors: in the order of the file.
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


def read_entries(path: Path) -> dict[str, bytes]:
    """The entries of a file's metadata as they are, by key. The file must have passed `read_gguf`: nothing is checked here."""
    data = map_file(path)
    view = memoryview(data.data)
    count, position = struct.unpack_from("<Q", view, 16)[0], 24
    entries = {}
    for _ in range(count):
        start = position
        key_end = position + 8 + struct.unpack_from("<Q", view, position)[0]
        key = str(view[position + 8 : key_end], "utf-8")
        position = _end_of_value(view, key_end + 4, struct.unpack_from("<I", view, key_end)[0])
        entries[key] = bytes(view[start:position])
    return entries


def _end_of_value(view: memoryview, position: int, kind: int) -> int:
    if kind == _STRING:
        return position + 8 + struct.unpack_from("<Q", view, position)[0]
    if kind != _ARRAY:
        return position + _ITEM_BYTES[kind]
    item, count = struct.unpack_from("<IQ", view, position)
    position += 12
    if item != _STRING:
        return position + count * _ITEM_BYTES[item]
    for _ in range(count):
        position += 8 + struct.unpack_from("<Q", view, position)[0]
    return position


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", _BOOL, value)
        case int():
            wide = not -(1 << 31) <= value < 1 << 32
            kind, code = {
                (False, False): (_U32, "I"),
                (True, False): (_I32, "i"),
                (False, True): (_U64, "Q"),
                (True, True): (_I64, "q"),
            }[value < 0, wide]
            return struct.pack(f"<I{code}", kind, value)
        case float():
            return struct.pack("<If", _F32, value)
        case str():
            return struct.pack("<I", _STRING) + _string(value)
        case list():
            return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_string, value))
    return struct.pack("<IIQ", _ARRAY, _item_type(value), len(value)) + np.ascontiguousarray(value).tobytes()


def _item_type(numbers: NDArray) -> int:
    return _ITEM_TYPES[f"{numbers.dtype.kind}{numbers.dtype.itemsize}"]
