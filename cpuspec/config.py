"""The frozen settings that travel through the package: model, sampling, speculation, engine.

Plain data and its validation; nothing here knows arrays, files or kernels.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields, replace
from functools import cached_property, partial
from numbers import Integral, Real
from typing import Any, NamedTuple, NoReturn, TypeVar

from cpuspec.errors import ConfigError

_LONGEST_CONTEXT = 1 << 26


def number(
    value: object, low: float = -math.inf, high: float = math.inf, above: float = -math.inf, below: float = math.inf
) -> float:
    """A finite number in [low, high] and (above, below), as a float; numpy's count, too. Raises ValueError or OverflowError."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError("not a number")
    found = float(value)
    if not (math.isfinite(found) and low <= found <= high and above < found < below):
        raise ValueError("out of range")
    return found


def whole(value: object, low: float = -math.inf, high: float = math.inf) -> int:
    """A whole number from low to high as an int; numpy's are whole numbers, too. Raises ValueError for others."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError("not a whole number")
    found = int(value)
    if not low <= found <= high:
        raise ValueError("out of range")
    return found


def _fits(read: Callable[[object], object], value: object) -> bool:
    """Whether a reader accepts the value."""
    try:
        read(value)
    except (ValueError, OverflowError):
        return False
    return True


def _shown(value: object) -> str:
    """A value in an error: not so long that it hides the error, whatever a file holds."""
    if isinstance(value, int) and abs(value) > 1 << 80:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)[:80]


def _check_integers(what: str, settings: object, limits: Mapping[str, tuple[int, int]]) -> None:
    """Raise ConfigError, which begins with `what`, unless each of these fields is an integer from least to largest."""
    for name, (least, largest) in limits.items():
        value = getattr(settings, name)
        if not _fits(partial(whole, low=least, high=largest), value):
            raise ConfigError(f"{what}: {name} must be an integer from {least} to {largest}, got {_shown(value)}")


# Of a mixer that keeps a matrix for each head.
_STATE_LIMITS = {"key_heads": (1, 1 << 12), "key_dims": (1, 1 << 10), "value_heads": (1, 1 << 12), "value_dims": (1, 1 << 10)}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    kind: "linear", "llama3", "yarn", "factors" (explicit divisors, one per frequency, as GGUF's `rope_freqs`), or "longrope": as
    "factors", but `short_factors` in a context of at most `original_context_length` (`for_context`).
    attention_factor: of cosines and sines; None for 1, or YaRN's own. truncate: whether YaRN's ramp goes from whole pairs to whole
    pairs, as it does for llama.cpp in every model.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3", "yarn", "factors", "longrope"):
            raise ConfigError(f"rope scaling {self.kind!r} is not supported; wanted linear, llama3, yarn, factors or longrope")
        numbers = {"factor": self.factor}
        if self.kind == "llama3":
            numbers |= {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        if self.kind == "yarn":
            numbers |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow}
        for name, value in numbers.items():
            self._check(name, value, _fits(partial(number, low=1e-6, high=1e6), value), "a number from 1e-6 to 1e6")
        if self.kind == "llama3":
            ordered = self.low_freq_factor < self.high_freq_factor
            self._check("low_freq_factor", self.low_freq_factor, ordered, f"less than high_freq_factor {self.high_freq_factor}")
        if self.kind == "yarn":
            self._check("beta_slow", self.beta_slow, self.beta_slow < self.beta_fast, f"less than beta_fast {self.beta_fast}")
        if self.kind in ("yarn", "factors", "longrope"):
            # It multiplies every cosine and sine, so that logits of attention grow with its square.
            sound = self.attention_factor is None or _fits(partial(number, low=1e-3, high=100), self.attention_factor)
            self._check("attention_factor", self.attention_factor, sound, "a number from 0.001 to 100")
        if self.kind in ("llama3", "yarn", "longrope"):
            length = self.original_context_length
            sound = _fits(partial(whole, low=1, high=_LONGEST_CONTEXT), length)
            self._check("original_context_length", length, sound, f"an integer from 1 to {_LONGEST_CONTEXT}")
        if self.kind == "longrope":
            same = len(self.short_factors) == len(self.factors)
            self._check("short_factors", f"{len(self.short_factors)} numbers", same, f"{len(self.factors)}, as of the long ones")
        for i, value in enumerate((*self.factors, *self.short_factors)):
            # Some files give pairs that are not to turn a factor like 1e30.
            self._check(f"factors[{i}]", value, _fits(partial(number, low=1e-6, high=1e38), value), "a number from 1e-6 to 1e38")

    def for_context(self, length: int) -> "RopeScaling":
        """The scaling in a context of `length` tokens, which alone chooses: whoever chose by the tokens that are there would find
        keys in the cache that were turned by other factors.
        """
        if self.kind != "longrope":
            return self
        factors = self.factors if length > self.original_context_length else self.short_factors
        return RopeScaling("factors", attention_factor=self.attention_factor, factors=factors)

    def _check(self, name: str, value: object, sound: bool, wanted: str) -> None:
        if not sound:
            raise ConfigError(f"rope scaling {self.kind}: {name} is {_shown(value)}, wanted {wanted}")


@dataclass(frozen=True)
class Rope:
    """One set of rotary positions: the base of their frequencies, how these are scaled, and how many dimensions of a head turn, the
    first ones; 0 for all.

    growth: b in 1 + b ln(1 + floor(position / growth_length)), a factor of the heads that are turned; 0 for none.
    """

    base: float = 10000.0
    scaling: RopeScaling | None = None
    dims: int = 0
    growth: float = 0.0
    growth_length: int = 0


@dataclass(frozen=True)
class Experts:
    """A mixture's experts, and how its router chooses among them. Each is a gated feed-forward part of `size`.

    count, used: how many there are, and how many a row goes through.
    score: what the router's logits become before the best are chosen: "softmax" over all experts, "sigmoid", or "chosen", a softmax
    over the logits of those that were chosen. normalised: whether the chosen weights are divided by their sum.
    scale: of the weights. shifted: whether the choice, and only it, adds a number of each expert to the scores (`router_shift`).
    groups, groups_used: experts in a row form groups; those of the groups whose two best scores have the largest sums are chosen
    from. least_sum: what the sum is at least where weights are normalised. bias: whether router and experts have biases.
    weighed: whether weights are multiplied with a number of their expert in the end (`router_factors`). normed_apart: whether the
    router, the experts and the dense part beside them each have a norm of their inputs, and the last two one of their outputs.
    """

    count: int
    used: int
    size: int
    score: str = "softmax"
    normalised: bool = True
    scale: float = 1.0
    shifted: bool = False
    groups: int = 1
    groups_used: int = 1
    least_sum: float = 0.0
    bias: bool = False
    weighed: bool = False
    normed_apart: bool = False

    def __post_init__(self) -> None:
        limits = {"count": (1, 1 << 12), "used": (1, self.count), "size": (1, 1 << 20), "groups": (1, self.count)}
        _check_integers("experts", self, limits)
        if self.score not in ("softmax", "sigmoid", "chosen"):
            raise ConfigError(f"experts: score {self.score!r} is not supported; wanted softmax, sigmoid or chosen")
        if not _fits(partial(number, low=1e-6, high=1e6), self.scale) or not 0 <= self.least_sum < 1:
            raise ConfigError(f"experts: scale is {_shown(self.scale)}, wanted a number from 1e-6 to 1e6")
        if not _fits(partial(whole, low=1, high=self.groups), self.groups_used) or self.count % self.groups:
            raise ConfigError(f"experts: {self.groups_used} of {self.groups} groups of {self.count}; wanted groups of one size")
        if self.groups > 1 and (self.count // self.groups < 2 or self.count // self.groups * self.groups_used < self.used):
            raise ConfigError(f"experts: {self.groups_used} groups of {self.count // self.groups} have no {self.used} to choose")


@dataclass(frozen=True)
class DeltaNet:
    """A mixer that keeps a matrix for each value head instead of all keys and values: the gated delta net (arXiv 2412.06464).

    key_heads, key_dims: heads of keys and of queries, and the numbers of each; value_heads, value_dims: likewise of values.
    taps: rows that the causal convolution over queries, keys and values reads, the row's own included. tiled: whether value head i
    reads key head i % key_heads, as in GGUF files of Qwen3.5; else neighbours share one.
    """

    key_heads: int
    key_dims: int
    value_heads: int
    value_dims: int
    taps: int = 4
    tiled: bool = False

    def __post_init__(self) -> None:
        _check_integers("delta net", self, {**_STATE_LIMITS, "taps": (2, 16)})
        if self.value_heads % self.key_heads:
            raise ConfigError(f"delta net: {self.value_heads} value heads are no multiple of {self.key_heads} key heads")
        if self.key_dims % 16 or self.value_dims % 16:
            raise ConfigError(f"delta net: heads of {self.key_dims} and {self.value_dims} numbers; wanted multiples of 16")

    projections = ("delta_qkv", "delta_gate", "delta_beta", "delta_alpha")
    output = "delta_o"
    convolution = "delta_conv"

    @property
    def key_head_of_values(self) -> list[int]:
        """Of each value head the key head that it reads."""
        shared = self.value_heads // self.key_heads
        return [i % self.key_heads if self.tiled else i // shared for i in range(self.value_heads)]

    @property
    def channels(self) -> int:
        """Numbers that the convolution goes over: those of queries, keys and values, in this order."""
        return 2 * self.key_heads * self.key_dims + self.value_heads * self.value_dims

    def tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """The shape of each of its tensors, by part. decay: below 0, the factor of the step in the logarithm of the decay."""
        values, heads = self.value_heads * self.value_dims, (self.value_heads,)
        return {
            "delta_qkv": (self.channels, hidden), "delta_gate": (values, hidden), "delta_beta": (*heads, hidden),
            "delta_alpha": (*heads, hidden), "delta_conv": (self.channels, self.taps), "delta_dt": heads, "delta_decay": heads,
            "delta_norm": (self.value_dims,), "delta_o": (hidden, values),
        }  # fmt: skip


@dataclass(frozen=True)
class ShortConv:
    """LFM2's mixer: c * conv(b * x), each of b, c and x a product of the row, then a product.

    taps: rows that the causal convolution reads, the row's own included. channels: numbers of a row.
    """

    channels: int
    taps: int = 3

    projections = ("conv_b", "conv_c", "conv_x")
    output = "conv_out"
    convolution = "short_conv"

    def __post_init__(self) -> None:
        _check_integers("short convolution", self, {"taps": (2, 16)})

    def tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """The shape of each of its tensors, by part."""
        square: tuple[int, ...] = (hidden, hidden)
        return {**dict.fromkeys((*self.projections, self.output), square), "short_conv": (hidden, self.taps)}


@dataclass(frozen=True)
class Mamba2:
    """A mixer that keeps a matrix S for each head: Mamba-2 (arXiv 2405.21060).

    key_heads, key_dims: groups, each with a B and a C of so many numbers; value_heads, value_dims: heads of x, neighbours of which
    share a group. With a step of each head: S = exp(step A) S + B (step x)^T, and S^T C + D x, times silu(z), then an RMS norm over
    each group's part if it is `normed`.
    taps: rows that the causal convolution over x, B and C reads; bias: whether it has biases. least_step: what steps are at least.
    """

    key_heads: int
    key_dims: int
    value_heads: int
    value_dims: int
    taps: int = 4
    bias: bool = True
    normed: bool = True
    least_step: float = 0.0

    projections = ("ssm_z", "ssm_xbc", "ssm_dt")
    output = "ssm_out"
    convolution = "ssm_conv"

    def __post_init__(self) -> None:
        _check_integers("Mamba-2", self, {**_STATE_LIMITS, "taps": (2, 16)})
        if self.value_heads % self.key_heads:
            raise ConfigError(f"Mamba-2: {self.value_heads} heads are no multiple of {self.key_heads} groups")
        if self.key_dims % 16 or self.value_dims % 16:
            raise ConfigError(f"Mamba-2: heads of {self.value_dims} and states of {self.key_dims}; wanted multiples of 16")
        if not _fits(partial(number, low=0, high=1), self.least_step):
            raise ConfigError(f"Mamba-2: least_step must be a number from 0 to 1, got {_shown(self.least_step)}")

    @property
    def key_head_of_values(self) -> list[int]:
        """Of each head its group."""
        return [i // (self.value_heads // self.key_heads) for i in range(self.value_heads)]

    @property
    def inner(self) -> int:
        """Numbers of all heads."""
        return self.value_heads * self.value_dims

    @property
    def channels(self) -> int:
        """Numbers that the convolution goes over: those of x, B and C, in this order."""
        return self.inner + 2 * self.key_heads * self.key_dims

    def tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """The shape of each of its tensors, by part. ssm_a: A itself, below 0."""
        heads = (self.value_heads,)
        found: dict[str, tuple[int, ...]] = {
            "ssm_z": (self.inner, hidden), "ssm_xbc": (self.channels, hidden), "ssm_dt": (*heads, hidden), "ssm_dt_bias": heads,
            "ssm_conv": (self.channels, self.taps), "ssm_a": heads, "ssm_d": heads, "ssm_out": (hidden, self.inner),
        }  # fmt: skip
        if self.bias:
            found["ssm_conv_bias"] = (self.channels,)
        if self.normed:
            found["ssm_norm"] = (self.inner,)
        return found


Recurrent = DeltaNet | ShortConv | Mamba2


@dataclass(frozen=True)
class Latent:
    """Latent attention (arXiv 2405.04434, section 2.1): keys and values of all heads are made of one vector of `rank` numbers.

    Only that vector is cached, and beside it a key of `turned` numbers with rotary positions, which all heads share. A query of
    `plain` numbers without positions is multiplied by its head's matrix `k_b` instead, and what attention makes of the cached
    vectors by `v_b`, to `value_dims` numbers. So a cached head has rank + turned numbers, and its values are among them.
    q_rank: of a vector that queries are made of, 0 where they are made of the row itself.
    """

    rank: int
    turned: int
    plain: int
    value_dims: int
    q_rank: int = 0

    def __post_init__(self) -> None:
        limits = dict.fromkeys(("rank", "turned", "plain", "value_dims"), (1, 1 << 12))
        _check_integers("latent attention", self, {**limits, "q_rank": (0, 1 << 16)})
        for name, unit in (("rank", 32), ("plain", 32), ("turned", 16), ("value_dims", 16)):
            if getattr(self, name) % unit:
                raise ConfigError(f"latent attention: {name} is {getattr(self, name)}, wanted a multiple of {unit}")

    @property
    def dims(self) -> int:
        """Numbers of a cached key: half of the rotated ones, half of the vector, and the other halves, so that what turns together
        is half a key apart, as in every head.
        """
        return self.rank + self.turned

    @property
    def value_places(self) -> list[int]:
        """The places of the vector's numbers in a key."""
        first, half = self.turned // 2, self.rank // 2
        return [*range(first, first + half), *range(2 * first + half, self.dims)]

    @property
    def projections(self) -> tuple[str, ...]:
        """Parts that the layer's normed rows are multiplied with."""
        return *(("q_a",) if self.q_rank else ("q_plain", "q_turned")), "latent", "k_turned"

    def tensors(self, heads: int, hidden: int) -> dict[str, tuple[int, ...]]:
        """The shape of each of its tensors, by part."""
        found: dict[str, tuple[int, ...]] = {}
        if self.q_rank:
            found |= {"q_a": (self.q_rank, hidden), "q_a_norm": (self.q_rank,)}
        inputs = self.q_rank or hidden
        return found | {
            "q_plain": (heads * self.plain, inputs), "q_turned": (heads * self.turned, inputs), "latent": (self.rank, hidden),
            "latent_norm": (self.rank,), "k_turned": (self.turned, hidden), "k_b": (heads, self.rank, self.plain),
            "v_b": (heads, self.value_dims, self.rank), "o": (hidden, heads * self.value_dims),
        }  # fmt: skip


