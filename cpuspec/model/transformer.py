"""The decoder, once: the order of its operations. Backends execute the operations or write them down.

numpy and torch compute with them, the graph backends emit nodes, numba writes the rows of a program. A family of models is layers
as data (`cpuspec.layers`) and a name map in its reader; a new operation is a line here and a method of each backend.
"""

from typing import Protocol, TypeVar

from cpuspec.config import DeltaNet, HeadConfig, Latent, Mamba2, ModelConfig, ShortConv
from cpuspec.layers import Attention, FeedForward, Layer, Mixer, layers_of

V = TypeVar("V")  # a backend's rows of numbers: an array, a tensor, the name of a node, or a buffer


class Operations(Protocol[V]):
    """The operations of a forward. T rows of C numbers go from one to the next."""

    def embed(self) -> V:
        """The batch's tokens, times `embedding_scale`, [T, C]."""
        ...

    def hidden(self, norm: str | None) -> V:
        """Norm (None for none) of the batch's hidden states, [T, C]. Norms are RMS norms, or those of the model's `norm_kind`."""
        ...

    def join(self, x: V, norms: tuple[str, str] | None) -> V:
        """RMS norms (None for none) of the embedded tokens and of the batch's hidden states, side by side, [T, 2C]."""
        ...

    def linears(self, x: V, names: tuple[str, ...], norm: str | None) -> tuple[V, ...]:
        """Norm of `x` (None for none), then its product with each matrix, plus the matrix's bias if it has one."""
        ...

    def rotate(self, layer: Layer, q: V, k: V | None) -> tuple[V, V | None]:
        """Queries and keys: RMS norm of each head, or of all, if there is one, then rotary positions; or these first.

        k: None of a layer that reads keys of another.
        """
        ...

    def attention(self, layer: Layer, q: V, k: V | None, v: V | None) -> V:
        """Append keys and values to the cache, if there are any, then softmax(scores) v over the tokens that each row sees,
        [T, H * D]. Where the layer says so, values have an RMS norm without weights first.

        v: None for latent attention, whose values are the `rank` numbers in the cached keys: [T, H * rank].
        """
        ...

    def absorb(self, layer: Layer, plain: V, q_rope: V, latent: V, k_rope: V) -> tuple[V, V]:
        """Queries [T, H * D] and keys [T, D] of latent attention, before rotary positions, in the order of `Latent.dims`: the
        product of each head's `plain` with its `k_b` beside `q_rope`, and the RMS norm of `latent` beside `k_rope`.
        """
        ...

    def expand(self, layer: Layer, mixed: V) -> V:
        """The product of each head's `rank` numbers with its `v_b`, [T, H * value_dims]."""
        ...

    def convolve(self, layer: Layer, x: V) -> V:
        """SiLU of a causal convolution of each of a recurrent layer's channels, [T, channels]. The state keeps the last inputs."""
        ...

    def delta_net(self, layer: Layer, qkv: V, beta: V, alpha: V) -> V:
        """The gated delta rule on the convolved queries, keys and values, then an RMS norm of each head, [T, value heads * dims].

        Of each value head with a matrix S: S *= decay, d = sigmoid(beta) (v - S^T k), S += k d^T, result S^T q. q and k have length
        1, and q is divided by the root of its dims; log(decay) = `delta_decay` * softplus(alpha + `delta_dt`). The state keeps S.
        """
        ...

    def short_conv(self, layer: Layer, b: V, c: V, x: V) -> V:
        """c * conv(b * x), where the causal convolution goes over each number's column, [T, C]. The state keeps the last inputs."""
        ...

    def mamba2(self, layer: Layer, xbc: V, dt: V, z: V) -> V:
        """Mamba-2's recurrence on the convolved x, B and C, its gate and norm (`config.Mamba2`), [T, inner]. The state keeps S."""
        ...

    def gate(self, gate: V, up: V | None, activation: str) -> V:
        """activation(gate) * up, None for 1. activation: one of `ModelConfig`, or "sigmoid"."""
        ...

    def add(self, x: V, branch: V, name: str, norm: str | None, factor: str | None = None) -> V:
        """`x` plus the product of `branch` with a matrix and its bias, after an RMS norm of that product (None for none), times
        `residual_scale`. factor: a tensor of one number that the sum is multiplied with.
        """
        ...

    def layer_inputs(self, x: V) -> V:
        """A second input of each layer (Gemma 4), made of the embedded tokens `x`: [T, layers * size], size `layer_input_size`.

        It is (norm(`layer_input` x / sqrt(C)) + sqrt(size) * `layer_embed` of the token) / sqrt(2): an RMS norm for each layer.
        """
        ...

    def input_of(self, layer: Layer, inputs: V) -> V:
        """A layer's part of `layer_inputs`, or of what is injected."""
        ...

    def experts(
        self, layer: Layer, x: V, norm: str | None, shared: tuple[V, V | None] | None, norm_after: str | None, factor: str | None
    ) -> V:
        """`x` plus a mixture of experts of its RMS norm (None for none), times `residual_scale`. The mixture is the weighted sum of
        the outputs of the experts that the router chooses for the row, best first.

        shared: the gated rows of the shared expert, whose product with `shared_down` is added to the sum; and for each row a number
        whose sigmoid is the factor of that product, None for no factor. norm_after, factor: `norm` and `factor` of `add`, for the
        sum. Where experts are `normed_apart`, the router reads the norm by `router_norm` instead, and the weighted sum and the
        product have norms (`expert_post_norm`, `shared_post_norm`) before they are added.
        """
        ...

    def keep(self, layer: Layer, x: V) -> None:
        """The layer's output, for callers that asked for its hidden states."""
        ...

    def logits(self, x: V, name: str, norm: str | None) -> V:
        """Norm (None for none) of the asked rows, their product with the output matrix, and `logit_softcap`, [rows, V]."""
        ...


