"""Recurrent layers: which layers of a model have a convolution or a recurrent state instead of attention, and their sizes.

Read from config.json and from GGUF metadata; written as the latter. `families.Family.recurrent` names a family's kind.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cpuspec.checkpoints.families import Family, each_layer
from cpuspec.checkpoints.fields import MOST_LAYERS, Fields
from cpuspec.config import DeltaNet, Mamba2, ModelConfig, Recurrent, ShortConv
from cpuspec.formats import QuantTensor, get_format

# What a layer is in the words of configurations; "moe" and "mlp" are feed-forward parts without a mixer, in Nemotron-H.
_KINDS: Mapping[str, str] = {
    **{"full_attention": "attention", "attention": "attention", "conv": "short_conv"},
    **{"linear_attention": "mamba2", "mamba": "mamba2", "moe": "moe", "mlp": "none"},
}
# Names that configurations have for the number of experts.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_LETTERS: Mapping[str, str] = {"M": "mamba2", "*": "attention", "E": "moe", "-": "none"}
# Names that configurations have for the same facts of Mamba-2. The last one may be of another fact beside the others.
_MAMBA_KEYS: Mapping[str, tuple[str, ...]] = {
    "key_heads": ("mamba_n_groups", "n_groups"),
    "key_dims": ("mamba_d_state", "ssm_state_size", "state_size"),
    "value_heads": ("mamba_n_heads", "mamba_num_heads", "num_heads"),
    "value_dims": ("mamba_d_head", "mamba_head_dim", "head_dim"),
    "taps": ("mamba_d_conv", "conv_kernel"),
}


def kinds_of(fields: Fields, family: Family, num_layers: int) -> tuple[str, ...]:
    """What each layer of a config.json is, "attention", "short_conv", "mamba2", "both", or without a mixer "moe" or "none"."""
    if family.recurrent == "both":
        return ("both",) * min(num_layers, MOST_LAYERS)
    if pattern := fields.text("hybrid_override_pattern", ""):
        kinds = [_LETTERS.get(letter, "") for letter in pattern]
        key = "hybrid_override_pattern"
    else:
        key = fields.first(("layers_block_type", "layer_types"))
        kinds = [_KINDS.get(str(kind), "") for kind in (fields.items(key) if key else [])]
    if not key and "full_attn_idxs" in fields:
        attending = fields.items("full_attn_idxs")
        return tuple("attention" if i in attending else "short_conv" for i in range(min(num_layers, MOST_LAYERS)))
    if not kinds:
        return (family.recurrent if family.recurrent != "short_conv" else "attention",) * min(num_layers, MOST_LAYERS)
    allowed = {"attention", family.recurrent, *(("moe", "none") if family.single_branch else ())}
    if len(kinds) != num_layers or set(kinds) - allowed:
        fields.fail(key, f"one of {', '.join(sorted(allowed))} for each of the {num_layers} layers")
    return tuple(kinds)


def has_experts(fields: Fields) -> bool:
    """Whether a config.json of a family that may have experts or not asks for some."""
    if "enable_moe_block" in fields:
        return fields.boolean("enable_moe_block")
    pattern = fields.text("hybrid_override_pattern", "")
    named = [*fields.items("layers_block_type"), *fields.items("layer_types")]
    if pattern or "moe" in named or "mlp" in named:
        return "E" in pattern or "moe" in named
    return fields.integer(fields.first(EXPERT_COUNTS, EXPERT_COUNTS[0]), 0) > 0


def dense_size(fields: Fields, family: Family) -> int:
    """The size of a dense feed-forward part by config.json, 0 for a family without."""
    if family.recurrent == "short_conv":
        size = fields.integer(fields.first(("block_ff_dim", "intermediate_size"), "intermediate_size"))
        if family.experts is None and fields.boolean("block_auto_adjust_ff_dim", True):
            step = max(fields.integer("block_multiple_of", 256), 1)
            size = int(fields.number("block_ffn_dim_multiplier", 1.0) * (2 * size // 3))
            size = -(-size // step) * step
        return size
    if family.recurrent == "mamba2" and family.has_scales:
        return fields.integer("shared_intermediate_size" if family.experts is None else "intermediate_size")
    if family.single_branch:
        key = "intermediate_size" if family.experts is None else "moe_intermediate_size"
        return fields.integer(key, 0) if family.layer_names.get("up") else 0
    return fields.integer("intermediate_size")


def multiplied(
    fields: Fields, family: Family, config: ModelConfig, tensors: Mapping[str, QuantTensor]
) -> tuple[ModelConfig, dict[str, QuantTensor]]:
    """The tensors of a config.json's model with its factors in them, and the configuration, with an output of its own if need be.

    As llama.cpp's converter does; such tensors become f32.
    """
    if not family.folds_multipliers:
        return config, dict(tensors)
    mamba = config.recurrent
    assert isinstance(mamba, Mamba2), "each layer has one"

    def factor(key: str) -> float:
        return fields.number(f"{key}_multiplier", 1.0)

    def several(key: str, count: int) -> list[float]:
        values = fields.items(f"{key}_multipliers") or [1.0] * count
        inside = Fields(f"{fields.what}: {key}_multipliers", {str(i): value for i, value in enumerate(values)})
        return [inside.number(str(i)) for i in range(count)]

    of_gate, of_down = several("mlp", 2)
    of_z, of_x, of_b, of_c, of_dt = (number * factor("ssm_in") for number in several("ssm", 5))
    groups = mamba.key_heads * mamba.key_dims
    of_channels = np.repeat([of_x, of_b, of_c], [mamba.inner, groups, groups])[:, None]
    attention_in = factor("attention_in")
    factors: dict[str, Any] = {
        "embed": factor("embedding"), "output": factor("lm_head"), "gate": of_gate, "down": of_down, "q": attention_in,
        "k": attention_in * factor("key"), "v": attention_in, "o": factor("attention_out"), "ssm_z": of_z,
        "ssm_xbc": of_channels, "ssm_dt": of_dt, "ssm_out": factor("ssm_out"),
        "k_bias": factor("key"), "o_bias": factor("attention_out"),  # these multiply outputs, the others inputs
    }  # fmt: skip
    found = dict(tensors)
    if config.tied_embeddings and factors["embed"] != factors["output"] and "embed" in found:
        found.setdefault("output", found["embed"])
        config = replace(config, tied_embeddings=False)
    for name, tensor in found.items():
        by = factors.get(name.rpartition(".")[2], 1.0)
        if np.any(np.asarray(by) != 1):
            found[name] = QuantTensor.encode(get_format("f32"), (tensor.dequantize() * by).astype(np.float32))
    return config, found


def num_layers_of(fields: Fields) -> int:
    """The number of layers of a config.json. Nemotron-H's may have only the pattern."""
    if "num_hidden_layers" in fields:
        return fields.integer("num_hidden_layers")
    pattern = fields.text("hybrid_override_pattern", "")
    return len(pattern) or len(fields.items("layers_block_type")) or fields.integer("num_hidden_layers")


