"""Ollama's protocol, for clients that speak no other: chats, prompts, embeddings, and the list of models.

An answer comes as lines of JSON, streamed unless the request says no. Its texts, tool calls and figures are those of the chat and
plain completions of OpenAI's protocol under other names. Source: Ollama's API documentation.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from cpuspec.engine.engine import Output, RequestedAnswer
from cpuspec.metrics import RequestStats, epoch_s, now_s
from cpuspec.model.batch import F32
from cpuspec.server.answering import respond, submit
from cpuspec.server.bodies import BodyRoute, ignore
from cpuspec.server.bounds import Count, Ids, Ignored, Listed, Most, Name, Range, Strings, Text
from cpuspec.server.chat import ChatPrompt, chat_prompt
from cpuspec.server.chunks import ChatChunks, Event, TextChunks, Usages, Writer
from cpuspec.server.embeddings import MOST_INPUTS, embed
from cpuspec.server.errors import ForbiddenError, NotFoundError, RequestError
from cpuspec.server.figures import chat_logprobs
from cpuspec.server.gate import context_of, model_of, shown_name
from cpuspec.server.model import ServedModel
from cpuspec.server.replies import error_body, json_response, time_text
from cpuspec.server.schema import Body, ConversationBody, UnusedBody, chat_params, grammar_of, ignoring
from cpuspec.server.server import Server, server_of
from cpuspec.server.structured import noted_format
from cpuspec.settings import SamplingParams
from cpuspec.text import Tokenizer
from cpuspec.text.reasoning import reasoning_marks

router = APIRouter(route_class=BodyRoute)

VERSION = "0.12.11"  # of Ollama, whose endpoints and fields these are; clients ask for a lowest one
_NS = 1_000_000_000
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}  # of Go's durations
_LONGEST_S = 1e9  # a model that stays for longer stays for ever
_Ignored: Any = ignoring("truncate", "shift")


class KeepAlive(Body):
    """How long the model stays loaded after the request: seconds, or a text as `5m`. 0 is not at all, below 0 for ever."""

    keep_alive: Annotated[float, Range(-1e18, 1e18)] | Name | None = None

    @property
    def keep_s(self) -> float | None:
        """Seconds. Raises RequestError."""
        if not isinstance(self.keep_alive, str):
            return self.keep_alive
        parts = re.fullmatch(r"(-?)((?:[0-9.]{1,12}(?:ns|us|µs|ms|s|m|h))+|[0-9.]{1,12})", self.keep_alive)
        try:
            assert parts is not None
            found = [(float(number), unit) for number, unit in re.findall(r"([0-9.]+)([a-zµ]*)", parts[2])]
        except (AssertionError, ValueError):
            raise RequestError(f"keep_alive is seconds, or a text such as 5m, got {self.keep_alive[:40]!r}", "keep_alive") from None
        return sum(number * _UNITS_S[unit] for number, unit in found) * (-1 if parts[1] else 1)


class OllamaChatBody(ConversationBody, UnusedBody, KeepAlive, _Ignored):
    messages: Listed = Field(default_factory=list)


class GenerateBody(ConversationBody, UnusedBody, KeepAlive, _Ignored):
    prompt: Text = ""
    suffix: Text = ""
    system: Text = ""
    images: Annotated[Strings, Most(1 << 23, 256)] = Field(default_factory=list)  # left out
    context: Ids = Field(default_factory=list)  # tokens of the conversation until now, as the last answer gave them
    raw: bool = False
    template: Text = ""


# Fields of a generation that a raw prompt, or one with a suffix, has no use for.
_OF_CHATS = (
    *("system", "images", "context", "tools", "reasoning_effort", "chat_template_kwargs"),
    *("continue_final_message", "add_generation_prompt"),
)


class EmbedBody(KeepAlive):
    model: Name | None = None
    input: Annotated[str | Strings, Most(1 << 23, MOST_INPUTS)] = Field(default_factory=list)
    truncate: bool = True
    dimensions: Count | None = None


class EmbeddingsBody(KeepAlive):
    model: Name | None = None
    prompt: Text


class NameBody(Body):
    model: Name | None = None
    name: Name | None = None  # the older spelling
    verbose: Ignored = None
    insecure: Ignored = None
    stream: Ignored = None


async def _model(request: Request, name: str | None, keep_s: float | None, lora: Mapping[int, float] | None = None) -> ServedModel:
    """The model of that name, which stays loaded for `keep_s` after this request. Ollama's clients write `NAME:latest`, too."""
    known = server_of(request).names
    own = (name or "").removesuffix(":latest")
    model = await model_of(request, own if own in known else name, lora)
    if model.has_keys and keep_s is not None:
        ignore(request, ["keep_alive"])  # one client must not unload it for the others
    else:
        model.keep_s = keep_s
    return model


