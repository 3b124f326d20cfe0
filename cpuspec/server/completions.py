"""OpenAI's `/v1/chat/completions` and `/v1/completions`."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from cpuspec.config import SamplingParams
from cpuspec.engine.engine import Output
from cpuspec.engine.llm import answer_params
from cpuspec.server.bodies import BodyRoute
from cpuspec.server.chat import ChatPrompt, chat_prompt, message_of, reason_of, said
from cpuspec.server.content import content_text
from cpuspec.server.errors import RequestError
from cpuspec.server.figures import (
    chat_logprobs,
    completion_logprobs,
    log_figures,
    prompt_progress,
    stats_of,
    timings,
    token_parts,
    usage,
)
from cpuspec.server.gate import context_of, model_of
from cpuspec.server.model import Answers, ServedModel, Wanted, gather
from cpuspec.server.parsing import Piece
from cpuspec.server.replies import EventStream, event, json_response, unless_gone
from cpuspec.server.schema import ChatBody, CompletionBody, Prediction, SamplingBody, grammar_of, sampling_params
from cpuspec.server.server import server_of
from cpuspec.server.structured import loose_format, loosened_note

router = APIRouter(route_class=BodyRoute)

_MOST_LOGPROBS = 20


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    model = await model_of(request, body.model)
    params = chat_params(model, body)
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables |= {"reasoning_effort": body.reasoning_effort, "enable_thinking": body.reasoning_effort != "none"} | variables
    keeps_to = grammar_of(body)
    work = partial(chat_prompt, model, body.messages, body.tools or (), body.tool_choice, variables, keeps_to, body.ending)
    prompt = await model.in_worker(work)
    context.notes |= prompt.notes
    check_number(model, params.n)
    predicted = await model.in_worker(partial(_predicted, model, body.prediction))
    wanted = prompt.wanted(params, bool(body.stream and body.return_progress), predicted)
    answers = await model.answers(context.client, context.id, wanted, context.rng)
    head = {"id": f"chatcmpl-{context.id}", "created": context.created, "model": server_of(request).shown_name(model)}
    if body.stream:
        return EventStream(_chat_events(body, prompt, answers, head, context.figures), answers, request, context.id)
    return await unless_gone(request, _chat(body, prompt, answers, head, context.figures), answers.close)


def _predicted(model: ServedModel, prediction: Prediction | None) -> list[int]:
    """Token ids of OpenAI's predicted output."""
    if prediction is None:
        return []
    text = content_text(prediction.content, "prediction")
    model.check_text(len(text))
    return model.llm.tokenizer.encode(text, add_special=False)[: model.llm.context_length]


def chat_params(model: ServedModel, body: ChatBody) -> SamplingParams:
    """The params of a chat completion. Raises RequestError or ConfigError."""
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    num_top = _checked_logprobs(body.top_logprobs or (0 if body.logprobs is True else body.logprobs or 0), "top_logprobs")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return sampling_params(model, body, n=body.n, stop=body.stop, max_tokens=limit, logprobs=num_top if body.logprobs else None)


def check_number(model: ServedModel, number: int) -> None:
    """Raise RequestError for more answers than could ever be taken in."""
    most = model.admission.max_running + model.admission.max_waiting
    if number > most:
        raise RequestError(f"the request asks for {number} answers, and at most {most} are taken", "n")


def _checked_logprobs(number: int, name: str) -> int:
    if not 0 <= number <= _MOST_LOGPROBS:
        raise RequestError(f"{name} must be from 0 to {_MOST_LOGPROBS}, got {str(number)[:20]}", name)
    return number


async def _chat(body: ChatBody, prompt: ChatPrompt, answers: Answers, head: dict[str, Any], figures: dict[str, Any]) -> Response:
    outputs = await gather(answers)
    tokenizer, choices = prompt.model.llm.tokenizer, []
    for index, output in enumerate(outputs):
        found = said(prompt, output.text)
        choices.append(
            {
                "index": index,
                "message": message_of(found),
                "logprobs": chat_logprobs(tokenizer, output.logprobs) if body.logprobs else None,
                "finish_reason": reason_of(output, bool(found.calls)),
            }
        )
    stats = stats_of(outputs)
    figures |= log_figures(stats)
    reply = {**head, "object": "chat.completion", "choices": choices, "usage": usage(stats)}
    return json_response(reply | ({"timings": timings(stats[0])} if len(stats) == 1 else {}))


