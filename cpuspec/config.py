"""What a model is: its layers, heads, experts and states, as numbers that every backend reads.

Plain data and its validation; nothing here knows arrays, files or kernels.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral, Real
from typing import Any

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


def fits(read: Callable[[object], object], value: object) -> bool:
    """Whether a reader accepts the value."""
    try:
        read(value)
    except (ValueError, OverflowError):
        return False
    return True


def shown(value: object) -> str:
    """A value in an error: not so long that it hides the error, whatever a file holds."""
    if isinstance(value, int) and abs(value) > 1 << 80:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)[:80]


def _check_integers(what: str, settings: object, limits: Mapping[str, tuple[int, int]]) -> None:
    """Raise ConfigError, which begins with `what`, unless each of these fields is an integer from least to largest."""
    what = what and f"{what}: "
    for name, (least, largest) in limits.items():
        value = getattr(settings, name)
        if not fits(partial(whole, low=least, high=largest), value):
            raise ConfigError(f"{what}{name} must be an integer from {least} to {largest}, got {shown(value)}")


# Of a mixer that keeps a matrix for each head.
_STATE_LIMITS = {"key_heads": (1, 1 << 12), "key_dims": (1, 1 << 10), "value_heads": (1, 1 << 12), "value_dims": (1, 1 << 10)}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context."""

    # "linear", "llama3", "yarn", "factors" (explicit divisors, one per frequency, as GGUF's `rope_freqs`), or "longrope": as
    # "factors", but `short_factors` in a context of at most `original_context_length` (`for_context`).
    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # of cosines and sines; None for 1, or YaRN's own
    factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    truncate: bool = True  # YaRN's ramp goes from whole pairs to whole pairs, as in llama.cpp for every model

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3", "yarn", "factors", "longrope"):
            raise ConfigError(f"rope scaling {self.kind!r} is not supported; wanted linear, llama3, yarn, factors or longrope")
        numbers = {"factor": self.factor}
        if self.kind == "llama3":
            numbers |= {"low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        if self.kind == "yarn":
            numbers |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow}
        for name, value in numbers.items():
            self._check(name, value, fits(partial(number, low=1e-6, high=1e6), value), "a number from 1e-6 to 1e6")
        if self.kind == "llama3":
            ordered = self.low_freq_factor < self.high_freq_factor
            self._check("low_freq_factor", self.low_freq_factor, ordered, f"less than high_freq_factor {self.high_freq_factor}")
        if self.kind == "yarn":
            self._check("beta_slow", self.beta_slow, self.beta_slow < self.beta_fast, f"less than beta_fast {self.beta_fast}")
        if self.kind in ("yarn", "factors", "longrope"):
            # It multiplies every cosine and sine, so that logits of attention grow with its square.
            sound = self.attention_factor is None or fits(partial(number, low=1e-3, high=100), self.attention_factor)
            self._check("attention_factor", self.attention_factor, sound, "a number from 0.001 to 100")
        if self.kind in ("llama3", "yarn", "longrope"):
            length = self.original_context_length
            sound = fits(partial(whole, low=1, high=_LONGEST_CONTEXT), length)
            self._check("original_context_length", length, sound, f"an integer from 1 to {_LONGEST_CONTEXT}")
        if self.kind == "longrope":
            same = len(self.short_factors) == len(self.factors)
            self._check("short_factors", f"{len(self.short_factors)} numbers", same, f"{len(self.factors)}, as of the long ones")
        for i, value in enumerate((*self.factors, *self.short_factors)):
            # Some files give pairs that are not to turn a factor like 1e30.
            self._check(f"factors[{i}]", value, fits(partial(number, low=1e-6, high=1e38), value), "a number from 1e-6 to 1e38")

    def for_context(self, length: int) -> "RopeScaling":
        """The scaling in a context of `length` tokens.

        The context chooses, not the tokens that are there: keys in the cache would have been turned by other factors.
        """
        if self.kind != "longrope":
            return self
        factors = self.factors if length > self.original_context_length else self.short_factors
        return RopeScaling("factors", attention_factor=self.attention_factor, factors=factors)

    def _check(self, name: str, value: object, sound: bool, wanted: str) -> None:
        if not sound:
            raise ConfigError(f"rope scaling {self.kind}: {name} is {shown(value)}, wanted {wanted}")