# min(gate, LIMIT) * sigmoid(ALPHA * min(gate, LIMIT)) * (up clamped to +-LIMIT, + 1): the activation "swiglu_oai" of gpt-oss.
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


@dataclass(frozen=True)
class HeadConfig:
    """How a head, a draft model that was trained for one target, begins and ends. Between, it is a model like any other.

    fuses: where its rows read the target's hidden state h beside the embedding e of the token that follows. "matrix": a matrix
    makes C numbers of both (EAGLE, arXiv 2401.15077; multi-token prediction, arXiv 2412.19437, section 2.2). "attention": queries,
    keys and values of the first layer read both, and branches are added to h (EAGLE-3, arXiv 2503.01840). "none": rows are tokens
    alone. "alone": rows are hidden states alone, and the head has no layers: matrices make logits of them (Medusa, arXiv
    2401.10774; MLP speculators, arXiv 2404.19124).
    input_norms: whether e and h have RMS norms. fuse_bias: whether the matrix has one. normed_residual: with "attention", whether
    branches are added to the normed h. first_norm: with "matrix", whether the first layer's attention has an RMS norm before it.
    final_norm: whether logits have one before them.
    feature_size: numbers of the target's layers, side by side, that `encode` makes one h of; 0 where h comes as it is.
    injects: whether every layer's keys and values are made of h, too (DFlash, arXiv 2602.06036; `model.transformer.inject`).
    num_logits: tokens that the head can draft, rows of its output matrix; None for the whole vocabulary.
    tensors: with "alone", names and shapes of its matrices and their biases.
    target_size: numbers of h and of e where the rows between have others; the matrix `back` makes the next h; 0 for none.
    reads: so many first layers compute no rows: they hold keys and values that the target's own matrices make of the inputs of its
    layers, and all other layers read these alone, no row its own (Gemma 4's assistants).
    """

    fuses: str = "matrix"
    input_norms: bool = True
    fuse_bias: bool = False
    normed_residual: bool = False
    first_norm: bool = True
    final_norm: bool = True
    feature_size: int = 0
    num_logits: int | None = None
    injects: bool = False
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    target_size: int = 0
    reads: int = 0

    def __post_init__(self) -> None:
        if not _fits(partial(whole, low=0, high=1 << 17), self.target_size) or self.target_size % 32:
            raise ConfigError(f"target_size must be a multiple of 32 up to {1 << 17}, got {_shown(self.target_size)}")
        if self.reads and (self.fuses != "matrix" or not self.injects or not self.target_size):
            raise ConfigError('a head that reads keys of its target has fuses "matrix", injects and a target_size')
        if self.fuses not in ("matrix", "attention", "none", "alone"):
            raise ConfigError(f"fuses {self.fuses!r} is not supported; wanted matrix, attention, none or alone")
        if not _fits(partial(whole, low=0, high=1 << 22), self.feature_size):
            raise ConfigError(f"feature_size must be an integer from 0 to {1 << 22}, got {_shown(self.feature_size)}")
        if self.num_logits is not None and not _fits(partial(whole, low=1, high=1 << 24), self.num_logits):
            raise ConfigError(f"num_logits must be an integer from 1 to {1 << 24}, got {_shown(self.num_logits)}")


