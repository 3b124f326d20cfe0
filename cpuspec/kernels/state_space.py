"""Recurrent layers: causal convolutions over the columns of rows, and matrices that each row decays and adds to.

A slot keeps, behind its keys and values, a header and for each recurrent layer a ring of the convolution's last inputs, the layer's
state after the first `folded` tokens, and a ring of records of the tokens since: decays, keys and updates. A forward walks from the
folded state over the records and then over its own rows, a tile of sixteen columns of one head at a time, all rows before the next
tile; where it passes the token `to`, it writes the state back. So truncating among the records sets a length, and a row's bits
depend neither on where the state was folded nor on what was drafted before. `model.recurrence` does the same with arrays.
"""

from cpuspec.kernels import simd
from cpuspec.kernels.options import compiled, inlined
from cpuspec.kernels.pointwise import exp_f32, silu_f32, softplus_f32

# How many inputs and records a ring holds, and the bytes in front of a slot's states: int64 `folded` and `to`.
RING_ROWS, HEADER_BYTES = 64, 64
TILE_BYTES = 64  # of one row of a tile of a state


@compiled
def states_of(state, row, cache_bytes):
    """Where a row's slot has its states, behind chunks of keys and values of so many bytes."""
    return state.places[row].storage + state.num_chunks * cache_bytes


@compiled
def convolve_kept(op, state, row, first, end):
    """Columns first..end (multiples of 16) of a row: c * conv(b * x), or silu(conv(x) + bias) where there is no c."""
    place, ring = state.places[row], states_of(state, row, op.cache_bytes) + HEADER_BYTES + op.ring_at
    row_bytes = op.columns * 4
    for at in range(4 * first, 4 * end, 64):
        total = simd.splat_f32(0.0)
        if op.bias != 0:
            total = simd.load_f32(op.bias + at)
        for tap in range(op.taps):
            back = op.taps - 1 - tap
            other = row - back
            weight = simd.load_f32(op.weight + tap * row_bytes + at)
            if other >= 0 and state.places[other].storage == place.storage and back <= place.cache_index:
                x = simd.load_f32(op.rows + other * op.stride + at)
                if op.factors != 0:
                    x = x * simd.load_f32(op.factors + other * op.stride + at)
                total = simd.fma(weight, x, total)
            elif back <= place.cache_index:
                total = simd.fma(weight, simd.load_f32(ring + (place.cache_index - back) % RING_ROWS * row_bytes + at), total)
        total = simd.load_f32(op.outer + row * op.stride + at) * total if op.outer != 0 else silu_f32(total)
        simd.store_f32(op.out + row * op.out_stride + at, total)


@compiled
def remember(op, state, row):
    """Keep what later forwards read of a row, unless a later row of this one takes its place."""
    place, later = state.places[row], row + RING_ROWS
    if later < state.num_rows and state.places[later].storage == place.storage:
        return
    states = states_of(state, row, op.cache_bytes) + HEADER_BYTES
    for number in range(op.num_parts):
        part = op.parts[number]
        to = states + part.at + place.cache_index % RING_ROWS * part.ring_bytes
        source, factors = part.source + row * part.stride, part.factors + row * part.stride
        for at in range(0, part.bytes, 64):
            x = simd.load_f32(source + at)
            if part.factors != 0:
                x = x * simd.load_f32(factors + at)
            simd.store_f32(to + at, x)


@compiled
def steps(op, state, row):
    """Write the decay and the step of each head of a row, and the head's values times its step."""
    decays, factors = op.decays + row * op.decays_stride, op.factors + row * op.factors_stride
    for at in range(0, 4 * op.value_heads, 64):
        step = simd.max_f32(softplus_f32(simd.load_f32(op.steps + row * op.steps_stride + at)), simd.splat_f32(op.least))
        simd.store_f32(decays + at, exp_f32(simd.load_f32(op.rates + at) * step))
        simd.store_f32(factors + at, step)
    source, values = op.rows + row * op.stride, op.values + row * op.values_stride
    for head in range(op.value_heads):
        factor = simd.splat_f32(simd.peek_f32(factors + 4 * head))
        for at in range(4 * head * op.value_dims, 4 * (head + 1) * op.value_dims, 64):
            simd.store_f32(values + at, simd.load_f32(source + at) * factor)


@inlined
def _changed(at, decay, key, update):
    """Sixteen numbers of a state after a step, of one number of the key."""
    return simd.fma(simd.splat_f32(simd.peek_f32(key)), update, simd.load_f32(at) * decay)


@compiled
def _step(tile, count, decay, keys, update):
    """Change a tile, f32 [count, 16], by a record."""
    factor = simd.splat_f32(decay)
    for k in range(count):
        at = tile + TILE_BYTES * k
        simd.store_f32(at, _changed(at, factor, keys + 4 * k, update))


