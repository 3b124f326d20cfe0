"""The reference backend against `transformers`, an independent implementation, on small random models."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cpuspec.backends.numpy_backend import NumpyBackend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.checkpoint import is_matrix, tensor_shapes
from cpuspec.checkpoints.families import FAMILIES
from cpuspec.config import DeltaNet, RopeScaling
from cpuspec.evaluate.quality import compare_rows
from cpuspec.formats import QuantTensor, get_format
from cpuspec.settings import EngineConfig
from tests.backends.models import GEMMA4, MIXTURES, RECURRENT, computed, forward, in_chunks
from tools.make_tiny_model import make_tiny_hf, random_weights, tiny_config, write_gguf, write_huggingface

LLAMA3 = RopeScaling("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=128)
LONGROPE = RopeScaling(
    "longrope",
    original_context_length=128,
    attention_factor=1.2,
    factors=tuple(1.0 + i for i in range(24)),
    short_factors=(1.5,) * 24,
)
TEMPERED = RopeScaling("yarn", factor=4.0, original_context_length=64, attention_factor=1.0)
MODELS = {
    "qwen2 tied": {"architecture": "qwen2"},
    "qwen2 untied": {"architecture": "qwen2", "tied": False},
    "qwen2 many heads": {"architecture": "qwen2", "num_heads": 8, "num_kv_heads": 1, "head_dim": 32},
    "qwen3 tied": {"architecture": "qwen3", "head_dim": 32},
    "qwen3 untied": {"architecture": "qwen3", "tied": False},
    "llama tied": {"architecture": "llama"},
    "llama untied": {"architecture": "llama", "tied": False, "num_kv_heads": 4},
    "llama biases": {"architecture": "llama", "qkv_bias": True, "o_bias": True},
    "llama 3 rope": {"architecture": "llama", "rope_scaling": LLAMA3, "rope_base": 500000.0},
    "linear rope": {"architecture": "llama", "rope_scaling": RopeScaling("linear", factor=4.0)},
    "gemma3": {"architecture": "gemma3", "num_layers": 3, "rope_scaling": RopeScaling("linear", factor=8.0), "rope_base": 1e6},
    "gemma3 untied": {"architecture": "gemma3", "tied": False, "head_dim": 32, "query_scale": 48**-0.5},
    "gemma2": {"architecture": "gemma2", "num_layers": 3},
    "gemma2 without windows": {"architecture": "gemma2", "window": 4096, "num_kv_heads": 4},
    "mistral": {"architecture": "mistral", "tied": False},
    "mistral with windows": {"architecture": "mistral", "window": 11, "head_dim": 32},
    "smollm3": {"architecture": "smollm3", "num_layers": 5},
    "qwen2 with windows": {"architecture": "qwen2", "window": 9},
    "qwen3 with windows": {"architecture": "qwen3", "window": 30},
    **MIXTURES,
    **RECURRENT,
    "falcon-h1 with biases": {"architecture": "falcon-h1", "tied": False, "qkv_bias": True, "o_bias": True},
    **GEMMA4,
    "qwen3next with a dense layer": {**RECURRENT["qwen3next"], "num_layers": 5, "dense_layers": (0,)},
    "gpt-oss": {
        **{"architecture": "gpt-oss", "num_layers": 3, "tied": False, "rope_base": 150000.0},
        "rope_scaling": RopeScaling("yarn", 32.0, original_context_length=64, truncate=False),
    },
    "granite": {"architecture": "granite", "head_dim": 64},
    "olmo2": {"architecture": "olmo2", "tied": False},
    "seed_oss": {"architecture": "seed_oss", "head_dim": 32},
    "ernie4_5": {"architecture": "ernie4_5", "head_dim": 32},
    "phi3": {"architecture": "phi3", "tied": False},
    "phi3 with windows": {"architecture": "phi3", "window": 17, "num_kv_heads": 4},
    "phi4-mini, long": {"architecture": "phi3", "rope_dims": 48, "rope_scaling": LONGROPE},
    "phi4-mini, short": {"architecture": "phi3", "rope_dims": 48, "rope_scaling": replace(LONGROPE, original_context_length=512)},
    "ministral3": {"architecture": "ministral3", "rope_scaling": TEMPERED, "query_growth": 0.3},
    "qwen3vl": {"architecture": "qwen3vl", "head_dim": 64},
    "olmo3": {"architecture": "olmo3", "tied": False, "num_layers": 3, "rope_scaling": TEMPERED, "rope_base": 5e5},
    "starcoder2": {"architecture": "starcoder2"},
    "starcoder2 with windows": {"architecture": "starcoder2", "window": 17},
    "stablelm": {"architecture": "stablelm", "tied": False, "rope_dims": 16, "qkv_bias": True},
    "glm4": {"architecture": "glm4", "tied": False, "rope_dims": 32, "qkv_bias": True},
    "glm": {"architecture": "glm", "tied": False, "rope_dims": 32, "qkv_bias": True},
    "exaone4": {"architecture": "exaone4"},
    "exaone4 with windows": {"architecture": "exaone4", "window": 17, "num_layers": 3},
    "internlm2": {"architecture": "internlm2", "tied": False},
    "cohere": {"architecture": "cohere"},
    "cohere2": {"architecture": "cohere2", "num_layers": 3},
    "hunyuan": {"architecture": "hunyuan_v1_dense"},
    "gemma": {"architecture": "gemma"},
    "llama with biases everywhere": {"architecture": "llama", "qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "yarn rope": {"architecture": "qwen2", "rope_scaling": RopeScaling("yarn", factor=4.0, original_context_length=128)},
}
# transformers has no class for a family: the one that computes the same of the same weights, under other names.
TWINS = {"bailingmoe2": {"architecture": "glm4moe", "qk_norm": True}}
TOKENS = np.random.default_rng(0).integers(0, 384, 150).tolist()


def _values(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return {name: tensor.dequantize() for name, tensor in checkpoint.tensors.items()}


# Settings with which a model must compute something else: the comparison sees each of them.
WRONG: dict[str, list[dict]] = {
    "deepseek2": [{"query_scale": 0.112}, {"rope_base": 20000.0}, {"experts": {"groups_used": 4}}, {"experts": {"scale": 1.5}}],
    "deepseek_v2": [{"query_scale": 0.112}, {"experts": {"normalised": True}}, {"shared_size": 0}],
    "glm4_moe_lite": [{"experts": {"score": "softmax"}}, {"experts": {"shifted": False}}],
    "mistral4": [{"query_growth": 0.0}, {"rope_scaling": None}],
    "gemma4": [{"value_norm": False}, {"query_scale": None}, {"rope_scaling": None}, {"logit_softcap": 0.0}, {"layer_windows": ()}],
    "gemma4, E": [{"embedding_scale": 15.0}],
    "gemma4-moe": [{"experts": {"weighed": False}}, {"experts": {"normed_apart": False}}, {"experts": {"used": 2}}],
    "lfm2": [{"qk_norm": False}, {"rope_base": 20000.0}],
    "lfm2moe": [{"experts": {"score": "softmax"}}, {"experts": {"normalised": False}}, {"experts": {"shifted": False}}],
    "granitehybrid": [{"layer_ropes": ()}, {"residual_scale": 1.0}],
    "granitehybrid-moe": [{"shared_size": 0}],
    "mamba2": [{"recurrent": {"normed": False}}, {"recurrent": {"bias": False}}],
    "nemotron_h": [{"recurrent": {"least_step": 0.0}}, {"activation": "silu"}, {"layer_ropes": ()}],
    "nemotron_h_moe": [{"experts": {"scale": 1.5}}, {"shared_size": 0}],
    "falcon-h1": [{"beside": False}],
    "falcon-h1 with biases": [{"qkv_bias": False}, {"o_bias": False}],
    "falcon-h1 with norms": [{"recurrent": {"normed": False}}],
    "qwen35": [{"recurrent": DeltaNet(2, 64, 4, 64)}, {"rope_dims": 0}, {"gated_attention": False}],
    "qwen2 tied": [{"rope_base": 20000.0}],
    "gemma3": [
        {"rope_base": 2e6},
        {"local_rope_base": 20000.0},
        {"layer_windows": (9, 0, 9)},
        {"activation": "silu"},
        {"embedding_scale": 15.0},
    ],
    "gemma3 untied": [{"query_scale": None}],
    "gemma2": [{"attention_softcap": 0.0}, {"logit_softcap": 0.0}, {"layer_windows": ()}],
    "mistral with windows": [{"layer_windows": (11, 12)}],
    "smollm3": [{"layer_ropes": ()}],
    "qwen3moe": [{"experts": {"normalised": False}}, {"experts": {"used": 2}}, {"experts": {"scale": 1.01}}],
    "qwen2moe": [{"experts": {"normalised": True}}],
    "olmoe": [{"experts": {"normalised": True}}],
    "mixtral": [{"experts": {"normalised": False}}],
    "gpt-oss": [
        {"experts": {"score": "softmax"}},
        {"experts": {"bias": False}},
        {"activation": "silu"},
        {"layer_windows": ()},
        {"layer_windows": (0, 8, 0)},
        {"rope_scaling": RopeScaling("yarn", 32.0, original_context_length=64)},
        {"sinks": False},
    ],
    "granite": [{"embedding_scale": 1.0}, {"query_scale": None}, {"residual_scale": 1.0}, {"logit_scale": 1.0}],
    "granitemoeshared": [{"experts": {"normalised": False}}],
    "granitemoe": [{"residual_scale": 1.0}],
    "ernie4_5_moe": [{"experts": {"score": "sigmoid"}}, {"experts": {"normalised": False}}],
    "glm4moe": [{"experts": {"score": "softmax"}}, {"experts": {"scale": 2.6}}, {"experts": {"groups": 1}}, {"rope_dims": 0}],
    "glm4moe, not normalised": [{"experts": {"normalised": True}}],
    "bailingmoe2": [{"experts": {"groups_used": 3}}, {"rope_dims": 16}],
    "hunyuan-moe": [{"rotates_first": False}, {"experts": {"used": 3}}],
    "olmo2": [{"norm_eps": 1e-1}],
    "phi3 with windows": [{"layer_windows": ()}],
    "phi4-mini, long": [{"rope_dims": 0, "rope_scaling": None}, {"rope_scaling": replace(LONGROPE, original_context_length=512)}],
    "phi4-mini, short": [{"rope_scaling": LONGROPE}],
    "ministral3": [{"query_growth": 0.0}, {"query_growth_length": 63}, {"rope_scaling": replace(TEMPERED, attention_factor=None)}],
    "olmo3": [{"layer_ropes": ()}, {"layer_windows": ()}],
    "cohere": [{"norm_kind": "rms"}, {"logit_scale": 1.0}],
    **{"starcoder2": [{"activation": "silu"}], "glm4": [{"rope_dims": 0}], "stablelm": [{"norm_eps": 1e-1}]},
    **{"exaone4 with windows": [{"layer_ropes": ()}], "internlm2": [{"rope_base": 20000.0}]},
    **{"cohere2": [{"layer_ropes": ()}], "hunyuan": [{"rotates_first": False}], "gemma": [{"embedding_scale": 1.0}]},
}


def _meant(path: Path, name: str) -> tuple[Checkpoint, np.ndarray]:
    """A model, and transformers' logits of TOKENS."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Mistral4ForCausalLM

    directory = make_tiny_hf(path / "model", **MODELS[name])
    checkpoint = open_checkpoint(directory)
    family = FAMILIES[checkpoint.config.architecture]
    auto = AutoModelForImageTextToText if family.text_alike else AutoModelForCausalLM
    if family.architecture == "mistral4":  # of which the table of causal models knows nothing
        auto = Mistral4ForCausalLM
    oracle = make_tiny_hf(path / "twin", **{**MODELS[name], **TWINS[name]}) if name in TWINS else directory
    if checkpoint.config.architecture == "internlm2":  # whose code transformers does not have: a Llama of other names
        oracle = write_huggingface(
            directory.with_name("oracle"), replace(checkpoint.config, architecture="llama"), _values(checkpoint)
        )
    model = auto.from_pretrained(oracle, dtype=torch.float32).eval()
    with torch.no_grad():
        return checkpoint, model(torch.tensor([TOKENS])).logits[0].numpy()


