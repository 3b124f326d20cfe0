"""Formats of this project: four bits on a grid of sixteen steps that is denser near zero and may be turned and moved.

nl4_g32 has blocks of 32, 4.5 bits:

  head: a word whose low four bits are the move of the grid, from -7 to 8, and whose other twelve are the top of an f16, the scale
  16 bytes of codes: nibbles in the order of q4_0. A value is scale * (LEVELS[code] + move).

nl4_xs has superblocks of 256, eight groups of 32, 4.25 bits:

  head: 32 bits. The low eight are a scale, bits 7 to 14 of an f16. Three more for each group are its move: -7, -5, up to 7.
  steps: four bits for each group. Three say how many steps its scale is below that of the superblock, and the top one is the sign.
  A step is one less in the eight bits of the scale: an octave has eight steps.
  128 bytes of codes: 16 for each group, as above

nl4_r has the record of nl4_xs for values in another basis: each 256 of a row times Hadamard's matrix (`Format.rotated`).

q4_k's linear grid with its minimum takes as many bytes as nl4_g32, and so does iq4_nl's grid, which cannot move; iq4_xs takes as
many as nl4_xs. These two formats leave less error (benchmarks/LOG.md). The grid reaches further on one side; the sign of the scale
chooses which.

Levels are whole numbers from -32 to 31. Kernels look them up by one shuffle, and processors without dot products of bytes may add
two pairs of products in 16 bits: iq4's levels, up to 127, have to be multiplied in two halves. The table was found by Lloyd's
algorithm on values of normal and of t distributions.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats import search
from cpuspec.formats.format import F32, OWN_GGUF_TYPES, U8, Affine, Format, Parts
from cpuspec.formats.kquants import SUPERBLOCK
from cpuspec.formats.legacy import BLOCK, NIBBLES
from cpuspec.formats.packing import bits, lanes

LEVELS = (-32, -26, -20, -16, -12, -8, -5, -2, 0, 3, 6, 9, 12, 16, 21, 28)
MOVE_BITS = 15  # of a head
LEAST_MOVE = -7  # of both formats
_MOST_MOVE = LEAST_MOVE + MOVE_BITS
MOVES = tuple(range(LEAST_MOVE, _MOST_MOVE + 1))
XS_MOVES = MOVES[: MOVE_BITS + 1 : 2]

_LEVELS = np.array(LEVELS, np.float32)
_COUNT = np.float32(BLOCK)
_SPAN, _MIDDLE = np.float32(LEVELS[-1] - LEVELS[0]), np.float32((LEVELS[-1] + LEVELS[0]) / 2)
_LEAST, _MOST = np.float32(LEVELS[0] + LEAST_MOVE), np.float32(LEVELS[-1] + _MOST_MOVE)

# Starting grids of a search, as shares of the span of the group and zero: cutting the largest values often pays.
_SHARES = (0.8, 0.9, 1.0, 1.1)
_STEPS = 3  # of a search from a start

_GROUPS = SUPERBLOCK // BLOCK
_XS_FURTHEST, _XS_NEARER = (
    np.float32(-LEVELS[0] - LEAST_MOVE),
    np.float32(LEVELS[-1] + XS_MOVES[-1]),
)  # how far the grid reaches on either side with its furthest moves
_INFINITE = 0xF8  # the smallest scale of eight bits that is inf or nan
_BELOW, _TRIED = 4, 9  # scales of nl4_xs that are tried: from so many below the one that just holds a group, so many
_LARGER = 2  # and up to so many above it for a superblock

# By floor(2 x) + 256 for each move, the code whose level with the move is nearest to x; and floor(2 x) less twice that.
_XS_FLOORS = np.arange(-256, 256)
_XS_CODES = np.array(
    [np.searchsorted(np.add(LEVELS[:-1], LEVELS[1:]) + 2 * move, _XS_FLOORS, side="right") for move in XS_MOVES], np.uint8
)
_XS_MISSES = [
    (_XS_FLOORS - 2 * (_LEVELS[codes] + move)).astype(np.float32) for codes, move in zip(_XS_CODES, XS_MOVES, strict=True)
]

# By floor(2 x) + 80, the code whose level is nearest to x: midpoints of levels are whole numbers there.
_NEAREST = np.searchsorted(np.add(LEVELS[:-1], LEVELS[1:]), np.arange(-80, 80), side="right").astype(np.uint8)


def encode(values: F32) -> Parts:
    """The scale, of either sign, and the move that leave the least squared error found.

    From each start codes are chosen, and the line of least squares through their levels and the values gives the next grid.
    `quantize.rounding` tries more, compiled.
    """
    total_x = values.sum(axis=1)
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
                along, squares, sums = (levels * values).sum(axis=1), (levels * levels).sum(axis=1), levels.sum(axis=1)
                # Of the squared error over that of zeros, sums of level + move follow from those of levels.
                gain = stored * (2 * (along + whole * total_x) - stored * (squares + whole * (2 * sums + whole * _COUNT)))
                better = gain > best_gain
                best, best_gain = np.where(better, head, best), np.where(better, gain, best_gain)
                slope = (_COUNT * along - sums * total_x) * search.inverse(_COUNT * squares - sums * sums)
                kept = slope * sign > 0
                start = (total_x - slope * sums) / _COUNT
                move = np.where(kept, start * search.inverse(slope), move)
                # The scale that is best with the move as it will be stored.
                moved = np.clip(np.rint(move), LEAST_MOVE, _MOST_MOVE)
                slope = (along + moved * total_x) * search.inverse(squares + moved * (2 * sums + moved * _COUNT))
                scale = np.where(kept & (slope * sign > 0), slope, scale)
    return _parts_of(values, best)


def parts_of(values: F32, scale: F32, move: F32) -> Parts:
    """The parts of values [n, 32] whose grids are nearest to scales and moves [n]."""
    return _parts_of(values, _head(scale, move))


def _parts_of(values: F32, head: NDArray[np.uint16]) -> Parts:
    return {"head": head[:, None], "codes": _codes(values, *scales_and_moves(head))}


def scales_and_moves(head: NDArray[np.uint16]) -> tuple[F32, F32]:
    """The scales and moves that heads encode."""
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
    return {"d": d, "z": -LEAST_MOVE - move}


def _fields(parts: Parts) -> Parts:
    """The field that holds scales and moves, where these are among the parts; packed weights keep the field itself."""
    if "d" not in parts:
        return {}
    top = parts["d"].astype("<f2").view(np.uint16) & np.uint16(0xFFFF - MOVE_BITS)
    return {"head": top | (-LEAST_MOVE - parts["z"]).astype(np.uint16)}


# Groups [n, 32], weights of their errors or None for ones, scales [n] -> the least weighted squared error under the scale, and the
# sign (bit 3) and index of the move that leave it.
Search = Callable[[F32, F32 | None, F32], tuple[F32, NDArray[Any]]]


def encode_xs(values: F32, importance: F32 | None = None, search_grids: Search | None = None) -> Parts:
    """The scale, steps, signs and moves that leave the least squared error. importance: of each value, [n, 256].

    The search tries all 144 grids of a group whose scale is near the smallest one that holds the group. A search from a few starts,
    as in `encode`, misses the best grids, which leave 6 % less error (benchmarks/LOG.md). search_grids: a compiled function that
    tries the moves; None for the one in NumPy.
    """
    groups = values.reshape(-1, BLOCK)
    weights = None if importance is None else importance.reshape(groups.shape)
    up, down = np.maximum(groups.max(axis=1), 0), np.maximum(-groups.min(axis=1), 0)
    turned = np.maximum(np.maximum(up, down) / _XS_FURTHEST, np.minimum(up, down) / _XS_NEARER)
    holding = np.maximum((up + down) / _SPAN, turned).astype("<f2").view(np.uint16).astype(np.int32)
    own = (holding + 64 >> 7).reshape(-1, _GROUPS)
    top = own.max(axis=1, keepdims=True)
    # Groups have the eight scales from that of the superblock down: a small group gets a larger one than it needs.
    first = np.maximum(np.maximum(own - _BELOW, top + (_LARGER - _TRIED)), 0)
    tried = np.minimum(first[:, :, None] + np.arange(_TRIED, dtype=np.int32), _INFINITE - 1)
    errors, grids = np.empty(tried.shape, np.float32), np.empty(tried.shape, np.uint8)
    without = np.einsum("gk,gk->g", groups, groups if weights is None else groups * weights)  # of a scale of 0
    for n in range(_TRIED):
        scale = _xs_scales(tried[:, :, n].reshape(-1))
        error, grid = (search_grids or _best_grids)(groups, weights, scale)
        error = np.where(scale > 0, error, without)
        errors[:, :, n], grids[:, :, n] = error.reshape(own.shape), grid.reshape(own.shape)
    best_error = np.full(len(values), np.inf, np.float32)
    best_top, best_tried = top[:, 0], np.zeros(own.shape, np.int64)
    for larger in range(-_BELOW, _LARGER + 1):
        most = np.clip(top + larger, 0, _INFINITE - 1)
        allowed = (tried <= most[:, :, None]) & (tried > most[:, :, None] - 8)
        possible = np.where(allowed, errors, np.float32(np.inf))
        chosen = possible.argmin(axis=2)
        error = np.take_along_axis(possible, chosen[:, :, None], axis=2).sum(axis=(1, 2))
        better = error < best_error
        best_error, best_top = np.where(better, error, best_error), np.where(better, most[:, 0], best_top)
        best_tried = np.where(better[:, None], chosen, best_tried)
    grids = np.take_along_axis(grids, best_tried[:, :, None], axis=2)[:, :, 0]
    scales = np.take_along_axis(tried, best_tried[:, :, None], axis=2)[:, :, 0]
    # What f16 cannot hold stays infinite.
    lost = top[:, 0] >= _INFINITE
    best_top, scales = np.where(lost, _INFINITE, best_top), np.where(lost[:, None], _INFINITE, scales)
    shifts = np.arange(_GROUPS, dtype=np.uint32)
    moves, signs = grids.astype(np.uint32) & 7, grids.astype(np.uint32) >> 3
    head = best_top.astype(np.uint32) | np.bitwise_or.reduce(moves << (8 + 3 * shifts), axis=1)
    below = (best_top[:, None] - scales).astype(np.uint32) | signs << 3
    steps = np.bitwise_or.reduce(below << (4 * shifts), axis=1)
    scale = np.where(signs == 1, -_xs_scales(scales), _xs_scales(scales)).reshape(-1)
    at = _floors(groups * (2 * search.inverse(scale))[:, None]).astype(np.intp) + 256
    codes = _XS_CODES[moves.reshape(-1, 1), at]
    return {"head": head[:, None], "steps": steps[:, None], "codes": codes.reshape(len(values), -1)}


def _best_grids(groups: F32, weights: F32 | None, scale: F32) -> tuple[F32, U8]:
    """The least squared error of groups [n, 32] under scales [n], and the sign (bit 3) and move that leave it."""
    doubled = groups * (2 * search.inverse(scale))[:, None]
    best, found = np.full(len(groups), np.inf, np.float32), np.zeros(len(groups), np.uint8)
    for sign in range(2):
        turned = -doubled if sign else doubled
        floors = _floors(turned)
        rest, at = turned - floors, floors.astype(np.intp) + 256
        for move, misses in enumerate(_XS_MISSES):
            miss = misses.take(at)
            miss += rest
            error = np.einsum("gk,gk->g", miss, miss if weights is None else miss * weights)
            better = error < best
            best, found = np.where(better, error, best), np.where(better, np.uint8(sign << 3 | move), found)
    return best * np.square(scale / 2), found


def _floors(doubled: F32) -> F32:
    return np.clip(np.floor(doubled), -256, 255)


def _xs_scales(eight_bits: NDArray) -> F32:
    """The scales of groups, from their superblock's scale and their steps."""
    return (eight_bits << 7).astype("<u2").view("<f2").astype(np.float32)


