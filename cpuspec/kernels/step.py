"""A whole forward as one compiled call: a program of operations, run by a team of threads that meet after each.

A program is rows of int64: an operation and its operands, mostly addresses. Whoever writes it knows the model; this file knows
how to run an operation on its share of the work. Threads take work in chunks from a counter, so one that is held up delays
only its chunk; who computes what never changes a result.
"""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from ctypes import addressof, c_int64
from functools import cache
from typing import Any

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from cpuspec.errors import BackendError
from cpuspec.formats.packing import aligned_bytes
from cpuspec.kernels import attention, machine_code, simd
from cpuspec.kernels.options import compiled
from cpuspec.kernels.pointwise import prepare_row, rotate_head, rows_of_block
from cpuspec.kernels.products import ORDERS, ROWS
from cpuspec.kernels.team import (
    COUNTERS,
    JOB,
    NUM_OPERATIONS,
    OPERATIONS,
    PARKED,
    QUIT,
    STATE,
    await_work,
    barrier,
    publish,
)

_Array = NDArray[Any]

EMBED, PREPARE, LINEAR, ROTATE, ATTEND, KEEP, FINISH = range(7)

# The state block (index of an int64). `enter` writes the first part for each call; addresses are of arrays that stay.
(
    NUM_ROWS,
    NUM_LOGIT_ROWS,
    NUM_PICKED,  # rows of logits whose largest is looked for: all of a few, or none
    TOKENS,  # int64 [rows]
    POSITIONS,  # int64 [rows]
    LOGIT_ROWS,  # int64 rows to project
    LOGITS,  # where the logits go
    KEPT,  # for each layer, where its output rows go, or 0; 0 where no layer is kept
    STORAGE,  # int64 address of each row's cache slot; here `enter` writes rows
    CACHE_INDEX,  # int64 index in the cache at which each row is appended
    LENGTH,  # int64 number of positions each row attends to
    STRAIGHT,  # int64 first logical position of each row that `PATHS` places
    PATHS,  # int64 [rows, path length]
    PATH_LENGTH,
    COSINES,  # [positions, D/2]
    SINES,
    HEAD_BYTES,  # of one head of one layer in a cache slot
    SCRATCH,  # of all threads, one after another
    SCRATCH_BYTES,  # of one thread
    HEADS,
    KV_HEADS,
    THREADS,
    BLOCKS,  # int64 [blocks, BLOCK_COLUMNS]: how attention is shared out; here `enter` writes
    NUM_BLOCKS,
    NUM_ITEMS,  # of all blocks
    RECORDS,  # of chunks that several threads walk over
    MOST_RECORDS,  # that have room there
    WALKED,  # int64 [blocks, kv heads], zeros: how many spans of a block's chunks are done
    PEAKS,  # f32 [ROWS, threads * CHUNKS]: the largest logit of each chunk of tiles
    PICKED,  # int32 [ROWS]: the lowest id of a row's largest logit; -1 where that is no finite number
    STATE_LENGTH,
) = range(31)

# What `Program.enter` passes on begins with these int64; of arrays it has the addresses of their objects.
C_ROWS, C_LOGIT_ROWS, C_PARENTS, C_SEQUENCES, C_HEAD_BYTES, C_LOGITS, C_KEPT, CALL_LENGTH = range(8)

# Operands, by operation. Column 0 is the operation. "_BITS" hold an f32 in their low half.
E_DECODER, E_DATA, E_ROW_BYTES, E_BLOCKS, E_FEATURES, E_OUT, E_STRIDE = range(1, 8)
P_KIND, P_ROWS, P_OTHER, P_STRIDE, P_WEIGHT, P_EPS_BITS, P_FEATURES, P_INT8, P_INT16, P_F32 = range(1, 11)
P_BF16, P_ROUNDED, P_SELECT = range(11, 14)
L_TENSORS, L_VOCAB, L_FEATURES, L_FIRST = 1, 2, 3, 4  # L_VOCAB: 0 unless these are the logits
T_KERNEL, T_TILES, T_TILE_BYTES, T_NUM_TILES, T_INPUTS, T_ROW_BYTES, T_BIAS, T_RESIDUAL, T_OUT, T_STRIDE, TENSOR_COLUMNS = range(11)
R_QUERIES, R_KEYS, R_VALUES, R_Q_STRIDE, R_K_STRIDE, R_V_STRIDE, R_Q_NORM, R_K_NORM, R_EPS_BITS, R_SCALE_BITS = range(1, 11)
R_HEADS, R_KV_HEADS, R_DIMS, R_LAYER, R_APPEND = range(11, 16)
A_QUERIES, A_STRIDE, A_OUT, A_OUT_STRIDE, A_HEADS, A_KV_HEADS, A_DIMS, A_LAYER, A_KERNEL = range(1, 10)
A_RECORDS_AT, A_RECORD_BYTES = range(10, 12)
K_ROWS, K_STRIDE, K_LAYER, K_BYTES = range(1, 5)
F_TILES, F_STRIDE = 1, 2
COLUMNS = L_FIRST + 3 * TENSOR_COLUMNS

