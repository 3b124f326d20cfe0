"""Responses as JSON, errors in the shape of each protocol, and server-sent events."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from cpuspec.server.errors import ContextExceededError, RequestError

# A key of ASGI messages with the value of `Answers.stamp`, in a stream that another replica may have to repeat. A message without
# it is no part of the answer, as a sign of life.
STAMP = "cpuspec.stamp"
_PIECE = 32  # items of a long list


def json_text(value: Any) -> str:
    """One line of JSON in ASCII: whatever characters a text holds, it can be sent."""
    return json.dumps(value, separators=(",", ":"))


def long_json_text(value: Any, depth: int = 6) -> str:
    """The same text, made in pieces between which other threads may run. depth: of the lists and objects that are divided."""
    if depth and isinstance(value, dict):
        return "{" + ",".join(f"{json_text(str(name))}:{long_json_text(one, depth - 1)}" for name, one in value.items()) + "}"
    if depth and isinstance(value, list):
        if len(value) <= _PIECE:
            return "[" + ",".join(long_json_text(one, depth - 1) for one in value) + "]"
        return "[" + ",".join(json_text(value[at : at + _PIECE])[1:-1] for at in range(0, len(value), _PIECE)) + "]"
    return json_text(value)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response of JSON."""
    return Response(long_json_text(value), status, headers, "application/json")


def time_text(seconds: int) -> str:
    """A time, in seconds since the epoch, as ISO 8601 writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def error_body(path: str, error: RequestError, request_id: str) -> dict[str, Any]:
    """The error in the shape of the protocol that the path belongs to."""
    if path.startswith("/v1/messages"):
        kind = {"server_error": "api_error"}.get(error.kind, error.kind)
        message = error.for_anthropic if isinstance(error, ContextExceededError) else str(error)
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
    if is_of_ollama(path):
        return {"error": str(error)}
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}}


def error_response(path: str, error: RequestError, request_id: str) -> Response:
    """A response that says what went wrong."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return json_response(error_body(path, error, request_id), error.status, headers)


def event(value: Mapping[str, Any], path: str = "", is_long: bool = False) -> str:
    """A part of a stream: a line of JSON on a path of Ollama's, else a server-sent event, named by its `type` if it has one."""
    text = (long_json_text if is_long else json_text)(value)
    if is_of_ollama(path):
        return f"{text}\n"
    data = f"data: {text}\n\n"
    return f"event: {value['type']}\n{data}" if "type" in value else data


def is_of_ollama(path: str) -> bool:
    """Whether Ollama's protocol has this path."""
    return path.startswith("/api/")
