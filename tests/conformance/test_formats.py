"""Every registered format: its sizes, its bytes, the values that they mean and what is refused.

Values are held to the gguf package, or to a definition that is read byte by byte; error budgets and affine forms to plain numpy.
"""

import tracemalloc
from dataclasses import replace

import gguf
import numpy as np
import pytest

from cpuspec.errors import FormatError
from cpuspec.formats import FORMATS, Format, QuantTensor, get_format, table_of
from cpuspec.formats.format import scales_of
from cpuspec.formats.packing import TILE, bits, lanes, pack, tile_bytes, unpack

# Root-mean-square error of one encode and decode, relative to the values', for Gaussian values.
ERROR_BUDGETS = {
    **{"f32": 0.0, "f16": 2.5e-4, "bf16": 2e-3, "q4_0": 0.092, "q4_1": 0.084, "q5_0": 0.047, "q5_1": 0.041, "q8_0": 0.006},
    **{"q2_k": 0.272, "q3_k": 0.149, "q4_k": 0.075, "q5_k": 0.039, "q6_k": 0.019, "mxfp4": 0.12, "nvfp4": 0.095},
    **{"nvfp4_global": 0.095, "iq4_nl": 0.079, "iq4_xs": 0.082, "nl4_g32": 0.071, "nl4_xs": 0.072, "nl4_i": 0.075},
    **{"q6_i": 0.032, "iq1_s": 0.55, "iq1_m": 0.5, "iq2_xxs": 0.36, "iq2_xs": 0.31, "iq2_s": 0.26, "iq3_xxs": 0.195},
    **{"iq3_s": 0.165, "tq1_0": 0.85, "tq2_0": 0.85, "q1_0": 0.66, "q2_0": 0.85, "int4_g32": 0.095, "int4_g64": 0.105},
    **{"int4_g128": 0.115, "int4_g32_asym": 0.085, "int4_g64_asym": 0.096, "int4_g128_asym": 0.106, "int3_g32_asym": 0.15},
    **{"int3_g64_asym": 0.171, "int2_g32_asym": 0.307, "int2_g64_asym": 0.331, "int8_g32": 0.006, "int8_g128": 0.0075},
    **{"fp8_g32": 0.028, "fp8_g128": 0.028, "nf4_g64": 0.092, "fp4_g64": 0.135},
}
IN_GGUF = [name for name in FORMATS if gguf.GGMLQuantizationType.__members__.get(name.upper()) in gguf.quants._type_traits]
IN_GGUF += ["f32", "f16"]
# The gguf package encodes these; the others it only decodes.
ENCODED_BY_GGUF = [name for name in IN_GGUF if not name.endswith("_k") and not name.startswith(("iq", "nvfp"))]
# The others' largest value is bound by their f16 scale.
RANGE_OF_F32 = ("f32", "bf16", "mxfp4", "int8_g32", "int8_g128", "fp8_g32", "fp8_g128", "nf4_g64", "fp4_g64")
RANGE_OF_E4M3 = ("nvfp4", "nvfp4_global")  # of their scales


# Formats that are packed in more bits than files have, because their codes take longer to find than the difference to read: times
# the bytes of the file.
EXPANDED = {
    **{"iq1_s": 2.09, "iq1_m": 1.94, "iq2_xxs": 1.58, "iq2_xs": 1.46, "iq2_s": 1.32, "iq3_xxs": 1.39, "iq3_s": 1.24},
    "tq1_0": 1.26,
}
IN_BLOCKS = [name for name, row in FORMATS.items() if row.block_size > 1]


def every_format(names=FORMATS):
    return pytest.mark.parametrize("format", [FORMATS[name] for name in names], ids=list(names))


def any_bytes(format: Format, rows: int, columns: int) -> np.ndarray:
    """Random rows of bytes, without what no encoder writes: 13 bytes of 256 are second ways to write five digits of tq1_0."""
    data = np.random.default_rng(rows).integers(0, 256, (rows, format.row_bytes(columns)), np.uint8)
    return format.join(format.split(data)) if format.name == "tq1_0" else data


def gguf_type(format: Format) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[format.name.upper()]


