"""Tool calls and JSON: how often answers are of the form that was asked for.

A line of the data has `messages` or `prompt`, and `tools` in OpenAI's spelling or `schema`, a JSON schema; with neither, any JSON
is valid. Of a schema are checked: type, enum, const, properties, required, additionalProperties, items.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuspec.errors import ConfigError
from cpuspec.evaluate.prompts import parse_line, read_text
from cpuspec.server.parsing.answer import answer_parser
from cpuspec.server.parsing.calls import tool_format, tool_instructions
from cpuspec.server.turns import tool_use
from cpuspec.text import Tokenizer

_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)(?:```|\Z)", re.DOTALL)
_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


@dataclass(frozen=True)
class FormLine:
    """A conversation, and the form that its answer shall have."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    schema: Any

    def prompt_ids(self, tokenizer: Tokenizer) -> list[int]:
        """The conversation with its tools, as the template wants them, or told in words where it has no place for them."""
        messages = [dict(message) for message in self.messages]
        if not self.tools:
            return tokenizer.encode_chat(messages)
        use = tool_use(tokenizer)
        if use.place == "variable":
            return tokenizer.encode_chat(messages, variables={"tools": list(self.tools)})
        return tokenizer.encode_chat([{"role": use.role, "content": tool_instructions(self.tools)}, *messages])


@dataclass(frozen=True)
class FormVerdict:
    """What an answer holds. Each field implies the ones before it: called, a known function, JSON arguments, fitting ones."""

    answered: bool  # a tool call was made or begun, or the text is JSON
    known: bool  # every call names a tool and can be read
    parses: bool  # every call's arguments are a JSON object
    fits: bool  # the schema holds


@dataclass(frozen=True)
class Validity:
    """Shares of the lines of one kind."""

    kind: str  # "tool calls" or "JSON"
    num_lines: int
    answered: float
    known: float
    parses: float
    fits: float


def read_forms(path: Path, limit: int | None = None) -> list[FormLine]:
    """The lines of a file. Raises ConfigError."""
    lines = [line for line in read_text(path).splitlines() if line.strip()][:limit]
    if not lines:
        raise ConfigError(f"{path} has no lines left; wanted objects with messages or prompt, and tools or schema")
    return [_form(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def judge_form(line: FormLine, text: str, template: str | None, thinking: bool = False) -> FormVerdict:
    """Whether an answer has the form. text: all of it, reasoning included, with the names of control tokens that were shown."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in line.tools}
    parser = answer_parser(template, schemas, thinking)
    content, calls = "", list[list[str]]()
    for piece in [*parser.push(text), *parser.finish()]:
        match piece.kind:
            case "content":
                content += piece.text
            case "call":
                calls.append([piece.text, ""])
            case "arguments":
                calls[-1][1] += piece.text
    if not schemas:
        value = _parsed(content)
        return FormVerdict(
            value is not None, value is not None, value is not None, value is not None and fits(value[0], line.schema)
        )
    values = [json_object(arguments) for _, arguments in calls]
    known = bool(calls) and all(name in schemas for name, _ in calls)
    parses = known and all(value is not None for value in values)
    fit = parses and all(fits(value, schemas[name]) for (name, _), value in zip(calls, values, strict=True))
    mark = tool_format(template).mark
    return FormVerdict(bool(calls) or bool(mark and mark in content), known, parses, fit)


def validity_by_kind(lines: Sequence[FormLine], verdicts: Sequence[FormVerdict]) -> list[Validity]:
    """The shares of lines with tools and of those without."""
    found = []
    for kind, with_tools in (("tool calls", True), ("JSON", False)):
        some = [verdict for line, verdict in zip(lines, verdicts, strict=True) if bool(line.tools) == with_tools]
        if some:
            shares = [sum(getattr(one, name) for one in some) / len(some) for name in ("answered", "known", "parses", "fits")]
            found.append(Validity(kind, len(some), *shares))
    return found


def fits(value: Any, schema: Any) -> bool:
    """Whether a value keeps to what is checked of a schema."""
    if not isinstance(schema, dict):
        return schema is not False
    kinds = schema.get("type")
    if kinds is not None:
        listed = kinds if isinstance(kinds, list) else [kinds]
        if not any(
            isinstance(value, _TYPES.get(kind, ())) and not (isinstance(value, bool) and kind != "boolean") for kind in listed
        ):
            return False
    if ("enum" in schema and value not in schema["enum"]) or ("const" in schema and value != schema["const"]):
        return False
    if isinstance(value, dict):
        properties, others = schema.get("properties") or {}, schema.get("additionalProperties", True)
        return all(name in value for name in schema.get("required") or ()) and all(
            fits(one, properties.get(name, others)) for name, one in value.items()
        )
    return not isinstance(value, list) or all(fits(one, schema.get("items", True)) for one in value)


def _parsed(content: str) -> tuple[Any] | None:
    """The JSON that an answer is, or that its first fence holds, in a tuple."""
    for text in (content, *_FENCE.findall(content)[:1]):
        try:
            return (json.loads(text),)
        except (ValueError, RecursionError):
            continue
    return None


def json_object(text: Any) -> dict[str, Any] | None:
    """The arguments of a call. None where they are not a JSON object; NaN and Infinity are not JSON."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        found = json.loads(text, parse_constant=refuse)
    except (ValueError, TypeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _form(line: str, where: str) -> FormLine:
    found = parse_line(line, where)
    messages = found.get("messages") or ([{"role": "user", "content": found["prompt"]}] if found.get("prompt") else [])
    tools = found.get("tools") or []
    if not (isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages)):
        raise ConfigError(f"{where}: wanted messages, a list of objects, or prompt, a text")
    for tool in tools if isinstance(tools, list) else [None]:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ConfigError(f"{where}: each of tools must be an object with function, and that with name")
    return FormLine(tuple(messages), tuple(tools), found.get("schema"))
