"""Closes silent connections. The web server itself never does, and it takes a limited number of connections."""

import asyncio
import logging
from typing import Any

import uvicorn

from cpuspec.metrics import now_s

REQUEST_S = 30.0  # the longest time in which the first line and the headers of a request may arrive
READ_S = 60.0  # the longest time in which a client may read nothing
_LOG = logging.getLogger("cpuspec.server")
_SWEEPS = 4  # how often all connections are looked at within the shorter of these times


async def close_silent(web: uvicorn.Server) -> None:
    """Close each connection that waits for a request's headers for REQUEST_S, or whose client reads nothing for READ_S.

    The answer of one that reads nothing ends as if the client had left. Ends when it is cancelled.
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
