"""The GGUF container, versions 2 and 3, little-endian: metadata and where each tensor's bytes lie. Knows no model.

Files are untrusted. Every count, length and offset is compared with the rest of the file, in Python's unbounded integers, before
anything of that size is allocated. A false header costs no more time and memory than a true one.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from cpuspec.checkpoints.mapped import map_file
from cpuspec.errors import CheckpointError
from cpuspec.formats import FORMATS, QuantTensor
from cpuspec.formats.format import OWN_GGUF_TYPES
from cpuspec.formats.tensor import U8

MAGIC = b"GGUF"

Value = int | float | bool | str | list[str] | NDArray

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS: dict[int, np.dtype] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("u1"),  # a boolean byte, checked to be 0 or 1
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}

_FORMATS = {row.gguf_type: row for row in FORMATS.values() if row.gguf_type is not None}

# Formats of ggml's own types. Types of this project are read, too.
GGUF_FORMATS = tuple(row.name for number, row in _FORMATS.items() if number < OWN_GGUF_TYPES)

_OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
}  # fmt: skip

# Ollama's number of mxfp4 whose bytes hold neighbours, as gpt-oss is published. To ggml it was q4_2, before GGUF files.
_OLLAMA_MXFP4 = 4

_INTEGERS: dict[int, np.dtype] = {24: np.dtype("i1"), 25: np.dtype("<i2"), 26: np.dtype("<i4"), 27: np.dtype("<i8")}

# Models have far less; a hostile file with this much is still quick to read.
_MAX_ENTRIES = 1 << 16
_MAX_STRINGS = 1 << 22
_MAX_KEY_BYTES = (1 << 16) - 1
_MAX_NAME_BYTES = 64
_MAX_ALIGNMENT = 1 << 20

# Prefixes that llama.cpp and Ollama give to tensors that process images or audio, or project them to the text model.
_VISION_AUDIO = ("v.", "a.", "mm.")

_COMPLETE = "a complete file: download it again"


@dataclass(frozen=True)
class GgufFile:
    """Metadata (key -> int, float, bool, str, list of str, or a numeric array) and tensors over the mapped bytes.

    Bytes of a tokenizer's lists that are no UTF-8 are lone surrogates ("surrogateescape"); those of other strings are U+FFFD.
    arrays: its vectors of integers. vision_audio: names of tensors that process images or audio, which are not read.
    remarks: a sentence for each thing that is read in another way than the file says. entries: the bytes of each entry of metadata.
    """

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, QuantTensor]
    arrays: dict[str, NDArray] = field(default_factory=dict)
    vision_audio: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    entries: dict[str, U8] = field(default_factory=dict)


def read_gguf(path: Path, mmap: bool = True) -> GgufFile:
    """Map a GGUF file, or read it, and check all of its structure. Raises CheckpointError naming the file, what, got and wanted."""
    data = map_file(path, mmap)
    cursor = _Cursor(path, data)
    magic = bytes(data[: len(MAGIC)])
    if magic != MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file: it starts with {magic!r}, wanted {MAGIC!r}")
    cursor.take(len(MAGIC), "magic")
    version = cursor.u32("version")
    if version & 0xFFFF == 0 and version:
        raise CheckpointError(f"{path} is a big-endian GGUF file; only little-endian ones are supported: convert the model again")
    if version not in (2, 3):
        raise CheckpointError(f"{path} is GGUF version {version}; versions 2 and 3 are supported: convert the model again")
    num_tensors = cursor.count("tensor count", 8 + 1 + 4 + 8 + 4 + 8, _MAX_ENTRIES)
    num_entries = cursor.count("metadata count", 8 + 1 + 4 + 1, _MAX_ENTRIES)

    metadata: dict[str, Value] = {}
    entries: dict[str, U8] = {}
    for i in range(num_entries):
        start = cursor.position
        key = cursor.string(f"key of metadata entry {i}", _MAX_KEY_BYTES)
        if not key or not key.isprintable() or key in metadata:
            cursor.fail(f"metadata entry {i} has the key {key[:80]!r}", "printable text that is not empty and used once")
        metadata[key] = cursor.value(key)
        entries[key] = data[start : cursor.position]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {alignment!r}", f"a power of two from 1 to {_MAX_ALIGNMENT}")

    infos = []
    names = set()
    for i in range(num_tensors):
        name = cursor.string(f"name of tensor {i}", _MAX_NAME_BYTES)
        if not name or not name.isprintable() or name in names:
            cursor.fail(f"tensor {i} has the name {name!r}", "printable text that is not empty and used once")
        names.add(name)
        infos.append((name, *_tensor_info(cursor, name, alignment)))
    arrays: dict[str, NDArray] = {}
    vision_audio = tuple(name for name, *_ in infos if name.startswith(_VISION_AUDIO))
    tensors = _map_tensors(cursor, data, [info for info in infos if not info[0].startswith(_VISION_AUDIO)], alignment, arrays)
    return GgufFile(path, metadata, tensors, arrays, vision_audio, tuple(cursor.remarks), entries)


def _tensor_info(cursor: "_Cursor", name: str, alignment: int) -> tuple[tuple[int, ...], int, int]:
    """Shape (numpy order), type number and offset of the next tensor."""
    num_dims = cursor.u32(f"dimensions of tensor {name}")
    if not 1 <= num_dims <= 4:
        cursor.fail(f"tensor {name} has {num_dims} dimensions", "1 to 4")
    shape = tuple(cursor.u64(f"dimension {d} of tensor {name}") for d in range(num_dims))[::-1]
    if 0 in shape:
        cursor.fail(f"tensor {name} has the shape {list(shape)}", "sizes above zero")
    type_number = cursor.u32(f"type of tensor {name}")
    offset = cursor.u64(f"offset of tensor {name}")
    if offset % alignment:
        cursor.fail(f"tensor {name} lies at offset {offset}", f"a multiple of the file's alignment {alignment}")
    return shape, type_number, offset


def _map_tensors(
    cursor: "_Cursor", data: U8, infos: list[tuple[str, tuple[int, ...], int, int]], alignment: int, arrays: dict[str, NDArray]
) -> dict[str, QuantTensor]:
    """Views of `data` for every tensor, after checking that they lie inside the file and apart from each other.

    arrays: gets vectors of integers.
    """
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {}
    extents = []
    for name, shape, type_number, offset in infos:
        integers = _INTEGERS.get(type_number) if len(shape) == 1 else None
        if integers is not None:
            start, end = data_start + offset, data_start + offset + shape[0] * integers.itemsize
            if end > len(data):
                cursor.fail(f"tensor {name} needs bytes {start} to {end} of a file of {len(data)}", _COMPLETE)
            extents.append((start, end, name))
            arrays[name] = data[start:end].view(integers)
            continue
        format = _FORMATS.get(39 if type_number == _OLLAMA_MXFP4 else type_number)
        if format is None:
            type_name = _OTHER_TYPES.get(type_number, f"number {type_number}")
            raise CheckpointError(
                f"{cursor.path}: tensor {name} has the type {type_name}; supported are {', '.join(GGUF_FORMATS).upper()}"
            )
        type_name = format.name.upper()
        if shape[-1] % format.block_size:
            cursor.fail(f"{type_name} tensor {name} has rows of {shape[-1]}", f"a multiple of {format.block_size}")
        row_bytes = format.row_bytes(shape[-1])
        num_bytes = math.prod(shape[:-1]) * row_bytes
        start = data_start + offset
        if start + num_bytes > len(data):
            cursor.fail(
                f"tensor {name} ({type_name} {list(shape)}) needs bytes {start} to {start + num_bytes} of a file of {len(data)}",
                _COMPLETE,
            )
        if len(shape) > 3:
            cursor.fail(f"tensor {name} has the shape {list(shape)}", "a vector, a matrix, or one of each expert")
        extents.append((start, start + num_bytes, name))
        blocks = data[start : start + num_bytes]
        blocks = _halves_apart(blocks) if type_number == _OLLAMA_MXFP4 else blocks
        tensors[name] = QuantTensor(format, shape, blocks.reshape(*shape[:-1], row_bytes))
    extents.sort()
    for (_, end, name), (start, _, following) in pairwise(extents):
        if start < end:
            cursor.fail(f"tensors {name} and {following} overlap at byte {start}", "bytes of their own for each tensor")
    return tensors


def _halves_apart(data: U8) -> U8:
    """A copy of Ollama's mxfp4 blocks in ggml's order: with values 0..15 in the low and 16..31 in the high halves of bytes."""
    ordered = np.empty(data.shape, np.uint8)
    step = 17 << 16
    for start in range(0, len(data), step):
        blocks, to = (some[start : start + step].reshape(-1, 17) for some in (data, ordered))
        codes = np.stack([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], axis=2).reshape(-1, 32)
        to[:, 0], to[:, 1:] = blocks[:, 0], codes[:, :16] | codes[:, 16:] << 4
    return ordered


class _Cursor:
    """A position in the file's header that cannot be moved past the end."""

    def __init__(self, path: Path, data: U8) -> None:
        self.path = path
        self.position = 0
        self.remarks: list[str] = []
        self._view = memoryview(data.data)
        self._size = len(data)

    def fail(self, got: str, wanted: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {got}, wanted {wanted}")

    def take(self, num_bytes: int, what: str) -> int:
        """Where `num_bytes` of `what` begin. The position moves past them."""
        start = self.position
        if num_bytes > self._size - start:
            self.fail(f"{what} needs {num_bytes} bytes at byte {start} of a file of {self._size}", _COMPLETE)
        self.position = start + num_bytes
        return start

    def u32(self, what: str) -> int:
        return _U32.unpack_from(self._view, self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return _U64.unpack_from(self._view, self.take(8, what))[0]

    def count(self, what: str, item_bytes: int, limit: int) -> int:
        """A u64 count of items of at least `item_bytes` each, that the rest of the file can hold."""
        count = self.u64(what)
        possible = min((self._size - self.position) // item_bytes, limit)
        if count > possible:
            self.fail(f"{what} is {count} at byte {self.position - 8} of a file of {self._size}", f"at most {possible}")
        return count

    def string(self, what: str, max_bytes: int | None = None, replaces: bool = False) -> str:
        """A string. replaces: bytes that are no UTF-8 become U+FFFD, with a remark."""
        length = self.u64(f"length of the {what}")
        if max_bytes is not None and length > max_bytes:
            self.fail(f"{what} is {length} bytes long", f"at most {max_bytes}")
        start = self.take(length, what)
        try:
            return str(self._view[start : self.position], "utf-8")
        except UnicodeDecodeError as error:
            if not replaces:
                self.fail(f"{what} is not UTF-8 ({error.reason} at byte {start + error.start})", "UTF-8 text")
            self.remarks.append(f"{self.path}: {what[:80]} is not UTF-8; bytes that are no text are replaced")
            return str(self._view[start : self.position], "utf-8", "replace")

    def value(self, key: str) -> Value:
        value_type = self.u32(f"type of {key}")
        if value_type == STRING:
            return self.string(key, replaces=True)
        if value_type == ARRAY:
            return self._array(key)
        return self._numbers(key, value_type, 1)[0].item() if value_type != BOOL else bool(self._numbers(key, value_type, 1)[0])

    def _array(self, key: str) -> list[str] | NDArray:
        item_type = self.u32(f"item type of {key}")
        if item_type == ARRAY:
            self.fail(f"{key} is an array of arrays", "an array of numbers or strings")
        if item_type == STRING:
            return self._strings(key, self.count(f"length of {key}", 8, _MAX_STRINGS))
        dtype = self._scalar_type(key, item_type)
        return self._numbers(key, item_type, self.count(f"length of {key}", dtype.itemsize, self._size))

    def _scalar_type(self, key: str, value_type: int) -> np.dtype:
        if value_type not in SCALARS:
            self.fail(f"{key} has the value type {value_type}", "a type from 0 to 12")
        return SCALARS[value_type]

    def _numbers(self, key: str, value_type: int, count: int) -> NDArray:
        """A view of `count` numbers; booleans come as a bool array."""
        dtype = self._scalar_type(key, value_type)
        start = self.take(count * dtype.itemsize, key)
        numbers = np.frombuffer(self._view[start : self.position], dtype)
        if value_type == BOOL:
            if (numbers > 1).any():
                self.fail(f"{key} is a boolean with the byte {numbers.max()}", "0 or 1")
            return numbers.astype(bool)
        return numbers

    def _strings(self, key: str, count: int) -> list[str]:
        # A vocabulary has hundreds of thousands of short strings, so this loop repeats `string` inline.
        view, size, position = self._view, self._size, self.position
        length_at = _U64.unpack_from
        strings: list[str] = []
        stray = 0
        try:
            for _ in range(count):
                start = position + 8
                position = start + length_at(view, position)[0]
                if position > size:
                    self.fail(f"string {len(strings)} of {key} ends at byte {position} of a file of {size}", _COMPLETE)
                try:
                    strings.append(str(view[start:position], "utf-8"))
                except UnicodeDecodeError:
                    # The bytes of tokens count.
                    errors = "surrogateescape" if key.startswith("tokenizer.") else "replace"
                    strings.append(str(view[start:position], "utf-8", errors))
                    stray += 1
        except struct.error:
            self.fail(f"string {len(strings)} of {key} begins at byte {position} of a file of {size}", _COMPLETE)
        if stray:
            self.remarks.append(f"{self.path}: {stray} strings of {key[:80]} are not UTF-8")
        self.position = position
        return strings
