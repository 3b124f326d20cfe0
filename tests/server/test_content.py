"""Parts of messages that a text model cannot read: the conversation goes on, and the model and the client are told."""

from typing import Any

import pytest

from cpuspec.server.content import content_text
from cpuspec.server.errors import RequestError
from tests.server.running import Running

PNG = "iVBORw0KGgo" + "A" * 8000
PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "Anthropic's image": (
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
        "[The image here was left out (image/png, 7 kB): this model reads text only.]",
    ),
    "Anthropic's image by address": (
        {"type": "image", "source": {"type": "url", "url": "http://a.example/cat.png"}},
        "[The image here was left out (http://a.example/cat.png): this model reads text only.]",
    ),
    "Anthropic's document": (
        {"type": "document", "title": "Rules", "source": {"type": "base64", "media_type": "application/pdf", "data": PNG}},
        "[The document here was left out (Rules, application/pdf, 7 kB): this model reads text only.]",
    ),
    "a document of text": ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "words"}}, "words"),
    "a document of parts": (
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}},
        "a\n[The image here was left out: this model reads text only.]",
    ),
    "a search result": (
        {"type": "search_result", "title": "A", "source": "b.example", "content": [{"type": "text", "text": "c"}]},
        "A\nb.example\nc",
    ),
    "OpenAI's image": (
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        "[The image here was left out (image/png, 7 kB): this model reads text only.]",
    ),
    "OpenAI's file": (
        {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PNG}"}},
        "[The document here was left out (a.pdf, 7 kB): this model reads text only.]",
    ),
    "OpenAI's sound": (
        {"type": "input_audio", "input_audio": {"data": PNG, "format": "wav"}},
        "[The recording here was left out (wav, 7 kB): this model reads text only.]",
    ),
    "the responses' image": (
        {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}", "detail": "auto"},
        "[The image here was left out (image/png, 7 kB): this model reads text only.]",
    ),
    "the responses' file": (
        {"type": "input_file", "file_id": "f-1"},
        "[The document here was left out: this model reads text only.]",
    ),
}


@pytest.mark.parametrize(("part", "wanted"), PARTS.values(), ids=PARTS)
def test_a_part_that_cannot_be_read_is_said_to_be_missing(part: dict[str, Any], wanted: str) -> None:
    assert content_text([{"type": "text", "text": "See:"}, part], "messages[0]") == f"See:\n{wanted}"


@pytest.mark.parametrize("part", [7, "a", {}, {"type": 3}, {"type": "smell"}, {"type": "text"}, {"type": "text", "text": 1}])
def test_what_is_no_part_is_refused(part: Any) -> None:
    with pytest.raises(RequestError, match="texts only"):
        content_text([part], "messages[0]")


SEEN, SEES = PARTS["Anthropic's image"]
CALL = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
HISTORIES: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": (
        "/v1/messages",
        {
            "messages": [
                {"role": "user", "content": "look"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "read", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [SEEN]}]},
            ]
        },
    ),
    "chat completions": (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": "look"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": [PARTS["OpenAI's image"][0]]},
            ]
        },
    ),
    "responses": (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": "look"},
                {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [PARTS["the responses' image"][0]]},
            ]
        },
    ),
}


@pytest.mark.parametrize(("route", "body"), HISTORIES.values(), ids=HISTORIES)
@pytest.mark.parametrize("stream", [False, True])
def test_an_image_in_the_result_of_a_tool_ends_no_conversation(
    running: Running, route: str, body: dict[str, Any], stream: bool
) -> None:
    limit = "max_output_tokens" if "responses" in route else "max_tokens"
    reply = running.post(route, json={**body, limit: 1, "stream": stream})
    assert (reply.status_code, reply.headers["x-cpuspec-left-out"]) == (200, "image"), reply.text
    prompt = next(slot.tokens for slot in running.model.slots if slot.tokens)
    assert SEES in running.model.llm.tokenizer.decode(prompt, skip_special=False)
