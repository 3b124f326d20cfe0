"""The application with its routes and error handlers, and the process that serves it."""

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from cpuspec import __version__
from cpuspec.engine.llm import LLM
from cpuspec.environment import trusts_proxies
from cpuspec.errors import ConfigError, CpuspecError
from cpuspec.metrics import now_s
from cpuspec.platform import SYSTEM
from cpuspec.server import completions, embeddings, llama_server, messages, native, ollama, page, responses
from cpuspec.server.errors import FAILED, EngineFailedError, RequestError, UnavailableError, as_request_error
from cpuspec.server.gate import NOTE, NOTES, Gate, context_of
from cpuspec.server.model import served
from cpuspec.server.observe import log_event
from cpuspec.server.replies import error_response
from cpuspec.server.runner import in_own_thread
from cpuspec.server.schema import wrong_field
from cpuspec.server.server import Server, socket_path
from cpuspec.settings import ServerConfig

REQUEST_S = 30.0  # the longest time in which the first line and the headers of a request may arrive
READ_S = 60.0  # the longest time in which a client may read nothing
_SWEEPS = 4  # how often all connections are looked at within the shorter of these times
_SWITCH_S = 0.001  # after which a thread lets another one have the interpreter: the engine waits for it several times a step
_LOG = logging.getLogger("cpuspec.server")


def make_app(server: Server) -> FastAPI:
    """The application of a server. The server's model may be loaded later."""
    # Pages of documentation would load scripts from elsewhere, and the schema takes a fifth of a second to make.
    app = FastAPI(title="cpuspec", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_api_route("/openapi.json", lambda: JSONResponse(app.openapi()), include_in_schema=False)  # in a thread
    for module in (native, completions, messages, responses, llama_server, ollama, embeddings, page):
        app.router.routes += module.router.routes  # `include_router` would build them again, at their first requests
    guard(app, server)
    return app


def guard(app: Starlette, server: Server) -> None:
    """Put the gate of a server before an application, and give its errors the protocols' shapes."""
    app.state.server = server
    for kind in (CpuspecError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_middleware(Gate, server=server)
    if server.config.cors:
        # Around the gate: a browser asks without a key first, and reads errors only with these headers.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(server.config.cors),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=["x-request-id", "retry-after", *(NOTE + name for name in NOTES)],
        )


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(request.url.path, _shown(request, error), context_of(request).id)


def _shown(request: Request, error: Exception) -> RequestError:
    """The error that the client sees for an error. The framework logs an error of another kind than those below."""
    match error:
        case CpuspecError():
            return as_request_error(error)
        case RequestValidationError():
            return _bad_body(request, error)
        case HTTPException():
            if isinstance(error.detail, RequestError):
                return error.detail
            shown = RequestError(str(error.detail))
            shown.status = error.status_code
            shown.kind = {404: "not_found_error", 413: "request_too_large"}.get(error.status_code, shown.kind)
            return shown
    return EngineFailedError(FAILED)


def _bad_body(request: Request, error: RequestValidationError) -> RequestError:
    """The first fault of a body that is not what its endpoint declares."""
    first = error.errors()[0]
    place = first["loc"][1:]
    if first["type"] == "json_invalid":
        return RequestError("the body is not JSON; wanted one JSON object")
    if not place and request.headers.get("content-type", "").partition(";")[0] != "application/json":
        return RequestError("the body was not read as JSON: send the header Content-Type: application/json")
    return wrong_field(first, request.url.path, place)


def listen(config: ServerConfig) -> socket.socket:
    """A listening socket, of an address or of a path. Raises ConfigError for one that cannot be bound."""
    if path := socket_path(config):
        return _listen_at(Path(path))
    host, port = config.host, config.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}, port {port}: {error}; choose another --host or --port") from None


def _listen_at(path: Path) -> socket.socket:
    """A listening Unix socket, for this user only. The file of a server that has died is replaced."""
    if not hasattr(socket, "AF_UNIX"):
        raise ConfigError("this system has no Unix sockets; choose a --host and --port")
    found = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX) as other, suppress(ConnectionRefusedError):
                other.connect(str(path))
                raise OSError(errno.EADDRINUSE, "another server listens there")
            path.unlink()
        before = os.umask(0o177)
        try:
            found.bind(str(path))
        finally:
            os.umask(before)
        found.listen(1024)
    except OSError as error:
        found.close()
        raise ConfigError(f"cannot listen on the socket {path}: {error}; choose another --uds") from None
    return found