_NUMBERS = np.zeros(1)  # any array
_LOWEST = np.float32(-np.inf)

CHUNKS = 8  # in each thread's share of the tiles of a LINEAR

# In an array object of numpy, the address of its numbers: to ask for it in Python takes longer than all else about an array.
_DATA_AT = next(at for at in range(0, 128, 8) if c_int64.from_address(id(_NUMBERS) + at).value == _NUMBERS.ctypes.data)

# A block of attention: rows of one sequence that go over the cache together. Its chunks are walked over in spans, one an item.
B_ROW, B_END_ROW, B_CHUNKS, B_SPAN, B_ITEM, B_RECORD, BLOCK_COLUMNS = range(7)
BLOCK_QUERIES = 64  # of one key head that a block has at most, unless a single row has more
_LEAST_QUERIES = 32  # that make a read of keys and values from memory worth its time
_ITEMS_PER_THREAD = 8

_INT8_BYTES, _INT16_BYTES, _F32_BYTES, _BF16_BYTES = (ORDERS[order] for order in ("int8", "int16", "f32", "bf16"))


@intrinsic
def _call(typingctx, address, operands):
    """Call a kernel by its address, with a tuple of int64."""

    def codegen(context, builder, sig, args):
        simd.call_address(builder, args[0], cgutils.unpack_tuple(builder, args[1], len(operands)))
        return context.get_dummy_value()

    return types.void(types.int64, operands), codegen


@compiled
def _take(counter, items, chunk):
    """The first item of the next chunk, or `items` when nothing is left."""
    return min(simd.fetch_add(counter, chunk), items)


@compiled
def _enter(state_address, numbers):
    """Write into the state block what the numbers that `Program.enter` notes say. Returns how many records that takes."""
    state = carray(simd.words(state_address), STATE_LENGTH)
    call = carray(simd.words(numbers), CALL_LENGTH)
    num_rows, num_logit_rows, num_parents, num_slots = call[C_ROWS], call[C_LOGIT_ROWS], call[C_PARENTS], call[C_SEQUENCES]
    state[NUM_ROWS], state[NUM_LOGIT_ROWS] = num_rows, num_logit_rows
    state[NUM_PICKED] = num_logit_rows if num_logit_rows <= ROWS else 0
    state[HEAD_BYTES], state[LOGITS] = call[C_HEAD_BYTES], _data(call[C_LOGITS])
    state[KEPT] = _data(call[C_KEPT]) if call[C_KEPT] != 0 else 0
    state[TOKENS] = numbers + 8 * CALL_LENGTH
    state[POSITIONS] = state[TOKENS] + 8 * num_rows
    state[LOGIT_ROWS] = state[POSITIONS] + 8 * num_rows
    lengths = state[LOGIT_ROWS] + 8 * num_logit_rows
    storage = lengths + 8 * num_slots
    starts = storage + 8 * num_slots
    parents = starts + 8 * (num_slots + 1)
    for b in range(num_slots):
        start, end = simd.peek_i64(starts + 8 * b), simd.peek_i64(starts + 8 * b + 8)
        prefix = simd.peek_i64(lengths + 8 * b)
        for row in range(start, end):
            depth = row - start + 1
            if num_parents > 0:
                depth, node = 0, row
                while node >= 0:
                    depth, node = depth + 1, simd.peek_i64(parents + 8 * node)
            # A row that sees all rows before it is a chain's, also in a tree.
            straight = prefix + depth if depth == row - start + 1 else prefix // simd.LANES * simd.LANES
            simd.poke_i64(state[STORAGE] + 8 * row, simd.peek_i64(storage + 8 * b))
            simd.poke_i64(state[CACHE_INDEX] + 8 * row, prefix + row - start)
            simd.poke_i64(state[LENGTH] + 8 * row, prefix + depth)
            simd.poke_i64(state[STRAIGHT] + 8 * row, straight)
            if straight < prefix + depth:
                _write_path(state, row, parents, prefix - start, straight, prefix, prefix + depth)
    return _share_attention(state)


