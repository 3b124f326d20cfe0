"""A quantized model as a Hugging Face directory in compressed-tensors' layout, which transformers and vLLM load.

pack-quantized: `weight_packed` I32 [N, K * bits / 32], codes without a sign, low bits first; `weight_scale` [N, K / group];
`weight_shape` I64 [2]; without symmetry `weight_zero_point` I32 [N / 8, K / group], packed down the rows likewise. int-quantized
and float-quantized, where inputs are rounded to 8 bits, too: `weight` I8 or F8_E4M3 [N, K] and `weight_scale` [N, 1]. Embedding
and output matrix stay plain. (https://github.com/vllm-project/compressed-tensors.)
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.canonical import HF, file_names, joined
from cpuspec.checkpoints.checkpoint import HfTokenizerFiles, is_linear
from cpuspec.checkpoints.families import FAMILIES, Family
from cpuspec.checkpoints.huggingface import config_to_write
from cpuspec.checkpoints.safetensors import INDEX, header_of
from cpuspec.errors import ConfigError
from cpuspec.files import write_file
from cpuspec.formats import Format, QuantTensor, float_codes, get_format, int8
from cpuspec.quantize.weights import layer_parts

# The values of --type for directories: llm-compressor's names.
SCHEMES = ("w4a16", "w4a16_asym", "w8a8", "w8a16", "fp8_dynamic")
_WITH_INPUTS = ("w8a8", "fp8_dynamic")  # whose inputs are rounded, too
_KEPT = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "additional_chat_templates/*.jinja", "1_Pooling/config.json")
_NOT_KEPT = (INDEX, "config.json")
_SHARD_BYTES = 5 * 10**9


@cache
def _rows_of_bytes(scheme: str, columns: int) -> Format:
    """Rows under one f32 scale each: bytes -127..127, or E4M3 where the scheme is fp8_dynamic."""
    return float_codes.fp8(columns) if scheme == "fp8_dynamic" else int8.int8(columns)


def formats_of(checkpoint: Checkpoint, scheme: str, group_size: int) -> dict[str, Format]:
    """The format of each matrix by canonical name; the embedding and an output matrix keep theirs.

    Raises ConfigError where the model is no Hugging Face directory, or has no matrices in floats.
    """
    if not isinstance(checkpoint.vocabulary, HfTokenizerFiles):
        raise ConfigError(
            f"{checkpoint.path} is a GGUF file, which has no config.json and no tokenizer.json; compressed-tensors are made from a "
            "Hugging Face directory. Name an output that ends in .gguf, or start from the directory"
        )
    family = FAMILIES[checkpoint.config.architecture]
    if checkpoint.config.experts and "*" not in family.layer_names.get("expert_gate", ("", ""))[1]:
        raise ConfigError(
            f"{checkpoint.path} is a mixture of experts, which is written as a GGUF file only; name OUT.gguf: it has those of a "
            "layer in one tensor, which compressed-tensors cannot quantize"
        )
    if group_size not in (32, 64, 128):
        raise ConfigError(f"the group size is {group_size}; wanted 32, 64 or 128")
    if checkpoint.tensors["embed"].format.affine:
        raise ConfigError(f"{checkpoint.path} is quantized already; start from its plain weights")
    int4 = get_format(f"int4_g{group_size}{'_asym' if scheme.endswith('_asym') else ''}")
    found = {}
    for name, tensor in checkpoint.tensors.items():
        if is_linear(name, tensor.shape):
            layer, part = layer_parts(name)
            inside = layer >= 0 and part not in ("k_b", "v_b")  # which lie across each other in the file
            found[name] = (
                tensor.format if not inside else int4 if scheme.startswith("w4") else _rows_of_bytes(scheme, tensor.shape[-1])
            )
            found[name].row_bytes(tensor.shape[-1])
    return found


def write_model(
    out: Path,
    checkpoint: Checkpoint,
    tensors: Mapping[str, QuantTensor],
    scheme: str,
    group_size: int,
    as_they_are: Mapping[str, QuantTensor] = MappingProxyType({}),
) -> None:
    """Write the directory, which must not be there yet or be empty; it appears when it is whole.

    as_they_are: further tensors, by their names in the file.
    Raises ConfigError for a directory with something in it, OSError where it cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; name a directory that is not")
    unfinished = out.with_name(f"{out.name}.{os.getpid()}")
    unfinished.mkdir()
    try:
        for pattern in _KEPT:
            for path in checkpoint.path.glob(pattern):
                if (name := path.relative_to(checkpoint.path)).as_posix() not in _NOT_KEPT:
                    target = unfinished / name
                    target.parent.mkdir(exist_ok=True)
                    shutil.copyfile(path, target)
        settings = _settings(scheme, group_size)
        names = FAMILIES[checkpoint.config.architecture].layer_names
        for part in ("router", "shared_weight") if checkpoint.config.experts else ():
            if part in names:
                settings["ignore"].append("re:.*" + re.escape(names[part][1].removesuffix(".weight")) + "$")
        if checkpoint.config.latent:
            settings["ignore"].append("re:.*kv_b_proj$")
        settings["ignore"] += [name.removesuffix(".weight") for name, tensor in as_they_are.items() if len(tensor.shape) > 1]
        config = config_to_write(checkpoint) | {"quantization_config": settings}
        write_file(unfinished / "config.json", json.dumps(config, indent=2))
        _write_safetensors(unfinished, checkpoint, tensors, scheme, as_they_are)
        os.replace(unfinished, out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _settings(scheme: str, group_size: int) -> dict[str, Any]:
    four, kind = scheme.startswith("w4"), "float" if scheme == "fp8_dynamic" else "int"
    weights = {
        "num_bits": 4 if four else 8,
        "type": kind,
        "symmetric": not scheme.endswith("_asym"),
        "strategy": "group" if four else "channel",
        "group_size": group_size if four else None,
        "dynamic": False,
        "observer": "minmax",
    }
    activations = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized" if scheme in _WITH_INPUTS else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": activations if scheme in _WITH_INPUTS else None,
            }
        },
        "ignore": ["lm_head"],
    }


