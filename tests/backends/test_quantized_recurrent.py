"""Quantized files of models with recurrent layers: their matrices mean what transformers computes with the same rounded numbers.

What `numba` computes then differs by the rounding of activations alone.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuspec.backends.numpy_backend import NumpyBackend
from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.checkpoint import is_matrix
from cpuspec.evaluate.quality import compare_rows
from cpuspec.formats import QuantTensor, get_format
from cpuspec.settings import EngineConfig
from tests.backends.models import RECURRENT, computed, in_chunks
from tools.make_tiny_model import random_weights, tiny_config, write_gguf, write_huggingface

# A model of each mixer and of each way in which files hold its matrices.
MODELS: dict[str, dict[str, Any]] = {
    **{name: RECURRENT[name] for name in ("lfm2", "granitehybrid-moe", "mamba2", "falcon-h1")},
    "qwen35": {"architecture": "qwen35"},
    "qwen3next": {"architecture": "qwen3next", "shared_size": 128, "tied": False},
    "nemotron_h": {"architecture": "nemotron_h", "num_layers": 4, "tied": False},
}
TOKENS = np.random.default_rng(0).integers(0, 384, 100).tolist()
# By the rounding of activations: without experts 1e-3, and where a router chooses another expert for a row, much in that row.
MOST_KL = {False: 0.01, True: 0.1}


@pytest.mark.parametrize(("model", "weight_format"), [*((name, "q8_0") for name in MODELS), ("qwen35", "q4_k"), ("mamba2", "q4_k")])
def test_a_quantized_file_means_its_rounded_numbers(tmp_path: Path, model: str, weight_format: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    config = tiny_config(**MODELS[model])
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
        wanted = twin(torch.tensor([TOKENS])).logits[0].numpy()
    got = in_chunks(NumpyBackend(checkpoint, EngineConfig(kv_format="f32")), TOKENS)
    assert np.abs(got - wanted).max() < 1e-4

    fast, following = computed("numba", checkpoint, TOKENS), TOKENS[1:]
    quality = compare_rows(wanted[:-1], fast[:-1], following)
    assert quality.kl_mean < MOST_KL[config.experts is not None]
    shifted = compare_rows(wanted[:-1], np.roll(fast, 1, axis=0)[:-1], following)  # what another model's rows would look like
    assert shifted.kl_mean > 5 * MOST_KL[True]
