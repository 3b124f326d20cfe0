"""LoRA adapters beside the products of a forward: y += scale * up (down x), in f32, for the rows that have an adapter.

"shrink" makes `down x` of prepared f32 activations, in chunks of inputs that are summed later, so that several threads share it.
"expand" adds the chunks up and multiplies with `up`. The names are vLLM's. What a row gets depends on that row alone: its sums have
one order, whatever the rows beside it.

`down` is f32 [vectors of 16 ranks][inputs][16], `up` f32 [tiles of 16 outputs][rank][16], both zero where there is nothing.
"""

from cpuspec.kernels import simd
from cpuspec.kernels.options import compiled
from cpuspec.kernels.products import BLOCK_ROWS

CHUNK = 512  # inputs whose products one item of "shrink" sums; even
PIECE = 16  # tiles of outputs that one item of "expand" makes


@compiled
def num_chunks(features):
    """Chunks of so many inputs."""
    return (features + CHUNK - 1) // CHUNK


@compiled
def num_pieces(op):
    """Pieces of the outputs of all matrices of an operation."""
    pieces = 0
    for t in range(op.num_tensors):
        pieces += (op.tensors[t].num_tiles + PIECE - 1) // PIECE
    return pieces


@compiled
def _partial(entry, tensor, chunks, chunk, row):
    """Where the sums of a chunk lie for a row of an adapter."""
    rows = entry.end_row - entry.row
    return entry.room + ((tensor * chunks + chunk) * rows + row - entry.row) * entry.rank_bytes


@compiled
def _shrink_four(weights, inputs, stride, count, out, out_stride):
    """16 ranks of four rows: `count` inputs, `stride` bytes apart, even and odd ones summed apart, then together."""
    zero = simd.splat_f32(0.0)
    even0 = even1 = even2 = even3 = odd0 = odd1 = odd2 = odd3 = zero
    for _ in range(count // 2):
        column = simd.load_f32(weights)
        even0 = simd.fma(column, simd.splat_f32(simd.peek_f32(inputs)), even0)
        even1 = simd.fma(column, simd.splat_f32(simd.peek_f32(inputs + 4)), even1)
        even2 = simd.fma(column, simd.splat_f32(simd.peek_f32(inputs + 8)), even2)
        even3 = simd.fma(column, simd.splat_f32(simd.peek_f32(inputs + 12)), even3)
        column = simd.load_f32(weights + 64)
        inputs += stride
        odd0 = simd.fma(column, simd.splat_f32(simd.peek_f32(inputs)), odd0)
        odd1 = simd.fma(column, simd.splat_f32(simd.peek_f32(inputs + 4)), odd1)
        odd2 = simd.fma(column, simd.splat_f32(simd.peek_f32(inputs + 8)), odd2)
        odd3 = simd.fma(column, simd.splat_f32(simd.peek_f32(inputs + 12)), odd3)
        inputs += stride
        weights += 128
    if count % 2 != 0:
        column = simd.load_f32(weights)
        even0 = simd.fma(column, simd.splat_f32(simd.peek_f32(inputs)), even0)
        even1 = simd.fma(column, simd.splat_f32(simd.peek_f32(inputs + 4)), even1)
        even2 = simd.fma(column, simd.splat_f32(simd.peek_f32(inputs + 8)), even2)
        even3 = simd.fma(column, simd.splat_f32(simd.peek_f32(inputs + 12)), even3)
    simd.store_f32(out, even0 + odd0)
    simd.store_f32(out + out_stride, even1 + odd1)
    simd.store_f32(out + 2 * out_stride, even2 + odd2)
    simd.store_f32(out + 3 * out_stride, even3 + odd3)


@compiled
def _shrink_one(weights, inputs, stride, count, out):
    """`_shrink_four` for one row, with the same bits."""
    even = odd = simd.splat_f32(0.0)
    for _ in range(count // 2):
        simd.fetch_line(weights)
        simd.fetch_line(weights + 64)
        even = simd.fma(simd.load_f32(weights), simd.splat_f32(simd.peek_f32(inputs)), even)
        odd = simd.fma(simd.load_f32(weights + 64), simd.splat_f32(simd.peek_f32(inputs + stride)), odd)
        inputs += 2 * stride
        weights += 128
    if count % 2 != 0:
        even = simd.fma(simd.load_f32(weights), simd.splat_f32(simd.peek_f32(inputs)), even)
    simd.store_f32(out, even + odd)


@compiled
def shrink(op, state, item):
    """A chunk of `down x` for the rows of one adapter and one matrix."""
    chunks = num_chunks(op.features)
    entry = state.adapted[item // (op.num_tensors * chunks)]
    tensor, chunk = item // chunks % op.num_tensors, item % chunks
    pair = entry.pairs[op.tensors[tensor].number]
    if pair.rank == 0:
        return
    first = chunk * CHUNK
    count, row = min(op.features - first, CHUNK), entry.row
    while row < entry.end_row:
        block = row // BLOCK_ROWS * BLOCK_ROWS
        block_rows = min(BLOCK_ROWS, state.num_rows - block)
        inputs = op.inputs + block * op.row_bytes + (first * block_rows + row - block) * 4
        together = 4 if row + 4 <= min(entry.end_row, block + block_rows) else 1
        out = _partial(entry, tensor, chunks, chunk, row)
        for vector in range((pair.rank + 15) // 16):
            weights = pair.down + (vector * op.features + first) * 64
            if together == 4:
                _shrink_four(weights, inputs, 4 * block_rows, count, out + 64 * vector, entry.rank_bytes)
            else:
                _shrink_one(weights, inputs, 4 * block_rows, count, out + 64 * vector)
        row += together


@compiled
def expand(op, state, item, scratch):
    """Add `scale * up (down x)` of each adapter of a span, one after the other, to some outputs of its rows."""
    pieces = num_pieces(op)
    span, piece, tensor = state.spans[item // pieces], item % pieces, 0
    while piece >= (op.tensors[tensor].num_tiles + PIECE - 1) // PIECE:
        piece -= (op.tensors[tensor].num_tiles + PIECE - 1) // PIECE
        tensor += 1
    made, chunks = op.tensors[tensor], num_chunks(op.features)
    first, end = piece * PIECE, min(made.num_tiles, piece * PIECE + PIECE)
    for number in range(span.first, span.end):
        entry = state.adapted[number]
        pair = entry.pairs[made.number]
        if pair.rank == 0:
            continue
        for row in range(entry.row, entry.end_row):
            for vector in range((pair.rank + 15) // 16):
                total = simd.splat_f32(0.0)
                for chunk in range(chunks):
                    total = total + simd.load_f32(_partial(entry, tensor, chunks, chunk, row) + 64 * vector)
                simd.store_f32(scratch + 64 * vector, total * simd.splat_f32(entry.scale))
            for tile in range(first, end):
                weights, total = pair.up + tile * pair.rank * 64, simd.splat_f32(0.0)
                for rank in range(pair.rank):
                    if row == entry.row:
                        simd.fetch_line(weights + 64 * rank)
                    total = simd.fma(simd.load_f32(weights + 64 * rank), simd.splat_f32(simd.peek_f32(scratch + 4 * rank)), total)
                out = made.out + row * made.stride + 64 * tile
                simd.store_f32(out, simd.load_f32(out) + total)
