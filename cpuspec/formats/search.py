"""The search of several encoders for the scale and zero point of a group with the least squared error.

Numbers lie as [values of a group, groups], and sums add one value after another: NumPy's sums have an order that depends on the
shape, and the compiled twin in `kernels.encode` must give the same bits.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from cpuspec.formats.format import F32

# Starting grids of two- and three-bit formats: cutting outliers pays for the other values, and so does moving the grid. On real
# weights the remaining error is within 1 % of the least possible one, and without moves within 1 to 4 %.
FEW_CODES = ((1.0, 0.0), *((share, move) for share in (0.95, 0.8, 0.65) for move in (-0.3, 0.0, 0.3)))

# (scale, value of code 0) -> (scale, zero point), both as the format stores them.
Store = Callable[[F32, F32], tuple[F32, F32]]


def fit(x: F32, largest: int, starts: Sequence[tuple[float, float]], store: Store) -> tuple[F32, F32]:
    """Scales d and zero points z [n] for which d * (code - z), codes 0..largest, comes closest to x [k, n] in squared error.

    starts: the grids to search from: the share of the span of group and zero that each covers, and the codes by which it is moved.
    A grid gives codes. The line of least squares through (code, value) gives a scale and the value of code 0. Both are rounded as
    the format stores them, and the error under the rounded ones counts. A scale that is stored as infinite stays: no error is below
    infinity then.
    """
    count, last = np.float32(len(x)), np.float32(largest)
    low, high, total = np.minimum(x.min(axis=0), 0), np.maximum(x.max(axis=0), 0), _sum(x)
    span, middle = high - low, (low + high) * np.float32(0.5)
    best_d, best_zero = store(span * (1 / last), low)
    best_error = np.full_like(span, np.inf)
    for share, move in starts:
        d = span * np.float32(share / last)
        start = middle + d * np.float32(move - last / 2)
        codes = rounded((x - start) * inverse(d), last)
        codes_total = _sum(codes)
        slope = count * _sum(codes * x) - codes_total * total
        slope = slope * inverse(count * _sum(codes * codes) - codes_total * codes_total)
        start = np.where(slope > 0, (total - slope * codes_total) * (1 / count), start)
        d, zero = store(np.where(slope > 0, slope, d), start)
        error = _sum(np.square(d * (nearest(x, d, zero, largest) - zero) - x))
        better = error < best_error
        best_d, best_zero = np.where(better, d, best_d), np.where(better, zero, best_zero)
        best_error = np.where(better, error, best_error)
    return best_d, best_zero


def scale_of_best(x: F32, weights: F32 | None, start: F32, choices: Iterable[F32], signed: bool = False) -> F32:
    """The scale [...] under which one of the choices, levels of the shape of x [..., k], leaves the least weighted squared error.

    Each choice is judged with its own scale of least squares. start: the scale where no choice is better than zeros. signed:
    whether a scale may be below zero.
    """
    best, best_gain = start, np.zeros(x.shape[:-1], np.float32)
    weighted = x if weights is None else x * weights
    for levels in choices:
        along = (levels * weighted).sum(axis=-1)
        scale = along * inverse((levels * levels if weights is None else levels * levels * weights).sum(axis=-1))
        gain = along * scale if signed else np.where(along > 0, along * scale, 0)  # of the squared error over that of zeros
        better = gain > best_gain
        best, best_gain = np.where(better, scale, best), np.where(better, gain, best_gain)
    return best


def nearest(x: F32, d: F32, zero: F32, largest: int) -> F32:
    """The codes that come nearest to x."""
    return rounded(x * inverse(d) + zero, np.float32(largest))


def rounded(values: F32, largest: np.float32) -> F32:
    """Values rounded to whole numbers and cut to 0..largest."""
    return np.clip(np.rint(values), 0, largest)


def inverse(values: F32) -> F32:
    """1 / values, and 0 where that is not finite."""
    with np.errstate(divide="ignore", over="ignore"):
        inverted = np.float32(1) / values
    return np.where(np.isfinite(inverted), inverted, np.float32(0))


def _sum(values: F32) -> F32:
    total = values[0].copy()
    for row in values[1:]:
        total += row
    return total
