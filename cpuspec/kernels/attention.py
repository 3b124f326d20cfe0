"""Attention of a few queries over one head's cache: decode, verify, tree and prefill rows are the same call.

Up to QUERIES queries (rows of one sequence, and the query heads that share a key head) go over the cache together, so that keys
and values are read once for all of them. Keys lie in blocks of 16 positions, [block][dimension][16 positions], so that 16 scores
are sixteen lanes and no sum crosses lanes; values lie [position][dimensions, padded to 16]. A query's sums run over its logical
positions in order, in blocks that start at multiples of 16, whoever shares the call: its bits do not depend on its company.

Tree rows see the cached prefix and then their ancestors, which lie anywhere after it. `path` lists the cache index of logical
positions from `straight` on (a multiple of 16, at or below the prefix); such a row goes alone. A chain has straight = its length.

What a call is told about its queries lies in a table in the thread's scratch: addresses of queries and of outputs, lengths.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cpuspec.kernels import simd
from cpuspec.kernels.options import compiled
from cpuspec.kernels.pointwise import exp_f32

LANES = simd.LANES
QUERIES = 8  # that share one walk over the cache: their sums, with what they are made of, fill the registers

# The scratch of a thread: the table, sums of each query for 64 dimensions, a gathered block of keys, scores of each query.
_OUTS, _LENGTHS, _SCALES, _SUMS = 64, 128, 192, 256
_BLOCK = _SUMS + 256 * QUERIES


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


@intrinsic
def _score_block(typingctx, count, queries, block, dims, to, stride):
    """Scores of `count` queries (their addresses at `queries`) against 16 keys, at to + query * stride.

    Two sums, over even and odd dimensions, then together.
    """

    def codegen(context, builder, sig, args):
        count, queries, block, dims, to, stride = args

        def body(number: int) -> None:
            zero = simd.constant(builder, 0.0, simd.f32x16)
            starts = [simd.load(builder, _plus(builder, queries, 8 * r), simd.I64) for r in range(number)]
            sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(2)] for _ in range(number)]
            with cgutils.for_range(builder, builder.lshr(dims, ir.Constant(simd.I64, 1))) as loop:
                for parity in range(2):
                    at = builder.add(builder.mul(loop.index, ir.Constant(simd.I64, 8)), ir.Constant(simd.I64, 4 * parity))
                    keys = simd.load(builder, builder.add(block, builder.mul(at, ir.Constant(simd.I64, 16))), simd.F32X16)
                    for start, total in zip(starts, sums, strict=True):
                        query = simd.splat(builder, simd.load(builder, builder.add(start, at), simd.F32))
                        _add_product(builder, query, keys, total[parity])
            for r, (even, odd) in enumerate(sums):
                score = builder.fadd(builder.load(even), builder.load(odd))
                simd.store(builder, builder.add(to, builder.mul(stride, ir.Constant(simd.I64, r))), score)

        _for_count(builder, count, body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


def _weigher(width: int) -> Any:
    """An intrinsic for `width` vectors of dimensions at a time."""

    @intrinsic
    def weigh(typingctx, count, weights, weight_stride, values, value_stride, positions, to):
        """Sums over 0..positions of weight * value for `count` queries, at to + query * 256."""

        def codegen(context, builder, sig, args):
            count, weights, weight_stride, values, value_stride, positions, to = args

            def body(number: int) -> None:
                zero = simd.constant(builder, 0.0, simd.f32x16)
                starts = [builder.add(weights, builder.mul(weight_stride, ir.Constant(simd.I64, r))) for r in range(number)]
                sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(width)] for _ in range(number)]
                with cgutils.for_range(builder, positions) as loop:
                    row = builder.add(values, builder.mul(loop.index, value_stride))
                    parts = [simd.load(builder, _plus(builder, row, 64 * w), simd.F32X16) for w in range(width)]
                    offset = builder.mul(loop.index, ir.Constant(simd.I64, 4))
                    for start, totals in zip(starts, sums, strict=True):
                        weight = simd.splat(builder, simd.load(builder, builder.add(start, offset), simd.F32))
                        for part, total in zip(parts, totals, strict=True):
                            _add_product(builder, weight, part, total)
                for r, totals in enumerate(sums):
                    for w, total in enumerate(totals):
                        simd.store(builder, _plus(builder, to, 256 * r + 64 * w), builder.load(total))

            _for_count(builder, count, body)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return weigh


_weigh_1, _weigh_2, _weigh_4 = _weigher(1), _weigher(2), _weigher(4)


def _for_count(builder: Any, count: Any, body: Any) -> None:
    """`body(n)` for the n of 1..QUERIES that `count` is."""
    done = builder.append_basic_block("done")
    switch = builder.switch(count, done)
    for number in range(1, QUERIES + 1):
        case = builder.append_basic_block(f"queries{number}")
        switch.add_case(ir.Constant(simd.I64, number), case)
        builder.position_at_end(case)
        body(number)
        builder.branch(done)
    builder.position_at_end(done)


def _plus(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, ir.Constant(simd.I64, offset))


def _add_product(builder: Any, x: Any, y: Any, total: Any) -> None:
    builder.store(simd.call(builder, "llvm.fma.v16f32", simd.F32X16, x, y, builder.load(total)), total)


@compiled
def _gather_block(keys, dims, path, straight, start, length, block):
    """Copy the keys of logical positions start..start + 16 (those below length) into one block."""
    for lane in range(min(LANES, length - start)):
        source = key_address(keys, dims, simd.peek_i64(path + 8 * (start + lane - straight)))
        for i in range(dims):
            simd.poke_f32(block + 64 * i + 4 * lane, simd.peek_f32(source + 64 * i))


@compiled
def put_query(scratch, number, query, out, length):
    """Enter one query in a call's table: where it is, where its result goes, and how many positions it sees."""
    simd.poke_i64(scratch + 8 * number, query)
    simd.poke_i64(scratch + _OUTS + 8 * number, out)
    simd.poke_i64(scratch + _LENGTHS + 8 * number, length)