def read_hf(fields: Fields, family: Family, num_layers: int) -> dict[str, Any]:
    """The mixers of a config.json, as arguments of `ModelConfig`. Raises CheckpointError, or ConfigError."""
    if family.delta_layers:
        return _hf_delta_net(fields, family, num_layers)
    if not family.recurrent:
        return {}
    for key in fields.names():
        if family.folds_multipliers and "_multiplier" in key:
            fields.value(key)  # which `multiplied` reads
    kinds = kinds_of(fields, family, num_layers)
    if "short_conv" in kinds and fields.boolean("conv_bias", False):
        fields.fail("conv_bias", "false; convolutions with biases are not supported")

    def mixer() -> Recurrent:
        if family.recurrent == "short_conv":
            return ShortConv(fields.integer("hidden_size"), fields.integer("conv_L_cache", 3))
        return _mamba2(fields, family)

    return _arguments(family, ["none" if kind == "moe" else kind for kind in kinds], mixer)


def _hf_delta_net(fields: Fields, family: Family, num_layers: int) -> dict[str, Any]:
    """The gated delta net of layers without attention, and which these are, as arguments of `ModelConfig`."""
    if not fields.boolean("attn_output_gate", True):
        fields.fail("attn_output_gate", "true; attention without a gate is not supported in this family")
    types, interval = fields.items("layer_types"), fields.integer("full_attention_interval")
    if interval < 1:
        fields.fail("full_attention_interval", "at least 1")
    parts = ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim", "conv_kernel_dim")
    key_heads, key_dims, value_heads, value_dims, taps = (fields.integer(f"linear_{part}") for part in parts)
    return {
        "recurrent": DeltaNet(key_heads, key_dims, value_heads, value_dims, taps, family.tiles_values),
        "layer_recurrent": tuple(kind == "linear_attention" for kind in types)
        or each_layer(num_layers, lambda i: (i + 1) % interval != 0),
    }


