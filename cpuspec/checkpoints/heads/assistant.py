"""Gemma 4's assistants: a few layers with queries only, over the keys and values of the target's last layers that have some.

Each row is made of a token's embedding and of the hidden state of the token before, both the target's. All rows of a draft have
the position of the last known token. The keys and values are not taken out of the target's cache: the target's own matrices make
them once more of the inputs of two of its layers (`model.transformer.inject`), so that the head has a cache like any other's.

Sources: transformers' `gemma4_assistant`, llama.cpp's `gemma4-assistant`. The order of tokens in groups, which spares most of the
output matrix there, is passed over, as in llama.cpp.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from cpuspec.checkpoints.canonical import GGUF, HF, Names, arranged
from cpuspec.checkpoints.checkpoint import Checkpoint, tensor_shapes
from cpuspec.checkpoints.families import FAMILIES
from cpuspec.checkpoints.fields import Fields
from cpuspec.checkpoints.gguf import ROPE_TENSORS, config_of
from cpuspec.checkpoints.gguf_file import GgufFile
from cpuspec.checkpoints.heads.head import Head, HeadFiles, HeadNorm, final_norm
from cpuspec.checkpoints.huggingface import model_config
from cpuspec.config import HeadConfig, ModelConfig
from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.formats import QuantTensor

_FAMILY, _ARCHITECTURE = FAMILIES["gemma4"], "gemma4-assistant"
_OWN = {"pre_projection.weight": "fuse", "post_projection.weight": "back"}
_GROUPS = re.compile(r"(nextn\.)?masked_embd.*|masked_embedding\..*")
_READS = 2  # layers whose keys are read: one with a window, and one without


def is_assistant(files: HeadFiles) -> bool:
    """Whether files are an assistant of Gemma 4."""
    if files.is_gguf:
        return files.fields.value("general.architecture") == _ARCHITECTURE
    return files.fields.value("model_type") in ("gemma4_assistant", "gemma4_unified_assistant")


def read_assistant(files: HeadFiles, target: Checkpoint) -> Head:
    """An assistant beside its target. Raises CheckpointError for one that does not fit."""
    if not target.config.value_norm:
        files.refuse(f"it is an assistant of a Gemma 4, and {target.name} is none")
    kind = GGUF if files.is_gguf else HF
    names, named = Names(_FAMILY, kind), dict[str, QuantTensor]()
    for name, tensor in files.tensors.items():
        ours = _OWN.get(name.removeprefix("nextn."), "") or names.ours(name)
        if ours or not (_GROUPS.fullmatch(name) or name in ROPE_TENSORS):
            named[ours or name] = tensor
    if not {"embed", "fuse"} <= named.keys():
        files.refuse("its embedding or pre_projection.weight is missing; this is not a whole assistant")
    size = target.config.hidden_size
    files.check("size of its target's hidden states", named["fuse"].shape[-1] // 2, size, target)
    owners = _owners(target.config)
    if min(owners) < 1:
        files.refuse(f"{target.name} has no layers before those whose keys are read")
    try:
        own = _own_config(files, named)
        config = _config(own, target.config, owners)
    except ConfigError as error:
        raise CheckpointError(f"{files.path}: {error}") from error
    files.check("vocabulary", own.vocab_size, config.vocab_size, target)
    named.setdefault("output", named["embed"])
    del named["embed"]
    named = {re.sub(r"^layers\.(\d+)", lambda found: f"layers.{int(found[1]) + _READS}", name): t for name, t in named.items()}
    tensors = arranged(str(files.path), config, _FAMILY, kind, named, tensor_shapes(config)) | {"embed": target.tensors["embed"]}
    for number, owner in enumerate(owners):
        parts = {part: target.tensors.get(f"layers.{owner}.{part}") for part in ("k", "v", "k_norm")}
        tensors |= {f"layers.{number}.{part}": tensor for part, tensor in parts.items() if tensor}
    model = Checkpoint(files.path, files.name, config, tensors, target.vocabulary)
    before = [target.tensors[f"layers.{owner}.attn_norm"].dequantize() for owner in owners]
    norms = [HeadNorm(weight, target.config.norm_eps, number * size) for number, weight in enumerate(before)]
    norms.append(replace(final_norm(target), start=_READS * size))
    layers = (*(owner - 1 for owner in owners), target.config.num_layers - 1)
    state_norm = HeadNorm(tensors["norm"].dequantize(), config.norm_eps)
    return Head("assistant", files.name, model, layers, tuple(norms), state_norm, num_tokens=3, tokenizer=files.tokenizer)


def _owners(target: ModelConfig) -> tuple[int, int]:
    """The target's last layer with a window and its last one without that keep keys and values; -1 for none."""
    owners = target.layer_owners or range(target.num_layers)
    windows = target.layer_windows or (0,) * target.num_layers
    kept = [i for i, owner in enumerate(owners) if owner == i]
    slid, whole = ([i for i in kept if bool(windows[i]) == has] for has in (True, False))
    return max(slid, default=-1), max(whole, default=-1)


def _own_config(files: HeadFiles, named: Mapping[str, QuantTensor]) -> ModelConfig:
    """The configuration of its layers, as if they made keys of their own."""
    if isinstance(files.files, GgufFile):
        neutral = {"attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0}
        given = {key.partition(".")[2]: value for key, value in files.files.metadata.items() if key.startswith(f"{_ARCHITECTURE}.")}
        for key in ("embedding_length_out", "nextn_predict_layers"):
            given.pop(key, None)
        metadata = {f"gemma4.{key}": value for key, value in (given | neutral).items()}
        return config_of(str(files.path), metadata, _FAMILY, dict(named), {})
    text = files.fields.value("text_config")
    neutral = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
    settings = {**text, **neutral} if isinstance(text, dict) else neutral
    return model_config(Fields(files.fields.what, settings, "", _FAMILY.hf_defaults), _FAMILY)


def _config(own: ModelConfig, target: ModelConfig, owners: tuple[int, int]) -> ModelConfig:
    """The head's: the layers that are read, then its own. Queries turn as the target's keys do."""
    kinds = [int(not window) for window in own.layer_windows or (0,) * own.num_layers]
    of_layers = [*range(_READS), *kinds]
    windows, values = target.layer_windows or (0,) * target.num_layers, target.layer_values or (True,) * target.num_layers
    return replace(
        own,
        vocab_size=target.vocab_size, num_layers=len(of_layers), context_length=target.context_length, tied_embeddings=False,
        embedding_scale=target.embedding_scale, logit_softcap=0.0, rope_base=target.rope_base, rope_scaling=target.rope_scaling,
        local_rope_base=target.local_rope_base, head_dim=target.head_dim, num_kv_heads=target.num_kv_heads,
        layer_windows=tuple(windows[owners[kind]] for kind in of_layers),
        layer_ropes=tuple(("local", "global")[kind] for kind in of_layers),
        layer_head_dims=tuple(target.layer_head_dims[owners[kind]] for kind in of_layers),
        layer_kv_heads=tuple(target.layer_kv_heads[owners[kind]] for kind in of_layers),
        layer_values=tuple(values[owners[kind]] for kind in of_layers), layer_owners=(*range(_READS), *kinds), layer_sizes=(),
        head=HeadConfig(input_norms=False, injects=True, target_size=target.hidden_size, reads=_READS),
    )  # fmt: skip
