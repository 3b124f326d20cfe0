"""Latent attention: many query heads over one cached key whose numbers are also the value.

The cache is that of `kv_rows` without values. Scores are those of `attention`. Results are summed from the same blocks of keys, in
which sixteen positions are lanes: each dimension of each query has sixteen sums, over every sixteenth position in their order, and
these are added to each other at the end of a chunk. So a query's bits depend on its own positions alone.
"""

import functools
from collections.abc import Callable
from functools import cache

from llvmlite import ir

from cpuspec.kernels import isa, machine_code, selfcheck, simd
from cpuspec.kernels.attention import GATHERED, POWERS, QUERIES, SCORES, SCORES_STRIDE, even_step, score, softmax_weights, walk_end
from cpuspec.kernels.kv_rows import CHUNK, CODINGS, copy_position, num_units, parts_of_group, row_shape
from cpuspec.kernels.layout import WALK, walk_at
from cpuspec.kernels.ops import I32, I64, Ops, Value, fma, vector_of
from cpuspec.kernels.options import compiled
from cpuspec.kernels.pointwise import norm_row
from cpuspec.kernels.simd import LANES, emitted

# Of how many dimensions and queries the sums stay in registers beside what they are made of.
_DIMS, _QUERIES = (4, 7) if "avx512f" in isa.features() else (2, 3)
_PARTIALS_AT, _LENGTHS_AT = (WALK.fields[name][1] for name in ("partials", "lengths"))  # type: ignore[index]


@compiled
def assemble(op, item):
    """A query, or behind all of them a row's key, in the order of `config.Latent.dims`. The key's vector is normed before."""
    row, head = item // (op.heads + 1), item % (op.heads + 1)
    vector, rope = (
        op.vectors + row * op.vectors_stride + head * op.rank * 4,
        op.q_rope + row * op.q_rope_stride + head * op.rope_dims * 4,
    )
    to = op.queries + row * op.q_stride + head * (op.rank + op.rope_dims) * 4
    if head == op.heads:
        vector, rope, to = op.latent + row * op.latent_stride, op.k_rope + row * op.k_rope_stride, op.keys + row * op.k_stride
        norm_row(vector, op.weight, op.eps, op.rank)
    for half in range(2):
        _copy(rope + half * op.rope_dims * 2, op.rope_dims * 2, to)
        _copy(vector + half * op.rank * 2, op.rank * 2, to + op.rope_dims * 2)
        to += (op.rank + op.rope_dims) * 2


@compiled
def _copy(source, size, to):
    for at in range(0, size, 4):
        simd.poke_f32(to + at, simd.peek_f32(source + at))


@cache
def attend_kernel(format_name: str, rope_dims: int) -> int:
    """Address of what `attention.attend_kernel` has. Values are the keys: both have as many numbers.

    rope_dims: `Latent.rope_dims`, numbers that are no values. Their results are 0 where the format has no groups of numbers.
    """
    name = f"attend-latent-{format_name}-{rope_dims}"
    check = selfcheck.Attention(format_name, QUERIES, rope_dims=rope_dims).check
    return machine_code.address(name, 8, lambda: _attend(format_name, rope_dims, *row_shape(format_name)), check=check)


def _attend(name: str, rope_dims: int, size: int, header: int, unit: int, unit_bytes: int) -> Callable[..., None]:
    def attend(count, head, key_dims, value_dims, first, straight, path, scratch):
        walk = walk_at(scratch)
        stored, row_bytes = num_units(unit, value_dims) * unit, num_units(unit, key_dims) * unit_bytes
        chunk, gathered, scores = head + first * row_bytes, scratch + GATHERED, scratch + SCORES
        shortest = longest = walk_end(walk, 0, first)
        for number in range(1, count):
            end = walk_end(walk, number, first)
            shortest, longest = min(shortest, end), max(longest, end)
        inside = max(0, min(straight - first, longest))
        tree = inside < longest
        if tree:
            for place in range(inside, longest):
                index = simd.peek_i64(path + 8 * (first + place - straight))
                copy_position(size, header, unit_bytes, row_bytes, 0, gathered, place, head, index)
        step = even_step(count)
        for piece in range(1 + tree):
            keys, begin, end = (gathered, inside, longest) if piece else (chunk, 0, inside)
            blocks = (end - begin + LANES - 1) // LANES
            for number in range(0, count, step):
                some, own = min(step, count - number), scores + 4 * begin + number * SCORES_STRIDE
                score(name, some, scratch + 8 * number, keys + begin * row_bytes, row_bytes, key_dims, blocks, own)
        for number in range(count):
            own = scores + number * SCORES_STRIDE
            softmax_weights(own, 0, walk_end(walk, number, first), scratch + POWERS, walk.partials[number], stored)
        # Blocks that all queries see whole, and then those that each sees a part of, or that a tree's row has of its own.
        together, turns = min(shortest, inside) // LANES, (count + _QUERIES - 1) // _QUERIES
        step, rest = (count + turns - 1) // turns, gathered if tree else chunk
        for number in range(0, count, step):
            some, own = min(step, count - number), scores + number * SCORES_STRIDE
            _weigh(name, rope_dims, some, scratch + 8 * number, own, chunk, rest, row_bytes, key_dims, together, first)

    return attend


