"""The first layer of a request: it checks the host, the key and the size of the body, and writes the log line at the end."""

import asyncio
import ipaddress
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cpuspec.checkpoints.adapters import AdapterSet
from cpuspec.metrics import epoch_s, now_s
from cpuspec.server import page
from cpuspec.server.errors import BodyTooLargeError, ForbiddenError, NotFoundError, RequestError, UnauthorizedError
from cpuspec.server.model import ServedModel
from cpuspec.server.observe import log_event
from cpuspec.server.replies import STAMP, error_response
from cpuspec.server.server import Server, server_of, socket_path

BODY_S = 60.0  # the longest time in which a body may arrive
# Paths that need no key: those of probes, and the page, which asks the user for the key.
OPEN_PATHS = ("/livez", "/health", "/ready", *page.FILES)
# A key of the scope. `cpuspec.ray` sets it for a request whose stream another replica may have to repeat event for event. Its value
# is a text that is unique to the request, and the time when the request came, in seconds since the epoch.
NONCE = "cpuspec.nonce"
# Response headers that say how a request was changed are NOTE with one of the names NOTES.
NOTE, NOTES = "x-cpuspec-", ("ignored-fields", "left-out", "loosened")
_PIECE = 1 << 18  # bytes of a body that are sent at once
_READING = ("GET", "HEAD", "OPTIONS")
_OF_V1 = (
    "/chat/completions",
    "/completions",
    "/embeddings",
    "/messages",
    "/messages/count_tokens",
    "/models",
    "/responses",
    "/rerank",
    "/reranking",
    "/score",
)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_HOST = re.compile(r"(?P<name>\[[^\]]*\]|[^:]*)(?::[0-9]+)?")


@dataclass
class RequestContext:
    """Facts about one request that all layers share.

    created: when the request came, in seconds since the epoch. rng: of a request with a NONCE, else None; equal nonces give equal
    random numbers. figures: what the endpoint adds to the log line. notes: how the request was changed, by the names of NOTES.
    models: those that must stay loaded until the request has ended. adapters: those that the request names; None if it names none.
    adapter: the one that the request names as its model, or "".
    """

    id: str
    client: str = ""
    created: int = field(default_factory=epoch_s)
    rng: Random | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    models: list[ServedModel] = field(default_factory=list)
    adapters: AdapterSet | None = None
    adapter: str = ""


def context_of(request: Request) -> RequestContext:
    """The context that the gate made for this request."""
    found: RequestContext = request.scope["cpuspec.context"]
    return found


async def model_of(request: Request, name: str | None, lora: Mapping[int, float] | None = None) -> ServedModel:
    """The model that a request names, loaded if need be. It stays loaded until the request has ended.

    name: of the model, of one of its adapters, or MODEL:ADAPTER. lora: scales of adapters by id, which a request may name
    instead. The context gets the adapters. Raises NotFoundError or ConfigError for adapters, and as `Server.model`.
    """
    server, context = server_of(request), context_of(request)
    own, adapter = server.split_name(name)
    found = await server.model(own)
    found.num_users += 1
    found.keep_s = None
    context.models.append(found)
    if adapter and adapter not in found.llm.adapters:
        raise NotFoundError(f"the model {own} has no adapter {adapter[:200]!r}")
    if adapter and lora:
        raise RequestError("model names an adapter, and lora others; name them in one place", "lora")
    if adapter:
        context.adapters, context.adapter = found.llm.adapter_set(adapter), adapter
    elif lora:
        context.adapters = found.llm.adapters.of_ids(lora)
    return found


def shown_name(request: Request, model: ServedModel) -> str:
    """The name that answers carry: the model's, or that of the adapter which the request named as its model."""
    return context_of(request).adapter or server_of(request).shown_name(model.name)


