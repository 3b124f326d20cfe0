"""Answers taken apart: what comes out does not depend on the pieces that the text arrives in."""

import json
import re
import sys
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpuspec.server.parsing.answer import AnswerParser, Piece, answer_parser, joined_pieces
from cpuspec.server.parsing.calls import TOOL_FORMATS, ToolFormat, tool_format
from cpuspec.text.reasoning import opens_reasoning, reasoning_marks
from tests.server.written import FUNCTIONS, PARTS, WAYS, WORDS, damaged, random_call

NAMES = {
    "get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "f": {"properties": {"a": {"type": ["string", "null"]}}},
    "search": {},
    "files.open": {},
    "typed": {
        "$defs": {"place": {"enum": ["home", "away"]}},
        "properties": {
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "one": {"const": "7"},
            "where": {"$ref": "#/$defs/place"},
            "empty": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            **{name: {"type": kind} for name, kind in (("flag", "boolean"), ("list", "array"), ("wrong", "integer"))},
        },
    },
}
ARGUMENTS = '{"city": "Paris, \\"}]{[\\\\", "deep": {"list": [1, 2.5, null, "</tool_call>"]}}'

GIVEN = json.loads(ARGUMENTS)

# Format, text, and what it holds, as `plain` tells it.
SAMPLES = [
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call> and on', [("f", {"a": 1}), "and on"]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", {})]),
    (
        "hermes",
        '```json\n{\n  "name": "f",\n  "arguments": {"a": 1}\n}\n```\nor <tool_call>{"name": "search"}</tool_call>',
        [("f", {"a": 1}), "or", ("search", {})],
    ),
    ("hermes", '{"name": "Bob"} <tool_call>{"name": "f"}', ['{"name": "Bob"}', ("f", {})]),
    (  # Falcon-H1's marks hold a list
        "hermes",
        'So:\n<tool_call>\n[\n  {"name": "f", "arguments": {"a": 1}},\n  {"name": "search", "arguments": {}}\n]\n'
        "</tool_call>\nNow, wait.",
        [*("So:", ("f", {"a": 1}), ("search", {})), "Now, wait."],
    ),
    (
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nNew\nYork 12\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=search>\n<parameter=q>\n[1, 2]\n"
        "<parameter=r>\nTrue\n</function>\n</tool_call>",
        ["I look.", ("get_weather", {"city": "New\nYork 12", "days": 3}), ("search", {"q": [1, 2], "r": True})],
    ),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n7\n</parameter>", [("f", {"a": "7"})]),
    (  # values that hold the format's own tags, and HTML
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\n<p>\n</parameter> or <function=g> <parameter=b>\n\n"
        "</parameter>\n</function>\n</tool_call>",
        [("f", {"a": "<p>\n</parameter> or <function=g> <parameter=b>\n"})],
    ),
    (  # what a schema says of a value counts, by whatever keyword it says it
        "qwen3_coder",
        "<tool_call>\n<function=typed>\n<parameter=maybe>\n12\n</parameter>\n<parameter=one>\n7\n</parameter>\n"
        "<parameter=where>\n[1]\n</parameter>\n<parameter=empty>\nnull\n</parameter>\n<parameter=flag>\nTrue\n</parameter>\n"
        "<parameter=list>\n['a', {'b': None}]\n</parameter>\n<parameter=wrong>\n1 or 2\n</parameter>\n</function>\n</tool_call>",
        [
            (
                "typed",
                {
                    "maybe": "12",
                    "one": "7",
                    "where": "[1]",
                    "empty": None,
                    "flag": True,
                    "list": ["a", {"b": None}],
                    "wrong": "1 or 2",
                },
            )
        ],
    ),
    (  # models forget the opening mark
        "qwen3_coder",
        "I look.\n\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=search>\n"
        "</function>\n</tool_call>",
        ["I look.", ("f", {"a": "x"}), ("search", {})],
    ),
    ("qwen3_coder", '<tool_call>\n[{"name": "f", "arguments": {}}]\n</tool_call>', [("f", {})]),
    (
        "glm",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>42</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
        "</tool_call><tool_call>f</tool_call>",
        [("get_weather", {"city": "42", "days": 2}), ("f", {})],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[get_weather(city='Paris', days=-2), f(a=[1, {'k': null}], b=true)]<|tool_call_end|>Done",
        [("get_weather", {"city": "Paris", "days": -2}), ("f", {"a": [1, {"k": None}], "b": True}), "Done"],
    ),
    (  # quotes that the template does not escape, keywords as names, lines in a text, numbers with zeros
        "lfm2",
        '<|tool_call_start|>[f(a=\'It\'s \\n "so"\', class="two\nlines"), files.open(n=007)]<|tool_call_end|>',
        [("f", {"a": 'It\'s \n "so"', "class": "two\nlines"}), ("files.open", {"n": 7})],
    ),
    (
        "lfm2",
        '[{"name": "f", "arguments": {"a": "b"}}]\n<|tool_call_start|>[ {"name": "search", "arguments": {}}]<|tool_call_end|>',
        [("f", {"a": "b"}), ("search", {})],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Think <b>.<|end|><|start|>assistant<|channel|>commentary<|message|>I will look.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        [("reasoning", "Think <b>."), "I will look.", ("f", GIVEN)],
    ),
    ("harmony", ' to=functions.search<|channel|>analysis json<|message|>{"q": "x"}', [("search", {"q": "x"})]),
    (
        "harmony",
        "<|channel|>analysis<|message|>one<|end|><|start|>assistant<|channel|>analysis<|message|>two<|end|><|start|>assistant"
        "<|channel|>final<|message|>Yes.<|return|>",
        [("reasoning", "one\n\ntwo"), "Yes."],
    ),
    ("json", '{"name": "f", "parameters": {}} Done.', [("f", {}), "Done."]),
]
F = ("f", {"a": "x"})
G = ("search", {})
_X = '{"name": "f", "arguments": {"a": "x"}}'
_NL = [("f", {"a": "x\ny\t\\d"})]
_CUT = '{"name": "f", "arguments": {"a": "x"}'