async def serve(server: Server, load: Callable[[], LLM], listener: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. Then new requests are refused and running ones may finish; a second signal ends it at once.

    load: loads the model in a thread. Requests get status 503 until it returns; an error that it raises ends the server.
    ready: called when the server begins to answer requests.
    """
    config, switch_s = server.config, sys.getswitchinterval()
    web = uvicorn.Server(
        uvicorn.Config(
            make_app(server),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            limit_concurrency=config.max_connections,
            timeout_graceful_shutdown=1,
            server_header=False,
            proxy_headers=trusts_proxies(),
        )
    )
    loop = asyncio.get_running_loop()
    must_end = asyncio.Event()

    def on_signal() -> None:
        if must_end.is_set():
            web.should_exit = True
        must_end.set()

    handlers = {number: signal.getsignal(number) for number in SYSTEM.end_signals}
    server.stop = partial(loop.call_soon_threadsafe, on_signal)
    # The loading thread is a daemon: a server that must end does not wait for it.
    loaded = asyncio.create_task(in_own_thread(load))
    serving = asyncio.create_task(web.serve(sockets=[listener]))
    ending = asyncio.create_task(must_end.wait())
    helpers = [asyncio.create_task(_close_silent(web)), asyncio.create_task(server.unload_idle())]
    try:
        async with anyio.create_task_group():  # this and NumPy's `unique` import at their first use, which would be a request's
            np.unique([0])
        while not web.started and not serving.done():
            await asyncio.sleep(0.01)
        if threading.current_thread() is threading.main_thread():
            for number, before in handlers.items():
                # The event loop's own handlers are not used: signals reach them through the loop's pipe, and a full pipe loses
                # them. On Linux 278 wake-ups fill it, as from steps whose tokens a busy loop has not sent yet. A background job
                # ignores Ctrl-C and must go on ignoring it.
                signal.signal(number, before if before is signal.SIG_IGN else lambda *_: server.stop())
        await asyncio.wait((loaded, ending, serving), return_when=asyncio.FIRST_COMPLETED)
        if loaded.done():
            server.start(await served(server.name, loaded.result(), config))
            # A collection stops all threads while it looks at objects. Those of libraries and of the model stay for good.
            gc.collect()
            gc.freeze()
            sys.setswitchinterval(_SWITCH_S)
            log_event("ready", {"model": server.name})
            ready()
            await asyncio.wait((ending, serving), return_when=asyncio.FIRST_COMPLETED)
        await _drain(server, web)
        if server.has_failed:
            raise EngineFailedError("the engine's thread has died before it brought a token; the log says why")
    finally:
        ending.cancel()
        for helper in helpers:
            helper.cancel()
        loaded.cancel()
        web.should_exit = True
        await serving
        if path := socket_path(config):
            Path(path).unlink(missing_ok=True)
        server.readers.close()
        gc.unfreeze()
        sys.setswitchinterval(switch_s)
        for model in server.models.values():
            await asyncio.to_thread(model.close)


async def _close_silent(web: uvicorn.Server) -> None:
    """Close each connection that waits for a request's headers for REQUEST_S, or whose client reads nothing for READ_S.

    The web server itself never does, and it takes a limited number of connections. The answer of one that reads nothing ends as if
    the client had left. Ends when it is cancelled.
    """
    silent: dict[Any, tuple[int, float]] = {}  # what each connection waits for, and since when
    while True:
        await asyncio.sleep(min(REQUEST_S, READ_S) / _SWEEPS)
        try:
            before, silent = silent, {}
            for one in web.server_state.connections:
                unsent = one.transport.get_write_buffer_size()
                if unsent or _awaits_request(one):
                    waits = before.get(one)
                    silent[one] = waits if waits and waits[0] == unsent else (unsent, now_s())
            for one, (unsent, since_s) in silent.items():
                if now_s() - since_s > (READ_S if unsent else REQUEST_S):
                    one.transport.abort()  # `close` would wait until everything is sent
        except Exception:  # the web server's objects may change; an error must not end this task unseen
            _LOG.exception("silent connections could not be closed")


def _awaits_request(one: Any) -> bool:
    """Whether no request is being answered. After an answer the web server closes an idle connection itself, and sooner."""
    answering = one.cycle is not None and not one.cycle.response_complete
    return not answering and one.timeout_keep_alive_task is None


async def _drain(server: Server, web: uvicorn.Server) -> None:
    """Refuse new requests, and wait for the running ones up to `drain_s` seconds."""
    server.state = "draining"
    log_event("draining", {"unfinished": server.num_unfinished})
    with suppress(TimeoutError):
        async with asyncio.timeout(server.config.drain_s):
            while server.num_unfinished and not web.should_exit:
                await asyncio.sleep(0.02)
    for model in server.models.values():
        model.fail_answers(UnavailableError("the server has ended before this answer was complete"))
