import math
from dataclasses import replace

import gguf
import numpy as np
import pytest

from cpuspec.checkpoints import GgufVocabulary, open_checkpoint
from cpuspec.checkpoints.checkpoint import norm_sha256
from cpuspec.checkpoints.gguf_file import GGUF_FORMATS
from cpuspec.config import RopeScaling
from cpuspec.errors import CheckpointError
from cpuspec.formats import QuantTensor, get_format
from tests.model_files import copy_gguf, typed
from tools.make_tiny_model import make_tiny_gguf, make_tiny_hf, make_vocabulary, random_weights, tiny_config

T = gguf.GGUFValueType


@pytest.mark.parametrize("format", [name for name in GGUF_FORMATS if name not in ("q1_0", "q2_0")])  # `test_formats` has these
def test_every_tensor_type_has_the_values_that_the_gguf_package_reads(tmp_path, format):
    path = make_tiny_gguf(tmp_path / "m.gguf", "qwen2", weight_format=format, num_layers=1, intermediate_size=256)
    tensors = open_checkpoint(path).tensors
    names = {"token_embd.weight": "embed", "blk.0.attn_q.weight": "layers.0.q", "blk.0.ffn_down.weight": "layers.0.down"}
    oracle = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors if t.name in names}
    for theirs, ours in names.items():
        assert tensors[ours].format.name == format
        assert np.array_equal(tensors[ours].dequantize(), oracle[theirs])


def _in_nvfp4(path, tensors):
    """The tiny model in nvfp4 with more tensors."""
    source = make_tiny_gguf(path.with_name("source.gguf"), "qwen2", weight_format="nvfp4")
    return copy_gguf(source, path, tensors={name: np.array(values, np.float32) for name, values in tensors.items()})


def test_the_scale_of_a_whole_tensor_multiplies_its_values(tmp_path):
    scale = np.float32(0.0123)
    path = _in_nvfp4(tmp_path / "m.gguf", {"blk.0.attn_q.scale": [scale], "blk.0.attn_q.input_scale": [3.0]})
    tensors, plain = open_checkpoint(path).tensors, open_checkpoint(tmp_path / "source.gguf").tensors
    assert tensors.keys() == plain.keys()
    assert tensors["layers.0.q"].format.name == "nvfp4_global"
    assert np.allclose(tensors["layers.0.q"].dequantize(), scale * plain["layers.0.q"].dequantize(), rtol=3e-7, atol=0)
    assert np.array_equal(tensors["layers.0.k"].data, plain["layers.0.k"].data)


def test_a_mixtral_of_2023_has_a_tensor_for_each_expert(tmp_path):
    source = make_tiny_gguf(tmp_path / "source.gguf", "mixtral", weight_format="q8_0", num_experts=4)
    apart, joined = {}, {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors if "_exps" in tensor.name}
    for name, tensor in joined.items():
        for i, matrix in enumerate(tensor.data):
            apart[name.replace("_exps.", f".{i}.")] = (np.array(matrix), tensor.tensor_type)
    drop = ["llama.expert_feed_forward_length"]
    found = open_checkpoint(copy_gguf(source, tmp_path / "m.gguf", drop=drop, tensors=apart, drop_tensors=[*joined]))
    usual = open_checkpoint(source)
    assert found.config == usual.config
    for name in ("layers.0.expert_gate", "layers.1.expert_down", "layers.1.expert_up"):
        assert np.array_equal(found.tensors[name].dequantize(), usual.tensors[name].dequantize())


