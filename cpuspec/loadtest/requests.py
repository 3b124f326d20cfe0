"""The requests of a load: from a JSON-lines file, or of random words; and the bodies that they become."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from cpuspec.errors import ConfigError, in_one_line
from cpuspec.loadtest.client import Client, ServerError

_MAX_LINE_BYTES = 64 << 20
COMPLETIONS, CHAT = "openai", "openai-chat"  # vLLM's names of the two protocols
PATHS: Mapping[str, str] = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"}
# Ordinary words, one token each for most vocabularies.
_WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state", "family"),
    *("student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system", "program", "work"),
    *("question", "number", "night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact", "month", "book"),
)


@dataclass(frozen=True)
class LoadRequest:
    """One request: a conversation, or else a text or token ids to continue. max_tokens: None as the load says."""

    prompt: str | list[int] = ""
    messages: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None

    def protocol(self, backend: str | None) -> str:
        """The protocol it is sent in: the one that was asked for, else the one that its content is made for."""
        return backend or (CHAT if self.messages else COMPLETIONS)

    def content(self, backend: str | None) -> dict[str, Any]:
        """The part of its body that says what is asked. Raises ConfigError where the protocol has no place for it."""
        if self.protocol(backend) == COMPLETIONS:
            if self.messages:
                raise ConfigError(f"a conversation cannot go to {PATHS[COMPLETIONS]}; use --backend {CHAT}")
            return {"prompt": self.prompt}
        if self.messages:
            return {"messages": list(self.messages)}
        if not isinstance(self.prompt, str):
            raise ConfigError(f"token ids cannot go to {PATHS[CHAT]}; use --backend {COMPLETIONS}")
        return {"messages": [{"role": "user", "content": self.prompt}]}


def read_requests(path: Path, count: int) -> list[LoadRequest]:
    """The first `count` lines of a JSON-lines file, each with `prompt` or `messages`, perhaps with `output_tokens`.

    A line may have `max_tokens` instead, or be one of OpenAI's batch format. A file with fewer is read over again from its
    beginning. Raises ConfigError.
    """
    found: list[LoadRequest] = []
    try:
        with path.open("rb") as file:
            number = 0
            while len(found) < count and (line := file.readline(_MAX_LINE_BYTES)):
                number += 1
                if line.strip():
                    found.append(_request(line, f"{path}, line {number}"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    if not found:
        raise ConfigError(f"{path} has no requests; wanted lines with a prompt or messages")
    return list(islice(cycle(found), count))


def _request(line: bytes, where: str) -> LoadRequest:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {in_one_line(str(error))}") from None
    body = value.get("body", value) if isinstance(value, dict) else None  # OpenAI's batch files have it in a body
    if not isinstance(body, dict):
        raise ConfigError(f"{where}: wanted an object with prompt or messages")
    prompt, messages = body.get("prompt"), body.get("messages")
    talk = messages if isinstance(messages, list) and all(isinstance(message, dict) for message in messages) else []
    ids = prompt if isinstance(prompt, list) and all(type(token) is int for token in prompt) else []
    if not (talk or ids or isinstance(prompt, str)):
        raise ConfigError(
            f"{where}: wanted prompt, a text or token ids, or messages, a list of objects; got {', '.join(body)[:80]}"
        )
    most = next(
        (body[name] for name in ("output_tokens", "max_tokens", "max_completion_tokens") if body.get(name) is not None), None
    )
    if most is not None and (type(most) is not int or most < 1):
        raise ConfigError(f"{where}: the tokens of an answer must be a whole number from 1 on; got {in_one_line(repr(most))}")
    return LoadRequest("", tuple(talk), most) if talk else LoadRequest(prompt if isinstance(prompt, str) else ids, (), most)


async def random_requests(
    client: Client, count: int, num_tokens: int, num_prefix_tokens: int, seed: int, backend: str | None
) -> list[LoadRequest]:
    """Prompts of random words that have `num_tokens` tokens each, after `num_prefix_tokens` that all of them share.

    The server's own `/tokenize` counts, as cpuspec and llama-server have it. Token ids go to `/v1/completions`; texts, which the
    chat template makes longer, to chat. Raises ConfigError for a server without it.
    """
    rng = random.Random(seed)
    try:
        prefix = await _random_ids(client, rng, num_prefix_tokens)
        prompts = [prefix + await _random_ids(client, rng, num_tokens) for _ in range(count)]
        if backend != CHAT:
            return [LoadRequest(prompt) for prompt in prompts]
        replies = [await client.post_json("/detokenize", {"tokens": prompt}) for prompt in prompts]
        return [LoadRequest(reply["content"]) for reply in replies]
    except (ServerError, LookupError, TypeError) as error:
        raise ConfigError(
            f"random prompts need a server that has /tokenize as cpuspec and llama-server do, and this one said: "
            f"{in_one_line(str(error))}; give prompts with --dataset-path"
        ) from None


async def _random_ids(client: Client, rng: random.Random, num_tokens: int) -> list[int]:
    if not num_tokens:
        return []
    words = " ".join(rng.choices(_WORDS, k=num_tokens))  # of a token or more each
    ids = (await client.post_json("/tokenize", {"content": f" {words}"}))["tokens"]
    return [int(token) for token in ids[:num_tokens]]
