"""Tool calls that are not JSON: held back until they end, then converted.

Sources: the chat templates of Qwen3-Coder, Qwen3.5 and Nemotron 3 (XML), GLM-4.5 and 4.7, LFM2 (Python), Gemma 4, DeepSeek V3 and
V3.1, Command R7B and A, Hunyuan-A13B. What models write beside their templates is from reports about other engines' parsers:
ollama 16686 and 18530 (`<function=` without `<tool_call>`), llama.cpp 18077 (no `</parameter>`), vllm 39243 and
Liquid4All/docs 130 (LFM2's quotes).
"""

import ast
import json
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from cpuspec.server.parsing.pieces import SPACE, Piece, decided, settled

Functions = Mapping[str, Mapping[str, Any]]  # JSON schemas of arguments by the function's name
Calls = list[tuple[str, dict[str, Any]]]  # names and arguments
Convert = Callable[[str, Functions], Calls]  # raises ValueError for a text that holds no call

_MOST_CHARS = 1 << 20  # of one call
_MOST_SCHEMAS = 100  # that are read to find the types of one value


class ConvertedCalls:
    """Calls between two marks, with text before and between them. White space beside a call is dropped.

    A text between the marks that is no call is content, marks included. A call that the answer's end cuts off is converted if it
    can be. bare: other marks that begin and end a call, of models that forget the first; they are part of the call's text, which
    must name one of the functions.
    """

    def __init__(
        self, opens: str, closes: str, convert: Convert, functions: Functions, bare: tuple[str, str] | None = None
    ) -> None:
        self.num_calls = 0
        self._marks = [(opens, closes), *([bare] if bare else [])]
        self._convert, self._functions = convert, functions
        self._pending = ""
        self._call: tuple[str, str] | None = None  # the marks of the call that is read
        self._space = ""  # white space before it
        self._orphan = ""  # a closing mark that may follow, and belongs to nobody
        self._searched = 0  # characters of a call that hold no closing mark

    def push(self, text: str) -> list[Piece]:
        """See `Parser`."""
        self._pending += text
        return decided(self._step)

    def finish(self) -> list[Piece]:
        """See `Parser`."""
        rest, self._pending = self._pending, ""
        if self._call:
            return self._converted(self._call, rest, "")
        return [Piece("content", rest)] if rest.strip(SPACE) or not self.num_calls else []

    def _step(self, pieces: list[Piece]) -> bool:
        return self._content(pieces) if self._call is None else self._in_call(self._call, pieces)

    def _content(self, pieces: list[Piece]) -> bool:
        text = self._pending
        if self.num_calls:
            text = text.lstrip(SPACE)
            if self._orphan.startswith(text):
                return False
            text, self._orphan = text.removeprefix(self._orphan).lstrip(SPACE), ""
            if not text:
                self._pending = ""
                return False
        found = [(at, marks) for marks in self._marks if (at := text.find(marks[0])) >= 0]
        if found:
            at, self._call = min(found)
            before = text[:at].rstrip(SPACE)
            pieces.append(Piece("content", before))
            self._space = text[len(before) : at]
            self._pending, self._searched = text[at + len(self._call[0]) :], 0
            return True
        sure = settled(text, *(opens for opens, _ in self._marks))
        pieces.append(Piece("content", sure))
        self._pending = text[len(sure) :]
        return False

    def _in_call(self, marks: tuple[str, str], pieces: list[Piece]) -> bool:
        text, closes = self._pending, marks[1]
        at = text.find(closes, self._searched)
        if at < 0 and len(text) <= _MOST_CHARS:
            self._searched = max(0, len(text) - len(closes) + 1)
            return False
        end = at if at >= 0 else len(text)
        self._pending = text[end + len(closes) :]
        pieces += self._converted(marks, text[:end], closes if at >= 0 else "")
        return True

    def _converted(self, marks: tuple[str, str], text: str, closes: str) -> list[Piece]:
        bare, self._call = marks != self._marks[0], None
        try:
            calls = self._convert((marks[0] + text if bare else text).strip(SPACE), self._functions)
            found = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
        except (ValueError, RecursionError, MemoryError):
            found = []
        if not found or (bare and not all(name in self._functions for name, _ in found)):
            return [Piece("content", self._space + marks[0] + text + closes)]
        self._orphan = self._marks[0][1] if bare else ""
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


# A value ends at the closing tag before another tag or the end. Models forget it before the next parameter or the function's end.
_TAGS = re.compile(
    r"<function=([^>]*)>|<parameter=([^>]*)>(.*?)(?:</parameter>(?=\s*(?:<parameter=|</?function|\Z))"
    r"|(?=\n[ \t]*<parameter=)|(?=</function>\s*(?:<function=|\Z))|\Z)",
    re.DOTALL,
)


