"""OpenAI's custom tools, which take a text: a model knows each as a function with one argument, `input`."""

import json
from collections.abc import Mapping
from typing import Any


def as_function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool of a chat; a custom one as the function that stands for it."""
    own = tool.get("custom") if tool.get("type") == "custom" else None
    return {"type": "function", "function": custom_function(own)} if isinstance(own, Mapping) else tool


def custom_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The function that stands for a custom tool. The format that its text shall have is described to the model."""
    form = tool.get("format")
    grammar = form.get("grammar", form) if isinstance(form, Mapping) else {}
    about = "The tool's input, as one text."
    if isinstance(grammar, Mapping) and isinstance(grammar.get("definition"), str):
        about += f" It keeps to this {grammar.get('syntax') or 'lark'} grammar:\n{grammar['definition']}"
    properties = {"input": {"type": "string", "description": about}}
    parameters = {"type": "object", "properties": properties, "required": ["input"]}
    return {"name": tool.get("name"), "description": tool.get("description"), "parameters": parameters}


def custom_input(arguments: str) -> str:
    """The text that a call of such a function gives; arguments of another shape, as of a call that was cut off, as they are."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return found["input"] if isinstance(found, dict) and isinstance(found.get("input"), str) else arguments
