"""Heads as llama.cpp's converter writes them: EAGLE-3 (`eagle3`: src/models/eagle3.cpp, conversion/llama.py), DFlash and DSpark
(`dflash`: src/models/dflash.cpp, conversion/qwen.py).

Unlike in safetensors, `d2t` holds the target's ids themselves, and rows of EAGLE-3's q and k pair neighbours for rotation.
"""

import re
from collections.abc import Mapping, Set
from dataclasses import replace

import numpy as np

from cpuspec.checkpoints.canonical import GGUF, in_our_order
from cpuspec.checkpoints.checkpoint import Checkpoint
from cpuspec.checkpoints.families import FAMILIES, GLOBAL_NAMES
from cpuspec.checkpoints.fields import Fields
from cpuspec.checkpoints.gguf import rope_scaling
from cpuspec.checkpoints.heads.dflash import block_size, side_heads
from cpuspec.checkpoints.heads.head import (
    Block,
    Head,
    HeadFiles,
    HeadNorm,
    eagle3_config,
    factor_of,
    final_norm,
    with_logit_scale,
)
from cpuspec.checkpoints.heads.model import beside_target
from cpuspec.config import HeadConfig, ModelConfig
from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.formats import QuantTensor

# Of tensors: the file's name to the canonical one, of the parts of a layer and of the others.
LAYER_NAMES = {theirs: ours for ours, (theirs, _) in FAMILIES["qwen3"].layer_names.items()}
_OUTSIDE = {"fc.weight": "encode", **{theirs: ours for ours, (theirs, _) in GLOBAL_NAMES.items()}}
NAMES_OF_EAGLE3 = {**_OUTSIDE, "blk.0.attn_norm.weight": "embed_norm", "blk.0.attn_norm_2.weight": "hidden_norm"}
NAMES_OF_BLOCK = {**_OUTSIDE, "enc.output_norm.weight": "hidden_norm"}
# What changes the computation and is not computed here, with the values at which it changes nothing.
_UNSUPPORTED = {"attention.sliding_window": (0,), "attention.value_scale": (0, 1)}
_FACTORS, FEATURE_NORM = "rope_freqs.weight", "enc.output_norm.weight"


def is_of_architecture(architecture: str, files: HeadFiles) -> bool:
    """Whether they are a GGUF file of an architecture: `eagle3`, or `dflash` of DFlash and DSpark heads."""
    return files.is_gguf and files.fields.value("general.architecture") == architecture


def read_gguf_eagle3(files: HeadFiles, target: Checkpoint) -> Head:
    """An EAGLE-3 head of a GGUF file, beside its target."""
    fields = files.fields.under("eagle3.")
    layers = _layers(files, fields, target)
    hidden = target.config.hidden_size
    files.check("size of its target's hidden states", fields.integer("target_hidden_size", hidden), hidden, target)
    tensors = _canonical(files, NAMES_OF_EAGLE3, {_FACTORS, FEATURE_NORM})
    size, num_logits, token_ids = files.sizes(tensors, layers, target)
    head = eagle3_config(fields, size, num_logits)
    model = _model(files, fields, head, tensors, target)
    config = model.config
    if fields.boolean("norm_before_fc", False) != (FEATURE_NORM in files.tensors):
        files.refuse(f"norm_before_fc is {fields.boolean('norm_before_fc', False)}, and tensor {FEATURE_NORM} says otherwise")
    norms: tuple[HeadNorm, ...] = ()
    if FEATURE_NORM in files.tensors:
        norms = (files.norm(FEATURE_NORM, size, config.norm_eps),)
    paired = {name: in_our_order(config, FAMILIES["llama"], GGUF, name, tensor) for name, tensor in model.tensors.items()}
    model = with_logit_scale(replace(model, tensors=paired), _factor(fields, "logit_scale"))
    return Head("eagle3", files.name, model, layers, norms, None, token_ids)


