"""Structured outputs: the fields of all protocols translated to `SamplingParams`, and the grammar of a tool call.

Sources: OpenAI's and Anthropic's API references; vLLM's structured outputs; llama.cpp's server README; llguidance's docs/syntax.md
and docs/json_schema.md.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

from cpuspec.server.errors import RequestError
from cpuspec.server.loosening import loosened
from cpuspec.server.parsing.calls import ToolFormat
from cpuspec.server.parsing.converted import value_kinds
from cpuspec.text import MOST_BYTES

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

# The white space of `json.dumps`, as in the answers to `json_schema`.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Keywords of the schemas of arguments that can be written in tags.
_OF_TAGS = {"$schema", "$defs", "additionalProperties", "definitions", "properties", "required", "type", "x-guidance"}
# Of a call that the model begins itself, perhaps on several lines.
_LOOSE = {"whitespace_flexible": True, "whitespace_pattern": r"[ \t\n]{1,24}", "item_separator": ",", "key_separator": ":"}
# llguidance cannot see that the branches of a `oneOf` exclude each other. `loosened` has made an `anyOf` of those that do not.
_ONE_OF = {"coerce_one_of": True}


def answer_format(given: Any, where: str) -> dict[str, Any]:
    """OpenAI's `response_format` and `text.format`, or Anthropic's `output_config.format`, as fields of SamplingParams.

    where: the field's name in the request. Raises RequestError.
    """
    kind = given.get("type") if isinstance(given, Mapping) else None
    if given is None or kind == "text":
        return {}
    if kind not in ("json_object", "json_schema"):
        raise RequestError(f"{where}.type is text, json_object or json_schema, got {str(kind)[:40]!r}", where)
    holder = given.get("json_schema", given)
    schema = holder.get("schema") if isinstance(holder, Mapping) else None
    if schema is None and kind == "json_object":
        schema = ANY_OBJECT
    if not isinstance(schema, Mapping):
        raise RequestError(f"{where} has no schema; wanted a JSON schema as an object", where)
    if isinstance(holder, Mapping) and holder.get("strict") is True:
        check_strict(schema, where, where)
    return {"json_schema": schema}


def loose_format(keeps_to: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """The same fields of SamplingParams with the part of a JSON schema that can be kept, and the keywords that are lost."""
    schema = keeps_to.get("json_schema")
    with suppress(ValueError, RecursionError):  # the grammar's compiler reports text that is no JSON
        found, lost = loosened(json.loads(schema) if isinstance(schema, str) else schema)
        if isinstance(found, Mapping):
            guidance = found.get("x-guidance")
            own = {**_ONE_OF, **(guidance if isinstance(guidance, Mapping) else {})}
            return {**keeps_to, "json_schema": {**found, "x-guidance": own}}, lost
    return dict(keeps_to), set()


def noted_format(keeps_to: Mapping[str, Any], notes: dict[str, str]) -> dict[str, Any]:
    """The fields that `loose_format` returns. notes: of the request; they get the lost keywords."""
    found, lost = loose_format(keeps_to)
    notes |= loosened_note(lost)
    return found


def loosened_note(lost: Set[str]) -> dict[str, str]:
    """A request's note of the keywords that are lost of its schemas, for its response's headers."""
    return {"loosened": ", ".join(sorted(lost))} if lost else {}


def check_strict(schema: Any, name: str, where: str) -> None:
    """Raise RequestError for a schema that must be kept as a whole and cannot."""
    if lost := loosened(schema)[1]:
        raise RequestError(
            f"{name} is strict, and {' and '.join(sorted(lost))} cannot be kept to; leave that out, or strict",
            where,
        )


def call_grammar(
    form: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    strict: Set[str],
    written: str | None,
    content: str | Mapping[str, Any] | None = None,
    demanded: bool = False,
) -> tuple[str, set[str]]:
    """A Lark grammar of one call of one of the tools, and the keywords that are lost of their schemas.

    strict: names of the tools whose arguments keep to their whole schema. Arguments of other tools are any object, or if the call
    is demanded keep to the part of the schema that llguidance knows. written: the call's beginning, which the grammar leaves out;
    None for a call that the model begins itself, in any of its ways (`call_trigger`).
    content: a JSON schema that the answer may keep to instead of a call. If the grammar is too long to be compiled, tools that are
    not strict take any object, those with the longest schemas first. Raises RequestError for what is no schema.
    """
    names, lines, texts, loose_texts, lost = [], [], {}, {}, set()
    for number, tool in enumerate(tools):
        function = tool["function"]
        name, schema = function["name"], function["parameters"] if function["name"] in strict or demanded else ANY_OBJECT
        if name in strict:
            check_strict(schema, f"tool {name!r}", "tools")
        kept, less = loosened(schema)
        lost |= less
        options: dict[str, Any] = _ONE_OF if name in strict else {"lenient": True, **_ONE_OF}
        in_tags = form.tagged and can_be_tagged(kept)
        head, closes = form.head(name, in_tags), f"</function>\n{form.ends}" if in_tags else form.closes
        names.append(f"call{number}")
        if written is None:
            pattern = _begun(form, name, in_tags).replace("/", r"\/")
            begins, options = f"/{pattern}/", {**options, **_LOOSE}
            closes = f"/{_SPACES}\\}}/" if form.bare and not in_tags else json.dumps(closes)
        else:
            begins, closes = json.dumps((form.mark + head).removeprefix(written)), json.dumps(closes)
        lines.append(f"call{number}: {begins} arguments{number} {closes}")
        what = f"the schema of tool {name!r}"
        texts[number] = _tagged(kept, options, number) if in_tags else f"%json {_schema_text(kept, options, what, type='object')}"
        loose_texts[number] = _tagged(ANY_OBJECT, {}, number) if in_tags else f"%json {_schema_text(ANY_OBJECT, {}, 'an object')}"
    loose = {number: text for number, text in texts.items() if tools[number]["function"]["name"] not in strict}
    bytes_left = MOST_BYTES - sum(len(line) + 32 for line in (*lines, *texts.values(), str(content or "")))
    for number in sorted(loose, key=lambda number: -len(loose[number])):
        if bytes_left < 0:
            bytes_left += len(texts[number])
            texts[number] = loose_texts[number]
            lost.add("parameters")
    if bytes_left < 0:
        raise RequestError(f"the schemas of the strict tools take more than {MOST_BYTES} bytes; leave out strict for some", "tools")
    lines += [f"arguments{number}: {text}" for number, text in texts.items()]
    if form.tagged:
        lines.append(r'text[suffix="\n</parameter>"]: /(?s:.*)/')
    if content is not None:
        names.append("content")
        lines.append(f"content: %json {_schema_text(content, _ONE_OF, 'the JSON schema')}")
    return "\n".join([f"start: {' | '.join(names)}", *lines]), lost


def call_trigger(form: ToolFormat, strict: Iterable[str]) -> str:
    """A regular expression of how a model begins a call: its mark, or without one a call of a strict tool.

    The group is where the text of `call_grammar` begins.
    """
    named = _any_of(strict)
    if form.channels:
        return f"({_message_to(named)})"
    ways = [f"({_escaped(form.mark)})"] if form.mark else []
    ways += [f"(<function={named}>)"] * form.tagged
    return "|".join([*ways, *([rf"(?:\A|\n|[>\[,;])\s*({_object(named)})"] if form.bare else [])])


def _begun(form: ToolFormat, name: str, in_tags: bool) -> str:
    """A regular expression of a call's text up to its arguments, as the model begins it itself."""
    mark, named = _escaped(form.mark), _any_of([name])
    if form.channels:
        return _message_to(named)
    if in_tags:
        return f"(?:{mark}{_SPACES})?<function={named}>\\n"
    if form.bare:
        return (
            rf"(?:{mark})?{_SPACES}(?:\[{_SPACES})?{_object(named)}{_SPACES},{_SPACES}"
            rf"{_quoted('(?:arguments|parameters)')}{_SPACES}:{_SPACES}"
        )
    return mark + _escaped(form.head(name))


