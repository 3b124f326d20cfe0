"""Before a forward: where each of its rows lies in the cache and what it sees, and how its attention is shared out among threads.

A result does not depend on the plan: each chunk gives a partial, and partials are merged in the order of the chunks.
"""

from cpuspec.kernels import simd
from cpuspec.kernels.attention import first_chunk
from cpuspec.kernels.kv_rows import CHUNK
from cpuspec.kernels.layout import MAX_QUERIES, int64s_at
from cpuspec.kernels.options import compiled

TASK_QUERIES = MAX_QUERIES  # of one key head that a task has at most, unless a single row has more
_LEAST_QUERIES = 32  # that make a read of keys and values from memory worth its time
_ITEMS_PER_THREAD = 8


@compiled
def place_rows(state, starts, lengths, storages, parents, num_sequences, num_parents, both_ways, sees_rows):
    """Write each row's place, and a path where its positions are no chain.

    Pointers to int64s: starts: the first row of each sequence, and the end of the last; lengths: tokens in each sequence's slot;
    storages: the slots' addresses; parents, both_ways, sees_rows: as in `ForwardBatch`.
    """
    for sequence in range(num_sequences):
        start, end, prefix = starts[sequence], starts[sequence + 1], lengths[sequence]
        for row in range(start, end):
            depth = 0 if not sees_rows else end - start if both_ways else row - start + 1
            if num_parents > 0:
                depth, node = 0, row
                while node >= 0:
                    depth, node = depth + 1, parents[node]
            place = state.places[row]
            place.storage = storages[sequence]
            place.cache_index = prefix + row - start
            place.length = prefix + depth
            # A row that sees all rows before it is a chain's, also in a tree.
            straight = both_ways or not sees_rows or depth == row - start + 1
            place.straight = prefix + depth if straight else prefix // simd.LANES * simd.LANES
            if place.straight < prefix + depth:
                _write_path(state, row, parents, prefix - start, place.straight, prefix, prefix + depth)


@compiled
def _write_path(state, row, parents, offset, straight, prefix, length):
    """Cache indices of a tree row's logical positions straight..length: the rest of the prefix, its ancestors by depth, itself."""
    path = int64s_at(state.paths + 8 * (row * state.path_length - straight))
    for index in range(straight, prefix):
        path[index] = index
    node = row
    for index in range(length - 1, prefix - 1, -1):
        path[index] = node + offset
        node = parents[node]


@compiled
def plan_attention(state):
    """Write the tasks of every plan. Where partials of several threads have no room, one thread walks over all of a task's chunks.
    Such tasks are the last ones, which are begun first (`operations`), so that the small items of the others still let threads end
    together.
    """
    for number in range(state.num_plans):
        _plan(state, state.plans[number])


@compiled
def _plan(state, plan):
    rows, heads, kv_heads, threads = state.num_rows, plan.heads, plan.kv_heads, state.threads
    places, tasks = state.places, plan.tasks
    shares = _ITEMS_PER_THREAD * threads
    queries = min(TASK_QUERIES, max(_LEAST_QUERIES, (2 * rows * heads + shares - 1) // shares))
    most_rows = max(1, queries // (heads // kv_heads))
    row = num_tasks = walks = 0
    while row < rows:
        end = row + 1
        while end < rows and places[end].storage == places[row].storage:
            end += 1
        parts = (end - row + most_rows - 1) // most_rows
        for part in range(parts):
            task = tasks[num_tasks]
            task.row, task.end_row = row + (end - row) * part // parts, row + (end - row) * (part + 1) // parts
            longest = shortest = places[task.row].length
            for here in range(task.row + 1, task.end_row):
                longest, shortest = max(longest, places[here].length), min(shortest, places[here].length)
            task.first, task.chunks = first_chunk(shortest, plan.window), (longest + CHUNK - 1) // CHUNK
            walks += (task.chunks - task.first) * kv_heads
            num_tasks += 1
        row = end
    longest_span = (walks + shares - 1) // shares if threads > 1 else walks
    items = partials = 0
    for i in range(num_tasks):
        task = tasks[i]
        chunks = task.chunks - task.first
        spans = (chunks + longest_span - 1) // longest_span
        separate = chunks * (task.end_row - task.row) * heads
        if partials + separate > plan.max_partials:
            spans = 1
        task.span, task.item, task.partial = (chunks + spans - 1) // spans, items, partials
        items += spans * kv_heads
        if spans > 1:
            partials += separate
            for counter in range(i * kv_heads, (i + 1) * kv_heads):
                state.walked[counter] = 0  # also in a child that was forked within a forward
    plan.num_tasks, plan.num_items = num_tasks, items
