"""Threads that run compiled steps together, one at a time, and meet at barriers.

Workers are Python threads inside a compiled function without the GIL. A barrier spins for a moment and then yields the
processor, so that a team larger than its free cores slows down and does not collapse. Between steps a worker spins a little
longer; when nothing comes it returns to Python and sleeps on an event.
"""

import sys

from numba import types

from cpuspec.kernels import simd
from cpuspec.kernels.options import compiled

# Slots of the control block, one cache line each (in bytes).
GENERATION, ARRIVED, ROUND, QUIT, JOB, PARKED = (64 * i for i in range(6))

# What is run, as int64 from JOB on.
OPERATIONS, NUM_OPERATIONS, STATE, COUNTERS = (JOB + 8 * i for i in range(4))

_SPINS = 200  # pauses before a waiting thread gives its core away: some microseconds
_YIELDS = 20000  # yields without work before a worker sleeps: some tens of milliseconds on a quiet machine

# The operating system's "let another thread run", found by name among the symbols of the process.
give_way = types.ExternalFunction("SwitchToThread" if sys.platform == "win32" else "sched_yield", types.int32())


@compiled
def barrier(control, threads):
    """Return when all threads have come here."""
    if threads == 1:
        return
    here = simd.acquire(control + ROUND)
    if simd.fetch_add(control + ARRIVED, 1) == threads - 1:
        simd.exchange(control + ARRIVED, 0)
        simd.fetch_add(control + ROUND, 1)
        return
    spins = 0
    while simd.acquire(control + ROUND) == here:
        if spins < _SPINS:
            spins += 1
            simd.pause()
        else:
            give_way()


@compiled
def await_work(control, seen, parked):
    """The next generation after `seen`; `seen` itself if none came and the worker should sleep; -1 to end."""
    waited = 0
    while True:
        now = simd.acquire(control + GENERATION)
        if now != seen:
            return -1 if simd.acquire(control + QUIT) != 0 else now
        waited += 1
        if waited < _SPINS:
            simd.pause()
        elif waited < _SPINS + _YIELDS:
            give_way()
        else:
            simd.exchange(parked, 1)
            # Work published between the last look and the flag would find nobody to wake.
            if simd.acquire(control + GENERATION) == seen:
                return seen
            simd.exchange(parked, 0)
            waited = 0


@compiled
def publish(control, operations, num_operations, state, counters, threads):
    """Reset the work counters, one for each operation, start a generation, and say how many workers sleep."""
    for i in range(num_operations):
        simd.poke_i64(counters + 8 * i, 0)
    simd.poke_i64(control + OPERATIONS, operations)
    simd.poke_i64(control + NUM_OPERATIONS, num_operations)
    simd.poke_i64(control + STATE, state)
    simd.poke_i64(control + COUNTERS, counters)
    simd.fetch_add(control + GENERATION, 1)
    asleep = 0
    for worker in range(1, threads):
        asleep += simd.exchange(control + PARKED + 64 * worker, 0)
    return asleep
