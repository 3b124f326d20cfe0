"""OpenAI's `/v1/embeddings`, for models that were trained to make them, or a pooling that the operator chose."""

import base64
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from cpuspec.model.batch import F32
from cpuspec.server.answering import run_job
from cpuspec.server.bodies import BodyRoute
from cpuspec.server.bounds import Count, Ignored, Most, Name, Prompts
from cpuspec.server.errors import NotSupportedError, RequestError
from cpuspec.server.gate import context_of, model_of, shown_name
from cpuspec.server.model import ServedModel
from cpuspec.server.replies import json_response
from cpuspec.server.schema import Body

router = APIRouter(route_class=BodyRoute)

MOST_INPUTS, MOST_TOKENS = 2048, 300_000  # of one request, as OpenAI has it


Inputs = Annotated[Prompts, Most(1 << 23, MOST_TOKENS)]  # texts or token ids


class EmbeddingsBody(Body):
    input: Inputs
    model: Name | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None
    user: Ignored = None


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
    """Vectors of length one, one for each input."""
    model = await model_of(request, body.model)

    def reply(rows: F32, num_tokens: int) -> Any:
        listed = [
            {"object": "embedding", "index": index, "embedding": _encoded(row, body.encoding_format)}
            for index, row in enumerate(rows)
        ]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "data": listed, "model": shown_name(request, model), "usage": usage}

    return await embed(request, model, body.input, body.dimensions, reply)


async def embed(
    request: Request,
    model: ServedModel,
    given: Inputs,
    dimensions: int | None,
    reply: Callable[[F32, int], Any],
    cuts: bool = False,
) -> Response:
    """Embed the inputs of a request. cuts: inputs that are too long are cut; otherwise they are refused.

    reply: makes the JSON of the response from vectors of length one, f32 [inputs, dimensions], and the number of all tokens.
    Raises RequestError for what the model does not take.
    """
    pooling = model.config.pooling or model.llm.pooling
    if not pooling:
        raise NotSupportedError(
            f"{model.name} was trained to write, and makes no embeddings; serve a model that does, such as Qwen3-Embedding, "
            "or start the server with --pooling"
        )
    client = context_of(request).client
    prompts = await model.in_worker(client, _prompts, model, given)
    if cuts:
        prompts = [prompt[: model.max_prompt_tokens] for prompt in prompts]
    num_tokens = count_tokens(request, model, prompts)
    job = await model.in_worker(client, model.llm.embedding_job, prompts, pooling, dimensions, context_of(request).adapters)
    await run_job(request, model, job)
    return await model.in_worker(client, lambda: json_response(reply(job.embeddings(), num_tokens)))


def count_tokens(request: Request, model: ServedModel, prompts: Sequence[Sequence[int]]) -> int:
    """The number of all tokens of a job's prompts, which its log line gets, too. Raises RequestError for more than are taken."""
    for prompt in prompts:
        model.check_prompt(prompt)
    num_tokens = sum(map(len, prompts))
    if num_tokens > MOST_TOKENS:
        raise RequestError(f"the inputs have {num_tokens} tokens together, and at most {MOST_TOKENS} are taken", "input")
    context_of(request).figures |= {"prompt_tokens": num_tokens}
    return num_tokens


def _prompts(model: ServedModel, given: Inputs) -> list[list[int]]:
    """Token ids of each input. Raises RequestError."""
    texts: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
    check_inputs(model, texts)
    return [model.llm.tokenizer.encode(text) if isinstance(text, str) else text for text in texts]


def check_inputs(model: ServedModel, texts: Sequence[str | list[int]]) -> None:
    """Raise RequestError for more texts than are taken, an empty one, or one that cannot fit."""
    if not 1 <= len(texts) <= MOST_INPUTS:
        raise RequestError(f"input has {len(texts)} texts, and 1 to {MOST_INPUTS} are taken", "input")
    if not all(texts):
        raise RequestError("input has an empty text; leave it out", "input")
    model.check_text(max(len(text) for text in texts))


def _encoded(row: F32, encoding: str) -> list[float] | str:
    """The numbers, or the bytes of little-endian float32 in base64, which OpenAI's client asks for."""
    return base64.b64encode(row.astype(np.dtype("<f4")).tobytes()).decode() if encoding == "base64" else row.tolist()
