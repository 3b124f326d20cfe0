"""Parts of messages that a text model cannot read: the conversation goes on, and the model and the client are told."""

from typing import Any

import pytest

from cpuspec.server.content import content_text
from cpuspec.server.errors import RequestError

PNG = "iVBORw0KGgo" + "A" * 8000
URL = f"data:image/png;base64,{PNG}"
# Parts that cannot be read, with the word for each, and what is told of it.
UNREAD: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}, "image", " (image/png, 7 kB)"),
    ({"type": "image", "source": {"type": "url", "url": "http://a.example/cat.png"}}, "image", " (http://a.example/cat.png)"),
    (
        {"type": "document", "title": "Rules", "source": {"type": "base64", "media_type": "application/pdf", "data": PNG}},
        *("document", " (Rules, application/pdf, 7 kB)"),
    ),
    ({"type": "image_url", "image_url": {"url": URL}}, "image", " (image/png, 7 kB)"),
    ({"type": "file", "file": {"filename": "a.pdf", "file_data": URL}}, "document", " (a.pdf, 7 kB)"),
    ({"type": "input_audio", "input_audio": {"data": PNG, "format": "wav"}}, "recording", " (wav, 7 kB)"),
    ({"type": "input_image", "image_url": URL, "detail": "auto"}, "image", " (image/png, 7 kB)"),
    ({"type": "input_file", "file_id": "f-1"}, "document", ""),
]
READ: list[tuple[dict[str, Any], str]] = [
    ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "words"}}, "words"),
    (
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}},
        "a\n[The image here was left out: this model reads text only.]",
    ),
    (
        {"type": "search_result", "title": "A", "source": "b.example", "content": [{"type": "text", "text": "c"}]},
        "A\nb.example\nc",
    ),
]


@pytest.mark.parametrize(
    ("part", "wanted"),
    [*READ, *((part, f"[The {word} here was left out{told}: this model reads text only.]") for part, word, told in UNREAD)],
)
def test_a_part_that_cannot_be_read_is_said_to_be_missing(part: dict[str, Any], wanted: str) -> None:
    assert content_text([{"type": "text", "text": "See:"}, part], "messages[0]") == f"See:\n{wanted}"


@pytest.mark.parametrize("part", [7, "a", {}, {"type": 3}, {"type": "smell"}, {"type": "text"}, {"type": "text", "text": 1}])
def test_what_is_no_part_is_refused(part: Any) -> None:
    with pytest.raises(RequestError, match="texts only"):
        content_text([part], "messages[0]")
