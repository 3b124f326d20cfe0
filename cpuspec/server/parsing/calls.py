"""The ways in which models write answers. A row of TOOL_FORMATS is everything about the tool calls of one of them.

Sources: the chat templates of Qwen2.5, Qwen3, Hermes 2 Pro, Granite 4 and Falcon-H1 (whose marks hold a list); Llama 3.1's model
card ("JSON based tool calling"); mistral-common's instruct tokenizers (v3 and v11); Gemma's guide to function calling; llama.cpp
23029 for Nemotron Nano 2; see also `converted.py` and `channels.py`.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cpuspec.server.parsing import converted
from cpuspec.server.parsing.call_reader import CallReader, ValueEnd
from cpuspec.server.parsing.converted import ConvertedCalls, Functions
from cpuspec.server.parsing.pieces import SPACE, Parser, Piece, decided, settled


def _read_call(reader: CallReader, text: str, number: int, pieces: list[Piece]) -> str:
    """Read a text as more of the call with this number, add what is new to the pieces, and return the text after the call."""
    had_begun = reader.begun
    taken, arguments = reader.push(text)
    if reader.begun and not had_begun:
        pieces.append(Piece("call", reader.name, number))
    pieces.append(Piece("arguments", arguments, number))
    return text[taken:]


class MarkedCalls:
    """Calls after a mark, as `<tool_call>{...}</tool_call>` and `[TOOL_CALLS][{...}, {...}]`, with text before and between them.

    One pair of marks may hold a list. White space beside a call is dropped. named: a call may also be written as `NAME[ARGS]{...}`.
    """

    def __init__(self, opens: str, closes: str, named: bool = False) -> None:
        self.num_calls = 0
        self._opens = opens
        self._closes = closes
        self._named = named
        self._state = "content"
        self._in_list = False
        self._pending = ""  # undecided text
        self._before_call = ""  # the mark, white space and the bracket of a list
        self._reader = CallReader()
        self._arguments = ValueEnd()

    def push(self, text: str) -> list[Piece]:
        """See `Parser`."""
        self._pending += text
        return decided(self._step)

    def finish(self) -> list[Piece]:
        """See `Parser`. A call that broke off before its name was known is content."""
        rest = self._pending
        if self._state == "before":
            rest = self._opens + rest
        elif self._state == "call" and not self._reader.begun:
            rest = self._before_call + self._reader.raw + rest
        elif self._state != "content":
            rest = ""  # a closing mark that broke off
        self._pending, self._state = "", "content"
        return [Piece("content", rest)] if rest.strip(SPACE) or not self.num_calls else []

    def _step(self, pieces: list[Piece]) -> bool:
        """Decide about some of the pending text; returns whether there may be more to decide."""
        match self._state:
            case "content":
                return self._content(pieces)
            case "before":
                return self._before(pieces)
            case "call":
                return self._call(pieces)
            case "arguments":
                return self._named_arguments(pieces)
            case "between":
                self._pending = self._pending.lstrip(SPACE)
                self._state = "content" if self._pending else "between"
                return bool(self._pending)
        return self._after()

    def _content(self, pieces: list[Piece]) -> bool:
        text = self._pending
        at = text.find(self._opens)
        if at >= 0:
            pieces.append(Piece("content", text[:at].rstrip(SPACE)))
            self._pending, self._state, self._in_list = text[at + len(self._opens) :], "before", False
            return True
        sure = settled(text, self._opens)
        pieces.append(Piece("content", sure))
        self._pending = text[len(sure) :]
        return False

    def _before(self, pieces: list[Piece]) -> bool:
        text = self._pending.lstrip(SPACE)
        bracket = not self._in_list and text.startswith("[")
        if bracket:
            text = text[1:].lstrip(SPACE)
        if not text:
            return False
        if text[0] == "{":
            self._before_call = self._opens + self._pending.removesuffix(text)
            self._pending, self._reader, self._state = text, CallReader(), "call"
            self._in_list |= bracket
            return True
        if not self._named:
            self._not_a_call(pieces, self._opens + self._pending)
            return True
        head, brace, _ = self._pending.partition("{")
        if not brace:
            return False
        if name := head.partition("[")[0].strip(SPACE):
            pieces.append(Piece("call", name, self.num_calls))
            self.num_calls += 1
            self._pending, self._arguments, self._state = self._pending[len(head) :], ValueEnd(), "arguments"
        else:
            self._not_a_call(pieces, self._opens + self._pending)
        return True

    def _call(self, pieces: list[Piece]) -> bool:
        reader, number = self._reader, self.num_calls - self._reader.begun
        self._pending = _read_call(reader, self._pending, number, pieces)
        self.num_calls = number + reader.begun
        if reader.failed:
            self._not_a_call(pieces, self._before_call + reader.raw + self._pending)
            return True
        if reader.done:
            self._state = "after"
        return reader.done

    def _named_arguments(self, pieces: list[Piece]) -> bool:
        for taken, char in enumerate(self._pending, 1):
            self._arguments.includes(char)
            if self._arguments.done:
                pieces.append(Piece("arguments", self._pending[:taken], self.num_calls - 1))
                self._pending, self._state = self._pending[taken:], "after"
                return True
        pieces.append(Piece("arguments", self._pending, self.num_calls - 1))
        self._pending = ""
        return False

    def _after(self) -> bool:
        """Behind a call: its closing mark, or another call of a list."""
        text = self._pending.lstrip(SPACE)
        if text.startswith(self._closes):
            self._pending, self._state = text[len(self._closes) :], "between"
            return True
        if self._closes.startswith(text):
            return False
        if self._in_list and text[0] == "]":
            self._pending, self._in_list = text[1:], False
            return True
        if self._in_list and text[0] == ",":
            if not text[1:].lstrip(SPACE):
                return False
            self._pending, self._state = text[1:], "before"
            return True
        self._pending, self._state = text, "between"
        return True

    def _not_a_call(self, pieces: list[Piece], text: str) -> None:
        # The mark goes out at once, so that it is not found again.
        pieces.append(Piece("content", self._opens))
        self._pending, self._state = text[len(self._opens) :], "content"


class BareCalls:
    """An answer that is nothing but calls: JSON objects, perhaps after a mark or in a fence, with ; or , between them.

    An object that names none of the functions is no call. It and all text after it go to `rest`; without `rest` they are content.
    """

    def __init__(self, names: Collection[str], marks: Sequence[str], rest: Parser | None = None) -> None:
        self._names = names
        self._marks = marks
        self._rest = rest
        self._num_own = 0
        self._state = "start"
        self._skipped = ""  # marks and white space before a call
        self._pending = ""
        self._reader = CallReader(names)

    @property
    def num_calls(self) -> int:
        """See `Parser`."""
        return self._num_own + (self._rest.num_calls if self._rest else 0)

    def push(self, text: str) -> list[Piece]:
        """See `Parser`."""
        self._pending += text
        return decided(self._step)

    def finish(self) -> list[Piece]:
        """See `Parser`. A call that broke off before its name was known is content."""
        broken_off = self._state == "call" and not self._reader.begun
        text = self._skipped + (self._reader.raw if broken_off else "") + self._pending
        self._pending, self._skipped, self._state = "", "", "content"
        # Separators after a call are dropped.
        pieces = self._others(text) if not self._num_own or text.strip(SPACE + ";,[]`") else []
        return pieces + (self._numbered(self._rest.finish()) if self._rest else [])

    def _step(self, pieces: list[Piece]) -> bool:
        match self._state:
            case "start":
                return self._start(pieces)
            case "call":
                return self._call(pieces)
        pieces += self._others(self._pending)
        self._pending = ""
        return False

    def _others(self, text: str) -> list[Piece]:
        """The text that is not part of a bare call."""
        return self._numbered(self._rest.push(text)) if self._rest else [Piece("content", text)]

    def _numbered(self, pieces: list[Piece]) -> list[Piece]:
        return [
            replace(piece, call=piece.call + self._num_own) if piece.kind in ("call", "arguments") else piece for piece in pieces
        ]

    def _start(self, pieces: list[Piece]) -> bool:
        text = self._pending
        if not text:
            return False
        found = next((mark for mark in self._marks if text.startswith(mark)), "")
        separators = SPACE + ";,[]" if self._num_own else SPACE + "["
        if any(mark.startswith(text) and mark != text for mark in self._marks):
            return False
        if found or text[0] in separators:
            size = len(found) or 1
            self._skipped, self._pending = self._skipped + text[:size], text[size:]
            return True
        if text[0] == "{":
            self._reader, self._state = CallReader(self._names), "call"
            return True
        self._no_call(text)
        return True

    def _call(self, pieces: list[Piece]) -> bool:
        reader, number = self._reader, self._num_own - self._reader.begun
        self._pending = _read_call(reader, self._pending, number, pieces)
        self._num_own = number + reader.begun
        if reader.begun:
            self._skipped = ""
        if reader.failed:
            self._no_call(reader.raw + self._pending)
            return True
        if reader.done:
            self._state = "start"
        return reader.done

    def _no_call(self, text: str) -> None:
        skipped = "" if self._num_own else self._skipped
        self._skipped, self._pending, self._state = "", skipped + text, "content"


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls. A demanded call is written in JSON even if the model's own calls are not, unless `tagged`."""

    name: str
    parser: Callable[[Functions], Parser]  # makes the parser of one answer from the functions' schemas
    mark: str  # the text that begins a call, "" where a call is bare JSON; many vocabularies have a token for it
    opens: str  # the text of a demanded call between the mark and the function's name
    arguments: str  # the text between the name and the arguments
    closes: str = "}"  # the shortest text that ends a call
    id_chars: int = 24  # the length of a call's id
    channels: bool = False  # whether the answer is in channels (`ChannelParser`)
    ends: str = ""  # the mark that ends a call, of models that may forget to close their reasoning before a call
    tagged: bool = False  # whether arguments that keep to a grammar are written in XML's tags, if their schema allows it
    python: bool = False  # whether calls are written in Python

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

    @property
    def tag_closes(self) -> str:
        """As `closes`, of a call in tags."""
        return f"</function>\n{self.ends}"

    def head(self, name: str, in_tags: bool = False) -> str:
        """A call's text between its mark and the arguments."""
        return f"\n<function={name}>\n" if in_tags else self.opens + name + self.arguments