def _difference(checkpoint: Checkpoint, wanted: np.ndarray, **changes: object) -> float:
    """changes: fields of the configuration that our model gets instead of the file's."""
    if "experts" in changes:
        changes["experts"] = replace(checkpoint.config.experts, **changes["experts"])
    if isinstance(recurrent := changes.get("recurrent"), dict):
        changes["recurrent"] = replace(checkpoint.config.recurrent, **recurrent)
    config = replace(checkpoint.config, **changes)
    checkpoint = replace(checkpoint, config=config, tensors={name: checkpoint.tensors[name] for name in tensor_shapes(config)})
    backend = NumpyBackend(checkpoint, EngineConfig(kv_format="f32"))
    got = forward(backend, backend.new_cache(1, 256), {0: TOKENS}).logits
    return float(np.abs(got - wanted).max())


def test_nemotron_h_has_an_output_of_its_own_whatever_its_settings_say_of_ties(tmp_path: Path) -> None:
    """Transformers ties nothing in it."""
    checkpoint, wanted = _meant(tmp_path, "nemotron_h_moe")
    settings = json.loads((checkpoint.path / "config.json").read_text())
    (checkpoint.path / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": True}))
    assert _difference(open_checkpoint(checkpoint.path), wanted) < 1e-4


@pytest.mark.parametrize("model", MODELS)
def test_logits_agree_to_1e_4_and_would_not_with_a_wrong_setting(tmp_path: Path, model: str) -> None:
    checkpoint, wanted = _meant(tmp_path, model)
    assert _difference(checkpoint, wanted) < 1e-4
    for wrong in WRONG.get(model, ()):
        assert _difference(checkpoint, wanted, **wrong) > 1e-3, wrong


# A model of each mixer and of each way in which files hold its matrices.
QUANTIZED: dict[str, dict] = {
    **{name: RECURRENT[name] for name in ("lfm2", "granitehybrid-moe", "mamba2", "falcon-h1")},
    "qwen35": {"architecture": "qwen35"},
    "qwen3next": {"architecture": "qwen3next", "shared_size": 128, "tied": False},
    "nemotron_h": {"architecture": "nemotron_h", "num_layers": 4, "tied": False},
}
TEXT = TOKENS[:100]
# By the rounding of activations: without experts 1e-3, and where a router chooses another expert for a row, much in that row.
MOST_KL = {False: 0.01, True: 0.1}


@pytest.mark.parametrize(
    ("model", "weight_format"), [*((name, "q8_0") for name in QUANTIZED), ("qwen35", "q4_k"), ("mamba2", "q4_k")]
)
def test_a_quantized_file_means_its_rounded_numbers(tmp_path: Path, model: str, weight_format: str) -> None:
    """And what numba computes differs by the rounding of activations alone."""
    import torch
    from transformers import AutoModelForCausalLM

    config = tiny_config(**QUANTIZED[model])
    weights = random_weights(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", config, weights, weight_format=weight_format))
    of_file = {name: tensor.format for name, tensor in checkpoint.tensors.items()}
    assert get_format(weight_format) in of_file.values()
    rounded = {
        name: QuantTensor.encode(of_file[name], values).dequantize() if is_matrix(name, values.shape) else values
        for name, values in weights.items()
    }
    twin = AutoModelForCausalLM.from_pretrained(write_huggingface(tmp_path / "twin", config, rounded), dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = twin(torch.tensor([TEXT])).logits[0].numpy()
    got = in_chunks(NumpyBackend(checkpoint, EngineConfig(kv_format="f32")), TEXT)
    assert np.abs(got - wanted).max() < 1e-4

    fast, following = computed("numba", checkpoint, TEXT), TEXT[1:]
    quality = compare_rows(wanted[:-1], fast[:-1], following)
    assert quality.kl_mean < MOST_KL[config.experts is not None]
    shifted = compare_rows(wanted[:-1], np.roll(fast, 1, axis=0)[:-1], following)  # what another model's rows would look like
    assert shifted.kl_mean > 5 * MOST_KL[True]
