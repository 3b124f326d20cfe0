"""The layers of a model as data: the mixer of each, its feed-forward part, its norms and their tensors.

`ModelConfig` says it for the whole model, briefly; `layers_of` says it layer by layer, to readers, backends and quantizers.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cpuspec.config import Experts, Latent, Mamba2, ModelConfig, Recurrent, Rope

I32 = NDArray[np.int32]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Attention:
    """Attention of `heads` queries over `kv_heads` keys of `dims` numbers each, and values of `value_dims`."""

    heads: int
    kv_heads: int
    dims: int
    window: int | None  # last tokens of its path that a row sees, its own included; None for all
    rope: Rope | None  # of keys; None where nothing is rotated
    scale: float  # factor of scores
    softcap: float  # c in c * tanh(x / c) for scores; 0 for none
    norm: str  # what RMS norms of queries and keys are over: each "head", or the "row" of all heads; "" for none
    qkv_bias: bool
    o_bias: bool
    query_rope: Rope | None  # of queries
    rotates_first: bool  # those norms follow the rotation
    sinks: bool  # each head has one more score in its softmax, which no value belongs to
    gated: bool  # `q_gate` weighs the results
    value_dims: int
    latent: Latent | None = None  # what keys and values are made of; values are then numbers of the cached keys
    keeps: bool = True  # it appends keys and values; else it reads those of the layer whose `state_index` it has
    makes_values: bool = True  # a matrix makes values; else they are keys before norms and positions
    value_norm: bool = False  # values have a norm without weights

    output = "o"

    @property
    def mixed_dims(self) -> int:
        """Numbers that attention makes for a head, those of a key where there are no values."""
        return self.value_dims or self.dims

    @property
    def projections(self) -> tuple[str, ...]:
        """Parts that the layer's normed rows are multiplied with."""
        if self.latent:
            return self.latent.projections
        return ("q", *(("k", "v") if self.makes_values else ("k",)) * self.keeps, *("q_gate",) * self.gated)

    def tensors(self, hidden: int) -> dict[str, Shape]:
        """The shape of each of its tensors, by part."""
        if self.latent:
            return self.latent.tensors(self.heads, hidden)
        q, kv = self.heads * self.dims, self.kv_heads * self.dims
        v, out = self.kv_heads * self.value_dims, self.heads * self.value_dims
        found: dict[str, Shape] = {"q": (q, hidden), "k": (kv, hidden), "v": (v, hidden)}
        if self.gated:
            found["q_gate"] = (out, hidden)
        if self.qkv_bias:
            found |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (v,)}
        found["o"] = (hidden, out)
        if self.o_bias:
            found["o_bias"] = (hidden,)
        if self.norm:
            found |= {"q_norm": (self.dims,), "k_norm": (self.dims,)} if self.norm == "head" else {"q_norm": (q,), "k_norm": (kv,)}
        if self.sinks:
            found["sinks"] = (self.heads,)
        without = {"k", "v", "k_bias", "v_bias", "k_norm"} if not self.keeps else set() if self.makes_values else {"v"}
        return {part: shape for part, shape in found.items() if part not in without}


# Parts of a layer that mix rows: each says its `tensors`, its `projections` and its `output` matrix.
Mixer = Attention | Recurrent


@dataclass(frozen=True)
class FeedForward:
    """activation(gate x) * (up x), times `down`: of the dense part, and of the experts beside it."""

    activation: str
    size: int  # of the dense part, which is a shared one where there are experts; 0 for none
    experts: Experts | None = None
    weighs_shared: bool = False  # the sigmoid of a row's product with a vector weighs the shared part
    gated: bool = True  # there is a gate; else the middle is activation(up x)
    bias: bool = False  # the matrices have biases


