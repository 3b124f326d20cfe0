"""One forward of the whole model over calibration text, matrix by matrix. A callback sees the inputs of each matrix.

Weights are decoded when they are needed and dropped after use, so memory holds one matrix and the rows of the text at a time. After
the callback has quantized a matrix, the forward uses the quantized one.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from cpuspec.backends.numpy_backend import Array, Forward, Model, Storage
from cpuspec.checkpoints.checkpoint import is_linear
from cpuspec.errors import ConfigError
from cpuspec.formats import QuantTensor, get_format
from cpuspec.layers import Layer, keeping_layers
from cpuspec.model.batch import F32, I32, ForwardBatch
from cpuspec.model.cache import KVCache
from cpuspec.model.recurrence import new_state, recurrent_mixers
from cpuspec.model.transformer import decode
from cpuspec.quantize.weights import Weights

# (x [T, K], names of the matrices that it is multiplied with, of experts also which), in the order of the model
OnInputs = Callable[..., None]


def split(tokens: list[int], chunks: int, length: int) -> I32:
    """The first `chunks` pieces of `length` tokens, I32 [chunks, length]; all there are if they are fewer.

    Raises ConfigError if there is not even one.
    """
    count = min(chunks, len(tokens) // length)
    if count < 1:
        raise ConfigError(f"the calibration text has {len(tokens)} tokens; wanted at least {length}, as many as a chunk has")
    return np.array(tokens[: count * length], np.int32).reshape(count, length)


def run(weights: Weights, chunks: I32, on_inputs: OnInputs, done: Mapping[str, QuantTensor], with_logits: bool = False) -> Array:
    """Feed every chunk [B, L] to the model as a text of its own, and call `on_inputs` with the inputs of each matrix.

    done: matrices that are used instead of the model's own, looked up when they are needed. `on_inputs` is also called for the
    output matrix, which is used only for logits. Returns the logits [B * L, V], or without them the last hidden states [B * L, C].
    Raises ConfigError for inputs that are not finite.
    """
    config = weights.checkpoint.config
    count, length = chunks.shape
    mixers = [layer.attention for layer in keeping_layers(config)]

    def new_storage() -> Storage:
        # A layer's keys and values are read right after they are written. Layers of the same shape share one buffer, unless others
        # read them later.
        buffers: dict[tuple[str, int, int], F32] = {}

        def buffer(kind: str, heads: int, dims: int) -> Any:
            new = np.zeros((length, heads, dims), np.float32)
            return new if config.layer_owners else buffers.setdefault((kind, heads, dims), new)

        keys = [buffer("keys", mixer.kv_heads, mixer.dims) for mixer in mixers]
        values = [buffer("values", mixer.kv_heads, mixer.value_dims) for mixer in mixers]
        zeros = partial(np.zeros, dtype=np.float32)
        return Storage(keys, values, [new_state(mixer, zeros) for mixer in recurrent_mixers(config)])

    cache = KVCache(count, length, new_storage, _never, _never, 0)
    batch = ForwardBatch(
        tokens=chunks.reshape(-1),
        positions=np.tile(np.arange(length, dtype=np.int32), count),
        slots=np.arange(count, dtype=np.int32),
        q_start=np.arange(count + 1, dtype=np.int32) * np.int32(length),
    )
    f32 = get_format("f32")
    values, embedding = _Values(weights, done), weights.checkpoint.tensors["embed"]
    model = Model(config, np.dtype(np.float32), f32, {}, embedding, values, {}, weights.checkpoint.tensors.get("layer_embed"))

    def on_finite(x: F32, names: tuple[str, ...], *which: Any) -> None:
        if not np.isfinite(x).all():
            raise ConfigError(
                f"with this calibration text the inputs of {names[0]} are not finite: the model is damaged, or its numbers "
                "exceed f32; quantize it without a text"
            )
        on_inputs(x, names, *which)

    return decode(config, _Watched(Forward(model, batch, cache), on_finite, with_logits))


def _never(*arguments: Any) -> None:
    raise AssertionError("calibration neither copies nor shortens a cache")


class _Values(Mapping[str, Array]):
    """Tensors in f32, decoded at each use."""

    def __init__(self, weights: Weights, done: Mapping[str, QuantTensor]) -> None:
        self._weights, self._done = weights, done

    def __getitem__(self, name: str) -> Any:
        tensors = self._weights.checkpoint.tensors
        if name == "output" and name not in tensors:
            name = "embed"
        if name in self._done:
            return self._done[name].dequantize()
        shape = tensors[name].shape
        if not is_linear(name, shape):
            return self._weights.vector(name).dequantize()
        return self._weights.matrix(name) if len(shape) == 2 else _Experts(self._weights, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights.checkpoint.tensors)

    def __len__(self) -> int:
        return len(self._weights.checkpoint.tensors)


class _Experts:
    """The matrices of a layer's experts, of which each use decodes one."""

    def __init__(self, weights: Weights, name: str) -> None:
        self._weights, self._name = weights, name

    def __getitem__(self, expert: int) -> Array:
        size = self._weights.checkpoint.tensors[self._name].shape[1]
        return self._weights.rows(self._name, expert * size, (expert + 1) * size)


