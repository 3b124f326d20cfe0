"""Tools of `cpuspec chat`: a function of the user's own Python file, which the model may call."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cpuspec.errors import ConfigError
from cpuspec.speculation.drafters.user import imported, is_import_path

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


@dataclass(frozen=True)
class Tool:
    """A function that a model may call. parameters: the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., Any]

    @property
    def declaration(self) -> dict[str, Any]:
        """The tool in OpenAI's form, which chat templates take."""
        told = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": told}

    def call(self, arguments: str) -> str:
        """The result for arguments that the model wrote as JSON, as text; an error of the function or of the arguments is told."""
        try:
            given = json.loads(arguments or "{}")
            result = self.function(**given)
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except Exception as error:  # of the user's function: the model is told, and may call it otherwise
            return f"error: {type(error).__name__}: {error}"


def open_tool(path: str) -> Tool:
    """The tool that FILE.py:FUNCTION or module:function names: its docstring and its annotations tell the model how to call it.

    Raises ConfigError where there is none.
    """
    if not is_import_path(path):
        raise ConfigError(f"a tool is a function of a Python file, as tools.py:weather; got {path[:80]!r}")
    function = imported(path)
    name = path.rpartition(":")[2]
    try:
        declared = inspect.signature(function, eval_str=True).parameters.values()
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(f"the parameters of {path} cannot be read: {error}") from error
    if odd := [one.name for one in declared if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY)]:
        raise ConfigError(f"{path} takes {odd[0]}, which no call can name; wanted parameters with names")
    kinds = {one.name: _TYPES.get(getattr(one.annotation, "__origin__", one.annotation)) for one in declared}
    schema = {
        "type": "object",
        "properties": {name: {"type": kind} if kind else {} for name, kind in kinds.items()},
        "required": [one.name for one in declared if one.default is one.empty],
    }
    return Tool(name, inspect.getdoc(function) or "", schema, function)