@dataclass(frozen=True)
class Layer:
    """One layer. Its branches are `mixer` and `feed`; one of them may be missing."""

    index: int
    state_index: int  # its place among the layers that keep the same kind of state: keys and values, or that of a recurrence
    mixer: Mixer | None
    feed: FeedForward | None
    normed_before: bool  # branches have norms of their inputs
    normed_after: bool  # and of their outputs
    norm_bias: bool = False  # the norms of inputs have biases
    parallel: bool = False  # both branches read one norm and are added to its input
    beside: Mamba2 | None = None  # a recurrent mixer beside attention, which reads the same norm
    # Numbers that the layer is given for each token besides, of which a gate and a matrix make a last branch; 0 for none.
    input_size: int = 0
    scaled: bool = False  # its output is multiplied with `output_scale`
    injected: bool = False  # it holds keys and values for the others, made of what it is given, and computes no rows

    @property
    def recurrent(self) -> Recurrent | None:
        """The mixer that keeps a state, of a layer that has one."""
        return self.beside if self.beside or self.mixer is None or isinstance(self.mixer, Attention) else self.mixer

    @property
    def attention(self) -> Attention:
        """Its mixer, of a layer that has attention."""
        assert isinstance(self.mixer, Attention), f"layer {self.index} has no attention"
        return self.mixer

    def weight(self, part: str) -> str:
        """The canonical name of one of its tensors."""
        return f"layers.{self.index}.{part}"

    def tensors(self, hidden: int) -> dict[str, Shape]:
        """The shape of each of its tensors, by part. hidden: numbers of a row."""
        if self.injected:
            made = self.attention.tensors(self.input_size)
            return {part: made[part] for part in ("k", "v", "k_norm") if part in made}
        feed, experts = self.feed, self.feed and self.feed.experts
        found: dict[str, Shape] = {"attn_norm": (hidden,)} if self.normed_before else {}
        for mixer in (self.mixer, self.beside):
            found |= mixer.tensors(hidden) if mixer else {}
        if self.normed_before and not self.parallel and self.mixer and feed:
            found["mlp_norm"] = (hidden,)
        if self.norm_bias:
            found |= {f"{name}_bias": (hidden,) for name in ("attn_norm", "mlp_norm") if name in found}
        if feed and experts:
            of_all, size = (experts.count,), experts.size
            found["router"] = (*of_all, hidden)
            if experts.shifted:
                found["router_shift"] = of_all
            found |= {"expert_gate": (*of_all, size, hidden)} if feed.gated else {}
            found["expert_up"] = (*of_all, size, hidden)
            found["expert_down"] = (*of_all, hidden, size)
            if experts.weighed:
                found["router_factors"] = of_all
            if experts.normed_apart:
                found |= dict.fromkeys(("router_norm", "expert_norm", "expert_post_norm", "shared_post_norm"), (hidden,))
            if experts.bias:
                found |= {"router_bias": of_all, "expert_gate_bias": (*of_all, size), "expert_up_bias": (*of_all, size)}
                found["expert_down_bias"] = (*of_all, hidden)
        if feed and feed.size:
            prefix = "shared_" if experts else ""
            if feed.gated:
                found[f"{prefix}gate"] = (feed.size, hidden)
            found |= {f"{prefix}up": (feed.size, hidden), f"{prefix}down": (hidden, feed.size)}
            if feed.bias:
                found |= {f"{part}_bias": found[part][:1] for part in ("gate", "up", "down") if part in found}
            if feed.weighs_shared:
                found["shared_weight"] = (1, hidden)
        if self.normed_after:
            found |= {"attn_post_norm": (hidden,), "mlp_post_norm": (hidden,)}
        if self.input_size:
            found |= {
                "input_gate": (self.input_size, hidden),
                "input_proj": (hidden, self.input_size),
                "input_post_norm": (hidden,),
            }
        if self.scaled:
            found["output_scale"] = (1,)
        return found


