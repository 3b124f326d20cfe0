"""This project's integers in groups (int2, int3, int4) against their definition, one number at a time, and their encoders against
the grids of other tools and an exhaustive search.
"""

import numpy as np
import pytest

from cpuspec.formats import FORMATS, int4_groups, lowbit

LOWBIT = [row.name for row in lowbit.FORMATS]
SYMMETRIC = [row.name for row in int4_groups.FORMATS if not row.name.endswith("_asym")]
ASYMMETRIC = [row.name for row in int4_groups.FORMATS if row.name.endswith("_asym")]


def every(names: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", names)


def bits(name: str) -> int:
    return int(name[3])


def group(name: str) -> int:
    return int(name.removesuffix("_asym").partition("_g")[2])


def taken_apart(name: str, data: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scales, zero points in codes, and codes [n, group] of blocks, read byte by byte."""
    scales, zeros, codes = [], [], []
    for block in data.reshape(-1, FORMATS[name].block_bytes):
        rest = bytes(block)
        scales.append(float(np.frombuffer(rest[:2], "<f2")[0]))
        zeros.append(8 if name in SYMMETRIC else rest[2] if bits(name) == 4 else rest[2] / 16)
        packed = rest[2:] if name in SYMMETRIC else rest[3:]
        if bits(name) == 4:
            codes.append([nibble for byte in packed for nibble in (byte % 16, byte // 16)])
            continue
        pairs, tops = packed[: group(name) // 4], packed[group(name) // 4 :]
        low = [pairs[i // 4] >> 2 * (i % 4) & 3 for i in range(group(name))]
        codes.append([c + 4 * (tops[i // 8] >> i % 8 & 1) for i, c in enumerate(low)] if tops else low)
    return np.array(scales), np.array(zeros), np.array(codes)


@every([*SYMMETRIC, *ASYMMETRIC, *LOWBIT])
def test_a_group_costs_a_scale_and_perhaps_a_zero_point(name: str) -> None:
    assert FORMATS[name].block_size == group(name)
    assert FORMATS[name].block_bytes == 2 + (name not in SYMMETRIC) + bits(name) * group(name) // 8


@every([*SYMMETRIC, *ASYMMETRIC, *LOWBIT])
def test_any_bytes_mean_the_scale_times_code_less_zero_point(name: str) -> None:
    data = np.random.default_rng(1).integers(0, 256, (7, 3 * FORMATS[name].block_bytes), np.uint8)
    scales, zeros, codes = taken_apart(name, data)
    assert codes.max() == 2 ** bits(name) - 1
    with np.errstate(invalid="ignore"):
        wanted = scales[:, None] * (codes - zeros[:, None])
    got = FORMATS[name].decode(data)
    assert got.shape == (7, 3 * group(name))
    assert np.array_equal(got.reshape(wanted.shape), wanted.astype(np.float32), equal_nan=True)
    assert np.isfinite(wanted).mean() > 0.8


@every([*SYMMETRIC, *LOWBIT])
def test_codes_are_the_nearest_under_the_scale_and_zero_point_stored(name: str) -> None:
    values = np.random.default_rng(2).standard_normal((40, group(name))).astype(np.float32)
    scales, zeros, codes = taken_apart(name, FORMATS[name].encode(values))
    grid = scales[:, None] * (np.arange(2 ** bits(name)) - zeros[:, None])
    error = np.abs(values[:, :, None] - grid[:, None])
    assert np.allclose(np.take_along_axis(error, codes[:, :, None], 2)[:, :, 0], error.min(axis=2), rtol=0, atol=1e-6)
    if name in SYMMETRIC:  # as GPTQ's and compressed-tensors' grids
        assert np.array_equal(scales, (np.abs(values).max(axis=1) / np.float32(7.5)).astype(np.float16))


@every(ASYMMETRIC)
@pytest.mark.parametrize("shift", [0.0, 1.0, 10.0, -10.0])
def test_asymmetric_groups_span_their_values_and_zero(name: str, shift: float) -> None:
    values = (np.random.default_rng(3).standard_normal((40, group(name))) + shift).astype(np.float32)
    low, high = np.minimum(values.min(axis=1), 0), np.maximum(values.max(axis=1), 0)
    data = FORMATS[name].encode(values)
    scales, zeros, _ = taken_apart(name, data)
    assert np.array_equal(scales, ((high - low) / np.float32(15)).astype(np.float16))
    assert np.array_equal(zeros, np.rint(-low / scales.astype(np.float32)))
    # Half a step, and what f16 takes from the range.
    assert (np.abs(FORMATS[name].decode(data) - values) <= scales[:, None] * 0.51).all()


@every(ASYMMETRIC)
def test_a_zero_point_of_sixteen_survives(name: str) -> None:
    """GPTQ files of version 1 store zero points less one, so that 15 in the file means 16."""
    block = np.zeros(FORMATS[name].block_bytes, np.uint8)
    block[:2] = np.array([0.5], "<f2").view(np.uint8)
    block[2] = 16
    assert np.array_equal(FORMATS[name].decode(block), np.full(group(name), -8, np.float32))


@every(ASYMMETRIC)
def test_a_zero_point_pays_where_values_lie_to_one_side(name: str) -> None:
    values = np.abs(np.random.default_rng(4).standard_normal((50, group(name)))).astype(np.float32)
    error = [np.square(FORMATS[n].decode(FORMATS[n].encode(values)) - values).mean() for n in (name, name.removesuffix("_asym"))]
    assert error[0] < 0.4 * error[1]


@every([*SYMMETRIC, *ASYMMETRIC, *LOWBIT])
def test_values_too_small_for_an_f16_scale_become_zeros(name: str) -> None:
    values = np.full((2, group(name)), 1e-9, np.float32)
    assert not FORMATS[name].decode(FORMATS[name].encode(values)).any()


@every(LOWBIT)
@pytest.mark.parametrize("shift", [0.0, 0.5, -2.0])
def test_the_search_comes_close_to_the_best_scale_and_zero_point_there_are(name: str, shift: float) -> None:
    values = (np.random.default_rng(3).standard_normal((6, group(name))) + shift).astype(np.float32)
    best = np.full(6, np.inf)
    reach = np.ptp(np.concatenate([values, np.zeros((6, 1))], axis=1), axis=1)
    for share in np.linspace(0.3, 1.1, 81):
        d = (reach * share / (2 ** bits(name) - 1))[:, None]
        for zero in np.arange(0, 16 * 2 ** bits(name)) / 16:
            codes = np.clip(np.rint(values / d + zero), 0, 2 ** bits(name) - 1)
            best = np.minimum(best, np.square(d * (codes - zero) - values).sum(axis=1))
    found = np.square(FORMATS[name].decode(FORMATS[name].encode(values)) - values).sum(axis=1)
    assert found.sum() < 1.07 * best.sum()
    assert (found < 1.2 * best).all()


@every(LOWBIT)
def test_values_that_lie_on_a_grid_come_back(name: str) -> None:
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 2 ** bits(name), (50, group(name)))
    codes[:, 0], codes[:, 1] = 0, 2 ** bits(name) - 1
    zeros = rng.integers(0, 16 * (2 ** bits(name) - 1) + 1, (50, 1)) / 16
    values = (np.float32(0.25) * (codes - zeros)).astype(np.float32)
    assert np.allclose(FORMATS[name].decode(FORMATS[name].encode(values)), values, atol=1e-6)


@every(LOWBIT)
def test_a_group_is_encoded_alike_alone_and_among_others(name: str) -> None:
    """Sums take one order whatever the shape; numpy's own do not."""
    values = np.random.default_rng(5).standard_normal((300, group(name))).astype(np.float32)
    together = FORMATS[name].encode(values)
    assert all(np.array_equal(FORMATS[name].encode(values[i : i + 1])[0], together[i]) for i in range(300))
