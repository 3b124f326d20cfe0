"""The operations of a forward as compiled code: each does its share of the work with one thread of a team.

Operands are fields of `layout`'s records. The backend that writes a program knows the model; this file knows the operations.
"""

from numba import types

from cpuspec.formats.packing import PANEL
from cpuspec.kernels import layout, pointwise, sharing, simd
from cpuspec.kernels.adapters import expand, num_parts, num_pieces, shrink
from cpuspec.kernels.argmax import peak, peaks_of_row, pick
from cpuspec.kernels.attention import finish, first_chunk, merge, put_query, sees
from cpuspec.kernels.experts import combine, gather, route
from cpuspec.kernels.kv_rows import CHUNK
from cpuspec.kernels.latent import assemble
from cpuspec.kernels.layout import DONE, is_operation, team_at, walk_at
from cpuspec.kernels.options import compiled
from cpuspec.kernels.pointers import address
from cpuspec.kernels.products import BLOCK_ROWS, ENCODINGS
from cpuspec.kernels.recurrent import convolve, finish_heads, num_convolved, record, recur
from cpuspec.kernels.waiting import await_leaving, await_step, begin, enter, leave
from cpuspec.platform import SYSTEM

# Cycles of the time stamp counter, some microseconds, that a piece is waited for before it is repeated.
_PATIENCE = 8000

_INT8_BYTES, _INT16_BYTES, _F32_BYTES, _BF16_BYTES, _ROTATED_BYTES, _INT14_BYTES = (
    ENCODINGS[encoding] for encoding in ("int8", "int16", "f32", "bf16", "rotated", "int14")
)


@compiled
def _embed(op, state, row):
    """A row of the embedding times its scale, padded with zeros."""
    out = op.out + row * op.stride
    simd.call_at(op.decoder, (op.data + state.tokens[row] * op.row_bytes, op.blocks, out))
    for at in range(4 * op.features, op.stride, 4):
        simd.poke_f32(out + at, simd.to_float(0))
    if op.scale != 1:
        pointwise.scale_numbers(out, op.features, op.scale)


@compiled
def _rows_to_prepare(op, state):
    if op.used != 0:
        return state.num_pairs
    if op.heads != 0:
        return state.num_rows * op.heads
    return state.num_logit_rows if op.select != 0 else state.num_rows


