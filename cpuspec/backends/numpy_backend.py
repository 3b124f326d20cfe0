"""The reference backend: what every operation means, on dequantized weights, written to be read.

It keeps every weight as f32 (or f64 on request), so it needs several times the file's size in memory, and its matrix
products are the BLAS library's: exact meaning, but a row's last bits may depend on its batch.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cpuspec.backends.formulas import Formulas
from cpuspec.backends.weights import LoadedWeights, WeightTensor, check_room, drop_embeddings, key_centres, weight_tensors
from cpuspec.checkpoints import Checkpoint
from cpuspec.config import SWIGLU_ALPHA, SWIGLU_LIMIT, ModelConfig, Rope
from cpuspec.formats import Format, QuantTensor
from cpuspec.formats.format import hadamard
from cpuspec.formats.kv import get_kv_format, remembered
from cpuspec.layers import Layer, keeping_layers
from cpuspec.model.batch import I32, ForwardBatch, ForwardOutput, visible
from cpuspec.model.cache import KVCache
from cpuspec.model.recurrence import RecurrentState, new_state, recurrent_mixers, recurrent_slots
from cpuspec.model.rope import rope_table
from cpuspec.model.transformer import decode, inject
from cpuspec.settings import EngineConfig

Array = NDArray[np.floating]


@dataclass(frozen=True)
class Storage:
    """Decoded keys and values of a slot, by layers with attention, and the states of recurrent ones."""

    keys: list[Array]  # [S, G, D] each
    values: list[Array]  # of no numbers where they are numbers of the keys
    states: list[RecurrentState]


@dataclass(frozen=True)
class Model:
    """What a forward computes with. weights: every tensor but the embedding, and an `output` matrix, by name."""

    config: ModelConfig
    dtype: np.dtype
    kv_format: Format
    centres: Mapping[int, NDArray[np.float32]]  # of `key_centres`
    embedding: QuantTensor
    weights: Mapping[str, Array]
    rounded_inputs: Mapping[str, int]  # matrices whose inputs are rounded to int8, with the inputs that are rotated together or 0
    layer_embedding: QuantTensor | None = None


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
    adapts = True
    _model: Model
    _weights: LoadedWeights[Array]

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
        tensors = weight_tensors(checkpoint, casts)
        drop_embeddings(tensors)
        in_codes = {
            name: tensor.format.block_size * tensor.format.rotated for name, tensor in tensors.items() if tensor.format.affine
        }
        made = np.dtype(dtype)

        def load(tensors: Mapping[str, WeightTensor]) -> dict[str, Array]:
            check_room(made.itemsize * sum(math.prod(tensor.shape) for tensor in tensors.values()))
            return {name: tensor.dequantize().astype(made, copy=False) for name, tensor in tensors.items()}

        weights = LoadedWeights(tensors, load, share._weights if share and share._model.dtype == made else None)
        self._weights = weights
        self.weight_bytes, self.shared_bytes = weights.num_bytes, weights.shared_bytes
        self._model = Model(
            self.config,
            made,
            get_kv_format(engine.kv_format),
            key_centres(self.config, get_kv_format(engine.kv_format), tensors),
            checkpoint.tensors["embed"],
            weights,
            in_codes if engine.activations == "int8" else {},
            checkpoint.tensors.get("layer_embed"),
        )

    def new_cache(self, num_slots: int, capacity: int) -> KVCache:
        """An empty cache for this model: decoded keys and values, rounded as the KV format rounds them."""
        c, dtype = self.config, self._model.dtype
        attends = [layer.attention for layer in keeping_layers(c)]
        per_token = sum(mixer.kv_heads * (mixer.dims + mixer.value_dims) for mixer in attends) * dtype.itemsize
        zeros, mixers = partial(np.zeros, dtype=dtype), recurrent_mixers(c)

        def new_storage() -> Storage:
            states = [new_state(mixer, zeros) for mixer in mixers]
            keys: list[Array] = [np.zeros((capacity, mixer.kv_heads, mixer.dims), dtype) for mixer in attends]
            values: list[Array] = [np.zeros((capacity, mixer.kv_heads, mixer.value_dims), dtype) for mixer in attends]
            return Storage(keys, values, states)

        return KVCache(num_slots, capacity, new_storage, _copy_rows, _copy_prefix, per_token, **recurrent_slots(c, dtype))

    def forward(self, batch: ForwardBatch, cache: KVCache) -> ForwardOutput:
        """Run the rows, append their keys and values to the cache, and return logits and asked hidden states."""
        batch.check(self.config, cache, self.max_rows)
        forward = Forward(self._model, batch, cache)
        logits = decode(self.config, forward)
        cache.advance(batch)
        hidden = tuple(forward.kept[i] for i in batch.hidden_layers)
        num_bytes = self._weights.read_bytes(len(logits), forward.expert_bytes)
        return ForwardOutput(logits.astype(np.float32, copy=False), hidden, weight_bytes=num_bytes)

    def project(self, rows: NDArray[np.float32], name: str) -> NDArray[np.float32]:
        """The product of rows with one of a head's matrices."""
        forward = Forward(self._model, ForwardBatch([], [], [], [0]), self.new_cache(1, 1))
        return forward.linear(rows.astype(self._model.dtype), name).astype(np.float32, copy=False)

    def inject(self, batch: ForwardBatch, cache: KVCache) -> None:
        """Append keys and values of hidden states."""
        batch.check(self.config, cache, self.max_rows, injects=True)
        inject(self.config, Forward(self._model, batch, cache))
        cache.advance(batch)

    def close(self) -> None:
        """Nothing to release."""


