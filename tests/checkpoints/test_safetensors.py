import json
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file

from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.safetensors import read_safetensors
from cpuspec.config import RopeScaling
from cpuspec.errors import CheckpointError
from tests.checkpoints.conftest import TINIEST
from tests.model_files import few_bytes, join_safetensors, read_tensors, write_anew, write_tensors
from tools.make_tiny_model import make_tiny_hf, random_weights, tiny_config

SCALINGS = [
    None,
    RopeScaling("linear", 2.0),
    RopeScaling("llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=128),
    RopeScaling("yarn", 4.0, original_context_length=128, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5),
]


@pytest.fixture
def directory(tmp_path):
    """A one-layer Llama directory."""
    return make_tiny_hf(tmp_path / "hf", "llama", vocab_size=260, **TINIEST)


def safetensors_values(path):
    return {name: tensor.floats().dequantize() for name, tensor in read_safetensors(path).items()}


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_values_are_those_of_the_safetensors_package(tmp_path, dtype):
    directory = make_tiny_hf(tmp_path / "hf", dtype=dtype)
    tensors = open_checkpoint(directory).tensors
    assert tensors["layers.0.q"].format.name == dtype
    if dtype == "bf16":  # which numpy, and so that package's numpy reader, does not have
        wanted = random_weights(tiny_config())["layers.0.q"]
        assert np.abs(tensors["layers.0.q"].dequantize() - wanted).max() <= np.abs(wanted).max() * 2**-8
        return
    oracle = load_file(directory / "model.safetensors")
    assert np.array_equal(tensors["layers.0.q"].dequantize(), oracle["model.layers.0.self_attn.q_proj.weight"])
    assert np.array_equal(tensors["layers.1.mlp_norm"].dequantize(), oracle["model.layers.1.post_attention_layernorm.weight"])


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s.kind if s else "none")
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_what_transformers_writes_again_is_the_same_model(tmp_path, architecture, scaling):
    import torch
    from transformers import AutoModelForCausalLM

    directory = make_tiny_hf(tmp_path / "hf", architecture, rope_base=5e4, rope_scaling=scaling, tied=architecture == "qwen3")
    AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).save_pretrained(tmp_path / "again")
    again, wanted = open_checkpoint(tmp_path / "again"), open_checkpoint(directory)
    assert again.config == wanted.config
    assert (again.config.rope_base, again.config.rope_scaling) == (5e4, scaling)
    assert again.tensors.keys() == wanted.tensors.keys()
    assert all(np.array_equal(again.tensors[name].dequantize(), one.dequantize()) for name, one in wanted.tensors.items())


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_norm_weights_of_gemma_are_one_plus_the_files_exactly(tmp_path, dtype):
    directory = make_tiny_hf(tmp_path / "hf", "gemma3", dtype=dtype)
    raw = safetensors_values(directory / "model.safetensors")
    tensors = open_checkpoint(directory).tensors
    for ours, theirs in (("norm", "model.norm.weight"), ("layers.1.k_norm", "model.layers.1.self_attn.k_norm.weight")):
        assert tensors[ours].format.name == "f32"
        assert np.array_equal(tensors[ours].dequantize(), np.float32(1) + raw[theirs])
    assert tensors["layers.0.q"].format.name == dtype


def opens(directory) -> bool:
    try:
        checkpoint = open_checkpoint(directory)
    except CheckpointError as error:
        if str(directory) not in str(error):
            raise
        return False
    for tensor in checkpoint.tensors.values():
        tensor.dequantize()
    return True