@compiled
def _prepare(op, state, threads, item):
    """A part of a row to activations."""
    rows, features = _rows_to_prepare(op, state), op.features
    parts = sharing.parts_of_row(op.features, rows, threads)
    part = sharing.part_of_row(features, parts, PANEL if op.rotated != 0 or op.int14 != 0 else 32)
    place, first = item // parts, item % parts * part
    if op.used != 0:
        place += state.first_pair
    row = state.logit_rows[place] if op.select != 0 else place
    source, other = op.rows + row * op.stride, op.other + row * op.other_stride
    block, block_rows = place // BLOCK_ROWS * BLOCK_ROWS, pointwise.rows_of_block(place, rows)
    if op.used != 0:
        pair = state.pairs[place]
        block, block_rows = pair.block, pair.block_rows
    if op.heads != 0:
        head, row = place // state.num_rows, place % state.num_rows
        source = op.rows + row * op.stride + head * op.apart
        block, block_rows = place - row % BLOCK_ROWS, pointwise.rows_of_block(row, state.num_rows)
    inputs = block * ((features + 31) // 32)
    int8 = op.int8 + inputs * _INT8_BYTES if op.int8 != 0 else 0
    int16 = op.int16 + inputs * _INT16_BYTES if op.int16 != 0 else 0
    f32 = op.f32 + inputs * _F32_BYTES if op.f32 != 0 else 0
    bf16 = op.bf16 + inputs * _BF16_BYTES if op.bf16 != 0 else 0
    rounded = op.rounded + inputs * _F32_BYTES if op.rounded != 0 else 0
    rotated = op.rotated + inputs * _ROTATED_BYTES if op.rotated != 0 else 0
    int14 = op.int14 + inputs * _INT14_BYTES if op.int14 != 0 else 0
    pointwise.prepare_row(
        op.kind, source, other, op.weight, op.order, op.eps, features, first, min(features, first + part),
        int8, int16, f32, bf16, rounded, rotated, int14, place - block, block_rows,
    )  # fmt: skip


if SYSTEM.processor_function:
    _processor = types.ExternalFunction(SYSTEM.processor_function, types.int32())

    @compiled
    def _nearest_copy(state):
        return 0 if address(state.copy_of) == 0 else state.copy_of[_processor() & layout.MOST_PROCESSORS - 1]

else:

    @compiled
    def _nearest_copy(state):
        return 0


@compiled
def _num_tiles(op):
    """Tiles of all matrices of a "linear" operation."""
    tiles = 0
    for t in range(op.num_tensors):
        tiles += op.tensors[t].num_tiles
    return tiles


@compiled
def _linear(op, state, counters, stride, done, step, here, threads, thread):
    """Tiles of matrices that read the same rows, or of those of experts. counters: of the threads, `stride` bytes apart.

    A thread goes through its own share from the first tile to the last, and then helps the others with what is left of theirs.
    Returns whether the thread did the last tile. done: address of the operation's count.
    """
    rows = state.num_logit_rows if op.vocab else state.num_rows
    tiles_of_all, copy = _num_tiles(op), _nearest_copy(state)
    items, completed = tiles_of_all * _num_segments(op, state), 0
    if _goes_apart(op, rows, items, threads):
        return _linear_apart(op, state, counters, stride, done, step, here, rows, items, copy, threads, thread)
    for turn in range(threads):
        owner = (thread + turn) % threads
        start, tiles = sharing.share(items, owner, threads)
        counter = counters + owner * stride
        while (
            sharing.piece(tiles, simd.acquire(counter)) < tiles
        ):  # to look costs less than to take in vain where many threads help
            number = sharing.take(counter, sharing.PIECES, 1)
            first, end = start + sharing.piece(tiles, number), start + sharing.piece(tiles, number + 1)
            if first == end:
                break
            if op.used == 0 and op.heads == 0:
                _multiply(op, state, rows, copy, first, end, 0)
            else:
                _multiply_experts(op, state, tiles_of_all, copy, first, end)
            completed += end - first
            if op.vocab:
                if op.cap != 0:
                    for row in range(rows):
                        pointwise.cap_numbers(
                            state.logits + row * op.tensors[0].stride + 64 * first, simd.LANES * (end - first), op.cap
                        )
                for row in range(state.num_picked):
                    largest = peak(state.logits + row * op.tensors[0].stride, first, end, op.vocab)
                    simd.poke_f32(peaks_of_row(state, row, threads) + 4 * (owner * sharing.PIECES + number), largest)
    return sharing.is_last(done, completed, items)


@compiled
def _goes_apart(op, rows, items, threads):
    """Whether threads multiply into memory of their own first, so that a piece that one of them holds can be multiplied again."""
    if threads == 1 or op.vocab != 0 or op.used != 0 or op.heads != 0:
        return False
    return 64 * rows * sharing.piece((items + threads - 1) // threads, 1) <= sharing.APART_BYTES


@compiled
def _linear_apart(op, state, counters, stride, done, step, here, rows, items, copy, threads, thread):
    """As `_linear`, but a thread that finds nothing left repeats what others hold for long: another process may have their cores.

    Each thread multiplies a piece into memory of its own, and copies it to its place if it is the first to claim the piece. A late
    thread may read what later operations wrote; its result is discarded.
    """
    own, begun, multiplied = state.scratch + thread * state.scratch_bytes, simd.cycles(), 0
    for turn in range(threads):
        owner = (thread + turn) % threads
        start, tiles = sharing.share(items, owner, threads)
        counter, pieces = counters + owner * stride, sharing.pieces_of(tiles)
        if sharing.taken(simd.acquire(counter)) >= pieces:  # to look costs less than to take in vain where many threads help
            continue
        number = sharing.taken(simd.fetch_add(counter, 1))
        while number < pieces:
            first, end = start + sharing.piece(tiles, number), start + sharing.piece(tiles, number + 1)
            multiplied += end - first
            _multiply(op, state, rows, copy, first, end, own)
            change = 1
            if sharing.claims(counter, number):
                _put(op, rows, first, end, own)
                change += sharing.PUBLISHED
            before = simd.fetch_add(counter, change)  # one change of what threads share, as each waits for memory
            if change != 1 and sharing.published(before) + 1 == pieces and sharing.is_last(done, tiles, items):
                return True
            number = sharing.taken(before)
    tile_cycles, idle_since, looks = (simd.cycles() - begun) // max(1, multiplied), simd.cycles(), 0
    while simd.acquire(step) == here:
        waited, is_any_held = simd.cycles() - idle_since, False
        if waited < (looks + 1) * _PATIENCE:  # who looks at a counter takes it from the thread that changes it
            simd.pause()
            continue
        looks += 1
        for turn in range(threads):
            owner = (thread + turn) % threads
            start, tiles = sharing.share(items, owner, threads)
            counter, pieces = counters + owner * stride, sharing.pieces_of(tiles)
            held = sharing.held_pieces(simd.acquire(counter), pieces)
            for number in range(pieces if held != 0 else 0):
                if held >> number & 1 != 0:
                    first, end = start + sharing.piece(tiles, number), start + sharing.piece(tiles, number + 1)
                    if waited < 2 * tile_cycles * (end - first):
                        is_any_held = True
                    elif sharing.repeats(counter, number):
                        _multiply(op, state, rows, copy, first, end, own)
                        if sharing.claims(counter, number):
                            _put(op, rows, first, end, own)
                            if sharing.published(simd.fetch_add(counter, sharing.PUBLISHED)) + 1 == pieces and sharing.is_last(
                                done, tiles, items
                            ):
                                return True
        if not is_any_held:
            break
    return False


@compiled
def _put(op, rows, first, end, own):
    """Copy tiles first..end, which lie at `own`, to where they belong, and add residuals."""
    stride = 64 * (end - first)
    for t in range(op.num_tensors):
        tensor = op.tensors[t]
        for tile in range(max(first, 0), min(end, tensor.num_tiles)):
            for row in range(rows):
                place, values = row * tensor.stride + 64 * tile, simd.load_f32(own + row * stride + 64 * (tile - first))
                if tensor.residual != 0:
                    values = values + simd.load_f32(tensor.residual + place)
                simd.store_f32(tensor.out + place, values)
        first -= tensor.num_tiles
        end -= tensor.num_tiles


@compiled
def _num_segments(op, state):
    """How often all tiles of a "linear" operation are multiplied: for each head, or each expert that has rows."""
    return op.heads if op.heads != 0 else state.num_segments if op.used != 0 else 1


@compiled
def _multiply(op, state, rows, copy, first, end, own):
    """Tiles first..end of a "linear" operation, numbered through all of its matrices. copy: the weights' that is read. own: where
    products and biases go instead, tile behind tile, 0 for nowhere.
    """
    length = end - first
    for t in range(op.num_tensors):
        tensor = op.tensors[t]
        tiles = tensor.num_tiles
        if first < tiles and end > 0:
            residual, out, stride = tensor.residual, state.logits if op.vocab else tensor.out, tensor.stride
            if own != 0:
                residual, out, stride = 0, own - 64 * first, 64 * length
            operands = (
                tensor.tiles + copy * tensor.copies_apart, tensor.tile_bytes, op.features, max(first, 0), min(end, tiles),
                tensor.inputs, tensor.row_bytes, rows, tensor.bias, residual, out, stride,
            )  # fmt: skip
            simd.call_at(tensor.kernel, operands)
        first -= tiles
        end -= tiles


@compiled
def _multiply_experts(op, state, tiles_of_all, copy, first, end):
    """Tiles first..end of a "linear" operation over segments, numbered through the matrices of each expert that has rows, or of
    each head.
    """
    while first < end:
        number, start = first // tiles_of_all, first % tiles_of_all
        expert, first_pair, rows = number, number * state.num_rows, state.num_rows
        if op.heads == 0:
            segment = state.segments[number]
            expert, first_pair, rows = segment.expert, segment.first, segment.rows
        stop = min(tiles_of_all, start + end - first)
        first += stop - start
        for t in range(op.num_tensors):
            tensor = op.tensors[t]
            tiles = tensor.num_tiles
            if start < tiles and stop > 0:
                inputs = tensor.inputs + first_pair * tensor.row_bytes
                if tensor.one_row != 0 and state.num_rows == 1:
                    inputs = tensor.one_row
                bias = tensor.bias + expert * tensor.bias_bytes if tensor.bias != 0 else 0
                matrix = tensor.tiles + copy * tensor.copies_apart + expert * tiles * tensor.tile_bytes
                if tensor.table != 0:
                    matrix = simd.peek_i64(tensor.table + 8 * expert)
                out = tensor.out + (first_pair * tensor.stride if op.heads == 0 else expert * tensor.apart)
                operands = (
                    matrix, tensor.tile_bytes, op.features, max(start, 0), min(stop, tiles), inputs, tensor.row_bytes,
                    rows, bias, 0, out, tensor.stride,
                )  # fmt: skip
                simd.call_at(tensor.kernel, operands)
            start -= tiles
            stop -= tiles


@compiled
def _combine(op, state, threads, item):
    """A part of a row."""
    parts = sharing.parts_of_row(op.features, state.num_rows, threads)
    part = sharing.part_of_row(op.features, parts, 32)
    first = item % parts * part
    combine(op, state, item // parts, first, min(op.features, first + part))


@compiled
def _cached_head(op, state, row, head):
    """Address of one head of a layer in a row's cache slot."""
    return state.places[row].storage + state.num_chunks * (op.cache_at + head * op.chunk_bytes)


@compiled
def _rotate(op, state, item):
    """Rotary positions of a query or a key; a key and its value go to the cache."""
    heads, kv_heads, dims, value_dims = op.heads, op.kv_heads, op.key_dims, op.value_dims
    row, head = item // (heads + kv_heads), item % (heads + kv_heads)
    cosines = sines = 0
    rotation = op.q_rotation if head < heads else op.rotation
    if rotation >= 0:
        table, turn = state.rotations[rotation], state.positions[row] * dims * 2
        cosines, sines = table.cosines + turn, table.sines + turn
    if head < heads:
        query = op.queries + row * op.q_stride + head * dims * 4
        pointwise.rotate_head(query, dims, cosines, sines, op.q_norm, op.norm_last, op.eps, op.scale)
        if op.hadamard != 0:
            pointwise.hadamard_head(query, dims, op.hadamard)
    else:
        head -= heads
        key, value = op.keys + row * op.k_stride + head * dims * 4, op.values + row * op.v_stride + head * value_dims * 4
        if op.copies != 0:
            for at in range(0, 4 * dims, 4):
                simd.poke_f32(value + at, simd.peek_f32(key + at))
        if op.v_norm != 0:
            pointwise.rotate_head(value, value_dims, 0, 0, op.v_norm, 0, op.eps, simd.to_float(1))
        pointwise.rotate_head(key, dims, cosines, sines, op.k_norm, op.norm_last, op.eps, simd.to_float(1))
        if op.centres != 0:
            pointwise.subtract(key, op.centres + 4 * head * dims, dims)
        if op.hadamard != 0:
            pointwise.hadamard_head(key, dims, op.hadamard)
        if op.v_hadamard != 0:
            pointwise.hadamard_head(value, value_dims, op.v_hadamard)
        cached = _cached_head(op, state, row, head)
        simd.call_at(op.append, (cached, dims, value_dims, state.places[row].cache_index, key, value))


@compiled
def _attend(op, state, counter, threads, thread):
    """Attention: a span of chunks for a task's queries of one key head. The thread that does a task's last span merges them all.

    Returns how many items it did.
    """
    kv_heads, size, plan = op.kv_heads, op.partial_bytes, state.plans[op.plan]
    group, items = op.heads // kv_heads, plan.num_items
    scratch = state.scratch + thread * state.scratch_bytes
    walk_at(scratch).caps[0] = op.cap
    number, completed = plan.num_tasks - 1, 0
    while True:
        item = sharing.take(counter, items, 1)
        if item == items:
            return completed
        completed += 1
        item = items - 1 - item  # the longest rows first
        while item < plan.tasks[number].item:
            number -= 1
        task = plan.tasks[number]
        row, chunks, span = task.row, task.chunks - task.first, task.span
        spans, queries = (chunks + span - 1) // span, (task.end_row - row) * group
        kv_head, first = (item - task.item) // spans, task.first + (item - task.item) % spans * span
        partials, stride = scratch + op.partials_at + op.together * size, size
        if spans > 1:
            stride = chunks * size
            partials = state.partials + task.partial * size + kv_head * queries * stride
        for chunk in range(first, min(task.chunks, first + span)):
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
                earliest = first_chunk(length, op.window) - task.first
                for later in range(earliest + 1, (length + CHUNK - 1) // CHUNK - task.first):
                    merge(partial + earliest * size, partial + later * size, size)
                partial += earliest * size
            head = kv_head * group + query % group
            out = op.out + here * op.out_stride + head * op.value_dims * 4
            finish(partial, size, op.value_dims, out, op.sinks + 4 * head if op.sinks != 0 else 0)
            if op.hadamard != 0:
                pointwise.hadamard_head(out, op.value_dims, op.hadamard)


@compiled
def _attend_chunk(op, state, task, kv_head, chunk, separate, partials, stride, scratch):
    """Walk over one chunk for a task's rows. separate: keep each chunk's partials; else merge them into a row's first."""
    group, dims, size, start = op.heads // op.kv_heads, op.key_dims, op.partial_bytes, chunk * CHUNK
    places, row, end_row = state.places, task.row, task.end_row
    head = _cached_head(op, state, row, kv_head)
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
            walks = (end - query + op.together - 1) // op.together
            count = (end - query + walks - 1) // walks
            for number in range(count):
                here, member = (query + number) // group, (query + number) % group
                length = places[here].length
                partial = partials + (query + number - first) * stride
                if separate:
                    partial += (chunk - task.first) * size
                elif chunk > first_chunk(length, op.window):
                    partial = scratch + op.partials_at + number * size
                source = op.queries + here * op.stride + (kv_head * group + member) * dims * 4
                put_query(walk, number, source, partial, max(0, length - op.window), length)
            path = state.paths + row * state.path_length * 8
            simd.call_at(op.kernel, (count, head, dims, op.value_dims, start, straight, path, scratch))
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
def _add(op, row):
    """The norm of a branch's row added to the residual's."""
    pointwise.add_normed(op.rows + row * op.stride, op.branch + row * op.stride, op.weight, op.eps, op.features, op.scale, op.after)


@compiled
def _keep(op, state, row):
    """Copy a layer's output row to where the caller wants it."""
    to = state.kept[op.layer] + row * op.row_bytes
    for at in range(0, op.row_bytes, 4):
        simd.poke_f32(to + at, simd.peek_f32(op.rows + row * op.stride + at))


@compiled
def _num_items(op, state, threads):
    """How many items of work an operation has in this forward, 0 where there is nothing to do."""
    if is_operation(op, "prepare"):
        rows = _rows_to_prepare(op.prepare, state)
        return rows * sharing.parts_of_row(op.prepare.features, rows, threads)
    if is_operation(op, "linear"):
        if op.linear.used != 0 or op.linear.heads != 0:
            return _num_tiles(op.linear) * _num_segments(op.linear, state)
        return _num_tiles(op.linear) if not op.linear.vocab or state.num_logit_rows > 0 else 0
    if is_operation(op, "rotate"):
        return state.num_rows * (op.rotate.heads + op.rotate.kv_heads)
    if is_operation(op, "add"):
        return state.num_rows * op.add.parts
    if is_operation(op, "attend"):
        return state.plans[op.attend.plan].num_items
    if is_operation(op, "latent"):
        return state.num_rows * (op.latent.heads + 1)
    if is_operation(op, "keep"):
        return state.num_rows if address(state.kept) != 0 and state.kept[op.keep.layer] != 0 else 0
    if is_operation(op, "pick"):
        return min(1, state.num_picked)
    if is_operation(op, "gather"):  # one row's activations are read where they are
        return state.num_rows * op.gather.used if state.num_rows > 1 else 0
    if is_operation(op, "convolve"):
        return num_convolved(op.convolve, state)
    if is_operation(op, "record"):
        return state.num_rows * op.record.key_heads
    if is_operation(op, "recur"):
        return state.num_sequences * op.recur.value_heads * (op.recur.value_dims // simd.LANES)
    if is_operation(op, "finish"):
        return state.num_rows * op.finish.groups
    if is_operation(op, "shrink"):
        return state.num_adapted * op.shrink.num_tensors * num_parts(op.shrink.features)
    if is_operation(op, "expand"):
        return state.num_spans * num_pieces(op.expand)
    if is_operation(op, "combine"):
        return state.num_rows * sharing.parts_of_row(op.combine.features, state.num_rows, threads)
    return state.num_rows


@compiled
def _do(op, state, threads, thread, item):
    """One item of an operation that shares its items out one by one."""
    if is_operation(op, "embed"):
        _embed(op.embed, state, item)
    elif is_operation(op, "prepare"):
        _prepare(op.prepare, state, threads, item)
    elif is_operation(op, "rotate"):
        _rotate(op.rotate, state, item)
    elif is_operation(op, "add"):
        _add(op.add, item)
    elif is_operation(op, "latent"):
        assemble(op.latent, item)
    elif is_operation(op, "keep"):
        _keep(op.keep, state, item)
    elif is_operation(op, "norm"):
        pointwise.norm_row(op.norm.rows + item * op.norm.stride, op.norm.weight, op.norm.eps, op.norm.features)
    elif is_operation(op, "route"):
        route(op.route, state, item)
    elif is_operation(op, "gather"):
        gather(op.gather, state, item)
    elif is_operation(op, "convolve"):
        convolve(op.convolve, state, item)
    elif is_operation(op, "record"):
        record(op.record, state, item)
    elif is_operation(op, "recur"):
        recur(op.recur, state, item, state.scratch + thread * state.scratch_bytes)
    elif is_operation(op, "finish"):
        finish_heads(op.finish, item)
    elif is_operation(op, "combine"):
        _combine(op.combine, state, threads, item)
    elif is_operation(op, "shrink"):
        shrink(op.shrink, state, item)
    elif is_operation(op, "expand"):
        expand(op.expand, state, item, state.scratch + thread * state.scratch_bytes)
    else:
        pick(op.pick, state, threads)


@compiled
def _take_part(job, number, items, step, here, threads, thread):
    """Take items of an operation until none is left. Returns whether this thread did the last one."""
    op, state, counter = job.operations[number], job.state, job.counters + 8 * number
    done = job.counters + 8 * (threads * job.num_operations + number)
    if is_operation(op, "linear"):
        return _linear(op.linear, state, counter, 8 * job.num_operations, done, step, here, threads, thread)
    if is_operation(op, "attend"):
        return sharing.is_last(done, _attend(op.attend, state, counter, threads, thread), items)
    reads_adapters = is_operation(op, "shrink") or is_operation(op, "expand")
    shares = 4 if is_operation(op, "rotate") else 2 if reads_adapters else 16  # adapters are read in long runs
    count = max(1, items // (threads * shares))
    completed = 0
    while True:
        first = sharing.take(counter, items, count)
        if first == items:
            return sharing.is_last(done, completed, items)
        end = min(items, first + count)
        for item in range(first, end):
            _do(op, state, threads, thread, item)
        completed += end - first


@compiled
def first_operation(job, number, threads):
    """The first operation from `number` on that has something to do in this forward, DONE if none has."""
    while number < job.num_operations:
        if _num_items(job.operations[number], job.state, threads) > 0:
            return number
        number += 1
    return DONE


@compiled
def _next_operation(job, number, threads):
    """The operation behind a finished one, DONE if there is none or the forward is to end early."""
    state = job.state
    if state.stops_early != 0 and simd.acquire(address(state.stop)) != 0:
        state.stopped = 1
        return DONE
    return first_operation(job, number + 1, threads)


def run(at, threads, thread):
    """One thread's part of the forward that is published in the team at address `at`, until it is done.

    An operation ends when all of its items are done, and the thread that did the last one begins the next operation. A thread that
    holds no item, because another process has its core, is not waited for: it goes on where the others are.
    """
    team = team_at(at)
    job, worker, step = team.job, team.workers[thread], address(team.step)
    while True:
        here = enter(team, worker)
        number = here & DONE
        if number == DONE:
            break
        items = _num_items(job.operations[number], job.state, threads)
        if _take_part(job, number, items, step, here, threads, thread):
            begin(step, here - number + _next_operation(job, number, threads))
        else:
            leave(worker)
            await_step(step, here, worker)
    leave(worker)
    if thread == 0:
        await_leaving(team, threads)