@compiled
def _step_and_read(tile, count, decay, keys, update, queries):
    """`_step`, and the sum over the tile's rows of a query's number times the row. count: a multiple of 4."""
    factor = simd.splat_f32(decay)
    a = b = c = d = simd.splat_f32(0.0)
    for k in range(0, count, 4):
        at, key, query = tile + TILE_BYTES * k, keys + 4 * k, queries + 4 * k
        x = _changed(at, factor, key, update)
        y = _changed(at + TILE_BYTES, factor, key + 4, update)
        z = _changed(at + 2 * TILE_BYTES, factor, key + 8, update)
        w = _changed(at + 3 * TILE_BYTES, factor, key + 12, update)
        simd.store_f32(at, x)
        simd.store_f32(at + TILE_BYTES, y)
        simd.store_f32(at + 2 * TILE_BYTES, z)
        simd.store_f32(at + 3 * TILE_BYTES, w)
        a = simd.fma(simd.splat_f32(simd.peek_f32(query)), x, a)
        b = simd.fma(simd.splat_f32(simd.peek_f32(query + 4)), y, b)
        c = simd.fma(simd.splat_f32(simd.peek_f32(query + 8)), z, c)
        d = simd.fma(simd.splat_f32(simd.peek_f32(query + 12)), w, d)
    return (a + b) + (c + d)


@compiled
def _copy(source, to, size):
    for at in range(0, size, 64):
        simd.store_f32(to + at, simd.load_f32(source + at))


@compiled
def recur(op, state, item, tile):
    """Sixteen columns of one head, of all rows of one sequence. tile: room for them."""
    tiles = op.value_dims // 16
    sequence, head, column = item // (op.value_heads * tiles), item // tiles % op.value_heads, item % tiles
    first, end = state.starts[sequence], state.starts[sequence + 1]
    length, states = state.places[first].cache_index, states_of(state, first, op.cache_bytes)
    folded, to, size = simd.peek_i64(states), simd.peek_i64(states + 8), op.key_dims * TILE_BYTES
    own = states + HEADER_BYTES + op.state_at + (head * tiles + column) * size
    records = states + HEADER_BYTES + op.records_at
    key_head = head // (op.value_heads // op.key_heads)
    key_at, value_at = 4 * key_head * op.key_dims, 4 * (head * op.value_dims + 16 * column)
    if folded == 0:
        for at in range(tile, tile + size, 64):
            simd.store_f32(at, simd.splat_f32(0.0))
    else:
        _copy(own, tile, size)
    for token in range(folded, length):
        record = records + token % RING_ROWS * op.record_bytes
        update = simd.load_f32(record + op.updates_at + value_at)
        _step(tile, op.key_dims, simd.peek_f32(record + 4 * head), record + op.keys_at + key_at, update)
        if token + 1 == to:
            _copy(tile, own, size)
    for row in range(first, end):
        decay = simd.peek_f32(op.decays + row * op.decays_stride + 4 * head)
        keys, queries = op.keys + row * op.stride + key_at, op.queries + row * op.stride + key_at
        update = simd.load_f32(op.values + row * op.values_stride + value_at)
        out = _step_and_read(tile, op.key_dims, decay, keys, update, queries)
        simd.store_f32(op.out + row * op.out_stride + value_at, out)
        if length + row - first + 1 == to:
            _copy(tile, own, size)


@compiled
def finish_heads(op, state, row):
    """In place: (rows + skip * x of the head) * silu(gate), then an RMS norm over each group, times weight, where that is not 0."""
    out, x, gate = op.rows + row * op.stride, op.inputs + row * op.inputs_stride, op.gate + row * op.gate_stride
    size = 4 * op.features // op.groups
    for group in range(op.groups):
        squares = simd.splat_f32(0.0)
        for at in range(group * size, (group + 1) * size, 64):
            skip = simd.splat_f32(simd.peek_f32(op.skip + at // (4 * op.dims) * 4))
            y = simd.fma(skip, simd.load_f32(x + at), simd.load_f32(out + at)) * silu_f32(simd.load_f32(gate + at))
            squares = simd.fma(y, y, squares)
            simd.store_f32(out + at, y)
        if op.weight != 0:
            mean = simd.sum_lanes(squares) / simd.to_float(size // 4)
            factor = simd.splat_f32(simd.to_float(1) / simd.sqrt_f32(mean + op.eps))
            for at in range(group * size, (group + 1) * size, 64):
                simd.store_f32(out + at, simd.load_f32(out + at) * factor * simd.load_f32(op.weight + at))