@dataclass(frozen=True)
class Rope:
    """One set of rotary positions."""

    base: float = 10000.0  # of the frequencies
    scaling: RopeScaling | None = None  # of the frequencies
    dims: int = 0  # the first dimensions of a head, which turn; 0 for all
    # b in 1 + b ln(1 + floor(position / growth_length)), a factor of the heads that are turned; 0 for none
    growth: float = 0.0
    growth_length: int = 0


@dataclass(frozen=True)
class Experts:
    """A mixture's experts, and how its router chooses among them. Each is a gated feed-forward part."""

    count: int  # experts of a layer
    used: int  # experts that a row goes through
    size: int  # inner numbers of one expert
    # What the router's logits become before the best are chosen: "softmax" over all experts, "sigmoid", or "chosen", a softmax over
    # the logits of those that were chosen.
    score: str = "softmax"
    normalised: bool = True  # the chosen weights are divided by their sum
    scale: float = 1.0  # of the weights
    shifted: bool = False  # the choice, and only it, adds a number of each expert to the scores (`router_shift`)
    # Consecutive experts form groups. The `groups_used` groups whose two best scores have the largest sums are chosen from.
    groups: int = 1
    groups_used: int = 1
    least_sum: float = 0.0  # what the sum is at least where weights are normalised
    bias: bool = False  # router and experts have biases
    weighed: bool = False  # weights are multiplied with a number of their expert in the end (`router_factors`)
    # The router, the experts and the dense part beside them each have a norm of their inputs, and the last two one of their
    # outputs.
    normed_apart: bool = False

    def __post_init__(self) -> None:
        limits = {"count": (1, 1 << 12), "used": (1, self.count), "size": (1, 1 << 20), "groups": (1, self.count)}
        _check_integers("experts", self, limits)
        if self.score not in ("softmax", "sigmoid", "chosen"):
            raise ConfigError(f"experts: score {self.score!r} is not supported; wanted softmax, sigmoid or chosen")
        if not fits(partial(number, low=1e-6, high=1e6), self.scale) or not 0 <= self.least_sum < 1:
            raise ConfigError(f"experts: scale is {shown(self.scale)}, wanted a number from 1e-6 to 1e6")
        if not fits(partial(whole, low=1, high=self.groups), self.groups_used) or self.count % self.groups:
            raise ConfigError(f"experts: {self.groups_used} of {self.groups} groups of {self.count}; wanted groups of one size")
        if self.groups > 1 and (self.count // self.groups < 2 or self.count // self.groups * self.groups_used < self.used):
            raise ConfigError(f"experts: {self.groups_used} groups of {self.count // self.groups} have no {self.used} to choose")


@dataclass(frozen=True)
class DeltaNet:
    """A mixer that keeps a matrix for each value head instead of all keys and values: the gated delta net (arXiv 2412.06464)."""

    key_heads: int  # of keys, and of queries
    key_dims: int  # numbers of a key, and of a query
    value_heads: int
    value_dims: int  # numbers of a value
    taps: int = 4  # rows that the causal convolution over queries, keys and values reads, the row's own included
    # value head i reads key head i % key_heads, as in GGUF files of Qwen3.5; else neighbours share one
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
    """LFM2's mixer: c * conv(b * x), each of b, c and x a product of the row, then a product."""

    channels: int  # numbers of a row
    taps: int = 3  # rows that the causal convolution reads, the row's own included

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

    With a step of each head: S = exp(step A) S + B (step x)^T, and S^T C + D x, times silu(z), then an RMS norm over each group's
    part if it is `normed`.
    """

    key_heads: int  # groups, each with a B and a C
    key_dims: int  # numbers of a B, and of a C
    value_heads: int  # heads of x, neighbours of which share a group
    value_dims: int  # numbers of a head of x
    taps: int = 4  # rows that the causal convolution over x, B and C reads
    bias: bool = True  # of the convolution
    normed: bool = True
    least_step: float = 0.0  # steps are at least this

    projections = ("ssm_z", "ssm_xbc", "ssm_dt")
    output = "ssm_out"
    convolution = "ssm_conv"

    def __post_init__(self) -> None:
        _check_integers("Mamba-2", self, {**_STATE_LIMITS, "taps": (2, 16)})
        if self.value_heads % self.key_heads:
            raise ConfigError(f"Mamba-2: {self.value_heads} heads are no multiple of {self.key_heads} groups")
        if self.key_dims % 16 or self.value_dims % 16:
            raise ConfigError(f"Mamba-2: heads of {self.value_dims} and states of {self.key_dims}; wanted multiples of 16")
        if not fits(partial(number, low=0, high=1), self.least_step):
            raise ConfigError(f"Mamba-2: least_step must be a number from 0 to 1, got {shown(self.least_step)}")

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

    Only that vector is cached, and beside it a key with rotary positions, which all heads share. A query without positions is
    multiplied by its head's matrix `k_b` instead, and what attention makes of the cached vectors by `v_b`. So a cached head has
    rank + rope_dims numbers, and its values are among them.
    """

    rank: int  # numbers of the cached vector
    rope_dims: int  # numbers of the key with rotary positions
    plain: int  # numbers of a query without positions
    value_dims: int  # numbers of a head's values
    q_rank: int = 0  # of a vector that queries are made of; 0 where they are made of the row itself

    def __post_init__(self) -> None:
        limits = dict.fromkeys(("rank", "rope_dims", "plain", "value_dims"), (1, 1 << 12))
        _check_integers("latent attention", self, {**limits, "q_rank": (0, 1 << 16)})
        for name, unit in (("rank", 32), ("plain", 32), ("rope_dims", 16), ("value_dims", 16)):
            if getattr(self, name) % unit:
                raise ConfigError(f"latent attention: {name} is {getattr(self, name)}, wanted a multiple of {unit}")

    @property
    def dims(self) -> int:
        """Numbers of a cached key: half of the rotated ones, half of the vector, and the other halves, so that what turns together
        is half a key apart, as in every head.
        """
        return self.rank + self.rope_dims

    @property
    def value_places(self) -> list[int]:
        """The places of the vector's numbers in a key."""
        first, half = self.rope_dims // 2, self.rank // 2
        return [*range(first, first + half), *range(2 * first + half, self.dims)]

    @property
    def projections(self) -> tuple[str, ...]:
        """Parts that the layer's normed rows are multiplied with."""
        return *(("q_a",) if self.q_rank else ("q_plain", "q_rope")), "latent", "k_rope"

    def tensors(self, heads: int, hidden: int) -> dict[str, tuple[int, ...]]:
        """The shape of each of its tensors, by part."""
        found: dict[str, tuple[int, ...]] = {}
        if self.q_rank:
            found |= {"q_a": (self.q_rank, hidden), "q_a_norm": (self.q_rank,)}
        inputs = self.q_rank or hidden
        return found | {
            "q_plain": (heads * self.plain, inputs), "q_rope": (heads * self.rope_dims, inputs), "latent": (self.rank, hidden),
            "latent_norm": (self.rank,), "k_rope": (self.rope_dims, hidden), "k_b": (heads, self.rank, self.plain),
            "v_b": (heads, self.value_dims, self.rank), "o": (hidden, heads * self.value_dims),
        }  # fmt: skip


# min(gate, LIMIT) * sigmoid(ALPHA * min(gate, LIMIT)) * (up clamped to +-LIMIT, + 1): the activation "swiglu_oai" of gpt-oss.
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


@dataclass(frozen=True)
class HeadConfig:
    """How a head, a draft model that was trained for one target, begins and ends. Between, it is a model like any other."""

    # Where rows read the target's hidden state h beside the embedding e of the token that follows. "matrix": a matrix makes C
    # numbers of both (EAGLE, arXiv 2401.15077; multi-token prediction, arXiv 2412.19437, section 2.2). "attention": queries, keys
    # and values of the first layer read both, and branches are added to h (EAGLE-3, arXiv 2503.01840). "none": rows are tokens
    # only. "alone": rows are hidden states only, and the head has no layers: matrices make logits of them (Medusa, arXiv
    # 2401.10774; MLP speculators, arXiv 2404.19124).
    fuses: str = "matrix"
    input_norms: bool = True  # e and h have RMS norms
    fuse_bias: bool = False  # the matrix has a bias
    normed_residual: bool = False  # with "attention": branches are added to the normed h
    first_norm: bool = True  # with "matrix": the first layer's attention has an RMS norm before it
    final_norm: bool = True  # logits have an RMS norm before them
    # numbers of the target's layers, side by side, that `encode` makes one h of; 0 where h comes as it is
    feature_size: int = 0
    # tokens that the head can draft, rows of its output matrix; None for the whole vocabulary
    num_logits: int | None = None
    # every layer's keys and values are made of h, too (DFlash, arXiv 2602.06036; `model.transformer.inject`)
    injects: bool = False
    # with "alone": names and shapes of its matrices and their biases
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    # numbers of h and of e where the rows between have others; the matrix `back` makes the next h; 0 for none
    target_size: int = 0
    # First layers that compute no rows: they hold keys and values that the target's own matrices make of the inputs of its layers,
    # and all other layers read only these, no row its own (Gemma 4's assistants).
    reads: int = 0

    def __post_init__(self) -> None:
        if not fits(partial(whole, low=0, high=1 << 17), self.target_size) or self.target_size % 32:
            raise ConfigError(f"target_size must be a multiple of 32 up to {1 << 17}, got {shown(self.target_size)}")
        if self.reads and (self.fuses != "matrix" or not self.injects or not self.target_size):
            raise ConfigError('a head that reads keys of its target has fuses "matrix", injects and a target_size')
        if self.fuses not in ("matrix", "attention", "none", "alone"):
            raise ConfigError(f"fuses {self.fuses!r} is not supported; wanted matrix, attention, none or alone")
        _check_integers(
            "", self, {"feature_size": (0, 1 << 22)} | ({} if self.num_logits is None else {"num_logits": (1, 1 << 24)})
        )


# Fields of ModelConfig that have an entry for each layer, or none.
_PER_LAYER = (
    "layer_windows", "layer_ropes", "layer_experts", "layer_recurrent", "layer_feeds", "layer_head_dims", "layer_kv_heads",
    "layer_owners", "layer_values", "layer_sizes",
)  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """Shape and flags of one decoder-only transformer: everything that a forward needs besides the weights.

    A field `layer_...` has an entry for each layer, or is empty: then all layers are alike.
    """

    architecture: str  # the name of its family; nothing is computed by it
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # inner numbers of the MLP
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # numbers of a head
    context_length: int
    norm_eps: float = 1e-6
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False  # queries and keys have norms
    tied_embeddings: bool = False
    few_logits: int | None = None  # rows of the output matrix of a draft model that drafts only some tokens; None for all
    norms: str = "before"  # of a branch (attention, MLP): "before", "after" (of its output) or "both"
    # Of the gate in the MLP: "silu", "gelu_tanh", "relu2" (the square of what is above 0) or "swiglu_oai", which clamps gate and up
    # (`SWIGLU_ALPHA`).
    activation: str = "silu"
    embedding_scale: float = 1.0  # factor of the embedded tokens
    query_scale: float | None = None  # factor of attention scores; None for 1 / sqrt(head_dim)
    attention_softcap: float = 0.0  # c in c * tanh(x / c) for attention scores; 0 for none
    logit_softcap: float = 0.0  # likewise for logits
    # how it begins and ends if it is a head, a draft model that takes its target's hidden states; None for other models
    head: HeadConfig | None = None
    layer_windows: tuple[int, ...] = ()  # last positions that a row sees, its own included; 0 for all
    # "global" (`rope_base`, `rope_scaling`), "local" (`local_rope_base`) or "none", which rotates nothing; empty for "global"
    layer_ropes: tuple[str, ...] = ()
    local_rope_base: float = 10000.0
    rope_dims: int = 0  # dimensions of a head that are rotated; 0 for all
    norm_spans: str = "head"  # what `qk_norm` is over: each "head", or the "row" of all heads
    experts: Experts | None = None  # of layers with a mixture; None for no such layer
    layer_experts: tuple[bool, ...] = ()  # the layer has experts instead of a dense part; empty for all layers
    shared_size: int = 0  # of a dense part that rows go through beside their experts; 0 for none
    weighs_shared: bool = False  # the sigmoid of a row's product with a vector weighs that part
    residual_scale: float = 1.0  # factor of every branch
    logit_scale: float = 1.0  # factor of logits
    norm_kind: str = "rms"  # "rms", or "layer" (mean and variance)
    norm_bias: bool = False  # norms have biases
    gated: bool = True  # the MLP has a gate; else the activation is of the MLP's inside itself
    mlp_bias: bool = False  # the MLP's matrices have biases
    parallel: bool = False  # attention and MLP read the same norm, and are both added to its input
    rotates_first: bool = False  # `qk_norm` follows the rotation
    query_growth: float = 0.0  # of `Rope`, for queries only
    query_growth_length: int = 0  # likewise
    sinks: bool = False  # each query head has a score of its own that softmax counts and no value belongs to
    # the sigmoid of numbers made like queries weighs attention's results, number by number
    gated_attention: bool = False
    recurrent: Recurrent | None = None  # the mixer of layers without attention
    layer_recurrent: tuple[bool, ...] = ()  # the layer has that mixer; empty for no layer
    beside: bool = False  # every layer has that mixer beside attention; both read one norm and are added to its input
    # Of a model whose layers are one branch each: the layer is the feed-forward part, else a mixer; empty for layers of both.
    layer_feeds: tuple[bool, ...] = ()
    # Of attention whose keys and values are made of one vector; head_dim is then `Latent.dims`, rope_dims `Latent.rope_dims`, and
    # there is one key head. None for other models.
    latent: Latent | None = None
    layer_head_dims: tuple[int, ...] = ()  # `head_dim` of the layer
    layer_kv_heads: tuple[int, ...] = ()  # `num_kv_heads` of the layer
    value_dim: int = 0  # numbers of a head of values; 0 for those of its keys
    # the number of the layer whose keys and values it reads, its own where it keeps some; empty where all do
    layer_owners: tuple[int, ...] = ()
    # a matrix makes values; else they are what keys are made of, before norms and positions; empty for all
    layer_values: tuple[bool, ...] = ()
    layer_sizes: tuple[int, ...] = ()  # `intermediate_size` of the layer
    value_norm: bool = False  # values have an RMS norm without weights
    # Numbers that each layer is given for a token besides, of a second embedding and of the first (Gemma 4's E models); 0 for none.
    layer_input_size: int = 0
    scales_layers: bool = False  # each layer's output is multiplied with a number of its own

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
            "vocab_size": (1, 1 << 24),
            "hidden_size": (1, 1 << 17),
            **dict.fromkeys(("num_layers", "num_heads", "num_kv_heads"), (1, 1 << 12)),
            "head_dim": (1, 1 << 10),
            "value_dim": (0, 1 << 10),
            "context_length": (1, _LONGEST_CONTEXT),
            "intermediate_size": (0 if self.layer_feeds else 1, 1 << 20),
            "rope_dims": (0, self.head_dim),
            "shared_size": (0, 1 << 20),
        }
        _check_integers("", self, limits)
        for heads in (self.num_kv_heads, *self.layer_kv_heads):
            if not fits(partial(whole, low=1, high=self.num_heads), heads) or self.num_heads % heads:
                raise ConfigError(f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {shown(heads)}")
        for dims in (self.head_dim, *self.layer_head_dims):
            if not fits(partial(whole, low=1, high=1 << 10), dims) or dims % 2:
                raise ConfigError(f"head_dim must be even for rotary positions, got {shown(dims)}")
        if set(self.layer_head_dims) - {self.head_dim} and self.rope_dims:
            raise ConfigError("rope_dims is of heads that have as many numbers in every layer; wanted no layer_head_dims")
        if not fits(partial(number, low=0, below=1), self.norm_eps):
            raise ConfigError(f"norm_eps must be in [0, 1), got {shown(self.norm_eps)}")
        for name in ("rope_base", "local_rope_base"):
            if not fits(partial(number, above=1, high=1e15), getattr(self, name)):
                raise ConfigError(f"{name} is {shown(getattr(self, name))}, wanted a number above 1, at most 1e15")
        if self.rope_dims % 2:
            raise ConfigError(f"rope_dims must be even, got {self.rope_dims}")
        for name, lowest in (
            ("embedding_scale", 1e-6), ("query_scale", 1e-6), ("attention_softcap", 0), ("logit_softcap", 0),
            ("residual_scale", 1e-6), ("logit_scale", 1e-6),
        ):  # fmt: skip
            value = getattr(self, name)
            if not (value is None and name == "query_scale") and not fits(partial(number, low=lowest, high=1e6), value):
                raise ConfigError(f"{name} is {shown(value)}, wanted a number from {lowest} to 1e6")
        self._check_combinations()
        scaling = self.rope_scaling
        turned_dims = self.rope_dims or self.head_dim
        if scaling is not None and scaling.kind in ("factors", "longrope") and len(scaling.factors) != turned_dims // 2:
            raise ConfigError(f"rope factors must be half of {turned_dims} dimensions, got {len(scaling.factors)} numbers")
        for name in _PER_LAYER:
            per_layer = getattr(self, name)
            if len(per_layer) not in (0, self.num_layers):
                raise ConfigError(f"{name} must have an entry for each of the {self.num_layers} layers, got {len(per_layer)}")
        for window in self.layer_windows:
            if not fits(partial(whole, low=0, high=_LONGEST_CONTEXT), window):
                raise ConfigError(f"layer_windows must be integers from 0 to {_LONGEST_CONTEXT}, got {shown(window)}")
        if unknown := set(self.layer_ropes) - {"global", "local", "none"}:
            raise ConfigError(f"layer_ropes are global, local or none, got {shown(min(unknown))}")
        self._check_mixers()
        self._check_layers()

    def _check_layers(self) -> None:
        """What layers read of each other, and their own sizes."""
        for i, owner in enumerate(self.layer_owners):
            if not fits(partial(whole, low=0, high=i), owner) or self.layer_owners[owner] != owner:
                raise ConfigError(
                    f"layer {i} reads the keys of layer {shown(owner)}; wanted one before it that has some, or itself"
                )
            for name in ("layer_windows", "layer_head_dims", "layer_kv_heads"):
                if (of := getattr(self, name)) and of[i] != of[owner]:
                    raise ConfigError(f"layer {i} reads the keys of layer {owner}, whose {name} differ: {of[i]} and {of[owner]}")
        for size in self.layer_sizes:
            if not fits(partial(whole, low=1, high=1 << 20), size):
                raise ConfigError(f"layer_sizes must be integers from 1 to {1 << 20}, got {shown(size)}")
        if not fits(partial(whole, low=0, high=1 << 12), self.layer_input_size) or self.layer_input_size % 32:
            raise ConfigError(f"layer_input_size must be a multiple of 32 up to {1 << 12}, got {shown(self.layer_input_size)}")
        of_gemma = self.value_norm or self.layer_input_size or self.scales_layers or self.layer_owners or self.layer_values
        if of_gemma and (
            (self.head and not self.head.reads) or self.parallel or self.latent or self.recurrent or self.norms != "both"
        ):
            raise ConfigError('what layers share or are given needs norms "both", in models of attention that are no heads')
        apart = self.experts is not None and self.experts.normed_apart
        if apart and (not self.shared_size or self.weighs_shared or self.norms != "both"):
            raise ConfigError('experts normed_apart need a dense part beside them that no gate weighs, and norms "both"')
        if self.layer_values and (self.value_dim or self.qkv_bias):
            raise ConfigError("layer_values needs values of the keys' size, and no biases")

    def _check_mixers(self) -> None:
        if latent := self.latent:
            if (self.num_kv_heads, self.head_dim, self.rope_dims) != (1, latent.dims, latent.rope_dims):
                raise ConfigError(
                    f"latent attention has one key head of {latent.dims} numbers, {latent.rope_dims} of which turn; got "
                    f"{self.num_kv_heads} of {self.head_dim}, and {self.rope_dims}"
                )
            if self.qkv_bias or self.o_bias or self.qk_norm or self.gated_attention or self.parallel or self.sinks:
                raise ConfigError(
                    "latent attention is supported without biases, norms of heads, gates, sinks and parallel branches"
                )
            if any(self.layer_windows) or self.attention_softcap:
                raise ConfigError(
                    "latent attention is supported over all positions, with scores as they are; got windows or a soft cap"
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
            raise ConfigError("layer_recurrent needs a recurrent mixer, in a model that is not a head and has no parallel branches")
        length = self.query_growth_length
        if not fits(partial(number, low=0, high=100), self.query_growth) or (
            self.query_growth and not fits(partial(whole, low=1, high=_LONGEST_CONTEXT), length)
        ):
            growth = f"query_growth {shown(self.query_growth)} over {shown(length)} tokens"
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
    def has_alike_heads(self) -> bool:
        """Whether keys and values of all layers have as many heads of as many numbers."""
        kinds = {*self.layer_head_dims} | {self.head_dim, self.value_dim or self.head_dim}
        return len(kinds) == 1 and not {*self.layer_kv_heads} - {self.num_kv_heads}

    @property
    def num_logits(self) -> int:
        """The length of a row of logits."""
        return (self.head.num_logits if self.head else self.few_logits) or self.vocab_size

    def with_layers(self, kept: Sequence[int]) -> "ModelConfig":
        """The model that has some of these layers, in this order."""
        per_layer: dict[str, Any] = {name: tuple(given[i] for i in kept) for name in _PER_LAYER if (given := getattr(self, name))}
        if self.layer_owners:
            if lost := {self.layer_owners[i] for i in kept} - set(kept):
                raise ConfigError(f"layer {min(lost)} must stay: others read its keys and values")
            per_layer["layer_owners"] = tuple(list(kept).index(owner) for owner in per_layer["layer_owners"])
        return replace(self, num_layers=len(kept), **per_layer)
