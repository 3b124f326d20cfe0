"""A quantized model as a GGUF file: names and rows as llama.cpp wants them, metadata of the source or made for it.

A GGUF source's entries are carried over to the byte. From a Hugging Face directory, settings and tokenizer are converted: the
tokenizer only where its ids come out the same on a text of many kinds, under one of llama.cpp's pre-tokenizers.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.canonical import GGUF, Names, file_names, file_shape, joined, joined_shape
from cpuspec.checkpoints.checkpoint import GgufVocabulary, HfTokenizerFiles
from cpuspec.checkpoints.families import FAMILIES
from cpuspec.checkpoints.gemma import gguf_entries as gemma_entries
from cpuspec.checkpoints.gguf import GGUF_POOLINGS, GGUF_SAMPLING_KEYS, GGUF_SCORES, RANK, RANKS, ROPE_TENSORS, config_of
from cpuspec.checkpoints.gguf_file import Value, read_gguf
from cpuspec.checkpoints.gguf_parts import read_parts
from cpuspec.checkpoints.gguf_writer import TensorInfo, entry, write_gguf
from cpuspec.checkpoints.latent import gguf_entries as latent_entries
from cpuspec.checkpoints.recurrent import gguf_entries
from cpuspec.config import Mamba2, ModelConfig, Rope
from cpuspec.errors import ConfigError
from cpuspec.files import replacing
from cpuspec.formats import Format, QuantTensor, get_format
from cpuspec.formats.tensor import U8
from cpuspec.model.rope import attention_factor, inverse_frequencies
from cpuspec.quantize import prediction
from cpuspec.text import make_tokenizer
from cpuspec.text.hf_vocabulary import read_hf_vocabulary
from cpuspec.text.parts import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from cpuspec.text.pre_tokenizers import PRE_TOKENIZERS
from cpuspec.text.tokenizer_json import read_json

_ROPE_FACTORS, _LONG, _SHORT = ROPE_TENSORS
_REMEDY = "write compressed-tensors (OUT without .gguf)"
_QUANTIZATION_VERSION = 2  # ggml's GGML_QNT_VERSION: of the layouts of blocks
_DROPPED = ("general.alignment", "split.no", "split.count", "split.tensors.count")

# Ids of this text differ between all pre-tokenizers that are known.
_PROBE = (
    "Hello, world! It's 2024: we've paid $1,234,567.89 (12345678 in all) for x_1 = y[0]->z && !done;\n\n\n\tdef f(a, b=3):\n"
    "        return a**2  # ok...   \r\n  'quoted' \"text\"  -- naïve café ÄÖÜß 你好，世界 こんにちは 안녕하세요 Привет мир "
    "مرحبا हिन्दी 🚀🚀 e\u0301 ™ ½ ³ IV  http://a.b/c?d=e&f=%20 CamelCaseWord I'LL DON'T we'Re \u00a0\u2003end   "
)


def gguf_name(config: ModelConfig, name: str) -> str:
    """The name in GGUF files of a tensor by its canonical name, or of the one that it is a part of."""
    marks = ["layers.0.q_a"] if config.latent and config.latent.q_rank else []  # which names of queries' matrices depend on
    return next(iter(file_names(FAMILIES[config.architecture], GGUF, [name, *marks])))


def one_format_of_joined(config: ModelConfig, formats: Mapping[str, Format], choose: Callable[..., Format]) -> dict[str, Format]:
    """The formats of matrices, one for those that are one tensor in the file: that of most or fewest bits, by `choose`."""
    found = dict(formats)
    for ours in file_names(FAMILIES[config.architecture], GGUF, formats).values():
        chosen = choose((formats[name] for name in ours), key=lambda format: format.bits)
        found |= dict.fromkeys(ours, chosen)
    return found


def source_entries(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The entries of a model: those of a GGUF file to the byte, converted ones of a Hugging Face directory.

    Raises ConfigError for a tokenizer, or settings, that have no place in such a file: nothing is lost silently.
    """
    if isinstance(checkpoint.vocabulary, GgufVocabulary):
        return {key: data.tobytes() for key, data in read_gguf(checkpoint.path).entries.items() if key not in _DROPPED}
    checkpoint = _of_plain_family(checkpoint)
    config, family = checkpoint.config, FAMILIES[checkpoint.config.architecture]
    architecture = family.gguf_name
    made = shape_entries(config, checkpoint.name)
    pooling = {name: number for number, name in GGUF_POOLINGS.items()}[checkpoint.pooling]
    if pooling:
        made[f"{architecture}.pooling_type"] = pooling
    for name, value in checkpoint.sampling.fields().items():
        made[GGUF_SAMPLING_KEYS[name]] = value if name == "top_k" else float(value)
    if checkpoint.mask_id is not None:
        raise ConfigError(f"{checkpoint.path} drafts with a mask, which GGUF files cannot name; {_REMEDY}")
    again = config_of(str(checkpoint.path), made, family, dict(checkpoint.tensors), rope_factors(config))
    if lost := [f"{name} {getattr(config, name)!r}"[:100] for name in vars(config) if not _survives(name, config, again)]:
        raise ConfigError(f"{checkpoint.path}: GGUF files of {architecture} models have no place for {', '.join(lost)}; {_REMEDY}")
    return {key: entry(key, value) for key, value in made.items()} | tokenizer_entries(checkpoint)