NOT_LITERAL = (
    "'x'",
    *(f"a={one}" for one in ("b'x'", "1j", "...", "{(1,): 2}", "{1: 2}", "open('x')", "1) + f(a=2", "[" * 1100 + "]" * 1100)),
)
# What is no call, and stays as it is.
TEXTS = [
    ("hermes", "Just text, <b>with</b> marks < and <tool"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": '),
    ("hermes", "<tool_call>sorry</tool_call>"),
    ("hermes", "<tool_call>[1, 2]</tool_call>"),
    ("hermes", '<tool_call>{"nam'),
    ("hermes", '<tool_call>{"name": 5, "x" 6} '),
    ("llama3", ' {"name": "Bob", "parameters": {"age": 3}}'),
    ("llama3", "{'name': 'f'} is no JSON"),
    ("json", '```python\nprint("x")\n```'),
    ("json", "[1] is a note"),
    ("qwen3_coder", "<tool_call>none</tool_call>"),
    ("qwen3_coder", "Write <function=NAME> ... </function> there."),
    *(("lfm2", f"<|tool_call_start|>[f({value})]<|tool_call_end|>") for value in NOT_LITERAL),
    ("lfm2", "<|tool_call_start|>[f(a='x'"),
    ("lfm2", "<|tool_call_start|>f[0]<|tool_call_end|>"),
    ("harmony", "No channel < at all."),
    ("hermes", '<tool_call>{"name": "f", "args": {"a": 1}}</tool_call>'),
    ("hermes", 'So:\n```json\n{"name": "Bob"}\n```'),
    ("phi4", "from functools import cache"),
    ("harmony", "assistants help."),
    ("harmony", "to=everyone: hi"),
    # Arguments that are no object; tools that the request does not have.
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "g", "arguments": {"a": "<tool_call>"}}</tool_call>'),
    ("qwen3_coder", "<tool_call>\n<function=g>\n</function>\n</tool_call>"),
    ("llama3", '{"name": "g", "parameters": {}}'),
]
# What models write beside their formats, as public reports about parsers tell it, in texts of our own.
ODD = [
    # A line end, a tab and an escape that JSON lacks, in a text.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny\t\\d"}}</tool_call>', _NL),
    ("llama3", '{"name": "f", "parameters": {"a": "x\ny\t\\d"}}', _NL),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "x\ny\t\\d"}', _NL),
    (
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "x\ny\t\\d"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        _NL,
    ),
    ("harmony", '<|channel|>commentary to=functions.f<|message|>{"a": "x\ny\t\\d"}<|call|>', _NL),
    # Python's texts, words and dicts; braces that are missing, too many or doubled; a comma too many; quotes without escapes.
    (
        "hermes",
        '```json\n{\n  "name": "f",\n  "arguments": {\n    "a": """\nprint("x")\n"""\n  }\n}\n```',
        [("f", {"a": '\nprint("x")\n'})],
    ),
    ("hermes", '{"name": "f", "arguments": {"a": """d = {"k": [1, "v"]}\n"""}}', [("f", {"a": 'd = {"k": [1, "v"]}\n'})]),
    ("hermes", "<tool_call>{'name': 'f', 'arguments': {'a': 'x'}}</tool_call> ok", [F, "ok"]),
    ("hermes", "<tool_call>{'name': 'f', 'arguments': {'a': None, }}</tool_call>", [("f", {"a": None})]),
    ("hermes", f"<tool_call>{_CUT}\n</tool_call> and <tool_call>{_X}</tool_call>", [F, "and", F]),
    ("hermes", f"<tool_call>{_CUT[:-1]}\n</tool_call>\nSo.<tool_call>{_X}</tool_call>", [F, "So.", F]),
    ("hermes", f"<tool_call>{_X}}}\n</tool_call>\nSo.", [F, "So."]),
    ("hermes", f"<tool_call>{{{_X}}}</tool_call>", [F]),
    ("mistral", f"[TOOL_CALLS][{_X}}}] So", [F, "So"]),
    ("mistral", f"[TOOL_CALLS][{_CUT}]", [F]),
    ("llama3", '{"name": "f", "parameters": {"a": "x"}}} So', [F, "So"]),
    ("llama3", '{"name": "f", "parameters": {"a": "x"}', [F]),
    ("hermes", f"<tool_call>\n```json\n{_X}\n```\n</tool_call>\nSo", [F, "So"]),
    ("hermes", f'<tool_call>{{"type": "function", "function": {_X}}}</tool_call>', [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "say "x" now"}}</tool_call>', [("f", {"a": 'say "x" now'})]),
    ("hermes", '<tool_call>{"name": "search"}</tool_call>\nx\n<tool_call>\n{"name": "search"}</tool_call>', [G, "x", G]),
    # Arguments that are no object.
    ("hermes", '<tool_call>{"name": "search", "arguments": null}</tool_call>', [G]),
    # Numbers that are not finite, halves of characters, values and keys that JSON lacks.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN, "b": -1e999}}</tool_call>', [("f", {"a": None, "b": None})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>', [("f", {"a": "\ufffd"})]),
    ("lfm2", "<|tool_call_start|>[f(a={'y', 'x'})]<|tool_call_end|>", [("f", {"a": ["y", "x"]})]),
    ("lfm2", "<|tool_call_start|>[f(**{'a': 'x'})]<|tool_call_end|>", [F]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=search>\n<parameter=q>\n{'x': {1}}\n</parameter>\n</function>\n</tool_call>",
        [("search", {"q": {"x": [1]}})],
    ),
    (
        "glm",
        "<tool_call>search<arg_key>q</arg_key><arg_value>{['a']: 1}</arg_value></tool_call>",
        [("search", {"q": "{['a']: 1}"})],
    ),
    # Tools that the request does not have; a malformed sibling.
    ("harmony", "<|channel|>commentary to=python<|message|>print(1)<|call|>", ["print(1)"]),
    ("harmony", "<|channel|>commentary to=functions.g<|message|>{}<|call|>", ["{}"]),
    (
        "hunyuan",
        f'<tool_calls>[{{"name": "f", "arguments": {{"a" "x"}}}}, {_X}]</tool_calls>',
        ['{"name": "f", "arguments": {"a" "x"}}', F],
    ),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{x}<｜tool▁call▁end｜>"
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "```"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ["<｜tool▁call▁begin｜>f<｜tool▁sep｜>{x}<｜tool▁call▁end｜>", ("f", {"a": "```"})],
    ),
    # Marks that are left out, doubled, or part of a value.
    ("glm", "<tool_call>f<arg_key><arg_key>a</arg_key></arg_key><arg_value>x</arg_value></tool_call>", [F]),
    ("glm", "<tool_call>f<arg_key>a</arg_key>x</arg_value></tool_call>", [F]),
    (
        "glm",
        "<tool_call>f<arg_key>a</arg_key><arg_value></arg_value></tool_call>.</arg_value></tool_call>",
        [("f", {"a": "</arg_value></tool_call>."})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\nx</parameter></function></tool_call>y\n</parameter>\n</function>\n</tool_call>\nSo",
        [("f", {"a": "x</parameter></function></tool_call>y"}), "So"],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>\n</tool_call>\nSo",
        [F, "So"],
    ),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n\nSo", [F, "So"]),
    ("gemma4", '<|tool_call>call:f{a:x<|"|>}<tool_call|>', [F]),
    ("gemma4", "<|tool_call>call:f{a:'x',}<tool_call|>", [F]),
    ("gemma4", "<|tool_call>call:f{a:x}<tool_call|>", [F]),
    ("gemma4", '<|tool_call>call:f{a:<|"|>x<|"|>b:2}<tool_call|>', [("f", {"a": "x", "b": 2})]),
    ("gemma4", '<|tool_call>call:f{a:<|"|>s = <|"|>x<|"|>\n<|"|>}<tool_call|>', [("f", {"a": 's = <|"|>x<|"|>\n'})]),
    ("gemma4", '<|tool_call>call:f{a:<|"|>x<tool_call|><|"|>}<tool_call|>So', [("f", {"a": "x<tool_call|>"}), "So"]),
    # Words before calls, beside them, and after them.
    ("llama3", 'I look.\n<|python_tag|>{"name": "f", "parameters": {"a": "x"}}', ["I look.", F]),
    ("llama3", 'I look.\n\n{"name": "f", "parameters": {"a": "x"}}\n\nSo  it\n is.', ["I look.", F, "So  it\n is."]),
    ("llama3", '<|python_start|>{"name": "f", "parameters": {"a": "x"}}<|python_end|>', [F]),
    ("hermes", f"I look:\n```json\n{_X}\n```\nSo.", ["I look:", F, "So."]),
    ("hermes", f"<tools>\n{_X}\n</tools>", [F]),
    ("granite", f"<tool_call>[{_X}]", [F]),
    ("phi4", f"functools[{_X}]", [F]),
    ("olmo3", "<function_calls>\nf(a='x')\nsearch()\n</function_calls>\nSo", [F, G, "So"]),
    ("seed", "<seed:tool_call>\n<function=f>\n<parameter=a>x</parameter>\n</function>\n</seed:tool_call>So", [F, "So"]),
    # Headers that are malformed, doubled or missing.
    (
        "harmony",
        "<|channel|>final<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
        [("reasoning", "Hm."), "Hi"],
    ),
    (
        "harmony",
        "<|channel|>commentary<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hi",
        [("reasoning", "Hm."), "Hi"],
    ),
]
REASONED = [
    ("", False, []),
    ("\n<think>\nI must <think> hard.\n</think>\n\nYes.", False, [("reasoning", "I must <think> hard."), "Yes."]),
    ("so </thin king </think> 42", True, [("reasoning", "so </thin king"), "42"]),
    ("<think></think>x", False, ["x"]),
    ("<think>never ends ", False, [("reasoning", "never ends ")]),
    ("  no <think>here</think>", False, ["  no <think>here</think>"]),
]


