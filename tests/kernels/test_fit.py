"""Searches find scales that leave about the least error there is, each group by itself."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cpuspec.formats import grids, nl4, nonlinear
from cpuspec.formats.search import IN_NUMPY, Searches
from cpuspec.kernels import fit
from cpuspec.kernels.fit import COMPILED

every = pytest.mark.parametrize("find", [COMPILED, IN_NUMPY], ids=["compiled", "numpy"])
LEVELS = {"signed": range(-4, 4), "three": (-1, 0, 1), "table": nonlinear.LEVELS}


def _groups(number: int, size: int = 32) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(number)
    return rng.standard_t(5, (number, size)).astype(np.float32), rng.lognormal(0, 1, (number, size)).astype(np.float32)


def _error(x: np.ndarray, weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The least weighted error of each group [n, k], of which each value may be any of `values` [n, levels]."""
    return (np.square(np.abs(x[:, :, None] - values[:, None]).min(axis=2)) * weights).sum(axis=1)


@every
@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("size", [16, 32, 128])
def test_few_scales_leave_less_error_than_those_found(name: str, size: int, find: Searches) -> None:
    x, weights = _groups(50, size)
    levels = np.array(LEVELS[name], np.float64)
    found = _error(x, weights, find.scales(x, weights, LEVELS[name])[:, None] * levels)
    all_scales = np.abs(x).max(axis=1)[:, None] / np.abs(levels).max() * np.linspace(-2, 2, 1001)
    least = np.min([_error(x, weights, scale[:, None] * levels) for scale in all_scales.T], axis=0)
    assert found.sum() < 1.03 * least.sum()
    assert (found < np.square(x * np.sqrt(weights)).sum(axis=1)).all()


@every
@pytest.mark.parametrize("is_free", [False, True])
def test_few_lines_leave_less_error_than_those_found(is_free: bool, find: Searches) -> None:
    x, weights = _groups(40)
    x += np.linspace(-3, 3, len(x), dtype=np.float32)[:, None]
    scale, minimum = find.lines(x, weights, 7, is_free)
    assert is_free or (minimum >= 0).all()
    found = _error(x, weights, scale[:, None] * np.arange(8) - minimum[:, None])
    low = x.min(axis=1) if is_free else np.minimum(x.min(axis=1), 0)
    span = x.max(axis=1) - low
    least = np.full(len(x), np.inf)
    for share in np.linspace(0.5, 1.1, 31):
        for start in np.linspace(-0.1, 0.5, 31):
            first = low + start * span if is_free else np.minimum(low + start * span, 0)
            least = np.minimum(least, _error(x, weights, (first[:, None] + share * span[:, None] / 7 * np.arange(8))))
    assert found.sum() < 1.04 * least.sum()


