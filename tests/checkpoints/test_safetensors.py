import json
import struct
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.families import FAMILIES, LEAST_SUM
from cpuspec.checkpoints.safetensors import read_safetensors
from cpuspec.config import ModelConfig, RopeScaling
from cpuspec.errors import CheckpointError
from tests.checkpoints.conftest import TINIEST
from tests.model_files import few_bytes, join_safetensors, read_tensors, write_anew, write_tensors
from tests.processes import make_pipe
from tools.make_tiny_model import make_tiny_gguf, make_tiny_hf, random_weights, tiny_config

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


def edit_config(directory, changes=(), drop=()):
    path = directory / "config.json"
    fields = {key: value for key, value in json.loads(path.read_text()).items() if key not in drop} | dict(changes)
    path.write_text(json.dumps(fields))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_configuration_and_values_come_back_as_written_in_either_container(tmp_path, architecture, tied):
    shape = {"hidden_size": 64, "num_heads": 4, "head_dim": 32, "num_layers": 4, "tied": tied}
    family = FAMILIES[architecture]
    if not family.latent:  # which has scalings of its own
        shape |= {"rope_scaling": None if family.single else SCALINGS[3] if tied else SCALINGS[1]}
    if architecture == "llama":
        shape |= {"qkv_bias": not tied, "o_bias": not tied}
    config = tiny_config(architecture, **shape)
    weights = random_weights(config, 5)
    experts = config.experts
    if experts and experts.score == "sigmoid":
        experts = replace(experts, least_sum=LEAST_SUM)  # llama.cpp's, which no key says
    directory = make_tiny_hf(tmp_path / "hf", architecture, num_shards=1 if tied else 3, seed=5, **shape)
    if shape.get("rope_scaling"):
        shape["rope_scaling"] = replace(shape["rope_scaling"], attention_factor=None)  # which llama.cpp computes
    file = make_tiny_gguf(tmp_path / "m.gguf", architecture, weight_format="f32", seed=5, **shape)
    scaling = config.rope_scaling if family.by_window or family.latent else shape["rope_scaling"]
    alike = family.latent or architecture == "gemma4_unified"  # GGUF files do not tell these families apart
    name = family.gguf_architecture if alike and family.gguf_architecture else architecture
    in_file = replace(config, architecture=name, experts=experts, rope_scaling=scaling, norm_eps=float(np.float32(config.norm_eps)))
    for path, wanted in ((directory, config), (file, in_file)):
        checkpoint = open_checkpoint(path)
        assert (checkpoint.config.query_scale or 0) == pytest.approx(
            wanted.query_scale or 0, rel=1e-6
        )  # files have its parts in f32
        assert replace(checkpoint.config, query_scale=wanted.query_scale) == wanted
        assert checkpoint.tensors.keys() == weights.keys()
        for name, values in weights.items():
            # Directories have the logarithms of these, and Falcon-H1's matrices without their factors.
            rtol = 1e-6 * (name.endswith(("delta_decay", "ssm_a")) or config.beside)
            np.testing.assert_allclose(checkpoint.tensors[name].dequantize(), values, rtol=rtol, atol=0, err_msg=name)


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
@pytest.mark.parametrize("architecture", ["Llama", "Qwen2", "Qwen3"])
def test_directories_written_by_transformers_open(tmp_path, architecture, scaling):
    import transformers

    rope: dict[str, object] = {"rope_type": "default", "rope_theta": 5e4}
    if scaling:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind != "linear":
            rope["original_max_position_embeddings"] = 128
        if scaling.kind == "llama3":
            rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        if scaling.kind == "yarn":
            rope |= {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5}
    settings = getattr(transformers, f"{architecture}Config")(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters=rope,
        tie_word_embeddings=architecture == "Qwen3",
    )
    model = getattr(transformers, f"{architecture}ForCausalLM")(settings)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == ModelConfig(
        architecture=architecture.lower(),
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        context_length=512,
        norm_eps=1e-5,
        rope_base=5e4,
        rope_scaling=scaling,
        qkv_bias=architecture == "Qwen2",
        qk_norm=architecture == "Qwen3",
        tied_embeddings=architecture == "Qwen3",
    )
    assert np.array_equal(checkpoint.tensors["embed"].dequantize(), model.model.embed_tokens.weight.detach().numpy())


