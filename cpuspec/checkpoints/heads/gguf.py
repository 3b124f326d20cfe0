"""EAGLE-3 heads as llama.cpp's converter writes them: architecture `eagle3` (src/models/eagle3.cpp, conversion/llama.py).

Unlike in safetensors, `d2t` holds the target's ids themselves, and rows of q and k pair neighbours for rotation.
"""

import re
from dataclasses import replace

import numpy as np

from cpuspec.checkpoints.checkpoint import Checkpoint
from cpuspec.checkpoints.families import FAMILIES
from cpuspec.checkpoints.fields import Fields
from cpuspec.checkpoints.gguf import rope_scaling, unpermuted
from cpuspec.checkpoints.heads.head import Head, HeadFiles, HeadNorm, shared
from cpuspec.config import HeadConfig, ModelConfig
from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.formats import QuantTensor

_LAYER = {theirs: ours for ours, (theirs, _) in FAMILIES["qwen3"].layer_names.items()}
_OTHERS = {
    "fc.weight": "encode",
    "blk.0.attn_norm.weight": "embed_norm",
    "blk.0.attn_norm_2.weight": "hidden_norm",
    "output_norm.weight": "norm",
    "output.weight": "output",
    "token_embd.weight": "embed",
}
_FACTORS, _FEATURE_NORM = "rope_freqs.weight", "enc.output_norm.weight"


def is_gguf_eagle3(files: HeadFiles) -> bool:
    """Whether a GGUF file is an EAGLE-3 head."""
    return files.is_gguf and files.fields.value("general.architecture") == "eagle3"


def read_gguf_eagle3(files: HeadFiles, target: Checkpoint) -> Head:
    """An EAGLE-3 head of a GGUF file, beside its target."""
    fields = files.fields.under("eagle3.")
    ids = fields.value("target_layers")
    layers = files.layers(ids.tolist() if isinstance(ids, np.ndarray) else [], target)
    hidden = target.config.hidden_size
    files.check("size of its target's hidden states", fields.integer("target_hidden_size", hidden), hidden, target)
    tensors: dict[str, QuantTensor] = {}
    for name, tensor in files.tensors.items():
        layer = re.fullmatch(r"blk\.(\d{1,4})\.(.+)", name, re.DOTALL)
        if name in _OTHERS:
            tensors[_OTHERS[name]] = tensor
        elif layer and layer[2] in _LAYER:
            tensors[f"layers.{layer[1]}.{_LAYER[layer[2]]}"] = tensor
        elif name not in (_FACTORS, _FEATURE_NORM):
            tensors[name] = tensor
    encode, output = tensors.get("encode"), tensors.get("output")
    if encode is None:
        files.refuse("tensor fc.weight is missing")
    files.check(f"input, as numbers of {len(layers)} layers,", encode.shape[-1], len(layers) * hidden, target)
    num_logits = output.shape[0] if output else target.config.vocab_size
    token_ids = files.token_ids(files.arrays["d2t"].astype(np.int64) if "d2t" in files.arrays else None, num_logits, target)
    head = HeadConfig(
        "attention",
        normed_residual=fields.boolean("norm_before_residual", False),
        feature_size=encode.shape[-1],
        num_logits=num_logits,
    )
    try:
        config = _config(files, fields, head, tensors, target)
    except ConfigError as error:
        raise CheckpointError(f"{files.path}: {error}") from error
    if config.hidden_size != hidden and not {"embed", "output"} <= tensors.keys():
        files.check("hidden size, without an embedding and an output matrix of its own,", config.hidden_size, hidden, target)
    model = Checkpoint(files.path, files.name, config, shared(target, tensors), target.vocabulary)
    if fields.boolean("norm_before_fc", False) != (_FEATURE_NORM in files.tensors):
        files.refuse(f"norm_before_fc is {fields.boolean('norm_before_fc', False)}, and tensor {_FEATURE_NORM} says otherwise")
    norms: tuple[HeadNorm, ...] = ()
    if _FEATURE_NORM in files.tensors:
        norms = (files.norm(_FEATURE_NORM, encode.shape[-1], config.norm_eps),)
    return Head("eagle3", files.name, replace(model, tensors=unpermuted(config, model.tensors)), layers, norms, None, token_ids)


def _config(files: HeadFiles, fields: Fields, head: HeadConfig, tensors: dict[str, QuantTensor], target: Checkpoint) -> ModelConfig:
    """The head's shape. Raises CheckpointError or ConfigError."""
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    if heads < 1:
        fields.fail("attention.head_count", "at least 1")
    dims, context = fields.integer("attention.key_length", hidden // heads), target.config.context_length
    return ModelConfig(
        architecture="llama",
        vocab_size=target.config.vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count"),
        num_heads=heads,
        num_kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=dims,
        context_length=context,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_base=fields.number("rope.freq_base", 10000.0),
        rope_scaling=rope_scaling(fields, context, dims, files.tensors.get(_FACTORS)),
        qkv_bias="layers.0.q_bias" in tensors,
        o_bias="layers.0.o_bias" in tensors,
        qk_norm="layers.0.q_norm" in tensors,
        head=head,
    )
