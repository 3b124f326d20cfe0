"""Metadata of GGUF files as converters other than ours write it: read as it is meant, told, or refused by name.

Keys and values are those of published files; shapes are those of a small model, so that there are weights to open.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from cpuspec.checkpoints import open_checkpoint
from cpuspec.config import ModelConfig, RopeScaling
from tests.model_files import typed
from tools.make_tiny_model import make_tiny_gguf, tiny_config

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "vocab_size": 260}
LAYERS = {"gemma2": 4, "gemma3": 7, "smollm3": 4}  # where it is not 2

# Keys that llama.cpp's converter has written since 2023, and those that it writes besides today.
ALWAYS = {
    **{"context_length": 512, "embedding_length": 32, "feed_forward_length": 64, "attention.head_count": 2},
    **{"attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-6},
}
TODAY = {**ALWAYS, "attention.key_length": 16, "attention.value_length": 16, "rope.freq_base": 1e6}
LLAMA_2023 = {**ALWAYS, "rope.dimension_count": 16}
LLAMA = {**TODAY, "rope.dimension_count": 16, "vocab_size": 260}
OLLAMA_GEMMA = {
    **{key: value for key, value in ALWAYS.items() if not key.endswith("epsilon")},
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.sliding_window": 8,
}
OLLAMA_VISION = {
    **{"mm.tokens_per_image": 256, "vision.attention.head_count": 16, "vision.attention.layer_norm_epsilon": 1e-6},
    **{"vision.block_count": 27, "vision.embedding_length": 1152, "vision.feed_forward_length": 4304},
    **{"vision.image_size": 896, "vision.num_channels": 3, "vision.patch_size": 14},
}

GENERAL: dict[str, Any] = {
    **{"general.base_model.0.name": "Model", "general.base_model.count": 1, "general.basename": "Model"},
    **{"general.file_type": 15, "general.finetune": "Instruct", "general.languages": ["en"]},
    **{"general.license": "apache-2.0", "general.quantization_version": 2, "general.quantized_by": "Unsloth"},
    **{"general.repo_url": "unsloth", "general.size_label": "3B", "general.tags": ["unsloth", "text-generation"]},
    **{"general.type": "model", "quantize.imatrix.chunks_count": 125, "quantize.imatrix.dataset": "calibration.txt"},
    **{"quantize.imatrix.entries_count": 224, "quantize.imatrix.file": "model.imatrix"},
}
WINDOWS = (8,) * 5 + (0, 8)
LOCAL = ("local",) * 5 + ("global", "local")

# name -> architecture, keys under it, what ModelConfig has besides the shape.
READ: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama of August 2023": ("llama", {**LLAMA_2023, "tensor_data_layout": "Meta AI original pth"}, {}),
    "llama of 2023 with a longer context": (
        "llama",
        {**LLAMA_2023, "rope.scale_linear": 4.0},
        {"rope_scaling": RopeScaling("linear", 4.0)},
    ),
    "llama of 2024": ("llama", {**LLAMA_2023, "vocab_size": 260, "rope.freq_base": 1e6}, {"rope_base": 1e6}),
    "llama of 2024 without experts": ("llama", {**LLAMA, "expert_count": 0, "expert_used_count": 0}, {"rope_base": 1e6}),
    "llama of today": ("llama", {**LLAMA, "block_count": 2}, {"rope_base": 1e6}),
    "llama with arrays of equal values": (
        "llama",
        {**LLAMA, "feed_forward_length": [64, 64], "attention.head_count": [2, 2], "attention.head_count_kv": [1, 1]},
        {"rope_base": 1e6},
    ),
    "llama by Ollama": (
        "llama",
        {**LLAMA_2023, "attention.head_dim": 16, "rope.freq_base": 5e5, "attention.layer_norm_epsilon": 1e-5, "vocab_size": 260},
        {"rope_base": 5e5},
    ),
    "yarn of 2023": (
        "llama",
        {
            **LLAMA_2023,
            **{"rope.scaling.type": "yarn", "rope.scaling.factor": 16.0, "rope.scaling.original_context_length": 128},
            "rope.scaling.finetuned": True,
        },
        {"rope_scaling": RopeScaling("yarn", 16.0, original_context_length=128)},
    ),
    "qwen2 of 2024": ("qwen2", {**ALWAYS, "rope.freq_base": 1e6}, {"rope_base": 1e6}),
    "qwen2 of today, pooled by its last": ("qwen2", {**TODAY, "pooling_type": 3}, {"rope_base": 1e6}),
    "qwen2 with yarn": (
        "qwen2",
        {
            **ALWAYS,
            **{"rope.freq_base": 1e6, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            "rope.scaling.original_context_length": 128,
        },
        {"rope_base": 1e6, "rope_scaling": RopeScaling("yarn", 4.0, original_context_length=128)},
    ),
    "qwen3": ("qwen3", TODAY, {"rope_base": 1e6}),
    "qwen3 by Ollama with yarn": (
        "qwen3",
        {**TODAY, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
        {"rope_base": 1e6, "rope_scaling": RopeScaling("yarn", 4.0, original_context_length=512)},
    ),
    "mistral3": ("mistral3", {**LLAMA, "attention.temperature_scale": 0.0}, {"rope_base": 1e6}),
    "smollm3": ("smollm3", LLAMA, {"rope_base": 1e6}),
    "gemma2 of June 2024": (
        "gemma2",
        {**ALWAYS, "attention.key_length": 16, "attention.value_length": 16, "attn_logit_softcapping": 50.0},
        {"attention_softcap": 50.0, "logit_softcap": 30.0, "layer_windows": (4096, 0, 4096, 0)},
    ),
    "gemma2 of today": (
        "gemma2",
        {
            **{key: value for key, value in TODAY.items() if key != "rope.freq_base"},
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "attention.sliding_window": 8,
        },
        {"attention_softcap": 50.0, "logit_softcap": 30.0, "layer_windows": (8, 0, 8, 0)},
    ),
    "gemma3 of March 2025": (
        "gemma3",
        {**TODAY, "attention.sliding_window": 8, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        {"rope_base": 1e6, "layer_windows": WINDOWS, "layer_ropes": LOCAL, "rope_scaling": RopeScaling("linear", 8.0)},
    ),
    "gemma3 of today": (
        "gemma3",
        {**TODAY, "attention.sliding_window": 8, "rope.freq_base_swa": 2e4, "attention.key_length_swa": 16},
        {"rope_base": 1e6, "layer_windows": WINDOWS, "layer_ropes": LOCAL, "local_rope_base": 2e4},
    ),
    "gemma3 with windows as numbers": (
        "gemma3",
        {**TODAY, "attention.sliding_window": 8, "attention.sliding_window_pattern": [1, 1, 0, 1, 1, 0, 1]},
        {
            "rope_base": 1e6,
            "layer_windows": (8, 8, 0, 8, 8, 0, 8),
            "layer_ropes": ("local", "local", "global", "local", "local", "global", "local"),
        },
    ),
    **{
        f"gemma3 with a pattern of {period}": (
            "gemma3",
            {**TODAY, "attention.sliding_window": 8, "attention.sliding_window_pattern": period},
            {"rope_base": 1e6, "layer_windows": windows, "layer_ropes": tuple("local" if one else "global" for one in windows)},
        )
        for period, windows in ((3, (8, 8, 0, 8, 8, 0, 8)), (0, (8,) * 7))
    },
    "gemma3 without windows": ("gemma3", TODAY, {"rope_base": 1e6, "layer_windows": (), "layer_ropes": ()}),
    "gemma3 1B by Ollama": (
        "gemma3",
        {
            **OLLAMA_GEMMA,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.global.freq_base": 2e6,
            "rope.local.freq_base": 3e4,
        },
        {"rope_base": 2e6, "layer_windows": WINDOWS, "layer_ropes": LOCAL, "local_rope_base": 3e4},
    ),
    "gemma3 by Ollama with yarn": (
        "gemma3",
        {
            **OLLAMA_GEMMA,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 2e6,
            "rope.local.freq_base": 1e4,
            "attention.sliding_window_pattern": [True, False, True, False, True, False, True],
            **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
            **{"rope.scaling.extrapolation_factor": 1.0, "rope.scaling.beta_fast": 64.0, "rope.scaling.beta_slow": 1.0},
        },
        {
            "rope_base": 2e6,
            "layer_windows": (8, 0, 8, 0, 8, 0, 8),
            "layer_ropes": ("local", "global", "local", "global", "local", "global", "local"),
            "rope_scaling": RopeScaling("yarn", 4.0, original_context_length=128, beta_fast=64.0),
        },
    ),
    "gemma3 by Ollama that sees": (
        "gemma3",
        {**OLLAMA_GEMMA, **OLLAMA_VISION},
        {"rope_base": 1e6, "layer_windows": WINDOWS, "layer_ropes": LOCAL},
    ),
}


@pytest.fixture
def headed(tmp_path: Path, edited_gguf: Callable[..., Path]) -> Callable[..., Path]:
    """A small model of an architecture that has these keys under it and no others."""

    def make(architecture: str, keys: dict[str, Any], num_layers: int | None = None, **changes: Any) -> Path:
        family = {"mistral3": "mistral"}.get(architecture, architecture)
        layers = num_layers or LAYERS.get(architecture, 2)
        source = make_tiny_gguf(tmp_path / "source.gguf", family, weight_format="f32", num_layers=layers, **SHAPE)
        own = [key for key in gguf.GGUFReader(source).fields if key.startswith(f"{architecture}.")]
        header = {f"{architecture}.{key}": value for key, value in {"block_count": layers, **keys}.items()}
        return edited_gguf(source, drop=own, set={key: typed(value) for key, value in {**GENERAL, **header}.items()}, **changes)

    return make


def shaped(architecture: str, **settings: Any) -> ModelConfig:
    family = {"mistral3": "mistral"}.get(architecture, architecture)
    plain = tiny_config(family, num_layers=LAYERS.get(architecture, 2), **SHAPE)
    gemma = {} if not family.startswith("gemma") else {"attention_softcap": 0.0, "logit_softcap": 0.0}
    return replace(plain, **{**gemma, **settings})


@pytest.mark.parametrize("name", READ)
def test_a_header_gives_the_configuration_that_its_authors_mean_and_no_remark(headed: Callable[..., Path], name: str) -> None:
    architecture, keys, settings = READ[name]
    checkpoint = open_checkpoint(headed(architecture, keys))
    wanted = shaped(architecture, **settings)
    for field, value in vars(wanted).items():  # numbers in the file have 32 bits
        got = getattr(checkpoint.config, field)
        assert got == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), field
    assert checkpoint.remarks == ()


@pytest.mark.parametrize("num_layers", [26, 34])
def test_sizes_of_gemma_3_by_ollama_have_what_its_program_knows_of_them(headed: Callable[..., Path], num_layers: int) -> None:
    keys = {**OLLAMA_GEMMA, **OLLAMA_VISION, "final_logit_softcapping": 30.0}
    config = open_checkpoint(headed("gemma3", keys, num_layers)).config
    assert config.rope_scaling == (RopeScaling("linear", 8.0) if num_layers == 34 else None)
    assert config.logit_softcap == (0.0 if num_layers == 26 else 30.0)
    assert config.norm_eps == 1e-6


def test_any_other_unknown_key_of_the_architecture_is_told(headed: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(headed("qwen3", {**TODAY, "colour": 3, "norm_top_k_prob": False, "cheer": [1, 2]}))
    assert [remark.partition(": ")[2] for remark in checkpoint.remarks] == ["this version does not know cheer, colour; ignored"]


def test_parts_that_see_or_hear_are_passed_over_by_name(headed: Callable[..., Path]) -> None:
    images = {"v.patch_embd.weight": np.ones((4, 3, 2, 2), np.float32), "mm.input_projection.weight": np.ones((2, 4), np.float32)}
    checkpoint = open_checkpoint(headed("gemma3", {**OLLAMA_GEMMA, **OLLAMA_VISION}, tensors=images))
    (remark,) = checkpoint.remarks
    assert remark.endswith("2 tensors, as 'v.patch_embd.weight', are of a part that sees or hears; only text is read")


def test_text_for_people_that_is_no_utf_8_is_told(headed: Callable[..., Path]) -> None:
    path = headed("llama", LLAMA, num_layers=1)
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content.replace(b"Unsloth", b"Unsl\xf6th").replace(b"text-generation", b"te\xfft-generation", 1))
    remarks = [remark.partition(": ")[2] for remark in open_checkpoint(path).remarks]
    assert sorted(remarks) == [
        "1 strings of general.tags are not UTF-8",
        "general.quantized_by is not UTF-8; bytes that are no text are replaced",
    ]
