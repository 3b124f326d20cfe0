"""A team of threads that runs one program after another, each as one compiled call.

Workers are Python threads inside a compiled function without the GIL. An operation ends when all of its items are done
(`operations.run`), so the threads of a team need not all be there. Between forwards a worker waits as it does between operations
(`waiting`). When no work comes for some milliseconds it sleeps: on the step's number where the system can do that, else it is
parked, which means that it returns to Python and sleeps on an event.
"""

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.environment import start_thread
from cpuspec.errors import BackendError
from cpuspec.formats.packing import aligned_bytes
from cpuspec.kernels import layout, machine_code, selfcheck, simd
from cpuspec.kernels.layout import DONE, job_at, team_at
from cpuspec.kernels.operations import first_operation, run
from cpuspec.kernels.options import compiled
from cpuspec.kernels.pointers import address
from cpuspec.kernels.program import Program, enter, go_on
from cpuspec.kernels.waiting import PARK, WORK, await_work, begin

_Array = NDArray[Any]


@compiled
def _publish(team, job, threads):
    """Reset the counters and begin the first operation. Returns how many workers are parked.

    Each operation has a counter for each thread and one of the items that are done.
    """
    own, step = team.job, address(team.step)
    own.operations, own.num_operations, own.state, own.counters = job.operations, job.num_operations, job.state, job.counters
    for i in range((threads + 1) * job.num_operations):
        simd.poke_i64(job.counters + 8 * i, 0)
    # One more than a forward's DONE is the first operation of the next.
    begin(step, (simd.acquire(step) | DONE) + 1 + first_operation(job, 0, threads))
    asleep = 0
    for worker in range(1, threads):
        asleep += simd.acquire(address(team.workers[worker]))
    return asleep


def _publish_only(at, job, threads):
    """`_publish` for Python: addresses of the team and of the job."""
    return _publish(team_at(at), job_at(job), threads)


def _lead(at, job, threads, run, numbers):
    """Enter a forward, publish it and run the caller's part of it; and those that follow. run: address of the compiled
    `operations.run`.

    Returns how many workers are parked; if any is, the forward is only published.
    """
    state = job_at(job).state
    enter(state, numbers)
    asleep = _publish(team_at(at), job_at(job), threads)
    if asleep == 0:
        simd.call_at(run, (at, threads, 0))
        while go_on(state, numbers):
            enter(state, numbers)
            _publish(team_at(at), job_at(job), threads)  # a worker that is parked meanwhile is not waited for
            simd.call_at(run, (at, threads, 0))
    return asleep


def _work(at, threads, thread, run):
    """Run every published forward. Returns PARK when it is time to sleep, and END to end."""
    simd.exchange(address(team_at(at).workers[thread]), 0)
    while True:
        simd.call_at(run, (at, threads, thread))
        next = await_work(team_at(at), thread)
        if next != WORK:
            return next


# By name: the Python function, its number of arguments, whether it returns something.
_ENTRIES: Mapping[str, tuple[Callable[..., Any], int, bool]] = MappingProxyType(
    {"run": (run, 3, False), "lead": (_lead, 5, True), "work": (_work, 4, True), "publish": (_publish_only, 3, True)}
)


@cache
def _entry(name: str) -> int:
    """Address of one of _ENTRIES."""
    python, num_arguments, returns = _ENTRIES[name]
    check = selfcheck.run if name == "run" else None
    return machine_code.address(name, num_arguments, lambda: python, returns, check)


@cache
def _function(name: str) -> Callable[..., Any]:
    """One of _ENTRIES, for Python."""
    _, num_arguments, returns = _ENTRIES[name]
    return machine_code.function(_entry(name), num_arguments, returns)


def compile_ahead() -> None:
    """At the first start, begin to compile `run` in another process: more than half of all that a start compiles."""
    machine_code.compile_elsewhere("run", f"from {__name__} import compile_run; compile_run()")


def compile_run() -> None:
    """Compile `run` and keep it, unless it is there."""
    _entry("run")


