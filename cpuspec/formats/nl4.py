"""nl4_g32, a format of this project: four bits on a grid of sixteen steps, groups of 32 under a signed scale of eight bits.

  scale: a byte of sign, four bits of exponent, three of mantissa: the f16 with this sign and these as the low bits of its exponent
      and the top bits of its mantissa. From 2^-17 to 1.875; none is infinite or nan.
  16 bytes of codes: nibbles in the order of q4_0. A value is scale * LEVELS[code].

Levels are whole numbers from -32 to 31. Kernels look them up by one shuffle, and processors without dot products of bytes may add
two pairs of products in 16 bits: iq4's levels, up to 127, have to be multiplied in two halves. The table was found by Lloyd's
algorithm on values of normal and of t distributions, with signs and scales as they are stored. It reaches further on one side, and
the scale's sign chooses which. Eight bits are spent better on fine scales than on a choice of tables (benchmarks/LOG.md).
"""

import numpy as np
from numpy.typing import NDArray

from cpuspec.errors import FormatError
from cpuspec.formats.format import F32, OWN_GGUF_TYPES, U8, Affine, Format, Parts
from cpuspec.formats.legacy import BLOCK, codes_4_bits, fields_4_bits
from cpuspec.formats.packing import bits, lanes

LEVELS = (-32, -26, -20, -16, -12, -8, -5, -2, 0, 3, 6, 9, 12, 16, 21, 28)


_SCALES = 9  # magnitudes that are tried: from .7 to 1.4 times that by which -32 is the largest magnitude
_LEAST = 0.7 / -LEVELS[0]
_LEVELS = np.array(LEVELS, np.float32)

# By floor(2 x) + 64, the level nearest to x: midpoints of levels are whole numbers there.
_NEAREST = np.searchsorted(np.add(LEVELS[:-1], LEVELS[1:]), np.arange(-64, 64), side="right").astype(np.uint8)


def scales_of_bytes(data: U8) -> F32:
    """What bytes stand for."""
    return ((data & 0x80).astype(np.uint16) << 8 | (data & 0x7F).astype(np.uint16) << 7).view("<f2").astype(np.float32)


_MAGNITUDES = scales_of_bytes(np.arange(0x80, dtype=np.uint8))  # in order
_LARGEST = float(_MAGNITUDES[-1] * -LEVELS[0])


def encode(values: F32, importance: F32 | None = None) -> Parts:
    """The scale that leaves the least squared error, of both signs and all magnitudes that come into question.

    importance: of each value, [n, 32]. Raises FormatError for magnitudes above 60.
    """
    peak = np.abs(values).max(axis=1)
    if peak.max() > _LARGEST:
        raise FormatError(f"nl4_g32 cannot hold {peak.max():g}: it ends at {_LARGEST:g}; use q4_k, iq4_nl, bf16 or f32")
    weighted = values if importance is None else values * importance
    first = np.minimum(np.searchsorted(_MAGNITUDES, peak * np.float32(_LEAST)), 0x80 - _SCALES)
    best, best_error = np.zeros(len(values), np.uint8), np.zeros(len(values), np.float32)  # over that of zeros
    for sign in (0, 0x80):
        for step in range(_SCALES):
            tried = (first + step + sign).astype(np.uint8)
            scale = scales_of_bytes(tried)
            levels = _LEVELS[_codes(values, scale)]
            squares = levels * levels if importance is None else levels * levels * importance
            error = scale * (scale * squares.sum(axis=1) - 2 * (levels * weighted).sum(axis=1))
            better = error < best_error
            best, best_error = np.where(better, tried, best), np.where(better, error, best_error)
    return {"scale": best[:, None], "codes": _codes(values, scales_of_bytes(best))}


def _codes(values: F32, scales: F32) -> U8:
    """The codes of values [n, 32] that are nearest under scales [n]; that of zero where the scale is zero."""
    doubled = np.divide(2, scales, out=np.zeros_like(scales), where=scales != 0)
    return _NEAREST[np.clip(np.floor(values * doubled[:, None]), -64, 63).astype(np.int16) + 64]


def _parts(fields: NDArray) -> Parts:
    return {"d": scales_of_bytes(fields["scale"]), **codes_4_bits(fields)}


NL4 = Format(
    "nl4_g32",
    np.dtype([("scale", "u1"), ("codes", "u1", 16)]),
    BLOCK,
    encode,
    _parts,
    fields_4_bits,
    Affine(levels=LEVELS),
    planes=(bits(4), lanes("scale", "u1", BLOCK)),
    reader="nl4",
    gguf_type=OWN_GGUF_TYPES | 1,
    encode_weighed=encode,
)
