"""The order in which kernels read weights, and its inverse. Every bit of the file's format is kept; only places change.

A tile is 16 consecutive output rows; one 64-byte load holds four bytes of each. A tile is a row of stretches of 256 inputs (the
last may be shorter), and a stretch is a few planes one after another: codes first, then scales, each [steps along the
inputs][16 rows]. So whatever a kernel reads of neighbouring tiles lies in one piece, which is what prefetchers follow.
Matrices are padded to whole tiles, and stretches to whole cache lines, with zero bytes.

Codes of a group of 32 inputs, for lane (row) r and byte b of 0..3:
  nibbles   load j of 0..3: low half = input 8j + b, high half = input 8j + 4 + b
  bytes     load v of 0..7: input 4v + b
  one bit   one load: bit 8b + v = that bit of the code of input 4v + b
  two bits  load h of 0..1: bits 8b + 2v and 8b + 2v + 1 = those bits of the code of input 16h + 4v + b, v of 0..3

Numbers of 16 bits that are multiplied in pairs (bf16) lie in pairs: load p of a group has inputs 2p and 2p + 1 of each row.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats import FORMATS, Format, QuantTensor, int4, kquants, legacy, lowbit, mx
from cpuspec.formats.tensor import U8

TILE = 16
GROUP = 32
STRETCH = 256

_U32 = np.dtype("<u4")

Parts = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Plane:
    """One stretch of a tile: where a part, or some bits of it, goes."""

    part: str
    bits: float  # per weight
    lay: Callable[[NDArray[Any]], NDArray[Any]]  # part of 16n rows -> [n, steps, 16]
    lift: Callable[[NDArray[Any]], NDArray[Any]]  # the inverse


@dataclass(frozen=True)
class Packing:
    """How one format is taken apart, laid out for kernels, and put back."""

    planes: tuple[Plane, ...]
    split: Callable[[U8], Parts]  # U8 [N, row_bytes] -> arrays [N, ...] by part name
    join: Callable[[Parts], U8]
    step: int = 1  # inputs are padded with zeros to a multiple of this


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """A matrix [N, K] as kernels read it: U8 [tiles, tile_bytes], starting at a multiple of 64 bytes."""

    format: Format
    shape: tuple[int, int]
    data: U8

    @property
    def tile_bytes(self) -> int:
        """From one tile to the next."""
        return self.data.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tiles, padding included."""
        return self.data.nbytes


