"""How threads of a team wait for each other: for the next forward, and for everyone at the end of an operation.

A waiting thread spins for a moment and then yields its core, so that a team larger than its free cores slows down and does not
collapse. A thread whose yields take long shares its core with another process, which hands the core back milliseconds after the
others came. That thread sleeps for a while instead, until the last of the others wakes it: schedulers run a woken thread promptly.
A thread with a core of its own never sleeps, because waking takes longer than most waits.
"""

import sys

from numba import types

from cpuspec.kernels import simd
from cpuspec.kernels.layout import SLEEPING
from cpuspec.kernels.options import compiled
from cpuspec.kernels.pointers import address

_SPINS = 200  # pauses before a waiting thread gives its core away: some microseconds
_YIELDS = 20000  # yields without work before a worker parks: some tens of milliseconds on a quiet machine

# Cycles of the time stamp counter, of which a nanosecond has one to four.
_LONG_WAIT = 2_000_000  # a shorter wait does not matter
_SLOW_YIELD = 50_000  # a yield takes a thousand on a core of one's own: another process used the core
_CROWDED = 200_000_000  # until the thread yields again, which may cost a time slice

# The operating system's "let another thread run", found by name among the symbols of the process.
give_way = types.ExternalFunction("SwitchToThread" if sys.platform == "win32" else "sched_yield", types.int32())

if sys.platform == "linux":
    _FUTEX, _WAIT, _WAKE = 202, 128, 129  # futex(2) on x86-64, among the threads of one process
    _ALL = 0x7FFFFFFF
    _system_call = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))

    @compiled
    def sleep_while(at, seen):
        """Sleep until the WATCHED number at address `at` changes; return at once if it is no longer `seen`. May wake up early."""
        simd.fetch_add(at + SLEEPING, 1)
        _system_call(_FUTEX, at, _WAIT, seen & 0xFFFFFFFF, 0, 0, 0)
        simd.fetch_add(at + SLEEPING, -1)

    @compiled
    def wake(at):
        """Wake the threads that sleep until the WATCHED number at `at` changes. Call it after changing the number."""
        if simd.acquire(at + SLEEPING) != 0:
            _system_call(_FUTEX, at, _WAKE, _ALL, 0, 0, 0)

else:

    @compiled
    def sleep_while(at, seen):
        """Yield: this system has no sleeping on a number."""
        give_way()

    @compiled
    def wake(at):
        """Do nothing: no thread sleeps."""


@compiled
def linger(at, seen, worker):
    """Return when the number at address `at` is no longer `seen`, or after a long while. worker: the waiting thread's record."""
    for _ in range(_SPINS):
        if simd.acquire(at) != seen:
            return
        simd.pause()
    start, turns = simd.cycles(), 0
    if start < worker.crowded:
        sleep_while(at, seen)
        return
    while simd.acquire(at) == seen and turns < _YIELDS:
        give_way()
        turns += 1
    passed = simd.cycles() - start
    if passed > _LONG_WAIT and passed > turns * _SLOW_YIELD:
        worker.crowded = start + _CROWDED


@compiled
def barrier(team, threads, thread):
    """Return when all threads have come here."""
    if threads == 1:
        return
    at, arrived = address(team.round), address(team.arrived)
    here = simd.acquire(at)
    if simd.fetch_add(arrived, 1) == threads - 1:
        simd.exchange(arrived, 0)
        simd.fetch_add(at, 1)
        wake(at)
        return
    while simd.acquire(at) == here:
        linger(at, here, team.workers[thread])


@compiled
def await_work(team, seen, thread):
    """The next generation after `seen`; `seen` itself if none came and the worker should park; -1 to end."""
    at, worker = address(team.generation), team.workers[thread]
    parked = address(worker)
    linger(at, seen, worker)
    if simd.acquire(at) == seen:
        simd.exchange(parked, 1)
        # Work published between the last look and the flag would find no parked worker to wake.
        if simd.acquire(at) == seen:
            return seen
        simd.exchange(parked, 0)
    return -1 if simd.acquire(address(team.quit)) != 0 else simd.acquire(at)
