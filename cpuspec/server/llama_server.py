"""llama.cpp's own protocol: `/completion`, and for editors `/infill`, the text at the cursor, with other files as context.

Source: llama.cpp's server README.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from cpuspec.engine.engine import Output, RequestedAnswer
from cpuspec.metrics import RequestStats, now_s
from cpuspec.server.answering import respond, submit
from cpuspec.server.bodies import BodyRoute
from cpuspec.server.bounds import Count, Integers, Most, Name, Range, Schema, Text
from cpuspec.server.chunks import Writer
from cpuspec.server.fields import UNLIMITED
from cpuspec.server.figures import chat_logprobs, timings
from cpuspec.server.gate import context_of, model_of, shown_name
from cpuspec.server.model import ServedModel
from cpuspec.server.schema import Body, Grammar, SamplingFields, Stops, sampling_params
from cpuspec.server.structured import noted_format
from cpuspec.settings import SamplingParams
from cpuspec.text import Tokenizer

router = APIRouter(route_class=BodyRoute)


class OtherFile(Body):
    text: Text
    filename: Name = "file"


class _TextBody(SamplingFields):
    """Fields of both endpoints."""

    model: Name | None = None
    stop: Stops | None = None
    grammar: Grammar = ""
    json_schema: Schema | None = None
    stream: bool = False
    t_max_predict_ms: Annotated[float, Range(-1e12, 1e12)] = 0  # 0: no limit


class InfillBody(_TextBody):
    input_prefix: Text
    input_suffix: Text
    input_extra: Annotated[list[OtherFile], Most(1 << 23, 1 << 12)] = Field(default_factory=list)
    prompt: Text = ""  # text that has been written at the cursor
    n_predict: Count = 128


class CompletionBody(_TextBody):
    prompt: Annotated[str | Integers, Most(1 << 23)]
    n_predict: Count = UNLIMITED
    n_probs: Annotated[int, Range(0, 100)] = 0  # of likely tokens for each token
    return_tokens: bool = False


@router.post("/infill")
async def infill(body: InfillBody, request: Request) -> Response:
    """Fill the gap. n_predict 0 reads the prompt only, so that the next request finds it in the cache."""
    model = await model_of(request, body.model, body.lora_scales)
    client = context_of(request).client
    params = model.fill_params(await model.in_worker(client, _params, request, model, body))
    others = [(one.filename, one.text) for one in body.input_extra]
    prompt = await model.in_worker(client, model.fill_prompt, body.input_prefix + body.prompt, body.input_suffix, others)
    return await _answer(request, model, body, prompt, params)


@router.post("/completion")
async def completion(body: CompletionBody, request: Request) -> Response:
    """Continue one prompt, a text or token ids. n_predict 0 reads the prompt only."""
    model = await model_of(request, body.model, body.lora_scales)
    client, prompt = context_of(request).client, body.prompt
    params = await model.in_worker(client, _params, request, model, body, body.n_probs or None)
    if isinstance(prompt, str):
        model.check_text(len(prompt))
        prompt = await model.in_worker(client, model.llm.tokenizer.encode_prompt, prompt)
    return await _answer(request, model, body, prompt, params)


async def _answer(
    request: Request, model: ServedModel, body: InfillBody | CompletionBody, prompt: list[int], params: SamplingParams
) -> Response:
    answers = await submit(request, model, [RequestedAnswer(prompt, params)])
    writer = _TextWriter(body, model.llm.tokenizer, shown_name(request, model), len(prompt))
    return await respond(request, answers, writer, body.stream)


def _params(request: Request, model: ServedModel, body: InfillBody | CompletionBody, logprobs: int | None = None) -> SamplingParams:
    """The params that a body asks for. Raises RequestError or ConfigError."""
    keeps_to = noted_format({} if body.json_schema is None else {"json_schema": body.json_schema}, context_of(request).notes)
    limit, grammar = max(body.n_predict, 1), body.grammar or None
    return sampling_params(model, body, stop=body.stop, max_tokens=limit, grammar=grammar, logprobs=logprobs, **keeps_to)


class _TextWriter(Writer):
    """Writes an answer's text."""

    def __init__(self, body: InfillBody | CompletionBody, tokenizer: Tokenizer, model: str, num_prompt_tokens: int) -> None:
        self._body, self._tokenizer, self._model, self._num_prompt_tokens = body, tokenizer, model, num_prompt_tokens
        self._shows_tokens = isinstance(body, CompletionBody) and body.return_tokens
        self._num_new = 0
        self._first_s: float | None = None  # when the first output came
        self._last: Output | None = None

    def show(self, index: int, output: Output) -> Iterator[dict[str, Any]]:
        """The text of an output. When the body's time is up, the answer ends with it."""
        self._num_new, self._last = self._num_new + len(output.token_ids), output
        probs = chat_logprobs(self._tokenizer, output.logprobs)["content"]
        parts = {"tokens": output.token_ids if self._shows_tokens else [], "completion_probabilities": probs}
        more = {name: items for name, items in parts.items() if items}
        if self._body.n_predict and (output.text or more):
            yield {"content": output.text, "stop": False, **more}
        self._first_s = now_s() if self._first_s is None else self._first_s
        self.is_done = self._body.t_max_predict_ms > 0 and 1000 * (now_s() - self._first_s) > self._body.t_max_predict_ms

    def finish(self, stats: Sequence[RequestStats]) -> Iterator[dict[str, Any]]:
        """The figures of the answer."""
        reason, stop = (self._last.finish_reason, self._last.stop_reason) if self._last else (None, None)
        yield {
            "content": "",
            "model": self._model,
            "stop": True,
            "stop_type": "limit" if reason != "stop" else "word" if isinstance(stop, str) else "eos",
            "stopping_word": stop if isinstance(stop, str) else "",
            "tokens_predicted": self._num_new,
            "tokens_evaluated": self._num_prompt_tokens,
            "truncated": False,
            **({"timings": timings(stats[0])} if stats else {}),
        }

    def whole(self, events: Sequence[dict[str, Any]], stats: Sequence[RequestStats]) -> dict[str, Any]:
        """The last event, with the whole text."""
        names = [name for name in ("tokens", "completion_probabilities") if any(name in one for one in events)]
        lists = {name: [item for one in events for item in one.get(name, ())] for name in names}
        return {**events[-1], "content": "".join(one["content"] for one in events), **lists}
