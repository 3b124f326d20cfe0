"""What the cache keeps of a key or a value, in every KV format."""

import numpy as np
import pytest

from cpuspec.errors import FormatError
from cpuspec.formats import FORMATS
from cpuspec.formats.kv import (
    INT4,
    INT8,
    KV_FORMATS,
    encode_rows,
    get_kv_format,
    hadamard,
    hadamard_size,
    remembered,
    rounded,
    stored_bytes,
    stored_dims,
)

# Largest error of numbers of a group, over the span of the group.
BUDGETS = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "int8": 1 / 500, "int4": 1 / 29}


@pytest.fixture(params=KV_FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def _rows(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def test_every_format_keeps_to_its_budget(name: str) -> None:
    rows = _rows(3, 50, 2, 64)
    group = max(KV_FORMATS[name].block_size, 32)
    groups = (rows - rounded(KV_FORMATS[name], rows)).reshape(-1, group)
    span = np.ptp(rows.reshape(-1, group), axis=1, keepdims=True)
    worst = (np.abs(groups) / span).max()
    assert worst <= BUDGETS[name]
    assert name == "f32" or worst > BUDGETS[name] / 20


def test_int8_loses_little_to_an_offset_that_all_dimensions_share() -> None:
    """Keys of a projection with a bias: codes around zero would lose a hundred times as much."""
    rows = _rows(100, 64)
    error = np.abs(rounded(INT8, rows + 300) - (rows + 300)).max()
    assert error < 0.02
    assert error < np.abs(FORMATS["q8_0"].decode(FORMATS["q8_0"].encode(rows + 300)) - (rows + 300)).max() / 20


def test_int8_is_exact_where_its_grid_has_the_numbers() -> None:
    codes = np.array([[-127, 127, 0, 5] * 8], np.float32)
    assert np.array_equal(rounded(INT8, codes * 0.25 + 3), codes * 0.25 + 3)
    constant = np.full((1, 32), 1.5, np.float32)
    assert np.array_equal(rounded(INT8, constant), constant)
    assert not rounded(INT8, np.full((1, 32), 1e-9, np.float32)).any()


def test_int4_is_exact_where_its_grid_has_the_numbers() -> None:
    codes = np.arange(64, dtype=np.float32)[None] % 16
    assert np.array_equal(rounded(INT4, codes * 0.25 - 3), codes * 0.25 - 3)
    assert np.array_equal(rounded(INT4, np.full((1, 64), -1.5, np.float32)), np.full((1, 64), -1.5, np.float32))


@pytest.mark.parametrize("dims", [16, 64, 80, 96, 128, 256])
def test_hadamards_matrix_is_its_own_inverse_and_keeps_scores(dims: int) -> None:
    size = hadamard_size(INT4, dims)
    assert size == {80: 16, 96: 32}.get(dims, dims)
    keys, query = _rows(50, dims), _rows(1, dims)[0]
    turned = hadamard(keys, size)
    assert np.abs(hadamard(turned, size) - keys).max() < 1e-5
    assert np.abs(turned @ hadamard(query, size) - keys @ query).max() < 1e-4
    assert np.abs(turned - keys).max() > 0.5
    one = np.zeros((1, dims), np.float32)
    one[0, 5] = 1
    assert np.allclose(np.abs(hadamard(one, size))[0, 5 // size * size :][:size], size**-0.5)


def test_hadamards_matrix_spreads_what_one_dimension_has_more() -> None:
    rows = _rows(200, 128)
    rows[:, 7] *= 30
    lost = [np.square(found - rows).mean() for found in (rounded(INT4, rows), remembered(INT4, rows))]
    assert lost[1] < lost[0] / 3


@pytest.mark.parametrize("dims", [2, 18, 72])
def test_heads_without_a_whole_vector_are_kept_as_they_are(dims: int) -> None:
    rows = _rows(3, dims)
    assert hadamard_size(INT4, dims) == 0
    assert np.array_equal(remembered(INT4, rows), rounded(INT4, rows))


@pytest.mark.parametrize("dims", [2, 18, 32, 64, 80, 128])
def test_rows_are_padded_to_whole_vectors_and_groups(name: str, dims: int) -> None:
    format, rows = KV_FORMATS[name], _rows(5, dims)
    data = encode_rows(format, rows)
    assert data.shape == (5, stored_bytes(format, dims))
    padded = format.decode(data)
    assert padded.shape == (5, stored_dims(format, dims))
    assert np.array_equal(padded[:, :dims], rounded(format, rows))
    # A row is encoded by itself.
    assert np.array_equal(np.concatenate([encode_rows(format, row[None]) for row in rows]), data)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows(name: str, bad: float) -> None:
    rows = _rows(2, 128)
    rows[1, 3] = bad
    got = rounded(KV_FORMATS[name], rows)
    assert np.isfinite(got[0]).all()
    assert not np.isfinite(got[1, 3])
    assert np.isfinite(got[1, 64:]).all()


def test_an_unknown_format_is_a_clear_error() -> None:
    with pytest.raises(FormatError, match="'q4_0' is not known; wanted one of f32, f16, bf16, int8, int4"):
        get_kv_format("q4_0")
