"""How the threads of a team share out an operation: by a counter, so that a thread that is held up delays only what it took.

Which thread computes what never changes a result.
"""

from cpuspec.kernels import simd
from cpuspec.kernels.options import compiled

PIECES = 8  # of each thread's share of the tiles of a linear layer


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
    """Where a piece of a share of `tiles` tiles begins. Each is half of what is left: memory is read in long runs, and threads end
    together.
    """
    return tiles - (tiles >> number) if number < PIECES else tiles