def parse(parser: AnswerParser, parts: list[str]) -> list[Piece]:
    pieces = [piece for part in parts for piece in parser.push(part)]
    return joined_pieces(pieces + parser.finish())


def plain(pieces: list[Piece]) -> list[Any]:
    """The pieces: of content their texts, of reasoning that word and the text, of a call its name and its arguments."""
    names = iter([piece.text for piece in pieces if piece.kind == "call"])
    first = {"content": lambda text: text, "arguments": lambda text: (next(names), json.loads(text))}
    return [first.get(piece.kind, lambda text: ("reasoning", text))(piece.text) for piece in pieces if piece.kind != "call"]


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def parser_of(name: str, thinking: bool = False) -> AnswerParser:
    return AnswerParser(TOOL_FORMATS[name], NAMES, thinking=thinking)


@pytest.mark.parametrize(("name", "text", "wanted"), [*SAMPLES, *ODD, *((name, text, [text]) for name, text in TEXTS)])
def test_calls_are_found_whatever_pieces_they_come_in(name: str, text: str, wanted: list[Any]) -> None:
    whole = parse(parser_of(name), [text])
    assert plain(whole) == wanted
    calls = [piece.call for piece in whole if piece.kind == "call"]
    assert calls == list(range(len(calls)))
    assert parse(parser_of(name), list(text)) == whole
    for at in range(len(text) if len(text) < 1000 else 0):
        assert parse(parser_of(name), [text[:at], text[at:]]) == whole


