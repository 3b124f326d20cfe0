"""Small random models, complete with a vocabulary that works, for tests and for trying things without a download.

    python tools/make_tiny_model.py gguf tiny.gguf architecture=qwen3 weight_format=q4_k num_layers=4
    python tools/make_tiny_model.py hf tiny-llama architecture=llama dtype=bf16
    python tools/make_tiny_model.py shape speed.gguf shape=qwen2.5-7b weight_format=q4_k

The pairs are arguments of `make_tiny_gguf`, `make_tiny_hf` and `write_random_gguf`, with the fields of `TinyShape`. `shape` writes
the exact shapes of a known model (SHAPES) with random weights: for speed, not for text. Files are written by the package's own
writers; tests hold these to the gguf package, to transformers and to llama.cpp's own order of rows.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from cpuspec.checkpoints import gemma
from cpuspec.checkpoints.canonical import GGUF, HF, file_names, file_shape, joined, joined_shape
from cpuspec.checkpoints.checkpoint import GgufVocabulary, is_matrix, tensor_shapes
from cpuspec.checkpoints.families import FAMILIES, Family, layer_flags
from cpuspec.checkpoints.fields import Fields
from cpuspec.checkpoints.gguf_writer import TensorInfo, entry
from cpuspec.checkpoints.gguf_writer import write_gguf as write_container
from cpuspec.checkpoints.huggingface import EXPERTS_USED, FIRSTS, SHARED_COUNTS, SHARED_SIZES, read_config
from cpuspec.checkpoints.recurrent import EXPERT_COUNTS, multiplied
from cpuspec.checkpoints.safetensors import header_of
from cpuspec.config import DeltaNet, Experts, Latent, Mamba2, ModelConfig, RopeScaling, ShortConv
from cpuspec.formats import QuantTensor, get_format
from cpuspec.formats.tensor import F32, U8
from cpuspec.quantize.gguf_output import rope_factors, shape_entries, vocabulary_entries
from cpuspec.quantize.mixes import fitting_format
from cpuspec.text.parts import CONTROL, NORMAL, UNUSED
from cpuspec.text.tokenizer import BYTE_OF

SHAPES: Mapping[str, ModelConfig] = {
    "smollm2-135m": ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, 1e5, tied_embeddings=True),
    "qwen2.5-0.5b": ModelConfig("qwen2", 151936, 896, 4864, 24, 14, 2, 64, 32768, 1e-6, 1e6, qkv_bias=True, tied_embeddings=True),
    "qwen2.5-1.5b": ModelConfig("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, 32768, 1e-6, 1e6, qkv_bias=True, tied_embeddings=True),
    "qwen2.5-7b": ModelConfig("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, 32768, 1e-6, 1e6, qkv_bias=True),
    "qwen3-0.6b": ModelConfig("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 40960, 1e-6, 1e6, qk_norm=True, tied_embeddings=True),
    "qwen3-1.7b": ModelConfig("qwen3", 151936, 2048, 6144, 28, 16, 8, 128, 40960, 1e-6, 1e6, qk_norm=True, tied_embeddings=True),
    "lfm2.5-1.2b": ModelConfig(
        "lfm2", 65536, 2048, 8192, 16, 32, 8, 64, 128000, 1e-5, 1e6, qk_norm=True, tied_embeddings=True,
        recurrent=ShortConv(2048), layer_recurrent=tuple(i not in (2, 5, 8, 10, 12, 14) for i in range(16)),
    ),
    "qwen3-30b-a3b": ModelConfig(
        "qwen3moe", 151936, 2048, 6144, 48, 32, 4, 128, 40960, 1e-6, 1e6, qk_norm=True, experts=Experts(128, 8, 768),
    ),
    "qwen3.5-4b": ModelConfig(
        "qwen35", 248320, 2560, 9216, 32, 16, 4, 256, 262144, 1e-6, 1e7, qk_norm=True, tied_embeddings=True, rope_dims=64,
        gated_attention=True, recurrent=DeltaNet(16, 128, 32, 128, tiled=True), layer_recurrent=(True, True, True, False) * 8,
    ),
    "qwen3.5-35b-a3b": ModelConfig(
        "qwen35moe", 248320, 2048, 512, 40, 16, 2, 256, 262144, 1e-6, 1e7, qk_norm=True, rope_dims=64, gated_attention=True,
        recurrent=DeltaNet(16, 128, 32, 128, tiled=True), layer_recurrent=(True, True, True, False) * 10,
        experts=Experts(256, 8, 512), shared_size=512, weighs_shared=True,
    ),
    "gpt-oss-20b": ModelConfig(
        "gpt-oss", 201088, 2880, 2880, 24, 64, 8, 64, 131072, 1e-5, 150000.0,
        RopeScaling("yarn", 32.0, original_context_length=4096), qkv_bias=True, o_bias=True, activation="swiglu_oai",
        sinks=True, layer_windows=(128, 0) * 12, experts=Experts(32, 4, 2880, "chosen", normalised=False, bias=True),
    ),
}  # fmt: skip


def _published(family: str, **settings: Any) -> ModelConfig:
    """A model by what its config.json says besides the defaults of its family."""
    return read_config(Fields(family, {"architectures": [FAMILIES[family].hf_class], **settings}))


SHAPES = {
    **SHAPES,
    "gemma4-e4b": _published(
        "gemma4", hidden_size=2560, intermediate_size=10240, num_hidden_layers=42, num_attention_heads=8, num_key_value_heads=2,
        num_kv_shared_layers=18, final_logit_softcapping=30.0,
    ),
    "gemma4-26b-a4b": _published(
        "gemma4", hidden_size=2816, intermediate_size=2112, num_attention_heads=16, num_key_value_heads=8, enable_moe_block=True,
        num_global_key_value_heads=2, attention_k_eq_v=True, sliding_window=1024, hidden_size_per_layer_input=0, num_experts=128,
        top_k_experts=8, moe_intermediate_size=704, final_logit_softcapping=30.0,
    ),
    "deepseek-v2-lite": ModelConfig(
        "deepseek2", 102400, 2048, 10944, 27, 16, 1, 576, 163840, 1e-6, 1e4,
        RopeScaling("yarn", 40.0, original_context_length=4096, attention_factor=1.0), rope_dims=64,
        query_scale=(1 + 0.0707 * math.log(40)) ** 2 / math.sqrt(192), latent=Latent(512, 64, 128, 128),
        experts=Experts(64, 6, 1408, normalised=False), layer_experts=(False, *[True] * 26), shared_size=2816,
    ),
    "glm-4.7-flash": ModelConfig(
        "deepseek2", 154880, 2048, 10240, 47, 20, 1, 576, 202752, 1e-5, 1e6, rope_dims=64, query_scale=1 / 16,
        latent=Latent(512, 64, 192, 256, q_rank=768), experts=Experts(64, 4, 1536, "sigmoid", scale=1.8, shifted=True),
        layer_experts=(False, *[True] * 46), shared_size=1536,
    ),
}  # fmt: skip

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_BYTES = sorted(BYTE_OF, key=BYTE_OF.__getitem__)  # the character that stands for each byte

_CORPUS = (
    "the cat sat on the mat and the dog ran to the door while the rain was falling on the roof of the house "
    "a small model reads each weight once for every token so the time of a token is the time of reading the weights "
    "there is no other way to be fast than to read less or to use what was read more than once "
    "user system assistant write a poem about memory and return the answer as a list of words in one line "
    "def main return import print for in range if else while not none true false self class"
)


@cache
def shape_of(name: str, num_layers: int | None = None) -> ModelConfig:
    """One of SHAPES, cut to its first layers where a number is given."""
    config = SHAPES[name]
    count = config.num_layers if num_layers is None else num_layers
    return config.with_layers(range(count))


def make_vocabulary(vocab_size: int, pre: str = "qwen2") -> GgufVocabulary:
    """Byte-level BPE of `vocab_size` >= 259 tokens: bytes, merges learned from a few sentences, control tokens, then unused rows.

    pre: the name of the rules by which a text is split.
    """
    if vocab_size < 256 + len(CONTROL_TOKENS):
        raise ValueError(f"vocab_size must be at least {256 + len(CONTROL_TOKENS)}, got {vocab_size}")
    words = Counter((_BYTES[ord(" ")], *word) for word in _CORPUS.split())
    merges = learn_merges(words, min(vocab_size - 256 - len(CONTROL_TOKENS), 120))
    normal = [*_BYTES, *(left + right for left, right in merges)]
    unused = [f"[PAD{i}]" for i in range(len(normal) + len(CONTROL_TOKENS), vocab_size)]
    first, end = len(normal), len(normal) + CONTROL_TOKENS.index("<|im_end|>")
    return GgufVocabulary(
        model="gpt2",
        pre=pre,
        tokens=(*normal, *CONTROL_TOKENS, *unused),
        token_types=(*[NORMAL] * len(normal), *[CONTROL] * len(CONTROL_TOKENS), *[UNUSED] * len(unused)),
        merges=tuple(f"{left} {right}" for left, right in merges),
        bos_id=first,
        eos_id=end,
        pad_id=first,
        chat_templates={"default": CHAT_TEMPLATE},
    )


def learn_merges(words: Mapping[tuple[str, ...], int], count: int) -> list[tuple[str, str]]:
    """Up to `count` most frequent pairs of pieces, one after the other; ties go to the alphabetically first pair.

    words: how often each is there. (Sennrich et al. 2016, algorithm 1.)
    """
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, frequency in words.items():
            for pair in pairwise(word):
                pairs[pair] += frequency
        if not pairs:
            break
        merges.append(min(pairs, key=lambda pair: (-pairs[pair], pair)))
        words = Counter({merged(word, merges[-1]): frequency for word, frequency in words.items()})
    return merges


def merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    """The pieces of a word with each such pair of neighbours joined, from the left."""
    found: list[str] = []
    for piece in word:
        if found and (found[-1], piece) == pair:
            found[-1] += piece
        else:
            found.append(piece)
    return tuple(found)


@dataclass(frozen=True)
class TinyShape:
    """The arguments of `tiny_config`. None and empty: what the architecture has. The sizes suit every format."""

    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    vocab_size: int = 384
    context_length: int = 512
    tied: bool = True
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_dims: int = 0
    qkv_bias: bool | None = None
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool | None = None
    window: int | None = None  # of all layers, or in a Gemma of each layer but every second; None: 8 in a Gemma and else none
    query_scale: float | None = None
    query_growth: float = 0.0
    mscale: float = 0.0  # the slope of the factor of scores under YaRN, with latent attention
    # Of families with experts:
    num_experts: int = 8
    num_used: int = 3
    expert_size: int = 128
    dense_layers: tuple[int, ...] = ()  # layers without experts
    shared_size: int = 0  # of the part beside the experts
    router: Mapping[str, Any] = field(default_factory=dict)  # fields of `Experts`
    # Of families with other mixers than attention:
    mixers: tuple[str, ...] = ()  # of each layer; by default one of each kind in turns
    mamba2: Mamba2 | None = None
    delta: DeltaNet | None = None  # in all layers but each fourth, or the last
    latent: Latent | None = None
    # Of a Gemma 4:
    same_values: bool = False  # layers without a window make values of keys
    shared_layers: int = 0  # last layers that read keys and values of others, and have twice the size
    layer_input_size: int = 0


def tiny_config(architecture: str = "qwen2", **chosen: Any) -> ModelConfig:
    """A small ModelConfig. chosen: fields of `TinyShape`. Factors and soft caps of a family are large enough to matter."""
    family = FAMILIES[architecture]
    s = _completed(architecture, TinyShape(**chosen))
    every_bias = family.hf_defaults.get("use_bias") is True
    grown = (s.rope_scaling and s.rope_scaling.original_context_length) or s.context_length
    sizes = {name: getattr(s, name) for name in ("intermediate_size", "num_heads", "num_kv_heads", "head_dim")}
    config = ModelConfig(
        architecture=architecture,
        vocab_size=s.vocab_size,
        hidden_size=s.hidden_size,
        num_layers=s.num_layers,
        context_length=s.context_length,
        norm_eps=1e-6,
        rope_base=s.rope_base,
        rope_scaling=s.rope_scaling,
        rope_dims=s.rope_dims,
        qkv_bias=family.qkv_bias or every_bias if s.qkv_bias is None else s.qkv_bias,
        o_bias=s.o_bias or every_bias,
        mlp_bias=s.mlp_bias or every_bias,
        query_growth=s.query_growth,
        query_growth_length=grown if s.query_growth else 0,
        tied_embeddings=s.tied and not family.folds_multipliers,
        latent=s.latent if family.latent else None,
        **_factors(architecture, s),
        **_windows(architecture, s),
        **_mixture(family, s),
        **(sizes | _recurrent(family, s)),
        **{"qk_norm": family.hf_defaults.get("use_qk_norm", False) if s.qk_norm is None else s.qk_norm, **family.flags},
    )
    return _by_window(config, s) if family.by_window else config


def _completed(architecture: str, s: TinyShape) -> TinyShape:
    """The shape with what files of the architecture always have, and with the defaults of its class."""
    family = FAMILIES[architecture]
    if architecture in _ONE_SIZE:
        s = replace(s, intermediate_size=s.expert_size)
    if architecture == "gpt-oss":
        yarn = RopeScaling("yarn", 32.0, original_context_length=64)
        s = replace(s, qkv_bias=True, o_bias=True, rope_scaling=s.rope_scaling or yarn)
    if architecture in ("hunyuan-moe", "gemma4-moe"):
        s = replace(s, shared_size=s.expert_size if architecture == "hunyuan-moe" else s.intermediate_size)
    if architecture in ("ministral3", "mistral4"):
        yarn = RopeScaling("yarn", 4.0, original_context_length=s.context_length // 8, attention_factor=1.0)
        s = replace(s, rope_scaling=s.rope_scaling or yarn, query_growth=s.query_growth or 0.125, mscale=s.mscale or 1.0)
    if family.delta_layers:
        s = replace(s, rope_dims=s.rope_dims or s.head_dim // 4)
    if family.latent:
        latent = s.latent or Latent(64, 32, 64, 48, q_rank=96)
        s = replace(s, latent=latent, rope_dims=latent.rope_dims, num_kv_heads=1, head_dim=latent.dims)
    return s


def _factors(architecture: str, s: TinyShape) -> dict[str, Any]:
    """Arguments of ModelConfig that multiply or bound what layers compute."""
    family = FAMILIES[architecture]
    found: dict[str, Any] = {
        "embedding_scale": math.sqrt(s.hidden_size) if family.scales_embeddings else 1.0,
        "query_scale": s.query_scale,
        "attention_softcap": 2.0 if architecture == "gemma2" else 0.0,
        "logit_softcap": 3.0 if architecture == "gemma2" or family.by_window else 0.0,
    }
    if family.has_scales:
        found |= {"embedding_scale": 3.0, "query_scale": 0.25, "residual_scale": 0.5, "logit_scale": 0.5}
    if family.has_logit_scale:
        found["logit_scale"] = 0.25
    if family.latent and s.latent:
        grows = 0.1 * math.log(s.rope_scaling.factor) if s.rope_scaling else 0.0
        found["query_scale"] = (1 + s.mscale * grows) ** 2 / math.sqrt(s.latent.plain + s.latent.rope_dims)
    return found


def _windows(architecture: str, s: TinyShape) -> dict[str, Any]:
    """Arguments of ModelConfig about the windows and the rotation of each layer."""
    family = FAMILIES[architecture]
    has_windows = architecture in ("gemma2", "gemma3", "olmo3", "cohere2", "gpt-oss") or family.by_window
    size = (8 if has_windows else 0) if s.window is None else s.window
    slides = [not (has_windows or family.turns_in_windows) or i % 2 == 0 for i in range(s.num_layers)]
    every = family.unrotated_every or s.num_layers + 1
    rotates = [(i + 1) % every != 0 and not (family.has_scales and family.recurrent) for i in range(s.num_layers)]
    return layer_flags(size, slides, slides if family.turns_in_windows and size else rotates, has_local_rope=family.has_local_rope)


def _mixture(family: Family, s: TinyShape) -> dict[str, Any]:
    """Arguments of ModelConfig about experts; none for families without."""
    if family.experts is None:
        return {}
    settings = family.hf_defaults
    facts = {
        "normalised": family.gguf_defaults.get("expert_weights_norm", True),
        "score": settings.get("score_function", "softmax"),
        "shifted": any(settings.get(key) for key in ("moe_router_enable_expert_bias", "use_expert_bias")),
        **family.experts,
        **{"count": s.num_experts, "used": s.num_used, "size": s.expert_size},
        **s.router,
    }
    return {
        "experts": Experts(**facts),
        "layer_experts": tuple(i not in s.dense_layers for i in range(s.num_layers)) if s.dense_layers else (),
        "shared_size": s.shared_size,
        "weighs_shared": s.shared_size > 0 and family.gates_shared,
    }


def _by_window(config: ModelConfig, s: TinyShape) -> ModelConfig:
    """A Gemma 4: layers without a window have heads twice as long, and with `same_values` one key head."""
    count, first = config.num_layers, config.num_layers - s.shared_layers
    slides = [window > 0 for window in config.layer_windows]
    heads = 1 if s.same_values else config.num_kv_heads
    last = {kind: max(i for i in range(first) if slides[i] == kind) for kind in (False, True)}
    return replace(
        config,
        head_dim=2 * config.head_dim,
        num_kv_heads=heads,
        layer_head_dims=tuple(config.head_dim * (1 if slid else 2) for slid in slides),
        layer_kv_heads=tuple(config.num_kv_heads if slid else heads for slid in slides),
        layer_values=tuple(slides) if s.same_values else (),
        layer_owners=tuple(i if i < first else last[slides[i]] for i in range(count)) if s.shared_layers else (),
        layer_sizes=tuple(config.intermediate_size * (1 if i < first else 2) for i in range(count)) if s.shared_layers else (),
        layer_input_size=s.layer_input_size,
        query_scale=1.0,
        rope_scaling=RopeScaling("factors", factors=(1.0,) * (config.head_dim // 4) + (gemma.STILL,) * (config.head_dim * 3 // 4)),
    )


def _recurrent(family: Family, s: TinyShape) -> dict[str, Any]:
    """Arguments of ModelConfig for the mixers of a family; none for a family with attention only."""
    if family.delta_layers:
        interval = min(4, s.num_layers)
        recurs = tuple((i + 1) % interval != 0 for i in range(s.num_layers))
        return {"recurrent": s.delta or DeltaNet(2, 64, 4, 64, tiled=family.tiles_values), "layer_recurrent": recurs}
    if not family.recurrent:
        return {}
    turns = {
        "short_conv": ("short_conv", "attention"), "both": ("both",), "mamba2": ("mamba2", "attention"),
        "mamba2 alone": ("mamba2",), "mamba2 and feed": ("mamba2", "none", "attention", "none"),
    }  # fmt: skip
    kind = family.recurrent
    if family.single_branch:
        kind += " and feed" if "up" in family.layer_names else " alone"
    chosen = s.mixers or tuple(turns[kind][i % len(turns[kind])] for i in range(s.num_layers))
    recurs, mamba2 = tuple(one in ("short_conv", "mamba2") for one in chosen), Mamba2(2, 32, 8, 64, normed=kind != "both")
    found: dict[str, Any] = {"layer_recurrent": recurs} if any(recurs) else {}
    if any(recurs) or "both" in chosen:
        mixer = ShortConv(s.hidden_size) if kind == "short_conv" else s.mamba2 or mamba2
        found |= {"recurrent": mixer, "beside": "both" in chosen}
    if family.single_branch:
        found["layer_feeds"] = tuple(one == "none" for one in chosen)
    if not {"attention", "both"} & set(chosen):
        found |= {"num_heads": 1, "num_kv_heads": 1, "head_dim": 2, "intermediate_size": 0}
    return found


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, F32]:
    """Random tensors under canonical names, of magnitudes that give logits a standard deviation near 2.

    The same config and seed give the same values.
    """
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in tensor_shapes(config).items():
        mean, deviation = _moments(name, shape)
        weights[name] = (mean + deviation * rng.standard_normal(shape)).astype(np.float32)
        if config.value_norm and name.endswith("q_norm"):
            weights[name] /= np.float32(math.sqrt(len(weights[name])))  # scores have no other factor
        if isinstance(config.recurrent, DeltaNet) and name.endswith("delta_qkv"):
            # Keys resemble queries: a result that nearly vanishes would have its rounding errors magnified by the norm after it.
            size = config.recurrent.key_heads * config.recurrent.key_dims
            weights[name][size : 2 * size] += weights[name][:size]
    return weights


def with_prediction(config: ModelConfig) -> ModelConfig:
    """The model with attention in its last layer, as one for multi-token prediction has."""
    return replace(config, layer_recurrent=(*config.layer_recurrent[:-1], False)) if config.layer_recurrent else config


def prediction_weights(config: ModelConfig, seed: int = 7) -> dict[str, F32]:
    """Random tensors of a layer for multi-token prediction, besides those of a layer of the model, by their names in GGUF files."""
    rng, hidden = np.random.default_rng(seed), config.hidden_size
    shapes = {"eh_proj": (hidden, 2 * hidden), "enorm": (hidden,), "hnorm": (hidden,), "shared_head_norm": (hidden,)}
    found = {}
    for name, shape in shapes.items():
        mean, deviation = _moments(name, shape)
        found[name] = (mean + deviation * rng.standard_normal(shape)).astype(np.float32)
    return found


def _moments(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a tensor's random values."""
    if name.endswith("norm"):
        return 1.0, 0.1
    if name.endswith(("delta_decay", "ssm_a")):  # below 0
        return -1.0, 0.15
    if name.endswith(("expert_gate_bias", "expert_up_bias")):
        return 0.0, 4.0  # some are clamped
    if name.endswith("bias"):
        return 0.0, 0.5
    if name.endswith("sinks"):
        return 0.0, 2.0
    if name.endswith(("ssm_d", "output_scale", "router_factors")):
        return 1.0, 0.2
    return 0.0, (2.0 if name in ("embed", "output") else 1.0) / math.sqrt(shape[-1])