def dequantized_by_gguf(data: np.ndarray, format: Format) -> np.ndarray:
    """The gguf package's values. It reads the mxfp4 scale 255 as 2^128, the specification as nan."""
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(data, gguf_type(format))
    if format.name == "mxfp4":
        values = np.where(np.repeat(data[:, :: format.block_bytes] == 255, 32, axis=1), np.float32(np.nan), values)
    return values


def weights(seed: int, rows: int = 24, columns: int = 1024) -> np.ndarray:
    """Gaussian rows of different magnitudes; then the shapes of block that encoders get wrong."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, columns)) * 0.05 * np.exp(rng.standard_normal((rows, 1)))
    values[0] = 0
    values[1] = 0.01
    values[2] = -0.01
    values[3] = np.abs(values[3])
    values[4] = -np.abs(values[4])
    values[5, ::256] = 3
    values[6, 32:] = 0
    return values.astype(np.float32)


@every_format(IN_GGUF)
def test_sizes_are_those_of_the_gguf_package(format):
    assert (format.block_size, format.block_bytes) == gguf.GGML_QUANT_SIZES[gguf_type(format)]
    assert format.bits == 8 * format.block_bytes / format.block_size


@every_format(IN_GGUF)
def test_any_bytes_and_encoded_weights_decode_as_in_the_gguf_package_bit_for_bit(format):
    for data in (np.random.default_rng(1).integers(0, 256, (64, format.row_bytes(1024)), np.uint8), format.encode(weights(2))):
        wanted, got = dequantized_by_gguf(data, format), format.decode(data)
        assert np.isfinite(wanted).mean() > 0.8
        assert ((got.view(np.uint32) == wanted.view(np.uint32)) | (np.isnan(got) & np.isnan(wanted))).all()


@every_format(ENCODED_BY_GGUF)
def test_encoding_gives_the_bytes_of_the_gguf_package(format):
    values = weights(3)
    wanted = gguf.quants.quantize(values, gguf_type(format)).view(np.uint8)
    assert np.array_equal(format.encode(values), wanted)


@every_format()
def test_a_round_trip_stays_within_the_error_budget_of_the_format(format):
    values = np.random.default_rng(4).standard_normal((64, 1024)).astype(np.float32)
    budget = ERROR_BUDGETS[format.name]
    error = np.sqrt(np.mean((format.decode(format.encode(values)) - values) ** 2))
    assert error <= budget
    # A budget that nothing could exceed would say nothing.
    assert error >= budget / 2


@every_format()
def test_no_value_moves_further_than_the_range_of_its_block_allows(format):
    values = weights(5)
    blocks, found = (format.rotate(some.reshape(-1, format.block_size)) for some in (values, format.decode(format.encode(values))))
    error = np.abs(found - blocks)
    span = np.maximum(blocks.max(axis=1), 0) - np.minimum(blocks.min(axis=1), 0)
    code_bits = 7 if format.block_size == 1 else format.code_bits
    # The scales of mxfp4 are powers of two: a peak just below the next one is cut from 8 steps to 6.
    # A value shares its point of a grid, and the number of minuses, with others.
    share = 1 / 4 if format.name == "mxfp4" else (3 if format.reader == "grids" else 1.5) / 2 ** (code_bits - 1)
    if format.name.startswith("fp8"):  # whose three bits of mantissa count at the largest magnitude
        share = 1 / 24
    if format.name == "q1_0":  # a sign at the mean magnitude
        share = 1
    assert (error.max(axis=1) <= share * span).all()


@every_format()
def test_zeros_stay_zeros(format):
    assert not format.decode(format.encode(np.zeros((2, 512), np.float32))).any()


@every_format()
def test_a_row_is_encoded_and_decoded_alike_alone_and_among_others(format):
    """Whatever the dimensions before it, and in a tensor larger than one chunk."""
    values = weights(6)[:12]
    data = format.encode(values.reshape(3, 4, 1024))
    assert data.shape == (3, 4, format.row_bytes(1024))
    rows = data.reshape(12, -1)
    assert all(np.array_equal(format.encode(values[i : i + 1])[0], rows[i]) for i in range(12))
    many = np.tile(rows, (26, 1))
    whole = format.decode(many)
    assert np.array_equal(format.decode(data).reshape(12, 1024), whole[:12])
    assert all(np.array_equal(whole[i], format.decode(many[i])) for i in range(0, len(many), 17))


@every_format()
def test_blocks_taken_apart_and_tiles_unpacked_have_the_bytes_of_the_file(format):
    for rows in (1, 16, 549):
        data = any_bytes(format, rows, 768)
        parts, packed = format.split(data), pack(QuantTensor(format, (rows, 768), data))
        assert parts["codes"].shape == (rows, 768)
        assert np.array_equal(format.join(parts), data)
        assert np.array_equal(unpack(packed).data, data)
        changed, other = data.copy(), packed.data.copy()
        changed[-1, 7] ^= 0x10
        other[0, 0] ^= 1
        assert not np.array_equal(format.join(format.split(changed)), data)
        assert not np.array_equal(unpack(type(packed)(format, packed.shape, other)).data, data)


@every_format([name for name in FORMATS if name not in IN_BLOCKS])
@pytest.mark.parametrize("in_features", [1, 31, 50, 300])
def test_any_number_of_inputs_can_be_packed(format, in_features):
    values = np.random.default_rng(in_features).standard_normal((20, in_features)).astype(np.float32)
    tensor = QuantTensor.encode(format, values)
    assert np.array_equal(unpack(pack(tensor)).data, tensor.data)


@every_format()
def test_tiles_start_at_cache_lines_and_have_at_most_three_percent_more_than_the_file_unless_it_says_so(format):
    assert tile_bytes(format, 4096) <= EXPANDED.get(format.name, 1.031) * TILE * format.row_bytes(4096)
    packed = pack(QuantTensor.encode(format, np.ones((20, 256), np.float32)))
    assert packed.tile_bytes % 64 == 0
    assert packed.data.ctypes.data % 64 == 0


@every_format([name for name, row in FORMATS.items() if row.affine])
def test_values_are_the_affine_form_of_the_parts(format):
    """value = d * s * level(code) - base * z * zero, with one factor for each run of codes, in exact arithmetic."""
    data = format.encode(np.random.default_rng(1).standard_normal((4, 512)).astype(np.float32))
    parts = format.split(data)
    d, s, base, z = (None if factor is None else np.asarray(factor, np.float64) for factor in scales_of(parts))
    base, z = d if base is None else base, s if z is None else z

    def wide(factor: np.ndarray | None) -> np.ndarray:
        return np.ones((4, 512)) if factor is None else np.repeat(factor, 512 // factor.shape[1], axis=1)

    level = parts["codes"] if format.affine.levels is None else np.array(format.affine.levels)[parts["codes"]]
    wanted = wide(d) * wide(s) * level - wide(base) * wide(z) * format.affine.zero
    got = format.rotate(format.decode(data).reshape(-1, format.block_size)).reshape(4, 512)
    assert np.allclose(got, wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())
    assert not np.allclose(got, wide(d) * wide(s) * (level + 1) - wide(base) * wide(z) * format.affine.zero, rtol=1e-3)


@every_format()
def test_rows_of_a_tensor_are_found_moved_and_counted_by_their_bytes(format):
    tensor = QuantTensor.encode(format, weights(7, 9, 512))
    whole, order = tensor.dequantize(), np.array([5, 0, 3, 1, 2, 4, 8, 7, 6])
    assert whole.shape == tensor.shape == (9, 512)
    assert whole.dtype == np.float32
    assert np.array_equal(tensor.rows([8, 0, 0, 3]), whole[[8, 0, 0, 3]])
    assert tensor.rows([]).shape == (0, 512)
    assert tensor.num_values == 9 * 512
    assert tensor.num_bytes == 9 * format.row_bytes(512)
    moved = tensor.permute_rows(order)
    assert np.array_equal(moved.data, tensor.data[order])
    assert np.array_equal(moved.dequantize(), whole[order])
    if format.block_size == 1:
        vector = QuantTensor.encode(format, whole[0, :9])
        assert np.array_equal(vector.permute_rows(order).dequantize(), vector.dequantize()[order])


@every_format()
def test_dequantizing_allocates_little_besides_the_result(format):
    tensor = QuantTensor(format, (2048, 2048), np.zeros((2048, format.row_bytes(2048)), np.uint8))
    tracemalloc.start()
    try:
        result = tensor.dequantize()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < result.nbytes + (6 << 20)


@every_format(IN_BLOCKS)
def test_rows_that_do_not_fill_blocks_are_refused_with_a_remedy(format):
    with pytest.raises(FormatError, match=rf"{format.name} needs in_features divisible by {format.block_size}, got 100; use f16"):
        format.row_bytes(100)
    with pytest.raises(FormatError, match="divisible"):
        format.encode(np.zeros((2, 100), np.float32))
    with pytest.raises(FormatError, match="blocks"):
        format.decode(np.zeros(format.block_bytes + 1, np.uint8))


@every_format(IN_BLOCKS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_block_formats_refuse_values_that_are_not_finite(format, value):
    values = weights(8)
    values[5, 300] = value
    with pytest.raises(FormatError, match="finite"):
        format.encode(values)


@every_format([name for name in FORMATS if name not in (*RANGE_OF_F32, *RANGE_OF_E4M3)])
def test_a_finite_value_never_becomes_infinite_silently(format):
    values = weights(9)
    values[5, 300] = 1e38
    with pytest.raises(FormatError, match="f16 is exceeded"):
        format.encode(values)


@every_format(RANGE_OF_E4M3)
def test_a_value_beyond_eight_bit_scales_is_refused(format):
    assert np.array_equal(format.decode(format.encode(np.full(64, -2688.0, np.float32))), np.full(64, -2688.0))
    with pytest.raises(FormatError, match="nvfp4 cannot hold 2700: it ends at 2688"):
        format.encode(np.full(64, 2700.0, np.float32))


@every_format(["f32", "f16", "bf16"])
def test_float_formats_keep_infinities_and_nans(format):
    decoded = format.decode(format.encode(np.array([np.inf, -np.inf, np.nan, 1.0], np.float32)))
    assert decoded[0] == np.inf
    assert decoded[1] == -np.inf
    assert np.isnan(decoded[2])
    assert decoded[3] == 1.0


@pytest.mark.filterwarnings("error")
@every_format([name for name in FORMATS if name != "nvfp4"])  # every byte is a finite scale
def test_scales_that_are_not_finite_decode_to_what_they_say_without_a_warning(format):
    values = format.decode(np.full(format.block_bytes, 0xFF, np.uint8))
    assert not np.isfinite(values).all()


@pytest.mark.parametrize(("name", "of_block", "per_byte"), [("q1_0", 128, 8), ("q2_0", 64, 4)])
def test_signs_and_two_bits_decode_as_ggml_lays_them_out(name: str, of_block: int, per_byte: int) -> None:
    """The gguf package does not decode them: a scale in f16, then `per_byte` values in each byte, the first in its lowest bits."""
    format = FORMATS[name]
    assert (format.block_size, format.block_bytes, format.gguf_type) == (
        of_block,
        2 + of_block // per_byte,
        {"q1_0": 41, "q2_0": 42}[name],
    )
    data = np.random.default_rng(1).integers(0, 256, (8, format.row_bytes(1024)), dtype=np.uint8)
    data[:, 1 :: format.block_bytes] = 0x2C  # scales of ordinary size
    wanted = []
    for block in data.reshape(-1, format.block_bytes):
        d, size = block[:2].view("<f2")[0].astype(np.float32), 8 // per_byte
        for i in range(of_block):
            code = int(block[2 + i // per_byte]) >> size * (i % per_byte) & (1 << size) - 1
            wanted.append(d * (2 * code - 1 if size == 1 else code - 1))
    assert np.array_equal(format.decode(data).reshape(-1), np.array(wanted, np.float32))


def test_signs_take_the_scale_that_leaves_the_least_weighted_error() -> None:
    rng = np.random.default_rng(2)
    values, weighed = rng.normal(size=(4, 128)).astype(np.float32), rng.lognormal(size=(4, 128)).astype(np.float32)
    format = FORMATS["q1_0"]
    assert np.array_equal(
        format.encode(values).view(format.layout)["d"].reshape(-1), np.abs(values).mean(axis=1).astype(np.float16)
    )

    def error(parts: dict, factor: float = 1.0) -> np.ndarray:
        decoded = format.decode(format.join({**parts, "d": parts["d"] * np.float32(factor)})).reshape(values.shape)
        return (np.square(decoded - values) * weighed).sum(axis=1)

    parts = format.searched(values, weighed, None)
    for factor in (0.97, 1.03):
        assert (error(parts) < error(parts, factor)).all()


Q4_0, F32 = FORMATS["q4_0"], QuantTensor.encode(FORMATS["f32"], np.ones((3, 4), np.float32))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: get_format("q4_k").row_bytes(896), "q4_k needs in_features divisible by 256, got 896; use q4_0 or q8_0"),
        (lambda: get_format("f32").encode(1.0), "single number"),
        (lambda: get_format("f32").decode(np.zeros(4, np.float32)), "uint8"),
        (lambda: get_format("q3_x"), r"'q3_x'.*f32, f16, bf16, q4_0"),
        (lambda: QuantTensor.encode(get_format("q8_0"), np.ones(32, np.float32)).permute_rows(np.arange(32)), "share scales"),
        *(
            (lambda order=order: F32.permute_rows(order), "row")
            for order in ([0, 1], [0, 1, 1], [0, 1, 3], [0, 1, -1], [[0, 1, 2]], [0.0, 1.0, 2.0])
        ),
        *((lambda rows=rows: F32.rows(rows), "from 0 to 2") for rows in ([3], [-1], [0, 1 << 40])),
        *(
            (lambda shape=shape, data=data: QuantTensor(Q4_0, shape, data), "")
            for shape, data in (
                ((2, 32), np.zeros((2, 17), np.uint8)),
                ((2, 32), np.zeros((3, 18), np.uint8)),
                ((2, 32), np.zeros(36, np.uint8)),
                ((2, 32), np.zeros((2, 18), np.int8)),
                ((2, 32), np.zeros((2, 36), np.uint8)[:, ::2]),
                ((2, 33), np.zeros((2, 18), np.uint8)),
                ((0, 32), np.zeros((0, 18), np.uint8)),
                ((1, 1, 2, 32), np.zeros((1, 1, 2, 18), np.uint8)),
                ((1, 2, 32), np.zeros((2, 18), np.uint8)),
                ((), np.zeros((), np.uint8)),
            )
        ),
    ],
)
def test_what_is_no_row_of_a_format_is_refused(call, message):
    with pytest.raises(FormatError, match=message):
        call()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Format("odd", Q4_0.layout, 32, Q4_0.encode_blocks), "format odd wants either an affine form or decode_numbers"),
        (lambda: replace(Q4_0, decode_numbers=FORMATS["f32"].decode_numbers), "either"),
        (lambda: table_of([replace(Q4_0, planes=())]), r"format q4_0: its planes hold 0 of 4\.5 bits"),
        (lambda: table_of([replace(Q4_0, planes=(bits(4),))]), r"its planes hold 4 of 4\.5 bits"),
        (lambda: table_of([replace(Q4_0, planes=(lanes("d", "<f2", 32),))]), r"its planes hold 0\.5 of 4\.5 bits"),
        (lambda: table_of([replace(Q4_0, reader="")]), "format q4_0 names no reader"),
        (lambda: table_of([Q4_0, replace(Q4_0, gguf_type=99)]), "same name"),
        (lambda: table_of([Q4_0, replace(Q4_0, name="other")]), "same gguf_type"),
        (lambda: table_of([FORMATS["f32"], replace(FORMATS["f32"], name="o", gguf_type=99)]), "same safetensors_dtype"),
    ],
)
def test_a_row_with_a_hole_or_a_name_of_another_cannot_be_registered(make, message):
    assert list(table_of([Q4_0, FORMATS["f32"]])) == ["q4_0", "f32"]
    with pytest.raises(AssertionError, match=message):
        make()
