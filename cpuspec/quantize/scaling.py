"""AWQ, SmoothQuant and balancing: factors move from inputs of matrices to the norm or matrix before, so that rounding loses less.

None of them changes what the model computes. The inputs of q, k and v, and of gate and up, are divided in the norm before them; AWQ
also divides those of o in v, and those of down in up. (AWQ: arXiv 2306.00978, SmoothQuant: arXiv 2211.10438.)
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from cpuspec.formats import Format
from cpuspec.formats.tensor import F32
from cpuspec.layers import Attention, attention_layers
from cpuspec.model.batch import I32
from cpuspec.quantize.calibration import run
from cpuspec.quantize.rounding import encode
from cpuspec.quantize.weights import Weights, layer_parts

_RATIOS = np.linspace(0, 0.95, 11)  # exponents that AWQ tries; 0 changes nothing
_ROWS = 256  # rows of a matrix on which AWQ measures an exponent
_LEAST = 1e-4


def smoothquant(weights: Weights, chunks: I32, strength: float) -> Weights:
    """Divide inputs by max|x|^strength / max|w|^(1 - strength), so that inputs and weights share what is hard to round."""
    inputs: dict[str, F32] = {}
    outputs: dict[str, F32] = {}

    def on_inputs(x: F32, names: tuple[str, ...]) -> None:
        norm = _norm_before(weights, names[0])
        if norm is not None:
            largest = np.max([np.abs(weights.matrix(name)).max(axis=0) for name in names], axis=0)
            factors = np.maximum(np.abs(x).max(axis=0), _LEAST) ** strength / np.maximum(largest, _LEAST) ** (1 - strength)
            inputs.update(dict.fromkeys(names, factors.astype(np.float32)))
            _divide(weights, outputs, norm, inputs[names[0]])

    run(weights, chunks, on_inputs, MappingProxyType({}))
    return _with_factors(weights, inputs, outputs)


def awq(weights: Weights, chunks: I32, formats: Mapping[str, Format]) -> Weights:
    """Multiply columns by mean|x|^ratio, with the ratio of each group of matrices that loses least of their outputs."""
    inputs: dict[str, F32] = {}
    outputs: dict[str, F32] = {}

    def on_inputs(x: F32, names: tuple[str, ...]) -> None:
        feeder = _feeder(weights, names[0])
        if feeder is None or not all(formats[name].affine and not formats[name].rotated for name in names):
            return
        sizes = _shared(weights, names[0], np.maximum(np.abs(x).mean(axis=0), _LEAST))
        factors = _best_factors(weights, names, formats, sizes, (x.T @ x) / np.float32(len(x)))
        inputs.update(dict.fromkeys(names, factors))
        _divide(weights, outputs, feeder, _of_feeder(weights, names[0], factors))

    run(weights, chunks, on_inputs, MappingProxyType({}))
    return _with_factors(weights, inputs, outputs)


def _with_factors(weights: Weights, inputs: Mapping[str, F32], outputs: Mapping[str, F32]) -> Weights:
    """The weights with further factors: those of a method before were there when these were measured, so that they multiply."""
    return replace(
        weights,
        inputs={**weights.inputs, **{name: weights.inputs.get(name, np.float32(1)) * new for name, new in inputs.items()}},
        outputs={**weights.outputs, **{name: weights.outputs.get(name, np.float32(1)) * new for name, new in outputs.items()}},
    )


def balanced(weights: Weights, formats: Mapping[str, Format], means: Mapping[str, F32]) -> Weights:
    """Multiply columns by (mean square of the input / mean square of the column)^(1/4), where all matrices that read the input have
    rotated formats.

    All rotated columns get the same rounding error, which grows with the sum of all columns' squares. These factors minimise the
    error of the outputs, as an importance of inputs does for other formats. means: mean squares of the inputs [K], by matrix.
    """
    own = replace(weights, inputs={}, outputs={})
    inputs, outputs = dict(weights.inputs), dict(weights.outputs)

    def on_inputs(x: F32, names: tuple[str, ...]) -> None:
        feeder = _feeder(own, names[0])
        if feeder is None or names[0] not in means or not all(formats[name].rotated for name in names):
            return
        squares = [np.square(own.matrix(name)) for name in names]
        of_columns = np.sum([one.mean(axis=0) / max(one.mean(), _LEAST**3) for one in squares], axis=0)
        of_inputs, of_columns = (_shared(own, names[0], some) for some in (means[names[0]], of_columns))
        factors = (np.maximum(of_inputs, _LEAST**2) / np.maximum(of_columns, _LEAST**3)) ** np.float32(0.25)
        factors = (factors / np.sqrt(factors.max() * factors.min())).astype(np.float32)
        inputs.update(dict.fromkeys(names, factors))
        _divide(own, outputs, feeder, _of_feeder(own, names[0], factors))

    run(own, np.zeros((1, 1), np.int32), on_inputs, MappingProxyType({}))  # one token shows which matrices read the same inputs
    return replace(weights, inputs=inputs, outputs=outputs)


def _feeder(weights: Weights, name: str) -> str | None:
    """The norm or matrix whose outputs are a matrix's inputs, up to factors; None where there is none."""
    layer, part = layer_parts(name)
    if part == "down":
        return f"layers.{layer}.up" if weights.checkpoint.config.gated else None  # else an activation lies between them
    if part == "o":
        # A norm of values would cancel the factors; and values may come from the matrix of the keys.
        mixer = _mixer(weights, name)
        return f"layers.{layer}.v" if mixer.makes_values and not mixer.value_norm else None
    return _norm_before(weights, name)