class _Watched:
    """The operations of the reference, with a look at the inputs of matrices (`Operations` in `model.transformer`)."""

    def __init__(self, forward: Forward, on_inputs: OnInputs, with_logits: bool) -> None:
        self._forward, self._on_inputs, self._with_logits = forward, on_inputs, with_logits
        self.embed, self.rotate, self.attention, self.gate = forward.embed, forward.rotate, forward.attention, forward.gate
        self.convolve, self.delta_net = forward.convolve, forward.delta_net
        self.short_conv, self.mamba2 = forward.short_conv, forward.mamba2
        self.hidden, self.join = forward.hidden, forward.join  # only of draft heads
        self.input_of = forward.input_of

    def linears(self, x: Array, names: tuple[str, ...], norm: str | None) -> tuple[Array, ...]:
        normed = self._forward.norm(x, norm)
        self._on_inputs(normed, names)
        return tuple(self._forward.linear(normed, name) for name in names)

    def absorb(self, layer: Layer, plain: Array, q_rope: Array, latent: Array, k_rope: Array) -> tuple[Array, Array]:
        return self._forward.absorb(layer, plain, q_rope, latent, k_rope, self._on_inputs)

    def expand(self, layer: Layer, mixed: Array) -> Array:
        return self._forward.expand(layer, mixed, self._on_inputs)

    def add(self, x: Array, branch: Array, name: str, norm: str | None, factor: str | None = None) -> Array:
        self._on_inputs(branch, (name,))
        return self._forward.add(x, branch, name, norm, factor)

    def layer_inputs(self, x: Array) -> Array:
        self._on_inputs(x, ("layer_input",))
        return self._forward.layer_inputs(x)

    def experts(
        self,
        layer: Layer,
        x: Array,
        norm: str | None,
        shared: tuple[Array, Array | None] | None,
        norm_after: str | None,
        factor: str | None,
    ) -> Array:
        apart = layer.feed and layer.feed.experts and layer.feed.experts.normed_apart
        self._on_inputs(self._forward.norm(x, layer.weight("router_norm") if apart else norm), (layer.weight("router"),))
        if shared:
            self._on_inputs(shared[0], (layer.weight("shared_down"),))
        return self._forward.experts(layer, x, norm, shared, norm_after, factor, self._on_inputs)

    def keep(self, layer: Layer, x: Array) -> None:
        pass

    def logits(self, x: Array, name: str, norm: str | None) -> Array:
        self._on_inputs(self._forward.norm(x, norm), (name,))
        return self._forward.logits(x, name, norm) if self._with_logits else x
