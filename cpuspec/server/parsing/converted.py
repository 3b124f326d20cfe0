"""Tool calls that are not JSON: held back until they end, then converted.

Sources: the chat templates of Qwen3-Coder and Qwen3.5 (XML), GLM-4.5 and 4.7, LFM2 (Python), Gemma 4, DeepSeek V3 and V3.1,
Command R7B and A; Hunyuan-A13B; vLLM's and llama.cpp's parsers of the same for what models write beside their templates.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from cpuspec.engine.text import overlap
from cpuspec.server.parsing.pieces import Piece, decided

Functions = Mapping[str, Mapping[str, Any]]  # JSON schemas of arguments by the function's name
Calls = list[tuple[str, dict[str, Any]]]  # names and arguments
Convert = Callable[[str, Functions], Calls]  # raises ValueError for a text that holds no call

_SPACE = " \t\r\n"
_MOST_CHARS = 1 << 20  # of one call


class ConvertedCalls:
    """Calls between two marks, with text before and between them. White space beside a call is dropped.

    A text between the marks that is no call is content, marks included. A call that the answer's end cuts off is converted if it
    can be.
    """

    def __init__(self, opens: str, closes: str, convert: Convert, functions: Functions) -> None:
        self.num_calls = 0
        self._opens, self._closes, self._convert, self._functions = opens, closes, convert, functions
        self._pending = ""
        self._in_call = False
        self._searched = 0  # characters of a call that hold no closing mark

    def push(self, text: str) -> list[Piece]:
        """See `Parser`."""
        self._pending += text
        return decided(self._step)

    def finish(self) -> list[Piece]:
        """See `Parser`."""
        rest, self._pending = self._pending, ""
        if self._in_call:
            self._in_call = False
            return self._converted(rest, "")
        return [Piece("content", rest)] if rest.strip(_SPACE) or not self.num_calls else []

    def _step(self, pieces: list[Piece]) -> bool:
        text = self._pending
        if not self._in_call:
            if self.num_calls and not (text := text.lstrip(_SPACE)):
                return False
            before, mark, rest = text.partition(self._opens)
            if mark:
                pieces.append(Piece("content", before.rstrip(_SPACE)))
                self._pending, self._in_call, self._searched = rest, True, 0
                return True
            sure = text[: len(text) - overlap(text, self._opens)].rstrip(_SPACE)
            pieces.append(Piece("content", sure))
            self._pending = text[len(sure) :]
            return False
        at = text.find(self._closes, self._searched)
        if at < 0 and len(text) <= _MOST_CHARS:
            self._searched = max(0, len(text) - len(self._closes) + 1)
            return False
        end = at if at >= 0 else len(text)
        self._pending, self._in_call = text[end + len(self._closes) :], False
        pieces += self._converted(text[:end], self._closes if at >= 0 else "")
        return True

    def _converted(self, text: str, closes: str) -> list[Piece]:
        try:
            calls = self._convert(text.strip(_SPACE), self._functions)
            found = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
        except (ValueError, RecursionError, MemoryError):
            found = []
        if not found:
            return [Piece("content", self._opens + text + closes)]
        pieces = []
        for name, arguments in found:
            pieces += [Piece("call", name, self.num_calls), Piece("arguments", arguments, self.num_calls)]
            self.num_calls += 1
        return pieces


def from_json(text: str, functions: Functions) -> Calls:
    """`{"name": ..., "arguments": {...}}`, or a list of such objects. Other engines' keys are understood, too."""
    value = json.loads(text)
    calls: Calls = []
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, dict):
            raise ValueError("no call")
        name = next((one[key] for key in ("name", "tool_name") if isinstance(one.get(key), str)), "")
        given: Any = next((one[key] for key in ("arguments", "parameters") if key in one), {})
        arguments = json.loads(given) if isinstance(given, str) else given
        if not name or not isinstance(arguments, dict):
            raise ValueError("no call")
        calls.append((name, arguments))
    return calls