class Injection(Operations[V], Protocol[V]):
    """The operations that `inject` needs."""

    def append(self, layer: Layer, k: V, v: V) -> None:
        """Append keys, rotated as by `rotate`, and values to the cache."""
        ...


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
    inputs = ops.layer_inputs(x) if config.layer_input_size else None
    for layer in layers_of(config):
        if layer.injected:
            continue
        if layer.parallel:
            x = _parallel(ops, layer, x)
        else:
            x, read = _mixed(ops, layer, x, read), None
            x = _feed_forward(ops, layer, x)
        if inputs is not None:
            (gate,) = ops.linears(x, (layer.weight("input_gate"),), None)
            inside = ops.gate(gate, ops.input_of(layer, inputs), config.activation)
            x = ops.add(x, inside, layer.weight("input_proj"), layer.weight("input_post_norm"), _factor(layer))
        ops.keep(layer, x)
    return ops.logits(x, "output", "norm" if head is None or head.final_norm else None)


def _mixed(ops: Operations[V], layer: Layer, x: V, read: V | None) -> V:
    """`x` plus what a layer's mixer, and the one beside it, make of its norm, or of `read` instead."""
    mixers = [mixer for mixer in (layer.mixer, layer.beside) if mixer]
    names = tuple(layer.weight(part) for mixer in mixers for part in mixer.projections)
    if not mixers:
        return x
    rows = ops.linears(x if read is None else read, names, _norm_before(layer, "attn_norm") if read is None else None)
    for mixer in mixers:
        mixed, rows = _mix(ops, layer, mixer, rows[: len(mixer.projections)]), rows[len(mixer.projections) :]
        x = ops.add(x, mixed, layer.weight(mixer.output), _norm_after(layer, "attn_post_norm"))
    return x


