"""Requests that cannot be answered: each protocol's error says what is wrong, in the protocol's own shape."""

import json
from typing import Any

import pytest

from tests.server.running import Running

CHAT, PLAIN, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
USER, SAID = {"role": "user", "content": "the cat sat on the mat"}, {"role": "assistant", "content": "On"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "max_tokens": 3},
    PLAIN: {"prompt": "the cat", "max_tokens": 3},
    MESSAGES: {"messages": [USER], "max_tokens": 3},
    RESPONSES: {"input": "the cat", "max_output_tokens": 3},
}
CONTINUE = {"continue_final_message": True}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"model": "gpt-5"}, "does not exist"),
    (CHAT, {"temperature": -1}, "temperature must be"),
    (CHAT, {"temperature": "hot"}, "temperature"),
    (CHAT, {"max_tokens": 0}, "max_tokens must be"),
    (CHAT, {"n": 10**6}, "asks for 1000000 answers"),
    (CHAT, {"top_logprobs": 3}, "needs logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 99}, "from 0 to 20"),
    (CHAT, {"messages": []}, "no messages"),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "smell", "smell": {"url": "x"}}]}]}, "texts only"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "not Unicode"),
    (CHAT, {"messages": [{"role": "user", "content": "7" * 40000}]}, "the prompt has"),
    (CHAT, {"logit_bias": {"cat": 1}}, "token ids"),
    (CHAT, {"logit_bias": {"999999": 1}}, "logit_bias ids"),
    (CHAT, {"functions": [{"name": "f"}]}, "Unrecognized request argument supplied: functions; send tools instead"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type is text, json_object or json_schema"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "is not a function"),
    (CHAT, {"tool_choice": "required"}, "there are no tools"),
    *((CHAT, {"prediction": one}, "prediction") for one in ({"type": "other", "content": "a"}, {"type": "content"}, "a")),
    (CHAT, {"prediction": {"type": "content", "content": [{}]}}, "prediction"),
    (CHAT, {"messages": [USER, SAID], "add_generation_prompt": True, **CONTINUE}, "exclude each other"),
    (CHAT, {"messages": [USER, CALLED], **CONTINUE}, "continue_final_message needs a last message"),
    (CHAT, {"messages": [], **CONTINUE}, "continue_final_message needs a last message"),
    (PLAIN, {"stop": ["x"] * 33}, "stop takes at most"),
    (PLAIN, {"stop": "x" * 5000}, "stop takes at most"),
    (PLAIN, {"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias takes at most"),
    (PLAIN, {"suffix": "b"}, "filling in the middle"),
    (MESSAGES, {"model": "claude-opus"}, "does not exist"),
    (MESSAGES, {"max_tokens": 0}, "max_tokens"),
    (MESSAGES, {"temperature": -1}, "temperature must be"),
    (MESSAGES, {"messages": [{"role": "tool", "content": "x"}]}, "user or assistant"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "smell", "source": {}}]}]}, "texts only"),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "w"}]}, "cannot run"),
    (MESSAGES, {"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
    (RESPONSES, {"background": True}, "background is not supported"),
    (RESPONSES, {"input": [{"type": "computer_call"}]}, "cannot read"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_smell", "image_url": "x"}]}]}, "texts only"),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format"),
]


@pytest.mark.parametrize(("path_", "change", "message"), REFUSED, ids=[f"{path} {str(change)[:40]}" for path, change, _ in REFUSED])
def test_what_cannot_be_answered_is_an_error_in_the_shape_of_its_protocol(
    running: Running, path_: str, change: dict[str, Any], message: str
) -> None:
    content = json.dumps(BODIES[path_] | change)
    reply = running.post(path_, content=content, headers={"content-type": "application/json"})
    assert reply.status_code == (404 if "model" in change else 400), reply.text
    body = reply.json()
    assert message in body["error"]["message"]
    if path_ == MESSAGES:
        assert (body["type"], body["request_id"]) == ("error", reply.headers["x-request-id"])
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