def _mixer(weights: Weights, name: str) -> Attention:
    """The attention of a matrix's layer."""
    return next(
        layer.attention for layer in attention_layers(weights.checkpoint.config) if layer.index == int(layer_parts(name)[0])
    )


def _shared(weights: Weights, name: str, sizes: F32) -> F32:
    """A number for each input of a matrix. In `o`, query heads with the same values have the same numbers: their means."""
    if layer_parts(name)[1] != "o":
        return sizes
    mixer = _mixer(weights, name)
    heads = sizes.reshape(mixer.kv_heads, -1, mixer.value_dims)
    return np.broadcast_to(heads.mean(axis=1, keepdims=True), heads.shape).reshape(-1)


def _of_feeder(weights: Weights, name: str, factors: F32) -> F32:
    """The factors of a matrix's inputs as those of the feeder's outputs."""
    if layer_parts(name)[1] != "o":
        return factors
    mixer = _mixer(weights, name)
    return factors.reshape(mixer.kv_heads, -1, mixer.value_dims)[:, 0].reshape(-1)


def _divide(weights: Weights, outputs: dict[str, F32], feeder: str, factors: F32) -> None:
    """Note what the outputs of a matrix or a norm are divided by, its biases included."""
    for name in (feeder, f"{feeder}_bias"):
        if name in weights.checkpoint.tensors:
            outputs[name] = factors


def _best_factors(weights: Weights, names: tuple[str, ...], formats: Mapping[str, Format], sizes: F32, hessian: F32) -> F32:
    means = hessian.diagonal()
    samples = []
    for name in names:
        step = max(1, weights.checkpoint.tensors[name].shape[0] // _ROWS)
        samples.append((formats[name], weights.matrix(name)[::step]))
    best: F32 = np.ones_like(sizes)
    best_error = np.inf
    for ratio in _RATIOS:
        factors = (sizes**ratio).astype(np.float32)
        factors /= np.sqrt(factors.max() * factors.min())
        error = 0.0
        for format, rows in samples:
            miss = format.decode(encode(format, rows * factors, means / factors**2)) / factors - rows
            error += float(((miss @ hessian) * miss).sum())
        if error < best_error:
            best, best_error = factors, error
    return best


def _norm_before(weights: Weights, name: str) -> str | None:
    """The norm whose output a matrix is multiplied with; None where there is none in its layer."""
    layer, part = layer_parts(name)
    norm = {"q": "attn_norm", "gate": "mlp_norm", "up": "mlp_norm"}.get(part)
    return f"layers.{layer}.{norm}" if norm and f"layers.{layer}.{norm}" in weights.checkpoint.tensors else None