_SPACES = r"[ \t\n]{0,12}"


def _object(named: str) -> str:
    return rf"\{{{_SPACES}{_quoted('name')}{_SPACES}:{_SPACES}{_quoted(named)}"


def _quoted(text: str) -> str:
    """A text in JSON's quotes, or in Python's as some models write them."""
    return f"(?:\"{text}\"|'{text}')"


def _message_to(named: str) -> str:
    """The header of gpt-oss's messages that are calls, from the recipient on."""
    return rf"to=functions\.{named}(?:\s[^<]*)?(?:<\|(?:channel|constrain)\|>[^<]*)*<\|message\|>"


def _any_of(texts: Iterable[str]) -> str:
    return f"(?:{'|'.join(map(_escaped, sorted(texts)))})"


def _escaped(text: str) -> str:
    """A regular expression of this text, for Python and for llguidance."""
    return re.sub(r"([\\.+*?()|\[\]{}^$#&~-])", r"\\\1", text).replace("\n", "\\n")


def can_be_tagged(schema: Any) -> bool:
    """Whether arguments that keep to the schema can be written in tags, where texts have neither quotes nor escapes."""
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object" or schema.keys() - _OF_TAGS:
        return False
    properties = schema.get("properties", {})
    return isinstance(properties, Mapping) and all(
        name.isprintable()
        and name
        and not set(name) & set('<>"\\')
        # Texts of another kind would need quotes.
        and (_is_text(one) or (isinstance(one, Mapping) and "string" not in (value_kinds(one, schema) or {"string"})))
        for name, one in properties.items()
    )


