"""A group of weights times the same inputs of a row: the arithmetic that every way to make a linear layer shares.

Activations come in one of these orders, in blocks of up to BLOCK_ROWS rows:
  "int8"   [group][row] records of 64 bytes: x = scale * byte + shift for 32 inputs, shift the middle of their range. Against
           bytes around zero this halves the error, for one more multiply-add a group.
  "int16"  [group][row] records of 128 bytes: x = scale * (256 * byte + low byte), for matrices where errors count most.
  "f32"    [input][row] numbers, for weights that are floating point themselves.
  "bf16"   [group][row] records of 32 numbers rounded to bf16, for bf16 weights on processors that multiply them in tile registers.
  "rounded"  [input][row] the same numbers, in f32, for processors that do not.
The last two are padded with zeros to whole groups. A record of integers holds 32 signed bytes, then at the offsets below the scale,
the shift and what formats with a zero point or a minimum need of the sums; then in "int16" order the 32 low bytes. On processors
that multiply with AVX2 alone an "int16" record has numbers of 16 bits in the place of both, those of the first 16 inputs and of the
last, the second and third of each four swapped.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cpuspec.kernels import simd
from cpuspec.kernels.readers import Group, Ops
from cpuspec.kernels.simd import f32x16, i32x16

BLOCK_ROWS = 16  # rows of a block of activations, which lie together
SCALE, SHIFT, VALUE_SUM, MINUS_8_SUMS, MINUS_16_SUMS, MINUS_128_SUMS, MINUS_32_LOW, MINUS_32_HIGH = range(32, 64, 4)
LOW_BYTES = 64

# Bytes of activations for each row and group of 32 inputs (where rows are side by side, for each row and 32 inputs).
ORDERS: Mapping[str, int] = MappingProxyType({"int8": 64, "int16": 128, "f32": 128, "bf16": 64, "rounded": 128})


def row_bytes(order: str, features: int) -> int:
    """Bytes of activations for each row of so many inputs."""
    return -(-features // 32) * ORDERS[order]


# Field of a record that an integer sum starts from, by zero point and by half of the group.
_STARTS = {8: (MINUS_8_SUMS,), 16: (MINUS_16_SUMS,), 128: (MINUS_128_SUMS,), 32: (MINUS_32_LOW, MINUS_32_HIGH)}


def _halves(group: Group) -> list[tuple[Any, list[Any]]]:
    """Each scale with the vectors of codes that it is for."""
    share = 8 // len(group.scales)
    return [(scale, group.codes[n * share : (n + 1) * share]) for n, scale in enumerate(group.scales)]


def sum_of_weights(o: Ops, group: Group) -> Any:
    """Sum over the group of scale * (code - zero), and of minima of its halves, for each row of the tile: what a shift of the
    inputs is multiplied with."""
    ones = simd.constant(o.b, 0x01010101, i32x16)
    weights = None
    for scale, vectors in _halves(group):
        total = simd.constant(o.b, -group.zero * 4 * len(vectors), i32x16)
        fits = len(vectors) * (2**group.bits - 1) < 256  # as bytes, the sum of all vectors does not overflow
        for vector in [o.sum_of_bytes(vectors)] if fits else vectors:
            total = simd.dot_bytes(o.b, total, vector, ones)
        number = o.b.sitofp(total, simd.F32X16)
        weights = o.b.fmul(number, scale) if weights is None else o.fma(number, scale, weights)
    if len(group.minima) == 2:
        weights = o.fma(o.b.fadd(*group.minima), simd.constant(o.b, 16.0, f32x16), weights)
    return weights


def start_field(zero: int, part: int) -> int:
    """Where a record has what the sum for one of the scales starts from."""
    return _STARTS[zero][part]


def add_group(o: Ops, group: Group, shifted: Any, record: Any, total: Any) -> Any:
    """total + scale of the row * (sum over parts of scale * integer dot) + shift * sum of weights + minimum * sum of inputs.

    shifted: the sum of weights for "int8" records, None for "int16" records.
    """
    dots = []
    for part, (_, vectors) in enumerate(_halves(group)):
        first = 4 * part * len(vectors)
        start = simd.constant(o.b, 0, i32x16)
        if group.zero:
            start = o.every(o.at(record, _STARTS[group.zero][part]), simd.I32)
        if shifted is None:
            high = o.dot(simd.constant(o.b, 0, i32x16), vectors, o.at(record, first))
            dots.append(o.b.add(o.left(high, 8), o.dot(start, vectors, o.at(record, LOW_BYTES + first))))
        else:
            dots.append(o.dot(start, vectors, o.at(record, first)))
    return add_dots(o, dots, group.scales, shifted, group.minima, record, total)


def add_dots(o: Ops, dots: list[Any], scales: list[Any], shifted: Any, minima: tuple[Any, ...], record: Any, total: Any) -> Any:
    """`add_group` where the integer dot for each scale is known, zero points taken off."""
    scaled = None
    for scale, dot in zip(scales, dots, strict=True):
        number = o.b.sitofp(dot, simd.F32X16)
        scaled = o.b.fmul(number, scale) if scaled is None else o.fma(number, scale, scaled)
    if len(minima) == 2:
        for minimum, field in zip(minima, _STARTS[32], strict=True):
            share = o.b.fmul(minimum, simd.constant(o.b, -1 / 32, f32x16))
            scaled = o.fma(o.b.sitofp(o.every(o.at(record, field), simd.I32), simd.F32X16), share, scaled)
    total = o.fma(scaled, o.every(o.at(record, SCALE), simd.F32), total)
    if shifted is not None:
        total = o.fma(shifted, o.every(o.at(record, SHIFT), simd.F32), total)
    if len(minima) == 1:
        total = o.fma(minima[0], o.every(o.at(record, VALUE_SUM), simd.F32), total)
    return total