def tensor(dtype="F32", shape=(2, 2), offsets=(0, 16)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[]", "a JSON list, wanted an object"),
        (b"{", "not sound JSON"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a":' * 50000, "not sound JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not sound JSON"),
        (b'{"a": {}, "a": {}}', "the key 'a' is repeated"),
        (b'{"\\u001b[2J": {}}', "printable"),
        ({"a": 1}, "a is 1, wanted an object"),
        ({"a": {}}, "dtype is absent"),
        ({"a": tensor("F4")}, "dtype is 'F4', wanted one of BOOL"),
        ({"a": tensor("I32")}, "I32 weights are not supported"),
        ({"a": tensor("F8_E4M3", (4, 4))}, "F8_E4M3 weights are not supported"),
        ({"a": tensor(shape=(2, -2))}, "integers that are not negative"),
        ({"a": tensor(shape=(1,) * 9)}, "up to 8"),
        ({"a": {"dtype": "F32", "shape": 4, "data_offsets": [0, 16]}}, "an array"),
        ({"a": tensor(shape=(1 << 40, 1 << 40))}, "bytes apart"),
        ({"a": tensor(shape=(2, 3))}, "24 bytes apart"),
        ({"a": tensor(offsets=(16, 0))}, "16 bytes apart"),
        ({"a": tensor(offsets=(1 << 40, (1 << 40) + 16))}, "within the 16 bytes"),
        ({"a": tensor(shape=(), offsets=(0, 4)), "b": tensor(shape=(3,), offsets=(4, 16))}, "wanted a vector, a matrix, or one of"),
        ({"a": tensor(shape=(0, 4), offsets=(0, 0)), "b": tensor()}, "wanted a vector, a matrix, or one of"),
        ({"a": tensor(), "b": tensor()}, "tensor b begins at data byte 0, wanted 16"),
        ({"a": tensor(shape=(2,), offsets=(0, 8))}, "tensors fill 8 bytes of data, the file has 16"),
        ({"a": tensor()}, "'a' belongs to a feature"),
    ],
)
def test_a_hostile_safetensors_header_is_a_clear_error(directory, header, message):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    write_anew(directory / "model.safetensors", join_safetensors(text, b"\0" * 16))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(directory)
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize("length", [9, 1 << 20, 100_000_001, 1 << 40, (1 << 64) - 1])
def test_a_lying_header_length_allocates_nothing(directory, length):
    write_anew(directory / "model.safetensors", struct.pack("<Q", length) + b"{}      ")
    with few_bytes(1 << 20), pytest.raises(CheckpointError, match=f"header is {length} bytes long, wanted at most 8"):
        open_checkpoint(directory)


@pytest.mark.parametrize(
    "name",
    ["../m.safetensors", "/etc/passwd", "a/b.safetensors", "..\\m.safetensors", ".m.safetensors", "m.bin", "", "m\0.safetensors"],
)
def test_a_shard_outside_the_directory_is_refused(tmp_path, name):
    directory = make_tiny_hf(tmp_path / "hf", num_shards=2)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = name
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"wanted the plain name of a \.safetensors file in the same directory"):
        open_checkpoint(directory)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_an_index_without_a_map_is_a_clear_error(tmp_path, weight_map):
    directory = make_tiny_hf(tmp_path / "hf", num_shards=2)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"weight_map is .*wanted an object"):
        open_checkpoint(directory)


def test_a_shard_that_is_missing_is_named(tmp_path):
    directory = make_tiny_hf(tmp_path / "hf", num_shards=2)
    (directory / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors does not exist"):
        open_checkpoint(directory)


def test_pickles_are_never_read(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickles, which can run code and are never read; convert"):
        open_checkpoint(directory)


def test_a_directory_without_weights_or_configuration_is_a_clear_error(directory, tmp_path):
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has none of model\.safetensors, model\.safetensors\.index\.json and"):
        open_checkpoint(directory)
    (directory / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        open_checkpoint(directory)


def test_a_tensor_that_would_go_unused_is_an_error(directory):
    path = directory / "model.safetensors"
    tensors = read_tensors(path)
    for name, opens_still in (("model.layers.0.self_attn.rotary_emb.inv_freq", True), ("model.layers.0.mlp.gate_proj.bias", False)):
        write_tensors(path, tensors | {name: ("F32", [4], bytes(16))})
        assert opens(directory) == opens_still
