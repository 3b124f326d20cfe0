"""Threads that run a forward together: however they wait for each other, they come to the same and to an end."""

import sys
import threading
import time

import numpy as np
import pytest

from cpuspec.backends import make_backend
from cpuspec.config import EngineConfig
from cpuspec.kernels import team
from cpuspec.kernels.layout import SLEEPING
from cpuspec.kernels.waiting import sleep_while, wake
from tests.backends.models import forward, tiny

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
FOR_EVER, NEVER = 2**62, 0


@pytest.mark.parametrize("threads", [2, 7])
def test_threads_that_sleep_while_they_wait_come_to_the_same_as_those_that_yield(threads: int, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    backend = make_backend("numba", tiny(tmp_path_factory), EngineConfig(threads=threads, max_rows=64))
    crowded = backend._team.workers["crowded"]  # type: ignore[attr-defined]
    logits = {FOR_EVER: [], NEVER: []}

    def run() -> None:
        for until, pause_s in ((NEVER, 0), (FOR_EVER, 0), (FOR_EVER, 0.02), (NEVER, 0.02), (FOR_EVER, 0)):
            crowded[:] = until
            for _ in range(6):
                logits[until].append(forward(backend, backend.new_cache(1, 64), {0: TOKENS}).logits)
                time.sleep(pause_s)  # with nothing to do workers sleep, too
        backend.close()  # wakes them up to end them

    _ends(run)
    assert len(crowded) == threads
    assert all(np.array_equal(one, logits[NEVER][0]) for one in logits[NEVER] + logits[FOR_EVER])


@pytest.mark.skipif(sys.platform != "linux", reason="threads sleep on a number on Linux only")
def test_a_thread_counts_as_sleeping_until_it_is_awake() -> None:
    """Whoever wakes others must still see one that noted that it sleeps and does not yet: it would sleep for ever."""
    words = np.zeros(SLEEPING // 8 + 1, np.int64)
    at, sleeping = words.ctypes.data, words[SLEEPING // 8 :]
    sleep_while(at, 1)  # has changed already
    assert sleeping == 0
    sleeper = threading.Thread(target=sleep_while, args=(at, 0), daemon=True)
    sleeper.start()
    while sleeping != 1:
        time.sleep(0.001)
    sleeping += 1  # as one that is between noting it and sleeping
    words[0] = 1
    while sleeper.is_alive():  # the first call may come before the thread sleeps
        wake(at)
        assert sleeping >= 1
    wake(at)
    assert sleeping == 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):  # type: ignore[no-untyped-def]
    return tiny(tmp_path_factory)


@pytest.fixture(scope="module")
def alone(checkpoint):  # type: ignore[no-untyped-def]
    """The logits that one thread computes."""
    backend = make_backend("numba", checkpoint, EngineConfig(threads=1, max_rows=64))
    logits = forward(backend, backend.new_cache(1, 64), {0: TOKENS}).logits
    backend.close()
    return logits


@pytest.mark.parametrize("threads", [8, 33, 64])
def test_a_team_many_times_larger_than_the_machine_computes_the_same(checkpoint, alone, threads: int) -> None:  # type: ignore[no-untyped-def]
    backend = make_backend("numba", checkpoint, EngineConfig(threads=threads, max_rows=64))
    logits = []

    def run() -> None:
        logits.extend(forward(backend, backend.new_cache(1, 64), {0: TOKENS}).logits for _ in range(5))
        backend.close()

    _ends(run)
    assert all(np.array_equal(one, alone) for one in logits)


def test_a_thread_that_does_not_come_is_not_waited_for(checkpoint, alone, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    come = threading.Event()
    monkeypatch.setattr(team, "_serve", lambda *_: come.wait())
    backend = make_backend("numba", checkpoint, EngineConfig(threads=3, max_rows=64))
    logits = []
    _ends(lambda: logits.append(forward(backend, backend.new_cache(1, 64), {0: TOKENS}).logits))
    come.set()
    backend.close()
    assert np.array_equal(logits[0], alone)


def test_threads_may_join_and_leave_a_forward_at_any_moment(checkpoint, alone, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Workers that look in at random moments, one or all of them absent in between, as when another process takes their core."""
    threads, over, joined = 5, threading.Event(), set()

    def look_in(memory, threads, thread, wake) -> None:  # type: ignore[no-untyped-def]
        rng, run = np.random.default_rng(thread), team._function("run")
        while not over.is_set():
            time.sleep(rng.choice([0, 1e-5, 1e-4, 2e-3]))
            run(memory.ctypes.data, threads, thread)
            joined.add(thread)

    monkeypatch.setattr(team, "_serve", look_in)
    backend = make_backend("numba", checkpoint, EngineConfig(threads=threads, max_rows=64))
    logits = []

    def run() -> None:
        while len(logits) < 300 or len(joined) < threads - 1:
            logits.append(forward(backend, backend.new_cache(1, 64), {0: TOKENS}).logits)

    _ends(run)
    over.set()
    backend.close()
    assert all(np.array_equal(one, alone) for one in logits)


def test_a_forward_does_not_return_while_a_thread_may_read_its_job(checkpoint) -> None:  # type: ignore[no-untyped-def]
    """The memory of a job may be freed or written anew behind a forward."""
    backend = make_backend("numba", checkpoint, EngineConfig(threads=2, max_rows=64))
    cache = backend.new_cache(1, 64)
    forward(backend, cache, {0: TOKENS})
    visitor = backend._team.workers["inside"]  # type: ignore[attr-defined]
    backend._team.close()  # type: ignore[attr-defined]
    backend._team._quit[0] = 0  # type: ignore[attr-defined]
    visitor[1] = 1  # no other thread writes this: the worker has ended
    thread = threading.Thread(target=lambda: forward(backend, cache, {0: TOKENS}), daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    visitor[1] = 0
    thread.join(900)
    assert not thread.is_alive()


def _ends(run) -> None:  # type: ignore[no-untyped-def]
    """Run it in a thread that does not keep the process, should it wait for ever; its errors are this test's."""
    ended = []
    thread = threading.Thread(target=lambda: ended.append(run()), daemon=True)
    thread.start()
    thread.join(900)
    assert ended, "the forwards did not come to their end"
