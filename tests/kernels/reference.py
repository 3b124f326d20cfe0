"""Linear layers, and the norms and gates before them, in numpy, one operation after another: the bits that kernels return on every
processor.

It starts from rows of f32 and from the codes and scales of a format's file. It knows nothing of panels, tiles, registers or
instructions. `fma` rounds once, as the instruction does.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from cpuspec.formats import FORMATS, QuantTensor
from cpuspec.formats.format import F32, hadamard, per_group, scales_of
from cpuspec.formats.packing import GROUP, PANEL
from cpuspec.kernels.selfcheck import Inputs
from tests.backends.models import CLASSES

_Integers = NDArray[np.int64]


def compiled_sparingly(cases: Iterable[tuple[str, str]]) -> list[Any]:
    """Cases of a format and an order of activations, for `parametrize`. Each is a kernel to compile. Those for activations in
    16 bits are slow, except one for each reader.
    """
    return [pytest.param(*case, marks=pytest.mark.slow if case[1] == "int16" and case[0] not in CLASSES else ()) for case in cases]


class Weights(NamedTuple):
    """Output rows as groups of 32 codes: weight = scale * code + minimum, with one scale or two, for each half of a group."""

    codes: _Integers  # [N, groups, 32], less their zero point
    scales: F32  # [N, groups, 1 or 2]
    minima: F32  # [N, groups, 0, 1 or 2]


def fma(x: Any, y: Any, z: Any) -> F32:
    """x * y + z of f32 numbers, rounded once.

    The product is exact in f64. Where the sum is not, the neighbour whose last bit is odd is taken: its rounding to f32 is that of
    the exact sum (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008). The error is Knuth's TwoSum.
    """
    product = np.asarray(x, np.float64) * y
    total = product + z
    added = total - product
    error = (product - (total - added)) + (z - added)
    inexact_and_even = (error != 0) & (total.view(np.int64) & 1 == 0)
    return np.where(inexact_and_even, np.nextafter(total, np.copysign(np.inf, error)), total).astype(np.float32)


def exp(x: F32) -> F32:
    """As `pointwise.exp_f32`: n ln 2 in two parts, and Taylor to the seventh power."""
    kept = np.clip(x, np.float32(-87), np.float32(88))
    n = np.rint(kept * np.float32(1.4426950408889634))
    r = fma(n, np.float32(2.12194440e-4), fma(n, np.float32(-0.693359375), kept))
    p = np.full_like(x, 1 / 5040)
    for factor in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1, 1):
        p = fma(p, r, np.float32(factor))
    return np.where(x > -87, np.ldexp(p, n.astype(np.int32)), np.float32(0))


@np.errstate(over="ignore", invalid="ignore")  # of the polynomial, where it is not taken
def tanh(x: F32) -> F32:
    """As `pointwise.tanh_f32`: Cephes' tanhf."""
    square = x * x
    p = np.full_like(x, -5.70498872745e-3)
    for factor in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        p = fma(p, square, np.float32(factor))
    far = 1 - 2 / (exp(x * 2) + 1)
    return np.where(np.abs(x) < np.float32(0.625), fma(p * square, x, x), far)


def normed(x: F32, weight: F32, eps: np.float32) -> F32:
    """x / rms(x) * weight of a row, whose squares are summed in sixteen lanes, then in eight, four, two and one."""
    lanes = np.zeros(16, np.float32)
    for some in np.pad(x, (0, -len(x) % 16)).reshape(-1, 16):
        lanes = fma(some, some, lanes)
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return x * (1 / np.sqrt(lanes / np.float32(len(x)) + eps)) * weight


def silu_times(x: F32, other: F32) -> F32:
    """silu(x) * other."""
    return x / (1 + exp(0 - x)) * other


def gelu_times(x: F32, other: F32) -> F32:
    """gelu(x) * other, in the tanh form."""
    inner = fma(x * x * x, np.float32(0.044715), x) * np.float32(0.7978845608028654)
    return np.float32(0.5) * x * (1 + tanh(inner)) * other