def make_tiny_gguf(
    path: str | Path,
    architecture: str = "qwen2",
    *,
    weight_format: str = "q4_0",
    embed_format: str | None = None,
    output_format: str | None = None,
    seed: int = 0,
    predicts: bool = False,
    **shape: Any,
) -> Path:
    """Write a small random model as one GGUF file and return its path. Embedding and output formats default to the weights'.

    predicts: whether the last layer is one for multi-token prediction. shape: fields of `TinyShape`.
    """
    config = with_prediction(tiny_config(architecture, **shape)) if predicts else tiny_config(architecture, **shape)
    weights, formats = random_weights(config, seed), {"embed_format": embed_format, "output_format": output_format}
    predicting = prediction_weights(config) if predicts else {}
    return write_gguf(path, config, weights, weight_format=weight_format, **formats, predicting=predicting)


def make_tiny_hf(
    directory: str | Path,
    architecture: str = "qwen2",
    *,
    dtype: str = "f32",
    num_shards: int = 1,
    seed: int = 0,
    predicts: bool = False,
    **shape: Any,
) -> Path:
    """Write a small random model as a Hugging Face directory and return its path. dtype: f32, f16 or bf16.

    predicts: whether the last layer is one for multi-token prediction. shape: fields of `TinyShape`.
    """
    config = with_prediction(tiny_config(architecture, **shape)) if predicts else tiny_config(architecture, **shape)
    predicting = prediction_weights(config) if predicts else {}
    weights = random_weights(config, seed)
    return write_huggingface(directory, config, weights, dtype=dtype, num_shards=num_shards, predicting=predicting)


