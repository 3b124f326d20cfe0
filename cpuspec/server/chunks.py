"""The interface of a protocol's writer; OpenAI's chunks of chat and plain completions. A whole completion is their sum."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from cpuspec.engine.engine import Output
from cpuspec.metrics import RequestStats
from cpuspec.sampling import TokenLogprobs
from cpuspec.server.admission import AnswerMeter
from cpuspec.server.chat import ChatPrompt, custom_input
from cpuspec.server.errors import RequestError
from cpuspec.server.figures import (
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    timings,
    token_parts,
    token_text,
    usage,
)
from cpuspec.server.parsing.answer import Piece, with_arguments
from cpuspec.server.schema import StreamOptions
from cpuspec.text import Tokenizer

Event = dict[str, Any]


class Writer(Protocol):
    """Makes events of the outputs of a request. Events are JSON objects; the `type` of one that has it becomes the event's name."""

    closing: str = ""  # the text that ends a stream, after the last event
    is_long: bool = False  # whether events are long, so that threads make texts of them
    is_done: bool = False  # set when the answer shall end with the output that was shown last

    def begin(self) -> Iterable[Event]:
        """The events before the first output."""
        return ()

    def show(self, index: int, output: Output) -> Iterable[Event]:
        """The events of an output of the answer with this index."""

    def finish(self, stats: Sequence[RequestStats]) -> Iterable[Event]:
        """The events after the last output. stats: of all answers, in their order."""

    def whole(self, events: Sequence[Event], stats: Sequence[RequestStats]) -> Event:
        """The whole answer as one JSON object, made of all events."""

    def sign_of_life(self) -> str:
        """The text that a silent stream sends so that its client does not give up: a comment, which clients skip."""
        return ": keep-alive\n\n"

    def failed(self, error: RequestError) -> Event | None:
        """The event of an error in a stream; None if the protocol has none besides its error object."""
        return None


class Usages:
    """The `usage` of chunks: absent, null until the last chunk, or (vLLM's option) that of the chunk's answer until then."""

    def __init__(self, options: StreamOptions | None, prompt_lengths: Sequence[int]) -> None:
        self.in_last_chunk = options is not None and options.include_usage
        self._is_continuous = options is not None and options.continuous_usage_stats
        self._num_prompt = prompt_lengths
        self._num_new = [0] * len(prompt_lengths)

    def count(self, index: int, output: Output) -> None:
        """Add the tokens of an output."""
        self._num_new[index] += len(output.token_ids)

    def of_chunk(self, index: int) -> dict[str, Any]:
        """The fields of a chunk of an answer."""
        if not (self.in_last_chunk and self._is_continuous):
            return {"usage": None} if self.in_last_chunk else {}
        num_prompt, num_new = self._num_prompt[index], self._num_new[index]
        return {"usage": {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}}


