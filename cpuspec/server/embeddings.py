"""OpenAI's `/v1/embeddings`, for models that were trained to make them, or a pooling that the operator chose; and scores of texts.

`/v1/rerank` is as Jina, Cohere, vLLM and llama-server have it, also in TEI's form, `/v1/score` as vLLM has it.
"""

import base64
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import ConfigDict
from starlette.responses import Response

from cpuspec.model.batch import F32
from cpuspec.server.answering import run_job
from cpuspec.server.bodies import BodyRoute
from cpuspec.server.bounds import Count, Ignored, Most, Name, Prompts, Quick, Strings, Text
from cpuspec.server.errors import NotSupportedError, RequestError
from cpuspec.server.gate import context_of, model_of, shown_name
from cpuspec.server.model import ServedModel
from cpuspec.server.replies import json_response
from cpuspec.server.schema import Body, ignoring

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

    def encoded() -> list[list[int]]:
        texts: list[Any] = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else list(given)
        check_inputs(model, texts)
        return [model.llm.tokenizer.encode(text) if isinstance(text, str) else text for text in texts]

    prompts = await model.in_worker(client, encoded)
    if cuts:
        prompts = [cut(prompt, model.max_prompt_tokens, list(model.llm.tokenizer.suffix)) for prompt in prompts]
    num_tokens = count_tokens(request, model, prompts)
    job = await model.in_worker(client, model.llm.embedding_job, prompts, pooling, dimensions, context_of(request).adapters)
    await run_job(request, model, job)
    return await model.in_worker(client, lambda: json_response(reply(job.embeddings(), num_tokens)))


def cut(prompt: list[int], most: int, suffix: list[int]) -> list[int]:
    """A prompt's first tokens, `most` with the suffix if it has it: a model may pool what it has seen by then."""
    if len(prompt) <= most:
        return prompt
    suffix = suffix if suffix and prompt[-len(suffix) :] == suffix else []
    return [*prompt[: most - len(suffix)], *suffix]


def count_tokens(request: Request, model: ServedModel, prompts: Sequence[Sequence[int]]) -> int:
    """The number of all tokens of a job's prompts, which its log line gets, too. Raises RequestError for more than are taken."""
    for prompt in prompts:
        model.check_prompt(prompt)
    num_tokens = sum(map(len, prompts))
    if num_tokens > MOST_TOKENS:
        raise RequestError(f"the inputs have {num_tokens} tokens together, and at most {MOST_TOKENS} are taken", "input")
    context_of(request).figures |= {"prompt_tokens": num_tokens}
    return num_tokens


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


class Document(Body):
    model_config = ConfigDict(extra="ignore")  # clients keep other facts beside a text

    text: Text


Texts = Annotated[str | Strings, Most(1 << 23, MOST_INPUTS)]
_Ignored: Any = ignoring("user", "max_chunks_per_doc", "max_tokens_per_doc", "rank_fields", "truncation", "truncate", "raw_scores")


class RerankBody(_Ignored):
    query: Text
    documents: Annotated[list[str | Document], Quick(), Most(1 << 23, MOST_INPUTS)] | None = None
    texts: Annotated[Strings, Most(1 << 23, MOST_INPUTS)] | None = None  # TEI's name of them
    model: Name | None = None
    top_n: Count | None = None
    return_documents: bool = False
    return_text: bool = False  # TEI's


class ScoreBody(_Ignored):
    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None  # newer names of the two
    documents: Texts | None = None
    model: Name | None = None


@router.post("/v1/rerank")
@router.post("/v1/reranking", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
async def rerank(body: RerankBody, request: Request) -> Response:
    """The documents, those that answer the query best first."""
    model = await model_of(request, body.model)
    given = body.documents if body.documents is not None else body.texts
    if given is None:
        raise RequestError("documents is missing; wanted a list of texts", "documents")
    if body.top_n is not None and body.top_n < 1:
        raise RequestError(f"top_n is {body.top_n}, wanted a number above 0", "top_n")
    texts = [one.text if isinstance(one, Document) else one for one in given]
    is_of_tei = body.documents is None

    def reply(scores: list[float], num_tokens: int) -> Any:
        best = sorted(range(len(texts)), key=lambda number: -scores[number])[: body.top_n]
        if is_of_tei:
            return [{"index": one, "score": scores[one], **({"text": texts[one]} if body.return_text else {})} for one in best]
        rows = [
            {"index": one, "relevance_score": scores[one], **({"document": {"text": texts[one]}} if body.return_documents else {})}
            for one in best
        ]
        return {**_scored_head(request, model, "rerank", num_tokens), "results": rows}

    return await _rank(request, model, [(body.query, text) for text in texts], reply)


@router.post("/v1/score")
async def score(body: ScoreBody, request: Request) -> Response:
    """The score of each pair: one text with each of several, or the texts of two lists in their order."""
    model = await model_of(request, body.model)
    firsts, seconds = (
        [given] if isinstance(given, str) else given or []
        for given in (
            body.text_1 if body.text_1 is not None else body.queries,
            body.text_2 if body.text_2 is not None else body.documents,
        )
    )
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        raise RequestError(f"text_1 has {len(firsts)} texts and text_2 has {len(seconds)}; wanted one, or as many", "text_1")

    def reply(scores: list[float], num_tokens: int) -> Any:
        rows = [{"index": index, "object": "score", "score": one} for index, one in enumerate(scores)]
        return {**_scored_head(request, model, "score", num_tokens), "created": context_of(request).created, "data": rows}

    return await _rank(request, model, list(zip(firsts, seconds, strict=True)), reply)


async def _rank(
    request: Request, model: ServedModel, pairs: Sequence[tuple[str, str]], reply: Callable[[list[float], int], Any]
) -> Response:
    """Score pairs of a query and a document. reply: makes the JSON of the scores and the number of all tokens."""
    pooling = model.config.pooling or model.llm.pooling
    if model.llm.ranker is None and not pooling:
        raise NotSupportedError(
            f"{model.name} was trained to write, and ranks no texts; serve a model that does, such as Qwen3-Reranker"
        )
    if not pairs:
        raise RequestError("there are no documents; wanted one or more texts", "documents")
    check_inputs(model, list(dict.fromkeys(text for pair in pairs for text in pair)))
    client = context_of(request).client
    job = await model.in_worker(client, model.llm.ranking_job, pairs, pooling, context_of(request).adapters)
    num_tokens = count_tokens(request, model, job.prompts)
    await run_job(request, model, job)
    return await model.in_worker(client, lambda: json_response(reply(job.scores(), num_tokens)))


def _scored_head(request: Request, model: ServedModel, kind: str, num_tokens: int) -> dict[str, Any]:
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"id": f"{kind}-{context_of(request).id}", "object": "list", "model": shown_name(request, model), "usage": usage}
