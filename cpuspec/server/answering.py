"""Answers on their way to a client, in every protocol: outputs become events, and events a stream or one whole answer."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from cpuspec.engine.engine import RequestedAnswer
from cpuspec.engine.llm import Job
from cpuspec.errors import CpuspecError
from cpuspec.server.chunks import Event, Writer
from cpuspec.server.errors import FAILED, ClientGoneError, EngineFailedError, as_request_error
from cpuspec.server.figures import log_figures
from cpuspec.server.gate import context_of
from cpuspec.server.model import Answers, ServedModel
from cpuspec.server.replies import STAMP, error_body, event, is_of_ollama, json_response

KEEP_ALIVE_S = 10.0  # silence, as while a long prompt is read, before a stream sends a sign of life
_MANY = 64  # events of a whole answer that a thread puts together
_LAST_S = 10.0  # added to the time that a request may take, for its last event
_LOG = logging.getLogger("cpuspec.server")
_T = TypeVar("_T")


async def submit(request: Request, model: ServedModel, requested: Sequence[RequestedAnswer]) -> Answers:
    """Queue the answers to a request. `respond` must follow: it closes them. Raises as `ServedModel.answers` does."""
    context = context_of(request)
    if context.adapters is not None:
        requested = [replace(one, adapters=context.adapters) for one in requested]
    return await model.answers(context.client, context.id, requested, context.rng)


async def respond(request: Request, answers: Answers, writer: Writer, streams: bool | None) -> Response:
    """Send answers as a stream of events, or as one object when the last has come."""
    if streams:
        return EventStream(request, answers, writer)

    async def whole() -> Response:
        events = [one async for one in _events(request, answers, writer)]

        def made() -> Response:
            return json_response(writer.whole(events, answers.stats))

        return await answers.model.in_worker(context_of(request).client, made) if writer.is_long or len(events) > _MANY else made()

    try:
        return await unless_gone(request, whole())
    finally:
        answers.close()


async def _events(request: Request, answers: Answers, writer: Writer) -> AsyncGenerator[Event]:
    """The events of all answers."""
    for one in writer.begin():
        yield one
    async for index, output in answers.outputs():
        for one in writer.show(index, output):
            yield one
        if writer.is_done:
            break
    if answers.stats:
        context_of(request).figures.update(log_figures(answers.stats))
    for one in writer.finish(answers.stats):
        yield one


async def _stream(request: Request, answers: Answers, writer: Writer) -> AsyncGenerator[str]:
    """The events as texts. An error becomes the last event: it is too late for its status."""
    path = request.url.path
    try:
        async for one in _events(request, answers, writer):
            if writer.is_long:
                yield await answers.model.in_worker(context_of(request).client, event, one, path, is_long=True)
            else:
                yield event(one, path)
        if writer.closing:
            yield writer.closing
    except (GeneratorExit, asyncio.CancelledError):
        raise
    except BaseException as error:  # a panic of a Rust library is no Exception
        if isinstance(error, CpuspecError):
            shown = as_request_error(error)
        else:
            _LOG.exception("request %s failed", context_of(request).id)
            shown = EngineFailedError(FAILED)
        yield event(writer.failed(shown) or error_body(path, shown, context_of(request).id), path)


class EventStream(StreamingResponse):
    """A stream of the events of answers. It closes the answers at its end, or when the client has left.

    The engine then drops what still runs before its next step (`SharedEngine.abort`).
    """

    def __init__(self, request: Request, answers: Answers, writer: Writer) -> None:
        kind = "application/x-ndjson" if is_of_ollama(request.url.path) else "text/event-stream"
        super().__init__(_stream(request, answers, writer), media_type=kind)
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # a proxy must not hold events back
        self._answers, self._request_id, self._sign_of_life = answers, context_of(request).id, writer.sign_of_life

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        now_s, last_s = asyncio.get_running_loop().time, 0.0
        signs: asyncio.Task[None] | None = None  # sends a sign of life whenever the body has been silent for KEEP_ALIVE_S

        async def pass_on(message: Message) -> None:
            nonlocal last_s
            await send(message)
            last_s = now_s()

        async def show_life() -> None:
            while True:
                await asyncio.sleep(last_s + KEEP_ALIVE_S - now_s())
                if now_s() >= last_s + KEEP_ALIVE_S:
                    await pass_on({"type": "http.response.body", "body": self._sign_of_life().encode(), "more_body": True})

        async def send_stamped(message: Message) -> None:
            nonlocal signs
            if self._answers.stamp is not None:
                message[STAMP] = self._answers.stamp
            if signs and not message.get("more_body", False):
                signs.cancel()
            await pass_on(message)
            signs = signs or asyncio.create_task(show_life())

        try:
            async with asyncio.timeout_at(self._answers.deadline_s + _LAST_S):
                await super().__call__(scope, receive, send_stamped)
        except TimeoutError:  # even the event about the end of its time could not be sent
            _LOG.warning("request %s ends: its client reads too slowly", self._request_id)
        finally:
            if signs:
                signs.cancel()
            self._answers.close()


async def run_job(request: Request, model: ServedModel, job: Job) -> None:
    """Run a job between the engine's steps. Raises ClientGoneError if the client leaves before its end, and as the model's does."""
    await unless_gone(request, model.run_job(context_of(request).client, job))


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Return what the work returns. If the client disconnects before that, cancel the work and raise ClientGoneError."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError("the client has left")
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        with suppress(asyncio.CancelledError, CpuspecError):
            await task
