"""The contract of the writers, one for each protocol: they make events of the engine's outputs. Knows no web framework."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from cpuspec.engine.engine import Output
from cpuspec.metrics import RequestStats
from cpuspec.server.errors import RequestError

Event = dict[str, Any]


class Writer(Protocol):
    """A protocol's way to write the answers to one request. Its events are JSON objects; one with a `type` is named by it."""

    closing: str = ""  # is sent after the last event
    is_done: bool = False  # whether no more outputs are wanted

    def begin(self) -> Iterable[Event]:
        """The events before the first output."""
        return ()

    def show(self, index: int, output: Output) -> Iterable[Event]:
        """The events of an output of the answer with this index."""

    def finish(self, stats: Sequence[RequestStats]) -> Iterable[Event]:
        """The events after the last output. stats: of all answers, in their order."""

    def whole(self, events: Sequence[Event], stats: Sequence[RequestStats]) -> Event:
        """One JSON object with what all these events say."""

    def sign_of_life(self) -> str:
        """The text that a silent stream sends so that its client does not give up: a comment, which clients skip."""
        return ": keep-alive\n\n"

    def failed(self, error: RequestError) -> Event | None:
        """The event of an error in a stream, where the protocol has more than an error object for it."""
        return None
