"""A weight format as one row of a table: the layout of a block in files, the meaning of its numbers, and their order for kernels.

A block is a record of `layout`. Its parts are `codes` and the factors of one formula, under the names that they have in the formula
(`Scales`):

    value = d * s * level(code) - base * z * zero

d and base belong to a block, s and z to a group within it. In f32 every product is exact, so a value is the file's, bit for bit.
A new format is a file beside this one with its row, and a line in `formats.FORMATS`. Splitting and joining blocks, packing,
decoding and kernels follow from the row where its factors are plain numbers. Packed factors take functions: `to_parts` and
`to_fields`, one in `kernels.readers`, and one in `kernels.embed` for compiled decoding of embeddings. A rounding encoder is a
function; a search for scales follows from the affine form.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpuspec.errors import FormatError
from cpuspec.formats.search import F32, IN_NUMPY, Parts, Searches, inverse

U8 = NDArray[np.uint8]
I32 = NDArray[np.int32]

# Values decoded or encoded at a time: temporaries of this size stay in a core's cache, which is several times faster than
# streaming them through memory, and they bound the memory that a large tensor needs besides its result.
CHUNK_VALUES = 1 << 17

# Type numbers in GGUF files from this one on ("CP") are this project's; other readers refuse them.
OWN_GGUF_TYPES = 0x43500000


_MOST = float(np.finfo(np.float32).max)


def hadamard(rows: F32, size: int) -> F32:
    """Rows [..., D], each `size` numbers times Hadamard's matrix, which is its own inverse; 0: the same rows."""
    if size == 0:
        return rows
    turned, half = rows.reshape(-1, size), size // 2
    while half:
        pairs = turned.reshape(-1, 2, half)
        turned = np.empty_like(pairs)
        np.add(pairs[:, 0], pairs[:, 1], out=turned[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=turned[:, 1])
        half //= 2
    return (turned * (np.float32(1) / np.sqrt(np.float32(size)))).reshape(rows.shape)


@dataclass(frozen=True)
class CodeField:
    """The field of a block that holds all codes, or `bits` bits of each.

    A byte holds 8 / bits codes, the first in its lowest bits. They are `stride` codes apart: `stride` bytes hold the codes of
    stride * 8 / bits consecutive values, byte i those of values i, stride + i, 2 * stride + i and so on.
    """

    name: str
    bits: int
    stride: int = 1
    at: int = 0  # the lowest of the code's bits that the field holds
    flipped: int = 0  # the bits of each byte that are stored inverted: 0x80 turns signed bytes into codes

    def read(self, fields: NDArray[Any]) -> U8:
        """The bits of the codes in records [n], U8 [n, codes of a block], in their places of a code."""
        packed = fields[self.name].reshape(len(fields), -1, self.stride) ^ np.uint8(self.flipped)
        codes = np.empty((*packed.shape[:2], 8 // self.bits, self.stride), np.uint8)
        for number in range(8 // self.bits):
            codes[:, :, number] = (packed >> np.uint8(number * self.bits) & self._mask) << np.uint8(self.at)
        return codes.reshape(len(fields), -1)

    def write(self, codes: U8) -> U8:
        """The field of blocks whose codes are U8 [n, codes of a block]."""
        apart = (codes >> np.uint8(self.at) & self._mask).reshape(len(codes), -1, 8 // self.bits, self.stride)
        packed = np.full((*apart.shape[:2], self.stride), self.flipped, np.uint8)
        for number in range(8 // self.bits):
            packed ^= apart[:, :, number] << np.uint8(number * self.bits)
        return packed.reshape(len(codes), -1)

    @property
    def _mask(self) -> np.uint8:
        return np.uint8((1 << self.bits) - 1)


@dataclass(frozen=True)
class Plane:
    """The place of a part, or of some bits of the codes, in a packed panel: [steps along the inputs][16 rows].

    dtype: of a number. inputs: how many inputs share one. Of planes of codes `at` is the lowest of the code's bits that they hold.
    """

    part: str
    bits: float  # per weight
    lay: Callable[[NDArray[Any]], NDArray[Any]]  # part of 16n rows -> [n, steps, 16]
    lift: Callable[[NDArray[Any]], NDArray[Any]]  # the inverse
    dtype: str = ""
    inputs: int = 0
    at: int = 0


class Grid(NamedTuple):
    """The values that rows may have: scale * level(code) - offset, both F32 [rows, groups]."""

    scale: F32
    offset: F32


class Scales(NamedTuple):
    """The factors of the formula, of numpy or of another library: d and base [N, blocks], s and z [N, groups]."""

    d: Any
    s: Any = None  # None: 1
    base: Any = None  # None: d
    z: Any = None  # None: s


@dataclass(frozen=True)
class Affine:
    """The constants of the formula."""

    zero: float = 0.0
    levels: tuple[float, ...] | None = None  # None: a code is its own level

    def decode(self, parts: Parts) -> F32:
        """The values of rows, F32 [n, codes of a row].

        Without a base, the common scale is multiplied last. A scale that is negative or infinite then gives the zeros, infinities
        and nans that ggml gives.
        """
        d, s, base, z = scales_of(parts)
        scale = per_group(d, s)
        codes = parts["codes"].astype(np.float32) if self.levels is None else np.array(self.levels, np.float32)[parts["codes"]]
        values = codes.reshape(*scale.shape, -1)
        if base is not None:
            values *= scale[:, :, None]
            values -= (per_group(base, z) * np.float32(self.zero))[:, :, None]
        else:
            if self.zero:
                values -= np.float32(self.zero) if z is None else z.astype(np.float32)[:, :, None] * np.float32(self.zero)
            values *= scale[:, :, None]
        return values.reshape(len(values), -1)


def scales_of(parts: Parts) -> Scales:
    """The factors among the parts of rows."""
    return Scales(*(parts.get(name) for name in Scales._fields))


def per_group(blocks: NDArray[Any], groups: NDArray[Any] | None) -> F32:
    """Factors of blocks [n, blocks] times those of the groups within them [n, groups], F32 [n, groups]."""
    blocks = blocks.astype(np.float32)
    if groups is None:
        return blocks
    return (blocks[:, :, None] * groups.reshape(*blocks.shape, -1).astype(np.float32)).reshape(len(blocks), -1)


def _nothing(of: Any) -> Parts:
    """The default of `to_parts` and `to_fields`: every part equals the field of its name."""
    return {}


@dataclass(frozen=True, eq=False)
class Format:
    """A format: blocks of `block_size` consecutive values of a row, each a record of `layout`.

    Formats of the KV cache are neither packed nor stored in files, so they have no planes and no types.
    """

    name: str
    layout: np.dtype[Any]
    block_size: int
    encode_blocks: Callable[[F32], Parts] | None  # [n, block_size] -> the parts of n blocks; None: `searched` encodes
    affine: Affine | None = None  # the meaning of codes; None: `decode_numbers` has it
    code_fields: tuple[CodeField, ...] = ()  # none: the field `codes`, or `to_parts`, has the codes as they are, [n, block_size]
    to_parts: Callable[[NDArray[Any]], Parts] = _nothing  # records [n] -> the other parts that differ from the field of their name
    to_fields: Callable[[Parts], Parts] = _nothing  # the fields, other than `code_fields`, that differ from the part of their name
    decode_numbers: Callable[[Parts], F32] | None = None  # of a format of plain numbers: parts -> [n, 1]
    planes: tuple[Plane, ...] = ()  # the order in which packed weights hold the parts
    reader: str = "affine"  # how kernels read the planes: this, or an exception of `kernels.readers`
    padded_to: int = 1  # packed rows are padded with zeros to a multiple of this many inputs
    gguf_type: int | None = None  # the type of such a tensor in files, if they can hold it
    safetensors_dtype: str | None = None
    # (blocks, weights of their errors or None for ones, `Searches`) -> the parts with the least weighted error found. None: the
    # search that follows from the affine form.
    search: Callable[[F32, F32 | None, Searches], Parts] | None = None
    scale_range: tuple[int, int] | None = None  # the least and the greatest scale that multiplies d or base; None for no scales
    free_codes: bool = True  # each code is chosen independently; False for codebooks and rotated formats
    # A block holds its values times Hadamard's matrix. Parts, planes and the affine form are those of the rotated values; `decode`
    # and `encode` rotate. Kernels multiply them with rotated activations.
    rotated: bool = False

    def __post_init__(self) -> None:
        if (self.affine is None) == (self.decode_numbers is None):
            raise AssertionError(f"format {self.name} wants either an affine form or decode_numbers, to say what its codes mean")

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.layout.itemsize

    @property
    def bits(self) -> float:
        """Bits per weight, scales included."""
        return 8 * self.block_bytes / self.block_size

    @property
    def code_bits(self) -> int:
        """Bits of a code as kernels read it."""
        return int(max((plane.at + plane.bits for plane in self.planes if plane.part == "codes"), default=0))

    @cached_property
    def group_size(self) -> int:
        """Consecutive values that share a scale."""
        d, s, _, _ = scales_of(self.split(np.zeros((1, self.block_bytes), np.uint8)))
        return self.block_size // per_group(d, s).shape[1]

    @property
    def is_searched(self) -> bool:
        """Whether codes are so few that a search for scales pays."""
        return self.affine is not None and self.code_bits != 8

    def searched(self, blocks: F32, weights: F32 | None, find: Searches) -> Parts:
        """The parts of blocks with the least weighted error found. blocks, weights: as `search` has them."""
        return self.search(blocks, weights, find) if self.search else _fitted(self, blocks, weights, find)

    def encoded(self, blocks: F32, find: Searches = IN_NUMPY) -> Parts:
        """The parts of blocks, F32 [n, block_size]. find: of formats without `encode_blocks`."""
        return self.encode_blocks(blocks) if self.encode_blocks else self.searched(blocks, None, find)

    def grid(self, parts: Parts) -> Grid:
        """The values that the scales of split rows allow."""
        assert self.affine, "a format of plain numbers has no grid"
        d, s, base, z = scales_of(parts)
        scale = per_group(d, s)
        if base is None and z is None:
            return Grid(scale, scale * np.float32(0 if self.affine.levels else self.affine.zero))
        return Grid(scale, per_group(d if base is None else base, z) * np.float32(self.affine.zero))

    def nearest(self, x: F32, scale: F32, offset: F32) -> U8:
        """The codes whose values come nearest to x. scale, offset: of a `Grid`, in shapes that broadcast to that of x."""
        assert self.affine, "a format of plain numbers has no codes"
        scaled = (x + offset) * inverse(scale)
        if self.affine.levels is None:
            return np.clip(np.rint(scaled), 0, (1 << self.code_bits) - 1).astype(np.uint8)
        levels = np.array(self.affine.levels, np.float32)
        ascending = np.argsort(levels, kind="stable")
        middles = (levels[ascending][1:] + levels[ascending][:-1]) / 2
        return ascending.astype(np.uint8)[np.searchsorted(middles, scaled)]

    def values_of(self, codes: U8, scale: F32, offset: F32) -> F32:
        """The values of codes on a `Grid`."""
        assert self.affine, "a format of plain numbers has no codes"
        levels = self.affine.levels
        return (codes.astype(np.float32) if levels is None else np.array(levels, np.float32)[codes]) * scale - offset

    def row_bytes(self, in_features: int) -> int:
        """Bytes of a row of `in_features` values. Raises FormatError if they do not fill whole blocks."""
        if in_features % self.block_size:
            raise FormatError(
                f"{self.name} needs in_features divisible by {self.block_size}, got {in_features}; "
                + ("use q4_0 or q8_0 for this tensor" if in_features % 32 == 0 else "use f16, bf16 or f32 for this tensor")
            )
        return in_features // self.block_size * self.block_bytes

    def split(self, rows: U8) -> Parts:
        """Rows U8 [N, row_bytes] taken apart: every part as [N, numbers of a row]. Raises nothing: rows have whole blocks."""
        fields = np.ascontiguousarray(rows).reshape(-1).view(self.layout)
        of_codes = [field.name for field in self.code_fields]
        parts = {name: fields[name] for name in self.layout.names or () if name not in of_codes} | self.to_parts(fields)
        if self.code_fields:
            parts["codes"] = reduce(np.bitwise_or, [field.read(fields) for field in self.code_fields])
        return {name: part.reshape(len(rows), -1) for name, part in parts.items()}

    def join(self, parts: Parts) -> U8:
        """The inverse of `split`, to the byte."""
        rows, columns = parts["codes"].shape
        blocks = {name: part.reshape(rows * columns // self.block_size, -1) for name, part in parts.items()}
        fields = np.empty(rows * columns // self.block_size, self.layout)
        filled = blocks | self.to_fields(blocks) | {field.name: field.write(blocks["codes"]) for field in self.code_fields}
        for name in self.layout.names or ():
            fields[name] = filled[name].reshape(fields[name].shape)
        return fields.view(np.uint8).reshape(rows, -1)

    def decode(self, data: U8) -> F32:
        """The values of `data`, U8 [..., n_blocks * block_bytes], as F32 [..., n_blocks * block_size]."""
        if data.dtype != np.uint8 or data.ndim == 0 or data.shape[-1] % self.block_bytes:
            raise FormatError(f"{self.name} wants uint8 rows of {self.block_bytes}-byte blocks, got {data.dtype} {data.shape}")
        values = np.empty((*data.shape[:-1], data.shape[-1] // self.block_bytes * self.block_size), np.float32)
        blocks = np.ascontiguousarray(data).reshape(-1, self.block_bytes)
        out = values.reshape(-1, self.block_size)
        step = max(1, CHUNK_VALUES // self.block_size)
        # A damaged file may hold scales of inf or nan. Its values are then inf or nan, and NumPy need not warn.
        with np.errstate(invalid="ignore", over="ignore"):
            for start in range(0, len(blocks), step):
                out[start : start + step] = self._decode_blocks(blocks[start : start + step])
        return values

    def encode(self, values: ArrayLike, find: Searches = IN_NUMPY) -> U8:
        """The nearest representation found for `values` [..., K], as U8 [..., row_bytes(K)]. find: as in `encoded`.

        Raises FormatError if K does not fill whole blocks, if a block format is given a value that is not finite,
        or if a finite value would become infinite.
        """
        source = np.asarray(values, dtype=np.float32, order="C")
        if source.ndim == 0:
            raise FormatError(f"{self.name} encodes rows, got a single number")
        data = np.empty((*source.shape[:-1], self.row_bytes(source.shape[-1])), np.uint8)
        blocks = source.reshape(-1, self.block_size)
        out = data.reshape(-1, self.block_bytes)
        step = max(1, CHUNK_VALUES // self.block_size)
        for start in range(0, len(blocks), step):
            chunk = blocks[start : start + step]
            finite = np.isfinite(chunk)
            if self.block_size > 1 and not finite.all():
                raise FormatError(f"{self.name} cannot hold {chunk[~finite][0]}: every value must be finite")
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                encoded = self.join(self.encoded(self.rotate(chunk), find))
                lost = finite & ~np.isfinite(self._decode_blocks(encoded))
            if lost.any():
                raise FormatError(f"{self.name} cannot hold {chunk[lost][0]}: f16 is exceeded; use bf16 or f32")
            out[start : start + step] = encoded
        return data

    def _decode_blocks(self, blocks: U8) -> F32:
        """U8 [n, block_bytes] -> F32 [n, block_size]."""
        parts = self.split(blocks)
        values = self.affine.decode(parts) if self.affine else self.decode_numbers(parts)  # type: ignore[misc]
        return hadamard(values, self.block_size) if self.rotated else values

    def rotate(self, blocks: F32) -> F32:
        """Values [n, block_size] as blocks hold them: rotated, or as they are. What exceeds f32 becomes its largest number."""
        return np.nan_to_num(hadamard(blocks, self.block_size), nan=_MOST) if self.rotated else blocks


def _fitted(format: Format, values: F32, weights: F32 | None, find: Searches) -> Parts:
    """The parts of blocks F32 [n, block_size], with the scales that leave the least weighted error found."""
    assert format.affine, "a format of plain numbers has no scales"
    like = format.split(np.zeros((1, format.block_bytes), np.uint8))
    x = values.reshape(len(values), format.grid(like).scale.shape[1], -1)
    shape, groups = x.shape[:2], x.reshape(-1, x.shape[2])
    weights = None if weights is None else weights.reshape(groups.shape)
    zero, num_codes = format.affine.zero, 1 << format.code_bits
    if "z" in like and "base" not in like and zero == 1:
        d, move = find.moved(groups, weights, range(num_codes), [-code for code in range(num_codes)], False)
        stored = {"d": d.astype("<f2").reshape(shape), "z": (-move).astype(np.uint8).reshape(shape)}
    elif "base" in like or "z" in like:
        stored = _lines(format, groups, weights, shape, find)
    else:
        levels = format.affine.levels or [code - zero for code in range(num_codes)]
        stored = _stored(find.scales(groups, weights, sorted(levels)).reshape(shape), format.scale_range)
    scale, offset = (part[:, :, None] for part in format.grid(stored))
    return stored | {"codes": format.nearest(x, scale, offset).reshape(len(x), -1)}


def _stored(scale: F32, scale_range: tuple[int, int] | None) -> Parts:
    """The parts that hold scales [n, g] best. scale_range: the least and the greatest multiple of d; None for no multiples."""
    if scale_range is None:
        return {"d": scale.astype("<f2")}
    peak = np.take_along_axis(scale, np.abs(scale).argmax(axis=1)[:, None], axis=1)
    d = (peak / scale_range[0]).astype("<f2")
    return {"d": d, "s": np.clip(np.rint(scale * inverse(d.astype(np.float32))), *scale_range).astype(np.int8)}


def _lines(format: Format, groups: F32, weights: F32 | None, shape: tuple[int, ...], find: Searches) -> Parts:
    """The parts that hold scales and minima of groups [n g, k]. shape: n and g."""
    assert format.affine, "checked by `_fitted`"
    zero, largest = np.float32(format.affine.zero), (1 << format.code_bits) - 1
    is_free = zero < 0  # then the file stores the negative of the minimum, of either sign
    scale, minimum = find.lines(groups, weights, largest, is_free)
    if format.scale_range:
        most = format.scale_range[1]
        d, of_scales, scales = _multiples(scale, shape, most)
        base, of_minima, minima = _multiples(minimum, shape, most)
        found = find.whole_lines(groups, weights, (of_scales, of_minima), (scales, minima), largest, most)
        s, z = (part.astype(np.uint8).reshape(shape) for part in found)
        return {"d": d, "base": base, "s": s, "z": z}
    d, minimum = scale.astype("<f2").reshape(shape), minimum.reshape(shape)
    if is_free:
        return {"d": d, "base": (minimum / zero).astype("<f2")}
    return {"d": d, "z": np.clip(np.rint(minimum * inverse(d.astype(np.float32) * zero)), 0, 255).astype(np.uint8)}


def _multiples(numbers: F32, shape: tuple[int, ...], most: int) -> tuple[NDArray[np.float16], F32, F32]:
    """Numbers of groups, of `shape` [n, g], as multiples 0 to `most` of a unit of each n: the unit, F16 [n, 1]; both by group."""
    unit = (numbers.reshape(shape).max(axis=1, keepdims=True) / most).astype("<f2")
    by_group = np.repeat(unit.astype(np.float32), shape[1])
    return unit, by_group, np.clip(np.rint(numbers * inverse(by_group)), 0, most)
