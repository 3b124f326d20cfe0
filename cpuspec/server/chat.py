"""A conversation with tools, encoded as a prompt.

OpenAI's chat completions and responses, Anthropic's messages and Ollama's endpoints all use it.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from cpuspec.engine.changing_lines import without_changing_lines
from cpuspec.engine.engine import RequestedAnswer
from cpuspec.engine.llm import answer_params
from cpuspec.errors import TokenizerError
from cpuspec.server.bounds import size_of
from cpuspec.server.content import content_text, reasoning_text
from cpuspec.server.errors import RequestError
from cpuspec.server.loosening import loosened
from cpuspec.server.model import ServedModel
from cpuspec.server.parsing.answer import AnswerParser
from cpuspec.server.parsing.calls import ToolFormat, tool_instructions
from cpuspec.server.schema import Ending
from cpuspec.server.structured import call_grammar, call_trigger, can_be_tagged, loose_format, loosened_note
from cpuspec.server.turns import in_turns
from cpuspec.settings import SamplingParams
from cpuspec.text import Tokenizer
from cpuspec.text.reasoning import opens_reasoning, reasoning_marks, reasoning_parts

_ROLES = {"developer": "system"}  # OpenAI's newer name, which templates do not know
_TEXT_FIELDS = ("name", "tool_call_id")  # of a message, that templates may read besides role and content


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation, ready to be answered."""

    model: ServedModel
    ids: list[int]  # the prompt, with `prefix` at its end
    template: str  # the chat template that made the prompt; it decides how answers are written
    thinking: bool  # whether the prompt opens the reasoning, so that the answer begins in it
    functions: Mapping[str, Mapping[str, Any]]  # schemas of the tools' arguments by function name
    custom: frozenset[str]  # the functions that stand for custom tools
    prefix: str  # the answer's beginning that the server writes for the model, as of a demanded tool call
    keeps_to: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingParams that restrict the answer
    notes: Mapping[str, str] = field(default_factory=dict)  # how the request was changed, for the response's headers
    begun: str = ""  # the client's own beginning, which the answer continues; without a mark that opens reasoning

    def parser(self) -> AnswerParser:
        """A new parser for one answer."""
        marks = reasoning_marks(self.template)
        return AnswerParser(self.model.tool_use.form, self.functions, marks, self.thinking, self.begun)

    def requested(
        self, params: SamplingParams, shows_progress: bool = False, prediction: Sequence[int] = ()
    ) -> list[RequestedAnswer]:
        """The answers to compute. prediction: token ids that they may repeat.

        Raises ConfigError for params that a grammar excludes.
        """
        params = replace(params, **self.keeps_to)
        calls = [pair for pair in self.model.tool_use.form.marks if self.functions and all(pair)]
        how = RequestedAnswer(
            self.ids,
            params,
            shows_progress=shows_progress,
            prediction=prediction,
            apart=[*reasoning_parts(self.template), *calls],  # stop strings count in content only
            within=reasoning_marks(self.template)[1] if self.thinking and not self.prefix else "",
        )
        return [replace(how, params=one) for one in answer_params(params)]

    def call_id(self, digits: str) -> str:
        """An id for a tool call, of the length that the model's template wants, from 32 hexadecimal digits."""
        num_chars = self.model.tool_use.form.id_chars
        return digits[:num_chars] if num_chars < 16 else f"call_{digits[:num_chars]}"