def _of_plain_family(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as one of the family that its GGUF file belongs to, where a Hugging Face directory has no recurrent layers.

    A mixture without rotation stays what it is: llama.cpp rotates all of `granitemoe`.
    """
    config = checkpoint.config
    plain = FAMILIES[config.architecture].gguf_plain
    if not plain or config.is_recurrent or isinstance(checkpoint.vocabulary, GgufVocabulary):
        return checkpoint
    if "none" in config.layer_ropes and not FAMILIES[plain].tells_ropes:
        return checkpoint
    return replace(checkpoint, config=replace(config, architecture=plain))


def _survives(name: str, config: ModelConfig, again: ModelConfig) -> bool:
    """Whether a field is the same after writing and reading, or differs in a way that no computation sees."""
    value, other = getattr(config, name), getattr(again, name)
    if name == "rope_scaling" and value is not None and value.kind == "longrope":
        numbers = [[*s.factors, *s.short_factors, s.original_context_length, s.attention_factor or 1.0] for s in (value, other)]
        return np.allclose(numbers[0], numbers[1], rtol=1e-6, atol=0)
    if name == "rope_scaling":  # those of Llama 3 become factors
        one, two = (Rope(c.rope_base, c.rope_scaling, c.rope_dims) for c in (config, again))
        same = np.allclose(inverse_frequencies(one, config.head_dim), inverse_frequencies(two, config.head_dim), rtol=1e-6, atol=0)
        return same and math.isclose(attention_factor(one.scaling), attention_factor(two.scaling), rel_tol=1e-6)
    if name == "experts" and config.experts and again.experts:
        # The least sum of weights that are normalised is the container's (`families.LEAST_SUM`): no scores have a sum below it.
        return replace(config.experts, least_sum=again.experts.least_sum) == again.experts
    if name == "recurrent" and isinstance(value, Mamba2):
        return replace(value, least_step=0.0) == other  # llama.cpp's steps have no least
    if name == "architecture":
        return FAMILIES[value].gguf_name == FAMILIES[other].gguf_name
    if name == "local_rope_base" and "local" not in config.layer_ropes:
        return True
    return math.isclose(value, other, rel_tol=1e-6) if isinstance(value, float) and isinstance(other, float) else value == other


def write_model(
    path: Path,
    checkpoint: Checkpoint,
    tensors: Mapping[str, QuantTensor],
    file_type: int,
    extra: Mapping[str, Value],
    source: Mapping[str, bytes] | None = None,
    predicts: bool = True,
) -> None:
    """Write a model as one file, which takes the place of `path` when it is whole.

    tensors: every tensor by canonical name. file_type: llama.cpp's number of the mix. extra: entries that tell how it was made.
    source: what `source_entries` gave. predicts: whether it keeps its layer for multi-token prediction.
    Raises ConfigError as that does, OSError where the file cannot be written.
    """
    checkpoint = _of_plain_family(checkpoint)
    config = checkpoint.config
    family = FAMILIES[config.architecture]
    new_entries: dict[str, Value] = {"general.file_type": file_type, "general.quantization_version": _QUANTIZATION_VERSION, **extra}
    others: dict[str, QuantTensor] = {}
    head = prediction.writable(checkpoint) if predicts else None
    predicting = prediction.tensors_of(checkpoint, head, tensors) if head else {}
    entries = {**(source_entries(checkpoint) if source is None else source)}
    if isinstance(checkpoint.vocabulary, GgufVocabulary):
        known, names = {gguf_name(config, name) for name in checkpoint.tensors}, Names(family, GGUF)
        left_out = checkpoint.prediction_layers.keys() if predicting or not predicts else set()
        stored = read_parts(checkpoint.path).tensors.items()
        kept = checkpoint.prediction_layers.keys() - left_out
        others = {name: one for name, one in stored if name in kept or not (name in known or names.ours(name) or name in left_out)}
        if checkpoint.prediction_layers and not predicts:
            new_entries |= prediction.entries_without(checkpoint)
    else:
        others = rope_factors(config)
        if checkpoint.ranker and checkpoint.ranker.weight:
            others[RANKS] = checkpoint.ranker.weight
            new_entries |= {f"{family.gguf_name}.pooling_type": RANK}
            new_entries |= {"tokenizer.chat_template.rerank": checkpoint.ranker.prompt}
        if predicting:
            architecture = family.gguf_name
            new_entries |= prediction.entries_with(shape_entries(config, checkpoint.name), architecture)
    entries |= {key: entry(key, value) for key, value in new_entries.items()}
    by_file = file_names(family, GGUF, checkpoint.tensors)

    def data_of(name: str) -> U8:
        if name in others:
            return others[name].data
        if name in predicting:
            return prediction.encoded(*predicting[name])
        tensor = joined(config, family, GGUF, {ours: tensors[ours] for ours in by_file[name]})
        return np.concatenate([part.data for part in tensor.parts]) if tensor.parts else tensor.data

    infos = {name: TensorInfo(tensor.format, tensor.shape) for name, tensor in others.items()}
    for theirs, ours in by_file.items():
        shapes = [file_shape(config, GGUF, name, tensors[name].shape) for name in ours]
        infos[theirs] = TensorInfo(tensors[ours[0]].format, joined_shape(shapes))
    infos |= {name: TensorInfo(format, tensor.shape) for name, (format, tensor) in predicting.items()}
    with replacing(path) as file:
        write_gguf(file, entries, infos, data_of)


def rope_factors(config: ModelConfig) -> dict[str, QuantTensor]:
    """Tensors that say how a Llama 3 or LongRoPE slows each frequency down, by their names in the file; none for other models."""
    scaling, f32 = config.rope_scaling, get_format("f32")
    if scaling is not None and scaling.kind == "longrope":
        both = {_LONG: scaling.factors, _SHORT: scaling.short_factors}
        return {name: QuantTensor.encode(f32, np.array(factors)) for name, factors in both.items()}
    if scaling is not None and scaling.kind == "factors":
        return {_ROPE_FACTORS: QuantTensor.encode(f32, np.array(scaling.factors))}
    if scaling is None or scaling.kind != "llama3":
        return {}
    rope_dims = config.rope_dims or config.head_dim
    plain, scaled = (inverse_frequencies(Rope(config.rope_base, one), rope_dims) for one in (None, scaling))
    return {_ROPE_FACTORS: QuantTensor.encode(f32, plain / scaled)}


def shape_entries(config: ModelConfig, name: str, architecture: str = "") -> dict[str, Value]:
    """Metadata of a model, in the names that llama.cpp's converter gives. architecture: by default that of the family."""
    c, architecture = config, architecture or FAMILIES[config.architecture].gguf_name
    found: dict[str, Value] = {
        "block_count": c.num_layers,
        "context_length": c.context_length,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_heads,
        "attention.head_count_kv": c.num_kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.value_dim or c.head_dim,
        f"attention.layer_norm_{'rms_' if c.norm_kind == 'rms' else ''}epsilon": c.norm_eps,
        "rope.dimension_count": c.head_dim,
        "rope.freq_base": c.rope_base,
        "vocab_size": c.vocab_size,
    }
    if "partial_rotary_factor" in FAMILIES[c.architecture].hf_defaults and c.rope_dims:
        found["rope.dimension_count"] = c.rope_dims
    if c.layer_windows:
        found["attention.sliding_window"] = max(c.layer_windows)
        found["attention.sliding_window_pattern"] = np.array([window > 0 for window in c.layer_windows])
    if c.query_growth and FAMILIES[c.architecture].temperature_grows:
        found["attention.temperature_scale"] = c.query_growth
    if FAMILIES[c.architecture].has_sections:
        # Sections of time, height and width, which are one for texts: those of published models, or pairs dealt out in turn.
        rope_dims = (c.rope_dims or c.head_dim) // 2
        sections = [24, 20, 20] if rope_dims == 64 else [(rope_dims + 2 - i) // 3 for i in range(3)]
        found["rope.dimension_sections"] = np.array([*sections, 0], np.int32)
    if FAMILIES[c.architecture].has_logit_scale:
        found["logit_scale"] = c.logit_scale
    if "local" in c.layer_ropes:
        found["rope.freq_base_swa"] = c.local_rope_base
    if c.attention_softcap:
        found["attn_logit_softcapping"] = c.attention_softcap
    if c.logit_softcap:
        found["final_logit_softcapping"] = c.logit_softcap
    if FAMILIES[c.architecture].has_scales:
        found |= {"embedding_scale": c.embedding_scale, "residual_scale": c.residual_scale, "logit_scale": 1 / c.logit_scale}
        found["attention.scale"] = 1 / math.sqrt(c.head_dim) if c.query_scale is None else c.query_scale
    if c.experts:
        found |= {
            "expert_count": c.experts.count,
            "expert_used_count": c.experts.used,
            "expert_feed_forward_length": c.experts.size,
            "expert_shared_feed_forward_length": c.shared_size,
            "expert_shared_count": c.shared_size // c.experts.size,
            "expert_gating_func": {name: number for number, name in GGUF_SCORES.items()}[c.experts.score],
            "expert_weights_norm": c.experts.normalised,
            "expert_weights_scale": c.experts.scale,
            "expert_group_count": c.experts.groups,
            "expert_group_used_count": c.experts.groups_used,
            "leading_dense_block_count": c.layer_experts.index(True) if c.layer_experts else 0,
            "interleave_moe_layer_step": 1,
        }
    scaling = c.rope_scaling
    if scaling is not None and scaling.kind == "longrope":
        found |= {"rope.scaling.original_context_length": scaling.original_context_length}
        found |= {"rope.scaling.attn_factor": scaling.attention_factor or 1.0}
    if scaling is not None and scaling.kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": scaling.kind, "rope.scaling.factor": scaling.factor}
        if scaling.kind == "yarn":
            own = attention_factor(replace(scaling, attention_factor=None))
            if scaling.attention_factor is not None:
                found["rope.scaling.attn_factor"] = scaling.attention_factor / own
            found |= {
                "rope.scaling.original_context_length": scaling.original_context_length,
                "rope.scaling.yarn_beta_fast": scaling.beta_fast,
                "rope.scaling.yarn_beta_slow": scaling.beta_slow,
            }
            if not scaling.truncate:
                found["rope.scaling.yarn_truncate"] = False
    found = {
        key: value for key, value in (found | gguf_entries(c) | latent_entries(c) | gemma_entries(c)).items() if value is not None
    }
    if FAMILIES[c.architecture].tells_ropes and (c.is_recurrent or "none" in c.layer_ropes):
        found["rope.scaling.finetuned"] = "none" not in c.layer_ropes
    general: dict[str, Value] = {"general.architecture": architecture, "general.type": "model", "general.name": name}
    return general | {f"{architecture}.{key}": value for key, value in found.items()}


def tokenizer_entries(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Entries of the tokenizer: those of a GGUF file to the byte, converted ones of a Hugging Face directory.

    Raises ConfigError if llama.cpp could not encode as it does.
    """
    if isinstance(checkpoint.vocabulary, GgufVocabulary):
        return {key: data.tobytes() for key, data in read_gguf(checkpoint.path).entries.items() if key.startswith("tokenizer.")}
    return {key: entry(key, value) for key, value in _tokenizer(checkpoint, checkpoint.vocabulary).items()}


def _tokenizer(checkpoint: Checkpoint, files: HfTokenizerFiles) -> dict[str, Value]:
    tokenizer = make_tokenizer(checkpoint)
    size = checkpoint.config.vocab_size
    read = read_hf_vocabulary(files, size)
    settings = read_json(files.directory / "tokenizer_config.json")
    if isinstance(read, GgufVocabulary):
        raise ConfigError(f"{files.tokenizer_json} is missing, which a GGUF file is made of; save the tokenizer with it")
    tokens = [text if text is not None else f"[PAD{i}]" for i, text in enumerate(read.tokens)]
    types = [NORMAL if text is not None else UNUSED for text in read.tokens]
    if not read.byte_level:
        types = [
            BYTE if len(text) == 6 and text.startswith("<0x") and text.endswith(">") else kind
            for text, kind in zip(tokens, types, strict=True)
        ]
    for added in read.added:
        types[added.id] = CONTROL if added.special else USER_DEFINED
    if read.unk_token in read.vocab and not read.byte_level:
        types[read.vocab[read.unk_token]] = UNKNOWN
    tokens += [f"[PAD{i}]" for i in range(len(tokens), size)]
    types += [UNUSED] * (size - len(types))

    def token_id(name: str) -> int | None:
        text = settings.get(f"{name}_token")
        text = text.get("content") if isinstance(text, dict) else text
        return read.vocab.get(text) if isinstance(text, str) else None

    around = tokenizer.encode("")
    prepends = any(step["type"] == "Prepend" for step in read.normalizer) or any(
        step["type"] == "Metaspace" and step["prepend_scheme"] != "never" for step in read.pre_tokenizer
    )
    ends = sorted(tokenizer.eos_ids)
    vocabulary = GgufVocabulary(
        model="gpt2" if read.byte_level else "llama",
        pre="default",
        tokens=tuple(tokens),
        token_types=tuple(types),
        merges=tuple(f"{left} {right}" for left, right in read.merges) if read.byte_level else (),
        # The library's merges join the pieces of SentencePiece in the order of their ids.
        scores=() if read.byte_level else tuple(-float(i) for i in range(size)),
        bos_id=tokenizer.bos_id,
        eos_id=token_id("eos") if token_id("eos") is not None else ends[0] if ends else None,
        unk_id=token_id("unk"),
        pad_id=token_id("pad"),
        end_ids=tuple(end for end in ends if end != token_id("eos")),
        add_bos=tokenizer.bos_id is not None and tokenizer.bos_id in around[:1],
        add_eos=bool(around) and around[-1] in tokenizer.eos_ids and len(around) > int(around[0] == tokenizer.bos_id),
        add_space_prefix=prepends and not read.byte_level,
        chat_templates=tokenizer.chat_templates,
    )
    wanted = tokenizer.encode(_PROBE)
    first_names = {rules: name for name, rules in reversed(list(PRE_TOKENIZERS.items())) if not rules.spaced}.values()
    for pre in reversed(first_names) if read.byte_level else ("default",):
        vocabulary = replace(vocabulary, pre=pre)
        if make_tokenizer(replace(checkpoint, vocabulary=vocabulary)).encode(_PROBE) == wanted:
            return vocabulary_entries(vocabulary)
    raise ConfigError(
        f"{files.tokenizer_json}: no tokenizer that llama.cpp knows gives the same ids on a text of many kinds, so a GGUF "
        "file would mislead; write compressed-tensors (OUT without .gguf), or start from a GGUF file of the model"
    )


def vocabulary_entries(vocabulary: GgufVocabulary) -> dict[str, Value]:
    """Metadata of a tokenizer."""
    found: dict[str, Value] = {
        "tokenizer.ggml.model": vocabulary.model,
        "tokenizer.ggml.pre": vocabulary.pre,
        "tokenizer.ggml.tokens": list(vocabulary.tokens),
        "tokenizer.ggml.token_type": np.array(vocabulary.token_types, np.int32),
        "tokenizer.ggml.add_bos_token": bool(vocabulary.add_bos),
        "tokenizer.ggml.add_eos_token": bool(vocabulary.add_eos),
        "tokenizer.ggml.add_space_prefix": bool(vocabulary.add_space_prefix),
    }
    if vocabulary.scores:
        found["tokenizer.ggml.scores"] = np.array(vocabulary.scores, np.float32)
    if vocabulary.merges:
        found["tokenizer.ggml.merges"] = list(vocabulary.merges)
    ids = {"bos": vocabulary.bos_id, "eos": vocabulary.eos_id, "unknown": vocabulary.unk_id, "padding": vocabulary.pad_id}
    found |= {f"tokenizer.ggml.{name}_token_id": value for name, value in ids.items() if value is not None}
    # llama.cpp reads the first two, and others the list.
    found |= {f"tokenizer.ggml.{name}_token_id": end for name, end in zip(("eot", "eom"), vocabulary.end_ids, strict=False)}
    if vocabulary.end_ids:
        ends = vocabulary.end_ids if vocabulary.eos_id is None else (vocabulary.eos_id, *vocabulary.end_ids)
        found["tokenizer.ggml.eos_token_ids"] = np.array(ends, np.int32)
    for name, template in vocabulary.chat_templates.items():
        found["tokenizer.chat_template" if name == "default" else f"tokenizer.chat_template.{name}"] = template
    return found
