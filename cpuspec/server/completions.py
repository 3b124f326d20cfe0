"""OpenAI's `/v1/chat/completions` and `/v1/completions`."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from cpuspec.engine.engine import Output, RequestedAnswer
from cpuspec.engine.llm import answer_params
from cpuspec.sampling import TokenLogprobs
from cpuspec.server.answering import respond, run_job, submit
from cpuspec.server.bodies import BodyRoute
from cpuspec.server.chat import ChatPrompt, chat_prompt
from cpuspec.server.chunks import ChatChunks, TextChunks, Usages
from cpuspec.server.embeddings import count_tokens
from cpuspec.server.errors import RequestError
from cpuspec.server.figures import completion_logprobs
from cpuspec.server.gate import context_of, model_of, shown_name
from cpuspec.server.model import ServedModel
from cpuspec.server.replies import event, json_response
from cpuspec.server.schema import (
    ChatBody,
    CompletionBody,
    chat_params,
    completion_params,
    grammar_of,
    predicted_ids,
    prompt_logprobs_of,
)
from cpuspec.server.structured import noted_format
from cpuspec.settings import SamplingParams

router = APIRouter(route_class=BodyRoute)

_OPENAI_TOKENS = 16  # of a plain completion that names no number
_MOST_SCORES = 1 << 20  # log-probabilities of prompts in one response


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    model = await model_of(request, body.model, body.lora_scales)
    prompt, requested = await model.in_worker(context.client, _chat, model, body)
    context.notes |= prompt.notes
    num_scored = prompt_logprobs_of(body)
    scored: list[TokenLogprobs] = []
    if num_scored is not None:
        (scored,) = await _scores(request, model, [prompt.ids], num_scored, 1, requested[0].params.cache_salt, True)
    answers = await submit(request, model, requested)
    writer = ChatChunks(
        prompt,
        {"id": f"chatcmpl-{context.id}", "created": context.created, "model": shown_name(request, model)},
        Usages(body.stream_options, [len(prompt.ids)] * len(requested)),
        len(requested),
        answers.new_id,
        logprobs=bool(body.logprobs),
        by_token=bool(body.stream and body.cpuspec and body.cpuspec.tokens),
        meters=answers.meters,
        scored=scored,
    )
    return await respond(request, answers, writer, body.stream)


def _chat(model: ServedModel, body: ChatBody) -> tuple[ChatPrompt, list[RequestedAnswer]]:
    """A conversation's prompt, and the answers that are asked for. Raises RequestError, ConfigError or TokenizerError."""
    params, keeps_to = chat_params(model, body, body.n), grammar_of(body)
    prompt = chat_prompt(model, body.messages, body.tools or (), body.tool_choice, body.variables, keeps_to, body)
    check_number(model, params.n)
    predicted = predicted_ids(model, body.prediction)
    return prompt, prompt.requested(params, bool(body.stream and body.return_progress), predicted)


