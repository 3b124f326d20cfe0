"""config.json as other people's tools write it: the right configuration, a warning or a refusal by name, and no noise."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cpuspec.backends.numpy_backend import NumpyBackend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.families import FAMILIES, WITHOUT_ATTENTION_BIAS
from cpuspec.checkpoints.heads.mtp import own_mtp
from cpuspec.checkpoints.huggingface import EXPERT_SIZES, EXPERTS_USED, FIRSTS, SHARED_COUNTS, SHARED_SIZES, STEPS
from cpuspec.checkpoints.recurrent import EXPERT_COUNTS
from cpuspec.config import RopeScaling
from cpuspec.errors import CheckpointError
from cpuspec.settings import EngineConfig
from tests.backends.models import MIXTURES, RECURRENT, forward, in_gguf
from tests.checkpoints.conftest import TINIEST
from tools.make_tiny_model import make_tiny_hf, random_weights, tiny_config, write_gguf, write_huggingface

TOKENS = np.random.default_rng(0).integers(0, 384, 100).tolist()


def edited(directory: Path, changes: dict[str, Any], drop: tuple[str, ...] = ()) -> Path:
    """The directory with other settings in its config.json."""
    fields = json.loads((directory / "config.json").read_text())
    fields = {key: value for key, value in fields.items() if key not in drop} | changes
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def directory_of(path: Path, architecture: str, changes: dict[str, Any], drop: tuple[str, ...] = (), **shape: Any) -> Path:
    """A tiny model whose config.json has other settings."""
    return edited(make_tiny_hf(path, architecture, **{"num_layers": 2, **shape}), changes, drop)


def rewrite(directory: Path, tensors: dict[str, np.ndarray]) -> None:
    (directory / "model.safetensors").unlink()
    save_file(tensors, directory / "model.safetensors")


def difference(directory: Path, checkpoint: Checkpoint) -> float:
    """Of logits, from those of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits[0].numpy()
    backend = NumpyBackend(checkpoint, EngineConfig(kv_format="f32"))
    return float(np.abs(forward(backend, backend.new_cache(1, 256), {0: TOKENS}).logits - wanted).max())


YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OLD = ("rope_theta", "rope_scaling")  # spellings before transformers 5

