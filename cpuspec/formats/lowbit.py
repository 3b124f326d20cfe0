"""Two- and three-bit integers in groups of 32 or 64 under an f16 scale, for drafts cast from a model's own weights.

With four or eight codes their place matters: a group's zero point has steps of a sixteenth of a code, and the encoder searches for
scale and zero point. Whole zero points, such as GPTQ's 0 to 8 for three bits, are among these. The block layout is this project's:

  d: f16 scale; z: u8 zero point in sixteenths; group / 4 bytes of low bits: value i at bits 2 * (i % 4) of byte i / 4;
  and for three bits `high`: group / 8 bytes of top bits: value i at bit i % 8 of byte i / 8
"""

from functools import partial

import numpy as np

from cpuspec.formats.format import F32, Affine, CodeField, Format, Parts
from cpuspec.formats.packing import bits, lanes
from cpuspec.formats.search import inverse, rounded

ZERO_STEPS = 16  # steps of a zero point in one code


# Starting grids of the search: the share of the span of group and zero that each covers, and the codes by which it is moved.
# Cutting outliers pays for the other values, and so does moving the grid. On real weights the remaining error is within 1 % of the
# least possible one, and without moves within 1 to 4 %.
STARTS = ((1.0, 0.0), *((share, move) for share in (0.95, 0.8, 0.65) for move in (-0.3, 0.0, 0.3)))


def encode(code_bits: int, values: F32) -> Parts:
    """The scale, zero point and codes that leave the least squared error. Zero is among the values of every group.

    A grid gives codes. The line of least squares through (code, value) gives a scale and the value of code 0. Both are rounded as
    stored, and the error under the rounded ones counts. A scale that is stored as infinite stays: no error is below infinity then.
    Numbers lie as [values of a group, groups], and sums add one value after another: NumPy's sums have an order that depends on the
    shape, and the compiled twin in `kernels.encode` must give the same bits.
    """
    x = np.ascontiguousarray(values.T)  # [group, n]
    count, last = np.float32(len(x)), np.float32(2**code_bits - 1)
    low, high, total = np.minimum(x.min(axis=0), 0), np.maximum(x.max(axis=0), 0), _sum(x)
    span, middle = high - low, (low + high) * np.float32(0.5)
    best_d, best_zero = _store(span * (1 / last), low)
    best_error = np.full_like(span, np.inf)
    for share, move in STARTS:
        d = span * np.float32(share / last)
        start = middle + d * np.float32(move - last / 2)
        codes = rounded((x - start) * inverse(d), last)
        codes_total = _sum(codes)
        slope = count * _sum(codes * x) - codes_total * total
        slope = slope * inverse(count * _sum(codes * codes) - codes_total * codes_total)
        start = np.where(slope > 0, (total - slope * codes_total) * (1 / count), start)
        d, zero = _store(np.where(slope > 0, slope, d), start)
        error = _sum(np.square(d * (_nearest(x, d, zero, last) - zero) - x))
        better = error < best_error
        best_d, best_zero = np.where(better, d, best_d), np.where(better, zero, best_zero)
        best_error = np.where(better, error, best_error)
    codes = _nearest(x, best_d, best_zero, last).T.astype(np.uint8)
    return {"d": best_d[:, None], "z": best_zero[:, None] * ZERO_STEPS, "codes": codes}


def _store(d: F32, start: F32) -> tuple[F32, F32]:
    """Scale and zero point as they are stored. start: the value of code 0."""
    d = d.astype(np.float16).astype(np.float32)
    zero = rounded(start * np.float32(-ZERO_STEPS) * inverse(d), np.float32(255))
    return d, zero * np.float32(1 / ZERO_STEPS)


def _nearest(x: F32, d: F32, zero: F32, last: np.float32) -> F32:
    return rounded(x * inverse(d) + zero, last)


def _sum(values: F32) -> F32:
    total = values[0].copy()
    for row in values[1:]:
        total += row
    return total


def _format(code_bits: int, group: int) -> Format:
    three = code_bits == 3
    return Format(
        f"int{code_bits}_g{group}_asym",
        np.dtype([("d", "<f2"), ("z", "u1"), ("codes", "u1", group // 4), *[("high", "u1", group // 8)] * three]),
        group,
        partial(encode, code_bits),
        Affine(1 / ZERO_STEPS),
        (CodeField("codes", 2), *[CodeField("high", 1, at=2)] * three),
        planes=(bits(2), *[bits(1, at=2)] * three, lanes("d", "<f2", group), lanes("z", "u1", group)),
    )


FORMATS = tuple(_format(code_bits, group) for code_bits in (3, 2) for group in (32, 64))