@every
def test_whole_scales_and_minima_are_the_best_of_nine(find: Searches) -> None:
    x, weights = _groups(35)
    scale, minimum = find.lines(x, weights, 15, minimum_is_free=False)
    units = tuple(np.full_like(part, part.max() / 63) for part in (scale, minimum))
    whole = tuple(np.clip(np.rint(part / unit), 0, 63) for part, unit in zip((scale, minimum), units, strict=True))

    def error(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
        return _error(x, weights, (units[0] * scales)[:, None] * np.arange(16) - (units[1] * minima)[:, None])

    found = find.whole_lines(x, weights, units, whole, 15, 63)
    assert any((one != given).any() for one, given in zip(found, whole, strict=True))
    moves = [(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1)]
    all_nine = [error(np.clip(whole[0] + a, 0, 63), np.clip(whole[1] + b, 0, 63)) for a, b in moves]
    assert np.allclose(error(*found), np.min(all_nine, axis=0), rtol=1e-4)


@every
@pytest.mark.parametrize("signs", [False, True])
def test_few_grids_that_move_leave_less_error_than_those_found(signs: bool, find: Searches) -> None:
    x, weights = _groups(30)
    scale, move = find.moved(x, weights, nl4.LEVELS, nl4.MOVES, signs)
    assert set(move) <= set(nl4.MOVES)
    assert signs == (scale < 0).any()
    levels = np.array(nl4.LEVELS)
    found = _error(x, weights, scale[:, None] * (levels + move[:, None]))
    least = np.full(len(x), np.inf)
    for one in nl4.MOVES:
        for share in np.linspace(0.6, 1.4, 41):
            for sign in (1, -1) if signs else (1,):
                tried = sign * share * (x.max(axis=1) - x.min(axis=1))[:, None] / (levels[-1] - levels[0])
                least = np.minimum(least, _error(x, weights, tried * (levels + one)))
    assert found.sum() < 1.03 * least.sum()


@every
def test_moves_under_given_scales_are_the_best_ones(find: Searches) -> None:
    x, weights = _groups(33)
    scales = np.abs(x).max(axis=1) / 30
    error, index = find.moves_of_scales(x, weights, scales, nl4.LEVELS, nl4.XS_MOVES)
    count = len(nl4.XS_MOVES)
    for n in range(2 * count):
        sign, move = (-1 if n >= count else 1), nl4.XS_MOVES[n % count]
        own = _error(x, weights, sign * scales[:, None] * np.add(nl4.LEVELS, move))
        assert (own > error * (1 - 1e-4)).all()
        assert np.allclose(own[index == n], error[index == n], rtol=1e-4)


GRIDS = {2: grids._IQ2_XXS, 3: grids._IQ3_S, 1: grids._IQ1}


@pytest.mark.parametrize("bits", GRIDS)
def test_points_are_as_near_as_those_that_numpy_finds(bits: int) -> None:
    grid = GRIDS[bits]
    rng = np.random.default_rng(bits)
    sizes = (rng.standard_normal((100, grid.dims)) * grid.magnitudes[-1]).astype(np.float32)
    weights = rng.lognormal(0, 1, sizes.shape).astype(np.float32)
    magnitudes = np.array(grid.magnitudes, np.float32)
    found, wanted = (
        (np.square(magnitudes[grid.nearest(sizes, weights, find)] - sizes) * weights).sum(axis=1) for find in (COMPILED, IN_NUMPY)
    )
    assert np.allclose(found, wanted, rtol=1e-5)
    with pytest.raises(ValueError, match="near"):
        fit.points(sizes, weights, grid.magnitudes, grid.offered, grid.near[:-1])


SEARCHES = {
    "scales": lambda x, w: (fit.scales(x, w, nonlinear.LEVELS),),
    "lines": lambda x, w: fit.lines(x, w, 15, minimum_is_free=False),
    "whole_lines": lambda x, w: fit.whole_lines(x, w, (np.abs(x).max(axis=1) / 99,) * 2, (np.ones(len(x)),) * 2, 15, 63),
    "moved": lambda x, w: fit.moved(x, w, nl4.LEVELS, nl4.MOVES, signs=True),
    "points": lambda x, w: (fit.points(x[:, :4], w[:, :4], GRIDS[3].magnitudes, GRIDS[3].offered, GRIDS[3].near),),
    "moves_of_scales": lambda x, w: fit.moves_of_scales(x, w, np.abs(x).max(axis=1) / 30, nl4.LEVELS, nl4.XS_MOVES),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_what_is_found_for_a_group_does_not_depend_on_its_company_or_on_other_threads(name: str) -> None:
    x, weights = _groups(37)
    together = SEARCHES[name](x, weights)
    for count in (1, 15, 16, 17):
        some = SEARCHES[name](x[5 : 5 + count], weights[5 : 5 + count])
        assert all(np.array_equal(part, whole[5 : 5 + count]) for part, whole in zip(some, together, strict=True))
    with ThreadPoolExecutor(4) as pool:
        for again in pool.map(lambda _: SEARCHES[name](x, weights), range(16)):
            assert all(np.array_equal(part, whole) for part, whole in zip(again, together, strict=True))


@pytest.mark.parametrize("name", SEARCHES)
def test_zeros_and_weights_of_zero_give_numbers(name: str) -> None:
    x, weights = _groups(16)
    x[3], weights[5], x[7, 1:] = 0, 0, 0
    assert all(np.isfinite(part).all() for part in SEARCHES[name](x, weights))
