"""Rounding to the nearest values of a format, with scales that are searched for: `Format.encode` where every input counts the same,
and here where inputs count by their importance.

The error of a value counts importance * sqrt(mean square of the row + value^2), as in llama.cpp's quantizers with an importance
matrix: inputs by their mean square, and large weights more than small ones.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats import Format, grids, mx, nl4, search
from cpuspec.formats.format import CHUNK_VALUES, F32, U8, Parts, per_group, scales_of
from cpuspec.kernels import fit
from cpuspec.kernels.encode import encode as encode_compiled

# The smallest and the largest scale of a group, as superblocks store it.
_SCALES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"q2_k": (0, 15), "q3_k": (-32, 31), "q4_k": (0, 63), "q5_k": (0, 63), "q6_k": (-128, 127), "iq4_xs": (-32, 31)}
)


_SAFE = 1024  # the scales of smaller values fit every format


class Grid(NamedTuple):
    """The values that rows may have: scale * level(code) - offset, both F32 [rows, groups]."""

    scale: F32
    offset: F32


def encode(format: Format, values: F32, importance: F32 | None = None) -> U8:
    """Rows [N, K] in the format, U8 [N, row_bytes(K)].

    importance: of the K inputs, such as the mean squares of what they are multiplied with; None where all count the same, as they
    do in a rotated format (`scaling.balanced` makes up for that).
    Raises FormatError as `Format.encode` does.
    """
    find = _search_of(format)
    if not find or (importance is None and find is format.encode_weighed):
        return encode_compiled(format, values)
    rows, columns = values.shape
    out = np.empty((rows, format.row_bytes(columns)), np.uint8)
    step = max(1, CHUNK_VALUES // columns)
    for start in range(0, rows, step):
        x = np.ascontiguousarray(values[start : start + step], np.float32)
        if not np.abs(x).max(initial=0) < _SAFE:
            out[start : start + step] = encode_compiled(format, x)  # refuses what the format cannot hold
            continue
        if format.rotated:
            x = format.turned(x.reshape(-1, format.block_size)).reshape(x.shape)
        weights = (
            np.ones_like(x)
            if importance is None or format.rotated
            else importance * np.sqrt(np.square(x).mean(axis=1, keepdims=True) + np.square(x))
        )
        blocks, weights = x.reshape(-1, format.block_size), weights.reshape(-1, format.block_size)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            out[start : start + step] = format.join(find(blocks, weights)).reshape(len(x), -1)
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


def _search_of(format: Format) -> Callable[[F32, F32], Parts] | None:
    """The search for the parts of blocks with the least weighted error, a function of values and weights, F32 [n, block_size]
    each; None for a format that has none.
    """
    if format.affine is None or format.code_bits == 8:
        return None
    if format.name == "nl4_g32":
        return lambda x, weights: nl4.parts_of(x, *fit.moved(x, weights, nl4.LEVELS, nl4.MOVES, signs=True))
    if format.name in ("nl4_xs", "nl4_r"):
        return partial(nl4.encode_xs, search_grids=_grids_of_nl4_xs)
    if format.encode_weighed and format.reader == "grids":
        return partial(format.encode_weighed, nearest=_nearest_points)
    if format.name == "mxfp4":
        return _mxfp4
    like = format.split(np.zeros((1, format.block_bytes), np.uint8))
    if format.encode_weighed or ("s" in like and format.name not in _SCALES):
        return format.encode_weighed  # scales of a kind that is not searched for have none
    return partial(_fitted, format, like)


def _mxfp4(x: F32, weights: F32) -> Parts:
    """The power of two that leaves the least weighted error: that of the largest value, or one beside it."""
    around = np.clip(mx.encode_mxfp4(x)["e"] + np.arange(-1, 2), 0, 254)
    levels = sorted(set(mx.E2M1_DOUBLED))
    errors = [fit.moves_of_scales(x, weights, mx.HALF_SCALES[e], levels, (0,))[0] for e in around.T]
    e = np.take_along_axis(around, np.argmin(errors, axis=0)[:, None], axis=1)
    scale = mx.HALF_SCALES[e]
    codes = nearest(mx.MXFP4, x, Grid(scale, np.zeros_like(scale)))
    return {"e": e, "codes": np.where(codes == 8, np.uint8(0), codes)}  # zeros have no sign


def _nearest_points(grid: grids.Grid, sizes: F32, weights: F32 | None) -> U8:
    weights = np.ones_like(sizes) if weights is None else weights
    return grid.points[fit.points(sizes, weights, grid.magnitudes, grid.offered, grid.near)]


def _grids_of_nl4_xs(groups: F32, weights: F32 | None, scale: F32) -> tuple[F32, F32]:
    assert weights is not None, "`encode` has ones"
    return fit.moves_of_scales(groups, weights, scale, nl4.LEVELS, nl4.XS_MOVES)


def _fitted(format: Format, like: Parts, x: F32, weights: F32) -> Parts:
    """The parts of blocks, which have the parts of `like`, with the scales that leave the least weighted error found."""
    assert format.affine, "checked by `_search_of`"
    groups = grid_of(format, like).scale.shape[1]
    x, weights = x.reshape(len(x), groups, -1), weights.reshape(len(x), groups, -1)
    if "z" in like and "base" not in like and format.affine.zero == 1:
        levels = range(1 << format.code_bits)
        d, move = fit.moved(_flat(x), _flat(weights), levels, [-zero for zero in levels], signs=False)
        stored = {"d": d.astype("<f2").reshape(x.shape[:2]), "z": (-move).astype(np.uint8).reshape(x.shape[:2])}
    elif "base" in like or "z" in like:
        stored = _lines(format, x, weights)
    else:
        stored = _store(format, _fit(format, x, weights))
    scale, offset = (part[:, :, None] for part in grid_of(format, stored))
    return stored | {"codes": nearest(format, x, Grid(scale, offset)).reshape(len(x), -1)}


def _flat(groups: F32) -> F32:
    """Groups [n, g, k] as [n g, k]."""
    return groups.reshape(-1, groups.shape[2])


def _fit(format: Format, x: F32, weights: F32) -> F32:
    """The scale [n, g] of groups [n, g, k] around zero."""
    assert format.affine, "checked by `_search_of`"
    levels = format.affine.levels or [code - format.affine.zero for code in range(1 << format.code_bits)]
    return fit.scales(_flat(x), _flat(weights), sorted(levels)).reshape(x.shape[:2])


def _store(format: Format, scale: F32) -> Parts:
    """The parts that hold scales [n, g] best."""
    if format.name not in _SCALES:
        return {"d": scale.astype("<f2")}
    low, high = _SCALES[format.name]
    peak = np.take_along_axis(scale, np.abs(scale).argmax(axis=1)[:, None], axis=1)
    d = (peak / low).astype("<f2")
    s = np.clip(np.rint(scale * search.inverse(d.astype(np.float32))), low, high).astype(np.int8)
    return {"d": d, "s": s}


def _lines(format: Format, x: F32, weights: F32) -> Parts:
    """The scales and minima of groups [n, g, k], value = scale * code - minimum, that leave the least weighted error."""
    assert format.affine, "checked by `_search_of`"
    groups, group_weights, shape = _flat(x), _flat(weights), x.shape[:2]
    zero, largest = np.float32(format.affine.zero), (1 << format.code_bits) - 1
    free = format.name in ("q4_1", "q5_1")  # whose minimum may be above zero
    scale, minimum = fit.lines(groups, group_weights, largest, free)
    if format.name in _SCALES:
        most = _SCALES[format.name][1]
        d, of_scales, scales = _multiples(scale, shape, most)
        base, of_minima, minima = _multiples(minimum, shape, most)
        found = fit.whole_lines(groups, group_weights, (of_scales, of_minima), (scales, minima), largest, most)
        s, z = (part.astype(np.uint8).reshape(shape) for part in found)
        return {"d": d, "base": base, "s": s, "z": z}
    d, minimum = scale.astype("<f2").reshape(shape), minimum.reshape(shape)
    if free:
        return {"d": d, "base": (minimum / zero).astype("<f2")}
    return {"d": d, "z": np.clip(np.rint(minimum * search.inverse(d.astype(np.float32) * zero)), 0, 255).astype(np.uint8)}


def _multiples(numbers: F32, shape: tuple[int, ...], most: int) -> tuple[NDArray[np.float16], F32, F32]:
    """Numbers of groups, of `shape` [n, g], as multiples 0 to `most` of a unit of each n: the unit, F16 [n, 1]; both by group."""
    unit = (numbers.reshape(shape).max(axis=1, keepdims=True) / most).astype("<f2")
    by_group = np.repeat(unit.astype(np.float32), shape[1])
    return unit, by_group, np.clip(np.rint(numbers * search.inverse(by_group)), 0, most)