@compiled
def _data(array):
    """Where the numbers of a numpy array are, from the address of the array object."""
    return simd.peek_i64(array + _DATA_AT)


@compiled
def _share_attention(state):
    """Share out a forward's attention among the threads. Returns how many records that takes.

    A result does not depend on the plan: records are of chunks, and folded in the order of the chunks.
    """
    rows, heads, kv_heads, threads = state[NUM_ROWS], state[HEADS], state[KV_HEADS], state[THREADS]
    group, blocks = heads // kv_heads, carray(simd.words(state[BLOCKS]), (state[NUM_ROWS], BLOCK_COLUMNS))
    shares = _ITEMS_PER_THREAD * threads
    queries = min(BLOCK_QUERIES, max(_LEAST_QUERIES, (2 * rows * heads + shares - 1) // shares))
    most_rows = max(1, queries // group)
    row = block = walks = 0
    while row < rows:
        end = row + 1
        while end < rows and simd.peek_i64(state[STORAGE] + 8 * end) == simd.peek_i64(state[STORAGE] + 8 * row):
            end += 1
        parts = (end - row + most_rows - 1) // most_rows
        for part in range(parts):
            first, last = row + (end - row) * part // parts, row + (end - row) * (part + 1) // parts
            longest = 0
            for here in range(first, last):
                longest = max(longest, simd.peek_i64(state[LENGTH] + 8 * here))
            chunks = (longest + attention.CHUNK - 1) // attention.CHUNK
            blocks[block, B_ROW], blocks[block, B_END_ROW], blocks[block, B_CHUNKS] = first, last, chunks
            walks += chunks * kv_heads
            block += 1
        row = end
    longest_span = (walks + shares - 1) // shares if threads > 1 else walks
    items = records = 0
    for i in range(block):
        chunks = blocks[i, B_CHUNKS]
        spans = (chunks + longest_span - 1) // longest_span
        blocks[i, B_SPAN], blocks[i, B_ITEM], blocks[i, B_RECORD] = (chunks + spans - 1) // spans, items, records
        items += spans * kv_heads
        if spans > 1:
            records += chunks * (blocks[i, B_END_ROW] - blocks[i, B_ROW]) * heads
    state[NUM_BLOCKS], state[NUM_ITEMS] = block, items
    return records


@compiled
def _write_path(state, row, parents, offset, straight, prefix, length):
    """Cache indices of a tree row's logical positions straight..length: the rest of the prefix, its ancestors by depth, itself."""
    path = state[PATHS] + 8 * (row * state[PATH_LENGTH] - straight)
    for index in range(straight, prefix):
        simd.poke_i64(path + 8 * index, index)
    node = row
    for index in range(length - 1, prefix - 1, -1):
        simd.poke_i64(path + 8 * index, node + offset)
        node = simd.peek_i64(parents + 8 * node)


@compiled
def _embed(op, state, counter):
    """Rows of the embedding, padded with zeros."""
    rows = state[NUM_ROWS]
    while True:
        row = _take(counter, rows, 1)
        if row == rows:
            return
        token, out = simd.peek_i64(state[TOKENS] + 8 * row), op[E_OUT] + row * op[E_STRIDE]
        simd.call_3(op[E_DECODER], op[E_DATA] + token * op[E_ROW_BYTES], op[E_BLOCKS], out)
        for at in range(4 * op[E_FEATURES], op[E_STRIDE], 4):
            simd.poke_f32(out + at, simd.to_float(0))


@compiled
def _prepare(op, state, counter, threads):
    """Rows to activations. With few rows, a long row is shared: each part measures the whole norm and writes its own inputs."""
    selected = op[P_SELECT] != 0
    rows = state[NUM_LOGIT_ROWS] if selected else state[NUM_ROWS]
    features = op[P_FEATURES]
    parts = 1 if rows >= 2 * threads else max(1, min(threads, features // 1024))
    part = (features // parts + 31) // 32 * 32
    eps = simd.f32_bits(simd.int32(op[P_EPS_BITS]))
    while True:
        item = _take(counter, rows * parts, 1)
        if item == rows * parts:
            return
        place, first = item // parts, item % parts * part
        row = simd.peek_i64(state[LOGIT_ROWS] + 8 * place) if selected else place
        source = op[P_ROWS] + row * op[P_STRIDE]
        block, block_rows = place // ROWS * ROWS, rows_of_block(place, rows)
        inputs = block * ((features + 31) // 32)
        int8 = op[P_INT8] + inputs * _INT8_BYTES if op[P_INT8] != 0 else 0
        int16 = op[P_INT16] + inputs * _INT16_BYTES if op[P_INT16] != 0 else 0
        f32 = op[P_F32] + inputs * _F32_BYTES if op[P_F32] != 0 else 0
        bf16 = op[P_BF16] + inputs * _BF16_BYTES if op[P_BF16] != 0 else 0
        rounded = op[P_ROUNDED] + inputs * _F32_BYTES if op[P_ROUNDED] != 0 else 0
        other = op[P_OTHER] + row * op[P_STRIDE]
        end = min(features, first + part)
        prepare_row(
            op[P_KIND],
            source,
            other,
            op[P_WEIGHT],
            eps,
            features,
            first,
            end,
            int8,
            int16,
            f32,
            bf16,
            rounded,
            place - block,
            block_rows,
        )


@compiled
def _linear(op, state, counters, stride, threads, thread):
    """Tiles of up to three matrices that read the same rows. counters: of the threads, `stride` bytes apart.

    A thread goes through its own share from the first tile to the last, and then helps the others with what is left of theirs.
    """
    vocab = op[L_VOCAB]
    rows = state[NUM_LOGIT_ROWS] if vocab else state[NUM_ROWS]
    tensors = op[L_TENSORS]
    items = 0
    for t in range(tensors):
        items += op[L_FIRST + t * TENSOR_COLUMNS + T_NUM_TILES]
    for turn in range(threads):
        owner = (thread + turn) % threads
        start, share = _share(items, owner, threads)
        while True:
            number = _take(counters + owner * stride, CHUNKS, 1)
            first, end = start + _chunk(share, number), start + _chunk(share, number + 1)
            if first == end:
                break
            _multiply(op, state, rows, first, end)
            if vocab:
                for row in range(state[NUM_PICKED]):
                    peak = _peak(state[LOGITS] + row * op[L_FIRST + T_STRIDE], first, end, vocab)
                    simd.poke_f32(_peaks(state, row, threads) + 4 * (owner * CHUNKS + number), peak)


@compiled
def _multiply(op, state, rows, first, end):
    """Tiles first..end of a LINEAR, numbered through all of its matrices."""
    for t in range(op[L_TENSORS]):
        at = L_FIRST + t * TENSOR_COLUMNS
        tiles = op[at + T_NUM_TILES]
        if first < tiles and end > 0:
            out = state[LOGITS] if op[L_VOCAB] else op[at + T_OUT]
            operands = (
                op[at + T_TILES],
                op[at + T_TILE_BYTES],
                op[L_FEATURES],
                max(first, 0),
                min(end, tiles),
                op[at + T_INPUTS],
                op[at + T_ROW_BYTES],
                rows,
                op[at + T_BIAS],
                op[at + T_RESIDUAL],
                out,
                op[at + T_STRIDE],
            )
            _call(op[at + T_KERNEL], operands)
        first -= tiles
        end -= tiles


@compiled
def _share(tiles, thread, threads):
    """A thread's share: the first of its tiles, and how many they are."""
    start = tiles * thread // threads
    return start, tiles * (thread + 1) // threads - start


@compiled
def _chunk(share, number):
    """Where a chunk of a share begins. Each is half of what is left: memory is read in long runs, and threads end together."""
    return share - (share >> number) if number < CHUNKS else share


@compiled
def _peaks(state, row, threads):
    return state[PEAKS] + 4 * row * CHUNKS * threads


@compiled
def _peak(logits, first, end, vocab):
    """The largest of a row's logits in some tiles; nan if there is one. Lanes beyond the vocabulary are not looked at."""
    lowest = simd.splat_f32(-np.inf)
    a, b, c, d = lowest, lowest, lowest, lowest
    whole = min(end, vocab // simd.LANES)
    tile = first
    while tile + 4 <= whole:  # four at a time: each waits for the one before
        at = logits + 64 * tile
        a, b = simd.max_f32(a, simd.load_f32(at)), simd.max_f32(b, simd.load_f32(at + 64))
        c, d = simd.max_f32(c, simd.load_f32(at + 128)), simd.max_f32(d, simd.load_f32(at + 192))
        tile += 4
    while tile < end:
        x = simd.first_lanes(simd.load_f32(logits + 64 * tile), simd.int32(vocab - simd.LANES * tile), lowest)
        a = simd.max_f32(a, x)
        tile += 1
    return simd.max_lanes(simd.max_f32(simd.max_f32(a, b), simd.max_f32(c, d)))


@compiled
def _finish(op, state, threads):
    """Pick the lowest id of each row's largest logit."""
    tiles = op[F_TILES]
    for row in range(state[NUM_PICKED]):
        peaks, peak, first = _peaks(state, row, threads), _LOWEST, 0
        for owner in range(threads):
            start, share = _share(tiles, owner, threads)
            number = 0
            while _chunk(share, number) < share:
                other = simd.peek_f32(peaks + 4 * (owner * CHUNKS + number))
                if not (other <= peak or simd.is_nan(peak)):
                    peak, first = other, start + _chunk(share, number)
                number += 1
        id = -1
        if not simd.is_nan(peak - peak):  # finite
            id = _find(state[LOGITS] + row * op[F_STRIDE], first, peak)
        simd.poke_i32(state[PICKED] + 4 * row, simd.int32(id))


@compiled
def _find(logits, tile, value):
    """The id of the first of a row's logits, from a tile on, that is `value`; there is one."""
    while True:
        lane = simd.first_equal(simd.load_f32(logits + 64 * tile), simd.splat_f32(value))
        if lane < simd.LANES:
            return simd.LANES * tile + lane
        tile += 1


@compiled
def _cached_head(state, row, layer, kv_heads, head):
    """Address of one head in a row's cache slot, which is [layer][head]."""
    return simd.peek_i64(state[STORAGE] + 8 * row) + (layer * kv_heads + head) * state[HEAD_BYTES]


@compiled
def _rotate(op, state, counter, threads):
    """Rotary positions of queries and keys; keys and values go to the cache."""
    heads, kv_heads, dims = op[R_HEADS], op[R_KV_HEADS], op[R_DIMS]
    per_row = heads + kv_heads
    items = state[NUM_ROWS] * per_row
    chunk = max(1, items // (threads * 4))
    eps, scale = simd.f32_bits(simd.int32(op[R_EPS_BITS])), simd.f32_bits(simd.int32(op[R_SCALE_BITS]))
    while True:
        first = _take(counter, items, chunk)
        if first == items:
            return
        for item in range(first, min(items, first + chunk)):
            row, head = item // per_row, item % per_row
            turn = simd.peek_i64(state[POSITIONS] + 8 * row) * dims * 2
            cosines, sines = state[COSINES] + turn, state[SINES] + turn
            if head < heads:
                query = op[R_QUERIES] + row * op[R_Q_STRIDE] + head * dims * 4
                rotate_head(query, dims, cosines, sines, op[R_Q_NORM], eps, scale)
            else:
                head -= heads
                key = op[R_KEYS] + row * op[R_K_STRIDE] + head * dims * 4
                value = op[R_VALUES] + row * op[R_V_STRIDE] + head * dims * 4
                rotate_head(key, dims, cosines, sines, op[R_K_NORM], eps, simd.to_float(1))
                index = simd.peek_i64(state[CACHE_INDEX] + 8 * row)
                _call(op[R_APPEND], (_cached_head(state, row, op[R_LAYER], kv_heads, head), dims, index, key, value))


@compiled
def _attend(op, state, counter, threads, thread):
    """Attention: a span of chunks for a block's queries of one key head. Whoever does a block's last span folds all its records."""
    heads, kv_heads, size = op[A_HEADS], op[A_KV_HEADS], op[A_RECORD_BYTES]
    group, items = heads // kv_heads, state[NUM_ITEMS]
    scratch = state[SCRATCH] + thread * state[SCRATCH_BYTES]
    block = state[NUM_BLOCKS] - 1
    at = state[BLOCKS] + 8 * BLOCK_COLUMNS * block
    while True:
        item = _take(counter, items, 1)
        if item == items:
            return
        item = items - 1 - item  # the longest rows first
        while item < simd.peek_i64(at + 8 * B_ITEM):
            block, at = block - 1, at - 8 * BLOCK_COLUMNS
        row, end_row = simd.peek_i64(at + 8 * B_ROW), simd.peek_i64(at + 8 * B_END_ROW)
        chunks, span = simd.peek_i64(at + 8 * B_CHUNKS), simd.peek_i64(at + 8 * B_SPAN)
        spans, queries = (chunks + span - 1) // span, (end_row - row) * group
        kv_head, first = (item - simd.peek_i64(at + 8 * B_ITEM)) // spans, (item - simd.peek_i64(at + 8 * B_ITEM)) % spans * span
        records, stride = scratch + op[A_RECORDS_AT] + attention.QUERIES * size, size
        if spans > 1:
            stride = chunks * size
            records = state[RECORDS] + simd.peek_i64(at + 8 * B_RECORD) * size + kv_head * queries * stride
        for chunk in range(first, min(chunks, first + span)):
            _attend_chunk(op, state, row, end_row, kv_head, chunk, spans > 1, records, stride, scratch)
        if spans > 1:
            walked = state[WALKED] + 8 * (block * kv_heads + kv_head)
            if simd.fetch_add(walked, 1) < spans - 1:
                continue
            simd.poke_i64(walked, 0)
        for query in range(queries):
            record, here = records + query * stride, row + query // group
            if spans > 1:
                for later in range(1, (simd.peek_i64(state[LENGTH] + 8 * here) + attention.CHUNK - 1) // attention.CHUNK):
                    attention.fold(record, record + later * size, size)
            head = kv_head * group + query % group
            attention.finish(record, size, op[A_DIMS], op[A_OUT] + here * op[A_OUT_STRIDE] + head * op[A_DIMS] * 4)


@compiled
def _attend_chunk(op, state, row, end_row, kv_head, chunk, apart, records, stride, scratch):
    """Walk over one chunk for rows row..end_row. The records of chunks stay apart, or are folded into the first one's."""
    group, dims, size, start = op[A_HEADS] // op[A_KV_HEADS], op[A_DIMS], op[A_RECORD_BYTES], chunk * attention.CHUNK
    head = _cached_head(state, row, op[A_LAYER], op[A_KV_HEADS], kv_head)
    first = row * group
    while row < end_row:
        run = row
        while run < end_row and _sees_straight(state, run, start):
            run += 1
        alone, straight = run == row, start + attention.CHUNK
        if alone:  # beyond the prefix, each row of a tree has a path of its own; or the row does not see the chunk
            run, straight = row + 1, simd.peek_i64(state[STRAIGHT] + 8 * row)
        query, end = row * group, run * group
        if simd.peek_i64(state[LENGTH] + 8 * row) <= start:
            query = end
        while query < end:
            walks = (end - query + attention.QUERIES - 1) // attention.QUERIES
            count = (end - query + walks - 1) // walks
            for number in range(count):
                here, member = (query + number) // group, (query + number) % group
                to = records + (query + number - first) * stride
                if apart:
                    to += chunk * size
                elif chunk > 0:
                    to = scratch + op[A_RECORDS_AT] + number * size
                address = op[A_QUERIES] + here * op[A_STRIDE] + (kv_head * group + member) * dims * 4
                attention.put_query(scratch, number, address, to, simd.peek_i64(state[LENGTH] + 8 * here))
            _call(op[A_KERNEL], (count, head, dims, start, straight, state[PATHS] + row * state[PATH_LENGTH] * 8, scratch))
            if not apart and chunk > 0:
                for number in range(count):
                    attention.fold(records + (query + number - first) * stride, scratch + op[A_RECORDS_AT] + number * size, size)
            query += count
        row = run


@compiled
def _sees_straight(state, row, start):
    """Whether a row sees positions of the chunk at `start`, and each where it lies in a chain."""
    length = simd.peek_i64(state[LENGTH] + 8 * row)
    return length > start and simd.peek_i64(state[STRAIGHT] + 8 * row) >= min(length, start + attention.CHUNK)


@compiled
def _keep(op, state):
    """Copy a layer's output rows to whoever asked for them."""
    to = simd.peek_i64(state[KEPT] + 8 * op[K_LAYER]) if state[KEPT] != 0 else 0
    if to != 0:
        for row in range(state[NUM_ROWS]):
            for at in range(0, op[K_BYTES], 4):
                simd.poke_f32(to + row * op[K_BYTES] + at, simd.peek_f32(op[K_ROWS] + row * op[K_STRIDE] + at))


def _run(control, threads, thread):
    """One thread's part of the published forward."""
    operations = simd.peek_i64(control + NUM_OPERATIONS)
    program = carray(simd.words(simd.peek_i64(control + OPERATIONS)), (operations, COLUMNS))
    state = carray(simd.words(simd.peek_i64(control + STATE)), STATE_LENGTH)
    counters = simd.peek_i64(control + COUNTERS)
    for i in range(operations):
        op, counter = program[i], counters + 8 * i
        if op[0] == EMBED:
            _embed(op, state, counter)
        elif op[0] == PREPARE:
            _prepare(op, state, counter, threads)
        elif op[0] == LINEAR:
            _linear(op, state, counter, 8 * operations, threads, thread)
        elif op[0] == ROTATE:
            _rotate(op, state, counter, threads)
        elif op[0] == ATTEND:
            _attend(op, state, counter, threads, thread)
        else:  # only reads what nobody writes before the next barrier
            if thread == 0:
                if op[0] == KEEP:
                    _keep(op, state)
                else:
                    _finish(op, state, threads)
            continue
        barrier(control, threads, thread)


def _lead(control, job, threads, run, numbers):
    """Enter a forward, publish it and run the caller's part of it.

    Returns how many workers sleep, and if any has only published. A negative number: so many records must have room before.
    """
    state_address = simd.peek_i64(job + STATE - JOB)
    state, records = carray(simd.words(state_address), STATE_LENGTH), _enter(state_address, numbers)
    if records > state[MOST_RECORDS]:
        return -records
    asleep = publish(control, job, threads)
    if asleep == 0:
        simd.call_3(run, control, threads, 0)
    return asleep


def _work(control, threads, thread, seen, run):
    """Run every published forward until told to end (-1) or until it is time to sleep (the last generation seen)."""
    while True:
        now = await_work(control, seen, thread)
        if now < 0 or now == seen:
            return now
        simd.call_3(run, control, threads, thread)
        seen = now


# By name: the Python function, its number of arguments, whether it returns something.
_ENTRIES = {
    "run": (_run, 3, False),
    "lead": (_lead, 5, True),
    "work": (_work, 5, True),
    "publish": (publish.py_func, 3, True),
}


@cache
def _entry(name: str) -> int:
    """Address of one of _ENTRIES."""
    python, num_arguments, returns = _ENTRIES[name]
    return machine_code.address(name, num_arguments, lambda: python, returns)


@cache
def _function(name: str) -> Callable[..., Any]:
    """One of _ENTRIES, for Python."""
    _, num_arguments, returns = _ENTRIES[name]
    return machine_code.function(_entry(name), num_arguments, returns)


class Program:
    """The operations of a forward, one row each, and the state block that they read, for so many threads."""

    def __init__(self, operations: NDArray[np.int64], threads: int) -> None:
        assert operations.shape[1:] == (COLUMNS,), "an operation is a row of COLUMNS numbers"
        self.state = np.zeros(STATE_LENGTH, np.int64)
        self.operations = np.ascontiguousarray(operations, np.int64)
        self.counters = aligned_bytes((8 * threads * len(operations),))
        # As `team.publish` takes them.
        addresses = [self.operations.ctypes.data, len(operations), self.state.ctypes.data, self.counters.ctypes.data]
        self._job = np.array(addresses)
        self.job: int = self._job.ctypes.data
        self._numbers = (c_int64 * 0)()
        self.numbers = 0  # the address of what `enter` notes

    def enter(
        self, tokens: list[int], positions: list[int], parents: list[int], logit_rows: Sequence[int], q_start: list[int],
        lengths: list[int], storage: list[int], head_bytes: int, kept: _Array | None, logits: _Array,
    ) -> None:  # fmt: skip
        """Note what the next run is about, where its rows go in the cache and what they attend to.

        As in `ForwardBatch`, parents empty where every sequence is a chain. lengths: tokens that each sequence's slot holds;
        storage: addresses of the slots; head_bytes: of one head of one layer in them; kept: for each layer, int64 address of where
        its rows are kept, None for no layer; logits f32 [logit rows, stride]. The arrays must stay until the run is over.
        """
        numbers: list[int | c_int64] = [  # a slice of ctypes takes both
            len(tokens), len(logit_rows), len(parents), len(q_start) - 1, head_bytes, id(logits),
            0 if kept is None else id(kept), *tokens, *positions, *logit_rows, *lengths, *storage, *q_start, *parents,
        ]  # fmt: skip
        if len(numbers) > len(self._numbers):
            self._numbers = (c_int64 * (2 * len(numbers)))()
            self.numbers = addressof(self._numbers)
        self._numbers[: len(numbers)] = numbers


class Team:
    """`threads` threads, the caller's among them, that run one program after another. Models that take turns share one.

    lock: held while a forward runs, by a thread that may hold it already. The workers know the team's memory and not the team, so
    that they end with it. In a forked child, which has none of the parent's threads, the next run gathers new ones.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        # All of it is compiled before a thread waits for another.
        self._lead, self._run, self._publish = map(_function, ("lead", "run", "publish"))
        _function("work")
        self._run_address = _entry("run")
        self._gather()
        _teams.add(self)

    def _gather(self) -> None:
        self._forked = False
        self.lock = threading.RLock()
        control = aligned_bytes((PARKED + 64 * self.threads,))
        control[:] = 0
        self._control, self._quit, self._address = control, control.view(np.int64)[QUIT // 8 : QUIT // 8 + 1], control.ctypes.data
        self._wake = [threading.Event() for _ in range(self.threads)]
        workers = [
            threading.Thread(target=_serve, args=(control, self.threads, i, self._wake[i]), daemon=True, name=f"cpuspec-{i}")
            for i in range(1, self.threads)
        ]
        for worker in workers:
            worker.start()
        # Also as the process exits, where a thread may still be running a forward: it must not outlive the memory that it reads.
        self._dismiss = weakref.finalize(self, _dismiss, control, self.lock, self._wake, workers)

    @property
    def closed(self) -> bool:
        """Whether the workers have ended, so that nothing can run."""
        return bool(self._quit[0])

    def run(self, program: Program) -> int:
        """Run a program on all threads as it was entered, and return 0 when it is done. The caller holds the lock.

        Where attention takes more records than have room, nothing is run, and their number is returned.
        Raises BackendError if the team was closed.
        """
        if self.closed:
            raise BackendError("this backend, or the one that it shares threads with, is closed; make a new one")
        if self._forked:
            self._gather()
        # One compiled call, so that an interrupt cannot come between publishing and running and leave the workers waiting.
        asleep = self._lead(self._address, program.job, self.threads, self._run_address, program.numbers)
        if asleep < 0:
            return -asleep
        if asleep:
            for event in self._wake:
                event.set()
            self._run(self._address, self.threads, 0)
        return 0

    def close(self) -> None:
        """End the workers, once no forward runs. Closing twice does nothing."""
        self._dismiss()
        self._quit[0] = 1

    def after_fork(self) -> None:
        """In a forked child: the parent's threads do not exist here, and what they held is not held."""
        self._forked, self.lock = True, threading.RLock()
        self._dismiss.detach()


def _serve(control: _Array, threads: int, thread: int, wake: threading.Event) -> None:
    """What a worker does, from its start to its end."""
    work, run, seen = _function("work"), _entry("run"), 0
    while (seen := work(control.ctypes.data, threads, thread, seen, run)) >= 0:
        wake.wait()
        wake.clear()


def _dismiss(control: _Array, lock: threading.RLock, wake: list[threading.Event], workers: list[threading.Thread]) -> None:
    """End the workers of a team that is closed or gone."""
    with lock:
        control.view(np.int64)[QUIT // 8] = 1
        nothing = Program(np.zeros((0, COLUMNS), np.int64), len(wake))
        _function("publish")(control.ctypes.data, nothing.job, len(wake))
        for event in wake:
            event.set()
    for worker in workers:
        if worker is not threading.current_thread():  # the garbage collector may run in any
            worker.join()


_teams: weakref.WeakSet[Team] = weakref.WeakSet()


def _after_fork() -> None:
    for team in list(_teams):
        team.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