async def _without_prompt(request: Request, body: "OllamaChatBody | GenerateBody") -> dict[str, Any] | None:
    """What a request without a prompt gets that unloads its model; None for another."""
    server = server_of(request)
    if body.keep_s != 0 or server.has_keys:
        return None
    own = server.own_name((body.model or "").removesuffix(":latest"))
    await server.unload(own)
    return {"model": body.model or own, "created_at": time_text(context_of(request).created), "done": True, "done_reason": "unload"}


@router.post("/api/chat")
async def chat(body: OllamaChatBody, request: Request) -> Response:
    """Answer a conversation. One without messages loads the model, or unloads it."""
    said = {"message": {"role": "assistant", "content": ""}}
    if not body.messages and (unloaded := await _without_prompt(request, body)):
        return json_response(said | unloaded)
    model = await _model(request, body.model, body.keep_s, body.lora_scales)
    head = _head(request, model)
    if not body.messages:
        return json_response({**head, **said, "done": True, "done_reason": "load"})
    prompt, requested = await model.in_worker(context_of(request).client, _asked, model, body)
    return await _answer_chat(request, model, body, prompt, requested, head, in_message=True)


@router.post("/api/generate")
async def generate(body: GenerateBody, request: Request) -> Response:
    """Answer a prompt as a conversation's only message, or continue it as it is (`raw`), or fill the gap before a suffix."""
    if not body.prompt and (unloaded := await _without_prompt(request, body)):
        return json_response({"response": ""} | unloaded)
    model = await _model(request, body.model, body.keep_s, body.lora_scales)
    head = _head(request, model)
    if body.template:
        raise RequestError("template is not supported: the model's own is used; send raw prompts instead", "template")
    if not body.prompt:
        return json_response({**head, "response": "", "done": True, "done_reason": "load"})
    tokenizer = model.llm.tokenizer
    if body.suffix or body.raw or not tokenizer.chat_template:
        return await _answer_text(request, model, body, head)
    prompt, requested = await model.in_worker(context_of(request).client, _asked, model, body)
    return await _answer_chat(request, model, body, prompt, requested, head, context=prompt.ids)


def _asked(model: ServedModel, body: OllamaChatBody | GenerateBody) -> tuple[ChatPrompt, list[RequestedAnswer]]:
    """The prompt of a conversation, or of a text as its only message, and the answer that is asked for."""
    if isinstance(body, GenerateBody):
        messages, tools = [{"role": "user", "content": body.prompt, "images": body.images}], body.tools or []
        messages = [{"role": "system", "content": body.system}, *messages] if body.system else messages
    else:
        messages, tools = body.messages, body.tools or []
    turns = [_as_openai(number, one) for number, one in enumerate(messages)]
    prompt = replace(chat_prompt(model, turns, tools, None, body.variables, grammar_of(body), body), custom=frozenset())
    if isinstance(body, GenerateBody) and body.context:
        if not all(0 <= one < model.llm.config.vocab_size for one in body.context):
            raise RequestError("context has numbers that are no tokens of this model; send what its last answer gave", "context")
        prompt = replace(prompt, ids=body.context + prompt.ids)
    return prompt, prompt.requested(chat_params(model, body))