class Team:
    """`threads` threads, the caller's among them, that run one program after another. Models that take turns share one.

    lock: held while a forward runs, by a thread that may hold it already. The workers know the team's memory and not the team, so
    that they end with it. In a forked child, which has none of the parent's threads, the next run gathers new ones.
    """

    def __init__(self, threads: int) -> None:
        self.threads, self.lock = threads, threading.RLock()
        # All of it is compiled before a thread waits for another.
        self._lead, self._run, self._publish = map(_function, ("lead", "run", "publish"))
        _function("work")
        self._run_address = _entry("run")
        self._gather()
        _teams.add(self)

    def _gather(self) -> None:
        self._forked = False
        memory = aligned_bytes((layout.TEAM.itemsize + layout.WORKER.itemsize * self.threads,))
        memory[:] = 0
        memory[: layout.TEAM.itemsize].view(layout.TEAM)["step"]["number"] = layout.DONE
        self.workers: _Array = memory[layout.TEAM.itemsize :].view(layout.WORKER)
        self._quit, self._address = _quit(memory), memory.ctypes.data
        self._wake = [threading.Event() for _ in range(self.threads)]
        workers = [
            threading.Thread(target=_serve, args=(memory, self.threads, i, self._wake[i]), daemon=True, name=f"cpuspec-{i}")
            for i in range(1, self.threads)
        ]
        for worker in workers:
            start_thread(worker)
        # Also as the process exits, where a thread may still be running a forward: it must not outlive the memory that it reads.
        self._dismiss = weakref.finalize(self, _dismiss, memory, self.lock, self._wake, workers)

    @property
    def closed(self) -> bool:
        """Whether the workers have ended, so that nothing can run."""
        return bool(self._quit[0])

    def run(self, program: Program) -> None:
        """Run a program on all threads as it was entered. The caller holds the lock.

        An interrupt, such as Ctrl-C, is raised once the program is done. Raises BackendError if the team was closed.
        """
        if self.closed:
            raise BackendError("this backend, or the one that it shares threads with, is closed; make a new one")
        if self._forked:
            self._gather()
        asleep = 1  # unless the call returns: an interrupt is raised before its result is stored
        try:
            asleep = self._lead(self._address, program.job, self.threads, self._run_address, program.numbers)
            if asleep:
                for event in self._wake:
                    event.set()
        finally:
            # Workers must not read memory that an interrupted caller frees. Nothing of a finished forward is run again.
            if asleep:
                self._run(self._address, self.threads, 0)

    def resume(self, job: int) -> None:
        """Run another part of the program that `run` began, one of its `jobs`, on all threads. The caller holds the lock."""
        try:
            if self._publish(self._address, job, self.threads):
                for event in self._wake:
                    event.set()
        finally:
            self._run(self._address, self.threads, 0)

    def close(self) -> None:
        """End the workers, once no forward runs. Closing twice does nothing."""
        self._dismiss()
        self._quit[0] = 1

    def after_fork(self) -> None:
        """In a forked child: the parent's threads do not exist here, and what they held is not held."""
        self._forked, self.lock = True, threading.RLock()
        self._dismiss.detach()


def _quit(memory: _Array) -> _Array:
    """The number [1] in a team's memory that tells workers to end."""
    quit: _Array = memory[: layout.TEAM.itemsize].view(layout.TEAM)[0]["quit"]
    return quit


def _serve(memory: _Array, threads: int, thread: int, wake: threading.Event) -> None:
    """Run a worker, from its start to its end."""
    work, run = _function("work"), _entry("run")
    while work(memory.ctypes.data, threads, thread, run) == PARK:
        wake.wait()
        wake.clear()


def _dismiss(memory: _Array, lock: threading.RLock, wake: list[threading.Event], workers: list[threading.Thread]) -> None:
    """End the workers of a team that is closed or gone."""
    with lock:
        _quit(memory)[0] = 1
        nothing = Program(np.zeros(0, layout.OPERATION), len(wake))
        _function("publish")(memory.ctypes.data, nothing.job, len(wake))
        for event in wake:
            event.set()
    for worker in workers:
        if worker is not threading.current_thread():  # the garbage collector may run in any
            worker.join()


_teams: weakref.WeakSet[Team] = weakref.WeakSet()


def _after_fork() -> None:
    for team in list(_teams):
        team.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
