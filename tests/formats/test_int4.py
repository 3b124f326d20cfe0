"""int4 groups against their definition, one number at a time, and against the grids of the tools that write them."""

import numpy as np
import pytest

from cpuspec.formats import FORMATS
from cpuspec.formats.int4 import FORMATS as ROWS

NAMES = [row.name for row in ROWS]

every_int4 = pytest.mark.parametrize("name", NAMES)
SYMMETRIC = [name for name in NAMES if not name.endswith("_asym")]
ASYMMETRIC = [name for name in NAMES if name.endswith("_asym")]


def group(name: str) -> int:
    return int(name.removesuffix("_asym").removeprefix("int4_g"))


def taken_apart(name: str, data: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scales, zero points and codes [n, group] of blocks, read byte by byte."""
    scales, zeros, codes = [], [], []
    for block in data.reshape(-1, FORMATS[name].block_bytes):
        rest = bytes(block)
        scales.append(np.frombuffer(rest[:2], "<f2")[0])
        zeros.append(rest[2] if name in ASYMMETRIC else 8)
        packed = rest[3:] if name in ASYMMETRIC else rest[2:]
        codes.append([nibble for byte in packed for nibble in (byte % 16, byte // 16)])
    return np.array(scales), np.array(zeros), np.array(codes)


@every_int4
def test_a_group_costs_a_scale_and_perhaps_a_zero_point(name: str) -> None:
    assert FORMATS[name].block_size == group(name)
    assert FORMATS[name].block_bytes == 2 + (name in ASYMMETRIC) + group(name) // 2


@every_int4
def test_any_bytes_mean_the_scale_times_code_less_zero_point(name: str) -> None:
    data = np.random.default_rng(1).integers(0, 256, (7, 3 * FORMATS[name].block_bytes), np.uint8)
    scales, zeros, codes = taken_apart(name, data)
    with np.errstate(invalid="ignore"):
        wanted = scales.astype(np.float64)[:, None] * (codes - zeros[:, None])
    got = FORMATS[name].decode(data)
    assert got.shape == (7, 3 * group(name))
    assert np.array_equal(got.reshape(wanted.shape), wanted, equal_nan=True)
    assert np.isfinite(wanted).mean() > 0.8


@pytest.mark.parametrize("name", SYMMETRIC)
def test_symmetric_groups_round_to_the_nearest_of_sixteen_steps_around_zero(name: str) -> None:
    values = np.random.default_rng(2).standard_normal((40, group(name))).astype(np.float32)
    scales, _, codes = taken_apart(name, FORMATS[name].encode(values))
    assert np.array_equal(scales, (np.abs(values).max(axis=1) / np.float32(7.5)).astype(np.float16))
    grid = scales.astype(np.float64)[:, None] * np.arange(-8, 8)
    nearest = np.abs(values[:, :, None] - grid[:, None]).min(axis=2)
    assert np.allclose(np.abs(values - np.take_along_axis(grid, codes, axis=1)), nearest, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ASYMMETRIC)
@pytest.mark.parametrize("shift", [0.0, 1.0, 10.0, -10.0])
def test_asymmetric_groups_span_their_values_and_zero(name: str, shift: float) -> None:
    values = (np.random.default_rng(3).standard_normal((40, group(name))) + shift).astype(np.float32)
    low, high = np.minimum(values.min(axis=1), 0), np.maximum(values.max(axis=1), 0)
    data = FORMATS[name].encode(values)
    scales, zeros, _ = taken_apart(name, data)
    assert np.array_equal(scales, ((high - low) / np.float32(15)).astype(np.float16))
    assert np.array_equal(zeros, np.rint(-low / scales.astype(np.float32)))
    # Half a step, and what f16 takes from the range.
    assert (np.abs(FORMATS[name].decode(data) - values) <= scales.astype(np.float64)[:, None] * 0.51).all()


@pytest.mark.parametrize("name", ASYMMETRIC)
def test_a_zero_point_of_sixteen_survives(name: str) -> None:
    """GPTQ files of version 1 store zero points less one, so that 15 in the file means 16."""
    block = np.zeros(FORMATS[name].block_bytes, np.uint8)
    block[:2] = np.array([0.5], "<f2").view(np.uint8)
    block[2] = 16
    assert np.array_equal(FORMATS[name].decode(block), np.full(group(name), -8, np.float32))


@pytest.mark.parametrize("name", ASYMMETRIC)
def test_a_zero_point_pays_where_values_lie_to_one_side(name: str) -> None:
    values = np.abs(np.random.default_rng(4).standard_normal((50, group(name)))).astype(np.float32)
    error = [np.square(FORMATS[n].decode(FORMATS[n].encode(values)) - values).mean() for n in (name, name.removesuffix("_asym"))]
    assert error[0] < 0.4 * error[1]


@every_int4
def test_values_too_small_for_an_f16_scale_become_zeros(name: str) -> None:
    values = np.full((2, group(name)), 1e-9, np.float32)
    assert not FORMATS[name].decode(FORMATS[name].encode(values)).any()
