"""Heads as files, which vLLM loads and llama.cpp's converter reads (conversion/llama.py, conversion/qwen.py).

EAGLE-3 and layers for multi-token prediction have the layout of speculators. Training starts from such files, read as any other
head is, and ends with the same files and other numbers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.canonical import HF, file_names, joined
from cpuspec.checkpoints.families import FAMILIES
from cpuspec.checkpoints.fields import read_json_object
from cpuspec.checkpoints.heads import Head, find_reader
from cpuspec.checkpoints.heads.eagle import NAMES_OF_3
from cpuspec.checkpoints.heads.model import OUTSIDE
from cpuspec.checkpoints.heads.mtp import MIMO, prediction_config
from cpuspec.config import ModelConfig
from cpuspec.errors import CheckpointError
from cpuspec.files import read_file, write_file
from cpuspec.formats import QuantTensor, get_format

WEIGHTS = "model.safetensors"
_MOST_BYTES = 1 << 34

_OF_EAGLE3 = {ours: theirs for theirs, ours in {**NAMES_OF_3, **OUTSIDE}.items()}
_LAYER = {ours: theirs for ours, (_, theirs) in FAMILIES["qwen3"].layer_names.items()}
_OF_MTP = {ours: f"mtp_layers.0.{theirs}" for theirs, ours in MIMO.items()}


def file_name(name: str) -> str:
    """The name in the file of a tensor of an EAGLE-3 head."""
    return _OF_EAGLE3.get(name) or f"layers.0.{_LAYER[name.removeprefix('layers.0.')]}"


def layer_config(target: Checkpoint, intermediate_size: int) -> dict[str, Any]:
    """The shape of a head's one layer, with the target's heads."""
    c = target.config
    return {
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.context_length,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_base,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def speculators_config(target: Checkpoint, algorithm: str, num_tokens: int) -> dict[str, Any]:
    """The part that says what the head is and for which model."""
    method = {"proposal_type": "greedy", "speculative_tokens": num_tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    hf_class = FAMILIES[target.config.architecture].hf_class
    return {
        "algorithm": algorithm,
        "proposal_methods": [method],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": target.name, "architectures": [hf_class]},
    }


def write_new_head(
    directory: Path, config: Mapping[str, Any], method: str, arrays: Mapping[str, np.ndarray], target: Checkpoint
) -> None:
    """Write a new head in f32; arrays by canonical name, and `token_ids`, the target's id of each drafted token, where it has some.

    Raises OSError.
    """
    write_directory(directory, config, _tensors(arrays, method, target.config))


def hf_tensors(config: ModelConfig, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Tensors of a model by canonical name as those of its family's Hugging Face files."""
    family, f32 = FAMILIES[config.architecture], get_format("f32")
    tensors = {name: QuantTensor.encode(f32, array) for name, array in arrays.items()}
    found = {}
    for theirs, ours in file_names(family, HF, tensors).items():
        found[theirs] = torch.from_numpy(joined(config, family, HF, {name: tensors[name] for name in ours}).dequantize())
    return found


def _mtp_tensors(target: ModelConfig, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """A layer for multi-token prediction, with the names of speculators outside and those of the target's family inside."""
    family = FAMILIES[target.architecture]
    inside = hf_tensors(prediction_config(target, False), {name: array for name, array in arrays.items() if name not in _OF_MTP})
    tensors = {name.replace(f"{family.hf_root}.layers.", "mtp_layers.", 1): tensor for name, tensor in inside.items()}
    for ours, theirs in _OF_MTP.items():
        tensors[theirs] = torch.from_numpy(arrays[ours]) - (family.norm_offset if ours.endswith("norm") else 0.0)
    return tensors


def _tensors(arrays: Mapping[str, np.ndarray], method: str, target: ModelConfig) -> dict[str, Tensor]:
    """As the file holds them."""
    if method == "mtp":
        return _mtp_tensors(target, arrays)
    tensors = {file_name(name): torch.from_numpy(array) for name, array in arrays.items() if name != "token_ids"}
    ids = arrays.get("token_ids")
    if ids is not None:
        tensors["d2t"] = torch.from_numpy(ids - np.arange(len(ids)))
        tensors["t2d"] = torch.from_numpy(np.isin(np.arange(target.vocab_size), ids))
    return tensors


def write_directory(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    names: tuple[str, str] = ("config.json", WEIGHTS),
) -> None:
    """Write a configuration and tensors into a directory, which is made; floats in `dtype`, if one is given. Raises OSError."""
    written = {name: (one.to(dtype) if dtype and one.is_floating_point() else one).contiguous() for name, one in tensors.items()}
    directory.mkdir(parents=True, exist_ok=True)
    write_file(directory / names[1], save(written, {"format": "pt"}))
    write_file(directory / names[0], json.dumps(config, indent=2) + "\n")


def read_head(directory: Path, target: Checkpoint) -> Head:
    """A head's directory as the engine reads it. Raises CheckpointError where it is none, or is not for this target."""
    found = find_reader(directory, mmap=False)
    if found is None:
        raise CheckpointError(f"{directory} is not a draft head; wanted a directory that `cpuspec train` wrote")
    reader, files = found
    return reader.read(files, target)


def rewrite_head(
    source: Path, directory: Path, method: str, trained: Mapping[str, Tensor], dtype: torch.dtype, target: Checkpoint
) -> None:
    """Write the head of `source` with other numbers to `directory`, which may be the same.

    trained: by canonical name. Every other tensor keeps its numbers; all floats are written in `dtype`.
    Raises CheckpointError for a tensor that the source's files do not have, OSError where nothing can be written.
    """
    tensors = load_file(source / WEIGHTS)
    if method == "mtp":
        tensors |= _mtp_tensors(target.config, {name: values.detach().cpu().numpy() for name, values in trained.items()})
        trained = {}
    for name, values in trained.items():
        theirs = file_name(name)
        if theirs not in tensors:
            raise CheckpointError(
                f"{source / WEIGHTS} has no tensor {theirs}; only heads with the names of speculators are trained"
            )
        tensors[theirs] = values.detach().cpu().reshape(tensors[theirs].shape)
    write_directory(directory, read_json_object(source / "config.json", _MOST_BYTES), tensors, dtype)


def replace_output(source: Path, directory: Path, arrays: Mapping[str, np.ndarray], target: Checkpoint) -> None:
    """Write an EAGLE-3 head with another output matrix to another directory, all in f32. arrays: `output` and `token_ids`.

    Raises CheckpointError for files that are no head as it is written here.
    """
    copy_head(source, directory)
    config = read_json_object(directory / "config.json", _MOST_BYTES) | {"draft_vocab_size": len(arrays["token_ids"])}
    kept = {name: one.float() if one.is_floating_point() else one for name, one in load_file(directory / WEIGHTS).items()}
    write_directory(directory, config, kept | _tensors(arrays, "eagle3", target.config))


def copy_head(source: Path, directory: Path) -> None:
    """Write a head's files to another directory. Raises CheckpointError where one is missing."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in (WEIGHTS, "config.json"):
        write_file(directory / name, read_file(source / name, _MOST_BYTES, CheckpointError))
