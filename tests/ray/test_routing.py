"""All turns of a conversation have one key, whatever protocol and spelling, and different conversations have different ones."""

import json
from typing import Any

import pytest

from cpuspec.ray.routing import conversation_key


def key(**body: Any) -> str:
    return conversation_key(json.dumps(body).encode())


FIRST, OTHER = {"role": "user", "content": "Write a haiku."}, {"role": "user", "content": "Write a sonnet."}
LATER = [{"role": "assistant", "content": "Old pond"}, {"role": "user", "content": "Another."}]
PARTS = {"role": "user", "content": [{"type": "input_text", "text": "Write a "}, {"type": "input_text", "text": "haiku."}]}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [FIRST, *LATER]},
        {"messages": [{"role": "system", "content": "the time is 12:30"}, FIRST, *LATER], "max_tokens": 7},
        {"messages": [PARTS, *LATER]},
        {"system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}], "messages": [FIRST]},
        {"input": "Write a haiku."},
        {"instructions": "Be brief.", "input": [{"type": "message", **PARTS}, *LATER]},
    ],
    ids=lambda body: str(body)[:50],
)
def test_every_turn_and_spelling_of_a_conversation_has_its_key(body: dict[str, Any]) -> None:
    assert key(**body) == key(messages=[FIRST]) != key(messages=[OTHER])


def test_a_text_that_grows_keeps_its_key() -> None:
    begin = "".join(f"line {number}\n" for number in range(60))
    assert (
        key(prompt=begin)
        == key(prompt=begin + "more")
        == key(prompt=[begin, "another"])
        == key(input_prefix=begin, input_suffix="x")
    )
    assert key(prompt=list(range(100))) == key(prompt=[list(range(200))]) != key(prompt=list(range(1, 100)))
    assert key(prompt=begin) != key(prompt=f"# {begin}")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"[" * 100_000,
        b"[]",
        b"3",
        b"{}",
        b'{"messages": []}',
        b'{"messages": [3, {"role": "user"}]}',
        b'{"prompt": {}}',
        b'{"prompt": []}',
        b'{"prompt": [[]]}',
        b'{"input": 3}',
        b'{"messages": [{"role": "user", "content": {"a": 1}}]}',
    ],
    ids=repr,
)
def test_a_body_without_a_prompt_has_no_key(body: bytes) -> None:
    assert conversation_key(body) == ""
