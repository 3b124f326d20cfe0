"""Relays an answer to a client: from one replica, and if that dies, the rest from another.

The other replica repeats the answer from its beginning, event for event, so the events that the client has are counted and left
out. The module knows the messages of ASGI, and nothing of Ray.
"""

from starlette.types import Message, Send

from cpuspec.server.errors import EngineFailedError, RequestError
from cpuspec.server.replies import STAMP, error_body, event


class Relay:
    """Passes the messages of replicas on to the client. has_ended: the client has the whole answer."""

    def __init__(self, send: Send) -> None:
        self.has_ended = False
        self._send = send
        self._held: Message | None = None  # the start of a response that is no stream, until its body is there
        self._streams = self._has_begun = False  # the start of a stream, or a part of another body, has been sent
        self._num_sent = self._num_received = 0  # parts of a stream: that the client has, and that this replica has sent
        self._stamp: int | None = None  # of the last part that was sent

    def begin_again(self) -> None:
        """Begin again with another replica. Raises EngineFailedError if the client has a part of an answer that is no stream."""
        if self._has_begun:
            raise EngineFailedError("the replica that sent this answer has ended; try again")
        self._held, self._num_received = None, 0

    async def pass_on(self, message: Message) -> None:
        """Send a message, unless it is a part of a stream that the client has.

        Raises EngineFailedError if another replica does not repeat what the client has.
        """
        stamp: int | None = message.pop(STAMP, None)
        if message["type"] == "http.response.start":
            await self._start(message)
            return
        if self._held:
            await self._send(self._held)
            self._held, self._has_begun = None, True
        ends = not message.get("more_body", False)
        if stamp is None:
            is_known, differs = False, ends and self._num_received < self._num_sent
        else:
            self._num_received += 1
            is_known = self._num_received <= self._num_sent
            differs = is_known and (ends or (self._num_received == self._num_sent and stamp != self._stamp))
        if differs:
            raise EngineFailedError("another replica gave another answer than the one that has ended; try again")
        if is_known:
            return
        if stamp is not None:
            self._num_sent, self._stamp = self._num_received, stamp
        await self._send(message)
        self.has_ended = ends

    async def _start(self, message: Message) -> None:
        if any(value.startswith(b"text/event-stream") for name, value in message["headers"] if name == b"content-type"):
            if not self._streams:
                await self._send(message)
            self._streams = True
        elif self._streams:
            raise EngineFailedError("another replica refused what one that has ended had taken on; try again")
        else:
            self._held = message

    async def break_off(self, path: str, error: RequestError, request_id: str) -> None:
        """End a stream with an error event. Raises the error where no stream has begun."""
        if not self._streams:
            raise error
        await self._send({"type": "http.response.body", "body": event(error_body(path, error, request_id), path).encode()})
