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
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import DTypeLike, NDArray

from cpuspec.backends.weights import LoadedWeights, WeightTensor, check_room, drop_embeddings, key_centres, weight_tensors
from cpuspec.checkpoints import Checkpoint
from cpuspec.config import SWIGLU_ALPHA, SWIGLU_LIMIT, DeltaNet, Experts, Mamba2, ModelConfig, Rope
from cpuspec.formats import Format, QuantTensor
from cpuspec.formats.format import hadamard
from cpuspec.formats.kv import get_kv_format, remembered
from cpuspec.layers import Layer, keeping_layers
from cpuspec.model.batch import I32, ForwardBatch, ForwardOutput, visible
from cpuspec.model.cache import KVCache
from cpuspec.model.recurrence import LENGTH_EPS, RecurrentState, delta_step, new_state, recurrent_mixers, recurrent_slots
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


def _ignore(x: Array, names: tuple[str, ...], expert: int) -> None:
    """The callback of a forward whose inputs of matrices nobody observes."""


class Forward:
    """The operations of one forward, each as it is defined (`Operations` in `model.transformer`)."""

    def __init__(self, model: Model, batch: ForwardBatch, cache: KVCache) -> None:
        self.kept: dict[int, NDArray[np.float32]] = {}
        self.expert_bytes = 0  # of experts' matrices that were read
        self._model, self._config, self._batch, self._cache = model, model.config, batch, cache
        starts = batch.lists.q_start
        self._adapted = list(zip(map(slice, starts, starts[1:]), batch.adapters, strict=False))
        self._rotations: dict[tuple[Rope, int], tuple[Array, Array]] = {}  # cosines and sines of the rows, [T, 1, D/2] each

    def embed(self) -> Array:
        return self._model.embedding.rows(self._batch.tokens).astype(self._model.dtype) * self._number(self._config.embedding_scale)

    def hidden(self, norm: str | None) -> Array:
        assert self._batch.hidden is not None, "`ForwardBatch.check` has checked it"
        return self.norm(self._batch.hidden.astype(self._model.dtype), norm)

    def join(self, x: Array, norms: tuple[str, str] | None) -> Array:
        of_x, of_hidden = norms or (None, None)
        return np.concatenate([self.norm(x, of_x), self.hidden(of_hidden)], axis=1)

    def linears(self, x: Array, names: tuple[str, ...], norm: str | None) -> tuple[Array, ...]:
        normed = self.norm(x, norm)
        return tuple(self.linear(normed, name) for name in names)

    def rotate(self, layer: Layer, q: Array, k: Array | None) -> tuple[Array, Array | None]:
        """Queries [T, H, D] and keys [T, G, D]. Pairs (i, i + D/2) turn by the row's position (arXiv 2104.09864)."""
        queries = self._rotated(layer, q, "q_norm", layer.attention.query_rope)
        return queries, None if k is None else self._rotated(layer, k, "k_norm", layer.attention.rope)

    def _rotated(self, layer: Layer, x: Array, norm: str, rope: Rope | None) -> Array:
        mixer = layer.attention
        if mixer.norm == "row":
            x = self.norm(x, layer.weight(norm))
        heads = x.reshape(len(x), -1, mixer.dims)
        if mixer.norm == "head" and not mixer.rotates_first:
            heads = self.norm(heads, layer.weight(norm))
        if rope is not None:
            if (rope, mixer.dims) not in self._rotations:
                cos, sin = rope_table(rope, mixer.dims, self._batch.positions)
                tables = cos.astype(self._model.dtype)[:, None], sin.astype(self._model.dtype)[:, None]
                self._rotations[rope, mixer.dims] = tables
            heads = _turned(heads, *self._rotations[rope, mixer.dims])
        return self.norm(heads, layer.weight(norm)) if mixer.rotates_first else heads

    def absorb(
        self, layer: Layer, plain: Array, turned: Array, latent: Array, k_turned: Array, on_inputs: Callable[..., None] = _ignore
    ) -> tuple[Array, Array]:
        """on_inputs: as of `experts`, for each head."""
        of_heads = self._by_head(layer, "k_b", plain, on_inputs)
        queries = _latent_row(of_heads, turned.reshape(*of_heads.shape[:2], -1))
        return queries.reshape(len(plain), -1), _latent_row(self.norm(latent, layer.weight("latent_norm")), k_turned)

    def expand(self, layer: Layer, mixed: Array, on_inputs: Callable[..., None] = _ignore) -> Array:
        return self._by_head(layer, "v_b", mixed, on_inputs).reshape(len(mixed), -1)

    def _by_head(self, layer: Layer, part: str, x: Array, on_inputs: Callable[..., None]) -> Array:
        """The product of each head's numbers with its matrix, [T, H, rows]."""
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
            scores = np.matmul(q[rows].transpose(1, 0, 2), keys.transpose(1, 2, 0)) * self._number(mixer.scale)  # [H, T, S]
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
        """Of each sequence its rows, a recurrent layer's memory of it, and how many tokens its slot holds."""
        batch = self._batch
        for slot, start, end in zip(batch.slots, batch.q_start, batch.q_start[1:], strict=False):
            yield slice(start, end), self._cache.storage(slot).states[layer.state_index], self._cache.lengths[slot]

    def convolve(self, layer: Layer, x: Array) -> Array:
        return self.gate(self._convolved(layer, x), None, "silu")

    def _convolved(self, layer: Layer, x: Array) -> Array:
        assert layer.recurrent, "the layer has a state"
        name = layer.weight(layer.recurrent.convolution)
        out, weights, bias = np.empty_like(x), self._model.weights[name], self._model.weights.get(name + "_bias")
        for rows, state, length in self._states(layer):
            state.begin(length)
            state.inputs = np.concatenate([state.inputs, x[rows]])
            windows = sliding_window_view(state.inputs[length - state.folded :], state.taps, axis=0)  # [rows, channels, taps]
            out[rows] = (windows * weights).sum(axis=-1)
        return out if bias is None else out + bias

    def short_conv(self, layer: Layer, b: Array, c: Array, x: Array) -> Array:
        out = c * self._convolved(layer, b * x)
        for rows, state, _ in self._states(layer):
            state.records += [()] * (rows.stop - rows.start)  # there is nothing to fold
        return out

    def mamba2(self, layer: Layer, xbc: Array, dt: Array, z: Array) -> Array:
        mixer, weight, numbers = layer.recurrent, layer.weight, self._model.weights
        assert isinstance(mixer, Mamba2), "the layer has one"
        x, b, c = np.split(xbc, [mixer.inner, mixer.inner + mixer.key_heads * mixer.key_dims], axis=1)
        x, of_values = x.reshape(len(x), -1, mixer.value_dims), mixer.key_head_of_values
        b, c = (each.reshape(len(x), -1, mixer.key_dims)[:, of_values] for each in (b, c))  # [T, heads, key dims]
        steps = np.maximum(np.logaddexp(self._number(0), dt), self._number(mixer.least_step))  # softplus
        decays, values = np.exp(numbers[weight("ssm_a")] * steps), x * steps[:, :, None]
        out = np.empty_like(x)
        for rows, memory, _ in self._states(layer):
            state = memory.last()
            for t in range(rows.start, rows.stop):
                record = decays[t], b[t], values[t]
                state = delta_step(state, record)
                memory.records.append(record)
                out[t] = np.matmul(c[t, :, None], state)[:, 0]
        out += x * numbers[weight("ssm_d")][:, None]
        gated = self.gate(z, out.reshape(len(x), -1), "silu")
        if not mixer.normed:
            return gated
        groups = gated.reshape(len(x), mixer.key_heads, -1)
        scale = 1 / np.sqrt(np.mean(groups * groups, axis=-1, keepdims=True) + self._number(self._config.norm_eps))
        return (groups * scale).reshape(gated.shape) * numbers[weight("ssm_norm")]

    def delta_net(self, layer: Layer, qkv: Array, beta: Array, alpha: Array) -> Array:
        mixer, weight, numbers = layer.mixer, layer.weight, self._model.weights
        assert isinstance(mixer, DeltaNet), "the layer is one"
        size = mixer.key_heads * mixer.key_dims
        q, k = (x.reshape(len(x), -1, mixer.key_dims) for x in np.split(qkv[:, : 2 * size], 2, axis=1))
        q, k = (x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + self._number(LENGTH_EPS)) for x in (q, k))
        of_values = mixer.key_head_of_values
        q, k = q[:, of_values] / self._number(math.sqrt(mixer.key_dims)), k[:, of_values]  # [T, value heads, key dims]
        v = qkv[:, 2 * size :].reshape(len(qkv), -1, mixer.value_dims)
        beta = self.gate(beta, None, "sigmoid")
        steps = np.logaddexp(self._number(0), alpha + numbers[weight("delta_dt")])  # softplus
        decays = np.exp(numbers[weight("delta_decay")] * steps)
        out = np.empty_like(v)
        for rows, memory, _ in self._states(layer):
            state = memory.last()
            for t in range(rows.start, rows.stop):
                known = np.matmul(k[t, :, None], state * decays[t, :, None, None])[:, 0]  # [value heads, value dims]
                record = decays[t], k[t], (v[t] - known) * beta[t, :, None]
                state = delta_step(state, record)
                memory.records.append(record)
                out[t] = np.matmul(q[t, :, None], state)[:, 0]
        return self.norm(out, weight("delta_norm")).reshape(len(out), -1)

    def append(self, layer: Layer, k: Array, v: Array) -> None:
        self._append(layer, self._rotated(layer, k, "k_norm", layer.attention.rope), v)

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
            limit, alpha = self._number(SWIGLU_LIMIT), self._number(SWIGLU_ALPHA)
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            return gate / (1 + np.exp(-alpha * gate)) * (up + self._number(1))
        if activation in ("silu", "sigmoid"):
            active = (gate if activation == "silu" else self._number(1)) / (1 + np.exp(-gate))
        elif activation == "relu2":
            active = np.square(np.maximum(gate, 0))
        else:
            inner = self._number(math.sqrt(2 / math.pi)) * (gate + self._number(0.044715) * gate**3)
            active = self._number(0.5) * gate * (1 + np.tanh(inner))
        return active if up is None else active * up

    def add(self, x: Array, branch: Array, name: str, norm: str | None, factor: str | None = None) -> Array:
        total = x + self._residual(self.norm(self.linear(branch, name), norm))
        return total if factor is None else total * self._model.weights[factor]

    def layer_inputs(self, x: Array) -> Array:
        size, table = self._config.layer_input_size, self._model.layer_embedding
        assert table is not None, "the model has it"
        given = table.rows(self._batch.tokens).astype(self._model.dtype) * self._number(math.sqrt(size))
        made = self.linear(x, "layer_input") / self._number(math.sqrt(x.shape[1]))
        normed = self.norm(made.reshape(len(x), -1, size), "layer_input_norm").reshape(len(x), -1)
        return (normed + given) / self._number(math.sqrt(2))

    def input_of(self, layer: Layer, inputs: Array) -> Array:
        return inputs[:, layer.index * layer.input_size :][:, : layer.input_size]

    def experts(
        self,
        layer: Layer,
        x: Array,
        norm: str | None,
        shared: tuple[Array, Array | None] | None,
        norm_after: str | None,
        factor: str | None,
        on_inputs: Callable[..., None] = _ignore,
    ) -> Array:
        """Expert by expert, each with the rows that go through it. on_inputs: told (rows, names of its matrices, the expert)."""
        feed, weight, normed = layer.feed, layer.weight, self.norm(x, norm)
        assert feed, "the layer has it"
        assert feed.experts, "and experts in it"
        experts, inner = feed.experts, tuple(weight(f"expert_{part}") for part in (("gate", "up") if feed.gated else ("up",)))
        vectors = self._model.weights
        routed = self.norm(x, weight("router_norm")) if experts.normed_apart else normed
        chosen, factors = choose(experts, self.linear(routed, weight("router")), vectors.get(weight("router_shift")))
        if experts.weighed:
            factors = factors * vectors[weight("router_factors")][chosen]
        outputs = np.empty((*chosen.shape, x.shape[1]), self._model.dtype)  # [T, used, C]
        for expert in np.unique(chosen):
            rows, places = np.nonzero(chosen == expert)
            given = normed[rows]
            on_inputs(given, inner, expert)
            gate, *up = (self.linear(given, name, expert) for name in inner)
            hidden = self.gate(gate, up[0] if up else None, feed.activation)
            on_inputs(hidden, (weight("expert_down"),), expert)
            outputs[rows, places] = self.linear(hidden, weight("expert_down"), expert)
        branch = (outputs * factors[:, :, None]).sum(axis=1)
        branch = self.norm(branch, weight("expert_post_norm") if experts.normed_apart else None)
        if shared:
            rows_of_all, weighs = shared
            common = self.linear(rows_of_all, weight("shared_down"))
            common = self.norm(common, weight("shared_post_norm") if experts.normed_apart else None)
            branch += common if weighs is None else common / (1 + np.exp(-weighs))
        total = x + self._residual(self.norm(branch, norm_after))
        return total if factor is None else total * vectors[factor]

    def _residual(self, branch: Array) -> Array:
        scale = self._config.residual_scale
        return branch if scale == 1 else branch * self._number(scale)

    def keep(self, layer: Layer, x: Array) -> None:
        if layer.index in self._batch.hidden_layers:
            self.kept[layer.index] = x.astype(np.float32)

    def logits(self, x: Array, name: str, norm: str | None) -> Array:
        rows = x if self._batch.logit_rows is None else x[self._batch.logit_rows]
        return self._softcapped(self.linear(self.norm(rows, norm), name), self._config.logit_softcap)

    def _number(self, value: float) -> Array:
        return np.asarray(value, self._model.dtype)

    def _unweighed(self, x: Array, eps: float) -> Array:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self._number(eps))

    def norm(self, x: Array, name: str | None) -> Array:
        """RMS norm over the last axis (arXiv 1910.07467), or layer norm (arXiv 1607.06450)."""
        if name is None:
            return x
        if self._config.norm_kind == "layer":
            x = x - x.mean(axis=-1, keepdims=True)
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self._number(self._config.norm_eps))
        normed = x * scale * self._model.weights[name]
        bias = self._model.weights.get(name + "_bias")
        return normed if bias is None else normed + bias

    def linear(self, x: Array, name: str, expert: int | None = None) -> Array:
        """expert: whose matrix of those of all it is."""
        one = ... if expert is None else expert
        matrix = self._model.weights[name][one]
        self.expert_bytes += 0 if expert is None else matrix.nbytes
        y = self._rounded(x, name) @ matrix.T
        for rows, adapters in self._adapted:
            for adapter, scale in adapters:
                if name in adapter.pairs:
                    down, up = (part.astype(self._model.dtype) for part in adapter.pairs[name])
                    y[rows] += self._number(scale) * (x[rows] @ down.T @ up.T)
        bias = self._model.weights.get(name + "_bias")
        return y if bias is None else y + bias[one]

    def _rounded(self, x: Array, name: str) -> Array:
        """Inputs of a matrix as they are multiplied."""
        return _in_int8(x, self._model.rounded_inputs[name]) if name in self._model.rounded_inputs else x

    def _softcapped(self, x: Array, cap: float) -> Array:
        return np.tanh(x / self._number(cap)) * self._number(cap) if cap else x


