"""One engine for several threads: their requests run in one batch.

One thread at a time owns the engine. A thread that waits for an output takes the engine if nobody owns it, runs a step, and puts
each output into the inbox of its request. The other threads wait at their inboxes. So a single thread pays for no hand-over, and a
fork loses nothing. A program with an event loop gives a receiver with its request instead, and has one thread that calls `step`. A
thread that submits or aborts a request leaves a command, which the next owner runs.

This file uses operations that are atomic in Python, and no lock. An interrupt right after a lock was taken would leave it taken for
ever, and the garbage collector may close a stream in the middle of a step.
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue

from cpuspec.engine.engine import Engine, Output, Request
from cpuspec.errors import BackendError, ConfigError, CpuspecError
from cpuspec.metrics import RequestStats

_Inbox = SimpleQueue[Output | None]  # None tells its thread that the engine may be free
Receiver = Callable[[Output], object]


class SharedEngine:
    """An engine that several threads may call at once. survives_fork: whether the models can run in a forked child."""

    def __init__(self, engine: Engine, survives_fork: bool) -> None:
        self.aborted_stats: RequestStats | None = None  # of the request that was aborted last
        self._engine = engine
        self._survives_fork = survives_fork
        self._closed = self._forked = False
        self._begin()
        _engines.add(self)

    def _begin(self) -> None:
        self._owner: dict[str, int] = {}  # "thread": the one that owns the engine; empty if none does
        self._commands: deque[Callable[[], object]] = deque()
        self._inboxes: dict[int, _Inbox] = {}  # by request, while a thread will ask for its outputs
        self._receivers: dict[int, Receiver] = {}  # by request
        self._waiting: dict[object, _Inbox] = {}  # the inboxes of the threads that wait
        self._exclusive: dict[_Inbox, None] = {}  # of these, those of `exclusive`, which come before those that want an output

    def submit(self, request: Request, receiver: Receiver | None = None) -> int:
        """Queue a request that `Engine.prepare` has made; returns its id. Raises ConfigError if it is closed.

        receiver: what the thread that runs a step calls with each output; None for an inbox that `outputs` reads.
        """
        self.check_open()
        request.meter.arrive()
        if receiver is None:
            inbox: _Inbox = SimpleQueue()
            self._inboxes[request.seq.id] = inbox
            receiver = inbox.put
        self._receivers[request.seq.id] = receiver
        self._commands.append(partial(self._engine.add, request))
        self._engine.hasten(request)
        return request.seq.id

    def outputs(self, request_id: int) -> Iterator[Output]:
        """Yield the outputs of a request up to its last, each as soon as its step has ended.

        Raises CpuspecError if an interrupt lost the end, or the request was left to the parent process in a fork.
        """
        while True:
            output = self._next(request_id)
            yield output
            if output.finish_reason is not None:
                return

    def abort(self, request_id: int) -> None:
        """Abort a request: now, or before the next step if another thread owns the engine."""
        self._inboxes.pop(request_id, None)
        if self._receivers.pop(request_id, None) is None:
            return
        self._commands.append(partial(self._abort, request_id))
        self._engine.hasten()
        while self._commands and not self._owner:
            if self._try_own():
                try:
                    self._run_commands()
                finally:
                    self._disown()

    def step(self) -> bool:
        """Add and abort the requests that were submitted and aborted, and run one step; returns whether there is more to do.

        An exception aborts every running request. Their last outputs come with the next step.
        """
        with self.exclusive():
            self._run()
            return bool(self._commands) or self._engine.has_work

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Own the engine within the `with` block: no other thread runs a step there."""
        inbox: _Inbox = SimpleQueue()
        self._exclusive[inbox] = None
        self._engine.hasten()
        try:
            while not self._try_own():
                self._wait(inbox, inbox)
        finally:
            self._exclusive.pop(inbox, None)  # a forked child has others
            if not self._owner:  # this thread was interrupted
                self._wake()
        try:
            yield
        finally:
            self._disown()

    def close(self) -> None:
        """Let no step begin any more; returns when the running step has ended."""
        self._closed = True
        with self.exclusive():
            pass

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def check_open(self) -> None:
        """Raise ConfigError if it was closed, BackendError if this process was forked and the models cannot run in it."""
        if self._closed:
            raise ConfigError("this LLM is closed; make a new one")
        if self._forked and not self._survives_fork:
            raise BackendError(
                "this model was loaded before the process was forked, and its backend runs in the parent only; "
                "load it in the child, start children by `spawn`, or use the numba backend"
            )

    def after_fork(self) -> None:
        """In a forked child: abort its copies of the parent's requests. The parent's threads go on with the requests themselves."""
        self._forked = True
        self._begin()
        self._commands.append(self._engine.abort_all)

    def _next(self, request_id: int) -> Output:
        while True:
            self.check_open()
            inbox = self._inboxes.get(request_id)
            if inbox is None:
                raise CpuspecError("this answer was begun before the process was forked, and is the parent's; ask again")
            if not inbox.empty():
                if output := inbox.get():
                    return output
            elif not self._exclusive and self._try_own():
                try:
                    self._run()
                    idle = inbox.empty() and not (self._commands or self._engine.has_work)
                finally:
                    self._disown()
                if idle:
                    raise CpuspecError("the end of this answer was lost when another call was interrupted; ask again")
            elif output := self._wait(request_id, inbox):
                return output

    def _run(self) -> None:
        """Run the commands and one step. An exception or an interrupt aborts every running request."""
        try:
            self.check_open()
            self._run_commands()
            for output in self._engine.step():
                is_last = output.finish_reason is not None
                if receiver := (self._receivers.pop if is_last else self._receivers.get)(output.request_id, None):
                    receiver(output)
        except BaseException:
            self._engine.abort_all()  # an interrupt between step and inboxes may have lost a part of an answer
            raise

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _abort(self, request_id: int) -> None:
        if output := self._engine.abort(request_id):
            self.aborted_stats = output.stats

    def _try_own(self) -> bool:
        """Own the engine if no other thread does; returns whether this one does. It still does if `_disown` was interrupted."""
        return self._owner.setdefault("thread", threading.get_ident()) == threading.get_ident()

    def _disown(self) -> None:
        self._owner.clear()
        self._wake()

    def _wake(self) -> None:
        for inbox in self._waiting.copy().values():
            if inbox.empty():
                inbox.put(None)

    def _wait(self, key: object, inbox: _Inbox) -> Output | None:
        """Wait for an output, or for None if the engine may be free."""
        self._waiting[key] = inbox
        try:
            # Whoever disowned the engine before this thread was listed as waiting has not woken it, so look again.
            # A thread that wants an output also lets those go first that want the engine for themselves.
            blocked = bool(self._owner) or bool(self._exclusive and key not in self._exclusive)
            return inbox.get() if blocked else None
        finally:
            del self._waiting[key]


_engines: weakref.WeakSet[SharedEngine] = weakref.WeakSet()


def _after_fork() -> None:
    for engine in list(_engines):
        engine.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
