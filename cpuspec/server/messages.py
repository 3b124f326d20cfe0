"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`, translated to a conversation in OpenAI's spelling and back.

Sources: Anthropic's Messages API reference (bodies, order of stream events), and the types of its Python client, which has more.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from cpuspec.engine.changing_lines import without_lines
from cpuspec.engine.engine import Output, RequestedAnswer
from cpuspec.metrics import RequestStats
from cpuspec.server.answering import respond, submit
from cpuspec.server.bodies import BodyRoute, ignore
from cpuspec.server.bounds import Content, Count, Ignored, Listed, Most, Name, Object, Refused, Schema, Strings
from cpuspec.server.chat import ChatPrompt, chat_prompt
from cpuspec.server.chunks import Writer
from cpuspec.server.content import content_text
from cpuspec.server.errors import RequestError
from cpuspec.server.gate import context_of, model_of, shown_name
from cpuspec.server.model import ServedModel
from cpuspec.server.parsing.answer import Piece, with_arguments
from cpuspec.server.replies import event, json_response
from cpuspec.server.schema import Body, SamplingFields, ignoring, refuse, sampling_params
from cpuspec.server.structured import answer_format

router = APIRouter(route_class=BodyRoute)


_Ignored: Any = ignoring(
    "billing_policy", "cache_control", "context_management", "mcp_servers", "speed", "user_profile_id", "workspace_id"
)
_IgnoredInAnswers: Any = ignoring(
    "container", "diagnostics", "fallback_credit_token", "fallbacks", "inference_geo", "metadata", "service_tier"
)


class Thinking(Body):
    type: Name | None = None
    budget_tokens: Ignored = None
    display: Ignored = None


class OutputConfig(Body):
    format: Schema | None = None
    effort: Name | None = None
    task_budget: Ignored = None


class CountBody(_Ignored):
    model: Name | None = None
    messages: Listed
    system: Content | None = None
    tools: Listed | None = None
    tool_choice: Object | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: Object | None = None
    output_format: Schema | None = None  # output_config.format, as the beta called it
    # Refused where they ask for something.
    compaction: Refused = None
    thread: Refused = None


class MessagesBody(CountBody, SamplingFields, _IgnoredInAnswers):
    max_tokens: Count | None = None
    stream: bool | None = None
    stop_sequences: Annotated[Strings, Most(4096, 32)] | None = None


@router.post("/v1/messages")
async def messages(body: MessagesBody, request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    model = await model_of(request, body.model, body.lora_scales)
    ignore(request, (f"tools.{tool['type']}" for tool in body.tools or () if _is_foreign(tool)))
    prompt, requested = await model.in_worker(context.client, _asked, model, body)
    context.notes |= prompt.notes
    head: dict[str, Any] = {
        "id": f"msg_{context.id}",
        "type": "message",
        "role": "assistant",
        "model": shown_name(request, model),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }
    answers = await submit(request, model, requested)
    return await respond(request, answers, _MessageWriter(prompt, head, answers.new_id), body.stream)


def _asked(model: ServedModel, body: MessagesBody) -> tuple[ChatPrompt, list[RequestedAnswer]]:
    stops = tuple(text for text in body.stop_sequences or () if text)
    params = sampling_params(model, body, max_tokens=body.max_tokens, stop=stops)
    prompt = _prompt(model, body)
    return prompt, prompt.requested(params)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountBody, request: Request) -> Response:
    """How many tokens the prompt of such a conversation has."""
    model = await model_of(request, body.model)
    prompt = await model.in_worker(context_of(request).client, _prompt, model, body)
    return json_response({"input_tokens": len(prompt.ids)})