def choose(experts: Experts, logits: Array, shift: Array | None) -> tuple[NDArray[np.intp], Array]:
    """Of each row the experts that it goes through, the best first, [T, used], and their factors. Of equals, the first is best."""
    scores = logits
    if experts.score == "softmax":
        scores = _softmax(logits)
    elif experts.score == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    ranks = scores if shift is None else scores + shift
    if experts.groups > 1:
        grouped = ranks.reshape(len(ranks), experts.groups, -1)
        best = np.sort(grouped, axis=-1)[:, :, -2:].sum(axis=-1)
        kept = np.argsort(-best, axis=-1, kind="stable")[:, : experts.groups_used]
        out = np.full_like(grouped, -np.inf)
        np.put_along_axis(out, kept[:, :, None], np.take_along_axis(grouped, kept[:, :, None], axis=1), axis=1)
        ranks = out.reshape(ranks.shape)
    chosen = np.argsort(-ranks, axis=-1, kind="stable")[:, : experts.used]
    factors = np.take_along_axis(scores, chosen, axis=-1)
    if experts.score == "chosen":
        factors = _softmax(factors)
    if experts.normalised:
        factors = factors / np.maximum(factors.sum(axis=-1, keepdims=True), factors.dtype.type(experts.least_sum))
    return chosen, factors * factors.dtype.type(experts.scale)