def check_number(model: ServedModel, number: int) -> None:
    """Raise RequestError for more answers than could ever be taken in."""
    most = model.admission.max_running + model.admission.max_waiting
    if number > most:
        raise RequestError(f"the request asks for {number} answers, and at most {most} are taken", "n")


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue one prompt or several, or fill the gap before a suffix. With `max_tokens` 0 only echo and score the prompts."""
    context = context_of(request)
    model = await model_of(request, body.model, body.lora_scales)
    prompts, echoes, params = await model.in_worker(context.client, _asked, model, body, context.notes)
    requested = [RequestedAnswer(prompt, one) for prompt in prompts for one in params]
    of_echo, of_prompt = params[0].logprobs if body.echo else None, prompt_logprobs_of(body)
    echoed: list[dict[str, Any]] = []
    scored: list[list[TokenLogprobs]] = []
    if of_echo is not None or of_prompt is not None:
        most, is_answered = max(of_echo or 0, of_prompt or 0), body.max_tokens != 0
        found = await _scores(request, model, prompts, most, len(params), params[0].cache_salt, is_answered)
        if of_echo is not None:
            own = _cut(found, of_echo)
            echoed = await model.in_worker(
                context.client, lambda: [completion_logprobs(model.llm.tokenizer, one, 0) for one in own]
            )
        scored = [] if of_prompt is None else await model.in_worker(context.client, _cut, found, of_prompt)
    writer = TextChunks(
        model.llm.tokenizer,
        {
            "id": f"cmpl-{context.id}",
            "object": "text_completion",
            "created": context.created,
            "model": shown_name(request, model),
        },
        Usages(body.stream_options, [len(one.prompt) for one in requested]),
        echoes,
        len(requested),
        logprobs=body.logprobs is not None,
        scores=echoed,
        scored=scored,
    )
    if body.max_tokens == 0:
        path = request.url.path
        return await model.in_worker(
            context.client, _without_answers, writer, len(requested), sum(map(len, prompts)), path, bool(body.stream)
        )
    return await respond(request, await submit(request, model, requested), writer, body.stream)


def _asked(
    model: ServedModel, body: CompletionBody, notes: dict[str, str]
) -> tuple[list[list[int]], list[str], list[SamplingParams]]:
    """The prompts, for each the text that is echoed, and the params of the answers to each.

    notes: gets how the request was changed. Raises RequestError or ConfigError.
    """
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError("best_of is not supported; leave it out, and choose among n answers", "best_of")
    if body.suffix and not (isinstance(body.prompt, str) and not body.echo):
        raise RequestError("suffix goes with one prompt, a text, and without echo", "suffix")
    limit = _OPENAI_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
    params = completion_params(model, body, noted_format(grammar_of(body), notes), limit)
    given = _each_prompt(body.prompt)
    check_number(model, params.n * len(given))
    if body.suffix:
        prompts, params = [model.fill_prompt(str(body.prompt), body.suffix)], model.fill_params(params)
    else:
        prompts = _prompts(model, body)
    decode = partial(model.llm.tokenizer.decode, skip_special=False)
    echoes = [one if isinstance(one, str) else decode(one) for one in given] if body.echo else [""] * len(prompts)
    return prompts, echoes, answer_params(params)


async def _scores(
    request: Request, model: ServedModel, prompts: list[list[int]], num_top: int, num_shown: int, cache_salt: str, is_answered: bool
) -> list[list[TokenLogprobs]]:
    """For each prompt the scores of its tokens with `num_top` likely ones; nothing stands before the first one.

    num_shown: how often the response has each. is_answered: whether answers follow, which then find what was computed here.
    Raises RequestError for more than are given.
    """
    count_tokens(request, model, prompts)
    num_scores = num_shown * (1 + num_top) * sum(map(len, prompts))
    if num_scores > _MOST_SCORES:
        raise RequestError(f"the prompts have {num_scores} log-probabilities, and at most {_MOST_SCORES} are given", "logprobs")
    context = context_of(request)
    salt = model.salt(context.client, cache_salt) if is_answered else None
    job = await model.in_worker(context.client, model.llm.scoring_job, prompts, num_top, context.adapters, salt)
    await run_job(request, model, job)
    return [[TokenLogprobs(ids[0], math.nan, ()), *found] for ids, found in zip(prompts, job.scores(), strict=True)]


def _cut(scores: list[list[TokenLogprobs]], num_top: int) -> list[list[TokenLogprobs]]:
    """The scores with `num_top` likely tokens each."""
    return [[replace(token, top=token.top[:num_top]) for token in one] for one in scores]


def _without_answers(writer: TextChunks, num_answers: int, num_prompt_tokens: int, path: str, streams: bool) -> Response:
    """What a request for no tokens gets: the echo of its prompts, and their scores."""
    ends = [Output(0, "", [], [], finish_reason="length")] * num_answers
    events = [*writer.begin(), *(one for index, end in enumerate(ends) for one in writer.show(index, end))]
    if streams:
        texts = [event(one, path, is_long=True) for one in events]
        return Response("".join([*texts, writer.closing]), media_type="text/event-stream")
    usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": 0, "total_tokens": num_prompt_tokens}
    return json_response(writer.whole(events, []) | {"usage": usage})


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
