"""The families of models: each is flags of `ModelConfig`, and the names that files give to its tensors and settings.

A family of known operations is one entry. `hf_defaults` and `gguf_defaults` are read as if they stood in a file that leaves them
out; they come from transformers' configuration classes and llama.cpp's loaders.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from cpuspec.checkpoints.fields import MOST_LAYERS

# Tensors outside of the layers: canonical name -> name in GGUF files, name in Hugging Face files.
GLOBAL_NAMES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "embed": ("token_embd.weight", "model.embed_tokens.weight"),
        "norm": ("output_norm.weight", "model.norm.weight"),
        "output": ("output.weight", "lm_head.weight"),
    }
)
_LAYER_NAMES = {
    "attn_norm": ("attn_norm.weight", "input_layernorm.weight"),
    "q": ("attn_q.weight", "self_attn.q_proj.weight"),
    "k": ("attn_k.weight", "self_attn.k_proj.weight"),
    "v": ("attn_v.weight", "self_attn.v_proj.weight"),
    "o": ("attn_output.weight", "self_attn.o_proj.weight"),
    "q_norm": ("attn_q_norm.weight", "self_attn.q_norm.weight"),
    "k_norm": ("attn_k_norm.weight", "self_attn.k_norm.weight"),
    "mlp_norm": ("ffn_norm.weight", "post_attention_layernorm.weight"),
    "gate": ("ffn_gate.weight", "mlp.gate_proj.weight"),
    "up": ("ffn_up.weight", "mlp.up_proj.weight"),
    "down": ("ffn_down.weight", "mlp.down_proj.weight"),
}
for _part in ("q", "k", "v", "o", "gate", "up", "down"):
    _gguf_name, _hf_name = (name.replace(".weight", ".bias") for name in _LAYER_NAMES[_part])
    _LAYER_NAMES[f"{_part}_bias"] = _gguf_name, _hf_name
# GGUF files of these families call the norm before the MLP by another name. In families with norms after the branches
# (`_POST_NAMES`) the same name is the norm of the attention's output.
_NORM_BETWEEN = {"mlp_norm": ("post_attention_norm.weight", "post_attention_layernorm.weight")}
_EACH = ("gate", "up", "down")


def _renamed(names: Mapping[str, tuple[str, str]], /, **hf_names: str) -> dict[str, tuple[str, str]]:
    """A copy of `names` with other Hugging Face names for some parts; "" for a part that those files join with another."""
    return {**names, **{part: (names[part][0], hf_name) for part, hf_name in hf_names.items()}}


# Families whose Hugging Face files join q, k and v in one tensor. GGUF files may do so, too; we write them apart.
_JOINED_QKV = {
    **{part: (_LAYER_NAMES[part][0], "") for part in ("q", "k", "v", "q_bias", "k_bias", "v_bias")},
    "q+k+v": ("", "self_attn.qkv_proj.weight"),
}
_EXPERT_NAMES = {
    **_LAYER_NAMES,
    "router": ("ffn_gate_inp.weight", "mlp.gate.weight"),
    "router_shift": ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
    **{f"expert_{part}": (f"ffn_{part}_exps.weight", f"mlp.experts.*.{part}_proj.weight") for part in _EACH},
    **{f"shared_{part}": (f"ffn_{part}_shexp.weight", f"mlp.shared_expert.{part}_proj.weight") for part in _EACH},
    "shared_weight": ("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight"),
}
# transformers' Glm4MoeForCausalLM and Ernie4_5_MoeForCausalLM name the part beside the experts so.
_SHARED_NAMES = _renamed(_EXPERT_NAMES, **{f"shared_{part}": f"mlp.shared_experts.{part}_proj.weight" for part in _EACH})
# Keys and values made of one vector. "k_b|v_b" is one matrix with the rows of each head's key, then of its value.
_LATENT_NAMES = {
    **{part: theirs for part, theirs in _SHARED_NAMES.items() if part[:2] not in ("q", "k", "v", "q_", "k_", "v_")},
    "q_a": ("attn_q_a.weight", "self_attn.q_a_proj.weight"),
    "q_a_norm": ("attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight"),
    "q_plain+q_rope": ("attn_q_b.weight", "self_attn.q_b_proj.weight"),
    "latent+k_rope": ("attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    "latent_norm": ("attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight"),
    "k_b|v_b": ("", "self_attn.kv_b_proj.weight"),
    "k_b": ("attn_k_b.weight", ""),
    "v_b": ("attn_v_b.weight", ""),
}
_MISTRAL4_NAMES = {
    **_renamed(_LATENT_NAMES, expert_gate="", expert_up="", expert_down="mlp.experts.down_proj"),
    "expert_gate+expert_up": ("", "mlp.experts.gate_up_proj"),
}
# Names in models without a `q_a`, whose queries are made of the row itself, and in GGUF files from before the vector was cached.
WITHOUT_Q_RANK: Mapping[str, str] = MappingProxyType(
    {"attn_q_b.weight": "attn_q.weight", "self_attn.q_b_proj.weight": "self_attn.q_proj.weight"}
)
_LATENT_OTHERS = {**dict.fromkeys(WITHOUT_Q_RANK.values(), "q_plain+q_rope"), "attn_kv_b.weight": "k_b|v_b"}
# Tensors that hold several parts, one after another along the rows, of any family that has these parts.
FUSED: Mapping[str, str] = MappingProxyType(
    {
        "attn_qkv.weight": "q+k+v",
        "attn_qkv.bias": "q_bias+k_bias+v_bias",
        "self_attn.qkv_proj.weight": "q+k+v",
        "mlp.gate_up_proj.weight": "gate+up",
        "ffn_gate_up_exps.weight": "expert_gate+expert_up",
        "mlp.experts.gate_up_proj": "expert_gate+expert_up",
        "mlp.experts.down_proj": "expert_down",
    }
)


def _mamba_names(where: str) -> dict[str, tuple[str, str]]:
    """Names of a Mamba-2 mixer that Hugging Face files call `where`."""
    return {
        "ssm_z+ssm_xbc+ssm_dt": ("ssm_in.weight", f"{where}.in_proj.weight"),
        "ssm_conv": ("ssm_conv1d.weight", f"{where}.conv1d.weight"),
        "ssm_conv_bias": ("ssm_conv1d.bias", f"{where}.conv1d.bias"),
        "ssm_dt_bias": ("ssm_dt.bias", f"{where}.dt_bias"),
        "ssm_a": ("ssm_a", f"{where}.A_log"),
        "ssm_d": ("ssm_d", f"{where}.D"),
        "ssm_norm": ("ssm_norm.weight", f"{where}.norm.weight"),
        "ssm_out": ("ssm_out.weight", f"{where}.out_proj.weight"),
    }


_LFM2_NAMES = {
    **_renamed(
        _EXPERT_NAMES,
        attn_norm="operator_norm.weight",
        o="self_attn.out_proj.weight",
        q_norm="self_attn.q_layernorm.weight",
        k_norm="self_attn.k_layernorm.weight",
        mlp_norm="ffn_norm.weight",
        router="feed_forward.gate.weight",
        router_shift="feed_forward.expert_bias",
        **{part: f"feed_forward.{name}.weight" for part, name in zip(_EACH, ("w1", "w3", "w2"), strict=True)},
        **{f"expert_{part}": f"feed_forward.experts.*.{name}.weight" for part, name in zip(_EACH, ("w1", "w3", "w2"), strict=True)},
    ),
    "conv_b+conv_c+conv_x": ("shortconv.in_proj.weight", "conv.in_proj.weight"),
    "short_conv": ("shortconv.conv.weight", "conv.conv.weight"),
    "conv_out": ("shortconv.out_proj.weight", "conv.out_proj.weight"),
}
# transformers' Lfm2Config and Lfm2MoeConfig.
_LFM2_DEFAULTS: dict[str, object] = {
    **{"norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True, "num_key_value_heads": 8, "num_attention_heads": 32},
    "max_position_embeddings": 128000,
}
_LFM2: dict[str, Any] = {
    **{"flags": {"qk_norm": True}, "layer_names": _LFM2_NAMES, "recurrent": "short_conv"},
    "global_names": {"norm": ("token_embd_norm.weight", "model.embedding_norm.weight")},
}
_GRANITE_MOE_NAMES = {
    **_renamed(
        {part: theirs for part, theirs in _EXPERT_NAMES.items() if part not in ("router_shift", "shared_weight")},
        **dict.fromkeys(("expert_gate", "expert_up", "shared_gate", "shared_up"), ""),
        router="block_sparse_moe.router.layer.weight",
        expert_down="block_sparse_moe.output_linear.weight",
        shared_down="shared_mlp.output_linear.weight",
    ),
    "expert_gate+expert_up": ("", "block_sparse_moe.input_linear.weight"),
    "shared_gate+shared_up": ("", "shared_mlp.input_linear.weight"),
}
_GRANITE_MOE_OTHERS = {  # names that transformers 5 writes
    "block_sparse_moe.experts.gate_up_proj": "expert_gate+expert_up",
    "block_sparse_moe.experts.down_proj": "expert_down",
    "block_sparse_moe.router.weight": "router",
    # One tensor for each expert, as quantizers write them.
    **{f"block_sparse_moe.experts.*.{name}.weight": f"expert_{part}" for part, name in zip(_EACH, ("w1", "w3", "w2"), strict=True)},
    "block_sparse_moe.gate.weight": "router",
}
_GRANITE_HYBRID_NAMES = {
    **_renamed(_LAYER_NAMES, gate="", up="", down="shared_mlp.output_linear.weight"),
    **_mamba_names("mamba"),
    "gate+up": ("", "shared_mlp.input_linear.weight"),
}
# transformers' GraniteMoeHybridConfig.
_GRANITE_HYBRID: dict[str, Any] = {
    "hf_types": ("granitemoehybrid", ""),
    "hf_defaults": {
        **{"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4},
        **{"mamba_expand": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024},
    },
    **{"pairs_neighbours": True, "has_scales": True, "recurrent": "mamba2", "tells_ropes": True},
}
_NEMOTRON_H_NAMES = {
    "attn_norm": ("attn_norm.weight", "norm.weight"),
    **{
        part: (gguf_name, re.sub(r"self_attn|mlp", "mixer", hf_name, count=1))
        for part, (gguf_name, hf_name) in _SHARED_NAMES.items()
        if re.fullmatch(r"q|k|v|o|router|router_shift|((expert|shared)_)?(up|down)", part)
    },
    **_mamba_names("mixer"),
}
_MAMBA2: dict[str, Any] = {  # also of the layers of Nemotron-H
    **{"single_branch": True, "unrotated_every": 1, "recurrent": "mamba2", "hf_root": "backbone"},
    "global_names": {
        "embed": ("token_embd.weight", "backbone.embeddings.weight"),
        "norm": ("output_norm.weight", "backbone.norm_f.weight"),
    },
}
# transformers' NemotronHConfig.
_NEMOTRON_H_DEFAULTS: dict[str, object] = {
    **{"layer_norm_epsilon": 1e-5, "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4, "expand": 2},
    **{"time_step_min": 0.001, "max_position_embeddings": 4096, "mlp_hidden_act": "relu2", "intermediate_size": 21504},
}
_NEMOTRON_H: dict[str, Any] = {
    **_MAMBA2,
    **{"flags": {"gated": False, "activation": "relu2"}, "layer_names": _NEMOTRON_H_NAMES, "steps_at_least": True},
}
# gate and up are one tensor in files of both kinds.
_JOINED_GATE = {
    **{part: names for part, names in _LAYER_NAMES.items() if part not in ("gate", "up", "gate_bias", "up_bias")},
    "gate+up": ("ffn_up.weight", "mlp.gate_up_proj.weight"),
}
_POST_NAMES = {
    **_LAYER_NAMES,
    "attn_post_norm": ("post_attention_norm.weight", "post_attention_layernorm.weight"),
    "mlp_post_norm": ("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
}
_GEMMA_NAMES = _renamed(_POST_NAMES, mlp_norm="pre_feedforward_layernorm.weight")
_GEMMA4_NAMES = {
    **_GEMMA_NAMES,
    "output_scale": ("layer_output_scale.weight", "layer_scalar"),
    "input_gate": ("inp_gate.weight", "per_layer_input_gate.weight"),
    "input_proj": ("proj.weight", "per_layer_projection.weight"),
    "input_post_norm": ("post_norm.weight", "post_per_layer_input_norm.weight"),
}
# Its dense part is one beside the experts.
_GEMMA4_MOE_NAMES = {
    **{f"shared_{part}" if part in ("gate", "up", "down") else part: theirs for part, theirs in _GEMMA4_NAMES.items()},
    "shared_post_norm": ("post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight"),
    "router": ("ffn_gate_inp.weight", "router.proj.weight"),
    "router_norm": ("ffn_gate_inp.scale", "router.scale"),
    "router_factors": ("ffn_down_exps.scale", "router.per_expert_scale"),
    "expert_norm": ("pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight"),
    "expert_gate+expert_up": ("", "experts.gate_up_proj"),
    **{f"expert_{part}": (f"ffn_{part}_exps.weight", "") for part in ("gate", "up")},
    "expert_down": ("ffn_down_exps.weight", "experts.down_proj"),
    "expert_post_norm": ("post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight"),
}

# Layers of Qwen3.5 and Qwen3-Next. The matrix of queries has a gate of each head beside the head's query.
_GATED_NAMES = {
    **{part: theirs for part, theirs in _EXPERT_NAMES.items() if part not in ("q", "q_bias", "k_bias", "v_bias")},
    "q+q_gate": ("attn_q.weight", "self_attn.q_proj.weight"),
    **_NORM_BETWEEN,
    "delta_conv": ("ssm_conv1d.weight", "linear_attn.conv1d.weight"),
    "delta_dt": ("ssm_dt.bias", "linear_attn.dt_bias"),
    "delta_decay": ("ssm_a", "linear_attn.A_log"),
    "delta_norm": ("ssm_norm.weight", "linear_attn.norm.weight"),
    "delta_o": ("ssm_out.weight", "linear_attn.out_proj.weight"),
}
_QWEN35_NAMES = {
    **_GATED_NAMES,
    "delta_qkv": ("attn_qkv.weight", "linear_attn.in_proj_qkv.weight"),
    "delta_gate": ("attn_gate.weight", "linear_attn.in_proj_z.weight"),
    "delta_beta": ("ssm_beta.weight", "linear_attn.in_proj_b.weight"),
    "delta_alpha": ("ssm_alpha.weight", "linear_attn.in_proj_a.weight"),
}
_QWEN3_NEXT_NAMES = {
    **_GATED_NAMES,
    "delta_qkv": ("attn_qkv.weight", ""),
    "delta_gate": ("attn_gate.weight", ""),
    "delta_qkv+delta_gate": ("", "linear_attn.in_proj_qkvz.weight"),
    "delta_beta+delta_alpha": ("ssm_ba.weight", "linear_attn.in_proj_ba.weight"),
}
# transformers' Qwen3_5TextConfig; Qwen3NextConfig has the same sizes of linear layers.
_DELTA_DEFAULTS: dict[str, object] = {
    **{"head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "attn_output_gate": True},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "linear_conv_kernel_dim": 4,
}

_BIASED_NORMS = {
    **_LAYER_NAMES,
    "attn_norm_bias": ("attn_norm.bias", "input_layernorm.bias"),
    "mlp_norm_bias": ("ffn_norm.bias", "post_attention_layernorm.bias"),
}
_BIASED_NORM = {"norm_bias": ("output_norm.bias", "model.norm.bias")}


@dataclass(frozen=True)
class Family:
    """One architecture: the names of its tensors and settings in files, and how these differ from Llama's."""

    architecture: str
    hf_class: str  # in config.json
    gguf_architecture: str = ""  # where GGUF files have another name than ours
    hf_wrapper: str = ""  # a class around it whose `text_config` describes this family
    hf_types: tuple[str, str] = ("", "")  # `model_type` of both classes; "" where it is the architecture
    text_alike: str = ""  # the family that computes the same in a file of texts only
    # Classes that compute the same, or have further layers for multi-token prediction.
    hf_alike: tuple[str, ...] = ()
    # Arguments of ModelConfig that all models of the family share. Hugging Face files decide the activation themselves, by
    # `hidden_act`, unless it is "swiglu_oai".
    flags: Mapping[str, Any] = field(default_factory=dict)
    hf_defaults: Mapping[str, object] = field(default_factory=dict)
    gguf_defaults: Mapping[str, Any] = field(default_factory=dict)
    # As GLOBAL_NAMES, for the parts of a layer; "" where a kind of file has none. "*" is the number of an expert, whose matrices
    # are stacked. Parts joined by "+" are one tensor, one part after another along the rows; "|": head by head.
    layer_names: Mapping[str, tuple[str, str]] = field(default_factory=lambda: _LAYER_NAMES)
    # Further names of parts or joined parts in files of any kind. "&": their rows alternate. "^T": the file has the inputs first.
    other_names: Mapping[str, str] = field(default_factory=dict)
    global_names: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # what differs from GLOBAL_NAMES
    # Files hold the rows of q and k so that rotation pairs neighbours, not the halves of a head.
    pairs_neighbours: bool = False  # GGUF files
    hf_pairs_neighbours: bool = False
    experts: Mapping[str, Any] | None = None  # arguments of Experts that all models share; None for a family without
    gates_shared: bool = False  # the part beside the experts, where there is one, has a weight of its own
    hf_shift_is_row: bool = False  # `router_shift` is a matrix of one row
    qkv_bias: bool = False  # the default of Hugging Face configurations
    hf_groups_heads: bool = False  # joined q, k and v go key head by key head: its queries, its key, its value
    has_scales: bool = False  # Granite's four factors: of embeddings, branches, scores and, inverse, logits
    has_logit_scale: bool = False
    has_sections: bool = False  # sections of rotary positions for images, which are one for texts
    has_local_rope: bool = False  # layers with a window rotate with another base, or without the scaling
    temperature_grows: bool = False  # queries may have a temperature that grows with the position
    turns_in_windows: bool = False  # in a model with windows, only layers that have one have rotary positions
    norm_offset: float = 0.0  # what is added to norm weights of Hugging Face files; GGUF files hold the sum
    delta_layers: bool = False  # layers without attention are gated delta nets
    # GGUF files order value heads as `DeltaNet.tiled` says, and so do we; in Hugging Face files neighbours share a key head.
    tiles_values: bool = False
    scales_embeddings: bool = False  # by the root of the hidden size
    unrotated_every: int = 0  # each n-th layer has no rotary positions; 0: all have them, 1: none
    # What layers without attention have: "short_conv" or "mamba2"; "both": each layer has Mamba-2 beside its attention.
    recurrent: str = ""
    single_branch: bool = False  # a layer is one branch
    steps_at_least: bool = False  # Hugging Face configurations have a least step of Mamba-2, which GGUF files do not know
    hf_root: str = "model"  # the prefix of layers in Hugging Face files
    folds_multipliers: bool = False  # Hugging Face configurations have factors that GGUF files have multiplied into the matrices
    latent: bool = False  # keys and values are made of one vector (`config.Latent`)
    by_window: bool = False  # heads of layers with a window have another size, and layers may share keys (`checkpoints.gemma`)
    tells_ropes: bool = False  # `rope.scaling.finetuned` in GGUF files means that no layer rotates
    gguf_plain: str = ""  # the family that GGUF files of its models without recurrent layers belong to
    # A GGUF key that is above 0 in this family, and absent or 0 in the other families of the same `gguf_architecture`.
    gguf_mark: str = ""
    gguf_wide_layers: int = 0  # a model with so many layers scales scores by hidden_size / num_heads, for which GGUF has no key

    @property
    def gguf_name(self) -> str:
        """`general.architecture` of its GGUF files."""
        return self.gguf_architecture or self.architecture


