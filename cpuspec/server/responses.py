"""OpenAI's `/v1/responses`. A request has the whole conversation, as Codex's do, or names the response that it continues.

Sources: OpenAI's API reference for bodies, and for the order of stream events; openai/codex for what Codex sends and reads
(codex-rs/codex-api/src/sse/responses.rs, codex-rs/protocol/src/models.rs, issues 23186 and 36942).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal
from uuid import uuid4

from fastapi import APIRouter, Request
from starlette.responses import Response

from cpuspec.engine.engine import Output, RequestedAnswer
from cpuspec.metrics import RequestStats
from cpuspec.server.answering import respond, submit
from cpuspec.server.bodies import BodyRoute, ignore
from cpuspec.server.bounds import Content, Count, Ignored, Listed, Name, Object, Refused, Schema, Text, Unused, size_of
from cpuspec.server.chat import ChatPrompt, chat_prompt, custom_input
from cpuspec.server.chunks import Writer
from cpuspec.server.errors import ContextExceededError, RequestError
from cpuspec.server.gate import context_of, model_of, shown_name
from cpuspec.server.model import ServedModel
from cpuspec.server.parsing.answer import Piece, with_arguments
from cpuspec.server.replies import event, json_response
from cpuspec.server.schema import Body, Choice, Ending, SamplingFields, Stops, UnusedBody, ignoring, refuse, sampling_params
from cpuspec.server.server import server_of
from cpuspec.server.structured import answer_format

router = APIRouter(route_class=BodyRoute)


_Ignored: Any = ignoring(
    "access_programs",
    "background_options",
    "client_metadata",
    "context_management",
    "image",
    "include",
    "max_tool_calls",
    "stream_options",
)


class Reasoning(Body):
    effort: Name | None = None
    context: Ignored = None
    generate_summary: Ignored = None
    mode: Ignored = None
    summary: Annotated[Name | None, Unused()] = None  # told back


class TextOptions(Body):
    format: Schema | None = None
    verbosity: Annotated[Name | None, Unused()] = None  # told back


class ResponsesBody(_Ignored, UnusedBody, SamplingFields):
    input: Content
    model: Name | None = None
    chat_template_kwargs: Object | None = None
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    previous_response_id: Name | None = None
    reasoning: Reasoning | None = None
    stop: Stops | None = None
    stream: bool | None = None
    store: bool | None = None
    text: TextOptions | None = None
    tool_choice: Choice | None = None
    tools: Listed | None = None
    # Told back.
    metadata: Annotated[Object | None, Unused()] = None
    parallel_tool_calls: Annotated[bool | None, Unused()] = None
    truncation: Annotated[Name | None, Unused()] = None
    user: Annotated[Name | None, Unused()] = None
    # Refused where they ask for something.
    background: bool | None = None
    conversation: Refused = None
    prompt: Refused = None
    top_logprobs: Count | None = None


_REFUSED = {
    "background": "answers are computed while the client waits",
    "conversation": "the server keeps no conversations; name a previous_response_id, or send the whole of it as input",
    "prompt": "the server keeps no prompts; send it as input",
    "top_logprobs": "log-probabilities come with chat completions only",
}


@router.post("/v1/responses")
async def responses(body: ResponsesBody, request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    model = await model_of(request, body.model, body.lora_scales)
    refuse(body, _REFUSED)
    tools = _Tools(body.tools or ())
    ignore(request, (f"tools.{kind}" for kind in tools.left_out))
    server, stores = server_of(request), body.store is not False
    owner = server.owner(context.client)
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    items = [server.responses.item(owner, one) for one in items]
    if body.previous_response_id is not None:
        items = [*server.responses.conversation(owner, body.previous_response_id), *items]
    head = {
        "id": f"resp_{uuid4().hex if context.rng is None else f'{context.rng.getrandbits(128):032x}'}",
        "object": "response",
        "created_at": context.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": shown_name(request, model),
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None} | (body.reasoning or Reasoning()).model_dump(exclude_none=True),
        "store": stores,
        "temperature": None,
        "text": {"format": {"type": "text"}} | (body.text or TextOptions()).model_dump(exclude_none=True),
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": None,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }
    numbered, num_bytes = _Numbered(), 0

    def asked() -> tuple[ChatPrompt, list[RequestedAnswer]]:
        nonlocal num_bytes
        params = sampling_params(model, body, max_tokens=body.max_output_tokens, stop=body.stop)
        head.update(temperature=params.temperature, top_p=params.top_p)
        prompt = _prompt(model, body, items, tools.functions)
        num_bytes = size_of([head, items]) if stores else 0
        return prompt, prompt.requested(params)

    def keep(response: dict[str, Any]) -> None:
        if stores:
            server.responses.store(owner, response, items, num_bytes + size_of(response["output"]))

    try:
        prompt, requested = await model.in_worker(context.client, asked)
        context.notes |= prompt.notes
        answers = await submit(request, model, requested)
    except ContextExceededError as error:
        if not body.stream:
            raise
        # Codex shortens its conversation after such an event, and ignores the status.
        head |= {"instructions": None, "tools": []}  # they may be what is too long
        events = [event(numbered({"type": "response.created", "response": head})), event(numbered(_failed(head, error)))]
        return Response("".join(events), media_type="text/event-stream")
    # In a stream that another server may repeat, signs of life have no numbers: they would come at other times.
    counts_signs = context.rng is None
    writer = _ResponseWriter(prompt, answers.new_id, tools, head, numbered, counts_signs, keep)
    return await respond(request, answers, writer, body.stream)


_LONG = 1 << 16  # characters of a response, which several events of a stream repeat
_MOST_ITEMS = 100  # of a page of input items, as OpenAI has it

# Items about tools that OpenAI runs itself. They hold nothing that this model could read.
_FOREIGN_ITEMS = (
    "code_interpreter_call",
    "file_search_call",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
)


@router.get("/v1/responses/{response_id}")
async def stored_response(response_id: str, request: Request) -> Response:
    """A stored response."""
    server = server_of(request)
    return json_response(server.responses.get(server.owner(context_of(request).client), response_id).response)


@router.get("/v1/responses/{response_id}/input_items")
async def stored_input(
    response_id: str, request: Request, limit: int = 20, order: Literal["asc", "desc"] = "desc", after: str | None = None
) -> Response:
    """The input items of a stored response and of the earlier ones in its conversation, the latest first; `limit` after `after`."""
    server = server_of(request)
    items = server.responses.get(server.owner(context_of(request).client), response_id).items[:: -1 if order == "desc" else 1]
    ids = [item["id"] for item in items]
    if not 1 <= limit <= _MOST_ITEMS:
        raise RequestError(f"limit is from 1 to {_MOST_ITEMS}, got {str(limit)[:20]}", "limit")
    if after is not None and after not in ids:
        raise RequestError(f"after names no input item of this response, got {after[:80]!r}", "after")
    begin = 0 if after is None else ids.index(after) + 1
    shown = items[begin : begin + limit]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": shown, **ends, "has_more": begin + limit < len(items)})


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, request: Request) -> Response:
    """Refused, as OpenAI refuses it for a response that was not made in the background; none is made so here."""
    server = server_of(request)
    server.responses.get(server.owner(context_of(request).client), response_id)
    raise RequestError("only responses in the background can be cancelled, and none is here; close the stream instead")


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request) -> Response:
    """Forget a response."""
    server = server_of(request)
    server.responses.delete(server.owner(context_of(request).client), response_id)
    return json_response({"id": response_id, "object": "response.deleted", "deleted": True})


def _prompt(
    model: ServedModel, body: ResponsesBody, items: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> ChatPrompt:
    listed: list[dict[str, Any]] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    reasoning = ""
    for number, item in enumerate(items):
        match item.get("type") or "message":
            case "message":
                message = {"role": item.get("role"), "content": item.get("content")}
                if reasoning and message["role"] == "assistant":
                    message["reasoning_content"] = reasoning
                reasoning = ""  # that of an answer which was cut off in it belongs to no other
                listed.append(message)
            case "reasoning":  # a summary stands for the reasoning of a model that does not show it
                reasoning = _texts(item.get("content")) or _texts(item.get("summary"))
            case "function_call" | "custom_tool_call" | "local_shell_call":
                if not listed or listed[-1]["role"] != "assistant":
                    listed.append({"role": "assistant", "content": ""})
                if reasoning:
                    before = listed[-1].get("reasoning_content")
                    listed[-1]["reasoning_content"], reasoning = f"{before}\n\n{reasoning}" if before else reasoning, ""
                listed[-1].setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": _called(item)})
            case "function_call_output" | "custom_tool_call_output":
                listed.append({"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": item.get("output")})
            case kind if kind not in _FOREIGN_ITEMS:
                raise RequestError(f"input[{number}] is of type {str(kind)[:40]!r}, which this model cannot read", "input")
    effort = (body.reasoning or Reasoning()).effort
    variables = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    variables |= body.chat_template_kwargs or {}
    keeps_to = answer_format(body.text.format if body.text else None, "text.format")
    choice = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") in ("custom", "function"):
        choice = {"type": "function", "name": _full_name(choice.get("namespace"), choice.get("name"))}
    return chat_prompt(model, listed, tools, choice, variables, keeps_to, Ending(continue_final_message=False))


def _texts(parts: Any) -> str:
    """The texts of the parts of a reasoning item, each a paragraph."""
    listed = parts if isinstance(parts, list) else ()
    return "\n\n".join(str(part.get("text") or "") for part in listed if isinstance(part, dict))


def _called(item: Mapping[str, Any]) -> dict[str, Any]:
    """The function that an item of an earlier turn calls, and its arguments."""
    match item["type"]:
        case "custom_tool_call":
            return {"name": item.get("name"), "arguments": {"input": item.get("input")}}
        case "local_shell_call":
            return {"name": "local_shell", "arguments": item.get("action") or {}}
    return {"name": _full_name(item.get("namespace"), item.get("name")), "arguments": item.get("arguments") or ""}


class _Tools:
    """A request's tools: the functions that the model gets to know, and how the client knows those.

    Codex has the tools of each MCP server in a namespace, and knows their calls by both names. Tools that OpenAI runs itself,
    such as its web search, do not exist here, and agents list them all the same.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self.functions: list[dict[str, Any]] = []
        self.names: dict[str, dict[str, Any]] = {}  # the client's names of the tools in a namespace, by the model's
        self.left_out: dict[str, None] = {}  # types of tools that do not exist here
        self._add(tools, None)

    def _add(self, tools: Sequence[Any], namespace: Any) -> None:
        for tool in (one for one in tools if isinstance(one, dict)):
            kind, name = tool.get("type"), _full_name(namespace, tool.get("name"))
            if kind == "namespace" and namespace is None:
                self._add(tool["tools"] if isinstance(tool.get("tools"), list) else (), tool.get("name"))
            elif kind in ("custom", "function") or (kind is None and namespace is not None):
                own, fields = ("custom", ("format",)) if kind == "custom" else ("function", ("parameters", "strict"))
                kept = {key: tool.get(key) for key in ("description", *fields)}
                self.functions.append({"type": own, own: {"name": name, **kept}})
                if name != tool.get("name"):
                    self.names[name] = {"name": tool.get("name"), "namespace": namespace}
            else:
                self.left_out[str(kind)] = None