def from_xml(text: str, functions: Functions) -> Calls:
    """`<function=NAME><parameter=KEY>VALUE</parameter>...</function>` of Qwen3-Coder. Values are lines of their own."""
    if text.startswith(("{", "[")):
        return from_json(text, functions)
    calls: Calls = []
    for part in text.split("<function=")[1:]:
        name, _, body = part.partition(">")
        # A parameter ends at its closing tag; models forget it before the next parameter or the function's end.
        pairs = re.findall(r"<parameter=([^>]*)>(.*?)(?:</parameter>|(?=<parameter=)|(?=</function>)|\Z)", body, re.DOTALL)
        calls.append((_name(name), {key.strip(): _typed(value, functions, name, key.strip()) for key, value in pairs}))
    return calls


def from_argument_tags(text: str, functions: Functions) -> Calls:
    """`NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...` of GLM-4.5 and 4.7."""
    if text.startswith(("{", "[")):
        return from_json(text, functions)
    name, _, _ = text.partition("<arg_key>")
    pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|\Z)", text, re.DOTALL)
    return [(_name(name), {key.strip(): _typed(value, functions, name.strip(), key.strip()) for key, value in pairs})]


def from_python(text: str, functions: Functions) -> Calls:
    """`[name(key='value', ...), ...]` of LFM2: calls with literal keyword arguments."""
    if text.startswith(("{", '[{"')):
        return from_json(text, functions)
    with suppress(SyntaxError, TypeError):
        body = ast.parse(text, mode="eval").body
        nodes = body.elts if isinstance(body, ast.List | ast.Tuple) else [body]
        calls: Calls = []
        for node in nodes:
            if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
                raise ValueError("no call")
            calls.append((ast.unparse(node.func), {str(one.arg): _literal(one.value) for one in node.keywords}))
        return calls
    raise ValueError("no call")


def from_gemma(text: str, functions: Functions) -> Calls:
    """`call:NAME{key:<|"|>text<|"|>,n:3}` of Gemma 4: bare keys, texts between marks of their own, other values as in JSON."""
    if text.startswith(("{", "[")):
        return from_json(text, functions)
    name, brace, rest = text.removeprefix("call:").partition("{")
    if not brace:
        raise ValueError("no call")
    parts = (brace + rest).split('<|"|>')
    for number, part in enumerate(parts):
        # Every second part is a text. Elsewhere a bare word before a colon is a key.
        parts[number] = json.dumps(part) if number % 2 else re.sub(r'([{,]\s*)([^\s"{}\[\],:]+)(\s*:)', r'\1"\2"\3', part)
    arguments = json.loads("".join(parts))
    if not isinstance(arguments, dict):
        raise ValueError("no call")
    return [(_name(name), arguments)]


def from_deepseek(text: str, functions: Functions) -> Calls:
    """Calls of DeepSeek: V3 writes `function<｜tool▁sep｜>NAME` and JSON in a fence, V3.1 writes `NAME<｜tool▁sep｜>JSON`."""
    calls: Calls = []
    for part in text.split("<｜tool▁call▁begin｜>")[1:]:
        head, _, rest = part.partition("<｜tool▁call▁end｜>")[0].partition("<｜tool▁sep｜>")
        name, fence, body = rest.partition("```json")
        arguments = json.loads(body.partition("```")[0] if fence else rest)
        if not isinstance(arguments, dict):
            raise ValueError("no call")
        calls.append((_name(name if fence else head), arguments))
    return calls


def _name(text: str) -> str:
    name = text.strip(_SPACE)
    if not name or len(name) > 256 or not name.isprintable() or set(name) & set("<>{}"):
        raise ValueError("no name of a function")
    return name


def _typed(text: str, functions: Functions, name: str, key: str) -> Any:
    """A value that was written without quotes. The function's schema says whether it is a text; other values are JSON."""
    text = text.removeprefix("\n").removesuffix("\n")
    schema = functions.get(name, {}).get("properties")
    declared = schema.get(key) if isinstance(schema, Mapping) else None
    kinds = declared.get("type") if isinstance(declared, Mapping) else None
    if kinds == "string" or (isinstance(kinds, list) and "string" in kinds and text != "null"):
        return text
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def _literal(node: ast.expr) -> Any:
    """A literal of Python, or of JSON: LFM2 writes both spellings of true, false and null."""
    for name in ast.walk(node):
        if isinstance(name, ast.Name) and name.id not in ("true", "false", "null"):
            raise ValueError("no literal")
    constants = {"true": True, "false": False, "null": None}

    class Spelled(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return ast.Constant(constants[node.id])

    return ast.literal_eval(Spelled().visit(node))
