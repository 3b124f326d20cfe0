"""A whole forward as one compiled call: a program of operations, run by a team of threads that meet after each.

A program is rows of int64: an operation and its operands, mostly addresses. Whoever writes it knows the model; this file knows
how to run an operation on its share of the work. Threads take work in chunks from a counter, so one that is held up delays
only its chunk; who computes what never changes a result.
"""

import atexit
import threading

import numpy as np
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from cpuspec.formats.packing import aligned_bytes
from cpuspec.kernels import simd
from cpuspec.kernels.attention import QUERIES, append_key_value, attend, put_query
from cpuspec.kernels.options import compiled
from cpuspec.kernels.pointwise import prepare_row, rotate_head, rows_of_block
from cpuspec.kernels.products import ORDERS, ROWS
from cpuspec.kernels.team import (
    COUNTERS,
    GENERATION,
    NUM_OPERATIONS,
    OPERATIONS,
    PARKED,
    QUIT,
    STATE,
    await_work,
    barrier,
    publish,
)

PREPARE, LINEAR, ROTATE, ATTEND, KEEP = range(5)

# Per call, in the state block (index of an int64).
(
    NUM_ROWS,
    NUM_LOGIT_ROWS,
    LOGIT_ROWS,  # int64 rows to project
    LOGITS,  # where their logits go
    COSINES,  # [rows, D/2]
    SINES,
    STORAGE,  # int64 address of each row's cache slot
    CACHE_INDEX,  # int64 index in the cache at which each row is appended
    LENGTH,  # int64 number of positions each row attends to
    STRAIGHT,  # int64 first logical position of each row that `PATHS` places
    PATHS,  # int64 [rows, path length]
    PATH_LENGTH,
    KEPT,  # for each layer, where its output rows go, or 0
    KEY_BYTES,  # of one head of one layer in a cache slot
    VALUE_BYTES,
    SCRATCH,  # of all threads, one after another
    SCRATCH_BYTES,  # of one thread
    STATE_LENGTH,
) = range(18)

# Operands, by operation. Column 0 is the operation. "_BITS" hold an f32 in their low half.
P_KIND, P_ROWS, P_OTHER, P_STRIDE, P_WEIGHT, P_EPS_BITS, P_FEATURES, P_INT8, P_INT16, P_F32, P_SELECT = range(1, 12)
L_TENSORS, L_SELECT, L_FEATURES, L_FIRST = 1, 2, 3, 4
T_KERNEL, T_TILES, T_TILE_BYTES, T_NUM_TILES, T_INPUTS, T_ROW_BYTES, T_BIAS, T_RESIDUAL, T_OUT, T_STRIDE, TENSOR_COLUMNS = range(11)
R_QUERIES, R_KEYS, R_VALUES, R_Q_STRIDE, R_K_STRIDE, R_V_STRIDE, R_Q_NORM, R_K_NORM, R_EPS_BITS, R_SCALE_BITS = range(1, 11)
R_HEADS, R_KV_HEADS, R_DIMS, R_PADDED_DIMS, R_LAYER = range(11, 16)
A_QUERIES, A_STRIDE, A_OUT, A_OUT_STRIDE, A_HEADS, A_KV_HEADS, A_DIMS, A_PADDED_DIMS, A_LAYER = range(1, 10)
K_ROWS, K_STRIDE, K_LAYER, K_BYTES = range(1, 5)
COLUMNS = L_FIRST + 3 * TENSOR_COLUMNS

_INT8_BYTES, _INT16_BYTES = ORDERS["int8"], ORDERS["int16"]


@intrinsic
def _call_linear(typingctx, address, a, b, c, d, e, f, g, h, i, j, k, m):
    """Call a kernel of `linear_kernel` by its address."""

    def codegen(context, builder, sig, args):
        simd.call_address(builder, args[0], args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 13), codegen


@compiled
def _take(counter, items, chunk):
    """The first item of the next chunk, or `items` when nothing is left."""
    return min(simd.fetch_add(counter, chunk), items)


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
        inputs = block * features // 32
        int8 = op[P_INT8] + inputs * _INT8_BYTES if op[P_INT8] != 0 else 0
        int16 = op[P_INT16] + inputs * _INT16_BYTES if op[P_INT16] != 0 else 0
        f32 = op[P_F32] + block * features * 4 if op[P_F32] != 0 else 0
        other = op[P_OTHER] + row * op[P_STRIDE]
        end = min(features, first + part)
        prepare_row(op[P_KIND], source, other, op[P_WEIGHT], eps, features, first, end, int8, int16, f32, place - block, block_rows)


