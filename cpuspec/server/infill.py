"""llama.cpp's `/infill` for editors: the text between what stands before and behind the cursor, with other files as context.

Source: llama.cpp's server README.
"""

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from cpuspec.engine.engine import Output
from cpuspec.metrics import now_s
from cpuspec.server.bodies import Body, BodyRoute
from cpuspec.server.completions import fill_params, fill_prompt
from cpuspec.server.figures import log_figures, stats_of, timings
from cpuspec.server.gate import context_of, model_of
from cpuspec.server.model import Answers, Wanted
from cpuspec.server.replies import EventStream, event, json_response, unless_gone
from cpuspec.server.schema import SamplingFields, sampling_params
from cpuspec.server.server import server_of
from cpuspec.server.structured import loose_format, loosened_note

router = APIRouter(route_class=BodyRoute)


class OtherFile(Body):
    text: str
    filename: str = "file"


class InfillBody(SamplingFields):
    model: str | None = None
    input_prefix: str
    input_suffix: str
    input_extra: list[OtherFile] = Field(default_factory=list)
    prompt: str = ""  # text that has been written at the cursor
    n_predict: int = 128
    stop: str | list[str] | None = None
    grammar: str = ""
    json_schema: dict[str, Any] | None = None
    stream: bool = False
    t_max_predict_ms: float = 0  # 0: no limit


@router.post("/infill")
async def infill(body: InfillBody, request: Request) -> Response:
    """Fill the gap. n_predict 0 reads the prompt only, so that the next request finds it in the cache."""
    context = context_of(request)
    model = await model_of(request, body.model)
    keeps_to, lost = loose_format({} if body.json_schema is None else {"json_schema": body.json_schema})
    context.notes |= loosened_note(lost)
    params = sampling_params(
        model,
        body,
        stop=body.stop,
        max_tokens=max(body.n_predict, 1),
        grammar=body.grammar or None,
        **keeps_to,
    )
    params = fill_params(model, params)
    others = [(one.filename, one.text) for one in body.input_extra]
    prompt = await model.in_worker(partial(fill_prompt, model, body.input_prefix + body.prompt, body.input_suffix, others))
    answers = await model.answers(context.client, context.id, [Wanted(prompt, params)], context.rng)
    name = server_of(request).shown_name(model)
    if body.stream:
        return EventStream(_events(body, answers, name, context.figures), answers, request, context.id)
    return await unless_gone(request, _whole(body, answers, name, context.figures), answers.close)


async def _timed(body: InfillBody, answers: Answers) -> AsyncGenerator[Output]:
    """The outputs, as long as the body's limit on time allows."""
    first_s = None
    async for _, output in answers.outputs():
        yield output
        first_s = now_s() if first_s is None else first_s
        if body.t_max_predict_ms > 0 and 1000 * (now_s() - first_s) > body.t_max_predict_ms:
            return


def _end(answers: Answers, model: str, last: Output | None, num_new: int, figures: dict[str, Any]) -> dict[str, Any]:
    """What the last event says, and a whole answer besides its content."""
    found: dict[str, Any] = {
        "model": model,
        "stop": True,
        "stop_type": {"length": "limit", "stop": "eos"}.get(last.finish_reason or "", "limit") if last else "limit",
        "tokens_predicted": num_new,
        "tokens_evaluated": len(answers.wanted[0].prompt),
        "truncated": False,
    }
    if last is not None and last.stats is not None:
        figures |= log_figures(stats_of([last]))
        found["timings"] = timings(last.stats)
    return found


async def _whole(body: InfillBody, answers: Answers, model: str, figures: dict[str, Any]) -> Response:
    outputs = [output async for output in _timed(body, answers)]
    content = "".join(output.text for output in outputs) if body.n_predict else ""
    num_new = sum(len(output.token_ids) for output in outputs)
    return json_response({"content": content, **_end(answers, model, outputs[-1], num_new, figures)})


async def _events(body: InfillBody, answers: Answers, model: str, figures: dict[str, Any]) -> AsyncGenerator[str]:
    num_new, last = 0, None
    async for output in _timed(body, answers):
        num_new, last = num_new + len(output.token_ids), output
        if output.text and body.n_predict:
            yield event({"content": output.text, "stop": False})
    yield event({"content": "", **_end(answers, model, last, num_new, figures)})
