"""Grids that move: what their encoders find among the grids that a block may have."""

import numpy as np
import pytest

from cpuspec.formats import nl4
from cpuspec.formats.nl4 import LEVELS, NL4_XS

GROUPS = 8


def _values() -> np.ndarray:
    """Superblocks of groups whose sizes differ by up to a factor of two."""
    rng = np.random.default_rng(1)
    values = rng.standard_t(6, (12, GROUPS, 32)) * rng.uniform(0.7, 1.4, (12, GROUPS, 1))
    return values.reshape(12, -1).astype(np.float32)


def _misses(values: np.ndarray, blocks: np.ndarray, importance: np.ndarray) -> np.ndarray:
    """The weighed squared error of each group [n, 8] with the nearest of all sixteen values that its grid has."""
    parts = NL4_XS.split(blocks)
    scale, move = parts["d"].astype(np.float64), -parts["z"].astype(np.float64)
    grids = scale[:, :, None, None] * (np.array(LEVELS, np.float64) + move[:, :, None, None])
    nearest = np.abs(values.reshape(-1, GROUPS, 32, 1) - grids).min(axis=3)
    return (nearest**2 * importance.reshape(nearest.shape)).sum(axis=2)


@pytest.mark.parametrize("is_weighed", [False, True])
def test_no_other_steps_signs_and_moves_leave_much_less_error_than_those_found(is_weighed: bool) -> None:
    values = _values()
    importance = np.random.default_rng(2).lognormal(size=values.shape).astype(np.float32) if is_weighed else np.ones_like(values)
    blocks = NL4_XS.join(nl4.encode_xs(values, importance if is_weighed else None))
    found = _misses(values, blocks, importance)
    decoded = NL4_XS.decode(blocks).astype(np.float64)
    assert np.allclose(((decoded - values) ** 2 * importance).reshape(-1, GROUPS, 32).sum(axis=2), found, rtol=1e-5)
    others = blocks.view(NL4_XS.layout).copy()
    least, typical = found.copy(), []
    for own in range(16):
        for move in range(8):
            others["head"] = others["head"] & 0xFF | int("".join([f"{move:03b}"] * GROUPS), 2) << 8
            others["steps"] = 0x11111111 * own
            misses = _misses(values, others.view(np.uint8), importance)
            least = np.minimum(least, misses)
            typical.append(misses.sum())
    assert least.sum() > 0.995 * found.sum()  # those far from what just holds a group are not tried
    assert np.median(typical) > 2 * found.sum()


def test_a_scale_below_zero_is_no_number() -> None:
    fields = np.zeros(1, NL4_XS.layout)
    fields["head"], fields["steps"] = 2, 0x87654321
    values = NL4_XS.decode(fields.view(np.uint8)).reshape(GROUPS, 32)
    assert np.isfinite(values[:2]).all()
    assert np.isnan(values[2:7]).all()
    assert np.isfinite(values[7]).all()  # of no step and the other sign
