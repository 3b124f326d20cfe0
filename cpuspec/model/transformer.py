"""The decoder, once: the order of its operations, and what differs by layer. Backends execute the operations or write them down.

numpy and torch compute with them, the graph backends emit nodes, numba writes the rows of a program. A family of models is flags
of `ModelConfig` and a name map in its reader; a new operation is a line here and a method of each backend.
"""

import math
from dataclasses import dataclass
from typing import Protocol, TypeVar

from cpuspec.config import HeadConfig, ModelConfig, Rope

V = TypeVar("V")  # a backend's rows of numbers: an array, a tensor, the name of a node, or a buffer


@dataclass(frozen=True)
class Layer:
    """One layer: where its weights are, and how its attention differs from that of other layers.

    window: how many last tokens of its path a row sees, its own included; None for all. rope: None where nothing is rotated.
    """

    index: int
    window: int | None
    rope: Rope | None

    def weight(self, part: str) -> str:
        """The canonical name of one of its tensors."""
        return f"layers.{self.index}.{part}"


class Operations(Protocol[V]):
    """The operations of a forward. T rows of C numbers go from one to the next."""

    def embed(self) -> V:
        """The batch's tokens, times `embedding_scale`, [T, C]."""
        ...

    def hidden(self, norm: str | None) -> V:
        """RMS norm (None for none) of the batch's hidden states, [T, C]."""
        ...

    def join(self, x: V, norms: tuple[str, str] | None) -> V:
        """RMS norms (None for none) of the embedded tokens and of the batch's hidden states, side by side, [T, 2C]."""
        ...

    def linears(self, x: V, names: tuple[str, ...], norm: str | None) -> tuple[V, ...]:
        """RMS norm of `x` (None for none), then its product with each matrix, plus the matrix's bias if it has one."""
        ...

    def rotate(self, layer: Layer, q: V, k: V) -> tuple[V, V]:
        """Queries and keys: RMS norm of each head where the model has one, then the rotary positions of the layer."""
        ...

    def attention(self, layer: Layer, q: V, k: V, v: V) -> V:
        """Append keys and values to the cache, then softmax(scores) v over the tokens that each row sees, [T, H * D]."""
        ...

    def gate(self, gate: V, up: V) -> V:
        """activation(gate) * up."""
        ...

    def add(self, x: V, branch: V, name: str, norm: str | None) -> V:
        """`x` plus the product of `branch` with a matrix and its bias, after an RMS norm of that product (None for none)."""
        ...

    def keep(self, layer: Layer, x: V) -> None:
        """The layer's output, for callers that asked for its hidden states."""
        ...

    def logits(self, x: V, name: str, norm: str | None) -> V:
        """RMS norm (None for none) of the asked rows, their product with the output matrix, and `logit_softcap`, [rows, V]."""
        ...


class Injection(Operations[V], Protocol[V]):
    """And what `inject` needs besides."""

    def append(self, layer: Layer, k: V, v: V) -> None:
        """Append keys, rotated as by `rotate`, and values to the cache."""
        ...


def layers_of(config: ModelConfig) -> list[Layer]:
    """The layers of a model, first to last."""
    ropes = {"global": Rope(config.rope_base, config.rope_scaling), "local": Rope(config.local_rope_base), "none": None}
    windows = config.layer_windows or (0,) * config.num_layers
    kinds = config.layer_ropes or ("global",) * config.num_layers
    return [Layer(i, windows[i] or None, ropes[kinds[i]]) for i in range(config.num_layers)]


def query_scale(config: ModelConfig) -> float:
    """The factor of attention scores."""
    return 1 / math.sqrt(config.head_dim) if config.query_scale is None else config.query_scale


def decode(config: ModelConfig, ops: Operations[V]) -> V:
    """One forward of the whole model; returns its logits."""
    head = config.head
    if head and head.fuses == "alone":
        return ops.logits(ops.hidden(None), "output", None)
    x = ops.embed()
    read: V | None = None  # what the first layer's attention reads instead of the normed `x`
    if head and head.fuses == "matrix":
        (x,) = ops.linears(_joined(head, ops, x), ("fuse",), None)
        read = None if head.first_norm else x
    elif head and head.fuses == "attention":
        read = _joined(head, ops, x)
        x = ops.hidden("hidden_norm" if head.normed_residual else None)
    for layer in layers_of(config):
        weight = layer.weight
        projections = weight("q"), weight("k"), weight("v")
        if read is None:
            q, k, v = ops.linears(x, projections, _norm_before(config, weight("attn_norm")))
        else:
            (q, k, v), read = ops.linears(read, projections, None), None
        q, k = ops.rotate(layer, q, k)
        x = ops.add(x, ops.attention(layer, q, k, v), weight("o"), _norm_after(config, weight("attn_post_norm")))
        gate, up = ops.linears(x, (weight("gate"), weight("up")), _norm_before(config, weight("mlp_norm")))
        x = ops.add(x, ops.gate(gate, up), weight("down"), _norm_after(config, weight("mlp_post_norm")))
        ops.keep(layer, x)
    return ops.logits(x, "output", "norm" if head is None or head.final_norm else None)


def inject(config: ModelConfig, ops: Injection[V]) -> None:
    """Rows of hidden states alone: every layer's keys and values are made of the normed ones, and nothing else is computed."""
    x = ops.hidden("hidden_norm")
    for layer in layers_of(config):
        k, v = ops.linears(x, (layer.weight("k"), layer.weight("v")), None)
        ops.append(layer, k, v)


def _joined(head: HeadConfig, ops: Operations[V], x: V) -> V:
    return ops.join(x, ("embed_norm", "hidden_norm") if head.input_norms else None)


def _norm_before(config: ModelConfig, name: str) -> str | None:
    return None if config.norms == "after" else name


def _norm_after(config: ModelConfig, name: str) -> str | None:
    return None if config.norms == "before" else name