def chat_prompt(
    model: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: Any = None,
    variables: Mapping[str, Any] | None = None,
    answer_format: Mapping[str, Any] | None = None,
    ending: Ending | None = None,
) -> ChatPrompt:
    """Encode a conversation in OpenAI's spelling. A long one may take seconds.

    variables: of the chat template. answer_format: fields of SamplingParams that restrict an answer without tool calls.
    ending: how the prompt ends; by default the answer continues the last message if that is an assistant's.
    Raises RequestError for a malformed conversation, TokenizerError for one that the template refuses.
    """
    if not model.llm.tokenizer.chat_template:
        raise RequestError(f"{model.name} has no chat template; use /v1/completions, or an instruct model", "model")
    custom = {str(tool["custom"].get("name")) for tool in tools if isinstance(tool.get("custom"), Mapping)}
    tools = list(map(_as_function, tools))
    given_functions = [function for tool in tools if isinstance(function := tool.get("function"), Mapping)]
    strict = {str(one.get("name")) for one in given_functions if one.get("strict") is True}
    tools, tool_choice = _allowed_tools(tools, tool_choice)
    tools, named = _chosen_tools(tools, tool_choice)
    if model.config.drop_changing_lines:
        messages = without_changing_lines(messages)
    left_out: set[str] = set()
    listed = [_message(number, message, left_out) for number, message in enumerate(messages)]
    ending, given = ending or Ending(), dict(variables or {})
    continues, adds_prompt = ending.continues(listed), ending.add_generation_prompt is not False
    model.check_text(size_of([listed, tools, given]))
    tokenizer, use = model.llm.tokenizer, model.tool_use
    if use.place == "words":
        listed = _without_tools(listed, tools, use.role)
    elif tools and use.place == "variable":
        given["tools"] = list(tools)
    elif tools:
        first = listed[0] if listed and listed[0]["role"] == "system" else {"role": "system", "content": ""}
        listed = [{**first, "tools": json.dumps(tools, ensure_ascii=False)}, *listed[first in listed :]]
    template = tokenizer.chat_template_for(given) or ""
    form = model.tool_use.form
    if form.channels:
        listed = list(map(_in_channels, listed))
    elif use.place != "words" and not use.shows_calls:
        listed = [_with_calls_as_text(message, form) for message in listed]
    ids, begun, thinking = _encoded(tokenizer, template, listed, given, adds_prompt, continues)
    choice = _Choice(tools, strict, named, bool(named) or tool_choice == "required")
    prefix, keeps_to, lost = _restricted(model, template, choice, answer_format or {}, thinking)
    functions = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    if prefix:
        ids = ids + tokenizer.encode(prefix, add_special=False, parse_special=True)
    notes = loosened_note(lost) | ({"left-out": ", ".join(sorted(left_out))} if left_out else {})
    return ChatPrompt(model, ids, template, thinking, functions, frozenset(custom), prefix, keeps_to, notes, begun)


class _Choice(NamedTuple):
    """The tools that a model may call. named: the function that it must call, or ""; demanded: it must call one of them."""

    tools: Sequence[Mapping[str, Any]]
    strict: set[str]  # functions whose arguments keep to their whole schema
    named: str
    demanded: bool


def _restricted(
    model: ServedModel, template: str, choice: _Choice, answer_format: Mapping[str, Any], thinking: bool
) -> tuple[str, dict[str, Any], set[str]]:
    """The answer's beginning, the fields of SamplingParams that restrict the rest, and the keywords of schemas that are lost.

    answer_format: fields that restrict an answer without calls. thinking: the prompt opens the reasoning. Raises RequestError.
    """
    form, tokenizer = model.tool_use.form, model.llm.tokenizer
    marks = reasoning_marks(template)
    reasons, closing = any(mark in template for mark in marks), marks[1]
    closed, prefix = f"\n{closing}\n\n" if thinking else "", ""
    keeps_to, lost = loose_format(answer_format)
    # Without a single token that ends the reasoning, nothing would say where a grammar begins.
    ends_in_a_token = reasons and closing == "</think>" and tokenizer.token_id(closing) is not None
    free = {"free_reasoning": True} if ends_in_a_token else {}
    if choice.demanded and choice.tools:
        in_tags = form.tagged and can_be_tagged(loosened(choice.tools[0]["function"]["parameters"])[0])
        begun = form.mark + form.head(choice.named, in_tags) if choice.named else form.begins
        grammar, lost = call_grammar(form, choice.tools, choice.strict, begun, demanded=True)
        return closed + begun, {"grammar": grammar, "stop": ()}, lost  # the grammar ends it, whatever its texts hold
    if choice.tools and keeps_to:
        if "json_schema" not in keeps_to:
            raise RequestError("an answer that may call tools keeps to a JSON schema only; leave out tools or the grammar", "tools")
        grammar, more = call_grammar(form, choice.tools, choice.strict, "", keeps_to["json_schema"])
        keeps_to, lost = {"grammar": grammar}, lost | more
    elif choice.strict and any(tool["function"]["name"] in choice.strict for tool in choice.tools):
        grammar, lost = call_grammar(form, choice.tools, choice.strict, None)
        return "", {"grammar": grammar, "grammar_trigger": call_trigger(form, choice.strict), **free}, lost
    if keeps_to and not (closing == "</think>" and tokenizer.token_id(closing) is not None):
        prefix = "<|channel|>final<|message|>" if form.channels else closed
    return prefix, {**keeps_to, **free}, lost


