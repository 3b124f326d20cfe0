"""Threads that run a forward together: however they wait for each other, they come to the same and to an end."""

import sys
import threading
import time

import numpy as np
import pytest

from cpuspec.backends import make_backend
from cpuspec.config import EngineConfig
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


def _ends(run) -> None:  # type: ignore[no-untyped-def]
    """Run it in a thread that does not keep the process, should it wait for ever; its errors are this test's."""
    ended = []
    thread = threading.Thread(target=lambda: ended.append(run()), daemon=True)
    thread.start()
    thread.join(900)
    assert ended, "the forwards did not come to their end"
