"""Rounding to the nearest values of a format, with scales that are searched for, compiled.

Without an importance all errors weigh 1. With one, the error of a value weighs importance * sqrt(mean square of the row + value^2),
as in llama.cpp's quantizers with an importance matrix: inputs count by their mean square, and large weights more than small ones.
Formats of 8 bits and more are rounded without a search.
"""

import numpy as np

from cpuspec.formats import Format
from cpuspec.formats.format import CHUNK_VALUES, F32, U8
from cpuspec.kernels.encode import encode as encode_compiled
from cpuspec.kernels.fit import COMPILED

_SAFE = 1024  # the scales of smaller values fit every format


def encode(format: Format, values: F32, importance: F32 | None = None) -> U8:
    """Rows [N, K] in the format, U8 [N, row_bytes(K)].

    importance: of the K inputs, such as the mean squares of what they are multiplied with, [K] or of each row [N, K]; None where
    all count the same, as they do in a rotated format (`scaling.balanced` makes up for that).
    Raises FormatError as `Format.encode` does.
    """
    if not format.is_searched:
        return encode_compiled(format, values)
    rows, columns = values.shape
    out = np.empty((rows, format.row_bytes(columns)), np.uint8)
    step = max(1, CHUNK_VALUES // columns)
    for start in range(0, rows, step):
        x = np.ascontiguousarray(values[start : start + step], np.float32)
        if not np.abs(x).max(initial=0) < _SAFE:
            out[start : start + step] = encode_compiled(format, x)  # refuses what the format cannot hold
            continue
        if format.rotated:
            x = format.rotate(x.reshape(-1, format.block_size)).reshape(x.shape)
        blocks, weights = x.reshape(-1, format.block_size), None
        if importance is not None and not format.rotated:
            of_rows = importance if importance.ndim == 1 else importance[start : start + step]
            weights = of_rows * np.sqrt(np.square(x).mean(axis=1, keepdims=True) + np.square(x))
            weights = weights.reshape(blocks.shape)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            out[start : start + step] = format.join(format.searched(blocks, weights, COMPILED)).reshape(len(x), -1)
    return out
