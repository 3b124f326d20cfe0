"""Attention of many queries in bf16, in tile registers (AMX) or vectors (AVX-512 BF16): for tokens of prompts.

A walk over a chunk as in `attention`, with its cache, its partials and its softmax; queries, keys, weights and values are rounded
to bf16 where they are multiplied, and sums are f32. A query's bits do not depend on those it goes with: each sum is of its own
products in their order, and positions that it does not see add zeros.
"""

from collections.abc import Callable
from functools import cache, partial

from numba import types

from cpuspec.kernels import isa, machine_code, selfcheck, simd
from cpuspec.kernels.attention import (
    GATHERED,
    POWERS,
    SCORES,
    SCORES_STRIDE,
    STEP,
    STEP_BYTES,
    VECTORS,
    softmax_weights,
    walk_end,
    walk_start,
)
from cpuspec.kernels.kv_rows import CHUNK, CODINGS, key_parts, load_part, num_units, place_of_value, row_shape, sixteen_of_value
from cpuspec.kernels.layout import MAX_QUERIES, walk_at
from cpuspec.kernels.ops import F32X16, I32, I32X16, Ops, Value, bf16_numbers, bf16_pairs, dot_pairs, fma
from cpuspec.kernels.options import compiled
from cpuspec.kernels.pointwise import cap_numbers
from cpuspec.kernels.products import BLOCK_ROWS
from cpuspec.kernels.readers import PAIRED
from cpuspec.kernels.simd import LANES, emitted
from cpuspec.kernels.tiles import add_paired_products, paired_totals, release, shape

_ROWS = 8  # that vectors multiply at a time: sixteen sums


@cache
def attend_kernel(format_name: str, windowed: bool = False, capped: bool = False) -> int:
    """Address of what `attention.attend_kernel` has, for queries of prompts: up to MAX_QUERIES, no tree."""
    name = f"attend-bf16-{format_name}{'-windowed' * windowed}{'-capped' * capped}"
    check = selfcheck.Attention(format_name, MAX_QUERIES, windowed, capped, numbers="bf16").check
    return machine_code.address(name, 8, lambda: _attend(format_name, *row_shape(format_name), windowed, capped), check=check)