def rotary_order(dims: int, rope_dims: int, neighbours: bool) -> I32:
    """Of a head of `dims` numbers in a file, the place of each number in ours, where pairs (i, i + dims / 2) turn together.

    rope_dims: how many of them turn, the first ones. neighbours: whether the file pairs neighbours, and not the halves of those.
    """
    pairs = np.arange(rope_dims).reshape(-1, 2) if neighbours else np.arange(rope_dims).reshape(2, -1).T
    pairs = np.concatenate([pairs, np.arange(rope_dims, dims).reshape(2, -1).T])
    return pairs.T.reshape(-1).astype(np.int32)


def layers_of(config: ModelConfig) -> list[Layer]:
    """The layers of a model, first to last."""
    c = config
    scaling = c.rope_scaling and c.rope_scaling.for_context(c.context_length)
    ropes = {
        "global": Rope(c.rope_base, scaling, c.rope_dims),
        "local": Rope(c.local_rope_base, None, c.rope_dims),
        "none": None,
    }
    windows = c.layer_windows or (0,) * c.num_layers
    kinds = c.layer_ropes or ("global",) * c.num_layers
    mixtures = c.layer_experts or (c.experts is not None,) * c.num_layers
    dense = FeedForward(c.activation, c.intermediate_size, gated=c.gated, bias=c.mlp_bias)
    mixture = FeedForward(c.activation, c.shared_size, c.experts, c.weighs_shared, c.gated)
    norm = c.norm_spans if c.qk_norm else ""

    recurs = c.layer_recurrent or (False,) * c.num_layers

    owners, values = c.layer_owners or range(c.num_layers), c.layer_values or (True,) * c.num_layers
    head_dims, kv_heads = c.layer_head_dims or (c.head_dim,) * c.num_layers, c.layer_kv_heads or (c.num_kv_heads,) * c.num_layers

    def mixer(i: int) -> Mixer | None:
        if c.layer_feeds and c.layer_feeds[i]:
            return None
        if recurs[i] and c.recurrent:
            return c.recurrent
        rope = ropes[kinds[i]]
        of_queries = rope and replace(rope, growth=c.query_growth, growth_length=c.query_growth_length)
        dims = head_dims[i]
        scale = 1 / math.sqrt(dims) if c.query_scale is None else c.query_scale
        return Attention(
            c.num_heads, kv_heads[i], dims, windows[i] or None, rope, scale, c.attention_softcap, norm,
            c.qkv_bias, c.o_bias, of_queries, c.rotates_first, c.sinks, c.gated_attention,
            0 if c.latent else c.value_dim or dims, c.latent, owners[i] == i, values[i], c.value_norm,
        )  # fmt: skip

    def feed(i: int) -> FeedForward | None:
        if c.layer_feeds and not c.layer_feeds[i]:
            return None
        return mixture if mixtures[i] else replace(dense, size=c.layer_sizes[i]) if c.layer_sizes else dense

    beside = c.recurrent if c.beside and isinstance(c.recurrent, Mamba2) else None
    found: list[Layer] = []
    for i in range(c.num_layers):
        one = mixer(i)
        alike = found[owners[i]].state_index if owners[i] != i else sum(_keeps_alike(layer.mixer, one) for layer in found)
        normed = c.norms != "after", c.norms != "before", c.norm_bias
        if injected := c.head is not None and i < c.head.reads:
            found.append(Layer(i, alike, one, None, *normed, input_size=c.state_size, injected=injected))
            continue
        found.append(Layer(i, alike, one, feed(i), *normed, c.parallel, beside, c.layer_input_size, c.scales_layers))
    return found


def _keeps_alike(one: Mixer | None, other: Mixer | None) -> bool:
    """Whether a mixer keeps the kind of state that another has."""
    if isinstance(one, Attention):
        return one.keeps and isinstance(other, Attention)
    return one is not None and not isinstance(other, Attention)


def attention_layers(config: ModelConfig) -> list[Layer]:
    """The layers that have attention."""
    return [layer for layer in layers_of(config) if isinstance(layer.mixer, Attention)]


def keeping_layers(config: ModelConfig) -> list[Layer]:
    """The layers that keep keys and values, by `state_index`."""
    return [layer for layer in attention_layers(config) if layer.attention.keeps]
