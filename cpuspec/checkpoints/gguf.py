"""GGUF files as checkpoints: the families of `families`, in one file or several. Weights keep their bytes."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from cpuspec.checkpoints import gemma
from cpuspec.checkpoints.canonical import GGUF, Names, arranged
from cpuspec.checkpoints.checkpoint import RANKING_PROMPT, Checkpoint, GgufVocabulary, Ranker, tensor_shapes
from cpuspec.checkpoints.families import FAMILIES, LEAST_SUM, NOT_COMPUTED, Family, each_layer, layer_flags
from cpuspec.checkpoints.fields import MOST_LAYERS, Fields
from cpuspec.checkpoints.gguf_file import GgufFile
from cpuspec.checkpoints.latent import read_gguf as read_latent
from cpuspec.checkpoints.ollama import as_llama_cpp_has_it
from cpuspec.checkpoints.recurrent import read_gguf as read_mixers
from cpuspec.config import Experts, ModelConfig, RopeScaling
from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.formats import QuantTensor
from cpuspec.formats.nvfp import NVFP4, with_scale
from cpuspec.settings import SamplingDefaults

_ROPE_FACTORS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"

# Sampling defaults (gguf-py's constants.py, Keys.General).
_SAMPLING = "general.sampling."
GGUF_SAMPLING_KEYS: Mapping[str, str] = {
    "temperature": f"{_SAMPLING}temp",
    "top_k": f"{_SAMPLING}top_k",
    "top_p": f"{_SAMPLING}top_p",
    "min_p": f"{_SAMPLING}min_p",
    "repetition_penalty": f"{_SAMPLING}penalty_repeat",
}

# llama.cpp's numbers (`enum llama_pooling_type`).
GGUF_POOLINGS: Mapping[int, str] = MappingProxyType({0: "", 1: "mean", 2: "cls", 3: "last"})
RANK, RANKS = 4, "cls.output.weight"  # a model that ranks texts, and the matrix that makes its scores

# Features that a file may ask for and this reader does not compute: key, values that do not ask for it, name.
_UNSUPPORTED = (
    ("attention.clamp_kqv", (0.0,), "clamped q, k and v"),
    ("attention.max_alibi_bias", (0.0,), "ALiBi positions"),
    ("attention.scale", (0.0,), "an attention scale of its own"),
    ("attention.output_scale", (0.0, 1.0), "a scale of attention's output"),
    ("attention.temperature_scale", (0.0,), "attention whose temperature grows with the position"),
    ("attention.temperature_length", (0,), "attention whose temperature grows with the position"),
    ("attention.shared_kv_layers", (0,), "layers that share keys and values"),
    ("attention.causal", (True,), "attention that is not causal"),
    ("use_parallel_residual", (False,), "parallel residuals"),
    ("logit_scale", (0.0, 1.0), "scaled logits"),
    ("residual_scale", (0.0, 1.0), "scaled residuals"),
    ("embedding_scale", (0.0, 1.0), "scaled embeddings"),
    ("embedding_length_per_layer_input", (0,), "embeddings for each layer"),
    ("rope.dimension_sections", (0,), "multimodal rotary sections"),
    ("rope.freq_scale", (0.0, 1.0), "a rotary scale without a type"),
    ("rope.scaling.alpha", (0.0,), "a rotary alpha"),
    ("rope.scaling.yarn_ext_factor", (1.0, -1.0), "a yarn extrapolation factor of its own"),
    ("rope.scaling.extrapolation_factor", (1.0, -1.0), "a yarn extrapolation factor of its own"),
    ("rope.scaling.yarn_attn_factor", (1.0,), "a yarn attention factor of its own"),
    ("rope.scaling.yarn_log_multiplier", (0.0,), "a yarn log multiplier"),
)
_SCALES = ("attention.scale", "logit_scale", "residual_scale", "embedding_scale")  # which Granite has
# Keys that change no answer: they repeat others, or matter only beside others that are read.
_HARMLESS = frozenset(
    {
        "attention.layer_norm_epsilon",  # of another kind of norm
        *("expert_shared_count", "expert_shared_feed_forward_length"),  # the tensors have the rows of all shared experts
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        *(f"rope.scaling.{of}beta_{end}" for of in ("yarn_", "") for end in ("fast", "slow")),
        "tensor_data_layout",
        "vocab_size",
    }
)
_VISION_AUDIO = ("vision.", "audio.", "mm.", "projector.", "image_token_index", "spatial_merge_size")


def checkpoint_of(file: GgufFile) -> Checkpoint:
    """The model of a parsed GGUF file; weights stay on disk until used, except q and k of families whose rows are reordered.

    Raises CheckpointError on anything damaged or not supported.
    """
    file = as_llama_cpp_has_it(file)
    path, fields = file.path, Fields(str(file.path), file.metadata)
    kind = fields.text("general.type", "model")
    if kind != "model":
        raise CheckpointError(f"{path} holds a {kind[:40]!r}, wanted a model")
    architecture = fields.text("general.architecture")
    family = _family_of(path, file.metadata, architecture)
    settings = Fields(str(path), file.metadata, f"{architecture}.", family.gguf_defaults)
    pooling, ranker = _read_pooling(settings, file, family)
    named, predicting = _canonical_names(file, family, _num_layers(settings))
    try:
        config = _read_config(settings, family, named, {name: file.tensors[name] for name in ROPE_TENSORS if name in file.tensors})
        tensors = arranged(str(path), config, family, GGUF, named, tensor_shapes(config))
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    vocabulary = read_vocabulary(file, config.vocab_size)
    name = fields.text("general.name", "")
    # The name is for people. One with control characters, or a very long one, is not used.
    name = name if name.isprintable() and 0 < len(name) <= 200 else path.stem
    remarks = (*file.remarks, *settings.remarks, *_unknown_keys(settings))
    if file.vision_audio:
        of = f"{len(file.vision_audio)} tensors, as {file.vision_audio[0]!r}, are of a part that sees or hears"
        remarks += (f"{path}: {of}; only text is read",)
    sampling = _read_sampling(file)
    return Checkpoint(
        path, name, config, tensors, vocabulary, sampling, predicting, pooling=pooling, remarks=remarks, ranker=ranker
    )


def _family_of(path: object, metadata: Mapping[str, object], architecture: str) -> Family:
    """The family of a file. Several share a name: Mixtral's files say llama."""
    known = [family for family in FAMILIES.values() if family.gguf_name == architecture]
    if not known:
        names = dict.fromkeys(family.gguf_name for family in FAMILIES.values())
        needs = f", with {NOT_COMPUTED[architecture]}, which this version does not compute" if architecture in NOT_COMPUTED else ""
        raise CheckpointError(f"{path} has the architecture {architecture[:40]!r}{needs}; supported are {', '.join(names)}")
    fields = Fields(str(path), metadata, f"{architecture}.")
    has_experts = fields.integer("expert_count", 0) > 0
    alike = [one for one in known if (one.experts is not None) == has_experts] or known
    marked = (one for one in alike if one.gguf_mark and fields.number(one.gguf_mark, 0.0) > 0)
    return next(marked, next((one for one in alike if not one.gguf_mark), alike[0]))


