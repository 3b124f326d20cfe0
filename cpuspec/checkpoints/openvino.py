"""Weights of OpenVINO models that optimum-intel exports: openvino_model.bin, described by openvino_model.xml.

Only weights are read, under the names that the Hugging Face model gives them; config.json describes the computation. NNCF's 4-bit
codes stay codes. Its 8-bit codes stay codes if they have no zero point or one in the middle. All others are decoded, mxfp8 to bf16
and the rest to f32. OpenVINO itself is not needed. XML with entities is refused, and every range is checked.

Format: OpenVINO IR version 11, https://docs.openvino.ai/2025/documentation/openvino-ir-format.html
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from cpuspec.checkpoints.grouped_codes import GroupedCodes, mxfp4_matrix, unpacked
from cpuspec.checkpoints.mapped import map_file
from cpuspec.errors import CheckpointError
from cpuspec.files import read_file
from cpuspec.formats import QuantTensor, get_format, mx
from cpuspec.formats.float_codes import E4M3
from cpuspec.formats.format import I32, U8

MODEL, WEIGHTS = "openvino_model.xml", "openvino_model.bin"

# Layers are called after the modules that they were made from.
_MODULE = re.compile(
    r"__module\.(model\.layers\.[0-9]+\.(?:self_attn\.(?:[qkvo]_proj|[qk]_norm)|mlp\.(?:gate|up|down)_proj"
    r"|input_layernorm|post_attention_layernorm)|model\.embed_tokens|model\.norm|lm_head)/"
)

_MAX_XML_BYTES = 1 << 25  # a parsed tree takes 25 times the bytes of the file; a graph of 80 layers has 12 MB
_MAX_DIMENSIONS = 8
_FLOATS = ("f32", "f16", "bf16")
_INTEGERS = ("u4", "i4", "u8", "i8")
_LEVELS = np.array(E4M3, np.float32)
_BITS = {"u4": 4, "i4": 4, "f4e2m1": 4, "u8": 8, "i8": 8, "f8e4m3": 8, "f8e8m0": 8, "f16": 16, "bf16": 16, "f32": 32}
_BITS |= {"i32": 32, "i64": 64}
_PASSED = ("Convert", "Reshape")  # layers between a constant and the product that keep its numbers


@dataclass(frozen=True)
class _Constant:
    """Some bytes of the weights' file."""

    type: str
    shape: tuple[int, ...]
    data: U8


@dataclass(frozen=True)
class _Weight:
    """A matrix of the graph: scale * (codes - zero), or plain numbers."""

    codes: _Constant
    zero: _Constant | None = None
    scale: _Constant | None = None


def read_openvino(directory: Path, mmap: bool = True) -> dict[str, QuantTensor]:
    """The tensors of the model in `directory` under their Hugging Face names, memory-mapped where they need no other layout.

    mmap: if not, the weights' file is read into memory.
    Raises CheckpointError on anything damaged or not supported.
    """
    graph = _Graph(directory, mmap)
    tensors: dict[str, QuantTensor] = {}
    # A byte holds two codes at most, and a tied embedding is read twice. More would be the same constant again and again.
    values_left = 4 * graph.num_bytes
    for layer in graph.layers.values():
        module = _MODULE.match(layer.name)
        what = f"{directory / MODEL}: {layer.name}"
        if not module:
            continue
        if layer.type in ("MatMul", "Gather"):
            weight = graph.weight(layer.inputs.get(1 if layer.type == "MatMul" else 0))
            if weight is not None and len(weight.codes.shape) > 1:
                values_left -= math.prod(weight.codes.shape)
                if values_left < 0:
                    raise CheckpointError(f"{what} is of a model with more weights than {WEIGHTS} has; wanted each to be used once")
                tensors[module[1] + ".weight"] = _matrix(what, weight)
        elif layer.type in ("Multiply", "Add"):
            for source in layer.inputs.values():
                weight = graph.weight(source)
                if weight is not None and weight.scale is None and math.prod(weight.codes.shape) > 1:
                    tensors[f"{module[1]}.{'weight' if layer.type == 'Multiply' else 'bias'}"] = _vector(what, weight.codes)
    return tensors


