"""Rounding to the nearest values of a format, with scales that are searched for: `Format.encode` where every input counts the same,
and here where inputs count by their importance.

The error of a value counts importance * sqrt(mean square of the row + value^2), as in llama.cpp's quantizers with an importance
matrix: inputs by their mean square, and large weights more than small ones.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from cpuspec.formats import Format, kquants, search
from cpuspec.formats.format import CHUNK_VALUES, F32, U8, Parts, per_group, scales_of
from cpuspec.kernels.encode import encode as encode_compiled

# The smallest and the largest scale of a group, as superblocks store it.
_SCALES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"q2_k": (0, 15), "q3_k": (-32, 31), "q4_k": (0, 63), "q5_k": (0, 63), "q6_k": (-128, 127), "iq4_xs": (-32, 31)}
)
_MOVES = np.linspace(-0.9, 0.9, 13, dtype=np.float32)  # codes by which searches stretch the range of a group


class Grid(NamedTuple):
    """The values that rows may have: scale * level(code) - offset, both F32 [rows, groups]."""

    scale: F32
    offset: F32


def encode(format: Format, values: F32, importance: F32 | None = None) -> U8:
    """Rows [N, K] in the format, U8 [N, row_bytes(K)].

    importance: of the K inputs, such as the mean squares of what they are multiplied with; None where all count the same.
    Raises FormatError as `Format.encode` does.
    """
    if importance is None or format.affine is None or format.code_bits == 8:
        return encode_compiled(format, values)
    rows, columns = values.shape
    out = np.empty((rows, format.row_bytes(columns)), np.uint8)
    step = max(1, CHUNK_VALUES // columns)
    for start in range(0, rows, step):
        x = np.ascontiguousarray(values[start : start + step], np.float32)
        plain = encode_compiled(format, x)  # refuses what the format cannot hold
        weights = importance * np.sqrt(np.square(x).mean(axis=1, keepdims=True) + np.square(x))
        blocks, weights = x.reshape(-1, format.block_size), weights.reshape(-1, format.block_size)
        if format.encode_weighed:
            fitted = format.encode_weighed(blocks, weights)
        else:
            parts = format.split(plain.reshape(-1, format.block_bytes))
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                fitted = _fitted(format, blocks, weights, parts)
        out[start : start + step] = format.join(fitted).reshape(len(x), -1)
    return out


def grid_of(format: Format, parts: Parts) -> Grid:
    """The values that the scales of split rows allow."""
    assert format.affine, "a format of plain numbers has no grid"
    d, s, base, z = scales_of(parts)
    scale = per_group(d, s)
    if base is None and z is None:
        return Grid(scale, scale * np.float32(0 if format.affine.levels else format.affine.zero))
    return Grid(scale, per_group(d if base is None else base, z) * np.float32(format.affine.zero))


def nearest(format: Format, x: F32, grid: Grid) -> U8:
    """The codes whose values come nearest to x. The factors of the grid have shapes that broadcast to that of x."""
    assert format.affine, "a format of plain numbers has no codes"
    scaled = (x + grid.offset) * search.inverse(grid.scale)
    if format.affine.levels is None:
        return np.clip(np.rint(scaled), 0, (1 << format.code_bits) - 1).astype(np.uint8)
    levels = np.array(format.affine.levels, np.float32)
    order = np.argsort(levels, kind="stable")
    middles = (levels[order][1:] + levels[order][:-1]) / 2
    return order.astype(np.uint8)[np.searchsorted(middles, scaled)]


def values_of(format: Format, codes: U8, grid: Grid) -> F32:
    """The values of codes."""
    assert format.affine, "a format of plain numbers has no codes"
    levels = format.affine.levels
    numbers = codes.astype(np.float32) if levels is None else np.array(levels, np.float32)[codes]
    return numbers * grid.scale - grid.offset


def _fitted(format: Format, x: F32, weights: F32, plain: Parts) -> Parts:
    """The parts of blocks [n, block_size] with the least weighted error found: those of `plain`, or better ones."""
    assert format.affine, "checked by `encode`"
    groups = grid_of(format, plain).scale.shape[1]
    x, weights = x.reshape(len(x), groups, -1), weights.reshape(len(x), groups, -1)
    if "base" in plain or "z" in plain:
        scale, minimum = _fit_with_minimum(format, x, weights)
        stored = _store_with_minimum(format, scale, minimum)
    elif "e" in plain or ("s" in plain and format.name not in _SCALES):
        return plain  # scales are powers of two, or of a kind that is not searched for
    else:
        stored = _store(format, _fit(format, x, weights))
    best, best_error = dict(plain), _error(format, x, weights, plain)
    found = {**plain, **stored}
    grid = grid_of(format, found)
    found["codes"] = nearest(format, x, Grid(grid.scale[:, :, None], grid.offset[:, :, None])).reshape(len(x), -1)
    better = _error(format, x, weights, found) < best_error
    for name, part in found.items():
        best[name] = np.where(better.reshape(-1, *[1] * (part.ndim - 1)), part, best[name])
    return best


def _error(format: Format, x: F32, weights: F32, parts: Parts) -> F32:
    """The weighted squared error of each block [n], of values [n, groups, k]."""
    grid = grid_of(format, parts)
    codes = parts["codes"].reshape(x.shape)
    miss = values_of(format, codes, Grid(grid.scale[:, :, None], grid.offset[:, :, None])) - x
    error: F32 = (miss * miss * weights).sum(axis=(1, 2))
    return np.where(np.isfinite(error), error, np.float32(np.inf))


def _fit(format: Format, x: F32, weights: F32) -> F32:
    """The scale [n, g] of groups [n, g, k] around zero."""
    assert format.affine, "checked by `encode`"
    zero = 0.0 if format.affine.levels else format.affine.zero
    levels = np.array(format.affine.levels or range(1 << format.code_bits), np.float32) - np.float32(zero)
    furthest = levels[np.abs(levels).argmax()]
    spacing = np.abs(furthest) / (1 << format.code_bits - 1)
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=2)[:, :, None], axis=2)
    best, best_error = peak / furthest, np.full_like(peak, np.inf)
    weighted = weights * x
    for move in _MOVES:
        scale = peak / (furthest + np.sign(furthest) * move * spacing)
        for _ in range(2):
            codes = values_of(
                format,
                nearest(format, x, Grid(scale, scale * np.float32(zero))),
                Grid(np.ones(1, np.float32), np.full(1, zero, np.float32)),
            )
            products, squares = (codes * weighted).sum(axis=2, keepdims=True), (codes * codes * weights).sum(axis=2, keepdims=True)
            scale = products * search.inverse(squares)
        error = -products * scale  # less the same number for every scale
        better = error < best_error
        best, best_error = np.where(better, scale, best), np.where(better, error, best_error)
    return best[:, :, 0]


def _store(format: Format, scale: F32) -> Parts:
    """The parts that hold scales [n, g] best."""
    if format.name not in _SCALES:
        return {"d": scale.astype("<f2")}
    low, high = _SCALES[format.name]
    peak = np.take_along_axis(scale, np.abs(scale).argmax(axis=1)[:, None], axis=1)
    d = (peak / low).astype("<f2")
    s = np.clip(np.rint(scale * search.inverse(d.astype(np.float32))), low, high).astype(np.int8)
    return {"d": d, "s": s, **({"scales": kquants.pack_signed_scales(s)} if format.name == "q3_k" else {})}


def _fit_with_minimum(format: Format, x: F32, weights: F32) -> tuple[F32, F32]:
    """Scale and minimum [n, g], value = scale * code - minimum, of groups [n, g, k] by the line of least weighted squares."""
    largest = np.float32((1 << format.code_bits) - 1)
    free = format.name in ("q4_1", "q5_1")  # whose minimum may be above zero
    low, high = x.min(axis=2, keepdims=True), x.max(axis=2, keepdims=True)
    low = low if free else np.minimum(low, 0)
    span = high - low
    best_scale, best_minimum, best_error = span / largest, -low, np.full_like(span, np.inf)
    weighted = weights * x
    total, total_x = weights.sum(axis=2, keepdims=True), weighted.sum(axis=2, keepdims=True)
    for move in _MOVES:
        scale, minimum = span / (largest + move), -low
        for _ in range(2):
            codes = np.clip(np.rint((x + minimum) * search.inverse(scale)), 0, largest)
            heavy = weights * codes
            sums, squares = heavy.sum(axis=2, keepdims=True), (heavy * codes).sum(axis=2, keepdims=True)
            products = (weighted * codes).sum(axis=2, keepdims=True)
            slope = (total * products - sums * total_x) * search.inverse(total * squares - sums * sums)
            start = (total_x - slope * sums) * search.inverse(total)
            if not free:
                slope = np.where(start > 0, products * search.inverse(squares), slope)
                start = np.minimum(start, 0)
            scale, minimum = np.where(slope > 0, slope, scale), np.where(slope > 0, -start, minimum)
        miss = scale * codes - minimum - x
        error = (miss * miss * weights).sum(axis=2, keepdims=True)
        better = error < best_error
        best_scale, best_minimum = np.where(better, scale, best_scale), np.where(better, minimum, best_minimum)
        best_error = np.where(better, error, best_error)
    return best_scale[:, :, 0], best_minimum[:, :, 0]


def _store_with_minimum(format: Format, scale: F32, minimum: F32) -> Parts:
    """The parts that hold scales and minima [n, g] best."""
    assert format.affine, "checked by `encode`"
    zero = np.float32(format.affine.zero)
    if format.name in _SCALES:
        largest = _SCALES[format.name][1]
        d, base = ((part.max(axis=1, keepdims=True) / largest).astype("<f2") for part in (scale, minimum))
        s = np.clip(np.rint(scale * search.inverse(d.astype(np.float32))), 0, largest).astype(np.uint8)
        z = np.clip(np.rint(minimum * search.inverse(base.astype(np.float32))), 0, largest).astype(np.uint8)
        return {"d": d, "base": base, "s": s, "z": z, **({"scales": s | z << 4} if format.name == "q2_k" else {})}
    d = scale.astype("<f2")
    if format.name in ("q4_1", "q5_1"):
        return {"d": d, "base": (minimum / zero).astype("<f2")}
    largest_zero = 15 if zero == 1 else 255
    z = np.clip(np.rint(minimum * search.inverse(d.astype(np.float32) * zero)), 0, largest_zero).astype(np.uint8)
    return {"d": d, "z": z}
