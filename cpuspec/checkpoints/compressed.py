"""Matrices as compressed-tensors (LLM Compressor, vLLM), ModelOpt (NVIDIA) and FP8 files store them. Knows no model.

What a layer holds is seen from its tensors; its scales multiply.
  `weight_packed` I32 [N, K * bits / 32]: codes as bits from the lowest on, their middle being 0, with `weight_shape` [N, K],
      `weight_scale` [N, groups], and where asymmetric `weight_zero_point` I32 packed along N; `weight_g_idx` [K] after act-order;
      before 0.11 a word of 3, 5, 6 or 7 bits held whole codes only, so that bits were left over at its end
  `weight_packed` U8 [N, K / 2]: two E2M1 codes a byte, the first low. Under `weight_scale` U8 [N, K / 32], powers of two, it is
      mxfp4; under E4M3 scales [N, K / 16] and the divisor `weight_global_scale` it is nvfp4
  `weight` F8_E4M3 [N, K] under `weight_scale`, or `weight_scale_inv` as DeepSeek calls it, of the matrix, of each row, or of blocks
  `weight` I8 [N, K] under `weight_scale` [N, groups], with `weight_zero_point` of that shape where asymmetric
gpt-oss has mxfp4 of experts as `X_blocks` U8 [experts, N, K / 32, 16], the first code of a byte low, under `X_scales` U8
[experts, N, K / 32], for what would be X.
ModelOpt has nvfp4 as `weight` U8 [N, K / 2] under `weight_scale`, and the factor `weight_scale_2` instead of a divisor.
Sources: compressed-tensors 0.20, compressors; transformers, integrations/finegrained_fp8.py; vLLM, quantization/fp8.py.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cpuspec.checkpoints.fields import Fields
from cpuspec.checkpoints.grouped_codes import (
    GroupedCodes,
    LayerTensors,
    Method,
    assembled,
    best_format,
    by_rows,
    int8_matrix,
    make_groups,
    mxfp4_matrix,
    part_of,
    unpacked,
)
from cpuspec.checkpoints.grouped_codes import packed as packed_bits
from cpuspec.checkpoints.safetensors import StoredTensor
from cpuspec.errors import CheckpointError
from cpuspec.formats import QuantTensor, get_format
from cpuspec.formats.float_codes import E4M3
from cpuspec.formats.format import F32, I32, U8

_FORMATS = (
    "dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
)  # fmt: skip
_PARTS = (
    "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale",
    "weight_scale_inv", "input_scale", "input_zero_point", "input_global_scale", "activation_scale",
)  # fmt: skip
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
_UNUSED = ("k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point", "output_scale")
_LEVELS = np.array(E4M3, np.float32)


def compressed_tensors(config: Fields) -> Method:
    """How a file by compressed-tensors is stored. Raises CheckpointError for a kind that is not supported."""
    format = config.text("format", "dense")
    if format not in _FORMATS:
        config.fail("format", f"one of {', '.join(_FORMATS)}; use a GGUF file of the model, or its plain weights")
    if config.object("transform_config").names():
        config.fail("transform_config", "it absent: rotated inputs are not supported; use a GGUF file of the model")
    groups = config.object("config_groups")
    weights = [groups.object(name).object("weights") for name in groups.names()]
    bits = {one.integer("num_bits", 8) for one in weights if one.names()}
    blocks = [_block(one, "block_structure") for one in weights if one.items("block_structure")]

    def matrix(what: str, parts: LayerTensors) -> QuantTensor:
        if "weight_packed" in parts and parts["weight_packed"].dtype == "I32":
            return _packed(what, parts, bits)
        if "weight_packed" in parts:
            if "weight_global_scale" not in parts:
                return _mxfp4(what, parts)
            whole = parts["weight_global_scale"].numbers()
            if not whole.all():
                raise CheckpointError(f"{what}: weight_global_scale, a divisor, is 0; the file is damaged")
            return _nvfp4(what, parts["weight_packed"], part_of(what, parts, "weight_scale"), np.float32(1) / whole)
        weight, scale = part_of(what, parts, "weight"), part_of(what, parts, "weight_scale")
        if weight.dtype == "I8":
            return int8_matrix(what, weight, scale.numbers(), parts.get("weight_zero_point"))
        return fp8_matrix(what, weight, scale, blocks)

    def is_quantized(parts: LayerTensors) -> bool:
        return "weight_packed" in parts or "weight_scale" in parts

    return Method(f"compressed-tensors, {format}", _PARTS, is_quantized, matrix, unused=_UNUSED)


def _packed(what: str, parts: LayerTensors, known_bits: set[int]) -> QuantTensor:
    """A matrix of integers in words of 32 bits. known_bits: those that the configuration names."""
    words, shape = parts["weight_packed"].array("I32", 2), part_of(what, parts, "weight_shape")
    dims = shape.array(shape.dtype if shape.dtype in ("I32", "I64") else "I64", 1).tolist()
    found = [
        (bits, count_words)
        for count_words in (_dense_words, _padded_words)
        for bits in sorted(known_bits)
        if len(dims) == 2 and 0 < bits <= 8 and count_words(dims[1], bits) == words.shape[1]
    ]
    if not found or dims[0] != len(words) or dims[1] < 1:
        raise CheckpointError(
            f"{what}: weight_packed {list(words.shape)} is not a matrix {dims} of {sorted(known_bits)} bits, as config.json and "
            "weight_shape say; the file is damaged"
        )
    (bits, count_words), (outputs, inputs) = found[0], dims
    scales = by_rows(what, part_of(what, parts, "weight_scale").numbers())
    scales, count = np.broadcast_to(scales, (outputs, 1)) if scales.size == 1 else scales, scales.shape[1]
    if len(scales) != outputs or inputs % count:
        raise CheckpointError(f"{what}: weight_scale is {list(scales.shape)}, wanted [{outputs}, groups of {inputs} inputs]")
    zeros: NDArray[np.integer] = np.broadcast_to(np.int32(1 << bits - 1), scales.shape)
    if "weight_zero_point" in parts:
        packed = parts["weight_zero_point"].array("I32", 2)
        if packed.shape != (count_words(outputs, bits), count):
            raise CheckpointError(f"{what}: weight_zero_point is {list(packed.shape)}, wanted it packed for {list(scales.shape)}")
        rows_of_bits = _dense(np.ascontiguousarray(packed.T), bits, outputs, count_words)
        zeros = unpacked(rows_of_bits, bits, outputs).T
    index = parts.get("weight_g_idx")
    order = None
    if index is not None:
        numbers = index.array(index.dtype if index.dtype in ("I32", "I64") else "I32", 1)
        if len(numbers) != inputs:
            raise CheckpointError(f"{what}: weight_g_idx has {len(numbers)} indices for {inputs} inputs")
        _, order = make_groups(what, numbers, inputs, inputs // count, count)

    def rows(some: slice) -> U8:
        return _dense(np.ascontiguousarray(words[some]), bits, inputs, count_words)[:, : -(-inputs * bits // 8)]

    grid = GroupedCodes((outputs, inputs), bits, inputs // count, rows, scales, np.ascontiguousarray(zeros, np.int32), order)
    return grid.tensor()


def fp8(config: Fields) -> Method:
    """How a file whose `quant_method` is fp8 or fbgemm_fp8 is stored. Raises CheckpointError for a kind that is not supported."""
    if config.text("fmt", "e4m3").lower() not in ("e4m3", "float8_e4m3fn"):
        config.fail("fmt", "e4m3; use the model's plain weights")
    blocks = [_block(config, "weight_block_size")] if config.items("weight_block_size") else []

    def matrix(what: str, parts: LayerTensors) -> QuantTensor:
        scale = parts.get("weight_scale_inv") or part_of(what, parts, "weight_scale")
        return fp8_matrix(what, parts["weight"], scale, blocks)

    def is_quantized(parts: LayerTensors) -> bool:
        return "weight" in parts and parts["weight"].dtype.startswith("F8")

    kind = "FP8, " + (f"blocks of {blocks[0][0]} x {blocks[0][1]}" if blocks else "rows or matrices")
    return Method(kind, _PARTS, is_quantized, matrix, unused=_UNUSED)


def modelopt(config: Fields) -> Method:
    """How a file by ModelOpt is stored. Raises CheckpointError for a kind that is not supported."""
    settings = config.object("quantization") if "quantization" in config else config  # in a file of its own, or in config.json
    algorithm = settings.text("quant_algo").upper()
    if algorithm not in _ALGORITHMS:
        settings.fail("quant_algo", f"{' or '.join(_ALGORITHMS)}; use a GGUF file of the model, or its plain weights")

    def matrix(what: str, parts: LayerTensors) -> QuantTensor:
        weight, scale = part_of(what, parts, "weight"), part_of(what, parts, "weight_scale")
        if "pre_quant_scale" in parts:
            raise CheckpointError(f"{what} has a pre_quant_scale, factors of its inputs, which are not supported; use a GGUF file")
        if weight.dtype == "U8":
            return _nvfp4(what, weight, scale, part_of(what, parts, "weight_scale_2").numbers())
        if len(scale.shape) == 4 and scale.shape[1] == scale.shape[3] == 1:  # of blocks
            scale = replace(scale, shape=(scale.shape[0], scale.shape[2]))
        return fp8_matrix(what, weight, scale, [(128, 128)])

    unused = (*_UNUSED, "k_bmm_quantizer._amax", "v_bmm_quantizer._amax")
    parts = (*_PARTS, "weight_scale_2", "pre_quant_scale")
    return Method(f"ModelOpt, {algorithm}", parts, lambda parts: "weight_scale" in parts, matrix, unused=unused)


def mxfp4(config: Fields) -> Method:
    """How a file whose `quant_method` is mxfp4 is stored, as gpt-oss's is: only its experts are quantized."""

    def matrices(what: str, parts: LayerTensors) -> QuantTensor:
        """The matrices [E, N, K] of experts."""
        blocks, e = part_of(what, parts, "blocks").array("U8", 4), part_of(what, parts, "scales").array("U8", 3)
        if e.shape != blocks.shape[:3] or blocks.shape[3] != 16:
            raise CheckpointError(
                f"{what}: blocks are {list(blocks.shape)} and scales {list(e.shape)}, wanted 16 bytes and a scale for 32 inputs"
            )
        count, rows, groups = e.shape
        flat = mxfp4_matrix(what, blocks.reshape(count * rows, 16 * groups), e.reshape(count * rows, groups))
        return QuantTensor(flat.format, (count, rows, 32 * groups), flat.data.reshape(count, rows, -1))

    return Method("mxfp4", ("blocks", "scales"), lambda parts: True, matrices, separator="_")