async def _chat_events(
    body: ChatBody, prompt: ChatPrompt, answers: Answers, head: dict[str, Any], figures: dict[str, Any]
) -> AsyncGenerator[str]:
    head = {**head, "object": "chat.completion.chunk"}
    tokenizer, lasts = prompt.model.llm.tokenizer, []
    parsers = [prompt.parser() for _ in answers.wanted]
    call_ids: dict[tuple[int, int], str] = {}
    usages = _Usages(body, answers)

    def chunk(index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None, **more: Any) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return event({**head, "choices": [choice], **usages.of_chunk(index), **more})

    def delta_of(index: int, piece: Piece) -> dict[str, Any]:
        match piece.kind:
            case "content":
                return {"content": piece.text}
            case "reasoning":
                return {"reasoning_content": piece.text}
            case "call":
                call_id = call_ids.setdefault((index, piece.call), prompt.call_id(answers.new_id()))
                function = {"name": piece.text, "arguments": ""}
                return {"tool_calls": [{"index": piece.call, "id": call_id, "type": "function", "function": function}]}
        return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}

    for index, parser in enumerate(parsers):
        yield chunk(index, {"role": "assistant", "content": ""})
        for piece in parser.push(prompt.prefix):
            yield chunk(index, delta_of(index, piece))
    by_token = body.cpuspec is not None and body.cpuspec.tokens
    async for index, output in answers.outputs():
        parser = parsers[index]
        usages.count(index, output)
        if output.num_read_tokens is not None:
            meter = answers.meters[index]
            yield chunk(index, {}, prompt_progress=prompt_progress(output, meter.num_prompt_tokens, meter.running_s))
        for text, found, told in token_parts(output) if by_token else [(output.text, output.logprobs, {})]:
            deltas = [delta_of(index, piece) for piece in parser.push(text)]
            logprobs = chat_logprobs(tokenizer, found) if body.logprobs and found else None
            if (logprobs or told) and not deltas:
                deltas = [{"content": ""}]
            for number, delta in enumerate(deltas):
                yield chunk(index, delta, None if number else logprobs, **({} if number else told))
        if output.finish_reason is not None:
            for piece in parser.finish():
                yield chunk(index, delta_of(index, piece))
            lasts.append(output)
            told = {"timings": timings(output.stats)} if output.stats and len(parsers) == 1 else {}
            yield chunk(index, {}, reason=reason_of(output, parser.num_calls > 0), **told)
    stats = stats_of(lasts)
    figures |= log_figures(stats)
    if usages.wanted:
        yield event({**head, "choices": [], "usage": usage(stats)})
    yield "data: [DONE]\n\n"


class _Usages:
    """The usage that chunks of a stream tell: none, null until the last chunk, or (vLLM's option) that of their answer so far."""

    def __init__(self, body: SamplingBody, answers: Answers) -> None:
        options = body.stream_options
        self.wanted = options is not None and options.include_usage
        self._is_continuous = options is not None and options.continuous_usage_stats
        self._num_prompt = [len(one.prompt) for one in answers.wanted]
        self._num_new = [0] * len(answers.wanted)

    def count(self, index: int, output: Output) -> None:
        """Add the tokens of an output."""
        self._num_new[index] += len(output.token_ids)

    def of_chunk(self, index: int) -> dict[str, Any]:
        """The fields of a chunk of an answer."""
        if not (self.wanted and self._is_continuous):
            return {"usage": None} if self.wanted else {}
        num_prompt, num_new = self._num_prompt[index], self._num_new[index]
        return {"usage": {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}}


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue one prompt or several, or fill the gap between a prompt and a suffix."""
    context = context_of(request)
    model = await model_of(request, body.model)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError("best_of is not supported; leave it out, and choose among n answers", "best_of")
    if body.echo and body.logprobs is not None:
        raise RequestError("echo with logprobs is not supported: a prompt's tokens get no log-probabilities", "echo")
    if body.suffix and not (isinstance(body.prompt, str) and not body.echo):
        raise RequestError("suffix goes with one prompt, a text, and without echo", "suffix")
    limit = 16 if body.max_tokens is None else body.max_tokens  # OpenAI's default
    num_top = None if body.logprobs is None else _checked_logprobs(body.logprobs, "logprobs")
    keeps_to, lost = loose_format(grammar_of(body))
    context.notes |= loosened_note(lost)
    params = sampling_params(model, body, n=body.n, stop=body.stop, max_tokens=limit, logprobs=num_top, **keeps_to)
    if body.suffix:
        assert isinstance(body.prompt, str), "checked above"
        check_number(model, params.n)
        prompts = [await model.in_worker(partial(fill_prompt, model, body.prompt, body.suffix))]
        params = fill_params(model, params)
    else:
        check_number(model, params.n * len(_each_prompt(body.prompt)))
        prompts = await model.in_worker(partial(_prompts, model, body))
    wanted = [Wanted(prompt, one) for prompt in prompts for one in answer_params(params)]
    echoes = [_echo(model, one) for one in _each_prompt(body.prompt)] if body.echo else [""] * len(prompts)
    answers = await model.answers(context.client, context.id, wanted, context.rng)
    head = {
        "id": f"cmpl-{context.id}",
        "object": "text_completion",
        "created": context.created,
        "model": server_of(request).shown_name(model),
    }
    if body.stream:
        return EventStream(_text_events(body, model, answers, echoes, head, context.figures), answers, request, context.id)
    return await unless_gone(request, _texts(body, model, answers, echoes, head, context.figures), answers.close)


def fill_prompt(model: ServedModel, before: str, behind: str, others: Sequence[tuple[str, str]] = (), name: str = "") -> list[int]:
    """The prompt that asks for the text between two texts. others: names and texts of other files; name: this file's.

    Source of the order: Qwen2.5-Coder's and StarCoder 2's repository format, as llama.cpp's server writes it. Raises RequestError
    for a model that cannot fill in.
    """
    fill, tokenizer = model.fill, model.llm.tokenizer
    if fill is None:
        raise RequestError(
            f"{model.name} has no tokens for filling in the middle, so it cannot take a suffix; use a model such as qwen2.5-coder",
            "suffix",
        )
    model.check_text(len(before) + len(behind) + sum(len(path) + len(text) for path, text in others))
    ids = list(tokenizer.prefix)
    if others and fill.repository is not None and fill.file is not None:
        ids += [fill.repository, *tokenizer.encode("project\n", add_special=False)]
        for path, text in others:
            ids += [fill.file, *tokenizer.encode(f"{path}\n{text}\n", add_special=False)]
        ids += [fill.file, *tokenizer.encode(f"{name or 'file'}\n", add_special=False)]
    elif others:
        ids += tokenizer.encode("".join(f"{text}\n" for _, text in others), add_special=False)
    return [
        *ids,
        fill.prefix,
        *tokenizer.encode(before, add_special=False),
        fill.suffix,
        *tokenizer.encode(behind, add_special=False),
        fill.middle,
    ]


def fill_params(model: ServedModel, params: SamplingParams) -> SamplingParams:
    """The params, with the tokens that end the text in a gap."""
    return replace(params, stop_token_ids=(*params.stop_token_ids, *(model.fill.ends if model.fill else ())))


def _each_prompt(given: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """A list of texts and lists of token ids."""
    if isinstance(given, str):
        return [given]
    ids = [one for one in given if isinstance(one, int)]
    return [ids] if ids else [one for one in given if not isinstance(one, int)]


def _prompts(model: ServedModel, body: CompletionBody) -> list[list[int]]:
    """Token ids of every prompt. Clients write the control tokens of templates of their own into its text."""
    given = body.prompt
    if not given and not isinstance(given, str):
        raise RequestError("prompt is an empty list; wanted a text, token ids, or a list of them", "prompt")
    tokenizer, prompts = model.llm.tokenizer, []
    special = body.parse_special is not False, body.add_special is not False
    for one in _each_prompt(given):
        model.check_text(len(one) if isinstance(one, str) else 0)
        prompts.append(tokenizer.encode_prompt(one, *special) if isinstance(one, str) else one or tokenizer.encode_prompt(""))
    return prompts


def _echo(model: ServedModel, prompt: str | list[int]) -> str:
    """The prompt's text."""
    return prompt if isinstance(prompt, str) else model.llm.tokenizer.decode(prompt, skip_special=False)