def _arguments(family: Family, kinds: Sequence[str], mixer: Callable[[], Recurrent]) -> dict[str, Any]:
    """Of layers of these kinds, as arguments of `ModelConfig`."""
    recurs = tuple(kind not in ("attention", "both", "none") for kind in kinds)
    found: dict[str, Any] = {"layer_recurrent": recurs} if any(recurs) else {}
    if family.single_branch:
        found["layer_feeds"] = tuple(kind == "none" for kind in kinds)
    if any(recurs) or "both" in kinds:
        found |= {"recurrent": mixer(), "beside": "both" in kinds}
    return found


def _mamba2(fields: Fields, family: Family) -> Mamba2:
    def key_of(fact: str) -> str:
        *names, last = _MAMBA_KEYS[fact]
        return fields.first(names, last)

    def number(fact: str) -> int:
        return fields.integer(key_of(fact))

    for key in ("mamba_proj_bias", "use_bias", "projectors_bias"):
        if fields.boolean(key, False):
            fields.fail(key, "false; biases of the products around a state are not supported")
    for key in ("mamba_hidden_act", "hidden_act"):
        if not family.single_branch and fields.text(key, "silu") != "silu":
            fields.fail(key, "silu")
    normed = fields.boolean("mamba_rms_norm", False) if family.recurrent == "both" else True
    if family.recurrent == "both" and normed and fields.boolean("mamba_norm_before_gate", True):
        fields.fail("mamba_norm_before_gate", "false; norms before the gate are not supported")
    limit = fields.items("time_step_limit")
    least = fields.number("time_step_min", 0.0) if family.steps_at_least else 0.0
    if limit and not family.steps_at_least and (len(limit) != 2 or limit[0] not in (0, 0.0)):
        fields.fail("time_step_limit", "a range from 0")
    facts = {fact: number(fact) for fact in ("key_heads", "key_dims", "value_heads", "taps")}
    expand = fields.integer(fields.first(("mamba_expand", "expand"), "expand"), 2)
    inner = fields.integer("mamba_d_ssm", 0) or expand * fields.integer("hidden_size")
    dims_key = key_of("value_dims")
    dims = fields.integer(dims_key) if fields.value(dims_key) not in (None, "auto") else inner // max(facts["value_heads"], 1)
    bias = fields.boolean(fields.first(("mamba_conv_bias", "use_conv_bias"), "use_conv_bias"), True)
    return Mamba2(**facts, value_dims=dims, bias=bias, normed=normed, least_step=least)


