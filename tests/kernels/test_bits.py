"""Linear layers, norms and gates have the bits of one reference in numpy. Every processor's kernels are held to the same one, so
all instruction sets give the same bits.
"""

from fractions import Fraction

import numpy as np
import pytest

from benchmarks import linear_alone
from benchmarks.linear_alone import activations, multiply
from cpuspec.formats import FORMATS, QuantTensor
from cpuspec.formats.packing import PANEL, TILE, pack
from cpuspec.kernels import isa, linear, machine_code
from cpuspec.kernels.linear import activation_encoding, encodings, prompt_encoding
from cpuspec.kernels.pointwise import GELU, NORM, SILU, prepare_row
from cpuspec.kernels.products import BLOCK_ROWS, GROUP_SUMS, LAST_LINE, PANEL_LINE, row_bytes
from cpuspec.kernels.readers import FLOAT_CODES, NUMBERS, READERS, SUPERBLOCKS
from cpuspec.kernels.selfcheck import in_blocks, random_tensor, records
from tests.kernels import reference

ROWS = (*range(1, 17), 33, 130)  # of one block each, of three, and more than one pass of any kernel serves
OUT_FEATURES = 83  # six tiles, the last in part: with few rows four are read in turns, and two are left


def _bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32)


def _rows(rows: int, features: int) -> np.ndarray:
    """Random rows of all sizes. The first has the largest codes; one is zeros, and one has the same number everywhere."""
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((rows, features)) + 0.5) * 10.0 ** rng.integers(-4, 5, (rows, 1))
    x[0], x[1], x[2] = 1, 0, 3
    x[0, ::32] = -1
    return x.astype(np.float32)


def _products(tensor: QuantTensor, order: str, x: np.ndarray) -> np.ndarray:
    packed = pack(tensor)
    out = np.full((len(x), len(packed.data) * TILE), np.nan, np.float32)
    multiply(packed, order, activations(x, order), out)
    return np.ascontiguousarray(out[:, : tensor.shape[0]])


def _check(tensor: QuantTensor, order: str, x: np.ndarray, wanted: np.ndarray) -> None:
    """Compare the bits of the products of any number of rows."""
    for rows in ROWS:
        assert np.array_equal(_bits(_products(tensor, order, x[:rows])), _bits(wanted)[:rows]), f"{rows} rows"


def _wanted(tensor: QuantTensor, order: str, x: np.ndarray) -> np.ndarray:
    inputs = reference.quantized(x, order)
    if order == "int14":
        return reference.superblocks_times(tensor, inputs)
    if tensor.format.rotated:
        return reference.rotated_times(tensor, inputs)
    return reference.codes_times(reference.weights(tensor), inputs)


CODES = [(name, order) for name in READERS for order in encodings(name) if order != "bf16"]


@pytest.mark.parametrize(("name", "order"), reference.compiled_sparingly(CODES))
def test_products_of_codes_are_those_of_the_reference_for_any_number_of_rows(name: str, order: str) -> None:
    tensor = random_tensor(FORMATS[name], OUT_FEATURES)
    x = _rows(max(ROWS), tensor.shape[1])
    _check(tensor, order, x, _wanted(tensor, order, x))


@pytest.mark.skipif(not isa.has_tiles(), reason="this processor has no tile registers")
@pytest.mark.parametrize("name", SUPERBLOCKS)
def test_superblocks_have_the_same_bits_in_tile_registers_and_in_vectors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = random_tensor(FORMATS[name], OUT_FEATURES)
    x = _rows(20, tensor.shape[1])
    in_tiles = [_products(tensor, "int14", x[:rows]) for rows in range(1, len(x) + 1)]
    in_vectors = machine_code.address(f"vectors-{name}", 12, lambda: linear.made(name, "int14", in_tiles=False))
    monkeypatch.setattr(linear_alone, "linear_kernel", lambda *case: in_vectors)
    for rows, products in enumerate(in_tiles, 1):
        assert np.array_equal(_bits(_products(tensor, "int14", x[:rows])), _bits(products)), f"{rows} rows"


@pytest.mark.parametrize("name", FLOAT_CODES)
def test_products_of_codes_of_floats_are_those_of_the_reference_for_any_number_of_rows(name: str) -> None:
    finite = random_tensor(FORMATS[name], OUT_FEATURES)
    x = _rows(max(ROWS), finite.shape[1])
    wanted = reference.float_codes_times(finite, x)
    assert np.isfinite(wanted).all()
    _check(finite, "f32", x, wanted)
    parts = finite.format.split(finite.data)
    parts["codes"][3::5, 70] = 2**finite.format.code_bits - 1  # nan in fp8
    tensor = QuantTensor(finite.format, finite.shape, finite.format.join(parts))
    with np.errstate(invalid="ignore"):
        wanted = reference.float_codes_times(tensor, x)
    assert name.startswith("fp8") == np.isnan(wanted).any()
    for rows in ROWS:
        assert np.array_equal(np.isnan(_products(tensor, "f32", x[:rows])), np.isnan(wanted[:rows])), f"{rows} rows"


@pytest.mark.parametrize("in_features", [1, 2, 51])
@pytest.mark.parametrize("name", NUMBERS)
def test_products_of_numbers_are_those_of_the_reference_for_any_number_of_rows(name: str, in_features: int) -> None:
    tensor = QuantTensor.encode(FORMATS[name], np.random.default_rng(3).standard_normal((OUT_FEATURES, in_features)))
    x = _rows(max(ROWS), in_features)
    _check(tensor, activation_encoding(name), x, reference.numbers_times(tensor.dequantize(), x))


