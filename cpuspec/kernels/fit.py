"""`formats.search.Searches` compiled: sixteen groups at a time.

Each grid that is tried takes a pass over the values: in numpy 100 to 500 ns a weight in all, here some 10.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats.search import F32, MOVED_SHARES, Searches, line_starts, scale_starts
from cpuspec.kernels import machine_code, simd
from cpuspec.kernels.blocks import inverted, larger, lay, rounded, smaller, splat
from cpuspec.kernels.options import compiled
from cpuspec.kernels.simd import LANES

_TURNS = 2  # of a search from a start
_ZERO, _ONE, _INFINITY = np.float32(0), np.float32(1), np.float32(np.inf)


def scales(groups: F32, weights: F32 | None, levels: Sequence[float]) -> F32:
    """`Searches.scales`: from each start levels are chosen, and the scale of least squares for these is the next one."""
    whole = bool((np.diff(levels) == 1).all())
    table = np.array([*_padded(levels[:: len(levels) - 1] if whole else levels), *scale_starts(levels)], np.float32)
    out = np.empty(_whole(len(groups)), np.float32)
    _run("fit-scales", _scales, groups, weights, table, 0, whole, out)
    return out[: len(groups)]


def lines(groups: F32, weights: F32 | None, largest: int, minimum_is_free: bool) -> tuple[F32, F32]:
    """`Searches.lines`: from each start codes are chosen, and their line of least squares is the next one."""
    out = np.empty((2, _whole(len(groups))), np.float32)
    starts = np.array(line_starts(largest), np.float32).reshape(-1)
    _run("fit-lines", _lines, groups, weights, starts, largest, minimum_is_free, out)
    return out[0, : len(groups)], out[1, : len(groups)]


def whole_lines(
    groups: F32, weights: F32 | None, units: tuple[F32, F32], whole: tuple[F32, F32], largest: int, most: int
) -> tuple[F32, F32]:
    """`Searches.whole_lines`."""
    out = np.zeros((4, _whole(len(groups))), np.float32)
    out[:, : len(groups)] = *units, *whole
    _run("fit-whole-lines", _whole_lines, groups, weights, np.zeros(1, np.float32), largest, most, out)
    return out[2, : len(groups)], out[3, : len(groups)]


def moved(groups: F32, weights: F32 | None, levels: Sequence[float], moves: Sequence[float], signs: bool) -> tuple[F32, F32]:
    """`Searches.moved`: all moves are tried, with several scales."""
    table = np.array([*_padded(levels), *moves], np.float32)
    out = np.empty((2, _whole(len(groups))), np.float32)
    _run("fit-moved", _moved, groups, weights, table, 0, signs, out)
    return out[0, : len(groups)], out[1, : len(groups)]


def moves_of_scales(
    groups: F32, weights: F32 | None, scales: F32, levels: Sequence[float], moves: Sequence[float]
) -> tuple[F32, F32]:
    """`Searches.moves_of_scales`."""
    table = np.array([*_padded(levels), *moves], np.float32)
    out = np.zeros((2, _whole(len(groups))), np.float32)
    out[0, : len(groups)] = scales
    _run("fit-moves", _moves_of_scales, groups, weights, table, 0, False, out)
    return out[0, : len(groups)], out[1, : len(groups)]


def points(sizes: F32, weights: F32 | None, magnitudes: Sequence[int], offered: F32, near: NDArray[np.int32]) -> NDArray[np.int32]:
    """`Searches.points`."""
    number = len(magnitudes) ** sizes.shape[1]
    wanted = (number, sizes.shape[1], LANES), (number, LANES)
    if (offered.shape, near.shape) != wanted:
        raise ValueError(f"offered are {list(offered.shape)} and near {list(near.shape)}, wanted {' and '.join(map(str, wanted))}")
    offered, near = np.ascontiguousarray(offered, np.float32), np.ascontiguousarray(near, np.int32)
    middles = np.array(_middles(magnitudes), np.float32)
    out = np.empty(len(sizes), np.int32)
    _run("fit-points", _points, sizes, weights, middles, offered.ctypes.data, near.ctypes.data, out)
    return out


def _middles(levels: Sequence[float]) -> list[float]:
    return list(np.add(levels[:-1], levels[1:]) / 2)


def _padded(levels: Sequence[float]) -> list[float]:
    """Sixteen levels, of which the last may repeat, and what lies in the middle of each two. Raises ValueError for more levels."""
    if (missing := LANES - len(levels)) < 0:
        raise ValueError(f"got {len(levels)} levels, wanted at most {LANES}")
    return [*levels, *[levels[-1]] * missing, *_middles(levels), *[math.inf] * (missing + 1)]


def _whole(count: int) -> int:
    """The least whole number of sixteens that holds so many."""
    return -(-count // LANES) * LANES


# A search over sixteen groups, one in each lane. Its arguments:
#   x, w: addresses of the values and of their weights
#   size: values of a group
#   numbers, num_numbers: address and count of its table of floats, such as levels, moves or starts
#   first, second: two integers that differ by search
#   out: address of its results
#   row: bytes from one result to the next of the same groups
# `_points` goes over all groups itself, with the arguments of `search_all` (`_by_sixteens`).
Search = Callable[..., None]


def _run(
    name: str, search: Search, groups: F32, weights: F32 | None, numbers: F32, first: int, second: int, out: NDArray[Any]
) -> None:
    weights = np.ones_like(groups) if weights is None else weights
    if groups.shape != weights.shape or groups.ndim != 2 or not groups.shape[1]:
        raise ValueError(f"groups are {list(groups.shape)} and their weights {list(weights.shape)}, wanted [n, k] both")
    x, w = (np.ascontiguousarray(part, np.float32) for part in (groups, weights))
    room = np.empty(2 * LANES * x.shape[1], np.float32)
    addresses = [part.ctypes.data for part in (x, w, numbers, out, room)]
    _compiled(name, search)(*addresses, len(x), x.shape[1], len(numbers), int(first), int(second))


@cache
def _compiled(name: str, search: Search) -> Search:
    address = machine_code.address(name, 10, lambda: search if search is _points else _by_sixteens(search))
    call: Search = machine_code.function(address, 10)
    return call


def _by_sixteens(search: Search) -> Callable[..., None]:
    """A search over all groups, to be compiled: addresses of groups and weights, F32 [n, size], of numbers, out and room; n, size,
    how many numbers, two numbers of the search.
    """
    find = compiled(search)

    def search_all(groups, weights, numbers, out, room, number, size, num_numbers, first, second):
        x, w, row = room, room + 64 * size, 4 * LANES * ((number + LANES - 1) // LANES)
        for start in range(0, number, LANES):
            lanes = min(LANES, number - start)
            lay(groups, start, lanes, size, x)
            lay(weights, start, lanes, size, w)
            find(x, w, size, numbers, num_numbers, first, second, out + 4 * start, row)

    return search_all


@compiled
def _level(scaled, table):
    """The nearest level, by bisection. table: as `_padded` has it."""
    levels, middles = simd.load_f32(table), simd.load_f32(table + 4 * LANES)
    index = simd.splat_i32(simd.int32(0))
    for step in (8, 4, 2, 1):
        middle = simd.lanes_at(middles, index + simd.splat_i32(simd.int32(step - 1)))
        above = index + simd.splat_i32(simd.int32(step))
        index = simd.as_i32(simd.where_less(middle, scaled, simd.as_f32(above), simd.as_f32(index)))
    return simd.lanes_at(levels, index)


@compiled
def _sums(x, w, size, inverse, move, table, whole):
    """For each lane the weighted sums of value * moved level, and of moved levels squared."""
    products = squares = splat(_ZERO)
    low, high = splat(simd.peek_f32(table)), splat(simd.peek_f32(table + 4 * (LANES - 1)))
    for i in range(size):
        value = simd.load_f32(x + 64 * i)
        scaled = simd.fma(value, inverse, splat(_ZERO) - move)
        level = (smaller(larger(simd.round_f32(scaled), low), high) if whole else _level(scaled, table)) + move
        heavy = level * simd.load_f32(w + 64 * i)
        products, squares = simd.fma(heavy, value, products), simd.fma(heavy, level, squares)
    return products, squares


def _scales(x, w, size, table, num_numbers, _, whole, out, _row):
    starts, num_starts = table + 8 * LANES, num_numbers - 2 * LANES
    peak = splat(_ZERO)
    for i in range(size):
        value = simd.load_f32(x + 64 * i)
        peak = simd.where_less(simd.abs_f32(peak), simd.abs_f32(value), value, peak)
    best, best_gain = peak * inverted(splat(simd.peek_f32(starts))), splat(_ZERO)
    for n in range(num_starts):
        inverse = splat(simd.peek_f32(starts + 4 * n)) * inverted(peak)
        scale = gain = splat(_ZERO)
        for _ in range(_TURNS):
            products, squares = _sums(x, w, size, inverse, splat(_ZERO), table, whole)
            scale = products * inverted(squares)
            gain = products * scale  # reduction of the squared error against a scale of 0
            inverse = inverted(scale)
        best = simd.where_less(best_gain, gain, scale, best)
        best_gain = larger(gain, best_gain)
    simd.store_f32(out, best)


def _lines(x, w, size, starts, num_numbers, largest_code, free, out, row):
    largest = splat(simd.to_float(largest_code))
    low = high = simd.load_f32(x)
    total = total_x = splat(_ZERO)
    for i in range(size):
        value, weight = simd.load_f32(x + 64 * i), simd.load_f32(w + 64 * i)
        low, high = smaller(value, low), larger(value, high)
        total, total_x = total + weight, simd.fma(weight, value, total_x)
    if not free:
        low = smaller(low, splat(_ZERO))
    span = high - low
    best_scale, best_start, best_error = span * inverted(largest), low, splat(_INFINITY)
    for n in range(num_numbers // 2):
        share, place = splat(simd.peek_f32(starts + 8 * n)), splat(simd.peek_f32(starts + 8 * n + 4))
        scale, start = span * share * inverted(largest), low + span * place
        error = splat(_ZERO)
        for turn in range(_TURNS + 1):  # the last one only tells the error
            inverse = inverted(scale)
            sums = squares = products = error = splat(_ZERO)
            for i in range(size):
                value, weight = simd.load_f32(x + 64 * i), simd.load_f32(w + 64 * i)
                code = rounded((value - start) * inverse, largest)
                heavy = weight * code
                sums, squares, products = sums + heavy, simd.fma(heavy, code, squares), simd.fma(heavy, value, products)
                miss = simd.fma(scale, code, start) - value
                error = simd.fma(miss * miss, weight, error)
            if turn < _TURNS:
                slope = total * products - sums * total_x
                slope = slope * inverted(total * squares - sums * sums)
                fitted = (total_x - slope * sums) * inverted(total)
                if not free:
                    above = splat(_ZERO)
                    slope = simd.where_less(above, fitted, products * inverted(squares), slope)
                    fitted = smaller(fitted, above)
                start = simd.where_less(splat(_ZERO), slope, fitted, start)
                scale = simd.where_less(splat(_ZERO), slope, slope, scale)
        best_scale = simd.where_less(error, best_error, scale, best_scale)
        best_start = simd.where_less(error, best_error, start, best_start)
        best_error = smaller(error, best_error)
    simd.store_f32(out, best_scale)
    simd.store_f32(out + row, splat(_ZERO) - best_start)


def _whole_lines(x, w, size, _numbers, _num_numbers, largest_code, most_whole, out, row):
    largest, most = splat(simd.to_float(largest_code)), splat(simd.to_float(most_whole))
    unit, unit_of_minima = simd.load_f32(out), simd.load_f32(out + row)
    scale, minimum = simd.load_f32(out + 2 * row), simd.load_f32(out + 3 * row)
    best_scale, best_minimum, best_error = scale, minimum, splat(_INFINITY)
    for n in range(9):
        own_scale = rounded(scale + splat(simd.to_float(n // 3 - 1)), most)
        own_minimum = rounded(minimum + splat(simd.to_float(n % 3 - 1)), most)
        step, start = unit * own_scale, splat(_ZERO) - unit_of_minima * own_minimum
        inverse = inverted(step)
        error = splat(_ZERO)
        for i in range(size):
            value = simd.load_f32(x + 64 * i)
            miss = simd.fma(step, rounded((value - start) * inverse, largest), start) - value
            error = simd.fma(miss * miss, simd.load_f32(w + 64 * i), error)
        best_scale = simd.where_less(error, best_error, own_scale, best_scale)
        best_minimum = simd.where_less(error, best_error, own_minimum, best_minimum)
        best_error = smaller(error, best_error)
    simd.store_f32(out + 2 * row, best_scale)
    simd.store_f32(out + 3 * row, best_minimum)


def _moved(x, w, size, table, num_numbers, _, signs, out, row):
    moves, num_moves = table + 8 * LANES, num_numbers - 2 * LANES
    low, high = splat(simd.peek_f32(table)), splat(simd.peek_f32(table + 4 * (LANES - 1)))
    least = most = splat(_ZERO)
    for i in range(size):
        value = simd.load_f32(x + 64 * i)
        least, most = smaller(value, least), larger(value, most)
    best, best_move, best_gain = (most - least) * inverted(high - low), splat(_ZERO), splat(_ZERO)
    for n in range((1 + signs) * num_moves):
        move = splat(simd.peek_f32(moves + 4 * (n % num_moves)))
        up, down = most * inverted(high + move), least * inverted(low + move)
        sign = splat(_ONE)
        if n >= num_moves:
            up, down, sign = least * inverted(high + move), most * inverted(low + move), splat(-_ONE)
            up, down = splat(_ZERO) - up, splat(_ZERO) - down
        holding = larger(up, down)
        for share in MOVED_SHARES:
            inverse = sign * inverted(holding * splat(share))
            scale = gain = splat(_ZERO)
            for _ in range(_TURNS):
                products, squares = _sums(x, w, size, inverse, move, table, False)
                scale = products * inverted(squares)
                gain = products * scale
                inverse = inverted(scale)
            best = simd.where_less(best_gain, gain, scale, best)
            best_move = simd.where_less(best_gain, gain, move, best_move)
            best_gain = larger(gain, best_gain)
    simd.store_f32(out, best)
    simd.store_f32(out + row, best_move)


def _moves_of_scales(x, w, size, table, num_numbers, _first, _second, out, row):
    moves, num_moves = table + 8 * LANES, num_numbers - 2 * LANES
    scale = simd.load_f32(out)
    inverse = inverted(scale)
    best_error, best = splat(_INFINITY), splat(_ZERO)
    for n in range(2 * num_moves):
        move = splat(_ZERO) - splat(simd.peek_f32(moves + 4 * (n % num_moves)))
        if n == num_moves:
            inverse = splat(_ZERO) - inverse
        error = splat(_ZERO)
        for i in range(size):
            scaled = simd.fma(simd.load_f32(x + 64 * i), inverse, move)
            miss = _level(scaled, table) - scaled
            error = simd.fma(miss * miss, simd.load_f32(w + 64 * i), error)
        best = simd.where_less(error, best_error, splat(simd.to_float(n)), best)
        best_error = smaller(error, best_error)
    simd.store_f32(out, best_error * scale * scale)
    simd.store_f32(out + row, best)


def _points(groups, weights, middles, out, _room, number, size, num_middles, offered, near):
    for n in range(number):
        x, w = groups + 4 * size * n, weights + 4 * size * n
        point, step = 0, 1
        for i in range(size):
            value = simd.peek_f32(x + 4 * i)
            for place in range(num_middles):
                if simd.peek_f32(middles + 4 * place) < value:
                    point += step
            step *= num_middles + 1
        error = splat(_ZERO)
        for i in range(size):
            miss = simd.load_f32(offered + 64 * (size * point + i)) - splat(simd.peek_f32(x + 4 * i))
            error = simd.fma(miss * miss, splat(simd.peek_f32(w + 4 * i)), error)
        best = simd.first_equal(error, splat(simd.min_lanes(error)))
        simd.poke_i32(out + 4 * n, simd.peek_i32(near + 64 * point + 4 * min(best, LANES - 1)))


COMPILED = Searches(scales, lines, whole_lines, moved, moves_of_scales, points)
