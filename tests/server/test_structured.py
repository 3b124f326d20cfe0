"""Structured outputs through the official clients: every spelling, streams, tools, reasoning, and grammars that are refused."""

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel

from cpuspec import SamplingParams
from cpuspec.engine.engine import RequestedAnswer
from cpuspec.server.errors import RequestError
from cpuspec.server.loosening import plain_pattern
from cpuspec.server.model import ServedModel
from cpuspec.server.parsing.answer import AnswerParser
from cpuspec.server.parsing.calls import TOOL_FORMATS, ToolFormat, tool_format
from cpuspec.server.structured import call_grammar, call_trigger
from cpuspec.text import MOST_BYTES, GrammarConstraint, Grammars
from tests.server.asgi import application
from tests.server.running import PATIENCE_S, Running, load, serving, templated_model, with_tokens
from tests.server.test_tools import TEMPLATE
from tests.server.written import as_xml
from tests.toys import PieceTokenizer

ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
MESSAGES: Any = [{"role": "user", "content": "the cat sat on the mat"}]
ASK: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0}


class Door(BaseModel, extra="forbid"):
    color: Literal["red", "green"]
    open: bool


class House(BaseModel, extra="forbid"):
    """A house."""

    owner: Literal["Ann", "Bob"]
    door: Door
    size: Literal[1, 2, 3]


