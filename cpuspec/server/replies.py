"""Responses: JSON, errors in each protocol's shape, server-sent events, and the end of what nobody waits for any more."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from cpuspec.errors import BackendError, CpuspecError
from cpuspec.server.errors import EngineFailedError, RequestError
from cpuspec.server.model import Answers

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
        return {"type": "error", "error": {"type": kind, "message": str(error)}, "request_id": request_id}
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}}


def error_response(path: str, error: RequestError, request_id: str) -> Response:
    """A response that says what went wrong."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return json_response(error_body(path, error, request_id), error.status, headers)


def event(value: Any, name: str | None = None) -> str:
    """A server-sent event."""
    return f"event: {name}\ndata: {json_text(value)}\n\n" if name else f"data: {json_text(value)}\n\n"


def error_event(path: str, error: RequestError, request_id: str) -> str:
    """An event that says what went wrong in a stream that has begun."""
    return event(error_body(path, error, request_id), "error" if path.startswith("/v1/messages") else None)


class EventStream(StreamingResponse):
    """Server-sent events about answers, which are closed whatever happens: at the end, or within a step of a disconnect."""

    def __init__(self, events: AsyncGenerator[str], answers: Answers, request: Request, request_id: str) -> None:
        super().__init__(_with_errors(events, request.url.path, request_id), media_type="text/event-stream")
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # a proxy must not hold events back
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.close()


async def _with_errors(events: AsyncGenerator[str], path: str, request_id: str) -> AsyncGenerator[str]:
    """The events; an error on the way is one more, for its status can no longer be sent."""
    try:
        async for one in events:
            yield one
    except CpuspecError as error:
        yield error_event(path, as_request_error(error), request_id)
    except Exception:
        _LOG.exception("request %s failed", request_id)
        yield error_event(path, EngineFailedError("the server failed; its log says why"), request_id)


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T], answers: Answers) -> _T | Response:
    """What the work returns; where the client leaves before, the answers are closed and nobody sees what is returned."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return Response(status_code=499)  # nginx's code for this
    finally:
        answers.close()
        for one in (task, gone):
            one.cancel()
        with suppress(asyncio.CancelledError, CpuspecError):
            await task


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
