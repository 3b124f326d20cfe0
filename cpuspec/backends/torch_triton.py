"""Products of a few rows with codes on a CUDA device: codes are unpacked in registers, so that memory is read once and as codes.

A program of the grid makes BLOCK_N outputs of all rows, and walks along K in one order: whatever the grid, the same bits.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

from cpuspec.formats.format import Scales


@triton.jit
def _kernel(
    x, codes, d, s, base, z, levels, y,
    rows, outputs, inputs,
    BITS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    HAS_S: tl.constexpr, HAS_Z: tl.constexpr, HAS_LEVELS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y [rows, outputs] = x [rows, inputs] times the matrix, whose bytes [outputs, inputs * BITS / 8] hold PARTS parts of a row."""
    PARTS: tl.constexpr = 8 // BITS
    m = tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    width = inputs // PARTS
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, width, BLOCK_K):
        j = start + tl.arange(0, BLOCK_K)
        inside = (n[:, None] < outputs) & (j[None, :] < width)
        packed = tl.load(codes + n[:, None] * width + j[None, :], mask=inside, other=0)
        for part in tl.static_range(PARTS):
            code = (packed >> (BITS * part)) & ((1 << BITS) - 1)
            if HAS_LEVELS:  # noqa: SIM108 (both sides of a conditional expression would be compiled)
                value = tl.load(levels + code.to(tl.int32))
            else:
                value = code.to(tl.float32)
            k = j + part * width
            block = n[:, None] * (inputs // BLOCK) + k[None, :] // BLOCK
            group = n[:, None] * (inputs // GROUP) + k[None, :] // GROUP
            scale = tl.load(d + block, mask=inside, other=0).to(tl.float32)
            if HAS_S:
                scale *= tl.load(s + group, mask=inside, other=0).to(tl.float32)
            value *= scale
            if ZERO != 0:
                offset = tl.load(base + block, mask=inside, other=0).to(tl.float32)
                if HAS_Z:
                    offset *= tl.load(z + group, mask=inside, other=0).to(tl.float32)
                value -= offset * ZERO
            seen = (m[:, None] < rows) & (j[None, :] < width)
            of_x = tl.load(x + m[:, None] * inputs + k[None, :], mask=seen, other=0)
            sums = tl.dot(of_x, tl.trans(value.to(of_x.dtype)), sums, input_precision="ieee")
    tl.store(y + m[:, None] * outputs + n[None, :], sums, mask=(m[:, None] < rows) & (n[None, :] < outputs))


def times(x: Tensor, codes: Tensor, scales: Scales, bits: int, zero: float, levels: Tensor | None) -> Tensor:
    """x [T, K] times the matrix [N, K] whose codes and scales these are, F32 [T, N]. x: contiguous, a few rows."""
    rows, inputs = x.shape
    outputs = len(codes)
    assert rows > 0, "a product of no rows runs no kernel"
    d, s, base, z = scales
    base, z = d if base is None else base, s if z is None else z
    groups = next((each.shape[1] for each in (s, z) if each is not None), d.shape[1])
    y = torch.empty((rows, outputs), dtype=torch.float32, device=x.device)
    block_n = 16 if outputs <= 4096 else 32  # enough programs for every multiprocessor
    _kernel[(triton.cdiv(outputs, block_n),)](
        x, codes, d, d if s is None else s, base, d if z is None else z, x if levels is None else levels, y,
        rows, outputs, inputs,
        BITS=bits, BLOCK=inputs // d.shape[1], GROUP=inputs // groups, ZERO=zero,
        HAS_S=s is not None, HAS_Z=z is not None, HAS_LEVELS=levels is not None,
        BLOCK_M=16 if rows <= 16 else 32, BLOCK_N=block_n, BLOCK_K=128,
    )  # fmt: skip
    return y
