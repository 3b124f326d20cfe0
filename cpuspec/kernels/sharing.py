"""How the threads of a team share out an operation: by counters, so that a thread that is held up delays only what it took.

Which thread computes what never changes a result.
"""

from cpuspec.kernels import simd
from cpuspec.kernels.options import compiled

PIECES = 16  # that a thread's share of the tiles of a linear layer has at most


@compiled
def take(counter, items, count):
    """The first of the next `count` items, or `items` when nothing is left. counter: an address."""
    return min(simd.fetch_add(counter, count), items)


@compiled
def share(tiles, thread, threads):
    """A thread's share of the tiles: the first one, and how many they are."""
    start = tiles * thread // threads
    return start, tiles * (thread + 1) // threads - start


@compiled
def piece(tiles, number):
    """The first tile of a piece of a share of `tiles` tiles. Each piece is a quarter of what is left: memory is read in long runs,
    a slow core never holds much, and threads end together.
    """
    if number >= PIECES:
        return tiles
    left = tiles
    for _ in range(number):
        left -= (left + 3) // 4
    return tiles - left


@compiled
def parts_of_row(features, rows, threads):
    """How many parts a row of activations is prepared in: a long row is shared where rows are few. Each part measures the norm."""
    return 1 if rows >= 2 * threads else max(1, min(threads, features // 1024))


@compiled
def part_of_row(features, parts):
    """Inputs of each of `parts` parts of a row, whole groups of 32; the last part may have fewer."""
    return (features + 32 * parts - 1) // (32 * parts) * 32
