"""Writers of quantized Hugging Face directories, as each package's format is described, without any code of the readers.

written = write(tmp_path / "model", Gptq(bits=4, group=128))
written.values["layers.0.q"]  # what the matrix means, F32 [N, K]
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import numpy as safetensors

from cpuspec.checkpoints import open_checkpoint
from tools.make_tiny_model import make_tiny_hf

PARTS = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip

Tensors = dict[str, np.ndarray]
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
    header, blob = {}, b""
    for name, tensor in sorted(tensors.items()):
        dtype, array = (tensor.dtype, tensor.array) if isinstance(tensor, Raw) else (_DTYPES[tensor.dtype.name], tensor)
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [len(blob), len(blob) + len(data)]}
        blob += data
    text = json.dumps(header).encode()
    path.unlink(missing_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + blob)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes of each row as little-endian bits of I32 words, [n, ceil(count * bits / 32)]."""
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


def opened(written: Written) -> Any:
    """The checkpoint, after a check that the matrices mean what was written."""
    checkpoint = open_checkpoint(written.directory)
    for name, values in written.values.items():
        assert np.array_equal(checkpoint.tensors[name].dequantize(), values), name
    return checkpoint
