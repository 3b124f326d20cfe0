"""A small HTTP client: one connection a request, to this machine only, without proxies and redirects.

It stands on h11, which uvicorn brings along: the client shares its cores with the server that it measures, and h11 alone takes less
of them than a client library around it.
"""

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import h11

from cpuspec.errors import CpuspecError, in_one_line
from cpuspec.load.address import LocalAddress

_MAX_EVENT_BYTES = 8 << 20
_MAX_REPLY_BYTES = 64 << 20
_MAX_ERROR_BYTES = 64 << 10
_LINE_END = re.compile(rb"\r\n|\n|\r")


class ServerError(CpuspecError):
    """A request that a server refused or broke off."""


class EventParser:
    """The data of server-sent events, whatever the pieces that they arrive in (HTML standard, section 9.2.6)."""

    def __init__(self) -> None:
        self._rest = b""  # of a line whose end has not come
        self._data: list[bytes] = []  # of an event whose end has not come
        self._after_return = False  # a newline that comes now belongs to the carriage return before it

    def push(self, piece: bytes) -> list[str]:
        """The data of the events that this piece completes. Raises ServerError for an event beyond all bounds."""
        if not piece:
            return []
        if self._after_return and piece.startswith(b"\n"):
            piece = piece[1:]
        self._after_return = piece.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(self._rest + piece)
        events = []
        for line in lines:
            name, _, value = line.partition(b":")
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data).decode(errors="replace"))
                self._data = []
            elif name == b"data":
                self._data.append(value.removeprefix(b" "))
        if len(self._rest) + sum(map(len, self._data)) > _MAX_EVENT_BYTES:
            raise ServerError(f"the server sent an event of more than {_MAX_EVENT_BYTES} bytes")
        return events


class Client:
    """Sends requests to one server."""

    def __init__(self, address: LocalAddress, api_key: str = "") -> None:
        self._address = address
        self._headers = [("host", f"{address.host}:{address.port}"), ("connection", "close"), ("user-agent", "cpuspec")]
        if api_key:
            self._headers.append(("authorization", f"Bearer {api_key}"))

    async def get_json(self, path: str) -> Any:
        """The JSON that a path has. Raises ServerError."""
        return await self._json("GET", path, None)

    async def post_json(self, path: str, body: Any) -> Any:
        """The JSON that answers a JSON body. Raises ServerError."""
        return await self._json("POST", path, body)

    async def post_events(self, path: str, body: Any, receive: Callable[[str], None]) -> None:
        """Send a JSON body, and call `receive` with the data of each event that answers it, as it comes. Raises ServerError."""
        parser = EventParser()

        def take(piece: bytes) -> None:
            for data in parser.push(piece):
                receive(data)

        await self._exchange("POST", path, body, take)

    async def _json(self, method: str, path: str, body: Any) -> Any:
        reply = bytearray()

        def take(piece: bytes) -> None:
            reply.extend(piece)
            if len(reply) > _MAX_REPLY_BYTES:
                raise ServerError(f"{path} gave more than {_MAX_REPLY_BYTES} bytes")

        await self._exchange(method, path, body, take)
        try:
            return json.loads(bytes(reply))
        except (ValueError, RecursionError):
            raise ServerError(f"{path} gave something else than JSON: {_shown(reply)!r}") from None

    async def _exchange(self, method: str, path: str, body: Any, take: Callable[[bytes], None]) -> None:
        """Send a request, and call `take` with each piece of its reply's body."""
        content = b"" if body is None else json.dumps(body).encode()
        headers = [*self._headers, ("content-type", "application/json"), ("content-length", str(len(content)))]
        connection = h11.Connection(h11.CLIENT)
        try:
            request = h11.Request(method=method, target=self._address.path + path, headers=headers)
        except (h11.LocalProtocolError, UnicodeEncodeError):  # whose message may have the key
            raise ServerError(f"{in_one_line(path)} or the API key has characters that HTTP has no place for") from None
        parts = [connection.send(request), connection.send(h11.Data(content)), connection.send(h11.EndOfMessage())]
        try:
            reader, writer = await self._connect()
            try:
                writer.write(b"".join(filter(None, parts)))
                await writer.drain()
                await _read_reply(connection, reader, take)
            finally:
                writer.close()
        except OSError as error:
            raise ServerError(f"no connection to {self._address.host}:{self._address.port}: {error.strerror or error}") from None
        except h11.RemoteProtocolError as error:
            raise ServerError(f"the server broke off, or speaks no HTTP/1.1: {in_one_line(str(error))}") from None

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        *others, last = self._address.numbers
        for number in others:  # localhost may have an address where nobody listens
            try:
                return await asyncio.open_connection(number, self._address.port)
            except ConnectionRefusedError:
                continue
        return await asyncio.open_connection(last, self._address.port)


async def _read_reply(connection: h11.Connection, reader: asyncio.StreamReader, take: Callable[[bytes], None]) -> None:
    refused: h11.Response | None = None
    reason = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(1 << 16))
        elif isinstance(event, h11.Response):
            if 300 <= event.status_code < 400:
                to = dict(event.headers).get(b"location", b"elsewhere")
                raise ServerError(f"status {event.status_code}: the server redirects to {_shown(to)!r}, which is not followed")
            refused = None if event.status_code == 200 else event
        elif isinstance(event, h11.Data) and refused is None:
            take(bytes(event.data))
        elif isinstance(event, h11.Data):
            reason += event.data[: _MAX_ERROR_BYTES - len(reason)]
        elif isinstance(event, h11.EndOfMessage):
            if refused is not None:
                raise ServerError(f"status {refused.status_code}: {_reason(reason)}")
            return


def _reason(reply: bytearray) -> str:
    """The message of an error in OpenAI's shape, or the beginning of whatever came instead."""
    try:
        return in_one_line(str(json.loads(bytes(reply))["error"]["message"]))
    except (ValueError, LookupError, TypeError, RecursionError):
        return _shown(reply)


def _shown(reply: bytes | bytearray) -> str:
    return in_one_line(bytes(reply[:400]).decode(errors="replace"))