async def _answer_chat(
    request: Request,
    model: ServedModel,
    body: ConversationBody,
    prompt: ChatPrompt,
    requested: Sequence[RequestedAnswer],
    head: Mapping[str, Any],
    in_message: bool = False,
    context: Sequence[int] = (),
) -> Response:
    context_of(request).notes |= prompt.notes
    answers = await submit(request, model, requested)
    chunks = ChatChunks(prompt, {}, Usages(None, [len(prompt.ids)]), 1, answers.new_id)
    writer = _OllamaLines(chunks, head, model.llm.tokenizer, in_message, context)
    return await respond(request, answers, writer, body.stream is not False)


async def _answer_text(request: Request, model: ServedModel, body: GenerateBody, head: Mapping[str, Any]) -> Response:
    ignore(request, [name for name in _OF_CHATS if getattr(body, name)])

    def asked() -> tuple[list[int], SamplingParams]:
        params = replace(chat_params(model, body), **noted_format(grammar_of(body), context_of(request).notes))
        if body.suffix:
            return model.fill_prompt(body.prompt, body.suffix), model.fill_params(params)
        model.check_text(len(body.prompt))
        return model.llm.tokenizer.encode_prompt(body.prompt), params

    ids, params = await model.in_worker(context_of(request).client, asked)
    chunks = TextChunks(model.llm.tokenizer, {}, Usages(None, [len(ids)]), [""], 1)
    answers = await submit(request, model, [RequestedAnswer(ids, params)])
    return await respond(request, answers, _OllamaLines(chunks, head, model.llm.tokenizer), body.stream is not False)


class _OllamaLines(Writer):
    """Translates the chunks of OpenAI's protocol into lines. Tool calls come whole, in one line before the last.

    in_message: whether a text stands in the line's message, else in the line itself. context: token ids of the prompt, if the last
    line has the token ids of the conversation.
    """

    def __init__(
        self,
        chunks: ChatChunks | TextChunks,
        head: Mapping[str, Any],
        tokenizer: Tokenizer,
        in_message: bool = False,
        context: Sequence[int] = (),
    ) -> None:
        self._chunks, self._head, self._in_message, self._context = chunks, dict(head), in_message, context
        self._tokenizer = tokenizer
        self._calls: list[dict[str, Any]] = []
        self._tokens: list[int] = []
        self._reason = "stop"

    def begin(self) -> Iterator[Event]:
        """What the answer begins with."""
        yield from self._translated(self._chunks.begin())

    def show(self, index: int, output: Output) -> Iterator[Event]:
        """The lines of an output."""
        self._tokens += output.token_ids
        lines = list(self._translated(self._chunks.show(index, output)))
        if output.logprobs:  # the first line of an output has those of all its tokens
            lines = lines or [self._line("", {})]
            lines[0]["logprobs"] = chat_logprobs(self._tokenizer, output.logprobs)["content"]
        yield from lines

    def finish(self, stats: Sequence[RequestStats]) -> Iterator[Event]:
        """The tool calls, and the figures of the answer."""
        if self._calls:
            yield self._line("", {"tool_calls": self._calls})
        context = {"context": [*self._context, *self._tokens]} if self._context else {}
        figures = _figures(stats[0]) if stats else {}
        yield self._line("", {}, done=True, done_reason=self._reason, **context, **figures)

    def whole(self, events: Sequence[Event], stats: Sequence[RequestStats]) -> Event:
        """The last line, with the texts, calls and log-probabilities of all."""
        parts = [line["message"] if self._in_message else line for line in events]
        content = "".join(part["content" if self._in_message else "response"] for part in parts)
        said = {
            "thinking": "".join(part.get("thinking", "") for part in parts),
            "tool_calls": [call for part in parts for call in part.get("tool_calls", ())],
        }
        more = {name: value for name, value in events[-1].items() if name not in ("message", "response")}
        if logprobs := [one for line in events for one in line.get("logprobs", ())]:
            more["logprobs"] = logprobs
        return self._line(content, {name: value for name, value in said.items() if value}, **more)

    def sign_of_life(self) -> str:
        """Nothing: every line must be JSON, and clients of this protocol wait."""
        return ""

    def failed(self, error: RequestError) -> Event:
        """The line of an error."""
        return error_body("/api/", error, "")

    def _line(self, content: str, parts: Mapping[str, Any], **more: Any) -> Event:
        """A line. parts: `thinking` and `tool_calls`, where there are any. more: fields of the line itself in both shapes."""
        if self._in_message:
            return {**self._head, "message": {"role": "assistant", "content": content, **parts}, "done": False, **more}
        return {**self._head, "response": content, **parts, "done": False, **more}

    def _translated(self, chunks: Iterator[Event]) -> Iterator[Event]:
        for choice in (one for chunk in chunks for one in chunk["choices"]):
            self._reason = "length" if choice["finish_reason"] == "length" else self._reason
            delta = choice.get("delta", {"content": choice.get("text", "")})
            for call in delta.get("tool_calls", ()):
                own = {**call["function"], "arguments": json.loads(call["function"]["arguments"])}
                self._calls.append({"id": call["id"], "function": {"index": len(self._calls), **own}})
            content = delta.get("content", "")
            parts = {"thinking": delta["reasoning_content"]} if delta.get("reasoning_content") else {}
            if content or parts:
                yield self._line(content, parts)


