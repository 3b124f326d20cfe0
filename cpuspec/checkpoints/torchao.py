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

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from cpuspec.checkpoints.compressed import fp8_matrix
from cpuspec.checkpoints.fields import Fields
from cpuspec.checkpoints.grids import Grid, assembled, best_format, packed, part_of, per_block, per_input, unpacked
from cpuspec.checkpoints.safetensors import StoredTensor
from cpuspec.errors import CheckpointError
from cpuspec.formats import QuantTensor
from cpuspec.formats.format import F32, I32, U8

_QDATA, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_OF_ACTIVATIONS = ("_weight_act_quant_scale", "_weight_act_quant_zero_point")
_PRE_SCALE = "_weight_act_pre_scale"
_FLOATS = ("F32", "F16", "BF16")
_MOST_ROUNDED = 1 / 64  # of a step, the group's or the median one, by which a minimum in f16 may be off
_INSTEAD = "use a GGUF file of the model, its plain weights, or torchao's plain packing"


class TorchAo:
    """The settings of a file by torchao. The tensors of each layer say how it is stored."""

    parts: tuple[str, ...] = (_QDATA, _SCALE, _ZERO, _PRE_SCALE, *_OF_ACTIVATIONS)
    separator = "."
    unused: tuple[str, ...] = ()

    def __init__(self, config: Fields) -> None:
        how = config.object("quant_type").object("default").text("_type", "")
        self.kind = "torchao" + (f", {how[:60]}" if how.isidentifier() else "")

    def takes(self, parts: Mapping[str, StoredTensor]) -> bool:
        """Whether a layer with these tensors is quantized: names alone say so here."""
        return bool(parts)

    def matrix(self, what: str, parts: Mapping[str, StoredTensor]) -> QuantTensor:
        """The matrix [N, K] of a linear layer or an embedding. Raises CheckpointError where its tensors do not belong together."""
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
        return _integers(what, codes, scale, zero)


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
        return Grid((outputs, inputs), 4, inputs // groups, rows, scales, np.full(scales.shape, 8, np.int32)).tensor()
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


def _integers(what: str, stored: StoredTensor, scale: StoredTensor, zero: StoredTensor | None) -> QuantTensor:
    """Of IntxUnpackedToInt8Tensor and Int8Tensor: a grid of as many bits as its codes and zero points need."""
    codes, scales = stored.array("I8", 2), scale.numbers()
    outputs, inputs = codes.shape
    scales = scales.reshape(len(scales), -1) if scales.ndim and scales.size > 1 else scales.reshape(1, 1)
    groups = scales.shape[1]
    if len(scales) not in (1, outputs) or inputs % groups:
        raise CheckpointError(f"{what}: the scale is {list(scale.shape)} for {outputs} x {inputs} weights")
    zeros: I32 = np.zeros(scales.shape, np.int32)
    if zero is not None:
        if zero.dtype != "I8" or zero.data.size != scales.size:
            raise CheckpointError(f"{what}: zero points are {zero.dtype} {list(zero.shape)}, wanted I8 {list(scale.shape)}")
        zeros = zero.data.view(np.int8).astype(np.int32).reshape(scales.shape)
    scales, zeros = np.broadcast_to(scales, (outputs, groups)), np.broadcast_to(zeros, (outputs, groups))
    bits = _bits(codes, zeros)
    middle = 1 << bits - 1

    def rows(some: slice) -> U8:
        return packed((codes[some].astype(np.int16) + middle).astype(np.uint8), bits)

    return Grid((outputs, inputs), bits, inputs // groups, rows, scales, np.ascontiguousarray(zeros + middle)).tensor()


def _bits(codes: NDArray[np.int8], zeros: I32) -> int:
    """Of signed codes and zero points."""
    low, high = (int(min(codes.min(), zeros.min())), int(max(codes.max(), zeros.max())))
    return next(bits for bits in (2, 3, 4, 8) if low >= -(1 << bits - 1) and high < 1 << bits - 1)