class ChatChunks(Writer):
    """Writes chat completions. head: id, created and model.

    new_id: makes 32 hexadecimal digits for a tool call. by_token: each token gets a chunk, with a `cpuspec` object. meters: the
    times of the answers, for reports of how far a prompt has been read. scored: the prompt's tokens, for a whole completion.
    """

    closing = "data: [DONE]\n\n"

    def __init__(
        self,
        prompt: ChatPrompt,
        head: Mapping[str, Any],
        usages: Usages,
        num_answers: int,
        new_id: Callable[[], str],
        *,
        logprobs: bool = False,
        by_token: bool = False,
        meters: Sequence[AnswerMeter] = (),
        scored: Sequence[TokenLogprobs] = (),
    ) -> None:
        self._scored, self.is_long = scored, bool(scored)
        self._prompt, self._head, self._usages, self._new_id = prompt, head, usages, new_id
        self._has_logprobs, self._by_token, self._meters = logprobs, by_token, meters
        self._parsers = [prompt.parser() for _ in range(num_answers)]

    def begin(self) -> Iterator[Event]:
        """Each answer's role, and the beginning that was written for the model."""
        for index, parser in enumerate(self._parsers):
            yield self._chunk(index, {"role": "assistant", "content": ""})
            for delta in self._deltas(parser.push(self._prompt.prefix)):
                yield self._chunk(index, delta)

    def show(self, index: int, output: Output) -> Iterator[Event]:
        """The chunks of an output."""
        parser, tokenizer = self._parsers[index], self._prompt.model.llm.tokenizer
        self._usages.count(index, output)
        if output.num_read_tokens is not None:
            meter = self._meters[index]  # llama-server's progress; cached tokens are processed from the start
            counts = {"cache": output.num_cached_tokens, "processed": output.num_read_tokens}
            progress = {"total": meter.num_prompt_tokens, **counts, "time_ms": 1000 * meter.running_s}
            yield self._chunk(index, {}, prompt_progress=progress)
        for text, tokens, more in token_parts(output) if self._by_token else [(output.text, output.logprobs, {})]:
            deltas = self._deltas(parser.push(text))
            logprobs = chat_logprobs(tokenizer, tokens) if self._has_logprobs and tokens else None
            if (logprobs or more) and not deltas:
                deltas = [{"content": ""}]
            for number, delta in enumerate(deltas):
                yield self._chunk(index, delta, None if number else logprobs, **({} if number else more))
        if output.finish_reason is not None:
            for delta in self._deltas(parser.finish()):
                yield self._chunk(index, delta)
            called = parser.num_calls > 0 and output.finish_reason == "stop"
            reason = "tool_calls" if called else output.finish_reason
            yield self._chunk(index, {}, reason=reason, **_timings_of_one([output.stats], len(self._parsers)))

    def finish(self, stats: Sequence[RequestStats]) -> Iterator[Event]:
        """The usage, if it was asked for."""
        if self._usages.in_last_chunk:
            yield {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage(stats)}

    def whole(self, events: Sequence[Event], stats: Sequence[RequestStats]) -> dict[str, Any]:
        """The chat completion."""
        choices: list[dict[str, Any]] = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "", "refusal": None},
                "logprobs": {"content": [], "refusal": None} if self._has_logprobs else None,
                "finish_reason": None,
            }
            for index in range(len(self._parsers))
        ]
        deltas: list[list[Mapping[str, Any]]] = [[] for _ in choices]
        for part in (part for chunk in events for part in chunk["choices"]):
            choice = choices[part["index"]]
            deltas[part["index"]].append(part["delta"])
            if part["logprobs"]:
                choice["logprobs"]["content"] += part["logprobs"]["content"]
            choice["finish_reason"] = part["finish_reason"]
        for choice, said in zip(choices, deltas, strict=True):
            choice["message"] |= _joined(said)
        found = {**self._head, "object": "chat.completion", "choices": choices, "usage": usage(stats)}
        if self._scored:
            found["prompt_logprobs"] = prompt_logprobs(self._prompt.model.llm.tokenizer, self._scored)
        return found | _timings_of_one(stats, len(self._parsers))

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None, **more: Any) -> Event:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **self._usages.of_chunk(index), **more}

    def _deltas(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """The parts of a message that these pieces are. A call is whole."""
        found: list[dict[str, Any]] = []
        for piece, arguments in with_arguments(pieces):
            if piece.kind != "call":
                found.append({"content" if piece.kind == "content" else "reasoning_content": piece.text})
                continue
            kind, own = "function", {"arguments": arguments}
            if piece.text in self._prompt.custom:
                kind, own = "custom", {"input": custom_input(arguments)}
            call = {"index": piece.call, "id": self._prompt.call_id(self._new_id()), "type": kind}
            found.append({"tool_calls": [{**call, kind: {"name": piece.text, **own}}]})
        return found


def _joined(deltas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The parts of a message that these deltas add up to."""
    texts: dict[str, list[str]] = {"content": []}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                texts.setdefault(name, []).append(delta[name])
        calls += [{key: value for key, value in call.items() if key != "index"} for call in delta.get("tool_calls", ())]
    found: dict[str, Any] = {name: "".join(parts) for name, parts in texts.items()}
    if calls:
        found["content"] = found["content"] or None
        found["tool_calls"] = calls
    return found


class TextChunks(Writer):
    """Writes plain completions.

    head: id, object, created and model. echoes: the prompts' texts, empty where none is wanted. scores: for each prompt that is
    echoed with its log-probabilities what `completion_logprobs` makes of them. scored: the tokens of each prompt, for
    `prompt_logprobs` of a whole completion.
    """

    closing = "data: [DONE]\n\n"

    def __init__(
        self,
        tokenizer: Tokenizer,
        head: Mapping[str, Any],
        usages: Usages,
        echoes: Sequence[str],
        num_answers: int,
        *,
        logprobs: bool = False,
        scores: Sequence[dict[str, Any]] = (),
        scored: Sequence[Sequence[TokenLogprobs]] = (),
    ) -> None:
        self._scored, self.is_long = scored, bool(scores or scored)
        self._tokenizer, self._head, self._usages, self._echoes, self._scores = tokenizer, head, usages, echoes, scores
        self._has_logprobs = logprobs
        self._num_chars = [0] * num_answers  # of the tokens that have come, for the offsets of logprobs

    def begin(self) -> Iterator[Event]:
        """The prompt's text, where it is echoed."""
        per_prompt = len(self._num_chars) // len(self._echoes)
        for index in range(len(self._num_chars)):
            prompt, logprobs = index // per_prompt, None
            if self._scores:
                logprobs = self._scores[prompt]
                self._num_chars[index] = sum(map(len, logprobs["tokens"]))
            if self._echoes[prompt]:
                yield self._chunk(index, self._echoes[prompt], logprobs)

    def show(self, index: int, output: Output) -> Iterator[Event]:
        """The chunk of an output; none for an output without text, logprobs or end."""
        logprobs = None
        self._usages.count(index, output)
        if self._has_logprobs:
            logprobs = self._logprobs(index, output.logprobs)
        more = {} if output.finish_reason is None else _timings_of_one([output.stats], len(self._num_chars))
        if output.text or logprobs or output.finish_reason is not None:
            yield self._chunk(index, output.text, logprobs, output.finish_reason, **more)

    def finish(self, stats: Sequence[RequestStats]) -> Iterator[Event]:
        """The usage, if it was asked for."""
        if self._usages.in_last_chunk:
            yield {**self._head, "choices": [], "usage": usage(stats, len(self._echoes))}

    def whole(self, events: Sequence[Event], stats: Sequence[RequestStats]) -> dict[str, Any]:
        """The completion."""
        choices: list[dict[str, Any]] = [
            {"index": index, "text": [], "logprobs": {} if self._has_logprobs else None, "finish_reason": None}
            for index in range(len(self._num_chars))
        ]
        for part in (part for chunk in events for part in chunk["choices"]):
            choice = choices[part["index"]]
            choice["text"].append(part["text"])
            choice["finish_reason"] = part["finish_reason"]
            for name, values in (part["logprobs"] or {}).items():
                if values is not None:
                    choice["logprobs"].setdefault(name, []).extend(values)
        for choice in choices:
            choice["text"] = "".join(choice["text"])
            if self._has_logprobs:
                choice["logprobs"] = completion_logprobs(self._tokenizer, [], 0) | choice["logprobs"]
        for choice in choices if self._scored else ():
            of_prompt = self._scored[choice["index"] * len(self._scored) // len(choices)]
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, of_prompt)
        found = {**self._head, "choices": choices, "usage": usage(stats, len(self._echoes))}
        return found | _timings_of_one(stats, len(self._num_chars))

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        found = completion_logprobs(self._tokenizer, tokens, self._num_chars[index])
        self._num_chars[index] += sum(len(token_text(self._tokenizer, one.token_id)[0]) for one in tokens)
        return found

    def _chunk(self, index: int, text: str, logprobs: Any = None, reason: str | None = None, **more: Any) -> Event:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "choices": [choice], **self._usages.of_chunk(index), **more}


def _timings_of_one(stats: Sequence[RequestStats | None], num_answers: int) -> dict[str, Any]:
    """llama-server's `timings`; only a request for one answer has them."""
    return {"timings": timings(stats[0])} if num_answers == 1 and stats and stats[0] is not None else {}
