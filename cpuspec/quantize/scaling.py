"""AWQ and SmoothQuant: factors of inputs that move from matrices into what feeds them, so that less is lost when they are rounded.

Both leave what the model computes as it is. The inputs of q, k and v, and of gate and up, are divided in the norm before them; AWQ
also divides those of o in v, and those of down in up. (AWQ: arXiv 2306.00978, SmoothQuant: arXiv 2211.10438.)
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from cpuspec.formats import Format
from cpuspec.formats.tensor import F32
from cpuspec.layers import attention_layers
from cpuspec.model.batch import I32
from cpuspec.quantize.calibration import run
from cpuspec.quantize.rounding import encode
from cpuspec.quantize.weights import Weights, layer_parts

_RATIOS = np.linspace(0, 0.95, 11)  # exponents that AWQ tries; 0 changes nothing
_ROWS = 256  # of a matrix, by which it judges them
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
    return replace(weights, inputs=inputs, outputs=outputs)


def awq(weights: Weights, chunks: I32, formats: Mapping[str, Format]) -> Weights:
    """Multiply columns by mean|x|^ratio, with the ratio of each group of matrices that loses least of their outputs."""
    config = weights.checkpoint.config
    inputs: dict[str, F32] = {}
    outputs: dict[str, F32] = {}
    attending = {layer.index: layer.attention for layer in attention_layers(config)}

    def on_inputs(x: F32, names: tuple[str, ...]) -> None:
        layer, part = layer_parts(names[0])
        feeder = f"layers.{layer}.{'v' if part == 'o' else 'up'}" if part in ("o", "down") else _norm_before(weights, names[0])
        if part == "down" and not config.gated:
            feeder = None  # between them is more than a factor
        if part == "o" and (attending[int(layer)].value_norm or not attending[int(layer)].makes_values):
            feeder = None  # a norm would take the factors away, and keys are of the same matrix
        if feeder is None or not all(formats[name].affine for name in names):
            return
        sizes = np.maximum(np.abs(x).mean(axis=0), _LEAST)
        if part == "o":
            # Query heads that share values share factors, too.
            mixer = attending[int(layer)]
            heads = sizes.reshape(mixer.kv_heads, -1, mixer.value_dims)
            sizes = np.broadcast_to(heads.mean(axis=1, keepdims=True), heads.shape).reshape(-1)
        factors = _best_factors(weights, names, formats, sizes, (x.T @ x) / np.float32(len(x)))
        inputs.update(dict.fromkeys(names, factors))
        if part == "o":
            factors = factors.reshape(mixer.kv_heads, -1, mixer.value_dims)[:, 0].reshape(-1)
        _divide(weights, outputs, feeder, factors)

    run(weights, chunks, on_inputs, MappingProxyType({}))
    return replace(weights, inputs=inputs, outputs=outputs)


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