def _dense_words(count: int, bits: int) -> int:
    return -(-count * bits // 32)


def _padded_words(count: int, bits: int) -> int:
    return -(-count // (32 // bits))


def _dense(words: I32, bits: int, count: int, count_words: Callable[[int, int], int]) -> U8:
    """Rows of words [n, words] as rows of bits without gaps."""
    if count_words is _dense_words or 32 % bits == 0:
        return words.view(np.uint8)
    fields = words.view(np.uint32)[:, :, None] >> np.arange(0, 33 - bits, bits, dtype=np.uint32) & np.uint32((1 << bits) - 1)
    return packed_bits(fields.reshape(len(words), -1)[:, :count].astype(np.uint8), bits)


def _block(fields: Fields, key: str) -> tuple[int, int]:
    """Rows and inputs of a block."""
    sizes = [size for size in fields.items(key) if type(size) is int and 0 < size < 1 << 31]
    if len(sizes) != 2 or len(fields.items(key)) != 2:
        fields.fail(key, "two numbers, rows and inputs of a block")
    return sizes[0], sizes[1]


def fp8_matrix(what: str, weight: StoredTensor, scale: StoredTensor, blocks: list[tuple[int, int]]) -> QuantTensor:
    """A matrix of E4M3 codes under scales of the matrix, of each row, or of blocks. blocks: (rows, inputs) of each possible size.

    Raises CheckpointError where the scales fit none of these, and for weights that are not finite.
    """
    codes, scales = weight.array("F8_E4M3", 2), by_rows(what, scale.numbers())
    outputs, inputs = codes.shape
    sizes = [(outputs, inputs), (1, inputs), *blocks]
    fitting = [(high, wide) for high, wide in sizes if scales.shape == (-(-outputs // high), -(-inputs // wide))]
    if not fitting:
        raise CheckpointError(
            f"{what}: the scale is {list(scale.shape)} for {outputs} x {inputs} weights, wanted a number for the "
            f"matrix, for each row{''.join(f', or for each block of {high} x {wide}' for high, wide in blocks)}"
        )
    high, wide = fitting[0]
    format = best_format(["fp8_g128", "fp8_g32"], inputs, wide)

    def rows(some: slice) -> U8:
        own, of_rows = codes[some], scales[np.arange(some.start, some.stop) // high]
        if (own & 0x7F == 0x7F).any():
            raise CheckpointError(f"{what} has weights that are not finite; the file is damaged")
        if format.name == "f32":
            return np.ascontiguousarray(_LEVELS[own] * of_rows[:, np.arange(inputs) // wide]).view(np.uint8)
        return format.join({"d": of_rows[:, np.arange(0, inputs, format.block_size) // wide], "codes": own})

    return assembled(format, (outputs, inputs), rows)


def _mxfp4(what: str, parts: LayerTensors) -> QuantTensor:
    packed, scales = parts["weight_packed"].array("U8", 2), part_of(what, parts, "weight_scale")
    e = scales.array("F8_E8M0" if scales.dtype == "F8_E8M0" else "U8", 2)
    outputs, inputs = len(packed), 2 * packed.shape[1]
    if inputs % 32 or e.shape != (outputs, inputs // 32):
        raise CheckpointError(f"{what}: weight_scale is {list(e.shape)} for {outputs} x {inputs} weights, wanted one for 32 inputs")
    return mxfp4_matrix(what, packed, e)


def _nvfp4(what: str, codes: StoredTensor, scale: StoredTensor, whole: F32) -> QuantTensor:
    """whole: the factor of all scales."""
    packed, scales = codes.array("U8", 2), scale.array("F8_E4M3", 2)
    outputs, inputs = len(packed), 2 * packed.shape[1]
    if inputs % 16 or scales.shape != (outputs, inputs // 16) or whole.size != 1:
        raise CheckpointError(
            f"{what}: its scales {list(scales.shape)} and {list(whole.shape)} of the whole fit no nvfp4 matrix {[outputs, inputs]}"
        )
    if not np.isfinite(_LEVELS[scales] * whole.reshape(())).all() or (scales > 0x7F).any() or not whole.all():
        raise CheckpointError(f"{what} has scales that are not finite, or not above 0; the file is damaged")
    format = get_format("nvfp4_global")
    if inputs % format.block_size:
        raise CheckpointError(
            f"{what}: nvfp4 takes rows of {format.block_size} weights here, got {inputs}; convert it to another format"
        )
    factors = np.full((outputs, inputs // format.block_size), whole.reshape(()), np.float32)

    def rows(some: slice) -> U8:
        return format.join({"d": factors[some], "scales": scales[some], "codes": unpacked(packed[some], 4, inputs)})

    return assembled(format, (outputs, inputs), rows)
