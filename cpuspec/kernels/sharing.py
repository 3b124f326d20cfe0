"""How the threads of a team share out an operation: by counters, so that a thread that is held up delays only what it took.

Which thread computes what never changes a result.
"""

from cpuspec.kernels import simd
from cpuspec.kernels.options import compiled

PIECES = 16  # that a thread's share of the tiles of a linear layer has at most

APART_BYTES = 128 << 10  # of a piece's results that a thread keeps to itself until it is the first to have them, at most


@compiled
def take(counter, items, count):
    """The first of the next `count` items, or `items` when nothing is left. counter: an address."""
    return min(simd.fetch_add(counter, count), items)


@compiled
def is_last(done, completed, items):
    """Count `completed` items at the address `done`; returns whether all are done with them."""
    return completed > 0 and simd.fetch_add(done, completed) + completed == items


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


# The counter of a share of tiles whose pieces may be repeated. Its bits, from the lowest:
#   below _CLAIMED: how many pieces were taken
#   from _CLAIMED on: one bit a piece, set once a thread has claimed it, so that only that thread copies its result
#   from _REPEATED on: one bit a piece, set once another thread repeats it
#   from _PUBLISHED on: how many pieces have their results in place
_CLAIMED, _REPEATED, _PUBLISHED = 16, 32, 48
PUBLISHED = 1 << _PUBLISHED  # one piece more


@compiled
def taken(counter):
    """How many pieces were taken; some threads take in vain."""
    return counter & 0xFFFF


@compiled
def published(counter):
    """How many pieces are where they belong."""
    return counter >> _PUBLISHED


@compiled
def held_pieces(counter, pieces):
    """The pieces, a bit each, that were taken and not claimed, and that nobody repeats."""
    return (1 << min(taken(counter), pieces)) - 1 & ~(counter >> _CLAIMED | counter >> _REPEATED)


@compiled
def claims(at, number):
    """Claim a piece in the counter at address `at`. Returns whether no thread had."""
    return simd.fetch_or(at, 1 << _CLAIMED + number) >> _CLAIMED + number & 1 == 0


@compiled
def repeats(at, number):
    """Note that a piece is repeated. Returns whether no thread had."""
    return simd.fetch_or(at, 1 << _REPEATED + number) >> _REPEATED + number & 1 == 0


@compiled
def pieces_of(tiles):
    """How many pieces a share of so many tiles has."""
    number = 0
    while tiles > 0 and number < PIECES:
        tiles -= (tiles + 3) // 4
        number += 1
    return number


@compiled
def parts_of_row(features, rows, threads):
    """How many parts a row of activations is prepared in: a long row is shared where rows are few. Each part measures the norm."""
    return 1 if rows >= 2 * threads else max(1, min(threads, features // 1024))


@compiled
def part_of_row(features, parts, unit):
    """Inputs of each of `parts` parts of a row, a multiple of `unit`; the last parts may have fewer."""
    return (features + unit * parts - 1) // (unit * parts) * unit
