"""One linear kernel called from Python, for `kernels.py` and the tests of kernels. A forward calls it from compiled code."""

import numpy as np

from cpuspec.formats.packing import TILE, PackedTensor
from cpuspec.formats.tensor import F32, U8
from cpuspec.kernels import machine_code, pointwise
from cpuspec.kernels.linear import linear_kernel
from cpuspec.kernels.products import BLOCK_ROWS, ENCODINGS, row_bytes


def activations(x: F32, encoding: str) -> U8:
    """Rows [T, K] in a kernel's encoding, one of ENCODINGS, as bytes."""
    rows, features = x.shape
    x = np.ascontiguousarray(np.pad(x, ((0, 0), (0, -features % 32))))
    out = np.zeros((-(-rows // BLOCK_ROWS) * BLOCK_ROWS + 1) * row_bytes(encoding, features), np.uint8)
    for row in range(rows):
        block, place = row // BLOCK_ROWS * BLOCK_ROWS, row % BLOCK_ROWS
        base = out.ctypes.data + block * row_bytes(encoding, features)
        to = {name: base if name == encoding else 0 for name in ENCODINGS}
        pointwise.prepare_row(
            pointwise.PLAIN, x[row].ctypes.data, 0, 0, 0, np.float32(0), features, 0, features,
            *to.values(), place, pointwise.rows_of_block(row, rows),
        )  # fmt: skip
    return out


def multiply(
    packed: PackedTensor, encoding: str, acts: U8, out: F32, *, bias: F32 | None = None, residual: F32 | None = None,
    tiles: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Write the products of `activations` with tiles first..end (None: all) of a matrix to out [T, N rounded up to tiles].

    bias [N rounded up] and residual (like out) are added. Other threads run meanwhile.
    """
    function = machine_code.function(linear_kernel(packed.format.name, encoding), 12)
    assert out.shape[1] == len(packed.data) * TILE, "outputs are whole tiles"
    first, end = tiles or (0, len(packed.data))
    function(
        packed.data.ctypes.data, packed.tile_bytes, packed.shape[1], first, end, acts.ctypes.data,
        row_bytes(encoding, packed.shape[1]), len(out), 0 if bias is None else bias.ctypes.data,
        0 if residual is None else residual.ctypes.data, out.ctypes.data, out.strides[0],
    )  # fmt: skip
