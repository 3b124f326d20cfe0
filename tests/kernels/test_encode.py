"""Compiled encoders give the bytes of `Format.encode`, and leave to it what it refuses."""

from collections.abc import Iterator

import numpy as np
import pytest

from cpuspec.errors import FormatError
from cpuspec.formats import FORMATS
from cpuspec.kernels.encode import _ENCODERS, encode, recode
from tests.conformance.test_formats import weights

compiled = pytest.mark.parametrize("name", _ENCODERS)


def _inputs(size: int) -> Iterator[np.ndarray]:
    """Values of many magnitudes, any number of blocks of `size`, and random bits wherever they are numbers."""
    yield from ((weights(1) * magnitude).astype(np.float32) for magnitude in (1e-42, 1e-38, 1e-7, 1e-3, 1.0, 1e4))
    rng = np.random.default_rng(2)
    yield from (rng.standard_normal(blocks * size).astype(np.float32) for blocks in (1, 2, 15, 16, 17, 33))
    bits = rng.integers(0, 1 << 32, (4096, size), np.uint32).view(np.float32)
    yield np.where(np.abs(bits) < 1e4, bits, np.float32(0))


@compiled
def test_the_bytes_are_those_of_the_format(name: str) -> None:
    for values in _inputs(FORMATS[name].block_size):
        assert np.array_equal(encode(FORMATS[name], values), FORMATS[name].encode(values))


@compiled
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(name: str, value: float) -> None:
    values = weights(3)
    values[17, 300] = value
    with pytest.raises(FormatError, match="finite"):
        encode(FORMATS[name], values)


@compiled
def test_values_beyond_the_range_of_the_scale_are_refused_or_encoded_as_the_format_does(name: str) -> None:
    values = weights(4)
    values[5, 300] = 1e38
    if name == "mxfp4":
        assert np.array_equal(encode(FORMATS[name], values), FORMATS[name].encode(values))
    else:
        with pytest.raises(FormatError, match="f16 is exceeded"):
            encode(FORMATS[name], values)


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in _ENCODERS])
def test_a_format_without_a_compiled_encoder_encodes_itself_with_compiled_searches(name: str) -> None:
    row, values = FORMATS[name], weights(5)
    got, wanted = encode(row, values), row.encode(values)
    if row.encode_blocks:
        assert np.array_equal(got, wanted)
    else:
        assert np.square(row.decode(got) - values).sum() < 1.02 * np.square(row.decode(wanted) - values).sum()


def test_rows_that_do_not_fill_blocks_are_refused() -> None:
    with pytest.raises(FormatError, match="divisible by 32, got 100"):
        encode(FORMATS["mxfp4"], np.zeros((2, 100), np.float32))


@pytest.mark.parametrize("source", ["f32", "bf16", "q4_0", "q6_k", "q2_k", "int3_g64_asym"])
@pytest.mark.parametrize("to", ["mxfp4", "int2_g32_asym", "q8_0"])
def test_recoding_decodes_and_encodes(source: str, to: str) -> None:
    data = FORMATS[source].encode(weights(6))
    wanted = FORMATS[to].encode(FORMATS[source].decode(data))
    assert np.array_equal(recode(data, FORMATS[source], FORMATS[to]), wanted)
    assert np.array_equal(recode(data[3:4], FORMATS[source], FORMATS[to]), wanted[3:4])
