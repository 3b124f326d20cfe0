"""Connections on which nothing comes or goes: the web server itself waits without end, and takes only so many connections."""

import asyncio
import logging
from typing import Any

import uvicorn

from cpuspec.metrics import now_s

REQUEST_S = 30.0  # that a client may take for the first line and the headers of a request
READ_S = 60.0  # that a client may take nothing of what was sent to it
_LOG = logging.getLogger("cpuspec.server")
_SWEEPS = 4  # in these times


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
                    one.transport.abort()  # to close it would wait until all is sent
        except Exception:  # of the web server's own objects; nobody would hear that this task has ended
            _LOG.exception("silent connections could not be closed")


def _awaits_request(one: Any) -> bool:
    """No request is being answered; and none has just been, for which the web server has a shorter time of its own."""
    answering = one.cycle is not None and not one.cycle.response_complete
    return not answering and one.timeout_keep_alive_task is None
