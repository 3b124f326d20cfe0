"""What a protocol's writer has to do: it makes events of the engine's outputs. This module knows no web framework."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from cpuspec.engine.engine import Output
from cpuspec.metrics import RequestStats
from cpuspec.server.errors import RequestError

Event = dict[str, Any]


class Writer(Protocol):
    """Writes the answers to one request. Events are JSON objects; the `type` of one that has it becomes the event's name."""

    closing: str = ""  # the text that ends a stream, after the last event
    is_long: bool = False  # whether events are long, so that threads make texts of them
    is_done: bool = False  # set when the answer shall end with the output that was shown last

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
        """The event of an error in a stream; None if the protocol has none besides its error object."""
        return None