class _Piece(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    data: partial[NDArray[Any]]


def _write_safetensors(
    directory: Path, checkpoint: Checkpoint, tensors: Mapping[str, QuantTensor], scheme: str, as_they_are: Mapping[str, QuantTensor]
) -> None:
    """Write the tensors one after the other, in files of 5 GB at most, as transformers splits them, unless one tensor has more."""
    plain = checkpoint.tensors["embed"].format
    config, family = checkpoint.config, FAMILIES[checkpoint.config.architecture]

    def joined_pieces(theirs: str, ours: Sequence[str]) -> dict[str, _Piece]:
        whole = joined(config, family, HF, {name: tensors[name] for name in ours})
        return dict(_pieces(family, theirs, ours[0], whole, plain, scheme))

    def stored_piece(name: str, tensor: QuantTensor) -> dict[str, _Piece]:
        return {name: _Piece(tensor.format.name.upper(), tensor.shape, tensor.num_bytes, partial(getattr, tensor, "data"))}

    # Pieces are made twice, for the header and to be written, because joined tensors are copies: one is in memory at a time.
    makers = [partial(joined_pieces, theirs, ours) for theirs, ours in file_names(family, HF, tensors).items()]
    makers += [partial(stored_piece, name, tensor) for name, tensor in as_they_are.items()]
    shards: list[tuple[list[partial[dict[str, _Piece]]], list[tuple[str, str, tuple[int, ...], int]]]] = []
    end, total = 0, 0
    for maker in makers:
        pieces = maker()
        num_bytes = sum(piece.num_bytes for piece in pieces.values())
        if not shards or (end and end + num_bytes > _SHARD_BYTES):
            shards.append(([], []))
            end = 0
        shards[-1][0].append(maker)
        shards[-1][1].extend((name, piece.dtype, piece.shape, piece.num_bytes) for name, piece in pieces.items())
        end += num_bytes
        total += num_bytes
    weight_map: dict[str, str] = {}
    for number, (own, told) in enumerate(shards, 1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        weight_map |= dict.fromkeys([name for name, *_ in told], file_name)
        with (directory / file_name).open("wb") as file:
            file.write(header_of(told, {"format": "pt"}))
            for maker in own:
                for name, piece in maker().items():
                    data = np.ascontiguousarray(piece.data())
                    assert data.nbytes == piece.num_bytes, f"{name} has {data.nbytes} bytes, not {piece.num_bytes}"
                    file.write(data.data)
    if len(shards) > 1:
        write_file(directory / INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))


def _pieces(
    family: Family, theirs: str, name: str, tensor: QuantTensor, plain: Format, scheme: str
) -> Iterator[tuple[str, _Piece]]:
    """The tensors of a file that hold a tensor of the model, and how to make them when they are written.

    theirs, name: its own name in the file, with a star for the number of an expert, and the canonical one of its first part.
    """
    if "*" in theirs:
        for expert, matrix in enumerate(tensor.matrices):
            yield from _pieces(family, theirs.replace("*", str(expert)), name, matrix, plain, scheme)
        return
    dtype = plain.safetensors_dtype or "F32"
    if tensor.format.affine is None:
        num_bytes = tensor.num_values * plain.block_bytes
        shape = (1, *tensor.shape) if family.hf_shift_is_row and name.endswith("router_shift") else tensor.shape
        yield theirs, _Piece(dtype, shape, num_bytes, partial(_as_floats, tensor, plain))
        return
    rows, columns = tensor.shape
    groups = columns // tensor.format.block_size
    yield f"{theirs}_scale", _Piece(dtype, (rows, groups), rows * groups * plain.block_bytes, partial(_scales, tensor, plain))
    if scheme in _WITH_INPUTS:
        dtype, flipped = ("I8", 0x80) if scheme == "w8a8" else ("F8_E4M3", 0)
        yield theirs, _Piece(dtype, tensor.shape, tensor.num_values, partial(_part, tensor, "codes", flipped))
        return
    num_bits = tensor.format.code_bits
    packed = (rows, columns * num_bits // 32)
    yield f"{theirs}_packed", _Piece("I32", packed, rows * columns * num_bits // 8, partial(_packed, tensor))
    yield f"{theirs}_shape", _Piece("I64", (2,), 16, partial(np.array, tensor.shape, "<i8"))
    if "z" in (tensor.format.layout.names or ()):
        zeros = (-(-rows // 8), groups)
        yield f"{theirs}_zero_point", _Piece("I32", zeros, 4 * zeros[0] * zeros[1], partial(_packed_zeros, tensor))


def _as_floats(tensor: QuantTensor, plain: Format) -> NDArray[Any]:
    return tensor.data if tensor.format is plain else plain.encode(tensor.dequantize())


def _scales(tensor: QuantTensor, plain: Format) -> NDArray[Any]:
    return plain.encode(_part(tensor, "d").astype(np.float32))


def _part(tensor: QuantTensor, name: str, flipped: int = 0) -> NDArray[Any]:
    part = tensor.format.split(tensor.data)[name]
    return part ^ np.uint8(flipped) if flipped else part


def _packed(tensor: QuantTensor) -> NDArray[Any]:
    """Codes of a row in order, of 4 bits two to a byte."""
    codes = _part(tensor, "codes")
    return codes if tensor.format.code_bits == 8 else codes[:, 0::2] | codes[:, 1::2] << 4


def _packed_zeros(tensor: QuantTensor) -> NDArray[Any]:
    """Zero points of eight rows in an i32, of rows that are not there 0."""
    zeros = _part(tensor, "z").astype(np.uint32)
    zeros = np.pad(zeros, ((0, -len(zeros) % 8), (0, 0))).reshape(-1, 8, zeros.shape[1])
    return np.bitwise_or.reduce(zeros << np.arange(0, 32, 4, dtype=np.uint32)[:, None], axis=1).astype("<u4")
