"""Answers lines with an LLM: many at once, in the order of the lines."""

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from cpuspec.batch.lines import CHAT, COMPLETIONS, Line, answer_line, error_line
from cpuspec.config import SamplingParams, ServerConfig
from cpuspec.engine.engine import Output
from cpuspec.engine.llm import LLM, answer_params
from cpuspec.errors import ConfigError, CpuspecError, in_one_line
from cpuspec.metrics import epoch_s
from cpuspec.server.chat import ChatPrompt, Ending, chat_prompt, message_of, reason_of, said
from cpuspec.server.content import content_text
from cpuspec.server.fields import plain_number, read
from cpuspec.server.figures import chat_logprobs, completion_logprobs, timings, usage
from cpuspec.server.model import ServedModel, Wanted, shown_tokens
from cpuspec.server.parsing import ToolFormat, tool_format
from cpuspec.server.structured import answer_format, check_strict

_MOST_ANSWERS = 128  # to one line, as OpenAI's API allows
_MOST_LOGPROBS = 20
_LINES_AHEAD = 16  # for each sequence that runs: answers that may wait for one before them
_SAMPLING = {one.name for one in fields(SamplingParams)} - {"logprobs", "max_draft_tokens"}
_NUMBERS = {one.name for one in fields(SamplingParams) if one.type in (int, float, int | None)} | {"max_completion_tokens"}
_GRAMMARS = ("json_schema", "regex", "choices", "grammar")
# Fields that change no answer here. One model answers the whole batch, whatever a line calls it.
_IGNORED = {
    *("model", "user", "metadata", "stream_options", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
    *("safety_identifier", "parallel_tool_calls", "modalities", "verbosity"),
}
# Fields that make the prompt.
_ENDINGS = ("continue_final_message", "add_generation_prompt")
_OF_PROMPTS = {
    COMPLETIONS: ("prompt",),
    CHAT: ("messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort", "prediction", *_ENDINGS),
}
# Fields that are refused unless they have the value that changes nothing.
_REFUSED: Mapping[str, Any] = {
    "stream": False,
    "tools": [],
    "response_format": {"type": "text"},
    "echo": False,
    "best_of": 1,
    "suffix": "",
}


def answer_lines(llm: LLM, lines: Iterator[Line], given: Mapping[str, Any]) -> Generator[dict[str, Any]]:
    """Yield the answer of each line, in order; as many run at once as the LLM has room for. Several threads may do
    this with one LLM, and share its batch; a step that fails ends the answers of all of them.

    given: fields of SamplingParams for lines that do not have them; the model's own recommendations come after these. Few lines are
    read ahead. A line that cannot be run has an error for an answer. Raises what `LLM.step` raises.
    """
    begun: deque[_Job] = deque()
    try:
        more = True
        while begun or more:
            while more and _has_room(llm, begun):
                line = next(lines, None)
                more = line is not None
                if line is not None:
                    begun.append(_Job(llm, line, given))
            while begun and begun[0].done:
                yield begun.popleft().answer()
            if any(not job.done for job in begun):
                llm.step()
    finally:
        for job in begun:
            job.drop()


def _has_room(llm: LLM, begun: deque["_Job"]) -> bool:
    running = sum(job.num_left for job in begun)
    return running < 2 * llm.max_sequences and len(begun) < _LINES_AHEAD * llm.max_sequences


@dataclass
class _Answer:
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    last: Output | None = None

    def take(self, output: Output) -> None:
        self.texts.append(output.text)
        self.logprobs += output.logprobs
        self.last = output if output.finish_reason else None


class _Job:
    """One line with its answers, as far as they are."""

    def __init__(self, llm: LLM, line: Line, given: Mapping[str, Any]) -> None:
        self._llm, self._line = llm, line
        self._error: CpuspecError | None = None
        self._answers: list[_Answer] = []
        self._requests: list[int] = []
        try:
            self._url, body = line.request()
            body = _read(self._url, body)
            params = _params(llm, self._url, body, given)
            self._prompt = _chat_prompt(llm, body) if self._url == CHAT else None
            if self._prompt:
                wanted = self._prompt.wanted(params, prediction=_prediction(llm, body))
            else:
                prompt = _prompt_ids(llm, body, params.parse_special)
                wanted = [Wanted(prompt, one) for one in answer_params(params)]
            llm.check(wanted[0].prompt, wanted[0].params)
        except CpuspecError as error:
            self._error = error
            return
        shown = shown_tokens(llm.tokenizer) if self._prompt else frozenset()
        for one in wanted:
            self._answers.append(_Answer())
            self._requests.append(llm.submit(one.prompt, one.params, self._answers[-1].take, shown, prediction=one.prediction))

    @property
    def num_left(self) -> int:
        """Answers that are not finished."""
        return sum(answer.last is None for answer in self._answers)

    @property
    def done(self) -> bool:
        return self.num_left == 0

    def drop(self) -> None:
        """Abort what still runs."""
        for request in self._requests:
            self._llm.drop(request)

    def answer(self) -> dict[str, Any]:
        """The finished line."""
        if self._error is not None:
            return error_line(self._line, self._error)
        self.drop()
        lasts = [answer.last for answer in self._answers if answer.last is not None]
        if any(last.finish_reason == "aborted" for last in lasts):
            raise CpuspecError("an answer was broken off, because another caller of this LLM was interrupted; ask again")
        if error := next((last.error for last in lasts if last.error), None):
            return error_line(self._line, CpuspecError(error))
        stats = [last.stats for last in lasts if last.stats is not None]
        is_chat, number = self._prompt is not None, self._line.number
        body = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{number}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": epoch_s(),
            "model": self._llm.name,
            "choices": [self._choice(index, answer) for index, answer in enumerate(self._answers)],
            "usage": usage(stats),
        }
        return answer_line(self._line, 200, body | ({"timings": timings(stats[0])} if len(stats) == 1 else {}))

    def _choice(self, index: int, answer: _Answer) -> dict[str, Any]:
        assert answer.last is not None, "a finished answer has a last output"
        tokenizer, text = self._llm.tokenizer, "".join(answer.texts)
        if self._prompt is None:
            logprobs = completion_logprobs(tokenizer, answer.logprobs, 0) if answer.logprobs else None
            return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": answer.last.finish_reason}
        found = said(self._prompt, text)
        logprobs = chat_logprobs(tokenizer, answer.logprobs) if answer.logprobs else None
        reason = reason_of(answer.last, bool(found.calls))
        return {"index": index, "message": message_of(found), "logprobs": logprobs, "finish_reason": reason}