# Fields of ModelConfig that have an entry for each layer, or none.
_PER_LAYER = (
    "layer_windows", "layer_ropes", "layer_experts", "layer_recurrent", "layer_feeds", "layer_head_dims", "layer_kv_heads",
    "layer_owners", "layer_values", "layer_sizes",
)  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """Shape and flags of one decoder-only transformer: everything that a forward needs besides the weights.

    architecture: the name of its family; nothing is computed by it.
    norms: where a branch (attention, MLP) has norms: "before", "after" (of its output) or "both". norm_kind: "rms", or "layer"
    (mean and variance); norm_bias: whether those have biases.
    activation: of the gate in the MLP, "silu", "gelu_tanh", "relu2" (the square of what is above 0) or "swiglu_oai", which clamps
    gate and up (`SWIGLU_ALPHA`). gated: whether there is one; else it is of the MLP's inside itself.
    mlp_bias: whether its matrices have biases. parallel: attention and MLP read the same norm, and are both added to its input.
    embedding_scale: factor of the embedded tokens. query_scale: factor of attention scores, None for 1 / sqrt(head_dim).
    sinks: each query head has a score of its own that softmax counts and no value belongs to.
    attention_softcap, logit_softcap: c in c * tanh(x / c) for attention scores and for logits; 0 for none.
    head: how it begins and ends if it is a head, a draft model that takes its target's hidden states; None for other models.
    layer_windows: for each layer how many last positions a row sees, its own included, 0 for all; empty for all in every layer.
    layer_ropes: for each layer "global" (`rope_base`, `rope_scaling`), "local" (`local_rope_base`) or "none", which rotates
    nothing; empty for "global" in every layer. rope_dims: how many dimensions of a head are rotated, 0 for all.
    norm_spans: what the norms of queries and keys (`qk_norm`) are over, each "head" or the "row" of all heads. rotates_first: they
    follow the rotation.
    query_growth, query_growth_length: of `Rope`, for queries alone.
    experts: of layers with a mixture; None for no such layer. layer_experts: for each layer whether it has them instead of a dense
    part of `intermediate_size`; empty for all layers. shared_size: of a dense part that rows go through beside their experts, 0 for
    none; shared_gate: whether the sigmoid of a row's product with a vector weighs it.
    residual_scale: factor of every branch. logit_scale: of logits.
    gated_attention: whether the sigmoid of numbers made like queries weighs attention's results, number by number.
    recurrent: the mixer of layers without attention; layer_recurrent: for each layer whether it has that; empty for no layer.
    beside: every layer has it beside attention; both read one norm and are added to its input.
    layer_feeds: of a model whose layers are one branch each, for each layer whether it is the feed-forward part, else it is its
    mixer; empty for layers of both.
    latent: of attention whose keys and values are made of one vector; head_dim is then `Latent.dims`, rope_dims `Latent.turned`,
    and there is one key head. None for other models.
    layer_head_dims, layer_kv_heads: for each layer the numbers of a head and the heads of keys; empty for `head_dim` and
    `num_kv_heads` in every layer. value_dim: the numbers of a head of values, 0 for those of its keys.
    layer_owners: for each layer the number of the layer whose keys and values it reads, its own where it keeps some; empty for a
    model in which all do. layer_values: for each layer whether a matrix makes values; else they are what keys are made of, before
    norms and positions; empty for all. value_norm: whether values have an RMS norm without weights.
    layer_sizes: for each layer its `intermediate_size`; empty where all have the same.
    layer_input_size: numbers that each layer is given for a token besides, of a second embedding and of the first (Gemma 4's E
    models), 0 for none. scales_layers: whether each layer's output is multiplied with a number of its own.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float = 1e-6
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    norms: str = "before"
    activation: str = "silu"
    embedding_scale: float = 1.0
    query_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    head: HeadConfig | None = None
    layer_windows: tuple[int, ...] = ()
    layer_ropes: tuple[str, ...] = ()
    local_rope_base: float = 10000.0
    rope_dims: int = 0
    norm_spans: str = "head"
    experts: Experts | None = None
    layer_experts: tuple[bool, ...] = ()
    shared_size: int = 0
    shared_gate: bool = False
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    norm_kind: str = "rms"
    norm_bias: bool = False
    gated: bool = True
    mlp_bias: bool = False
    parallel: bool = False
    rotates_first: bool = False
    query_growth: float = 0.0
    query_growth_length: int = 0
    sinks: bool = False
    gated_attention: bool = False
    recurrent: Recurrent | None = None
    layer_recurrent: tuple[bool, ...] = ()
    beside: bool = False
    layer_feeds: tuple[bool, ...] = ()
    latent: Latent | None = None
    layer_head_dims: tuple[int, ...] = ()
    layer_kv_heads: tuple[int, ...] = ()
    value_dim: int = 0
    layer_owners: tuple[int, ...] = ()
    layer_values: tuple[bool, ...] = ()
    layer_sizes: tuple[int, ...] = ()
    value_norm: bool = False
    layer_input_size: int = 0
    scales_layers: bool = False

    def __post_init__(self) -> None:
        choices = {
            "norms": ("before", "after", "both"),
            "activation": ("silu", "gelu_tanh", "swiglu_oai", "relu2"),
            "norm_spans": ("head", "row"),
            "norm_kind": ("rms", "layer"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} {getattr(self, name)!r} is not supported; wanted one of {', '.join(known)}")
        limits = {
            "vocab_size": 1 << 24,
            "hidden_size": 1 << 17,
            "num_layers": 1 << 12,
            "num_heads": 1 << 12,
            "num_kv_heads": 1 << 12,
            "head_dim": 1 << 10,
            "context_length": _LONGEST_CONTEXT,
        }
        for name, limit in limits.items():
            value = getattr(self, name)
            if not _fits(partial(whole, low=1, high=limit), value):
                raise ConfigError(f"{name} must be an integer from 1 to {limit}, got {_shown(value)}")
        for heads in (self.num_kv_heads, *self.layer_kv_heads):
            if not _fits(partial(whole, low=1, high=self.num_heads), heads) or self.num_heads % heads:
                raise ConfigError(f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {_shown(heads)}")
        for dims in (self.head_dim, *self.layer_head_dims):
            if not _fits(partial(whole, low=1, high=1 << 10), dims) or dims % 2:
                raise ConfigError(f"head_dim must be even for rotary positions, got {_shown(dims)}")
        if not _fits(partial(whole, low=0, high=1 << 10), self.value_dim):
            raise ConfigError(f"value_dim must be an integer from 0 to {1 << 10}, got {_shown(self.value_dim)}")
        if set(self.layer_head_dims) - {self.head_dim} and self.rope_dims:
            raise ConfigError("rope_dims is of heads that have as many numbers in every layer; wanted no layer_head_dims")
        if not _fits(partial(number, low=0, below=1), self.norm_eps):
            raise ConfigError(f"norm_eps must be in [0, 1), got {_shown(self.norm_eps)}")
        for name in ("rope_base", "local_rope_base"):
            if not _fits(partial(number, above=1, high=1e15), getattr(self, name)):
                raise ConfigError(f"{name} is {_shown(getattr(self, name))}, wanted a number above 1, at most 1e15")
        if not _fits(partial(whole, low=0 if self.layer_feeds else 1, high=1 << 20), self.intermediate_size):
            raise ConfigError(f"intermediate_size must be an integer from 1 to {1 << 20}, got {_shown(self.intermediate_size)}")
        for name, limit in (("rope_dims", self.head_dim), ("shared_size", 1 << 20)):
            if not _fits(partial(whole, low=0, high=limit), getattr(self, name)) or (name == "rope_dims" and self.rope_dims % 2):
                raise ConfigError(f"{name} must be an integer from 0 to {limit}, got {_shown(getattr(self, name))}")
        for name, lowest in (
            ("embedding_scale", 1e-6), ("query_scale", 1e-6), ("attention_softcap", 0), ("logit_softcap", 0),
            ("residual_scale", 1e-6), ("logit_scale", 1e-6),
        ):  # fmt: skip
            value = getattr(self, name)
            if not (value is None and name == "query_scale") and not _fits(partial(number, low=lowest, high=1e6), value):
                raise ConfigError(f"{name} is {_shown(value)}, wanted a number from {lowest} to 1e6")
        self._check_combinations()
        scaling = self.rope_scaling
        turned = self.rope_dims or self.head_dim
        if scaling is not None and scaling.kind in ("factors", "longrope") and len(scaling.factors) != turned // 2:
            raise ConfigError(f"rope factors must be half of {turned} dimensions, got {len(scaling.factors)} numbers")
        for name in _PER_LAYER:
            per_layer = getattr(self, name)
            if len(per_layer) not in (0, self.num_layers):
                raise ConfigError(f"{name} must have an entry for each of the {self.num_layers} layers, got {len(per_layer)}")
        for window in self.layer_windows:
            if not _fits(partial(whole, low=0, high=_LONGEST_CONTEXT), window):
                raise ConfigError(f"layer_windows must be integers from 0 to {_LONGEST_CONTEXT}, got {_shown(window)}")
        if unknown := set(self.layer_ropes) - {"global", "local", "none"}:
            raise ConfigError(f"layer_ropes are global, local or none, got {_shown(min(unknown))}")
        self._check_mixers()
        self._check_layers()

    def _check_layers(self) -> None:
        """What layers read of each other, and their own sizes."""
        for i, owner in enumerate(self.layer_owners):
            if not _fits(partial(whole, low=0, high=i), owner) or self.layer_owners[owner] != owner:
                raise ConfigError(
                    f"layer {i} reads the keys of layer {_shown(owner)}; wanted one before it that has some, or itself"
                )
            for name in ("layer_windows", "layer_head_dims", "layer_kv_heads"):
                if (of := getattr(self, name)) and of[i] != of[owner]:
                    raise ConfigError(f"layer {i} reads the keys of layer {owner}, whose {name} differ: {of[i]} and {of[owner]}")
        for size in self.layer_sizes:
            if not _fits(partial(whole, low=1, high=1 << 20), size):
                raise ConfigError(f"layer_sizes must be integers from 1 to {1 << 20}, got {_shown(size)}")
        if not _fits(partial(whole, low=0, high=1 << 12), self.layer_input_size) or self.layer_input_size % 32:
            raise ConfigError(f"layer_input_size must be a multiple of 32 up to {1 << 12}, got {_shown(self.layer_input_size)}")
        of_gemma = self.value_norm or self.layer_input_size or self.scales_layers or self.layer_owners or self.layer_values
        if of_gemma and (
            (self.head and not self.head.reads) or self.parallel or self.latent or self.recurrent or self.norms != "both"
        ):
            raise ConfigError('what layers share or are given needs norms "both", in models of attention that are no heads')
        apart = self.experts is not None and self.experts.normed_apart
        if apart and (not self.shared_size or self.shared_gate or self.norms != "both"):
            raise ConfigError('experts normed_apart need a dense part beside them that no gate weighs, and norms "both"')
        if self.layer_values and (self.value_dim or self.qkv_bias):
            raise ConfigError("layer_values needs values of the keys' size, and no biases")

    def _check_mixers(self) -> None:
        if latent := self.latent:
            if (self.num_kv_heads, self.head_dim, self.rope_dims) != (1, latent.dims, latent.turned):
                raise ConfigError(
                    f"latent attention has one key head of {latent.dims} numbers, {latent.turned} of which turn; got "
                    f"{self.num_kv_heads} of {self.head_dim}, and {self.rope_dims}"
                )
            if self.qkv_bias or self.o_bias or self.qk_norm or self.gated_attention or self.parallel or self.sinks:
                raise ConfigError(
                    "latent attention is supported without biases, norms of heads, gates, sinks and parallel branches"
                )
            if self.head and (self.head.fuses != "matrix" or self.head.injects):
                raise ConfigError('a head with latent attention joins states by a matrix; wanted fuses "matrix"')
        if (self.beside or self.layer_feeds) and (self.parallel or self.head or self.norms != "before"):
            raise ConfigError('beside and layer_feeds are supported with norms "before", in models that are no heads')
        if self.beside and (not isinstance(self.recurrent, Mamba2) or self.layer_recurrent or self.layer_feeds):
            raise ConfigError("beside needs a Mamba-2 mixer, in a model whose layers all have attention")
        if any(recurs and feeds for recurs, feeds in zip(self.layer_recurrent, self.layer_feeds, strict=False)):
            raise ConfigError("a layer of one branch is a mixer or a feed-forward part; layer_recurrent and layer_feeds name one")

    def _check_combinations(self) -> None:
        if self.norm_kind == "layer" and (self.norms != "before" or self.qk_norm or self.experts):
            raise ConfigError('norm_kind "layer" is supported for norms before dense branches; wanted rms for any other')
        if self.norm_bias and self.norm_kind != "layer":
            raise ConfigError('norm_bias needs norm_kind "layer"')
        if (self.parallel and self.experts) or ((self.parallel or not self.gated) and self.head):
            raise ConfigError("parallel branches and an MLP without a gate are supported in models that are no heads")
        if self.activation == "swiglu_oai" and not self.gated:
            raise ConfigError('activation "swiglu_oai" is of a gate and what it gates; wanted gated')
        if self.parallel and self.norms != "before":
            raise ConfigError('parallel branches read one norm; wanted norms "before"')
        if self.rotates_first and (self.norm_spans != "head" or not self.qk_norm):
            raise ConfigError("rotates_first needs norms of the heads of queries and keys")
        if self.layer_recurrent and (self.recurrent is None or self.parallel or (self.head and any(self.layer_recurrent))):
            raise ConfigError("layer_recurrent needs a recurrent mixer, in a model that is no head and has no parallel branches")
        length = self.query_growth_length
        if not _fits(partial(number, low=0, high=100), self.query_growth) or (
            self.query_growth and not _fits(partial(whole, low=1, high=_LONGEST_CONTEXT), length)
        ):
            growth = f"query_growth {_shown(self.query_growth)} over {_shown(length)} tokens"
            raise ConfigError(f"{growth}; wanted a number from 0 to 100 over 1 to {_LONGEST_CONTEXT}")

    @property
    def takes_hidden(self) -> bool:
        """Whether each row begins with a hidden state, and, unless it is "alone", a token."""
        return self.head is not None and self.head.fuses != "none"

    @property
    def state_size(self) -> int:
        """Numbers of a hidden state that a row begins with, and of a token's embedding."""
        return (self.head and self.head.target_size) or self.hidden_size

    @property
    def injected_size(self) -> int:
        """Numbers of a row that is injected (`model.transformer.inject`)."""
        return self.head.reads * self.head.target_size if self.head and self.head.reads else self.hidden_size

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer keeps a state instead of keys and values."""
        return self.beside or any(self.layer_recurrent)

    @property
    def num_attention_layers(self) -> int:
        """How many layers keep keys and values."""
        readers = sum(owner != i for i, owner in enumerate(self.layer_owners))
        return self.num_layers - sum(self.layer_recurrent) - sum(self.layer_feeds) - readers

    @property
    def has_alike_heads(self) -> bool:
        """Whether keys and values of all layers have as many heads of as many numbers."""
        kinds = {*self.layer_head_dims} | {self.head_dim, self.value_dim or self.head_dim}
        return len(kinds) == 1 and not {*self.layer_kv_heads} - {self.num_kv_heads}

    @property
    def num_logits(self) -> int:
        """The length of a row of logits."""
        return self.head.num_logits if self.head and self.head.num_logits else self.vocab_size

    def with_layers(self, kept: Sequence[int]) -> "ModelConfig":
        """The model that has some of these layers, in this order."""
        per_layer: dict[str, Any] = {name: tuple(given[i] for i in kept) for name in _PER_LAYER if (given := getattr(self, name))}
        if self.layer_owners:
            if lost := {self.layer_owners[i] for i in kept} - set(kept):
                raise ConfigError(f"layer {min(lost)} must stay: others read its keys and values")
            per_layer["layer_owners"] = tuple(list(kept).index(owner) for owner in per_layer["layer_owners"])
        return replace(self, num_layers=len(kept), **per_layer)


_T = TypeVar("_T")


class _Kind(NamedTuple):
    """A kind of setting: the function that checks and normalises a value (ValueError), and what it takes, for errors."""

    read: Callable[[object], object]
    wanted: str


def _setting(
    default: object, kind: _Kind, help: str, metavar: str = "", of_backend: bool = False, option: str = "", short: str = ""
) -> Any:
    """A field of settings: everything that Python, the command line and a backend's spelling need to know of it.

    help, metavar, option: of its option; by default its name, without the plural's s. short: the letter that llama.cpp gives it.
    of_backend: whether `read_backend` takes it.
    """
    told = {"kind": kind, "help": help, "metavar": metavar, "of_backend": of_backend, "option": option, "short": short}
    return field(default=default, metadata=told)


_of_backend = partial(_setting, of_backend=True)


def _read_settings(settings: Any) -> None:
    """Check and normalise every value by its field's function. Raises ConfigError."""
    for one in fields(settings):
        value, kind = getattr(settings, one.name), one.metadata["kind"]
        try:
            object.__setattr__(settings, one.name, kind.read(value))
        except (ValueError, TypeError, OverflowError):
            raise ConfigError(f"{one.name} must be {kind.wanted}, got {_shown(value)}") from None


