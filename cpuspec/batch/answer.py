"""Answers lines with an LLM: many at once, in the order of the lines."""

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from cpuspec.batch.lines import CHAT, Line, answer_line, error_line
from cpuspec.config import SamplingParams
from cpuspec.engine.engine import Output
from cpuspec.engine.llm import LLM, answer_params
from cpuspec.errors import ConfigError, CpuspecError, in_one_line
from cpuspec.metrics import epoch_s
from cpuspec.server.figures import chat_logprobs, completion_logprobs, timings, usage
from cpuspec.server.parsing import AnswerParser

_MOST_ANSWERS = 128  # to one line, as OpenAI's API allows
_MOST_LOGPROBS = 20
_LINES_AHEAD = 16  # for each sequence that runs: answers that may wait for one before them
_REASONING = ("<think>", "</think>")
_SAMPLING = {one.name for one in fields(SamplingParams)} - {"logprobs", "max_draft_tokens"}
# Fields that change no answer here. One model answers the whole batch, whatever a line calls it.
_IGNORED = {
    *("model", "user", "metadata", "stream_options", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
    *("safety_identifier", "parallel_tool_calls", "modalities", "verbosity", "prediction", "tool_choice"),
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
    """Yield the answer of each line, in order; as many run at once as the LLM has room for. It must have no other callers.

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
            self._prompt = _prompt_ids(llm, self._url, body)
            params = _params(llm, self._url, body, given)
            llm.check(self._prompt, params)
        except CpuspecError as error:
            self._error = error
            return
        tokenizer = llm.tokenizer
        found = [tokenizer.token_id(text) for text in _REASONING] if self._url == CHAT else []
        shown = frozenset(token for token in found if token is not None)
        for one in answer_params(params):
            self._answers.append(_Answer())
            self._requests.append(llm.submit(self._prompt, one, self._answers[-1].take, shown))

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
        stats = [last.stats for last in lasts if last.stats is not None]
        is_chat, number = self._url == CHAT, self._line.number
        choice = self._chat_choice if is_chat else self._text_choice
        body = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{number}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": epoch_s(),
            "model": self._llm.name,
            "choices": [choice(index, answer) for index, answer in enumerate(self._answers)],
            "usage": usage(stats),
        }
        return answer_line(self._line, 200, body | ({"timings": timings(stats[0])} if len(stats) == 1 else {}))

    def _chat_choice(self, index: int, answer: _Answer) -> dict[str, Any]:
        tokenizer = self._llm.tokenizer
        thinking = tokenizer.decode(self._prompt[-8:], skip_special=False).rstrip().endswith(_REASONING[0])
        parser = AnswerParser(thinking=thinking, calls=None)
        said = {"reasoning": "", "content": ""}
        for piece in [*parser.push("".join(answer.texts)), *parser.finish()]:
            said[piece.kind] += piece.text
        message = {"role": "assistant", "content": said["content"], "refusal": None}
        if said["reasoning"]:
            message["reasoning_content"] = said["reasoning"]
        logprobs = chat_logprobs(tokenizer, answer.logprobs) if answer.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": _reason(answer)}

    def _text_choice(self, index: int, answer: _Answer) -> dict[str, Any]:
        logprobs = completion_logprobs(self._llm.tokenizer, answer.logprobs, 0) if answer.logprobs else None
        return {"index": index, "text": "".join(answer.texts), "logprobs": logprobs, "finish_reason": _reason(answer)}


def _reason(answer: _Answer) -> str | None:
    return answer.last.finish_reason if answer.last else None


def _prompt_ids(llm: LLM, url: str, body: Mapping[str, Any]) -> list[int]:
    """Token ids of a body's prompt or conversation. Raises ConfigError or TokenizerError."""
    tokenizer = llm.tokenizer
    if url == CHAT:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ConfigError("messages must be a list of objects with role and content")
        return tokenizer.encode_chat([_message(message) for message in messages], variables=_variables(body))
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt)
        return ids if ids or tokenizer.bos_id is None else [tokenizer.bos_id]
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    raise ConfigError("prompt must be a text or a list of token ids; a batch has a line for each prompt")


def _variables(body: Mapping[str, Any]) -> dict[str, Any]:
    variables = body.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise ConfigError("chat_template_kwargs must be an object")
    return variables


def _message(message: Any) -> dict[str, Any]:
    """A message with its content as one text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ConfigError("each of messages must be an object with role and content")
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError("content has a part that is no text; this model takes texts only")
        content = "\n".join(map(str, texts))
    if not isinstance(content, str):
        raise ConfigError("content must be a text or a list of texts; tool calls are answered by `cpuspec serve` only")
    role = {"developer": "system"}.get(message["role"], message["role"])
    return {"role": role, "content": content}


def _params(llm: LLM, url: str, body: Mapping[str, Any], given: Mapping[str, Any]) -> SamplingParams:
    """The params that a body asks for. Raises ConfigError, also for fields that would change the answer and cannot be honoured."""
    asked = {name: value for name, value in body.items() if value is not None and name not in _IGNORED}
    for name in ("prompt", "messages", "chat_template_kwargs"):
        asked.pop(name, None)
    for name, neutral in _REFUSED.items():
        if (value := asked.pop(name, neutral)) != neutral:
            raise ConfigError(f"{name} is not supported in a batch; got {in_one_line(repr(value))}")
    if "max_completion_tokens" in asked:
        asked["max_tokens"] = asked.pop("max_completion_tokens")
    changes = dict(given) | _logprobs(url, asked) | _drafts(asked)
    if unknown := sorted(asked.keys() - _SAMPLING):
        raise ConfigError(f"there is no field {in_one_line(unknown[0])!r}; wanted some of {', '.join(sorted(_SAMPLING))}")
    if asked.get("top_k") == -1:
        asked["top_k"] = 0  # vLLM's spelling of "off"
    for name in ("stop", "stop_token_ids"):
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
