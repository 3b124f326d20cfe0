"""The route that reads what a client sent as the body that an endpoint declares."""

import re
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from cpuspec.server.fields import REFUSED, read
from cpuspec.server.gate import context_of
from cpuspec.server.observe import log_event
from cpuspec.server.schema import Body, body_in
from cpuspec.server.server import server_of

_ODD = re.compile(r"[^A-Za-z0-9_.\-]")  # characters of a client that must not reach a header or a log line
_LONGEST_NAME, _MOST_NAMES, _MOST_NOTED = 64, 32, 256


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
        self._kind = body

    async def json(self) -> Any:
        """The fields that the body declares."""
        given, server = await super().json(), server_of(self)
        if not isinstance(given, dict):
            return given
        strict = server.config.strict_requests
        found, unknown = read(self._kind.declared(), given, strict)
        refused = {name.partition(".")[0] for name in unknown if strict or name in REFUSED}
        if refused:  # the body refuses them: it has no such fields
            return found | {name: given.get(name) for name in refused}
        ignore(self, [*unknown, *self._kind.ignored(found)])
        return found


def ignore(request: Request, names: Iterable[str]) -> None:
    """Say in a header of the response that these fields of the request change nothing, and each once in the log."""
    notes, known = context_of(request).notes, server_of(request).ignored_fields
    clean = [_ODD.sub("?", name)[:_LONGEST_NAME] for name in names]
    if clean:
        notes["ignored-fields"] = ", ".join([*filter(None, [notes.get("ignored-fields")]), *dict.fromkeys(clean[:_MOST_NAMES])])
    for name in clean:
        if name not in known and len(known) < _MOST_NOTED:
            known.add(name)
            log_event("ignored", {"field": name, "path": request.url.path})
