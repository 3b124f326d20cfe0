"""LoRA adapters beside the products of a forward: y += scale * up (down x), in f32, for the rows that have an adapter.

"shrink" makes `down x` of prepared f32 activations, in parts of inputs that are summed later, so that several threads share it.
"expand" adds the parts up and multiplies with `up`. The names are vLLM's. What a row gets depends on that row alone: its sums have
one order, whatever the rows beside it.

`down` is f32 [vectors of 16 ranks][inputs][16], `up` f32 [tiles of 16 outputs][rank][16], both zero where there is nothing.
"""

from functools import partial

from cpuspec.kernels import simd
from cpuspec.kernels.linear import number_sums
from cpuspec.kernels.ops import Ops, Value
from cpuspec.kernels.options import compiled
from cpuspec.kernels.products import BLOCK_ROWS
from cpuspec.kernels.simd import emitted

PART = 512  # inputs whose products one item of "shrink" sums; even
PIECE = 16  # tiles of outputs that one item of "expand" makes


@compiled
def num_parts(features):
    """Parts of `features` inputs."""
    return (features + PART - 1) // PART


@compiled
def num_pieces(op):
    """Pieces of the outputs of all matrices of an operation."""
    pieces = 0
    for t in range(op.num_tensors):
        pieces += (op.tensors[t].num_tiles + PIECE - 1) // PIECE
    return pieces


@compiled
def _partial(entry, tensor, parts, part, row):
    """Where the sums of a part lie for a row of an adapter."""
    rows = entry.end_row - entry.row
    return entry.partials + ((tensor * parts + part) * rows + row - entry.row) * entry.rank_bytes


@emitted
def _shrink(
    o: Ops, rows: Value, weights: Value, inputs: Value, stride: Value, count: Value, out: Value, out_stride: Value
) -> None:  # fmt: skip
    """16 ranks of `rows` rows, 1 or 4, as products of f32 weights (`linear.number_sums`): `count` inputs, `stride` bytes apart."""

    def some(number: int) -> None:
        for row, total in enumerate(number_sums(o, "f32", number, weights, count, inputs, stride)):
            (out + out_stride * row).store(total)

    o.switch(rows, {1: partial(some, 1), 4: partial(some, 4)})


@compiled
def shrink(op, state, item):
    """A part of `down x` for the rows of one adapter and one matrix."""
    parts = num_parts(op.features)
    entry = state.adapted[item // (op.num_tensors * parts)]
    tensor, part = item // parts % op.num_tensors, item % parts
    pair = entry.pairs[op.tensors[tensor].number]
    if pair.rank == 0:
        return
    first = part * PART
    count, row = min(op.features - first, PART), entry.row
    while row < entry.end_row:
        block = row // BLOCK_ROWS * BLOCK_ROWS
        block_rows = min(BLOCK_ROWS, state.num_rows - block)
        inputs = op.inputs + block * op.row_bytes + (first * block_rows + row - block) * 4
        together = 4 if row + 4 <= min(entry.end_row, block + block_rows) else 1
        out = _partial(entry, tensor, parts, part, row)
        for vector in range((pair.rank + 15) // 16):
            weights = pair.down + (vector * op.features + first) * 64
            _shrink(together, weights, inputs, 4 * block_rows, count, out + 64 * vector, entry.rank_bytes)
        row += together


@compiled
def expand(op, state, item, scratch):
    """Add `scale * up (down x)` of each adapter of a span, one after the other, to some outputs of its rows."""
    pieces = num_pieces(op)
    span, piece, tensor = state.spans[item // pieces], item % pieces, 0
    while piece >= (op.tensors[tensor].num_tiles + PIECE - 1) // PIECE:
        piece -= (op.tensors[tensor].num_tiles + PIECE - 1) // PIECE
        tensor += 1
    made, parts = op.tensors[tensor], num_parts(op.features)
    first, end = piece * PIECE, min(made.num_tiles, piece * PIECE + PIECE)
    for number in range(span.first, span.end):
        entry = state.adapted[number]
        pair = entry.pairs[made.number]
        if pair.rank == 0:
            continue
        for row in range(entry.row, entry.end_row):
            for vector in range((pair.rank + 15) // 16):
                total = simd.splat_f32(0.0)
                for part in range(parts):
                    total = total + simd.load_f32(_partial(entry, tensor, parts, part, row) + 64 * vector)
                simd.store_f32(scratch + 64 * vector, total * simd.splat_f32(entry.scale))
            for tile in range(first, end):
                weights, total = pair.up + tile * pair.rank * 64, simd.splat_f32(0.0)
                for rank in range(pair.rank):
                    if row == entry.row:
                        simd.fetch_line(weights + 64 * rank)
                    total = simd.fma(simd.load_f32(weights + 64 * rank), simd.splat_f32(simd.peek_f32(scratch + 4 * rank)), total)
                out = made.out + row * made.stride + 64 * tile
                simd.store_f32(out, simd.load_f32(out) + total)