def _encoded(
    tokenizer: Tokenizer,
    template: str,
    messages: list[dict[str, Any]],
    variables: Mapping[str, Any],
    adds_prompt: bool,
    continues: bool,
) -> tuple[list[int], str, bool]:
    """Token ids of a conversation, the text at their end that the answer continues, and whether they leave the reasoning open."""
    marks = reasoning_marks(template)
    begun, thought = (messages[-1]["content"], _open_reasoning(messages[-1], marks)) if continues else ("", None)
    if thought is not None and any(mark in template for mark in marks):
        # Templates put reasoning of their own before it, or leave it out.
        ids = _encoded_turns(tokenizer, messages[:-1], variables)
        head = "" if opens_reasoning(tokenizer, template, ids) else f"{marks[0]}\n"
        begun = thought.lstrip()
        ids += tokenizer.encode(head, add_special=False, parse_special=True)
        return ids + tokenizer.encode_parts([begun.encode()], continues=True), begun, True
    if begun.strip():
        return _encoded_turns(tokenizer, messages, variables, continues=True), begun, False
    if continues:  # a message without a text: the answer begins it
        messages, adds_prompt = messages[:-1], True
    ids = _encoded_turns(tokenizer, messages, variables, add_generation_prompt=adds_prompt)
    return ids, "", opens_reasoning(tokenizer, template, ids)


def _encoded_turns(tokenizer: Tokenizer, messages: list[dict[str, Any]], variables: Mapping[str, Any], **how: bool) -> list[int]:
    """Token ids of a conversation, changed to what strict templates take if this one refuses it."""
    try:
        return tokenizer.encode_chat(messages, variables=variables, **how)
    except TokenizerError:
        turns = in_turns(list(map(_with_objects, messages)))
        if turns == messages:
            raise
        return tokenizer.encode_chat(turns, variables=variables, **how)


def _open_reasoning(message: Mapping[str, Any], marks: tuple[str, str]) -> str | None:
    """The reasoning that a message has begun and not closed; None where it has none, or a text after it."""
    content: str = message["content"]
    if not content.strip():
        return message.get("reasoning_content")
    head, opening, thought = content.partition(marks[0])
    return thought if opening and not head.strip() and marks[1] not in thought else None


def _allowed_tools(tools: Sequence[Mapping[str, Any]], choice: Any) -> tuple[Sequence[Mapping[str, Any]], Any]:
    """The tools among which the model may choose, and the choice, "auto" or "required", where a request allows only some of them.

    Chat completions have the list in a part of its own, and name a function in another one; responses have both in the choice.
    """
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return tools, choice
    given = choice.get("allowed_tools", choice)
    mode, listed = (given.get("mode"), given.get("tools")) if isinstance(given, Mapping) else (None, None)
    listed = listed if isinstance(listed, list) else []
    names = [_chosen_name({"type": "function", **one}) for one in listed if isinstance(one, Mapping)]
    known = {str(function.get("name")): tool for tool in tools if isinstance(function := tool.get("function"), Mapping)}
    if mode not in ("auto", "required") or not names or not all(name in known for name in names):
        raise RequestError(
            "tool_choice of type allowed_tools has the mode auto or required, and tools, a list of those that the request has",
            "tool_choice",
        )
    return [known[name] for name in dict.fromkeys(names)], mode


def _chosen_tools(tools: Sequence[Mapping[str, Any]], choice: Any) -> tuple[list[dict[str, Any]], str]:
    """The tools that the model gets to know, and the name of the one that it must call, "" for none."""
    found = [_tool(number, tool) for number, tool in enumerate(tools)]
    if choice in (None, "auto", "required"):
        if choice == "required" and not found:
            raise RequestError("tool_choice is required, and there are no tools", "tool_choice")
        return found, ""
    if choice == "none":
        return [], ""
    name = _chosen_name(choice)
    chosen = [tool for tool in found if tool["function"]["name"] == name]
    if not chosen:
        raise RequestError(
            "tool_choice is none, auto, required, or {'type': 'function', 'function': {'name': ...}} with the name of a tool",
            "tool_choice",
        )
    return chosen, name


def _chosen_name(choice: Any) -> str:
    """The name of the function or custom tool that a choice, or a part of one, names; "" for none."""
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    holder = choice.get(kind, choice) if kind in ("function", "custom") else None
    name = holder.get("name") if isinstance(holder, Mapping) else None
    return name if isinstance(name, str) else ""


