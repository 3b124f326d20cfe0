"""The operations of a forward as compiled code: each does its share of the work with one thread of a team.

Operands are fields of `layout`'s records. The backend that writes a program knows the model; this file knows the operations.
"""

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cpuspec.kernels import layout, simd
from cpuspec.kernels.argmax import peak, peaks_of_row, pick
from cpuspec.kernels.attention import CHUNK, QUERIES, finish, first_chunk, merge, put_query, sees
from cpuspec.kernels.layout import team_at, walk_at
from cpuspec.kernels.ops import Ops
from cpuspec.kernels.options import compiled
from cpuspec.kernels.pointers import address
from cpuspec.kernels.pointwise import add_normed, cap_numbers, prepare_row, rotate_head, rows_of_block, scale_numbers
from cpuspec.kernels.products import BLOCK_ROWS, ORDERS
from cpuspec.kernels.sharing import PIECES, piece, share, take
from cpuspec.kernels.waiting import barrier

_INT8_BYTES, _INT16_BYTES, _F32_BYTES, _BF16_BYTES = (ORDERS[order] for order in ("int8", "int16", "f32", "bf16"))
_EMBED, _PREPARE, _LINEAR, _ROTATE, _ATTEND, _ADD, _KEEP = (
    layout.EMBED, layout.PREPARE, layout.LINEAR, layout.ROTATE, layout.ATTEND, layout.ADD, layout.KEEP
)  # fmt: skip


@intrinsic
def _call(typingctx, kernel, operands):
    """Call a kernel by its address, with a tuple of int64."""

    def codegen(context, builder, sig, args):
        o = Ops(builder)
        o.call_address(o.value(args[0]), [o.value(v) for v in cgutils.unpack_tuple(builder, args[1], len(operands))])
        return context.get_dummy_value()

    return types.void(types.int64, operands), codegen


@compiled
def _embed(op, state, counter):
    """Rows of the embedding times its scale, padded with zeros."""
    rows = state.num_rows
    while True:
        row = take(counter, rows, 1)
        if row == rows:
            return
        out = op.out + row * op.stride
        _call(op.decoder, (op.data + state.tokens[row] * op.row_bytes, op.blocks, out))
        for at in range(4 * op.features, op.stride, 4):
            simd.poke_f32(out + at, simd.to_float(0))
        if op.scale != 1:
            scale_numbers(out, op.features, op.scale)


