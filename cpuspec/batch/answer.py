"""Answers lines with an LLM, many at once. The answers keep the order of the lines."""

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, cast
from uuid import uuid4

from cpuspec.batch.lines import CHAT, Line, answer_line, error_line
from cpuspec.engine.engine import Output, RequestedAnswer
from cpuspec.engine.llm import LLM, answer_params
from cpuspec.errors import ConfigError, CpuspecError, fault_of_one, in_one_line
from cpuspec.metrics import epoch_s
from cpuspec.server.chat import chat_prompt
from cpuspec.server.chunks import ChatChunks, TextChunks, Usages
from cpuspec.server.fields import read
from cpuspec.server.model import ServedModel, shown_tokens
from cpuspec.server.schema import (
    ChatBody,
    CompletionBody,
    UnusedBody,
    chat_params,
    completion_params,
    grammar_of,
    predicted_ids,
)
from cpuspec.server.structured import check_strict
from cpuspec.server.turns import ToolUse, tool_use
from cpuspec.settings import SamplingParams, ServerConfig

_MOST_ANSWERS = 128  # to one line, as OpenAI's API allows
_LINES_AHEAD = 16  # for each sequence that the LLM runs: finished answers may wait for that of an earlier line
_IGNORED = {*UnusedBody.model_fields, "modalities", "verbosity"}  # fields of chats that plain lines may have, too
# Fields of the server that a batch does not support, with the values that change nothing.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "echo": (None, False),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "return_progress": (None, False),
    "prompt_logprobs": (None,),
}


def answer_lines(llm: LLM, lines: Iterator[Line], given: Mapping[str, Any]) -> Generator[dict[str, Any]]:
    """Yield the answer of each line, in order. Up to `max_sequences` answers run at once, and few lines are read ahead.

    given: fields of SamplingParams for lines that do not set them. The model's recommendation fills in a field that neither sets.
    A line that cannot be run gets an error as its answer. Several threads may share one LLM; a failed step ends the answers of all
    threads. Raises what `LLM.step` raises.
    """
    begun: deque[_Job] = deque()
    most = _LINES_AHEAD * llm.max_sequences
    model = cast(ServedModel, _BatchModel(llm, llm.name, given))
    try:
        more = True
        while begun or more:
            while more and sum(job.num_left for job in begun) < 2 * llm.max_sequences and len(begun) < most:
                line = next(lines, None)
                more = line is not None
                if line is not None:
                    begun.append(_Job(llm, line, model))
            while begun and begun[0].done:
                yield begun.popleft().answer()
            if any(not job.done for job in begun):
                llm.step()
    finally:
        for job in begun:
            job.abort()