def _attend(name: str, size: int, header: int, unit: int, unit_bytes: int, windowed: bool, capped: bool) -> Callable[..., None]:
    def attend(count, head, dims, value_dims, first, straight, path, scratch):
        walk = walk_at(scratch)
        units = num_units(unit, value_dims)
        stored, row_bytes, value_bytes = units * unit, num_units(unit, dims) * unit_bytes, units * unit_bytes
        keys, depth = head + first * (row_bytes + value_bytes), (dims + STEP - 1) // STEP
        blocks = (count + BLOCK_ROWS - 1) // BLOCK_ROWS
        queries = scratch + GATHERED
        paired = queries + 64 * depth * (MAX_QUERIES + BLOCK_ROWS)
        longest, earliest = walk_end(walk, 0, first), walk_start(walk, 0, first, windowed)
        for number in range(1, count):
            longest = max(longest, walk_end(walk, number, first))
            earliest = min(earliest, walk_start(walk, number, first, windowed))
        earliest = earliest // STEP * STEP
        shape(PAIRED, count)
        for number in range(count):
            _round_numbers(walk.queries[number], 0, dims, depth * STEP, queries + 64 * depth * number)
        for at in range(earliest, longest, STEP):
            for half in range(2):
                _pair_keys(name, keys + (at + LANES * half) * row_bytes, dims, depth, paired + half * STEP_BYTES * depth)
            for block in range(0, blocks, 2):
                own = block * BLOCK_ROWS
                _multiply(
                    min(2, blocks - block), 2, queries + own * 64 * depth, 64 * depth, paired, STEP_BYTES * depth, depth,
                    scratch + SCORES + own * SCORES_STRIDE + 4 * at, SCORES_STRIDE,
                )  # fmt: skip
        for number in range(count):
            own = scratch + SCORES + number * SCORES_STRIDE
            start, end = walk_start(walk, number, first, windowed), walk_end(walk, number, first)
            if capped:
                cap_numbers(own + 4 * (start // LANES * LANES), end - start // LANES * LANES, walk.caps[0])
            softmax_weights(own, start, end, scratch + POWERS, walk.partials[number], stored)
            _round_numbers(own, start // LANES * LANES, (end + LANES - 1) // LANES * LANES, longest, own)
        values = keys + CHUNK * row_bytes
        _weigh(name, scratch, 0, count, values, value_bytes, stored, earliest, earliest, longest, paired)
        # What a query does not see weighs nothing, unless it is no finite number.
        for number in range(count):
            if not _is_finite(walk.partials[number], stored):
                start, end = walk_start(walk, number, first, windowed), walk_end(walk, number, first)
                _weigh(name, scratch, number, 1, values, value_bytes, stored, earliest, start, end, paired)
        release()

    return attend


@compiled
def _weigh(name, scratch, number, count, values, row_bytes, stored, begin, start, end, paired):
    """The sums of weight * value of `count` queries over the positions from `begin` on, of which start..end are read."""
    walk = walk_at(scratch)
    steps = (end - begin + STEP - 1) // STEP
    found = paired + VECTORS * (CHUNK // STEP) * STEP_BYTES
    for vector in range(0, stored // LANES, VECTORS):
        vectors = min(VECTORS, stored // LANES - vector)
        _pair_values(name, values, row_bytes, vector, vectors, begin, steps, start, end, paired)
        for own in range(number, number + count, 2 * BLOCK_ROWS):
            some = min(2 * BLOCK_ROWS, number + count - own)
            blocks = (some + BLOCK_ROWS - 1) // BLOCK_ROWS
            rows = scratch + SCORES + own * SCORES_STRIDE + 2 * begin
            _multiply(blocks, vectors, rows, SCORES_STRIDE, paired, CHUNK // STEP * STEP_BYTES, steps, found, 64 * VECTORS)
            for row in range(some):
                to, source = walk.partials[own + row] + 64 * vector, found + 64 * VECTORS * row
                for at in range(0, 64 * vectors, 64):
                    simd.store_f32(to + at, simd.load_f32(source + at))


@compiled
def _is_finite(numbers, count):
    total = simd.splat_f32(0.0)
    for at in range(numbers, numbers + 4 * count, 64):
        total = total + simd.load_f32(at) * simd.splat_f32(0.0)
    return not simd.is_nan(simd.sum_lanes(total))


@compiled
def _round_numbers(source, first, end, total, to):
    """Numbers first..end in bf16, and zeros before and behind, up to a multiple of STEP from `total` on; in place, too.

    first: a multiple of 16.
    """
    whole, zero = end // LANES * LANES, simd.splat_f32(0.0)
    for at in range(0, first, LANES):
        _store_bf16(to + 2 * at, zero)
    for at in range(first, whole, LANES):
        _store_bf16(to + 2 * at, simd.load_f32(source + 4 * at))
    if whole < end:
        _store_bf16(to + 2 * whole, load_part(source + 4 * whole, end - whole))
    for at in range((end + LANES - 1) // LANES * LANES, (total + STEP - 1) // STEP * STEP, LANES):
        _store_bf16(to + 2 * at, zero)


_store_bf16 = simd.operation((types.int64, simd.f32x16), types.void, lambda o, at, values: at.store(bf16_numbers(values)))


@emitted
def _multiply(
    o: Ops, blocks: Value, columns: Value, rows: Value, row_bytes: Value, paired: Value, column_bytes: Value, steps: Value,
    to: Value, to_bytes: Value,
) -> None:  # fmt: skip
    """The products of 1 or 2 blocks of 16 rows of bf16, `row_bytes` apart, with 1 or 2 blocks of 16 columns, `column_bytes` apart:
    sums over `steps` tile registers of each, as f32 rows `to_bytes` apart.
    """
    if not isa.has_bf16_tiles():
        _multiply_vectors(o, blocks, columns, rows, row_bytes, paired, column_bytes, steps, to, to_bytes)
        return

    def products(height: int, width: int) -> None:
        totals = paired_totals(height, width)
        for total in totals.values():
            o.tile_zero(total)
        parts = [(rows + row_bytes * (BLOCK_ROWS * n), 64, row_bytes) for n in range(height)]
        add_paired_products(o, steps, parts, [paired + column_bytes * m for m in range(width)], totals)
        for (n, m), total in totals.items():
            o.tile_store(total, to + to_bytes * (BLOCK_ROWS * n) + 64 * m, to_bytes)

    o.switch(blocks * 2 + columns, {2 * n + m: partial(products, n, m) for n in (1, 2) for m in (1, 2)})


def _multiply_vectors(
    o: Ops, blocks: Value, columns: Value, rows: Value, row_bytes: Value, paired: Value, column_bytes: Value, steps: Value,
    to: Value, to_bytes: Value,
) -> None:  # fmt: skip
    """`_multiply` in vectors: a sum takes pair after pair of its row."""

    def products(width: int) -> None:
        with o.loop(blocks * (BLOCK_ROWS // _ROWS)) as part:
            first, to_first = rows + row_bytes * (part * _ROWS), to + to_bytes * (part * _ROWS)
            sums = [o.variables(width) for _ in range(_ROWS)]
            with o.loop(steps * (STEP // 2)) as pair:
                weights = [(paired + column_bytes * m + pair * 64).load(I32X16) for m in range(width)]
                for row, totals in enumerate(sums):
                    inputs = (first + row_bytes * row + pair * 4).every(I32)
                    for column, total in zip(weights, totals, strict=True):
                        total.set(dot_pairs(total.get(), column, inputs))
            for row, totals in enumerate(sums):
                for m, total in enumerate(totals):
                    (to_first + to_bytes * row + 64 * m).store(total.get())

    o.switch(columns, {width: partial(products, width) for width in range(1, VECTORS + 1)})


@emitted
def _pair_keys(o: Ops, name: str, keys: Value, dims: Value, depth: Value, paired: Value) -> None:
    """A block of 16 keys in bf16 as tile registers want columns: [dims / 2][16 keys][2], zeros up to `depth` registers."""
    coding = CODINGS[name]
    for at, first_dim, number, half, (factors,) in key_parts(o, coding, [keys], dims):
        with o.loop((number > 0).select(number, number.like(0)) // 2) as index:
            pair = []
            for odd in range(2):
                key = coding.read(keys + at + (index * 2 + odd) * (LANES * coding.size), o.number(half, I32))
                pair.append(fma(key, *factors) if factors else key)
            (paired + (first_dim + index * 2) * 32).store(bf16_pairs(*pair))
    with o.loop(depth * (STEP // 2) - dims // 2) as rest:
        (paired + (dims // 2 + rest) * 64).store(o.number(0.0, F32X16))


@emitted
def _pair_values(
    o: Ops, name: str, rows: Value, row_bytes: Value, vector: Value, vectors: Value, begin: Value, steps: Value, start: Value,
    end: Value, paired: Value,
) -> None:  # fmt: skip
    """1 or 2 vectors of the dimensions of values, in bf16 as tile registers want columns: for each vector [positions / 2][16][2],
    from position `begin` on and `steps` registers of them; zeros where they are not in start..end.
    """
    coding = CODINGS[name]
    scales, numbers, half = place_of_value(coding, rows, vector * LANES)
    zero = o.number(0.0, F32X16)

    def body(width: int) -> None:
        with o.loop(steps * (STEP // 2)) as index:
            pairs: list[list[Value]] = [[] for _ in range(width)]
            for odd in range(2):
                position = begin + index * 2 + odd
                row = position * row_bytes
                seen = (position < end) & (position >= start)
                for w, pair in enumerate(pairs):
                    pair.append(seen.select(sixteen_of_value(coding, numbers + row, scales + row, half, w), zero))
            for w, pair in enumerate(pairs):
                (paired + w * (CHUNK // STEP * STEP_BYTES) + index * 64).store(bf16_pairs(*pair))

    o.switch(vectors, {width: partial(body, width) for width in range(1, VECTORS + 1)})