def _unknown_keys(fields: Fields) -> tuple[str, ...]:
    """A sentence about keys that no reader asked for. Raises CheckpointError for one of positions or attention."""
    odd = []
    for key in fields.unread():
        value = fields.value(key)
        if key in _HARMLESS or key.startswith(_VISION_AUDIO) or (isinstance(value, int | float | str) and not value):
            continue
        if key.startswith(("rope.", "attention.")):
            fields.fail(key, "it absent; this version does not know it, and it may change what attention computes")
        odd.append(key)
    return (f"{fields.what}: this version does not know {', '.join(sorted(odd))[:200]}; ignored",) if odd else ()


def config_of(
    what: str, metadata: Mapping[str, object], family: Family, tensors: dict[str, QuantTensor], factors: Mapping[str, QuantTensor]
) -> ModelConfig:
    """The configuration of a file with this metadata and these tensors, by canonical names. what: its name in messages.

    Raises CheckpointError or ConfigError.
    """
    family = _family_of(what, metadata, family.gguf_name)
    prefix = f"{family.gguf_name}."
    return _read_config(Fields(what, metadata, prefix, family.gguf_defaults), family, tensors, factors)


def _read_pooling(fields: Fields, file: GgufFile, family: Family) -> tuple[str, Ranker | None]:
    """The hidden states that make embeddings, and how the model ranks texts: by a matrix in the file, or, in a file that was
    converted as a text generator, known by its name.
    """
    number, weight = fields.integer("pooling_type", 0), file.tensors.get(RANKS)
    named = f"{file.metadata.get('general.name', '')} {file.path.stem}".lower()
    if family.architecture == "qwen3" and (number == RANK if weight else "rerank" in named):
        prompt = str(file.metadata.get("tokenizer.chat_template.rerank") or RANKING_PROMPT)
        return "", Ranker(prompt, weight)
    if number not in GGUF_POOLINGS:
        fields.fail("pooling_type", "none (0), mean (1), cls (2) or last (3), or of a Qwen3 with cls.output.weight rank (4)")
    return GGUF_POOLINGS[number], None


