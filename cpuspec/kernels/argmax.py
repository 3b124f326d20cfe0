"""The largest logit of each row of a batch, found by the threads that compute the logits: `peak` of a piece, `pick` of all."""

import numpy as np

from cpuspec.kernels import simd
from cpuspec.kernels.options import compiled
from cpuspec.kernels.sharing import PIECES, piece, share

MOST_ROWS = 64  # whose largest logits are looked for, as those of a batch; of more, as of a text that is read, most ask for none

_LOWEST = np.float32(-np.inf)


@compiled
def peaks_of_row(state, row, threads):
    """Address of the peaks of a row's pieces, f32 [threads, PIECES]."""
    return state.peaks + 4 * row * PIECES * threads


@compiled
def peak(logits, first, end, vocab):
    """The largest of a row's logits in tiles first..end; nan if there is one. Lanes beyond the vocabulary are not looked at."""
    lowest = simd.splat_f32(-np.inf)
    a, b, c, d = lowest, lowest, lowest, lowest
    whole = min(end, vocab // simd.LANES)
    tile = first
    while tile + 4 <= whole:  # four at a time: each waits for the one before
        at = logits + 64 * tile
        a, b = simd.max_f32(a, simd.load_f32(at)), simd.max_f32(b, simd.load_f32(at + 64))
        c, d = simd.max_f32(c, simd.load_f32(at + 128)), simd.max_f32(d, simd.load_f32(at + 192))
        tile += 4
    while tile < end:
        x = simd.first_lanes(simd.load_f32(logits + 64 * tile), simd.int32(vocab - simd.LANES * tile), lowest)
        a = simd.max_f32(a, x)
        tile += 1
    return simd.max_lanes(simd.max_f32(simd.max_f32(a, b), simd.max_f32(c, d)))


@compiled
def pick(op, state, threads):
    """Write the lowest id of each row's largest logit."""
    for row in range(state.num_picked):
        peaks, largest, first = peaks_of_row(state, row, threads), _LOWEST, 0
        for owner in range(threads):
            start, tiles = share(op.tiles, owner, threads)
            number = 0
            while piece(tiles, number) < tiles:
                other = simd.peek_f32(peaks + 4 * (owner * PIECES + number))
                if not (other <= largest or simd.is_nan(largest)):
                    largest, first = other, start + piece(tiles, number)
                number += 1
        id = -1
        if not simd.is_nan(largest - largest):  # finite
            id = _find(state.logits + row * op.stride, first, largest)
        state.picked[row] = simd.int32(id)


@compiled
def _find(logits, tile, value):
    """The id of the first of a row's logits, from a tile on, that is `value`; there is one."""
    while True:
        lane = simd.first_equal(simd.load_f32(logits + 64 * tile), simd.splat_f32(value))
        if lane < simd.LANES:
            return simd.LANES * tile + lane
        tile += 1
