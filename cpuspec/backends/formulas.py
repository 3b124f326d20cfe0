"""Formulas of a forward that numpy and torch compute alike, written once for arrays of either.

`xp` is the module, numpy or torch; only names that mean the same in both are used. A backend's forward adds products with matrices,
norms, gates, the cache and attention.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from cpuspec.config import DeltaNet, Experts, Mamba2, ModelConfig, Rope
from cpuspec.layers import Layer
from cpuspec.model.recurrence import LENGTH_EPS, RecurrentState, delta_step

Array = Any  # of `xp`


def _ignore(x: Array, names: tuple[str, ...], expert: int) -> None:
    """The callback of a forward whose inputs of matrices nobody observes."""


class Formulas(Protocol):
    """Operations of `model.transformer` from norms, products and gates.

    on_inputs: told (rows, names of the matrices that they are multiplied with, the expert or the head).
    """

    xp: Any
    expert_bytes: int  # of experts' matrices that were read
    kept: dict[int, Array]  # layers' outputs that were asked for
    _config: ModelConfig
    _vectors: Mapping[str, Array]
    _adapted: Sequence[tuple[slice, float, Mapping[str, tuple[Array, Array]]]]  # rows, and a scaled adapter of theirs

    def norm(self, x: Array, name: str | None) -> Array: ...

    def linear(self, x: Array, name: str, expert: int | None = None) -> Array: ...

    def gate(self, gate: Array, up: Array | None, activation: str) -> Array: ...

    def hidden(self, norm: str | None) -> Array: ...

    def _by_head(self, layer: Layer, part: str, x: Array, on_inputs: Callable[..., None]) -> Array:
        """The product of each head's numbers with its matrix, [T, H, rows]."""
        ...

    def _rotation(self, rope: Rope, dims: int) -> tuple[Array, Array]:
        """Cosines and sines of the rows, [T, 1, D/2] each."""
        ...

    def _layer_embedding(self) -> Array:
        """The tokens' rows of `layer_embed`."""
        ...

    def _append(self, layer: Layer, k: Array, v: Array | None) -> None:
        """Put keys and values, if there are any, into the slots, after the norm of values."""
        ...

    def _states(self, layer: Layer) -> Iterable[tuple[slice, RecurrentState, int]]:
        """Of each sequence its rows, a recurrent layer's memory of it, and how many tokens its slot holds."""
        ...

    def join(self, x: Array, norms: tuple[str, str] | None) -> Array:
        of_x, of_hidden = norms or (None, None)
        return self.xp.concatenate([self.norm(x, of_x), self.hidden(of_hidden)], 1)

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
            cos, sin = self._rotation(rope, mixer.dims)
            first, second = _halves(heads)
            heads = self.xp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
        return self.norm(heads, layer.weight(norm)) if mixer.rotates_first else heads

    def append(self, layer: Layer, k: Array, v: Array) -> None:
        self._append(layer, self._rotated(layer, k, "k_norm", layer.attention.rope), v)

    def absorb(
        self, layer: Layer, plain: Array, q_rope: Array, latent: Array, k_rope: Array, on_inputs: Callable[..., None] = _ignore
    ) -> tuple[Array, Array]:
        of_heads = self._by_head(layer, "k_b", plain, on_inputs)
        queries = self._latent_row(of_heads, q_rope.reshape(*of_heads.shape[:2], -1))
        return queries.reshape(len(plain), -1), self._latent_row(self.norm(latent, layer.weight("latent_norm")), k_rope)

    def _latent_row(self, vector: Array, rope: Array) -> Array:
        """Both in the order of `Latent.dims`, over the last axis."""
        (low, high), (rope_low, rope_high) = _halves(vector), _halves(rope)
        return self.xp.concatenate([rope_low, low, rope_high, high], -1)

    def expand(self, layer: Layer, mixed: Array, on_inputs: Callable[..., None] = _ignore) -> Array:
        return self._by_head(layer, "v_b", mixed, on_inputs).reshape(len(mixed), -1)

    def convolve(self, layer: Layer, x: Array) -> Array:
        return self.gate(self._convolved(layer, x), None, "silu")

    def _convolved(self, layer: Layer, x: Array) -> Array:
        assert layer.recurrent, "the layer has a state"
        name = layer.weight(layer.recurrent.convolution)
        out, weights, bias = self.xp.empty_like(x), self._vectors[name], self._vectors.get(name + "_bias")
        for rows, state, length in self._states(layer):
            state.begin(length)
            state.inputs = self.xp.concatenate([state.inputs, x[rows]], 0)
            inputs, count = state.inputs[length - state.folded :], rows.stop - rows.start
            out[rows] = sum(inputs[tap : tap + count] * weights[:, tap] for tap in range(state.taps))
        return out if bias is None else out + bias

    def short_conv(self, layer: Layer, b: Array, c: Array, x: Array) -> Array:
        out = c * self._convolved(layer, b * x)
        for rows, state, _ in self._states(layer):
            state.records += [()] * (rows.stop - rows.start)  # there is nothing to fold
        return out

    def mamba2(self, layer: Layer, xbc: Array, dt: Array, z: Array) -> Array:
        mixer, weight, numbers = layer.recurrent, layer.weight, self._vectors
        assert isinstance(mixer, Mamba2), "the layer has one"
        size, of_values = mixer.key_heads * mixer.key_dims, mixer.key_head_of_values
        x, b, c = (xbc[:, first:end] for first, end in ((0, -2 * size), (-2 * size, -size), (-size, None)))
        x = x.reshape(len(x), -1, mixer.value_dims)
        b, c = (each.reshape(len(x), -1, mixer.key_dims)[:, of_values] for each in (b, c))  # [T, heads, key dims]
        steps = self._softplus(dt).clip(min=mixer.least_step)
        decays, values = self.xp.exp(numbers[weight("ssm_a")] * steps), x * steps[:, :, None]
        out = self.xp.empty_like(x)
        for rows, memory, _ in self._states(layer):
            state = memory.last()
            for t in range(rows.start, rows.stop):
                record = decays[t], b[t], values[t]
                state = delta_step(state, record)
                memory.records.append(record)
                out[t] = (c[t, :, None] @ state)[:, 0]
        out = out + x * numbers[weight("ssm_d")][:, None]
        gated = self.gate(z, out.reshape(len(x), -1), "silu")
        if not mixer.normed:
            return gated
        groups = gated.reshape(len(x), mixer.key_heads, -1)
        scale = 1 / self.xp.sqrt((groups * groups).mean(axis=-1, keepdims=True) + self._config.norm_eps)
        return (groups * scale).reshape(gated.shape) * numbers[weight("ssm_norm")]

    def delta_net(self, layer: Layer, qkv: Array, beta: Array, alpha: Array) -> Array:
        mixer, weight, numbers = layer.mixer, layer.weight, self._vectors
        assert isinstance(mixer, DeltaNet), "the layer is one"
        size, of_values = mixer.key_heads * mixer.key_dims, mixer.key_head_of_values
        q, k = (qkv[:, i * size : (i + 1) * size].reshape(len(qkv), -1, mixer.key_dims) for i in range(2))
        q, k = (x / self.xp.sqrt((x * x).sum(axis=-1, keepdims=True) + LENGTH_EPS) for x in (q, k))
        q, k = q[:, of_values] / math.sqrt(mixer.key_dims), k[:, of_values]  # [T, value heads, key dims]
        v = qkv[:, 2 * size :].reshape(len(qkv), -1, mixer.value_dims)
        beta, steps = self.gate(beta, None, "sigmoid"), self._softplus(alpha + numbers[weight("delta_dt")])
        decays = self.xp.exp(numbers[weight("delta_decay")] * steps)
        out = self.xp.empty_like(v)
        for rows, memory, _ in self._states(layer):
            state = memory.last()
            for t in range(rows.start, rows.stop):
                known = (k[t, :, None] @ (state * decays[t, :, None, None]))[:, 0]  # [value heads, value dims]
                record = decays[t], k[t], (v[t] - known) * beta[t, :, None]
                state = delta_step(state, record)
                memory.records.append(record)
                out[t] = (q[t, :, None] @ state)[:, 0]
        return self.norm(out, weight("delta_norm")).reshape(len(out), -1)

    def _softplus(self, x: Array) -> Array:
        return self.xp.logaddexp(self.xp.zeros_like(x), x)

    def _with_adapters(self, y: Array, x: Array, name: str) -> Array:
        """Products of `x` with a matrix, and what adapters add to them."""
        for rows, scale, pairs in self._adapted:
            if name in pairs:
                down, up = pairs[name]
                y[rows] += scale * (x[rows] @ down.T @ up.T)
        return y

    def _softcapped(self, x: Array, cap: float) -> Array:
        return self.xp.tanh(x / cap) * cap if cap else x

    def add(self, x: Array, branch: Array, name: str, norm: str | None, factor: str | None = None) -> Array:
        return self._added(x, self.norm(self.linear(branch, name), norm), factor)

    def _added(self, x: Array, branch: Array, factor: str | None) -> Array:
        total = x + branch * self._config.residual_scale
        return total if factor is None else total * self._vectors[factor]

    def layer_inputs(self, x: Array) -> Array:
        size = self._config.layer_input_size
        made = self.linear(x, "layer_input") / math.sqrt(x.shape[1])
        normed = self.norm(made.reshape(len(x), -1, size), "layer_input_norm").reshape(len(x), -1)
        return (normed + self._layer_embedding() * math.sqrt(size)) / math.sqrt(2)

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
        """Expert by expert, each with the rows that go through it."""
        feed, weight, normed = layer.feed, layer.weight, self.norm(x, norm)
        assert feed, "the layer has it"
        assert feed.experts, "and experts in it"
        experts, inner = feed.experts, tuple(weight(f"expert_{part}") for part in (("gate", "up") if feed.gated else ("up",)))
        routed = self.norm(x, weight("router_norm")) if experts.normed_apart else normed
        chosen, factors = choose(self.xp, experts, self.linear(routed, weight("router")), self._vectors.get(weight("router_shift")))
        if experts.weighed:
            factors = factors * self._vectors[weight("router_factors")][chosen]
        outputs = self.xp.stack([x] * experts.used, 1)  # [T, used, C]: each is overwritten
        for expert in self.xp.unique(chosen).tolist():
            rows, places = self.xp.where(chosen == expert)
            given = normed[rows]
            on_inputs(given, inner, expert)
            gate, *up = (self.linear(given, name, expert) for name in inner)
            inside = self.gate(gate, up[0] if up else None, feed.activation)
            on_inputs(inside, (weight("expert_down"),), expert)
            outputs[rows, places] = self.linear(inside, weight("expert_down"), expert)
        branch = (outputs * factors[:, :, None]).sum(axis=1)
        branch = self.norm(branch, weight("expert_post_norm") if experts.normed_apart else None)
        if shared:
            rows_of_all, weighs = shared
            common = self.linear(rows_of_all, weight("shared_down"))
            common = self.norm(common, weight("shared_post_norm") if experts.normed_apart else None)
            branch = branch + (common if weighs is None else common / (1 + self.xp.exp(-weighs)))
        return self._added(x, self.norm(branch, norm_after), factor)


