"""The reference backend against `transformers`, an independent implementation, on small random models."""

from pathlib import Path

import numpy as np
import pytest

from cpuspec.backends.numpy_backend import NumpyBackend
from cpuspec.checkpoints import open_checkpoint
from cpuspec.config import EngineConfig, RopeScaling
from tests.backends.models import forward
from tools.make_tiny_model import make_tiny_gguf, make_tiny_hf

LLAMA3 = RopeScaling("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=128)
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
    "yarn rope": {"architecture": "qwen2", "rope_scaling": RopeScaling("yarn", factor=4.0, original_context_length=128)},
}
TOKENS = np.random.default_rng(0).integers(0, 384, 200).tolist()


def _difference(directory: Path, rope_base: float | None = None) -> float:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits[0].numpy()
    backend = NumpyBackend(open_checkpoint(directory), EngineConfig(kv_format="f32"))
    if rope_base is not None:
        object.__setattr__(backend.config, "rope_base", rope_base)
    got = forward(backend, backend.new_cache(1, 256), {0: TOKENS}).logits
    return float(np.abs(got - wanted).max())


@pytest.mark.parametrize("model", MODELS)
def test_logits_agree_to_1e_4(tmp_path: Path, model: str) -> None:
    assert _difference(make_tiny_hf(tmp_path / "model", **MODELS[model])) < 1e-4


def test_the_comparison_would_see_a_wrong_rotation(tmp_path: Path) -> None:
    assert _difference(make_tiny_hf(tmp_path / "model"), rope_base=20000.0) > 1e-2


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_means_what_the_directory_means(tmp_path: Path, architecture: str) -> None:
    """The same weights in the two containers: llama files hold their query and key rows in another order."""
    logits = []
    for path in (
        make_tiny_hf(tmp_path / "hf", architecture=architecture),
        make_tiny_gguf(tmp_path / "tiny.gguf", architecture=architecture, weight_format="f32"),
    ):
        backend = NumpyBackend(open_checkpoint(path), EngineConfig(kv_format="f32"))
        logits.append(forward(backend, backend.new_cache(1, 64), {0: TOKENS[:30]}).logits)
    assert np.array_equal(*logits)
