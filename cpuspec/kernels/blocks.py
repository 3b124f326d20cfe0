"""Sixteen blocks of values at a time, one in each lane: what encoders and their searches share."""

import numpy as np

from cpuspec.kernels import simd
from cpuspec.kernels.options import compiled
from cpuspec.kernels.simd import LANES

splat = simd.splat_f32

_ZERO, _ONE, _INFINITY = np.float32(0), np.float32(1), np.float32(np.inf)


@compiled
def lay(values, first, count, size, to):
    """Blocks of `size` values, `count` from `first` on, one in each lane: value i of all at to + 64 i. Others repeat the last."""
    for lane in range(LANES):
        block = values + 4 * size * (first + min(lane, count - 1))
        for i in range(size):
            simd.poke_i32(to + 64 * i + 4 * lane, simd.peek_i32(block + 4 * i))


@compiled
def smaller(x, y):
    return simd.where_less(x, y, x, y)


@compiled
def larger(x, y):
    return simd.where_less(y, x, x, y)


@compiled
def inverted(x):
    """1 / x, and 0 where that is not finite."""
    inverse = splat(_ONE) / x
    return simd.where_less(simd.abs_f32(inverse), splat(_INFINITY), inverse, splat(_ZERO))


@compiled
def rounded(x, largest):
    """To the nearest of 0 to `largest`."""
    return smaller(larger(simd.round_f32(x), splat(_ZERO)), largest)