def read_gguf_block(files: HeadFiles, target: Checkpoint) -> Head:
    """A DFlash or DSpark head of a GGUF file, beside its target."""
    fields = files.fields.under("dflash.")
    if any("conv" in name or "selector" in name for name in files.names):
        files.refuse("it is a head of DFlash 2, whose convolutions are not supported; use one of DFlash or DSpark")
    layers = _layers(files, fields, target)
    others = {name: one for name, one in files.tensors.items() if name.startswith(("markov_", "conf_"))}
    tensors = _canonical(files, NAMES_OF_BLOCK, {_FACTORS, *others})
    size, num_logits, token_ids = files.sizes(tensors, layers, target)
    head = HeadConfig("none", feature_size=size, num_logits=num_logits, injects=True)
    model = _model(files, fields, head, tensors, target)
    mask_id = files.fields.token_id("tokenizer.ggml.mask_token_id", model.config.vocab_size)
    markov, confidence, bias = side_heads(files, others, model, num_logits)
    num_skipped = 0 if markov and fields.boolean("sample_from_anchor", True) else 1
    block = Block(block_size(fields), num_skipped, not fields.boolean("attention.causal", False), markov, confidence, bias)
    norm = final_norm(model)
    number, model = block.size - num_skipped, with_logit_scale(model, _factor(fields, "logit_scale"))
    return Head("block", files.name, model, layers, (), norm, token_ids, number, mask_id=mask_id, block=block)


def _layers(files: HeadFiles, fields: Fields, target: Checkpoint) -> tuple[int, ...]:
    ids = fields.value("target_layers")
    return files.layers(ids.tolist() if isinstance(ids, np.ndarray) else [], target)


def _canonical(files: HeadFiles, others: Mapping[str, str], left_out: Set[str]) -> dict[str, QuantTensor]:
    """The tensors of the model by canonical name; one that nothing knows keeps its name, so that the checkpoint refuses it."""
    tensors: dict[str, QuantTensor] = {}
    for name, tensor in files.tensors.items():
        layer = re.fullmatch(r"blk\.(\d{1,4})\.(.+)", name, re.DOTALL)
        if name in others:
            tensors[others[name]] = tensor
        elif layer and layer[2] in LAYER_NAMES:
            tensors[f"layers.{layer[1]}.{LAYER_NAMES[layer[2]]}"] = tensor
        elif name not in left_out:
            tensors[name] = tensor
    return tensors


def _factor(fields: Fields, key: str) -> float:
    """A factor; 0 in the file means that there is none."""
    return factor_of(fields, key, 0.0) or 1.0


def _model(files: HeadFiles, fields: Fields, head: HeadConfig, tensors: dict[str, QuantTensor], target: Checkpoint) -> Checkpoint:
    """The head as a model beside its target. Raises CheckpointError where a tensor or a size is not as it should be."""
    try:
        config = _config(files, fields, head, tensors, target)
    except ConfigError as error:
        raise CheckpointError(f"{files.path}: {error}") from error
    return beside_target(files, config, tensors, target)


def _config(files: HeadFiles, fields: Fields, head: HeadConfig, tensors: dict[str, QuantTensor], target: Checkpoint) -> ModelConfig:
    """The head's shape. Raises CheckpointError or ConfigError."""
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    if heads < 1:
        fields.fail("attention.head_count", "at least 1")
    dims, context = fields.integer("attention.key_length", hidden // heads), target.config.context_length
    for key, neutral in {**_UNSUPPORTED, "rope.dimension_count": (dims,), "attention.value_length": (dims,)}.items():
        if key in fields and fields.number(key) not in neutral:
            fields.fail(key, f"{' or '.join(map(str, neutral))}: others are not supported")
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
        rope_scaling=rope_scaling(fields, context, dims, {_FACTORS: files.tensors[_FACTORS]} if _FACTORS in files.tensors else {}),
        qkv_bias="layers.0.q_bias" in tensors,
        o_bias="layers.0.o_bias" in tensors,
        qk_norm="layers.0.q_norm" in tensors,
        embedding_scale=_factor(fields, "embedding_scale"),
        query_scale=factor_of(fields, "attention.scale", 0.0) or None,
        logit_softcap=factor_of(fields, "final_logit_softcapping", 0.0),
        head=head,
    )
