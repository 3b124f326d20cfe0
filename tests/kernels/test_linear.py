"""Linear kernels however a matrix and its rows are divided: the bits stay. `test_bits.py` has what they are."""

from functools import cache

import numpy as np
import pytest
from numba import njit, types
from numba.extending import intrinsic

from benchmarks.linear_alone import activations, multiply
from cpuspec.formats import FORMATS, QuantTensor
from cpuspec.formats.packing import TILE, PackedTensor, aligned_bytes, pack
from cpuspec.kernels.isa import lookup_isa
from cpuspec.kernels.linear import activation_encoding, encodings, prompt_encoding
from cpuspec.kernels.ops import Ops, lookup_bytes
from cpuspec.kernels.readers import READERS
from tests.backends.models import CLASSES

CASES = [(name, activation_encoding(name, precise)) for name in FORMATS for precise in (False, True)]
CASES += [("bf16", "rounded")]  # what processors without tile registers for bf16 do
CASES = list(dict.fromkeys([*CASES, *((name, prompt_encoding(name)) for name in READERS)]))  # tokens of prompts
CASES += [(name, "int14") for name in READERS if "int14" in encodings(name)]
# Of what does not depend on how a format's codes are read.
each_reader = pytest.mark.parametrize(
    ("format_name", "order"), [pytest.param(*case, marks=pytest.mark.slow if case[0] not in CLASSES else ()) for case in CASES]
)
OUT_FEATURES = 153  # ten tiles, the last in part: with few rows four are read in turns, twice, and two are left
PADDED = 160


@cache
def _matrix(format_name: str, out_features: int, in_features: int) -> tuple[QuantTensor, PackedTensor]:
    values = np.random.default_rng(1).standard_normal((out_features, in_features)).astype(np.float32)
    tensor = QuantTensor.encode(FORMATS[format_name], values)
    return tensor, pack(tensor)


def _run(
    packed: PackedTensor, order: str, x: np.ndarray, *, bias: np.ndarray | None = None, residual: np.ndarray | None = None,
    tiles: tuple[int, int] | None = None,
) -> np.ndarray:  # fmt: skip
    out = np.full((len(x), len(packed.data) * TILE), np.nan, np.float32)
    multiply(packed, order, activations(x, order), out, bias=bias, residual=residual, tiles=tiles)
    return out


@each_reader
def test_a_tile_is_computed_alike_in_any_share_of_the_work(format_name: str, order: str) -> None:
    """With a bias and a residual, which are added after the product, and where an input is nan in that row alone."""
    _, packed = _matrix(format_name, OUT_FEATURES, 512)
    rng = np.random.default_rng(4)
    x, residual = rng.standard_normal((6, 512)).astype(np.float32), rng.standard_normal((6, PADDED)).astype(np.float32)
    bias, whole = rng.standard_normal(PADDED).astype(np.float32), _run(packed, order, x)
    for first in range(len(packed.data)):
        part = _run(packed, order, x, tiles=(first, first + 1))
        columns = slice(first * TILE, (first + 1) * TILE)
        assert np.array_equal(part[:, columns], whole[:, columns])
        assert np.isnan(np.delete(part, np.arange(columns.start, columns.stop), axis=1)).all()
    for rows in (6, 4, 1):
        got = _run(packed, order, x[:rows], bias=bias, residual=residual[:rows])
        assert np.array_equal(got, ((whole + bias) + residual)[:rows])
    x[0, 77] = np.nan
    got = _run(packed, order, x)
    assert np.isnan(got[0, :OUT_FEATURES]).all()
    assert np.array_equal(got[1:], whole[1:])


@each_reader
def test_long_rows_and_long_matrices_are_computed_like_short_ones(format_name: str, order: str) -> None:
    tensor, packed = _matrix(format_name, PADDED, 512)
    rng, num_inputs = np.random.default_rng(10), 21 * 512  # of which few rows are as large as the second cache
    wide = pack(QuantTensor(tensor.format, (PADDED, num_inputs), np.tile(tensor.data, 21)))
    x = rng.standard_normal((40, num_inputs)).astype(np.float32)
    together = _run(wide, order, x)
    for first, end in ((0, 1), (14, 18), (24, 40)):
        assert np.array_equal(_run(wide, order, x[first:end]), together[first:end])
    times = 1 + (1 << 20) // packed.data.nbytes  # a MiB is long: its tiles are read in turns for up to 16 rows
    data = aligned_bytes((times * len(packed.data), packed.tile_bytes))
    data[:] = np.tile(packed.data, (times, 1))
    long = PackedTensor(packed.format, (times * PADDED, 512), data)
    short = _run(packed, order, x[:16, :512])
    for rows in (16, 13, 9, 1):
        assert np.array_equal(_run(long, order, x[:rows, :512]), np.tile(short[:rows], times))


@pytest.mark.parametrize("order", ["int8", "int16"])
def test_the_scales_of_mxfp4_are_exact_from_the_smallest_on_and_nan_stays_nan(order: str) -> None:
    fields = np.zeros((256, 1), FORMATS["mxfp4"].layout)
    fields["e"][:, 0] = np.arange(256)
    fields["codes"][:, 0, 3] = np.where(np.arange(256) % 2, 0x01, 0x90)  # 0.5 or -0.5
    tensor = QuantTensor(FORMATS["mxfp4"], (256, 32), fields.view(np.uint8))
    got = _run(pack(tensor), order, np.ones((1, 32), np.float32))[0]
    wanted = np.ldexp(np.where(np.arange(256) % 2, 1.0, -1.0), np.arange(256) - 128)
    # Sums with the integers of activations need room: beyond 2^92 weights are none.
    assert np.allclose(got[:220], wanted[:220], rtol=1e-6, atol=0)
    assert np.isnan(got[255])


def _looked_up(isa: str, table: tuple[int, ...], indices: np.ndarray) -> np.ndarray:
    @intrinsic
    def look_up(typingctx, source, target):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            source, target = map(Ops(builder).value, arguments)
            target.store(lookup_bytes(table, source.i32(), isa))
            return context.get_dummy_value()

        return types.void(source, target), codegen

    @njit
    def run(source, target):  # type: ignore[no-untyped-def]
        look_up(source, target)

    out = np.zeros(64, np.uint8)
    run(indices.ctypes.data, out.ctypes.data)
    return out


@pytest.mark.parametrize("lookup", sorted({lookup_isa(), "avx2"}))
def test_bytes_are_looked_up_alike_by_every_instruction(lookup: str) -> None:
    rng = np.random.default_rng(8)
    table = tuple(rng.permutation(256)[:16].tolist())
    indices = rng.permutation(np.arange(64, dtype=np.uint8) % 16)
    assert np.array_equal(_looked_up(lookup, table, indices), np.array(table, np.uint8)[indices])
