"""Formats of this project whose values are signed bytes under one scale for 256, in another basis: each 256 values of a row times
Hadamard's matrix (`Format.rotated`).

So kernels add products in integers over 256 inputs, and make one float of them (benchmarks/DECISIONS.md#nl4_i).

nl4_i, 4.25 bits. A byte is factor * LEVELS[code] + move:

  head: 32 bits. The low half is the scale, an f16. Two more bits for each group of 32 are the upper bits of its move.
  steps: four bits for each group. Two are its factor less 3, the third is the factor's sign, the fourth the low bit of its move.
  128 bytes of codes: 16 for each group, nibbles in the order of q4_0. A move is one of -7, -5, up to 7

q6_i, 6.0625 bits, for the output matrix. A byte is the code less 32:

  scale: an f16
  128 bytes with the low four bits of codes, in the same order, and 64 with the upper two, in the order of q2_k
"""

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats.blocks32 import BLOCK, NIBBLES
from cpuspec.formats.format import F32, OWN_GGUF_TYPES, Affine, CodeField, Format, Parts
from cpuspec.formats.kquants import PAIRS, SUPERBLOCK
from cpuspec.formats.packing import bits, lanes
from cpuspec.formats.search import IN_NUMPY, Searches, inverse

# The table was found by descent on normal values, which rotated ones resemble.
LEVELS = (-20, -16, -13, -10, -7, -5, -3, -1, 0, 2, 4, 6, 8, 10, 13, 16)
FACTORS = (3, 4, 5, 6)
MOVES = tuple(range(-7, 8, 2))

_GROUPS = SUPERBLOCK // BLOCK
# By ceil(2 x), from twice the first level on, the code whose level is nearest to x: midpoints of levels are whole numbers there.
_NEAREST = np.searchsorted(np.add(LEVELS[:-1], LEVELS[1:]), np.arange(2 * LEVELS[0], 2 * LEVELS[-1] + 1)).astype(np.uint8)
# Scales that a search tries, by the largest magnitude of a superblock: shares of the largest signed byte.
_SHARES = tuple(np.float32(share / 127) for share in (0.86, 0.91, 0.95, 0.99, 1.03, 1.08))


def encode(values: F32, weights: F32 | None = None, find: Searches = IN_NUMPY) -> Parts:
    """The scale, factors and moves that leave the least squared error found. weights: of errors, [n, 256].

    For each scale tried, the search tries all factors and moves of each group.
    """
    groups = values.reshape(-1, BLOCK)
    weights = None if weights is None else weights.reshape(groups.shape)
    largest = np.abs(values).max(axis=1)
    best_error = np.full(len(values), np.inf, np.float32)
    best_scale = (largest * _SHARES[0]).astype("<f2").astype(np.float32)  # what f16 cannot hold stays infinite
    best_grid = np.zeros((len(values), _GROUPS), np.int64)
    for share in _SHARES:
        scale = (largest * share).astype("<f2").astype(np.float32)
        errors, grids = [], []
        for factor in FACTORS:
            moves = [move / factor for move in MOVES]
            error, grid = find.moves_of_scales(groups, weights, np.repeat(scale * factor, _GROUPS), LEVELS, moves)
            errors.append(error)
            grids.append(grid)
        chosen = np.argmin(errors, axis=0)
        error = np.min(errors, axis=0).reshape(best_grid.shape).sum(axis=1)
        grid = chosen * (2 * len(MOVES)) + np.choose(chosen, grids).astype(np.int64)
        better = error < best_error
        best_error, best_scale = np.where(better, error, best_error), np.where(better, scale, best_scale)
        best_grid = np.where(better[:, None], grid.reshape(best_grid.shape), best_grid)
    factors, sign, move = best_grid // 16, best_grid // 8 % 2, best_grid % 8
    move = np.where(sign == 1, 7 - move, move)  # -scale * (level + move) is scale * (-level - move)
    shifts = np.arange(_GROUPS, dtype=np.uint32)
    head = np.bitwise_or.reduce((move >> 1).astype(np.uint32) << (16 + 2 * shifts), axis=1)
    head |= best_scale.astype("<f2").view(np.uint16).astype(np.uint32)
    steps = np.bitwise_or.reduce((factors | sign << 2 | (move & 1) << 3).astype(np.uint32) << (4 * shifts), axis=1)
    times = np.where(sign == 1, -1, 1) * (factors + FACTORS[0])
    whole = groups.reshape(*best_grid.shape, BLOCK) * inverse(best_scale)[:, None, None] - (2 * move + MOVES[0])[:, :, None]
    twice = np.ceil(whole / times[:, :, None].astype(np.float32) * 2)
    codes = _NEAREST[(np.clip(twice, 2 * LEVELS[0], 2 * LEVELS[-1]) - 2 * LEVELS[0]).astype(np.intp)]
    return {"head": head[:, None], "steps": steps[:, None], "codes": codes.reshape(len(values), -1)}


def _parts(fields: NDArray) -> Parts:
    """d, and the factors and moves of groups [n, 8]: a value is d * s * level - base * z."""
    groups = np.arange(_GROUPS, dtype=np.uint32)
    d = (fields["head"] & 0xFFFF).astype(np.uint16).view("<f2")
    upper, own = fields["head"][:, None] >> (16 + 2 * groups), fields["steps"][:, None] >> 4 * groups
    factor = (own & 3).astype(np.int8) + np.int8(FACTORS[0])
    move = ((upper & 3) << 2 | own >> 2 & 2).astype(np.int8) + np.int8(MOVES[0])
    return {"d": d, "base": d, "s": np.where(own & 4, -factor, factor), "z": -move}


NL4_I = Format(
    "nl4_i",
    np.dtype([("head", "<u4"), ("steps", "<u4"), ("codes", "u1", SUPERBLOCK // 2)]),
    SUPERBLOCK,
    None,
    Affine(1, levels=LEVELS),
    (NIBBLES,),
    _parts,
    planes=(bits(4), lanes("head", "<u4", SUPERBLOCK), lanes("steps", "<u4", SUPERBLOCK)),
    reader="integers",
    gguf_type=OWN_GGUF_TYPES | 4,
    search=encode,
    free_codes=False,
    rotated=True,
)
Q6_I = Format(
    "q6_i",
    np.dtype([("d", "<f2"), ("codes", "u1", SUPERBLOCK // 2), ("high", "u1", SUPERBLOCK // 4)]),
    SUPERBLOCK,
    None,
    Affine(32),
    (NIBBLES, CodeField("high", 2, stride=PAIRS.stride, at=4)),
    planes=(bits(4), bits(2, at=4), lanes("d", "<f2", SUPERBLOCK)),
    reader="integers",
    gguf_type=OWN_GGUF_TYPES | 5,
    free_codes=False,
    rotated=True,
)

FORMATS = (NL4_I, Q6_I)
