"""Writers of quantized Hugging Face directories, as each package's format is described, without any code of the readers.

written = write(tmp_path / "model", Gptq(bits=4, group=128))
written.values["layers.0.q"]  # what the matrix means, F32 [N, K]
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import numpy as safetensors

from cpuspec.checkpoints import open_checkpoint
from cpuspec.formats import get_format
from tests.model_files import write_tensors
from tools.make_tiny_model import make_tiny_hf

PARTS = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip

Tensors = dict[str, Any]
# (random numbers, [N, K]) -> the tensors of a layer by the ends of their names, and the values of its matrix
Quantize = Callable[[np.random.Generator, tuple[int, int]], tuple[Tensors, np.ndarray]]


@dataclass(frozen=True)
class Written:
    """A directory, and what the matrices mean that were quantized."""

    directory: Path
    values: dict[str, np.ndarray] = field(default_factory=dict)


def write(directory: Path, config: dict[str, Any], quantize: Quantize, skip: tuple[str, ...] = (), **options: Any) -> Written:
    """A tiny model whose linear layers are quantized, but for those parts of a layer that `skip` names."""
    make_tiny_hf(directory, **{"dtype": "f16", "tied": False, "num_layers": 1, **options})
    path = directory / "model.safetensors"
    tensors = safetensors.load_file(path)
    written = Written(directory)
    rng = np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        layer, module = name.split(".")[2], name.removesuffix(".weight").split(".", 3)[3]
        part = next(ours for ours, theirs in PARTS.items() if theirs == module)
        if part in skip:
            continue
        parts, values = quantize(rng, tensors.pop(name).shape)
        tensors |= {f"{name.removesuffix('weight')}{end}": tensor for end, tensor in parts.items()}
        written.values[f"layers.{layer}.{part}"] = values
    save(path, tensors)
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    return written


class Raw:
    """A tensor of a type that numpy does not have."""

    def __init__(self, dtype: str, array: np.ndarray) -> None:
        self.dtype, self.shape, self.array = dtype, array.shape, np.ascontiguousarray(array)


_DTYPES = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64", "uint8": "U8", "int8": "I8"}


def save(path: Path, tensors: dict[str, Any]) -> None:
    """A safetensors file, written by hand: numpy has no bf16 and no 8-bit floats."""
    stored = {}
    for name, tensor in sorted(tensors.items()):
        dtype, array = (tensor.dtype, tensor.array) if isinstance(tensor, Raw) else (_DTYPES[tensor.dtype.name], tensor)
        stored[name] = (dtype, list(tensor.shape), np.ascontiguousarray(array).tobytes())
    write_tensors(path, stored)


def packed(codes: np.ndarray, bits: int, is_padded: bool = False) -> np.ndarray:
    """Codes of each row as little-endian bits of I32 words, [n, ceil(count * bits / 32)]. is_padded: only whole codes in a word."""
    if is_padded:
        per = 32 // bits
        fields = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per))).reshape(len(codes), -1, per).astype(np.uint32)
        return np.bitwise_or.reduce(fields << (bits * np.arange(per, dtype=np.uint32)), axis=2).astype(np.uint32).view(np.int32)
    stream = (codes[:, :, None] >> np.arange(bits) & 1).reshape(len(codes), -1).astype(np.uint8)
    padded = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return np.packbits(padded, axis=1, bitorder="little").view("<i4")


def gptq(bits: int = 4, group: int = 128, act_order: bool = False, symmetric: bool = False, version: int = 1) -> Quantize:
    """`group` -1: whole columns."""

    def quantize(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Tensors, np.ndarray]:
        outputs, inputs = shape
        size = inputs if group == -1 else group
        groups = -(-inputs // size)
        codes = rng.integers(0, 1 << bits, (inputs, outputs))
        zeros = np.full((groups, outputs), 1 << bits - 1) if symmetric else rng.integers(0, 1 << bits, (groups, outputs))
        scales = (0.001 + 0.01 * rng.random((groups, outputs))).astype(np.float16)
        index = np.arange(inputs) // size
        if act_order:
            index = rng.permutation(index)
        values = scales.astype(np.float32)[index] * (codes - zeros[index]).astype(np.float32)
        stored = packed(zeros, bits)
        if version == 1 and bits == 3:
            stored = packed(zeros - 1 & 7, bits)
        elif version == 1:
            stored = (stored.view(np.uint32) - np.uint32(sum(1 << at for at in range(0, 32, bits)))).view(np.int32)
        parts = {"qweight": packed(codes.T, bits).T, "qzeros": stored, "scales": scales, "g_idx": index.astype(np.int32)}
        return {**parts, "bias": np.zeros(outputs, np.float16)}, values.T

    return quantize


def awq(group: int = 128, with_zeros: bool = True) -> Quantize:
    """Version gemm."""

    def words(codes: np.ndarray) -> np.ndarray:
        found = np.zeros((len(codes), codes.shape[1] // 8), np.uint32)
        for nibble, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            found |= codes[:, output::8].astype(np.uint32) << np.uint32(4 * nibble)
        return found.view(np.int32)

    def quantize(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Tensors, np.ndarray]:
        outputs, inputs = shape
        size = inputs if group == -1 else group
        codes = rng.integers(0, 16, (inputs, outputs))
        zeros = rng.integers(0, 16, (inputs // size, outputs)) if with_zeros else np.full((inputs // size, outputs), 8)
        scales = (0.001 + 0.01 * rng.random(zeros.shape)).astype(np.float16)
        values = np.repeat(scales.astype(np.float32), size, axis=0) * (codes - np.repeat(zeros, size, axis=0)).astype(np.float32)
        parts = {"qweight": words(codes), "scales": scales} | ({"qzeros": words(zeros)} if with_zeros else {})
        return parts, values.T

    return quantize


def bf16(numbers: np.ndarray) -> tuple[Raw, np.ndarray]:
    """Numbers cut to bf16: as a tensor, and their values."""
    bits = numbers.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return Raw("BF16", (bits >> 16).astype(np.uint16)), bits.view(np.float32)


def compressed(
    bits: int = 4, group: int = 128, symmetric: bool = True, act_order: bool = False, tiny: bool = False, is_padded: bool = False
) -> Quantize:
    """pack-quantized. tiny: scales that f16 does not have. is_padded: as older versions packed."""

    def quantize(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Tensors, np.ndarray]:
        outputs, inputs = shape
        size = inputs if group == -1 else group
        codes, half = rng.integers(0, 1 << bits, shape), 1 << bits - 1
        zeros = np.full((outputs, inputs // size), half) if symmetric else rng.integers(0, 1 << bits, (outputs, inputs // size))
        stored, scales = bf16((1e-7 if tiny else 0.01) * (0.1 + rng.random(zeros.shape)))
        index = np.arange(inputs) // size
        if act_order:
            index = rng.permutation(index)
        parts: Tensors = {"weight_packed": packed(codes, bits, is_padded), "weight_scale": stored, "weight_shape": np.array(shape)}
        if not symmetric:
            parts["weight_zero_point"] = packed(zeros.T, bits, is_padded).T
        if act_order:
            parts["weight_g_idx"] = index.astype(np.int32)
        return parts, scales[:, index] * (codes - zeros[:, index]).astype(np.float32)

    return quantize


def int8(groups: int = 1) -> Quantize:
    """int-quantized, with f32 scales."""

    def quantize(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Tensors, np.ndarray]:
        codes = rng.integers(-128, 128, shape).astype(np.int8)
        scales = (0.0001 + 0.0002 * rng.random((shape[0], groups))).astype(np.float32)
        return {"weight": codes, "weight_scale": scales}, np.repeat(scales, shape[1] // groups, axis=1) * codes

    return quantize


def fp8(scales_of: str, name: str = "weight_scale") -> Quantize:
    """scales_of: matrix, row, or block of 128 x 128."""

    def quantize(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Tensors, np.ndarray]:
        codes = rng.integers(0, 256, shape).astype(np.uint8)
        codes[codes & 0x7F == 0x7F] = 0
        high, wide = {"matrix": shape, "row": (1, shape[1]), "block": (128, 128)}[scales_of]
        scales = 0.001 * (0.1 + rng.random((-(-shape[0] // high), -(-shape[1] // wide)))).astype(np.float32)
        exponent, mantissa = codes >> 3 & 15, codes & 7
        magnitude = np.where(exponent > 0, 2.0 ** (exponent.astype(int) - 7) * (1 + mantissa / 8), mantissa * 2.0**-9)
        values = (magnitude * np.where(codes > 127, -1, 1)).astype(np.float32)
        spread = np.repeat(np.repeat(scales, high, axis=0), wide, axis=1)[: shape[0], : shape[1]]
        stored = scales.reshape(()) if scales_of == "matrix" else scales
        return {"weight": Raw("F8_E4M3", codes), name: stored, "input_scale": np.ones((), np.float32)}, values * spread

    return quantize


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def fp4(nv: bool) -> Quantize:
    """mxfp4-pack-quantized or nvfp4-pack-quantized."""

    def quantize(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Tensors, np.ndarray]:
        codes = rng.integers(0, 16, shape).astype(np.uint8)
        parts: Tensors = {"weight_packed": codes[:, 0::2] | codes[:, 1::2] << 4}
        if not nv:
            e = rng.integers(115, 122, (shape[0], shape[1] // 32)).astype(np.uint8)
            parts["weight_scale"] = e
            return parts, _E2M1[codes] * np.repeat(2.0 ** (e.astype(np.float32) - 127), 32, axis=1)
        scales, whole = rng.integers(0x30, 0x70, (shape[0], shape[1] // 16)).astype(np.uint8), np.array([3000.0], np.float32)
        parts |= {"weight_scale": Raw("F8_E4M3", scales), "weight_global_scale": whole}
        values = (2.0 ** ((scales >> 3).astype(int) - 7) * (1 + (scales & 7) / 8)).astype(np.float32) / whole
        return parts, _E2M1[codes] * np.repeat(values, 16, axis=1)

    return quantize


def modelopt(kind: str) -> Quantize:
    """kind: of matrices, rows or blocks in FP8, or nvfp4, which has a factor where compressed-tensors has a divisor."""

    def quantize(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Tensors, np.ndarray]:
        parts, values = fp4(nv=True)(rng, shape) if kind == "nvfp4" else fp8(kind)(rng, shape)
        if kind == "nvfp4":
            parts["weight"], whole = parts.pop("weight_packed"), parts.pop("weight_global_scale")
            parts |= {"weight_scale_2": (1 / whole).reshape(()), "input_scale": np.ones((), np.float32)}
        elif kind == "block":
            parts["weight_scale"] = parts["weight_scale"][:, None, :, None]
        elif kind == "row":
            parts["weight_scale"] = parts["weight_scale"][:, 0]
        return parts, values

    return quantize


# bitsandbytes 0.50, functional.py, rounded to four digits: the reader has the whole numbers.
_NF4 = [-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1]


def bitsandbytes(kind: str = "nf4", nested: bool = False, block: int = 64) -> Quantize:
    """nf4, fp4, or int8."""

    def quantize(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Tensors, np.ndarray]:
        if kind == "int8":
            codes, scb = rng.integers(-127, 128, shape).astype(np.int8), (0.5 + rng.random(shape[0])).astype(np.float32)
            values = codes * (scb * np.float32(1 / 127))[:, None]
            return {"weight": codes, "SCB": scb, "weight_format": np.zeros((), np.uint8)}, values
        levels = np.array(get_format(f"{kind}_g64").affine.levels, np.float32)
        assert kind == "fp4" or np.abs(levels - _NF4).max() < 1e-4
        flat = rng.integers(0, 16, math.prod(shape)).astype(np.uint8)
        blocks = len(flat) // block
        state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
        parts: Tensors = {"weight": (flat[0::2] << 4 | flat[1::2])[:, None], "weight.quant_map": levels}
        if nested:
            table, outer = np.linspace(-1, 1, 256, dtype=np.float32), (0.1 + rng.random(-(-blocks // 256))).astype(np.float32)
            inner = rng.integers(128, 256, blocks).astype(np.uint8)
            absmax = table[inner] * np.repeat(outer, 256)[:blocks] + np.float32(0.05)
            parts |= {"weight.absmax": inner, "weight.nested_absmax": outer, "weight.nested_quant_map": table}
            state |= {"nested_blocksize": 256, "nested_offset": 0.05, "nested_dtype": "float32"}
        else:
            absmax = (0.01 + 0.05 * rng.random(blocks)).astype(np.float32)
            parts["weight.absmax"] = absmax
        parts[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
        return parts, (levels[flat] * np.repeat(absmax, block)).reshape(shape)

    return quantize


OFFSETS = (-4, 0, 4)  # of int4, in steps, that leave minima which f16 has


def torchao(kind: str = "int4", group: int = 128) -> Quantize:
    """kind: int4 with zero points, int4 symmetric, int8, int8 asymmetric, intx of 2, 3 or 4 bits, fp8, fp8 of groups."""

    def quantize(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[Tensors, np.ndarray]:
        name, _, how = kind.partition(" ")
        rows, groups = shape[0], shape[1] // (group if name in ("int4", "intx") or how == "of groups" else shape[1])
        if name == "fp8":
            parts, values = fp8("row")(rng, shape)
            scales = np.repeat(parts["weight_scale"], groups, axis=1)
            return {"_weight_qdata": parts["weight"], "_weight_scale": scales}, values
        bits = {"int4": 4, "int8": 8}.get(name) or int(how)
        codes = rng.integers(-(1 << bits - 1), 1 << bits - 1, shape).astype(np.int8)
        scales, by_scale = bf16(0.001 + 0.004 * rng.random((rows, groups)))
        spread = np.repeat(by_scale, shape[1] // groups, axis=1)
        if name == "int4":
            halves = codes & 15
            _, zeros = bf16(by_scale * rng.choice(OFFSETS, (rows, groups)) * (how != "symmetric"))
            stored, _ = bf16(zeros.T)
            parts = {"_weight_qdata": (halves[:, 0::2] | halves[:, 1::2] << 4).astype(np.int8), "_weight_zero_point": stored}
            parts["_weight_scale"], _ = bf16(by_scale.T)
            return parts, spread * codes + np.repeat(zeros, shape[1] // groups, axis=1)
        zeros = rng.integers(-2, 2, (rows, groups)).astype(np.int8) * np.int8(how == "asymmetric")
        parts = {"_weight_qdata": codes, "_weight_scale": scales, "_weight_zero_point": zeros}
        if name == "int8" and not how:
            del parts["_weight_zero_point"]
        return parts, spread * (codes.astype(np.float32) - np.repeat(zeros, shape[1] // groups, axis=1))

    return quantize


def opened(written: Written) -> Any:
    """The checkpoint, after a check that the matrices mean what was written."""
    checkpoint = open_checkpoint(written.directory)
    for name, values in written.values.items():
        tensor = checkpoint.tensors[name]
        # nvfp4's scale of the whole matrix is stored as its inverse, which is rounded.
        error = 2**-22 if tensor.format.name == "nvfp4_global" else 0
        assert np.allclose(tensor.dequantize(), values, rtol=error, atol=0), name
    return checkpoint
