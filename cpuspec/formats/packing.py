"""The order in which kernels read weights, and its inverse. Packing moves the bits of the file's format and changes none.

A tile is 16 consecutive output rows; one 64-byte load holds four bytes of each. A tile is a row of panels of 256 inputs (the last
may be shorter), and a panel is the planes of the format's row one after another: codes first, then scales, each [steps along the
inputs][16 rows]. So all bytes that a kernel reads of neighbouring tiles are contiguous, and prefetchers follow it. Matrices are
padded to whole tiles, and panels to whole cache lines, with zero bytes.

Codes of a group of 32 inputs, for lane (row) r and byte b of 0..3:
  nibbles   load j of 0..3: low half = input 8j + b, high half = input 8j + 4 + b
  bytes     load v of 0..7: input 4v + b
  one bit   one load: bit 8b + v = that bit of the code of input 4v + b
  pairs     16 bytes p of 0..15: of each row a byte whose low half is input 2p and whose high half is input 2p + 1
  two bits  load h of 0..1: bits 8b + 2v and 8b + 2v + 1 = those bits of the code of input 16h + 4v + b, v of 0..3

Numbers of 16 bits that are multiplied in pairs (bf16) lie in pairs: load p of a group has inputs 2p and 2p + 1 of each row.
"""

import math
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats.format import U8, Format, Plane
from cpuspec.formats.tensor import QuantTensor
from cpuspec.platform import SYSTEM

TILE = 16
GROUP = 32
PANEL = 256
_ROWS_AT_ONCE = 512  # of a matrix that are split into parts together

_U32 = np.dtype("<u4")


def bits(number: int, at: int = 0) -> Plane:
    """A plane of `number` bits of the codes, from bit `at` on: 8 / number words of four codes become one word."""
    mask, shifts = np.uint32(0x01010101 * (2**number - 1)), [np.uint32(shift) for shift in range(0, 8, number)]

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

    return Plane("codes", number, lay, lift, at=at)


def nibble_pairs() -> Plane:
    """A plane of 4-bit codes, two neighbours in a byte, for kernels that convert codes to floats one input after another."""

    def lay(codes: U8) -> NDArray[Any]:
        return _to_lanes(codes[:, 0::2] | codes[:, 1::2] << np.uint8(4))

    def lift(plane: U8) -> NDArray[Any]:
        packed = _from_lanes(plane)
        return np.stack([packed & 0x0F, packed >> np.uint8(4)], axis=2).reshape(len(packed), -1)

    return Plane("codes", 4, lay, lift)


def lanes(part: str, dtype: str, inputs: int) -> Plane:
    """A plane with one number of the part for every `inputs` inputs."""
    bits = 8 * np.dtype(dtype).itemsize / inputs
    return Plane(part, bits, _to_lanes, lambda plane: _from_lanes(plane.view(dtype)), dtype, inputs)


