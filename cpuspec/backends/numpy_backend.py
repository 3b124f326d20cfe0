"""The reference backend: what every operation means, on dequantized weights, written to be read.

It keeps every weight as f32 (or f64 on request), so it needs several times the file's size in memory, and its matrix
products are the BLAS library's: exact meaning, but a row's last bits may depend on its batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cpuspec.checkpoints import Checkpoint
from cpuspec.config import EngineConfig
from cpuspec.formats import Cast, Format, QuantTensor
from cpuspec.formats.codings import CODINGS
from cpuspec.formats.kv import get_kv_format, rounded
from cpuspec.model.batch import I32, ForwardBatch, ForwardOutput, visible
from cpuspec.model.cache import KVCache
from cpuspec.model.rope import rope_table

Array = NDArray[np.floating]


@dataclass(frozen=True)
class _Storage:
    keys: Array  # [L, S, G, D]
    values: Array  # [L, S, G, D]


class NumpyBackend:
    """The transformer in plain numpy. `dtype` is the precision of weights and of every intermediate result.

    `EngineConfig.activations` int8 rounds what matrices in codes are multiplied with, as engines with integer products do: how far
    that is from f32 is what their arithmetic explains.
    share: a backend of the same dtype whose weights this one uses, for every tensor object that both checkpoints hold.
    casts: matrices that are cast to another format at load, by name.
    """

    name = "numpy"
    row_invariant = False
    survives_fork = False  # the threads of a BLAS do not

    def __init__(
        self,
        checkpoint: Checkpoint,
        engine: EngineConfig,
        dtype: DTypeLike = np.float32,
        share: "NumpyBackend | None" = None,
        casts: Mapping[str, Format] = MappingProxyType({}),
    ) -> None:
        self.config = checkpoint.config
        self.max_rows = engine.max_rows
        self.threads = 1
        self._dtype = np.dtype(dtype)
        self._kv_format = get_kv_format(engine.kv_format)
        self._int8 = engine.activations == "int8"
        self._embed = checkpoint.tensors["embed"]
        tensors = {name: t for name, t in checkpoint.tensors.items() if name != "embed"}
        if self.config.tied_embeddings:
            tensors["output"] = self._embed
        weights = {name: Cast(t, casts[name]) if name in casts else t for name, t in tensors.items()}
        self._in_codes = {name for name, t in weights.items() if t.format.name in CODINGS}
        shared = share._values if share and share._dtype == self._dtype else {}
        self._weights = {
            name: shared[t] if t in shared else t.dequantize().astype(self._dtype, copy=False) for name, t in weights.items()
        }
        self._values: WeakKeyDictionary[QuantTensor | Cast, Array] = WeakKeyDictionary()  # while somebody holds the tensor
        self._values.update({t: self._weights[name] for name, t in weights.items()})
        self.weight_bytes = sum(w.nbytes for w in self._weights.values())
        self.shared_bytes = sum(self._weights[name].nbytes for name, t in weights.items() if t in shared)

    def new_cache(self, num_slots: int, capacity: int) -> KVCache:
        """An empty cache for this model: decoded keys and values, rounded as the KV format rounds them."""
        c = self.config
        shape = (c.num_layers, capacity, c.num_kv_heads, c.head_dim)
        per_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * self._dtype.itemsize

        def new_storage() -> _Storage:
            return _Storage(np.zeros(shape, self._dtype), np.zeros(shape, self._dtype))

        return KVCache(num_slots, capacity, new_storage, _copy_rows, _copy_prefix, per_token)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> ForwardOutput:
        """Run the rows, append their keys and values to the cache, and return logits and asked hidden states."""
        c = self.config
        batch.check(c, cache, self.max_rows)
        cos, sin = (table.astype(self._dtype)[:, None, :] for table in rope_table(c, batch.positions))  # [T, 1, D/2]
        x = self._embed.rows(batch.tokens).astype(self._dtype)  # [T, C]
        hidden = {}
        for i in range(c.num_layers):
            layer = f"layers.{i}."
            h = self._norm(x, layer + "attn_norm")
            q = self._linear(h, layer + "q").reshape(-1, c.num_heads, c.head_dim)
            k = self._linear(h, layer + "k").reshape(-1, c.num_kv_heads, c.head_dim)
            v = self._linear(h, layer + "v").reshape(-1, c.num_kv_heads, c.head_dim)
            if c.qk_norm:
                q, k = self._norm(q, layer + "q_norm"), self._norm(k, layer + "k_norm")
            attended = self._attention(i, _rotate(q, cos, sin), _rotate(k, cos, sin), v, batch, cache)
            x = x + self._linear(attended, layer + "o")
            h = self._norm(x, layer + "mlp_norm")
            gate, up = self._linear(h, layer + "gate"), self._linear(h, layer + "up")
            x = x + self._linear(_silu(gate) * up, layer + "down")
            if i in batch.hidden_layers:
                hidden[i] = x.astype(np.float32)
        rows = x if batch.logit_rows is None else x[batch.logit_rows]
        logits = self._linear(self._norm(rows, "norm"), "output")
        cache.advance(batch)
        return ForwardOutput(logits.astype(np.float32, copy=False), tuple(hidden[i] for i in batch.hidden_layers))

    def close(self) -> None:
        """Nothing to release."""

    def _number(self, value: float) -> Array:
        return np.asarray(value, self._dtype)

    def _norm(self, x: Array, name: str) -> Array:
        """RMS norm over the last axis (arXiv 1910.07467)."""
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self._number(self.config.norm_eps))
        return x * scale * self._weights[name]

    def _linear(self, x: Array, name: str) -> Array:
        if self._int8 and name in self._in_codes:
            x = _in_int8(x)
        y = x @ self._weights[name].T
        bias = self._weights.get(name + "_bias")
        return y if bias is None else y + bias

    def _attention(self, layer: int, q: Array, k: Array, v: Array, batch: ForwardBatch, cache: KVCache) -> Array:
        """Append keys and values, then softmax(q k^T / sqrt(D)) v over the cached prefix and the row's own ancestors."""
        c = self.config
        out = np.empty((len(q), c.num_heads * c.head_dim), self._dtype)
        for b, slot in enumerate(batch.slots):
            rows, prefix = slice(batch.q_start[b], batch.q_start[b + 1]), cache.lengths[slot]
            storage, end = cache.storage(slot), prefix + rows.stop - rows.start
            for held, new in ((storage.keys, k), (storage.values, v)):
                held[layer, prefix:end] = rounded(self._kv_format, new[rows].astype(np.float32, copy=False))
            keys = storage.keys[layer, :end].repeat(c.num_heads // c.num_kv_heads, axis=1)  # [S, H, D]
            values = storage.values[layer, :end].repeat(c.num_heads // c.num_kv_heads, axis=1)
            scores = np.matmul(q[rows].transpose(1, 0, 2), keys.transpose(1, 2, 0)) / self._number(np.sqrt(c.head_dim))  # [H, T, S]
            scores[:, ~visible(batch, b, prefix)] = -np.inf
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[rows] = np.matmul(weights, values.transpose(1, 0, 2)).transpose(1, 0, 2).reshape(-1, out.shape[1])
        return out


def _copy_rows(storage: _Storage, rows: I32, first: int) -> None:
    for kind in (storage.keys, storage.values):
        kind[:, first : first + len(rows)] = kind[:, rows]


def _copy_prefix(source: _Storage, storage: _Storage, length: int) -> None:
    storage.keys[:, :length] = source.keys[:, :length]
    storage.values[:, :length] = source.values[:, :length]


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turn pairs (i, i + D/2) of every head by the row's position (arXiv 2104.09864, rotate-half layout)."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _in_int8(x: Array) -> Array:
    """Rows [T, K] with each 32 consecutive numbers rounded to multiples of 1/127 of the largest of them."""
    groups = x.reshape(len(x), -1, 32)
    scales = np.abs(groups).max(axis=2, keepdims=True) / groups.dtype.type(127)
    steps = np.rint(groups / np.where(scales > 0, scales, groups.dtype.type(1)))
    return (steps * scales).reshape(x.shape)


def _silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))