def choose(xp: Any, experts: Experts, logits: Array, shift: Array | None) -> tuple[Array, Array]:
    """Of each row the experts that it goes through, the best first, [T, used], and their factors. Of equals, the first is best."""
    scores = logits
    if experts.score == "softmax":
        scores = _softmax(xp, logits)
    elif experts.score == "sigmoid":
        scores = 1 / (1 + xp.exp(-logits))
    ranks = scores if shift is None else scores + shift
    if experts.groups > 1:
        grouped = ranks.reshape(len(ranks), experts.groups, -1)
        best = _taken(xp, grouped, xp.argsort(-grouped, stable=True)[:, :, :2]).sum(axis=-1)
        places = xp.argsort(xp.argsort(-best, stable=True), stable=True)
        ranks = xp.where((places < experts.groups_used)[:, :, None], grouped, -math.inf).reshape(ranks.shape)
    chosen = xp.argsort(-ranks, stable=True)[:, : experts.used]
    factors = _taken(xp, scores, chosen)
    if experts.score == "chosen":
        factors = _softmax(xp, factors)
    if experts.normalised:
        factors = factors / factors.sum(axis=-1, keepdims=True).clip(min=experts.least_sum)
    return chosen, factors * experts.scale


def _softmax(xp: Any, x: Array) -> Array:
    powers = xp.exp(x - xp.amax(x, axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def _taken(xp: Any, x: Array, indices: Array) -> Array:
    """Of each last axis the numbers at indices."""
    return x.gather(-1, indices) if hasattr(x, "gather") else xp.take_along_axis(x, indices, -1)


def _halves(x: Array) -> tuple[Array, Array]:
    middle = x.shape[-1] // 2
    return x[..., :middle], x[..., middle:]
