"""GPTQ (arXiv 2210.17323) for any format with codes: columns are rounded one after the other, and later columns compensate for the
rounding errors of earlier ones.

The scales of a block are searched for when its first column is reached, from weights that include the corrections so far. With
`act_order` columns are rounded by the size of their inputs, largest first, and all scales are searched for beforehand, so that the
groups of a format stay in place (`static_groups` in other tools).
"""

from dataclasses import dataclass

import numpy as np

from cpuspec.errors import ConfigError
from cpuspec.formats import Format
from cpuspec.formats.format import Grid
from cpuspec.formats.tensor import F32, U8
from cpuspec.quantize.rounding import encode

_BATCH = 256  # columns whose corrections reach the columns after them in one product
_STEP = 32  # columns whose corrections reach the rest of a batch in one product


@dataclass(frozen=True)
class GptqSettings:
    """dampening_frac: share of the mean of the Hessian's diagonal that is added to it. act_order: largest inputs first."""

    dampening_frac: float = 0.01
    act_order: bool = True


@dataclass(frozen=True, eq=False)
class Factors:
    """The statistics of the inputs of a matrix that GPTQ uses; matrices with the same inputs share them.

    means: mean squares of the inputs [K]. order: the columns as they are rounded. upper: [K, K] in that order, the transpose of
    the Cholesky factor of the Hessian's inverse.
    """

    means: F32
    order: np.ndarray
    upper: F32


def factors(hessian: F32, settings: GptqSettings) -> Factors:
    """hessian: mean of x x^T over the inputs, [K, K]; it is overwritten.

    If the Cholesky factorization fails, ten times as much is added to the diagonal, until it succeeds. Raises ConfigError for
    numbers that are not finite.
    """
    if not np.isfinite(hessian).all():
        raise ConfigError(
            "the inputs of a matrix have squares that are not finite, so GPTQ cannot weigh them; leave out --method gptq"
        )
    means = hessian.diagonal().copy()
    order = np.argsort(-means, kind="stable") if settings.act_order else np.arange(len(means))
    hessian = hessian[np.ix_(order, order)] if settings.act_order else hessian
    added = max(settings.dampening_frac, 1e-6) * max(float(means.mean()), 1e-12)
    diagonal = np.einsum("ii->i", hessian)
    while True:
        diagonal += np.float32(added)
        try:
            # With both axes reversed, the lower factor is an upper one, H = R R^T; then H^-1 = R^-T R^-1.
            lower = np.linalg.cholesky(hessian[::-1, ::-1])
            if np.isfinite(lower).all():  # numpy may give NaN instead of an error
                break
        except np.linalg.LinAlgError:
            pass
        added *= 10
    return Factors(means, order, np.ascontiguousarray(_inverse_of_lower(lower)[::-1, ::-1]))


def _inverse_of_lower(lower: F32) -> F32:
    """The inverse of a lower triangle, half by half: most of it is products of matrices."""
    size = len(lower)
    if size <= 64:
        inverse: F32 = np.tril(np.linalg.inv(lower.astype(np.float64))).astype(np.float32)
        return inverse
    half = size // 2
    first, second = _inverse_of_lower(lower[:half, :half]), _inverse_of_lower(lower[half:, half:])
    result = np.zeros_like(lower)
    result[:half, :half], result[half:, half:] = first, second
    result[half:, :half] = -second @ (lower[half:, :half] @ first)
    return result


def quantize(format: Format, matrix: F32, of_inputs: Factors, act_order: bool) -> U8:
    """The matrix [N, K] in a format with codes, U8 [N, row_bytes].

    A format whose codes are not free is rounded, its inputs weighed: no column of it can be rounded by itself.
    """
    if not format.free_codes:
        return encode(format, matrix, of_inputs.means)
    rows, columns = matrix.shape
    size = format.block_size
    per_row = columns // size
    batch = max(_BATCH // size, 1) * size if not act_order else _BATCH
    upper, order = of_inputs.upper, of_inputs.order
    w = np.ascontiguousarray(matrix.T[order])  # [K, N]
    encoded = np.empty((rows, format.row_bytes(columns)), np.uint8)
    codes = np.empty((columns, rows), np.uint8)
    grids: list[Grid] = []
    if act_order:
        encoded[:] = encode(format, matrix, of_inputs.means)
        grids = [_grid(format, encoded)]
    for start in range(0, columns, batch):
        end = min(start + batch, columns)
        errors = np.empty((end - start, rows), np.float32)
        for step_start in range(start, end, _STEP):
            step_end = min(step_start + _STEP, end)
            for column in range(step_start, step_end):
                if not act_order and column % size == 0:
                    block = np.ascontiguousarray(w[column : column + size].T)
                    at = slice(column // size * format.block_bytes, (column // size + 1) * format.block_bytes)
                    encoded[:, at] = encode(format, block, of_inputs.means[column : column + size])
                    grids = [_grid(format, np.ascontiguousarray(encoded[:, at]))]
                place = order[column] if act_order else column % size
                width = columns if act_order else size
                group = place * len(grids[0].scale) // width
                grid = Grid(grids[0].scale[group], grids[0].offset[group])
                code = format.nearest(w[column], *grid)
                codes[order[column]] = code
                error = (w[column] - format.values_of(code, *grid)) * np.float32(1 / upper[column, column])
                errors[column - start] = error
                w[column + 1 : step_end] -= upper[column, column + 1 : step_end, None] * error
            if step_end < end:
                w[step_end:end] -= upper[step_start:step_end, step_end:end].T @ errors[step_start - start : step_end - start]
        if end < columns:
            w[end:] -= upper[start:end, end:].T @ errors
    parts = format.split(encoded.reshape(-1, format.block_bytes))
    parts["codes"] = np.ascontiguousarray(codes.T).reshape(rows * per_row, size)
    return format.join(parts).reshape(rows, -1)


def _grid(format: Format, encoded: U8) -> Grid:
    """The grid of rows, each factor [groups, rows]."""
    rows = len(encoded)
    grid = format.grid(format.split(encoded))
    return Grid(*(np.ascontiguousarray(part.reshape(rows, -1).T) for part in grid))
