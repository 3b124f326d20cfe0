"""Mixtures of experts between their linear layers: a router's choice, the segments that it makes, and the sum of the results.

A pair is a row and one of the experts that it goes through. Pairs lie expert by expert, those of one expert in the order of their
rows: a segment, which a linear layer multiplies with the expert's tiles. Results are summed for each row in the order of its
choice, so that a row's bits depend on its own inputs alone, whatever rows share its experts.
"""

import numpy as np

from cpuspec.kernels import simd
from cpuspec.kernels.options import compiled
from cpuspec.kernels.pointers import address
from cpuspec.kernels.pointwise import exp_f32, rows_of_block
from cpuspec.kernels.products import BLOCK_ROWS

_LOWEST = np.float32(-np.inf)

# How a router turns its logits into scores.
SOFTMAX, SIGMOID, CHOSEN = range(3)


@compiled
def _softmax(at, count):
    """In place, of `count` numbers; those that fill up the last vector become 0."""
    end = at + (count + 15) // 16 * 64
    for rest in range(at + 4 * count, end, 4):
        simd.poke_f32(rest, _LOWEST)
    most = simd.splat_f32(-np.inf)
    for here in range(at, end, 64):
        most = simd.max_f32(most, simd.load_f32(here))
    top, total = simd.splat_f32(simd.max_lanes(most)), simd.splat_f32(0.0)
    for here in range(at, end, 64):
        power = exp_f32(simd.load_f32(here) - top)
        simd.store_f32(here, power)
        total = total + power
    whole = simd.splat_f32(simd.sum_lanes(total))
    for here in range(at, end, 64):
        simd.store_f32(here, simd.load_f32(here) / whole)


@compiled
def _keep_groups(op, ranks):
    """Leave the ranks of experts of the groups whose two best have the largest sums; all others become -inf."""
    size, kept = op.count // op.groups, ranks + 4 * op.count  # behind the ranks, a number for each group
    for group in range(op.groups):
        best = second = _LOWEST
        for at in range(ranks + 4 * group * size, ranks + 4 * (group + 1) * size, 4):
            rank = simd.peek_f32(at)
            if rank > best:
                best, second = rank, best
            elif rank > second:
                second = rank
        simd.poke_f32(kept + 4 * group, best + second)
    for group in range(op.groups):
        own, before = simd.peek_f32(kept + 4 * group), 0
        for other in range(op.groups):
            sum_of_other = simd.peek_f32(kept + 4 * other)
            if sum_of_other > own or (sum_of_other == own and other < group):
                before += 1
        if before >= op.groups_used:
            for at in range(ranks + 4 * group * size, ranks + 4 * (group + 1) * size, 4):
                simd.poke_f32(at, _LOWEST)