class Gate:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = _with_one_v1(scope["path"])
        start_s, headers = now_s(), Headers(scope=scope)
        given = headers.get("x-request-id", "")
        context = RequestContext(given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex)
        if NONCE in scope:
            nonce, context.created = scope[NONCE]
            context.rng = Random(nonce)
        scope["cpuspec.context"] = context
        status = 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                sent = MutableHeaders(scope=message)
                sent["x-request-id"] = context.id
                for name, note in context.notes.items():
                    sent[NOTE + name] = note.encode("ascii", "replace").decode()
            body = b"" if STAMP in message else message.get("body", b"")
            for at in range(0, len(body) - _PIECE, _PIECE):  # a socket takes a large body as a whole, while the loop waits
                await send({"type": "http.response.body", "body": body[at : at + _PIECE], "more_body": True})
                await asyncio.sleep(0)
            at = max(len(body) - 1, 0) // _PIECE * _PIECE
            await send({**message, "body": body[at:]} if at else message)

        try:
            try:
                context.client = self._check(scope, headers)
            except RequestError as error:
                await error_response(scope["path"], error, context.id)(scope, receive, send_on)
                return
            if _may_be_json(scope, headers):
                MutableHeaders(scope=scope)["content-type"] = "application/json"
            elif (
                scope["method"] not in _READING
                and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json"
            ):
                refusal = RequestError("a page of another origin must send the header Content-Type: application/json")
                await error_response(scope["path"], refusal, context.id)(scope, receive, send_on)
                return
            try:
                await self._app(scope, _limited(receive, self._server.config.max_body_bytes), send_on)
            except (Exception, asyncio.CancelledError):
                raise
            except BaseException as error:  # a panic of a Rust library, which no handler of errors would see
                raise RuntimeError(f"a library failed: {error!r}") from error
        finally:
            for model in context.models:
                model.num_users -= 1
                model.used_s = now_s()
            if scope["path"] not in (*OPEN_PATHS, "/metrics"):
                if status >= 400 and self._server.loaded:
                    self._server.loaded.metrics.refused(status)
                line = {
                    "request_id": context.id,
                    "client": context.client,
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status or "disconnected",
                    "seconds": round(now_s() - start_s, 4),
                }
                log_event("request", line | context.notes | context.figures)

    def _check(self, scope: Scope, headers: Headers) -> str:
        """The client that the request counts for. Raises ForbiddenError, UnauthorizedError, BodyTooLargeError."""
        found = _HOST.fullmatch(headers.get("host", ""))
        name = found["name"].lower().strip("[]") if found else ""
        bound = self._server.config.host
        # A web page may point its own name at this machine (DNS rebinding). A server of local requests accepts only local names.
        # No web page reaches a Unix socket.
        if not socket_path(self._server.config) and _is_loopback(bound) and not (name == bound or _is_loopback(name)):
            raise ForbiddenError(f"this server answers to localhost, and was asked for as {name[:100]!r}")
        address = (scope.get("client") or ("local", 0))[0]
        if scope["path"] in OPEN_PATHS:
            return address
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else None)
        client = self._server.client(key, address)
        if client is None:
            raise UnauthorizedError("the API key is missing or wrong", code="invalid_api_key")
        size = headers.get("content-length", "0")
        if size.isdigit() and int(size[:20]) > self._server.config.max_body_bytes:
            raise BodyTooLargeError(_too_large(self._server.config.max_body_bytes))
        return client


def _limited(receive: Receive, most: int) -> Receive:
    """Receives a body, and stops when it exceeds its limits of bytes and of time. A body need not tell its length."""
    ends_s, num_bytes, is_complete = asyncio.get_running_loop().time() + BODY_S, 0, False

    async def limited() -> Message:
        nonlocal num_bytes, is_complete
        try:
            # After the body only a disconnect follows, and that has no time limit: the answer may take long.
            async with asyncio.timeout_at(None if is_complete else ends_s):
                message = await receive()
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {BODY_S:g} seconds") from None
        if message["type"] == "http.request":
            is_complete = not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            if num_bytes > most:
                raise HTTPException(413, _too_large(most))
        return message

    return limited


def _with_one_v1(path: str) -> str:
    """The path with exactly one /v1: some clients leave it out, others write it twice."""
    while path.startswith("/v1/v1/"):
        path = path.removeprefix("/v1")
    return f"/v1{path}" if path in _OF_V1 or path.startswith(("/models/", "/responses/")) else path


def _may_be_json(scope: Scope, headers: Headers) -> bool:
    """Whether the body is read as JSON whatever its header says: `curl -d` sends JSON as a form, other clients no type at all.

    A browser sends a page's text to another origin without asking that one first, so a page of another origin must say JSON.
    """
    return headers.get("origin") in (None, f"{scope['scheme']}://{headers.get('host')}")


def _too_large(most: int) -> str:
    return f"the body is larger than {most} bytes, the most that is taken"


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
