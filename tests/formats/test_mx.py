"""mxfp4 against the words of its specification and of ML-SpecQD, one number at a time."""

import math
from fractions import Fraction

import gguf
import numpy as np
import pytest

from cpuspec.formats import FORMATS
from cpuspec.formats.mx import E2M1_DOUBLED

MXFP4 = FORMATS["mxfp4"]
MAGNITUDES = [Fraction(value) for value in ("0", "0.5", "1", "1.5", "2", "3", "4", "6")]


def blocks(e: np.ndarray | int, codes: np.ndarray) -> np.ndarray:
    """The bytes of blocks that hold codes [n, 32] under scales e."""
    fields = np.empty(len(codes), MXFP4.layout)
    fields["e"], fields["codes"] = e, codes[:, :16] | codes[:, 16:] << 4
    return fields.view(np.uint8).reshape(-1, 17)


def scale_and_codes(encoded: np.ndarray) -> tuple[int, list[int]]:
    return int(encoded[0]), [*(encoded[1:] & 15).tolist(), *(encoded[1:] >> 4).tolist()]


def encoded_by_the_rule(values: list[float]) -> tuple[int, list[int]]:
    """Scale and codes of one block in exact fractions: shared exponent, nearest even, saturation."""
    peak = max(abs(Fraction(value)) for value in values)
    exponent = -127
    while peak and Fraction(2) ** (exponent + 3) <= peak:
        exponent += 1
    codes = []
    for value in values:
        scaled = min(abs(Fraction(value)) / Fraction(2) ** exponent, Fraction(6))
        code = min(range(8), key=lambda c: (abs(MAGNITUDES[c] - scaled), c % 2))
        codes.append(code + 8 if value < 0 and code else code)
    return exponent + 127, codes


def test_every_code_under_every_scale_has_its_exact_value() -> None:
    codes = np.tile(np.arange(32, dtype=np.uint8) % 16, (256, 1))
    values = MXFP4.decode(blocks(np.arange(256), codes))
    for e in range(255):
        for code in range(16):
            exact = math.ldexp(E2M1_DOUBLED[code], e - 128)
            wanted = math.copysign(math.inf, exact) if abs(exact) >= 2.0**128 else exact
            assert values[e, code] == values[e, code + 16] == wanted
    assert np.isnan(values[255]).all()


@pytest.mark.parametrize("exponent", [-149, -130, -127, -126, -20, 0, 9, 126])
def test_scale_and_codes_follow_the_rule_of_ml_specqd(exponent: int) -> None:
    rng = np.random.default_rng(exponent + 200)
    for peak in (1.0, 1.25, 1.5, 1.75, 1.9999999):
        values = np.ldexp(rng.uniform(-peak, peak, (8, 32)), exponent).astype(np.float32)
        values[:, 5] = np.float32(math.ldexp(peak, exponent))
        for row, encoded in zip(values, MXFP4.encode(values), strict=True):
            assert scale_and_codes(encoded) == encoded_by_the_rule(row.tolist())


def test_halves_go_to_the_even_code_and_what_exceeds_six_becomes_six() -> None:
    values = np.zeros((1, 32), np.float32)
    values[0, :10] = 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.0001, 6.5, 7.9999
    values[0, 10:20] = -values[0, :10]
    decoded = MXFP4.decode(MXFP4.encode(values))[0]
    wanted = np.array([0, 1, 1, 2, 2, 4, 4, 6, 6, 6], np.float32)
    assert np.array_equal(decoded, np.concatenate([wanted, -wanted, np.zeros(12, np.float32)]))
    # A tool that breaks ties by the lower code gives other values for the same weights.
    other = gguf.quants.dequantize(gguf.quants.quantize(values, gguf.GGMLQuantizationType.MXFP4), gguf.GGMLQuantizationType.MXFP4)
    assert not np.array_equal(other[0], decoded)


def test_values_on_the_grid_are_kept_exactly() -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 16, (200, 32), np.uint8)
    codes[codes == 8] = 0
    codes[:, 0] = rng.choice([6, 7, 14, 15], 200)
    data = blocks(rng.integers(0, 253, 200), codes)
    assert np.array_equal(MXFP4.encode(MXFP4.decode(data)), data)