@compiled
def route(op, state, row):
    """Choose a row's experts, the best first, and their factors. The last row that is done makes the segments of all."""
    scores = op.logits + row * op.stride
    ranks = scores + op.stride // 2
    if op.score == SOFTMAX:
        _softmax(scores, op.count)
    elif op.score == SIGMOID:
        one = simd.splat_f32(1.0)
        for at in range(scores, scores + 4 * op.count, 64):
            simd.store_f32(at, one / (one + exp_f32(simd.splat_f32(0.0) - simd.load_f32(at))))
    for at in range(0, 4 * op.count, 4):
        shift = simd.peek_f32(op.shift + at) if op.shift != 0 else simd.to_float(0)
        simd.poke_f32(ranks + at, simd.peek_f32(scores + at) + shift)
    if op.groups > 1:
        _keep_groups(op, ranks)
    factors = op.factors + 64 * row * ((op.used + 15) // 16)
    for slot in range(op.used):
        best, most = 0, simd.peek_f32(ranks)
        for expert in range(1, op.count):
            rank = simd.peek_f32(ranks + 4 * expert)
            if rank > most:
                best, most = expert, rank
        simd.poke_f32(ranks + 4 * best, _LOWEST)
        state.chosen[row * op.used + slot] = best
        simd.poke_f32(factors + 4 * slot, simd.peek_f32(scores + 4 * best))
    if op.score == CHOSEN:
        _softmax(factors, op.used)
    if op.normalised != 0:
        total = simd.to_float(0)
        for slot in range(op.used):
            total = total + simd.peek_f32(factors + 4 * slot)
        total = max(total, op.least_sum)
        for slot in range(op.used):
            simd.poke_f32(factors + 4 * slot, simd.peek_f32(factors + 4 * slot) / total)
    for slot in range(op.used):
        scale = op.scale
        if op.weights != 0:
            scale = scale * simd.peek_f32(op.weights + 4 * state.chosen[row * op.used + slot])
        simd.poke_f32(factors + 4 * slot, simd.peek_f32(factors + 4 * slot) * scale)
    if simd.fetch_add(address(state.routed), 1) == state.num_rows - 1:
        state.routed.rows = 0
        _segment(op, state)


@compiled
def _segment(op, state):
    """Sort the pairs by expert, and list the segments."""
    count, pairs = op.count, state.num_rows * op.used
    for expert in range(count):
        state.of_expert[expert] = 0
    for pair in range(pairs):
        state.of_expert[state.chosen[pair]] += 1
    number = first = 0
    for turn in range(count if op.table == 0 else 2 * count):  # those in memory before those that are waited for
        expert = turn % count
        if op.table != 0 and (simd.peek_i64(op.table + 8 * expert) != 0) != (turn < count):
            continue
        rows = state.of_expert[expert]
        state.of_expert[expert] = first
        if rows > 0:
            segment = state.segments[number]
            segment.expert, segment.first, segment.rows = expert, first, rows
            for pair in range(first, first + rows):
                place = state.pairs[pair]
                place.block = first + (pair - first) // BLOCK_ROWS * BLOCK_ROWS
                place.block_rows = min(BLOCK_ROWS, first + rows - place.block)
            number += 1
            first += rows
    for at in range(pairs):
        expert = state.chosen[at]
        pair = state.of_expert[expert]
        state.of_expert[expert] = pair + 1
        state.pair_of[at] = pair
        state.pairs[pair].row = at // op.used
    state.num_segments, state.first_pair, state.num_pairs = number, 0, pairs
    state.expert_bytes += number * op.bytes


@compiled
def gather(op, state, pair):
    """Copy a row's activations to where those of one of its pairs lie."""
    place = state.pairs[pair]
    top, rows, to_rows = place.row // BLOCK_ROWS * BLOCK_ROWS, rows_of_block(place.row, state.num_rows), place.block_rows
    row, to_row = place.row - top, pair - place.block
    for n in range(op.num_copies):
        copy = op.copies[n]
        for step in range(copy.steps):
            source = copy.source + top * copy.row_bytes + step * rows * copy.step_bytes
            to = copy.to + place.block * copy.row_bytes + step * to_rows * copy.step_bytes
            for piece in range(copy.pieces):
                for at in range(0, copy.size, 64):
                    numbers = simd.load_f32(source + (piece * rows + row) * copy.size + at)
                    simd.store_f32(to + (piece * to_rows + to_row) * copy.size + at, numbers)
            source, to = source + copy.pieces * rows * copy.size, to + copy.pieces * to_rows * copy.size
            for word in range(copy.words):
                simd.poke_f32(to + (word * to_rows + to_row) * 4, simd.peek_f32(source + (word * rows + row) * 4))


@compiled
def combine(op, state, row, first, end):
    """Of numbers first..end of a row, the weighed outputs of its pairs and those of the part that all rows go through.

    They are added to what is there where the operation `adds`.
    """
    x, factors = op.rows + row * op.stride, op.factors + 64 * row * ((op.used + 15) // 16)
    shared, weight = op.shared + row * op.shared_stride, simd.splat_f32(1.0)
    if op.weights != 0:
        one = simd.splat_f32(1.0)
        weight = one / (one + exp_f32(simd.splat_f32(0.0) - simd.splat_f32(simd.peek_f32(op.weights + row * op.weights_stride))))
    scale = simd.splat_f32(op.scale)
    for at in range(4 * first, 4 * end, 64):
        total = simd.splat_f32(0.0)
        for slot in range(op.used):
            output = op.outputs + state.pair_of[row * op.used + slot] * op.outputs_stride
            total = simd.fma(simd.splat_f32(simd.peek_f32(factors + 4 * slot)), simd.load_f32(output + at), total)
        if op.shared != 0:
            total = simd.fma(weight, simd.load_f32(shared + at), total)
        if op.adds != 0:
            simd.store_f32(x + at, simd.fma(scale, total, simd.load_f32(x + at)))
        else:
            simd.store_f32(x + at, scale * total)