def _prompt_ids(llm: LLM, body: Mapping[str, Any], parse_special: bool) -> list[int]:
    """Token ids of a body's prompt. Raises ConfigError or TokenizerError."""
    tokenizer, prompt = llm.tokenizer, body.get("prompt")
    if isinstance(prompt, str):
        return tokenizer.encode_prompt(prompt, parse_special)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    raise ConfigError("prompt must be a text or a list of token ids; a batch has a line for each prompt")


@dataclass(frozen=True)
class _ChatModel:
    """An LLM as `chat_prompt` takes it, without a server."""

    llm: LLM
    name: str
    tool_format: ToolFormat
    template_takes_tools: bool
    config: ServerConfig = field(default_factory=lambda: ServerConfig(drop_changing_lines=False))

    def check_text(self, num_chars: int) -> None:
        """Nothing: a long text delays nobody but its owner."""


def _chat_prompt(llm: LLM, body: Mapping[str, Any]) -> ChatPrompt:
    """The prompt of a body's conversation. Raises ConfigError, RequestError or TokenizerError."""
    messages, tools = _objects(body, "messages"), _objects(body, "tools")
    if not messages:
        raise ConfigError("messages must be a list of objects with role and content")
    variables, effort = body.get("chat_template_kwargs") or {}, body.get("reasoning_effort")
    if not isinstance(variables, dict):
        raise ConfigError("chat_template_kwargs must be an object")
    if effort is not None:
        variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"} | variables
    template = llm.tokenizer.chat_template_for({"tools": tools})
    model = _ChatModel(llm, llm.name, tool_format(template), "tools" in (template or ""))
    asked = [body.get(name) for name in _ENDINGS]
    if not all(isinstance(one, bool | None) for one in asked):
        raise ConfigError(f"{' and '.join(_ENDINGS)} must be true or false")
    ending, choice = Ending(*asked), body.get("tool_choice")
    return chat_prompt(cast(ServedModel, model), messages, tools, choice, variables, _answer_format(body), ending)


