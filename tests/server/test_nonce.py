"""Two servers that get a request with one nonce tell its stream in the same events, however each computes it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.asgi import Application, application, parts, said
from tests.server.running import templated_model
from tests.server.test_infill import with_fill_tokens
from tests.server.test_tools import TEMPLATE, TOOL

CHAT, PLAIN, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TALK = {"messages": [{"role": "user", "content": "the cat sat on the mat and the cat sat on the mat"}], "max_tokens": 40}
OPENAI_TOOL = {"type": "function", "name": "get_time", "parameters": {"type": "object"}, "strict": False}
CLAUDE_TOOL = {"name": "get_time", "input_schema": {"type": "object"}}
LONG = TALK | {"ignore_eos": True}
INPUT = {"input": "the cat sat", "max_output_tokens": 40}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, LONG | {"stream_options": {"include_usage": True}}),
    "chat with reasoning": (CHAT, LONG | {"chat_template_kwargs": {"think": True}}),
    "chat with a call": (CHAT, TALK | {"tools": [TOOL], "tool_choice": "required"}),
    "chat with logprobs": (CHAT, LONG | {"logprobs": True, "top_logprobs": 2}),
    "chat with levels": (CHAT, LONG | {"cpuspec": {"tokens": True}}),
    "chat with progress": (CHAT, LONG | {"return_progress": True, "n": 2}),
    "more chats than places": (CHAT, LONG | {"n": 6}),
    "plain": (PLAIN, {"prompt": "the cat", "max_tokens": 40, "ignore_eos": True, "logprobs": 1}),
    "plain with stops": (PLAIN, {"prompt": "the cat", "max_tokens": 40, "stop": ["cat", "e "]}),
    "several prompts": (PLAIN, {"prompt": ["the cat", "a dog"], "n": 2, "max_tokens": 20, "echo": True}),
    "suffix": (PLAIN, {"prompt": "the cat sat ", "suffix": "dog", "max_tokens": 40}),
    "responses": (RESPONSES, INPUT),
    "responses with a call": (RESPONSES, INPUT | {"tools": [OPENAI_TOOL], "tool_choice": "required"}),
    "messages": (MESSAGES, TALK),
    "messages with a call": (MESSAGES, TALK | {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "any"}}),
    "ollama's chat": ("/api/chat", {"messages": TALK["messages"], "options": {"num_predict": 40}}),
    "ollama's prompt": ("/api/generate", {"prompt": "the cat", "options": {"num_predict": 40}, "logprobs": True}),
    "completion": ("/completion", {"prompt": "the cat", "n_predict": 40}),
    "infill": ("/infill", {"input_prefix": "the cat sat ", "input_suffix": "dog", "n_predict": 40}),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tools, reasoning and the tokens of filling in."""
    return with_fill_tokens(templated_model(tmp_path_factory.mktemp("model"), TEMPLATE, vocab_size=512))


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
    path, body = STREAMS["chat"]
    last = twins[0].messages(path, body | {"stream": True, "temperature": 0}, "a nonce")[-3]["body"]
    assert b'"accepted_prediction_tokens":0' not in last
    assert b'"accepted_prediction_tokens":' in last


@pytest.mark.parametrize("name", ["chat", "plain", "several prompts", "responses", "messages"])
def test_without_a_nonce_a_slow_reader_gets_what_has_come_as_one_event(twins: tuple[Application, Application], name: str) -> None:
    path, body = STREAMS[name]
    body = body | {"stream": True, "temperature": 0}
    whole = twins[1].messages(path, body, "a nonce", is_slow=True)
    merged = twins[1].messages(path, body, None, is_slow=True)
    assert parts(merged) == []
    assert len(merged) < len(whole) / 2


def test_without_a_nonce_what_is_drawn_differs(twins: tuple[Application, Application]) -> None:
    path, body = STREAMS["chat"]
    first, second = (
        [
            said(message["body"])
            for message in twins[1].messages(path, body | {"stream": True, "temperature": 1}, None)
            if "body" in message
        ]
        for _ in range(2)
    )
    assert first != second