SCHEMA = House.model_json_schema()
TIME = {
    "type": "object",
    "description": "of a call",
    "properties": {"zone": {"enum": ["CET", "UTC"]}, "title": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["zone", "title"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_time", "description": "the time", "parameters": TIME}}
STRICT: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}


def make_model(directory: Path, template: str) -> Path:
    """A model whose vocabulary has tokens for reasoning and tool calls."""
    return with_tokens(templated_model(directory, template, context_length=4096), ADDED, special=False)


MODEL = partial(make_model, template=TEMPLATE.replace("<think>", ""))


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a model that reasons."""
    path = make_model(tmp_path_factory.mktemp("model"), TEMPLATE)
    with serving(lambda: load(path)) as found:
        yield found


def token_of(running: Running, text: str) -> int:
    token = running.model.llm.tokenizer.token_id(text)
    assert token is not None
    return token


def is_house(text: str) -> bool:
    return isinstance(House.model_validate_json(text), House)


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


LARK = 'start: "the " ("cat" | "dog")'
GBNF = 'root ::= "the " ("cat" | "dog")'
NAMED = {"type": "json_schema", "json_schema": {"name": "house", "schema": SCHEMA, "strict": True}}
ANIMAL = re.compile("the (cat|dog)").fullmatch
SPELLINGS: dict[str, tuple[dict[str, Any], Any]] = {
    "response_format": ({"response_format": NAMED}, is_house),
    "json_object with a schema": ({"response_format": {"type": "json_object", "schema": SCHEMA}}, is_house),
    "structured_outputs.json": ({"structured_outputs": {"json": SCHEMA}}, is_house),
    "structured_outputs.json as a text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_house),
    "structured_outputs.regex": ({"structured_outputs": {"regex": "the (cat|dog)"}}, ANIMAL),
    "structured_outputs.choice": ({"structured_outputs": {"choice": ["the cat", "the dog"]}}, ANIMAL),
    "structured_outputs.grammar": ({"structured_outputs": {"grammar": GBNF}}, ANIMAL),
    "guided_json": ({"guided_json": SCHEMA, "guided_decoding_backend": "auto"}, is_house),
    "guided_regex": ({"guided_regex": "the (cat|dog)"}, ANIMAL),
    "guided_choice": ({"guided_choice": ["the cat", "the dog"]}, ANIMAL),
    "guided_grammar": ({"guided_grammar": LARK}, ANIMAL),
    "json_schema": ({"json_schema": SCHEMA}, is_house),
    "regex": ({"regex": "the (cat|dog)"}, ANIMAL),
    "choices": ({"choices": ["the cat", "the dog"]}, ANIMAL),
    "grammar": ({"grammar": GBNF}, ANIMAL),
}


@pytest.mark.parametrize(("body", "is_right"), SPELLINGS.values(), ids=SPELLINGS)
def test_every_spelling_restricts_chats_and_plain_completions(client: openai.OpenAI, body: dict[str, Any], is_right: Any) -> None:
    answer = client.chat.completions.create(max_tokens=200, extra_body=body, **ASK)
    assert answer.choices[0].finish_reason == "stop"
    assert is_right(answer.choices[0].message.content)
    plain = client.completions.create(model="tiny", prompt="the cat", max_tokens=200, temperature=1.5, seed=1, extra_body=body)
    assert plain.choices[0].finish_reason == "stop"
    assert is_right(plain.choices[0].text)


@pytest.mark.parametrize("body", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}])
def test_any_object_is_an_object(client: openai.OpenAI, body: dict[str, Any]) -> None:
    stop = {"extra_body": body, "logit_bias": {"92": 5}}  # }, which a random model would not find soon
    answers = client.chat.completions.create(n=8, seed=1, max_tokens=400, **ASK | {"temperature": 1.0}, **stop)
    texts = [one.message.content for one in answers.choices if one.finish_reason == "stop"]
    assert texts
    assert all(map(is_object, texts))


def test_official_clients_parse_answers_and_their_streams(client: openai.OpenAI, theirs: anthropic.Anthropic) -> None:
    def streamed(opened: Any) -> Any:
        with opened as stream:
            for _ in stream:
                pass
            return stream

    ask: dict[str, Any] = {"max_tokens": 200, **ASK}
    chat = client.chat.completions.parse(response_format=House, **ask).choices[0].message.parsed
    assert isinstance(chat, House)
    stream = streamed(client.chat.completions.stream(response_format=House, **ask))
    assert stream.get_final_completion().choices[0].message.parsed == chat
    tools = [openai.pydantic_function_tool(House)]
    (call,) = client.chat.completions.parse(tools=tools, tool_choice="required", **ask).choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, House)

    ask = {"model": "tiny", "input": "the cat", "temperature": 0, "max_output_tokens": 200}
    answer = client.responses.parse(text_format=House, **ask)
    assert isinstance(answer.output_parsed, House)
    assert answer.text.format.type == "json_schema"
    assert streamed(client.responses.stream(text_format=House, **ask)).get_final_response().output_parsed == answer.output_parsed

    ask = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200}
    message = theirs.messages.parse(output_format=House, **ask)
    assert isinstance(message.parsed_output, House)
    assert streamed(theirs.messages.stream(output_format=House, **ask)).get_final_message().parsed_output == message.parsed_output
    assert theirs.beta.messages.parse(output_format=House, **ask).parsed_output == message.parsed_output
    form = {"type": "json_schema", "schema": SCHEMA}
    assert is_house(theirs.messages.create(extra_body={"output_format": form}, **ask).content[0].text)
    counted = theirs.messages.count_tokens(model="tiny", messages=MESSAGES, output_config={"format": form})
    assert counted.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_a_strict_tool_is_kept_to_in_calls_that_the_model_begins(client: openai.OpenAI, running: Running) -> None:
    """A bias lets the model begin a call wherever it is free, so one follows the other."""
    bias = {str(token_of(running, "<tool_call>")): 100}
    answer = client.chat.completions.create(tools=[STRICT], logit_bias=bias, max_tokens=600, **ASK)
    calls = answer.choices[0].message.tool_calls or []
    assert len(calls) > 2, answer.choices[0].message.content
    for call in calls:
        found = json.loads(call.function.arguments)  # type: ignore[union-attr]
        assert found["zone"] in ("CET", "UTC")
        assert 10 <= found["title"] <= 99
    free = client.chat.completions.create(tools=[STRICT], max_tokens=30, **ASK).choices[0].message
    plain = client.chat.completions.create(tools=[TOOL], max_tokens=30, **ASK).choices[0].message
    assert (free.content, free.tool_calls) == (plain.content, plain.tool_calls)


def test_an_answer_with_tools_and_a_format_is_a_call_or_keeps_to_the_format(client: openai.OpenAI, running: Running) -> None:
    ask: dict[str, Any] = {"tools": [STRICT], "response_format": NAMED, "max_tokens": 200, **ASK}
    bias = {str(token_of(running, "<tool_call>")): 100}
    called = client.chat.completions.create(logit_bias=bias, **ask).choices[0]
    assert called.finish_reason == "tool_calls"
    assert json.loads(called.message.tool_calls[0].function.arguments)["zone"] in ("CET", "UTC")  # type: ignore[index,union-attr]
    answered = client.chat.completions.create(logit_bias=dict.fromkeys(bias, -100), **ask).choices[0]
    assert answered.message.tool_calls or is_house(answered.message.content or "")


def test_reasoning_is_free_and_the_answer_behind_it_is_not(thinking: Running) -> None:
    client = thinking.openai
    opens, closes = token_of(thinking, "<think>"), token_of(thinking, "</think>")

    def ask(max_tokens: int = 200, bias: dict[int, int] | None = None, **extra: Any) -> Any:
        biases = {str(token): value for token, value in (bias or {}).items()}
        return client.chat.completions.create(max_tokens=max_tokens, extra_body=extra, logit_bias=biases, **ASK).choices[0].message

    think = {"chat_template_kwargs": {"think": True}}
    begun, free = ask(20, response_format=NAMED, **think), ask(20, ignore_eos=True, **think)
    assert begun.content == free.content == ""
    assert begun.reasoning_content == free.reasoning_content
    assert is_house(ask(bias={closes: 100}, response_format=NAMED, **think).content)
    # The model opens its reasoning itself, or does not.
    assert ask(20, {opens: 100, closes: -100}, response_format=NAMED).content == ""
    assert is_house(ask(bias={opens: -100}, response_format=NAMED).content)
    # A demanded call comes without reasoning.
    called = ask(tools=[TOOL], tool_choice="required", **think)
    assert json.loads(called.tool_calls[0].function.arguments)["zone"] in ("CET", "UTC")


def test_a_schema_holds_behind_the_reasoning_that_a_client_has_begun(thinking: Running) -> None:
    """However long it is, so that nothing of the schema's text becomes reasoning."""
    begun = {"role": "assistant", "content": "", "reasoning_content": "the cat sat on the mat and the dog ran to the door"}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "the cat"}, begun], "max_tokens": 200}
    closes = {str(token_of(thinking, "</think>")): 100}
    for bias in ({}, closes):
        reply = thinking.post("/v1/chat/completions", json=body | {"response_format": NAMED, "logit_bias": bias}).json()
        message = reply["choices"][0]["message"]
        assert is_house(message["content"]) if bias else not message["content"]
    free = thinking.post("/v1/chat/completions", json=body | {"max_tokens": 20}).json()["choices"][0]["message"]
    held = thinking.post("/v1/chat/completions", json=body | {"max_tokens": 20, "response_format": NAMED}).json()
    assert held["choices"][0]["message"]["reasoning_content"] == free["reasoning_content"]


