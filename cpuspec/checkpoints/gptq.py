"""Matrices as GPTQ and AWQ files store them: four tensors a linear layer. Knows no model.

GPTQ (AutoGPTQ, GPTQModel): `qweight` I32 [K * bits / 32, N], the codes of a column as bits from the lowest of the first word on;
`qzeros` I32 [groups, N * bits / 32], zero points likewise along N; `scales` [groups, N]; `g_idx` I32 [K], the group of each
input, not ascending after act-order. Version 1 (`checkpoint_format` gptq) has zero points less one, version 2 as they are.
GPTQModel subtracts and adds words of ones, so that borrows of a zero point 0 are undone; three-bit ones wrap around.
Where `sym` is true the zero point is the middle. Files may store it as either version does, whatever version they claim, because
vLLM's kernels for symmetric files do not read it.
AWQ (gemm): `qweight` I32 [K, N / 8] and `qzeros` I32 [groups, N / 8]; a word holds eight outputs in the order 0 2 4 6 1 3 5 7.
Auto-round writes either, and says so in `packing_format`, `backend` in older files.
Sources: GPTQModel, gptqmodel/utils/model.py and nn_modules/qlinear; AutoAWQ, awq/modules/linear/gemm.py; AutoRound,
auto_round/inference/backend.py.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.checkpoints.fields import Fields
from cpuspec.checkpoints.grouped_codes import GroupedCodes, LayerTensors, Method, make_groups, part_of, unpacked
from cpuspec.errors import CheckpointError
from cpuspec.formats import QuantTensor
from cpuspec.formats.format import I32, U8

_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # one in each field of a word
_AWQ_SHIFTS = [4 * place for place in (0, 4, 1, 5, 2, 6, 3, 7)]  # of outputs 0 to 7 in a word


def gptq(config: Fields, version: str = "") -> Method:
    """How a file by GPTQ is stored. Raises CheckpointError for a kind that is not supported.

    version: the file's, where `config` tells it in another way than GPTQ's packages.
    """
    file_bits, file_group = config.integer("bits"), config.integer("group_size", -1)
    mixed = "dynamic" in config or "extra_config" in config  # layers may have bits and groups of their own
    symmetric = config.boolean("sym", False)
    if file_bits not in (2, 3, 4, 8):
        config.fail("bits", "2, 3, 4 or 8")
    if file_group != -1 and file_group < 1:
        config.fail("group_size", "-1 or at least 1")
    version = version or config.text("checkpoint_format", config.text("format", "gptq"))
    if version not in ("gptq", "gptq_v2"):
        config.fail("checkpoint_format", "gptq or gptq_v2; save the model again with GPTQModel in one of these")
    if config.value("rotation"):
        config.fail("rotation", "it absent: rotated inputs are not supported; use a GGUF file of the model")
    if config.text("pack_dtype", "int32") != "int32":
        config.fail("pack_dtype", "int32; save the model again with GPTQModel in that")

    def matrix(what: str, parts: LayerTensors) -> QuantTensor:
        qweight, scales = part_of(what, parts, "qweight").array("I32", 2), part_of(what, parts, "scales").numbers()
        index = parts["g_idx"].array("I32", 1) if "g_idx" in parts else None
        bits = 32 * len(qweight) // len(index) if index is not None and mixed else file_bits
        inputs, outputs = 32 * len(qweight) // bits if bits else 0, qweight.shape[1]
        if bits not in (2, 3, 4, 8) or 32 * len(qweight) != bits * inputs or (index is not None and len(index) != inputs):
            of = "" if index is None else f" and g_idx of {len(index)}"
            raise CheckpointError(
                f"{what}: qweight {list(qweight.shape)} of {bits} bits{of} are no whole matrix; the file is damaged"
            )
        size = inputs // len(scales) if mixed and len(scales) and inputs % len(scales) == 0 else file_group
        group, order = make_groups(what, index, inputs, size, len(scales))
        _check_shape(what, "scales", scales, (-(-inputs // group), outputs))
        qzeros = part_of(what, parts, "qzeros").array("I32", 2)
        _check_shape(what, "qzeros", qzeros, (len(scales), -(-outputs * bits // 32)))
        zeros = _zeros(qzeros, bits, outputs, version == "gptq", symmetric)
        return GroupedCodes(
            (outputs, inputs),
            bits,
            group,
            lambda some: np.ascontiguousarray(qweight[:, some].T).view(np.uint8),
            np.ascontiguousarray(scales.T),
            np.ascontiguousarray(zeros.T),
            order,
        ).tensor()

    kind = f"GPTQ, {file_bits} bits, {_groups_text(file_group)}"
    return Method(kind, _PARTS, lambda parts: "qweight" in parts, matrix)


def _zeros(qzeros: I32, bits: int, outputs: int, less_one: bool, symmetric: bool) -> I32:
    """Zero points of codes [groups, N]. less_one: as version 1 stores them."""
    words = np.ascontiguousarray(qzeros).view(np.uint32)
    if less_one and bits in _ONES:
        words = words + np.uint32(_ONES[bits])
    zeros = unpacked(words.view(np.uint8), bits, outputs).astype(np.int32)
    zeros = zeros + 1 & 7 if less_one and bits == 3 else zeros
    middle, first = 1 << bits - 1, int(zeros.flat[0])
    if symmetric and abs(first - middle) == 1 and (zeros == first).all():
        zeros[:] = middle  # stored as the other version stores it
    return zeros


def awq(config: Fields) -> Method:
    """How a file by AWQ is stored. Raises CheckpointError for a kind that is not supported."""
    file_group = config.integer("group_size", config.integer("q_group_size", 128))
    if config.integer("bits", config.integer("w_bit", 4)) != 4:
        config.fail("bits" if "bits" in config else "w_bit", "4")
    if file_group != -1 and file_group < 1:
        config.fail("group_size" if "group_size" in config else "q_group_size", "-1 or at least 1")
    if config.text("version", "gemm").lower() != "gemm":
        config.fail("version", "gemm; quantize the model again with AutoAWQ in that version, or use a GGUF file of it")

    def matrix(what: str, parts: LayerTensors) -> QuantTensor:
        qweight, scales = part_of(what, parts, "qweight").array("I32", 2), part_of(what, parts, "scales").numbers()
        inputs, outputs = len(qweight), 8 * qweight.shape[1]
        group = inputs if file_group == -1 else file_group
        groups = -(-inputs // group)
        _check_shape(what, "scales", scales, (groups, outputs))
        zeros: NDArray[np.integer] = np.broadcast_to(np.uint8(8), scales.shape)
        if "qzeros" in parts:
            qzeros = parts["qzeros"].array("I32", 2)
            _check_shape(what, "qzeros", qzeros, (groups, qweight.shape[1]))
            zeros = _awq_codes(qzeros)
        if inputs % 2:
            raise CheckpointError(f"{what}: qweight has {inputs} inputs, wanted an even number; the file is damaged")

        def rows(some: slice) -> U8:
            first, last = some.start // 8, -(-some.stop // 8)
            codes = _awq_codes(qweight[:, first:last]).T[some.start - 8 * first : some.stop - 8 * first]
            return codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)

        points: I32 = np.ascontiguousarray(zeros.T, np.int32)
        return GroupedCodes((outputs, inputs), 4, group, rows, np.ascontiguousarray(scales.T), points).tensor()

    return Method(f"AWQ, 4 bits, {_groups_text(file_group)}", _PARTS, lambda parts: "qweight" in parts, matrix)


def _groups_text(group: int) -> str:
    return "whole rows" if group == -1 else f"groups of {group}"


def _check_shape(what: str, name: str, array: NDArray[Any], wanted: tuple[int, ...]) -> None:
    if array.shape != wanted:
        raise CheckpointError(f"{what}: {name} are {list(array.shape)}, wanted {list(wanted)}")


def auto_round(config: Fields) -> Method:
    """How a file by AutoRound is stored. Raises CheckpointError for a kind that is not supported."""
    if config.text("data_type", "int") != "int":
        config.fail("data_type", "int; use a GGUF file of the model, or its plain weights")
    key = "packing_format" if "packing_format" in config else "backend"
    parts = config.text(key, "auto").replace("auto-round", "auto_round").replace("autoround", "auto_round").split(":")
    if parts in (["auto"], ["auto_round", "auto"]) or {"gptq", "auto_gptq"} & set(parts):
        method = gptq(config, "gptq")
    elif any("awq" in part for part in parts):
        method = awq(config)
    elif parts[0] == "auto_round" and set(parts[1:]) <= {"gptqmodel", "exllamav2", "triton", "tritonv2"}:
        method = gptq(config, "gptq_v2")
    else:
        config.fail(
            key, "auto_round, auto_round:gptqmodel, auto_round:auto_gptq or auto_round:auto_awq; use a GGUF file of the model"
        )
    return replace(method, kind=f"Auto-Round, {method.kind}")


def _awq_codes(words: I32) -> U8:
    """The codes of words [n, words], U8 [n, 8 * words]."""
    codes = np.empty((*words.shape, 8), np.uint8)
    for output, shift in enumerate(_AWQ_SHIFTS):
        codes[:, :, output] = words >> shift & 15
    return codes.reshape(len(words), -1)