def stretch_bytes(format: Format, inputs: int = STRETCH) -> int:
    """Bytes of a stretch of a tile, rounded up to whole cache lines."""
    return -(-sum(_plane_bytes(plane, inputs) for plane in PACKINGS[format.name].planes) // 64) * 64


def tile_bytes(format: Format, in_features: int) -> int:
    """Bytes of a tile: its whole stretches and the rest."""
    in_features = _padded(format, in_features)
    return in_features // STRETCH * stretch_bytes(format) + stretch_bytes(format, in_features % STRETCH)


def pack(tensor: QuantTensor, rows_at_once: int = 512) -> PackedTensor:
    """The matrix in kernel order. Raises nothing: a QuantTensor has whole blocks."""
    rows, in_features = tensor.shape
    packing = PACKINGS[tensor.format.name]
    laid_features = _padded(tensor.format, in_features)
    data = aligned_bytes((-(-rows // TILE), tile_bytes(tensor.format, in_features)))
    for first in range(0, rows, rows_at_once):
        block = tensor.data[first : first + rows_at_once]
        missing = -len(block) % TILE, tensor.format.row_bytes(laid_features) - block.shape[1]
        if any(missing):
            block = np.pad(block, ((0, missing[0]), (0, missing[1])))
        parts = packing.split(np.ascontiguousarray(block))
        tiles = data[first // TILE : (first + len(block)) // TILE]
        laid = [
            np.ascontiguousarray(plane.lay(parts[plane.part])).view(np.uint8).reshape(len(tiles), -1) for plane in packing.planes
        ]
        written = 0
        for number, at, start, size in _places(tensor.format, laid_features):
            tiles[:, written:at] = 0  # what rounds a stretch up
            tiles[:, at : at + size] = laid[number][:, start : start + size]
            written = at + size
        tiles[:, written:] = 0
    return PackedTensor(tensor.format, (rows, in_features), data)


def unpack(packed: PackedTensor) -> QuantTensor:
    """The inverse of `pack`, to the byte."""
    rows, in_features = packed.shape
    packing, laid_features = PACKINGS[packed.format.name], _padded(packed.format, in_features)
    laid = [np.empty((len(packed.data), _plane_bytes(plane, laid_features)), np.uint8) for plane in packing.planes]
    for number, at, start, size in _places(packed.format, laid_features):
        laid[number][:, start : start + size] = packed.data[:, at : at + size]
    parts: Parts = {}
    for plane, stored in zip(packing.planes, laid, strict=True):
        lifted = plane.lift(stored)
        parts[plane.part] = parts[plane.part] | lifted if plane.part in parts else lifted
    data = packing.join(parts)[:rows, : packed.format.row_bytes(in_features)]
    return QuantTensor(packed.format, (rows, in_features), np.ascontiguousarray(data))


def _places(format: Format, in_features: int) -> Iterator[tuple[int, int, int, int]]:
    """In the order of a tile: (number of the plane, where its piece lies in the tile, and in the whole plane, bytes)."""
    planes = PACKINGS[format.name].planes
    stretch = 0
    for first in range(0, in_features, STRETCH):
        inputs = min(STRETCH, in_features - first)
        at = stretch
        for number, plane in enumerate(planes):
            size = _plane_bytes(plane, inputs)
            yield number, at, _plane_bytes(plane, first), size
            at += size
        stretch += stretch_bytes(format, inputs)


def aligned_bytes(shape: tuple[int, ...]) -> U8:
    """An uninitialised byte array that starts at a multiple of 64."""
    size = math.prod(shape)
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].reshape(shape)


def _padded(format: Format, in_features: int) -> int:
    """Inputs as they are laid out."""
    step = PACKINGS[format.name].step
    return -(-in_features // step) * step


def _plane_bytes(plane: Plane, in_features: int) -> int:
    return int(plane.bits * TILE * in_features) // 8


def _to_lanes(values: NDArray[Any]) -> NDArray[Any]:
    """[16n, steps] -> [n, steps, 16]."""
    return values.reshape(-1, TILE, values.shape[1]).transpose(0, 2, 1)


def _from_lanes(plane: NDArray[Any]) -> NDArray[Any]:
    """[n, steps * 16] -> [16n, steps]."""
    return plane.reshape(len(plane), -1, TILE).transpose(0, 2, 1).reshape(len(plane) * TILE, -1)


def _bits(bits: int, at: int = 0) -> Plane:
    """So many bits of the codes, from bit `at` on: 8 / bits words of four codes become one."""
    mask, shifts = np.uint32(0x01010101 * (2**bits - 1)), [np.uint32(shift) for shift in range(0, 8, bits)]

    def lay(codes: U8) -> NDArray[Any]:
        words = np.ascontiguousarray(codes).view(_U32).reshape(len(codes), -1, len(shifts))
        laid = words[:, :, 0] >> np.uint32(at) & mask
        for v, shift in enumerate(shifts[1:], 1):
            laid |= (words[:, :, v] >> np.uint32(at) & mask) << shift
        return _to_lanes(laid)

    def lift(plane: U8) -> NDArray[Any]:
        laid = _from_lanes(plane.view(_U32))
        words = np.stack([(laid >> shift & mask) << np.uint32(at) for shift in shifts], axis=2)
        return words.view(np.uint8).reshape(len(laid), -1)

    return Plane("codes", bits, lay, lift)


def _lanes(part: str, dtype: str, inputs: int) -> Plane:
    """A plane of one number for every `inputs` inputs."""
    typ = np.dtype(dtype)
    return Plane(part, typ.itemsize * 8 / inputs, _to_lanes, lambda plane: _from_lanes(plane.view(typ)))


def _words(part: str, bits: float) -> Plane:
    """A plane of bytes as they are, four of a row side by side."""

    def lift(plane: U8) -> U8:
        return np.ascontiguousarray(_from_lanes(plane.view(_U32))).view(np.uint8)

    return Plane(part, bits, lambda data: _to_lanes(data.view(_U32)), lift)


_NIBBLES, _BYTES = _bits(4), _bits(8)
_FEW_BITS = {2: (_bits(2),), 3: (_bits(2), _bits(1, at=2))}


def _blocks(layout: np.dtype[Any], codes: Callable[..., U8], encode: Callable[[U8], Parts], *planes: Plane) -> Packing:
    """Blocks of codes and single numbers; `codes` reads them unsigned [n, block], `encode` gives their fields back."""
    numbers = [name for name in layout.names or () if name not in ("codes", "high")]
    block = codes(np.zeros(1, layout)).size

    def split(data: U8) -> Parts:
        fields = data.view(layout)
        return {"codes": codes(fields).reshape(len(data), -1)} | {name: fields[name] for name in numbers}

    def join(parts: Parts) -> U8:
        rows = len(parts["codes"])
        fields = np.empty((rows, parts["codes"].shape[1] // block), layout)
        for name in numbers:
            fields[name] = parts[name]
        for name, values in encode(parts["codes"].reshape(-1, block)).items():
            fields[name] = values.reshape(fields[name].shape)
        return fields.view(np.uint8).reshape(rows, -1)

    return Packing((*planes, *(_lanes(name, layout[name].str, block) for name in numbers)), split, join)


def _k(layout: np.dtype[Any], codes: Callable[..., U8], encode: Callable[[U8], Parts], *planes: Plane) -> Packing:
    """Superblocks of 256 with eight 6-bit scales and minima."""

    def split(data: U8) -> Parts:
        fields = data.view(layout)
        scales, minima = kquants.unpack_scales(fields["scales"].reshape(-1, 12))
        return {
            "codes": codes(fields).reshape(len(data), -1),
            "scales": scales.reshape(len(data), -1),
            "minima": minima.reshape(len(data), -1),
            "d": fields["d"],
            "dmin": fields["dmin"],
        }

    def join(parts: Parts) -> U8:
        rows = len(parts["codes"])
        fields = np.empty(parts["d"].shape, layout)
        fields["d"], fields["dmin"] = parts["d"], parts["dmin"]
        packed = kquants.pack_scales(parts["scales"].reshape(-1, 8), parts["minima"].reshape(-1, 8))
        fields["scales"] = packed.reshape(*fields.shape, 12)
        for name, values in encode(parts["codes"].reshape(-1, 8, 32)).items():
            fields[name] = values.reshape(fields[name].shape)
        return fields.view(np.uint8).reshape(rows, -1)

    scales = (_lanes("scales", "u1", 32), _lanes("minima", "u1", 32), _lanes("d", "<f2", 256), _lanes("dmin", "<f2", 256))
    return Packing((*planes, *scales), split, join)


def _superblocks(layout: np.dtype[Any], codes: Callable[..., U8], encode: Callable[[U8], Parts], *planes: Plane) -> Packing:
    """Superblocks of 256 whose scales stay as the file has them; `codes` reads codes, `encode` gives their fields back."""
    others = [name for name in ("scales", "d", "dmin") if name in (layout.names or ())]

    def split(data: U8) -> Parts:
        fields = data.view(layout)
        return {"codes": codes(fields).reshape(len(data), -1)} | {name: fields[name].reshape(len(data), -1) for name in others}

    def join(parts: Parts) -> U8:
        rows = len(parts["codes"])
        fields = np.empty(parts["d"].shape, layout)
        codes_fields = encode(parts["codes"].reshape(-1, kquants.SUPERBLOCK))
        for name, values in (codes_fields | {name: parts[name] for name in others}).items():
            fields[name] = values.reshape(fields[name].shape)
        return fields.view(np.uint8).reshape(rows, -1)

    return Packing((*planes, *(_lanes(name, "<f2", 256) for name in others[1:])), split, join)


def _numbers(dtype: str) -> Packing:
    """One number a weight."""
    typ = np.dtype(dtype)
    return Packing(
        (_lanes("values", dtype, 1),),
        lambda data: {"values": data.view(typ)},
        lambda parts: np.ascontiguousarray(parts["values"]).view(np.uint8),
    )


def _pairs() -> Packing:
    """Numbers of two bytes, two of a row side by side, in whole groups."""
    return Packing((_words("values", 16),), lambda data: {"values": data}, lambda parts: parts["values"], step=GROUP)


PACKINGS: Mapping[str, Packing] = MappingProxyType(
    {
        "f32": _numbers("<u4"),
        "f16": _numbers("<u2"),
        "bf16": _pairs(),
        "q4_0": _blocks(legacy.Q4_0_LAYOUT, legacy.codes_4_bits, legacy.fields_4_bits, _NIBBLES),
        "q4_1": _blocks(legacy.Q4_1_LAYOUT, legacy.codes_4_bits, legacy.fields_4_bits, _NIBBLES),
        "q5_0": _blocks(legacy.Q5_0_LAYOUT, legacy.codes_5_bits, legacy.fields_5_bits, _NIBBLES, _bits(1, at=4)),
        "q5_1": _blocks(legacy.Q5_1_LAYOUT, legacy.codes_5_bits, legacy.fields_5_bits, _NIBBLES, _bits(1, at=4)),
        # Codes move by 128 so that they are unsigned, as the dot product of bytes wants one side.
        "q8_0": _blocks(
            legacy.Q8_0_LAYOUT,
            lambda fields: fields["codes"].reshape(-1, GROUP).view(np.uint8) ^ 0x80,
            lambda codes: {"codes": (codes ^ 0x80).view(np.int8)},
            _BYTES,
        ),
        "q2_k": _superblocks(kquants.Q2_K_LAYOUT, kquants.codes_q2_k, kquants.fields_q2_k, _bits(2), _lanes("scales", "u1", 16)),
        "q3_k": _superblocks(
            kquants.Q3_K_LAYOUT,
            kquants.codes_q3_k,
            kquants.fields_q3_k,
            _bits(2),
            _bits(1, at=2),
            _words("scales", 96 / 256),
        ),
        "q4_k": _k(kquants.Q4_K_LAYOUT, kquants.codes_q4_k, kquants.fields_q4_k, _NIBBLES),
        "q5_k": _k(kquants.Q5_K_LAYOUT, kquants.codes_q5_k, kquants.fields_q5_k, _NIBBLES, _bits(1, at=4)),
        "q6_k": _superblocks(
            kquants.Q6_K_LAYOUT, kquants.codes_q6_k, kquants.fields_q6_k, _NIBBLES, _bits(2, at=4), _lanes("scales", "i1", 16)
        ),
        "mxfp4": _blocks(mx.MXFP4_LAYOUT, legacy.codes_4_bits, legacy.fields_4_bits, _NIBBLES),
        **{name: _blocks(layout, int4.codes_in_order, int4.fields_in_order, _NIBBLES) for name, layout in int4.LAYOUTS.items()},
        **{
            name: _blocks(layout, *lowbit.CODES[lowbit.code_bits(layout)], *_FEW_BITS[lowbit.code_bits(layout)])
            for name, layout in lowbit.LAYOUTS.items()
        },
    }
)

if PACKINGS.keys() != FORMATS.keys():
    raise AssertionError(f"formats without a packing: {FORMATS.keys() ^ PACKINGS.keys()}")