def write_gguf(
    path: str | Path,
    config: ModelConfig,
    weights: Mapping[str, F32],
    *,
    weight_format: str = "q4_0",
    embed_format: str | None = None,
    output_format: str | None = None,
    predicting: Mapping[str, F32] = MappingProxyType({}),
) -> Path:
    """Write weights under canonical names as a GGUF file, matrices in the formats asked for, vectors in f32. Returns the path.

    predicting: `prediction_weights`, with which the last layer is one for multi-token prediction.
    """
    asked = {"": weight_format, "embed": embed_format, "output": output_format}
    parts, infos = _gguf_tensors(config, {name: values.shape for name, values in weights.items()}, asked)
    others = {}
    for name, values in predicting.items():
        format = fitting_format(weight_format, values.shape[-1]) if values.ndim > 1 else get_format("f32")
        others[f"blk.{config.num_layers - 1}.nextn.{name}.weight"] = QuantTensor.encode(format, values)

    def data_of(name: str) -> U8:
        whole = joined(config, FAMILIES[config.architecture], GGUF, {ours: _f32(weights[ours]) for ours in parts[name]})
        return infos[name].format.encode(whole.dequantize())

    return _write_gguf(Path(path), config, infos, data_of, others, {"nextn_predict_layers": 1} if predicting else {})