def _num_layers(fields: Fields) -> int:
    """Layers of the model itself: those for multi-token prediction are counted with them, and come last."""
    predicting = fields.integer("nextn_predict_layers", 0)
    if not 0 <= predicting < max(fields.integer("block_count"), 1):
        fields.fail("nextn_predict_layers", "a number from 0 to less than block_count")
    return fields.integer("block_count") - predicting


def _canonical_names(file: GgufFile, family: Family, num_layers: int) -> tuple[dict[str, QuantTensor], dict[str, QuantTensor]]:
    """The file's tensors under canonical names, and those of layers for multi-token prediction under their own.

    Raises CheckpointError on a tensor that this reader would not use.
    """
    names, tensors, predicting = Names(family, GGUF), {}, {}
    has_predicting = file.metadata.get(f"{file.metadata['general.architecture']}.nextn_predict_layers")
    if file.arrays:
        raise CheckpointError(f"{file.path}: tensor {min(file.arrays)!r} holds integers, which no model of these families has")
    for name, tensor in scaled(file, names).items():
        if has_predicting and names.layer_of(name) >= num_layers:
            predicting[name] = tensor
        elif ours := names.ours(name):
            if ours in tensors:
                raise CheckpointError(f"{file.path}: tensor {name!r} is there under another name, too; wanted it once")
            tensors[ours] = tensor
        elif name not in ROPE_TENSORS and not (name == RANKS and family.architecture == "qwen3"):
            raise CheckpointError(
                f"{file.path}: tensor {name!r} belongs to a feature this version does not compute in {family.architecture} models; "
                "the model would be wrong without it"
            )
    return tensors, predicting


def scaled(file: GgufFile, names: Names | None = None) -> dict[str, QuantTensor]:
    """The file's tensors. A tensor `<name>.scale` or `<name>.weight.scale` beside `<name>.weight` scales the whole matrix, or the
    matrix of each expert, and is multiplied in, unless `names` knows it as a tensor of the model.

    `<name>.input_scale` is left out: it is for processors that round inputs to four bits. Raises CheckpointError for a scale of
    another format than nvfp4, and for one that is no positive number.
    """
    found = dict(file.tensors)
    for name, tensor in file.tensors.items():
        stem, _, kind = name.rpartition(".")
        whole = f"{stem.removesuffix('.weight')}.weight"
        weight = file.tensors.get(whole)
        if weight is None or kind not in ("scale", "input_scale") or (names and names.ours(name)):
            continue
        del found[name]
        if kind == "input_scale":
            continue
        scale = tensor.dequantize().ravel()
        matrices = math.prod(weight.shape[:-2])
        if scale.size not in (1, matrices) or not ((scale > 0) & (scale < np.inf)).all():
            of_each = f"one positive number{f', or one for each of {matrices} experts' * (matrices > 1)}"
            raise CheckpointError(f"{file.path}: tensor {name!r} is {scale[:4].tolist()}, wanted {of_each}")
        if weight.format is NVFP4:
            found[whole] = with_scale(weight, scale)
        elif (scale != 1).any():
            raise CheckpointError(f"{file.path}: tensor {name!r} scales one of {weight.format.name}; wanted nvfp4: convert again")
    return found


