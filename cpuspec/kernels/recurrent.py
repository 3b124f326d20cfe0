"""Recurrent layers: a causal convolution and the gated delta rule, on states that are truncated by setting a length.

A slot's memory of a layer is a state for each value head, in tiles of sixteen value columns [keys][16], each with the number of
tokens that it covers, and rings of the rows since then: inputs of the convolution, decays, keys and updates by position. A forward
begins with a tile, does the recorded steps up to its first row again (a scale and a multiply-add of each number, the same
operations as in the step that made the record), and goes on with its own rows. It writes to the state only where it folds. Folding
changes no bit of what follows, so that it may happen anywhere.

A forward of a few rows folds rows that it found, in place: it may end early, and the next one finds tiles of two ages, each right.
One of many rows writes states, rows and inputs to another memory, which takes the place of the slot's when the forward has ended.
"""

from cpuspec.kernels import simd
from cpuspec.kernels.options import compiled
from cpuspec.kernels.pointwise import exp_f32, norm_row, silu_f32, softplus_f32
from cpuspec.kernels.sharing import take

RING = 32  # rows of a ring, by position

_PART = 512  # channels of an item of the convolution


@compiled
def num_convolved(op, state):
    """Items of a convolution."""
    return state.num_rows * ((op.channels + _PART - 1) // _PART)


@compiled
def convolve(op, state, item):
    """Some channels of one row: SiLU of the weighed sum of the last inputs, the oldest first."""
    parts = (op.channels + _PART - 1) // _PART
    row, first = item // parts, item % parts * _PART
    seq = state.sequences[state.sequence_of[row]]
    position, ring = seq.length + row - seq.row, op.channels * 4
    source, target = seq.source + op.inputs_at, seq.target + op.inputs_at
    taps = op.taps
    for at in range(4 * first, 4 * min(op.channels, first + _PART), 64):
        total = simd.splat_f32(0.0)
        for tap in range(taps):
            back = taps - 1 - tap
            x = simd.splat_f32(0.0)
            if row - back >= seq.row:
                x = simd.load_f32(op.rows + (row - back) * op.stride + at)
            elif position >= back:
                x = simd.load_f32(source + (position - back) % RING * ring + at)
                if row == seq.row and source != target:
                    simd.store_f32(target + (position - back) % RING * ring + at, x)
            total = simd.fma(x, simd.load_f32(op.weights + tap * ring + at), total)
        simd.store_f32(op.out + row * op.out_stride + at, silu_f32(total))
        if position > seq.recorded - taps:
            simd.store_f32(target + position % RING * ring + at, simd.load_f32(op.rows + row * op.stride + at))


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
def delta_rows(op, state, item):
    """In place: a query and a key of one row; for the first also the decays and the factors of updates. Records keys and decays."""
    row, head = item // op.key_heads, item % op.key_heads
    seq = state.sequences[state.sequence_of[row]]
    position = seq.length + row - seq.row
    query = op.qkv + row * op.stride + 4 * head * op.key_dims
    key = query + 4 * op.key_heads * op.key_dims
    one = simd.to_float(1)
    _to_length_1(query, op.key_dims, one / simd.sqrt_f32(simd.to_float(op.key_dims)), op.length_eps)
    _to_length_1(key, op.key_dims, one, op.length_eps)
    if position >= seq.recorded:
        kept = seq.target + op.keys_at + 4 * (position % RING * op.key_heads + head) * op.key_dims
        for at in range(0, 4 * op.key_dims, 64):
            simd.store_f32(kept + at, simd.load_f32(key + at))
    if head == 0:
        padded = (op.value_heads + 15) // 16 * 64
        beta, decay = op.beta + row * op.beta_stride, op.decays + row * op.decays_stride
        kept = seq.target + op.decays_at + position % RING * padded
        for at in range(0, padded, 64):
            ones = simd.splat_f32(1.0)
            simd.store_f32(beta + at, ones / (ones + exp_f32(simd.splat_f32(0.0) - simd.load_f32(beta + at))))
            step = softplus_f32(simd.load_f32(decay + at) + simd.load_f32(op.dt + at))
            simd.store_f32(decay + at, exp_f32(simd.load_f32(op.rates + at) * step))
            if position >= seq.recorded:
                simd.store_f32(kept + at, simd.load_f32(decay + at))


@compiled
def delta(op, state, counter, items, thread):
    """The rows of one sequence over one tile of a state. Returns how many items it did."""
    completed, tiles = 0, op.value_dims // 16
    tile = state.scratch + thread * state.scratch_bytes
    while True:
        item = take(counter, items, 1)
        if item == items:
            return completed
        completed += 1
        per_sequence = op.value_heads * tiles
        _delta(op, state.sequences[item // per_sequence], item % per_sequence, tile)


@compiled
def _delta(op, seq, number, tile):
    """number: of the tile, [value heads][value dims / 16]; tile: room for one."""
    size, tiles = 64 * op.key_dims, op.value_dims // 16
    head = number // tiles
    key_head = head % op.key_heads if op.tiled != 0 else head // (op.value_heads // op.key_heads)
    folded_at, state_at = op.folded_at + 8 * number, op.state_at + number * size
    begin = simd.peek_i64(seq.source + folded_at) if seq.length > 0 else 0
    end = seq.length + seq.end_row - seq.row
    if seq.source != seq.target or seq.length == 0:
        simd.poke_i64(seq.target + folded_at, 0)
    for at in range(0, size, 64):
        x = simd.splat_f32(0.0)
        if begin > 0:
            x = simd.load_f32(seq.source + state_at + at)
        simd.store_f32(tile + at, x)
    padded = (op.value_heads + 15) // 16 * 64
    values_row = 4 * op.value_heads * op.value_dims
    update_at = op.updates_at + 64 * number
    keys_row = 4 * op.key_heads * op.key_dims
    for position in range(begin, seq.length):
        if position == seq.fold and position > begin:
            _write(seq.target + folded_at, position, seq.target + state_at, tile, size)
        slot = position % RING
        decay = simd.splat_f32(simd.peek_f32(seq.source + op.decays_at + slot * padded + 4 * head))
        key = seq.source + op.keys_at + slot * keys_row + 4 * key_head * op.key_dims
        update = simd.load_f32(seq.source + update_at + slot * values_row)
        for i in range(op.key_dims):
            at = tile + 64 * i
            k = simd.splat_f32(simd.peek_f32(key + 4 * i))
            simd.store_f32(at, simd.fma(k, update, simd.load_f32(at) * decay))
    for row in range(seq.row, seq.end_row):
        position = seq.length + row - seq.row
        if position == seq.fold and (position > begin or seq.source != seq.target) and position > 0:
            _write(seq.target + folded_at, position, seq.target + state_at, tile, size)
        query = op.qkv + row * op.stride + 4 * key_head * op.key_dims
        key = query + 4 * op.key_heads * op.key_dims
        value = simd.load_f32(op.qkv + row * op.stride + 2 * keys_row + 64 * number)
        decay = simd.splat_f32(simd.peek_f32(op.decays + row * op.decays_stride + 4 * head))
        beta = simd.splat_f32(simd.peek_f32(op.beta + row * op.beta_stride + 4 * head))
        a = b = c = d = simd.splat_f32(0.0)
        for i in range(0, op.key_dims, 4):
            at, k = tile + 64 * i, key + 4 * i
            s, t = simd.load_f32(at) * decay, simd.load_f32(at + 64) * decay
            u, v = simd.load_f32(at + 128) * decay, simd.load_f32(at + 192) * decay
            simd.store_f32(at, s)
            simd.store_f32(at + 64, t)
            simd.store_f32(at + 128, u)
            simd.store_f32(at + 192, v)
            a = simd.fma(s, simd.splat_f32(simd.peek_f32(k)), a)
            b = simd.fma(t, simd.splat_f32(simd.peek_f32(k + 4)), b)
            c = simd.fma(u, simd.splat_f32(simd.peek_f32(k + 8)), c)
            d = simd.fma(v, simd.splat_f32(simd.peek_f32(k + 12)), d)
        update = (value - ((a + b) + (c + d))) * beta
        a = b = c = d = simd.splat_f32(0.0)
        for i in range(0, op.key_dims, 4):
            at, k, q = tile + 64 * i, key + 4 * i, query + 4 * i
            s = simd.fma(simd.splat_f32(simd.peek_f32(k)), update, simd.load_f32(at))
            t = simd.fma(simd.splat_f32(simd.peek_f32(k + 4)), update, simd.load_f32(at + 64))
            u = simd.fma(simd.splat_f32(simd.peek_f32(k + 8)), update, simd.load_f32(at + 128))
            v = simd.fma(simd.splat_f32(simd.peek_f32(k + 12)), update, simd.load_f32(at + 192))
            simd.store_f32(at, s)
            simd.store_f32(at + 64, t)
            simd.store_f32(at + 128, u)
            simd.store_f32(at + 192, v)
            a = simd.fma(s, simd.splat_f32(simd.peek_f32(q)), a)
            b = simd.fma(t, simd.splat_f32(simd.peek_f32(q + 4)), b)
            c = simd.fma(u, simd.splat_f32(simd.peek_f32(q + 8)), c)
            d = simd.fma(v, simd.splat_f32(simd.peek_f32(q + 12)), d)
        simd.store_f32(op.out + row * op.out_stride + 64 * number, (a + b) + (c + d))
        if position >= seq.recorded:
            simd.store_f32(seq.target + update_at + position % RING * values_row, update)
    if end == seq.fold and end > seq.length:
        _write(seq.target + folded_at, end, seq.target + state_at, tile, size)


@compiled
def _write(folded_at, position, state_at, tile, size):
    """Fold: the tile is the state after the tokens before `position`."""
    for at in range(0, size, 64):
        simd.store_f32(state_at + at, simd.load_f32(tile + at))
    simd.poke_i64(folded_at, position)


@compiled
def delta_norm(op, item):
    """The RMS norm of one value head's results."""
    row, head = item // op.value_heads, item % op.value_heads
    norm_row(op.out + row * op.out_stride + 4 * head * op.value_dims, op.norm, op.eps, op.value_dims)