@dataclass(frozen=True)
class _Layer:
    type: str
    name: str
    data: dict[str, str]  # attributes
    inputs: dict[int, str]  # ids of layers, by port


class _Graph:
    """The layers of the XML file, and the bytes that its constants name."""

    def __init__(self, directory: Path, mmap: bool) -> None:
        self._path = directory / MODEL
        self._bytes = map_file(directory / WEIGHTS, mmap)
        self.num_bytes = len(self._bytes)
        self.layers: dict[str, _Layer] = {}
        root = _read_xml(self._path)
        for element in root.iterfind("layers/layer"):
            data = element.find("data")
            attributes = {} if data is None else dict(data.attrib)
            self.layers[element.get("id", "")] = _Layer(element.get("type", ""), element.get("name", ""), attributes, {})
        # Ports count inputs and then outputs, from 0 on.
        for edge in root.iterfind("edges/edge"):
            to, port = self.layers.get(edge.get("to-layer", "")), edge.get("to-port", "")
            if to is None or edge.get("from-layer") not in self.layers or not re.fullmatch(r"[0-9]{1,6}", port):
                raise CheckpointError(f"{self._path}: edge {dict(edge.attrib)} joins no two layers")
            to.inputs[int(port)] = edge.get("from-layer", "")

    def weight(self, layer_id: str | None) -> _Weight | None:
        """The output of a layer that depends only on constants; None for any other."""
        layer = self._source(layer_id)
        if layer is None:
            return None
        if layer.type == "Const":
            return _Weight(self._constant(layer))
        first, second = self._source(layer.inputs.get(0)), self._source(layer.inputs.get(1))
        if layer.type != "Multiply" or first is None or second is None or second.type != "Const":
            return None
        scale = self._constant(second)
        if first.type == "Const":
            return _Weight(self._constant(first), None, scale)
        codes, zero = self._source(first.inputs.get(0)), self._source(first.inputs.get(1))
        if first.type != "Subtract" or codes is None or zero is None or (codes.type, zero.type) != ("Const", "Const"):
            return None
        return _Weight(self._constant(codes), self._constant(zero), scale)

    def _source(self, layer_id: str | None) -> _Layer | None:
        """The layer; or, if it only passes numbers on, the one that they come from."""
        for _ in range(8):
            layer = self.layers.get(layer_id or "")
            if layer is None or layer.type not in _PASSED:
                return layer
            layer_id = layer.inputs.get(0)
        return None

    def _constant(self, layer: _Layer) -> _Constant:
        what = f"{self._path}: constant {layer.name!r}"
        type, shape = layer.data.get("element_type", ""), layer.data.get("shape", "")
        if type not in _BITS:
            raise CheckpointError(f"{what} is of type {type!r}; wanted one of {', '.join(_BITS)}; export the model in another one")
        numbers = [layer.data.get("offset", ""), layer.data.get("size", ""), *filter(None, shape.replace(" ", "").split(","))]
        sound = all(re.fullmatch(r"[0-9]{1,15}", number) for number in numbers)
        if not sound or len(numbers) > 2 + _MAX_DIMENSIONS:
            raise CheckpointError(f"{what} has no offset, size and shape of whole numbers: {str(layer.data)[:200]}")
        offset, size, *dims = map(int, numbers)
        if -(-math.prod(dims) * _BITS[type] // 8) != size or not size or offset + size > len(self._bytes):
            raise CheckpointError(f"{what}: {size} bytes at {offset} are no {type} {dims} in a file of {len(self._bytes)} bytes")
        return _Constant(type, tuple(dims), self._bytes[offset : offset + size])


def _read_xml(path: Path) -> ElementTree.Element:
    text = read_file(path, _MAX_XML_BYTES, CheckpointError)
    if b"<!DOCTYPE" in text or b"<!ENTITY" in text:
        raise CheckpointError(f"{path} declares entities, which no OpenVINO model does")
    try:
        return ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise CheckpointError(f"{path} is not XML: {error}") from error


def _vector(what: str, constant: _Constant) -> QuantTensor:
    if constant.type not in _FLOATS:
        raise CheckpointError(f"{what} takes a vector of {constant.type}; wanted one of {', '.join(_FLOATS)}")
    return QuantTensor(get_format(constant.type), (math.prod(constant.shape),), constant.data)


def _matrix(what: str, weight: _Weight) -> QuantTensor:
    """The matrix in a format of the same values."""
    codes, scale = weight.codes, weight.scale
    rows, columns = codes.shape[0], math.prod(codes.shape[1:])
    if scale is None:
        if codes.type not in _FLOATS:
            raise CheckpointError(f"{what} multiplies with {codes.type} as they are; wanted them with a scale")
        return QuantTensor(get_format(codes.type), (rows, columns), codes.data.reshape(rows, -1))
    groups = math.prod(codes.shape[1:-1])
    group = codes.shape[-1]
    if math.prod(scale.shape) != rows * groups or (weight.zero and math.prod(weight.zero.shape) not in (1, rows * groups)):
        raise CheckpointError(f"{what} has scales {list(scale.shape)} for codes {list(codes.shape)}; wanted one for each group")
    if codes.type in ("f4e2m1", "f8e4m3"):
        if scale.type != "f8e8m0" or group != 32 or weight.zero:
            raise CheckpointError(f"{what}: {codes.type} in groups of {group} under {scale.type}; wanted groups of 32 under f8e8m0")
        if codes.type == "f4e2m1":
            return mxfp4_matrix(what, codes.data.reshape(rows, -1), scale.data.reshape(rows, -1))
        return _mxfp8(codes.data, scale.data, (rows, columns))
    if codes.type not in _INTEGERS or scale.type not in _FLOATS:
        raise CheckpointError(f"{what} multiplies {codes.type} with {scale.type}; wanted {', '.join(_INTEGERS)} with f16 or f32")
    bits, scales = _BITS[codes.type], _numbers(scale).reshape(rows, groups)
    if columns * bits % 8 or not np.isfinite(scales).all():
        raise CheckpointError(f"{what} has rows of {columns} codes of {bits} bits; wanted whole bytes, and scales that are finite")
    lowest = 0 if codes.type.startswith("u") else -1 << bits - 1
    zeros = np.zeros((rows, groups), np.int32) if weight.zero is None else _zeros(what, weight.zero, rows, groups)
    zeros -= lowest
    if zeros.min() < 0 or zeros.max() >> bits:
        raise CheckpointError(f"{what} has zero points that are no codes of {bits} bits; the file is damaged")
    flips = np.uint8(0 if not lowest else 0x88 if bits == 4 else 0x80)  # signed codes to those from the lowest on
    stored = codes.data.reshape(rows, -1)
    return GroupedCodes((rows, columns), bits, group, lambda some: stored[some] ^ flips, scales, zeros).tensor(prefers_q8_0=True)


def _zeros(what: str, zero: _Constant, rows: int, groups: int) -> I32:
    if zero.type not in _INTEGERS:
        raise CheckpointError(f"{what} subtracts {zero.type}; wanted {', '.join(_INTEGERS)}")
    numbers = _numbers(zero).astype(np.int32).reshape(-1)
    return np.array(np.broadcast_to(numbers if len(numbers) == 1 else numbers.reshape(rows, groups), (rows, groups)))


def _mxfp8(codes: U8, scales: U8, shape: tuple[int, int]) -> QuantTensor:
    """bf16 has room for the three bits of an E4M3 mantissa and nearly every power of two; f32 for the others."""
    values = (_LEVELS[codes.reshape(-1, 32)] * (2 * mx.HALF_SCALES[scales])[:, None]).reshape(shape)
    bf16 = QuantTensor.encode(get_format("bf16"), values)
    return bf16 if np.array_equal(bf16.dequantize(), values, equal_nan=True) else QuantTensor.encode(get_format("f32"), values)


def _numbers(constant: _Constant) -> NDArray[Any]:
    """The numbers of a constant, flat; floats as f32."""
    if constant.type in _FLOATS:
        return get_format(constant.type).decode(constant.data)
    if _BITS[constant.type] == 8:
        return constant.data.view(np.int8 if constant.type == "i8" else np.uint8)
    codes = unpacked(constant.data[None], 4, math.prod(constant.shape))[0]
    return codes if constant.type == "u4" else (codes ^ 8).astype(np.int8) - np.int8(8)
