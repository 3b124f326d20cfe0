"""Small random models, complete with a vocabulary that works, for tests and for trying things without a download.

    python tools/make_tiny_model.py gguf tiny.gguf architecture=qwen3 weight_format=q4_k num_layers=4
    python tools/make_tiny_model.py hf tiny-llama architecture=llama dtype=bf16
    python tools/make_tiny_model.py shape speed.gguf shape=qwen2.5-7b weight_format=q4_k

The pairs are arguments of `make_tiny_gguf`, `make_tiny_hf` and `write_random_gguf`, with the fields of `TinyShape`. `shape` writes
the exact shapes of a known model (SHAPES) with random weights: for speed, not for text. Writing GGUF needs the `gguf`
package, an independent implementation of the container, so that files made here do not share our reader's mistakes.
"""

import json
import math
import struct
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from cpuspec.checkpoints import gemma
from cpuspec.checkpoints.canonical import GGUF, HF, file_names, file_shape
from cpuspec.checkpoints.checkpoint import is_matrix, tensor_shapes
from cpuspec.checkpoints.families import FAMILIES, Family, layer_flags
from cpuspec.checkpoints.latent import gguf_entries as latent_entries
from cpuspec.checkpoints.recurrent import gguf_entries
from cpuspec.config import DeltaNet, Experts, Latent, Mamba2, ModelConfig, RopeScaling, ShortConv
from cpuspec.formats import QuantTensor, get_format
from cpuspec.formats.tensor import F32, U8

if TYPE_CHECKING:
    import gguf

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


def _gemma4(
    windows: tuple[int, ...], heads: tuple[int, int], sizes: tuple[str, int, int, int, int, int], **facts: Any
) -> ModelConfig:
    """The numbers that all Gemma 4 have. heads: of keys, in layers with a window and in others; sizes: of `ModelConfig`, from
    architecture to num_heads."""
    architecture, vocab_size, hidden_size, intermediate_size, num_layers, num_heads = sizes
    return ModelConfig(
        architecture, vocab_size, hidden_size, intermediate_size, num_layers, num_heads,
        heads[1], 512, 131072, 1e-6, 1e6, RopeScaling("factors", factors=(1.0,) * 64 + (gemma.STILL,) * 192), qk_norm=True,
        tied_embeddings=True, norms="both", activation="gelu_tanh", embedding_scale=math.sqrt(hidden_size), query_scale=1.0,
        logit_softcap=30.0, layer_windows=windows, layer_ropes=tuple("local" if window else "global" for window in windows),
        layer_head_dims=tuple(256 if window else 512 for window in windows),
        layer_kv_heads=tuple(heads[not window] for window in windows), value_norm=True, scales_layers=True, **facts,
    )  # fmt: skip