def _softmax(x: Array) -> Array:
    powers: Array = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _copy_rows(storage: Storage, rows: I32, first: int) -> None:
    for held in (*storage.keys, *storage.values):
        held[first : first + len(rows)] = held[rows]


def _copy_prefix(source: Storage, storage: Storage, length: int) -> None:
    for held, given in zip((*storage.keys, *storage.values), (*source.keys, *source.values), strict=True):
        held[:length] = given[:length]


def _turned(x: Array, cos: Array, sin: Array) -> Array:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _latent_row(vector: Array, turned: Array) -> Array:
    """Both in the order of `Latent.dims`, over the last axis."""
    halves = zip(np.split(turned, 2, axis=-1), np.split(vector, 2, axis=-1), strict=True)
    return np.concatenate([part for pair in halves for part in pair], axis=-1)


def _in_int8(x: Array, rotated: int) -> Array:
    """Rows [T, K] with each 32 consecutive numbers rounded to multiples of 1/127 of the largest of them; or each `rotated`, while
    they are multiplied with Hadamard's matrix.
    """
    groups = hadamard(x, rotated).reshape(len(x), -1, rotated or 32)
    scales = np.abs(groups).max(axis=2, keepdims=True) / groups.dtype.type(127)
    steps = np.rint(groups / np.where(scales > 0, scales, groups.dtype.type(1)))
    return hadamard((steps * scales).reshape(x.shape), rotated)