def test_layers_of_qwen_from_max_window_layers_on_have_the_window(tmp_path):
    directory = make_tiny_hf(tmp_path / "hf", num_layers=3)
    window = {"use_sliding_window": True, "sliding_window": 4096}
    for changes, wanted in (
        ({"max_window_layers": 2}, (0, 0, 4096)),
        ({"max_window_layers": 28}, ()),
        ({"max_window_layers": 28, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}, (0, 4096, 0)),
    ):
        edit_config(directory, {**window, **changes})
        assert open_checkpoint(directory).config.layer_windows == wanted


@pytest.mark.parametrize(("window", "wanted"), [(7, (7, 7)), (None, ())])
def test_the_window_of_mistral_is_in_every_layer_or_null(tmp_path, window, wanted):
    directory = make_tiny_hf(tmp_path / "hf", "mistral", window=window)
    assert open_checkpoint(directory).config.layer_windows == wanted
    edit_config(directory, drop=["sliding_window"])
    assert open_checkpoint(directory).config.layer_windows == (4096, 4096)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"no_rope_layers": [0, 1, 1, 1, 0]}, ("none", "global", "global", "global", "none")),
        ({"no_rope_layers": None}, ("global", "global", "global", "none", "global")),
        ({"no_rope_layers": None, "no_rope_layer_interval": 2}, ("global", "none", "global", "none", "global")),
        ({"no_rope_layers": [1] * 5}, ()),
    ],
)
def test_layers_of_smollm3_have_the_positions_that_the_configuration_says(tmp_path, changes, wanted):
    directory = make_tiny_hf(tmp_path / "hf", "smollm3", num_layers=5)
    edit_config(directory, changes)
    assert open_checkpoint(directory).config.layer_ropes == wanted
    for bad in ({"no_rope_layers": [1, 0]}, {"no_rope_layers": [2] * 5}, {"no_rope_layers": None, "no_rope_layer_interval": 0}):
        edit_config(directory, bad)
        with pytest.raises(CheckpointError, match="no_rope_layer"):
            open_checkpoint(directory)