def _f32(values: F32) -> QuantTensor:
    return QuantTensor.encode(get_format("f32"), values)


def _gguf_tensors(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], asked: Mapping[str, str | None]
) -> tuple[dict[str, tuple[str, ...]], dict[str, TensorInfo]]:
    """The tensors of a file by name: their canonical parts, and their formats and shapes.

    shapes: by canonical name. asked: the format of matrices, by canonical name and by "" for all others.
    """
    parts, infos = file_names(FAMILIES[config.architecture], GGUF, shapes), dict[str, TensorInfo]()
    for theirs, ours in parts.items():
        shape = joined_shape([file_shape(config, GGUF, name, shapes[name]) for name in ours])
        # llama.cpp's converter writes routers in F32, and llama-quantize leaves them so.
        stays = ours[0].endswith((".router", ".shared_weight")) or not is_matrix(ours[0], shapes[ours[0]])
        wanted = get_format("f32") if stays else fitting_format(asked.get(ours[0]) or asked[""] or "", shape[-1])
        infos[theirs] = TensorInfo(wanted, shape)
    return parts, infos


def _write_gguf(
    path: Path,
    config: ModelConfig,
    infos: Mapping[str, TensorInfo],
    data_of: Callable[[str], U8],
    others: Mapping[str, QuantTensor] = MappingProxyType({}),
    extra: Mapping[str, int] = MappingProxyType({}),
) -> Path:
    """Write a file whose tensors `data_of` makes, one at a time. extra: more metadata, by keys without the architecture."""
    # By the name phi3 llama.cpp looks for tokens that this vocabulary has not.
    entries = shape_entries(config, f"tiny random {config.architecture.replace('phi3', 'phi')}")
    entries |= {f"{FAMILIES[config.architecture].gguf_name}.{key}": value for key, value in extra.items()}
    entries.pop(f"{FAMILIES[config.architecture].gguf_name}.attention.recurrent_layers", None)  # most files have the interval only
    vocabulary = make_vocabulary(config.vocab_size, "smollm" if config.architecture == "llama" else "qwen2")
    made = {**rope_factors(config), **others}
    all_infos = {name: TensorInfo(tensor.format, tensor.shape) for name, tensor in made.items()} | dict(infos)
    with path.open("wb") as file:
        data = {key: entry(key, value) for key, value in (entries | vocabulary_entries(vocabulary)).items()}
        write_container(file, data, all_infos, lambda name: made[name].data if name in made else data_of(name))
    return path


