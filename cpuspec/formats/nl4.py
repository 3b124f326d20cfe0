"""nl4_g32, a format of this project: four bits on a grid of sixteen steps that is denser near zero and may be turned and moved.
Groups of 32, 4.5 bits.

  head: a word whose low four bits are the move of the grid, from -7 to 8, and whose other twelve are the top of an f16, the scale
  16 bytes of codes: nibbles in the order of q4_0. A value is scale * (LEVELS[code] + move).

q4_k's linear grid with its minimum takes as many bytes, and so does iq4_nl's grid, which cannot move. This leaves less error than
either (benchmarks/LOG.md). The grid reaches further on one side, and the scale's sign turns it.

Levels are whole numbers from -32 to 31. Kernels look them up by one shuffle, and processors without dot products of bytes may add
two pairs of products in 16 bits: iq4's levels, up to 127, have to be multiplied in two halves. The table was found by Lloyd's
algorithm on values of normal and of t distributions.
"""

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats import search
from cpuspec.formats.format import F32, OWN_GGUF_TYPES, U8, Affine, Format, Parts
from cpuspec.formats.legacy import BLOCK, codes_4_bits, fields_4_bits
from cpuspec.formats.packing import bits, lanes

LEVELS = (-32, -26, -20, -16, -12, -8, -5, -2, 0, 3, 6, 9, 12, 16, 21, 28)
MOVE_BITS = 15  # of a head
LEAST_MOVE = -7
_MOST_MOVE = LEAST_MOVE + MOVE_BITS

_LEVELS = np.array(LEVELS, np.float32)
_SPAN, _MIDDLE = np.float32(LEVELS[-1] - LEVELS[0]), np.float32((LEVELS[-1] + LEVELS[0]) / 2)
_LEAST, _MOST = np.float32(LEVELS[0] + LEAST_MOVE), np.float32(LEVELS[-1] + _MOST_MOVE)

# Starting grids of a search, as shares of the span of the group and zero: cutting the largest values often pays.
_SHARES = (0.8, 0.9, 1.0, 1.1)
_STEPS = 3  # of a search from a start

# By floor(2 x) + 80, the code whose level is nearest to x: midpoints of levels are whole numbers there.
_NEAREST = np.searchsorted(np.add(LEVELS[:-1], LEVELS[1:]), np.arange(-80, 80), side="right").astype(np.uint8)


def encode(values: F32, importance: F32 | None = None) -> Parts:
    """The scale, of either sign, and the move that leave the least squared error found. importance: of each value, [n, 32].

    From each start codes are chosen, and the line of least squares through their levels and the values gives the next grid.
    """
    weights = np.ones((1, 1), np.float32) if importance is None else importance
    total = weights.sum(axis=1) * np.float32(BLOCK if importance is None else 1)
    weighted = values * weights
    total_x = weighted.sum(axis=1)
    low, high = np.minimum(values.min(axis=1), 0), np.maximum(values.max(axis=1), 0)
    best_gain = np.zeros(len(values), np.float32)
    best = _head((high - low) / _SPAN, best_gain)  # where that is infinite, it stays: no gain is a number then
    for sign in (np.float32(1), np.float32(-1)):
        for share in _SHARES:
            # At least so large that a move reaches both ends.
            up, down = (high, -low) if sign > 0 else (-low, high)
            size = np.maximum((high - low) / _SPAN, np.maximum(up / _MOST, down / -_LEAST))
            scale = sign * size * np.float32(share)
            move = (low + high) / 2 * search.inverse(scale) - _MIDDLE
            for _ in range(_STEPS):
                head = _head(scale, move)
                stored, whole = scales_and_moves(head)
                levels = _LEVELS[_codes(values, stored, whole)]
                along, squares = (levels * weighted).sum(axis=1), (levels * levels * weights).sum(axis=1)
                sums = (levels * weights).sum(axis=1)
                # Of the squared error over that of zeros, sums of level + move follow from those of levels.
                gain = stored * (2 * (along + whole * total_x) - stored * (squares + whole * (2 * sums + whole * total)))
                better = gain > best_gain
                best, best_gain = np.where(better, head, best), np.where(better, gain, best_gain)
                slope = (total * along - sums * total_x) * search.inverse(total * squares - sums * sums)
                kept = slope * sign > 0
                start = (total_x - slope * sums) * search.inverse(total)
                move = np.where(kept, start * search.inverse(slope), move)
                # The scale that is best with the move as it will be stored.
                moved = np.clip(np.rint(move), LEAST_MOVE, _MOST_MOVE)
                slope = (along + moved * total_x) * search.inverse(squares + moved * (2 * sums + moved * total))
                scale = np.where(kept & (slope * sign > 0), slope, scale)
    scale, move = scales_and_moves(best)
    return {"head": best[:, None], "codes": _codes(values, scale, move)}


def scales_and_moves(head: NDArray[np.uint16]) -> tuple[F32, F32]:
    """What heads stand for."""
    scales = (head & np.uint16(0xFFFF - MOVE_BITS)).view("<f2").astype(np.float32)
    return scales, (head & np.uint16(MOVE_BITS)).astype(np.float32) + LEAST_MOVE


def _head(scale: F32, move: F32) -> NDArray[np.uint16]:
    """The word that holds the nearest scale and move."""
    near = scale.astype("<f2").view(np.uint16).astype(np.uint32) + (MOVE_BITS + 1) // 2  # halves up
    moved = np.clip(np.rint(move), LEAST_MOVE, _MOST_MOVE) - LEAST_MOVE
    return (near & (0xFFFF - MOVE_BITS)).astype(np.uint16) | moved.astype(np.uint16)


def _codes(values: F32, scale: F32, move: F32) -> U8:
    """The codes of values [n, 32] that are nearest."""
    doubled = np.floor(values * (2 * search.inverse(scale))[:, None] - (2 * move)[:, None])
    return _NEAREST[np.clip(doubled, -80, 79).astype(np.int16) + 80]


def _parts(fields: NDArray) -> Parts:
    d, move = (fields["head"] & np.uint16(0xFFFF - MOVE_BITS)).view("<f2"), (fields["head"] & np.uint16(MOVE_BITS)).astype(np.int8)
    return {"d": d, "z": -LEAST_MOVE - move, **codes_4_bits(fields)}


def _fields(parts: Parts) -> Parts:
    """The fields that hold codes and, where they are among the parts, scales and moves."""
    fields = fields_4_bits(parts)
    if "d" in parts:
        top = parts["d"].astype("<f2").view(np.uint16) & np.uint16(0xFFFF - MOVE_BITS)
        fields["head"] = top | (-LEAST_MOVE - parts["z"]).astype(np.uint16)
    return fields


NL4 = Format(
    "nl4_g32",
    np.dtype([("head", "<u2"), ("codes", "u1", 16)]),
    BLOCK,
    encode,
    _parts,
    _fields,
    Affine(1, levels=LEVELS),
    planes=(bits(4), lanes("head", "<u2", BLOCK)),
    reader="nl4",
    gguf_type=OWN_GGUF_TYPES | 1,
    encode_weighed=encode,
)
