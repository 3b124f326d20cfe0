"""OpenAI's `/v1/embeddings`, for models that were trained to make them, or a pooling that the operator chose."""

import asyncio
import base64
from functools import partial
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from cpuspec.engine.embedding import EmbeddingJob
from cpuspec.model.batch import F32
from cpuspec.server.answering import unless_gone
from cpuspec.server.bodies import BodyRoute
from cpuspec.server.errors import BusyError, NotSupportedError, RequestError, TimeUpError
from cpuspec.server.gate import context_of, model_of
from cpuspec.server.model import ServedModel
from cpuspec.server.replies import json_response
from cpuspec.server.schema import Body
from cpuspec.server.server import server_of

router = APIRouter(route_class=BodyRoute)

_MOST_INPUTS, _MOST_TOKENS = 2048, 300_000  # of one request, as OpenAI has it


class EmbeddingsBody(Body):
    input: str | list[int] | list[str] | list[list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    # Ignored.
    user: Any = None


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
    """Vectors of length one, one for each input."""
    model = await model_of(request, body.model)
    pooling = model.config.pooling or model.llm.pooling
    if not pooling:
        raise NotSupportedError(
            f"{model.name} was trained to write, and makes no embeddings; serve a model that does, such as Qwen3-Embedding, "
            "or start the server with --pooling"
        )
    if model.num_embedding > model.admission.max_waiting:
        raise BusyError(f"{model.num_embedding} requests for embeddings wait; try again later")
    prompts = await model.in_worker(_prompts, model, body.input)
    for prompt in prompts:
        model.check_prompt(prompt)
    num_tokens = sum(map(len, prompts))
    if num_tokens > _MOST_TOKENS:
        raise RequestError(f"the inputs have {num_tokens} tokens together, and at most {_MOST_TOKENS} are taken", "input")
    job = model.llm.embedding_job(prompts, pooling, body.dimensions)
    context_of(request).figures |= {"prompt_tokens": num_tokens}
    model.num_embedding += 1
    return await unless_gone(request, _reply(body, job, model, server_of(request).shown_name(model), num_tokens), model.embedded)


def _prompts(model: ServedModel, given: str | list[int] | list[str] | list[list[int]]) -> list[list[int]]:
    """Token ids of each input. Raises RequestError."""
    texts: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
    if not 1 <= len(texts) <= _MOST_INPUTS:
        raise RequestError(f"input has {len(texts)} texts, and 1 to {_MOST_INPUTS} are taken", "input")
    if not all(texts):
        raise RequestError("input has an empty text; leave it out", "input")
    model.check_text(max(len(text) for text in texts))
    return [model.llm.tokenizer.encode(text) if isinstance(text, str) else text for text in texts]


async def _reply(body: EmbeddingsBody, job: EmbeddingJob, model: ServedModel, name: str, num_tokens: int) -> Response:
    try:
        async with asyncio.timeout(model.config.max_request_s), model.embeds:
            while not job.is_done:
                await model.runner.between_steps(partial(model.llm.embed_step, job))
    except TimeoutError:
        raise TimeUpError(f"the embeddings took longer than {model.config.max_request_s:g} s") from None
    rows = [
        {"object": "embedding", "index": index, "embedding": _encoded(row, body.encoding_format)}
        for index, row in enumerate(job.embeddings())
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return json_response({"object": "list", "data": rows, "model": name, "usage": usage})


def _encoded(row: F32, encoding: str) -> list[float] | str:
    """The numbers, or the bytes of little-endian float32 in base64, which OpenAI's client asks for."""
    return base64.b64encode(row.astype(np.dtype("<f4")).tobytes()).decode() if encoding == "base64" else row.tolist()