def _parts_xs(fields: NDArray) -> Parts:
    """d and z of groups [n, 8]. Below a scale of zero, steps go on from the largest, which is nan."""
    groups = np.arange(_GROUPS, dtype=np.uint32)
    head, own = fields["head"][:, None], fields["steps"][:, None] >> 4 * groups
    scale = ((head & 0xFF) - (own & 7) & 0xFF) << 7 | (own & 8) << 12
    move = (head >> (8 + 3 * groups) & 7).astype(np.int8) * np.int8(2)
    return {"d": scale.astype("<u2").view("<f2"), "z": np.int8(-LEAST_MOVE) - move}


NL4 = Format(
    "nl4_g32",
    np.dtype([("head", "<u2"), ("codes", "u1", 16)]),
    BLOCK,
    encode,
    Affine(1, levels=LEVELS),
    (NIBBLES,),
    _parts,
    _fields,
    planes=(bits(4), lanes("head", "<u2", BLOCK)),
    reader="nl4",
    gguf_type=OWN_GGUF_TYPES | 1,
)
NL4_XS = Format(
    "nl4_xs",
    np.dtype([("head", "<u4"), ("steps", "<u4"), ("codes", "u1", SUPERBLOCK // 2)]),
    SUPERBLOCK,
    encode_xs,
    Affine(1, levels=LEVELS),
    (NIBBLES,),
    _parts_xs,
    planes=(bits(4), lanes("head", "<u4", SUPERBLOCK), lanes("steps", "<u4", SUPERBLOCK)),
    reader="nl4_xs",
    gguf_type=OWN_GGUF_TYPES | 2,
)
NL4_R = replace(NL4_XS, name="nl4_r", reader="nl4_r", gguf_type=OWN_GGUF_TYPES | 3, free_codes=False, rotated=True)

FORMATS = (NL4, NL4_XS, NL4_R)
