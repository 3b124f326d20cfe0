"""Conversations for chat templates that are strict about turns. Gemma's and Mistral's take one system message, first, and then user
and assistant by turns. Agents do otherwise: Codex begins with instructions, a developer's message and two messages of the user.
"""

from collections.abc import Mapping, Sequence
from typing import Any

_JOINED = ("system", "user", "assistant")


def in_turns(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with one system message, at its beginning, and no two messages of a user or an assistant in a row.

    A later system message becomes the user's. Texts are joined with an empty line.
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        last = found[-1] if found else None
        role = message["role"]
        if role == "system" and last is not None and last["role"] != "system":
            role = "user"
        if last is not None and last["role"] == role and role in _JOINED and "tool_calls" not in last:
            texts = "\n\n".join(filter(None, (last["content"], message["content"])))
            found[-1] = {**last, **message, "role": role, "content": texts}
        else:
            found.append({**message, "role": role})
    return found