@pytest.mark.parametrize("ending", ["scale", "weight.scale"])
def test_each_expert_in_nvfp4_has_a_scale_of_its_own(tmp_path, ending):
    source = make_tiny_gguf(tmp_path / "source.gguf", "qwen3moe", weight_format="nvfp4", num_experts=4)
    scales = np.array([0.01, 0.5, 1.0, 3.0], np.float32)
    extra = {f"blk.0.ffn_down_exps.{ending}": scales, "blk.0.ffn_up_exps.input_scale": scales}
    tensors, plain = open_checkpoint(copy_gguf(source, tmp_path / "m.gguf", tensors=extra)).tensors, open_checkpoint(source).tensors
    wanted = plain["layers.0.expert_down"].dequantize() * scales[:, None, None]
    assert np.allclose(tensors["layers.0.expert_down"].dequantize(), wanted, rtol=3e-7, atol=0)
    assert np.array_equal(tensors["layers.0.expert_up"].data, plain["layers.0.expert_up"].data)
    extra = {"blk.0.ffn_down_exps.scale": scales[:3]}
    with pytest.raises(CheckpointError, match="wanted one positive number, or one for each of 4 experts"):
        open_checkpoint(copy_gguf(source, tmp_path / "x.gguf", tensors=extra))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.0.attn_q.scale": [1.0, 2.0]}, "wanted one positive number"),
        ({"blk.0.attn_q.scale": [np.nan]}, "wanted one positive number"),
        ({"blk.0.attn_norm.scale": [2.0]}, "scales one of f32; wanted nvfp4"),
        ({"blk.0.attn_z.scale": [2.0]}, "belongs to a feature this version does not compute"),
    ],
)
def test_a_scale_that_would_be_lost_is_refused(tmp_path, tensors, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(_in_nvfp4(tmp_path / "m.gguf", tensors))


@pytest.mark.parametrize("format", ["q4_0", "q6_k", "bf16"])
def test_llama_rows_are_unpermuted_without_touching_their_bytes(tmp_path, format):
    config = tiny_config("llama", qkv_bias=True)
    path = make_tiny_gguf(tmp_path / "m.gguf", "llama", weight_format=format, qkv_bias=True)
    tensors = open_checkpoint(path).tensors
    weights = random_weights(config)
    for name in ("layers.0.q", "layers.1.k", "layers.0.v"):
        assert np.array_equal(tensors[name].data, QuantTensor.encode(get_format(format), weights[name]).data)
    assert np.array_equal(tensors["layers.0.k_bias"].dequantize(), weights["layers.0.k_bias"])
    stored = {t.name: t.data for t in gguf.GGUFReader(path).tensors}
    for name, heads in (("q", 4), ("k", 2)):  # llama.cpp's converter (conversion/llama.py, `permute`)
        values = weights[f"layers.0.{name}"]
        permuted = values.reshape(heads, 2, len(values) // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
        wanted = QuantTensor.encode(get_format(format), permuted).data
        assert np.array_equal(stored[f"blk.0.attn_{name}.weight"].view(np.uint8), wanted)
        assert not np.array_equal(wanted, tensors[f"layers.0.{name}"].data)


def test_llama3_scaling_arrives_as_explicit_factors(tmp_path):
    scaling = RopeScaling("llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=128)
    # What each frequency is divided by (Llama 3.1's reference code).
    turns = 128 / (2 * np.pi * 1e4 ** (np.arange(32) / 32))
    smooth = np.clip((turns - 1) / 3, 0, 1)
    read = open_checkpoint(make_tiny_gguf(tmp_path / "m.gguf", "llama", rope_scaling=scaling)).config.rope_scaling
    assert read.kind == "factors"
    assert np.allclose(read.factors, 1 / ((1 - smooth) / 8 + smooth), rtol=1e-6)
    assert min(read.factors) == 1.0
    assert max(read.factors) == 8.0


def test_weights_stay_in_the_mapped_file_until_used(tmp_path):
    path = make_tiny_gguf(tmp_path / "m.gguf")
    data = open_checkpoint(path).tensors["layers.0.gate"].data
    assert not data.flags.writeable
    assert not data.flags.owndata
    content = path.read_bytes()
    assert data.tobytes() in content


def test_a_checkpoint_outlives_its_path(tmp_path):
    path = make_tiny_gguf(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(path)
    before = checkpoint.tensors["layers.0.gate"].dequantize()
    path.unlink()
    assert np.array_equal(checkpoint.tensors["layers.0.gate"].dequantize(), before)


def test_the_vocabulary_is_read_whole(tmp_path):
    vocabulary = open_checkpoint(make_tiny_gguf(tmp_path / "m.gguf")).vocabulary
    wanted = make_vocabulary(384)
    assert isinstance(vocabulary, GgufVocabulary)
    assert (vocabulary.model, vocabulary.pre) == ("gpt2", "qwen2")
    assert vocabulary == replace(wanted, add_bos=False, add_eos=False, add_space_prefix=False)
    assert vocabulary.tokens[vocabulary.eos_id] == "<|im_end|>"
    assert vocabulary.tokens[vocabulary.bos_id] == vocabulary.tokens[vocabulary.pad_id] == "<|endoftext|>"


def test_a_sentencepiece_vocabulary_has_scores_and_its_own_defaults(small_gguf, edited_gguf):
    scores = [float(-i) for i in range(260)]
    own = {"tokenizer.ggml.model": ("llama", T.STRING), "tokenizer.ggml.scores": (scores, T.ARRAY)}
    drop = [f"tokenizer.ggml.{key}" for key in ("merges", "add_bos_token", "add_space_prefix", "token_type", "pre")]
    vocabulary = open_checkpoint(edited_gguf(small_gguf("llama"), set=own, drop=[*drop, "tokenizer.chat_template"])).vocabulary
    assert vocabulary.scores == tuple(scores)
    assert (vocabulary.add_bos, vocabulary.add_space_prefix) == (None, None)  # the tokenizer has the defaults
    assert vocabulary.merges == ()
    assert vocabulary.pre == ""
    assert not vocabulary.chat_templates
    assert vocabulary.token_types == (1,) * 260


def test_optional_metadata_has_the_format_s_defaults(small_gguf, edited_gguf):
    keys = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base")
    zeros = {f"blk.0.attn_{part}.weight": np.zeros((32, 32), np.float32) for part in "kv"}
    zeros |= {f"blk.0.attn_{part}.bias": np.zeros(32, np.float32) for part in "kv"}
    path = edited_gguf(small_gguf("qwen2"), drop=[*(f"qwen2.{key}" for key in keys), "general.name", "general.type"], tensors=zeros)
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    assert (config.num_kv_heads, config.head_dim, config.rope_base) == (2, 16, 10000.0)
    assert checkpoint.name == "edited"


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"type": "none", "factor": 4.0}, None),
        ({"type": "linear"}, None),
        ({"factor": 4.0}, RopeScaling("linear", 4.0)),
        ({"type": "yarn", "factor": 4.0}, RopeScaling("yarn", 4.0, original_context_length=512)),
        (
            {"type": "yarn", "factor": 1.0, "attn_factor": 0.5},
            RopeScaling("yarn", 1.0, original_context_length=512, attention_factor=0.5),
        ),
    ],
)
def test_rope_scaling_is_read_as_the_file_means_it(small_gguf, edited_gguf, changes, wanted):
    path = edited_gguf(small_gguf("qwen2"), set={f"qwen2.rope.scaling.{key}": typed(value) for key, value in changes.items()})
    assert open_checkpoint(path).config.rope_scaling == wanted


def test_a_yarn_factor_that_a_converter_copied_counts_once(small_gguf, edited_gguf):
    """llama.cpp's converter of OLMo 3 writes all of config.json's attention_factor where its loader expects a factor beside it."""
    own, keys = 0.1 * math.log(8) + 1, {"rope.scaling.type": ("yarn", T.STRING), "rope.scaling.factor": (8.0, T.FLOAT32)}
    found = {}
    for factor in (None, 1.0, own, 0.5):
        key = {} if factor is None else {"rope.scaling.attn_factor": (factor, T.FLOAT32)}
        path = edited_gguf(small_gguf("olmo2"), set={f"olmo2.{name}": value for name, value in {**keys, **key}.items()})
        checkpoint = open_checkpoint(path)
        found[factor] = checkpoint.config.rope_scaling.attention_factor
        assert any("counts once" in remark for remark in checkpoint.remarks) == (factor == own), factor
    assert [found[factor] for factor in (None, 1.0, own)] == [None] * 3
    assert math.isclose(found[0.5], 0.5 * own)


def test_a_granite_without_a_scale_of_logits_is_read_with_a_remark(small_gguf, edited_gguf):
    path = small_gguf("granite")
    assert not open_checkpoint(path).remarks
    (remark,) = open_checkpoint(edited_gguf(path, drop=["granite.logit_scale"])).remarks
    assert "has no logit_scale" in remark


WINDOW, YARN = {"attention.sliding_window": 4}, {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen2", {"expert_count": 8}, "computes qwen2 models without experts alone"),
        ("qwen2", {"attention.sliding_window": 128}, "this architecture has no windows"),
        ("qwen2", {"attention.sliding_window": -5, "attention.sliding_window_pattern": 2}, "layer_windows"),
        ("qwen2", {**WINDOW, "attention.sliding_window_pattern": [True, False]}, "array of 1 numbers"),
        ("qwen2", {**WINDOW, "attention.sliding_window_pattern": [2]}, "true or false for each of 1 layers"),
        ("qwen2", {**WINDOW, "attention.sliding_window_pattern": "6"}, "an integer"),
        ("qwen2", {"attn_logit_softcapping": -50.0}, "attention_softcap is -50.0, wanted a number from 0"),
        ("qwen2", {"rope.freq_base_swa": 1.0}, "local_rope_base is 1.0, wanted a number above 1"),
        ("qwen2", {"attention.temperature_scale": 0.1}, "attention whose temperature grows with the position"),
        ("qwen2", {"logit_scale": 0.5}, "scaled logits"),
        ("qwen2", {"attention.causal": False}, "not causal"),
        ("qwen2", {"rope.dimension_sections": [8, 8, 0, 0]}, "multimodal"),
        ("qwen2", {"rope.dimension_count": 8}, "partial rotary"),
        ("qwen2", {"attention.value_length": 8}, "length of keys"),
        ("qwen2", {"rope.scaling.type": "longrope"}, "none, linear, longrope or yarn"),
        ("qwen2", {**YARN, "rope.scaling.factor": 0.0}, "factor"),
        ("qwen2", {**YARN, "rope.scaling.yarn_beta_fast": 0.0}, "yarn: beta_fast is 0.0, wanted"),
        ("qwen2", {**YARN, "rope.freq_base": 1.0}, "rope_base is 1.0, wanted a number above 1"),
        ("qwen2", {"rope.scaling.attn_factor": 2.0}, "attn_factor"),
        ("qwen2", {"rope.freq_base": float("nan")}, "finite"),
        ("qwen2", {"attention.head_count": [2, 2]}, "array of 1 numbers"),
        ("qwen2", {"attention.head_count": 0}, "at least 1"),
        ("qwen2", {"block_count": 2, "attention.head_count_kv": [1, 2]}, r"kv is an array of 2, wanted the same number for every"),
        ("qwen2", {"block_count": 2}, r"layers\.1\.\w+ .*missing"),
        ("qwen2", {"embedding_length": 64}, "shape"),
        ("qwen2", {"feed_forward_length": 32}, r"shape \[64, 32\], wanted \[32, 32\]"),
        ("qwen2", {"rope.mrope_section": [2, 3, 3]}, r"qwen2\.rope\.mrope_section is an array of 3, wanted it absent"),
        ("llama", {"rope.sharpness": 2.0}, r"llama\.rope\.sharpness is 2\.0, wanted it absent; this version does not know it"),
        ("qwen3", {"attention.sinks": True}, r"qwen3\.attention\.sinks is True, wanted it absent"),
        ("qwen3", {"rope.global.freq_base": 1e6}, r"qwen3\.rope\.global\.freq_base is 1000000\.0, wanted it absent"),
        ("llama", {"attention.key_length_swa": 8}, r"key_length_swa is 8, wanted the length of keys, 16"),
        ("llama", {"attention.head_dim": 8}, r"head_dim is 8, wanted the length of keys, 16"),
        ("gemma3", {"rope.dimension_count_swa": 8}, r"dimension_count_swa is 8, wanted that of other layers, 16"),
        ("llama", {"rope.scaling.alpha": 1000.0}, r"rope\.scaling\.alpha is 1000\.0, wanted it absent: a rotary alpha"),
        ("", {"general.architecture": "gemma9"}, "'gemma9'; supported are llama, .*mistral3"),
        ("", {"general.architecture": "qwen3"}, "qwen3"),
        ("", {"general.type": "adapter"}, "adapter"),
        ("", {"split.count": 3}, "give the first part under its own name"),
        ("", {"tokenizer.ggml.tokens": ["a", "b"]}, "260 tokens"),
        ("", {"tokenizer.ggml.token_type": [1, 2]}, "260 numbers"),
        ("", {"tokenizer.ggml.merges": [1, 2]}, "strings"),
        ("", {"tokenizer.ggml.eos_token_id": "2"}, "an integer"),
        ("", {"tokenizer.ggml.precompiled_charsmap": "2"}, "an array of bytes"),
        ("", {"tokenizer.ggml.add_bos_token": 1}, "true or false"),
        ("", {"tokenizer.chat_template": 1}, "text"),
    ],
)
def test_what_is_not_supported_or_inconsistent_is_an_error_and_never_ignored(small_gguf, edited_gguf, family, changes, message):
    """family: whose keys these are, "" for keys of every file."""
    changes = {f"{family}.{key}".removeprefix("."): typed(value) for key, value in changes.items()}
    path = edited_gguf(small_gguf(family or "qwen2"), set=changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("blk.0.ffn_gate_exps.weight", (4, 64, 32), "does not compute in qwen2 models"),
        ("blk.0.ffn_gate_inp.weight", (4, 32), "does not compute in qwen2 models"),
        ("blk.0.attn_qkv.weight", (64, 32), r"has 64 rows, wanted those of its parts, \[\d+, \d+, \d+\]|is there twice"),
        ("blk.0.ffn_down.bias", (32,), "has no place"),
        ("blk.1.attn_q.weight", (32, 32), r"layers\.1\.q has no place"),
        ("blk.00.attn_q.weight", (32, 32), "does not compute"),
        ("blk.0.attn_q_norm.weight", (16,), "q_norm has no place in a qwen2 model"),
        ("cls.output.weight", (2, 32), "does not compute"),
        ("rope_freqs.weight", (4,), r"\[4\], wanted a float for each of the 8 frequencies"),
    ],
)
def test_tensors_that_would_go_unused_are_an_error(small_gguf, edited_gguf, name, shape, message):
    path = edited_gguf(small_gguf("qwen2"), tensors={name: np.ones(shape, np.float32)})
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def test_a_file_says_how_its_states_are_pooled(small_gguf, edited_gguf):
    path = small_gguf()
    assert open_checkpoint(path).pooling == ""
    for number, pooling in enumerate(("", "mean", "cls", "last")):
        assert open_checkpoint(edited_gguf(path, set={"qwen2.pooling_type": (number, T.UINT32)})).pooling == pooling
    with pytest.raises(CheckpointError, match=r"qwen2\.pooling_type is 4, wanted .*or of a Qwen3 with cls\.output\.weight rank"):
        open_checkpoint(edited_gguf(path, set={"qwen2.pooling_type": (4, T.UINT32)}))


def test_scores_of_the_largest_gemmas_are_scaled_by_the_width_of_a_head_in_the_hidden_size(tmp_path):
    shape = {"hidden_size": 96, "intermediate_size": 32, "num_heads": 4, "num_kv_heads": 1, "head_dim": 4, "vocab_size": 260}
    path = make_tiny_gguf(tmp_path / "m.gguf", "gemma2", weight_format="f32", num_layers=46, **shape)
    assert open_checkpoint(path).config.query_scale == 1 / math.sqrt(96 // 4)


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.0.attn_norm.weight", "blk.0.attn_v.bias"])
def test_a_missing_tensor_is_named(small_gguf, edited_gguf, name):
    with pytest.raises(CheckpointError, match="missing"):
        open_checkpoint(edited_gguf(small_gguf("qwen2"), drop_tensors=[name]))


def test_a_type_that_is_not_supported_names_type_tensor_and_choices(small_gguf, edited_gguf):
    path = edited_gguf(small_gguf("qwen2"), tensors={"blk.0.ffn_up.weight": np.zeros((64, 32), np.int32)})
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight has the type I32; supported are F32, F16, BF16, Q4_0"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("architecture", "name", "message"),
    [
        ("qwen2", "output_norm.weight", "norm is q8_0; norms and biases are f32, f16 or bf16"),
        ("llama", "blk.0.attn_q.bias", "the values of a q8_0 vector share scales"),
    ],
)
def test_a_vector_in_blocks_is_refused(small_gguf, edited_gguf, architecture, name, message):
    vector = (np.zeros(34, np.uint8), gguf.GGMLQuantizationType.Q8_0)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(edited_gguf(small_gguf(architecture), tensors={name: vector}))


def test_a_name_that_would_scribble_over_a_terminal_is_not_used(small_gguf, edited_gguf):
    path = edited_gguf(small_gguf("qwen2"), set={"general.name": ("\x1b[2Jhello", T.STRING)})
    assert open_checkpoint(path).name == "edited"


@pytest.mark.parametrize("architecture", ["qwen2", "gemma3"])
def test_the_last_norm_tells_a_model_whatever_its_quantization(tmp_path, architecture):
    made = [make_tiny_gguf(tmp_path / f"{name}.gguf", architecture, weight_format=name) for name in ("q4_0", "q8_0", "f32")]
    made.append(make_tiny_hf(tmp_path / "hf", architecture))
    (found,) = {norm_sha256(open_checkpoint(path)) for path in made}
    assert norm_sha256(open_checkpoint(make_tiny_gguf(tmp_path / "other.gguf", architecture, seed=1))) != found