def _check_supported(fields: Fields, family: Family) -> None:
    """Raise CheckpointError for a setting that changes the computation and is not computed in this family."""
    supported = {
        *(_SCALES if family.has_scales else ()),
        *(("logit_scale",) if family.has_logit_scale else ()),
        # llama.cpp's converter writes true for StableLMs that are not: their norm before the MLP decides.
        *(("use_parallel_residual",) if family.architecture == "stablelm" else ()),
        *(("rope.dimension_sections",) if family.has_sections else ()),
        *(("attention.temperature_scale", "rope.scaling.yarn_log_multiplier") if family.temperature_grows or family.latent else ()),
        *(("attention.temperature_length",) if family.latent else ()),
        *(("attention.shared_kv_layers", "embedding_length_per_layer_input") if family.by_window else ()),
    }
    for key, neutral, feature in _UNSUPPORTED:
        value = fields.value(key)
        if key in supported:
            continue
        if value is not None and not np.isin(np.array(value), neutral).all():
            fields.fail(key, f"it absent: {feature} is not supported")


def _heads(fields: Fields, family: Family, hidden_size: int, attends: bool, num_blocks: int) -> tuple[int, int, int]:
    """The number of query heads, the dimensions of a head, and how many of them rotate. attends: whether a layer has attention."""
    num_heads = fields.of_layers("attention.head_count", num_blocks, some=True) if attends else 1
    if num_heads < 1:
        fields.fail("attention.head_count", "at least 1")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads) if attends else 2
    if attends and "attention.key_length" not in fields and hidden_size % num_heads:
        fields.fail("attention.head_count", f"a divisor of embedding_length {hidden_size}, or attention.key_length")
    for key in ("value_length", "key_length_swa", "value_length_swa", "head_dim"):
        follows = family.by_window or (family.latent and key == "value_length")  # another rule, which is checked there
        if not follows and fields.integer(f"attention.{key}", head_dim) != head_dim:
            fields.fail(f"attention.{key}", f"the length of keys, {head_dim}")
    rope_dims = fields.integer("rope.dimension_count", head_dim)
    if family.unrotated_every == 1 or not attends:
        rope_dims = head_dim
    if rope_dims != head_dim and ("partial_rotary_factor" not in family.hf_defaults or rope_dims < 1):
        fields.fail("rope.dimension_count", f"all {head_dim} dimensions of a head; partial rotary positions are not supported")
    if not family.by_window and fields.integer("rope.dimension_count_swa", rope_dims) != rope_dims:
        fields.fail("rope.dimension_count_swa", f"that of other layers, {rope_dims}")
    return num_heads, head_dim, rope_dims


