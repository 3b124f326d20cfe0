"""The ways in which models write answers. A row of TOOL_FORMATS is everything about the tool calls of one family.

Sources: the chat templates of Qwen2.5, Qwen3, Hermes 2 Pro, Granite 4 and Falcon-H1 (whose marks hold a list); Llama 3.1's model
card ("JSON based tool calling"); mistral-common's instruct tokenizers (v3 and v11); Gemma's guide to function calling; llama.cpp
23029 for Nemotron Nano 2; OpenAI's harmony guide; Phi-4-mini's model card; see also `converted.py`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cpuspec.server.parsing.converted import (
    Syntax,
    deepseek_items,
    from_argument_tags,
    from_deepseek,
    from_gemma,
    from_invocation,
    from_json,
    from_python,
    from_xml,
    invocations,
    json_items,
    python_items,
    xml_items,
)
from cpuspec.text.reasoning import CHANNELS

_JSON = Syntax(from_json, json_items, "{[`", is_value=True)
_NAMED = Syntax(from_json, json_items, "{[`", is_value=True, is_named=True)
_PYTHON = Syntax(from_python, python_items, "{[", is_named=True)
_XML = Syntax(from_xml, xml_items, "{[<", is_quoted=False)
_TAGS = Syntax(from_argument_tags, json_items, "{[", is_quoted=False, is_named=True)
_GEMMA = Syntax(from_gemma, json_items, "{[c")
_DEEPSEEK = Syntax(from_deepseek, deepseek_items, "<")
_INVOCATIONS = Syntax(from_invocation, invocations, "{[<", is_quoted=False)


@dataclass(frozen=True)
class ToolFormat:
    """How a family writes calls. A demanded call is written in JSON even if the model's own calls are not, unless `tagged`."""

    name: str
    syntax: Syntax
    # Pairs of marks around calls. The first pair is the model's own; "" where it has none. Many vocabularies have tokens for it.
    marks: tuple[tuple[str, str], ...]
    opens: str = '{"name": "'  # the text of a demanded call between the mark and the function's name
    arguments: str = '", "arguments": '  # the text between the name and the arguments
    closes: str = "}"  # the shortest text that ends a call
    bare: bool = False  # whether a call may be an object of JSON without a mark, at a line's beginning or in a fence
    id_chars: int = 24  # the length of a call's id
    channels: bool = False  # whether the answer is in channels (`AnswerParser`)
    tagged: bool = False  # whether arguments that keep to a grammar are written in XML's tags, if their schema allows it
    python: bool = False  # whether calls are written in Python

    @property
    def mark(self) -> str:
        """The text that begins a call, "" where a call is bare JSON."""
        return self.marks[0][0]

    @property
    def ends(self) -> str:
        """The mark that ends a call, "" where none does."""
        return self.marks[0][1]

    def written(self, calls: Iterable[tuple[str, Any]]) -> str:
        """The text of calls, as the model writes them, for templates that leave earlier calls out."""
        if self.python:
            said = ", ".join(f"{name}({', '.join(f'{key}={value!r}' for key, value in _items(given))})" for name, given in calls)
            return f"{self.mark}[{said}]{self.ends}"
        return "\n".join(
            f"{self.mark}{self.head(name)}{json.dumps(given, ensure_ascii=False)}{self.closes}{self.ends}" for name, given in calls
        )

    @property
    def begins(self) -> str:
        """The text that begins a call of any function."""
        return self.mark if self.tagged else self.mark + self.opens

    def head(self, name: str, in_tags: bool = False) -> str:
        """A call's text between its mark and the arguments."""
        return f"\n<function={name}>\n" if in_tags else self.opens + name + self.arguments


def _items(arguments: Any) -> Iterable[tuple[str, Any]]:
    return arguments.items() if isinstance(arguments, Mapping) else [("arguments", arguments)]


_TOOL_CALL = ("<tool_call>", "</tool_call>")
_FUNCTION = ("<function=", "</function>")  # of models that forget the marks around it
_DSML = tuple((f"<｜DSML｜{name}>", f"</｜DSML｜{name}>") for name in ("function_calls", "tool_calls"))
_LINE, _LIST = '\n{"name": "', '[{"name": "'
_WITH_PARAMETERS: Any = {"arguments": '", "parameters": ', "bare": True}