def _head(request: Request, model: ServedModel) -> dict[str, Any]:
    return {"model": shown_name(request, model), "created_at": time_text(context_of(request).created)}


def _figures(stats: RequestStats) -> dict[str, Any]:
    """Counts, and times in nanoseconds. The first token is part of the prompt's time."""
    prompt_ns, answer_ns = round(_NS * (stats.ttft_s or 0)), round(_NS * (stats.decode_s or 0))
    return {
        "total_duration": prompt_ns + answer_ns,
        "load_duration": 0,
        "prompt_eval_count": stats.num_prompt_tokens,
        "prompt_eval_duration": prompt_ns,
        "eval_count": stats.num_new_tokens,
        "eval_duration": answer_ns,
    }


def _as_openai(number: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in OpenAI's spelling: images become parts of its content; reasoning and a tool's name have other names there."""
    found = {name: value for name, value in message.items() if name not in ("images", "thinking", "tool_name")}
    if images := message.get("images"):
        if not isinstance(images, list):
            raise RequestError(f"messages[{number}].images must be a list", "messages")
        found["content"] = [{"type": "text", "text": message.get("content") or ""}, *({"type": "image"} for _ in images)]
    if message.get("thinking"):
        found["reasoning_content"] = message["thinking"]
    if message.get("tool_name"):
        found["name"] = message["tool_name"]
    return found


@router.post("/api/embed")
async def embed_inputs(body: EmbedBody, request: Request) -> Response:
    """Vectors of length one, one for each input."""
    model = await _model(request, body.model, body.keep_s)
    texts = [body.input] if isinstance(body.input, str) else body.input
    name, begin_s = shown_name(request, model), now_s()
    if not texts or body.input == "":
        return json_response({"model": name, "embeddings": []})
    texts = [text or " " for text in texts]  # a text without tokens has no states

    def reply(rows: F32, num_tokens: int) -> Any:
        figures = {"total_duration": round(_NS * (now_s() - begin_s)), "load_duration": 0, "prompt_eval_count": num_tokens}
        return {"model": name, "embeddings": rows.tolist(), **figures}

    return await embed(request, model, texts, body.dimensions, reply, body.truncate)


@router.post("/api/embeddings")
async def embed_prompt(body: EmbeddingsBody, request: Request) -> Response:
    """The vector of one prompt, as clients asked for it before /api/embed."""
    model = await _model(request, body.model, body.keep_s)
    if not body.prompt:
        return json_response({"embedding": []})
    return await embed(request, model, [body.prompt], None, lambda rows, _: {"embedding": rows[0].tolist()}, cuts=True)


@router.get("/api/version")
@router.head("/api/version", include_in_schema=False)
async def version() -> Response:
    """The version of Ollama whose protocol this is."""
    return json_response({"version": VERSION})


@router.get("/api/tags")
@router.head("/api/tags", include_in_schema=False)
async def tags(request: Request) -> Response:
    """Every model under each of its names."""
    server = server_of(request)
    server.check_ready()
    rows = [_row(server, name) for name in server.names]
    for model in server.models.values():
        row = _row(server, server.shown_name(model.name))
        rows += [row | {"name": one.name, "model": one.name, "digest": _digest(one.name)} for one in model.llm.adapters]
    return json_response({"models": rows})


@router.get("/api/ps")
async def loaded(request: Request) -> Response:
    """The loaded models, and until when they stay if no request comes."""
    server = server_of(request)
    server.check_ready()
    rows = []
    for model in list(server.models.values()):
        idle_s = model.unload_after_s
        ends = "9999-12-31T23:59:59Z" if idle_s is None or idle_s > _LONGEST_S else time_text(epoch_s() + int(idle_s))
        more = {"expires_at": ends, "size_vram": 0, "context_length": model.llm.context_length}
        rows.append(_row(server, server.shown_name(model.name)) | {"size": await model.num_bytes()} | more)
    return json_response({"models": rows})


@router.post("/api/show")
async def show(body: NameBody, request: Request) -> Response:
    """A model's shape, template and abilities."""
    model = await _model(request, body.model or body.name, None)
    llm, config = model.llm, model.llm.config
    template = llm.tokenizer.chat_template or ""
    abilities = {
        "completion": True,
        "tools": bool(template),  # a template without a place for tools gets them in words
        "thinking": any(mark in template for mark in reasoning_marks(template)),
        "insert": model.fill is not None,
        "embedding": bool(model.config.pooling or llm.pooling),
    }
    info = {
        "context_length": llm.context_length,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "vocab_size": config.vocab_size,
    }
    sampling = [f"{name} {value}" for name, value in llm.sampling_defaults.fields().items() if not isinstance(value, list | dict)]
    return json_response(
        {
            "modelfile": f"FROM {model.name}\n",
            "parameters": "\n".join(sampling),
            "template": template,
            "details": _details(model),
            "model_info": {"general.architecture": config.architecture, "general.parameter_count": llm.num_parameters}
            | {f"{config.architecture}.{name}": value for name, value in info.items()},
            "capabilities": [name for name, has in abilities.items() if has],
            "modified_at": time_text(server_of(request).created),
        }
    )


@router.post("/api/pull")
async def pull(body: NameBody, request: Request) -> Response:
    """Nothing to do for a model of this server; others are refused, because its models are chosen where it is started."""
    name = (body.model or body.name or "").removesuffix(":latest")
    known = server_of(request).names
    if name not in known:
        shown = ", ".join(map(repr, known))
        raise NotFoundError(
            f"this server has {shown}, and pulls no other model; start it with `cpuspec serve MODEL`, got {name[:200]!r}"
        )
    return Response('{"status":"success"}\n', media_type="application/x-ndjson")


@router.post("/api/create", include_in_schema=False)
@router.post("/api/copy", include_in_schema=False)
@router.post("/api/push", include_in_schema=False)
@router.delete("/api/delete", include_in_schema=False)
async def change(request: Request) -> Response:
    """Refused: no request may change which models there are."""
    raise ForbiddenError(f"{request.url.path} is refused: the server's models are chosen where it is started")


def _row(server: Server, name: str) -> dict[str, Any]:
    """A model in a list. Its digest is one of its name: files of gigabytes are not read for it."""
    own = server.own_name(name)
    model = server.models.get(own)
    return {
        "name": name,
        "model": name,
        "modified_at": time_text(server.created),
        "size": server.num_bytes(own),
        "digest": _digest(name),
        "details": _details(model),
    }


def _digest(name: str) -> str:
    return sha256(name.encode()).hexdigest()


def _details(model: ServedModel | None) -> dict[str, Any]:
    """A model's kind and size; without a loaded model its fields are empty."""
    llm = model.llm if model else None
    family, number = (llm.config.architecture, llm.num_parameters) if llm else ("", 0)
    short = f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.2f}M"
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": short if llm else "",
        "quantization_level": llm.quantization if llm else "",
    }
