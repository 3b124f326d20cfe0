"""Lines that agents put into system messages and change with each request, so that no prompt begins like the last one.

Keys and values can be used again only for the tokens with which both prompts begin. So a server may remove these lines before it
makes a prompt of the messages, if its user has asked for that. RULES has every rule with an example. Nothing else is ever removed,
and nothing from the messages of a user, an assistant or a tool.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

SYSTEM_ROLES = ("system", "developer")


class Rule(NamedTuple):
    """A line that is removed from system messages if all of it matches. source: where the line is described."""

    name: str
    agent: str
    line: re.Pattern[str]
    example: str
    source: str


RULES = (
    Rule(
        "billing-header",
        "Claude Code",
        re.compile(r"[ \t]*x-anthropic-billing-header:[^\n]*"),
        "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;",
        "ggml-org/llama.cpp pull request 20623",
    ),
    Rule(
        "tokens-left",
        "Claude Code",
        re.compile(r"[ \t]*<total_tokens>[ \t]*[\d,._]{1,20} tokens left[ \t]*</total_tokens>[ \t]*"),
        "<total_tokens>14999436 tokens left</total_tokens>",
        "ollama/ollama pull request 17918",
    ),
)


def without_changing_lines(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages without the lines of RULES. A system message, or a part of one, that is empty then is removed, too.

    Content is a text, or a list of parts of which those with a `text` are texts, as OpenAI and Anthropic have it.
    """
    kept = []
    for message in messages:
        if message.get("role") not in SYSTEM_ROLES:
            kept.append(dict(message))
            continue
        content = message.get("content")
        if isinstance(content, str):
            shorter: Any = without_lines(content)
        elif isinstance(content, list):
            shorter = _without_in_parts(content)
        else:
            shorter = content
        if shorter or shorter == content:
            kept.append({**message, "content": shorter})
    return kept


def without_lines(text: str) -> str:
    """A system message's text without the lines of RULES."""
    lines = text.splitlines(keepends=True)
    kept = [line for line in lines if not any(rule.line.fullmatch(line.rstrip("\r\n")) for rule in RULES)]
    return text if len(kept) == len(lines) else "".join(kept)


def _without_in_parts(parts: list[Any]) -> list[Any]:
    kept = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else None
        shorter = without_lines(text) if isinstance(text, str) else text
        if shorter or shorter == text:
            kept.append(part if shorter == text else {**part, "text": shorter})
    return kept
