"""Tool calls as models write them: where one ends, what it says, and the gate through which it leaves.

Sources: the chat templates of Qwen3-Coder, Qwen3.5 and Nemotron 3 (XML), GLM-4.5 and 4.7, LFM2 and OLMo 3 (Python), Gemma 4,
DeepSeek V3 to V3.2, Command R7B and A, Hunyuan-A13B, Phi-4-mini. What models write beside their templates is from reports about
other engines' parsers: ollama 16686 and 18530 (`<function=` without `<tool_call>`), llama.cpp 18077 (no `</parameter>`), vllm 39243
and Liquid4All/docs 130 (LFM2's quotes), vllm 49248 and 54971 (GLM's tags), vllm 48678 and sglang 39240 (Gemma's quotes).
"""

import ast
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from cpuspec.engine.text import overlap

SPACE = " \t\r\n"  # the white space that parsers drop around reasoning and calls

Functions = Mapping[str, Mapping[str, Any]]  # JSON schemas of arguments by the function's name
Call = tuple[str, Any]  # a name and arguments
# Reads one call. The last argument: whether the call's end was seen, else the answer's end cut it off. Raises for what is no call.
Convert = Callable[[str, Functions, bool], Call]

_JSON_TYPES = ((bool, "boolean"), (str, "string"), (int | float, "number"), (list, "array"), (dict, "object"))
_MOST_SCHEMAS = 100  # that are read to find the types of one value
_PAIRS = {"{": "}", "[": "]", "(": ")"}
_GEMMA_QUOTE = '<|"|>'
_MOST_AFTER = 80  # characters behind a quote that decide whether it ends a text


@dataclass(frozen=True)
class Syntax:
    """A language of calls.

    split: cuts the text between two marks into calls. begins: the first characters of that text; is_named: or it begins with a
    name. is_quoted: texts are in quotes, so that a mark in one ends nothing. is_value: the last bracket ends a call, so that it
    needs no mark.
    """

    convert: Convert
    split: Callable[[str], list[str]]
    begins: str
    is_named: bool = False
    is_quoted: bool = True
    is_value: bool = False


@dataclass
class Scan:
    """How far a text that grows was read. Nothing before that is read again when more of it comes."""

    at: int = 0  # what begins before it is decided
    inner: int = 0  # where the search for the end of what begins at `at` goes on
    brackets: list[str] = field(default_factory=list)  # that are open at `at`


def tokens(text: str, marks: Sequence[str] = (), final: bool = True, scan: Scan | None = None) -> Iterator[tuple[int, int, str]]:
    """The brackets, quoted texts and marks of a call: where each begins and ends, and its bracket, quote or mark.

    A quote ends a text only where something of a call follows, so that a text may hold quotes that nobody escaped. Nothing after a
    text without an end is yielded; such a text has the name "open". final: nothing follows the text; else its end stays undecided.
    scan: where an earlier call for the beginning of the text stopped; it is moved on.
    """
    scan = scan or Scan()
    found = re.compile("|".join([*map(re.escape, marks), r'<\|"\|>|["\'{}\[\]()]']))
    sure = len(text) - (0 if final else max(overlap(text, mark) for mark in (*marks, _GEMMA_QUOTE)))
    while (one := found.search(text, scan.at)) and one.start() < sure:
        what, start, end = one[0], one.start(), one.end()
        if what in _PAIRS:
            scan.brackets.append(what)
        elif what in _PAIRS.values():
            del scan.brackets[-1:]
        elif what not in marks and _follows_an_opening(text, start):
            ends = _text_end(text, end, what, ",)" if scan.brackets[-1:] == ["("] else ",:}]", marks, final, scan)
            if ends is None:
                scan.at = start
                yield start, len(text), "open"
                return
            end, scan.inner = ends, 0
        elif what not in marks:
            what = ""
        scan.at = end
        if what:
            yield start, end, what
    scan.at = max(scan.at, sure)


def _follows_an_opening(text: str, at: int) -> bool:
    while at and text[at - 1] in SPACE:
        at -= 1
    return at == 0 or text[at - 1] in ":,[{(="