CALLS = [(call, {"a": "x }\n", "b": [1, {"c": None}]}) for call in ("f", "search")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *TEXTS,
        *((name, text) for name, text, _ in (*SAMPLES, *ODD)),
        *((name, way(CALLS)) for name, ways in WAYS.items() for way in ways),
    ],
)
def test_an_answer_that_is_cut_off_has_no_broken_call(name: str, text: str) -> None:
    whole = [piece.text for piece in parse(parser_of(name), [text]) if piece.kind == "arguments"]
    for at in range(0, len(text), 1 + len(text) // 400):
        pieces = parse(parser_of(name), [text[:at]])
        assert all(isinstance(json.loads(piece.text), dict) for piece in pieces if piece.kind == "arguments")
        if len(whole) == 1 and TOOL_FORMATS[name].syntax.is_quoted:
            assert [piece.text for piece in pieces if piece.kind == "arguments"] in ([], whole), "a call with less than it says"


@pytest.mark.parametrize(("text", "thinking", "wanted"), REASONED)
def test_reasoning_comes_first_and_apart(text: str, thinking: bool, wanted: list[Any]) -> None:
    for parts in ([text], list(text)):
        assert plain(parse(AnswerParser(TOOL_FORMATS["json"], {}, thinking=thinking), parts)) == wanted


@pytest.mark.parametrize("name", [name for name, form in TOOL_FORMATS.items() if form.ends])
def test_calls_that_end_an_unclosed_reasoning_are_calls_and_others_are_part_of_it(name: str) -> None:
    mark, call, found = TOOL_FORMATS[name].mark, WAYS[name][0]([F]), [F]
    spoken = f"Say {mark} or `{mark}`, as in {call}, and so on."
    for said, wanted in (
        (f"I look.\n\n{call}\n", [("reasoning", "I look."), *found]),
        (f"{call}{call}", [*found, *found]),
        (f"{spoken}\n{call}", [("reasoning", spoken), *found]),
        (spoken, [("reasoning", spoken)]),
        (f"I would {call}\n</think>\nNo.", [("reasoning", f"I would {call}"), "No."]),
        (f"I look. {(half := call[: len(call) // 2])}", [("reasoning", f"I look. {half}")]),
        (f"So.\n</think>\n\n{call}", [("reasoning", "So."), *found]),
    ):
        for parts in ([said], list(said), [said[: len(said) // 2], said[len(said) // 2 :]]):
            parser = parser_of(name, thinking=True)
            assert plain(parse(parser, parts)) == wanted
            assert parser.num_calls == sum(one[0] == "f" for one in wanted)


MARKS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```json", "```", "f", "["),
    *("<function=f>", "<parameter=a>", "</parameter>", "</function>", "<TOOLCALL>", "</TOOLCALL>", "<arg_key>", "</arg_key>", "]"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call>", "<tool_call|>", '<|"|>', "call:f{a:1}", "<|end|>", "<arg_value>"),
    *("<|start|>assistant", "<|channel|>analysis", "<|channel|>final", " to=functions.f", "<|message|>", "<|tool_call|>", "f(a=1)"),
    *('"', "\\", ",", ";", " ", "\n", ":", "text", '"name"', "<", "tool", "é", "{", "}"),
)
OBJECTS = ('{"name": "f", "arguments": {"a": [1, "}"]}}', '{"name": "f", "parameters": {}}', '{"a": 1}')
FRAGMENTS = st.lists(st.sampled_from([*MARKS, *OBJECTS]), max_size=12).map("".join)


@pytest.mark.parametrize("name", TOOL_FORMATS)
@given(text=FRAGMENTS, places=st.lists(st.integers(0, 400), max_size=6), thinking=st.booleans())
@settings(max_examples=80)
def test_no_split_changes_what_comes_out(name: str, text: str, places: list[int], thinking: bool) -> None:
    def make() -> AnswerParser:
        return parser_of(name, thinking)

    whole = parse(make(), [text])
    assert parse(make(), cut(text, places)) == whole
    assert parse(make(), list(text)) == whole


@pytest.mark.parametrize("name", [name for name, form in TOOL_FORMATS.items() if not form.channels])
@given(text=FRAGMENTS)
@example(text="[TOOL_CALLS][{")
@example(text='Well.[TOOL_CALLS] [ {"name": [1}')
@settings(max_examples=100)
def test_text_without_calls_loses_nothing(name: str, text: str) -> None:
    pieces = parse(parser_of(name), [f"-{text}"])
    if all(piece.kind == "content" for piece in pieces):
        shown = "".join(piece.text for piece in pieces)
        assert re.sub(r"\s", "", shown) == re.sub(r"\s", "", f"-{text}")


def test_a_parser_that_looked_at_pieces_alone_would_be_caught() -> None:
    class Forgetful(AnswerParser):
        def push(self, text: str) -> list[Piece]:
            return [*super().push(text), *self.finish()]

    text = SAMPLES[1][1]
    assert parse(Forgetful(TOOL_FORMATS["hermes"], NAMES), list(text)) != parse(parser_of("hermes"), [text])


@pytest.mark.parametrize("name", WAYS)
def test_what_a_family_writes_is_read_again_with_the_words_around_it(name: str) -> None:
    """Values hold quotes, brackets and marks; where nothing quotes them, none of the row's own."""
    own = () if TOOL_FORMATS[name].syntax.is_quoted else ("tool_call", "function", "parameter", "arg_", "invoke", "DSML")
    parts = tuple(part for part in PARTS if not any(mark in part for mark in own) and (name != "gemma4" or part != '<|"|>'))
    for seed in range(6):
        for way in WAYS[name]:
            random = Random(seed)
            calls = [random_call(random, parts) for _ in range(random.randrange(1, 4))]
            begun, after = ("", "") if name == "harmony" else (random.choice(("", *WORDS)), random.choice(("", *WORDS)))
            text = "\n".join(filter(None, (begun, way(calls), after)))
            whole = parse(AnswerParser(TOOL_FORMATS[name], FUNCTIONS), [text])
            found = [(one.text, json.loads(two.text)) for one, two in pairwise(whole) if one.kind == "call"]
            assert found == calls
            assert "".join(piece.text for piece in whole if piece.kind == "content") == begun + after
            for parts_of in (list(text), cut(text, [random.randrange(1 << 16) for _ in range(6)])):
                assert parse(AnswerParser(TOOL_FORMATS[name], FUNCTIONS), parts_of) == whole


def test_the_gates_check_would_notice_what_is_no_call() -> None:
    texts = {damaged(Random(seed), WAYS["hermes"][0]([("ping", {})])) for seed in range(50)}
    kinds = {tuple(piece.kind for piece in parse(AnswerParser(TOOL_FORMATS["hermes"], FUNCTIONS), [text])) for text in texts}
    assert {("call", "arguments"), ("content",)} <= kinds


@pytest.mark.parametrize("row", TOOL_FORMATS.values(), ids=lambda row: row.name)
def test_a_demanded_call_is_begun_in_the_format_itself(row: ToolFormat) -> None:
    text = row.mark + row.head("f") + '{"a": 1}' + row.closes
    assert plain(parse(parser_of(row.name), [text])) == [("f", {"a": 1})]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral"),
        ("{% if tools %}Environment: ipython{% endif %}", "llama3"),
        ("{% if tools %}<tool_call>\n<function=example>{% endif %}", "qwen3_coder"),
        ("{% if tools %}<tool_call>{function-name}<arg_key>{% endif %}", "glm"),
        ("{% if tools %}<|tool_call_start|>{% endif %}", "lfm2"),
        ("{% if tools %}List of tools: <|tool_list_start|>[{% endif %}", "lfm2"),
        ("{% if tools %}List of tools: [{% endif %}", "lfm2"),
        ("{% if tools %}<tool_calls>[{% endif %}", "hunyuan"),
        ("{% if tools %}<TOOLCALL>[{% endif %}", "nemotron2"),
        ("{% if tools %}only with <|tool_call|> followed by a JSON list{% endif %}", "granite"),
        ("{% if tools %}within <tool_call></tool_call> XML tags{% endif %}", "hermes"),
        ("{{ tools }}<|tool_call>call:", "gemma4"),
        ("{{ tools }}<|tool|>{{ tools }}<|/tool|>", "phi4"),
        ("{{ tools }}<function_calls>", "olmo3"),
        ("{{ tools }}<seed:tool_call><function=", "seed"),
        ("{{ tools }}<｜DSML｜function_calls>", "dsml"),
        ("{{ tools }}<｜tool▁calls▁begin｜>", "deepseek"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony"),
        ("<start_of_turn>", "json"),
        (None, "json"),
    ],
)
def test_the_format_of_calls_is_the_templates(template: str | None, name: str) -> None:
    assert tool_format(template).name == name


GEMMA = "{{ message.split('<channel|>') }}<|channel>{{ tools }}<|tool_call>call:"
GEMMAS = '<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>'


@pytest.mark.parametrize(
    ("template", "text", "wanted"),
    [
        ("[THINK]", "[THINK]a[/THINK]b", [("reasoning", "a"), "b"]),
        ("<|channel>thought", "<|channel>thought\na<channel|>b", [("reasoning", "a"), "b"]),
        ("{{ x.split('</think>') }}", "<think>a</think>b", [("reasoning", "a"), "b"]),
        (None, "<think>a</think>b", [("reasoning", "a"), "b"]),
        (GEMMA, f"<|channel>thought\na\n<channel|>b{GEMMAS}", [("reasoning", "a"), "b", F]),
        (GEMMA, f"<|channel>thought\n<channel|>b{GEMMAS}", ["b", F]),  # an empty channel, where thinking is off
    ],
)
def test_reasoning_has_the_marks_of_the_template(template: str | None, text: str, wanted: list[Any]) -> None:
    assert plain(parse(answer_parser(template, NAMES), list(text))) == wanted
    begun = reasoning_marks(template)[0]
    for prompt, opened in ((f"assistant\n{begun}\n", True), ("assistant\n", False)):
        tokenizer: Any = SimpleNamespace(decode=lambda ids, skip_special, prompt=prompt: prompt)
        assert opens_reasoning(tokenizer, template, [0]) == opened
    assert plain(parse(answer_parser(template, NAMES, thinking=True), list(text.removeprefix(begun)))) == wanted


def work(name: str, num_lines: int) -> int:
    """Lines of the parser that run for one call whose text is a program of this many lines, which comes in small pieces."""
    program = "".join(f'if x["{number}"] > [{number}]:\n    print({{"a": "b"}})  # <tag>\n' for number in range(num_lines))
    text = WAYS[name][0]([("write_file", {"path": "a.py", "content": program})])
    parser, count = AnswerParser(TOOL_FORMATS[name], FUNCTIONS), 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace if "/parsing/" in frame.f_code.co_filename.replace("\\", "/") else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        pieces = [piece for at in range(0, len(text), 4) for piece in parser.push(text[at : at + 4])]
    finally:
        sys.settrace(before)
    pieces += parser.finish()
    assert [piece.text for piece in pieces if piece.kind == "call"] == ["write_file"]
    return count


@pytest.mark.parametrize("name", WAYS)
def test_a_call_is_read_once_however_small_its_pieces(name: str) -> None:
    few, many = work(name, 50), work(name, 200)
    assert many < 5 * few, "four times the text is four times the work"
