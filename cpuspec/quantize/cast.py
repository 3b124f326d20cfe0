"""Direct casts: a checkpoint's linear layers in fewer bits, for drafts of the model's own weights (ML-SpecQD, arXiv:2503.13565).

Always from the values, never from a file's own codes: a 4-bit file is cast as the same values in bf16 would be.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from cpuspec.checkpoints import Checkpoint
from cpuspec.environment import usable_cores
from cpuspec.errors import FormatError
from cpuspec.formats import Format, QuantTensor

OnProgress = Callable[[int, int], None]  # (weights cast, weights to cast)

_CHUNK_VALUES = 1 << 17  # decoded and encoded at a time: they stay in a core's cache


def cast(tensor: QuantTensor, format: Format) -> QuantTensor:
    """The tensor's values in another format. Raises FormatError as `Format.encode` does."""
    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    data = np.empty((len(rows), format.row_bytes(tensor.shape[-1])), np.uint8)
    step = max(1, _CHUNK_VALUES // tensor.shape[-1])
    for start in range(0, len(rows), step):
        data[start : start + step] = format.encode(tensor.format.decode(rows[start : start + step]))
    return QuantTensor(format, tensor.shape, data.reshape(*tensor.shape[:-1], -1))


def cast_checkpoint(
    checkpoint: Checkpoint, format: Format, threads: int | None = None, on_progress: OnProgress = lambda done, total: None
) -> Checkpoint:
    """The checkpoint with its linear layers cast. Embedding, output, norms and biases are the very same objects.

    threads: None is all cores. Raises FormatError, naming the tensor, where the format cannot hold it.
    """
    linears = {name: t for name, t in checkpoint.tensors.items() if len(t.shape) == 2 and name not in ("embed", "output")}
    for name, tensor in linears.items():
        with _naming(name):
            format.row_bytes(tensor.shape[1])
    done, total = 0, sum(t.num_values for t in linears.values())
    with ThreadPoolExecutor(threads or usable_cores()) as pool:
        jobs = {name: pool.submit(cast, tensor, format) for name, tensor in linears.items()}
        for name, job in jobs.items():
            with _naming(name):
                linears[name] = job.result()
            done += linears[name].num_values
            on_progress(done, total)
    return replace(checkpoint, tensors={**checkpoint.tensors, **linears})


@contextmanager
def _naming(tensor: str) -> Iterator[None]:
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{tensor}: {error}") from error
