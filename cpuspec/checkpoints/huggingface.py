"""Hugging Face directories as checkpoints: config.json with safetensors, for the families of `families`.

Weights are plain f32, f16 or bf16, quantized by a package that `quantized` knows, or what optimum-intel exported there for
OpenVINO. Pickles are never read. The tokenizer's files are only pointed at.
"""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cpuspec.checkpoints import gemma, openvino
from cpuspec.checkpoints.canonical import HF, Names, arranged
from cpuspec.checkpoints.checkpoint import Checkpoint, HfTokenizerFiles, Ranker, tensor_shapes
from cpuspec.checkpoints.families import (
    FAMILIES,
    MODEL_TYPES,
    NOT_COMPUTED,
    WITHOUT_ATTENTION_BIAS,
    Family,
    each_layer,
    layer_flags,
)
from cpuspec.checkpoints.fields import Fields, read_json_object
from cpuspec.checkpoints.latent import read_hf as read_latent
from cpuspec.checkpoints.quantized import Method, read_method, read_quantized
from cpuspec.checkpoints.recurrent import EXPERT_COUNTS, dense_size, has_experts, kinds_of, multiplied, num_layers_of
from cpuspec.checkpoints.recurrent import read_hf as read_mixers
from cpuspec.checkpoints.safetensors import INDEX, StoredTensor, read_index, read_safetensors
from cpuspec.config import SWIGLU_ALPHA, SWIGLU_LIMIT, Experts, ModelConfig, RopeScaling
from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.formats import QuantTensor
from cpuspec.settings import NO_DEFAULTS, SAMPLING_FIELDS, SamplingDefaults

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}
# Flags that a model may set and this reader does not compute.
_UNSUPPORTED = {
    "use_qk_norm": "layer norms of queries and keys are",
    "qk_layernorm": "layer norms of queries and keys are",
    "use_parallel_residual": "parallel residuals are",
    "use_bidirectional_attention": "attention that is not causal is",
    "rope_interleaved": "rotary positions that pair neighbours are",
    "norm_head": "a normed output matrix is",
    "use_cla": "layers that share keys and values are",
    "use_mla": "keys and values made of a common vector are",
}
# A setting of positions or attention that no reader asked for is reported, unless it changes no answer.
_TELLING = re.compile("rope|rotary|attn|attention|window|softcap|alibi|position|mscale|nope|qk_")
_HARMLESS = re.compile("dropout|pdrop|flash|sdpa|xformers|attn_implementation|max_window_layers|sliding_window_pattern")
# Rotary settings that change nothing at these values, and those that only tell how a model was made.
_NEUTRAL_ROPE = {"factor": 1, "attn_factor": 1, "extrapolation_factor": 1, "attention_factor": 1, "truncate": True}
_TELLING_ROPE = ("original_max_position_embeddings", "finetuned")
_SECTIONS = ("mrope_section", "mrope_interleaved")

_SINGLE = "model.safetensors"
_VISION_AUDIO = re.compile(
    r"(model\.)?(vision_tower|vision_model|vision_encoder|visual|multi_modal_projector|mm_projector|audio_tower|embed_vision|embed_audio)\."
)
_COMPARED_VALUES = 1 << 20