_E4B_WINDOWS, _A4B_WINDOWS = ((512,) * 5 + (0,)) * 7, ((1024,) * 5 + (0,)) * 5
LATENT_SHAPES: Mapping[str, ModelConfig] = {
    # The last 18 layers read keys and values of layers 22 and 23.
    "gemma4-e4b": _gemma4(
        _E4B_WINDOWS, (2, 2), ("gemma4", 262144, 2560, 10240, 42, 8), layer_input_size=256,
        layer_owners=tuple(i if i < 24 else 22 if window else 23 for i, window in enumerate(_E4B_WINDOWS)),
    ),
    "gemma4-26b-a4b": _gemma4(
        _A4B_WINDOWS, (8, 2), ("gemma4-moe", 262144, 2816, 2112, 30, 16), layer_values=tuple(map(bool, _A4B_WINDOWS)),
        experts=Experts(128, 8, 704, weighed=True, normed_apart=True), shared_size=2112,
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
SHAPES = {**SHAPES, **LATENT_SHAPES}

# Parts of layers that llama.cpp's converter writes in F32, and llama-quantize leaves so.
_ALWAYS_F32 = ("router", "shared_weight")
# What llama-quantize takes where the rows do not fill superblocks.
_FALLBACK = {
    **{"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"},
    **dict.fromkeys(("iq4_xs", "nvfp4", "iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s"), "iq4_nl"),
    **dict.fromkeys(("tq1_0", "tq2_0", "q1_0", "q2_0"), "q4_0"),
}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_CORPUS = (
    "the cat sat on the mat and the dog ran to the door while the rain was falling on the roof of the house "
    "a small model reads each weight once for every token so the time of a token is the time of reading the weights "
    "there is no other way to be fast than to read less or to use what was read more than once "
    "user system assistant write a poem about memory and return the answer as a list of words in one line "
    "def main return import print for in range if else while not none true false self class"
)


@dataclass(frozen=True)
class TinyVocabulary:
    """Byte-level BPE: 256 bytes, merges learned from a few sentences, control tokens, then unused rows up to the size asked for."""

    tokens: tuple[str, ...]
    token_types: tuple[int, ...]  # GGUF's: 1 normal, 3 control, 5 unused
    merges: tuple[str, ...]

    def token_id(self, token: str) -> int:
        """The id of a token's text."""
        return self.tokens.index(token)


@cache
def shape_of(name: str, num_layers: int | None = None) -> ModelConfig:
    """One of SHAPES, cut to its first layers where a number is given."""
    config = SHAPES[name]
    count = config.num_layers if num_layers is None else num_layers
    return config.with_layers(range(count))


def make_vocabulary(vocab_size: int) -> TinyVocabulary:
    """A working vocabulary of `vocab_size` >= 259 tokens. The same for every call."""
    if vocab_size < 256 + len(CONTROL_TOKENS):
        raise ValueError(f"vocab_size must be at least {256 + len(CONTROL_TOKENS)}, got {vocab_size}")
    alphabet = byte_alphabet()
    merges = _learn_merges(min(vocab_size - 256 - len(CONTROL_TOKENS), 120))
    normal = [*alphabet, *(left + right for left, right in merges)]
    unused = [f"[PAD{i}]" for i in range(len(normal) + len(CONTROL_TOKENS), vocab_size)]
    return TinyVocabulary(
        tokens=(*normal, *CONTROL_TOKENS, *unused),
        token_types=(*[1] * len(normal), *[3] * len(CONTROL_TOKENS), *[5] * len(unused)),
        merges=tuple(f"{left} {right}" for left, right in merges),
    )


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (as GPT-2 introduced it), by byte."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(substitutes)) for byte in range(256)]


def _learn_merges(count: int) -> list[tuple[str, str]]:
    """Up to `count` most frequent pairs, one after the other; ties go to the alphabetically first pair."""
    space = byte_alphabet()[ord(" ")]
    words = Counter((space, *word) for word in _CORPUS.split())
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, frequency in words.items():
            for pair in pairwise(word):
                pairs[pair] += frequency
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = Counter({_merge(word, best): frequency for word, frequency in words.items()})
    return merges


def _merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    merged: list[str] = []
    for piece in word:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return tuple(merged)


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
    if family.single:
        kind += " and feed" if "up" in family.layer_names else " alone"
    chosen = s.mixers or tuple(turns[kind][i % len(turns[kind])] for i in range(s.num_layers))
    recurs, mamba2 = tuple(one in ("short_conv", "mamba2") for one in chosen), Mamba2(2, 32, 8, 64, normed=kind != "both")
    found: dict[str, Any] = {"layer_recurrent": recurs} if any(recurs) else {}
    if any(recurs) or "both" in chosen:
        mixer = ShortConv(s.hidden_size) if kind == "short_conv" else s.mamba2 or mamba2
        found |= {"recurrent": mixer, "beside": "both" in chosen}
    if family.single:
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

    path = Path(path)
    writer, family = _gguf_writer(path, config), FAMILIES[config.architecture]
    chosen = {"embed": embed_format or weight_format, "output": output_format or weight_format}
    rows = {name: _file_rows(name, values, config, family.pairs_neighbours) for name, values in weights.items()}
    rows = {name: values.reshape(file_shape(config, GGUF, name, values.shape)) for name, values in rows.items()}
    for theirs, ours in _gguf_parts(config, list(weights)).items():
        values = _joined_by_head(config, {name.rpartition(".")[2]: rows[name] for name in ours}, in_gguf=True)
        format_name = _gguf_format(ours[0], weights[ours[0]].shape, chosen.get(ours[0], weight_format), values.shape)
        stored = QuantTensor.encode(get_format(format_name), values)
        writer.add_tensor(theirs, stored.data, raw_dtype=_raw_dtype(format_name))
    if predicting:
        writer.add_nextn_predict_layers(1)
    for name, values in predicting.items():
        format_name = _fitting_format(weight_format, values.shape)
        data = QuantTensor.encode(get_format(format_name), values).data
        raw_dtype = _raw_dtype(format_name)
        writer.add_tensor(f"blk.{config.num_layers - 1}.nextn.{name}.weight", data, raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _raw_dtype(format_name: str) -> Any:
    """The type of a format in GGUF files, also one that is younger than the gguf package."""
    import gguf

    row = get_format(format_name)
    if row.gguf_type not in gguf.GGML_QUANT_SIZES:
        gguf.GGML_QUANT_SIZES[row.gguf_type] = (row.block_size, row.block_bytes)  # type: ignore[index]
    return row.gguf_type


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

    path = Path(path)
    rng = np.random.default_rng(seed)
    writer = _gguf_writer(path, config)
    shapes = tensor_shapes(config)
    if output_format is not None:
        shapes["output"] = shapes["embed"]
    formats = []
    for theirs, ours in _gguf_parts(config, list(shapes)).items():
        name, dims = ours[0], (sum(shapes[one][0] for one in ours), *shapes[ours[0]][1:])
        asked = {"output": output_format, "embed": embed_format}.get(name) or weight_format
        if asked == "mxfp4" and "expert_" not in name:  # as files of gpt-oss have it
            asked = "q8_0"
        in_file = file_shape(config, GGUF, name, dims)
        format, dims = get_format(_gguf_format(name, dims, asked, in_file)), in_file
        formats.append((name, format, dims))
        byte_shape = (*dims[:-1], format.row_bytes(dims[-1]))
        writer.add_tensor_info(theirs, byte_shape, np.dtype(np.uint8), math.prod(byte_shape), _raw_dtype(format.name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for held in [info.tensor for info in writer.tensors[0].values() if info.tensor is not None]:  # rope factors
        writer.write_tensor_data(held)
    for name, format, dims in formats:
        # A few thousand encoded blocks, drawn again and again: encoding billions of values would take minutes.
        mean, deviation = _moments(name, dims)
        pool: U8 = format.encode(mean + deviation * rng.standard_normal((2048, format.block_size)))
        num_blocks = math.prod(dims) // format.block_size
        writer.write_tensor_data(pool[rng.integers(0, len(pool), num_blocks, dtype=np.int32)])
    writer.close()
    return path


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
    family = FAMILIES[config.architecture]
    stored: dict[str, QuantTensor] = {}
    rows = {
        name: _hf_values(config, name, _file_rows(name, values, config, family.hf_pairs_neighbours), family.norm_offset)
        for name, values in weights.items()
    }
    rows = {name: _of_falcon(name, values, config) for name, values in rows.items()}
    prefix = "model.language_model." if family.text_alike else "model."
    if config.architecture == "gpt-oss":
        stored |= {name: QuantTensor.encode(get_format(dtype), values) for name, values in gpt_oss_experts(rows).items()}
    others = [name for name in weights if not any(f"expert_{part}" in name for part in ("gate", "up", "down") if config.sinks)]
    for name, ours in file_names(family, HF, others).items():
        values = _joined_by_head(config, {name.rpartition(".")[2]: rows[name] for name in ours})
        if family.hf_shift_is_row and ours[0].endswith("router_shift"):
            values = values[None]
        theirs = prefix + name.removeprefix("model.") if name.startswith("model.") else name
        format = get_format("f32" if ours[0].endswith("router_shift") else dtype)
        stored |= _hf_tensors(theirs, QuantTensor.encode(format, values))
    last = f"{prefix}layers.{config.num_layers - 1}."
    for name, values in predicting.items():
        theirs = f"{last}{name.replace('shared_head_', 'shared_head.')}.weight"
        stored[theirs] = QuantTensor.encode(get_format(dtype), values - np.float32(family.norm_offset * (values.ndim == 1)))
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


def _hf_values(config: ModelConfig, name: str, values: F32, norm_offset: float) -> F32:
    """A tensor's numbers as Hugging Face files of a family have them."""
    if isinstance(config.recurrent, DeltaNet) and config.recurrent.tiled:
        values = _untiled(config.recurrent, name, values)
    if name.endswith(("delta_decay", "ssm_a")):
        return np.log(-values)
    if name.endswith("_conv"):
        return values[:, None]
    return values - np.float32(norm_offset * (name.endswith("norm") and not name.endswith("delta_norm")))


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


def _of_falcon(name: str, values: F32, config: ModelConfig) -> F32:
    """A tensor of a Falcon-H1 without its factors."""
    mamba, by = config.recurrent, MULTIPLIERS
    if config.architecture != "falcon-h1" or not isinstance(mamba, Mamba2):
        return values
    groups = mamba.key_heads * mamba.key_dims
    z, x, b, c, dt = (by["ssm_in_multiplier"] * number for number in by["ssm_multipliers"])
    factors = {
        "embed": by["embedding_multiplier"], "output": by["lm_head_multiplier"], "q": by["attention_in_multiplier"],
        "k": by["attention_in_multiplier"] * by["key_multiplier"], "v": by["attention_in_multiplier"],
        "o": by["attention_out_multiplier"], "gate": by["mlp_multipliers"][0], "down": by["mlp_multipliers"][1],
        "ssm_z": z, "ssm_xbc": np.repeat([x, b, c], [mamba.inner, groups, groups])[:, None], "ssm_dt": dt,
        "ssm_out": by["ssm_out_multiplier"], "k_bias": by["key_multiplier"], "o_bias": by["attention_out_multiplier"],
    }  # fmt: skip
    return (values / factors.get(name.rpartition(".")[2], 1.0)).astype(np.float32)


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


def _joined(parts: list[F32]) -> F32:
    """Parts of one tensor, one after another along the rows."""
    return np.concatenate(parts, axis=-2 if parts[0].ndim > 1 else 0)


def _hf_tensors(name: str, tensor: QuantTensor) -> dict[str, QuantTensor]:
    """The tensor by its name, or, where that has a star, the matrix of each expert by its own."""
    if "*" not in name:
        return {name: tensor}
    return {name.replace("*", str(expert)): matrix for expert, matrix in enumerate(tensor.matrices)}


def write_safetensors(path: Path, tensors: Mapping[str, QuantTensor]) -> None:
    """Write f32, f16 or bf16 tensors as one safetensors file."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        offsets = [end, end := end + tensor.num_bytes]
        header[name] = {"dtype": tensor.format.name.upper(), "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.data.tobytes())


def _gguf_format(name: str, shape: tuple[int, ...], asked: str, in_file: tuple[int, ...]) -> str:
    """The format of a tensor of a GGUF file. asked: that of matrices; in_file: the tensor's shape there."""
    if name.rpartition(".")[2] in _ALWAYS_F32 or not is_matrix(name, shape):
        return "f32"
    return _fitting_format(asked, in_file)


def _fitting_format(name: str, shape: tuple[int, ...]) -> str:
    """`name`, or what takes its place for vectors (f32) and rows that do not fill its blocks."""
    if len(shape) == 1:
        return "f32"
    if shape[-1] % get_format(name).block_size:
        name = _FALLBACK.get(name, "f16")
    return name if shape[-1] % get_format(name).block_size == 0 else "f16"


def _untiled(delta: DeltaNet, name: str, values: F32) -> F32:
    """A tensor whose value heads go round the key heads in turns, with those of each key head side by side."""
    part, keys, size = name.rpartition(".")[2], 2 * delta.key_heads * delta.key_dims, delta.value_heads // delta.key_heads
    if not part.startswith("delta_") or part == "delta_norm":
        return values
    if part == "delta_o":
        return _untiled(delta, "delta_gate", values.T).T.copy()
    first = keys if part in ("delta_qkv", "delta_conv") else 0
    heads = values[first:].reshape(size, delta.key_heads, -1, *values.shape[1:]).swapaxes(0, 1)
    return np.concatenate([values[:first], heads.reshape(values[first:].shape)])


def _joined_by_head(config: ModelConfig, parts: Mapping[str, F32], in_gguf: bool = False) -> F32:
    """Parts of one tensor by name: head by head where files of the family have them so, else one after another."""
    rows, delta = list(parts.values()), config.recurrent
    match list(parts):
        case ["q", "q_gate"] | ["q_plain", "q_rope"]:
            heads = config.num_heads
        case ["k_b", "v_b"]:
            return np.concatenate([rows[0].swapaxes(1, 2), rows[1]], axis=1).reshape(-1, rows[1].shape[2])
        case ["q" | "q_bias", _, _] if FAMILIES[config.architecture].hf_groups_heads and not in_gguf:
            heads = config.num_kv_heads  # of InternLM2: for each key head its queries, itself, its value
        case ["delta_qkv", "delta_gate"] if isinstance(delta, DeltaNet):
            size, heads = delta.key_heads * delta.key_dims, delta.key_heads
            rows = [*np.split(rows[0], [size, 2 * size]), rows[1]]
        case ["delta_beta", "delta_alpha"] if isinstance(delta, DeltaNet):
            heads = delta.key_heads
        case _:
            return _joined(rows)
    groups = [part.reshape(heads, -1, *part.shape[1:]) for part in rows]
    return np.concatenate(groups, axis=1).reshape(-1, *rows[0].shape[1:])


def _gguf_parts(config: ModelConfig, names: list[str]) -> dict[str, tuple[str, ...]]:
    """Tensors as llama.cpp's converter writes them, with what each holds: named by the gguf package's own table."""
    family = FAMILIES[config.architecture]
    # The converter takes them apart, or renames them.
    renamed = config.architecture in ("gpt-oss", "granitemoe", "qwen3next") or family.by_window
    if family.hf_groups_heads or family.recurrent or family.latent or renamed:
        return file_names(family, GGUF, names)
    return {_gguf_name(theirs, config): ours for theirs, ours in file_names(family, HF, names).items()}


def _gguf_architecture(config: ModelConfig) -> str:
    return FAMILIES[config.architecture].gguf_name


def _gguf_name(name: str, config: ModelConfig) -> str:
    """The name that the gguf package's own table gives to a Hugging Face tensor of the architecture."""
    if name == "lm_head.weight":
        return "output.weight"
    # The converter joins experts, and looks their names up without a number.
    theirs = name.replace(".*.", ".").replace("correction_bias", "correction.bias").replace("expert_bias", "expert_bias.bias")
    theirs = theirs.replace("dt_bias", "dt_proj.bias")
    found = _gguf_names(_gguf_architecture(config), config.num_layers).get_name(theirs, (".weight", ".bias"))
    assert found, f"gguf has no name for {name} of {config.architecture}"
    return found


@cache
def _gguf_names(architecture: str, num_layers: int) -> "gguf.TensorNameMap":
    import gguf

    return gguf.get_tensor_name_map({text: number for number, text in gguf.MODEL_ARCH_NAMES.items()}[architecture], num_layers)


def _file_rows(name: str, values: F32, config: ModelConfig, pairs_neighbours: bool) -> F32:
    """Rows as files store them: some families pair neighbouring rows of q and k for rotation, not the two halves of a head. Those
    that turn come first.
    """
    part, dims = name.rpartition(".")[2], config.head_dim
    if part in ("q_rope", "k_rope"):
        assert config.latent, "the layer has it"
        return values.reshape(-1, 2, config.latent.rope_dims // 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    rope_dims = config.rope_dims or dims
    if part not in ("q", "k", "q_bias", "k_bias", "q_norm", "k_norm") or (rope_dims == dims and not pairs_neighbours):
        return values
    heads = config.num_heads if part.startswith("q") else config.num_kv_heads
    if part.endswith("norm") and config.norm_spans == "head":
        heads = 1
    columns = values.size // (heads * dims)
    halves = values.reshape(heads, 2, dims // 2, columns)
    first, rest = halves[:, :, : rope_dims // 2], halves[:, :, rope_dims // 2 :]
    if pairs_neighbours:
        first = first.swapaxes(1, 2)
    parts = first.reshape(heads, rope_dims, columns), rest.reshape(heads, dims - rope_dims, columns)
    return np.concatenate(parts, axis=1).reshape(values.shape)


def _add(writer: "gguf.GGUFWriter", **entries: Any) -> None:
    """Have the writer add each entry of metadata, by the name of its method."""
    for name, value in entries.items():
        getattr(writer, f"add_{name}")(value)


def _gguf_writer(path: Path, config: ModelConfig) -> "gguf.GGUFWriter":
    """A `gguf.GGUFWriter` that holds all metadata of the model and its vocabulary."""
    import gguf

    writer, family = gguf.GGUFWriter(path, _gguf_architecture(config)), FAMILIES[config.architecture]
    # By the name phi3 llama.cpp looks for tokens that this vocabulary has not.
    _add(writer, type="model", name=f"tiny random {config.architecture.replace('phi3', 'phi')}", block_count=config.num_layers)
    _add(writer, context_length=config.context_length, embedding_length=config.hidden_size)
    _add(writer, feed_forward_length=config.intermediate_size, head_count=config.num_heads, head_count_kv=config.num_kv_heads)
    _add(writer, key_length=config.head_dim, value_length=config.head_dim)
    _add(writer, rope_dimension_count=config.rope_dims or config.head_dim, rope_freq_base=config.rope_base)
    (writer.add_layer_norm_rms_eps if config.norm_kind == "rms" else writer.add_layer_norm_eps)(config.norm_eps)
    if FAMILIES[config.architecture].has_logit_scale:
        writer.add_logit_scale(config.logit_scale)
    if FAMILIES[config.architecture].has_sections:
        half = (config.rope_dims or config.head_dim) // 2
        writer.add_rope_dimension_sections([(half + 2 - i) // 3 for i in range(3)] + [0])
    if config.query_growth:
        writer.add_attn_temperature_scale(config.query_growth)
    if experts := config.experts:
        _add(writer, expert_count=experts.count, expert_used_count=experts.used, expert_feed_forward_length=experts.size)
        if config.shared_size and not family.latent:
            writer.add_expert_shared_feed_forward_length(config.shared_size)
        writer.add_expert_shared_count(config.shared_size // experts.size)
        if config.architecture in ("glm4moe", "bailingmoe2", "lfm2moe", "nemotron_h_moe") or family.latent:
            _add(writer, expert_weights_norm=experts.normalised, expert_weights_scale=experts.scale)
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType[experts.score.upper()])
        if experts.groups > 1:
            _add(writer, expert_group_count=experts.groups, expert_group_used_count=experts.groups_used)
        if config.layer_experts:
            writer.add_leading_dense_block_count(config.layer_experts.index(True))
        if config.architecture == "ernie4_5_moe":
            writer.add_interleave_moe_layer_step(1)
    if FAMILIES[config.architecture].has_scales:
        _add(writer, embedding_scale=config.embedding_scale, residual_scale=config.residual_scale)
        _add(writer, logit_scale=1 / config.logit_scale, attention_scale=config.query_scale or 0.0)
    _add_gguf_rope_scaling(writer, config)
    if config.layer_windows:
        writer.add_sliding_window(max(config.layer_windows))
        writer.add_sliding_window_pattern([window > 0 for window in config.layer_windows])
    if "local" in config.layer_ropes:
        writer.add_rope_freq_base_swa(config.local_rope_base)
    if config.attention_softcap:
        writer.add_attn_logit_softcapping(config.attention_softcap)
    if config.logit_softcap:
        writer.add_final_logit_softcapping(config.logit_softcap)

    for key, value in (gguf_entries(config) | latent_entries(config) | gemma.gguf_entries(config)).items():
        name = f"{_gguf_architecture(config)}.{key}"
        writer.kv_data[0].pop(name, None)
        if key == "attention.recurrent_layers":
            continue  # most files have the interval only
        if isinstance(value, np.ndarray):
            writer.add_array(name, value.tolist())
        elif value is not None:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(name, value)
    if family.recurrent == "mamba2" and family.has_scales:
        writer.add_rope_scaling_finetuned("none" not in config.layer_ropes)

    vocabulary = make_vocabulary(config.vocab_size)
    first, end = vocabulary.token_id("<|endoftext|>"), vocabulary.token_id("<|im_end|>")
    _add(writer, tokenizer_model="gpt2", tokenizer_pre="smollm" if config.architecture == "llama" else "qwen2")
    _add(writer, token_list=vocabulary.tokens, token_types=vocabulary.token_types, token_merges=vocabulary.merges)
    _add(writer, bos_token_id=first, eos_token_id=end, pad_token_id=first)
    _add(writer, add_bos_token=False, add_space_prefix=False, chat_template=CHAT_TEMPLATE)
    return writer


def _add_gguf_rope_scaling(writer: "gguf.GGUFWriter", config: ModelConfig) -> None:
    import gguf

    scaling = config.rope_scaling
    if scaling is None:
        return
    if scaling.kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(scaling.original_context_length)
        writer.add_rope_scaling_attn_factors(scaling.attention_factor or 1.0)
        for length, factors in (("long", scaling.factors), ("short", scaling.short_factors)):
            data = np.array(factors, np.float32).view(np.uint8)
            writer.add_tensor(f"rope_factors_{length}.weight", data, raw_dtype=gguf.GGMLQuantizationType.F32)
        return
    if scaling.kind in ("factors", "llama3"):
        factors = scaling.factors if scaling.kind == "factors" else llama3_factors(config)
        data = np.array(factors, np.float32).view(np.uint8)
        writer.add_tensor("rope_freqs.weight", data, raw_dtype=gguf.GGMLQuantizationType.F32)
        return
    _add(writer, rope_scaling_type=gguf.RopeScalingType(scaling.kind), rope_scaling_factor=scaling.factor)
    if scaling.kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling.original_context_length)
        _add(writer, rope_scaling_yarn_beta_fast=scaling.beta_fast, rope_scaling_yarn_beta_slow=scaling.beta_slow)
        if scaling.attention_factor == 1 and not config.latent:
            writer.add_rope_scaling_yarn_log_mul(1.0)


def llama3_factors(config: ModelConfig) -> tuple[float, ...]:
    """What each rotary frequency is divided by under llama3 scaling, as converters to GGUF write it; head_dim / 2 numbers.

    Waves shorter than the original context / high_freq_factor stay, longer than / low_freq_factor are stretched by `factor`,
    with a linear passage between (Llama 3.1 model card and reference code).
    """
    scaling = config.rope_scaling
    assert scaling is not None, "llama3 factors of a model without rope scaling"
    factors = []
    for i in range(config.head_dim // 2):
        wavelength = 2 * math.pi * config.rope_base ** (2 * i / config.head_dim)
        turns = scaling.original_context_length / wavelength
        smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = min(max(smooth, 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return tuple(factors)


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


def _hf_config(config: ModelConfig, dtype: str) -> dict[str, object]:
    """config.json in the spelling that every version of transformers reads."""
    vocabulary = make_vocabulary(config.vocab_size)
    fields: dict[str, object] = {
        "architectures": [FAMILIES[config.architecture].hf_class],
        "model_type": FAMILIES[config.architecture].hf_types[0] or config.architecture,
        **{"vocab_size": config.vocab_size, "hidden_size": config.hidden_size},
        **{"intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers},
        **{"num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads},
        **{"head_dim": config.head_dim, "max_position_embeddings": config.context_length, "rms_norm_eps": config.norm_eps},
        "rope_theta": config.rope_base,
        "rope_scaling": None if FAMILIES[config.architecture].by_window else _hf_rope_scaling(config.rope_scaling),
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": vocabulary.token_id("<|endoftext|>"),
        "eos_token_id": vocabulary.token_id("<|im_end|>"),
        "pad_token_id": vocabulary.token_id("<|endoftext|>"),
        "torch_dtype": {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[dtype],
    }
    if config.experts:
        fields |= _hf_experts(config, config.experts)
    if "use_qk_norm" in FAMILIES[config.architecture].hf_defaults:
        fields["use_qk_norm"] = config.qk_norm
    if FAMILIES[config.architecture].has_scales:
        fields |= {"embedding_multiplier": config.embedding_scale, "attention_multiplier": config.query_scale}
        fields |= {"residual_multiplier": config.residual_scale, "logits_scaling": 1 / config.logit_scale}
    family = FAMILIES[config.architecture]
    if config.norm_kind == "layer":
        fields[next(key for key in ("norm_epsilon", "layer_norm_eps") if key in family.hf_defaults)] = fields.pop("rms_norm_eps")
    if family.has_logit_scale:
        fields["logit_scale"] = config.logit_scale
    if config.rope_dims or family.hf_defaults.get("partial_rotary_factor", 1.0) != 1.0:
        fields["partial_rotary_factor"] = (config.rope_dims or config.head_dim) / config.head_dim
    if config.rope_scaling and config.rope_scaling.kind == "longrope":
        fields["original_max_position_embeddings"] = config.rope_scaling.original_context_length
    if config.architecture == "gpt-oss":
        fields["rope_parameters"] = {"rope_theta": config.rope_base, **(fields.pop("rope_scaling") or {"rope_type": "default"})}  # type: ignore[dict-item]
    if config.query_growth:
        fields["rope_parameters"] = {
            **fields.pop("rope_scaling"),  # type: ignore[dict-item]
            **{"rope_theta": config.rope_base, "llama_4_scaling_beta": config.query_growth},
        }
    if latent := config.latent:
        del fields["head_dim"], fields["partial_rotary_factor"]
        fields["num_key_value_heads"] = config.num_heads  # which classes read and do not use
        fields |= {"kv_lora_rank": latent.rank, "q_lora_rank": latent.q_rank or None, "v_head_dim": latent.value_dims}
        fields |= {"qk_rope_head_dim": latent.rope_dims, "qk_nope_head_dim": latent.plain, "rope_interleave": True}
        if isinstance(rope := fields.get("rope_scaling", fields.get("rope_parameters")), dict):
            del rope["attention_factor"]
            grows = 0.1 * math.log(rope["factor"])
            slope = (math.sqrt((config.query_scale or 0) * math.sqrt(latent.plain + latent.rope_dims)) - 1) / grows
            rope |= {"mscale": slope, "mscale_all_dim": slope}
    if config.architecture.startswith("gemma"):
        fields["hidden_activation"] = "gelu_pytorch_tanh"
        fields["query_pre_attn_scalar"] = config.head_dim if config.query_scale is None else round(config.query_scale**-2)
        fields["attn_logit_softcapping"] = config.attention_softcap or None
        fields["final_logit_softcapping"] = config.logit_softcap or None
        if config.architecture == "gemma3":
            fields["rope_local_base_freq"] = config.local_rope_base
    else:
        fields["hidden_act"] = "gelu_pytorch_tanh" if config.activation == "gelu_tanh" else "silu"
    if family.hf_defaults.get("use_sliding_window") and not config.architecture.startswith("gemma"):
        fields["sliding_window"] = max(config.layer_windows, default=None)
        if "sliding_window_pattern" in family.hf_defaults:
            windows = config.layer_windows or (0,) * config.num_layers
            fields["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
    elif config.layer_windows:
        fields["use_sliding_window"], fields["sliding_window"] = True, max(config.layer_windows)
        fields["layer_types"] = ["sliding_attention" if window else "full_attention" for window in config.layer_windows]
    if "none" in config.layer_ropes and family.unrotated_every:
        fields["no_rope_layers"] = [int(kind != "none") for kind in config.layer_ropes]
    if "use_bias" in family.hf_defaults:
        fields["use_bias"] = config.qkv_bias
    elif "attention_out_bias" in family.hf_defaults:
        fields["attention_bias"], fields["attention_out_bias"] = config.qkv_bias, config.o_bias
    elif family.hf_groups_heads or config.architecture == "stablelm":
        fields["bias" if family.hf_groups_heads else "use_qkv_bias"] = config.qkv_bias
    elif FAMILIES[config.architecture].qkv_bias:
        if not config.qkv_bias or config.o_bias:
            raise ValueError("a directory of this family always has q, k and v biases and no o bias")
    else:
        if config.qkv_bias != config.o_bias and "attention_out_bias" not in FAMILIES[config.architecture].hf_defaults:
            raise ValueError("attention_bias means q, k, v and o together: give qkv_bias and o_bias, or neither")
        fields["attention_bias"] = config.qkv_bias
    if isinstance(d := config.recurrent, DeltaNet):
        fields["layer_types"] = ["linear_attention" if recurs else "full_attention" for recurs in config.layer_recurrent]
        fields |= {"linear_num_key_heads": d.key_heads, "linear_key_head_dim": d.key_dims, "linear_conv_kernel_dim": d.taps}
        fields |= {"linear_num_value_heads": d.value_heads, "linear_value_head_dim": d.value_dims}
    if config.mlp_bias and "use_bias" not in family.hf_defaults:
        fields["mlp_bias"] = True
    if family.by_window:
        fields |= _gemma4_settings(config)
        for key in ("rope_theta", "rope_scaling", "query_pre_attn_scalar", "attn_logit_softcapping"):
            del fields[key]
    return fields | _hf_mixers(config)


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
        fields["layers_block_type" if family.single else "layer_types"] = words
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


def _hf_experts(config: ModelConfig, experts: Experts) -> dict[str, object]:
    """The settings of a mixture in the words of its family."""
    first_dense = config.layer_experts.index(True) if config.layer_experts else 0
    num_shared = config.shared_size // experts.size
    used: dict[str, object] = {"num_experts_per_tok": experts.used}
    match config.architecture:
        case "mixtral" | "olmoe" | "gpt-oss":
            key = "num_experts" if config.architecture == "olmoe" else "num_local_experts"
            return used | {key: experts.count, "norm_topk_prob": experts.normalised}
        case "granitemoe":
            shared = {"architectures": ["GraniteMoeSharedForCausalLM"], "model_type": "granitemoeshared"} if num_shared else {}
            return used | {"num_local_experts": experts.count, "shared_intermediate_size": config.shared_size, **shared}
        case "ernie4_5_moe":
            sizes = {"moe_num_experts": experts.count, "moe_k": experts.used, "moe_intermediate_size": experts.size}
            return {**sizes, "moe_num_shared_experts": num_shared, "moe_layer_start_index": first_dense, "moe_layer_interval": 1}
        case "hunyuan-moe":
            lists = {"moe_topk": experts.used, "num_shared_expert": num_shared, "moe_intermediate_size": experts.size}
            return {"num_experts": experts.count, **{key: [value] * config.num_layers for key, value in lists.items()}}
        case "granitehybrid-moe":
            return used | {"num_local_experts": experts.count, "shared_intermediate_size": config.shared_size}
        case "lfm2moe":
            return used | {
                **{"num_experts": experts.count, "moe_intermediate_size": experts.size, "num_dense_layers": first_dense},
                **{"norm_topk_prob": experts.normalised, "routed_scaling_factor": experts.scale, "use_expert_bias": True},
            }
        case "nemotron_h_moe":
            return used | {
                **{"n_routed_experts": experts.count, "moe_intermediate_size": experts.size, "n_group": experts.groups},
                **{"norm_topk_prob": experts.normalised, "routed_scaling_factor": experts.scale, "topk_group": experts.groups_used},
                "moe_shared_expert_intermediate_size": config.shared_size,
            }
        case "glm4moe" | "bailingmoe2" | "deepseek2" | "deepseek_v2" | "glm4_moe_lite" | "mistral4":
            prefix = "num" if config.architecture == "bailingmoe2" else "n"
            routed = "num_experts" if config.architecture == "bailingmoe2" else "n_routed_experts"
            dense: dict[str, object] = {"first_k_dense_replace": first_dense}
            if config.architecture == "glm4_moe_lite":
                dense = {"mlp_layer_types": ["dense"] * first_dense + ["sparse"] * (config.num_layers - first_dense)}
            return used | dense | {
                **{routed: experts.count, f"{prefix}_shared_experts": num_shared, "moe_intermediate_size": experts.size},
                **{"norm_topk_prob": experts.normalised, "routed_scaling_factor": experts.scale},
                **{"n_group": experts.groups, "topk_group": experts.groups_used},
            }  # fmt: skip
    return used | {
        "num_experts": experts.count,
        "moe_intermediate_size": experts.size,
        "norm_topk_prob": experts.normalised,
        "mlp_only_layers": [i for i, has in enumerate(config.layer_experts) if not has],
        "shared_expert_intermediate_size": config.shared_size,
    }


def _hf_rope_scaling(scaling: RopeScaling | None) -> dict[str, object] | None:
    if scaling is None:
        return None
    if scaling.kind == "factors":
        raise ValueError("a Hugging Face configuration has no explicit rope factors; use llama3")
    if scaling.kind == "longrope":
        long, short = list(scaling.factors), list(scaling.short_factors)
        return {"rope_type": "longrope", "long_factor": long, "short_factor": short, "attention_factor": scaling.attention_factor}
    fields: dict[str, object] = {"rope_type": scaling.kind, "factor": scaling.factor}
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
    rows = list(enumerate(zip(vocabulary.tokens, vocabulary.token_types, strict=True)))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    if config.architecture == "llama":
        split: list[dict[str, object]] = [{"type": "Digits", "individual_digits": True}, {**byte_level, "use_regex": True}]
    else:
        pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        split = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {**byte_level, "use_regex": False},
        ]
    control = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **control} for i, (token, kind) in rows if kind == 3],
        "normalizer": None if config.architecture == "llama" else {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": split},
        "post_processor": {**byte_level, "trim_offsets": False, "use_regex": False},
        "decoder": {**byte_level, "use_regex": False},
        "model": {
            **{"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": ""},
            **{"end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False},
            "vocab": {token: i for i, (token, kind) in rows if kind == 1},
            "merges": [merge.split(" ") for merge in vocabulary.merges],
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")
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