def _text_end(text: str, at: int, quote: str, follow: str, marks: Sequence[str], final: bool, scan: Scan) -> int | None:
    """Where a text ends, behind its closing quote; None if it does not end, or if later characters decide.

    follow: the characters that may follow it.
    """
    if text.startswith(quote * 2, at) and quote != _GEMMA_QUOTE:  # Python's triple quotes
        end = text.find(quote * 3, max(at + 2, scan.inner))
        scan.inner = max(at + 2, len(text) - 2)
        return end + 3 if end >= 0 else None
    is_gemmas = quote == _GEMMA_QUOTE
    scan.inner = max(at, scan.inner)
    for one in re.compile(re.escape(quote) if is_gemmas else rf"\\.|{quote}", re.DOTALL).finditer(text, scan.inner):
        if one[0][0] != "\\":
            start = scan.inner = one.end()
            while start < len(text) and text[start] in SPACE:
                start += 1
            after = text[start : start + _MOST_AFTER]
            if after[:1] in tuple(follow) or after.startswith(tuple(marks)) or (is_gemmas and re.match(r"[\w.-]+\s*:", after)):
                return one.end()
            is_short = len(after) < _MOST_AFTER and re.fullmatch(r"[\w.-]+\s*", after)
            if not final and (any(mark.startswith(after) for mark in marks) or not after or is_short):
                scan.inner = one.start()
                return None
            if not after:
                return one.end()
        scan.inner = one.end()
    # What may be the first half of an escape or of a mark is looked at again.
    half = overlap(text, quote) if is_gemmas else text.endswith("\\")
    scan.inner = max(scan.inner, len(text) - half)
    return None


def call_end(text: str, closes: Sequence[str], is_value: bool, final: bool, scan: Scan | None = None) -> tuple[int, int] | None:
    """The end of a call's text, and of the mark behind it; None if it does not end, or if later characters decide.

    closes: the mark, if it has one. is_value: the last bracket ends the call, too. scan: as in `tokens`.
    """
    scan = scan or Scan()
    for start, end, what in tokens(text, closes, final, scan):
        if what in closes:
            return start, end
        if is_value and what in _PAIRS.values() and not scan.brackets:
            return end, end
    return None


def marked_end(
    text: str, opens: Sequence[str], ends: Sequence[str], closes: str, final: bool, scan: Scan
) -> tuple[int, int] | None:
    """As `call_end`, where nothing quotes a text: a mark that ends calls, before which none begins, belongs to the call, too.

    opens, ends: marks of all calls.
    """
    marks = re.compile("|".join(map(re.escape, (*opens, *ends, closes))))
    most = max(map(len, (*opens, *ends, closes))) - 1  # characters that may be the first part of a mark
    while (at := text.find(closes, scan.at)) >= 0:
        after = at + len(closes)
        later = marks.search(text, max(after, scan.inner))
        scan.at, scan.inner = at, later.end() if later else max(after, scan.inner, len(text) - most)
        if later is None:
            return (at, after) if final else None
        if later[0] in opens or not text[after : later.start()].strip(SPACE):
            return at, after
        if later[0] == closes:
            scan.at = scan.inner = later.start()
    scan.at = max(scan.at, len(text) - most)
    return None


def checked(call: Call, functions: Functions) -> tuple[str, str]:
    """The gate: the name of a tool of this request, and its arguments as a JSON object. Raises ValueError, RecursionError."""
    name, given = call
    if name not in functions:
        raise ValueError("no tool of the request has its name")
    given = read_value(given) if isinstance(given, str) else {} if given is None else given
    if not isinstance(given, Mapping):
        raise ValueError("its arguments are no object")
    text = json.dumps(_as_json(given), ensure_ascii=False, allow_nan=False)
    return name, re.sub("[\ud800-\udfff]", "\ufffd", text)


