"""Hugging Face directories as checkpoints: config.json with safetensors, for Llama, Qwen2 and Qwen3 causal language models.

Weights are plain f32, f16 or bf16, or what optimum-intel exported there for OpenVINO. Pickles are never read. The tokenizer's files
are only pointed at.
"""

import re
from dataclasses import replace
from pathlib import Path

from cpuspec.checkpoints import openvino
from cpuspec.checkpoints.checkpoint import Checkpoint, HfTokenizerFiles
from cpuspec.checkpoints.fields import Fields, read_json_object
from cpuspec.checkpoints.safetensors import read_safetensors
from cpuspec.config import NO_DEFAULTS, SAMPLING_FIELDS, ModelConfig, RopeScaling, SamplingDefaults
from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.formats import QuantTensor

_ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}

_GLOBAL_TENSORS = {"model.embed_tokens.weight": "embed", "model.norm.weight": "norm", "lm_head.weight": "output"}
_LAYER_TENSORS = {
    "input_layernorm.weight": "attn_norm",
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.q_proj.bias": "q_bias",
    "self_attn.k_proj.bias": "k_bias",
    "self_attn.v_proj.bias": "v_bias",
    "self_attn.o_proj.weight": "o",
    "self_attn.o_proj.bias": "o_bias",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    "post_attention_layernorm.weight": "mlp_norm",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
}

_MAX_CONFIG_BYTES = 1 << 20
_MAX_INDEX_BYTES = 1 << 25


def open_huggingface(directory: Path, mmap: bool = True) -> Checkpoint:
    """Read config.json and the headers of the safetensors files; weights stay on disk until used.

    Raises CheckpointError on anything damaged, missing or not supported.
    """
    config = read_config(directory)
    tensors = {}
    for name, tensor in _read_tensors(directory, mmap).items():
        layer = re.fullmatch(r"model\.layers\.(0|[1-9][0-9]{0,8})\.(.+)", name, re.DOTALL)
        if name in _GLOBAL_TENSORS:
            tensors[_GLOBAL_TENSORS[name]] = tensor
        elif layer and layer[2] in _LAYER_TENSORS:
            tensors[f"layers.{layer[1]}.{_LAYER_TENSORS[layer[2]]}"] = tensor
        elif not name.endswith("rotary_emb.inv_freq"):  # derived from the configuration; old files store it
            raise CheckpointError(f"{directory}: tensor {name!r} belongs to a feature this version does not compute")
    if config.tied_embeddings:
        # Some exporters store the tied matrix twice; transformers uses the embedding for both.
        tensors.pop("output", None)
    vocabulary = HfTokenizerFiles(directory, directory / "tokenizer.json")
    # A snapshot of huggingface_hub's cache is called by its commit, and the repository by models--OWNER--NAME.
    where = directory.resolve()
    name = where.parent.parent.name.rpartition("--")[2] if where.parent.name == "snapshots" else where.name
    return Checkpoint(directory, name, config, tensors, vocabulary, _read_sampling(directory))


def read_config(directory: Path) -> ModelConfig:
    """Shapes and flags of a directory's config.json. Raises CheckpointError on anything damaged or not supported."""
    path = directory / "config.json"
    fields = Fields(str(path), read_json_object(path, _MAX_CONFIG_BYTES))
    try:
        return _read_config(fields)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _read_sampling(directory: Path) -> SamplingDefaults:
    """What generation_config.json recommends, in the sense of transformers' GenerationConfig.

    do_sample false is greedy, true without a temperature is 1; without do_sample the temperature says which, as in vLLM.
    """
    path = directory / "generation_config.json"
    if not path.exists():
        return NO_DEFAULTS
    try:
        values = read_json_object(path, _MAX_CONFIG_BYTES)
    except CheckpointError as error:
        return SamplingDefaults(ignored=(f"{error}; it is ignored",))
    found = SamplingDefaults.read(str(path), {name: values.get(name) for name in SAMPLING_FIELDS})
    match values.get("do_sample"):
        case None:
            return found
        case True:
            return found.over(SamplingDefaults(temperature=1.0))
        case False:
            return SamplingDefaults(temperature=0.0).over(found)
    return replace(found, ignored=(*found.ignored, f"{path}: do_sample must be true or false; it is ignored"))


def _read_config(fields: Fields) -> ModelConfig:
    """Shapes and flags of config.json. Raises CheckpointError or ConfigError."""
    class_names = fields.items("architectures")
    if len(class_names) != 1 or str(class_names[0]) not in _ARCHITECTURES:
        fields.fail("architectures", f"one of {', '.join(_ARCHITECTURES)}")
    architecture = _ARCHITECTURES[str(class_names[0])]
    if "quantization_config" in fields:
        quantization = fields.object("quantization_config")
        method = quantization.text("quant_method", "an unnamed method")
        raise CheckpointError(
            f"{fields.what}: weights quantized with {method[:40]!r} are not supported by this version; "
            "use a GGUF file of the model, or its plain weights"
        )
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        fields.fail("hidden_act", "silu")
    if fields.boolean("mlp_bias", False):
        fields.fail("mlp_bias", "false; biases in the feed-forward part are not supported")
    if fields.boolean("use_sliding_window", False):
        fields.fail("use_sliding_window", "false; sliding windows are not supported")
    if any(layer != "full_attention" for layer in fields.items("layer_types")):
        fields.fail("layer_types", "full_attention in every layer")

    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    if num_heads < 1:
        fields.fail("num_attention_heads", "at least 1")
    head_dim = fields.integer("head_dim", 128 if architecture == "qwen3" else hidden_size // num_heads)
    if "head_dim" not in fields and architecture != "qwen3" and hidden_size % num_heads:
        fields.fail("num_attention_heads", f"a divisor of hidden_size {hidden_size}, or head_dim")
    context_length = fields.integer("max_position_embeddings")
    attention_bias = fields.boolean("attention_bias", False) and architecture != "qwen2"
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        fields.fail("partial_rotary_factor", "1; partial rotary positions are not supported")
    rope = fields.object("rope_parameters")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        context_length=context_length,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_base=rope.number("rope_theta", fields.number("rope_theta", 10000.0)),
        rope_scaling=_read_rope_scaling(rope if rope.names() else fields.object("rope_scaling"), context_length),
        qkv_bias=architecture == "qwen2" or attention_bias,
        o_bias=attention_bias,
        qk_norm=architecture == "qwen3",
        tied_embeddings=fields.boolean("tie_word_embeddings", False),
    )


def _read_rope_scaling(rope: Fields, context_length: int) -> RopeScaling | None:
    """`rope_parameters` (transformers 5) or `rope_scaling` (before); `type` is the oldest spelling of `rope_type`."""
    kind = rope.text("rope_type", rope.text("type", "default"))
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        rope.fail("partial_rotary_factor", "1; partial rotary positions are not supported")
    for key in ("full_attention", "sliding_attention"):
        if key in rope:
            rope.fail(key, "one set of parameters for all layers")
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        rope.fail("rope_type" if "rope_type" in rope else "type", "default, linear, llama3 or yarn")
    factor = rope.number("factor")
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_context_length=rope.integer("original_max_position_embeddings"),
        )
    for key in ("mscale", "mscale_all_dim"):
        if key in rope:
            rope.fail(key, "it absent; use attention_factor")
    if not rope.boolean("truncate", True):
        rope.fail("truncate", "true")
    return RopeScaling(
        "yarn",
        factor,
        original_context_length=rope.integer("original_max_position_embeddings", context_length),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor") if "attention_factor" in rope else None,
    )


def _read_tensors(directory: Path, mmap: bool) -> dict[str, QuantTensor]:
    """All tensors of the directory under their own names: one file, or the shards of an index."""
    single = directory / "model.safetensors"
    index_path = directory / "model.safetensors.index.json"
    if single.exists():
        return read_safetensors(single, mmap)
    if (directory / openvino.MODEL).exists():
        return openvino.read_openvino(directory, mmap)
    if not index_path.exists():
        if any(directory.glob("pytorch_model*.bin")) or any(directory.glob("*.pth")):
            raise CheckpointError(
                f"{directory} has its weights only as pickles, which can run code and are never read; "
                "convert them: load the model with transformers and call save_pretrained"
            )
        raise CheckpointError(f"{directory} has none of model.safetensors, model.safetensors.index.json and {openvino.MODEL}")

    index = Fields(str(index_path), read_json_object(index_path, _MAX_INDEX_BYTES))
    weight_map = index.object("weight_map")
    if not weight_map.names():
        index.fail("weight_map", "an object from tensor names to file names")
    wanted: dict[str, set[str]] = {}
    for name in weight_map.names():
        file_name = weight_map.text(name, "")
        # A shard lies beside its index: a name with a separator, a drive or dots could point anywhere.
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,250}\.safetensors", file_name):
            weight_map.fail(name, "the plain name of a .safetensors file in the same directory")
        wanted.setdefault(file_name, set()).add(name)
    tensors: dict[str, QuantTensor] = {}
    for file_name, names in wanted.items():
        shard = read_safetensors(directory / file_name, mmap)
        if shard.keys() != names:
            odd = min(shard.keys() ^ names)
            where = "only in the file" if odd in shard else "only in the index"
            raise CheckpointError(f"{directory / file_name}: tensor {odd!r} is {where}; index and shards do not belong together")
        tensors |= shard
    return tensors
