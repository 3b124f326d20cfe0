"""Connections on which no request comes: the web server itself waits for one without end, and takes only so many connections."""

import asyncio
import logging
from typing import Any

import uvicorn

from cpuspec.metrics import now_s

REQUEST_S = 30.0  # that a client may take for the first line and the headers of a request
_LOG = logging.getLogger("cpuspec.server")
_SWEEPS = 4  # in this time


async def close_silent(web: uvicorn.Server) -> None:
    """Close each connection that has waited for a request's headers for REQUEST_S. Ends when it is cancelled."""
    silent: dict[Any, float] = {}
    while True:
        await asyncio.sleep(REQUEST_S / _SWEEPS)
        try:
            silent = {one: silent.get(one, now_s()) for one in web.server_state.connections if _awaits_request(one)}
            for one, since_s in silent.items():
                if now_s() - since_s > REQUEST_S:
                    one.transport.close()
        except Exception:  # of the web server's own objects; nobody would hear that this task has ended
            _LOG.exception("silent connections could not be closed")


def _awaits_request(one: Any) -> bool:
    """No request is being answered; and none has just been, for which the web server has a shorter time of its own."""
    answering = one.cycle is not None and not one.cycle.response_complete
    return not answering and one.timeout_keep_alive_task is None