def write_random_gguf(
    path: str | Path,
    config: ModelConfig,
    *,
    weight_format: str = "q4_k",
    output_format: str | None = None,
    embed_format: str | None = None,
    seed: int = 0,
) -> Path:
    """Write a model of any size (SHAPES has known ones) with random weights, one tensor in memory at a time. Returns the path.

    A tied model gets an output matrix of its own when `output_format` is given, as Q4_K_M files have. The embedding's format
    defaults to the weights'.
    """
    rng, shapes = np.random.default_rng(seed), tensor_shapes(config)
    if output_format is not None:
        shapes["output"] = shapes["embed"]
    asked = {"": weight_format, "output": output_format, "embed": embed_format}
    if weight_format == "mxfp4":  # of which files of gpt-oss have their experts only
        asked |= {name: asked.get(name) or "q8_0" for name in shapes if "expert_" not in name}
    parts, infos = _gguf_tensors(config, shapes, asked)

    def data_of(name: str) -> U8:
        # A few thousand encoded blocks, drawn again and again: encoding billions of values would take minutes.
        format, shape = infos[name].format, infos[name].shape
        mean, deviation = _moments(parts[name][0], shape)
        pool: U8 = format.encode(mean + deviation * rng.standard_normal((2048, format.block_size)))
        return pool[rng.integers(0, len(pool), math.prod(shape) // format.block_size, dtype=np.int32)]

    return _write_gguf(Path(path), config, infos, data_of)


def write_huggingface(
    directory: str | Path,
    config: ModelConfig,
    weights: Mapping[str, F32],
    *,
    dtype: str = "f32",
    num_shards: int = 1,
    predicting: Mapping[str, F32] = MappingProxyType({}),
) -> Path:
    """Write weights under canonical names as a Hugging Face directory with configuration and tokenizer. Returns the directory.

    predicting: `prediction_weights`, with which the last layer is one for multi-token prediction.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    family, format = FAMILIES[config.architecture], get_format(dtype)
    rows, stored = {name: _f32(values) for name, values in weights.items()}, dict[str, QuantTensor]()
    if family.folds_multipliers:
        # A file's tensors times its factors are the model's.
        ones = {name: _f32(np.ones_like(values)) for name, values in weights.items()}
        by = multiplied(Fields("factors", MULTIPLIERS), family, config, ones)[1]
        rows = {name: _f32(values / by[name].dequantize()) for name, values in weights.items()}
    prefix = "model.language_model." if family.text_alike else "model."
    if config.sinks:
        stored |= {name: QuantTensor.encode(format, values) for name, values in gpt_oss_experts(weights).items()}
    others = [name for name in weights if not (config.sinks and ".expert_" in name)]
    for name, ours in file_names(family, HF, others).items():
        tensor = joined(config, family, HF, {one: rows[one] for one in ours})
        theirs = prefix + name.removeprefix("model.") if name.startswith("model.") else name
        if ours[0].endswith("router_shift"):
            stored[theirs] = _f32(tensor.dequantize()[None] if family.hf_shift_is_row else tensor.dequantize())
        elif "*" in theirs:
            values = tensor.dequantize()
            stored |= {theirs.replace("*", str(i)): QuantTensor.encode(format, one) for i, one in enumerate(values)}
        else:
            stored[theirs] = QuantTensor.encode(format, tensor.dequantize())
    last = f"{prefix}layers.{config.num_layers - 1}."
    for name, values in predicting.items():
        theirs = f"{last}{name.replace('shared_head_', 'shared_head.')}.weight"
        stored[theirs] = QuantTensor.encode(format, values - np.float32(family.norm_offset * (values.ndim == 1)))
    if predicting and config.recurrent:
        stored = {_qwen_name(name, last): tensor for name, tensor in stored.items()}
    if num_shards == 1:
        write_safetensors(directory / "model.safetensors", stored)
    else:
        weight_map: dict[str, str] = {}
        for shard in range(num_shards):
            file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
            part = {name: stored[name] for name in list(stored)[shard::num_shards]}
            write_safetensors(directory / file_name, part)
            weight_map |= dict.fromkeys(part, file_name)
        index = {"metadata": {"total_size": sum(t.num_bytes for t in stored.values())}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    settings = _hf_config(config.with_layers(range(config.num_layers - 1)) if predicting else config, dtype)
    if predicting:
        settings["num_nextn_predict_layers"] = 1
    if family.text_alike:  # there is no class of the text part alone
        vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "deepstack_visual_indexes": [0]}
        settings = {
            "architectures": [family.hf_wrapper],
            "model_type": family.hf_types[1],
            "text_config": settings,
            "vision_config": {**vision, "out_hidden_size": config.hidden_size},
            "tie_word_embeddings": config.tied_embeddings,
        }
    (directory / "config.json").write_text(json.dumps(settings, indent=2), "utf-8")
    _write_hf_tokenizer(directory, config)
    return directory


def write_safetensors(path: Path, tensors: Mapping[str, QuantTensor]) -> None:
    """Write f32, f16 or bf16 tensors as one safetensors file."""
    told = ((name, tensor.format.name.upper(), tensor.shape, tensor.num_bytes) for name, tensor in tensors.items())
    path.write_bytes(header_of(told, {"format": "pt"}) + b"".join(tensor.data.tobytes() for tensor in tensors.values()))


def _qwen_name(name: str, layer: str) -> str:
    """The name of a tensor where the model's last layer is one for multi-token prediction. layer: what its names begin with."""
    parts = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm"}
    part = name.removeprefix(layer).removesuffix(".weight")
    if not name.startswith(layer):
        return name
    return f"mtp.{parts[part]}.weight" if part in parts else name.replace(layer, "mtp.layers.0.")


# Of a Falcon-H1: those of its configuration, each with its own number.
MULTIPLIERS: Mapping[str, Any] = MappingProxyType(
    {
        **{"embedding_multiplier": 2.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.75, "attention_in_multiplier": 1.5},
        **{"attention_out_multiplier": 0.625, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.875},
        **{"mlp_multipliers": [0.8, 1.125], "ssm_multipliers": [0.5, 1.25, 0.7, 1.5, 0.9]},
    }
)


def gpt_oss_experts(weights: Mapping[str, F32]) -> dict[str, F32]:
    """The experts' tensors of a gpt-oss in transformers' layout, inputs first, gate and up in turns."""
    found = {}
    for layer in [name.removesuffix("expert_gate") for name in weights if name.endswith("expert_gate")]:
        gate, up, down = (weights[f"{layer}expert_{part}"] for part in ("gate", "up", "down"))
        biases = [weights[f"{layer}expert_{part}_bias"] for part in ("gate", "up")]
        experts = f"model.{layer}mlp.experts."
        both = np.stack([gate, up], axis=2).reshape(len(gate), -1, gate.shape[2])
        found[f"{experts}gate_up_proj"] = np.ascontiguousarray(both.swapaxes(1, 2))
        found[f"{experts}gate_up_proj_bias"] = np.stack(biases, axis=2).reshape(len(gate), -1)
        found[f"{experts}down_proj"] = np.ascontiguousarray(down.swapaxes(1, 2))
        found[f"{experts}down_proj_bias"] = weights[f"{layer}expert_down_bias"]
    return found


# Families whose files have one size for dense parts and experts.
_ONE_SIZE = ("nemotron_h_moe", "mixtral", "olmoe", "granitemoe", "granitehybrid-moe", "hunyuan-moe", "gpt-oss")


def _gemma4_settings(config: ModelConfig) -> dict[str, Any]:
    """The settings of a config.json of transformers' Gemma4TextConfig that other families do not have."""
    c, scaling = config, config.rope_scaling
    first = next((i for i, window in enumerate(c.layer_windows) if window), 0)
    turned = sum(factor == 1 for factor in scaling.factors) / len(scaling.factors) if scaling else 1.0
    shared = sum(owner != i for i, owner in enumerate(c.layer_owners))
    return {
        "head_dim": c.layer_head_dims[first], "global_head_dim": c.head_dim, "num_key_value_heads": c.layer_kv_heads[first],
        "num_global_key_value_heads": c.num_kv_heads, "attention_k_eq_v": bool(c.layer_values), "num_kv_shared_layers": shared,
        "use_double_wide_mlp": bool(c.layer_sizes), "hidden_size_per_layer_input": c.layer_input_size,
        "vocab_size_per_layer_input": c.vocab_size, "sliding_window": max(c.layer_windows),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in c.layer_windows],
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": c.rope_base, "partial_rotary_factor": turned},
            "sliding_attention": {"rope_type": "default", "rope_theta": c.local_rope_base},
        },
        "final_logit_softcapping": c.logit_softcap or None, "enable_moe_block": c.experts is not None,
        **({"top_k_experts": c.experts.used} if c.experts else {}),
    }  # fmt: skip


