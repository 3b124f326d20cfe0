"""Threads that run a forward together: however they wait for each other, they come to the same and to an end."""

import ctypes
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from cpuspec.backends.numba_backend import NumbaBackend
from cpuspec.kernels import layout, machine_code, team
from cpuspec.kernels.layout import SLEEPING
from cpuspec.kernels.waiting import CAN_SLEEP, sleep_while, wake
from cpuspec.settings import EngineConfig
from tests.backends.models import forward, tiny

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
FOR_EVER, NEVER = 2**62, 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):  # type: ignore[no-untyped-def]
    return tiny(tmp_path_factory)


@pytest.fixture(scope="module")
def alone(checkpoint):  # type: ignore[no-untyped-def]
    """The logits that one thread computes."""
    backend = NumbaBackend(checkpoint, EngineConfig(threads=1, max_rows=64))
    logits = forward(backend, backend.new_cache(1, 64), {0: TOKENS}).logits
    backend.close()
    return logits


@pytest.mark.parametrize("threads", [2, 7, 64])  # and many more than there are cores
def test_threads_that_sleep_while_they_wait_come_to_the_same_as_those_that_yield(checkpoint, alone, threads: int) -> None:  # type: ignore[no-untyped-def]
    backend = NumbaBackend(checkpoint, EngineConfig(threads=threads, max_rows=64))
    crowded, logits = backend.team.workers["crowded"], []

    def run() -> None:
        for until, pause_s in ((NEVER, 0), (FOR_EVER, 0), (FOR_EVER, 0.02), (NEVER, 0.02), (FOR_EVER, 0)):
            crowded[:] = until
            for _ in range(6):
                logits.append(forward(backend, backend.new_cache(1, 64), {0: TOKENS}).logits)
                time.sleep(pause_s)  # with nothing to do workers sleep, too
        backend.close()  # wakes them up to end them

    _ends(run)
    assert len(crowded) == threads
    assert all(np.array_equal(one, alone) for one in logits)