class Forward(Formulas):
    """The operations of one forward, each as it is defined (`Operations` in `model.transformer`)."""

    def __init__(self, model: Model, batch: ForwardBatch, cache: KVCache) -> None:
        self.kept: dict[int, NDArray[np.float32]] = {}
        self.expert_bytes = 0  # of experts' matrices that were read
        self._model, self._config, self._batch, self._cache = model, model.config, batch, cache
        starts = batch.lists.q_start
        self.xp, self._vectors = np, model.weights
        by_rows = zip(map(slice, starts, starts[1:]), batch.adapters, strict=False)
        self._adapted = [(rows, scale, adapter.pairs) for rows, adapters in by_rows for adapter, scale in adapters]
        self._rotations: dict[tuple[Rope, int], tuple[Array, Array]] = {}  # cosines and sines of the rows, [T, 1, D/2] each

    def embed(self) -> Array:
        return self._model.embedding.rows(self._batch.tokens).astype(self._model.dtype) * self._config.embedding_scale

    def hidden(self, norm: str | None) -> Array:
        assert self._batch.hidden is not None, "`ForwardBatch.check` has checked it"
        return self.norm(self._batch.hidden.astype(self._model.dtype), norm)

    def _rotation(self, rope: Rope, dims: int) -> tuple[Array, Array]:
        if (rope, dims) not in self._rotations:
            cos, sin = rope_table(rope, dims, self._batch.positions)
            self._rotations[rope, dims] = cos.astype(self._model.dtype)[:, None], sin.astype(self._model.dtype)[:, None]
        return self._rotations[rope, dims]

    def _layer_embedding(self) -> Array:
        table = self._model.layer_embedding
        assert table is not None, "the model has it"
        return table.rows(self._batch.tokens).astype(self._model.dtype)

    def _by_head(self, layer: Layer, part: str, x: Array, on_inputs: Callable[..., None]) -> Array:
        name, products = layer.weight(part), []
        for head, given in enumerate(np.split(x, layer.attention.heads, axis=1)):
            on_inputs(given, (name,), head)
            products.append(self._rounded(given, name) @ self._model.weights[name][head].T)
        return np.stack(products, axis=1)

    def attention(self, layer: Layer, q: Array, k: Array | None, v: Array | None) -> Array:
        """Scores are q k^T times the query scale, under the softcap if the model has one, and the sinks beside them."""
        mixer, batch = layer.attention, self._batch
        if k is not None:
            self._append(layer, k, v)
        places = None if mixer.latent is None else mixer.latent.value_places
        width = mixer.value_dims if mixer.latent is None else mixer.latent.rank
        out = np.empty((len(q), mixer.heads * width), self._model.dtype)
        for b, slot in enumerate(batch.slots):
            rows, prefix = slice(batch.q_start[b], batch.q_start[b + 1]), self._cache.lengths[slot]
            storage, end = self._cache.storage(slot), prefix + rows.stop - rows.start
            keys = storage.keys[layer.state_index][:end].repeat(mixer.heads // mixer.kv_heads, axis=1)  # [S, H, D]
            held = storage.values[layer.state_index] if places is None else storage.keys[layer.state_index][..., places]
            values = held[:end].repeat(mixer.heads // mixer.kv_heads, axis=1)
            scores = np.matmul(q[rows].transpose(1, 0, 2), keys.transpose(1, 2, 0)) * mixer.scale  # [H, T, S]
            scores = self._softcapped(scores, mixer.softcap)
            scores[:, ~visible(batch, b, prefix, mixer.window)] = -np.inf
            if mixer.sinks:
                sinks = self._model.weights[layer.weight("sinks")][:, None, None]
                scores = np.concatenate([scores, np.broadcast_to(sinks, (*scores.shape[:2], 1))], axis=-1)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights = (weights / weights.sum(axis=-1, keepdims=True))[:, :, :end]
            out[rows] = np.matmul(weights, values.transpose(1, 0, 2)).transpose(1, 0, 2).reshape(-1, out.shape[1])
        return out

    def _states(self, layer: Layer) -> Iterator[tuple[slice, RecurrentState, int]]:
        batch = self._batch
        for slot, start, end in zip(batch.slots, batch.q_start, batch.q_start[1:], strict=False):
            yield slice(start, end), self._cache.storage(slot).states[layer.state_index], self._cache.lengths[slot]

    def _append(self, layer: Layer, k: Array, v: Array | None) -> None:
        mixer, batch = layer.attention, self._batch
        if mixer.value_norm and v is not None:
            v = self._unweighed(v.reshape(len(v), mixer.kv_heads, -1), self._config.norm_eps)
        if layer.index in self._model.centres:
            k = k - self._model.centres[layer.index]
        for slot, start, end in zip(batch.slots, batch.q_start, batch.q_start[1:], strict=False):
            storage, prefix = self._cache.storage(slot), self._cache.lengths[slot]
            for held, new in ((storage.keys, k), (storage.values, v)):
                if new is None:
                    continue
                given = new[start:end].reshape(end - start, mixer.kv_heads, -1).astype(np.float32, copy=False)
                held[layer.state_index][prefix : prefix + end - start] = remembered(self._model.kv_format, given)

    def gate(self, gate: Array, up: Array | None, activation: str) -> Array:
        if activation == "swiglu_oai":
            assert up is not None, "`ModelConfig` has checked it"
            gate, up = np.minimum(gate, SWIGLU_LIMIT), np.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
            return gate / (1 + np.exp(-SWIGLU_ALPHA * gate)) * (up + 1)
        if activation in ("silu", "sigmoid"):
            active = (gate if activation == "silu" else 1) / (1 + np.exp(-gate))
        elif activation == "relu2":
            active = np.square(np.maximum(gate, 0))
        else:
            inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
            active = 0.5 * gate * (1 + np.tanh(inner))
        return active if up is None else active * up

    def keep(self, layer: Layer, x: Array) -> None:
        if layer.index in self._batch.hidden_layers:
            self.kept[layer.index] = x.astype(np.float32)

    def logits(self, x: Array, name: str, norm: str | None) -> Array:
        rows = x if self._batch.logit_rows is None else x[self._batch.logit_rows]
        return self._softcapped(self.linear(self.norm(rows, norm), name), self._config.logit_softcap)

    def _unweighed(self, x: Array, eps: float) -> Array:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)

    def norm(self, x: Array, name: str | None) -> Array:
        """RMS norm over the last axis (arXiv 1910.07467), or layer norm (arXiv 1607.06450)."""
        if name is None:
            return x
        if self._config.norm_kind == "layer":
            x = x - x.mean(axis=-1, keepdims=True)
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self._config.norm_eps)
        normed = x * scale * self._model.weights[name]
        bias = self._model.weights.get(name + "_bias")
        return normed if bias is None else normed + bias

    def linear(self, x: Array, name: str, expert: int | None = None) -> Array:
        """expert: whose matrix of those of all it is."""
        one = ... if expert is None else expert
        matrix = self._model.weights[name][one]
        self.expert_bytes += 0 if expert is None else matrix.nbytes
        y = self._with_adapters(self._rounded(x, name) @ matrix.T, x, name)
        bias = self._model.weights.get(name + "_bias")
        return y if bias is None else y + bias[one]

    def _rounded(self, x: Array, name: str) -> Array:
        """Inputs of a matrix as they are multiplied."""
        return _in_int8(x, self._model.rounded_inputs[name]) if name in self._model.rounded_inputs else x


def _copy_rows(storage: Storage, rows: I32, first: int) -> None:
    for held in (*storage.keys, *storage.values):
        held[first : first + len(rows)] = held[rows]


def _copy_prefix(source: Storage, storage: Storage, length: int) -> None:
    for held, given in zip((*storage.keys, *storage.values), (*source.keys, *source.values), strict=True):
        held[:length] = given[:length]


def _in_int8(x: Array, rotated: int) -> Array:
    """Rows [T, K] with each 32 consecutive numbers rounded to multiples of 1/127 of the largest of them; or each `rotated`, while
    they are multiplied with Hadamard's matrix.
    """
    groups = hadamard(x, rotated).reshape(len(x), -1, rotated or 32)
    scales = np.abs(groups).max(axis=2, keepdims=True) / groups.dtype.type(127)
    steps = np.rint(groups / np.where(scales > 0, scales, groups.dtype.type(1)))
    return hadamard((steps * scales).reshape(x.shape), rotated)