def _objects(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A field that is a list of objects; empty if it is not there."""
    found = body.get(name) or []
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ConfigError(f"{name} must be a list of objects")
    return found


def _prediction(llm: LLM, body: Mapping[str, Any]) -> list[int]:
    """Token ids of OpenAI's predicted output, which a body's answer may repeat."""
    given = body.get("prediction")
    if given is None:
        return []
    if not isinstance(given, dict) or given.get("type") != "content":
        raise ConfigError('prediction must be an object with type "content" and content')
    text = content_text(given.get("content"), "prediction")
    return llm.tokenizer.encode(text, add_special=False)[: llm.context_length]


def _answer_format(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a conversation's answer keeps to, as fields of SamplingParams. Raises RequestError, and ConfigError for two of them."""
    found = answer_format(body.get("response_format"), "response_format")
    own = {name: body[name] for name in _GRAMMARS if body.get(name) is not None}
    if len(found) + len(own) > 1:
        raise ConfigError(f"an answer keeps to one of response_format, {', '.join(_GRAMMARS)}")
    if isinstance(own.get("choices"), list):
        own["choices"] = tuple(own["choices"])
    if "json_schema" in found | own:
        check_strict((found | own)["json_schema"], "the JSON schema of a line", "response_format")  # no header could say otherwise
    return found | own


def _read(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The body with fields and numbers as `SamplingParams` has them, whatever other servers call them.

    Raises ConfigError for a field that would be ignored: a line has no header that could tell.
    """
    declared = {*_SAMPLING, *_IGNORED, *_OF_PROMPTS[url], *_REFUSED, "max_completion_tokens", "logprobs", "speculation"}
    found, unknown = read(dict.fromkeys(declared | ({"top_logprobs"} if url == CHAT else set())), body)
    if unknown:
        raise ConfigError(f"there is no field {in_one_line(unknown[0])!r}; wanted some of {', '.join(sorted(_SAMPLING))}")
    return {name: plain_number(value) if name in _NUMBERS else value for name, value in found.items()}


def _params(llm: LLM, url: str, body: Mapping[str, Any], given: Mapping[str, Any]) -> SamplingParams:
    """The params that a body asks for. Raises ConfigError, also for fields that would change the answer and cannot be honoured."""
    asked = {name: value for name, value in body.items() if value is not None and name not in _IGNORED}
    for name in _OF_PROMPTS[url]:
        asked.pop(name, None)
    for name in ("response_format", *_GRAMMARS) if url == CHAT else ():  # `_answer_format` reads them
        asked.pop(name, None)
    for name, neutral in _REFUSED.items():
        if (value := asked.pop(name, neutral)) != neutral:
            raise ConfigError(f"{name} is not supported in a batch; got {in_one_line(repr(value))}")
    if "max_completion_tokens" in asked:
        asked["max_tokens"] = asked.pop("max_completion_tokens")
    changes = dict(given) | _logprobs(url, asked) | _drafts(asked)
    for name in ("stop", "stop_token_ids", "choices"):
        if isinstance(asked.get(name), list):
            asked[name] = tuple(asked[name])
    if isinstance(asked.get("stop"), str):
        asked["stop"] = (asked["stop"],)
    if "logit_bias" in asked:
        asked["logit_bias"] = _biases(asked["logit_bias"])
    params = llm.sampling_defaults.under(changes | asked)
    if params.n > _MOST_ANSWERS:
        raise ConfigError(f"n is {params.n}, and at most {_MOST_ANSWERS} answers are given to a line")
    return params


def _logprobs(url: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The log-probabilities that a body asks for, taken out of it: a number, or in chat a flag and a number."""
    wanted, top = asked.pop("logprobs", None), asked.pop("top_logprobs", 0)
    if url == CHAT:
        if wanted not in (None, True, False):
            raise ConfigError(f"logprobs must be true or false, got {in_one_line(repr(wanted))}")
        wanted = top if wanted else None
    if wanted is None:
        return {}
    if type(wanted) is not int or not 0 <= wanted <= _MOST_LOGPROBS:
        raise ConfigError(f"the number of logprobs must be from 0 to {_MOST_LOGPROBS}, got {in_one_line(repr(wanted))}")
    return {"logprobs": wanted}


def _drafts(asked: dict[str, Any]) -> dict[str, Any]:
    """The drafts that a body asks for, taken out of it."""
    given = asked.pop("speculation", {})
    if not isinstance(given, dict) or given.get("draft", "auto") not in ("auto", "none"):
        raise ConfigError('speculation must be an object with draft, "auto" or "none", and max_draft_tokens')
    most = 0 if given.get("draft") == "none" else given.get("max_draft_tokens")
    return {} if most is None else {"max_draft_tokens": most}


def _biases(given: Any) -> dict[int, Any]:
    try:
        return {int(token): bias for token, bias in given.items()}
    except (AttributeError, ValueError):
        raise ConfigError("logit_bias maps token ids to numbers") from None
