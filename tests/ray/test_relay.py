"""Whenever a replica dies, the client gets the stream that it would have got: from another one the rest, and nothing twice."""

import asyncio
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import pytest
from starlette.types import Message

from cpuspec.ray.relay import Relay
from cpuspec.server.errors import EngineFailedError
from cpuspec.server.replies import STAMP
from tests.server.asgi import Application, application, said
from tests.server.running import tiny_model

TALK = {"messages": [{"role": "user", "content": "the cat sat"}], "max_tokens": 12, "temperature": 1, "stream": True}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": TALK | {"n": 2, "return_progress": True},
    "/v1/completions": {"prompt": "the cat", "max_tokens": 12, "temperature": 1, "stream": True},
    "/v1/responses": {"input": "the cat sat", "max_output_tokens": 12, "temperature": 1, "stream": True},
    "/v1/messages": TALK,
}
PING: Message = {"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True}
REFUSAL: list[Message] = [
    {"type": "http.response.start", "status": 429, "headers": [(b"content-type", b"application/json")]},
    {"type": "http.response.body", "body": b"{}", "more_body": False},
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    with asyncio.Runner() as loop, application(tiny_model(tmp_path_factory.mktemp("model")), loop) as found:
        yield found


@pytest.fixture(scope="module", params=STREAMS)
def tellings(request: pytest.FixtureRequest, served: Application) -> tuple[list[Message], list[Message]]:
    """What two replicas tell of one request."""
    body = STREAMS[request.param]
    return served.messages(request.param, body, "a nonce"), served.messages(request.param, body, "a nonce", is_slow=True)


async def relayed(*tellings: Sequence[Message]) -> tuple[list[Message], Relay]:
    """What the client has when replicas have told this, one after the other has died."""
    got: list[Message] = []

    async def send(message: Message) -> None:
        got.append(message)

    relay = Relay(send)
    for number, messages in enumerate(tellings):
        if number:
            relay.begin_again()
        for message in messages:
            await relay.pass_on(deepcopy(message))
    return got, relay


def events(messages: Sequence[Message]) -> list[str]:
    """What a client reads, besides figures and signs of life."""
    assert [message["type"] for message in messages] == ["http.response.start", *["http.response.body"] * (len(messages) - 1)]
    found = [said(message["body"]) for message in messages[1:]]
    return [one for one in found if not one.startswith(":") and "prompt_progress" not in one]


def test_a_stream_goes_on_wherever_its_replica_died(tellings: tuple[list[Message], list[Message]]) -> None:
    first, second = tellings
    for length in range(len(first)):
        got, relay = asyncio.run(relayed(first[:length], second))
        assert events(got) == events(first)
        assert relay.has_ended
        assert not got[-1]["more_body"]
        assert not any(STAMP in message for message in got)
        assert b"".join(one["body"] for one in got[1:length]) == b"".join(one["body"] for one in first[1:length])


def test_a_stream_goes_on_when_replicas_die_again_and_again(tellings: tuple[list[Message], list[Message]]) -> None:
    first, second = tellings
    for length in range(1, len(first) - 1):
        deaths = [telling[:end] for end in (length, length // 2, length + 1, 0) for telling in tellings]
        got, relay = asyncio.run(relayed(*deaths, second))
        assert (events(got), relay.has_ended) == (events(first), True)


def test_signs_of_life_are_passed_on_and_not_counted(tellings: tuple[list[Message], list[Message]]) -> None:
    first, second = tellings
    lively = [one for message in first for one in (message, PING)][:-1]
    for length in range(1, len(lively)):
        got, _ = asyncio.run(relayed(lively[:length], [second[0], PING, PING, *second[1:]]))
        assert events(got) == events(first)
        assert sum(message.get("body") == PING["body"] for message in got) == length // 2 + 2


def test_another_answer_is_told_and_not_joined_to_the_first(served: Application) -> None:
    path = "/v1/completions"
    first, other = (served.messages(path, STREAMS[path], nonce) for nonce in ("a nonce", "another"))
    assert asyncio.run(relayed(first[:1], other))[1].has_ended, "the client has nothing yet"
    for length in range(4, len(first)):
        with pytest.raises(EngineFailedError, match="another answer"):
            asyncio.run(relayed(first[:length], other))
        with pytest.raises(EngineFailedError, match="another answer"):  # one that ends before
            asyncio.run(relayed(first[:length], [*first[: length - 1], {**first[-1], STAMP: first[length - 1].get(STAMP)}]))


async def broken_off(path: str, *tellings: Sequence[Message]) -> list[Message]:
    got, relay = await relayed(*tellings)
    await relay.break_off(path, EngineFailedError("gone"), "mine")
    return got


def test_a_refusal_breaks_off_a_stream_that_has_begun(tellings: tuple[list[Message], list[Message]]) -> None:
    first, _ = tellings
    assert asyncio.run(relayed([], REFUSAL))[0] == REFUSAL
    with pytest.raises(EngineFailedError, match="refused"):
        asyncio.run(relayed(first[:1], REFUSAL))
    end = asyncio.run(broken_off("/v1/messages", first[:5]))[-1]
    assert end["body"].startswith(b"event: error\ndata: {")
    assert not end.get("more_body")


def test_an_answer_that_is_no_stream_is_told_once() -> None:
    start, body = REFUSAL
    for deaths in ([[]], [[start]], [[start], [], [start]]):
        assert asyncio.run(relayed(*deaths, REFUSAL))[0] == REFUSAL
    with pytest.raises(EngineFailedError):  # the client has a part
        asyncio.run(relayed([start, {**body, "more_body": True}], REFUSAL))
    with pytest.raises(EngineFailedError, match="gone"):
        asyncio.run(broken_off("/v1/messages", [start]))
