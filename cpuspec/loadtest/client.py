"""A client of one server of this machine: one connection a request, without proxies and redirects."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from httpx_sse import EventSource, SSEError

from cpuspec.errors import CpuspecError, in_one_line
from cpuspec.loadtest.address import LocalAddress

_MAX_REPLY_BYTES = 64 << 20
_MAX_ERROR_BYTES = 64 << 10


class ServerError(CpuspecError):
    """A request that a server refused or broke off."""


class Client:
    """Sends requests to one server."""

    def __init__(self, address: LocalAddress, api_key: str = "") -> None:
        self.address = address
        self._headers = {"host": f"{address.host}:{address.port}", "connection": "close", "user-agent": "cpuspec"}
        self._headers["content-type"] = "application/json"
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    async def get_json(self, path: str) -> Any:
        """The JSON that a path has. Raises ServerError."""
        return await self._json("GET", path, None)

    async def post_json(self, path: str, body: Any) -> Any:
        """The JSON that answers a JSON body. Raises ServerError."""
        return await self._json("POST", path, body)

    async def post_events(self, path: str, body: Any, receive: Callable[[str], None]) -> None:
        """Send a JSON body, and call `receive` with the data of each event that answers it, as it comes. Raises ServerError."""
        async with self._reply("POST", path, body) as reply:
            async for event in EventSource(reply).aiter_sse():
                receive(event.data)

    async def _json(self, method: str, path: str, body: Any) -> Any:
        async with self._reply(method, path, body) as reply:
            content = await _read(reply, _MAX_REPLY_BYTES + 1)
        if len(content) > _MAX_REPLY_BYTES:
            raise ServerError(f"{path} gave more than {_MAX_REPLY_BYTES} bytes")
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise ServerError(f"{path} gave something else than JSON: {_shown(content)!r}") from None

    @asynccontextmanager
    async def _reply(self, method: str, path: str, body: Any) -> AsyncIterator[httpx.Response]:
        """A reply of status 200 whose body is still to be read. Raises ServerError, also for what fails while it is read."""
        address, content = self.address, body if body is None or isinstance(body, bytes) else json.dumps(body)
        try:
            # Loopback addresses have no certificates: `verify` would read the system's for nothing.
            async with httpx.AsyncClient(headers=self._headers, trust_env=False, verify=False, timeout=None) as client:
                for number in address.numbers:  # localhost may have an address where nobody listens
                    url = f"http://{f'[{number}]' if ':' in number else number}:{address.port}{address.path}{path}"
                    try:
                        reply = await client.send(client.build_request(method, url, content=content), stream=True)
                        break
                    except httpx.ConnectError:
                        if number == address.numbers[-1]:
                            raise
                try:
                    await _check(reply)
                    yield reply
                finally:
                    await reply.aclose()
        except httpx.ConnectError as error:
            raise ServerError(f"no connection to {address.host}:{address.port}: {in_one_line(str(error))}") from None
        except (UnicodeEncodeError, httpx.InvalidURL, httpx.LocalProtocolError):  # whose message may have the key
            raise ServerError(f"{in_one_line(path)} or the API key has characters that HTTP has no place for") from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise ServerError(f"the server broke off, or speaks no HTTP/1.1: {in_one_line(str(error))}") from None
        except SSEError as error:
            raise ServerError(f"{path} gave no stream of events: {in_one_line(str(error))}") from None


async def _check(reply: httpx.Response) -> None:
    if reply.is_redirect:
        to = reply.headers.get("location", "elsewhere").encode(errors="replace")
        raise ServerError(f"status {reply.status_code}: the server redirects to {_shown(to)!r}, which is not followed")
    if reply.status_code != 200:
        raise ServerError(f"status {reply.status_code}: {_reason(await _read(reply, _MAX_ERROR_BYTES))}")


async def _read(reply: httpx.Response, most_bytes: int) -> bytes:
    """The first bytes of a reply's body."""
    content = bytearray()
    async for piece in reply.aiter_bytes():
        content += piece
        if len(content) >= most_bytes:
            break
    return bytes(content[:most_bytes])


def _reason(reply: bytes) -> str:
    """The message of an error in OpenAI's shape, or the beginning of whatever came instead."""
    try:
        return in_one_line(str(json.loads(reply)["error"]["message"]))
    except (ValueError, LookupError, TypeError, RecursionError):
        return _shown(reply)


def _shown(reply: bytes) -> str:
    return in_one_line(reply[:400].decode(errors="replace"))
