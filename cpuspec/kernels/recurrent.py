"""Recurrent layers: a causal convolution and a recurrence, on states that are truncated by setting a length.

The gated delta rule and Mamba-2 are one recurrence: of a state S of each value head, S = decay S + key update^T, result S^T query.
update = factor (value - decay S^T key) with the correction of the delta rule, and factor value without it.

A slot's memory of a layer is a state for each value head, in tiles of sixteen value columns [keys][16], each with the number of
tokens that it covers, and rings of the rows since then: inputs of the convolution, decays, keys and updates by position. A forward
begins with a tile, does the recorded steps up to its first row again (a scale and a multiply-add of each number, the same
operations as in the step that made the record), and goes on with its own rows. It writes to the state only where it folds. Folding
changes no bit of what follows, so that it may happen anywhere.

A forward of a few rows folds rows of earlier forwards, in place. It may end early: some tiles then cover more tokens than others,
and each tile's count says how many. A forward of many rows writes states, rows and inputs to a spare buffer, which the slot takes
when the forward has ended. An empty slot is written in place. `backends.recurrent_memory` decides this. `model.recurrence` does the
same with arrays.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np

from cpuspec.kernels import machine_code, simd
from cpuspec.kernels.options import compiled, inlined
from cpuspec.kernels.pointwise import exp_f32, silu_f32, softplus_f32

RING = 32  # rows of a ring of decays, keys and updates, by position

_TILE = 64  # bytes of one row of a tile
_PART = 512  # channels of an item of the convolution


@compiled
def num_convolved(op, state):
    """Items of a convolution."""
    return state.num_rows * ((op.channels + _PART - 1) // _PART)


@compiled
def convolve(op, state, item):
    """Some channels of one row: the weighed sum of the last inputs, the oldest first, with what `layout` names besides."""
    parts = (op.channels + _PART - 1) // _PART
    row, first = item // parts, item % parts * _PART
    seq = state.sequences[state.sequence_of[row]]
    position, row_bytes = seq.length + row - seq.row, op.channels * 4
    source, target = seq.source + op.inputs_at, seq.target + op.inputs_at
    taps = op.taps
    for at in range(4 * first, 4 * min(op.channels, first + _PART), 64):
        total = x = simd.splat_f32(0.0)
        if op.bias != 0:
            total = simd.load_f32(op.bias + at)
        for tap in range(taps):
            back = taps - 1 - tap
            x = simd.splat_f32(0.0)
            if row - back >= seq.row:
                x = simd.load_f32(op.rows + (row - back) * op.stride + at)
                if op.factors != 0:
                    x = x * simd.load_f32(op.factors + (row - back) * op.stride + at)
            elif position >= back:
                x = simd.load_f32(source + (position - back) % op.ring * row_bytes + at)
                if row == seq.row and source != target and position - back > seq.recorded - taps:
                    simd.store_f32(target + (position - back) % op.ring * row_bytes + at, x)
            total = simd.fma(x, simd.load_f32(op.weights + tap * row_bytes + at), total)
        if position > seq.recorded - taps:
            simd.store_f32(target + position % op.ring * row_bytes + at, x)
        total = simd.load_f32(op.outer + row * op.stride + at) * total if op.outer != 0 else silu_f32(total)
        simd.store_f32(op.out + row * op.out_stride + at, total)


@compiled
def _to_length_1(head, dims, factor, eps):
    """In place: a head times factor over the root of its squared length and eps."""
    total = simd.splat_f32(0.0)
    for at in range(head, head + 4 * dims, 64):
        x = simd.load_f32(at)
        total = simd.fma(x, x, total)
    length = simd.sqrt_f32(simd.sum_lanes(total) + eps)
    scale = simd.splat_f32(factor / length)
    for at in range(head, head + 4 * dims, 64):
        simd.store_f32(at, simd.load_f32(at) * scale)


@compiled
def record(op, state, item):
    """Record a key of one row. The delta rule first brings it and the query to their lengths, in place.

    The first key's item also writes the decays and the factors of updates, and records the decays.
    """
    row, head = item // op.key_heads, item % op.key_heads
    seq = state.sequences[state.sequence_of[row]]
    position = seq.length + row - seq.row
    key_at = row * op.stride + 4 * head * op.key_dims
    if op.corrects != 0:
        one = simd.to_float(1)
        _to_length_1(op.queries + key_at, op.key_dims, one / simd.sqrt_f32(simd.to_float(op.key_dims)), op.length_eps)
        _to_length_1(op.keys + key_at, op.key_dims, one, op.length_eps)
    if position >= seq.recorded:
        kept = seq.target + op.keys_at + 4 * (position % RING * op.key_heads + head) * op.key_dims
        _copy(op.keys + key_at, kept, 4 * op.key_dims)
    if head == 0:
        padded = (op.value_heads + 15) // 16 * 64
        steps, factor = op.steps + row * op.steps_stride, op.factors + row * op.factors_stride
        decay = op.decays + row * op.decays_stride
        for at in range(0, padded, 64):
            x = simd.load_f32(steps + at)
            if op.dt != 0:
                x = x + simd.load_f32(op.dt + at)
            step = simd.max_f32(softplus_f32(x), simd.splat_f32(op.least))
            simd.store_f32(decay + at, exp_f32(simd.load_f32(op.rates + at) * step))
            if op.corrects != 0:
                ones = simd.splat_f32(1.0)
                step = ones / (ones + exp_f32(simd.splat_f32(0.0) - simd.load_f32(factor + at)))
            simd.store_f32(factor + at, step)
        if position >= seq.recorded:
            _copy(decay, seq.target + op.decays_at + position % RING * padded, padded)


@inlined
def _stepped(at, decay, key, update):
    """Sixteen numbers of a state after a step, of one number of the key."""
    return simd.fma(simd.splat_f32(simd.peek_f32(key)), update, simd.load_f32(at) * decay)


@compiled
def _step(tile, dims, decay, keys, update):
    """Change a tile, f32 [dims, 16], by a record."""
    for k in range(dims):
        at = tile + _TILE * k
        simd.store_f32(at, _stepped(at, decay, keys + 4 * k, update))


@compiled
def _recall(tile, dims, decay, keys):
    """The product of a decayed tile and a key, [16]. dims: a multiple of 4."""
    a = b = c = d = simd.splat_f32(0.0)
    for k in range(0, dims, 4):
        at, key = tile + _TILE * k, keys + 4 * k
        a = simd.fma(simd.load_f32(at) * decay, simd.splat_f32(simd.peek_f32(key)), a)
        b = simd.fma(simd.load_f32(at + _TILE) * decay, simd.splat_f32(simd.peek_f32(key + 4)), b)
        c = simd.fma(simd.load_f32(at + 2 * _TILE) * decay, simd.splat_f32(simd.peek_f32(key + 8)), c)
        d = simd.fma(simd.load_f32(at + 3 * _TILE) * decay, simd.splat_f32(simd.peek_f32(key + 12)), d)
    return (a + b) + (c + d)


@compiled
def _step_and_answer(tile, dims, decay, keys, update, queries):
    """`_step`, and then the product of the tile and a query, [16]. dims: a multiple of 4."""
    a = b = c = d = simd.splat_f32(0.0)
    for k in range(0, dims, 4):
        at, key, query = tile + _TILE * k, keys + 4 * k, queries + 4 * k
        x = _stepped(at, decay, key, update)
        y = _stepped(at + _TILE, decay, key + 4, update)
        z = _stepped(at + 2 * _TILE, decay, key + 8, update)
        w = _stepped(at + 3 * _TILE, decay, key + 12, update)
        simd.store_f32(at, x)
        simd.store_f32(at + _TILE, y)
        simd.store_f32(at + 2 * _TILE, z)
        simd.store_f32(at + 3 * _TILE, w)
        a = simd.fma(x, simd.splat_f32(simd.peek_f32(query)), a)
        b = simd.fma(y, simd.splat_f32(simd.peek_f32(query + 4)), b)
        c = simd.fma(z, simd.splat_f32(simd.peek_f32(query + 8)), c)
        d = simd.fma(w, simd.splat_f32(simd.peek_f32(query + 12)), d)
    return (a + b) + (c + d)


@compiled
def recur(op, state, item, tile):
    """The rows of one sequence over one tile of a state. tile: room for it."""
    size, tiles = _TILE * op.key_dims, op.value_dims // 16
    seq, number = state.sequences[item // (op.value_heads * tiles)], item % (op.value_heads * tiles)
    head = number // tiles
    key_head = head % op.key_heads if op.tiled != 0 else head // (op.value_heads // op.key_heads)
    folded_at, state_at = seq.target + op.folded_at + 8 * number, seq.target + op.state_at + number * size
    begin = 0
    if seq.length > 0:
        begin = simd.peek_i64(seq.source + op.folded_at + 8 * number)
    if seq.source != seq.target or seq.length == 0:
        simd.poke_i64(folded_at, 0)
    _read_tile(seq.source + op.state_at + number * size, begin, tile, size)
    padded, keys_row = (op.value_heads + 15) // 16 * 64, 4 * op.key_heads * op.key_dims
    updates_row = 4 * op.value_heads * op.value_dims
    key_at, update_at = 4 * key_head * op.key_dims, op.updates_at + 64 * number
    for position in range(begin, seq.length):
        if position == seq.fold and position > begin:
            _fold(tile, size, state_at, folded_at, position)
        slot = position % RING
        decay = simd.splat_f32(simd.peek_f32(seq.source + op.decays_at + slot * padded + 4 * head))
        update = simd.load_f32(seq.source + update_at + slot * updates_row)
        _step(tile, op.key_dims, decay, seq.source + op.keys_at + slot * keys_row + key_at, update)
    for row in range(seq.row, seq.end_row):
        position = seq.length + row - seq.row
        if position == seq.fold and (position > begin or seq.source != seq.target) and position > 0:
            _fold(tile, size, state_at, folded_at, position)
        keys, queries = op.keys + row * op.stride + key_at, op.queries + row * op.stride + key_at
        decay = simd.splat_f32(simd.peek_f32(op.decays + row * op.decays_stride + 4 * head))
        update = simd.load_f32(op.values + row * op.stride + 64 * number)
        if op.corrects != 0:
            update = update - _recall(tile, op.key_dims, decay, keys)
        update = update * simd.splat_f32(simd.peek_f32(op.factors + row * op.factors_stride + 4 * head))
        answer = _step_and_answer(tile, op.key_dims, decay, keys, update, queries)
        simd.store_f32(op.out + row * op.out_stride + 64 * number, answer)
        if position >= seq.recorded:
            simd.store_f32(seq.target + update_at + position % RING * updates_row, update)


def write_states(
    places: Mapping[str, int], key_heads: Sequence[int], value_dims: int, num_key_heads: int, key_dims: int, length: int, to: int
) -> None:
    """Write the states of a layer after the first `length` tokens of a slot, tile after tile, to the address `to`.

    Does what a forward would do before its first row. places: the addresses of the parts of the slot's memory. key_heads: of each
    value head, the key head that it reads.
    """
    of_values = np.array(key_heads)
    parts = [places[name] for name in ("state_at", "folded_at", "decays_at", "keys_at", "updates_at")]
    shape = len(key_heads), value_dims // 16, num_key_heads, key_dims
    _write_states_function()(*parts, *shape, of_values.ctypes.data, length, to)


@cache
def _write_states_function() -> Callable[..., None]:
    return machine_code.function(machine_code.address("write_states", 12, lambda: _write_states), 12)


def _write_states(states, folded, decays, keys, updates, value_heads, tiles, num_key_heads, key_dims, key_heads, length, to):
    size, padded, keys_row = _TILE * key_dims, (value_heads + 15) // 16 * 64, 4 * num_key_heads * key_dims
    for number in range(value_heads * tiles):
        tile, begin, head = to + number * size, simd.peek_i64(folded + 8 * number), number // tiles
        _read_tile(states + number * size, begin, tile, size)
        key_at = keys + 4 * key_dims * simd.peek_i64(key_heads + 8 * head)
        for position in range(begin, length):
            slot = position % RING
            update = simd.load_f32(updates + 64 * (number + slot * value_heads * tiles))
            decay = simd.splat_f32(simd.peek_f32(decays + slot * padded + 4 * head))
            _step(tile, key_dims, decay, key_at + slot * keys_row, update)


@compiled
def _read_tile(state, length, tile, size):
    """Copy a tile of a state that covers `length` tokens; it is zeros where there are none."""
    if length > 0:
        _copy(state, tile, size)
    else:
        for at in range(tile, tile + size, 64):
            simd.store_f32(at, simd.splat_f32(0.0))


@compiled
def _fold(tile, size, state_at, folded_at, position):
    """Write a state down: the tile is that after the tokens before `position`."""
    _copy(tile, state_at, size)
    simd.poke_i64(folded_at, position)


@compiled
def _copy(source, to, size):
    for at in range(0, size, 64):
        simd.store_f32(to + at, simd.load_f32(source + at))


@compiled
def finish_heads(op, item):
    """In place, of one group of a row: rows + skip * values of each head, times silu(gate), then an RMS norm times weight."""
    row, group = item // op.groups, item % op.groups
    out, values, gate = op.rows + row * op.stride, op.values + row * op.values_stride, op.gate + row * op.gate_stride
    size, weight = 4 * op.features // op.groups, op.weight + group * op.weight_bytes
    first, squares = group * size, simd.splat_f32(0.0)
    for at in range(first, first + size, 64):
        y = simd.load_f32(out + at)
        if op.skip != 0:
            y = simd.fma(simd.splat_f32(simd.peek_f32(op.skip + at // (4 * op.dims) * 4)), simd.load_f32(values + at), y)
        if op.gate != 0:
            y = y * silu_f32(simd.load_f32(gate + at))
        squares = simd.fma(y, y, squares)
        simd.store_f32(out + at, y)
    if op.weight != 0:
        mean = simd.sum_lanes(squares) / simd.to_float(size // 4)
        factor = simd.splat_f32(simd.to_float(1) / simd.sqrt_f32(mean + op.eps))
        for at in range(0, size, 64):
            simd.store_f32(out + first + at, simd.load_f32(out + first + at) * factor * simd.load_f32(weight + at))