def open_huggingface(directory: Path, mmap: bool = True) -> Checkpoint:
    """Read config.json and the headers of the safetensors files; weights stay on disk until used.

    Raises CheckpointError on anything damaged, missing or not supported.
    """
    fields = read_fields(directory)
    settings, family = _settings(fields)
    config = _read_config(settings, family)
    remarks = [*_unknown_settings(settings)]
    method = read_method(directory, fields)
    wanted, names = tensor_shapes(config), Names(family, HF)
    named, predicting, found = {}, {}, _read_tensors(directory, method, mmap, remarks)
    # A snapshot of huggingface_hub's cache is called by its commit, and the repository by models--OWNER--NAME.
    where = directory.resolve()
    title = where.parent.parent.name.rpartition("--")[2] if where.parent.name == "snapshots" else where.name
    ranker = _read_ranker(title, family, found)
    prefix = "model." if "embed_tokens.weight" in found else ""  # models that make embeddings are saved without their output matrix
    for file_name, tensor in found.items():
        # In a model that also reads images, names of the language model have a prefix, in one of two forms.
        name = prefix + (
            file_name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)
            if family.hf_wrapper
            else file_name
        )
        if family.hf_root != "model":  # which transformers reads and writes as well
            name = re.sub(r"^(model\.)?(model|backbone)\.", f"{family.hf_root}.", name)
        if name.startswith(("model.mtp_", "model.mtp.", "mtp.")) or names.layer_of(name) >= config.num_layers:
            predicting[name] = tensor
            continue
        ours = names.ours(name)
        if name.endswith("rotary_emb.inv_freq"):  # derived from the configuration; old files store it
            continue
        if method and name.endswith(".bias") and ours not in wanted and not tensor.dequantize().any():
            continue  # AutoGPTQ gives zeros as a bias to layers that have none
        if not ours:
            raise CheckpointError(f"{directory}: tensor {file_name!r} belongs to a feature this version does not compute")
        if ours in named:
            raise CheckpointError(f"{directory}: tensor {file_name!r} is there under another name, too; wanted it once")
        named[ours] = tensor
    tensors = arranged(str(directory), config, family, HF, named, wanted)
    config, tensors = multiplied(settings, family, config, tensors)
    pooling = _read_pooling(directory)
    if (pooling or ranker) and "output" not in tensors:
        config = replace(config, tied_embeddings=True)  # its logits are never used
    if config.tied_embeddings and "output" in tensors:
        # Some exporters store the tied matrix twice, or only under the name of the other. As in transformers, a matrix that differs
        # is the model's, whatever the configuration says.
        tensors.setdefault("embed", tensors["output"])
        if _same_values(tensors["embed"], tensors["output"]):
            del tensors["output"]
        else:
            config = replace(config, tied_embeddings=False)
            remarks.append(f"{fields.what}: tie_word_embeddings is true, and lm_head.weight differs from the embedding; it is used")
    vocabulary = HfTokenizerFiles(directory, directory / "tokenizer.json")
    _check_prediction_layers(directory, predicting, config.num_layers + fields.integer("num_nextn_predict_layers", 0))
    # The token of models trained for drafts in one pass: PARD's key (arXiv 2504.18583), and vLLM's other one for it.
    mask_key = fields.first(("pard_token", "ptd_token_id"))
    mask_id = fields.token_id(mask_key, config.vocab_size) if mask_key else None
    sampling = _read_sampling(directory)
    quantization = method.kind if method else ""
    return Checkpoint(
        directory, title, config, tensors, vocabulary, sampling, predicting, mask_id, quantization, pooling, tuple(remarks), ranker
    )


