"""The way of answers to a client, for every protocol: outputs become events, and events a stream or one whole answer."""

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from cpuspec.engine.engine import Output
from cpuspec.metrics import RequestStats
from cpuspec.server.errors import RequestError
from cpuspec.server.figures import log_figures
from cpuspec.server.gate import context_of
from cpuspec.server.model import Answers
from cpuspec.server.replies import EventStream, comment, event, json_response, unless_gone

Event = dict[str, Any]


class Writer(Protocol):
    """A protocol's way to write the answers to one request. Its events are JSON objects; one with a `type` is named by it."""

    closing: str  # is sent behind the last event
    is_done: bool  # no output is wanted any more

    def begin(self) -> Iterable[Event]:
        """The events before the first output."""

    def show(self, index: int, output: Output) -> Iterable[Event]:
        """The events of an output of the answer with this index."""

    def end(self, stats: Sequence[RequestStats]) -> Iterable[Event]:
        """The events after the last output. stats: of all answers, in their order."""

    def whole(self, events: Sequence[Event], stats: Sequence[RequestStats]) -> Event:
        """One JSON object with what all these events say."""


async def respond(
    request: Request,
    answers: Answers,
    writer: Writer,
    streams: bool | None,
    sign_of_life: Callable[[], str] = comment,
    failed: Callable[[RequestError], Event] | None = None,
) -> Response:
    """Answer a request: with a stream of events, or with the whole of them when the last has come.

    sign_of_life: makes what a silent stream sends so that its client does not give up. failed: makes the event of an error in a
    stream, where the protocol has more than an error object for it.
    """
    if streams:
        return EventStream(_stream(request, answers, writer), answers, request, context_of(request).id, sign_of_life, failed)
    return await unless_gone(request, _whole(request, answers, writer), answers.close)


async def _stream(request: Request, answers: Answers, writer: Writer) -> AsyncGenerator[str]:
    async for one in _events(request, answers, writer, []):
        yield event(one)
    if writer.closing:
        yield writer.closing


async def _whole(request: Request, answers: Answers, writer: Writer) -> Response:
    stats: list[RequestStats] = []
    events = [one async for one in _events(request, answers, writer, stats)]
    return json_response(writer.whole(events, stats))


async def _events(request: Request, answers: Answers, writer: Writer, stats: list[RequestStats]) -> AsyncGenerator[Event]:
    """The events of all answers. stats: gets those of each answer, in their order."""
    for one in writer.begin():
        yield one
    found: dict[int, RequestStats] = {}
    async for index, output in answers.outputs():
        for one in writer.show(index, output):
            yield one
        if output.stats is not None and output.finish_reason is not None:
            found[index] = output.stats
        if writer.is_done:
            break
    stats += [found[index] for index in sorted(found)]
    if stats:
        context_of(request).figures.update(log_figures(stats))
    for one in writer.end(stats):
        yield one