def words(part: str, number: float, dtype: str) -> Plane:
    """A plane of the part's own bytes, `number` bits for each weight, four bytes of a row side by side."""

    def lay(numbers: NDArray[Any]) -> NDArray[Any]:
        return _to_lanes(np.ascontiguousarray(numbers).view(_U32))

    def lift(plane: U8) -> NDArray[Any]:
        return np.ascontiguousarray(_from_lanes(plane.view(_U32))).view(dtype)

    return Plane(part, number, lay, lift)


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """A matrix [N, K], or one of each expert [E, N, K], as kernels read it: U8 [tiles, tile_bytes], starting at a multiple of 64
    bytes. Each expert is a range of tiles; all ranges have the same length. copies_apart: bytes from these tiles to a copy of them,
    and from there to the next copy; 0 where there is none.
    """

    format: Format
    shape: tuple[int, ...]
    data: U8
    copies_apart: int = 0

    @property
    def num_matrices(self) -> int:
        """Experts; 1 of a matrix."""
        return math.prod(self.shape[:-2])

    @property
    def num_tiles(self) -> int:
        """Tiles of one matrix."""
        return len(self.data) // self.num_matrices

    @property
    def tile_bytes(self) -> int:
        """Bytes from one tile to the next."""
        return self.data.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tiles, padding included."""
        return self.data.nbytes


def round_up(value: int, to: int) -> int:
    """The least multiple of `to` that is not below a value."""
    return -(-value // to) * to


def panel_bytes(format: Format, inputs: int = PANEL) -> int:
    """Bytes of a panel of a tile, rounded up to whole cache lines."""
    return -(-sum(_plane_bytes(plane, inputs) for plane in format.planes) // 64) * 64


def tile_bytes(format: Format, in_features: int) -> int:
    """Bytes of a tile: its whole panels and the rest."""
    in_features = _padded(format, in_features)
    return in_features // PANEL * panel_bytes(format) + panel_bytes(format, in_features % PANEL)


def num_tiles(shape: tuple[int, ...]) -> int:
    """Tiles of a matrix, or of those of all experts, each padded to whole tiles."""
    return math.prod(shape[:-2]) * -(-shape[-2] // TILE)


def pack(tensor: QuantTensor) -> PackedTensor:
    """The matrix in kernel order, or the matrices of all experts. Raises nothing: a QuantTensor has whole blocks."""
    data = aligned_bytes((num_tiles(tensor.shape), tile_bytes(tensor.format, tensor.shape[-1])))
    matrices = tensor.matrices
    for matrix, tiles in zip(matrices, data.reshape(len(matrices), -1, data.shape[1]), strict=True):
        _pack_matrix(matrix, tiles)
    return PackedTensor(tensor.format, tensor.shape, data)


def _pack_matrix(tensor: QuantTensor, data: U8) -> None:
    """Write the tiles of a matrix."""
    rows, in_features = tensor.shape
    format = tensor.format
    laid_features = _padded(format, in_features)
    for first in range(0, rows, _ROWS_AT_ONCE):
        block = tensor.data[first : first + _ROWS_AT_ONCE]
        missing = -len(block) % TILE, format.row_bytes(laid_features) - block.shape[1]
        if any(missing):
            block = np.pad(block, ((0, missing[0]), (0, missing[1])))
        parts = format.split(block)
        tiles = data[first // TILE : (first + len(block)) // TILE]
        laid = [
            np.ascontiguousarray(plane.lay(parts[plane.part])).view(np.uint8).reshape(len(tiles), -1) for plane in format.planes
        ]
        written = 0
        for number, at, start, size in _places(format, laid_features):
            tiles[:, written:at] = 0  # the padding of a panel
            tiles[:, at : at + size] = laid[number][:, start : start + size]
            written = at + size
        tiles[:, written:] = 0


def unpack(packed: PackedTensor) -> QuantTensor:
    """The inverse of `pack`, to the byte."""
    if len(packed.shape) == 3:
        tiles = packed.data.reshape(packed.num_matrices, -1, packed.tile_bytes)
        return QuantTensor.stack([unpack(PackedTensor(packed.format, packed.shape[1:], one)) for one in tiles])
    rows, in_features = packed.shape
    format = packed.format
    laid_features = _padded(format, in_features)
    laid = [np.empty((len(packed.data), _plane_bytes(plane, laid_features)), np.uint8) for plane in format.planes]
    for number, at, start, size in _places(format, laid_features):
        laid[number][:, start : start + size] = packed.data[:, at : at + size]
    parts: dict[str, NDArray[Any]] = {}
    for plane, stored in zip(format.planes, laid, strict=True):
        lifted = plane.lift(stored)
        parts[plane.part] = parts[plane.part] | lifted if plane.part in parts else lifted
    data = format.join(parts)[:rows, : format.row_bytes(in_features)]
    return QuantTensor(format, (rows, in_features), np.ascontiguousarray(data))


def _places(format: Format, in_features: int) -> Iterator[tuple[int, int, int, int]]:
    """The pieces of a tile in order: (number of the plane, offset in the tile, offset in the whole plane, bytes)."""
    planes = format.planes
    panel = 0
    for first in range(0, in_features, PANEL):
        inputs = min(PANEL, in_features - first)
        at = panel
        for number, plane in enumerate(planes):
            size = _plane_bytes(plane, inputs)
            yield number, at, _plane_bytes(plane, first), size
            at += size
        panel += panel_bytes(format, inputs)


def aligned_bytes(shape: tuple[int, ...]) -> U8:
    """An uninitialised byte array that starts at a multiple of 64."""
    size = math.prod(shape)
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].reshape(shape)


def paged_bytes(shape: tuple[int, ...]) -> U8:
    """Zeros that take up memory page by page, as they are written: for arrays that may stay mostly empty.

    Raises MemoryError, as NumPy does.
    """
    return _pages(shape, SYSTEM.zeroed_pages)


def reserved_bytes(shape: tuple[int, ...]) -> U8:
    """Zeros that take up no memory and must not be touched until `commit` was called for them: for arrays of the largest size.

    Raises MemoryError, as NumPy does.
    """
    return _pages(shape, SYSTEM.reserved_pages)


def commit(reserved: U8) -> None:
    """Let a contiguous part of `reserved_bytes` be used from now on. Raises MemoryError."""
    try:
        if reserved.nbytes:
            SYSTEM.commit_pages(reserved.ctypes.data, reserved.nbytes)
    except OSError as error:
        raise MemoryError(f"no memory for {reserved.nbytes} bytes: {error}") from None


def decommit(reserved: U8) -> None:
    """Give back the whole pages of a contiguous part of `reserved_bytes`. Nothing reads it before it is committed and written."""
    first, size = reserved.ctypes.data, mmap.PAGESIZE
    start, end = -(-first // size) * size, (first + reserved.nbytes) // size * size
    if start < end:
        SYSTEM.decommit_pages(start, end - start)


def _pages(shape: tuple[int, ...], of_bytes: Callable[[int], Any]) -> U8:
    try:
        memory = of_bytes(max(math.prod(shape), 1))
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no memory for {math.prod(shape)} bytes: {error}") from None
    return np.frombuffer(memory, np.uint8, math.prod(shape)).reshape(shape)


def _padded(format: Format, in_features: int) -> int:
    """The number of inputs after padding."""
    return -(-in_features // format.padded_to) * format.padded_to


def _plane_bytes(plane: Plane, in_features: int) -> int:
    return int(plane.bits * TILE * in_features) // 8


def _to_lanes(values: NDArray[Any]) -> NDArray[Any]:
    """[16n, steps] -> [n, steps, 16]."""
    return values.reshape(-1, TILE, values.shape[1]).transpose(0, 2, 1)


def _from_lanes(plane: NDArray[Any]) -> NDArray[Any]:
    """[n, steps * 16] -> [16n, steps]."""
    return plane.reshape(len(plane), -1, TILE).transpose(0, 2, 1).reshape(len(plane) * TILE, -1)
