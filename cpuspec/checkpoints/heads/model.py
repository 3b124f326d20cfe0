"""The model inside a head's directory: canonical names of its tensors, and its configuration beside the target's."""

import re
from collections.abc import Mapping
from dataclasses import replace

from cpuspec.checkpoints.checkpoint import Checkpoint
from cpuspec.checkpoints.families import FAMILIES
from cpuspec.checkpoints.fields import Fields
from cpuspec.checkpoints.heads.head import HeadFiles, shared
from cpuspec.checkpoints.huggingface import model_config
from cpuspec.config import HeadConfig, ModelConfig
from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.formats import QuantTensor

_LAYER = {theirs: ours for ours, (_, theirs) in FAMILIES["qwen3"].layer_names.items()}
OUTSIDE = {"norm.weight": "norm", "lm_head.weight": "output", "embed_tokens.weight": "embed"}
DERIVED = re.compile(r".*rotary_emb\.inv_freq|t2d")  # computed from the configuration, or only for training


def canonical_name(name: str, own: Mapping[str, str]) -> str:
    """The canonical name of a tensor, by the names that its kind of head has of its own, or else by those of all models.

    One that nothing knows keeps its name, so that the checkpoint refuses it.
    """
    if name in own:
        return own[name]
    layer = re.fullmatch(r"layers\.(\d{1,4})\.(.+)", name, re.DOTALL)
    if layer and layer[2] in _LAYER:
        return f"layers.{layer[1]}.{_LAYER[layer[2]]}"
    return OUTSIDE.get(name, name)


def head_model(
    files: HeadFiles, fields: Fields, tensors: dict[str, QuantTensor], head: HeadConfig, target: Checkpoint
) -> Checkpoint:
    """The head as a model beside its target. Raises CheckpointError where a tensor or a size is not as it should be."""
    defaults = {
        "vocab_size": target.config.vocab_size,
        "max_position_embeddings": target.config.context_length,
        "tie_word_embeddings": False,
    }
    kind = fields.text("model_type", "llama")
    family = FAMILIES.get(kind if kind in ("qwen2", "qwen3") else "llama", FAMILIES["llama"])
    try:
        config = replace(
            model_config(fields.over({**family.hf_defaults, **defaults, "sliding_window": None}), family),
            context_length=target.config.context_length,
            tied_embeddings=False,
            qkv_bias="layers.0.q_bias" in tensors,
            o_bias="layers.0.o_bias" in tensors,
            mlp_bias="layers.0.up_bias" in tensors,  # EAGLE-1's field `bias` is that of `fc`
            qk_norm="layers.0.q_norm" in tensors,
            head=head,
        )
    except ConfigError as error:
        raise CheckpointError(f"{files.path}: {error}") from error
    return beside_target(files, config, tensors, target)


def beside_target(files: HeadFiles, config: ModelConfig, tensors: dict[str, QuantTensor], target: Checkpoint) -> Checkpoint:
    """The same of a configuration that has been read."""
    files.check("vocabulary", config.vocab_size, target.config.vocab_size, target)
    if config.hidden_size != target.config.hidden_size and not {"embed", "output"} <= tensors.keys():
        what = "hidden size, without an embedding and an output matrix of its own,"
        files.check(what, config.hidden_size, target.config.hidden_size, target)
    return Checkpoint(files.path, files.name, config, shared(target, tensors), target.vocabulary)
