"""Two servers that get a request with one nonce tell its stream in the same events, however each computes it."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.test_protocols import CHAT, PLAIN, PROTOCOLS, RESPONSES, TIME
from tests.server.asgi import Application, application, parts
from tests.server.test_tools import full_model

MODEL = full_model
TALK = {"messages": [{"role": "user", "content": "the cat sat on the mat and the cat sat on the mat"}], "max_tokens": 40}
LONG = TALK | {"ignore_eos": True}


def demanding(name: str) -> tuple[str, dict[str, Any]]:
    """A request for a call."""
    protocol = PROTOCOLS[name]
    return protocol.path, protocol.body(max_tokens=80) | {"tools": [protocol.tool(TIME)], "tool_choice": protocol.choice("")}


STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (one.path, one.body(TALK["messages"][0]["content"], max_tokens=40)) for name, one in PROTOCOLS.items()},
    **{f"{name} with a call": demanding(name) for name in ("chat completions", "responses", "messages")},
    "chat with usage": (CHAT, LONG | {"stream_options": {"include_usage": True}}),
    "chat with reasoning": (CHAT, LONG | {"chat_template_kwargs": {"think": True}}),
    "chat with logprobs": (CHAT, LONG | {"logprobs": True, "top_logprobs": 2}),
    "chat with levels": (CHAT, LONG | {"cpuspec": {"tokens": True}}),
    "chat with progress": (CHAT, LONG | {"return_progress": True, "n": 2}),
    "more chats than places": (CHAT, LONG | {"n": 6}),
    "plain with logprobs": (PLAIN, {"prompt": "the cat", "max_tokens": 40, "ignore_eos": True, "logprobs": 1}),
    "plain with stops": (PLAIN, {"prompt": "the cat", "max_tokens": 40, "stop": ["cat", "e "]}),
    "several prompts": (PLAIN, {"prompt": ["the cat", "a dog"], "n": 2, "max_tokens": 20, "echo": True}),
    "suffix": (PLAIN, {"prompt": "the cat sat ", "suffix": "dog", "max_tokens": 40}),
}


@pytest.fixture(scope="module")
def twins(path: Path, prompt_arithmetic: str) -> Iterator[tuple[Application, Application]]:
    """One that drafts, and one that does not and has fewer places."""
    with (
        asyncio.Runner() as loop,
        application(path, loop, spec="ngram") as first,
        application(path, loop, spec=None, max_sequences=2) as second,
    ):
        yield first, second


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("name", STREAMS)
def test_a_nonce_decides_every_event(twins: tuple[Application, Application], name: str, temperature: int) -> None:
    drafting, plain = twins
    path, body = STREAMS[name]
    body = body | {"stream": True, "temperature": temperature}
    told = parts(drafting.messages(path, body, "a nonce"))
    assert told == parts(plain.messages(path, body, "a nonce", is_slow=True))
    other = parts(drafting.messages(path, body, "another"))
    assert (told != other) == (temperature > 0 or "call" in name or path == RESPONSES), "what is drawn is the nonce's"
    assert len({stamp for stamp, _ in told}) > 1, "a stamp tells how far an answer has come"


def test_drafts_were_accepted(twins: tuple[Application, Application]) -> None:
    """Else the test above would not show that events do not depend on them."""
    path, body = STREAMS["chat with usage"]
    last = twins[0].messages(path, body | {"stream": True, "temperature": 0}, "a nonce")[-3]["body"]
    assert b'"accepted_prediction_tokens":0' not in last
    assert b'"accepted_prediction_tokens":' in last


@pytest.mark.parametrize("name", ["chat with usage", "completions", "several prompts", "responses", "messages"])
def test_without_a_nonce_a_slow_reader_gets_what_has_come_as_one_event(twins: tuple[Application, Application], name: str) -> None:
    path, body = STREAMS[name]
    body = body | {"stream": True, "temperature": 0}
    whole = twins[1].messages(path, body, "a nonce", is_slow=True)
    merged = twins[1].messages(path, body, None, is_slow=True)
    assert parts(merged) == []
    assert len(merged) < len(whole) / 2


def test_without_a_nonce_what_is_drawn_differs(twins: tuple[Application, Application]) -> None:
    """Of four answers not all are equal. Two may be: one in fifty repeats a token that has no text."""
    path, body = STREAMS["chat with logprobs"]
    answers = [twins[1].messages(path, body | {"stream": True, "temperature": 1}, None) for _ in range(4)]
    drawn = [re.findall(rb'"token":"[^"]*"', b"".join(one["body"] for one in answer[1:])) for answer in answers]
    assert drawn[0]
    assert any(one != drawn[0] for one in drawn)
