"""An LLM for programs with an event loop: answers as asynchronous iterators, which run together in one batch."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from cpuspec.engine.engine import Output
from cpuspec.engine.llm import LLM, Message, Prompt, Seq
from cpuspec.settings import SamplingParams


class AsyncLLM:
    """An LLM whose streams are asynchronous. Its model, drafts and answers are those of `LLM`, which it has as `llm`.

    Iterators of several tasks run in one batch; leaving one, or cancelling its task, ends its request.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        """As `LLM`. Loading blocks the calling thread; in an event loop use `await asyncio.to_thread(AsyncLLM, ...)`."""
        self.llm = LLM(*args, **settings)
        self._threads = ThreadPoolExecutor(4 * self.llm.max_sequences, "cpuspec-stream")

    async def generate(
        self, prompt: Prompt | Seq[Message], params: SamplingParams | None = None, **settings: Any
    ) -> AsyncIterator[Output]:
        """Yield what `LLM.stream` yields: one output a step, the last with finish_reason and stats. Raises as it does."""
        stream = self.llm.stream(prompt, params, **settings)
        step = self._threads.submit(next, stream, None)
        try:
            while (output := await asyncio.wrap_future(step)) is not None:
                yield output
                step = self._threads.submit(next, stream, None)
        finally:
            # A running step cannot be cancelled: the request ends after it.
            step.add_done_callback(lambda _: stream.close())

    def close(self) -> None:
        """End all requests, and release the model."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.llm.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await asyncio.to_thread(self.close)
