"""Prompts for measurements: fields of JSON-lines files, raw or in chat form."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuspec.errors import ConfigError, in_one_line
from cpuspec.text import Tokenizer

Prompt = str | list[dict[str, str]]  # a raw text, or a conversation

# What the user of a conversation says, with the field's text in the braces.
CHAT_FORMS: Mapping[str, str] = {
    "chat": "{}",
    "complete": "Complete this function. Answer with the whole function.\n\n```python\n{}\n```",
}
_CHARACTERS_OF_A_TOKEN = 32  # at most, so that a long file is not encoded for its beginning
_SHAPE = f"wanted FILE:FIELD:COUNT, and for conversations :{' or :'.join(CHAT_FORMS)} after it"


@dataclass(frozen=True)
class PromptSet:
    """Prompts that are measured together."""

    name: str
    prompts: tuple[Prompt, ...]


def read_prompts(text: str) -> PromptSet:
    """The prompts that FILE:FIELD:COUNT names: a field of the first lines of a JSON-lines file (of a list, its first text).

    They are raw, or with one of CHAT_FORMS at the end (FILE:FIELD:COUNT:chat) what a user says. Raises ConfigError.
    """
    file, _, form = text.rpartition(":")
    if form not in CHAT_FORMS:
        file, form = text, ""
    path, field, count = [*file.rsplit(":", 2), "", ""][:3]
    number = read_count(count, text, _SHAPE)
    lines = [line for line in read_text(Path(path)).splitlines() if line.strip()]
    if len(lines) < number:
        raise ConfigError(f"{path} has {len(lines)} lines, and {text!r} asks for {number}")
    texts = [_field(line, field, f"{path}, line {i}") for i, line in enumerate(lines[:number], 1)]
    name = ":".join([Path(path).stem, *([form] if form else [])])
    said: list[Prompt] = [[{"role": "user", "content": CHAT_FORMS[form].replace("{}", one)}] if form else one for one in texts]
    return PromptSet(name, tuple(said))


def read_text_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """The first ids of a text file, given as FILE:TOKENS. Raises ConfigError where it has fewer."""
    path, _, count = text.rpartition(":")
    number = read_count(count, text, "wanted FILE:TOKENS")
    ids = tokenizer.encode(read_text(Path(path))[: number * _CHARACTERS_OF_A_TOKEN])[:number]
    if len(ids) < number:
        raise ConfigError(f"{path} has {len(ids)} tokens, and {text!r} asks for {number}")
    return ids


def prompt_ids(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, as the model wants to be asked."""
    return tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)


def read_count(count: str, text: str, wanted: str) -> int:
    if not (count.isascii() and count.isdigit() and 0 < len(count) < 7 and int(count)):
        raise ConfigError(f"cannot read the prompts {text!r}; {wanted}")
    return int(count)


def read_text(path: Path) -> str:
    """The text of a file. Raises ConfigError."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None


def parse_line(content: str | bytes, where: str) -> dict[str, Any]:
    """The JSON object of a line. Raises ConfigError, naming `where`."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {in_one_line(str(error))}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is not a JSON object")
    return value


def _field(line: str, field: str, where: str) -> str:
    record = parse_line(line, where)
    value = record.get(field)
    if isinstance(value, list) and value:
        value = value[0]
    if not (isinstance(value, str) and value):
        raise ConfigError(f"{where}: wanted a text in the field {field!r}, got {', '.join(record)}")
    return value