_REFUSED = {
    "compaction": "the server writes no summaries by itself; ask for one in a message",
    "thread": "the server keeps no conversations; send the whole of it as messages",
}
# Tools that Anthropic runs itself, by the beginning of their type, and the blocks about them. Agents name them to every server;
# they hold nothing that this model could use.
_FOREIGN_TOOLS = ("advisor", "code_execution", "mcp_toolset", "tool_search_tool", "web_fetch", "web_search")
_FOREIGN_BLOCKS = (
    *("fallback", "mcp_tool_listing", "mcp_tool_use", "redacted_thinking", "server_tool_use", "tool_addition", "tool_removal"),
)


def _prompt(model: ServedModel, body: CountBody) -> ChatPrompt:
    refuse(body, _REFUSED)
    listed: list[dict[str, Any]] = []
    blocks = [{"type": "text", "text": body.system}] if isinstance(body.system, str) else body.system or []
    texts = [content_text([block], "system") for block in blocks]
    if model.config.drop_changing_lines:  # a block that has only such lines leaves no empty line
        texts = list(map(without_lines, texts))
    if system := "\n\n".join(filter(None, texts)):
        listed.append({"role": "system", "content": system})
    for number, message in enumerate(body.messages):
        listed += _translated(number, message)
    tools = [_tool(number, tool) for number, tool in enumerate(body.tools or ()) if not _is_foreign(tool)]
    if body.tools and not tools:
        raise RequestError(f"tools.0 is of type {str(body.tools[0]['type'])[:40]!r}, which this server cannot run", "tools")
    output = body.output_config or OutputConfig()
    variables: dict[str, Any] = {} if output.effort is None else {"reasoning_effort": output.effort}
    if body.thinking:
        variables["enable_thinking"] = body.thinking.type != "disabled"
    variables |= body.chat_template_kwargs or {}
    asked = output.format or body.output_format
    keeps_to = answer_format(asked, "output_config.format")
    return chat_prompt(model, listed, tools, _tool_choice(body.tool_choice), variables, keeps_to)