@pytest.mark.parametrize("order", sorted({"rounded", activation_encoding("bf16")}))
@pytest.mark.parametrize("in_features", [1, 50, 256])
@pytest.mark.parametrize("sizes", [(1.0, 1.0), (1e-19, 1e-19), (1e-38, 1.0)])  # or some products, or numbers, are not normal
def test_products_of_bf16_are_those_of_the_reference_for_any_number_of_rows(
    order: str, in_features: int, sizes: tuple[float, float]
) -> None:
    rng = np.random.default_rng(9)
    tensor = QuantTensor.encode(FORMATS["bf16"], sizes[0] * rng.standard_normal((OUT_FEATURES, in_features)))
    x = (sizes[1] * rng.standard_normal((max(ROWS), in_features))).astype(np.float32)
    wanted = reference.pairs_times(tensor.dequantize(), QuantTensor.encode(FORMATS["bf16"], x).dequantize())
    assert wanted.any()
    for rows in ROWS:
        assert np.array_equal(_products(tensor, order, x[:rows]), wanted[:rows]), f"{rows} rows"


@pytest.mark.skipif(not isa.has_bf16_tiles(), reason="this processor has no bf16 tile registers")
@pytest.mark.parametrize("name", [name for name in READERS if not FORMATS[name].rotated])
def test_products_of_dequantized_codes_are_those_of_bf16_weights_for_any_number_of_rows(name: str) -> None:
    tensor = random_tensor(FORMATS[name], OUT_FEATURES)
    x = _rows(max(ROWS), tensor.shape[1])
    wanted = reference.pairs_times(reference.dequantized(tensor), QuantTensor.encode(FORMATS["bf16"], x).dequantize())
    assert np.isfinite(wanted).all()
    for rows in ROWS:
        assert np.array_equal(_products(tensor, prompt_encoding(name), x[:rows]), wanted[:rows]), f"{rows} rows"


@pytest.mark.parametrize("features", [83, 576])
@pytest.mark.parametrize("kind", [NORM, SILU, GELU])
def test_norms_and_gates_are_those_of_the_reference(kind: int, features: int) -> None:
    rng = np.random.default_rng(4)
    row, other, weight = (4 * rng.standard_normal((3, features))).astype(np.float32)
    row[:4] = 0, 100, -100, 0.01
    eps = np.float32(1e-5)
    padded = [np.pad(part, (0, -features % 32)) for part in (row, other, weight)]
    got = np.empty(features, np.float32)
    prepare_row(kind, *(part.ctypes.data for part in padded), 0, eps, features, 0, features, 0, 0, got.ctypes.data, *[0] * 5, 1)
    if kind == NORM:
        wanted = reference.normed(row, weight, eps)
    else:
        wanted = (reference.silu_times if kind == SILU else reference.gelu_times)(row, other)
    assert np.array_equal(_bits(got), _bits(wanted))


@pytest.mark.parametrize(
    ("order", "features"), [("int8", PANEL + 96), ("int16", PANEL + 96), ("rotated", 3 * PANEL), ("int14", 3 * PANEL)]
)
def test_records_of_inputs_are_those_of_the_reference(order: str, features: int) -> None:
    x = _rows(BLOCK_ROWS + 4, features)
    wanted = records(reference.quantized(x, order), order, in_words=isa.dot_isa() == "avx2")
    written = np.ones_like(wanted)
    written[:, :, PANEL + 8 if order == "rotated" else wanted.shape[2] :] = 0  # not what fills up lines
    if order == "int14":
        written[:, :, LAST_LINE * PANEL_LINE :][:, :, 4:GROUP_SUMS] = 0
    wanted, written = (in_blocks(steps, row_bytes(order, features))[: wanted.size] for steps in (wanted, written))
    assert np.array_equal(activations(x, order)[: wanted.size] * written, wanted)


@pytest.mark.parametrize("order", ["int8", "int16"])
@pytest.mark.parametrize("name", ["q4_0", "q4_k", "q2_k", "q6_k"])
def test_another_order_of_sums_or_another_rounding_has_other_bits(name: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = random_tensor(FORMATS[name], OUT_FEATURES)
    x = _rows(5, tensor.shape[1])
    own = _products(tensor, order, x)
    weights, inputs = reference.weights(tensor), reference.quantized(x, order)
    backwards = [type(parts)(*(part[:, ::-1] for part in parts)) for parts in (weights, inputs)]
    assert not np.array_equal(reference.codes_times(*backwards), own)
    monkeypatch.setattr(reference, "fma", lambda x, y, z: x * y + z)
    twice = reference.codes_times(weights, inputs)
    assert not np.array_equal(twice, own)
    assert np.allclose(twice, own, rtol=1e-3, atol=1e-5 * np.abs(own).max())


def test_the_reference_rounds_once_where_a_detour_over_f64_would_round_twice() -> None:
    rng = np.random.default_rng(5)
    z = (1 + rng.integers(0, 1 << 23, 500) * 2.0**-23).astype(np.float32)
    small = rng.integers(1, 1 << 12, 500) * 2.0**-23
    x, y = (1 + small).astype(np.float32), ((1 - small) * 2.0**-24).astype(np.float32)  # the product is just below half a step
    got, neighbours = reference.fma(x, y, z), np.stack([np.nextafter(z, np.float32(to)) for to in (0, 2)])
    for given in zip(x, y, z, got, *neighbours, strict=True):
        exact = Fraction(float(given[0])) * Fraction(float(given[1])) + Fraction(float(given[2]))
        distances = [abs(Fraction(float(number)) - exact) for number in given[2:]]
        assert distances[1] == min(distances)
    assert not np.array_equal((x.astype(np.float64) * y + z).astype(np.float32), got)
