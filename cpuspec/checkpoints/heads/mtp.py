"""Layers for multi-token prediction (arXiv 2412.19437, section 2.2) in a target's own checkpoint, and copies of them beside it.

All are one decoder layer over the norms of a token's embedding and of the hidden state before it, joined by a matrix. They differ
in names, in which of the two comes first, in whether the target's hidden state is taken behind its final norm, and in which of its
own the layer goes on with. Sources: vLLM's `mimo_mtp.py` and `mimo.py`, llama.cpp's graphs.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from cpuspec.checkpoints.checkpoint import Checkpoint
from cpuspec.checkpoints.families import FAMILIES
from cpuspec.checkpoints.heads.head import Head, HeadFiles, HeadNorm, final_norm, shared
from cpuspec.config import HeadConfig
from cpuspec.errors import CheckpointError
from cpuspec.formats import QuantTensor


@dataclass(frozen=True)
class _Layout:
    """How a family writes its layer. Of several layers the first is read, which predicts the next token but one.

    layer: what names in the decoder layer begin with. names: of the other tensors. hidden_first: whether the matrix reads the
    hidden state before the embedding. normed: whether the target's hidden state comes from behind its final norm. feeds_normed:
    whether the layer goes on with its output from behind its own.
    """

    layer: str
    names: Mapping[str, str]
    hidden_first: bool = False
    normed: bool = True
    feeds_normed: bool = True
    is_gguf: bool = False


_MIMO = {
    "token_layernorm.weight": "embed_norm",
    "hidden_layernorm.weight": "hidden_norm",
    "input_proj.weight": "fuse",
    "final_layernorm.weight": "norm",
}
_DEEPSEEK = {
    "enorm.weight": "embed_norm",
    "hnorm.weight": "hidden_norm",
    "eh_proj.weight": "fuse",
    "embed_tokens.weight": "embed",
    "shared_head.norm.weight": "norm",
    "shared_head.head.weight": "output",
}
_QWEN = {
    "pre_fc_norm_embedding.weight": "embed_norm",
    "pre_fc_norm_hidden.weight": "hidden_norm",
    "fc.weight": "fuse",
    "norm.weight": "norm",
}
_NEXTN = {
    "nextn.enorm.weight": "embed_norm",
    "nextn.hnorm.weight": "hidden_norm",
    "nextn.eh_proj.weight": "fuse",
    "nextn.embed_tokens.weight": "embed",
    "nextn.shared_head_norm.weight": "norm",
    "nextn.shared_head_head.weight": "output",
}


def _under(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    return {prefix + name: ours for name, ours in names.items()}


def _layouts(num_layers: int) -> tuple[_Layout, ...]:
    """num_layers: of the target, which its layers for prediction follow."""
    mimo, deepseek, gguf = "model.mtp_layers.0.", f"model.layers.{num_layers}.", f"blk.{num_layers}."
    return (
        _Layout(mimo, _under(mimo, _MIMO), hidden_first=True, normed=False),
        _Layout("mtp_layers.0.", _under("mtp_layers.0.", _MIMO)),
        _Layout("mtp.layers.0.", _under("mtp.", _QWEN)),
        _Layout("model.mtp.layers.0.", _under("model.mtp.", _QWEN)),
        _Layout(deepseek, _under(deepseek, _DEEPSEEK), feeds_normed=False),
        _Layout(gguf, _under(gguf, _NEXTN), is_gguf=True),
    )


def is_mtp(files: HeadFiles) -> bool:
    """Whether a directory has the layout that speculators gives to such layers outside of their target."""
    return files.fields.value("speculators_model_type") == "mtp"


def read_mtp(files: HeadFiles, target: Checkpoint) -> Head:
    """Such a layer beside its target."""
    return replace(_head(files.tensors, target, files.name), tokenizer=files.tokenizer)


def own_mtp(target: Checkpoint) -> Head:
    """The layer in the target's own checkpoint. Raises CheckpointError if it has none, or one that is not supported."""
    if not target.prediction_layers:
        raise CheckpointError(f"{target.path} cannot draft for itself: it has no layers for multi-token prediction; name a drafter")
    if any(".experts." in name or "_exps." in name for name in target.prediction_layers):
        raise CheckpointError(f"{target.path}: its layers for multi-token prediction are mixtures of experts, which do not draft")
    return _head(target.prediction_layers, target, "mtp")


def _head(files: Mapping[str, QuantTensor], target: Checkpoint, name: str) -> Head:
    layouts = [
        one for one in _layouts(target.config.num_layers) if any(files.get(key) for key, to in one.names.items() if to == "fuse")
    ]
    if not layouts:
        raise CheckpointError(
            f"{target.path}: the layout of its layers for multi-token prediction is not known; they begin with {min(files)!r}"
        )
    layout, family = layouts[0], FAMILIES[target.config.architecture]
    parts = {theirs[0 if layout.is_gguf else 1]: ours for ours, theirs in family.layer_names.items()}
    tensors: dict[str, QuantTensor] = {}
    for file_name, tensor in files.items():
        later = re.match(r"((?:model\.)?mtp(?:_layers|\.layers)|model\.layers|blk)\.(\d{1,9})\.", file_name)
        if file_name in layout.names:
            tensors[layout.names[file_name]] = tensor
        elif file_name.startswith(layout.layer):
            part = file_name.removeprefix(layout.layer)
            tensors[f"layers.0.{parts[part]}" if part in parts else file_name] = tensor
        elif not (later and int(later[2]) > 0):  # what predicts tokens further ahead is not used
            tensors[file_name] = tensor
    if "norm" not in tensors:
        tensors["norm"] = target.tensors["norm"]
    if layout.hidden_first:
        tensors["fuse"] = _swapped(tensors["fuse"])
    last = target.config.num_layers - 1
    config = replace(target.config.with_layers([last]), head=HeadConfig(), tied_embeddings=False)
    if layout.is_gguf and family.pairs_neighbours:
        raise CheckpointError(f"{target.path}: rows of its prediction layer's q and k pair neighbours, which is not supported")
    model = Checkpoint(target.path, f"{target.name}-mtp", config, shared(target, tensors), target.vocabulary)
    norms = (final_norm(target),) if layout.normed else ()
    state_norm = HeadNorm(tensors["norm"].dequantize(), config.norm_eps) if layout.feeds_normed else None
    return Head("mtp", name, model, (last,), norms, state_norm, num_tokens=3)


def _swapped(tensor: QuantTensor) -> QuantTensor:
    """A matrix whose inputs come with their halves the other way round; halves are whole blocks."""
    half = tensor.format.row_bytes(tensor.shape[1] // 2)
    return QuantTensor(tensor.format, tensor.shape, np.concatenate([tensor.data[:, half:], tensor.data[:, :half]], axis=1))