class _FrozenDict(dict[int, float]):
    """A dict that never changes and has a hash."""

    def _refuse(self, *arguments: object, **named: object) -> NoReturn:
        raise TypeError("sampling params do not change; make others with dataclasses.replace(params, logit_bias=...)")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[object, ...]:
        return _FrozenDict, (dict(self),)


_MEMORY_LIMIT = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?(?:(%)|([KMGT])(i?)B)", re.IGNORECASE)


def _memory_limit(value: object) -> str:
    if value != "auto":
        memory_limit_bytes(value, 1 << 40)
    return str(value)


def memory_limit_bytes(limit: object, memory_bytes: int) -> int:
    """The bytes that a limit such as 8GB, 8 GiB or 60% names. memory_bytes: what a share is of. Raises ValueError for others."""
    found = _MEMORY_LIMIT.fullmatch(limit) if isinstance(limit, str) else None
    amount = float(found[1]) if found else 0.0
    if found is None or amount == 0 or (found[2] and amount > 100):
        raise ValueError("not a size")
    if found[2]:
        return int(amount / 100 * memory_bytes)
    return int(amount * (1024 if found[4] else 1000) ** ("KMGT".index(found[3].upper()) + 1))


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError("not True or False")


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError("not a text")


def _one_of(choices: tuple[str, ...], value: object) -> str:
    if value in choices:
        return _text(value)
    raise ValueError("none of them")