@pytest.mark.skipif(not CAN_SLEEP, reason="threads of this system do not sleep on a number")
def test_a_thread_counts_as_sleeping_until_it_is_awake() -> None:
    """Whoever wakes others must still see one that noted that it sleeps and does not yet: it would sleep for ever."""
    words = np.zeros(SLEEPING // 8 + 2, np.int64)
    at, sleeping, own = words.ctypes.data, words[SLEEPING // 8 :][:1], words[-1:].ctypes.data
    sleep_while(at, 1, own)  # has changed already
    assert sleeping == 0
    sleeper = threading.Thread(target=sleep_while, args=(at, 0, own), daemon=True)
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


def test_a_thread_that_does_not_come_is_not_waited_for(checkpoint, alone, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    come = threading.Event()
    monkeypatch.setattr(team, "_serve", lambda *_: come.wait())
    backend = NumbaBackend(checkpoint, EngineConfig(threads=3, max_rows=64))
    logits = []
    _ends(lambda: logits.append(forward(backend, backend.new_cache(1, 64), {0: TOKENS}).logits))
    come.set()
    backend.close()
    assert np.array_equal(logits[0], alone)


def test_what_an_absent_thread_multiplies_is_multiplied_again_and_harms_nobody_when_it_comes(checkpoint, alone) -> None:  # type: ignore[no-untyped-def]
    """As when another process takes a core in the middle of a product, until later operations use the same memory."""
    backend = NumbaBackend(checkpoint, EngineConfig(threads=2, max_rows=64))
    program, caller, kept, last = backend.program, [0], [], 0
    absent, back, in_time, wrote = threading.Event(), threading.Event(), [], []
    order, is_late = threading.Lock(), [False]  # a worker may begin its piece when the caller has ended the forward without it
    products = [tensors for tensors in program._held if tensors.dtype == layout.TENSOR]

    def replaced(number: int, address: int):  # type: ignore[no-untyped-def]
        kernel = machine_code.function(address, 12)

        def multiply(*operands: int) -> None:
            here = threading.get_ident()
            if number == 0 and here != caller[0] and not absent.is_set():
                with order:
                    if not is_late[0]:
                        absent.set()
                if absent.is_set():
                    wrote.append(operands[10] + 64 * operands[3] - backend.scratch[1].ctypes.data)
                    in_time.append(back.wait(60))
            if number == last and here == caller[0]:
                with order:
                    is_late[0] = True
                    if absent.is_set():
                        back.set()
            kernel(*operands)

        kept.append(ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 12)(multiply))
        return ctypes.cast(kept[-1], ctypes.c_void_p).value

    last = len(products) - 2  # behind it are the logits
    for number, tensors in enumerate(products):
        for tensor in tensors:
            tensor["kernel"] = replaced(number, int(tensor["kernel"]))
    logits = []

    def run() -> None:
        caller[0] = threading.get_ident()
        while not absent.is_set():
            is_late[0] = False
            logits.append(forward(backend, backend.new_cache(1, 64), {0: TOKENS}).logits)

    _ends(run)
    backend.close()
    assert in_time == [True]
    assert 0 <= wrote[0] < backend.scratch.strides[0]
    assert all(np.array_equal(one, alone) for one in logits)


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
    backend = NumbaBackend(checkpoint, EngineConfig(threads=threads, max_rows=64))
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
    backend = NumbaBackend(checkpoint, EngineConfig(threads=2, max_rows=64))
    cache = backend.new_cache(1, 64)
    forward(backend, cache, {0: TOKENS})
    visitor = backend.team.workers["inside"]
    backend.team.close()
    backend.team._quit[0] = 0
    visitor[1] = 1  # no other thread writes this: the worker has ended
    thread = threading.Thread(target=lambda: forward(backend, cache, {0: TOKENS}), daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    visitor[1] = 0
    thread.join(900)
    assert not thread.is_alive()


@pytest.mark.skipif(not CAN_SLEEP, reason="threads sleep on a number on Linux only")
def test_workers_without_work_sleep_until_there_is_some(checkpoint, alone) -> None:  # type: ignore[no-untyped-def]
    """A thread that yields uses up the time that a container is granted."""
    backend = NumbaBackend(checkpoint, EngineConfig(threads=3, max_rows=64))
    step = np.frombuffer((ctypes.c_int64 * 9).from_address(backend.team._address), np.int64)
    for _ in range(3):
        logits = forward(backend, backend.new_cache(1, 64), {0: TOKENS}).logits
        _ends(lambda: [time.sleep(0.001) for _ in iter(lambda: step[SLEEPING // 8] == 2, True)])
        assert np.array_equal(logits, alone)
    backend.close()


def test_an_interrupt_as_a_forward_is_published_is_raised_when_the_forward_is_done(checkpoint, alone, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Ctrl-C between two calls: memory that workers read may be freed behind it."""
    backend = NumbaBackend(checkpoint, EngineConfig(threads=2, max_rows=64))
    lead, running = backend.team._lead, []

    def interrupted(*arguments: int) -> int:
        running.append(True)
        monkeypatch.setattr(backend.team, "_lead", lead)
        lead(*arguments)
        backend.team._publish(*arguments[:3])
        raise KeyboardInterrupt

    monkeypatch.setattr(backend.team, "_lead", interrupted)
    step = np.frombuffer((ctypes.c_int64 * 1).from_address(backend.team._address), np.int64)
    cache = backend.new_cache(1, 64)
    with pytest.raises(KeyboardInterrupt):
        forward(backend, cache, {0: TOKENS})
    assert running
    assert step[0] & layout.DONE == layout.DONE
    assert cache.lengths == [0]
    assert np.array_equal(forward(backend, cache, {0: TOKENS}).logits, alone)
    backend.close()


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc for the size of a stack")
def test_a_worker_has_room_for_what_kernels_keep_on_its_stack() -> None:
    """Whatever the C library gives: musl has 128 KiB."""
    code = """if True:
        import ctypes, threading
        from cpuspec.environment import start_thread
        c, found = ctypes.CDLL(None), []
        c.pthread_self.restype = ctypes.c_ulong
        def look():
            attributes, size = ctypes.create_string_buffer(256), ctypes.c_size_t()
            assert not c.pthread_getattr_np(ctypes.c_ulong(c.pthread_self()), attributes)
            assert not c.pthread_attr_getstacksize(attributes, ctypes.byref(size))
            found.append(size.value)
        threading.stack_size(128 << 10)
        threads = [threading.Thread(target=look) for _ in range(2)]
        threads[0].start()
        start_thread(threads[1])
        [thread.join() for thread in threads]
        print(*sorted(found), threading.stack_size())"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    default, workers, kept = map(int, done.stdout.split())
    assert (default, kept) == (128 << 10, 128 << 10)
    assert workers >= 1 << 20


def _ends(run) -> None:  # type: ignore[no-untyped-def]
    """Run it in a thread that does not keep the process, should it wait for ever; its errors are this test's."""
    ended = []
    thread = threading.Thread(target=lambda: ended.append(run()), daemon=True)
    thread.start()
    thread.join(900)
    assert ended, "the forwards did not come to their end"


@pytest.mark.parametrize("left", [1, 2])
def test_what_a_fork_within_a_forward_has_counted_is_forgotten(left: int, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    """Spans of attention over a long context, and rows that a router has chosen for, in the memory that a child gets."""
    checkpoint = tiny(tmp_path_factory, architecture="qwen3moe", context_length=2048)
    backend = NumbaBackend(checkpoint, EngineConfig(threads=2, max_rows=1024))
    tokens = np.random.default_rng(0).integers(0, 300, 1010).tolist()
    logits = []
    for counted in (0, left, 0):
        cache = backend.new_cache(1, 2048)
        forward(backend, cache, {0: tokens[:1000]})
        for token in tokens[1000:]:
            backend._plans._walked[:] = counted
            backend.program.state["routed"]["rows"] = counted
            logits.append(forward(backend, cache, {0: [token]}).logits.copy())
    assert (backend.program.state["plans"]["num_items"] > checkpoint.config.num_kv_heads).any(), "threads share the attention"
    assert all(np.array_equal(one, logits[number % 10]) for number, one in enumerate(logits))
    backend.close()