def _translated(number: int, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A message as one or more in OpenAI's spelling: results of tools are messages of their own."""
    role, content, where = message.get("role"), message.get("content"), f"messages.{number}"
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{where}.role is user or assistant, got {str(role)[:40]!r}", where)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise RequestError(f"{where}.content must be a text or a list of blocks", where)
    found: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    reasoning, calls = "", []
    for block in content:
        match block.get("type"):
            case "tool_result":
                given = block.get("content")
                if block.get("is_error"):  # templates have no field for it
                    texts = [{"type": "text", "text": given}] if isinstance(given, str) else given or []
                    given = [{"type": "text", "text": "Error:"}, *texts] if isinstance(texts, list) else texts
                found.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id") or ""), "content": given})
            case "tool_use":
                function: dict[str, Any] = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "thinking":
                reasoning += str(block.get("thinking") or "")
            case kind if kind not in _FOREIGN_BLOCKS and not str(kind).endswith("_tool_result"):
                parts.append(block)
    if parts or calls or not found:
        own: dict[str, Any] = {"role": role, "content": parts}
        if reasoning:
            own["reasoning_content"] = reasoning
        if calls:
            own["tool_calls"] = calls
        found.append(own)
    return found


def _is_foreign(tool: Mapping[str, Any]) -> bool:
    return str(tool.get("type")).startswith(_FOREIGN_TOOLS)


def _tool(number: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise RequestError(f"tools.{number} is of type {str(tool['type'])[:40]!r}, which this server cannot run", "tools")
    names = {"name": "name", "description": "description", "parameters": "input_schema", "strict": "strict"}
    return {"type": "function", "function": {ours: tool.get(theirs) for ours, theirs in names.items()}}


def _tool_choice(choice: Mapping[str, Any] | None) -> Any:
    kind = (choice or {"type": "auto"}).get("type")
    if kind == "tool" and choice is not None:
        return {"type": "function", "function": {"name": choice.get("name")}}
    known = {"auto": "auto", "any": "required", "none": "none"}
    if kind not in known:
        raise RequestError(f"tool_choice.type is auto, any, tool or none, got {str(kind)[:40]!r}", "tool_choice")
    return known[kind]


def _usage(num_prompt: int, num_cached: int = 0, num_new: int = 0) -> dict[str, Any]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": num_cached}
    return {"input_tokens": num_prompt - num_cached, **cached, "output_tokens": num_new}


def _ending(last: Output, has_calls: bool) -> dict[str, Any]:
    """Why the answer ended, and with which stop sequence."""
    if last.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(last.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
    return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}


_DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class _MessageWriter(Writer):
    """Writes a message. One content block is open at a time, and each piece belongs to one."""

    def __init__(self, prompt: ChatPrompt, head: dict[str, Any], new_id: Callable[[], str]) -> None:
        self._prompt, self._head, self._new_id = prompt, head, new_id
        self._parser = prompt.parser()
        self._blocks: list[tuple[str, dict[str, Any], list[str]]] = []  # of each, the kind of its pieces, its beginning, its texts
        self._open: tuple[str, int] | None = None  # of the open block, the kind of its pieces, and the call
        self._last: Output | None = None

    def begin(self) -> Iterator[dict[str, Any]]:
        """The message without content, and the beginning that was written for the model."""
        yield {"type": "message_start", "message": {**self._head, "usage": _usage(len(self._prompt.ids))}}
        yield from self._show(self._parser.push(self._prompt.prefix))

    def show(self, index: int, output: Output) -> Iterator[dict[str, Any]]:
        """The events of an output."""
        self._last = output
        yield from self._show(self._parser.push(output.text))
        if output.finish_reason is not None:
            yield from self._show(self._parser.finish())

    def _show(self, pieces: Sequence[Piece]) -> Iterator[dict[str, Any]]:
        for piece, arguments in with_arguments(pieces):
            if self._open != (piece.kind, piece.call):
                yield from self._close()
                yield self._begin_block(piece)
            name, key = _DELTAS[piece.kind]
            text = arguments or piece.text
            self._blocks[-1][2].append(text)
            yield self._delta({"type": name, key: text})

    def finish(self, stats: Sequence[RequestStats]) -> Iterator[dict[str, Any]]:
        """The end of the last block, why the answer ended, and its usage."""
        yield from self._close()
        if all(kind == "reasoning" for kind, _, _ in self._blocks):  # clients read a text
            yield self._begin_block(Piece("content", ""))
            yield from self._close()
        assert self._last is not None, "an answer has outputs"
        ending = _ending(self._last, self._parser.num_calls > 0)
        usage = _usage(stats[0].num_prompt_tokens, stats[0].num_cached_tokens, stats[0].num_new_tokens)
        yield {"type": "message_delta", "delta": ending, "usage": usage}
        yield {"type": "message_stop"}

    def sign_of_life(self) -> str:
        """Anthropic's own event for it."""
        return event({"type": "ping"})

    def whole(self, events: Sequence[dict[str, Any]], stats: Sequence[RequestStats]) -> dict[str, Any]:
        """The message with the blocks of the stream, in their order."""
        content = []
        for kind, block, texts in self._blocks:
            said = "".join(texts)
            content.append(block | ({"input": json.loads(said)} if kind == "call" else {_DELTAS[kind][1]: said}))
        ending, usage = events[-2]["delta"], events[-2]["usage"]
        return {**self._head, "content": content, **ending, "usage": usage}

    def _close(self) -> Iterator[dict[str, Any]]:
        """The events that end the open block."""
        if self._open is None:
            return
        if self._open[0] == "reasoning":
            yield self._delta({"type": "signature_delta", "signature": ""})
        self._open = None
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _begin_block(self, piece: Piece) -> dict[str, Any]:
        self._open = (piece.kind, piece.call)
        block: dict[str, Any] = {"type": "text", "text": ""}
        if piece.kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif piece.kind == "call":
            block = {"type": "tool_use", "id": self._prompt.call_id(self._new_id()), "name": piece.text, "input": {}}
        self._blocks.append((piece.kind, block, []))
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}
