"""The server's application without a network: what it sends for a request, message by message."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message

from cpuspec.server.app import make_app
from cpuspec.server.gate import NONCE
from cpuspec.server.model import ServedModel
from cpuspec.server.replies import STAMP
from cpuspec.server.server import Server
from cpuspec.settings import ServerConfig
from tests.server.running import load

# What depends on how an answer was computed.
_FIGURES = ("timings", "usage", "rounds", "level", "total_duration", "prompt_eval_duration", "eval_duration")


@dataclass(frozen=True)
class Application:
    """A server's application, its model, and the event loop that both run in."""

    app: ASGIApp
    served: ServedModel
    loop: asyncio.Runner

    def messages(self, path: str, body: dict[str, Any], nonce: str | None, is_slow: bool = False) -> list[Message]:
        """What is sent for a request. is_slow: whether the client reads on only when the whole answer has been computed."""
        return self.loop.run(self._messages(path, body, nonce, is_slow))

    async def _messages(self, path: str, body: dict[str, Any], nonce: str | None, is_slow: bool) -> list[Message]:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"x-request-id", b"mine")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        if nonce is not None:
            scope[NONCE] = (nonce, 1_700_000_000)
        given: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        sent: list[Message] = []

        async def receive() -> Message:
            if not given:
                await asyncio.Event().wait()
            return given.pop()

        async def send(message: Message) -> None:
            sent.append(message)
            while is_slow and (self.served.admission.num_running or self.served.admission.num_waiting):
                await asyncio.sleep(0.001)

        await self.app(scope, receive, send)
        return sent


@contextmanager
def application(path: Path, loop: asyncio.Runner, **settings: Any) -> Iterator[Application]:
    """The application over a model, without a process of its own. settings: as `load` has them."""

    async def make() -> Application:
        served = ServedModel("tiny", load(path, **settings), ServerConfig())
        server = Server("tiny", served.config)
        server.start(served)
        return Application(make_app(server), served, loop)

    found = loop.run(make())
    try:
        yield found
    finally:
        loop.run(asyncio.to_thread(found.served.close))


def parts(messages: list[Message]) -> list[tuple[int, str]]:
    """The stamp of each message that is a part of the answer, and what it says besides figures."""
    return [(message[STAMP], said(message["body"])) for message in messages if STAMP in message and "body" in message]


def said(body: bytes) -> str:
    """An event without its figures."""
    lines = body.decode().splitlines()
    texts = [(line, line.removeprefix("data: ")) for line in lines]
    return "\n".join(json.dumps(_bare(json.loads(text))) if text.startswith("{") else line for line, text in texts)


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _bare(one) for name, one in value.items() if name not in _FIGURES}
    return [_bare(one) for one in value] if isinstance(value, list) else value
