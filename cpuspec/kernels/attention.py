"""Attention of one query head over its cache: decode, verify, tree and prefill rows are the same call.

Keys of a head lie in blocks of 16 positions, [block][dimension][16 positions], so that 16 scores are sixteen lanes and no sum
crosses lanes; values lie [position][dimensions, padded to 16]. A row's sums run over its logical positions in order, in blocks
that start at multiples of 16, whatever else is in the batch: its bits do not depend on its company.

Tree rows see the cached prefix and then their ancestors, which lie anywhere after it. `path` lists the cache index of logical
positions from `straight` on (a multiple of 16, at or below the prefix); a chain has straight = its length and no path.
"""

from cpuspec.kernels import simd
from cpuspec.kernels.options import compiled
from cpuspec.kernels.pointwise import exp_f32

LANES = simd.LANES


@compiled
def key_address(keys, dims, index):
    """Where the first dimension of a cached key lies; the next ones follow 64 bytes apart."""
    return keys + index // LANES * dims * 64 + index % LANES * 4


@compiled
def append_key_value(keys, values, dims, padded_dims, index, key, value):
    """Put a key and a value of one head at a cache index."""
    to = key_address(keys, dims, index)
    for i in range(dims):
        simd.poke_f32(to + 64 * i, simd.peek_f32(key + 4 * i))
    row = values + index * padded_dims * 4
    for i in range(dims):
        simd.poke_f32(row + 4 * i, simd.peek_f32(value + 4 * i))
    for i in range(dims, padded_dims):
        simd.poke_f32(row + 4 * i, simd.to_float(0))


@compiled
def _block_scores(query, block, dims):
    """Query times 16 keys. Four sums over the dimensions by their rest modulo 4, then together."""
    a = simd.splat_f32(0.0)
    b = simd.splat_f32(0.0)
    c = simd.splat_f32(0.0)
    d = simd.splat_f32(0.0)
    whole = dims // 4 * 4
    for i in range(0, whole, 4):
        at, q = block + 64 * i, query + 4 * i
        a = simd.fma(simd.broadcast_f32(q), simd.load_f32(at), a)
        b = simd.fma(simd.broadcast_f32(q + 4), simd.load_f32(at + 64), b)
        c = simd.fma(simd.broadcast_f32(q + 8), simd.load_f32(at + 128), c)
        d = simd.fma(simd.broadcast_f32(q + 12), simd.load_f32(at + 192), d)
    for i in range(whole, dims):
        a = simd.fma(simd.broadcast_f32(query + 4 * i), simd.load_f32(block + 64 * i), a)
    return (a + b) + (c + d)


@compiled
def _gather_block(keys, dims, path, straight, start, length, block):
    """Copy the keys of logical positions start..start + 16 (those below length) into one block."""
    for lane in range(min(LANES, length - start)):
        source = key_address(keys, dims, simd.peek_i64(path + 8 * (start + lane - straight)))
        for i in range(dims):
            simd.poke_f32(block + 64 * i + 4 * lane, simd.peek_f32(source + 64 * i))


@compiled
def attend(query, keys, values, dims, padded_dims, length, straight, path, out, scratch):
    """out[dims] = softmax(query . keys) values over logical positions 0..length. The query carries its 1/sqrt(D).

    scratch: (16 * dims + length rounded up to 16) numbers of this thread.
    """
    block = scratch
    scores = scratch + 64 * dims
    largest = simd.splat_f32(-3.4028234e38)
    for start in range(0, length, LANES):
        if start >= straight:
            _gather_block(keys, dims, path, straight, start, length, block)
            score = _block_scores(query, block, dims)
        else:
            score = _block_scores(query, keys + start * dims * 4, dims)
        score = simd.first_lanes(score, simd.int32(length - start), simd.splat_f32(-3.4028234e38))
        largest = simd.max_f32(largest, score)
        simd.store_f32(scores + 4 * start, score)
    top = simd.splat_f32(simd.max_lanes(largest))
    total = simd.splat_f32(0.0)
    for start in range(0, length, LANES):
        weight = exp_f32(simd.load_f32(scores + 4 * start) - top)
        weight = simd.first_lanes(weight, simd.int32(length - start), simd.splat_f32(0.0))
        total = total + weight
        simd.store_f32(scores + 4 * start, weight)
    scale = simd.splat_f32(simd.to_float(1) / simd.sum_lanes(total))
    first = 0
    while first < dims:
        if dims - first >= 64:
            _weigh_values(scores, values + 4 * first, padded_dims, length, straight, path, scale, out + 4 * first)
            first += 64
        else:
            sums = simd.splat_f32(0.0)
            for position in range(length):
                row = _value_row(values, padded_dims, position, straight, path) + 4 * first
                sums = simd.fma(simd.broadcast_f32(scores + 4 * position), simd.load_f32(row), sums)
            simd.scatter_f32(out + 4 * first, 4, dims - first, sums * scale)
            first += LANES


@compiled
def _value_row(values, padded_dims, position, straight, path):
    index = position if position < straight else simd.peek_i64(path + 8 * (position - straight))
    return values + index * padded_dims * 4


@compiled
def _weigh_values(scores, values, padded_dims, length, straight, path, scale, out):
    """64 dimensions of sum(score * value) * scale."""
    a = simd.splat_f32(0.0)
    b = simd.splat_f32(0.0)
    c = simd.splat_f32(0.0)
    d = simd.splat_f32(0.0)
    for position in range(length):
        row = _value_row(values, padded_dims, position, straight, path)
        weight = simd.broadcast_f32(scores + 4 * position)
        a = simd.fma(weight, simd.load_f32(row), a)
        b = simd.fma(weight, simd.load_f32(row + 64), b)
        c = simd.fma(weight, simd.load_f32(row + 128), c)
        d = simd.fma(weight, simd.load_f32(row + 192), d)
    simd.store_f32(out, a * scale)
    simd.store_f32(out + 64, b * scale)
    simd.store_f32(out + 128, c * scale)
    simd.store_f32(out + 192, d * scale)