def nested(depth: int) -> Any:
    found: Any = {"type": "string"}
    for _ in range(depth):
        found = {"type": "object", "properties": {"a": found}}
    return found


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "exponential": (
        {"json_schema": {"allOf": [{"type": "string", "pattern": f"[a-z]{{{number},}}"} for number in range(60)]}},
        "too much time or memory",
    ),
    "huge": ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "a" * 7_000_000}}}}, "takes at most"),
    "deep": ({"response_format": {"type": "json_schema", "json_schema": {"schema": nested(150)}}}, "nested"),
    "empty": ({"guided_choice": []}, "no choice"),
    "impossible": ({"json_schema": {"type": "string", "enum": []}}, "schema"),
    "a file": ({"json_schema": {"$ref": "file:///etc/passwd"}}, "schema"),
    "an open bracket": ({"regex": "(a"}, "regular expression"),
    "counted": ({"guided_regex": "((a{1000}){1000}){1000}"}, "regular expression"),
    "no grammar": ({"grammar": "root ::= ("}, "grammar"),
    "two": ({"regex": "a", "guided_json": {}}, "one grammar; got regex and guided_json"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "no schema"),
    "unknown of vLLM's": ({"structured_outputs": {"structural_tag": "a"}}, "structural_tag"),
    "no end": ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    "tools": ({"tools": [TOOL], "regex": "a"}, "JSON schema only"),
    "a tool": (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "cat"}}}]},
        "cannot be compiled",
    ),
}


