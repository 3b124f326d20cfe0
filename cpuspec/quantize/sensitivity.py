"""How much a model's answers change when a matrix is stored in a format, estimated for every matrix and format.

The loss of a matrix in a format is the mean squared error of its outputs, times the KL divergence of the model's answers per unit
of that error. Misses are measured on some rows of the matrix, inputs weighed by their mean squares. Divergences are measured
on a text: with every matrix of one layer rounded to four bits, layer by layer, and with one kind of matrix rounded in all layers,
kind by kind. These are sums of the divergences of single matrices, along the rows and the columns of one table. Each single one is
taken to be its miss times a factor of its layer and a factor of its kind, which iterative proportional fitting finds. So a model
of 30 layers takes 38 forwards instead of 211.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np

from cpuspec.formats import Format, QuantTensor, get_format
from cpuspec.formats.tensor import F32
from cpuspec.model.batch import I32
from cpuspec.quantize import calibration
from cpuspec.quantize.cast import cast
from cpuspec.quantize.rounding import encode
from cpuspec.quantize.store import Workspace
from cpuspec.quantize.weights import Weights, layer_parts
from cpuspec.sampling import kl_divergence, log_softmax

Losses = dict[str, dict[str, float]]  # by matrix, by format

_PROBE = get_format("mxfp4")  # quick to make, and its errors are of the size that budgets are about
_ROWS = 64  # rows of a matrix on which errors are measured
_TOKENS = 256  # tokens of text on which divergences are measured
_ROWS_AT_ONCE = 32  # rows of logits that are compared together
_FITTINGS = 100
_LEAST = 1e-12


def estimate(
    weights: Weights,
    chunks: I32,
    candidates: Mapping[str, Sequence[Format]],
    of_inputs: Mapping[str, F32],
    workspace: Workspace,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Losses:
    """The loss of each matrix in each of its candidates.

    candidates: by matrix; matrices without an entry are left as they are. chunks: text, I32 [B, L]. of_inputs: mean squares [K] of
    the inputs of matrices; all count the same where there are none. What is measured is kept in the workspace.
    """
    names = [name for name in candidates if weights.checkpoint.tensors[name].shape[1] % _PROBE.block_size == 0]
    groups: dict[str, list[str]] = {}
    for name in names:
        layer, part = layer_parts(name)
        if layer >= 0:
            groups.setdefault(f"layer {layer}", []).append(name)
        groups.setdefault(f"all {part}", []).append(name)
    total, done = len(groups) + len(candidates), 0

    def step() -> None:
        nonlocal done
        done += 1
        on_progress(done, total)

    misses: Losses = {}
    for name, formats in candidates.items():
        tried = {format.name: format for format in (*formats, *([_PROBE] if name in names else []))}
        measure = partial(_misses, weights, name, [*tried.values()], of_inputs.get(name))
        misses[name] = dict(zip(tried, workspace.measured(f"{name}: {', '.join(tried)}", measure), strict=True))
        step()
    text = chunks.reshape(-1)[: max(_TOKENS // chunks.shape[1], 1) * min(chunks.shape[1], _TOKENS)]
    text = text.reshape(-1, min(chunks.shape[1], _TOKENS))
    reference = cache(partial(_answers, weights, text))  # computed once, if anything is left to measure
    divergences = {}
    for group, members in groups.items():
        (divergences[group],) = workspace.measured(group, partial(_divergence, weights, text, members, reference))
        step()
    probed = {name: misses[name][_PROBE.name] for name in names}
    own = _shares(probed, divergences)
    typical = sum(own.values()) / max(sum(probed.values()), _LEAST)
    factors = {name: own[name] / max(probed[name], _LEAST) if name in own else typical for name in candidates}
    return {
        name: {format.name: factors[name] * misses[name][format.name] for format in formats} for name, formats in candidates.items()
    }


def _ignore(x: F32, names: tuple[str, ...]) -> None:
    """No inputs are looked at."""


def _misses(weights: Weights, name: str, formats: Sequence[Format], of_inputs: F32 | None) -> list[float]:
    """The mean square of what all outputs of a matrix miss in each format, from some of its rows."""
    count = weights.num_rows(name)
    step = -(-count // _ROWS)
    rows = np.concatenate([weights.rows(name, row, row + 1) for row in range(0, count, step)])
    found = []
    for format in formats:
        squares = np.square(format.decode(encode(format, rows, of_inputs)) - rows)
        found.append(float((squares if of_inputs is None else squares * of_inputs).sum(dtype=np.float64) * step))
    return found


def _answers(weights: Weights, text: I32) -> F32:
    return calibration.run(weights, text, _ignore, {}, with_logits=True)


def _divergence(weights: Weights, text: I32, names: Sequence[str], reference: Callable[[], F32]) -> list[float]:
    """The mean KL divergence of the answers with these matrices rounded from those without, which `reference` gives."""
    checkpoint = weights.checkpoint
    rounded = {name: cast(QuantTensor.encode(get_format("f32"), weights.matrix(name)), _PROBE) for name in names}
    rest = [replace(one, pairs={name: pair for name, pair in one.pairs.items() if name not in names}) for one in weights.adapters]
    changed = replace(weights, checkpoint=replace(checkpoint, tensors={**checkpoint.tensors, **rounded}), adapters=rest)
    wanted, got = reference(), _answers(changed, text)
    total = 0.0
    for start in range(0, len(got), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        total += float(kl_divergence(log_softmax(wanted[rows]), log_softmax(got[rows])).sum())
    return [max(total / len(got), _LEAST)]


def _shares(misses: Mapping[str, float], divergences: Mapping[str, float]) -> dict[str, float]:
    """The divergence of each matrix by itself, from its miss and those of the groups that it belongs to."""
    inside = [name for name in misses if layer_parts(name)[0] >= 0]
    found = {name: divergences[f"all {name}"] for name in misses if name not in inside}
    layers, parts = zip(*map(layer_parts, inside), strict=True) if inside else ((), ())
    rows, row = np.unique(layers, return_inverse=True)
    columns, column = np.unique(parts, return_inverse=True)
    of_rows = np.array([divergences[f"layer {layer}"] for layer in rows])
    of_columns = np.array([divergences[f"all {part}"] for part in columns])
    of_columns *= of_rows.sum() / max(of_columns.sum(), _LEAST)  # rounded together, they add up to less
    table = np.zeros((len(rows), len(columns)))
    table[row, column] = [max(misses[name], _LEAST) for name in inside]
    for _ in range(_FITTINGS):
        table *= (of_rows / table.sum(axis=1))[:, None]
        table *= of_columns / table.sum(axis=0)
    return found | {name: float(table[i, j]) for name, i, j in zip(inside, row, column, strict=True)}