@compiled
def _prepare(op, state, counter, threads):
    """Rows to activations. With few rows, a long row is shared: each part measures the whole norm and writes its own inputs."""
    selected = op.select != 0
    rows = state.num_logit_rows if selected else state.num_rows
    features = op.features
    parts = 1 if rows >= 2 * threads else max(1, min(threads, features // 1024))
    part = (features // parts + 31) // 32 * 32
    while True:
        item = take(counter, rows * parts, 1)
        if item == rows * parts:
            return
        place, first = item // parts, item % parts * part
        row = state.logit_rows[place] if selected else place
        source, other = op.rows + row * op.stride, op.other + row * op.stride
        block = place // BLOCK_ROWS * BLOCK_ROWS
        inputs = block * ((features + 31) // 32)
        int8 = op.int8 + inputs * _INT8_BYTES if op.int8 != 0 else 0
        int16 = op.int16 + inputs * _INT16_BYTES if op.int16 != 0 else 0
        f32 = op.f32 + inputs * _F32_BYTES if op.f32 != 0 else 0
        bf16 = op.bf16 + inputs * _BF16_BYTES if op.bf16 != 0 else 0
        rounded = op.rounded + inputs * _F32_BYTES if op.rounded != 0 else 0
        prepare_row(
            op.kind, source, other, op.weight, op.eps, features, first, min(features, first + part),
            int8, int16, f32, bf16, rounded, place - block, rows_of_block(place, rows),
        )  # fmt: skip


@compiled
def _linear(op, state, counters, stride, threads, thread):
    """Tiles of up to MAX_TENSORS matrices that read the same rows. counters: of the threads, `stride` bytes apart.

    A thread goes through its own share from the first tile to the last, and then helps the others with what is left of theirs.
    """
    rows = state.num_logit_rows if op.vocab else state.num_rows
    items = 0
    for t in range(op.num_tensors):
        items += op.tensors[t].num_tiles
    for turn in range(threads):
        owner = (thread + turn) % threads
        start, tiles = share(items, owner, threads)
        while True:
            number = take(counters + owner * stride, PIECES, 1)
            first, end = start + piece(tiles, number), start + piece(tiles, number + 1)
            if first == end:
                break
            _multiply(op, state, rows, first, end)
            if op.vocab:
                if op.cap != 0:
                    for row in range(rows):
                        cap_numbers(state.logits + row * op.tensors[0].stride + 64 * first, simd.LANES * (end - first), op.cap)
                for row in range(state.num_picked):
                    largest = peak(state.logits + row * op.tensors[0].stride, first, end, op.vocab)
                    simd.poke_f32(peaks_of_row(state, row, threads) + 4 * (owner * PIECES + number), largest)


@compiled
def _multiply(op, state, rows, first, end):
    """Tiles first..end of a "linear" operation, numbered through all of its matrices."""
    for t in range(op.num_tensors):
        tensor = op.tensors[t]
        tiles = tensor.num_tiles
        if first < tiles and end > 0:
            out = state.logits if op.vocab else tensor.out
            operands = (
                tensor.tiles, tensor.tile_bytes, op.features, max(first, 0), min(end, tiles), tensor.inputs, tensor.row_bytes,
                rows, tensor.bias, tensor.residual, out, tensor.stride,
            )  # fmt: skip
            _call(tensor.kernel, operands)
        first -= tiles
        end -= tiles


@compiled
def _cached_head(state, row, layer, kv_heads, head):
    """Address of one head in a row's cache slot, which is [layer][head]."""
    return state.places[row].storage + (layer * kv_heads + head) * state.head_bytes


@compiled
def _rotate(op, state, counter, threads):
    """Rotary positions of queries and keys; keys and values go to the cache."""
    heads, kv_heads, dims = op.heads, op.kv_heads, op.dims
    per_row = heads + kv_heads
    items = state.num_rows * per_row
    count = max(1, items // (threads * 4))
    while True:
        first = take(counter, items, count)
        if first == items:
            return
        for item in range(first, min(items, first + count)):
            row, head = item // per_row, item % per_row
            cosines = sines = 0
            if op.rotation >= 0:
                table, turn = state.rotations[op.rotation], state.positions[row] * dims * 2
                cosines, sines = table.cosines + turn, table.sines + turn
            if head < heads:
                query = op.queries + row * op.q_stride + head * dims * 4
                rotate_head(query, dims, cosines, sines, op.q_norm, op.eps, op.scale)
            else:
                head -= heads
                key, value = op.keys + row * op.k_stride + head * dims * 4, op.values + row * op.v_stride + head * dims * 4
                rotate_head(key, dims, cosines, sines, op.k_norm, op.eps, simd.to_float(1))
                cached = _cached_head(state, row, op.layer, kv_heads, head)
                _call(op.append, (cached, dims, state.places[row].cache_index, key, value))


@compiled
def _attend(op, state, counter, threads, thread):
    """Attention: a span of chunks for a task's queries of one key head. The thread that does a task's last span merges them all."""
    kv_heads, size = op.kv_heads, op.partial_bytes
    group, items = op.heads // kv_heads, state.num_items
    scratch = state.scratch + thread * state.scratch_bytes
    walk_at(scratch).caps[0] = op.cap
    number = state.num_tasks - 1
    while True:
        item = take(counter, items, 1)
        if item == items:
            return
        item = items - 1 - item  # the longest rows first
        while item < state.tasks[number].item:
            number -= 1
        task = state.tasks[number]
        row, chunks, span = task.row, task.chunks, task.span
        spans, queries = (chunks + span - 1) // span, (task.end_row - row) * group
        kv_head, first = (item - task.item) // spans, (item - task.item) % spans * span
        partials, stride = scratch + op.partials_at + QUERIES * size, size
        if spans > 1:
            stride = chunks * size
            partials = state.partials + task.partial * size + kv_head * queries * stride
        for chunk in range(first, min(chunks, first + span)):
            _attend_chunk(op, state, task, kv_head, chunk, spans > 1, partials, stride, scratch)
        if spans > 1:
            walked = address(state.walked) + 8 * (number * kv_heads + kv_head)
            if simd.fetch_add(walked, 1) < spans - 1:
                continue
            simd.poke_i64(walked, 0)
        for query in range(queries):
            partial, here = partials + query * stride, row + query // group
            if spans > 1:
                length = state.places[here].length
                earliest = first_chunk(length, op.window)
                for later in range(earliest + 1, (length + CHUNK - 1) // CHUNK):
                    merge(partial + earliest * size, partial + later * size, size)
                partial += earliest * size
            head = kv_head * group + query % group
            finish(partial, size, op.dims, op.out + here * op.out_stride + head * op.dims * 4)


@compiled
def _attend_chunk(op, state, task, kv_head, chunk, separate, partials, stride, scratch):
    """Walk over one chunk for a task's rows. separate: keep each chunk's partials; else merge them into a row's first."""
    group, dims, size, start = op.heads // op.kv_heads, op.dims, op.partial_bytes, chunk * CHUNK
    places, row, end_row = state.places, task.row, task.end_row
    head = _cached_head(state, row, op.layer, op.kv_heads, kv_head)
    walk, first = walk_at(scratch), row * group
    while row < end_row:
        run = row
        while run < end_row and _sees_straight(places[run], start, op.window):
            run += 1
        alone, straight = run == row, start + CHUNK
        if alone:  # beyond the prefix, each row of a tree has a path of its own; or the row does not see the chunk
            run, straight = row + 1, places[row].straight
        query, end = row * group, run * group
        if alone and not sees(places[row].length, start, op.window):
            query = end
        while query < end:
            walks = (end - query + QUERIES - 1) // QUERIES
            count = (end - query + walks - 1) // walks
            for number in range(count):
                here, member = (query + number) // group, (query + number) % group
                length = places[here].length
                partial = partials + (query + number - first) * stride
                if separate:
                    partial += chunk * size
                elif chunk > first_chunk(length, op.window):
                    partial = scratch + op.partials_at + number * size
                source = op.queries + here * op.stride + (kv_head * group + member) * dims * 4
                put_query(walk, number, source, partial, max(0, length - op.window), length)
            _call(op.kernel, (count, head, dims, start, straight, state.paths + row * state.path_length * 8, scratch))
            if not separate:
                for number in range(count):
                    if chunk > first_chunk(places[(query + number) // group].length, op.window):
                        merge(partials + (query + number - first) * stride, scratch + op.partials_at + number * size, size)
            query += count
        row = run


@compiled
def _sees_straight(place, start, window):
    """Whether a row sees positions of the chunk at `start`, and each where it lies in a chain."""
    return sees(place.length, start, window) and place.straight >= min(place.length, start + CHUNK)


@compiled
def _add(op, state, counter):
    """The norm of a branch's rows added to the residual's."""
    rows = state.num_rows
    while True:
        row = take(counter, rows, 1)
        if row == rows:
            return
        add_normed(op.rows + row * op.stride, op.branch + row * op.stride, op.weight, op.eps, op.features)


@compiled
def _keep(op, state):
    """Copy a layer's output rows to where the caller wants them, if it does."""
    to = state.kept[op.layer] if address(state.kept) != 0 else 0
    if to != 0:
        for row in range(state.num_rows):
            for at in range(0, op.row_bytes, 4):
                simd.poke_f32(to + row * op.row_bytes + at, simd.peek_f32(op.rows + row * op.stride + at))


def run(at, threads, thread):
    """One thread's part of the forward that is published in the team at address `at`."""
    team = team_at(at)
    # Read once: behind the last barrier the caller may already publish the next job, while this thread is still in the loop.
    operations, num_operations, state, counters = team.job.operations, team.job.num_operations, team.job.state, team.job.counters
    for i in range(num_operations):
        op, counter = operations[i], counters + 8 * i
        if op.number == _EMBED:
            _embed(op.embed, state, counter)
        elif op.number == _PREPARE:
            _prepare(op.prepare, state, counter, threads)
        elif op.number == _LINEAR:
            _linear(op.linear, state, counter, 8 * num_operations, threads, thread)
        elif op.number == _ROTATE:
            _rotate(op.rotate, state, counter, threads)
        elif op.number == _ATTEND:
            _attend(op.attend, state, counter, threads, thread)
        elif op.number == _ADD:
            _add(op.add, state, counter)
        else:  # only reads what no thread writes before the next barrier
            if thread == 0:
                if op.number == _KEEP:
                    _keep(op.keep, state)
                else:
                    pick(op.pick, state, threads)
            continue
        barrier(team, threads, thread)
