"""Formats of this project: four bits on a grid of sixteen steps that is denser near zero and may change its sign and be moved.

nl4_g32 has blocks of 32, 4.5 bits:

  head: a word whose low four bits are the move of the grid, from -7 to 8, and whose other twelve are the top of an f16, the scale
  16 bytes of codes: nibbles in the order of q4_0. A value is scale * (LEVELS[code] + move).

nl4_xs has superblocks of 256, eight groups of 32, 4.25 bits:

  head: 32 bits. The low eight are a scale, bits 7 to 14 of an f16. Three more for each group are its move: -7, -5, up to 7.
  steps: four bits for each group. Three say how many steps its scale is below that of the superblock, and the top one is the sign.
  A step is one less in the eight bits of the scale: an octave has eight steps.
  128 bytes of codes: 16 for each group, as above

q4_k's linear grid with its minimum takes as many bytes as nl4_g32, and so does iq4_nl's grid, which cannot move; iq4_xs takes as
many as nl4_xs. These two formats leave less error (benchmarks/DECISIONS.md#nl4_g32, benchmarks/DECISIONS.md#nl4_xs). The grid
reaches further on one side; the sign of the scale chooses which.

Levels are whole numbers from -32 to 31. Kernels look them up by one shuffle, and processors without dot products of bytes may add
two pairs of products in 16 bits: iq4's levels, up to 127, have to be multiplied in two halves. The table was found by Lloyd's
algorithm on values of normal and of t distributions.
"""

import numpy as np
from numpy.typing import NDArray

from cpuspec.formats.blocks32 import BLOCK, NIBBLES
from cpuspec.formats.format import F32, OWN_GGUF_TYPES, U8, Affine, Format, Parts
from cpuspec.formats.kquants import SUPERBLOCK
from cpuspec.formats.packing import bits, lanes
from cpuspec.formats.search import IN_NUMPY, Searches, inverse

LEVELS = (-32, -26, -20, -16, -12, -8, -5, -2, 0, 3, 6, 9, 12, 16, 21, 28)
MOVE_BITS = 15  # mask of the low bits of a head, which hold the move less LEAST_MOVE
LEAST_MOVE = -7  # in all three formats
_MOST_MOVE = LEAST_MOVE + MOVE_BITS
MOVES = tuple(range(LEAST_MOVE, _MOST_MOVE + 1))
XS_MOVES = MOVES[: MOVE_BITS + 1 : 2]

_SPAN = np.float32(LEVELS[-1] - LEVELS[0])

_GROUPS = SUPERBLOCK // BLOCK
# How far the grid reaches on either side with its furthest moves.
_XS_FURTHEST, _XS_NEARER = np.float32(-LEVELS[0] - LEAST_MOVE), np.float32(LEVELS[-1] + XS_MOVES[-1])
_INFINITE = 0xF8  # the smallest scale of eight bits that is inf or nan
# Steps of a scale of nl4_xs. A search tries _TRIED scales of a group, from _BELOW steps below the one that just holds it, and for a
# superblock up to _LARGER steps above that.
_BELOW, _TRIED, _LARGER = 4, 9, 2

# By floor(2 x) + 80, the code whose level is nearest to x: midpoints of levels are whole numbers there. And the same by
# floor(2 x) + 256 for each move of nl4_xs, with the levels moved.
_MIDPOINTS = np.add(LEVELS[:-1], LEVELS[1:])
_NEAREST = np.searchsorted(_MIDPOINTS, np.arange(-80, 80), side="right").astype(np.uint8)
_XS_CODES = np.array([np.searchsorted(_MIDPOINTS + 2 * move, np.arange(-256, 256), side="right") for move in XS_MOVES], np.uint8)


def encode(values: F32, weights: F32 | None = None, find: Searches = IN_NUMPY) -> Parts:
    """The scale, of either sign, and the move that leave the least squared error found. weights: of errors, [n, 32]."""
    head = _head(*find.moved(values, weights, LEVELS, MOVES, True))
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
    doubled = np.floor(values * (2 * inverse(scale))[:, None] - (2 * move)[:, None])
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


def encode_xs(values: F32, weights: F32 | None = None, find: Searches = IN_NUMPY) -> Parts:
    """The scale, steps, signs and moves that leave the least squared error. weights: of errors, [n, 256].

    The search tries all 144 grids of a group whose scale is near the smallest one that holds the group
    (benchmarks/DECISIONS.md#nl4_xs).
    """
    groups = values.reshape(-1, BLOCK)
    weights = None if weights is None else weights.reshape(groups.shape)
    up, down = np.maximum(groups.max(axis=1), 0), np.maximum(-groups.min(axis=1), 0)
    turned = np.maximum(np.maximum(up, down) / _XS_FURTHEST, np.minimum(up, down) / _XS_NEARER)
    holding = np.maximum((up + down) / _SPAN, turned).astype("<f2").view(np.uint16).astype(np.int32)
    own = (holding + 64 >> 7).reshape(-1, _GROUPS)
    top = own.max(axis=1, keepdims=True)
    # Groups have the eight scales from that of the superblock down: a small group gets a larger one than it needs.
    first = np.maximum(np.maximum(own - _BELOW, top + (_LARGER - _TRIED)), 0)
    tried = np.minimum(first[:, :, None] + np.arange(_TRIED, dtype=np.int32), _INFINITE - 1)
    errors, grids = np.empty(tried.shape, np.float32), np.empty(tried.shape, np.uint8)
    without = np.einsum("gk,gk->g", groups, groups if weights is None else groups * weights)  # the error under a scale of 0
    for n in range(_TRIED):
        scale = _xs_scales(tried[:, :, n].reshape(-1))
        error, grid = find.moves_of_scales(groups, weights, scale, LEVELS, XS_MOVES)
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
    at = _floors(groups * (2 * inverse(scale))[:, None]).astype(np.intp) + 256
    codes = _XS_CODES[moves.reshape(-1, 1), at]
    return {"head": head[:, None], "steps": steps[:, None], "codes": codes.reshape(len(values), -1)}


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
    None,
    Affine(1, levels=LEVELS),
    (NIBBLES,),
    _parts,
    _fields,
    planes=(bits(4), lanes("head", "<u2", BLOCK)),
    reader="nl4",
    gguf_type=OWN_GGUF_TYPES | 1,
    search=encode,
)
NL4_XS = Format(
    "nl4_xs",
    np.dtype([("head", "<u4"), ("steps", "<u4"), ("codes", "u1", SUPERBLOCK // 2)]),
    SUPERBLOCK,
    None,
    Affine(1, levels=LEVELS),
    (NIBBLES,),
    _parts_xs,
    planes=(bits(4), lanes("head", "<u4", SUPERBLOCK), lanes("steps", "<u4", SUPERBLOCK)),
    reader="nl4_xs",
    gguf_type=OWN_GGUF_TYPES | 2,
    search=encode_xs,
)
FORMATS = (NL4, NL4_XS)