def _full_name(namespace: Any, name: Any) -> Any:
    """The name of a namespace's tool as the model knows it."""
    if not (isinstance(namespace, str) and namespace and isinstance(name, str)):
        return name
    return namespace + ("" if namespace.endswith("_") else "__") + name


def _usage(stats: RequestStats, num_reasoning: int) -> dict[str, Any]:
    return {
        "input_tokens": stats.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.num_cached_tokens},
        "output_tokens": stats.num_new_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": stats.num_prompt_tokens + stats.num_new_tokens,
    }


class _Numbered:
    """The events of a stream, numbered from 0 on as they are made."""

    def __init__(self) -> None:
        self._number = 0

    def __call__(self, value: Mapping[str, Any], counts: bool = True) -> dict[str, Any]:
        number = self._number
        self._number += counts
        return {**value, "sequence_number": number}


def _failed(head: Mapping[str, Any], error: RequestError) -> dict[str, Any]:
    """The event of a response that ends with an error."""
    shown = {"code": error.code or error.kind, "message": str(error)}
    return {"type": "response.failed", "response": {**head, "status": "failed", "error": shown}}


_THOUGHT, _SAID = ("reasoning",), ("content", "call", "arguments")  # kinds of pieces


class _ResponseWriter(Writer):
    """Writes a response. One output item is open at a time, and each piece belongs to one.

    tools: how the client knows them. keep: called with the whole response.
    """

    def __init__(
        self,
        prompt: ChatPrompt,
        new_id: Callable[[], str],
        tools: _Tools,
        head: Mapping[str, Any],
        numbered: _Numbered,
        counts_signs: bool,
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        self._prompt, self._new_id, self._tools, self._head, self._numbered = prompt, new_id, tools, head, numbered
        self._counts_signs, self._keep = counts_signs, keep
        self.is_long = size_of(head, _LONG) > _LONG
        self._parser = prompt.parser()
        self._done: list[dict[str, Any]] = []  # items that are complete
        self._open: tuple[str, int] | None = None  # kind of its pieces, and call
        self._item: dict[str, Any] = {}
        self._texts: list[str] = []  # of the open item
        self._num_reasoning = 0.0  # tokens; one that ends the reasoning and begins the answer is divided
        self._last: Output | None = None

    def begin(self) -> Iterator[dict[str, Any]]:
        """The response without output, and the beginning that was written for the model."""
        yield self._numbered({"type": "response.created", "response": self._head})
        yield self._numbered({"type": "response.in_progress", "response": self._head})
        yield from self._show(self._parser.push(self._prompt.prefix))

    def show(self, index: int, output: Output) -> Iterator[dict[str, Any]]:
        """The events of an output."""
        self._last, pieces = output, self._parser.push(output.text)
        thought, said = (sum(len(one.text) for one in pieces if one.kind in kinds) for kinds in (_THOUGHT, _SAID))
        reasons = self._open is not None and self._open[0] in _THOUGHT
        self._num_reasoning += len(output.token_ids) * (thought / (thought + said) if thought + said else reasons)
        yield from self._show(pieces)
        if output.finish_reason is not None:
            yield from self._show(self._parser.finish())

    def finish(self, stats: Sequence[RequestStats]) -> Iterator[dict[str, Any]]:
        """The end of the last item, and the whole response."""
        complete = self._last is None or self._last.finish_reason != "length"
        status = "completed" if complete else "incomplete"
        for one in self._close(status):
            yield self._numbered(one)
        response = {
            **self._head,
            "status": status,
            "incomplete_details": None if complete else {"reason": "max_output_tokens"},
            "output": list(self._done),
            "usage": _usage(stats[0], round(self._num_reasoning)),
        }
        self._keep(response)
        yield self._numbered({"type": f"response.{status}", "response": response})

    def whole(self, events: Sequence[dict[str, Any]], stats: Sequence[RequestStats]) -> dict[str, Any]:
        """The response of the last event."""
        response: dict[str, Any] = events[-1]["response"]
        return response

    def sign_of_life(self) -> str:
        """An event: while Codex waits for a long prompt to be read, it counts no comments."""
        return event(self._numbered({"type": "keepalive"}, self._counts_signs))

    def failed(self, error: RequestError) -> dict[str, Any]:
        """The event of a response that ends with an error."""
        return self._numbered(_failed(self._head, error))

    def _show(self, pieces: Sequence[Piece]) -> Iterator[dict[str, Any]]:
        for piece, arguments in with_arguments(pieces):
            is_open = self._open == (piece.kind, piece.call)
            events = [] if is_open else [*self._close("completed"), *self._begin_item(piece)]
            text = custom_input(arguments) if self._item["type"] == "custom_tool_call" else arguments or piece.text
            self._texts.append(text)
            events.append({**self._where(f"{self._name()}.delta"), "delta": text} | self._no_logprobs())
            yield from map(self._numbered, events)

    def _close(self, status: str) -> list[dict[str, Any]]:
        """The events that end the open item."""
        if self._open is None:
            return []
        text, events = "".join(self._texts), []
        if self._open[0] == "call":
            done = {"arguments": text, "name": self._item["name"]} if self._item["type"] == "function_call" else {"input": text}
            self._item |= done
            events.append({**self._where(f"{self._name()}.done"), **done})
        else:
            self._item["content"] = [self._part(text)]
            events.append({**self._where(f"{self._name()}.done"), "text": text} | self._no_logprobs())
            events.append({**self._where("response.content_part.done"), "part": self._part(text)})
        self._item["status"] = status
        events.append({"type": "response.output_item.done", "output_index": len(self._done), "item": dict(self._item)})
        self._done.append(self._item)
        self._open = None
        return events

    def _begin_item(self, piece: Piece) -> list[dict[str, Any]]:
        self._open, self._texts = (piece.kind, piece.call), []
        if piece.kind == "call":
            is_custom, call_id = piece.text in self._prompt.custom, self._prompt.call_id(self._new_id())
            own = {"type": "custom_tool_call", "input": ""} if is_custom else {"type": "function_call", "arguments": ""}
            named = {"call_id": call_id, "name": piece.text, **self._tools.names.get(piece.text, {})}
            self._item = {"id": f"{'ctc' if is_custom else 'fc'}_{self._new_id()}", **own, **named}
        elif piece.kind == "reasoning":
            self._item = {"id": f"rs_{self._new_id()}", "type": "reasoning", "summary": [], "content": []}
        else:
            self._item = {"id": f"msg_{self._new_id()}", "type": "message", "role": "assistant", "content": []}
        self._item["status"] = "in_progress"
        events = [{"type": "response.output_item.added", "output_index": len(self._done), "item": dict(self._item)}]
        if piece.kind != "call":
            events.append({**self._where("response.content_part.added"), "part": self._part("")})
        return events

    def _name(self) -> str:
        assert self._open is not None, "a delta belongs to an open item"
        names = {"call": "function_call_arguments", "reasoning": "reasoning_text", "content": "output_text"}
        is_custom = self._item["type"] == "custom_tool_call"
        return f"response.{'custom_tool_call_input' if is_custom else names[self._open[0]]}"

    def _where(self, kind: str) -> dict[str, Any]:
        place: dict[str, Any] = {"type": kind, "item_id": self._item["id"], "output_index": len(self._done)}
        return {**place, "content_index": 0} if self._item["type"] in ("message", "reasoning") else place

    def _no_logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if self._item["type"] == "message" else {}

    def _part(self, text: str) -> dict[str, Any]:
        if self._item["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