def _mix(ops: Operations[V], layer: Layer, mixer: Mixer, rows: tuple[V, ...]) -> V:
    """A mixer of a layer, up to its output matrix. rows: of its projections. A kind of mixer is a case here."""
    match mixer:
        case Attention(latent=Latent() as latent):
            *queries, vector, k_rope = rows
            if latent.q_rank:
                queries = list(ops.linears(queries[0], tuple(map(layer.weight, ("q_plain", "q_rope"))), layer.weight("q_a_norm")))
            q, k = ops.rotate(layer, *ops.absorb(layer, queries[0], queries[1], vector, k_rope))
            return ops.expand(layer, ops.attention(layer, q, k, None))
        case Attention():
            named = dict(zip(mixer.projections, rows, strict=True))
            own = named.get("k")
            of_queries, of_keys = ops.rotate(layer, named["q"], own)
            mixed = ops.attention(layer, of_queries, of_keys, named.get("v", own))
            return ops.gate(named["q_gate"], mixed, "sigmoid") if mixer.gated else mixed
        case DeltaNet():
            qkv, gate, beta, alpha = rows
            return ops.gate(gate, ops.delta_net(layer, ops.convolve(layer, qkv), beta, alpha), "silu")
        case ShortConv():
            return ops.short_conv(layer, *rows)
        case Mamba2():
            z, xbc, dt = rows
            return ops.mamba2(layer, ops.convolve(layer, xbc), dt, z)


def _feed_forward(ops: Operations[V], layer: Layer, x: V) -> V:
    weight, feed, norm = layer.weight, layer.feed, _norm_before(layer, "mlp_norm" if layer.mixer else "attn_norm")
    if feed is None:
        return x
    factor = None if layer.input_size else _factor(layer)
    if not feed.experts:
        inside = ops.gate(*_two(ops.linears(x, tuple(map(weight, _inner(feed))), norm)), feed.activation)
        return ops.add(x, inside, weight("down"), _norm_after(layer, "mlp_post_norm"), factor)
    shared: tuple[V, V | None] | None = None
    if feed.size:
        matrices = [f"shared_{part}" for part in _inner(feed)] + ["shared_weight"] * feed.weighs_shared
        rows = ops.linears(x, tuple(map(weight, matrices)), norm)
        inside = ops.gate(*_two(rows[: len(_inner(feed))]), feed.activation)
        shared = inside, rows[-1] if feed.weighs_shared else None
    norm = weight("expert_norm") if feed.experts.normed_apart else norm
    return ops.experts(layer, x, norm, shared, _norm_after(layer, "mlp_post_norm"), factor)


def _inner(feed: FeedForward) -> tuple[str, ...]:
    """The matrices that make the middle of a feed-forward part."""
    return ("gate", "up") if feed.gated else ("up",)


def _two(rows: tuple[V, ...]) -> tuple[V, V | None]:
    return rows[0], rows[1] if len(rows) > 1 else None


def _parallel(ops: Operations[V], layer: Layer, x: V) -> V:
    """Attention and a dense part, both of the same normed rows."""
    weight, feed = layer.weight, layer.feed
    assert feed, "`ModelConfig` has checked it"
    q, k, v, *inner = ops.linears(x, tuple(map(weight, ("q", "k", "v", *_inner(feed)))), weight("attn_norm"))
    of_queries, of_keys = ops.rotate(layer, q, k)
    x = ops.add(x, ops.attention(layer, of_queries, of_keys, v), weight("o"), None)
    return ops.add(x, ops.gate(*_two(tuple(inner)), feed.activation), weight("down"), None)


def inject(config: ModelConfig, ops: Injection[V]) -> None:
    """Append to the cache the keys and values that every layer makes of the normed hidden states. Nothing else is computed.

    In a head that `reads`, the first layers alone do so, each from numbers of its own.
    """
    reads = config.head.reads if config.head else 0
    x = ops.hidden(None if reads else "hidden_norm")
    for layer in layers_of(config)[: reads or None]:
        given = ops.input_of(layer, x) if reads else x
        made = ("k", "v") if layer.attention.makes_values else ("k",)
        k, *v = ops.linears(given, tuple(map(layer.weight, made)), None)
        ops.append(layer, k, v[0] if v else k)


def _joined(head: HeadConfig, ops: Operations[V], x: V) -> V:
    return ops.join(x, ("embed_norm", "hidden_norm") if head.input_norms else None)


def _norm_before(layer: Layer, part: str) -> str | None:
    return layer.weight(part) if layer.normed_before else None


def _factor(layer: Layer) -> str | None:
    return layer.weight("output_scale") if layer.scaled else None


def _norm_after(layer: Layer, part: str) -> str | None:
    return layer.weight(part) if layer.normed_after else None
