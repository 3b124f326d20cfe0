"""fp8, nf4 and fp4 against the words of their definitions and against other implementations."""

import math

import ml_dtypes
import numpy as np
import pytest

from cpuspec.formats import FORMATS
from cpuspec.formats.float_codes import FORMATS as ROWS

NAMES = [row.name for row in ROWS]


def test_every_e4m3_byte_has_the_value_that_ml_dtypes_gives_it() -> None:
    wanted = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    data = np.concatenate([np.array([2.0], "<f4").view(np.uint8), np.arange(128, dtype=np.uint8)])
    other = data.copy()
    other[4:] += 128
    got = FORMATS["fp8_g128"].decode(np.stack([data, other])).reshape(-1)
    assert np.array_equal(got, 2 * wanted, equal_nan=True)
    assert np.isnan(got).sum() == 2


def test_numbers_round_to_e4m3_as_ml_dtypes_rounds_them() -> None:
    values = np.random.default_rng(0).standard_normal((200, 128)).astype(np.float32)
    values[:, 0] = 448  # so that the scale is 1
    values[0, 1:9] = 1.0625, 1.1875, 2**-9, 2**-10, 3 * 2**-10, -1.0625, 0, 0.0009
    got = FORMATS["fp8_g128"].encode(values)[:, 4:]
    wanted = values.astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(FORMATS["fp8_g128"].decode(FORMATS["fp8_g128"].encode(values)), wanted.astype(np.float32))
    assert np.array_equal(got & 0x7F, wanted.view(np.uint8) & 0x7F)


def test_nf4_levels_are_quantiles_of_a_normal_distribution() -> None:
    """QLoRA, appendix E: eight below zero, seven above, and zero, as quantiles between an offset and a half, the largest made 1."""
    import statistics

    offset, quantile = 0.9677083, statistics.NormalDist().inv_cdf
    above = [quantile(0.5 + (offset - 0.5) * i / 8) for i in range(1, 9)]
    below = [-quantile(0.5 + (offset - 0.5) * i / 7) for i in range(1, 8)]
    wanted = np.array(sorted([*above, 0.0, *below])) / max(above)
    levels = FORMATS["nf4_g64"].affine.levels
    assert levels is not None
    assert np.allclose(levels, wanted, atol=2e-6)


def test_fp4_is_sign_exponent_and_mantissa() -> None:
    """bitsandbytes: 0b001 is its smallest step, and of the others the largest is 12, their mantissa counting a half."""
    wanted = []
    for code in range(16):
        exponent, mantissa = code >> 1 & 3, code & 1
        magnitude = {0: 0.0625 * mantissa}.get(exponent) if exponent == 0 else 2.0 ** [3, 2, 1][exponent - 1] * (1 + mantissa / 2)
        wanted.append(math.copysign(magnitude / 12, -1 if code > 7 else 1))
    levels = np.array(FORMATS["fp4_g64"].affine.levels)
    assert np.allclose(np.sort(np.abs(levels)), np.sort(np.abs(wanted)), atol=1e-7)
    assert levels[3] == 1
    assert levels[11] == -1


@pytest.mark.parametrize("name", NAMES)
def test_codes_are_the_nearest(name: str) -> None:
    format = FORMATS[name]
    values = np.random.default_rng(1).standard_normal((30, format.block_size)).astype(np.float32)
    data = format.encode(values)
    d = np.ascontiguousarray(data[:, :4]).view("<f4")
    levels = np.array([level for level in format.affine.levels if not math.isnan(level)], np.float32)
    nearest = np.abs(values[:, :, None] - (d * levels)[:, None]).min(axis=2)
    assert np.allclose(np.abs(format.decode(data) - values), nearest, atol=1e-6)