def read_gguf(
    fields: Fields, family: Family, num_layers: int, num_blocks: int, tensors: Mapping[str, QuantTensor]
) -> dict[str, Any]:
    """The mixers of GGUF metadata, as arguments of `ModelConfig`. Raises CheckpointError, or ConfigError."""
    if family.delta_layers:
        return _gguf_delta_net(fields, family, num_layers)
    if not family.recurrent:
        return {}
    kinds = ["both"] * num_layers
    if family.recurrent != "both":
        attends = fields.per_layer("attention.head_count_kv", num_blocks, 0)
        feeds = fields.per_layer("feed_forward_length", num_blocks, 0)
        kinds = ["attention" if attends[i] else family.recurrent for i in range(num_layers)]
        if family.single_branch:
            kinds = ["none" if feeds[i] else kind for i, kind in enumerate(kinds)]

    def mixer() -> Recurrent:
        if family.recurrent == "short_conv":
            return ShortConv(fields.integer("embedding_length"), fields.integer("shortconv.l_cache"))
        some = f"layers.{next(i for i, kind in enumerate(kinds) if kind in ('mamba2', 'both'))}."
        heads, inner = fields.integer("ssm.time_step_rank"), fields.integer("ssm.inner_size")
        if heads < 1 or inner % heads:
            fields.fail("ssm.inner_size", f"a multiple of ssm.time_step_rank, {heads}")
        sizes = fields.integer("ssm.group_count", 1), fields.integer("ssm.state_size"), heads, inner // heads
        return Mamba2(*sizes, fields.integer("ssm.conv_kernel"), some + "ssm_conv_bias" in tensors, some + "ssm_norm" in tensors)

    return _arguments(family, kinds, mixer)


def _gguf_delta_net(fields: Fields, family: Family, num_layers: int) -> dict[str, Any]:
    """The gated delta net of layers without attention, and which these are, as arguments of `ModelConfig`."""
    heads, inner, interval = (fields.integer(key) for key in ("ssm.time_step_rank", "ssm.inner_size", "full_attention_interval"))
    if heads < 1 or inner % heads:
        fields.fail("ssm.time_step_rank", f"a divisor of ssm.inner_size {inner}")
    if interval < 1:
        fields.fail("full_attention_interval", "at least 1")
    key, recurs = "attention.recurrent_layers", each_layer(num_layers, lambda i: (i + 1) % interval != 0)
    if key in fields:
        recurs = tuple(flag == 1 for flag in fields.numbers(key, np.bool_, fields.integer("block_count"))[:num_layers])
    sizes = fields.integer("ssm.group_count"), fields.integer("ssm.state_size"), heads, inner // heads
    return {"recurrent": DeltaNet(*sizes, fields.integer("ssm.conv_kernel"), family.tiles_values), "layer_recurrent": recurs}


def gguf_entries(config: ModelConfig) -> dict[str, Any]:
    """The metadata of a model's mixers, by keys without the architecture, as llama.cpp's converter has it. None removes a key."""
    c, mixer = config, config.recurrent
    if isinstance(mixer, DeltaNet):
        return {
            "ssm.conv_kernel": mixer.taps, "ssm.inner_size": mixer.value_heads * mixer.value_dims,
            "ssm.state_size": mixer.key_dims, "ssm.time_step_rank": mixer.value_heads, "ssm.group_count": mixer.key_heads,
            "full_attention_interval": c.layer_recurrent.index(False) + 1,
            "attention.recurrent_layers": np.array(c.layer_recurrent),
        }  # fmt: skip
    none = (False,) * c.num_layers
    recurs, feeds = c.layer_recurrent or none, c.layer_feeds or none
    found: dict[str, Any] = {}
    if any(recurs) or any(feeds):
        attends = [not recurs[i] and not feeds[i] for i in range(c.num_layers)]
        found["attention.head_count_kv"] = np.array(attends, np.int32) * c.num_kv_heads
        if not any(attends):
            found |= {"attention.head_count": 0, "attention.head_count_kv": 0}
            found |= dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"))
    if c.layer_feeds:
        size = c.experts.size if c.experts else c.intermediate_size
        found["feed_forward_length"] = np.array(feeds, np.int32) * size if any(feeds) else 0
        found["attention.layer_norm_epsilon"] = c.norm_eps  # which Nemotron-H's loader wants, too
    if isinstance(mixer, ShortConv):
        found["shortconv.l_cache"] = mixer.taps
    if isinstance(mixer, Mamba2):
        found |= {
            "ssm.conv_kernel": mixer.taps, "ssm.state_size": mixer.key_dims, "ssm.group_count": mixer.key_heads,
            "ssm.inner_size": mixer.inner, "ssm.time_step_rank": mixer.value_heads,
        }  # fmt: skip
    return found
