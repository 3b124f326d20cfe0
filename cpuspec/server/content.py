"""The parts of a message as one text, in the spellings of all protocols.

A part that a text model cannot read, such as an image, becomes a sentence that says so. Refusing the part would end a
conversation with an agent, which sends its whole history with each request.
"""

from collections.abc import Mapping
from typing import Any

from cpuspec.server.errors import RequestError

_SAYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "compaction": "content"}
_UNREADABLE = {  # parts by type, and the word for each
    **dict.fromkeys(("image", "image_url", "input_image", "image_file"), "image"),
    **dict.fromkeys(("document", "file", "input_file"), "document"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "recording"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}
_LONGEST_NAME = 200


def content_text(content: Any, where: str, left_out: set[str] | None = None) -> str:
    """A message's content as one text: text itself, or the texts of its parts, each on lines of its own.

    left_out: gets a word for each kind of part that the model cannot read. Raises RequestError for what is no content.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a text or a list of parts", "messages")
    return "\n".join(_part_text(part, where, set() if left_out is None else left_out) for part in content)


def reasoning_text(message: Mapping[str, Any]) -> str:
    """An earlier message's reasoning, under the names that servers give it: vLLM's, DeepSeek's, Ollama's and OpenRouter's."""
    for name in ("reasoning_content", "reasoning", "thinking"):
        if isinstance(message.get(name), str) and message[name]:
            return str(message[name])
    details = message.get("reasoning_details")
    parts = [part for part in details if isinstance(part, Mapping)] if isinstance(details, list) else []
    return "\n".join(str(part.get("text") or part.get("summary") or "") for part in parts).strip("\n")


def _part_text(part: Any, where: str, left_out: set[str]) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text: Any = None
    if isinstance(part, Mapping) and isinstance(kind, str):
        if kind in _UNREADABLE:
            text = _document_text(part, where, left_out)
            return _placeholder(part, _UNREADABLE[kind], left_out) if text is None else text
        if kind == "tool_reference":
            text = part.get("tool_name")
        elif kind == "search_result":
            head = [str(part[name]) for name in ("title", "source") if part.get(name)]
            text = "\n".join([*head, content_text(part.get("content"), where, left_out)])
        elif kind in _SAYS:
            text = part.get(_SAYS[kind])
    if not isinstance(text, str):
        raise RequestError(f"{where}.content has a part of type {str(kind)[:40]!r}; this model takes texts only", "messages")
    return text


def _document_text(part: Mapping[str, Any], where: str, left_out: set[str]) -> str | None:
    """The text of one of Anthropic's documents; None for a part without a text."""
    source = part.get("source")
    if part["type"] != "document" or not isinstance(source, Mapping):
        return None
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        return str(source["data"])
    return content_text(source.get("content"), where, left_out) if source.get("type") == "content" else None


def _placeholder(part: Mapping[str, Any], word: str, left_out: set[str]) -> str:
    """The sentence for a part that cannot be read, with the part's name, address or type and its size, as far as they are known."""
    left_out.add(word)
    holders = [part, *(one for name in ("source", part["type"]) if isinstance(one := part.get(name), Mapping))]
    texts = {name: one for holder in holders for name, one in holder.items() if isinstance(one, str)}
    known = [
        _address(texts.get(name, "")) for name in ("filename", "title", "url", "image_url", "file_url", "media_type", "format")
    ]
    data = max((texts.get(name, "") for name in ("data", "file_data", "url", "image_url")), key=len)
    size = f"{len(data) * 3 // 4000 + 1} kB" if data and not data.startswith("http") else ""
    said = ", ".join(dict.fromkeys(filter(None, (*known, size))))
    return f"[The {word} here was left out{f' ({said})' if said else ''}: this model reads text only.]"


def _address(text: str) -> str:
    """A name or an address as it is shown; an address that holds data is shown as their type."""
    return text.partition(";")[0].partition(",")[0].removeprefix("data:") if text.startswith("data:") else text[:_LONGEST_NAME]