async def _texts(
    body: CompletionBody,
    model: ServedModel,
    answers: Answers,
    echoes: Sequence[str],
    head: dict[str, Any],
    figures: dict[str, Any],
) -> Response:
    outputs = await gather(answers)
    per_prompt = len(outputs) // len(echoes)
    choices = []
    for index, output in enumerate(outputs):
        echo = echoes[index // per_prompt]
        logprobs = completion_logprobs(model.llm.tokenizer, output.logprobs, 0) if body.logprobs is not None else None
        choices.append({"index": index, "text": echo + output.text, "logprobs": logprobs, "finish_reason": output.finish_reason})
    stats = stats_of(outputs)
    figures |= log_figures(stats)
    reply = {**head, "choices": choices, "usage": usage(stats, len(echoes))}
    return json_response(reply | ({"timings": timings(stats[0])} if len(stats) == 1 else {}))


async def _text_events(
    body: CompletionBody,
    model: ServedModel,
    answers: Answers,
    echoes: Sequence[str],
    head: dict[str, Any],
    figures: dict[str, Any],
) -> AsyncGenerator[str]:
    per_prompt = len(answers.wanted) // len(echoes)
    num_chars, lasts = [0] * len(answers.wanted), {}
    usages = _Usages(body, answers)

    def chunk(index: int, text: str, logprobs: Any = None, reason: str | None = None, **more: Any) -> str:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return event({**head, "choices": [choice], **usages.of_chunk(index), **more})

    for index in range(len(answers.wanted)):
        if echo := echoes[index // per_prompt]:
            yield chunk(index, echo)
    async for index, output in answers.outputs():
        logprobs = None
        usages.count(index, output)
        if body.logprobs is not None:
            logprobs = completion_logprobs(model.llm.tokenizer, output.logprobs, num_chars[index])
            num_chars[index] += sum(map(len, logprobs["tokens"]))
        told: dict[str, Any] = {}
        if output.finish_reason is not None:
            lasts[index] = output
            told = {"timings": timings(output.stats)} if output.stats and len(answers.wanted) == 1 else {}
        if output.text or logprobs or output.finish_reason is not None:
            yield chunk(index, output.text, logprobs, output.finish_reason, **told)
    stats = stats_of([lasts[index] for index in sorted(lasts)])
    figures |= log_figures(stats)
    if usages.wanted:
        yield event({**head, "choices": [], "usage": usage(stats, len(echoes))})
    yield "data: [DONE]\n\n"