class _Job:
    """One line with its unfinished answers."""

    def __init__(self, llm: LLM, line: Line, model: ServedModel) -> None:
        self._llm, self._line = llm, line
        self._error: CpuspecError | None = None
        self._chunks: list[dict[str, Any]] = []
        self._lasts: dict[int, Output] = {}  # the last output of each finished answer
        self._requests: list[int] = []
        try:
            url, fields = line.request()
            body = _body(url, fields)
            requested = self._chat(body, model) if isinstance(body, ChatBody) else self._text(body, model)
            if len(requested) > _MOST_ANSWERS:
                raise ConfigError(f"n is {len(requested)}, and at most {_MOST_ANSWERS} answers are given to a line")
            llm.check(requested[0].prompt, requested[0].params)
            adapters = llm.adapters.of_ids(body.lora_scales) if body.lora_scales else None
        except CpuspecError as error:
            self._error = error
            return
        self._chunks += self._writer.begin()
        shown = shown_tokens(llm.tokenizer) if isinstance(body, ChatBody) else frozenset()
        for index, one in enumerate(requested):
            self._requests.append(llm.submit(replace(one, shown=shown, adapters=adapters), partial(self._receive, index)))

    def _chat(self, body: ChatBody, model: ServedModel) -> list[RequestedAnswer]:
        if not body.messages:
            raise ConfigError("messages must be a list of objects with role and content")
        if type(body.logprobs) is int:
            raise ConfigError(f"logprobs must be true or false, got {body.logprobs}; top_logprobs is a number")
        params, keeps_to = chat_params(model, body, body.n), _strict(grammar_of(body))
        prompt = chat_prompt(model, body.messages, body.tools or (), body.tool_choice, body.variables, keeps_to, body)
        requested = prompt.requested(params, prediction=predicted_ids(model, body.prediction))
        head = self._head("chatcmpl", "chat.completion")
        self._writer: ChatChunks | TextChunks = ChatChunks(
            prompt, head, Usages(None, [0] * len(requested)), len(requested), lambda: uuid4().hex, logprobs=bool(body.logprobs)
        )
        return requested

    def _text(self, body: CompletionBody, model: ServedModel) -> list[RequestedAnswer]:
        if (body.response_format or {"type": "text"}) != {"type": "text"}:
            raise ConfigError("response_format goes with messages; a prompt takes json_schema, regex, choices or grammar")
        params = completion_params(model, body, _strict(grammar_of(body)), body.max_tokens)
        tokenizer, prompt = self._llm.tokenizer, body.prompt
        special = params.parse_special, body.add_special is not False
        ids = tokenizer.encode_prompt(prompt, *special) if isinstance(prompt, str) else cast(list[int], prompt)
        requested = [RequestedAnswer(ids, one) for one in answer_params(params)]
        usages = Usages(None, [0] * len(requested))
        head = self._head("cmpl", "text_completion")
        self._writer = TextChunks(tokenizer, head, usages, [""], len(requested), logprobs=body.logprobs is not None)
        return requested

    def _head(self, prefix: str, kind: str) -> dict[str, Any]:
        return {"id": f"{prefix}-{self._line.number}", "object": kind, "created": epoch_s(), "model": self._llm.name}

    def _receive(self, index: int, output: Output) -> None:
        try:
            self._chunks += self._writer.show(index, output)
        except BaseException as error:  # it would end the answers of all lines
            self._error = fault_of_one(error)
            self.abort()
            self._requests, self._lasts = [], {}
            return
        if output.finish_reason is not None:
            self._lasts[index] = output

    @property
    def num_left(self) -> int:
        """Answers that are not finished."""
        return len(self._requests) - len(self._lasts)

    @property
    def done(self) -> bool:
        return self.num_left == 0

    def abort(self) -> None:
        """Abort what still runs."""
        for request in self._requests:
            self._llm.abort(request)

    def answer(self) -> dict[str, Any]:
        """The finished line."""
        if self._error is not None:
            return error_line(self._line, self._error)
        self.abort()
        lasts = [self._lasts[index] for index in sorted(self._lasts)]
        if any(last.finish_reason == "aborted" for last in lasts):
            raise CpuspecError("an answer was broken off, because another caller of this LLM was interrupted; ask again")
        if error := next((last.error for last in lasts if last.error), None):
            return error_line(self._line, error)
        stats = [last.stats for last in lasts if last.stats is not None]
        return answer_line(self._line, 200, self._writer.whole(self._chunks, stats))


def _body(url: str, fields: Mapping[str, Any]) -> ChatBody | CompletionBody:
    """The server's body of a request.

    Raises ConfigError for a field that the server would ignore: its response names such fields in a header, and a line has none.
    """
    kind: type[ChatBody | CompletionBody] = ChatBody if url == CHAT else CompletionBody
    found, unknown = read(kind.declared(), {name: value for name, value in fields.items() if name not in _IGNORED})
    if unknown:
        raise ConfigError(f"a line has no field {in_one_line(unknown[0])!r}; leave it out")
    for name, neutral in _REFUSED.items():
        if found.get(name) not in neutral:
            raise ConfigError(f"{name} is not supported in a batch; got {in_one_line(repr(found[name]))}")
    prompt = found.get("prompt", "")
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt and all(type(one) is int for one in prompt)):
        raise ConfigError("prompt must be a text or a list of token ids; a batch has a line for each prompt")
    return kind.of_fields(found)


def _strict(keeps_to: dict[str, Any]) -> dict[str, Any]:
    """The grammar of an answer.

    Raises RequestError for a schema with parts that no grammar can enforce: the server would name them in a header.
    """
    if "json_schema" in keeps_to:
        check_strict(keeps_to["json_schema"], "the JSON schema of a line", "response_format")
    return keeps_to


@dataclass(frozen=True)
class _BatchModel:
    """An LLM in the shape of the server's model. given: fields of SamplingParams for lines that do not set them."""

    llm: LLM
    name: str
    given: Mapping[str, Any]
    config: ServerConfig = field(default_factory=lambda: ServerConfig(drop_changing_lines=False))

    @cached_property
    def tool_use(self) -> ToolUse:
        """What the chat template does with tools."""
        return tool_use(self.llm.tokenizer)

    def check_text(self, num_chars: int) -> None:
        """Accept every text: a long one delays nobody else."""

    def params(self, fields: Mapping[str, Any]) -> SamplingParams:
        """The params of a line with these fields."""
        return self.llm.sampling_defaults.under({**self.given, **fields})
