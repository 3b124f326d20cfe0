"""How threads of a team wait: for the next forward, and for the items of an operation that others still do.

A thread that does no item is not waited for. It is outside of the job then, and joins the operation that runs when it comes back.

A waiting thread spins for a moment and then yields its core, so that a team larger than its free cores slows down and does not
collapse. A thread whose yields take long shares its core with another process, which hands the core back milliseconds later. That
thread sleeps for a while instead, until another thread wakes it: schedulers run a woken thread promptly.
A thread with a core of its own never sleeps, because waking takes longer than most waits.
"""

from numba import types

from cpuspec.kernels import simd
from cpuspec.kernels.layout import DONE, SEEN, SLEEPING
from cpuspec.kernels.options import compiled
from cpuspec.kernels.pointers import address
from cpuspec.platform import SYSTEM

_SPINS = 200  # pauses before a waiting thread gives its core away: some microseconds

# Cycles of the time stamp counter, of which a nanosecond has one to four.
_IDLE = 6_000_000  # without work before a worker sleeps: longer than what comes between most forwards of one answer
_LONG_WAIT = 2_000_000  # a shorter wait does not matter
_SLOW_YIELD = 50_000  # a yield takes a thousand on a core of one's own: another process used the core
_CROWDED = 200_000_000  # until the thread yields again, which may cost a time slice

WORK, PARK, END = range(3)

# The operating system's "let another thread run", found by name among the symbols of the process.
give_way = types.ExternalFunction(SYSTEM.yield_function, types.int32())

CAN_SLEEP = bool(SYSTEM.sleep)  # on a number, until another thread of the process changes it

if SYSTEM.sleep == "futex":
    _FUTEX, _WAIT, _WAKE = 202, 128, 129  # futex(2) on x86-64, among the threads of one process
    _ALL = 0x7FFFFFFF
    _system_call = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))

    @compiled
    def _sleep(at, seen, own):
        _system_call(_FUTEX, at, _WAIT, seen & 0xFFFFFFFF, 0, 0, 0)

    @compiled
    def _wake_all(at):
        _system_call(_FUTEX, at, _WAKE, _ALL, 0, 0, 0)

elif SYSTEM.sleep == "WaitOnAddress":
    _FOR_EVER = 0xFFFFFFFF
    _wait_on_address = types.ExternalFunction("WaitOnAddress", types.int32(types.int64, types.int64, types.int64, types.uint32))
    _wake_all = types.ExternalFunction("WakeByAddressAll", types.void(types.int64))

    @compiled
    def _sleep(at, seen, own):
        simd.exchange(own, seen)
        _wait_on_address(at, own, 8, _FOR_EVER)

else:

    @compiled
    def _sleep(at, seen, own):
        give_way()

    @compiled
    def _wake_all(at):
        pass


@compiled
def sleep_while(at, seen, own):
    """Sleep until the WATCHED number at address `at` changes; return at once if it is no longer `seen`. May wake up early.

    own: address of an int64 of this thread. A system without sleeping on a number lets another thread run.
    """
    simd.fetch_add(at + SLEEPING, 1)
    _sleep(at, seen, own)
    simd.fetch_add(at + SLEEPING, -1)


@compiled
def wake(at):
    """Wake the threads that sleep until the WATCHED number at `at` changes. Call it after changing the number."""
    if simd.acquire(at + SLEEPING) != 0:
        _wake_all(at)


@compiled
def linger(at, seen, worker):
    """Return when the number at `at` is no longer `seen`, or some milliseconds later. worker: the waiting thread's record."""
    for _ in range(_SPINS):
        if simd.acquire(at) != seen:
            return
        simd.pause()
    start, turns, passed = simd.cycles(), 0, 0
    if start < worker.crowded:
        sleep_while(at, seen, address(worker) + SEEN)
        return
    while simd.acquire(at) == seen and passed < _IDLE:
        give_way()
        turns += 1
        passed = simd.cycles() - start
    if passed > _LONG_WAIT and passed > turns * _SLOW_YIELD:
        worker.crowded = start + _CROWDED


@compiled
def enter(team, worker):
    """Note that the thread reads the job from here on. Returns the step: where no operation runs, there is no job to be read."""
    simd.exchange(address(worker.inside), 1)
    return simd.acquire(address(team.step))


@compiled
def leave(worker):
    """Note that the thread reads the job no more."""
    simd.exchange(address(worker.inside), 0)


@compiled
def begin(step, next):
    """Change the step at address `step`, and wake the threads that sleep until it changes."""
    simd.exchange(step, next)
    wake(step)


@compiled
def await_step(step, here, worker):
    """Return when the step at address `step` is no longer `here`."""
    while simd.acquire(step) == here:
        linger(step, here, worker)


@compiled
def await_leaving(team, threads):
    """Return when no other thread reads the job. Only one that was interrupted on its way to an operation is waited for at all."""
    for thread in range(1, threads):
        inside, turns = address(team.workers[thread].inside), 0
        while simd.acquire(inside) != 0:
            turns += 1
            if turns < _SPINS:
                simd.pause()
            else:
                give_way()


@compiled
def await_work(team, thread):
    """Wait for work. Returns WORK or END, or PARK if no work comes and this platform has no way to sleep."""
    at, worker = address(team.step), team.workers[thread]
    parked = address(worker)
    seen = simd.acquire(at)
    if simd.acquire(address(team.quit)) != 0:
        return END
    if seen & DONE == DONE:
        linger(at, seen, worker)
        while CAN_SLEEP and simd.acquire(at) == seen:
            sleep_while(at, seen, address(worker) + SEEN)
    if simd.acquire(at) == seen and seen & DONE == DONE:
        simd.exchange(parked, 1)
        # Work published between the last look and the flag would find no parked worker to wake.
        if simd.acquire(at) == seen:
            return PARK
        simd.exchange(parked, 0)
    return END if simd.acquire(address(team.quit)) != 0 else WORK