def _as_function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool; of a custom one, which takes a text, the function with one argument, `input`, as which the model knows it.

    The format that the text shall have is described to the model.
    """
    own = tool.get("custom") if tool.get("type") == "custom" else None
    if not isinstance(own, Mapping):
        return tool
    form = own.get("format")
    grammar = form.get("grammar", form) if isinstance(form, Mapping) else {}
    about = "The tool's input, as one text."
    if isinstance(grammar, Mapping) and isinstance(grammar.get("definition"), str):
        about += f" It keeps to this {grammar.get('syntax') or 'lark'} grammar:\n{grammar['definition']}"
    properties = {"input": {"type": "string", "description": about}}
    parameters = {"type": "object", "properties": properties, "required": ["input"]}
    function = {"name": own.get("name"), "description": own.get("description"), "parameters": parameters}
    return {"type": "function", "function": function}


def custom_input(arguments: str) -> str:
    """The text that such a call gives its custom tool; arguments of another shape as they are."""
    text = json.loads(arguments).get("input")
    return text if isinstance(text, str) else arguments


def _tool(number: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
        wanted = "{'type': 'function', 'function': {...}}, or 'custom' in place of 'function'"
        raise RequestError(f"tools[{number}] is not a function; wanted {wanted}", "tools")
    name = function.get("name")
    if not isinstance(name, str) or not name or len(name) > 256 or not name.isprintable() or '"' in name or "\\" in name:
        raise RequestError(f"tools[{number}].function.name must be a name", "tools")
    kept = {key: value for key, value in function.items() if key != "strict" and value is not None}
    return {"type": "function", "function": {"parameters": {"type": "object", "properties": {}}, **kept}}


def _message(number: int, message: Mapping[str, Any], left_out: set[str]) -> dict[str, Any]:
    """The message as templates take it: its content one text, arguments of calls as objects. left_out: as in `content_text`."""
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError(f"messages[{number}] has no role", "messages")
    content = content_text(message.get("content"), f"messages[{number}]", left_out)
    found: dict[str, Any] = {"role": _ROLES.get(role, role), "content": content}
    for key in _TEXT_FIELDS:
        if isinstance(message.get(key), str):
            found[key] = message[key]
    if reasoning := reasoning_text(message):
        found["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise RequestError(f"messages[{number}].tool_calls must be a list", "messages")
    if calls:
        found["tool_calls"] = [_tool_call(number, call) for call in calls]
    return found


def _in_channels(message: dict[str, Any]) -> dict[str, Any]:
    """The message as harmony's templates take it: reasoning is `thinking`; before a call they refuse a text beside it."""
    thought = message.get("reasoning_content", "")
    if thought and message.get("tool_calls") and message["content"]:
        return message | {"thinking": f"{thought}\n\n{message['content']}", "content": ""}
    return message | ({"thinking": thought} if thought else {})


def _with_calls_as_text(message: dict[str, Any], form: ToolFormat) -> dict[str, Any]:
    """The message for a template that takes tools and shows no earlier calls, as LFM2's and Falcon-H1's first ones."""
    if not (calls := message.get("tool_calls")):
        return message
    functions = [call["function"] for call in calls]
    written = form.written((function["name"], function["arguments"]) for function in functions)
    return {**message, "content": "\n".join(filter(None, (message["content"], written)))}


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with all arguments of calls as objects, for templates that go through them by name."""
    calls = []
    for call in message.get("tool_calls", ()):
        function, given = call["function"], call["function"]["arguments"]
        calls.append(call if isinstance(given, Mapping) else {**call, "function": {**function, "arguments": {"arguments": given}}})
    return {**message, "tool_calls": calls} if calls else dict(message)


def _tool_call(number: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(call, dict) and isinstance(custom := call.get("custom"), dict):
        function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"messages[{number}].tool_calls has a call without a function's name", "messages")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # a model wrote it; the template shows what is no JSON as it is
            arguments = json.loads(arguments)
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _without_tools(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], role: str) -> list[dict[str, Any]]:
    """The conversation for a template that has no place for tools: the role describes them, calls and results are texts."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            shown = [json.dumps({"name": call["function"]["name"], "parameters": call["function"]["arguments"]}) for call in calls]
            content = "\n".join(filter(None, (message["content"], *shown)))
            found.append({"role": "assistant", "content": content})
        elif message["role"] in ("tool", "function"):
            result = f"```tool_output\n{message['content']}\n```"
            if found and found[-1]["role"] == "user":  # the results of several calls become one message
                found[-1] = {"role": "user", "content": f"{found[-1]['content']}\n{result}"}
            else:
                found.append({"role": "user", "content": result})
        else:
            found.append(message)
    if not tools:
        return found
    first = next((number for number, message in enumerate(found) if message["role"] in ("system", role)), None)
    words = tool_instructions(tools)
    if first is None:
        return [{"role": role, "content": words}, *found]
    found[first] = found[first] | {"content": f"{found[first]['content']}\n\n{words}"}
    return found