def quantized(x: F32, order: str) -> Inputs:
    """Rows [T, K] in the codes of an order of `products`, "int8", "int16", "rotated" or "int14"."""
    groups, half = x.reshape(len(x), -1, GROUP), np.float32(0.5)
    if order == "rotated":
        groups = hadamard(x, PANEL).reshape(groups.shape)
    if order == "int8":
        smallest, largest = groups.min(2), groups.max(2)
        shift, scale = smallest * half + largest * half, (largest * half - smallest * half) / np.float32(127)
    elif order in ("rotated", "int14"):
        most = np.float32(127 if order == "rotated" else 8191)
        scale = np.repeat(np.abs(groups).reshape(len(x), -1, PANEL).max(2) / most, PANEL // GROUP, axis=1)
        shift = np.zeros_like(scale)
    else:
        scale = np.abs(groups).max(2) / np.float32(127 * 256)
        shift = np.zeros_like(scale)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    codes = np.rint((groups - shift[:, :, None]) * inverse[:, :, None]).astype(np.int64)
    return Inputs(codes, scale, shift, fma(scale, codes.sum(2).astype(np.float32), np.float32(GROUP) * shift))


def weights(tensor: QuantTensor) -> Weights:
    """The codes and factors of a tensor in a format of codes. Products of a format's factors are exact in f32."""
    format = tensor.format
    assert format.affine is not None, f"{format.name} has codes"
    parts = format.split(tensor.data)
    d, s, base, z = scales_of(parts)
    zero, levels = format.affine.zero, format.affine.levels
    scales = per_group(d, s)
    codes = parts["codes"].astype(np.int64) if levels is None else np.array(levels)[parts["codes"]]
    groups = codes.shape[1] // GROUP
    minima = np.empty((len(codes), 0), np.float32)
    if base is not None:
        minima = -per_group(base, z) * np.float32(zero)
    elif z is not None:
        minima = -scales * (z * np.float32(zero))
    else:
        codes = codes - int(zero)

    def by_group(factors: F32) -> F32:
        """Those of a longer group for each 32 of its inputs; those of 16 inputs in pairs."""
        repeated = np.repeat(factors, max(1, groups // max(1, factors.shape[1])), axis=1)
        return repeated.reshape(len(codes), groups, -1)

    return Weights(codes.reshape(len(codes), groups, GROUP), by_group(scales), by_group(minima))


def dequantized(tensor: QuantTensor) -> F32:
    """The weights [N, K] of a tensor in a format of codes, each rounded once to f32 and then to bf16."""
    codes, scales, minima = weights(tensor)
    every_scale = np.repeat(scales, GROUP // scales.shape[2], axis=2)
    every_minimum = np.repeat(minima, GROUP // minima.shape[2], axis=2) if minima.shape[2] else np.float32(0)
    values = fma(codes, every_scale, every_minimum).reshape(len(codes), -1)
    return QuantTensor.encode(FORMATS["bf16"], values).dequantize()


def of_group(parts: Any, group: int) -> Any:
    """One group of Inputs or Weights, without that axis."""
    return type(parts)(*(part[:, group] for part in parts))


def sum_of_weights(group: Weights) -> F32:
    """The factor of a shift, [N]: the sum of a group's weights; without its minimum where it has one, with both of two."""
    total = _scaled(group.codes.reshape(*group.scales.shape, -1).sum(2).T, group.scales)
    return fma(group.minima[:, 0] + group.minima[:, 1], np.float32(16), total) if group.minima.shape[1] == 2 else total


def add_group(total: F32, group: Weights, inputs: Inputs) -> F32:
    """total [T, N] + the products of one group."""
    rows = inputs.codes.reshape(len(total), group.scales.shape[1], -1)
    dots = np.einsum("tpk,npk->ptn", rows, group.codes.reshape(*group.scales.shape, -1))
    scaled = _scaled(dots, group.scales)
    scale, shift, value_sum = (numbers[:, None] for numbers in inputs[1:])
    if group.minima.shape[1] == 2:
        for minimum, half in zip(group.minima.T, np.split(inputs.codes, 2, axis=1), strict=True):
            scaled = fma(half.sum(1, keepdims=True).astype(np.float32), minimum, scaled)
    total = fma(scaled, scale, total)
    total = fma(sum_of_weights(group), shift, total)
    return fma(group.minima[:, 0], value_sum, total) if group.minima.shape[1] == 1 else total


def _scaled(integers: _Integers, scales: F32) -> F32:
    """Integers [parts, ..., N] times the parts' scales [N, parts], summed over the parts."""
    first, *others = zip(integers.astype(np.float32), scales.T, strict=True)
    total = first[0] * first[1]
    for numbers, scale in others:
        total = fma(numbers, scale, total)
    return total


def codes_times(tensor: Weights, inputs: Inputs) -> F32:
    """Products [T, N] of weights in codes: group after group."""
    total = np.zeros((len(inputs.codes), len(tensor.codes)), np.float32)
    for group in range(inputs.codes.shape[1]):
        total = add_group(total, of_group(tensor, group), of_group(inputs, group))
    return total


def rotated_times(tensor: QuantTensor, inputs: Inputs) -> F32:
    """Products [T, N] of rotated weights and rows: integers over a panel, times both scales."""
    parts, affine = tensor.format.split(tensor.data), tensor.format.affine
    assert affine is not None, f"{tensor.format.name} has codes"
    whole = parts["codes"].astype(np.int64) - int(affine.zero)
    if affine.levels is not None:
        levels = np.array(affine.levels, np.int64)[parts["codes"]].reshape(*parts["s"].shape, GROUP)
        whole = levels * parts["s"][:, :, None] - parts["z"][:, :, None].astype(np.int64)
    weights, rows = (codes.reshape(len(codes), -1, PANEL) for codes in (whole, inputs.codes))
    total = np.zeros((len(rows), len(weights)), np.float32)
    for panel in range(rows.shape[1]):
        scale = parts["d"][:, panel].astype(np.float32) * inputs.scale[:, panel * (PANEL // GROUP), None]
        total = fma((rows[:, panel] @ weights[:, panel].T).astype(np.float32), scale, total)
    return total


def superblocks_times(tensor: QuantTensor, inputs: Inputs) -> F32:
    """Products [T, N] of superblocks and rows in 14 bits: integers over 256 inputs, with 7 bits and with 7, then floats of them."""
    parts, affine = tensor.format.split(tensor.data), tensor.format.affine
    assert affine is not None, f"{tensor.format.name} has codes"
    d, s, base, z = scales_of(parts)
    codes = parts["codes"].astype(np.int64) if affine.levels is None else np.array(affine.levels, np.int64)[parts["codes"]]
    whole = codes - int(affine.zero) * (base is None and affine.levels is None)
    weights = (whole.reshape(*s.shape, -1) * s.astype(np.int64)[:, :, None]).reshape(len(whole), -1, PANEL)
    rows = inputs.codes.reshape(len(inputs.codes), -1, PANEL)
    total = np.zeros((len(rows), len(weights)), np.float32)
    for panel in range(rows.shape[1]):
        scale = inputs.scale[:, panel * (PANEL // GROUP), None]
        high, low = ((some[:, panel] @ weights[:, panel].T).astype(np.float32) for some in (rows >> 7, rows & 127))
        total = fma(fma(high, np.float32(128), low), d[:, panel].astype(np.float32) * scale, total)
        if base is not None:
            minima, groups = np.zeros_like(total), z.shape[1] // rows.shape[1]
            sums = rows[:, panel].reshape(len(rows), groups, -1).sum(2).astype(np.float32)
            for group in range(groups):
                minima = fma(z[:, panel * groups + group].astype(np.float32), sums[:, group, None], minima)
            total = fma(minima, -(base[:, panel].astype(np.float32) * scale), total)
    return total


def float_codes_times(tensor: QuantTensor, x: F32) -> F32:
    """Rows times a matrix of codes of floats: even and odd inputs of 32 apart, then both together times the scale."""
    parts, affine = tensor.format.split(tensor.data), tensor.format.affine
    assert affine is not None, f"{tensor.format.name} has codes"
    levels = np.array(affine.levels, np.float32)[parts["codes"]]
    total = np.zeros((len(x), len(levels)), np.float32)
    for first in range(0, x.shape[1], GROUP):
        sums = [np.zeros_like(total), np.zeros_like(total)]
        for k in range(first, first + GROUP):
            sums[k % 2] = fma(levels[None, :, k], x[:, k, None], sums[k % 2])
        total = fma(sums[0] + sums[1], parts["d"][None, :, first // tensor.format.block_size], total)
    return total


def numbers_times(tensor: F32, x: F32) -> F32:
    """Products [T, N] of f32 or f16 weights [N, K]: even inputs, odd inputs, then both."""
    sums = [np.zeros((len(x), len(tensor)), np.float32) for _ in range(2)]
    for k in range(x.shape[1]):
        sums[k % 2] = fma(tensor[:, k], x[:, k, None], sums[k % 2])
    return sums[0] + sums[1]


def pairs_times(tensor: F32, x: F32) -> F32:
    """Products [T, N] of bf16 weights [N, K] with rows rounded to bf16, as Intel's manual has TDPBF16PS for each 32 inputs: even
    inputs, odd inputs, then both, and a number below the least normal one is zero.
    """
    total = np.zeros((len(x), len(tensor)), np.float32)
    x, tensor = _without_small(x), _without_small(tensor)
    for group in range(0, x.shape[1], GROUP):
        sums = [np.zeros_like(total) for _ in range(2)]
        for k in range(group, min(group + GROUP, x.shape[1])):
            sums[k % 2] = _without_small(fma(tensor[:, k], x[:, k, None], sums[k % 2]))
        total = _without_small(total + _without_small(sums[0] + sums[1]))
    return total


def _without_small(x: F32) -> F32:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)
