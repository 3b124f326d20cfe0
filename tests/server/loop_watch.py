"""A watch on an event loop: how much processor time each of its callbacks takes, and where the long ones spend it.

Processor time of the loop's own thread is judged: on a loaded machine a callback may wait for long without holding anybody up by
itself.
"""

import asyncio
import gc
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_SAMPLE_S = 0.005  # between two looks at the stack of the running callback
_KEPT = 20


@dataclass
class Callback:
    """One callback: seconds of processor time and of the clock, and where it was when it was looked at."""

    cpu_s: float
    wall_s: float
    stack: str


class LoopWatch:
    """The callbacks that took most processor time, the longest first."""

    def __init__(self) -> None:
        self.longest: list[Callback] = []
        self.num_callbacks = 0
        self.ended = threading.Event()
        self.longest_collection_s = 0.0  # of the garbage collector, in whichever thread; it counts for no callback
        self._collected_s: dict[int, float] = {}  # by thread
        self._collection_begin_s = 0.0
        self._has_begun = False  # what a start takes holds up nobody
        self._running: dict[int, float] = {}  # when the running callback began, by thread
        self._stacks: dict[int, str] = {}

    @property
    def longest_s(self) -> float:
        """Seconds of the longest one; 0 where there was none."""
        return self.longest[0].cpu_s if self.longest else 0.0

    def run(self, handle: Any, whole: Any) -> None:
        """Run a callback as the loop does."""
        if not self._has_begun:
            whole(handle)
            self._has_begun = any(one.name == "cpuspec-engine" for one in threading.enumerate())
            return
        thread, begin_s = threading.get_ident(), time.perf_counter()
        self._collected_s.pop(thread, None)
        self._running[thread], cpu_s = begin_s, time.thread_time()
        try:
            whole(handle)
        finally:
            cpu_s = time.thread_time() - cpu_s - self._collected_s.pop(thread, 0.0)
            self._running.pop(thread, None)
            stack = self._stacks.pop(thread, "")
            self.num_callbacks += 1
            if len(self.longest) < _KEPT or cpu_s > self.longest[-1].cpu_s:
                found = Callback(cpu_s, time.perf_counter() - begin_s, stack or repr(handle)[:500])
                self.longest = sorted([*self.longest, found], key=lambda one: -one.cpu_s)[:_KEPT]

    def collection(self, phase: str, _: Any) -> None:
        """Note a collection, which may come in any callback, and looks at the objects of all."""
        if phase == "start":
            self._collection_begin_s = time.thread_time()
            return
        cpu_s, thread = time.thread_time() - self._collection_begin_s, threading.get_ident()
        self._collected_s[thread] = self._collected_s.get(thread, 0.0) + cpu_s
        if self._has_begun:
            self.longest_collection_s = max(self.longest_collection_s, cpu_s)

    def look(self) -> None:
        """Note the stacks of callbacks that have run for a while, until the watch ends."""
        while not self.ended.wait(_SAMPLE_S):
            gc.disable()  # a collection within the call may wait for ever before Python 3.12.1 (gh-106883)
            frames = sys._current_frames()
            gc.enable()
            for thread, begin_s in list(self._running.items()):
                if time.perf_counter() - begin_s > _SAMPLE_S and thread in frames:
                    self._stacks[thread] = "".join(traceback.format_stack(frames[thread])[-12:])


@contextmanager
def watching() -> Iterator[LoopWatch]:
    """Watch the loops of this process."""
    watch, whole = LoopWatch(), asyncio.Handle._run
    threading.Thread(target=watch.look, daemon=True).start()
    asyncio.Handle._run = lambda handle: watch.run(handle, whole)  # type: ignore[method-assign, assignment]
    gc.callbacks.append(watch.collection)
    try:
        yield watch
    finally:
        gc.callbacks.remove(watch.collection)
        asyncio.Handle._run = whole  # type: ignore[method-assign]
        watch.ended.set()
