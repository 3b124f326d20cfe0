"""Threads that run compiled steps together, one at a time, and meet at barriers.

Workers are Python threads inside a compiled function without the GIL. Who waits for the others spins for a moment and then
yields the processor, so that a team larger than its free cores slows down and does not collapse. A thread whose yields take long
shares its core with somebody who hands it back a time slice later, milliseconds after the others came: for a while it then
sleeps instead, until the last of the others wakes it, which schedulers do promptly for those that slept. A thread with a core of
its own never sleeps: to be woken takes longer than most waits. Between steps a worker waits in the same way, and when nothing
comes for long it returns to Python and sleeps on an event.
"""

import sys

from numba import types

from cpuspec.kernels import simd
from cpuspec.kernels.options import compiled

# Slots of the control block, cache lines of their own (in bytes); PARKED is the first of as many as there are threads.
GENERATION, ROUND, ARRIVED, QUIT, JOB, PARKED = 0, 128, 256, 320, 384, 448

# On the line behind GENERATION and ROUND, which others look at all the time: how many sleep until the number changes, are about to
# or just woke up. Each takes itself off: were it who wakes them, one that comes to sleep on the next number meanwhile would sleep
# unseen, and for ever.
SLEEPING = 64

# Behind PARKED: until when, in cycles of the time stamp counter, a thread sleeps where it would yield.
CROWDED = 8

# What is run, as int64 from JOB on.
OPERATIONS, NUM_OPERATIONS, STATE, COUNTERS = (JOB + 8 * i for i in range(4))
JOB_BYTES = 32

_SPINS = 200  # pauses before a waiting thread gives its core away: some microseconds
_YIELDS = 20000  # yields without work before a worker parks: some tens of milliseconds on a quiet machine

# Cycles of the time stamp counter, of which a nanosecond has one to four.
_LONG_WAIT = 2_000_000  # to wait less is no matter
_SLOW_YIELD = 50_000  # a yield with a core of one's own takes a thousand: somebody else used the core
_CROWDED = 200_000_000  # until one yields again, which may cost a time slice

# The operating system's "let another thread run", found by name among the symbols of the process.
give_way = types.ExternalFunction("SwitchToThread" if sys.platform == "win32" else "sched_yield", types.int32())

if sys.platform == "linux":
    _FUTEX, _WAIT, _WAKE = 202, 128, 129  # futex(2) on x86-64, among the threads of one process
    _ALL = 0x7FFFFFFF
    _system_call = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))

    @compiled
    def sleep_while(at, seen):
        """Sleep until somebody changes the number at `at`, or not at all if it is no longer `seen`; may wake up for nothing."""
        simd.fetch_add(at + SLEEPING, 1)
        _system_call(_FUTEX, at, _WAIT, seen & 0xFFFFFFFF, 0, 0, 0)
        simd.fetch_add(at + SLEEPING, -1)

    @compiled
    def wake(at):
        """Wake who sleeps until the number at `at` changes: to be called after changing it."""
        if simd.acquire(at + SLEEPING) != 0:
            _system_call(_FUTEX, at, _WAKE, _ALL, 0, 0, 0)

else:

    @compiled
    def sleep_while(at, seen):
        """Yield: there is no sleeping on a number here."""
        give_way()

    @compiled
    def wake(at):
        """Nobody sleeps."""


@compiled
def linger(at, seen, crowded):
    """Return when the number at `at` is no longer `seen`, or after a long while. crowded: address of the thread's CROWDED."""
    for _ in range(_SPINS):
        if simd.acquire(at) != seen:
            return
        simd.pause()
    start, turns = simd.cycles(), 0
    if start < simd.peek_i64(crowded):
        sleep_while(at, seen)
        return
    while simd.acquire(at) == seen and turns < _YIELDS:
        give_way()
        turns += 1
    passed = simd.cycles() - start
    if passed > _LONG_WAIT and passed > turns * _SLOW_YIELD:
        simd.poke_i64(crowded, start + _CROWDED)


@compiled
def barrier(control, threads, thread):
    """Return when all threads have come here."""
    if threads == 1:
        return
    here = simd.acquire(control + ROUND)
    if simd.fetch_add(control + ARRIVED, 1) == threads - 1:
        simd.exchange(control + ARRIVED, 0)
        simd.fetch_add(control + ROUND, 1)
        wake(control + ROUND)
        return
    while simd.acquire(control + ROUND) == here:
        linger(control + ROUND, here, control + PARKED + 64 * thread + CROWDED)


@compiled
def await_work(control, seen, thread):
    """The next generation after `seen`; `seen` itself if none came and the worker should park; -1 to end."""
    parked = control + PARKED + 64 * thread
    linger(control + GENERATION, seen, parked + CROWDED)
    if simd.acquire(control + GENERATION) == seen:
        simd.exchange(parked, 1)
        # Work published between the last look and the flag would find nobody to wake.
        if simd.acquire(control + GENERATION) == seen:
            return seen
        simd.exchange(parked, 0)
    return -1 if simd.acquire(control + QUIT) != 0 else simd.acquire(control + GENERATION)


@compiled
def publish(control, job, threads):
    """Reset the work counters, of each thread one for each operation, start a generation, and say how many workers are parked.

    job: address of what is run, as it lies from JOB on.
    """
    for at in range(0, JOB_BYTES, 8):
        simd.poke_i64(control + JOB + at, simd.peek_i64(job + at))
    counters = simd.peek_i64(control + COUNTERS)
    for i in range(threads * simd.peek_i64(control + NUM_OPERATIONS)):
        simd.poke_i64(counters + 8 * i, 0)
    simd.fetch_add(control + GENERATION, 1)
    wake(control + GENERATION)
    asleep = 0
    for worker in range(1, threads):
        asleep += simd.exchange(control + PARKED + 64 * worker, 0)
    return asleep