def test_old_and_new_configurations_of_gemma_3_are_read(tmp_path):
    """Older ones have a pattern and two bases, newer ones a list of layers and a rope for each kind of layer."""
    directory = make_tiny_hf(tmp_path / "hf", "gemma3", num_layers=3, rope_base=1e6, rope_scaling=RopeScaling("linear", 8.0))
    wanted = open_checkpoint(directory).config
    assert (wanted.rope_base, wanted.local_rope_base, wanted.rope_scaling) == (1e6, 1e4, RopeScaling("linear", 8.0))
    assert (wanted.layer_windows, wanted.layer_ropes) == ((8, 0, 8), ("local", "global", "local"))
    edit_config(directory, {"sliding_window_pattern": 2}, drop=["layer_types", "use_sliding_window", "rope_local_base_freq"])
    assert open_checkpoint(directory).config == wanted
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    edit_config(directory, {"rope_parameters": ropes}, drop=["rope_theta", "rope_scaling"])
    assert open_checkpoint(directory).config == wanted
    edit_config(directory, drop=["sliding_window_pattern"])  # 6, and so no layer of three is global
    assert open_checkpoint(directory).config.layer_ropes == ("local",) * 3
    for bad, message in (
        ({"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "default in layers with a window"),
    ):
        edit_config(directory, bad)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(directory)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_norm_weights_of_gemma_are_one_plus_the_files_exactly(tmp_path, dtype):
    directory = make_tiny_hf(tmp_path / "hf", "gemma3", dtype=dtype)
    raw = safetensors_values(directory / "model.safetensors")
    tensors = open_checkpoint(directory).tensors
    for ours, theirs in (("norm", "model.norm.weight"), ("layers.1.k_norm", "model.layers.1.self_attn.k_norm.weight")):
        assert tensors[ours].format.name == "f32"
        assert np.array_equal(tensors[ours].dequantize(), np.float32(1) + raw[theirs])
    assert tensors["layers.0.q"].format.name == dtype


def test_old_and_null_spellings_of_the_configuration_are_read(directory):
    edit_config(
        directory,
        {
            "rope_scaling": {"type": "linear", "factor": 2},
            "rope_theta": 500000,
            "head_dim": None,
            "quantization_config": None,
            "sliding_window": 4096,
            "use_sliding_window": False,
        },
        drop=["tie_word_embeddings", "hidden_act"],
    )
    with pytest.raises(CheckpointError, match=r"output .*missing"):
        open_checkpoint(directory)
    edit_config(directory, {"tie_word_embeddings": True})
    config = open_checkpoint(directory).config
    assert config.rope_scaling == RopeScaling("linear", 2.0)
    assert config.rope_base == 500000
    assert config.head_dim == 16


QWEN = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPTNeoXForCausalLM"]}, "GPTNeoXForCausalLM.*wanted one of LlamaForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "an array"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: bits is absent, wanted an integer"),
        ({"quantization_config": {"quant_method": "hqq"}}, "'hqq' are not supported by this version, which reads gptq, auto-round"),
        ({"quantization_config": {}}, "an unnamed method"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', wanted silu or gelu_pytorch_tanh"),
        ({"mlp_bias": True}, "gate_bias"),
        ({"layer_types": ["sliding_attention"]}, "layer_types is .*, wanted full_attention in every layer"),
        ({**QWEN, "layer_types": ["chunked_attention"]}, "full_attention or sliding_attention in every layer"),
        ({**QWEN, "sliding_window": -4, "max_window_layers": 0}, "layer_windows must be integers from 0"),
        ({"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window is True, wanted false; llama models have no"),
        ({"use_bidirectional_attention": True}, "not causal"),
        ({"query_pre_attn_scalar": 0}, "a number above 0"),
        ({"attn_logit_softcapping": -1}, "attention_softcap is -1.0, wanted a number from 0"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic', wanted default, linear, llama3, longrope or yarn"),
        ({"rope_scaling": {"type": "su"}}, "rope factors must be half of 16 dimensions, got 0 numbers"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is absent, wanted a finite number"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": 0}}, "yarn: beta_fast is 0.0, wanted"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}, "rope_theta": 1}, "rope_base is 1.0, wanted a number above 1"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor is absent"),
        ({"rope_scaling": [1]}, "rope_scaling is .*wanted an object"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4}}}, "one set of parameters for all layers"),
        ({"num_attention_heads": 0}, "at least 1"),
        ({"num_attention_heads": 3, "head_dim": None}, "divisor of hidden_size 32"),
        ({"num_hidden_layers": 2}, r"layers\.1\.attn_norm .*missing"),
        ({"num_hidden_layers": 10**400}, "num_layers"),
        ({"hidden_size": 64, "head_dim": 16}, "shape"),
        ({"hidden_size": "32"}, "hidden_size is '32', wanted an integer"),
        ({"rms_norm_eps": 10**4000}, "finite number"),
        ({"attention_bias": True}, "q_bias .*missing"),
    ],
)
def test_a_configuration_that_is_wrong_or_not_supported_names_the_field(directory, changes, message):
    edit_config(directory, changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(directory)
    assert str(directory) in str(caught.value)


@pytest.fixture(scope="module")
def shared_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("shared")
    make_tiny_hf(directory, **TINIEST)
    return directory, (directory / "config.json").read_text(), (directory / "model.safetensors").read_bytes()


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


def test_a_file_that_ends_early_is_a_clear_error_wherever_it_ends(shared_directory):
    directory, config, content = shared_directory
    (directory / "config.json").write_text(config)
    length = int.from_bytes(content[:8], "little")
    for end in [*range(0, 9), *range(9, 8 + length, 41), 8 + length, len(content) // 2, len(content) - 1]:
        write_anew(directory / "model.safetensors", content[:end])
        assert not opens(directory), end
    write_anew(directory / "model.safetensors", content + b"\0")
    assert not opens(directory)


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


def test_shards_may_be_links_to_a_store_of_files(tmp_path):
    directory = make_tiny_hf(tmp_path / "hf", num_shards=2)
    for shard in directory.glob("*.safetensors"):
        blob = tmp_path / f"blob-{shard.stem}"
        shard.rename(blob)
        shard.symlink_to(blob)
    assert opens(directory)


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
    make_pipe(directory / "config.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(directory)
    (directory / "config.json").unlink()
    (directory / "config.json").write_bytes(b" " * (2 << 20))
    with pytest.raises(CheckpointError, match="wanted at most"):
        open_checkpoint(directory)


def test_a_tensor_that_would_go_unused_is_an_error(directory):
    path = directory / "model.safetensors"
    tensors = read_tensors(path)
    for name, opens_still in (("model.layers.0.self_attn.rotary_emb.inv_freq", True), ("model.layers.0.mlp.gate_proj.bias", False)):
        write_tensors(path, tensors | {name: ("F32", [4], bytes(16))})
        assert opens(directory) == opens_still
