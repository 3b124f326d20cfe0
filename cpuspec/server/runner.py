"""The thread that runs the engine, and how its outputs reach the event loop."""

import asyncio
import contextlib
import logging
import threading
from collections import abc
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from cpuspec.engine.engine import Output, Request
from cpuspec.engine.llm import LLM
from cpuspec.environment import start_thread
from cpuspec.server.errors import EngineFailedError, contained

_LOG = logging.getLogger("cpuspec.server")

_T = TypeVar("_T")
OnOutput = abc.Callable[[Output], None]


class Runner:
    """Runs an LLM's steps in a thread of its own. The event loop submits requests and receives their outputs.

    All outputs of a step cross into the event loop in one call. If a step fails, the requests that run end, their last outputs say
    "aborted", and the waiting ones go on. If the thread dies, all requests end. Then a new thread starts, unless the dead one never
    brought a token.
    """

    def __init__(self, llm: LLM, loop: asyncio.AbstractEventLoop, on_failure: Callable[[], object] = lambda: None) -> None:
        """on_failure: called in the event loop when the running requests may get no more outputs."""
        self._llm = llm
        self._loop = loop
        self._on_failure = on_failure
        self._wake = threading.Event()
        self._closed = False
        self._outputs: list[tuple[OnOutput, Output]] = []  # of the running step
        self._begin()

    def _begin(self) -> None:
        self._has_answered = False  # whether the thread has brought a token
        self._thread = threading.Thread(target=self._live, name="cpuspec-engine", daemon=True)
        start_thread(self._thread)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, prepared: Request, on_output: OnOutput) -> int:
        """Queue an answer that `LLM.prepare` has made; returns the engine's id of it.

        `on_output` is called in the event loop. Raises ConfigError, and EngineFailedError if the thread has ended.
        """
        if not self.is_alive and not self._closed:
            raise EngineFailedError("the engine's thread has ended; restart the server")
        request_id = self._llm.submit(prepared, lambda output: self._outputs.append((on_output, output)))
        self._wake.set()
        return request_id

    def abort(self, request_id: int) -> None:
        """Forget a request: it ends before the next step."""
        self._llm.abort(request_id)
        self._wake.set()

    def close(self) -> None:
        """End the thread when its step is done."""
        self._closed = True
        self._wake.set()
        self._thread.join()

    def _live(self) -> None:
        try:
            self._run()
        finally:
            if not self._closed:
                self._call_in_loop(self._died)

    def _died(self) -> None:
        """End everything that waits for the dead thread, and start another one. Runs in the event loop."""
        self._thread.join()
        if self._has_answered and not self._closed:
            self._begin()
        self._on_failure()

    def _run(self) -> None:
        failed = False
        while not self._closed:
            try:
                more, failed = self._llm.step(), False
            except BaseException:  # a panic of a Rust library is no Exception
                _LOG.exception("a step failed; the requests that ran are ended")
                # The next step brings their last outputs. If it fails as well, the requests are ended here.
                if failed:
                    self._call_in_loop(self._on_failure)
                more, failed = not failed, True
            if self._outputs:
                outputs, self._outputs = self._outputs, []
                self._has_answered = self._has_answered or any(output.token_ids for _, output in outputs)
                self._call_in_loop(partial(_deliver, outputs))
            if not more:
                self._wake.wait()
                self._wake.clear()

    def _call_in_loop(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed, so nobody waits
            self._loop.call_soon_threadsafe(function)


async def in_own_thread(function: Callable[[], _T]) -> _T:
    """Call the function in a daemon thread, and return what it returns."""
    future: Future[_T] = Future()

    def run() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(contained(function))
            except Exception as error:
                future.set_exception(error)

    start_thread(threading.Thread(target=run, name="cpuspec-call", daemon=True))
    return await asyncio.wrap_future(future)


def _deliver(outputs: list[tuple[OnOutput, Output]]) -> None:
    for on_output, output in outputs:
        try:
            on_output(output)
        except Exception:  # the fault of one request must not lose the outputs of the others
            _LOG.exception("an output could not be delivered")
