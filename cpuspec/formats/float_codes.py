"""Eight- and four-bit floats in groups under one f32 scale: fp8, and the 4-bit codes nf4 and fp4 of bitsandbytes.

  fp8 (groups of 32 or 128): an E4M3 byte (arXiv 2209.05433): sign, four bits of exponent with bias 7, three of mantissa; 0x7F and
      0xFF are nan, and there is no infinity. Files have a scale for a matrix, a row, or a square of 128 rows and inputs.
  nf4 (groups of 64): quantiles of a normal distribution (QLoRA, arXiv 2305.14314, appendix E), the scale is the largest magnitude.
  fp4 (groups of 64): sign, two bits of exponent, one of mantissa, with a smallest step that is no power of two, times 1/192.

The block layout is this project's: d in f32; then one byte for each value, or one byte for two values, the first in its low half.
"""

import math
from functools import partial

import numpy as np

from cpuspec.formats.format import F32, U8, Affine, CodeField, Format, Parts
from cpuspec.formats.packing import lanes, nibble_pairs

_EXPONENT, _MANTISSA = np.divmod(np.arange(127), 8)
_POSITIVE = np.where(_EXPONENT > 0, np.ldexp(1 + _MANTISSA / 8, _EXPONENT - 7), np.ldexp(_MANTISSA / 8, -6))
E4M3: tuple[float, ...] = tuple(sign * value for sign in (1.0, -1.0) for value in (*_POSITIVE.tolist(), float("nan")))

# As bitsandbytes has them, in f32 (bitsandbytes/functional.py, get_4bit_type).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = tuple(float(np.float32(sign * step / 192)) for sign in (1, -1) for step in (0, 1, 128, 192, 64, 96, 32, 48))


def nearest_code(levels: tuple[float, ...], values: F32) -> U8:
    """The codes of the nearest levels; of two equally near levels, the one with the even code."""
    codes = np.array([code for code, level in enumerate(levels) if not math.isnan(level)])
    ranked = codes[np.argsort(np.array(levels)[codes], kind="stable")]
    steps = np.array(levels, np.float32)[ranked]
    middles = (steps[1:].astype(np.float64) + steps[:-1]) / 2
    below, above = np.searchsorted(middles, values, "left"), np.searchsorted(middles, values, "right")
    return np.where(ranked[below] % 2 == 0, ranked[below], ranked[above]).astype(np.uint8)


def encode(levels: tuple[float, ...], values: F32) -> Parts:
    """Round to nearest, with a scale that maps the largest magnitude to the largest level."""
    largest = np.float32(np.nanmax(levels))
    d = np.abs(values).max(axis=1, keepdims=True) / largest
    steps = np.divide(values, d, out=np.zeros_like(values), where=d > 0)
    return {"d": d, "codes": nearest_code(levels, np.clip(steps, -largest, largest))}


def fp8(group: int) -> Format:
    """E4M3 with a scale for each `group` values."""
    return Format(
        f"fp8_g{group}",
        np.dtype([("d", "<f4"), ("codes", "u1", group)]),
        group,
        partial(encode, E4M3),
        Affine(levels=E4M3),
        planes=(lanes("codes", "u1", 1), lanes("d", "<f4", group)),
        reader="e4m3",
    )


def _table(name: str, levels: tuple[float, ...]) -> Format:
    return Format(
        f"{name}_g64",
        np.dtype([("d", "<f4"), ("codes", "u1", 32)]),
        64,
        partial(encode, levels),
        Affine(levels=levels),
        (CodeField("codes", 4),),
        planes=(nibble_pairs(), lanes("d", "<f4", 64)),
        reader="table",
    )


FORMATS = (fp8(32), fp8(128), _table("nf4", NF4), _table("fp4", FP4))