def from_xml(text: str, functions: Functions) -> Calls:
    """`<function=NAME><parameter=KEY>VALUE</parameter>...</function>` of Qwen3-Coder. Values are lines of their own."""
    if text.startswith(("{", "[")):
        return from_json(text, functions)
    calls: Calls = []
    for name, key, value in _TAGS.findall(text):
        if name:
            calls.append((_name(name), {}))
        elif calls:
            calls[-1][1][key.strip()] = _typed(value, functions, calls[-1][0], key.strip())
    return calls


def from_argument_tags(text: str, functions: Functions) -> Calls:
    """`NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...` of GLM-4.5 and 4.7."""
    if text.startswith(("{", "[")):
        return from_json(text, functions)
    name, _, _ = text.partition("<arg_key>")
    pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|\Z)", text, re.DOTALL)
    return [(_name(name), {key.strip(): _typed(value, functions, name.strip(), key.strip()) for key, value in pairs})]


# A text in quotes. A quote within it that nothing of a call follows is part of the text, as in 'It's'.
_QUOTED = re.compile(r"""(['"])((?:\\.|(?!\1)[^\\]|\1(?!\s*(?:[,)\]}:]|\Z)))*)\1""", re.DOTALL)
_KEYWORD = re.compile(rf"\b({'|'.join(keyword.kwlist)})(\s*=)")


def from_python(text: str, functions: Functions) -> Calls:
    """`[name(key='value', ...), ...]` of LFM2: calls with literal keyword arguments."""
    if text.startswith("{") or re.match(r"\[\s*{", text):
        return from_json(text, functions)
    try:
        body = _python(text)
    except (SyntaxError, TypeError):
        raise ValueError("no call") from None
    nodes = body.elts if isinstance(body, ast.List | ast.Tuple) else [body]
    calls: Calls = []
    for node in nodes:
        if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
            raise ValueError("no call")
        calls.append((ast.unparse(node.func), {str(one.arg).removesuffix("ˍ"): _literal(one.value) for one in node.keywords}))
    return calls


def _python(text: str) -> ast.expr:
    """The expression. Where it is none, again with quotes and line ends in texts escaped, keywords as names, and 07 as 7."""
    with suppress(SyntaxError):
        return ast.parse(text, mode="eval").body
    parts, at = [], 0
    for found in [*_QUOTED.finditer(text), None]:
        bare = text[at : found.start() if found else len(text)]
        parts.append(re.sub(r"\b0+(?=\d)", "", _KEYWORD.sub(r"\1ˍ\2", bare)))
        if found:
            inner = re.sub(rf"(?<!\\)((?:\\\\)*){found[1]}", rf"\1\\{found[1]}", found[2])
            parts.append(found[1] + inner.replace("\n", "\\n").replace("\r", "\\r") + found[1])
            at = found.end()
    return ast.parse("".join(parts), mode="eval").body


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
    name = text.strip(SPACE)
    if not name or len(name) > 256 or not name.isprintable() or set(name) & set("<>{}"):
        raise ValueError("no name of a function")
    return name


def _typed(text: str, functions: Functions, name: str, key: str) -> Any:
    """A value that was written without quotes. The function's schema says whether it is a text; other values are JSON."""
    text = text.removeprefix("\n").removesuffix("\n")
    schema = functions.get(name, {})
    properties = schema.get("properties")
    kinds = value_kinds(properties.get(key) if isinstance(properties, Mapping) else None, schema)
    if "string" in kinds and (text != "null" or "null" not in kinds):
        return text
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        found = ast.literal_eval(text.strip())
        if isinstance(found, dict | list | bool | None):
            json.dumps(found)  # no bytes, sets and the like
            return found
    return text


def value_kinds(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """The types that a JSON schema names for its value, none if it names none. root: the schema that `$ref` refers to."""
    kinds: set[str] = set()
    left, num_read = [schema], 0
    while left and num_read < _MOST_SCHEMAS:
        one, num_read = left.pop(), num_read + 1
        if not isinstance(one, Mapping):
            continue
        kinds |= {json_type(value) for value in (*_list(one.get("enum")), *([one["const"]] if "const" in one else []))}
        kinds |= {kind for kind in (one.get("type"), *_list(one.get("type"))) if isinstance(kind, str)}
        left += [branch for word in ("anyOf", "oneOf", "allOf") for branch in _list(one.get(word))]
        left += [] if (referred := referred_schema(one, root)) is one else [referred]
    return kinds


def referred_schema(schema: Any, root: Any) -> Any:
    """The schema that a reference within the root leads to, None for a reference to nothing; a schema without one itself."""
    target = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(target, str) or not target.startswith("#/"):
        return schema
    for name in target[2:].split("/"):
        root = root.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def json_type(value: Any) -> str:
    """The name of a value's type in JSON schemas."""
    return next((name for kind, name in _JSON_TYPES if isinstance(value, kind)), "null")


_JSON_TYPES = ((bool, "boolean"), (str, "string"), (int | float, "number"), (list, "array"), (dict, "object"))


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []


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
