"""One to three bits on grids: iq1_s, iq1_m, iq2_xxs, iq2_xs, iq2_s (eight values are a point of a grid), iq3_xxs, iq3_s (four).

Layouts as GGUF files store them, and the grids: ggml-common.h and ggml-quants.c of https://github.com/ggml-org/ggml. A point gives
magnitudes; the eighth sign of each eight values makes the number of minuses even, except in iq2_s and iq3_s, which store it. Scales
are odd multiples of d or a part of it, four bits for each 32 values (iq2_xs and iq2_s: for each 16).
In iq1 a point gives -1, 0 or 1 for each of eight values; a bit moves 32 values (iq1_s) or eight (iq1_m) up or down by an eighth.
Scales have three bits, for each 32 values or for each 16.

A code here has the index of one value's magnitude in its low bits, and the sign in the bit above. Kernels read these codes: 3 bits
for one- and two-bit formats, 4 for three-bit ones. Looking points up in a kernel would be slower than reading the additional bits
(benchmarks/DECISIONS.md#grids), and would need code for each instruction set.
"""

import base64
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats import search
from cpuspec.formats.format import F32, Affine, Format, Parts
from cpuspec.formats.kquants import SUPERBLOCK
from cpuspec.formats.packing import bits, lanes, words
from cpuspec.formats.search import Searches

_CANDIDATES = 16
_ROWS_AT_ONCE = 1 << 9  # points whose distances are computed together

# Where the largest magnitude of a group goes in a search for the scale, times the largest of the grid. The first two are for groups
# whose magnitudes are all alike.
_SHARES = (0.2, 0.58, 0.75, 0.9, 1.05, 1.2)