def test_grammars_that_cannot_be_used_are_refused_and_stop_no_stream(client: openai.OpenAI, running: Running) -> None:
    stream = client.chat.completions.create(stream=True, max_tokens=2000, extra_body={"ignore_eos": True}, **ASK)
    parts = iter(stream)
    next(parts)
    for name, (body, message) in HOSTILE.items():
        reply = running.post("/v1/chat/completions", json={**ASK, **body, "max_tokens": 5})
        assert reply.status_code == 400, (name, reply.text[:300])
        assert message in reply.json()["error"]["message"], name
    assert sum(bool(part.choices[0].delta.content) for part in parts) > 10
    assert not running.server.num_unfinished


def of(**keywords: Any) -> Any:
    """A schema of one property, which keeps to the keywords."""
    return {"type": "object", "properties": {"a": keywords}, "required": ["a"], "additionalProperties": False}


COLORS = {"red", "green"}
WORDS = {"enum": ["red", "green"]}
PROPERTIES = {"propertyNames": {"pattern": "^x"}, "additionalProperties": WORDS, "maxProperties": 1}
BY_LOOK_AROUND = {"type": "object", "patternProperties": {"^(?!x)": WORDS}, "additionalProperties": False, "maxProperties": 1}
# Keywords that llguidance cannot keep, a schema with them, and what of the rest is kept all the same.
LOOSE: list[tuple[str, Any, Callable[[Any], bool]]] = [
    ("uniqueItems", of(type="array", items=WORDS, maxItems=2, uniqueItems=True), COLORS.issuperset),
    ("propertyNames", of(type="object", **PROPERTIES), lambda a: True),
    ("format", of(type="string", format="iri", maxLength=3), lambda a: len(a) <= 3),
    ("pattern", of(type="string", pattern="^(?!green)(red|green)$"), lambda a: a in COLORS),
    ("pattern", of(type="string", pattern="^(a)\\1$", maxLength=3), lambda a: len(a) <= 3),
    ("additionalProperties, patternProperties", BY_LOOK_AROUND, lambda a: True),
    ("not", of(**WORDS, **{"not": {"const": "red"}}), lambda a: a in COLORS),
    ("if", of(**WORDS, **{"if": {"const": "a"}, "then": False}), lambda a: a in COLORS),
    ("oneOf", of(oneOf=[{"enum": ["red"]}, {"enum": ["red", "green"]}]), lambda a: a in COLORS),
    ("contains, uniqueItems", of(type="array", items=WORDS, maxItems=1, uniqueItems=True, contains=WORDS), COLORS.issuperset),
]
KEPT = {
    "uniqueItems: false": of(type="array", items=WORDS, maxItems=2, uniqueItems=False),
    "a number's format": of(type="integer", format="int32", minimum=1, maximum=5),
    "branches by a constant": {
        "$defs": {name: {**of(const=name), "title": name} for name in ("red", "green")},
        "oneOf": [{"$ref": "#/$defs/red"}, {"$ref": "#/$defs/green"}],
    },
    "a property called not": {"type": "object", "properties": {"not": WORDS}, "required": ["not"], "additionalProperties": False},
}


