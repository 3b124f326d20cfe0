"""The route that reads what a client sent as the body that an endpoint declares."""

import json
import re
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from itertools import islice
from json import decoder, scanner
from typing import Any

from fastapi import HTTPException, Request
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.responses import Response

from cpuspec.server.bounds import MOST_HOLDERS, MOST_VALUES
from cpuspec.server.errors import RequestError
from cpuspec.server.fields import REFUSED, read
from cpuspec.server.gate import context_of
from cpuspec.server.observe import log_event
from cpuspec.server.schema import Body, body_in, worst_fault, wrong_field
from cpuspec.server.server import server_of

_ODD = re.compile(r"[^A-Za-z0-9_.\-]")  # characters of a client that must not reach a header or a log line
_LONGEST_NAME, _MOST_NAMES, _MOST_NOTED = 64, 32, 256
_Scan = Callable[[str, int], Any]
_LONG = 1 << 12  # bytes of a body that is read in a thread


class BodyRoute(APIRoute):
    """A route whose endpoint gets the fields that its body declares, under whichever names a client sent them.

    Fields that mean nothing here are ignored: a header of the response names them, and the log each once. A strict server refuses
    them.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI."""
        handler = super().get_route_handler()
        body = body_in(self.body_field.field_info.annotation) if self.body_field else None

        async def handle(request: Request) -> Response:
            return await handler(_ReadRequest(request, body) if body else request)

        return handle


class _ReadRequest(Request):
    def __init__(self, request: Request, body: type[Body]) -> None:
        super().__init__(request.scope, request.receive)
        self._body_type = body
        self._pieces: list[bytes] | None = None

    async def body(self) -> bytes:
        """The first bytes of the body, from which FastAPI sees whether there is one. `json` reads all."""
        if self._pieces is None:
            self._pieces = [piece async for piece in self.stream() if piece]
        return self._pieces[0] if self._pieces else b""

    async def json(self) -> Any:
        """The body that the endpoint declares; a list of such as it is. A long one is read in a thread."""
        server, context, pieces = server_of(self), context_of(self), self._pieces or []
        is_long = sum(map(len, pieces)) > _LONG
        reading = partial(_read_body, pieces, self._body_type, server.config.strict_requests, self.url.path, is_long)
        try:
            found, names = await server.readers.run(context.client, reading) if is_long else reading()
        except RequestError as error:  # FastAPI passes on its own exceptions only
            raise HTTPException(error.status, error) from None
        ignore(self, names)
        return found


def ignore(request: Request, names: Iterable[str]) -> None:
    """Say in a header of the response that these fields of the request change nothing, and each once in the log."""
    notes, known = context_of(request).notes, server_of(request).ignored_fields
    clean = list(dict.fromkeys(_ODD.sub("?", name[:_LONGEST_NAME]) for name in islice(names, _MOST_NAMES)))
    if clean:
        notes["ignored-fields"] = ", ".join([*filter(None, [notes.get("ignored-fields")]), *clean])
    for name in clean:
        if name not in known and len(known) < _MOST_NOTED:
            known.add(name)
            log_event("ignored", {"field": name, "path": request.url.path})


def _read_body(pieces: list[bytes], body: type[Body], strict: bool, path: str, is_long: bool) -> tuple[Any, list[str]]:
    """A body, and the names of its fields that are ignored. Raises JSONDecodeError and RequestError."""
    try:
        given = json.loads(b"".join(pieces), cls=_Decoder if is_long else None)
        if not isinstance(given, dict):
            return given, []
        found, unknown = read(body.declared(), given, strict)
        # The body refuses these: it has no such fields.
        refused = {name.partition(".")[0] for name in unknown if strict or name in REFUSED}
        found |= {name: given.get(name) for name in refused}
        return body.model_validate(found), [*unknown, *body.ignored(found)]
    except RecursionError:
        raise RequestError("the body's lists and objects are nested too deeply") from None
    except ValidationError as error:
        raise wrong_field(worst_fault(error), path) from None


class _Decoder(json.JSONDecoder):
    """Reads a long body in Python, so that other threads may run between any two of its values, and counts these."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._values_left, self._holders_left = MOST_VALUES, MOST_HOLDERS
        self.parse_array = lambda begin, scan: decoder.JSONArray(begin, self._counting(scan))  # type: ignore[attr-defined]
        self.parse_object = lambda begin, strict, scan, *hooks: decoder.JSONObject(  # type: ignore[attr-defined]
            begin, strict, self._counting(scan), *hooks
        )
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _counting(self, scan: _Scan) -> _Scan:
        self._holders_left -= 1
        if self._holders_left < 0:
            raise RequestError(f"the body has more than {MOST_HOLDERS} lists and objects, the most that are taken")

        def scan_one(text: str, start: int) -> Any:
            self._values_left -= 1
            if self._values_left < 0:
                raise RequestError(f"the body has more than {MOST_VALUES} JSON values, the most that are taken")
            return scan(text, start)

        return scan_one
