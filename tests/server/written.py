"""Answers with tool calls, written at random as each family writes them, with what they hold; and answers that are damaged."""

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from cpuspec.server.parsing.calls import TOOL_FORMATS

Call = tuple[str, dict[str, Any]]

FUNCTIONS: Mapping[str, Mapping[str, Any]] = {
    "write_file": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}, "mode": {"type": "integer"}},
    },
    "run": {
        "type": "object",
        "properties": {"command": {"type": "string"}, "flags": {"type": "array"}, "now": {"type": "boolean"}},
    },
    "look-up": {"type": "object", "properties": {"where": {"type": "object"}, "query": {"type": ["string", "null"]}}},
    "ping": {"type": "object", "properties": {}},
}


def as_json(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_xml(call: Call) -> str:
    parameters = "".join(f"<parameter={key}>\n{_raw(value)}\n</parameter>\n" for key, value in call[1].items())
    return f"<function={call[0]}>\n{parameters}</function>"


def as_tags(call: Call) -> str:
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{_raw(value)}</arg_value>\n" for key, value in call[1].items())
    return f"{call[0]}\n{pairs}"


def as_python(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{key}={value!r}' for key, value in call[1].items())})"


def as_gemma(call: Call) -> str:
    def value_of(value: Any) -> str:
        if isinstance(value, str):
            return f'<|"|>{value}<|"|>'
        if isinstance(value, list):
            return f"[{','.join(map(value_of, value))}]"
        if isinstance(value, dict):
            return f"{{{','.join(f'{key}:{value_of(one)}' for key, one in value.items())}}}"
        return json.dumps(value)

    return f"call:{call[0]}{value_of(call[1])}"


def as_invocation(call: Call) -> str:
    values = "".join(
        f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{_raw(value)}</｜DSML｜parameter>\n'
        for key, value in call[1].items()
    )
    return f'<｜DSML｜invoke name="{call[0]}">\n{values}</｜DSML｜invoke>'


def _each(begin: str, write: Callable[[Call], str], end: str, between: str = "\n") -> Callable[[list[Call]], str]:
    return lambda calls: between.join(f"{begin}{write(call)}{end}" for call in calls)


def _listed(begin: str, write: Callable[[Call], str], end: str, between: str = ", ") -> Callable[[list[Call]], str]:
    return lambda calls: f"{begin}{between.join(map(write, calls))}{end}"


def _as_deepseek(call: Call) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call[0]}\n```json\n{json.dumps(call[1])}\n```<｜tool▁call▁end｜>"


def _as_deepseek_31(call: Call) -> str:
    return f"<｜tool▁call▁begin｜>{call[0]}<｜tool▁sep｜>{json.dumps(call[1])}<｜tool▁call▁end｜>"


def _with_parameters(call: Call) -> str:
    return as_json(call, "parameters")


def _in_channel(call: Call) -> str:
    return (
        f"<|start|>assistant<|channel|>commentary to=functions.{call[0]} <|constrain|>json<|message|>{json.dumps(call[1])}<|call|>"
    )


# By row: the ways in which its models write several calls.
WAYS: Mapping[str, tuple[Callable[[list[Call]], str], ...]] = {
    "hermes": (
        _each("<tool_call>\n", as_json, "\n</tool_call>"),
        _each("<tool_call>", as_json, "</tool_call>", ""),
        _listed("<tool_call>\n[\n", as_json, "\n]\n</tool_call>"),
        _each("```json\n", as_json, "\n```"),
        _each("", as_json, ""),
    ),
    "mistral": (
        _listed("[TOOL_CALLS] [", as_json, "]"),
        _each("[TOOL_CALLS]", lambda call: f"{call[0]}[ARGS]{json.dumps(call[1])}", "", ""),
        _each("[TOOL_CALLS]", lambda call: f"{call[0]}[CALL_ID]abc123def[ARGS]{json.dumps(call[1])}", "", ""),
    ),
    "llama3": (_each("", _with_parameters, "", "; "), _each("<|python_tag|>", _with_parameters, "")),
    "json": (_each("", _with_parameters, ""), _each("```json\n", _with_parameters, "\n```")),
    "qwen3_coder": (_each("<tool_call>\n", as_xml, "\n</tool_call>"), _each("", as_xml, "")),
    "seed": (_each("<seed:tool_call>\n", as_xml, "\n</seed:tool_call>"),),
    "glm": (_each("<tool_call>", as_tags, "</tool_call>"),),
    "lfm2": (_listed("<|tool_call_start|>[", as_python, "]<|tool_call_end|>"),),
    "olmo3": (_listed("<function_calls>\n", as_python, "\n</function_calls>", "\n"),),
    "nemotron2": (_listed("<TOOLCALL>[", as_json, "]</TOOLCALL>"),),
    "hunyuan": (_listed("<tool_calls>[", as_json, "]</tool_calls>"),),
    "gemma4": (_each("<|tool_call>", as_gemma, "<tool_call|>", ""),),
    "granite": (_listed("<|tool_call|>[", as_json, "]"), _listed("<tool_call>[", as_json, "]")),
    "phi4": (_listed("<|tool_call|>[", as_json, "]<|/tool_call|>"), _listed("functools[", as_json, "]")),
    "command": (
        _listed(
            "<|START_ACTION|>[\n",
            lambda call: json.dumps({"tool_call_id": "0", "tool_name": call[0], "parameters": call[1]}, ensure_ascii=False),
            "\n]<|END_ACTION|>",
        ),
    ),
    "deepseek": (
        _listed("<｜tool▁calls▁begin｜>", _as_deepseek, "<｜tool▁calls▁end｜>", "\n"),
        _listed("<｜tool▁calls▁begin｜>", _as_deepseek_31, "<｜tool▁calls▁end｜>", ""),
    ),
    "dsml": (_listed("<｜DSML｜function_calls>\n", as_invocation, "\n</｜DSML｜function_calls>", "\n"),),
    "harmony": (_each("", _in_channel, "", ""),),
}

WORDS = (
    *("I look.", "Now let me explain:\n\n  def f(x):", "*   Bananas\n*   Apples", "Größe 漢字 🙂", "a < b and [x] {y}"),
    "It's done.",
)
# Parts of values: quotes, brackets, marks of every row, lines, characters outside the basic plane.
PARTS = tuple(
    dict.fromkeys(
        (
            *(
                *("a", "It's", 'say "hi"', "\\n", "\\", "\n", "\t", "  ", "漢字", "🙂", "é", "{", "}", "[", "]", "(", ")", ","),
                *(":", "'", '"'),
            ),
            *("print('x')\n", '{"a": [1]}', "</b>", '<p class="x">', '"""', "```", "```json\n", "; ", "null", "True", "1.5"),
            *(mark for form in TOOL_FORMATS.values() for marks in form.marks for mark in marks if mark),
            *(
                *("<think>", "</think>", '{"name": "run", "arguments": {}}', "<parameter=a>", "</parameter>", "<arg_key>"),
                "</arg_value>",
            ),
            *("<｜tool▁call▁end｜>", "<|channel|>", "<|message|>", "<|end|>", '<|"|>'),
        )
    )
)


def random_text(random: Random, parts: tuple[str, ...] = PARTS) -> str:
    return "".join(random.choice(parts) for _ in range(random.randrange(6)))


def random_call(random: Random, parts: tuple[str, ...] = PARTS) -> Call:
    """A call that keeps to the schema of its function."""

    def one(kind: Any) -> Any:
        kind = random.choice(kind) if isinstance(kind, list) else kind
        return {
            "string": lambda: random_text(random, parts),
            "integer": lambda: random.randrange(-5, 1000),
            "boolean": lambda: random.random() < 0.5,
            "null": lambda: None,
            "array": lambda: [random_text(random, parts), 2.5, None, [True]][: random.randrange(5)],
            "object": lambda: {"k": random_text(random, parts), "deep": {"n": [1, {"x": random_text(random, parts)}]}},
        }[kind]()

    name = random.choice(list(FUNCTIONS))
    properties = FUNCTIONS[name]["properties"]
    keys = [key for key in properties if random.random() < 0.8]
    return name, {key: one(properties[key]["type"]) for key in keys}


def damaged(random: Random, text: str) -> str:
    """The text with some of its characters gone, doubled or replaced, or cut off."""
    for _ in range(random.randrange(4)):
        at, size = random.randrange(len(text) + 1), random.randrange(8)
        change = random.randrange(4)
        if change == 0:
            text = text[:at] + text[at + size :]
        elif change == 1:
            text = text[:at] + random.choice(PARTS) + text[at:]
        elif change == 2:
            text = text[: at + size] + text[at:]
        else:
            text = text[:at] if random.random() < 0.3 else text
    return text
