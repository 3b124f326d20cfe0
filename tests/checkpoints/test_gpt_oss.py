"""gpt-oss out of its files: mxfp4 in both orders of nibbles, clamped gates in every backend, and what is written of it."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cpuspec.backends import make_backend
from cpuspec.backends.numpy_backend import NumpyBackend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.config import RopeScaling
from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.quantize.gguf_output import gguf_name
from cpuspec.quantize.imatrix import collect
from cpuspec.quantize.job import Job, quantize
from cpuspec.quantize.weights import Weights
from cpuspec.settings import EngineConfig
from tests.backends.models import every_backend, forward
from tools.make_tiny_model import make_tiny_gguf, make_tiny_hf

TOKENS = np.random.default_rng(0).integers(0, 300, 200).tolist()
YARN = RopeScaling("yarn", 32.0, original_context_length=64, truncate=False)


def logits(backend, size: int = 200) -> np.ndarray:
    cache = backend.new_cache(1, 256)
    return np.concatenate([forward(backend, cache, {0: TOKENS[i : i + size]}).logits for i in range(0, len(TOKENS), size)])


def reference(checkpoint: Checkpoint) -> np.ndarray:
    return logits(NumpyBackend(checkpoint, EngineConfig(kv_format="f32"), np.float64))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(
        make_tiny_gguf(tmp_path_factory.mktemp("model") / "f32.gguf", "gpt-oss", weight_format="f32", tied=False)
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_hf(tmp_path_factory.mktemp("plain") / "hf", "gpt-oss", tied=False, rope_scaling=YARN, context_length=256)


def packed(source: Path, directory: Path, **shape: dict[str, tuple[int, ...]]) -> Path:
    """The directory with random experts in mxfp4, as gpt-oss is published. shape: of tensors that are damaged, by name."""
    directory.mkdir()
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    tensors, rng = load_file(source / "model.safetensors"), np.random.default_rng(3)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (count, rows, columns // 32, 16)).astype(np.uint8)
        tensors[f"{name}_scales"] = rng.integers(120, 124, (count, rows, columns // 32)).astype(np.uint8)
    for name, dims in shape.get("damaged", {}).items():
        tensors[name] = np.resize(tensors[name], dims)
    save_file(tensors, directory / "model.safetensors")
    return directory


@every_backend(("numba", "torch"))
def test_backends_agree_and_prompts_have_the_bits_of_decoding(model: Checkpoint, name: str) -> None:
    """Gates and what they gate reach beyond the limit, so that clamping counts."""
    wanted, backend = reference(model), make_backend(name, model, EngineConfig(threads=2, max_rows=200, kv_format="f32"))
    together = logits(backend)
    assert np.abs(together - wanted).max() < 1e-4
    for size in (1, 7, 64):
        assert name != "numba" or np.array_equal(logits(backend, size), together)
    backend.close()


def test_each_layer_gives_what_transformers_gives(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    directory = make_tiny_hf(tmp_path / "hf", "gpt-oss", num_layers=4, tied=False, rope_scaling=YARN)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states[1:4]  # the last comes behind a norm
    backend = NumpyBackend(open_checkpoint(directory), EngineConfig(kv_format="f32"))
    found = forward(backend, backend.new_cache(1, 256), {0: TOKENS}, hidden_layers=(0, 1, 2)).hidden
    for got, states in zip(found, wanted, strict=True):
        assert np.abs(got - states[0].numpy()).max() < 1e-4


def test_mxfp4_experts_have_the_values_that_transformers_gives_them(plain: Path, tmp_path: Path) -> None:
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    checkpoint, stored = open_checkpoint(packed(plain, tmp_path / "hf")), load_file(tmp_path / "hf" / "model.safetensors")
    assert checkpoint.quantization == "mxfp4"
    assert checkpoint.config.rope_scaling == YARN
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts."
        both, down = (
            convert_moe_packed_tensors(
                torch.from_numpy(stored[f"{experts}{part}_blocks"]), torch.from_numpy(stored[f"{experts}{part}_scales"]),
                dtype=torch.float32,
            ).numpy().swapaxes(1, 2)
            for part in ("gate_up_proj", "down_proj")
        )  # fmt: skip
        for part, wanted in (("gate", both[:, 0::2]), ("up", both[:, 1::2]), ("down", down)):
            tensor = checkpoint.tensors[f"layers.{layer}.expert_{part}"]
            assert tensor.format.name == "mxfp4"
            assert np.array_equal(tensor.dequantize(), wanted)
        bias = stored[f"{experts}gate_up_proj_bias"]
        assert np.array_equal(checkpoint.tensors[f"layers.{layer}.expert_up_bias"].dequantize(), bias[:, 1::2])


@pytest.mark.parametrize(
    ("part", "dims", "message"),
    [
        ("down_proj_scales", (8, 256, 3), "wanted 16 bytes and a scale for 32 inputs"),
        ("down_proj_blocks", (8, 256, 4, 8), "wanted 16 bytes and a scale for 32 inputs"),
        ("gate_up_proj_blocks", (8, 256, 128), "of 4 dimensions"),
        ("gate_up_proj_bias", (8, 255), "wanted those of its parts"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(plain: Path, tmp_path: Path, part: str, dims: tuple[int, ...], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(packed(plain, tmp_path / "hf", damaged={f"model.layers.1.mlp.experts.{part}": dims}))


@pytest.mark.parametrize(("key", "value"), [("swiglu_limit", 6.0), ("swiglu_alpha", 1.0)])
def test_another_clamp_is_refused_by_name(plain: Path, tmp_path: Path, key: str, value: float) -> None:
    path = packed(plain, tmp_path / "hf") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(CheckpointError, match=f"{key} is {value}, wanted"):
        open_checkpoint(tmp_path / "hf")


def test_a_directory_in_mxfp4_becomes_a_gguf_file_of_the_same_model(plain: Path, tmp_path: Path) -> None:
    """Experts keep their values, in the other order of nibbles, and YaRN its ramp, which no key of llama.cpp's says."""
    source = open_checkpoint(packed(plain, tmp_path / "hf"))
    quantize(
        source, tmp_path / "out.gguf", Job("mxfp4", output="f32", embed="f32", tensor_types=((r"\.[qkvo]$", "f32"),)), threads=1
    )
    again = open_checkpoint(tmp_path / "out.gguf")
    assert (again.config.rope_scaling, again.config.layer_windows) == (YARN, source.config.layer_windows)
    for name in ("layers.0.expert_gate", "layers.1.expert_down"):
        assert again.tensors[name].format.name == "mxfp4"
        assert np.array_equal(again.tensors[name].dequantize(), source.tensors[name].dequantize())
    assert np.abs(reference(again) - reference(source)).max() < 1e-4
    quantize(again, tmp_path / "mixed.gguf", Job("mxfp4"), threads=1)
    mixed = open_checkpoint(tmp_path / "mixed.gguf").tensors
    assert (mixed["layers.0.q"].format.name, mixed["layers.0.expert_up"].format.name) == ("q8_0", "mxfp4")
    with pytest.raises(ConfigError, match="is a mixture of experts, which is written as a GGUF file only"):
        quantize(open_checkpoint(plain), tmp_path / "directory", Job("w4a16"), threads=1)


def test_inputs_of_experts_are_measured_under_their_names_in_files(model: Checkpoint) -> None:
    found = collect(Weights(model), np.array([TOKENS[:64]], np.int32), lambda name: gguf_name(model.config, name)).means
    assert {name for name in found if name.startswith("blk.0.") and "_exps" in name} == {
        f"blk.0.ffn_{part}_exps.weight" for part in ("gate", "up", "down")
    }
