"""The key of a conversation. Requests with the same key go to the same replica, whose prefix cache holds the earlier turns."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_MOST_CHARS = 256  # of a text that may grow at its end, such as a file
_MOST_TOKENS = 64


def conversation_key(body: bytes) -> str:
    """The key of a request's body: the same for all turns of a conversation; empty for a body without a prompt.

    The key of a conversation is made of its first message from a user, that of a plain prompt or a file of its beginning. System
    messages are left out: agents change some of their lines, and every replica has an agent's after its first conversation.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    begins = _beginning(value) if isinstance(value, dict) else None
    return hashlib.sha256(json.dumps(begins).encode()).hexdigest()[:32] if begins else ""


def _beginning(body: Mapping[str, Any]) -> Any:
    """The part of a body that stays the same while its conversation grows."""
    for name in ("messages", "input"):
        turns = body.get(name)
        if isinstance(turns, str):
            return _text(turns)
        if isinstance(turns, list):
            users = (turn for turn in turns if isinstance(turn, dict) and turn.get("role") == "user")
            return _text(next(users, {}).get("content"))
    prompt = body.get("prompt") or body.get("input_prefix") or body.get("content")
    while isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]  # of several prompts the first
    return prompt[: _MOST_CHARS if isinstance(prompt, str) else _MOST_TOKENS] if isinstance(prompt, str | list) else None


def _text(content: Any) -> str:
    """A message's text; clients may send a text or parts of it for the same message."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