# A row begins with its name, its syntax and its marks.
TOOL_FORMATS = {
    row.name: row
    for row in (
        # Small models, as Qwen2.5-Coder, often forget the mark or write a fence instead.
        ToolFormat("hermes", _JSON, (_TOOL_CALL,), _LINE, bare=True),
        ToolFormat("mistral", _NAMED, (("[TOOL_CALLS]", ""),), _LIST, closes="}]", id_chars=9),  # its template refuses others
        ToolFormat("llama3", _JSON, (("", ""), ("<|python_tag|>", ""), ("<|python_start|>", "<|python_end|>")), **_WITH_PARAMETERS),
        ToolFormat("json", _JSON, (("", ""),), **_WITH_PARAMETERS),
        ToolFormat("qwen3_coder", _XML, (_TOOL_CALL, _FUNCTION), _LINE, tagged=True),
        ToolFormat("seed", _XML, (("<seed:tool_call>", "</seed:tool_call>"), _TOOL_CALL, _FUNCTION), _LINE, tagged=True),
        ToolFormat("glm", _TAGS, (_TOOL_CALL,)),
        # Its template does not show how a call is written, so the model writes bare JSON at times.
        ToolFormat("lfm2", _PYTHON, (("<|tool_call_start|>", "<|tool_call_end|>"),), _LIST, closes="}]", bare=True, python=True),
        ToolFormat("olmo3", _PYTHON, (("<function_calls>", "</function_calls>"),), _LIST, closes="}]", bare=True, python=True),
        ToolFormat("nemotron2", _JSON, (("<TOOLCALL>", "</TOOLCALL>"),), _LIST, closes="}]"),
        ToolFormat("hunyuan", _JSON, (("<tool_calls>", "</tool_calls>"),), _LIST, closes="}]"),
        ToolFormat("gemma4", _GEMMA, (("<|tool_call>", "<tool_call|>"),)),
        ToolFormat("granite", _NAMED, (("<|tool_call|>", ""), _TOOL_CALL), _LIST, closes="}]", bare=True),
        ToolFormat("phi4", _NAMED, (("<|tool_call|>", "<|/tool_call|>"), ("functools", "")), _LIST, closes="}]", bare=True),
        ToolFormat(
            "command",
            _JSON,
            (("<|START_ACTION|>", "<|END_ACTION|>"),),
            '[{"tool_call_id": "0", "tool_name": "',
            '", "parameters": ',
            closes="}]",
        ),
        ToolFormat(
            "deepseek",
            _DEEPSEEK,
            (("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),),
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json\n",
            closes="\n```<｜tool▁call▁end｜>",
        ),
        ToolFormat("dsml", _INVOCATIONS, _DSML, _LIST, closes="}]"),
        ToolFormat(
            "harmony",
            _JSON,
            (("", ""),),
            "<|channel|>commentary to=functions.",
            " <|constrain|>json<|message|>",
            closes="",
            channels=True,
        ),
    )
}

# Marks in a chat template, and the format of calls that each stands for. The first mark that is found counts.
_TELLTALES = {
    CHANNELS: "harmony",
    "<seed:tool_call>": "seed",
    "<function=": "qwen3_coder",
    "<arg_key>": "glm",
    "<|tool_call_start|>": "lfm2",
    "<|tool_list_start|>": "lfm2",
    "List of tools: [": "lfm2",  # LFM2.5's, which shows no call
    "<function_calls>": "olmo3",
    "<TOOLCALL>": "nemotron2",  # Nemotron Nano 2
    "<tool_calls>": "hunyuan",
    "<|tool_call>": "gemma4",
    "<|/tool_call|>": "phi4",
    "<|/tool|>": "phi4",  # Phi-4-mini's, which shows no call
    "<|tool_call|>": "granite",
    "<|START_ACTION|>": "command",
    "｜DSML｜": "dsml",
    "<｜tool▁calls▁begin｜>": "deepseek",
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3",
    "<|python_start|>": "llama3",
    "ipython": "llama3",
}


def tool_format(template: str | None) -> ToolFormat:
    """The format that a chat template teaches. If it teaches none, "json", which `tool_instructions` describe."""
    template = template or ""
    found = next((name for mark, name in _TELLTALES.items() if mark in template), "json")
    # An answer in channels is one without tools, too. DeepSeek's template renders calls and takes no list of tools.
    return TOOL_FORMATS[found if "tools" in template or found == "harmony" else "json"]


def tool_instructions(tools: Sequence[Any]) -> str:
    """The text that describes tools to a model whose template has no place for them. Gemma's guide recommends the words."""
    functions = [tool["function"] for tool in tools]
    return (
        "You have access to functions. If you decide to invoke any of the function(s), you MUST put it in the format of\n"
        '{"name": function name, "parameters": dictionary of argument name and its value}\n\n'
        "You SHOULD NOT include any other text in the response if you call a function\n"
        f"{json.dumps(functions, ensure_ascii=False)}"
    )