def _same_values(one: QuantTensor, other: QuantTensor) -> bool:
    """Whether two matrices are equal, a few rows at a time."""
    step = max(1, _COMPARED_VALUES // one.shape[-1])
    return one.shape == other.shape and all(
        np.array_equal(one.rows(some), other.rows(some))
        for some in (np.arange(i, min(i + step, one.shape[0])) for i in range(0, one.shape[0], step))
    )


def _read_pooling(directory: Path) -> str:
    """The pooling in the file of sentence-transformers beside a model; "" where there is none."""
    path = directory / "1_Pooling" / "config.json"
    if not path.exists():
        return ""
    fields = Fields.of_file(path)
    keys = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    asked = [pooling for key, pooling in keys.items() if fields.boolean(key, False)]
    if len(asked) != 1:
        raise CheckpointError(f"{path} asks for {len(asked)} of {', '.join(keys)}; exactly one is supported")
    return asked[0]


def _read_ranker(title: str, family: Family, tensors: dict[str, QuantTensor]) -> Ranker | None:
    """How a model ranks texts; None if it does not. Its matrix is taken out of the tensors; without one its name decides."""
    if family.architecture != "qwen3":
        return None
    weight = tensors.pop("score.weight", None)
    return Ranker(weight=weight) if weight is not None or "rerank" in title.lower() else None


def read_fields(directory: Path) -> Fields:
    """A directory's config.json. Raises CheckpointError if it is missing or damaged."""
    return Fields.of_file(directory / "config.json")


def config_to_write(checkpoint: Checkpoint) -> dict[str, object]:
    """config.json for a directory of the model's own tensors: that of the language model only. It says whether the output is tied.

    Raises CheckpointError if the model's file is missing or damaged by now.
    """
    values = read_json_object(checkpoint.path / "config.json")
    family = FAMILIES[checkpoint.config.architecture]
    if (
        family.hf_wrapper
        and values.get("architectures") != [family.hf_class]
        and isinstance(inside := values.get("text_config"), dict)
    ):
        kept = {key: value for key, value in values.items() if key.endswith(("_token_id", "dtype"))}
        values = {**kept, **inside, "architectures": [family.hf_class]}
    if family.text_alike:
        alike = FAMILIES[family.text_alike]
        values |= {"architectures": [alike.hf_class], "model_type": alike.architecture}
        for key in ("rope_parameters", "rope_scaling"):
            if isinstance(rope := values.get(key), dict):
                values[key] = {name: value for name, value in rope.items() if name not in _SECTIONS and value != "mrope"}
    tied = {} if checkpoint.pooling else {"tie_word_embeddings": checkpoint.config.tied_embeddings}
    if family.folds_multipliers:  # into the tensors that this goes with
        values = {key: value for key, value in values.items() if "_multiplier" not in key}
    return {key: value for key, value in values.items() if key != "quantization_config"} | tied


def read_config(fields: Fields) -> ModelConfig:
    """Shapes and flags of a config.json. Raises CheckpointError on anything not supported."""
    return _read_config(*_settings(fields))


def _settings(fields: Fields) -> tuple[Fields, Family]:
    """The settings of the language model, and its family: by its class, or where a file names none, by its `model_type`."""
    names_of = ((family, (family.hf_class, family.hf_wrapper, *family.hf_alike)) for family in FAMILIES.values())
    classes = {name: family for family, names in names_of for name in names if name}
    names = [str(name) for name in fields.items("architectures")]
    if not names and (family_of_type := MODEL_TYPES.get(fields.text("model_type", ""))):
        names = [family_of_type]
    if needs := NOT_COMPUTED.get(fields.text("model_type", "")):
        fields.fail("model_type", f"a family without {needs}, which this version does not compute")
    if len(names) != 1 or names[0] not in classes:
        fields.fail("architectures", f"one of {', '.join(classes)}")
    family = classes[names[0]]
    tied: dict[str, object] = {}
    if names[0] == family.hf_wrapper:
        is_tied, fields = fields.value("tie_word_embeddings"), fields.object("text_config")
        tied = {} if is_tied is None else {"tie_word_embeddings": is_tied}
        inside = fields.text("model_type", "")
        within = [one for one in FAMILIES.values() if one.hf_wrapper == family.hf_wrapper]
        family = next((one for one in within if inside == one.architecture), within[0])
    alike = [one for one in FAMILIES.values() if one.hf_class == family.hf_class]
    if len(alike) > 1:  # dense models and mixtures
        mixed = has_experts(fields.over(family.hf_defaults))
        family = next((one for one in alike if (one.experts is not None) == mixed), family)
    return fields.over({**family.hf_defaults, **tied}), family


def _read_config(settings: Fields, family: Family) -> ModelConfig:
    try:
        return model_config(settings, family)
    except ConfigError as error:
        raise CheckpointError(f"{settings.what}: {error}") from error


def _unknown_settings(settings: Fields) -> tuple[str, ...]:
    """A sentence about the settings of positions and attention that no reader asked for, and that are neither off nor harmless."""
    odd = [
        f"{key} = {settings.value(key)!r}"[:60]
        for key in settings.unread()
        if _TELLING.search(key) and not _HARMLESS.search(key) and settings.value(key) not in (False, 0, "", [], {})
    ]
    return (f"{settings.what}: this version does not know {', '.join(odd)[:300]}; ignored",) if odd else ()


def _check_prediction_layers(directory: Path, tensors: dict[str, QuantTensor], num_layers: int) -> None:
    """Raise CheckpointError for layers after the last one of config.json. num_layers: with those for multi-token prediction."""
    for name in tensors:
        number = re.match(r"model\.layers\.([0-9]+)\.", name)
        if number and int(number[1]) >= num_layers:
            raise CheckpointError(f"{directory}: tensor {name!r} belongs to layer {number[1]}, and the model has {num_layers}")


def _read_sampling(directory: Path) -> SamplingDefaults:
    """The sampling that generation_config.json recommends, read as transformers' GenerationConfig.

    do_sample false is greedy. do_sample true without a temperature is temperature 1. Without do_sample the temperature decides, as
    in vLLM.
    """
    path = directory / "generation_config.json"
    if not path.exists():
        return NO_DEFAULTS
    try:
        values = read_json_object(path)
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


def model_config(fields: Fields, family: Family) -> ModelConfig:
    """Shapes and flags of config.json. Raises CheckpointError or ConfigError."""
    activation_key = fields.first(("mlp_hidden_act", "hidden_activation"), "hidden_act")
    activation = fields.text(activation_key, "silu")
    if activation not in _ACTIVATIONS:
        fields.fail(activation_key, f"{' or '.join(_ACTIVATIONS)}")
    for key, feature in _UNSUPPORTED.items():
        if key not in family.hf_defaults and fields.boolean(key, False):
            fields.fail(key, f"false; {feature} not supported")
    hidden_size = fields.integer("hidden_size")
    num_layers = num_layers_of(fields)
    mixers = read_mixers(fields, family, num_layers)
    others = sum(mixers.get("layer_recurrent", ())) + sum(mixers.get("layer_feeds", ()))
    attends = others < num_layers
    num_heads = fields.integer("num_attention_heads", None if attends else 1)
    if num_heads < 1:
        fields.fail("num_attention_heads", "at least 1")
    head_dim = fields.integer(fields.first(("head_dim", "attention_head_dim"), "head_dim"), hidden_size // num_heads)
    if not attends:
        num_heads, head_dim = 1, 2
    if family.latent:
        head_dim = fields.integer("qk_rope_head_dim")
    elif attends and "head_dim" not in fields and hidden_size % num_heads:
        fields.fail("num_attention_heads", f"a divisor of hidden_size {hidden_size}, or head_dim")
    context_length = fields.integer("max_position_embeddings")
    every_bias = fields.boolean("use_bias", False) or fields.boolean("bias", False)
    attention_bias = (fields.boolean("attention_bias", False) and family.architecture not in WITHOUT_ATTENTION_BIAS) or every_bias
    if fields.value("clip_qkv") is not None:
        fields.fail("clip_qkv", "null; clamped queries, keys and values are not supported")
    if not fields.boolean("is_causal", True):
        fields.fail("is_causal", "true; attention that is not causal is not supported")
    has_local_rope = family.has_local_rope
    rope, local = _rope_settings(fields, has_local_rope)
    rotary_factor = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if (rotary_factor != 1.0 and "partial_rotary_factor" not in family.hf_defaults) or not 0 < rotary_factor <= 1:
        where = rope if "partial_rotary_factor" in rope else fields
        where.fail("partial_rotary_factor", "1; partial rotary positions of this family are not supported")
    rope_dims = int(head_dim * rotary_factor)
    if fields.integer("rotary_dim", rope_dims) != rope_dims:
        fields.fail("rotary_dim", f"{rope_dims}, as partial_rotary_factor says")
    # Phi-3's place for it, which transformers prefers in every model.
    original = fields.integer("original_max_position_embeddings", 0)
    if has_local_rope and _read_rope_scaling(local, context_length, 0, family) is not None:
        local.fail("rope_type", "default in layers with a window")
    growth = rope.number("llama_4_scaling_beta", 0.0) if family.temperature_grows else 0.0
    rope_base = _rope_base(fields, rope, head_dim)
    scaling = _read_rope_scaling(rope, context_length, original, family)
    pre_attention = fields.number("query_pre_attn_scalar", head_dim)
    if pre_attention <= 0:
        fields.fail("query_pre_attn_scalar", "a number above 0")
    window = fields.integer("sliding_window", 0) if fields.boolean("use_sliding_window", False) else 0
    if "use_sliding_window" in fields or "sliding_window" in family.hf_defaults:
        fields.value("sliding_window")  # a size that is not in use
    rotated = _rotated(fields, family, num_layers)
    slides = _slides(fields, family, window, rotated)
    if family.turns_in_windows and window:
        rotated = slides
    eps_keys = ("rms_norm_eps", "norm_epsilon", "layer_norm_eps", "norm_eps", "layer_norm_epsilon")
    eps = fields.first(eps_keys, "rms_norm_eps")
    config = ModelConfig(
        architecture=family.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=dense_size(fields, family),
        **_read_experts(fields, family, num_layers),
        **mixers,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads) if attends else 1,
        head_dim=head_dim,
        context_length=context_length,
        norm_eps=fields.number(eps, 1e-6),
        rope_base=rope_base,
        rope_scaling=scaling,
        rope_dims=0 if rope_dims == head_dim or family.by_window else rope_dims,
        query_growth=growth,
        query_growth_length=rope.integer("original_max_position_embeddings", context_length) if growth else 0,
        mlp_bias=every_bias or fields.boolean("mlp_bias", False),
        qkv_bias=fields.boolean("qkv_bias", fields.boolean("use_qkv_bias", family.qkv_bias)) or attention_bias,
        o_bias=fields.boolean("attention_out_bias", attention_bias),
        tied_embeddings=fields.boolean(fields.first(("tie_embedding", "tie_word_embeddings"), "tie_word_embeddings"), False),
        **_scales(fields, family, hidden_size, None if pre_attention == head_dim else 1 / math.sqrt(pre_attention)),
        attention_softcap=fields.number("attn_logit_softcapping", 0.0),
        logit_softcap=fields.number("final_logit_softcapping", 0.0),
        local_rope_base=local.number("rope_theta", fields.number("rope_local_base_freq", rope_base)) if has_local_rope else 1e4,
        **layer_flags(window, slides, rotated, has_local_rope),
        **{
            "qk_norm": "use_qk_norm" in family.hf_defaults and fields.boolean("use_qk_norm"),
            **family.flags,
            "activation": _clamped(fields, family) or _ACTIVATIONS[activation],
        },
    )
    if family.by_window:
        own = gemma.read_hf(fields, slides)
        rope_pairs = int(own["head_dim"] * rotary_factor) // 2
        factors = (1.0,) * rope_pairs + (gemma.STILL,) * (own["head_dim"] // 2 - rope_pairs)
        return replace(config, **own, rope_scaling=RopeScaling("factors", factors=factors) if rotary_factor < 1 else None)
    return replace(config, **read_latent(fields, rope, scaling)) if family.latent else config


def _rope_base(fields: Fields, rope: Fields, head_dim: int) -> float:
    """The base of rotary frequencies, which Hunyuan's "dynamic" scaling makes larger."""
    rope_base = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    alpha = rope.number("alpha", 0.0) if rope.value("alpha") else 0.0
    if alpha and rope.text("rope_type", rope.text("type", "")) == "dynamic":
        if not 0 < alpha <= 1e6:
            rope.fail("alpha", "a number above 0, at most 1e6")
        rope_base *= alpha ** (head_dim / max(head_dim - 2, 1))
    return rope_base


def _clamped(fields: Fields, family: Family) -> str:
    """The activation of a family that clamps its gates, "" for others. Raises CheckpointError for other numbers than gpt-oss's."""
    if family.flags.get("activation") != "swiglu_oai":
        return ""
    for key, value in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if fields.number(key, value) != value:
            fields.fail(key, f"{value}")
    return "swiglu_oai"


def _scales(fields: Fields, family: Family, hidden_size: int, query_scale: float | None) -> dict[str, Any]:
    """The factors of embeddings, scores, branches and logits, as arguments of `ModelConfig`."""
    if family.has_logit_scale:
        return {"query_scale": query_scale, "logit_scale": fields.number("logit_scale", 1.0)}
    if not family.has_scales:
        return {"embedding_scale": math.sqrt(max(hidden_size, 1)) if family.scales_embeddings else 1.0, "query_scale": query_scale}
    divisor = fields.number("logits_scaling", 1.0)
    if divisor <= 0:
        fields.fail("logits_scaling", "a number above 0")
    return {
        "embedding_scale": fields.number("embedding_multiplier", 1.0),
        "query_scale": fields.number("attention_multiplier", 1.0),
        "residual_scale": fields.number("residual_multiplier", 1.0),
        "logit_scale": 1 / divisor,
    }


# Names that configurations have for the same facts of experts.
EXPERTS_USED = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
EXPERT_SIZES = ("moe_intermediate_size", "expert_hidden_dim")  # else intermediate_size
SHARED_SIZES = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
SHARED_COUNTS = ("num_shared_experts", "n_shared_experts", "moe_num_shared_experts", "num_shared_expert")  # of an expert's size
_SHIFTED = ("moe_router_enable_expert_bias", "use_expert_bias")
STEPS = ("decoder_sparse_step", "moe_layer_interval", "moe_layer_freq")
FIRSTS = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")


def _read_experts(fields: Fields, family: Family, num_layers: int) -> dict[str, Any]:
    """Read the settings of a mixture of experts, as arguments of `ModelConfig`."""
    if family.experts is None:
        return {}

    def number(names: tuple[str, ...], default: int | None = None) -> int:
        return fields.of_layers(fields.first(names, names[0]), num_layers, default)

    step, first, dense = number(STEPS, 1), number(FIRSTS, 0), fields.items("mlp_only_layers")
    last = fields.integer("moe_layer_end_index", -1)
    if step < 1:
        fields.fail(fields.first(STEPS), "at least 1")
    layers = each_layer(num_layers, lambda i: i not in dense and (i + 1) % step == 0 and i >= first and (last < 0 or i <= last))
    if kinds := fields.items("mlp_layer_types"):
        if len(kinds) != num_layers or set(map(str, kinds)) - {"dense", "sparse"}:
            fields.fail("mlp_layer_types", f"dense or sparse for each of {num_layers} layers")
        layers = tuple(kind == "sparse" for kind in kinds)
    if family.single_branch:
        layers = tuple(kind != "none" for kind in kinds_of(fields, family, num_layers))
        fields.integer("n_shared_experts", 0)  # whose size is that of all
        if fields.value("moe_latent_size") is not None:
            fields.fail("moe_latent_size", "null; experts of another width than the model's are not supported")
    if fields.text("topk_method", "greedy") == "group_limited_greedy" and fields.integer("n_group", 1) > 1:
        fields.fail("topk_method", "greedy or noaux_tc; groups by their best expert alone are not supported")
    size = number(EXPERT_SIZES if fields.first(EXPERT_SIZES) else ("intermediate_size",))
    facts: dict[str, Any] = {
        "count": number(EXPERT_COUNTS),
        "used": number(EXPERTS_USED),
        "size": size,
        "score": fields.text(fields.first(("scoring_func", "score_function"), "scoring_func"), "softmax"),
        "shifted": fields.boolean(fields.first(_SHIFTED, "use_expert_bias"), False),
        "normalised": fields.boolean("norm_topk_prob", True),
        "scale": fields.number("routed_scaling_factor", 1.0),
        "groups": fields.integer("n_group", 1),
        "groups_used": fields.integer("topk_group", 1),
    }
    shared = number(SHARED_SIZES, 0) or number(SHARED_COUNTS, 0) * size
    experts = Experts(**{**facts, **family.experts})
    if experts.normed_apart:
        shared = fields.integer("intermediate_size")
    return {
        "experts": experts,
        "layer_experts": () if all(layers) else layers,
        "shared_size": shared,
        "weighs_shared": shared > 0 and family.gates_shared,
    }


def _rotated(fields: Fields, family: Family, num_layers: int) -> tuple[bool, ...]:
    """For each layer whether it has rotary positions."""
    if family.has_scales and family.recurrent:
        return (fields.text("position_embedding_type", "none") == "rope",) * num_layers
    if not family.unrotated_every:
        return each_layer(num_layers, lambda i: True)
    interval = fields.integer("no_rope_layer_interval", family.unrotated_every)
    if interval < 1:
        fields.fail("no_rope_layer_interval", "at least 1")
    flags = fields.items("no_rope_layers")  # which says 1 where there are positions
    if flags and (len(flags) != num_layers or any(flag not in (0, 1) for flag in flags)):
        fields.fail("no_rope_layers", f"0 or 1 for each of the {num_layers} layers")
    return tuple(flag == 1 for flag in flags) or each_layer(num_layers, lambda i: (i + 1) % interval != 0)


def _slides(fields: Fields, family: Family, window: int, rotated: tuple[bool, ...]) -> tuple[bool, ...]:
    """For each layer whether it has a window: as `layer_types` says, or else as transformers chooses for the family."""
    if window and "sliding_window" not in family.hf_defaults:
        fields.fail("use_sliding_window", f"false; {family.architecture} models have no sliding windows")
    types, num_layers = [] if family.recurrent else fields.items("layer_types"), len(rotated)
    allowed = ("full_attention", *(["sliding_attention"] if window else []), *(["linear_attention"] if family.delta_layers else []))
    if any(kind not in allowed for kind in types) or len(types) not in (0, num_layers):
        fields.fail("layer_types", f"{' or '.join(allowed)} in every layer")
    if types or not window:
        return tuple(kind == "sliding_attention" for kind in types) or (False,) * num_layers
    if "sliding_window_pattern" in family.hf_defaults:
        period = fields.integer("sliding_window_pattern")
        if period < 1:
            fields.fail("sliding_window_pattern", "at least 1")
        return each_layer(num_layers, lambda i: (i + 1) % period != 0)
    if family.unrotated_every:
        return tuple(not one for one in rotated)
    first = fields.integer("max_window_layers")
    return each_layer(num_layers, lambda i: i >= first)


def _rope_settings(fields: Fields, has_local_rope: bool) -> tuple[Fields, Fields]:
    """Settings of rotary positions, of layers that see all and of layers with a window: the same unless `has_local_rope`.

    `rope_parameters` is transformers 5's; `rope_scaling` is older. Where a file has both, a user has added `rope_scaling` by hand:
    it counts, with the base of `rope_parameters`.
    """
    rope = local = fields.object("rope_parameters")
    if has_local_rope:
        rope, local = rope.object("full_attention"), rope.object("sliding_attention")
    added = fields.object("rope_scaling")
    if "rope_parameters" not in fields.over({}) and ("rope_scaling" in fields or "rope_theta" in fields):
        rope = local = fields.over({}).object("rope_parameters")  # a family's own are for files that say nothing
    if added.names():
        added = added.over({key: rope.value(key) for key in ("rope_theta", "partial_rotary_factor")})
        rope, local = added, local if has_local_rope else added
    return rope, local


def _read_rope_scaling(rope: Fields, context_length: int, original: int, family: Family) -> RopeScaling | None:
    """The scaling of a set of rotary settings, all of which must be known. original: the trained context; 0: `rope` has it."""
    for key in ("full_attention", "sliding_attention"):
        if key in rope:
            rope.fail(key, "one set of parameters for all layers")
    rope.number("partial_rotary_factor", 1.0)  # read with the other settings of the model, as this:
    rope.number("rope_theta", 1.0)
    scaling = _scaling(rope, context_length, original, family)
    telling = (*_TELLING_ROPE, *(_SECTIONS if family.has_sections else ()))
    for key in rope.unread():
        if key not in telling and not (key in _NEUTRAL_ROPE and rope.value(key) == _NEUTRAL_ROPE[key]):
            rope.fail(key, f"it absent; with rope type {scaling.kind if scaling else 'default'} this version does not know it")
    return scaling


def _scaling(rope: Fields, context_length: int, original: int, family: Family) -> RopeScaling | None:
    kind = rope.text("rope_type", rope.text("type", "default"))  # `type` is the older spelling
    if kind == "default" or (kind == "mrope" and family.has_sections) or (kind == "proportional" and family.by_window):
        return None
    if kind == "dynamic" and (family.hf_groups_heads or family.flags.get("rotates_first")):  # InternLM 2, Hunyuan
        rope.number("factor", 1.0)  # beyond the context that the model has here; an alpha is in the base
        for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            rope.value(key)
        return None
    if kind in ("longrope", "su") or (kind == "yarn" and "short_factor" in rope):
        return _longrope(rope, context_length, original)
    if kind not in ("linear", "llama3", "yarn"):
        rope.fail("rope_type" if "rope_type" in rope else "type", "default, linear, llama3, longrope or yarn")
    factor = rope.number("factor")
    if kind == "linear":
        return RopeScaling("linear", factor)
    original = original or rope.integer("original_max_position_embeddings", context_length)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        return RopeScaling("llama3", factor, low_freq_factor=low, high_freq_factor=high, original_context_length=original)
    mscale, of_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    attention_factor = rope.number("attention_factor") if "attention_factor" in rope else None
    if attention_factor is None and mscale and of_all:
        grows = 0.1 * math.log(max(factor, 1.0))
        attention_factor = (mscale * grows + 1) / (of_all * grows + 1)
    return RopeScaling(
        "yarn",
        factor,
        original_context_length=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=attention_factor,
        truncate=rope.boolean("truncate", True),
    )


def _longrope(rope: Fields, context_length: int, original: int) -> RopeScaling:
    """LongRoPE (arXiv 2402.13753), with Phi-3's attention factor unless the file has one."""
    original = rope.integer("original_max_position_embeddings", original or context_length)
    factor = rope.number("factor", context_length / max(original, 1))
    attention_factor = rope.number("attention_factor", 0.0)
    if not attention_factor:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    found: dict[str, tuple[float, ...]] = {}
    for key in ("long_factor", "short_factor"):
        values = rope.items(key)
        numbers = Fields(f"{rope.what}: {key}", {str(i): value for i, value in enumerate(values)})
        found[key] = tuple(numbers.number(str(i)) for i in range(len(values)))
    return RopeScaling(
        "longrope",
        original_context_length=original,
        attention_factor=attention_factor,
        factors=found["long_factor"],
        short_factors=found["short_factor"],
    )


def _read_tensors(directory: Path, method: Method | None, mmap: bool, remarks: list[str]) -> dict[str, QuantTensor]:
    """The tensors of the language model under the names of plain weights. remarks: gets a sentence for each oddity."""
    if (directory / openvino.MODEL).exists() and not (directory / _SINGLE).exists():
        return openvino.read_openvino(directory, mmap)
    stored = read_stored(directory, mmap, remarks)
    vision_audio = [name for name in stored if _VISION_AUDIO.match(name)]
    for name in vision_audio:
        del stored[name]
    if vision_audio:
        of = f"{len(vision_audio)} tensors, as {vision_audio[0]!r}, are of a part that sees or hears"
        remarks.append(f"{directory}: {of}; only text is read")
    if method is None:
        return {name: tensor.floats() for name, tensor in stored.items()}
    return read_quantized(directory, method, stored)


def read_stored(directory: Path, mmap: bool, remarks: list[str] | None = None) -> dict[str, StoredTensor]:
    """All tensors of the directory as its files have them: one file, or the shards of an index. Raises CheckpointError.

    remarks: gets a sentence where index and shards disagree. As in transformers, all tensors of the shards count then.
    """
    index_path = directory / INDEX
    if (directory / _SINGLE).exists():
        return read_safetensors(directory / _SINGLE, mmap)
    if not index_path.exists():
        if any(directory.glob("pytorch_model*.bin")) or any(directory.glob("*.pth")):
            raise CheckpointError(
                f"{directory} has its weights only as pickles, which can run code and are never read; "
                "convert them: load the model with transformers and call save_pretrained"
            )
        raise CheckpointError(f"{directory} has none of model.safetensors, {INDEX} and {openvino.MODEL}")

    files = read_index(index_path)
    tensors: dict[str, StoredTensor] = {}
    odd: list[str] = []
    for file_name in dict.fromkeys(files.values()):
        for name, tensor in read_safetensors(directory / file_name, mmap).items():
            is_named = files.get(name) == file_name
            if not is_named:
                odd.append(name)
            if is_named or name not in tensors:
                tensors[name] = tensor
    odd += files.keys() - tensors.keys()
    if odd and remarks is not None:
        remarks.append(f"{index_path} and its shards disagree on {len(odd)} tensors, as {min(odd)!r}; the shards count")
    return tensors
