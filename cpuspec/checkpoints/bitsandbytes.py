"""Matrices as bitsandbytes stores them: nf4, fp4, and LLM.int8(). Knows no model.

Four bits: `weight` holds two codes a byte, the first in the high half, of the matrix as one row of blocks; `weight.quant_state.*`
is JSON with its shape and the size of a block; `weight.absmax` is the scale of each block. After double quantization that is a code
of `weight.nested_quant_map`, times `weight.nested_absmax` of 256 blocks, plus an offset.
Eight bits: `weight` I8 [N, K] and `SCB` [N], 127 times the scale of a row.
Source: bitsandbytes, functional.py (QuantState) and nn/modules.py.
"""

import numpy as np

from cpuspec.checkpoints.fields import Fields, parse_json_object
from cpuspec.checkpoints.grouped_codes import LayerTensors, Method, assembled, int8_matrix, part_of, unpacked
from cpuspec.errors import CheckpointError
from cpuspec.formats import QuantTensor, get_format
from cpuspec.formats.format import F32, U8

_STATE = "weight.quant_state.bitsandbytes__"
_TYPES = ("nf4", "fp4")


_PARTS = (
    "weight", "SCB", "weight_format", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map",
    *(_STATE + type for type in _TYPES),
)  # fmt: skip


def bitsandbytes(config: Fields) -> Method:
    """How a file by bitsandbytes is stored. The tensors of each layer say more."""
    kind = "bitsandbytes, " + ("8 bits" if config.boolean("load_in_8bit", False) else "4 bits")
    return Method(kind, _PARTS, lambda parts: len(parts) > 1, _matrix)


def _matrix(what: str, parts: LayerTensors) -> QuantTensor:
    if "SCB" in parts:
        return _int8(what, parts)
    kind = next((type for type in _TYPES if _STATE + type in parts), None)
    if kind is None:
        raise CheckpointError(f"{what} has {', '.join(parts)} and no {_STATE}nf4; save the model again with transformers")
    state = Fields(f"{what}: quant_state", parse_json_object(parts[_STATE + kind].data.tobytes(), f"{what}: quant_state"))
    shape = [size for size in state.items("shape") if type(size) is int and 0 < size < 1 << 31]
    block, weight = state.integer("blocksize"), part_of(what, parts, "weight")
    if len(shape) != 2 or len(state.items("shape")) != 2 or shape[0] * shape[1] != 2 * weight.data.size:
        state.fail("shape", f"the {2 * weight.data.size} weights that the file has, as two sizes")
    if block < 1:
        state.fail("blocksize", "at least 1")
    format = get_format(f"{kind}_g64")
    levels = np.array(format.affine.levels if format.affine else (), np.float32)
    if "weight.quant_map" in parts and not np.array_equal(parts["weight.quant_map"].numbers(), levels):
        raise CheckpointError(f"{what}: weight.quant_map is not that of {kind}; use the model's plain weights")
    scales = _scales(what, parts, state)
    if len(scales) != -(-shape[0] * shape[1] // block):
        raise CheckpointError(f"{what}: {len(scales)} blocks have scales, wanted {-(-shape[0] * shape[1] // block)}")
    packed = weight.data
    outputs, inputs = shape
    if inputs % 64 or block % 64:
        format = get_format("f32")

    def rows(some: slice) -> U8:
        first, last = some.start * inputs, some.stop * inputs
        of_bytes = packed[first // 2 : -(-last // 2)]
        swapped = of_bytes >> np.uint8(4) | of_bytes << np.uint8(4)
        if format.name == "f32":
            codes = unpacked(swapped[None], 4, 2 * len(swapped))[0, first % 2 :][: last - first]
            return (levels[codes] * scales[np.arange(first, last) // block]).reshape(-1, inputs).view(np.uint8)
        fields = np.empty((last - first) // 64, format.layout)
        fields["d"], fields["codes"] = scales[np.arange(first, last, 64) // block], swapped.reshape(-1, 32)
        return fields.view(np.uint8).reshape(some.stop - some.start, -1)

    return assembled(format, (outputs, inputs), rows)


def _scales(what: str, parts: LayerTensors, state: Fields) -> F32:
    """The scale of each block."""
    absmax = part_of(what, parts, "weight.absmax")
    if absmax.dtype != "U8":
        return absmax.numbers().reshape(-1)
    codes = absmax.array("U8", 1)
    table, outer = (part_of(what, parts, f"weight.nested_{name}").numbers().reshape(-1) for name in ("quant_map", "absmax"))
    size, offset = state.integer("nested_blocksize"), np.float32(state.number("nested_offset", 0.0))
    if len(table) != 256 or size < 1 or len(outer) != -(-len(codes) // size):
        raise CheckpointError(
            f"{what}: {len(codes)} scales have {len(outer)} of their own for {size} each, and a table of {len(table)}"
        )
    scales = table[codes] * outer[np.arange(len(codes)) // size] + offset
    if not np.isfinite(scales).all():
        raise CheckpointError(f"{what} has scales that are not finite; the file is damaged")
    return scales


def _int8(what: str, parts: LayerTensors) -> QuantTensor:
    weight, scb = part_of(what, parts, "weight"), parts["SCB"].numbers().reshape(-1)
    layout = parts.get("weight_format")
    if layout is not None and layout.data.any():
        raise CheckpointError(f"{what}: weight_format is not that of rows; save the model again with a newer bitsandbytes")
    if len(scb) != len(codes := weight.array("I8", 2)):
        raise CheckpointError(f"{what}: SCB has {len(scb)} numbers for {len(codes)} rows")
    return int8_matrix(what, weight, scb[:, None] * np.float32(1 / 127), None)