def _read_config(
    fields: Fields, family: Family, tensors: dict[str, QuantTensor], factors: Mapping[str, QuantTensor]
) -> ModelConfig:
    """Shapes and flags from metadata and from which tensors there are. Raises CheckpointError or ConfigError."""
    _check_supported(fields, family)
    context_length, num_layers = fields.integer("context_length"), _num_layers(fields)
    hidden_size = fields.integer("embedding_length")
    num_blocks = fields.integer("block_count")  # those for multi-token prediction, too
    mixers = read_mixers(fields, family, num_layers, num_blocks, tensors)
    nothing = (False,) * max(1, min(num_layers, MOST_LAYERS))
    recurs, feeds = (mixers.get(key) or nothing for key in ("layer_recurrent", "layer_feeds"))
    attends = [i for i, (other, feed) in enumerate(zip(recurs, feeds, strict=True)) if not other and not feed]
    num_heads, head_dim, rope_dims = _heads(fields, family, hidden_size, bool(attends), num_blocks)
    growth = fields.number("attention.temperature_scale", 0.0) if family.temperature_grows or family.latent else 0.0
    growth_length = fields.integer("rope.scaling.original_context_length", context_length) if growth else 0
    if growth and family.latent:
        growth_length = fields.integer("attention.temperature_length", growth_length)
    slides = _slides(fields, num_layers, context_length)
    rotated = each_layer(num_layers, lambda i: family.unrotated_every == 0 or (i + 1) % family.unrotated_every != 0)
    if family.turns_in_windows and any(slides):
        rotated = slides
    if family.tells_ropes and not fields.boolean("rope.scaling.finetuned", True):
        rotated = (False,) * num_layers
    is_local = "rope.freq_base_swa" in fields or (family.has_local_rope and any(slides))
    eps = f"attention.layer_norm_{'' if family.flags.get('norm_kind') == 'layer' else 'rms_'}epsilon"
    if family.single_branch and eps not in fields:
        eps = "attention.layer_norm_epsilon"
    if fields.integer("embedding_length_out", hidden_size) != hidden_size:
        fields.fail("embedding_length_out", f"that of the model, {hidden_size}")
    first = f"layers.{attends[0] if attends else 0}."  # layer that attends
    embed = tensors.get("embed")
    if embed is None or len(embed.shape) != 2:
        raise CheckpointError(f"{fields.what}: token_embd.weight is {'missing' if embed is None else 'a vector'}, wanted a matrix")
    scaling = rope_scaling(fields, context_length, rope_dims, factors, family.latent)
    config = ModelConfig(
        architecture=family.architecture,
        vocab_size=embed.shape[0],
        hidden_size=hidden_size,
        intermediate_size=1
        if family.by_window
        else fields.of_layers("feed_forward_length", num_blocks, some=bool(family.recurrent)),
        **_read_experts(fields, family, num_layers, tensors, feeds),
        **mixers,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.of_layers("attention.head_count_kv", num_blocks, num_heads, some=True)
        if attends and not family.by_window
        else 1,
        head_dim=head_dim,
        context_length=context_length,
        norm_eps=fields.number(eps),
        rope_base=fields.number("rope.freq_base", 10000.0),
        rope_scaling=scaling,
        rope_dims=0 if rope_dims == head_dim else rope_dims,
        query_growth=growth,
        query_growth_length=growth_length,
        mlp_bias="layers.0.up_bias" in tensors,
        qkv_bias=bool({f"{first}q_bias", f"{first}q_bias+k_bias+v_bias"} & tensors.keys()),
        o_bias=f"{first}o_bias" in tensors,
        tied_embeddings="output" not in tensors,
        **_scales(fields, family, hidden_size, num_heads, num_layers),
        attention_softcap=fields.number("attn_logit_softcapping", 0.0),
        logit_softcap=fields.number("final_logit_softcapping", 0.0),
        local_rope_base=fields.number(
            "rope.freq_base_swa", fields.number("rope.freq_base", 10000.0) if is_local else ModelConfig.local_rope_base
        ),
        **layer_flags(fields.integer("attention.sliding_window", 0), slides, rotated, is_local),
        **{"qk_norm": "use_qk_norm" in family.hf_defaults and "layers.0.q_norm" in tensors, **family.flags},
    )
    if family.by_window:
        return replace(config, **gemma.read_gguf(fields, slides, tensors))
    return replace(config, **read_latent(fields, scaling, tensors)) if family.latent else config


