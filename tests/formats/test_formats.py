import gguf
import numpy as np
import pytest

from cpuspec.errors import FormatError
from cpuspec.formats import FORMATS, Format, get_format

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


def every_format(names=FORMATS):
    return pytest.mark.parametrize("format", [FORMATS[name] for name in names], ids=list(names))


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
def test_any_bytes_decode_as_in_the_gguf_package_bit_for_bit(format):
    data = np.random.default_rng(1).integers(0, 256, (64, format.row_bytes(1024)), dtype=np.uint8)
    wanted = dequantized_by_gguf(data, format)
    got = format.decode(data)
    assert np.isfinite(wanted).mean() > 0.8
    same = (got.view(np.uint32) == wanted.view(np.uint32)) | (np.isnan(got) & np.isnan(wanted))
    assert same.all()


@every_format(IN_GGUF)
def test_encoded_weights_decode_as_in_the_gguf_package_bit_for_bit(format):
    data = format.encode(weights(2))
    wanted = dequantized_by_gguf(data, format)
    assert np.array_equal(format.decode(data).view(np.uint32), wanted.view(np.uint32))


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
def test_leading_dimensions_pass_through(format):
    values = weights(6)[:12]
    data = format.encode(values.reshape(3, 4, 1024))
    assert data.shape == (3, 4, format.row_bytes(1024))
    assert np.array_equal(format.decode(data).reshape(12, 1024), format.decode(format.encode(values)))


@every_format()
def test_a_tensor_larger_than_one_chunk_decodes_like_its_rows(format):
    data = np.tile(format.encode(weights(7)), (13, 1))
    whole = format.decode(data)
    assert all(np.array_equal(whole[i], format.decode(data[i])) for i in range(0, len(data), 17))


@every_format([name for name, row in FORMATS.items() if row.block_size > 1])
def test_rows_that_do_not_fill_blocks_are_refused_with_a_remedy(format):
    with pytest.raises(FormatError, match=rf"{format.name} needs in_features divisible by {format.block_size}, got 100; use f16"):
        format.row_bytes(100)
    with pytest.raises(FormatError, match="divisible"):
        format.encode(np.zeros((2, 100), np.float32))
    with pytest.raises(FormatError, match="blocks"):
        format.decode(np.zeros(format.block_bytes + 1, np.uint8))


def test_superblock_formats_name_the_smaller_blocks_that_would_fit():
    with pytest.raises(FormatError, match="q4_k needs in_features divisible by 256, got 896; use q4_0 or q8_0"):
        get_format("q4_k").row_bytes(896)


@every_format([name for name, row in FORMATS.items() if row.block_size > 1])
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


def test_single_numbers_are_not_rows():
    with pytest.raises(FormatError, match="single number"):
        get_format("f32").encode(1.0)
    with pytest.raises(FormatError, match="uint8"):
        get_format("f32").decode(np.zeros(4, np.float32))


def test_an_unknown_format_names_the_choices():
    with pytest.raises(FormatError, match=r"'q3_x'.*f32, f16, bf16, q4_0"):
        get_format("q3_x")


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