def _items(arguments: Any) -> Iterable[tuple[str, Any]]:
    return arguments.items() if isinstance(arguments, Mapping) else [("arguments", arguments)]


_FENCES = ("```json", "```xml", "```tool_call", "```tool_code", "```")
_CALLS_OF_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


def _converted(
    opens: str, closes: str, convert: converted.Convert, bare: tuple[str, str] | None = None
) -> Callable[[Functions], Parser]:
    return partial(ConvertedCalls, opens, closes, convert, bare=bare)


def _no_calls(functions: Functions) -> Parser:
    raise AssertionError("channels hold their calls")


# A row's text before a name and before arguments, where a call is an object of JSON.
_NAME, _ARGUMENTS = '{"name": "', '", "arguments": '

TOOL_FORMATS = {
    row.name: row
    for row in (
        ToolFormat(
            "hermes",
            # Small models, as Qwen2.5-Coder, often forget the mark or write a fence instead.
            lambda functions: BareCalls(functions, _FENCES, MarkedCalls("<tool_call>", "</tool_call>")),
            "<tool_call>",
            "\n" + _NAME,
            _ARGUMENTS,
            ends="</tool_call>",
        ),
        ToolFormat(
            "mistral",
            lambda functions: MarkedCalls("[TOOL_CALLS]", "]", named=True),
            "[TOOL_CALLS]",
            "[" + _NAME,
            _ARGUMENTS,
            id_chars=9,  # its template refuses others
        ),
        ToolFormat("llama3", lambda functions: BareCalls(functions, ("<|python_tag|>", *_FENCES)), "", _NAME, '", "parameters": '),
        ToolFormat("json", lambda functions: BareCalls(functions, _FENCES), "", _NAME, '", "parameters": '),
        ToolFormat(
            "qwen3_coder",
            _converted("<tool_call>", "</tool_call>", converted.from_xml, bare=("<function=", "</function>")),
            "<tool_call>",
            "\n" + _NAME,
            _ARGUMENTS,
            ends="</tool_call>",
            tagged=True,
        ),
        ToolFormat(
            "glm",
            _converted("<tool_call>", "</tool_call>", converted.from_argument_tags),
            "<tool_call>",
            _NAME,
            _ARGUMENTS,
            ends="</tool_call>",
        ),
        ToolFormat(
            "lfm2",
            # Its template does not show how a call is written, so the model writes bare JSON at times.
            lambda functions: BareCalls(
                functions, _FENCES, ConvertedCalls("<|tool_call_start|>", "<|tool_call_end|>", converted.from_python, functions)
            ),
            "<|tool_call_start|>",
            "[" + _NAME,
            _ARGUMENTS,
            closes="}]",
            ends="<|tool_call_end|>",
            python=True,
        ),
        ToolFormat(
            "nemotron2",
            _converted("<TOOLCALL>", "</TOOLCALL>", converted.from_json),
            "<TOOLCALL>",
            "[" + _NAME,
            _ARGUMENTS,
            closes="}]",
            ends="</TOOLCALL>",
        ),
        ToolFormat(
            "hunyuan",
            _converted("<tool_calls>", "</tool_calls>", converted.from_json),
            "<tool_calls>",
            "[" + _NAME,
            _ARGUMENTS,
            closes="}]",
        ),
        ToolFormat("gemma4", _converted("<|tool_call>", "<tool_call|>", converted.from_gemma), "<|tool_call>", _NAME, _ARGUMENTS),
        ToolFormat(
            "granite", lambda functions: MarkedCalls("<|tool_call|>", "]", named=True), "<|tool_call|>", "[" + _NAME, _ARGUMENTS
        ),
        ToolFormat(
            "command",
            _converted("<|START_ACTION|>", "<|END_ACTION|>", converted.from_json),
            "<|START_ACTION|>",
            '[{"tool_call_id": "0", "tool_name": "',
            '", "parameters": ',
            closes="}]",
        ),
        ToolFormat(
            "deepseek",
            _converted(*_CALLS_OF_DEEPSEEK, converted.from_deepseek),
            _CALLS_OF_DEEPSEEK[0],
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json\n",
            closes="\n```<｜tool▁call▁end｜>",
        ),
        ToolFormat(
            "harmony",
            _no_calls,
            "",
            "<|channel|>commentary to=functions.",
            " <|constrain|>json<|message|>",
            closes="",
            channels=True,
        ),
    )
}

# Marks in a chat template, and the format of calls that each stands for. The first mark that is found counts.
_TELLTALES = {
    "<|channel|>analysis": "harmony",
    "<function=": "qwen3_coder",
    "<arg_key>": "glm",
    "<|tool_call_start|>": "lfm2",
    "<|tool_list_start|>": "lfm2",
    "List of tools: [": "lfm2",  # LFM2.5's, which shows no call
    "<TOOLCALL>": "nemotron2",  # Nemotron Nano 2
    "<tool_calls>": "hunyuan",
    "<|tool_call>": "gemma4",
    "<|tool_call|>": "granite",
    "<|START_ACTION|>": "command",
    _CALLS_OF_DEEPSEEK[0]: "deepseek",
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3",
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
