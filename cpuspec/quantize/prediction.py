"""The layer for multi-token prediction of a model that is written as a GGUF file: kept, as llama.cpp names it, or left out."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.canonical import GGUF, file_names, joined
from cpuspec.checkpoints.checkpoint import is_linear
from cpuspec.checkpoints.families import FAMILIES
from cpuspec.checkpoints.gguf_file import Value
from cpuspec.checkpoints.gguf_parts import read_parts
from cpuspec.checkpoints.heads import Head, own_mtp
from cpuspec.checkpoints.heads.mtp import NEXTN
from cpuspec.errors import CheckpointError
from cpuspec.formats import Format, QuantTensor, get_format
from cpuspec.formats.tensor import U8

_COUNT, _PREDICTING = "block_count", "nextn_predict_layers"
_OTHERS = "q8_0"  # the format of matrices that no layer of the model has


def writable(checkpoint: Checkpoint) -> Head | None:
    """The layer of a model if GGUF files have a place for it and it is the only one; else None."""
    predicting = checkpoint.prediction_layers
    if (
        not predicting
        or len({name for name in predicting if name.endswith(("eh_proj.weight", "input_proj.weight", "fc.weight"))}) > 1
    ):
        return None
    try:
        head = own_mtp(checkpoint)
    except CheckpointError:
        return None
    return head if head.feature_norms else None  # llama.cpp takes the target's hidden states after its last norm


def tensors_of(checkpoint: Checkpoint, head: Head, tensors: Mapping[str, QuantTensor]) -> dict[str, tuple[Format, QuantTensor]]:
    """The layer's tensors by their names in a GGUF file, and the formats to write them in: those of the model's last layer.

    tensors: the model's, by canonical name, as they are written.
    """
    family, last = FAMILIES[checkpoint.config.architecture], checkpoint.config.num_layers - 1
    shared = set(map(id, checkpoint.tensors.values()))
    own = {name: tensor for name, tensor in head.model.tensors.items() if id(tensor) not in shared}
    names: dict[str, tuple[str, ...]] = {
        theirs: (ours,) for theirs, ours in NEXTN.items() if ours in own and theirs.startswith("nextn.")
    }
    inside = file_names(family, GGUF, [name for name in own if name.startswith("layers.")])
    names |= {name.removeprefix("blk.0."): ours for name, ours in inside.items()}
    found = {}
    for theirs, ours in names.items():
        tensor = joined(head.model.config, family, GGUF, {name: own[name] for name in ours})
        like = tensors.get(ours[0].replace("layers.0.", f"layers.{last}."))
        found[f"blk.{last + 1}.{theirs}"] = (_format_of(ours[0], tensor, like), tensor)
    return found


def encoded(format: Format, tensor: QuantTensor) -> U8:
    """The bytes of a tensor in a format, those of experts one after another."""
    parts = [
        part.data if part.format is format and part.order is None else format.encode(part.dequantize()) for part in tensor.matrices
    ]
    return np.concatenate(parts) if len(tensor.shape) == 3 else parts[0]


def _format_of(name: str, tensor: QuantTensor, like: QuantTensor | None) -> Format:
    """name: canonical. like: the same part of the model's last layer, as it is written, whose format is taken if it is smaller."""
    if not is_linear(name, tensor.shape):
        return get_format("f32")
    other = get_format(_OTHERS if tensor.shape[-1] % get_format(_OTHERS).block_size == 0 else "f16")
    smaller = like.format if like is not None else other
    return tensor.format if tensor.format.gguf_type is not None and tensor.format.bits <= smaller.bits else smaller


def _of_layers(entries: Mapping[str, object], architecture: str) -> dict[str, NDArray[Any]]:
    """The entries that have a number for each block. Those of rotary positions have one for each section."""
    count, of_model = entries[f"{architecture}.{_COUNT}"], re.compile(re.escape(architecture) + r"\.(?!rope\.)")
    arrays = {key: value for key, value in entries.items() if isinstance(value, np.ndarray) and of_model.match(key)}
    return {key: value for key, value in arrays.items() if len(value) == count}


def entries_with(made: Mapping[str, Value], architecture: str) -> dict[str, Value]:
    """The entries about blocks, with one block for prediction added. made: the entries without it."""
    count = made[f"{architecture}.{_COUNT}"]
    assert isinstance(count, int), "a number of layers"
    found: dict[str, Value] = {f"{architecture}.{_COUNT}": count + 1, f"{architecture}.{_PREDICTING}": 1}
    for key, value in _of_layers(made, architecture).items():
        found[key] = np.append(value, value.dtype.type(0) if value.dtype == bool else value.max())
    return found


def entries_without(checkpoint: Checkpoint) -> dict[str, Value]:
    """What a GGUF file says of its blocks once those for prediction are left out."""
    metadata, count = read_parts(checkpoint.path).metadata, checkpoint.config.num_layers
    architecture = str(metadata["general.architecture"])
    found: dict[str, Value] = {f"{architecture}.{_COUNT}": count, f"{architecture}.{_PREDICTING}": 0}
    return found | {key: value[:count] for key, value in _of_layers(metadata, architecture).items()}
