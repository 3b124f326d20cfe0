"""The operations of the decoder on torch tensors that gradients flow through: `model.transformer.decode`, trained.

A trained head and a served one are the same calls of `decode` over other operations.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from cpuspec.config import ModelConfig
from cpuspec.layers import Layer, layers_of
from cpuspec.model.rope import rope_table

# Fields of a model's configuration that `Rows` computes whatever they are. All others must be as they are in most models.
_COMPUTED = frozenset(
    {
        *("norm_eps", "rope_base", "rope_scaling", "qkv_bias", "o_bias", "qk_norm", "tied_embeddings", "norms", "norm_spans"),
        *("activation", "embedding_scale", "query_scale", "logit_softcap", "head", "layer_ropes", "local_rope_base"),
        *("residual_scale", "mlp_bias", "rope_dims", "gated_attention"),
    }
)


def not_computed(config: ModelConfig) -> list[str]:
    """The fields of a configuration for which `Rows` has no operations."""
    ignored = {"layer_windows"} if not any(config.layer_windows) else set[str]()
    if not config.is_recurrent:
        ignored |= {"recurrent", "layer_recurrent"}
    others = [one for one in fields(config) if one.default is not MISSING and one.name not in _COMPUTED | ignored]
    return [one.name for one in others if getattr(config, one.name) != one.default]


class RowAttention(Protocol):
    """What the rows of a forward see of one another, and of earlier ones."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """softmax(scale q k) v, [T, H, D], for queries [T, H, D] and the rows' own keys and values [T, G, D]."""
        ...


class Rows:
    """The rows of one forward (`model.transformer.Operations`).

    weights: tensors by canonical name. positions [T]: of rotation. embedded, given [T, C]: tokens and hidden states of the target.
    asked [T]: whether a row's logits are wanted; None for all rows.
    output [T, C]: the last layer's, as the engine hands it to a drafter. state [T, C]: after the norm before the logits. They are
    there when `decode` is done.
    Raises AssertionError for what no supported model trains with: soft caps of attention and windows.
    """

    output: Tensor
    state: Tensor

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        positions: NDArray[np.integer],
        attention: RowAttention,
        embedded: Tensor | None = None,
        given: Tensor | None = None,
        asked: Tensor | None = None,
    ) -> None:
        self._config, self._weights, self._attention = config, weights, attention
        self._embedded, self._given, self._asked = embedded, given, asked
        assert not config.attention_softcap, "the caller has refused it"
        device = next(iter(weights.values())).device
        self._tables = {
            layer.attention.rope: tuple(
                torch.from_numpy(table)[:, None].to(device)
                for table in rope_table(layer.attention.rope, layer.attention.dims, positions)
            )
            for layer in layers_of(config)
            if layer.attention.rope
        }

    def embed(self) -> Tensor:
        assert self._embedded is not None, "a forward has tokens"
        return self._embedded * self._config.embedding_scale

    def hidden(self, norm: str | None) -> Tensor:
        assert self._given is not None, "the forward of a head has hidden states"
        return self.norm(self._given, norm)

    def join(self, x: Tensor, norms: tuple[str, str] | None) -> Tensor:
        of_x, of_hidden = norms or (None, None)
        return torch.cat([self.norm(x, of_x), self.hidden(of_hidden)], dim=1)

    def linears(self, x: Tensor, names: tuple[str, ...], norm: str | None) -> tuple[Tensor, ...]:
        normed = self.norm(x, norm)
        return tuple(self._linear(normed, name) for name in names)

    def rotate(self, layer: Layer, q: Tensor, k: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Queries [T, H, D] and keys [T, G, D]."""
        assert k is not None, "heads that are trained have keys"
        return self._rotated(layer, q, "q_norm"), self._rotated(layer, k, "k_norm")

    def attention(self, layer: Layer, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        assert k is not None, "heads that are trained have keys"
        assert v is not None, "and values"
        v = v.unflatten(1, (-1, layer.attention.value_dims))
        return self._attention.attend(layer.index, q, k, v, layer.attention.scale).flatten(1)

    def refuse(self, *arguments: object) -> Any:
        """An operation that nothing in training has: `not_computed` names what needs it, and the caller has refused that."""
        raise AssertionError("this operation is not trained")

    absorb = expand = layer_inputs = input_of = convolve = delta_net = short_conv = mamba2 = experts = refuse

    def gate(self, gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
        if activation == "sigmoid":
            gated = torch.sigmoid(gate)
        else:
            gated = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
        return gated if up is None else gated * up

    def add(self, x: Tensor, branch: Tensor, name: str, norm: str | None, factor: str | None = None) -> Tensor:
        return x + self.norm(self._linear(branch, name), norm) * self._config.residual_scale

    def keep(self, layer: Layer, x: Tensor) -> None:
        self.output = x

    def logits(self, x: Tensor, name: str, norm: str | None) -> Tensor:
        self.state = self.norm(x, norm)
        asked = self.state if self._asked is None else self.state[self._asked]
        cap, logits = self._config.logit_softcap, self._linear(asked, name).float()
        return cap * torch.tanh(logits / cap) if cap else logits

    def norm(self, x: Tensor, name: str | None) -> Tensor:
        """RMS norm over the last axis (arXiv 1910.07467), in f32."""
        if name is None:
            return x
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._config.norm_eps) * self._weights[name]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self._weights[name], self._weights.get(f"{name}_bias"))

    def _rotated(self, layer: Layer, x: Tensor, norm: str) -> Tensor:
        if layer.attention.norm == "row":
            x = self.norm(x, layer.weight(norm))
        heads = x.unflatten(1, (-1, layer.attention.dims))
        if layer.attention.norm == "head":
            heads = self.norm(heads, layer.weight(norm))
        if layer.attention.rope is None:
            return heads
        cos, sin = self._tables[layer.attention.rope]
        a, b = heads.float().chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(scale q k) v, [T, H, D], for queries [T, H, D], keys and values [S, G, D], and a mask [T, S] of what a row sees."""
    q, k, v = (x.transpose(0, 1)[None].to(v.dtype) for x in (q, k, v))
    mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return mixed[0].transpose(0, 1)
