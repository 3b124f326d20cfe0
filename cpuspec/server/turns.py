"""What chat templates take: turns, and tools.

Gemma's and Mistral's templates take one system message, first, and then user and assistant by turns. Agents do otherwise: Codex
begins with instructions, a developer's message and two messages of the user.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cpuspec.errors import TokenizerError
from cpuspec.server.parsing.calls import TOOL_FORMATS, ToolFormat, tool_format
from cpuspec.text import Tokenizer

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


@dataclass(frozen=True)
class ToolUse:
    """What a chat template does with tools.

    place: where it reads them: "variable", its variable `tools`; "message", a system message's `tools`, as Phi-4-mini's; "words":
    nowhere, so that words must tell of them. shows_calls: whether it shows the calls of earlier messages. role: "system", or "user"
    where it knows no system message. form: how the model writes calls, as the template teaches, or as these words do.
    """

    place: str
    shows_calls: bool
    role: str
    form: ToolFormat


_NAME = "cpuspec_probe"
_USER, _SYSTEM = {"role": "user", "content": "a"}, {"role": "system", "content": "b"}
_CALL = {"id": "abcdef123", "type": "function", "function": {"name": _NAME, "arguments": {"a": "b"}}}
_SAID: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_ANSWERED = {"role": "tool", "tool_call_id": "abcdef123", "name": "other", "content": "c"}


def tool_use(tokenizer: Tokenizer) -> ToolUse:
    """What the tokenizer's template for tools does with one, found out by rendering it."""
    form = tool_format(tokenizer.chat_template_for({"tools": True}))
    if not tokenizer.has_chat_template:
        return ToolUse("words", True, "system", form)

    def shows(*messages: Mapping[str, Any], name: str = _NAME) -> bool:
        parameters = {"type": "object", "properties": {"a": {"type": "string", "description": "a text"}}, "required": ["a"]}
        tools = [{"type": "function", "function": {"name": name, "description": "a tool", "parameters": parameters}}]
        given = [one | {"tools": json.dumps(tools)} if "tools" in one else one for one in map(dict, messages)]
        variables = {} if any("tools" in one for one in given) else {"tools": tools}
        try:
            return _NAME in tokenizer.apply_chat_template(given, variables=variables)
        except TokenizerError:  # it refuses such a conversation
            return False

    place = "words"
    if shows(_USER) or shows(_SYSTEM, _USER):
        place = "variable"
    elif shows(_SYSTEM | {"tools": ""}, _USER):
        place = "message"
    said = ([_USER, _SAID], [_USER, _SAID, _ANSWERED], [_SYSTEM, _USER, _SAID, _ANSWERED])
    knows_system = "system" in (tokenizer.chat_template or "") and shows(_SYSTEM | {"content": _NAME}, _USER, name="other")
    shows_calls = any(shows(*messages, name="other") for messages in said)
    form = form if place != "words" or form.channels else TOOL_FORMATS["json"]
    return ToolUse(place, shows_calls, "system" if knows_system else "user", form)