@compiled
def _linear(op, state, counter, threads):
    """Tiles of up to three matrices that read the same rows."""
    selected = op[L_SELECT] != 0
    rows = state[NUM_LOGIT_ROWS] if selected else state[NUM_ROWS]
    tensors = op[L_TENSORS]
    items = 0
    for t in range(tensors):
        items += op[L_FIRST + t * TENSOR_COLUMNS + T_NUM_TILES]
    chunk = max(1, items // (threads * 8)) if threads > 1 else items
    while True:
        first = _take(counter, items, chunk)
        if first == items:
            return
        end = min(items, first + chunk)
        for t in range(tensors):
            at = L_FIRST + t * TENSOR_COLUMNS
            tiles = op[at + T_NUM_TILES]
            if first < tiles and end > 0:
                out = state[LOGITS] if selected else op[at + T_OUT]
                _call_linear(
                    op[at + T_KERNEL],
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
            first -= tiles
            end -= tiles


@compiled
def _cached_head(state, row, layer, kv_heads, head):
    """Addresses of the keys and of the values of one head in a row's cache slot: [layer][all keys by head, all values by head]."""
    key_bytes, value_bytes = state[KEY_BYTES], state[VALUE_BYTES]
    here = simd.peek_i64(state[STORAGE] + 8 * row) + layer * kv_heads * (key_bytes + value_bytes)
    return here + head * key_bytes, here + kv_heads * key_bytes + head * value_bytes


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
            cosines, sines = state[COSINES] + row * dims * 2, state[SINES] + row * dims * 2
            if head < heads:
                query = op[R_QUERIES] + row * op[R_Q_STRIDE] + head * dims * 4
                rotate_head(query, dims, cosines, sines, op[R_Q_NORM], eps, scale)
            else:
                head -= heads
                key = op[R_KEYS] + row * op[R_K_STRIDE] + head * dims * 4
                value = op[R_VALUES] + row * op[R_V_STRIDE] + head * dims * 4
                rotate_head(key, dims, cosines, sines, op[R_K_NORM], eps, simd.to_float(1))
                keys, values = _cached_head(state, row, op[R_LAYER], kv_heads, head)
                index = simd.peek_i64(state[CACHE_INDEX] + 8 * row)
                append_key_value(keys, values, dims, op[R_PADDED_DIMS], index, key, value)


@compiled
def _attend(op, state, counter, threads, thread):
    """Attention: the queries of a key head (all rows, and the query heads that share it), a few at a time, the longest first."""
    heads, kv_heads, dims = op[A_HEADS], op[A_KV_HEADS], op[A_DIMS]
    group = heads // kv_heads
    queries = state[NUM_ROWS] * group
    together = max(1, min(QUERIES, queries * kv_heads // threads))
    blocks = (queries + together - 1) // together
    scratch = state[SCRATCH] + thread * state[SCRATCH_BYTES]
    while True:
        item = _take(counter, blocks * kv_heads, 1)
        if item == blocks * kv_heads:
            return
        kv_head, block = item % kv_heads, blocks - 1 - item // kv_heads
        first, end = block * together, min(queries, (block + 1) * together)
        while first < end:
            row = first // group
            storage, straight = simd.peek_i64(state[STORAGE] + 8 * row), simd.peek_i64(state[STRAIGHT] + 8 * row)
            alone = straight < simd.peek_i64(state[LENGTH] + 8 * row)
            count = 0
            while first < end and (count == 0 or not alone):
                here = first // group
                length = simd.peek_i64(state[LENGTH] + 8 * here)
                # A tree row goes alone, and rows of another sequence have another cache.
                if count > 0 and (
                    simd.peek_i64(state[STORAGE] + 8 * here) != storage or simd.peek_i64(state[STRAIGHT] + 8 * here) < length
                ):
                    break
                head = kv_head * group + first % group
                query = op[A_QUERIES] + here * op[A_STRIDE] + head * dims * 4
                put_query(scratch, count, query, op[A_OUT] + here * op[A_OUT_STRIDE] + head * dims * 4, length)
                straight = max(straight, simd.peek_i64(state[STRAIGHT] + 8 * here))
                first += 1
                count += 1
            keys, values = _cached_head(state, row, op[A_LAYER], kv_heads, kv_head)
            path = state[PATHS] + row * state[PATH_LENGTH] * 8
            attend(count, keys, values, dims, op[A_PADDED_DIMS], straight, path, scratch)


@compiled
def _keep(op, state):
    """Copy a layer's output rows to whoever asked for them."""
    to = simd.peek_i64(state[KEPT] + 8 * op[K_LAYER])
    if to != 0:
        for row in range(state[NUM_ROWS]):
            for at in range(0, op[K_BYTES], 4):
                simd.poke_f32(to + row * op[K_BYTES] + at, simd.peek_f32(op[K_ROWS] + row * op[K_STRIDE] + at))


@compiled
def run(control, threads, thread):
    """One thread's part of the published forward."""
    operations = simd.peek_i64(control + NUM_OPERATIONS)
    program = carray(simd.words(simd.peek_i64(control + OPERATIONS)), (operations, COLUMNS))
    state = carray(simd.words(simd.peek_i64(control + STATE)), STATE_LENGTH)
    counters = simd.peek_i64(control + COUNTERS)
    for i in range(operations):
        op, counter = program[i], counters + 8 * i
        if op[0] == PREPARE:
            _prepare(op, state, counter, threads)
        elif op[0] == LINEAR:
            _linear(op, state, counter, threads)
        elif op[0] == ROTATE:
            _rotate(op, state, counter, threads)
        elif op[0] == ATTEND:
            _attend(op, state, counter, threads, thread)
        else:  # only reads rows that nobody writes before the next barrier
            if thread == 0:
                _keep(op, state)
            continue
        barrier(control, threads)


@compiled
def _lead(control, operations, num_operations, state, counters, threads):
    """Publish a forward and run the caller's part of it; returns whether a worker sleeps, and then has only published."""
    if publish(control, operations, num_operations, state, counters, threads) != 0:
        return True
    run(control, threads, 0)
    return False


@compiled
def _work(control, threads, thread, seen):
    """Run every published forward until told to end (-1) or until it is time to sleep (the last generation seen)."""
    while True:
        now = await_work(control, seen, control + PARKED + 64 * thread)
        if now < 0 or now == seen:
            return now
        run(control, threads, thread)
        seen = now


class Program:
    """The operations of a forward, one row each, and the state block that they read."""

    def __init__(self, operations: NDArray[np.int64]) -> None:
        assert operations.shape[1:] == (COLUMNS,), "an operation is a row of COLUMNS numbers"
        self.state = np.zeros(STATE_LENGTH, np.int64)
        self.operations = np.ascontiguousarray(operations, np.int64)
        self.counters = aligned_bytes((8 * len(operations),))

    def addresses(self) -> tuple[int, int, int, int]:
        """Operations, their number, state and counters, as `team.publish` takes them."""
        return self.operations.ctypes.data, len(self.operations), self.state.ctypes.data, self.counters.ctypes.data


class Team:
    """`threads` threads, the caller's among them, that run one program after another. Models that take turns share one."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.closed = False
        self._control = aligned_bytes((PARKED + 64 * threads,))
        self._control[:] = 0
        self._wake = [threading.Event() for _ in range(threads)]
        self._compile()
        self._workers = [
            threading.Thread(target=self._serve, args=(i,), daemon=True, name=f"cpuspec-{i}") for i in range(1, threads)
        ]
        for worker in self._workers:
            worker.start()
        atexit.register(self.close)

    def run(self, program: Program) -> None:
        """Run a program on its state, on all threads, and return when it is done. One caller at a time."""
        # One compiled call, so that an interrupt cannot come between publishing and running and leave the workers waiting.
        if _lead(self._address, *program.addresses(), self.threads):
            self._wake_all()
            run(self._address, self.threads, 0)

    def close(self) -> None:
        """End the workers. A closed team cannot run; closing twice does nothing."""
        self.closed = True
        atexit.unregister(self.close)
        self._control.view(np.int64)[QUIT // 8] = 1
        publish(self._address, *_NOTHING.addresses(), self.threads)
        self._wake_all()
        for worker in self._workers:
            worker.join()
        self._workers = []

    @property
    def _address(self) -> int:
        return self._control.ctypes.data

    def _wake_all(self) -> None:
        for event in self._wake:
            event.set()

    def _serve(self, thread: int) -> None:
        seen = 0
        while (seen := _work(self._address, self.threads, thread, seen)) >= 0:
            self._wake[thread].wait()
            self._wake[thread].clear()

    def _compile(self) -> None:
        """Have everything compiled before a thread waits for another: an empty program, and a worker that ends at once."""
        _lead(self._address, *_NOTHING.addresses(), self.threads)
        control = self._control.view(np.int64)
        control[QUIT // 8] = control[GENERATION // 8] = 1
        _work(self._address, self.threads, 0, 0)
        control[QUIT // 8] = control[GENERATION // 8] = 0


_NOTHING = Program(np.zeros((0, COLUMNS), np.int64))
