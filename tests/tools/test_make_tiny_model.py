import math

import numpy as np

from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.checkpoint import tensor_shapes
from tools.make_tiny_model import SHAPES, tiny_config, write_random_gguf


def test_random_models_are_written_tensor_by_tensor_with_sane_values(tmp_path):
    config = tiny_config("llama", vocab_size=512)
    path = write_random_gguf(tmp_path / "m.gguf", config, weight_format="q4_k", output_format="q6_k")
    checkpoint = open_checkpoint(path)
    assert not checkpoint.config.tied_embeddings
    assert checkpoint.tensors["output"].format.name == "q6_k"
    assert checkpoint.tensors["layers.1.gate"].format.name == "q4_k"
    assert abs(checkpoint.tensors["layers.1.gate"].dequantize().std() * np.sqrt(256) - 1) < 0.1
    assert abs(checkpoint.tensors["norm"].dequantize().mean() - 1) < 0.1


def test_known_shapes_have_the_parameters_of_their_names():
    millions = {
        **{"smollm2-135m": 134.5, "qwen2.5-0.5b": 494, "qwen2.5-1.5b": 1544, "qwen2.5-7b": 7616, "qwen3-0.6b": 596},
        **{"qwen3-1.7b": 1721, "qwen3-30b-a3b": 30532, "gpt-oss-20b": 20915, "qwen3.5-4b": 4206, "qwen3.5-35b-a3b": 34661},
        **{"lfm2.5-1.2b": 1170.3, "gemma4-e4b": 7463, "gemma4-26b-a4b": 25233, "deepseek-v2-lite": 15706},
        "glm-4.7-flash": 29943,
    }
    for name, config in SHAPES.items():
        count = sum(math.prod(shape) for shape in tensor_shapes(config).values())
        assert abs(count / 1e6 / millions[name] - 1) < 0.002, name