def _as_json(value: Any) -> Any:
    """The value as JSON can say it: numbers that are not finite become null."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("its arguments have a key that is not a text")
        return {key: _as_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_as_json, value))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ValueError("its arguments have a value that JSON lacks")


def read_value(text: str, is_whole: bool = True) -> Any:
    """A value in JSON or Python, mended where its meaning is plain. is_whole: see `_mended`. Raises ValueError, RecursionError."""
    text = text.strip(SPACE)
    with suppress(ValueError):
        return json.loads(text, strict=False, parse_constant=_nothing)
    with suppress(ValueError):
        return json.loads(_mended(text, is_whole), strict=False, parse_constant=_nothing)
    if re.search(r"""\\[^\\'"abfnrtuUxN0-7\n]""", text):
        raise ValueError("it has an escape that Python lacks, too")
    try:
        tree = _ListForSet().visit(ast.parse(text, mode="eval"))
        return ast.literal_eval(tree)
    except (SyntaxError, TypeError, MemoryError):
        raise ValueError("it is not JSON") from None


def _nothing(name: str) -> None:
    """The value of NaN and Infinity."""


class _ListForSet(ast.NodeTransformer):
    def visit_Set(self, node: ast.Set) -> ast.List:
        return ast.List(node.elts, ast.Load())


_WORDS = {"True": "true", "False": "false", "None": "null"}
_LOOSE = re.compile(r"(?<![\w.])0+(?=\d)|\b(?:True|False|None)\b")


def _mended(text: str, is_whole: bool) -> str:
    """JSON of a text that nearly is: quotes, escapes, commas, Python's words, brackets that are missing or too many.

    is_whole: the call's end was seen. Without it only the brackets around whole arguments may be missing.
    """
    if text.startswith("{{") and text.endswith("}}"):
        text = text[1:-1]
    parts, stack, at = [""], "", 0
    for start, end, what in tokens(text):
        parts.append(_LOOSE.sub(lambda one: _WORDS.get(one[0], ""), text[at:start]))
        at = end
        if what == "open":
            raise ValueError("a text has no end")
        if what in _PAIRS:
            stack += _PAIRS[what]
            parts.append(what)
        elif what in _PAIRS.values():
            parts[-1] = parts[-1].rstrip(SPACE).removesuffix(",")
            if (place := stack.rfind(what)) >= 0:  # else it is one too many
                parts.append(stack[place:][::-1])
                stack = stack[:place]
        else:
            parts.append(_json_text(text[start + len(what) : end - len(what)], what))
    if stack and not is_whole and (stack.count("}") > 1 or not text.rstrip(f"{SPACE}])").endswith("}")):
        raise ValueError("the answer ends in it")
    return "".join([*parts, _LOOSE.sub(lambda one: _WORDS.get(one[0], ""), text[at:]), stack[::-1]])


def _json_text(text: str, quote: str) -> str:
    """A quoted text as JSON writes it."""
    if quote == _GEMMA_QUOTE:
        return json.dumps(text)
    if len(text) >= 4 and text[:2] == text[-2:] == quote * 2:
        text = text[2:-2]  # Python's triple quotes

    def escaped(one: re.Match[str]) -> str:
        if one[0] == '"':
            return '\\"'
        if one[1] == "'":
            return "'"
        return f"\\u00{one[1][1:]}" if len(one[1]) == 3 else one[0] if one[1] in '"\\/bfnrtu' else f"\\{one[0]}"

    return '"' + re.sub(r"""\\(x[0-9a-fA-F]{2}|.)|\"""", escaped, text, flags=re.DOTALL) + '"'


def _name(text: str) -> str:
    name = text.strip(SPACE)
    if not name or len(name) > 256 or not name.isprintable() or set(name) & set("<>{}"):
        raise ValueError("no name of a function")
    return name


def _parted(text: str, separators: str = ",") -> list[str]:
    """The parts of a text in brackets, without these: items of a list, arguments of a call."""
    parts, depth, begun, at = [], 0, 0, 0
    for start, end, what in (*tokens(text), (len(text), len(text), "")):
        for one in re.finditer(f"[{separators}]", text[at:start]) if depth == 1 else ():
            parts.append(text[begun : at + one.start()])
            begun = at + one.end()
        at = end
        depth += (what in _PAIRS) - (what in _PAIRS.values())
        if what in _PAIRS and depth == 1:
            begun = end
        elif what in _PAIRS.values() and depth == 0:
            parts.append(text[begun:start])
            begun = len(text)
            break
    return [part.strip(SPACE) for part in (*parts, text[begun:]) if part.strip(SPACE)]


def json_items(text: str) -> list[str]:
    """The calls of a list, or the one call that is no list. A fence around them is left out."""
    text = text.strip(SPACE)
    if text.startswith("```"):
        text = text.partition("\n")[2].removesuffix("```").strip(SPACE)
    return _parted(text) if text.startswith("[") else [text]


def from_json(text: str, functions: Functions, is_whole: bool) -> Call:
    """`{"name": ..., "arguments": {...}}`, or `NAME[ARGS]{...}` of Mistral. Other engines' keys are understood, too."""
    if not text.startswith("{"):
        head, brace, rest = text.partition("{")
        return _name(head.partition("[")[0]), read_value(brace + rest, is_whole)
    one = read_value(text, is_whole)
    if isinstance(one, dict) and isinstance(one.get("function"), dict):
        one = one["function"]
    if not isinstance(one, dict):
        raise ValueError("it is not an object")
    name = next((one[key] for key in ("name", "tool_name", "function") if isinstance(one.get(key), str)), "")
    given = next((key for key in ("arguments", "parameters") if key in one), "")
    if not given and one.keys() - {"name", "tool_name", "function", "id", "tool_call_id", "type"}:
        raise ValueError("it has other keys than arguments")
    return name, one.get(given)


def python_items(text: str) -> list[str]:
    """The calls of a list, or those of lines."""
    text = text.strip(SPACE)
    return _parted(text) if text.startswith("[") else _parted(f"[{text}]", ",\n")


def from_python(text: str, functions: Functions, is_whole: bool) -> Call:
    """`name(key='value', ...)` of LFM2 and OLMo 3: a call with literal keyword arguments."""
    name, _, _ = text.partition("(")
    given = text[len(name) :]
    if not re.fullmatch(r"[\w.-]+", name) or call_end(given, (), True, True) != (len(given), len(given)):
        raise ValueError("it is not a call of Python")
    arguments: dict[str, Any] = {}
    for part in _parted(given):
        key, equals, value = part.partition("=")
        if part.startswith("**"):
            arguments |= read_value(part[2:])
        elif equals and key.strip().isidentifier():
            arguments[key.strip()] = read_value(value)
        else:
            raise ValueError("an argument has no name")
    return name, arguments


def xml_items(text: str) -> list[str]:
    """The functions between two marks."""
    if text.lstrip(SPACE).startswith(("{", "[")):
        return json_items(text)
    return re.split(r"(?<=</function>)\s*(?:<[\w:]*tool_call>\s*)?(?=<function=)", text.strip(SPACE))


# A value ends at a closing tag that the next parameter or the call's end follows. Models forget it there.
_PARAMETER = re.compile(
    r"<parameter=([^>]*)>(.*?)(?:</parameter>(?=\s*(?:<parameter=|(?:</function>\s*)?\Z))"
    r"|(?=\n[ \t]*<parameter=)|(?=</function>\s*\Z)|\Z)",
    re.DOTALL,
)


def from_xml(text: str, functions: Functions, is_whole: bool) -> Call:
    """`<function=NAME><parameter=KEY>VALUE</parameter>...</function>` of Qwen3-Coder. Values are lines of their own."""
    head = re.match(r"<function=([^>]*)>", text)
    if head is None or not (is_whole or text.endswith(("</parameter>", "</function>"))):
        raise ValueError("it is not a function in tags, or the answer ends in it")
    name = _name(head[1])
    values = [(key, value.removeprefix("\n").removesuffix("\n")) for key, value in _PARAMETER.findall(text, head.end())]
    return name, _typed(values, functions, name)


# An invocation of DeepSeek V3.2 has its names in attributes, of tags with a prefix.
_INVOCATION = re.compile(r"""<(｜DSML｜|)invoke name="([^"]*)">(.*?)(?:</\1invoke>(?=\s*(?:<\1invoke|\Z))|\Z)""", re.DOTALL)
_NAMED = re.compile(
    r"""<(｜DSML｜|)parameter name="([^"]*)"([^>]*)>(.*?)</\1parameter>(?=\s*(?:<\1parameter name=|\Z))""", re.DOTALL
)


def invocations(text: str) -> list[str]:
    """The invocations between two marks."""
    if text.lstrip(SPACE).startswith(("{", "[")):
        return json_items(text)
    return [one[0] for one in _INVOCATION.finditer(text)]


def from_invocation(text: str, functions: Functions, is_whole: bool) -> Call:
    """`<invoke name="NAME"><parameter name="KEY" string="true">VALUE</parameter>...</invoke>`."""
    found = _INVOCATION.match(text)
    if found is None or not (is_whole or text.endswith("invoke>")):
        raise ValueError("it is not an invocation, or the answer ends in it")
    name, values = _name(found[2]), _NAMED.findall(found[3].strip(SPACE))
    texts = {key: value for _, key, kind, value in values if 'string="true"' in kind}
    return name, _typed([(key, value) for _, key, _, value in values], functions, name) | texts


# Models double the tags of a key, and leave out the one that opens a value.
_PAIR = re.compile(
    r"(?:<arg_key>\s*)+([^<>]+?)\s*(?:</arg_key>\s*)+(?:<arg_value>)?(.*?)(?:</arg_value>(?=\s*(?:<arg_key>|\Z))|(?=<arg_key>)|\Z)",
    re.DOTALL,
)


def from_argument_tags(text: str, functions: Functions, is_whole: bool) -> Call:
    """`NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...` of GLM-4.5 and 4.7."""
    head = text.partition("<arg_key>")[0]
    if not is_whole and not text.endswith("</arg_value>"):
        raise ValueError("the answer ends in it")
    return (name := _name(head)), _typed(_PAIR.findall(text, len(head)), functions, name)


_OF_GEMMA = re.compile(r"([^\s\"'{}\[\],:<]+)\s*:|([{\[])|([}\]])|([^<{}\[\]\"',]*)<\|\"\|>(?=\s*[,}\]])|([^,{}\[\]]+)")


def from_gemma(text: str, functions: Functions, is_whole: bool) -> Call:
    """`call:NAME{key:<|"|>text<|"|>,n:3}` of Gemma 4: bare keys, texts between marks of their own, other values as in JSON.

    Models leave out commas, the mark before a text, and quotes.
    """
    name, brace, rest = text.removeprefix("call:").partition("{")
    text, parts, at, has_value = brace + rest, list[str](), 0, False
    quoted = {start: (end, what) for start, end, what in tokens(text) if what in ('"', "'", _GEMMA_QUOTE)}
    while at < len(text):
        if text[at] in f"{SPACE},":
            at += 1
            continue
        key = opening = closing = late = word = None
        if at in quoted:
            end, what = quoted[at]
            part = _json_text(text[at + len(what) : end - len(what)], what)
            key = part if (colon := re.compile(r"\s*:").match(text, end)) else None
            at = colon.end() if colon else end
        elif found := _OF_GEMMA.match(text, at):
            key, opening, closing, late, word = found.groups()
            at = found.end()
            if word and _GEMMA_QUOTE in word:
                raise ValueError("a text has no end")
            literal = word and re.fullmatch(r"-?\d+(\.\d*)?([eE][+-]?\d+)?|true|false|null|True|False|None", word.strip(SPACE))
            part = _WORDS.get(word.strip(SPACE), word) if word and literal else json.dumps((key or late or word or "").strip(SPACE))
        else:
            raise ValueError("it is not a call of Gemma's")
        if has_value and not closing:
            parts.append(",")
        parts.append(f"{key and part}:" if key else opening or closing or part)
        has_value = not (key or opening)
    if not is_whole and "".join(parts).count("{") > "".join(parts).count("}"):
        raise ValueError("the answer ends in it")
    return _name(name), read_value("".join(parts))


_CALL, _CALL_ENDS, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def deepseek_items(text: str) -> list[str]:
    """The calls between the outer marks."""
    starts = [start for start, _, what in tokens(text, (_CALL,)) if what == _CALL]
    return [text[start:end].strip(SPACE) for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def from_deepseek(text: str, functions: Functions, is_whole: bool) -> Call:
    """A call of DeepSeek: V3 writes `function<｜tool▁sep｜>NAME` and JSON in a fence, V3.1 writes `NAME<｜tool▁sep｜>JSON`."""
    inner, mark, _ = text.removeprefix(_CALL).rpartition(_CALL_ENDS)
    head, _, rest = (inner if mark else text.removeprefix(_CALL)).partition(_SEP)
    name, fence, body = rest.partition("```json")
    if fence and "{" not in name:
        return _name(name), read_value(body.strip(SPACE).removesuffix("```"), bool(mark) or is_whole)
    return _name(head), read_value(rest, bool(mark) or is_whole)


def _typed(values: Sequence[tuple[str, str]], functions: Functions, name: str) -> dict[str, Any]:
    """Values that were written without quotes. The function's schema says which are texts; others are JSON, or texts."""
    schema, found = functions.get(name, {}), {}
    properties = schema.get("properties")
    for key, text in values:
        kinds = value_kinds(properties.get(key.strip()) if isinstance(properties, Mapping) else None, schema)
        value: Any = text
        if "string" not in kinds or (text == "null" and "null" in kinds):
            bare = text.strip(SPACE)
            with suppress(ValueError, RecursionError):
                value = _as_json(read_value(bare) if bare[:1] in tuple("{[") or bare in _WORDS else json.loads(text))
        found[key.strip()] = value
    return found


def value_kinds(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """The types that a JSON schema names for its value, none if it names none. root: the schema that `$ref` refers to."""
    kinds: set[str] = set()
    left, num_read = [schema], 0
    while left and num_read < _MOST_SCHEMAS:
        one, num_read = left.pop(), num_read + 1
        if not isinstance(one, Mapping):
            continue
        values = (*_list(one.get("enum")), *([one["const"]] if "const" in one else []))
        kinds |= {next((name for kind, name in _JSON_TYPES if isinstance(value, kind)), "null") for value in values}
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


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []
