"""Attention of a few queries over a chunk of one head's cache: decode, verify, tree and prefill rows are the same call.

A query's positions are taken in chunks of CHUNK, counted from its sequence's start. Each chunk gives a partial result: its largest
score, the sum of its weights exp(score - largest), and the values' sum under these weights. Partials are merged in the order of
the chunks. So the order of every sum depends on the query's own positions alone, while chunks may go to several threads, and
up to QUERIES queries (rows of one sequence, and the query heads that share a key head) walk over a chunk together. Without
AVX-512, keys and values are widened to f32 once for all of them where they are many, some at a time.

A layer with a window shows a query its last positions only; they are counted along its path. Chunks before them are not walked
over, and in the first one that is, earlier positions have no weight.

Tree rows see the cached prefix and then their ancestors, which lie anywhere after it. `path` lists the cache index of logical
positions from `straight` on (a multiple of 16, at or below the prefix). A chain has straight = its length.

A call finds its queries in a `layout.WALK` at the start of the thread's scratch.
"""

import functools
from collections.abc import Callable
from functools import cache

from numba import types

from cpuspec.formats.kv import get_kv_format, stored_dims
from cpuspec.kernels import isa, machine_code, selfcheck, simd
from cpuspec.kernels.kv_rows import (
    CHUNK,
    CODINGS,
    WIDENED,
    chunk_bytes,
    copy_position,
    key_parts,
    num_units,
    place_of_value,
    row_shape,
    sixteen_of_value,
)
from cpuspec.kernels.layout import MAX_QUERIES, WALK, walk_at
from cpuspec.kernels.ops import F32, I32, I64, Ops, Value, fma
from cpuspec.kernels.options import compiled
from cpuspec.kernels.pointwise import cap_numbers, exp_f32, exp_of_parts, exp_parts
from cpuspec.kernels.products import BLOCK_ROWS
from cpuspec.kernels.simd import LANES, emitted

# Vectors of sums that stay in registers beside their operands; queries that are multiplied at once; queries that share a walk over
# a chunk; and queries from which on keys and values are widened to f32 once for all of them: with AVX-512, more than share a walk.
_SUMS, _TOGETHER, QUERIES, _MANY = (16, 8, 8, 9) if "avx512f" in isa.features() else (4, 6, 64, 24)
_MOST_QUERIES = MAX_QUERIES + BLOCK_ROWS if isa.has_bf16_dots() else QUERIES  # whose scores the scratch holds

# What is widened at a time stays in the first cache while all queries read it: a block of keys, or the values of this many
# positions in this many vectors of dimensions.
_WIDENED_POSITIONS, _WIDENED_VECTORS = 128, 2

# Values of this many positions are read for all dimensions before the next ones: they stay in the nearest cache. The next values
# and keys are prefetched meanwhile.
_POSITIONS = 32

# Of `attention_bf16`: numbers of a row of a tile register, which one instruction sums; bytes of a register; how many vectors of
# the values' dimensions are multiplied at a time.
STEP, STEP_BYTES, VECTORS = 32, 64 * BLOCK_ROWS, 2

# The scratch of a thread: a WALK, scores of each query, powers of one query's scores, then a gathered chunk, or what is widened
# (which is no larger), or what tile registers multiply, then partials.
_QUERIES_AT, _PARTIALS_AT = (WALK.fields[name][1] for name in ("queries", "partials"))  # type: ignore[index]
SCORES = WALK.itemsize
SCORES_STRIDE = 4 * CHUNK
POWERS = SCORES + _MOST_QUERIES * SCORES_STRIDE
GATHERED = POWERS + SCORES_STRIDE


def partial_bytes(format_name: str, value_dims: int) -> int:
    """Bytes of a partial: the sum of each dimension, sixteen times the sum of weights, sixteen times the largest score."""
    return 4 * stored_dims(get_kv_format(format_name), value_dims) + 2 * 64


def partials_offset(format_name: str, key_dims: int, value_dims: int) -> int:
    """The offset of the partials in a thread's scratch: first those of a walk, then those of a task."""
    return GATHERED + max(chunk_bytes(format_name, key_dims, value_dims), tiles_bytes(key_dims))


def tiles_bytes(dims: int) -> int:
    """Bytes of scratch of an `attention_bf16` walk besides scores: queries, two blocks of keys or two vectors of values; sums."""
    depth = -(-dims // STEP)
    return 64 * depth * (MAX_QUERIES + BLOCK_ROWS) + STEP_BYTES * max(2 * depth, VECTORS * (CHUNK // STEP + 2))


@compiled
def first_chunk(length, window):
    """The first chunk that a query of `length` positions sees; window: 0 for none."""
    return 0 if window == 0 else max(0, length - window) // CHUNK


@compiled
def sees(length, start, window):
    """Whether a query sees a position of the chunk that starts at `start`."""
    return length > start and (window == 0 or length - window < start + CHUNK)


@compiled
def put_query(walk, number, query, partial, start, length):
    """Enter one query in a walk: where it is, where its partial goes, and which positions it sees, from `start` to `length`."""
    walk.queries[number] = query
    walk.partials[number] = partial
    walk.starts[number] = start
    walk.lengths[number] = length


@compiled
def merge(partial, later, size):
    """Merge the partial of a later chunk into that of all earlier ones."""
    largest, other = simd.load_f32(partial + size - 64), simd.load_f32(later + size - 64)
    both = simd.max_f32(largest, other)
    largest, other = exp_f32(largest - both), exp_f32(other - both)
    for at in range(0, size - 64, 64):
        simd.store_f32(partial + at, simd.fma(simd.load_f32(later + at), other, simd.load_f32(partial + at) * largest))
    simd.store_f32(partial + size - 64, both)


@compiled
def finish(partial, size, dims, out, sink):
    """out[dims] = the partial's sums over its sum of weights. sink: address of a score that has a weight and no value, or 0."""
    total = simd.load_f32(partial + size - 128)
    scale = simd.splat_f32(1.0) / total
    if sink != 0:
        largest, score = simd.load_f32(partial + size - 64), simd.splat_f32(simd.peek_f32(sink))
        both = simd.max_f32(largest, score)
        kept = exp_f32(largest - both)
        scale = kept / simd.fma(total, kept, exp_f32(score - both))
    for dim in range(0, dims, LANES):
        value = simd.load_f32(partial + 4 * dim) * scale
        if dims - dim >= LANES:
            simd.store_f32(out + 4 * dim, value)
        else:
            simd.scatter_f32(out + 4 * dim, 4, dims - dim, value)


@cache
def attend_kernel(format_name: str, windowed: bool = False, capped: bool = False) -> int:
    """Address of (count, head's cache, key dims, value dims, first position, straight, path, scratch): partials of a chunk for the
    first `count` queries of the walk, each of which sees some of the positions that the chunk holds, from `first position` (a
    multiple of CHUNK).

    Queries carry their scale. With tree rows (straight below a length) all queries are of one row. windowed: queries may start
    behind position 0; capped: scores are soft-capped.
    """
    name = f"attend-{format_name}{'-windowed' * windowed}{'-capped' * capped}"
    check = selfcheck.Attention(format_name, QUERIES, windowed, capped).check
    return machine_code.address(name, 8, lambda: _attend(format_name, *row_shape(format_name), windowed, capped), check=check)


_fetch = simd.operation((types.int64,), types.void, lambda o, at: at.fetch(0, 64, into_first=False))


def _attend(name: str, size: int, header: int, unit: int, unit_bytes: int, windowed: bool, capped: bool) -> Callable[..., None]:
    def attend(count, head, key_dims, value_dims, first, straight, path, scratch):
        walk = walk_at(scratch)
        units = num_units(unit, value_dims)
        stored, key_bytes, value_bytes = units * unit, num_units(unit, key_dims) * unit_bytes, units * unit_bytes
        chunk, gathered, scores = head + first * (key_bytes + value_bytes), scratch + GATHERED, scratch + SCORES
        shortest = longest = walk_end(walk, 0, first)
        earliest = latest = walk_start(walk, 0, first, windowed)
        for number in range(1, count):
            end, start = walk_end(walk, number, first), walk_start(walk, number, first, windowed)
            shortest, longest = min(shortest, end), max(longest, end)
            earliest, latest = min(earliest, start), max(latest, start)
        earliest = earliest // LANES * LANES
        inside = max(0, min(straight - first, longest))
        tree = inside < longest
        wide = QUERIES >= _MANY and count >= _MANY and not tree  # what is widened lies where a tree's positions are gathered
        if tree:
            for place in range(max(inside, earliest), longest):
                index = simd.peek_i64(path + 8 * (first + place - straight))
                copy_position(size, header, unit_bytes, key_bytes, value_bytes, gathered, place, head, index)
        step = even_step(count)
        for piece in range(1 + tree):
            keys, begin, end = (gathered, inside, longest) if piece else (chunk, 0, inside)
            begin = max(begin, earliest)
            blocks = max(0, end - begin + LANES - 1) // LANES
            values, to = keys + CHUNK * key_bytes + begin * value_bytes, scores + 4 * begin
            keys += begin * key_bytes
            if wide:
                for block in range(0, blocks * LANES, LANES):
                    own, soon = keys + block * key_bytes, values + block * value_bytes
                    _score_widened(name, count, step, scratch, own, key_bytes, key_dims, soon, value_bytes, to + 4 * block)
            else:
                for number in range(0, count, step):
                    some, own = min(step, count - number), to + number * SCORES_STRIDE
                    score(name, some, scratch + 8 * number, keys, key_bytes, key_dims, blocks, own)
        for number in range(count):
            own, start = scores + number * SCORES_STRIDE, walk_start(walk, number, first, windowed)
            end = walk_end(walk, number, first)
            if capped:
                cap_numbers(own + 4 * (start // LANES * LANES), end - start // LANES * LANES, walk.caps[0])
            softmax_weights(own, start, end, scratch + POWERS, walk.partials[number], stored)
        # In the order of the positions: what each query of a window sees before the others do, what all of them see, and then the
        # ancestors of a tree row, or what each query of a chain sees more.
        before = count if windowed and not tree else 0
        together = max(latest, min(shortest, inside))
        for piece in range(2 if tree else before + 1 + count):
            number, many, values, begin, end = 0, count, chunk, latest, together
            if tree:
                if piece:
                    values, begin, end = gathered, max(inside, latest), longest
            elif piece < before:
                number, many, begin = piece, 1, walk_start(walk, piece, first, windowed)
                end = min(latest, walk_end(walk, number, first))
            elif piece > before:
                number, many = piece - before - 1, 1
                begin, end = together, walk_end(walk, number, first)
            is_wide = wide and many > 1
            positions = _WIDENED_POSITIONS if is_wide else _POSITIONS
            for start in range(begin, end, positions):
                row, here = values + CHUNK * key_bytes + start * value_bytes, min(positions, end - start)
                weights = scores + number * SCORES_STRIDE + 4 * start
                if is_wide:
                    _weigh_widened(name, count, step, scratch, weights, row, value_bytes, stored, here)
                else:
                    for other in range(0, many, step):
                        some, own = min(step, many - other), weights + other * SCORES_STRIDE
                        _weigh(name, some, scratch + 8 * (number + other), own, row, value_bytes, stored, here, 0)

    return attend


@compiled
def even_step(count):
    """The number of queries that are multiplied at once, so that all turns through `count` queries have about as many."""
    turns = (count + _TOGETHER - 1) // _TOGETHER
    return (count + turns - 1) // turns


@compiled
def walk_end(walk, number, first):
    """The end of the positions of the chunk that a query sees."""
    return min(CHUNK, walk.lengths[number] - first)


@compiled
def walk_start(walk, number, first, windowed):
    """The first position of the chunk that a query sees."""
    return max(0, walk.starts[number] - first) if windowed else 0


@compiled
def softmax_weights(scores, start, end, powers, partial, stored):
    """Scores start..end to exp(score - largest) in place, zeros up to whole vectors; begins the partial: no sums yet, the rest
    complete. powers: room for a chunk's.

    An exponential is a long chain of operations. In two loops, a processor has more of them under way at once.
    """
    first, whole = (start + LANES - 1) // LANES * LANES, end // LANES * LANES
    before, rest = simd.int32(start % LANES), simd.int32(end % LANES)
    zero = total = simd.splat_f32(0.0)
    largest = lowest = simd.splat_f32(-3.4028234e38)
    if start < first:
        score = simd.first_lanes(lowest, before, simd.load_f32(scores + 4 * first - 64))
        if first > end:
            score = simd.first_lanes(score, rest, lowest)
        largest = simd.where_less(largest, score, score, largest)
    for at in range(first, whole, LANES):
        score = simd.load_f32(scores + 4 * at)
        largest = simd.where_less(largest, score, score, largest)
    if first <= whole < end:
        score = simd.first_lanes(simd.load_f32(scores + 4 * whole), rest, lowest)
        largest = simd.where_less(largest, score, score, largest)
    top = simd.splat_f32(simd.max_lanes(largest))
    if start < first:
        weight = simd.first_lanes(zero, before, exp_f32(simd.load_f32(scores + 4 * first - 64) - top))
        if first > end:
            weight = simd.first_lanes(weight, rest, zero)
        total = total + weight
        simd.store_f32(scores + 4 * first - 64, weight)
    for at in range(first, whole, LANES):
        r, power = exp_parts(simd.load_f32(scores + 4 * at) - top)
        simd.store_f32(scores + 4 * at, r)
        simd.store_f32(powers + 4 * at, power)
    for at in range(first, whole, LANES):
        weight = exp_of_parts(simd.load_f32(scores + 4 * at), simd.load_f32(powers + 4 * at))
        total = total + weight
        simd.store_f32(scores + 4 * at, weight)
    if first <= whole < end:
        weight = simd.first_lanes(exp_f32(simd.load_f32(scores + 4 * whole) - top), rest, zero)
        total = total + weight
        simd.store_f32(scores + 4 * whole, weight)
    for dim in range(0, stored, LANES):
        simd.store_f32(partial + 4 * dim, zero)
    simd.store_f32(partial + 4 * stored, simd.splat_f32(simd.sum_lanes(total)))
    simd.store_f32(partial + 4 * stored + 64, top)


@emitted
def score(
    o: Ops, name: str, count: Value, walk: Value, keys: Value, row_bytes: Value, dims: Value, blocks: Value, to: Value,
) -> None:  # fmt: skip
    """Scores of `count` queries against `blocks` blocks of 16 keys, at to + query * SCORES_STRIDE.

    A score is one sum, in the order of the dimensions.
    """
    coding = CODINGS[name]
    block_bytes = row_bytes * LANES

    def some(queries: list[Value], first: Value, together: int) -> None:
        """Against `together` blocks from `first` on."""
        here = [keys + (first + n) * block_bytes for n in range(together)]
        sums = [o.variables(together) for _ in queries]

        for at, first_dim, number, half, factors in key_parts(o, coding, here, dims):
            with o.loop(number) as index:
                offset = at + index * (LANES * coding.size)
                found = []
                for block, own in zip(here, factors, strict=True):
                    address = block + offset
                    if not coding.near and half == 0:
                        (address + block_bytes * together).fetch(0, LANES * coding.size)
                    key = coding.read(address, o.number(half, I32))
                    found.append(fma(key, *own) if own else key)
                dim = first_dim + index
                for query, totals in zip(queries, sums, strict=True):
                    number_of_query = (query + dim * 4).every(F32)
                    for key, total in zip(found, totals, strict=True):
                        total.set(fma(number_of_query, key, total.get()))
        for r, totals in enumerate(sums):
            row = to + first * 64 + r * SCORES_STRIDE
            for n, total in enumerate(totals):
                (row + 64 * n).store(total.get())

    def body(number: int) -> None:
        queries = [(walk + (_QUERIES_AT + 8 * r)).load(I64) for r in range(number)]
        _in_steps(o, blocks, number, lambda first, n: some(queries, first, n))

    _for_count(o, count, body)


@emitted
def _weigh(
    o: Ops, name: str, count: Value, walk: Value, weights: Value, rows: Value, row_bytes: Value, stored: Value, positions: Value,
    offset: Value,
) -> None:  # fmt: skip
    """Add weight * value over `positions` positions to the partials of `count` queries, in the order of the positions: `stored`
    dimensions, whose sums lie `offset` bytes behind a partial's begin.
    """
    coding = CODINGS[name]

    def some(partials: list[Value], first: Value, width: int) -> None:
        """For `width` vectors of dimensions from `first` on."""
        scales, numbers, half = place_of_value(coding, rows, first)
        sums = [[o.variable((partial + first * 4 + 64 * w).f32()) for w in range(width)] for partial in partials]
        with o.loop(positions) as index:
            row = index * row_bytes
            here = numbers + row
            if not coding.near:
                (here + row_bytes * _POSITIONS).fetch(0, width * LANES * coding.size)
            values = [sixteen_of_value(coding, here, scales + row, half, w) for w in range(width)]
            for r, totals in enumerate(sums):
                weight = (weights + index * 4 + r * SCORES_STRIDE).every(F32)
                for value, total in zip(values, totals, strict=True):
                    total.set(fma(weight, value, total.get()))
        for partial, totals in zip(partials, sums, strict=True):
            for w, total in enumerate(totals):
                (partial + first * 4 + 64 * w).store(total.get())

    def body(number: int) -> None:
        partials = [(walk + (_PARTIALS_AT + 8 * r)).load(I64) + offset for r in range(number)]
        _in_steps(o, stored // LANES, number, lambda first, n: some(partials, first * LANES, n))

    _for_count(o, count, body)


@compiled
def _score_widened(name, count, step, scratch, keys, row_bytes, dims, values, value_bytes, to):
    """Scores of all queries against one block of keys. The next block, and this one's values, are asked for meanwhile."""
    block_bytes = LANES * row_bytes
    widened = scratch + GATHERED
    _widen_keys(name, keys, dims, widened)
    for number in range(0, count, step):
        some = min(step, count - number)
        for line in range(block_bytes * number // count // 64, block_bytes * (number + some) // count // 64):
            _fetch(keys + block_bytes + 64 * line)
        for line in range(LANES * value_bytes * number // count // 64, LANES * value_bytes * (number + some) // count // 64):
            _fetch(values + 64 * line)
        score(WIDENED, some, scratch + 8 * number, widened, row_bytes, dims, 1, to + number * SCORES_STRIDE)


@compiled
def _weigh_widened(name, count, step, scratch, weights, rows, row_bytes, stored, positions):
    """`_weigh` for all queries, up to _WIDENED_POSITIONS positions."""
    widened = scratch + GATHERED
    for first in range(0, stored // LANES, _WIDENED_VECTORS):
        vectors = min(_WIDENED_VECTORS, stored // LANES - first)
        _widen_values(name, rows, row_bytes, first, vectors, positions, widened)
        for number in range(0, count, step):
            some, own = min(step, count - number), weights + number * SCORES_STRIDE
            _weigh(WIDENED, some, scratch + 8 * number, own, widened, 64 * vectors, LANES * vectors, positions, 64 * first)


@emitted
def _widen_keys(o: Ops, name: str, keys: Value, dims: Value, widened: Value) -> None:
    """A block of 16 keys as f32 [dims][16]."""
    coding = CODINGS[name]
    for at, first_dim, number, half, (factors,) in key_parts(o, coding, [keys], dims):
        with o.loop(number) as index:
            key = coding.read(keys + at + index * (LANES * coding.size), o.number(half, I32))
            (widened + (first_dim + index) * 64).store(fma(key, *factors) if factors else key)


@emitted
def _widen_values(
    o: Ops, name: str, rows: Value, row_bytes: Value, first: Value, vectors: Value, positions: Value, widened: Value,
) -> None:  # fmt: skip
    """Vectors first..first + vectors of the dimensions of some values as f32 [positions][16 * vectors]."""
    coding = CODINGS[name]
    scales, numbers, half = place_of_value(coding, rows, first * LANES)

    def body(number: int) -> None:
        with o.loop(positions) as index:
            row = index * row_bytes
            for w in range(number):
                (widened + index * (64 * number) + 64 * w).store(sixteen_of_value(coding, numbers + row, scales + row, half, w))

    o.switch(vectors, {number: functools.partial(body, number) for number in range(1, _WIDENED_VECTORS + 1)})


def _in_steps(o: Ops, total: Value, number: int, body: Callable[[Value, int], None]) -> None:
    """`body(first, n)` over all of `total`, n at a time: as many as let the sums of `number` queries stay in registers."""
    done = o.number(0)
    for step in (n for n in (4, 2, 1) if n == 1 or number * n <= _SUMS):
        times = (total - done) // step
        with o.loop(times) as index:
            body(done + index * step, step)
        done = done + times * step


def _for_count(o: Ops, count: Value, body: Callable[[int], None]) -> None:
    """`body(n)` for the n of 1.._TOGETHER that `count` is."""
    o.switch(count, {number: functools.partial(body, number) for number in range(1, _TOGETHER + 1)})