def _is_text(schema: Any) -> bool:
    """Whether a value is any text, perhaps null instead, or one of some texts, and that is all that its schema says."""
    if not isinstance(schema, Mapping):
        return False
    said = {key: value for key, value in schema.items() if key != "$schema"}
    if (texts := said.pop("enum", [said.pop("const")] if "const" in said else None)) is not None:
        one_line = isinstance(texts, list) and texts and all(isinstance(one, str) and "\n" not in one for one in texts)
        return bool(one_line) and said.pop("type", "string") == "string" and not said
    branches = said.pop("anyOf", None)
    kinds = said.pop("type", None) if branches is None else branches
    if isinstance(branches, list):
        kinds = [one.get("type") if isinstance(one, Mapping) and len(one) == 1 else None for one in branches]
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return not said and isinstance(kinds, list) and sorted(map(str, kinds)) in (["null", "string"], ["string"])


def _tagged(schema: Mapping[str, Any], options: Mapping[str, Any], number: int) -> str:
    """The right side of a Lark rule for arguments in tags, with rules of its own after it. number: of the tool."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not properties and schema.get("additionalProperties") is not False:
        return r'("<parameter=" /[^<>"\n]{1,256}/ ">\n" text "\n")*'
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parameters, rules = [], []
    for place, (name, one) in enumerate(properties.items()):
        rule, texts = f"p{number}_{place}", one.get("enum", [one["const"]] if "const" in one else None)
        opens = json.dumps(f"<parameter={name}>\n")
        if _is_text(one) and texts is None:
            rules.append(f'{rule}: {opens} text "\\n"')
        else:
            rules.append(f'{rule}: {opens} v{number}_{place} "\\n</parameter>\\n"')
            value = (
                " | ".join(map(json.dumps, texts)) if _is_text(one) else f"%json {_schema_text({**shared, **one}, options, name)}"
            )
            rules.append(f"v{number}_{place}: {value}")
        parameters.append(rule if name in required else f"{rule}?")
    return "\n".join([" ".join(parameters) or '""', *rules])


def _schema_text(schema: Any, options: Mapping[str, Any], name: str, **implied: Any) -> str:
    """A schema on one line with llguidance's settings. implied: keywords for a schema that lacks them."""
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(found, Mapping):
            raise ValueError("it is not an object")
        found = {**implied, **found, "x-guidance": {**_STYLE, **options}}
        return json.dumps({key: value for key, value in found.items() if key != "$schema"}, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} cannot be read: {str(error)[:200]}", "tools") from None
