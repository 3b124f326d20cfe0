"""Quantizes a model matrix by matrix, in bounded memory: each is decoded, quantized, stored, and forgotten."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed

import numpy as np

from cpuspec.checkpoints.checkpoint import is_linear
from cpuspec.formats import Format
from cpuspec.formats.tensor import F32, U8
from cpuspec.model.batch import I32
from cpuspec.quantize import calibration, gptq
from cpuspec.quantize.cast import naming
from cpuspec.quantize.rounding import encode
from cpuspec.quantize.store import TensorStore
from cpuspec.quantize.weights import Weights, layer_parts

OnProgress = Callable[[int, int], None]  # (weights quantized, weights to quantize)
_VALUES_AT_ONCE = 1 << 22


def round_all(
    weights: Weights,
    formats: Mapping[str, Format],
    importance: Mapping[str, F32],
    store: TensorStore,
    threads: int,
    on_progress: OnProgress,
) -> None:
    """Round every matrix that is not in the store yet, `threads` at a time.

    importance: of the inputs [K], or of those of each expert [E, K], by matrix; without an entry all count the same.
    Raises FormatError, naming the tensor.
    """
    tensors = weights.checkpoint.tensors
    total, done = (
        sum(tensors[name].num_values for name in formats),
        sum(tensors[name].num_values for name in store if name in formats),
    )
    on_progress(done, total)
    with ThreadPoolExecutor(threads) as pool:
        jobs = {
            pool.submit(_rounded, weights, name, format, importance.get(name), store): name
            for name, format in formats.items()
            if name not in store
        }
        try:
            for job in as_completed(jobs):
                job.result()
                done += tensors[jobs[job]].num_values
                on_progress(done, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def gptq_all(
    weights: Weights,
    formats: Mapping[str, Format],
    chunks: I32,
    settings: gptq.GptqSettings,
    store: TensorStore,
    on_progress: OnProgress,
) -> dict[str, F32]:
    """GPTQ for every matrix of the layers that is not in the store yet, in the order of the model. Each matrix gets the inputs that
    the quantized matrices before it produce. chunks: of calibration text, I32 [B, L].

    Returns the mean squares of the inputs of the output matrix, by its name. Raises FormatError, naming the tensor.
    """
    tensors = weights.checkpoint.tensors
    inside = [name for name in formats if layer_parts(name)[0] >= 0]
    total, done = sum(tensors[name].num_values for name in inside), 0
    outside: dict[str, F32] = {}

    def on_inputs(x: F32, names: tuple[str, ...]) -> None:
        nonlocal done
        if "output" in names:
            outside["output"] = (x * x).mean(axis=0)
            return
        names = tuple(name for name in names if name in formats)  # those of a decay have none
        wanted = [name for name in names if name not in store]
        if any(formats[name].affine for name in wanted):
            of_inputs = gptq.factors((x.T @ x) / np.float32(len(x)), settings)
        for name in names:
            if name in wanted and not formats[name].affine:
                _rounded(weights, name, formats[name], None, store)
            elif name in wanted:
                with naming(name):
                    store.put(name, gptq.quantize(formats[name], weights.matrix(name), of_inputs, settings.act_order))
            done += tensors[name].num_values
            on_progress(done, total)

    calibration.run(weights, chunks, on_inputs, store)
    return outside


def keep_vectors(weights: Weights, store: TensorStore) -> None:
    """Put norms, biases and routers into the store, in f32."""
    for name, tensor in weights.checkpoint.tensors.items():
        if not is_linear(name, tensor.shape) and name not in store:
            store.put(name, weights.vector(name).data)


def _rounded(weights: Weights, name: str, format: Format, importance: F32 | None, store: TensorStore) -> None:
    rows, columns = weights.num_rows(name), weights.checkpoint.tensors[name].shape[-1]
    data: U8 = np.empty((rows, format.row_bytes(columns)), np.uint8)
    step = max(1, _VALUES_AT_ONCE // columns)
    with naming(name):
        for first in range(0, rows, step):
            last = min(first + step, rows)
            own = importance
            if importance is not None and importance.ndim == 2:
                own = importance[np.arange(first, last) // weights.checkpoint.tensors[name].shape[-2]]
            data[first:last] = encode(format, weights.rows(name, first, last), own)
    store.put(name, data)