def _texts(value: object) -> tuple[str, ...]:
    texts = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple | set | frozenset) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("not texts")
    return tuple(texts)


def _ids(value: object) -> tuple[int, ...]:
    if isinstance(value, str | bytes | Mapping):
        raise ValueError("not token ids")
    return () if value is None else tuple(whole(one) for one in value)  # type: ignore[attr-defined]


def _schema(value: object) -> str:
    """A JSON schema as JSON text, of a text or of what such a text stands for; the order of properties is kept."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError("not a schema")
    try:
        return json.dumps(dict(value), allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _biases(value: object) -> _FrozenDict:
    """-inf forbids a token."""
    if value is not None and not isinstance(value, Mapping):
        raise ValueError("not a mapping")
    return _FrozenDict(
        {
            whole(token, 0): -math.inf if isinstance(bias, Real) and bias == -math.inf else number(bias, -1e6, 1e6)
            for token, bias in (value or {}).items()
        }
    )


def _is_minus_one(value: object) -> bool:
    return value == -1 and not isinstance(value, bool)


def _or_none(read: Callable[[object], _T]) -> Callable[[object], _T | None]:
    return lambda value: None if value is None else read(value)


def _choice(choices: tuple[str, ...]) -> _Kind:
    return _Kind(partial(_one_of, choices), f"one of {', '.join(choices)}")


def _whole(low: int, high: int) -> _Kind:
    return _Kind(partial(whole, low=low, high=high), f"an integer from {low} to {high}")


def _optional(kind: _Kind) -> _Kind:
    return _Kind(_or_none(kind.read), f"None or {kind.wanted}")


_NOT_NEGATIVE = _Kind(partial(number, low=0), "a number >= 0")
_SHARE, _SHARE_OR_0 = (
    _Kind(partial(number, above=0, high=1), "a number in (0, 1]"),
    _Kind(partial(number, low=0, high=1), "a number in [0, 1]"),
)
# Bounds that leave every sum and quotient of logits finite.
_SHIFT = _Kind(partial(number, low=-1e6, high=1e6), "a number from -1e6 to 1e6")
_PENALTY = _Kind(partial(number, low=1e-3, high=1e3), "a number from 0.001 to 1000")
_FACTOR = _Kind(partial(number, above=0), "a number > 0")
_COUNT, _POSITIVE_COUNT = (_Kind(partial(whole, low=low), f"an integer >= {low}") for low in (0, 1))
# vLLM and llama.cpp write -1 for "off" and "none".
_TOP_K = _Kind(lambda value: 0 if _is_minus_one(value) else whole(value, low=0), "an integer >= 0, or -1 for off")
_SEED = _Kind(lambda value: None if value is None or _is_minus_one(value) else whole(value, low=0), "None or an integer >= 0")
_BOOLEAN, _TEXT = _Kind(_flag, "True or False"), _Kind(_text, "a text")
_TEXTS, _IDS = _Kind(_texts, "a text or several, none of them empty, or None"), _Kind(_ids, "token ids, or None")
_SCHEMA = _Kind(_or_none(_schema), "a JSON schema, as a dict or as JSON text, or None")
_BIASES = _Kind(_biases, "a mapping from token id to a number from -1e6 to 1e6 (-inf forbids), or None")


@dataclass(frozen=True)
class SamplingParams:
    """How one request turns logits into tokens, and when it ends. The default is greedy.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and penalties at their defaults are off.
    n: answers that `LLM.generate` and `LLM.chat` give to the prompt; with a seed, the second has seed + 1, and so on.
    logprobs: None, or the number of alternatives to report beside each chosen token (0 = the chosen token alone).
    prompt_logprobs: the same for the prompt's tokens, in `Completion.prompt_logprobs`; streams have none.
    max_draft_tokens: most tokens drafted in a round for this request, 0 = none; None = as the model was loaded.
    json_schema (kept as JSON text), regex, choices, grammar: one of them at most; every token is then chosen among those that can
    still lead to a text of it. The answer ends where nothing can follow, or where the text is whole and the model chooses its end
    token; max_tokens and stop may cut it off before. free_reasoning and grammar_trigger leave parts of the answer free.
    """

    temperature: float = _setting(
        0.0,
        _NOT_NEGATIVE,
        "0 takes the likeliest token, whatever the model's files recommend; higher is more random. This and the next four are "
        "by default what the model's files or its recipe recommend, else greedy.",
        "T",
    )
    top_k: int = _setting(0, _TOP_K, "Sample among the K likeliest tokens; 0 is off.", "K")
    top_p: float = _setting(1.0, _SHARE, "Sample among the likeliest tokens that together have P; 1 is off.", "P")
    min_p: float = _setting(0.0, _SHARE_OR_0, "Drop tokens less likely than P times the likeliest; 0 is off.", "P")
    repetition_penalty: float = _setting(1.0, _PENALTY, "Above 1, tokens of prompt and answer become less likely; 1 is off.", "X")
    presence_penalty: float = _setting(0.0, _SHIFT, "Taken from the logits of tokens of the answer.", "X")
    frequency_penalty: float = _setting(0.0, _SHIFT, "Likewise, once for each time the token was generated.", "X")
    logit_bias: Mapping[int, float] = _setting(
        _FrozenDict(), _BIASES, "Added to a token's logit; -inf forbids it. Repeatable.", "ID=BIAS"
    )
    seed: int | None = _setting(None, _SEED, "Repeats a sampled answer; by default one is drawn, and shown.", "S")
    stop: tuple[str, ...] = _setting((), _TEXTS, "End before this text, which is not shown. Taken literally. Repeatable.", "TEXT")
    stop_token_ids: tuple[int, ...] = _setting((), _IDS, "End with this token, too. Repeatable.", "ID")
    include_stop_str_in_output: bool = _setting(False, _BOOLEAN, "The answer's text ends with the stop text that ended it.")
    skip_special_tokens: bool = _setting(True, _BOOLEAN, "Leave special tokens out of the answer's text.")
    allowed_token_ids: tuple[int, ...] = _setting(
        (), _IDS, "Choose among these tokens alone; by default among all. Repeatable.", "ID"
    )
    bad_words: tuple[str, ...] = _setting(
        (), _TEXTS, "The answer never has this text as the tokenizer writes it alone, or behind a space. Repeatable.", "TEXT"
    )
    ignore_eos: bool = _setting(False, _BOOLEAN, "Go on when the model ends its answer, up to --max-tokens.")
    max_tokens: int = _setting(1024, _POSITIVE_COUNT, "Tokens that an answer may have at most.", "N", short="n")
    min_tokens: int = _setting(0, _COUNT, "Tokens that an answer has at least: before, no end token is taken, and no --stop.", "N")
    n: int = _setting(1, _POSITIVE_COUNT, "Answers to the prompt.", "N")
    parse_special: bool = _setting(
        True, _BOOLEAN, "Take a text like <|im_end|> in a raw prompt for that token; in a message it is always text."
    )
    logprobs: int | None = _setting(
        None, _optional(_COUNT), "With --json: log-probabilities of each token and of the N likeliest ones in its place.", "N"
    )
    prompt_logprobs: int | None = _setting(
        None, _optional(_COUNT), "Log-probabilities of the prompt's tokens, and of the N likeliest ones in each place.", "N"
    )
    max_draft_tokens: int | None = _setting(None, _optional(_COUNT), "Tokens that are drafted in a round at most.", "N")
    cache_salt: str = _setting(
        "", _TEXT, "Prefixes and past answers are shared with requests of the same salt alone, as in vLLM.", "TEXT"
    )
    draft: str | None = _setting(
        None,
        _optional(_TEXT),
        "Drafts for this request, of lookups and of models that are loaded; by default as the model was loaded.",
        "SPEC",
    )
    json_schema: str | Mapping[str, Any] | None = _setting(
        None, _SCHEMA, "The answer is JSON of this schema, written on one line.", "FILE"
    )
    regex: str | None = _setting(None, _optional(_TEXT), "The answer as a whole matches this, in the syntax of Rust's regex.", "R")
    choices: tuple[str, ...] = _setting((), _TEXTS, "The answer is this text, or another that is given so. Repeatable.", "TEXT")
    grammar: str | None = _setting(
        None, _optional(_TEXT), "The answer is a text of this grammar: Lark as llguidance takes it, or llama.cpp's GBNF.", "FILE"
    )
    free_reasoning: bool = _setting(
        False, _BOOLEAN, "A grammar begins behind the reasoning where there is any, from <think> to </think>."
    )
    grammar_trigger: str | None = _setting(
        None,
        _optional(_TEXT),
        "A grammar holds behind this token only, until its text is whole, each time that the answer has the token.",
        "TOKEN",
    )

    logits_processors: InitVar[object] = None  # vLLM's; refused

    def __post_init__(self, logits_processors: object) -> None:
        if logits_processors:
            raise ConfigError(
                "logits_processors must be left out: no code of a caller runs between logits and tokens; use logit_bias, "
                "allowed_token_ids, bad_words, regex or grammar"
            )
        _read_settings(self)
        if self.has_grammar:
            self._check_grammar()
        elif self.grammar_trigger is not None:
            raise ConfigError("grammar_trigger says where a grammar begins; give json_schema, regex, choices or grammar, too")

    def _check_grammar(self) -> None:
        given = [name for name in ("json_schema", "regex", "choices", "grammar") if getattr(self, name) not in (None, ())]
        if len(given) > 1:
            raise ConfigError(f"an answer keeps to one grammar; got {' and '.join(given)}")
        if self.ignore_eos:
            raise ConfigError(f"{given[0]} says where the answer ends; leave out ignore_eos")
        if self.allowed_token_ids:
            raise ConfigError(f"{given[0]} says which tokens the answer may have; leave out allowed_token_ids")
        if -math.inf in self.logit_bias.values():
            raise ConfigError(f"a logit_bias of -inf may forbid all that {given[0]} allows; take a finite one, as -100")

    @property
    def has_grammar(self) -> bool:
        """Whether json_schema, regex, choices or grammar restricts the answer."""
        return not (self.json_schema is None and self.regex is None and self.grammar is None and not self.choices)

    @property
    def greedy(self) -> bool:
        """Whether the next token is the argmax of the processed logits."""
        return self.temperature == 0

    @cached_property
    def keeps_order(self) -> bool:
        """Whether the processed logits are the raw logits, so that their argmax needs no history."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return not self.logit_bias and penalties == (1, 0, 0)