def _scales(fields: Fields, family: Family, hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    """The factors of embeddings, scores, branches and logits, as arguments of `ModelConfig`."""
    if family.has_logit_scale:
        return {"logit_scale": fields.number("logit_scale", 0.0) or 1.0}
    if not family.has_scales:
        return {
            "embedding_scale": math.sqrt(max(hidden_size, 1)) if family.scales_embeddings else 1.0,
            "query_scale": 1 / math.sqrt(max(hidden_size // num_heads, 1)) if num_layers == family.gguf_wide_layers else None,
        }
    # A factor that is absent, or 0, is none.
    if "logit_scale" not in fields:
        fields.remarks.append(
            f"{fields.what} has no logit_scale, which Granite's files have and llama.cpp wants; logits are not scaled"
        )
    return {
        "embedding_scale": fields.number("embedding_scale", 0.0) or 1.0,
        "query_scale": fields.number("attention.scale", 0.0) or None,
        "residual_scale": fields.number("residual_scale", 0.0) or 1.0,
        "logit_scale": 1 / (fields.number("logit_scale", 0.0) or 1.0),
    }


# llama.cpp's numbers of scores (`enum llama_expert_gating_func_type`).
GGUF_SCORES: Mapping[int, str] = MappingProxyType({1: "softmax", 2: "sigmoid", 3: "chosen"})  # expert_gating_func


def _read_experts(
    fields: Fields, family: Family, num_layers: int, tensors: Mapping[str, QuantTensor], feeds: tuple[bool, ...]
) -> dict[str, Any]:
    """Read the settings of a mixture of experts, as arguments of `ModelConfig`. feeds: `layer_feeds`."""
    if not fields.integer("expert_count", 0):
        return {}
    if family.experts is None:
        fields.fail("expert_count", f"none; this version computes {family.architecture} models without experts alone")
    gating = fields.integer("expert_gating_func", 0)
    if gating and gating not in GGUF_SCORES:
        fields.fail("expert_gating_func", f"one of {', '.join(map(str, GGUF_SCORES))}")
    first = fields.integer("leading_dense_block_count", 0)
    every = fields.integer("interleave_moe_layer_step", 1)
    layers = each_layer(num_layers, lambda i: i >= first and every > 0 and (i + 1) % every == 0)
    if family.single_branch:
        layers = feeds
    some = next((f"layers.{i}." for i, has in enumerate(layers) if has), "layers.0.")
    names = ("expert_down", "expert_gate+expert_up", "expert_down@0")
    gate = next((tensors[some + name] for name in names if some + name in tensors), None)
    shared = tensors.get(some + "shared_down")
    told_size = fields.of_layers("expert_feed_forward_length", fields.integer("block_count"), 0, some=bool(family.recurrent))
    facts: dict[str, Any] = {
        "count": fields.integer("expert_count"),
        "used": fields.integer("expert_used_count"),
        # Some files have the size in this key, some in feed_forward_length. The tensors have it in all files.
        "size": gate.shape[-1] if gate else told_size,
        "scale": fields.number("expert_weights_scale", 0.0) or 1.0,
        "shifted": some + "router_shift" in tensors,
        "groups": max(fields.integer("expert_group_count", 1), 1),
        "groups_used": max(fields.integer("expert_group_used_count", 1), 1),
        "bias": some + "router_bias" in tensors,
    }
    if family.latent and not gating:  # files from before the key; GLM-4.7-Flash is known by its size
        is_glm = num_layers in (47, 48) and tensors["embed"].shape[0] == 154880
        facts["score"] = "sigmoid" if is_glm else "softmax"
    if gating:
        facts["score"] = GGUF_SCORES[gating]
    if "expert_weights_norm" in fields:
        facts["normalised"] = fields.boolean("expert_weights_norm")
    experts = Experts(**{**facts, **family.experts})
    return {
        "experts": replace(experts, least_sum=LEAST_SUM) if experts.score == "sigmoid" else experts,
        "layer_experts": () if all(layers) or family.single_branch else layers,
        "shared_size": shared.shape[-1] if shared else 0,
        "weighs_shared": some + "shared_weight" in tensors,
    }


def _slides(fields: Fields, num_layers: int, context_length: int) -> tuple[bool, ...]:
    """For each layer whether it sees a window only. Raises CheckpointError where a file has a window, and no layers for it."""
    window, key = fields.integer("attention.sliding_window", 0), "attention.sliding_window_pattern"
    pattern = fields.value(key)
    if window and isinstance(pattern, np.ndarray):
        num_blocks = fields.integer("block_count")  # those for multi-token prediction, too
        flags = fields.numbers(key, np.bool_ if pattern.dtype == bool else np.integer, num_blocks)
        if set(flags) - {0, 1}:
            fields.fail(key, f"true or false for each of {num_blocks} layers")
        return tuple(flag == 1 for flag in flags[:num_layers])
    period = fields.integer(key, 0)
    if 0 < window < context_length and pattern is None:
        fields.fail("attention.sliding_window", f"none below the context of {context_length}; this architecture has no windows")
    return each_layer(num_layers, lambda i: bool(window and pattern is not None and (period == 0 or (i + 1) % period)))


# Tensors of divisors of rotary frequencies, a float for each.
ROPE_TENSORS = (_ROPE_FACTORS, _LONG, _SHORT)


def rope_scaling(
    fields: Fields, context_length: int, rope_dims: int, factors: Mapping[str, QuantTensor], latent: bool = False
) -> RopeScaling | None:
    """The file's stretching of rotary frequencies, or None. Raises CheckpointError on a kind that is not supported.

    rope_dims: dimensions of a head that turn. factors: those of ROPE_TENSORS that the file has. latent: whether the model has
    latent attention. There `latent.read_gguf` gives the slope of YaRN's factor to the scores, so that cosines and sines do
    without it.
    """
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 0.0))
    # Files older than the type key mean linear scaling.
    kind = fields.text("rope.scaling.type", "linear" if factor not in (0.0, 1.0) else "none")
    if kind == "linear" and factor in (0.0, 1.0):
        kind = "none"
    attention_factor = fields.number("rope.scaling.attn_factor", 1.0)
    numbers: dict[str, tuple[float, ...]] = {}
    for name, tensor in factors.items():
        if tensor.shape != (rope_dims // 2,) or tensor.format.block_size != 1:
            raise CheckpointError(
                f"{fields.what}: {name} is {tensor.format.name} {list(tensor.shape)}, "
                f"wanted a float for each of the {rope_dims // 2} frequencies of a head"
            )
        numbers[name] = tuple(tensor.dequantize().tolist())
    if numbers and kind not in ("none", "longrope"):
        fields.fail("rope.scaling.type", f"none beside the tensor {min(numbers)}")
    if numbers.keys() == {_LONG, _SHORT}:
        original = fields.integer("rope.scaling.original_context_length", context_length)
        return RopeScaling(
            "longrope", original_context_length=original, attention_factor=attention_factor, factors=numbers[_LONG],
            short_factors=numbers[_SHORT],
        )  # fmt: skip
    if kind != "yarn" and attention_factor != 1.0:
        fields.fail("rope.scaling.attn_factor", f"1 with rope scaling {kind}")
    if numbers:
        if numbers.keys() != {_ROPE_FACTORS}:
            raise CheckpointError(
                f"{fields.what} has {' and '.join(numbers)}; wanted {_LONG} and {_SHORT}, or {_ROPE_FACTORS} alone"
            )
        return RopeScaling("factors", factors=numbers[_ROPE_FACTORS])
    if kind == "none":
        return None
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind == "yarn":
        return RopeScaling(
            "yarn",
            factor,
            original_context_length=fields.integer("rope.scaling.original_context_length", context_length),
            # The second is Ollama's name for it.
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", fields.number("rope.scaling.beta_fast", 32.0)),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", fields.number("rope.scaling.beta_slow", 1.0)),
            attention_factor=attention_factor
            if latent and fields.number("rope.scaling.yarn_log_multiplier", 0.0)
            else _yarn_attention(fields, factor, attention_factor),
            # Our own key: llama.cpp goes by whole pairs in every model, also in gpt-oss, which was trained without.
            truncate=fields.boolean("rope.scaling.yarn_truncate", True),
        )
    fields.fail("rope.scaling.type", "none, linear, longrope or yarn")


def _yarn_attention(fields: Fields, factor: float, own: float) -> float | None:
    """The factor of cosines and sines: YaRN's (arXiv 2309.00071, section 3.4) times the file's own.

    The key is a factor beside YaRN's to llama.cpp's loader and to this project's writer. llama.cpp's converter of OLMo 3 fills it
    with config.json's attention_factor, which is the whole. A value that equals YaRN's own is taken for the latter: nobody means
    the square. If the file has a slope, YaRN's factor is divided by the same factor with that slope. None: YaRN's factor alone.
    """
    slope, grows = fields.number("rope.scaling.yarn_log_multiplier", 0.0), 0.1 * math.log(max(factor, 1.0))
    if own != 1.0 and math.isclose(own, grows + 1.0, rel_tol=1e-5):
        key = "rope.scaling.attn_factor"
        fields.remarks.append(
            f"{fields.what}: {key} {own:.5g} is YaRN's own factor, as converters copy attention_factor from config.json; it counts "
            "once, as in transformers (llama.cpp multiplies both)"
        )
        own = 1.0
    if own == 1.0 and not slope:
        return None
    return own * (grows + 1.0) / (slope * grows + 1.0)


def _read_sampling(file: GgufFile) -> SamplingDefaults:
    """The sampling that the file recommends. Keys of samplers that are not computed here are reported as ignored."""
    values: dict[str, object] = {}
    for name, key in GGUF_SAMPLING_KEYS.items():
        value = file.metadata.get(key)
        # A number of 32 bits: 0.7 and not 0.699999988079071.
        values[name] = float(f"{value:.7g}") if isinstance(value, float) else value
    found = SamplingDefaults.read(str(file.path), values)
    others = [key for key in file.metadata if key.startswith(_SAMPLING) and key not in GGUF_SAMPLING_KEYS.values()]
    unknown = (f"{file.path}: this version does not know {', '.join(others)[:200]}; ignored",) if others else ()
    return replace(found, ignored=found.ignored + unknown)


def read_vocabulary(file: GgufFile, vocab_size: int | None = None) -> GgufVocabulary:
    """The tokenizer's tables, consistent with each other and with `vocab_size` embeddings if that is given."""
    fields = Fields(str(file.path), file.metadata, "tokenizer.")
    tokens = fields.strings("ggml.tokens")
    size = len(tokens) if vocab_size is None else vocab_size
    if len(tokens) != size:
        fields.fail("ggml.tokens", f"{size} tokens, one for each row of token_embd.weight")

    def token_id(*keys: str) -> int | None:
        return next((fields.integer(f"ggml.{key}_token_id") for key in keys if f"ggml.{key}_token_id" in fields), None)

    def flag(key: str) -> bool | None:
        return fields.boolean(key) if key in fields else None

    def bytes_of(key: str) -> bytes:
        table = fields.value(key)
        if table is not None and not (isinstance(table, np.ndarray) and table.dtype.itemsize == 1):
            fields.fail(key, "an array of bytes")
        return b"" if table is None else table.tobytes()

    ends = fields.value("ggml.eos_token_ids")  # Ollama's
    if ends is not None and not (isinstance(ends, np.ndarray) and np.issubdtype(ends.dtype, np.integer)):
        fields.fail("ggml.eos_token_ids", "an array of integers")
    named = (token_id("eot"), token_id("eom"), token_id("fim_pad"), token_id("fim_rep"), token_id("fim_sep"))
    template = "tokenizer.chat_template"
    keys = (key.removeprefix("tokenizer.") for key in file.metadata if key == template or key.startswith(f"{template}."))
    templates = {key.partition(".")[2] or "default": fields.text(key) for key in keys}
    return GgufVocabulary(
        model=fields.text("ggml.model"),
        pre=fields.text("ggml.pre", ""),
        tokens=tuple(tokens),
        token_types=tuple(fields.numbers("ggml.token_type", np.integer, size)) or (1,) * size,
        merges=tuple(fields.strings("ggml.merges")),
        scores=tuple(map(float, fields.numbers("ggml.scores", np.number, size))),
        bos_id=token_id("bos", "cls"),
        eos_id=token_id("eos"),
        unk_id=token_id("unknown"),
        pad_id=token_id("padding"),
        sep_id=token_id("seperator", "separator"),  # the first is how files spell it
        end_ids=tuple(dict.fromkeys((*(one for one in named if one is not None), *(() if ends is None else ends.tolist())))),
        add_bos=flag("ggml.add_bos_token"),
        add_eos=flag("ggml.add_eos_token"),
        add_space_prefix=flag("ggml.add_space_prefix"),
        merges_spaces=fields.boolean("ggml.remove_extra_whitespaces", False),
        charsmap=bytes_of("ggml.precompiled_charsmap"),
        lowercase=flag("ggml.normalizer.lowercase"),
        strip_accents=flag("ggml.normalizer.strip_accents"),
        # No key says so. llama.cpp goes by the name, too, but lacks the spelling with a space.
        control_swallows=bool(re.search("phi[- ]?3", str(file.metadata.get("general.name")), re.IGNORECASE)),
        chat_templates={name: text for name, text in templates.items() if text},
    )
