"""The thread that runs the engine, and the way of its outputs into the event loop."""

import asyncio
import contextlib
import logging
import threading
from collections import abc, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from cpuspec.config import SamplingParams
from cpuspec.engine.engine import Output
from cpuspec.engine.llm import LLM

_LOG = logging.getLogger("cpuspec.server")

_T = TypeVar("_T")
OnOutput = abc.Callable[[Output], None]


class Runner:
    """Runs an LLM's steps in a thread of its own; requests come from the event loop, and their outputs go there.

    A step that fails ends the requests that run, whose last outputs say "aborted", and no other. All of a step's outputs cross into
    the event loop in one call.
    """

    def __init__(self, llm: LLM, loop: asyncio.AbstractEventLoop) -> None:
        self._llm = llm
        self._loop = loop
        self._wake = threading.Event()
        self._closed = False
        self._outputs: list[tuple[OnOutput, Output]] = []  # of the step that runs
        self._calls: deque[Callable[[], object]] = deque()  # that wait for the end of the step
        self._thread = threading.Thread(target=self._run, name="cpuspec-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        shown: abc.Set[int],
        on_output: OnOutput,
        shows_progress: bool = False,
        prediction: abc.Sequence[int] = (),
    ) -> int:
        """Queue a prompt; returns the request's id. `on_output` is called in the event loop. Raises ConfigError."""
        receive = partial(self._receive, on_output)
        request_id = self._llm.submit(prompt, params, receive, shown, shows_progress, prediction)
        self._wake.set()
        return request_id

    def drop(self, request_id: int) -> None:
        """Forget a request: it ends before the next step."""
        self._llm.drop(request_id)
        self._wake.set()

    async def between_steps(self, function: Callable[[], _T]) -> _T:
        """What the function returns, called by the engine's thread when its step is done: then nobody computes."""
        future: Future[_T] = Future()
        self._calls.append(partial(_answer, future, function))
        self._wake.set()
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the thread when its step is done."""
        self._closed = True
        self._wake.set()
        self._thread.join()

    def _receive(self, on_output: OnOutput, output: Output) -> None:
        self._outputs.append((on_output, output))

    def _run(self) -> None:
        failed = False
        while not self._closed:
            while self._calls:
                self._calls.popleft()()
            try:
                more, failed = self._llm.step(), False
            except Exception:
                _LOG.exception("a step failed; the requests that ran are ended")
                # Their last outputs come with the next step. If that fails, too, there is nothing left to end.
                more, failed = not failed, True
            if self._outputs:
                outputs, self._outputs = self._outputs, []
                with contextlib.suppress(RuntimeError):  # the event loop is closed, so nobody waits
                    self._loop.call_soon_threadsafe(_deliver, outputs)
            if not more:
                self._wake.wait()
                self._wake.clear()


async def beside(function: Callable[[], _T]) -> _T:
    """What the function returns, called in a thread of its own, which a process that ends does not wait for."""
    future: Future[_T] = Future()
    threading.Thread(target=_answer, args=(future, function), name="cpuspec-load", daemon=True).start()
    return await asyncio.wrap_future(future)


def _answer(future: Future[Any], function: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)


def _deliver(outputs: list[tuple[OnOutput, Output]]) -> None:
    for on_output, output in outputs:
        on_output(output)
