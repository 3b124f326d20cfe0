"""Responses: JSON, errors in each protocol's shape, server-sent events, and the end of what nobody waits for any more."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from cpuspec.errors import BackendError, CpuspecError
from cpuspec.server.errors import ContextExceededError, EngineFailedError, RequestError
from cpuspec.server.model import Answers

KEEP_ALIVE_S = 10.0  # of silence, as while a long prompt is read, until a stream shows that it lives
_LAST_S = 10.0  # behind the time that a request may take, for its last event
# In the messages of a stream that another server may have to repeat: `Answers.stamp`. What has none is no part of the answer.
STAMP = "cpuspec.stamp"
_LOG = logging.getLogger("cpuspec.server")
_T = TypeVar("_T")


def json_text(value: Any) -> str:
    """One line of JSON in ASCII: whatever characters a text holds, it can be sent."""
    return json.dumps(value, separators=(",", ":"))


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response of JSON."""
    return Response(json_text(value), status, headers, "application/json")


def as_request_error(error: CpuspecError) -> RequestError:
    """The error of a request that some part of the package raised: the client's fault unless a backend failed."""
    if isinstance(error, RequestError):
        return error
    return EngineFailedError(str(error)) if isinstance(error, BackendError) else RequestError(str(error))


def error_body(path: str, error: RequestError, request_id: str) -> dict[str, Any]:
    """The error in the shape of the protocol that the path belongs to."""
    if path.startswith("/v1/messages"):
        kind = {"server_error": "api_error"}.get(error.kind, error.kind)
        message = error.for_anthropic if isinstance(error, ContextExceededError) else str(error)
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}}


def error_response(path: str, error: RequestError, request_id: str) -> Response:
    """A response that says what went wrong."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return json_response(error_body(path, error, request_id), error.status, headers)


def event(value: Mapping[str, Any]) -> str:
    """A server-sent event, named by its `type` if it has one."""
    data = f"data: {json_text(value)}\n\n"
    return f"event: {value['type']}\n{data}" if "type" in value else data


def error_event(path: str, error: RequestError, request_id: str) -> str:
    """An event that says what went wrong in a stream that has begun."""
    return event(error_body(path, error, request_id))


def comment() -> str:
    """A comment for a silent stream. Clients skip it."""
    return ": keep-alive\n\n"


class EventStream(StreamingResponse):
    """Server-sent events about answers, which are closed whatever happens: at the end, or within a step of a disconnect.

    sign_of_life: makes what is sent after each KEEP_ALIVE_S of silence; clients and proxies give up on a stream that stays silent.
    """

    def __init__(
        self,
        events: AsyncGenerator[str],
        answers: Answers,
        request: Request,
        request_id: str,
        sign_of_life: Callable[[], str] = comment,
        failed: Callable[[RequestError], Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__(_with_errors(events, request.url.path, request_id, failed), media_type="text/event-stream")
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # a proxy must not hold events back
        self._answers, self._request_id = answers, request_id
        self._sign_of_life = sign_of_life

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = _LivelySender(send, self._sign_of_life)

        async def send_stamped(message: Message) -> None:
            if self._answers.stamp is not None:
                message[STAMP] = self._answers.stamp
            await sender.send(message)

        try:
            async with asyncio.timeout_at(self._answers.deadline_s + _LAST_S):
                await super().__call__(scope, receive, send_stamped)
        except TimeoutError:  # the client reads so slowly that it has not got the error of the same name, either
            _LOG.warning("request %s ends: its client reads too slowly", self._request_id)
        finally:
            sender.close()
            self._answers.close()


class _LivelySender:
    """Sends the messages of a response, and a sign of life whenever its body has been silent for KEEP_ALIVE_S."""

    def __init__(self, send: Send, sign_of_life: Callable[[], str]) -> None:
        self._send = send
        self._sign_of_life = sign_of_life
        self._last_s = 0.0
        self._signs: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        """Send a message."""
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.close()
        await self._send(message)
        self._last_s = asyncio.get_running_loop().time()
        if message["type"] == "http.response.start":
            self._signs = asyncio.create_task(self._show_life())

    def close(self) -> None:
        """Send no signs any more. Doing it again changes nothing."""
        if self._signs is not None:
            self._signs.cancel()

    async def _show_life(self) -> None:
        now_s = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(self._last_s + KEEP_ALIVE_S - now_s())
            if now_s() >= self._last_s + KEEP_ALIVE_S:
                await self.send({"type": "http.response.body", "body": self._sign_of_life().encode(), "more_body": True})


async def _with_errors(
    events: AsyncGenerator[str], path: str, request_id: str, failed: Callable[[RequestError], Mapping[str, Any]] | None
) -> AsyncGenerator[str]:
    """The events; an error on the way is one more, for its status can no longer be sent."""
    try:
        async for one in events:
            yield one
    except CpuspecError as error:
        told = as_request_error(error)
        yield event(failed(told)) if failed else error_event(path, told, request_id)
    except (GeneratorExit, asyncio.CancelledError):
        raise
    except BaseException:  # a panic of a Rust library is no Exception
        _LOG.exception("request %s failed", request_id)
        yield error_event(path, EngineFailedError("the server failed; its log says why"), request_id)


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T], close: Callable[[], object]) -> _T | Response:
    """Return what the work returns. If the client disconnects before that, cancel the work. `close` is called in any case."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return Response(status_code=499)  # nginx's code for this
    finally:
        close()
        for one in (task, gone):
            one.cancel()
        with suppress(asyncio.CancelledError, CpuspecError):
            await task


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
