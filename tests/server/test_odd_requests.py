"""Requests that made other servers crash, hang or answer 500, by their public reports: answered, or refused by their own fault."""

import json
from typing import Any

import pytest

from tests.server.running import Running

CHAT, PLAIN, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
USER = {"role": "user", "content": "hi"}


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def schema(of: Any) -> dict[str, Any]:
    return {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": of}}}


ANSWERED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": None}]}),
    (CHAT, {"messages": [{"role": "user", "content": []}]}),
    (CHAT, {"messages": [{"role": "user"}]}),
    *((CHAT, {"messages": [USER, call(arguments), USER]}) for arguments in ({"a": 1}, "{bad", "", None, "[1]", "5")),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}, USER]}),
    (CHAT, {"messages": [USER, {"role": "tool", "tool_call_id": "unknown", "content": None}]}),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": "x", "reasoning": {"a": 1}}, USER]}),
    (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "parameters": None}}]}),
    (CHAT, {"messages": [USER], "chat_template_kwargs": {"messages": []}}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    (CHAT, schema({"type": "object", "additionalProperties": {"$ref": "#"}})),
    (CHAT, schema({"type": "string", "format": "unheard-of"})),
    (PLAIN, {"prompt": "a" * 20_000}),
    (PLAIN, {"prompt": " " * 20_000}),
    (PLAIN, {"prompt": "\0"}),
    (PLAIN, {"prompt": "hi", "seed": 2**70}),
    (PLAIN, {"prompt": "hi", "top_k": 10**12}),
    (PLAIN, {"prompt": "hi", "temperature": 1e300}),
    (PLAIN, {"prompt": "hi", "logit_bias": []}),
    (MESSAGES, {"messages": [{"role": "assistant", "content": "x"}]}),
    (MESSAGES, {"messages": [USER, {"role": "assistant", "content": []}, USER]}),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]}),
    (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [None]}),
    (CHAT, {"messages": [{"role": "user", "content": [None]}]}),
    (CHAT, {"messages": [USER], "tools": [{}]}),
    (CHAT, {"messages": [USER], "chat_template_kwargs": "x"}),
    *(
        (CHAT, schema(of))
        for of in ({"$ref": "#"}, {"$ref": "#/none"}, {"enum": []}, {"pattern": "("}, {"multipleOf": 0, "type": "number"})
    ),
    (CHAT, schema({"type": "object", "properties": {"\ud800": {}}})),
    (PLAIN, {"prompt": []}),
    (PLAIN, {"prompt": [[1, 2], "a"]}),
    (PLAIN, {"prompt": [-1]}),
    (PLAIN, {"prompt": [2**40]}),
    (PLAIN, {"prompt": "\ud800"}),
    (PLAIN, {"prompt": "hi", "temperature": float("nan")}),
    (PLAIN, {"prompt": "hi", "n": 0}),
    (MESSAGES, {"messages": [USER], "tool_choice": {"type": "tool", "name": "unknown"}}),
    (RESPONSES, {"input": [{}]}),
    ("/detokenize", {"tokens": [10**9]}),
    ("/tokenize", {"content": 5}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{}]}),
]


@pytest.mark.parametrize(("path_", "body"), [*ANSWERED, *REFUSED])
def test_an_odd_request_is_answered_or_refused_by_its_own_fault(running: Running, path_: str, body: dict[str, Any]) -> None:
    few = {"max_output_tokens" if path_ == RESPONSES else "max_tokens": 16} if path_.startswith("/v1") else {}
    with running.client(headers={"content-type": "application/json"}) as client:
        reply = client.post(path_, content=json.dumps(few | body).encode())
        assert reply.status_code == (200 if (path_, body) in ANSWERED else 400), reply.text
        assert client.post(PLAIN, json={"prompt": "hi", "max_tokens": 1}).status_code == 200
