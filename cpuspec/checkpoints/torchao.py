"""Matrices as torchao stores them in safetensors: int4, integers in whole bytes, and FP8. Knows no model.

A matrix `weight` of a layer is several tensors; which class of torchao it was, their types tell.
  Int4Tensor: `_weight_qdata` I8 or U8 [N, K / 2], two signed codes a byte, the first low; `_weight_scale` and `_weight_zero_point`
      [K / group, N], both floats: value = scale * code + zero point
  IntxUnpackedToInt8Tensor, Int8Tensor: `_weight_qdata` I8 [N, K]; `_weight_scale` [N, groups]; `_weight_zero_point` I8 of that
      shape, or none: value = scale * (code - zero point). Codes of fewer bits are in whole bytes, too
  Float8Tensor: `_weight_qdata` F8_E4M3 [N, K]; `_weight_scale` of the matrix, of each row, or of groups of inputs
Int4TilePackedTo4dTensor (I32 of four dimensions) and Int4PlainInt32Tensor have an order for one processor's instructions.
Source: torchao 0.18, prototype/safetensors and quantization/quantize_/workflows.
"""

import numpy as np

from cpuspec.checkpoints.compressed import fp8_matrix
from cpuspec.checkpoints.fields import Fields
from cpuspec.checkpoints.grouped_codes import (
    GroupedCodes,
    LayerTensors,
    Method,
    assembled,
    best_format,
    int8_matrix,
    part_of,
    per_block,
    per_input,
    unpacked,
)
from cpuspec.checkpoints.safetensors import StoredTensor
from cpuspec.errors import CheckpointError
from cpuspec.formats import QuantTensor
from cpuspec.formats.format import F32, U8

_QDATA, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_OF_ACTIVATIONS = ("_weight_act_quant_scale", "_weight_act_quant_zero_point")
_PRE_SCALE = "_weight_act_pre_scale"
_FLOATS = ("F32", "F16", "BF16")
_MOST_ROUNDED = 1 / 64  # the error of a minimum in f16 that is allowed, as a share of a step: the group's or the median one
_INSTEAD = "use a GGUF file of the model, its plain weights, or torchao's plain packing"


def torchao(config: Fields) -> Method:
    """How a file by torchao is stored. The tensors of each layer say more. Their names say which layers are quantized."""
    how = config.object("quant_type").object("default").text("_type", "")
    kind = "torchao" + (f", {how[:60]}" if how.isidentifier() else "")
    return Method(kind, (_QDATA, _SCALE, _ZERO, _PRE_SCALE, *_OF_ACTIVATIONS), bool, _matrix)


def _matrix(what: str, parts: LayerTensors) -> QuantTensor:
    """The matrix [N, K] of a linear layer or an embedding."""
    codes, scale, zero = part_of(what, parts, _QDATA), part_of(what, parts, _SCALE), parts.get(_ZERO)
    if _PRE_SCALE in parts:
        raise CheckpointError(f"{what} multiplies its inputs first (act_pre_scale), which is not supported; {_INSTEAD}")
    if codes.dtype == "F8_E4M3":
        return fp8_matrix(what, codes, scale, _group_blocks(codes, scale))
    if codes.dtype not in ("I8", "U8") or len(codes.shape) != 2:
        raise CheckpointError(
            f"{what}: its codes are {codes.dtype} {list(codes.shape)}, an order for one processor's instructions, or a type "
            f"that is not supported; {_INSTEAD}"
        )
    if zero is not None and zero.dtype in _FLOATS:
        return _int4(what, codes, scale, zero)
    return int8_matrix(what, codes, scale.numbers(), zero, narrow=True)  # Int8Tensor and IntxUnpackedToInt8Tensor


def _group_blocks(codes: StoredTensor, scale: StoredTensor) -> list[tuple[int, int]]:
    """Rows and inputs of a block, where scales are of groups of inputs."""
    if len(codes.shape) != 2 or len(scale.shape) != 2 or not scale.shape[1] or codes.shape[1] % scale.shape[1]:
        return []
    return [(1, codes.shape[1] // scale.shape[1])]


def _int4(what: str, stored: StoredTensor, scale: StoredTensor, zero: StoredTensor) -> QuantTensor:
    """Of Int4Tensor. Codes whose zero points are 0 become int4, others q4_1, whose minima are f16."""
    codes, scales, zeros = stored.array(stored.dtype, 2).view(np.uint8), scale.numbers(), zero.numbers()
    outputs, inputs = len(codes), 2 * codes.shape[1]
    groups = len(scales)
    if scales.shape != (groups, outputs) or zeros.shape != scales.shape or inputs % groups:
        raise CheckpointError(
            f"{what}: scales are {list(scale.shape)} and zero points {list(zero.shape)} for {outputs} x {inputs} weights; "
            f"wanted both [groups of inputs, {outputs}]"
        )
    scales, zeros = np.ascontiguousarray(scales.T), np.ascontiguousarray(zeros.T)

    def rows(some: slice) -> U8:
        return codes[some] ^ np.uint8(0x88)  # from the middle to the lowest code

    if not zeros.any():
        return GroupedCodes((outputs, inputs), 4, inputs // groups, rows, scales, np.full(scales.shape, 8, np.int32)).tensor()
    minima = zeros - 8 * scales
    steps = np.abs(scales)
    fits = _in_halves(scales, 0) and _in_halves(minima, _MOST_ROUNDED * np.maximum(steps, np.median(steps)))
    format = best_format(["q4_1"] if fits else [], inputs, inputs // groups)

    def blocks(some: slice) -> U8:
        levels = unpacked(rows(some), 4, inputs)
        if format.name == "f32":
            d, z = (per_input(numbers[some], inputs, inputs // groups) for numbers in (scales, zeros))
            return (d * (levels.astype(np.float32) - 8) + z).astype(np.float32).view(np.uint8)
        d, m = (per_block(numbers[some], format, inputs, inputs // groups) for numbers in (scales, minima))
        return format.join({"d": d, "base": m, "codes": levels})

    return assembled(format, (outputs, inputs), blocks)


def _in_halves(numbers: F32, most: F32 | float) -> bool:
    """Whether f16 has these numbers, none off by more than `most`."""
    with np.errstate(over="ignore"):
        return bool((np.abs(numbers.astype(np.float16).astype(np.float32) - numbers) <= most).all())