# The fields of SamplingParams that models recommend values for.
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class SamplingDefaults:
    """The sampling that a model recommends, in the fields of `SamplingParams`; None where it recommends nothing.

    ignored: a sentence for each value of its files that cannot be used. Raises ConfigError for values that SamplingParams refuses.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        SamplingParams(**self.fields())

    @staticmethod
    def read(where: str, values: Mapping[str, object]) -> "SamplingDefaults":
        """Read the defaults from a file, called `where`, that nobody has checked; a value of no use is ignored.

        None is absent, and a top_k of -1 is off, as in vLLM.
        """
        usable: dict[str, Any] = {}
        ignored = []
        for name, value in values.items():
            if value is None:
                continue
            usual = 0 if name == "top_k" and type(value) is int and value == -1 else value
            try:
                SamplingDefaults(**{name: usual})  # type: ignore[arg-type]
            except ConfigError as error:
                ignored.append(f"{where}: {str(error)[:200]}; it is ignored")
            else:
                usable[name] = usual
        return SamplingDefaults(**usable, ignored=tuple(ignored))

    def fields(self) -> dict[str, Any]:
        """The recommended values, by name."""
        return {name: getattr(self, name) for name in SAMPLING_FIELDS if getattr(self, name) is not None}

    def over(self, others: "SamplingDefaults") -> "SamplingDefaults":
        """These defaults, completed by those of `others`."""
        return SamplingDefaults(**{**others.fields(), **self.fields()}, ignored=self.ignored + others.ignored)

    def under(self, given: Mapping[str, Any]) -> SamplingParams:
        """The params of a request with these settings, the others by default.

        A given temperature of 0 is plain greedy decoding: none of the model's defaults apply, a penalty as little as top-k.
        Raises ConfigError as SamplingParams does.
        """
        return SamplingParams(**{**({} if given.get("temperature") == 0 else self.fields()), **given})


NO_DEFAULTS = SamplingDefaults()


DTYPES = ("auto", "f32", "bf16", "f16")
WEIGHTS = ("auto", "values", "codes")
ACTIVATIONS = ("auto", "int8", "f32")
PROMPT_ARITHMETICS = ("auto", "codes", "bf16")
HEAD_FORMATS = ("int8", "int4", "file")
POOLINGS = ("last", "mean", "cls")  # of a text's states, for its embedding: the last token's, the mean of all, the first one's


@dataclass(frozen=True)
class EngineConfig:
    """What an engine reserves, and how its backend computes.

    The KV format's name is checked where formats are known (`cpuspec.formats.kv`), the device's where devices are. Device, dtype
    and weights are settings of the torch backend, activations of onnxruntime, openvino and numpy, the arithmetic of prompts of
    numba; others take "auto", and "cpu" as the device (`cpuspec.backends.check_backend`).
    """

    max_sequences: int = _setting(16, _whole(1, 4096), "Sequences that run at once; more wait their turn.", "N")
    context_length: int | None = _setting(
        None,
        _optional(_Kind(partial(whole, low=2), "an integer >= 2")),
        "Tokens that prompt and answer may have together; by default what the model was trained for.",
        "N",
    )
    max_rows: int = _setting(256, _whole(1, 8192), "Rows of one forward; longer prompts go in chunks.", "N")
    # More rows delay answers, fewer slow down prompts. With AVX2, SmolLM2-135M, two streams and a prompt of 4,000 tokens, 32 rows
    # leave gaps of 151 ms and make the prompt 18 % slower; 16 rows: 101 ms and 31 %; 64 rows: 261 ms and 2 % (benchmarks/LOG.md).
    prompt_rows: int = _setting(
        32,
        _whole(1, 8192),
        "Rows of prompts that a step reads beside running answers: more of them read prompts sooner and delay answers.",
        "N",
    )
    prefix_cache_gb: float | None = _setting(
        None,
        _optional(_NOT_NEGATIVE),
        "Gigabytes of keys and values that finished requests leave in memory, so that later prompts that begin alike need not be "
        "computed: by default an eighth of the memory, up to a quarter of what the weights leave, and 0 on backends that do not "
        "promise the same bits.",
        "GB",
    )
    prefix_cache_dir: str | None = _setting(
        None,
        _optional(_TEXT),
        "Directory that gets what does not fit in memory, and at the end the rest, for the next start; by default "
        "`prefixes` in the cache directory; `none` is none. It holds prompts.",
        "DIR",
    )
    plain_on_draft_error: bool = _setting(
        False, _BOOLEAN, "Let a request whose drafter fails go on without drafts, instead of raising the error."
    )
    prefix_disk_gb: float = _setting(10.0, _NOT_NEGATIVE, "Gigabytes that this directory may have.", "GB")
    threads: int | None = _of_backend(
        None, _optional(_whole(1, 1024)), "Threads to compute with; by default every usable core.", "N"
    )
    memory: str = _of_backend(
        "auto",
        _Kind(_memory_limit, "a size such as 8GB, a share of the memory such as 60%, or auto"),
        "Memory that weights may take with numba, as 8GB or 60%: experts of a mixture that do not fit stay on the disk and are "
        "read when tokens need them. auto keeps all in memory.",
        "LIMIT",
    )
    keep_packed: bool = _setting(True, _BOOLEAN, "Keep weights in the order of the kernels on the disk, for a quick next start.")
    numa: str = _setting(
        "auto",
        _choice(("auto", "copies", "interleave", "off")),
        "Where weights lie on a machine with several memory nodes: a copy on each, which threads nearby read; spread over them; or "
        "as the system likes. auto makes copies where they take up to half of the memory, and spreads other weights.",
        "HOW",
    )
    mmap: bool = _setting(
        True,
        _BOOLEAN,
        "Map model files; reading them into memory instead is slower to start, and safe from files that are shortened.",
    )
    head_format: str = _setting(
        "int8",
        _choice(HEAD_FORMATS),
        "What a trained head's matrices of 16 bits and more are cast to at load: int8, int4, or file, which leaves them.",
        "F",
    )
    head_vocab: int | None = _setting(
        None,
        _optional(_COUNT),
        "A head that could draft all tokens drafts the N of the lowest numbers, which tokenizers give to frequent ones, and those "
        "that end an answer; 0 is all. By default 32768 for multi-token prediction if the output matrix is most of it.",
        "N",
    )
    lora: tuple[str, ...] = _setting(
        (),
        _TEXTS,
        "A LoRA adapter for every answer, times SCALE: a directory of PEFT, or a GGUF file of llama.cpp. Repeatable. Drafts are "
        "made without it; `quantize --lora` merges one for good.",
        "FILE[=SCALE]",
        option="lora",
    )
    lora_modules: tuple[str, ...] = _setting(
        (),
        _TEXTS,
        "A LoRA adapter for requests that call the model NAME, or MODEL:NAME. Repeatable.",
        "NAME=FILE",
        option="lora-modules",
    )
    # f16 halves what f32 reads at depth, at no cost that can be measured (benchmarks/LOG.md).
    kv_format: str = _of_backend(
        "f16",
        _TEXT,
        "What keys and values are kept in: f32, f16, bf16, int8 or int4. Fewer bits are faster in a long context.",
        "F",
    )
    device: str = _of_backend("auto", _TEXT, "Where torch computes: cpu, cuda, cuda:N, or auto, a GPU where there is one.", "D")
    dtype: str = _of_backend(
        "auto", _choice(DTYPES), "In what torch multiplies with weights: f32, bf16, f16, or auto, f32 on a CPU, bf16 on a GPU.", "T"
    )
    weights: str = _of_backend(
        "auto",
        _choice(WEIGHTS),
        "What torch keeps of weights: values, dequantized at load; codes, as small as in the file; or auto, codes on a GPU.",
        "W",
    )
    activations: str = _of_backend(
        "auto",
        _choice(ACTIVATIONS),
        "What ONNX Runtime and OpenVINO multiply 4- and 8-bit matrices with: int8, fast and what auto is, or f32, exact but for "
        "the order of sums. numpy with int8 shows what that rounding costs.",
        "A",
    )
    prompt_arithmetic: str = _of_backend(
        "auto",
        _choice(PROMPT_ARITHMETICS),
        "How numba multiplies tokens of prompts: codes, like all other tokens; bf16, attention in bf16, and weights dequantized to "
        "bf16 where the processor has tile registers (AMX); or auto, bf16 with such registers.",
        "A",
    )

    def __post_init__(self) -> None:
        _read_settings(self)


ANY_NAME = "*"  # among the names of a model: requests may call it anything


@dataclass(frozen=True)
class ServerConfig:
    """Where `cpuspec serve` listens, whom it answers, and the limits of what it takes on. Secrets are no settings."""

    host: str = _setting("127.0.0.1", _TEXT, "The address to listen on; 0.0.0.0 is every one that this machine has.", "ADDRESS")
    port: int = _setting(8000, _whole(0, 65535), "The port to listen on; 0 takes a free one.", "N")
    aliases: tuple[str, ...] = _setting(
        (),
        _TEXTS,
        "A name that requests may call the model by; by default MODEL. Repeatable. * forgives every other name, too.",
        "NAME",
        option="alias",
    )
    cors: tuple[str, ...] = _setting(
        (),
        _TEXTS,
        "An origin whose web pages may use the server, as http://localhost:3000; by default none. Repeatable.",
        "ORIGIN",
        option="cors",
    )
    max_waiting: int = _setting(
        64, _whole(0, 1 << 16), "Answers that may wait for their turn; a request beyond is refused with status 429.", "N"
    )
    max_connections: int = _setting(512, _whole(1, 1 << 16), "Connections at once; one beyond gets status 503.", "N")
    max_body_bytes: int = _setting(8 << 20, _whole(1, 1 << 32), "Bytes of a request's body; beyond is status 413.", "N")
    max_prompt_tokens: int | None = _setting(
        None, _optional(_POSITIVE_COUNT), "Tokens that a prompt may have; by default what the context holds.", "N"
    )
    max_new_tokens: int | None = _setting(
        None, _optional(_POSITIVE_COUNT), "Tokens that an answer may have, whatever a request asks for.", "N"
    )
    max_request_s: float = _setting(1800.0, _FACTOR, "Seconds that a request may take, waiting included.", "S")
    models_gb: float | None = _setting(
        None,
        _optional(_NOT_NEGATIVE),
        "Gigabytes that loaded models may take together, where there are several; by default three quarters of the memory.",
        "GB",
    )
    drop_changing_lines: bool = _setting(
        True,
        _BOOLEAN,
        "Take out the lines that some agents change in the system message of each request, so that prompts begin alike.",
    )
    strict_requests: bool = _setting(
        False, _BOOLEAN, "Refuse requests with unknown fields, as OpenAI's API does, instead of ignoring these with a note."
    )
    lora_dir: str | None = _setting(
        None,
        _optional(_TEXT),
        "Directory from which requests may load LoRA adapters, by vLLM's /v1/load_lora_adapter; by default that is refused. "
        "Every client may then load and unload adapters for all.",
        "DIR",
    )
    slot_save_path: str | None = _setting(
        None,
        _optional(_TEXT),
        "Directory that /slots may save prompts to and restore them from; by default that is refused.",
        "DIR",
    )
    pooling: str | None = _setting(
        None,
        _optional(_choice(POOLINGS)),
        "Make embeddings of which states: last, mean or cls; by default as the model's files say.",
        "POOLING",
    )
    drain_s: float = _setting(
        30.0, _NOT_NEGATIVE, "Seconds that running requests have left when the server is told to end (SIGTERM, Ctrl-C).", "S"
    )

    def __post_init__(self) -> None:
        _read_settings(self)


_DEVICE = r"(?:auto|cpu|cuda(?::\d+)?)"
_OF_BACKEND = tuple(one.name for one in fields(EngineConfig) if one.metadata["of_backend"])
_NAMED = rf"(?:device={_DEVICE}|(?:{'|'.join(_OF_BACKEND)})=\w+)"
BACKEND_SETTINGS = rf"(?:{_DEVICE}|{_NAMED})(?:,{_NAMED})*"  # what follows a backend's name and a colon


def read_backend(text: str, settings: EngineConfig) -> tuple[str, EngineConfig]:
    """The name of a backend, and `settings` with those that its spelling sets, as in `torch:cuda,dtype=bf16` or `numba:threads=1`.

    A setting without a name is the device. Names of backends are checked where they are known (`backends.check_backend`).
    Raises ConfigError.
    """
    if not isinstance(text, str):
        raise ConfigError(f"a backend is a text such as 'numba' or 'torch:cuda,dtype=bf16'; got {_shown(text)}")
    backend, _, changes = text.partition(":")
    found: dict[str, Any] = {}
    for change in changes.split(",") if changes else ():
        name, _, value = change.rpartition("=")
        name = name or "device"
        if name not in _OF_BACKEND or not value:
            raise ConfigError(
                f"cannot read {change!r} in {text!r}; wanted BACKEND:SETTING=VALUE,... with some of {', '.join(_OF_BACKEND)}"
            )
        if name == "threads" and not (value.isascii() and value.isdigit() and len(value) < 5):
            raise ConfigError(f"threads in {text!r} are a whole number, got {value!r}")
        found[name] = int(value) if name == "threads" else value
    return backend, replace(settings, **found)


MAX_DRAFT_TOKENS = 255  # at most a row less than a forward has
_OLD_NAME = re.compile(rf"\A((?:\w+(?::{BACKEND_SETTINGS})?:)?)match:")  # of text:MODEL, which it still stands for


@dataclass(frozen=True)
class LevelSpec:
    """One drafter: `name`, or `name:argument` for those that take one, and its settings.

    num_tokens: most tokens drafted in a round, None for the drafter's own number. min_confidence: a draft ends where its drafter is
    less sure than this, 0 for the drafter's own bound. then: drafters that continue its tokens within the same verification.
    """

    drafter: str
    num_tokens: int | None = None
    min_confidence: float = 0.0
    then: tuple["LevelSpec", ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.drafter, str) or not self.name or self.name == "none" or self.drafter.endswith(":"):
            raise ConfigError(f"a draft level begins with the name of a drafter, got {self.drafter!r}")
        object.__setattr__(self, "drafter", _OLD_NAME.sub(r"\1text:", self.drafter))
        try:
            object.__setattr__(self, "num_tokens", _or_none(partial(whole, low=1, high=MAX_DRAFT_TOKENS))(self.num_tokens))
        except ValueError:
            got = _shown(self.num_tokens)
            raise ConfigError(f"{self.drafter} drafts 1 to {MAX_DRAFT_TOKENS} tokens a round, got {got}") from None
        try:
            object.__setattr__(self, "min_confidence", number(self.min_confidence, low=0, below=1))
        except (ValueError, OverflowError):
            got = _shown(self.min_confidence)
            raise ConfigError(f"min_confidence of {self.drafter} must be a number in [0, 1), got {got}") from None

    @property
    def name(self) -> str:
        """The text before the first colon."""
        return self.drafter.partition(":")[0]

    @property
    def argument(self) -> str:
        """The text after the first colon."""
        return self.drafter.partition(":")[2]

    def __str__(self) -> str:
        tokens = "" if self.num_tokens is None else str(self.num_tokens)
        confidence = f":{self.min_confidence:g}" if self.min_confidence else ""
        cap = f"@{tokens}{confidence}" if tokens or confidence else ""
        return "+".join([f"{self.drafter}{cap}", *map(str, self.then)])


_NEXT_LEVEL = re.compile(rf",(?!(?:{'|'.join(_OF_BACKEND)})=)")  # other commas separate the settings of a level's backend
_LEVEL = re.compile(r"(?P<drafter>.+?)(@(?P<tokens>[0-9]{1,9})?(:(?P<confidence>[0-9]*\.?[0-9]+))?)?")
_GRAMMAR = "wanted none, or levels drafter[:argument][@tokens[:confidence]], cheapest first, separated by commas, or joined by +"


@dataclass(frozen=True)
class SpecConfig:
    """The draft levels, cheapest first; no level is plain decoding."""

    levels: tuple[LevelSpec, ...] = ()

    @staticmethod
    def parse(text: str) -> "SpecConfig":
        """Read the text of `--draft`, as `ngram`, `ngram@8`, `suffix,self:mxfp4@4` or `small-model@6:0.4+ngram`, or vLLM's JSON.

        Names are checked where drafters are known (`cpuspec.engine.assemble`). Raises ConfigError on bad grammar.
        """
        if text.lstrip().startswith("{"):
            try:
                return SpecConfig.read(json.loads(text))
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"a speculative config is a JSON object; {text[:80]!r} is none: {error}") from None
        return SpecConfig() if text.strip() in ("", "none") else SpecConfig.read(_NEXT_LEVEL.split(text))

    @staticmethod
    def read(levels: object) -> "SpecConfig":
        """The same from a list, as TOML and JSON have it: each level a text, or a table with the fields of `LevelSpec`.

        In a table a drafter may contain any character. A SpecConfig is returned as it is. A mapping is read as vLLM's speculative
        config, as {"method": "eagle3", "model": "path", "num_speculative_tokens": 3}. Raises ConfigError.
        """
        if isinstance(levels, SpecConfig):
            return levels
        if isinstance(levels, str):
            return SpecConfig.parse(levels)
        if isinstance(levels, Mapping) and not levels.keys() & {"drafter"}:
            return SpecConfig((_read_vllm(levels),))
        if not isinstance(levels, list | tuple):
            raise ConfigError(f"draft levels are a text or a list, got {levels!r}")
        return SpecConfig(tuple(_read_level(level) for level in levels))

    def __str__(self) -> str:
        return ",".join(map(str, self.levels)) or "none"


AUTO = SpecConfig((LevelSpec("auto"),))  # drafts where that pays: the default of everything that takes a spec


# Methods of vLLM's speculative config that name no model, with our drafters; those that end with mtp are the target's own layer.
_VLLM_DRAFTERS: Mapping[str, str] = {"ngram": "ngram", "ngram_gpu": "ngram", "suffix": "suffix"}
# Its keys, with the function that reads a value. Those that _read_vllm does not use say how vLLM drafts; no answer depends on them.
_VLLM_KEYS: Mapping[str, Callable[[Any], object]] = {
    **dict.fromkeys(("method", "model", "quantization", "kv_cache_dtype", "moe_backend", "attention_backend"), _or_none(_text)),
    "num_speculative_tokens": lambda value: value,  # LevelSpec checks it
    **dict.fromkeys(
        ("prompt_lookup_max", "prompt_lookup_min", "max_model_len", "dspark_draft_topk"), _or_none(partial(whole, low=1))
    ),
    **dict.fromkeys(("suffix_decoding_max_tree_depth", "disable_by_batch_size"), _or_none(partial(whole, low=1))),
    "suffix_decoding_max_cached_requests": partial(whole, low=0),
    "suffix_decoding_max_spec_factor": partial(number, low=0),
    "suffix_decoding_min_token_prob": partial(number, low=0, below=1),
    **dict.fromkeys(("parallel_drafting", "use_heterogeneous_vocab", "use_local_argmax_reduction"), _flag),
    **dict.fromkeys(("disable_padded_drafter_batch", "disable_eagle_block_drop", "enable_adaptive_verification"), _flag),
    "enforce_eager": _or_none(_flag),
    "draft_tensor_parallel_size": _or_none(partial(whole, low=1, high=1)),
    "rejection_sample_method": partial(_one_of, ("standard", "block", "strict", "probabilistic")),
    "draft_sample_method": partial(_one_of, ("greedy", "probabilistic")),
}


def _read_vllm(values: Mapping[Any, Any]) -> LevelSpec:
    """The level of vLLM's speculative config: a head's files say what method it has, so other methods need a model alone."""
    for key, value in values.items():
        if key not in _VLLM_KEYS:
            known = ", ".join(_VLLM_KEYS)
            raise ConfigError(
                f"a speculative config has no {_shown(key)} here; wanted method, model, num_speculative_tokens; of {known}"
            )
        if not _fits(_VLLM_KEYS[key], value):
            raise ConfigError(f"cannot read {key} of a speculative config, got {_shown(value)}")
    method, model, number = (values.get(key) for key in ("method", "model", "num_speculative_tokens"))
    if (values.get("prompt_lookup_min") or 1) > (values.get("prompt_lookup_max") or math.inf):
        raise ConfigError("a speculative config's prompt_lookup_min is above its prompt_lookup_max")
    if method is None and model in ("ngram", "[ngram]"):
        method = "ngram"
    drafter = "mtp" if method and (method == "mtp" or method.endswith("_mtp")) else _VLLM_DRAFTERS.get(method or "", model)
    if drafter is None:
        raise ConfigError(f"a speculative config with the method {_shown(method)} names a model, got none")
    if drafter == "suffix":
        return LevelSpec(drafter, number, values.get("suffix_decoding_min_token_prob", 0.0))
    return LevelSpec(drafter, number)


def _read_level(level: object) -> LevelSpec:
    if isinstance(level, LevelSpec):
        return level
    if isinstance(level, str):
        first, *then = [_read_drafter(part.strip(), level) for part in level.split("+")]
        return replace(first, then=tuple(then))
    if not isinstance(level, dict) or not {"drafter"} <= level.keys() <= {"drafter", "num_tokens", "min_confidence", "then"}:
        raise ConfigError(
            f"cannot read draft level {level!r}; wanted a text or a table with drafter, num_tokens, min_confidence, then"
        )
    return LevelSpec(**{**level, "then": SpecConfig.read(level.get("then", [])).levels})


def _read_drafter(text: str, level: str) -> LevelSpec:
    found = _LEVEL.fullmatch(text)
    if found is None or text.endswith("@"):
        raise ConfigError(f"cannot read {level!r} in a draft spec; {_GRAMMAR}")
    tokens, confidence = found["tokens"], found["confidence"]
    return LevelSpec(found["drafter"], int(tokens) if tokens else None, float(confidence) if confidence else 0.0)