# llama.cpp divides the weights of experts by at least this, the least normal number in f16 (`build_moe_ffn`). transformers adds
# 1e-20 to the sum in GLM-4.5, 1e-6 in LFM2, and takes at least 1e-12 in ERNIE 4.5. Sums of chosen scores are far above all of them.
LEAST_SUM = 6.103515625e-5

# transformers' Qwen3MoeConfig.
_QWEN_MOE_DEFAULTS: dict[str, object] = {
    **{"num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "sliding_window": 4096},
    "max_window_layers": 28,
}

_GPT_OSS_NAMES = {
    **_renamed(_EXPERT_NAMES, router="mlp.router.weight", **{f"expert_{part}": "" for part in _EACH}),
    "sinks": ("attn_sinks.weight", "self_attn.sinks"),
    **_NORM_BETWEEN,
    "router_bias": ("ffn_gate_inp.bias", "mlp.router.bias"),
    **{f"expert_{part}_bias": (f"ffn_{part}_exps.bias", "") for part in _EACH},
}
# transformers' GptOssConfig.
_GPT_OSS_DEFAULTS: dict[str, object] = {
    **{"num_local_experts": 128, "num_experts_per_tok": 4, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64},
    **{"num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "vocab_size": 201088},
    **{"attention_bias": True, "use_sliding_window": True, "sliding_window": 128, "sliding_window_pattern": 2},
    **{"rope_theta": 150000.0, "max_position_embeddings": 131072},
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        "original_max_position_embeddings": 4096,
    },
}
# transformers' Glm4Config.
_GLM_DEFAULTS: dict[str, object] = {
    **{"head_dim": 128, "rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5},
    **{"attention_bias": True, "attention_out_bias": False},
}
_MISTRAL3_WRAPPER: dict[str, Any] = {"hf_wrapper": "Mistral3ForConditionalGeneration", "hf_types": ("", "mistral3")}
# transformers' Ministral3Config.
_MINISTRAL_ROPE: dict[str, object] = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}
# transformers' DeepseekV3Config, DeepseekV2Config, Glm4MoeLiteConfig and Mistral4Config.
_DEEPSEEK_DEFAULTS: dict[str, object] = {
    **{"score_function": "sigmoid", "moe_router_enable_expert_bias": True, "q_lora_rank": 1536, "kv_lora_rank": 512},
    **{"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1},
    **{"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5},
    **{"moe_intermediate_size": 2048, "partial_rotary_factor": 1.0},
}
_DEEPSEEK_V2_DEFAULTS: dict[str, object] = {
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
    **{"n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "topk_method": "greedy"},
    **{"moe_intermediate_size": 1407, "partial_rotary_factor": 1.0},
}
_GLM_LITE_DEFAULTS: dict[str, object] = {
    **{"score_function": "sigmoid", "moe_router_enable_expert_bias": True, "q_lora_rank": 768, "kv_lora_rank": 512},
    **{"qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_routed_experts": 64, "n_shared_experts": 1},
    **{"num_experts_per_tok": 4, "first_k_dense_replace": 1, "routed_scaling_factor": 1.8, "moe_intermediate_size": 1536},
    **{"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
}
_MISTRAL4_DEFAULTS: dict[str, object] = {
    **{"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 128},
    **{"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 2048},
    **{"max_position_embeddings": 1 << 20, "partial_rotary_factor": 1.0},
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192},
        **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    },
}
_NEIGHBOURS: dict[str, Any] = {"pairs_neighbours": True, "hf_pairs_neighbours": True}
_LATENT: dict[str, Any] = {
    **{"latent": True, "layer_names": _LATENT_NAMES, "other_names": _LATENT_OTHERS},
    **{**_NEIGHBOURS, "gguf_defaults": {"expert_weights_norm": False}},
}
_DELTA: dict[str, Any] = {"flags": {"qk_norm": True, "gated_attention": True}, "norm_offset": 1.0, "delta_layers": True}
_GEMMA: dict[str, Any] = {"norm_offset": 1.0, "scales_embeddings": True}
_GEMMA_FLAGS = {"norms": "both", "activation": "gelu_tanh"}
# transformers' Gemma2Config and Gemma3TextConfig: files of large models name only what differs from these.
_GEMMA_DEFAULTS: dict[str, object] = {
    **{"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8, "head_dim": 256},
    **{"num_key_value_heads": 4, "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh"},
    **{"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 4096},
}
_GEMMA2_CAPS: dict[str, object] = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
# transformers' Gemma4TextConfig.
_GEMMA4_DEFAULTS: dict[str, object] = {
    **{key: value for key, value in _GEMMA_DEFAULTS.items() if key != "query_pre_attn_scalar"},
    **{"num_hidden_layers": 30, "vocab_size": 262144, "max_position_embeddings": 131072, "sliding_window": 512},
    **{"sliding_window_pattern": 6, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256},
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    **{"partial_rotary_factor": 1.0, "use_bidirectional_attention": None},
}
_GEMMA4_HF: dict[str, Any] = {
    **{"hf_wrapper": "Gemma4ForConditionalGeneration", "hf_types": ("gemma4_text", "gemma4"), "hf_defaults": _GEMMA4_DEFAULTS}
}
_GEMMA4: dict[str, Any] = {
    "flags": {**_GEMMA_FLAGS, "qk_norm": True, "value_norm": True, "scales_layers": True},
    "gguf_defaults": {"rope.freq_base_swa": 1e4, "final_logit_softcapping": 30.0},
    "global_names": {
        "layer_embed": ("per_layer_token_embd.weight", "model.embed_tokens_per_layer.weight"),
        "layer_input": ("per_layer_model_proj.weight", "model.per_layer_model_projection.weight"),
        "layer_input_norm": ("per_layer_proj_norm.weight", "model.per_layer_projection_norm.weight"),
    },
    **{"scales_embeddings": True, "has_local_rope": True, "by_window": True},
}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.architecture: family
        for family in (
            Family("llama", "LlamaForCausalLM", pairs_neighbours=True),
            Family(
                "qwen2",
                "Qwen2ForCausalLM",
                hf_alike=("MiMoForCausalLM",),
                qkv_bias=True,
                hf_defaults={"sliding_window": 4096, "max_window_layers": 28},
            ),
            Family(
                "qwen3",
                "Qwen3ForCausalLM",
                hf_alike=("Qwen3ForSequenceClassification",),  # Qwen3-Reranker
                flags={"qk_norm": True},
                hf_defaults={"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
            ),
            Family(
                "qwen3vl",
                "Qwen3VLTextModel",
                hf_wrapper="Qwen3VLForConditionalGeneration",
                hf_types=("qwen3_vl_text", "qwen3_vl"),
                text_alike="qwen3",
                flags={"qk_norm": True},
                hf_defaults={"head_dim": 128, "rope_theta": 5e5},
                has_sections=True,
            ),
            Family(
                "qwen3moe",
                "Qwen3MoeForCausalLM",
                hf_types=("qwen3_moe", ""),
                flags={"qk_norm": True},
                experts={},
                hf_defaults={"num_experts": 128, "norm_topk_prob": False, **_QWEN_MOE_DEFAULTS},
                layer_names=_EXPERT_NAMES,
            ),
            Family(
                "qwen2moe",
                "Qwen2MoeForCausalLM",
                hf_types=("qwen2_moe", ""),
                qkv_bias=True,
                experts={},
                gates_shared=True,
                hf_defaults={
                    **{"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "norm_topk_prob": False},
                    **{"shared_expert_intermediate_size": 5632, "sliding_window": 0, "max_window_layers": 28},
                },
                gguf_defaults={"expert_weights_norm": False},
                layer_names=_EXPERT_NAMES,
            ),
            Family(
                "qwen35",
                "Qwen3_5ForCausalLM",
                hf_wrapper="Qwen3_5ForConditionalGeneration",
                hf_types=("qwen3_5_text", "qwen3_5"),
                **_DELTA,
                hf_defaults=_DELTA_DEFAULTS,
                gguf_defaults={"full_attention_interval": 4},
                layer_names=_QWEN35_NAMES,
                has_sections=True,
                tiles_values=True,
            ),
            Family(
                "qwen35moe",
                "Qwen3_5MoeForCausalLM",
                hf_wrapper="Qwen3_5MoeForConditionalGeneration",
                hf_types=("qwen3_5_moe_text", "qwen3_5_moe"),
                **_DELTA,
                experts={},
                gates_shared=True,
                hf_defaults={
                    **_DELTA_DEFAULTS,
                    **{"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512},
                    **{"shared_expert_intermediate_size": 512, "intermediate_size": 512},
                },
                gguf_defaults={"full_attention_interval": 4, "feed_forward_length": 512},
                layer_names=_QWEN35_NAMES,
                has_sections=True,
                tiles_values=True,
            ),
            Family(
                "qwen3next",
                "Qwen3NextForCausalLM",
                hf_types=("qwen3_next", ""),
                **_DELTA,
                experts={},
                gates_shared=True,
                hf_defaults={
                    **_DELTA_DEFAULTS,
                    **{"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512},
                    **{"shared_expert_intermediate_size": 512, "decoder_sparse_step": 1},
                },
                gguf_defaults={"full_attention_interval": 4, "feed_forward_length": 512},
                layer_names=_QWEN3_NEXT_NAMES,
                other_names={"ssm_in.weight": "delta_qkv+delta_gate"},
            ),
            Family(
                "olmoe",
                "OlmoeForCausalLM",
                flags={"qk_norm": True, "norm_spans": "row"},
                experts={},
                hf_defaults={"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "rms_norm_eps": 1e-5},
                gguf_defaults={"expert_weights_norm": False},
                layer_names=_EXPERT_NAMES,
            ),
            Family(
                "mixtral",
                "MixtralForCausalLM",
                "llama",
                experts={"normalised": True},
                hf_defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6, "sliding_window": None},
                layer_names=_renamed(
                    _EXPERT_NAMES,
                    router="block_sparse_moe.gate.weight",
                    expert_gate="block_sparse_moe.experts.*.w1.weight",
                    expert_up="block_sparse_moe.experts.*.w3.weight",
                    expert_down="block_sparse_moe.experts.*.w2.weight",
                ),
                other_names={f"ffn_{part}.*.weight": f"expert_{part}" for part in _EACH},  # GGUF files of before April 2024
                pairs_neighbours=True,
            ),
            Family(
                "gpt-oss",
                "GptOssForCausalLM",
                hf_types=("gpt_oss", ""),
                flags={"activation": "swiglu_oai", "sinks": True},
                experts={"score": "chosen", "normalised": False, "bias": True},
                hf_defaults=_GPT_OSS_DEFAULTS,
                gguf_defaults={"attention.sliding_window_pattern": 2, "expert_weights_norm": False},
                layer_names=_GPT_OSS_NAMES,
                other_names={
                    "mlp.experts.gate_up_proj": "expert_gate&expert_up^T",
                    "mlp.experts.gate_up_proj_bias": "expert_gate_bias&expert_up_bias",
                    "mlp.experts.down_proj": "expert_down^T",
                    "mlp.experts.down_proj_bias": "expert_down_bias",
                    # In mxfp4 (`compressed.Mxfp4`).
                    "mlp.experts.gate_up_proj.weight": "expert_gate&expert_up",
                    "mlp.experts.down_proj.weight": "expert_down",
                    # One linear layer for each expert, as Unsloth's models have.
                    "mlp.experts.gate_up_projs.*.weight": "expert_gate&expert_up",
                    "mlp.experts.gate_up_projs.*.bias": "expert_gate_bias&expert_up_bias",
                    "mlp.experts.down_projs.*.weight": "expert_down",
                    "mlp.experts.down_projs.*.bias": "expert_down_bias",
                    **{f"mlp.router.linear.{end}": f"router{part}" for end, part in (("weight", ""), ("bias", "_bias"))},
                },
            ),
            Family("granite", "GraniteForCausalLM", pairs_neighbours=True, has_scales=True, tells_ropes=True),
            Family(
                "granitemoe",
                "GraniteMoeForCausalLM",
                hf_alike=("GraniteMoeSharedForCausalLM",),
                # Both take a softmax over the chosen, llama.cpp as one over all that is normalised.
                experts={"normalised": True},
                hf_defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
                layer_names=_GRANITE_MOE_NAMES,
                other_names=_GRANITE_MOE_OTHERS,
                pairs_neighbours=True,
                has_scales=True,
            ),
            Family(
                "ernie4_5_moe",
                "Ernie4_5_MoeForCausalLM",
                "ernie4_5-moe",
                experts={"normalised": True},
                hf_defaults={
                    **{"head_dim": 128, "tie_word_embeddings": True, "rope_theta": 5e5, "rms_norm_eps": 1e-5},
                    **{"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2},
                    **{"moe_layer_start_index": 1, "moe_router_enable_expert_bias": True},
                },
                layer_names=_renamed(_SHARED_NAMES, router_shift="mlp.moe_statics.e_score_correction_bias"),
                other_names={"mlp.gate.moe_statics.e_score_correction_bias": "router_shift"},
                hf_shift_is_row=True,
                **_NEIGHBOURS,
            ),
            Family(
                "glm4moe",
                "Glm4MoeForCausalLM",
                hf_types=("glm4_moe", ""),
                experts={},
                hf_defaults={
                    **{"score_function": "sigmoid", "moe_router_enable_expert_bias": True, "use_qk_norm": False},
                    **{"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1},
                    **{"first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "attention_out_bias": False},
                },
                gguf_defaults={"expert_gating_func": 2, "expert_weights_norm": False},
                layer_names={**_SHARED_NAMES, **_NORM_BETWEEN},
            ),
            # The first one is the family of all GGUF files of deepseek2.
            Family(
                "deepseek2",
                "DeepseekV3ForCausalLM",
                hf_types=("deepseek_v3", ""),
                experts={},
                hf_defaults=_DEEPSEEK_DEFAULTS,
                **_LATENT,
            ),
            Family("deepseek_v2", "DeepseekV2ForCausalLM", "deepseek2", experts={}, hf_defaults=_DEEPSEEK_V2_DEFAULTS, **_LATENT),
            Family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", "deepseek2", experts={}, hf_defaults=_GLM_LITE_DEFAULTS, **_LATENT),
            Family(
                "mistral4",
                "Mistral4ForCausalLM",
                **_MISTRAL3_WRAPPER,
                experts={},
                hf_defaults=_MISTRAL4_DEFAULTS,
                temperature_grows=True,
                **{**_LATENT, "layer_names": _MISTRAL4_NAMES},
            ),
            Family(
                "bailingmoe2",  # Ling 2 and Ring 2
                "BailingMoeV2ForCausalLM",
                hf_types=("bailing_moe", ""),
                experts={},
                hf_defaults={
                    **{"score_function": "sigmoid", "moe_router_enable_expert_bias": True, "use_qk_norm": True},
                    **{"partial_rotary_factor": 0.5, "use_qkv_bias": False},
                },
                gguf_defaults={"expert_weights_norm": False},
                layer_names={
                    **_renamed(
                        {name: theirs for name, theirs in _SHARED_NAMES.items() if name not in ("q", "k", "v")},
                        o="attention.dense.weight",
                        q_norm="attention.query_layernorm.weight",
                        k_norm="attention.key_layernorm.weight",
                        router_shift="mlp.gate.expert_bias",
                    ),
                    "q+k+v": ("attn_qkv.weight", "attention.query_key_value.weight"),
                    "q_bias+k_bias+v_bias": ("attn_qkv.bias", "attention.query_key_value.bias"),
                },
                global_names={"embed": ("token_embd.weight", "model.word_embeddings.weight")},
            ),
            Family(
                "hunyuan-moe",
                "HunYuanMoEV1ForCausalLM",
                hf_types=("hunyuan_v1_moe", ""),
                flags={"rotates_first": True},
                experts={"normalised": True},
                hf_defaults={"num_shared_expert": 1, "use_qk_norm": True, "rms_norm_eps": 1e-5},
                layer_names=_renamed(
                    _EXPERT_NAMES,
                    q_norm="self_attn.query_layernorm.weight",
                    k_norm="self_attn.key_layernorm.weight",
                    router="mlp.gate.wg.weight",
                    **{f"shared_{part}": f"mlp.shared_mlp.{part}_proj.weight" for part in _EACH},
                ),
            ),
            Family(
                "olmo2",
                "Olmo2ForCausalLM",
                flags={"norms": "after", "qk_norm": True, "norm_spans": "row"},
                hf_defaults={"rms_norm_eps": 1e-5},
                layer_names=_POST_NAMES,
            ),
            Family(
                "olmo3",
                "Olmo3ForCausalLM",
                "olmo2",
                flags={"norms": "after", "qk_norm": True, "norm_spans": "row"},
                hf_defaults={
                    **{"rms_norm_eps": 1e-5, "rope_theta": 5e5, "use_sliding_window": True, "sliding_window": 4096},
                    "sliding_window_pattern": 4,
                },
                gguf_defaults={"attention.sliding_window_pattern": 4},
                layer_names=_POST_NAMES,
                has_local_rope=True,
                gguf_mark="attention.sliding_window",
            ),
            Family(
                "exaone4",
                "Exaone4ForCausalLM",
                flags={"norms": "after", "qk_norm": True},
                hf_defaults={"rms_norm_eps": 1e-5, "use_sliding_window": True, "sliding_window": 4096, "sliding_window_pattern": 4},
                gguf_defaults={"attention.sliding_window_pattern": 4},
                layer_names=_POST_NAMES,
                turns_in_windows=True,
            ),
            Family(
                "phi3",
                "Phi3ForCausalLM",
                hf_defaults={
                    **{"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
                    **{"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0},
                },
                gguf_defaults={"attention.sliding_window_pattern": 0},
                layer_names={**_JOINED_GATE, **_JOINED_QKV},
            ),
            Family(
                "glm4",
                "Glm4ForCausalLM",
                flags={"norms": "both"},
                hf_defaults=_GLM_DEFAULTS,
                layer_names={
                    **_JOINED_GATE,
                    "attn_post_norm": ("post_attention_norm.weight", "post_self_attn_layernorm.weight"),
                    "mlp_post_norm": ("post_ffw_norm.weight", "post_mlp_layernorm.weight"),
                },
                **_NEIGHBOURS,
            ),
            Family("glm", "GlmForCausalLM", "chatglm", hf_defaults=_GLM_DEFAULTS, layer_names=_JOINED_GATE, **_NEIGHBOURS),
            Family(
                "starcoder2",
                "Starcoder2ForCausalLM",
                flags={"norm_kind": "layer", "norm_bias": True, "gated": False, "activation": "gelu_tanh"},
                hf_defaults={
                    **{"norm_epsilon": 1e-5, "use_bias": True, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
                    **{"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0},
                },
                layer_names={
                    **_BIASED_NORMS,
                    "up": ("ffn_up.weight", "mlp.c_fc.weight"),
                    "up_bias": ("ffn_up.bias", "mlp.c_fc.bias"),
                    "down": ("ffn_down.weight", "mlp.c_proj.weight"),
                    "down_bias": ("ffn_down.bias", "mlp.c_proj.bias"),
                },
                global_names=_BIASED_NORM,
            ),
            Family(
                "stablelm",
                "StableLmForCausalLM",
                flags={"norm_kind": "layer", "norm_bias": True},
                hf_defaults={"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
                layer_names=_BIASED_NORMS,
                global_names=_BIASED_NORM,
            ),
            Family(
                "cohere",
                "CohereForCausalLM",
                "command-r",
                flags={"norm_kind": "layer", "parallel": True},
                hf_defaults={"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True},
                **_NEIGHBOURS,
                has_logit_scale=True,
            ),
            Family(
                "cohere2",
                "Cohere2ForCausalLM",
                flags={"norm_kind": "layer", "parallel": True},
                hf_defaults={
                    **{"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True, "use_sliding_window": True},
                    **{"sliding_window": 4096, "sliding_window_pattern": 4},
                },
                gguf_defaults={"attention.sliding_window_pattern": 4},
                **_NEIGHBOURS,
                has_logit_scale=True,
                turns_in_windows=True,
            ),
            Family(
                "internlm2",
                "InternLM2ForCausalLM",
                layer_names={
                    **_renamed(
                        {**_LAYER_NAMES, **_JOINED_QKV},
                        **{"o": "attention.wo.weight", "o_bias": "attention.wo.bias", "attn_norm": "attention_norm.weight"},
                        **{"mlp_norm": "ffn_norm.weight", "gate": "feed_forward.w1.weight", "up": "feed_forward.w3.weight"},
                        down="feed_forward.w2.weight",
                    ),
                    **{"q_bias+k_bias+v_bias": ("", "attention.wqkv.bias"), "q+k+v": ("", "attention.wqkv.weight")},
                },
                global_names=_renamed(GLOBAL_NAMES, embed="model.tok_embeddings.weight", output="output.weight"),
                pairs_neighbours=True,
                hf_groups_heads=True,
            ),
            Family(
                "hunyuan_v1_dense",
                "HunYuanDenseV1ForCausalLM",
                "hunyuan-dense",
                flags={"qk_norm": True, "rotates_first": True},
                hf_defaults={"rms_norm_eps": 1e-5},
                layer_names=_renamed(
                    _LAYER_NAMES, q_norm="self_attn.query_layernorm.weight", k_norm="self_attn.key_layernorm.weight"
                ),
            ),
            Family(
                "seed_oss",
                "SeedOssForCausalLM",
                qkv_bias=True,
                hf_defaults={"attention_bias": True, "attention_out_bias": False, "head_dim": 128},
                layer_names={**_LAYER_NAMES, **_NORM_BETWEEN},
            ),
            Family(
                "ernie4_5",
                "Ernie4_5ForCausalLM",
                "ernie4_5",
                hf_alike=("Ernie4_5_ForCausalLM",),  # the first revisions
                hf_defaults={"head_dim": 128, "tie_word_embeddings": True, "rope_theta": 5e5, "rms_norm_eps": 1e-5},
                **_NEIGHBOURS,
            ),
            Family(
                "mistral",
                "MistralForCausalLM",
                "mistral3",  # older files say llama
                **_MISTRAL3_WRAPPER,
                hf_defaults={"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0},
                pairs_neighbours=True,
            ),
            Family(
                "ministral3",
                "Ministral3ForCausalLM",
                "mistral3",
                **_MISTRAL3_WRAPPER,
                hf_defaults={
                    **{"rms_norm_eps": 1e-5, "head_dim": 128, "rope_parameters": _MINISTRAL_ROPE},
                    **{"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0},
                },
                pairs_neighbours=True,
                temperature_grows=True,
                gguf_mark="attention.temperature_scale",
            ),
            Family(
                "smollm3",
                "SmolLM3ForCausalLM",
                hf_defaults={"tie_word_embeddings": True, "rope_theta": 2e6, "sliding_window": None},
                pairs_neighbours=True,
                unrotated_every=4,
            ),
            Family("lfm2", "Lfm2ForCausalLM", hf_defaults=_LFM2_DEFAULTS, **_LFM2),
            Family(
                "lfm2moe",
                "Lfm2MoeForCausalLM",
                hf_types=("lfm2_moe", ""),
                experts={"score": "sigmoid"},
                hf_defaults={
                    **_LFM2_DEFAULTS,
                    **{"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "num_dense_layers": 2},
                    **{"use_expert_bias": True, "intermediate_size": 7168},
                },
                other_names={  # names that transformers 5 writes
                    "feed_forward.experts.gate_up_proj": "expert_gate+expert_up",
                    "feed_forward.experts.down_proj": "expert_down",
                },
                **_LFM2,
            ),
            Family(
                "granitehybrid",
                "GraniteMoeHybridForCausalLM",
                layer_names=_GRANITE_HYBRID_NAMES,
                **_GRANITE_HYBRID,
                gguf_plain="granite",
            ),
            Family(
                "granitehybrid-moe",
                "GraniteMoeHybridForCausalLM",
                "granitehybrid",
                experts={"normalised": True},
                layer_names={**_GRANITE_MOE_NAMES, **_mamba_names("mamba")},
                other_names=_GRANITE_MOE_OTHERS,
                **_GRANITE_HYBRID,
                gguf_plain="granitemoe",
            ),
            Family(
                "mamba2",
                "Mamba2ForCausalLM",
                hf_defaults={
                    **{"layer_norm_epsilon": 1e-5, "num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8},
                    **{"conv_kernel": 4, "expand": 2, "max_position_embeddings": 1 << 20},
                },
                layer_names={"attn_norm": ("attn_norm.weight", "norm.weight"), **_mamba_names("mixer")},
                **_MAMBA2,
            ),
            Family("nemotron_h", "NemotronHForCausalLM", hf_defaults=_NEMOTRON_H_DEFAULTS, **_NEMOTRON_H),
            Family(
                "nemotron_h_moe",
                "NemotronHForCausalLM",
                hf_types=("nemotron_h", ""),
                experts={"score": "sigmoid", "shifted": True},
                hf_defaults={
                    **_NEMOTRON_H_DEFAULTS,
                    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688},
                    **{"moe_shared_expert_intermediate_size": 7688},
                },
                gguf_defaults={"expert_weights_norm": False},
                other_names={"mixer.experts.up_proj": "expert_up", "mixer.experts.down_proj": "expert_down"},
                **_NEMOTRON_H,
            ),
            Family(
                "falcon-h1",
                "FalconH1ForCausalLM",
                hf_types=("falcon_h1", ""),
                hf_defaults={
                    **{"rms_norm_eps": 1e-5, "num_attention_heads": 32, "num_key_value_heads": 8, "mamba_d_ssm": 1024},
                    **{"mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4},
                    "max_position_embeddings": 8192,
                },
                layer_names={
                    **_LAYER_NAMES,
                    **_mamba_names("mamba"),
                    "mlp_norm": ("ffn_norm", "pre_ff_layernorm.weight"),
                    **{part: (f"ffn_{part}.weight", f"feed_forward.{part}_proj.weight") for part in ("gate", "up", "down")},
                },
                global_names={"norm": ("output_norm.weight", "model.final_layernorm.weight")},
                recurrent="both",
                folds_multipliers=True,
            ),
            Family(
                "gemma",
                "GemmaForCausalLM",
                flags={"activation": "gelu_tanh"},
                hf_defaults={"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
                **_GEMMA,
            ),
            Family(
                "gemma2",
                "Gemma2ForCausalLM",
                flags=_GEMMA_FLAGS,
                hf_defaults={
                    **{**_GEMMA_DEFAULTS, **_GEMMA2_CAPS},
                    **{"vocab_size": 256000, "max_position_embeddings": 8192, "sliding_window_pattern": 2},
                },
                gguf_defaults={"attention.sliding_window": 4096, "attention.sliding_window_pattern": 2, **_GEMMA2_CAPS},
                layer_names=_GEMMA_NAMES,
                **_GEMMA,
                gguf_wide_layers=46,
            ),
            Family(
                "gemma3",
                "Gemma3ForCausalLM",
                hf_wrapper="Gemma3ForConditionalGeneration",
                hf_types=("gemma3_text", "gemma3"),
                flags={**_GEMMA_FLAGS, "qk_norm": True},
                hf_defaults={
                    **{**_GEMMA_DEFAULTS, "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6},
                    **{"rope_theta": 1e6, "rope_local_base_freq": 1e4},
                },
                gguf_defaults={"attention.sliding_window_pattern": 6, "rope.freq_base_swa": 1e4},
                layer_names=_GEMMA_NAMES,
                **_GEMMA,
                gguf_wide_layers=62,
                has_local_rope=True,
            ),
            Family("gemma4", "Gemma4ForCausalLM", layer_names=_GEMMA4_NAMES, **_GEMMA4_HF, **_GEMMA4),
            Family(
                "gemma4-moe",
                "Gemma4ForCausalLM",
                "gemma4",
                experts={"normalised": True, "weighed": True, "normed_apart": True},
                layer_names=_GEMMA4_MOE_NAMES,
                **_GEMMA4_HF,
                **_GEMMA4,
            ),
            Family(
                "gemma4_unified",
                "Gemma4UnifiedForCausalLM",
                "gemma4",
                hf_wrapper="Gemma4UnifiedForConditionalGeneration",
                hf_types=("gemma4_unified_text", "gemma4_unified"),
                hf_defaults={
                    **{**_GEMMA4_DEFAULTS, "max_position_embeddings": 262144, "sliding_window": 1024},
                    "hidden_size_per_layer_input": 0,
                },
                layer_names=_GEMMA4_NAMES,
                **_GEMMA4,
            ),
        )
    }
)

# `model_type` of a config.json -> the class that transformers makes of it.
MODEL_TYPES: Mapping[str, str] = MappingProxyType(
    {
        **{family.hf_types[0] or family.architecture: family.hf_class for family in FAMILIES.values()},
        **{family.hf_types[1]: family.hf_wrapper for family in FAMILIES.values() if family.hf_wrapper},
    }
)


# Families whose classes in transformers have no biases of attention, whatever attention_bias says (`qkv_bias` is of others).
WITHOUT_ATTENTION_BIAS = frozenset(
    (
        *("qwen2", "qwen2moe", "mixtral", "mistral", "ministral3", "phi3", "stablelm", "starcoder2", "exaone4", "ernie4_5"),
        *("ernie4_5_moe", "lfm2", "lfm2moe", "mamba2", "nemotron_h", "nemotron_h_moe"),
    )
)

# Families that are known and not computed, by their names in GGUF files and as `model_type`: the layers that they need.
NOT_COMPUTED: Mapping[str, str] = MappingProxyType(
    {
        "mamba": "state spaces of the first Mamba",
        **dict.fromkeys(("gemma3n", "gemma3n_text"), "several streams of rows (AltUp)"),
        **dict.fromkeys(
            ("gemma4-assistant", "gemma4_assistant"),
            "attention over the keys and values of another model (it drafts for that: --draft)",
        ),
        **dict.fromkeys(("kimi-linear", "kimi_linear"), "delta nets whose decays differ within a head"),
        **dict.fromkeys(("deepseek32", "deepseek_v32", "glm-dsa", "glm_moe_dsa"), "attention to tokens that an indexer chooses"),
    }
)


def each_layer(num_layers: int, rule: Callable[[int], bool]) -> tuple[bool, ...]:
    """`rule(i)` for each layer."""
    return tuple(rule(i) for i in range(min(num_layers, MOST_LAYERS)))


def layer_flags(window: int, slides: Sequence[bool], rotated: Sequence[bool], has_local_rope: bool) -> dict[str, Any]:
    """`layer_windows` and `layer_ropes` of ModelConfig.

    slides, rotated: for each layer whether it has the window, and whether it has rotary positions.
    """
    windows = tuple(window if slid else 0 for slid in slides)
    local = "local" if has_local_rope else "global"
    ropes = tuple("none" if not turned else local if slid else "global" for slid, turned in zip(slides, rotated, strict=True))
    return {"layer_windows": windows if any(windows) else (), "layer_ropes": ropes if set(ropes) - {"global"} else ()}