def _hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json in the spelling that every version of transformers reads."""
    c, family, vocabulary = config, FAMILIES[config.architecture], make_vocabulary(config.vocab_size)
    defaults, is_gemma = family.hf_defaults, config.architecture.startswith("gemma")
    scaling = _hf_rope_scaling(c.rope_scaling) if not family.by_window else None
    fields: dict[str, Any] = {
        "architectures": [family.hf_class],
        "model_type": family.hf_types[0] or c.architecture,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.context_length,
        next((key for key in ("norm_epsilon", "layer_norm_eps") if key in defaults), "rms_norm_eps"): c.norm_eps,
        "hidden_activation" if is_gemma else "hidden_act": "gelu_pytorch_tanh" if c.activation == "gelu_tanh" else "silu",
        "rope_theta": c.rope_base,
        "rope_scaling": scaling,
        "tie_word_embeddings": c.tied_embeddings,
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
        "pad_token_id": vocabulary.pad_id,
        "torch_dtype": {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[dtype],
        **(_hf_experts(c, c.experts) if c.experts else {}),
        **_hf_biases(c),
    }
    if "use_qk_norm" in defaults:
        fields["use_qk_norm"] = c.qk_norm
    if family.has_scales:
        fields |= {"embedding_multiplier": c.embedding_scale, "attention_multiplier": c.query_scale}
        fields |= {"residual_multiplier": c.residual_scale, "logits_scaling": 1 / c.logit_scale}
    if family.has_logit_scale:
        fields["logit_scale"] = c.logit_scale
    if not c.latent and (c.rope_dims or defaults.get("partial_rotary_factor", 1.0) != 1.0):
        fields["partial_rotary_factor"] = (c.rope_dims or c.head_dim) / c.head_dim
    if c.rope_scaling and c.rope_scaling.kind == "longrope":
        fields["original_max_position_embeddings"] = c.rope_scaling.original_context_length
    if c.architecture == "gpt-oss" or c.query_growth:
        growth = {"llama_4_scaling_beta": c.query_growth} if c.query_growth else {}
        del fields["rope_scaling"]
        scaling = fields["rope_parameters"] = {**(scaling or {"rope_type": "default"}), "rope_theta": c.rope_base, **growth}
    if latent := c.latent:
        del fields["head_dim"]
        fields["num_key_value_heads"] = c.num_heads  # which classes read and do not use
        fields |= {"kv_lora_rank": latent.rank, "q_lora_rank": latent.q_rank or None, "v_head_dim": latent.value_dims}
        fields |= {"qk_rope_head_dim": latent.rope_dims, "qk_nope_head_dim": latent.plain, "rope_interleave": True}
        if scaling:
            grows = 0.1 * math.log(scaling["factor"])
            slope = (math.sqrt((c.query_scale or 0) * math.sqrt(latent.plain + latent.rope_dims)) - 1) / grows
            scaling |= {"mscale": slope, "mscale_all_dim": slope}
            del scaling["attention_factor"]
    if is_gemma:
        fields["query_pre_attn_scalar"] = c.head_dim if c.query_scale is None else round(c.query_scale**-2)
        fields["attn_logit_softcapping"], fields["final_logit_softcapping"] = c.attention_softcap or None, c.logit_softcap or None
    if c.layer_windows or defaults.get("use_sliding_window"):
        fields["use_sliding_window"], fields["sliding_window"] = True, max(c.layer_windows, default=None)
    if c.layer_windows or "sliding_window_pattern" in defaults:
        windows = c.layer_windows or (0,) * c.num_layers
        fields["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
    if c.architecture == "gemma3":
        fields["rope_local_base_freq"] = c.local_rope_base
    if "none" in c.layer_ropes and family.unrotated_every:
        fields["no_rope_layers"] = [int(kind != "none") for kind in c.layer_ropes]
    if isinstance(d := c.recurrent, DeltaNet):
        fields["layer_types"] = ["linear_attention" if recurs else "full_attention" for recurs in c.layer_recurrent]
        fields |= {"linear_num_key_heads": d.key_heads, "linear_key_head_dim": d.key_dims, "linear_conv_kernel_dim": d.taps}
        fields |= {"linear_num_value_heads": d.value_heads, "linear_value_head_dim": d.value_dims}
    if family.by_window:
        fields |= _gemma4_settings(c)
        for key in ("rope_theta", "rope_scaling", "query_pre_attn_scalar", "attn_logit_softcapping"):
            del fields[key]
    return fields | _hf_mixers(c)


def _hf_biases(config: ModelConfig) -> dict[str, bool]:
    """Which matrices have biases. Raises ValueError for a choice that directories of the family cannot tell."""
    family = FAMILIES[config.architecture]
    if "use_bias" in family.hf_defaults:
        return {"use_bias": config.qkv_bias}
    found = {"mlp_bias": True} if config.mlp_bias else {}
    if "attention_out_bias" in family.hf_defaults:
        return {**found, "attention_bias": config.qkv_bias, "attention_out_bias": config.o_bias}
    if family.hf_groups_heads or config.architecture == "stablelm":
        return {**found, "bias" if family.hf_groups_heads else "use_qkv_bias": config.qkv_bias}
    if (config.qkv_bias, config.o_bias) != ((True, False) if family.qkv_bias else (config.qkv_bias, config.qkv_bias)):
        raise ValueError("directories have q, k and v biases and none of o (Qwen2), or attention_bias, which means all four")
    return found if family.qkv_bias else {**found, "attention_bias": config.qkv_bias}


def _hf_mixers(config: ModelConfig) -> dict[str, object]:
    """The settings of mixers in the words of a family."""
    family, mixer = FAMILIES[config.architecture], config.recurrent
    if not family.recurrent:
        return {}
    none = (False,) * config.num_layers
    body, other = "moe" if config.experts else "mlp", "conv" if family.recurrent == "short_conv" else "linear_attention"
    kinds = zip(config.layer_recurrent or none, config.layer_feeds or none, strict=True)
    words = [other if recurs else body if feeds else "full_attention" for recurs, feeds in kinds]
    fields: dict[str, object] = {"norm_eps": config.norm_eps, "layer_norm_epsilon": config.norm_eps}
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_base}
    if family.recurrent != "both":
        fields["layers_block_type" if family.single_branch else "layer_types"] = words
    if config.architecture == "mamba2":
        del fields["layers_block_type"]
    if isinstance(mixer, ShortConv):
        fields |= {"conv_L_cache": mixer.taps, "block_auto_adjust_ff_dim": False}
    if family.has_scales and family.recurrent:
        fields["position_embedding_type"] = "nope" if "none" in config.layer_ropes else "rope"
        if not config.experts:
            fields |= {"num_local_experts": 0, "shared_intermediate_size": config.intermediate_size}
    if isinstance(mixer, Mamba2):
        heads, dims, groups, state = mixer.value_heads, mixer.value_dims, mixer.key_heads, mixer.key_dims
        facts = {
            "n_heads": heads, "num_heads": heads, "d_head": dims, "head_dim": dims, "d_state": state, "n_groups": groups,
            "d_conv": mixer.taps, "expand": mixer.inner // config.hidden_size, "conv_bias": mixer.bias,
        }  # fmt: skip
        fields |= {f"mamba_{name}": value for name, value in facts.items()}
        fields |= {"ssm_state_size": state, "n_groups": groups, "conv_kernel": mixer.taps, "use_conv_bias": mixer.bias}
        if config.architecture == "mamba2":
            fields |= {"num_heads": heads, "head_dim": dims, "state_size": state, "expand": facts["expand"]}
        if family.steps_at_least:
            fields["time_step_min"] = mixer.least_step
        if family.recurrent == "both":
            fields |= {**MULTIPLIERS, "mamba_d_ssm": mixer.inner, "mamba_rms_norm": mixer.normed, "mamba_norm_before_gate": False}
    if config.activation == "relu2":
        fields["mlp_hidden_act"] = "relu2"
    return fields


def _hf_experts(config: ModelConfig, experts: Experts) -> dict[str, Any]:
    """The settings of a mixture, under the names that its family has defaults for."""
    family, first_dense = FAMILIES[config.architecture], config.layer_experts.index(True) if config.layer_experts else 0
    is_hunyuan = config.architecture == "hunyuan-moe"

    def key(names: tuple[str, ...], default: str) -> str:
        return next((name for name in names if name in family.hf_defaults), default)

    shared = key((*SHARED_SIZES, *SHARED_COUNTS), "shared_intermediate_size" if family.has_scales else "num_shared_experts")
    fields: dict[str, Any] = {
        key(EXPERT_COUNTS, "num_experts"): experts.count,
        key(EXPERTS_USED, "moe_topk" if is_hunyuan else "num_experts_per_tok"): experts.used,
        "moe_intermediate_size": experts.size,
        shared: config.shared_size // (1 if shared in SHARED_SIZES else experts.size),
        key(FIRSTS, "first_k_dense_replace"): first_dense,
        "norm_topk_prob": experts.normalised,
        "routed_scaling_factor": experts.scale,
        "n_group": experts.groups,
        "topk_group": experts.groups_used,
        "mlp_only_layers": [i for i, has in enumerate(config.layer_experts) if not has],
    }
    if is_hunyuan:  # whose files say it of each layer
        fields |= {name: [fields[name]] * config.num_layers for name in ("moe_topk", shared, "moe_intermediate_size")}
    if config.architecture == "granitemoe" and config.shared_size:
        fields |= {"architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared"}
    if config.architecture == "glm4_moe_lite":
        fields["mlp_layer_types"] = ["dense"] * first_dense + ["sparse"] * (config.num_layers - first_dense)
    return fields


def _hf_rope_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.kind == "factors":
        raise ValueError("a Hugging Face configuration has no explicit rope factors; use llama3")
    if scaling.kind == "longrope":
        long, short = list(scaling.factors), list(scaling.short_factors)
        return {"rope_type": "longrope", "long_factor": long, "short_factor": short, "attention_factor": scaling.attention_factor}
    fields: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = scaling.original_context_length
    if scaling.kind == "llama3":
        fields |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        fields |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        fields |= {} if scaling.truncate else {"truncate": False}
        if scaling.attention_factor is not None:
            fields["attention_factor"] = scaling.attention_factor
    return fields


def _write_hf_tokenizer(directory: Path, config: ModelConfig) -> None:
    """tokenizer.json and tokenizer_config.json of the tiny vocabulary, split as the architecture's real models split."""
    vocabulary = make_vocabulary(config.vocab_size)
    normal = vocabulary.tokens[: vocabulary.token_types.count(NORMAL)]
    merges = [(left, right) for left, right in map(str.split, vocabulary.merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(normal)}, merges))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROL_TOKENS])
    is_llama = config.architecture == "llama"
    split: Any = pre_tokenizers.Digits(individual_digits=True)
    if not is_llama:
        pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        split, tokenizer.normalizer = pre_tokenizers.Split(Regex(pattern), "isolated"), normalizers.NFC()
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=is_llama)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, by_bytes])
    tokenizer.post_processor, tokenizer.decoder = processors.ByteLevel(trim_offsets=False), decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        **{"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, "add_prefix_space": False},
        **{"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        **{"clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), "utf-8")


def main(kind: str, path: str, *pairs: str) -> None:
    """The command line described at the top of this file: `name=value` pairs, whose values are JSON or plain words."""
    options: dict[str, Any] = {}
    for name, _, text in (pair.partition("=") for pair in pairs):
        options[name] = text
        with suppress(ValueError):
            options[name] = json.loads(text)
    if kind == "shape":
        config = shape_of(options.pop("shape"), options.pop("num_layers", None))
        written = write_random_gguf(path, config, **options)
    else:
        makers: dict[str, Callable[..., Path]] = {"gguf": make_tiny_gguf, "hf": make_tiny_hf}
        written = makers[kind](path, **options)
    print(f"wrote {written}")


if __name__ == "__main__":
    main(*sys.argv[1:])
