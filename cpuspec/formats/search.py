"""Searches for the scales, minima and moves of groups with the least weighted squared error.

`Searches` are implemented twice: here in NumPy, and compiled in `kernels.fit`, which improves each start twice.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Parts = dict[str, NDArray[Any]]  # the contents of blocks or rows: [n, numbers of each]


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
        gain = along * scale if signed else np.where(along > 0, along * scale, 0)  # less squared error than zeros have
        better = gain > best_gain
        best, best_gain = np.where(better, scale, best), np.where(better, gain, best_gain)
    return best


def rounded(values: F32, largest: np.float32) -> F32:
    """Values rounded to whole numbers and cut to 0..largest."""
    return np.clip(np.rint(values), 0, largest)


def inverse(values: F32 | np.floating[Any]) -> F32:
    """1 / values, and 0 where that is not finite."""
    with np.errstate(divide="ignore", over="ignore"):
        inverted = np.float32(1) / values
    return np.where(np.isfinite(inverted), inverted, np.float32(0))


class Searches(NamedTuple):
    """One implementation of all searches. groups, and weights of their errors: F32 [n, k]; weights None are ones.

    scales: (groups, weights, levels) -> the scale [n], of either sign, under which levels, ascending, come nearest.
    lines: (groups, weights, largest, minimum_is_free) -> scales and minima [n] for which scale * code - minimum, codes 0 to
    largest, comes nearest. A minimum is at least 0 unless it is free.
    whole_lines: (groups, weights, units, whole, largest, most) -> the best scales and minima that are whole multiples, 0 to most,
    of units [n] each: `whole` or their neighbours.
    moved: (groups, weights, levels, moves, signs) -> scales and moves [n] for which scale * (level + move) comes nearest. signs:
    whether scales may be below zero.
    moves_of_scales: (groups, weights, scales, levels, moves) -> the least errors [n] and the indices of their moves [n]. scales:
    the absolute values, 0 or more; both signs are tried. Where minus is better, the number of moves is added to the index.
    points: (groups, weights, magnitudes, offered, near) -> the indices [n], from `near`, of the nearest points. magnitudes: those
    that a value may have. offered F32 [all, k, 16], near I32 [all, 16]: the magnitudes and the indices of sixteen points for each
    combination of magnitudes. `offered[i]`: the 16 points nearest to combination i, to which the group's values
    round. i numbers every combination, first value least significant.
    """

    scales: Callable[..., F32]
    lines: Callable[..., tuple[F32, F32]]
    whole_lines: Callable[..., tuple[F32, F32]]
    moved: Callable[..., tuple[F32, F32]]
    moves_of_scales: Callable[..., tuple[F32, F32]]
    points: Callable[..., NDArray[np.int32]]


# Starts of a search for scales. A start fixes which level the largest value maps to: some code steps beyond the last level or
# before it, or a multiple of the last level. A multiple cuts the value off, which pays where codes are few.
_STEPS_BEYOND = tuple(np.linspace(-1.5, 0.9, 5))
_CUTS = (1.2, 1.5, 2.2, 3.5)
# Starts of a search for lines: the length and the begin of a line, as shares of the range of the group. A range ends some steps
# beyond the last code or before it; a cut leaves out one end or both.
_LINE_STEPS_BEYOND = tuple(np.linspace(-1.2, 0.9, 9))
_LINE_CUTS = ((0.94, 0.03), (0.85, 0.07), (0.8, 0.0), (0.8, 0.2), (0.65, 0.17))
MOVED_SHARES = tuple(np.float32(share) for share in (0.8, 1.0))  # starts of `moved`: shares of the scale that just holds a group


def scale_starts(levels: Sequence[float]) -> list[float]:
    """Where each start of `Searches.scales` puts the value of largest magnitude. The first is beside the further end."""
    ends = sorted((levels[0], levels[-1]), key=abs, reverse=True)
    spacing = abs(ends[0]) / (len(levels) // 2)
    return [end * share for end in ends for share in (*(1 + beyond * spacing / abs(end) for beyond in _STEPS_BEYOND), *_CUTS)]


def line_starts(largest: int) -> list[tuple[float, float]]:
    """The length and the begin of each start of `Searches.lines`."""
    return [*((largest / (largest + beyond), 0) for beyond in _LINE_STEPS_BEYOND), *_LINE_CUTS]


def scales(groups: F32, weights: F32 | None, levels: Sequence[float]) -> F32:
    """`Searches.scales`."""
    starts, nearest_level = scale_starts(levels), level_finder(levels)
    peak = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1)
    choices = (nearest_level(groups * (np.float32(start) * inverse(peak))) for start in starts)
    return scale_of_best(groups, weights, peak[:, 0] * inverse(np.float32(starts[0])), choices, signed=True)


def lines(groups: F32, weights: F32 | None, largest: int, minimum_is_free: bool) -> tuple[F32, F32]:
    """`Searches.lines`."""
    weights = np.ones_like(groups) if weights is None else weights
    low, high, zero = groups.min(axis=1), groups.max(axis=1), np.float32(0)
    low = low if minimum_is_free else np.minimum(low, zero)
    span, total, total_x = high - low, weights.sum(axis=1), (weights * groups).sum(axis=1)
    best_scale, best_start, best_error = span / largest, low, np.full(span.shape, np.inf, np.float32)
    for length, begin in line_starts(largest):
        scale, start = span * np.float32(length / largest), low + span * np.float32(begin)
        codes = rounded((groups - start[:, None]) * inverse(scale)[:, None], np.float32(largest))
        heavy = weights * codes
        sums, squares, products = heavy.sum(axis=1), (heavy * codes).sum(axis=1), (heavy * groups).sum(axis=1)
        slope = (total * products - sums * total_x) * inverse(total * squares - sums * sums)
        fitted_start = (total_x - slope * sums) * inverse(total)
        if not minimum_is_free:
            slope = np.where(fitted_start > 0, products * inverse(squares), slope)
            fitted_start = np.minimum(fitted_start, zero)
        scale, start = (np.where(slope > 0, new, old) for new, old in ((slope, scale), (fitted_start, start)))
        error = (np.square(scale[:, None] * codes + start[:, None] - groups) * weights).sum(axis=1)
        better = error < best_error
        best_scale, best_start = np.where(better, scale, best_scale), np.where(better, start, best_start)
        best_error = np.where(better, error, best_error)
    return best_scale, -best_start


def whole_lines(
    groups: F32, weights: F32 | None, units: tuple[F32, F32], whole: tuple[F32, F32], largest: int, most: int
) -> tuple[F32, F32]:
    """`Searches.whole_lines`."""
    weights = np.ones_like(groups) if weights is None else weights
    tried = [(np.clip(whole[0] + a, 0, most), np.clip(whole[1] + b, 0, most)) for a in (-1, 0, 1) for b in (-1, 0, 1)]
    errors = []
    for scales, minima in tried:
        step, start = (units[0] * scales)[:, None], -(units[1] * minima)[:, None]
        codes = rounded((groups - start) * inverse(step), np.float32(largest))
        errors.append((np.square(step * codes + start - groups) * weights).sum(axis=1))
    best = np.argmin(np.where(np.isfinite(errors), errors, np.inf), axis=0)
    both = [np.choose(best, numbers).astype(np.float32) for numbers in zip(*tried, strict=True)]
    return both[0], both[1]


def moved(groups: F32, weights: F32 | None, levels: Sequence[float], moves: Sequence[float], signs: bool) -> tuple[F32, F32]:
    """`Searches.moved`."""
    low, high, nearest_level = np.float32(levels[0]), np.float32(levels[-1]), level_finder(levels)
    least, most = np.minimum(groups.min(axis=1), 0), np.maximum(groups.max(axis=1), 0)
    best, best_move, best_gain = (most - least) / (high - low), np.zeros_like(least), np.zeros_like(least)
    weighted = groups if weights is None else groups * weights
    for sign in (1, -1)[: 1 + signs]:
        ends = (most, least) if sign > 0 else (-least, -most)
        for move in map(np.float32, moves):
            holding = np.maximum(ends[0] * inverse(high + move), ends[1] * inverse(low + move))
            for share in MOVED_SHARES:
                found = nearest_level(groups * (sign * inverse(holding * share))[:, None] - move) + move
                products = (found * weighted).sum(axis=1)
                scale = products * inverse((found * found if weights is None else found * found * weights).sum(axis=1))
                better = products * scale > best_gain
                best, best_move = np.where(better, scale, best), np.where(better, move, best_move)
                best_gain = np.where(better, products * scale, best_gain)
    return best, best_move


def moves_of_scales(
    groups: F32, weights: F32 | None, scales: F32, levels: Sequence[float], moves: Sequence[float]
) -> tuple[F32, F32]:
    """`Searches.moves_of_scales`."""
    nearest_level, errors = level_finder(levels), []
    for sign in (1, -1):
        scaled = groups * (sign * inverse(scales))[:, None]
        for move in map(np.float32, moves):
            miss = nearest_level(scaled - move) + move - scaled
            errors.append(np.einsum("gk,gk->g", miss, miss if weights is None else miss * weights))
    best = np.argmin(errors, axis=0)
    return np.min(errors, axis=0) * np.square(scales), best.astype(np.float32)


def level_finder(levels: Sequence[float]) -> Callable[[F32], F32]:
    """A function that returns the nearest of ascending levels for each of its values."""
    table, middles = np.array(levels, np.float32), np.add(levels[:-1], levels[1:]) / 2
    if any(level != int(level) for level in levels):
        return lambda scaled: table[np.searchsorted(middles, scaled)]
    # Middles of whole levels are multiples of a half: a table by floor(2 x) is quicker than a search.
    first, last = 2 * int(levels[0]) - 1, 2 * int(levels[-1]) + 1
    by_halves = table[np.searchsorted(middles, np.arange(first, last + 1) / 2, side="right")]
    return lambda scaled: by_halves[(np.clip(np.floor(scaled * 2), first, last) - first).astype(np.int16)]


_ROWS_AT_ONCE = 1 << 9  # groups whose errors are computed together


def points(groups: F32, weights: F32 | None, magnitudes: Sequence[int], offered: F32, near: NDArray[np.int32]) -> NDArray[np.int32]:
    """`Searches.points`."""
    middles = np.add(magnitudes[:-1], magnitudes[1:]) / 2
    numbers = np.searchsorted(middles.astype(np.float32), groups) @ len(magnitudes) ** np.arange(groups.shape[1])
    best = np.empty(len(groups), np.intp)
    for start in range(0, len(groups), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        errors = np.zeros((len(best[rows]), near.shape[1]), np.float32)
        for value in range(groups.shape[1]):  # one after the other: numpy is slow where the inner sums are short
            misses = offered[numbers[rows], value]
            misses -= groups[rows, value, None]
            misses *= misses
            if weights is not None:
                misses *= weights[rows, value, None]
            errors += misses
        best[rows] = errors.argmin(axis=1)
    return near[numbers, best]


IN_NUMPY = Searches(scales, lines, whole_lines, moved, moves_of_scales, points)