@dataclass(frozen=True, eq=False)
class Codebook:
    """The combinations of magnitudes that consecutive values may have. Points are in ascending order; their last value counts most.

    name: of its points in grids.json: one bit for each conceivable point, whether the grid has it, compressed and in base 85.
    dims: how many values a point stands for. magnitudes: those that a value may have, in units of `unit`. moved: a sign moves the
    value down by this, and no sign moves it up; 0 where a sign makes the value negative.
    """

    name: str
    dims: int
    magnitudes: tuple[int, ...]
    unit: float
    moved: int = 0

    @property
    def sign(self) -> int:
        """The bit of a code that is the sign."""
        return (len(self.magnitudes) - 1).bit_length()

    @property
    def levels(self) -> tuple[int, ...]:
        """The value of each code, in units of `unit`; 0 for codes that do not occur."""
        places = range(1 << self.sign)
        sizes = [self.magnitudes[place] if place < len(self.magnitudes) else None for place in places]
        plus, minus = [
            tuple(0 if size is None else size + sign * self.moved if self.moved else sign * size for size in sizes)
            for sign in (1, -1)
        ]
        return (*plus, *minus)

    def codes(self, indices: NDArray[Any], signs: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Codes [n, 256] of points [n, 256 / dims] and bytes of eight signs [n, 32]."""
        minus = np.unpackbits(signs, axis=1, bitorder="little")
        return self.points[indices].reshape(len(indices), -1) | minus << self.sign

    def split(self, codes: NDArray[np.uint8]) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
        """The inverse of `codes`, for codes that come from points."""
        places = codes.reshape(-1, self.dims) & np.uint8((1 << self.sign) - 1)
        indices = self._indices[places @ self._weights].reshape(len(codes), -1)
        signs: NDArray[np.uint8] = np.packbits(codes >> np.uint8(self.sign), axis=1, bitorder="little")
        return indices.astype(np.uint16), signs

    @cached_property
    def points(self) -> NDArray[np.uint8]:
        """The places of magnitudes, U8 [points, dims]."""
        held = json.loads(Path(__file__).with_name("grids.json").read_text("utf-8"))[self.name]
        there = np.unpackbits(np.frombuffer(zlib.decompress(base64.b85decode(held)), np.uint8))
        numbers = np.flatnonzero(there)[:, None] // self._weights % len(self.magnitudes)
        return numbers.astype(np.uint8)

    @cached_property
    def _weights(self) -> NDArray[np.int64]:
        return len(self.magnitudes) ** np.arange(self.dims)

    @cached_property
    def _indices(self) -> NDArray[np.int16]:
        """For each conceivable point: its index in the grid, or -1 where the grid lacks it."""
        found = np.full(len(self.magnitudes) ** self.dims, -1, np.int16)
        found[self.points @ self._weights] = np.arange(len(self.points))
        return found

    def nearest(self, sizes: F32, weights: F32 | None, find: Searches) -> NDArray[np.uint8]:
        """The points [n, dims] whose magnitudes come nearest to `sizes` [n, dims] in squared error. weights: of that, [n, dims].

        Only the points around the magnitudes that each value would take by itself are tried. The best of all points would leave
        0.5 % less error on Gaussian values.
        """
        return self.points[find.points(sizes, weights, self.magnitudes, self.offered, self.near)]

    @cached_property
    def offered(self) -> F32:
        """The magnitudes of the points in `near`, [points of all, dims, 16]."""
        return np.ascontiguousarray(np.array(self.magnitudes, np.float32)[self.points[self.near]].transpose(0, 2, 1))

    @cached_property
    def near(self) -> NDArray[np.int32]:
        """For each conceivable point: the indices of the 16 nearest points of the grid."""
        magnitudes = np.array(self.magnitudes, np.float32)
        everything = magnitudes[np.arange(len(self._indices))[:, None] // self._weights % len(magnitudes)]
        offered = magnitudes[self.points].T
        near = np.empty((len(everything), _CANDIDATES), np.int32)
        for start in range(0, len(everything), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            # Not by matmul, whose threads would fight those that encode other tensors.
            errors = np.square(offered).sum(axis=0) - 2 * np.einsum("nd,dp->np", everything[rows], offered)
            near[rows] = np.argpartition(errors, _CANDIDATES, axis=1)[:, :_CANDIDATES]
        return near


_IQ2_XXS = Codebook("iq2_xxs", 8, (8, 25, 43), 1 / 8)
_IQ2_XS = Codebook("iq2_xs", 8, (8, 25, 43), 1 / 8)
_IQ2_S = Codebook("iq2_s", 8, (8, 25, 43), 1 / 8)
_IQ1 = Codebook("iq1", 8, (-8, 0, 8), 1 / 8, moved=1)
_IQ3_XXS = Codebook("iq3_xxs", 4, (2, 6, 10, 14, 18, 22, 26, 31), 1 / 2)
_IQ3_S = Codebook("iq3_s", 4, (1, 3, 5, 7, 9, 11, 13, 15), 1)


def encode(grid: Codebook, group: int, even: bool, values: F32, weights: F32 | None, find: Searches) -> Parts:
    """Scales by least squares for each `group` values, then the nearest points under the scales as stored.

    even: whether each eight values must have an even number of minuses. Where they do not, the least important value gets the other
    sign. weights: of errors, [n, 256]. With the nearest points found in numpy a value takes about a microsecond.
    """
    signed = values.reshape(-1, 8)
    minus = signed < 0
    if even:
        cost = np.square(signed) * (1 if weights is None else weights.reshape(-1, 8))
        least = cost.argmin(axis=1)
        minus[np.arange(len(minus)), least] ^= minus.sum(axis=1) % 2 == 1
    sizes = np.where(minus, -signed, signed).reshape(-1, group)  # below zero where a sign was changed
    weights = None if weights is None else weights.reshape(-1, group)
    scales = _fit(grid, sizes, weights, find).reshape(len(values), -1)
    top = np.float32(31 * grid.unit)
    d = (scales.max(axis=1, keepdims=True) / top).astype("<f2")
    step = d.astype(np.float32) * np.float32(grid.unit)
    four_bits = np.clip(np.rint((scales * search.inverse(step) - 1) / 2), 0, 15).astype(np.uint8)
    stored = (step * (2 * four_bits.astype(np.float32) + 1)).reshape(-1, 1)
    places = _points(grid, sizes, stored, weights, find).reshape(len(values), -1)
    codes = places | minus.reshape(len(values), -1).astype(np.uint8) << grid.sign
    return {"d": d, "codes": codes, "scales": _halves(four_bits)}


def _points(grid: Codebook, sizes: F32, scales: F32, weights: F32 | None, find: Searches) -> NDArray[np.uint8]:
    """The places of magnitudes nearest to sizes [n, k] under scales [n, 1]."""
    flat = None if weights is None else weights.reshape(-1, grid.dims)
    return grid.nearest((sizes * search.inverse(scales)).reshape(-1, grid.dims), flat, find).reshape(sizes.shape)


def _fit(grid: Codebook, sizes: F32, weights: F32 | None, find: Searches) -> F32:
    """Scales [n] that bring scale * magnitude closest to sizes [n, k] in squared error."""
    magnitudes = np.array(grid.magnitudes, np.float32)
    peak = sizes.max(axis=1, keepdims=True)
    tried = (peak / np.float32(magnitudes[-1] * share) for share in _SHARES)
    choices = (magnitudes[_points(grid, sizes, scale, weights, find)] for scale in tried)
    return search.scale_of_best(sizes, weights, peak[:, 0] / magnitudes[-1], choices)


# Where the largest magnitude of a group of iq1 goes in a search for the scale, times the larger level: as in any format of three
# levels, most of them are beyond it.
_SHARES_OF_IQ1 = (0.8, 1.0, 1.2, 1.4, 1.7, 2.0, 2.4)


def encode_iq1(group: int, shared: int, values: F32, weights: F32 | None, find: Searches) -> Parts:
    """Scales by least squares for each `group` values, then for each `shared` values the move up or down, and the nearest points.

    weights: of errors, [n, 256].
    """
    x = values.reshape(-1, group)
    weights = None if weights is None else weights.reshape(-1, group)
    peak = np.abs(x).max(axis=1, keepdims=True)
    choices = (_levels_of_iq1(x, peak / np.float32(8 * share), sign, weights, find) for sign in (1, -1) for share in _SHARES_OF_IQ1)
    scales = search.scale_of_best(x, weights, peak[:, 0] / _IQ1.levels[2], choices)
    scales = scales.reshape(len(values), -1)
    d = (scales.max(axis=1, keepdims=True) / np.float32(15 * _IQ1.unit)).astype("<f2")
    step = d.astype(np.float32) * np.float32(_IQ1.unit)
    three_bits = np.clip(np.rint((scales * search.inverse(step) - 1) / 2), 0, 7).astype(np.uint8)
    stored = np.repeat(step * (2 * three_bits.astype(np.float32) + 1), group // shared, axis=1).reshape(-1, 1)
    x, weights = values.reshape(-1, shared), None if weights is None else weights.reshape(-1, shared)
    up, down = (_levels_of_iq1(x, stored, sign, weights, find) for sign in (1, -1))
    errors = [np.square(levels * stored - x) * (1 if weights is None else weights) for levels in (up, down)]
    is_down = (errors[1].sum(axis=1) < errors[0].sum(axis=1))[:, None]
    places = np.where(is_down, down + _IQ1.moved, up - _IQ1.moved) / 8 + 1
    codes = places.astype(np.uint8) | is_down.astype(np.uint8) << _IQ1.sign
    return {"d": d, "codes": codes.reshape(len(values), -1), "scales": _halves(three_bits)}


def _levels_of_iq1(x: F32, scales: F32, sign: int, weights: F32 | None, find: Searches) -> F32:
    """The levels [n, k] of the nearest points, all moved by `sign`, under scales [n, 1]."""
    moved = np.float32(sign * _IQ1.moved)
    sizes = (x * search.inverse(scales) - moved).reshape(-1, 8)
    places = _IQ1.nearest(sizes, None if weights is None else weights.reshape(-1, 8), find)
    return np.array(_IQ1.magnitudes, np.float32)[places].reshape(x.shape) + moved


_SEVENS = np.arange(0, 28, 7, dtype=np.uint32)  # shifts of the signs of 32 values, in a word whose top four bits are their scale
_PAIRS = np.arange(0, 8, 2, dtype=np.uint8)


def _halves(four_bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two numbers in a byte, the first in its low half."""
    packed: NDArray[np.uint8] = four_bits[:, 1::2] << np.uint8(4)
    packed |= four_bits[:, 0::2]
    return packed


def _even_signs(sevens: NDArray[Any]) -> NDArray[np.uint8]:
    """Eight signs whose number of minuses is even, by the first seven."""
    odd = np.bitwise_xor.reduce([sevens >> np.uint8(i) for i in range(7)]) & 1
    return (sevens | odd << 7).astype(np.uint8)


def _parts(grid: Codebook, indices: NDArray[Any], signs: NDArray[np.uint8], scales: NDArray[np.uint8]) -> Parts:
    """scales: U8 [n, halves], two of four bits in a byte."""
    four_bits = np.stack([scales & 0x0F, scales >> 4], axis=2).reshape(len(scales), -1)
    s = ((2 * four_bits + 1) * np.float32(grid.unit)).astype("<f2")
    return {"codes": grid.codes(indices, signs), "s": s, "scales": scales}


def _signs_and_scales(words: NDArray[np.uint32]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Eight signs for each eight values, [n, 32], and scales, two in a byte, [n, 4], of words [n, 8]."""
    signs = _even_signs((words[:, :, None] >> _SEVENS & 0x7F).astype(np.uint8).reshape(-1, 32))
    scales = (words >> 28).astype(np.uint8)
    return signs, _halves(scales)


def _words(signs: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """The inverse of `_signs_and_scales`."""
    sevens = np.bitwise_or.reduce((signs & 0x7F).reshape(-1, 8, 4).astype(np.uint32) << _SEVENS, axis=2)
    return sevens | np.stack([scales & 0x0F, scales >> 4], axis=2).reshape(-1, 8).astype(np.uint32) << 28


def parts_iq2_xxs(fields: NDArray) -> Parts:
    """A block has four bytes of points, and a word of signs and scale, for each 32 values."""
    words = fields["points"].reshape(-1, 8, 2)
    return _parts(_IQ2_XXS, np.ascontiguousarray(words[:, :, 0]).view(np.uint8), *_signs_and_scales(words[:, :, 1]))


def fields_iq2_xxs(parts: Parts) -> Parts:
    """The inverse of `parts_iq2_xxs`."""
    indices, signs = _IQ2_XXS.split(parts["codes"])
    return {"points": np.stack([indices.astype(np.uint8).view("<u4"), _words(signs, parts["scales"])], axis=2)}


def parts_iq2_xs(fields: NDArray) -> Parts:
    """Nine bits of a point and seven signs for each eight values."""
    points = fields["points"]
    return _parts(_IQ2_XS, points & 511, _even_signs((points >> 9).astype(np.uint8)), fields["scales"])


def fields_iq2_xs(parts: Parts) -> Parts:
    """The inverse of `parts_iq2_xs`."""
    indices, signs = _IQ2_XS.split(parts["codes"])
    return {"points": indices | (signs & 0x7F).astype(np.uint16) << 9}


def parts_iq2_s(fields: NDArray) -> Parts:
    """Points of ten bits, the top two in `tops`, and eight signs."""
    tops = (fields["tops"][:, :, None] >> _PAIRS & 3).reshape(-1, 32)
    return _parts(_IQ2_S, fields["points"] | tops.astype(np.uint16) << 8, fields["signs"], fields["scales"])


def fields_iq2_s(parts: Parts) -> Parts:
    """The inverse of `parts_iq2_s`."""
    indices, signs = _IQ2_S.split(parts["codes"])
    tops = np.bitwise_or.reduce((indices >> 8).astype(np.uint8).reshape(-1, 8, 4) << _PAIRS, axis=2)
    return {"points": indices.astype(np.uint8), "tops": tops, "signs": signs}


def parts_iq3_xxs(fields: NDArray) -> Parts:
    """Bytes of points, then for each 32 values a word of signs and their scale."""
    return _parts(_IQ3_XXS, fields["points"], *_signs_and_scales(fields["words"]))


def fields_iq3_xxs(parts: Parts) -> Parts:
    """The inverse of `parts_iq3_xxs`."""
    indices, signs = _IQ3_XXS.split(parts["codes"])
    return {"points": indices.astype(np.uint8), "words": _words(signs, parts["scales"])}


def parts_iq3_s(fields: NDArray) -> Parts:
    """Points of nine bits, the top one in `tops`, and eight signs."""
    tops = np.unpackbits(fields["tops"], axis=1, bitorder="little")
    return _parts(_IQ3_S, fields["points"] | tops.astype(np.uint16) << 8, fields["signs"], fields["scales"])


def fields_iq3_s(parts: Parts) -> Parts:
    """The inverse of `parts_iq3_s`."""
    indices, signs = _IQ3_S.split(parts["codes"])
    tops = np.packbits((indices >> 8).astype(np.uint8), axis=1, bitorder="little")
    return {"points": indices.astype(np.uint8), "tops": tops, "signs": signs}


_TOPS = np.arange(0, 12, 3, dtype=np.uint16)  # shifts of three bits in a word
_D_OF_IQ1_M = np.arange(12, -4, -4, dtype=np.uint16)  # right shifts of the four bits of d that the top of a word holds


def parts_iq1_s(fields: NDArray) -> Parts:
    """Low eight bits of points; for each 32 values a word: top three bits of four points, the scale, whether values move down."""
    words = fields["words"]
    tops = (words[:, :, None] >> _TOPS & 7).reshape(len(words), -1)
    down = np.repeat(words >> 15, 4, axis=1).astype(np.uint8) * np.uint8(255)
    return _parts(_IQ1, fields["points"] | tops << 8, down, _halves((words >> 12 & 7).astype(np.uint8)))


def fields_iq1_s(parts: Parts) -> Parts:
    """The inverse of `parts_iq1_s`."""
    indices, down = _IQ1.split(parts["codes"])
    tops = np.bitwise_or.reduce((indices >> 8).reshape(-1, 8, 4) << _TOPS, axis=2)
    three_bits = np.stack([parts["scales"] & 7, parts["scales"] >> 4], axis=2).reshape(-1, 8).astype(np.uint16)
    return {"points": indices.astype(np.uint8), "words": tops | three_bits << 12 | (down[:, ::4] & 1).astype(np.uint16) << 15}


def parts_iq1_m(fields: NDArray) -> Parts:
    """Low eight bits of points; their top three and whether eight values move down, four bits each; words of four scales and d."""
    four_bits = np.stack([fields["tops"] & 15, fields["tops"] >> 4], axis=2).reshape(len(fields), -1)
    words = fields["words"]
    three_bits = (words[:, :, None] >> _TOPS & 7).astype(np.uint8).reshape(len(words), -1)
    down = (four_bits >> 3).astype(np.uint8) * np.uint8(255)
    d = np.bitwise_or.reduce((words & 0xF000) >> _D_OF_IQ1_M, axis=1).astype("<u2").view("<f2")
    return {"d": d, **_parts(_IQ1, fields["points"] | (four_bits & 7).astype(np.uint16) << 8, down, _halves(three_bits))}


def fields_iq1_m(parts: Parts) -> Parts:
    """The inverse of `parts_iq1_m`."""
    indices, down = _IQ1.split(parts["codes"])
    four_bits = ((indices >> 8) | (down & 1) << 3).astype(np.uint8)
    scales = parts["scales"]
    three_bits = np.stack([scales & 7, scales >> 4], axis=2).reshape(-1, 4, 4).astype(np.uint16)
    d = np.ascontiguousarray(parts["d"], "<f2").view("<u2").reshape(-1, 1)
    words = np.bitwise_or.reduce(three_bits << _TOPS, axis=2) | (d << _D_OF_IQ1_M & 0xF000)
    return {"points": indices.astype(np.uint8), "tops": _halves(four_bits), "words": words}


def _format(
    name: str, gguf_type: int, grid: Codebook, group: int, encode: Callable[..., Parts], fields: list[tuple[Any, ...]],
    to_parts: Callable[[NDArray], Parts], to_fields: Callable[[Parts], Parts],
) -> Format:  # fmt: skip
    codes = (bits(2), bits(1, at=2)) if grid.sign == 2 else (bits(4),)
    return Format(
        name,
        np.dtype(fields),
        SUPERBLOCK,
        None,
        Affine(levels=grid.levels),
        (),
        to_parts,
        to_fields,
        planes=(*codes, words("scales", 4 / group, "u1"), lanes("d", "<f2", SUPERBLOCK)),
        reader="grids",
        gguf_type=gguf_type,
        search=encode,
        free_codes=False,
    )


_D = ("d", "<f2")

FORMATS = (
    _format(
        "iq1_s", 19, _IQ1, 32, partial(encode_iq1, 32, 32), [_D, ("points", "u1", 32), ("words", "<u2", 8)],
        parts_iq1_s, fields_iq1_s,
    ),
    _format(
        "iq1_m", 29, _IQ1, 16, partial(encode_iq1, 16, 8), [("points", "u1", 32), ("tops", "u1", 16), ("words", "<u2", 4)],
        parts_iq1_m, fields_iq1_m,
    ),
    _format(
        "iq2_xxs", 16, _IQ2_XXS, 32, partial(encode, _IQ2_XXS, 32, True), [_D, ("points", "<u4", 16)],
        parts_iq2_xxs, fields_iq2_xxs,
    ),
    _format(
        "iq2_xs", 17, _IQ2_XS, 16, partial(encode, _IQ2_XS, 16, True), [_D, ("points", "<u2", 32), ("scales", "u1", 8)],
        parts_iq2_xs, fields_iq2_xs,
    ),
    _format(
        "iq2_s", 22, _IQ2_S, 16, partial(encode, _IQ2_S, 16, False),
        [_D, ("points", "u1", 32), ("signs", "u1", 32), ("tops", "u1", 8), ("scales", "u1", 8)], parts_iq2_s, fields_iq2_s,
    ),
    _format(
        "iq3_xxs", 18, _IQ3_XXS, 32, partial(encode, _IQ3_XXS, 32, True), [_D, ("points", "u1", 64), ("words", "<u4", 8)],
        parts_iq3_xxs, fields_iq3_xxs,
    ),
    _format(
        "iq3_s", 21, _IQ3_S, 32, partial(encode, _IQ3_S, 32, False),
        [_D, ("points", "u1", 64), ("tops", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)], parts_iq3_s, fields_iq3_s,
    ),
)  # fmt: skip