@emitted
def _weigh(
    o: Ops, name: str, rope_dims: Value, count: Value, walk: Value, weights: Value, keys: Value, rest: Value, row_bytes: Value,
    dims: Value, blocks: Value, first: Value,
) -> None:  # fmt: skip
    """The sums of weight * key of `count` queries to their partials: over `blocks` blocks of 16 keys, and over further ones at
    `rest` as far as each query sees them.
    """
    coding = CODINGS[name]
    block_bytes = row_bytes * LANES
    lanes = o.value(ir.Constant(vector_of(I64), list(range(LANES))))

    def body(number: int) -> None:
        partials = [(walk + (_PARTIALS_AT + 8 * r)).load(I64) for r in range(number)]
        ends = [((walk + (_LENGTHS_AT + 8 * r)).load(I64) - first).smaller(CHUNK) for r in range(number)]
        longest = ends[0]
        for end in ends[1:]:
            longest = (longest < end).select(end, longest)

        def add_dims(at: Value, first_dim: Value, num_dims: Value, half: int, group_at: Value) -> None:
            def read(block: Value) -> list[Value]:
                return [coding.read(block + d * (LANES * coding.size), o.number(half, I32)) for d in range(_DIMS)]

            with o.loop((num_dims > 0).select(num_dims // _DIMS, num_dims.like(0))) as index:
                offset = at + index * (_DIMS * LANES * coding.size)
                sums = [o.variables(_DIMS) for _ in range(number)]

                def add(base: Value, block: Value, seen: list[Value]) -> None:
                    scale: tuple[Value, ...] = ()
                    if coding.group:
                        scale = (base + group_at).f16(), (base + group_at + 2 * LANES).f16()
                    found = [fma(key, *scale) if scale else key for key in read(base + offset)]
                    for r, totals in enumerate(sums):
                        weight = (weights + block * 64 + r * SCORES_STRIDE).f32()
                        for key, total in zip(found, totals, strict=True):
                            # What a query does not see may be no finite number.
                            x, y = (seen[r].select(one, one.like(0.0)) if seen else one for one in (weight, key))
                            total.set(fma(x, y, total.get()))

                with o.loop(blocks) as block:
                    add(keys + block * block_bytes, block, [])
                with o.loop(longest.rounded_up(LANES) - blocks) as later:
                    block = blocks + later
                    add(rest + block * block_bytes, block, [lanes < (end - block * LANES).splat() for end in ends])
                for partial, totals in zip(partials, sums, strict=True):
                    (partial + (first_dim + index * _DIMS) * 4).store(_folded([total.get() for total in totals]))

        if coding.group:
            with o.loop(dims.rounded_up(coding.group)) as group:
                at = group * (LANES * coding.unit_bytes)
                for part in parts_of_group(coding, at, group, dims):
                    add_dims(*part, at)
        else:
            with o.loop(o.number(2)) as half:  # rotated numbers, which are no values, and then half of the vector
                first_dim = dims // 2 * half + rope_dims // 2
                add_dims(first_dim * (LANES * coding.size), first_dim, (dims - rope_dims) // 2, 0, o.number(0))

    o.switch(count, {number: functools.partial(body, number) for number in range(1, _QUERIES + 1)})


def _folded(vectors: list[Value]) -> Value:
    """The sum of the lanes of each of some vectors, a power of two of them, as the lanes of one."""
    number = len(vectors)
    while len(vectors) > 1:
        vectors = [
            one.shuffled(range(0, 2 * LANES, 2), two) + one.shuffled(range(1, 2 * LANES, 2), two)
            for one, two in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    (whole,), lanes = vectors, LANES
    while lanes > number:
        whole, lanes = whole.shuffled(range(0, lanes, 2)) + whole.shuffled(range(1, lanes, 2)), lanes // 2
    return whole