@pytest.mark.parametrize(("lost", "schema", "holds"), LOOSE)
def test_the_rest_of_a_schema_is_kept_and_a_header_names_what_is_not(running: Running, lost: str, schema: Any, holds: Any) -> None:
    form: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    ask = {**ASK, "max_tokens": 60, "logit_bias": {"92": 20, "93": 10}}
    chat = running.post("/v1/chat/completions", json=ask | {"response_format": form})
    plain = running.post("/v1/completions", json={"prompt": "a", "max_tokens": 60, "guided_json": json.dumps(schema)})
    call = running.post("/v1/chat/completions", json=ask | {"tools": [tool], "tool_choice": "required"})
    theirs = running.post(
        "/v1/messages",
        json={"messages": MESSAGES, "max_tokens": 3, "output_config": {"format": {"type": "json_schema", "schema": schema}}},
    )
    form["json_schema"]["strict"] = True
    refused = running.post("/v1/chat/completions", json=ask | {"response_format": form})
    tool["function"]["strict"] = True
    no_tool = running.post("/v1/chat/completions", json=ask | {"tools": [tool]})
    for reply in (chat, plain, call, theirs):
        assert (reply.status_code, reply.headers.get("x-cpuspec-loosened")) == (200, lost), reply.text
    choice = chat.json()["choices"][0]
    if lost != "propertyNames":  # whose names a random model does not end
        assert choice["finish_reason"] == "stop"
        assert holds(next(iter(json.loads(choice["message"]["content"]).values()), {}))
    for reply in (refused, no_tool):
        assert reply.status_code == 400
        assert f"is strict, and {lost.replace(', ', ' and ')} cannot be kept" in reply.json()["error"]["message"]


@pytest.mark.parametrize("schema", KEPT.values(), ids=KEPT)
def test_a_schema_that_can_be_kept_is_kept_strictly(running: Running, schema: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    reply = running.post("/v1/chat/completions", json=ASK | {"max_tokens": 60, "response_format": form})
    assert reply.status_code == 200, reply.text
    assert "x-cpuspec-loosened" not in reply.headers


def test_a_catalogue_of_tools_that_is_too_long_loses_its_longest_schemas() -> None:
    long = {"type": "object", "properties": {f"p{number}": {"enum": ["x" * 200, "y"]} for number in range(200)}}
    tools: Any = [{"type": "function", "function": {"name": f"f{number}", "parameters": long}} for number in range(3)]
    form = tool_format(TEMPLATE)
    text, lost = call_grammar(form, [*tools, TOOL], set(), form.begins, demanded=True)
    assert len(text) < MOST_BYTES
    assert lost == {"parameters"}
    assert text.count("x" * 200) == 200, "one of three has room"
    assert '"CET"' in text
    text, lost = call_grammar(form, [*tools, TOOL], {"f1"}, form.begins, demanded=True)
    assert 'arguments1: %json {"type": "object", "properties": {"p0"' in text
    with pytest.raises(RequestError, match="strict tools take more than"):
        call_grammar(form, tools, {"f0", "f1", "f2"}, form.begins, demanded=True)


TAGGED = {
    "type": "object",
    "$defs": {
        "place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
    },
    "properties": {
        "text": {"type": "string", "description": "any"},
        "kind": {"enum": ["red", "green"]},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "Maybe"},
        "size": {"type": "integer"},
        "at": {"$ref": "#/$defs/place"},
    },
    "required": ["text", "kind", "at"],
    "additionalProperties": False,
}
XML = tool_format("{{ tools }}<tool_call>\n<function=")
VALUES = {"text": "<p>\n</para \\n{", "kind": "red", "size": 12, "at": {"x": 3}}