# name -> family, config.json's settings, those that are not there, what ModelConfig must have.
ROPES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], dict[str, Any]]] = {
    "rope_parameters": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, OLD, {"rope_base": 5e5}),
    "both bases": ("qwen2", {"rope_theta": 7e5, "rope_parameters": {"rope_theta": 5e5}}, ("rope_scaling",), {"rope_base": 5e5}),
    "base in rope_scaling": ("qwen2", {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}}, OLD, {"rope_base": 5e5}),
    "base in rope_scaling, scaled": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        ("rope_theta",),
        {"rope_base": 5e5, "rope_scaling": RopeScaling("linear", 2.0)},
    ),
    "both types": (
        "qwen3",
        {"rope_scaling": {"type": "linear", "rope_type": "yarn", **YARN}},
        (),
        {"rope_scaling": RopeScaling("yarn", 4.0, original_context_length=128)},
    ),
    "context of yarn at top level": (
        "qwen2",
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 64},
        (),
        {"rope_scaling": RopeScaling("yarn", 4.0, original_context_length=64)},
    ),
    "context of yarn at both levels": (
        "qwen2",
        {"rope_scaling": {"type": "yarn", **YARN}, "original_max_position_embeddings": 64},
        (),
        {"rope_scaling": RopeScaling("yarn", 4.0, original_context_length=64)},
    ),
    "context of llama3 at top level": (
        "llama",
        {"rope_scaling": LLAMA3, "original_max_position_embeddings": 64},
        (),
        {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, original_context_length=64)},
    ),
    "llama3 without a context": (
        "llama",
        {"rope_scaling": LLAMA3},
        (),
        {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, original_context_length=512)},
    ),
    "yarn with mscale": (
        "mistral",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "mscale": 1.0, "mscale_all_dim": 0.5, **YARN}},
        OLD,
        {"rope_base": 5e5},
    ),
    "yarn of 2023": (
        "llama",
        {"rope_scaling": {"type": "yarn", "finetuned": True, **YARN}},
        (),
        {"rope_scaling": RopeScaling("yarn", 4.0, original_context_length=128)},
    ),
    "hunyuan's alpha": (
        "hunyuan-moe",
        {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0, "beta_fast": 32, "beta_slow": 1}},
        (),
        {"rope_base": 1e4 * 1000 ** (64 / 62), "rope_scaling": None},
    ),
    "glm's part of a head, scaled": (
        "glm4moe",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "partial_rotary_factor": 0.25, **YARN}},
        (*OLD, "partial_rotary_factor"),
        {"rope_base": 5e5, "rope_dims": 16},
    ),
    "gemma3, rope_parameters with rope_scaling": (
        "gemma3",
        {
            "rope_parameters": {"full_attention": {"rope_theta": 3e6}, "sliding_attention": {"rope_theta": 3e4}},
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        ("rope_theta", "rope_local_base_freq"),
        {"rope_base": 3e6, "local_rope_base": 3e4, "rope_scaling": RopeScaling("linear", 8.0)},
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_rotary_settings_are_read_wherever_they_stand_and_compute_what_transformers_computes(tmp_path: Path, name: str) -> None:
    family, changes, drop, wanted = ROPES[name]
    directory = directory_of(tmp_path / "hf", family, changes, drop)
    checkpoint = open_checkpoint(directory)
    assert {key: getattr(checkpoint.config, key) for key in wanted} == wanted
    assert checkpoint.remarks == ()
    assert difference(directory, checkpoint) < 1e-4


def test_a_scaling_added_by_hand_keeps_the_base_that_the_file_has(tmp_path: Path) -> None:
    """transformers 5.24 falls back to the base of its class here, which no such model was trained with."""
    changes = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": {"type": "yarn", **YARN}}
    config = open_checkpoint(directory_of(tmp_path / "hf", "qwen2", changes, ("rope_theta",))).config
    assert (config.rope_base, config.rope_scaling) == (5e5, RopeScaling("yarn", 4.0, original_context_length=128))


def long(factors: list[Any], short: list[float]) -> dict[str, Any]:
    """LongRoPE's settings."""
    return {"rope_type": "longrope", "original_max_position_embeddings": 128, "long_factor": factors, "short_factor": short}


FULL, SLID = "full_attention", "sliding_attention"
WINDOWS = {"use_sliding_window": True, "sliding_window": 4096}
# family, other settings, what the error says.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_scaling": {"type": "yarn", "sharpness": 2, **YARN}}, "sharpness is 2, wanted it absent; with rope type yarn"),
    ("llama", {"rope_scaling": {"type": "yarn", "attn_factor": 0.5, **YARN}}, "attn_factor is 0.5, wanted it absent"),
    (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0, "high_freq_factor": 4.0}},
        "high_freq_factor is 4.0, wanted it absent",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3]}},
        r"mrope_section is \[2, 3\], wanted it absent",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "default", "factor": 4.0}},
        "factor is 4.0, wanted it absent; with rope type default",
    ),
    ("llama", {"rope_interleaved": True}, "rope_interleaved is True, wanted false"),
    ("llama", {"is_causal": False}, "is_causal is False, wanted true"),
    (
        "llama",
        {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"},
        "wanted a family without delta nets whose",
    ),
    ("llama", {"architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text"}, "without several streams of rows"),
    ("llama", {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}, "without attention to tokens"),
    ("llama", {"architectures": None, "model_type": "gpt_neox"}, "architectures is absent, wanted one of LlamaForCausalLM"),
    ("llama", {"architectures": ["GPTNeoXForCausalLM"]}, "GPTNeoXForCausalLM.*wanted one of LlamaForCausalLM"),
    ("llama", {"architectures": "LlamaForCausalLM"}, "an array"),
    ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config: bits is absent, wanted an integer"),
    ("llama", {"quantization_config": {"quant_method": "hqq"}}, "'hqq' are not supported by this version, which reads gptq"),
    ("llama", {"quantization_config": {}}, "an unnamed method"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', wanted silu or gelu_pytorch_tanh"),
    ("llama", {"mlp_bias": True}, "gate_bias"),
    ("llama", {"layer_types": ["sliding_attention"]}, "layer_types is .*, wanted full_attention in every layer"),
    ("qwen2", {**WINDOWS, "layer_types": ["chunked_attention"]}, "full_attention or sliding_attention in every layer"),
    ("qwen2", {**WINDOWS, "sliding_window": -4, "max_window_layers": 0}, "layer_windows must be integers from 0"),
    ("llama", {"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window is True, wanted false; llama models have no"),
    ("llama", {"use_bidirectional_attention": True}, "not causal"),
    ("llama", {"query_pre_attn_scalar": 0}, "a number above 0"),
    ("llama", {"attn_logit_softcapping": -1}, "attention_softcap is -1.0, wanted a number from 0"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic', wanted default, linear, llama3, longrope or"),
    ("llama", {"rope_scaling": {"type": "su"}}, "rope factors must be half of 16 dimensions, got 0 numbers"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "factor is absent, wanted a finite number"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": 0}}, "yarn: beta_fast is 0.0, wanted"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4}, "rope_theta": 1}, "rope_base is 1.0, wanted a number above 1"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor is absent"),
    ("llama", {"rope_scaling": [1]}, "rope_scaling is .*wanted an object"),
    ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial rotary"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4}}}, "one set of parameters for all layers"),
    ("llama", {"num_attention_heads": 0}, "at least 1"),
    ("llama", {"num_attention_heads": 3, "head_dim": None}, "divisor of hidden_size 32"),
    ("llama", {"num_hidden_layers": 2}, r"layers\.1\.attn_norm .*missing"),
    ("llama", {"num_hidden_layers": 10**400}, "num_layers"),
    ("llama", {"hidden_size": 64, "head_dim": 16}, "shape"),
    ("llama", {"hidden_size": "32"}, "hidden_size is '32', wanted an integer"),
    ("llama", {"rms_norm_eps": 10**4000}, "finite number"),
    ("llama", {"attention_bias": True}, "q_bias .*missing"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, wanted 1"),
    ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": 1e300}}, "alpha is 1e.300, wanted a number above 0"),
    ("phi3", {"rope_scaling": long([10**400] * 8, [1.0] * 8)}, "long_factor: 0 is 10.*finite"),
    ("phi3", {"rope_scaling": long([1.0] * 7, [1.0] * 7)}, "half of 16 dimensions, got 7"),
    ("phi3", {"rope_scaling": long([1.0] * 8, [])}, "short_factors is '0 numbers', wanted 8"),
    ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
    ("glm4", {"partial_rotary_factor": 0.2}, "rope_dims must be even, got 3"),
    ("cohere", {"use_qk_norm": True}, "layer norms of queries and keys are not supported"),
    ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": -1.0}}, "query_growth -1.0 over"),
    *(
        ("smollm3", changes, "no_rope_layer")
        for changes in ({"no_rope_layers": [1, 0]}, {"no_rope_layers": [2]}, {"no_rope_layers": None, "no_rope_layer_interval": 0})
    ),
    ("gemma3", {"sliding_window_pattern": 0, "layer_types": None}, "sliding_window_pattern"),
    (
        "gemma3",
        {
            "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
            "rope_theta": None,
            "rope_scaling": None,
        },
        "default in layers with a window",
    ),
]


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED)
def test_a_setting_that_is_wrong_or_not_computed_is_refused_by_name(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    directory = directory_of(tmp_path / "hf", family, changes, **TINIEST)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(directory)
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize(
    ("family", "changes", "field", "wanted"),
    [
        ("qwen2", {**WINDOWS, "max_window_layers": 3}, "layer_windows", (0, 0, 0, 4096)),
        ("qwen2", {**WINDOWS, "max_window_layers": 28}, "layer_windows", ()),
        ("qwen2", {**WINDOWS, "max_window_layers": 28, "layer_types": [FULL, SLID, FULL, SLID]}, "layer_windows", (0, 4096) * 2),
        ("mistral", {"sliding_window": 7, "layer_types": None}, "layer_windows", (7,) * 4),
        ("mistral", {"sliding_window": None, "layer_types": None}, "layer_windows", ()),
        ("mistral", {}, "layer_windows", (4096,) * 4),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 0]}, "layer_ropes", ("none", "global", "global", "none")),
        ("smollm3", {}, "layer_ropes", ("global", "global", "global", "none")),
        ("smollm3", {"no_rope_layer_interval": 2}, "layer_ropes", ("global", "none") * 2),
        ("smollm3", {"no_rope_layers": [1] * 4}, "layer_ropes", ()),
    ],
)
def test_layers_have_the_windows_and_positions_that_the_configuration_says(
    tmp_path: Path, family: str, changes: dict[str, Any], field: str, wanted: tuple[Any, ...]
) -> None:
    own = ("sliding_window", "use_sliding_window", "layer_types", "no_rope_layers")
    config = open_checkpoint(directory_of(tmp_path / "hf", family, changes, own, **{**TINIEST, "num_layers": 4})).config
    assert getattr(config, field) == wanted


def test_old_and_new_configurations_of_gemma_3_are_read(tmp_path: Path) -> None:
    """Older ones have a pattern and two bases, newer ones a list of layers and a rope for each kind of layer."""
    directory = make_tiny_hf(tmp_path / "hf", "gemma3", num_layers=3, rope_base=1e6, rope_scaling=RopeScaling("linear", 8.0))
    wanted = open_checkpoint(directory).config
    assert (wanted.rope_base, wanted.local_rope_base, wanted.rope_scaling) == (1e6, 1e4, RopeScaling("linear", 8.0))
    assert (wanted.layer_windows, wanted.layer_ropes) == ((8, 0, 8), ("local", "global", "local"))
    edited(directory, {"sliding_window_pattern": 2}, drop=("layer_types", "use_sliding_window", "rope_local_base_freq"))
    assert open_checkpoint(directory).config == wanted
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    edited(directory, {"rope_parameters": ropes}, drop=("rope_theta", "rope_scaling"))
    assert open_checkpoint(directory).config == wanted
    edited(directory, {}, drop=("sliding_window_pattern",))  # 6, and so no layer of three is global
    assert open_checkpoint(directory).config.layer_ropes == ("local",) * 3


def test_old_and_null_spellings_of_the_configuration_are_read(tmp_path: Path) -> None:
    directory = make_tiny_hf(tmp_path / "hf", "llama", vocab_size=260, **TINIEST)
    edited(
        directory,
        {
            "rope_scaling": {"type": "linear", "factor": 2},
            "rope_theta": 500000,
            "head_dim": None,
            "quantization_config": None,
            "sliding_window": 4096,
            "use_sliding_window": False,
        },
        drop=("tie_word_embeddings", "hidden_act"),
    )
    with pytest.raises(CheckpointError, match=r"output .*missing"):
        open_checkpoint(directory)
    edited(directory, {"tie_word_embeddings": True})
    config = open_checkpoint(directory).config
    assert config.rope_scaling == RopeScaling("linear", 2.0)
    assert config.rope_base == 500000
    assert config.head_dim == 16


def test_an_unknown_setting_of_attention_is_told(tmp_path: Path) -> None:
    changes = {"attention_sharpness": 2, "position_noise": 0.5, "sliding_window": 64, "attention_off": False, "colour": 3}
    checkpoint = open_checkpoint(directory_of(tmp_path / "hf", "llama", changes))
    (remark,) = checkpoint.remarks
    assert (
        "config.json: this version does not know attention_sharpness = 2, position_noise = 0.5, sliding_window = 64; ignored"
        in remark
    )


# Settings that published models have besides their shapes.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.2": (
        "llama",
        {
            **{"attention_dropout": 0.0, "mlp_bias": False, "pretraining_tp": 1, "use_cache": True, "unsloth_fixed": True},
            "eos_token_id": [1, 2],
        },
    ),
    "TinyLlama": ("llama", {"max_sequence_length": 2048, "tie_word_embeddings": True, "attention_bias": False, "use_cache": True}),
    "SmolLM2": ("llama", {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}}),
    "vicuna": ("llama", {"_flash_attn_2_enabled": True, "output_attentions": False, "cross_attention_hidden_size": None}),
    "Qwen2.5": ("qwen2", {"attention_dropout": 0.0, "max_window_layers": 21, "sliding_window": 32768, "use_sliding_window": False}),
    "R1 distilled into Qwen": (
        "qwen2",
        {"sliding_window": 4096, "use_mrope": False, "use_sliding_window": False, "max_window_layers": 21},
    ),
    "Qwen3": ("qwen3", {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 36, "attention_dropout": 0.0}),
    "Mistral": ("mistral", {"_attn_implementation_autoset": False, "attention_dropout": 0.0, "sliding_window": None}),
    "SmolLM3": (
        "smollm3",
        {"max_window_layers": 28, "no_rope_layer_interval": 4, "use_sliding_window": False, "attention_dropout": 0},
    ),
    "Gemma 2": ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid", "sliding_window_size": None}),
    "Granite 3.1 3B-A800M": (
        "granitemoe",
        {"output_router_logits": False, "router_aux_loss_coef": 0.0, "attention_bias": False, "attention_dropout": 0.1},
    ),
    "ERNIE 4.5 21B-A3B": (
        "ernie4_5_moe",
        {
            **{"use_bias": False, "moe_use_aux_free": True, "moe_gate": "topk", "moe_capacity": [64, 64, 64], "rope_theta": 5e5},
            **{"moe_layer_end_index": 27, "moe_norm_min": 1e-12, "num_nextn_predict_layers": 1, "compression_ratio": 1.0},
        },
    ),
    "GLM-4.5-Air": (
        "glm4moe",
        {
            **{"attention_dropout": 0.0, "use_qk_norm": False, "num_nextn_predict_layers": 1, "pad_token_id": 2, "n_group": 1},
            **{"rope_scaling": None, "partial_rotary_factor": 0.5, "attention_bias": False},
        },
    ),
    "Ling-mini 2.0": (
        "bailingmoe2",
        {
            **{"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 20, "use_qkv_bias": False},
            **{"rope_scaling": None, "attention_dropout": 0.0, "embedding_dropout": 0.0, "norm_head": False, "norm_softmax": False},
            **{
                **{"score_function": "sigmoid", "router_dtype": "fp32", "moe_router_enable_expert_bias": True},
                "topk_method": "noaux_tc",
            },
            **{"num_nextn_predict_layers": 0, "mtp_loss_scaling_factor": 0, "use_rmsnorm": True, "use_bias": False},
        },
    ),
    "Hunyuan-A13B": (
        "hunyuan-moe",
        {
            **{"use_cla": False, "cla_share_factor": 2, "use_mla": False, "use_mixed_mlp_moe": True, "norm_type": "rms"},
            **{"attention_head_dim": 64, "use_qk_norm": True, "moe_random_routing_dropped_token": False, "mlp_bias": False},
            "rope_scaling": {
                **{"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
                **{"beta_fast": 32, "beta_slow": 1},
            },
        },
    ),
    "Gemma 4 26B-A4B": (
        "gemma4-moe",
        {
            **{"attention_bias": False, "attention_dropout": 0.0, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
            **{"use_bidirectional_attention": "vision", "use_double_wide_mlp": False, "vocab_size_per_layer_input": 262144},
        },
    ),
    "Gemma 3": ("gemma3", {"_sliding_window_pattern": 2, "cache_implementation": "hybrid", "use_bidirectional_attention": False}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_of_published_models_make_no_noise(tmp_path: Path, name: str) -> None:
    family, changes = PUBLISHED[name]
    assert open_checkpoint(directory_of(tmp_path / "hf", family, changes)).remarks == ()


@pytest.mark.parametrize(
    ("model_type", "family"),
    [
        ("llama", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("mistral", "mistral"),
        ("smollm3", "smollm3"),
        ("gemma3_text", "gemma3"),
        ("gemma4_text", "gemma4"),
        ("gemma4_text", "gemma4-moe"),
        ("gemma4_unified_text", "gemma4_unified"),
        ("glm4_moe", "glm4moe"),
        ("granitemoe", "granitemoe"),
    ],
)
def test_a_file_that_names_no_class_is_of_its_model_type(tmp_path: Path, model_type: str, family: str) -> None:
    directory = directory_of(tmp_path / "hf", family, {"model_type": model_type}, ("architectures",))
    assert open_checkpoint(directory).config.architecture == family


def test_heads_of_layers_without_a_window_are_told_in_either_way(tmp_path: Path) -> None:
    """transformers 5.24 writes what differs by layer, where published files of Gemma 4 have keys for it."""
    directory = make_tiny_hf(tmp_path / "hf", "gemma4", num_layers=4, same_values=True)
    wanted, path = open_checkpoint(directory).config, directory / "config.json"
    settings = json.loads(path.read_text())
    whole = {"head_dim": settings.pop("global_head_dim"), "num_key_value_heads": settings.pop("num_global_key_value_heads")}
    path.write_text(json.dumps({**settings, "per_layer_config": {"1": whole, "3": whole}}))
    assert open_checkpoint(directory).config == wanted
    path.write_text(json.dumps({**settings, "per_layer_config": {"0": whole, "3": whole}}))
    with pytest.raises(CheckpointError, match="per_layer_config"):
        open_checkpoint(directory)


@pytest.mark.parametrize("kind", ["gguf", "hf"])
def test_matrices_of_keys_that_no_layer_reads_are_passed_over(tmp_path: Path, kind: str) -> None:
    """Google's files of Gemma 4 E2B and E4B have them, except for those trained for Q4_0."""
    config = tiny_config("gemma4", num_layers=6, shared_layers=2, layer_input_size=32)
    weights = random_weights(config)
    others = {f"layers.{4 + i}.{part}": weights[f"layers.{2 + i}.{part}"] for i in range(2) for part in ("k", "v", "k_norm")}
    write = write_gguf if kind == "gguf" else write_huggingface
    suffix = ".gguf" if kind == "gguf" else ""
    wanted, got = (
        open_checkpoint(write(tmp_path / f"{name}{suffix}", config, found))
        for name, found in (("without", weights), ("with", weights | others))
    )
    assert got.config == wanted.config
    assert got.tensors.keys() == wanted.tensors.keys()
    assert got.remarks == wanted.remarks


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("has", ["both", "both, equal", "output", "embedding"])
def test_the_matrices_that_the_file_has_count_whatever_is_said_to_be_tied(tmp_path: Path, has: str, is_tied: bool) -> None:
    directory = directory_of(tmp_path / "hf", "llama", {"tie_word_embeddings": is_tied}, tied=False)
    tensors = load_file(directory / "model.safetensors")
    embed, output = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    if has == "both, equal":
        tensors["lm_head.weight"] = output = embed
    elif has != "both":
        del tensors["lm_head.weight" if has == "embedding" else "model.embed_tokens.weight"]
    rewrite(directory, tensors)
    if not is_tied and has in ("output", "embedding"):
        with pytest.raises(CheckpointError, match="is missing"):
            open_checkpoint(directory)
        return
    checkpoint = open_checkpoint(directory)
    assert np.array_equal(checkpoint.tensors["embed"].dequantize(), output if has == "output" else embed)
    if has == "both":
        assert np.array_equal(checkpoint.tensors["output"].dequantize(), output)
        assert len(checkpoint.remarks) == int(is_tied)
    assert difference(directory, checkpoint) < 1e-4


# Wrapper, its `model_type`, the family of its text, and how its files begin names of the text's tensors and of what sees.
GEMMA, MISTRAL = "Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration"
UNIFIED = "Gemma4UnifiedForConditionalGeneration"
WRAPPED = {
    "Gemma 3": (GEMMA, "gemma3", "gemma3", "language_model.model.", "vision_tower."),
    "Gemma 3, transformers 5": (GEMMA, "gemma3", "gemma3", "model.language_model.", "model.vision_tower."),
    "Mistral Small 3.1": (MISTRAL, "mistral3", "mistral", "language_model.model.", "multi_modal_projector."),
    "Ministral 3": (MISTRAL, "mistral3", "ministral3", "model.language_model.", "model.vision_tower."),
    "Gemma 4 26B-A4B": ("Gemma4ForConditionalGeneration", "gemma4", "gemma4-moe", "model.language_model.", "model.vision_tower."),
    "Gemma 4 12B": (UNIFIED, "gemma4_unified", "gemma4_unified", "model.language_model.", "model.embed_vision."),
}


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("name", WRAPPED)
def test_the_text_part_of_a_file_that_sees_is_the_text_model(tmp_path: Path, name: str, is_named: bool) -> None:
    wrapper, model_type, family, prefix, sees = WRAPPED[name]
    directory = directory_of(tmp_path / "hf", family, {})
    wanted = open_checkpoint(directory)
    text = json.loads((directory / "config.json").read_text())
    told = {"architectures": [wrapper]} if is_named else {}
    del text["architectures"]
    (directory / "config.json").write_text(json.dumps({**told, "model_type": model_type, "text_config": text, "vision_config": {}}))
    tensors = {prefix + name.removeprefix("model."): values for name, values in load_file(directory / "model.safetensors").items()}
    rewrite(directory, tensors | {f"{sees}patch.weight": np.ones((2, 3), np.float32)})
    checkpoint = open_checkpoint(directory)
    assert checkpoint.config == wanted.config
    assert all(np.array_equal(checkpoint.tensors[part].data, tensor.data) for part, tensor in wanted.tensors.items())
    (remark,) = checkpoint.remarks
    assert "are of a part that sees or hears; only text is read" in remark


@pytest.mark.parametrize("fault", ["not in the index", "of another shard", "in no shard"])
def test_an_index_that_disagrees_with_its_shards_is_told_and_the_shards_count(tmp_path: Path, fault: str) -> None:
    directory = make_tiny_hf(tmp_path / "hf", num_shards=2)
    wanted = open_checkpoint(directory)
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    own = index["weight_map"].pop("model.norm.weight")
    other = next(name for name in index["weight_map"].values() if name != own)
    index["weight_map"] |= {"of another shard": {"model.norm.weight": other}, "in no shard": {"lm_head.weight": own}}.get(fault, {})
    path.write_text(json.dumps(index))
    checkpoint = open_checkpoint(directory)
    assert replace(checkpoint.config) == wanted.config
    assert all(np.array_equal(checkpoint.tensors[name].data, tensor.data) for name, tensor in wanted.tensors.items())
    (remark,) = checkpoint.remarks
    assert "model.safetensors.index.json and its shards disagree on" in remark


@pytest.mark.parametrize(("mixture", "layer"), [("glm4moe", "model.layers.2."), ("ernie4_5_moe", "model.mtp_block.0.")])
def test_layers_for_prediction_of_an_unknown_layout_are_passed_over_and_do_not_draft(
    tmp_path: Path, mixture: str, layer: str
) -> None:
    directory = make_tiny_hf(tmp_path / "hf", **in_gguf(mixture))
    wanted, tensors = open_checkpoint(directory), load_file(directory / "model.safetensors")
    ahead = {name.replace("model.layers.1.", layer): values for name, values in tensors.items() if "layers.1." in name}
    rewrite(directory, tensors | ahead)
    fields = json.loads((directory / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(fields))
    checkpoint = open_checkpoint(directory)
    assert (checkpoint.config, checkpoint.tensors.keys()) == (wanted.config, wanted.tensors.keys())
    assert len(checkpoint.prediction_layers) == len(ahead)
    with pytest.raises(CheckpointError, match="the layout of its layers for multi-token prediction is not known"):
        own_mtp(checkpoint)


SYNONYMS = (EXPERT_COUNTS, EXPERTS_USED, EXPERT_SIZES, SHARED_SIZES, SHARED_COUNTS, FIRSTS, STEPS)
OF_MIXTURES = [
    (name, key, other)
    for name in ("qwen3moe", "qwen2moe", "olmoe", "mixtral", "granitemoeshared", "ernie4_5_moe", "glm4moe", "deepseek2", "lfm2moe")
    for names in SYNONYMS
    for key in names
    for other in names
    if other != key
]


@pytest.mark.parametrize("name", sorted({name for name, *_ in OF_MIXTURES}))
def test_a_fact_under_another_name_counts_and_not_the_default_of_the_usual_one(tmp_path: Path, name: str) -> None:
    """transformers 5 writes num_local_experts where num_experts was; other tools have more such names."""
    options = {**RECURRENT, **MIXTURES}[name]
    directory = make_tiny_hf(tmp_path / "hf", **options)
    settings = json.loads((directory / "config.json").read_text())
    usual, num_renamed = open_checkpoint(directory).config, 0
    for _, key, other in (one for one in OF_MIXTURES if one[0] == name and one[1] in settings and one[2] not in settings):
        renamed = {other if this == key else this: value for this, value in settings.items()}
        (directory / "config.json").write_text(json.dumps(renamed))
        assert open_checkpoint(directory).config == usual, (key, other)
        num_renamed += 1
    assert num_renamed > 3


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_attention_bias_counts_where_transformers_reads_it(architecture: str) -> None:
    """Files of other families may say it of layers that have none."""
    import transformers

    family = FAMILIES[architecture]
    sources = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    source = next((text for text in (path.read_text("utf-8") for path in sources) if f"class {family.hf_class}(" in text), "")
    if not source:
        assert architecture in ("bailingmoe2", "internlm2"), "which transformers does not have"
    else:
        assert ("config.attention_bias" in source) == (architecture not in WITHOUT_ATTENTION_BIAS)


@pytest.mark.parametrize("architecture", ["mistral", "phi3", "stablelm", "starcoder2"])
def test_biases_that_transformers_does_not_have_are_not_missed(tmp_path: Path, architecture: str) -> None:
    usual = open_checkpoint(make_tiny_hf(tmp_path / "usual", architecture, num_layers=2))
    changed = open_checkpoint(directory_of(tmp_path / "hf", architecture, {"attention_bias": True}))
    assert changed.config == usual.config


def test_heads_of_a_qwen3_moe_without_their_size_share_the_hidden_size(tmp_path: Path) -> None:
    directory = directory_of(tmp_path / "hf", "qwen3moe", {}, drop=("head_dim",), head_dim=64, num_heads=4, hidden_size=256)
    checkpoint = open_checkpoint(directory)
    assert checkpoint.config.head_dim == 64
    assert difference(directory, checkpoint) < 1e-4


def test_first_revisions_of_ernie_have_a_class_of_their_own(tmp_path: Path) -> None:
    directory = directory_of(tmp_path / "hf", "ernie4_5", {"architectures": ["Ernie4_5_ForCausalLM"]})
    assert open_checkpoint(directory).config.architecture == "ernie4_5"


@pytest.mark.parametrize("name", ["granitemoe", "gpt-oss"])
def test_a_tensor_for_each_expert_is_read_as_the_one_of_all(tmp_path: Path, name: str) -> None:
    """As quantizers take joined experts apart: of Granite in vLLM's names, of gpt-oss in Unsloth's, gate and up in turns."""
    directory = make_tiny_hf(tmp_path / "hf", name, tied=False)
    usual, apart = open_checkpoint(directory), {}
    wanted = {part: tensor.dequantize() for part, tensor in usual.tensors.items()}
    for key, values in load_file(directory / "model.safetensors").items():
        start, _, part = key.rpartition(".mlp.experts." if name == "gpt-oss" else ".block_sparse_moe.")
        if part in ("gate_up_proj", "down_proj"):
            apart |= {f"{start}.mlp.experts.{part}s.{i}.weight": np.ascontiguousarray(one.T) for i, one in enumerate(values)}
        elif part in ("gate_up_proj_bias", "down_proj_bias"):
            apart |= {f"{start}.mlp.experts.{part[:-5]}s.{i}.bias": one for i, one in enumerate(values)}
        elif part == "input_linear.weight":
            halves = [np.split(one, 2) for one in values]
            apart |= {f"{start}.block_sparse_moe.experts.{i}.w1.weight": gate for i, (gate, _) in enumerate(halves)}
            apart |= {f"{start}.block_sparse_moe.experts.{i}.w3.weight": up for i, (_, up) in enumerate(halves)}
        elif part == "output_linear.weight":
            apart |= {f"{start}.block_sparse_moe.experts.{i}.w2.weight": one for i, one in enumerate(values)}
        else:
            apart[key.replace("mlp.router.", "mlp.router.linear.")] = values
    rewrite(directory, {key: np.ascontiguousarray(values) for key, values in apart.items()})
    found = open_checkpoint(directory)
    assert found.config == usual.config
    for part, values in wanted.items():
        assert np.array_equal(found.tensors[part].dequantize(), values), part