@compiled
def attend(count, keys, values, dims, padded_dims, straight, path, scratch):
    """out[dims] = softmax(query . keys) values for the `count` queries of the table. Queries carry their 1/sqrt(D).

    With more than one query, all positions are straight. scratch: `scratch_bytes` of this thread.
    """
    shortest = longest = simd.peek_i64(scratch + _LENGTHS)
    for number in range(1, count):
        length = simd.peek_i64(scratch + _LENGTHS + 8 * number)
        shortest, longest = min(shortest, length), max(longest, length)
    block = scratch + _BLOCK
    scores = block + 64 * dims
    stride = (longest + 15) // 16 * 64
    for start in range(0, longest, LANES):
        here = keys + start * dims * 4
        if start >= straight:
            _gather_block(keys, dims, path, straight, start, longest, block)
            here = block
        _score_block(count, scratch, here, dims, scores + 4 * start, stride)
    for number in range(count):
        length = simd.peek_i64(scratch + _LENGTHS + 8 * number)
        simd.poke_f32(scratch + _SCALES + 4 * number, _softmax(scores + number * stride, length))
    first = 0
    while first < dims:
        width, together = 64, min(shortest, straight)
        if count <= 4 and padded_dims - first >= 64:
            _weigh_4(count, scores, stride, values + 4 * first, padded_dims * 4, together, scratch + _SUMS)
        elif padded_dims - first >= 32:
            width = 32
            _weigh_2(count, scores, stride, values + 4 * first, padded_dims * 4, together, scratch + _SUMS)
        else:
            width = 16
            _weigh_1(count, scores, stride, values + 4 * first, padded_dims * 4, together, scratch + _SUMS)
        for number in range(count):
            length = simd.peek_i64(scratch + _LENGTHS + 8 * number)
            weights, out = scores + number * stride, simd.peek_i64(scratch + _OUTS + 8 * number)
            scale = simd.broadcast_f32(scratch + _SCALES + 4 * number)
            for dim in range(first, min(first + width, dims), LANES):
                total = simd.load_f32(scratch + _SUMS + 256 * number + 4 * (dim - first))
                for position in range(together, length):
                    row = _value_row(values, padded_dims, position, straight, path) + 4 * dim
                    total = simd.fma(simd.broadcast_f32(weights + 4 * position), simd.load_f32(row), total)
                if dims - dim >= LANES:
                    simd.store_f32(out + 4 * dim, total * scale)
                else:
                    simd.scatter_f32(out + 4 * dim, 4, dims - dim, total * scale)
        first += width


@compiled
def _softmax(scores, length):
    """Scores 0..length to exp(score - largest), in place; returns 1 / their sum."""
    largest = simd.splat_f32(-3.4028234e38)
    for start in range(0, length, LANES):
        score = simd.load_f32(scores + 4 * start)
        largest = simd.max_f32(largest, simd.first_lanes(score, simd.int32(length - start), largest))
    top = simd.splat_f32(simd.max_lanes(largest))
    total = simd.splat_f32(0.0)
    for start in range(0, length, LANES):
        weight = exp_f32(simd.load_f32(scores + 4 * start) - top)
        weight = simd.first_lanes(weight, simd.int32(length - start), simd.splat_f32(0.0))
        total = total + weight
        simd.store_f32(scores + 4 * start, weight)
    return simd.to_float(1) / simd.sum_lanes(total)


@compiled
def _value_row(values, padded_dims, position, straight, path):
    index = position if position < straight else simd.peek_i64(path + 8 * (position - straight))
    return values + index * padded_dims * 4


def scratch_bytes(dims: int, capacity: int) -> int:
    """What one thread needs for heads of `dims` dimensions over up to `capacity` positions."""
    return _BLOCK + 64 * dims + QUERIES * 4 * (-(-capacity // LANES) * LANES)
