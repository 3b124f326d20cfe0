"""llama.cpp's `/infill` for editors: the text between what stands before and behind the cursor, with other files as context.

Source: llama.cpp's server README.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from cpuspec.engine.engine import Output
from cpuspec.metrics import RequestStats, now_s
from cpuspec.server.answering import respond
from cpuspec.server.bodies import BodyRoute
from cpuspec.server.figures import timings
from cpuspec.server.gate import context_of, model_of
from cpuspec.server.runner import RequestedAnswer
from cpuspec.server.schema import Body, SamplingFields, sampling_params
from cpuspec.server.server import server_of
from cpuspec.server.structured import loose_format, loosened_note
from cpuspec.server.writer import Writer

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
    params = model.fill.params(params) if model.fill else params
    others = [(one.filename, one.text) for one in body.input_extra]
    prompt = await model.in_worker(model.fill_prompt, body.input_prefix + body.prompt, body.input_suffix, others)
    writer = _InfillWriter(body, server_of(request).shown_name(model), len(prompt))
    return await respond(request, model, [RequestedAnswer(prompt, params)], lambda _: writer, body.stream)


class _InfillWriter(Writer):
    """Writes the text in a gap."""

    def __init__(self, body: InfillBody, model: str, num_prompt_tokens: int) -> None:
        self._body, self._model, self._num_prompt_tokens = body, model, num_prompt_tokens
        self._num_new = 0
        self._first_s: float | None = None  # when the first output came
        self._last: Output | None = None

    def show(self, index: int, output: Output) -> Iterator[dict[str, Any]]:
        """The text of an output. When the body's time is up, the answer ends with it."""
        self._num_new, self._last = self._num_new + len(output.token_ids), output
        if output.text and self._body.n_predict:
            yield {"content": output.text, "stop": False}
        self._first_s = now_s() if self._first_s is None else self._first_s
        self.is_done = self._body.t_max_predict_ms > 0 and 1000 * (now_s() - self._first_s) > self._body.t_max_predict_ms

    def end(self, stats: Sequence[RequestStats]) -> Iterator[dict[str, Any]]:
        """The figures of the answer."""
        reason = self._last.finish_reason if self._last else None
        yield {
            "content": "",
            "model": self._model,
            "stop": True,
            "stop_type": "eos" if reason == "stop" else "limit",
            "tokens_predicted": self._num_new,
            "tokens_evaluated": self._num_prompt_tokens,
            "truncated": False,
            **({"timings": timings(stats[0])} if stats else {}),
        }

    def whole(self, events: Sequence[dict[str, Any]], stats: Sequence[RequestStats]) -> dict[str, Any]:
        """The last event, with the whole text."""
        return {**events[-1], "content": "".join(one["content"] for one in events)}