def in_tags(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{as_xml((name, arguments))}\n</tool_call>"


def accepts(grammar: str, text: str) -> bool:
    found = Grammars(PieceTokenizer([*(bytes([byte]) for byte in range(256)), "<end>"], [256])).constraint(  # type: ignore[arg-type]
        SamplingParams(grammar=grammar)
    )
    path = list(text.encode())
    assert isinstance(found, GrammarConstraint)
    legal = [found.legal(path[:size]) for size in range(len(path))]
    return all(one is not None and one[byte] for one, byte in zip(legal, path, strict=True)) and found.accepts(path)


@pytest.mark.parametrize("named", [True, False])
def test_a_demanded_call_in_xml_keeps_to_the_schema_and_is_read_as_it_was_meant(named: bool) -> None:
    tools = [{"function": {"name": "paint", "parameters": TAGGED}}, {"function": {"name": "any", "parameters": {"type": "object"}}}]
    written = "<tool_call>" + XML.head("paint", True) if named else XML.begins
    grammar, lost = call_grammar(XML, tools[: 1 if named else 2], {"paint"}, written, demanded=True)
    assert not lost
    text = in_tags("paint", VALUES)
    assert accepts(grammar, text.removeprefix(written))
    parser = AnswerParser(XML, {"paint": TAGGED})
    pieces = [*parser.push(text), *parser.finish()]
    assert [(piece.kind, piece.text) for piece in pieces if piece.kind == "call"] == [("call", "paint")]
    assert json.loads("".join(piece.text for piece in pieces if piece.kind == "arguments")) == VALUES
    wrong = ({"size": "12a"}, {"kind": "blue"}, {"at": {"x": "y"}}, {"other": 1})
    assert not any(accepts(grammar, in_tags("paint", VALUES | one).removeprefix(written)) for one in wrong)
    assert not accepts(grammar, in_tags("paint", {"text": "a"}).removeprefix(written))
    if not named:
        assert accepts(grammar, in_tags("any", {"a": "b", "c": [1]}).removeprefix(written))


SIZED = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"], "additionalProperties": False}


def ways(row: ToolFormat) -> list[str]:
    """How models of a row begin a call: after a mark, and where they may, in a fence, on lines, or after words alone."""
    if row.tagged:
        return [f"Well.{mark}<function=paint>\n<parameter=size>\n" for mark in (f"{row.mark}\n", f"{row.mark}", "\n")]
    found = [f'Well.\n{row.mark}{row.head("paint")}{{"size": '] * (not row.bare or row.mark != "")
    if row.bare:
        found += [f'{start}{{\n  "name": "paint",\n  "arguments": {{\n    "size": ' for start in ("", "Well.\n", "```json\n")]
        found += ["{'name': 'paint', 'arguments': {\"size\": "]  # Python's dict; its arguments are JSON then
    return found + ['<|channel|>commentary to=functions.paint<|message|>{"size": '] * row.channels


@pytest.mark.parametrize("row", TOOL_FORMATS.values(), ids=lambda row: row.name)
def test_a_strict_tool_is_kept_to_wherever_a_model_begins_its_call(row: ToolFormat) -> None:
    """By every family, with a mark, in a fence and without either; other text is free."""
    tools = [{"function": {"name": "paint", "parameters": SIZED}}, {"function": {"name": "any", "parameters": {"type": "object"}}}]
    grammar, lost = call_grammar(row, tools, {"paint"}, None)
    params = SamplingParams(grammar=grammar, grammar_trigger=call_trigger(row, {"paint"}))
    pieces = [*(bytes([byte]) for byte in range(256)), "<end>"]
    found = Grammars(PieceTokenizer(pieces, [256])).constraint(params)  # type: ignore[arg-type]
    assert found is not None
    assert not lost
    for begun in ways(row):
        path = list(begun.encode())
        assert all(found.legal(path[:size])[byte] for size, byte in enumerate(path)), begun  # type: ignore[index]
        legal = found.legal(path)
        assert legal is not None
        assert legal[ord("1")]
        assert not legal[ord('"')]
        assert not legal[ord("x")]
        assert not legal[256]
        if begun.startswith("{'"):
            pieces = AnswerParser(row, {"paint": SIZED}).push(f"{begun}1}}}}")
            assert [one.text for one in pieces] == ["paint", '{"size": 1}']
    free = found.legal(list(b'{"name": "other", "arguments": {"size": '))
    assert free is not None
    assert free.all()


@pytest.mark.parametrize(
    "one",
    [
        *({"type": "string", "pattern": "^a+$"}, {}, {"type": ["string", "integer"]}, {"enum": ["a", 1]}, True),
        *({"anyOf": [{"type": "string"}, True]}, {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}),
    ],
)
def test_a_schema_that_tags_cannot_tell_is_kept_to_in_json(one: Any) -> None:
    tools = [{"function": {"name": "f", "parameters": of(**one) if one is not True else {"properties": {"a": True}}}}]
    grammar, _ = call_grammar(XML, tools, set(), XML.begins, demanded=True)
    value = "aaa" if isinstance(one, dict) and "pattern" in one else "a"
    assert accepts(grammar, f'\n{{"name": "f", "arguments": {{"a": "{value}"}}}}')


PATTERNS = {
    **{"^a$": "^a$", "^a|^b$": "^a|^b$", r"\bfoo\b": "foo", "^(?!x)(?=.*[)a])[a-z]+(?<!y)$": "^[a-z]+$", "a^b$c": "abc"},
    **{"(?:^a$)": "(?:^a$)", "x(^a)": "x(a)", "[^^$(?=]": "[^^$(?=]", r"(a)\1": None, r"a\0": None, "(?=a)*b": None},
    **{r"\^\$a": r"\^\$a", "(?!a": ""},
}


@pytest.mark.parametrize(("pattern", "wanted"), PATTERNS.items())
def test_a_pattern_loses_its_assertions(pattern: str, wanted: str | None) -> None:
    assert plain_pattern(pattern) == wanted


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_leads_nowhere_is_the_clients_error(stream: bool, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    right = GrammarConstraint.legal
    monkeypatch.setattr(GrammarConstraint, "legal", lambda self, path: None if len(path) >= 3 else right(self, path))
    body = {**ASK, "regex": "the cat sat on the mat", "stream": stream}
    reply = running.post("/v1/chat/completions", json=body)
    assert "the grammar leads nowhere here" in reply.text
    assert reply.status_code == (200 if stream else 400)


def test_clients_take_turns_at_the_compiler_and_a_compiled_grammar_waits_for_none(path: Path) -> None:
    async def ask(served: ServedModel) -> list[str]:
        compiled, go_on = list[str](), threading.Event()
        check = served.llm.check

        def slow(prompt: Sequence[int], params: SamplingParams) -> None:
            if not served.llm.engine.has_compiled(params):
                compiled.append(str(params.regex))
                assert go_on.wait(PATIENCE_S)
            check(prompt, params)

        async def answer(client: str, regex: str) -> None:
            params = SamplingParams(regex=regex, max_tokens=1)
            (await served.answers(client, regex, [RequestedAnswer([5], params)], None)).close()

        await answer("a", "known")
        served.llm.check = slow  # type: ignore[method-assign]
        waiting = [asyncio.create_task(answer(regex[0], regex)) for regex in ("a0", "a1", "a2", "a3", "b0")]
        await asyncio.sleep(0)
        await answer("b", "known")
        go_on.set()
        await asyncio.gather(*waiting)
        return compiled

    with asyncio.Runner() as loop, application(path, loop) as app:
        compiled = loop.run(ask(app.served))
    assert [one for one in compiled if one != "b0"] == ["a0", "a1", "a2", "a3"]
    assert compiled.index("b0") in (1, 2)  # it came last, and waited for the running one and for one turn at most
