"""Integers in groups stand for the values of the file, whatever the format."""

import numpy as np
import pytest

from cpuspec.formats import FORMATS, QuantTensor
from cpuspec.formats.grouped import GroupedIntegers, group_integers

# Formats with an offset that is no multiple of the scale: f32 rounds them once more.
WITH_OFFSETS = {name for name in FORMATS if name in ("q4_1", "q5_1", "q2_k", "q4_k", "q5_k") or name.startswith(("int2", "int3"))}
FLOATS = ["f32", "f16", "bf16", "fp8_g32", "fp8_g128", "nf4_g64", "fp4_g64"]
ROTATED = [name for name, row in FORMATS.items() if row.rotated]
BLOCKS = [name for name in FORMATS if name not in FLOATS + ROTATED]


def _tensor(name: str, seed: int = 0) -> QuantTensor:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((24, 512)) * np.exp(rng.standard_normal((24, 1))) + rng.standard_normal((24, 1))
    values[0], values[1], values[2, 32:] = 0, 0.01, 0
    return QuantTensor.encode(FORMATS[name], values)


def _values(grouped: GroupedIntegers) -> np.ndarray:
    rows, groups = grouped.scales.shape
    zeros = np.uint8(1 << grouped.bits - 1) if grouped.zeros is None else grouped.zeros[:, :, None]
    with np.errstate(invalid="ignore", over="ignore"):
        values = grouped.scales[:, :, None] * (
            grouped.codes.reshape(rows, groups, -1).astype(np.float32) - zeros.astype(np.float32)
        )
        return (values if grouped.offsets is None else values + grouped.offsets[:, :, None]).reshape(rows, -1)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_values_are_the_files(name: str) -> None:
    tensor = _tensor(name)
    grouped = group_integers(tensor)
    assert grouped is not None
    assert (grouped.offsets is not None) == (name in WITH_OFFSETS)
    got, wanted = _values(grouped), tensor.dequantize()
    if name not in WITH_OFFSETS:
        assert np.array_equal(got, wanted)
        return
    # Of two roundings each is at most half a unit in the last place of the larger part.
    largest = np.abs(grouped.scales) * 2**grouped.bits + np.abs(grouped.offsets)
    assert (np.abs(got - wanted).reshape(*largest.shape, -1) <= 2.0**-23 * largest[:, :, None]).all()


@pytest.mark.parametrize("name", BLOCKS)
def test_codes_and_zero_points_fit_their_bits(name: str) -> None:
    grouped = group_integers(_tensor(name))
    assert grouped is not None
    assert grouped.bits in (4, 8)
    assert grouped.codes.dtype == np.uint8
    assert grouped.codes.max() < 1 << grouped.bits
    assert grouped.zeros is None or grouped.zeros.max() < 1 << grouped.bits
    assert grouped.scales.shape == (24, 512 // grouped.group)


@pytest.mark.parametrize("name", BLOCKS)
def test_any_bytes_keep_their_values(name: str) -> None:
    """Every code and scale that a file can hold. An offset of inf leaves nan where the file says inf."""
    format = FORMATS[name]
    data = np.random.default_rng(1).integers(0, 256, (8, format.row_bytes(2048)), np.uint8)
    tensor = QuantTensor(format, (8, 2048), data)
    grouped = group_integers(tensor)
    assert grouped is not None
    got, wanted = _values(grouped), tensor.dequantize()
    assert np.isfinite(wanted).mean() > 0.8
    finite = np.repeat(np.isfinite(grouped.scales), grouped.group, axis=1) & np.isfinite(wanted)
    if grouped.offsets is None or name.startswith("int4"):
        assert np.array_equal(got[finite], wanted[finite])
    else:
        with np.errstate(invalid="ignore"):
            largest = np.abs(grouped.scales) * 2**grouped.bits + np.abs(grouped.offsets)
            budget = 2.0**-23 * np.repeat(largest, grouped.group, axis=1)
        assert (np.abs(got - wanted)[finite] <= budget[finite]).all()


def test_a_zero_point_beyond_four_bits_becomes_an_offset() -> None:
    """GPTQ files store zero points less one, and reach 16."""
    tensor = _tensor("int4_g32_asym")
    data = tensor.data.reshape(24, -1, tensor.format.block_bytes).copy()
    data[3, 5, 2] = 16
    changed = QuantTensor(tensor.format, tensor.shape, data.reshape(tensor.data.shape))
    grouped = group_integers(changed)
    assert grouped is not None
    assert grouped.zeros is None
    assert np.array_equal(_values(grouped), changed.dequantize())


@pytest.mark.parametrize("name", FLOATS + ROTATED)
def test_floats_and_rotated_codes_are_no_integers(name: str) -> None:
    assert group_integers(_tensor(name)) is None
