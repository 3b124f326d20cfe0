"""`/v1/rerank` as Jina, Cohere, vLLM and llama-server have it, TEI's form of it, and vLLM's `/v1/score`."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import ConfigDict
from starlette.responses import Response

from cpuspec.server.answering import run_job
from cpuspec.server.bodies import BodyRoute
from cpuspec.server.bounds import Count, Most, Name, Quick, Strings, Text
from cpuspec.server.embeddings import MOST_INPUTS, check_inputs, count_tokens
from cpuspec.server.errors import NotSupportedError, RequestError
from cpuspec.server.gate import context_of, model_of
from cpuspec.server.model import ServedModel
from cpuspec.server.replies import json_response
from cpuspec.server.schema import Body, ignoring
from cpuspec.server.server import server_of

router = APIRouter(route_class=BodyRoute)


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
        return {**_head(request, model, "rerank", num_tokens), "results": rows}

    return await _respond(request, model, [(body.query, text) for text in texts], reply)


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
        return {**_head(request, model, "score", num_tokens), "created": context_of(request).created, "data": rows}

    return await _respond(request, model, list(zip(firsts, seconds, strict=True)), reply)


async def _respond(
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


def _head(request: Request, model: ServedModel, kind: str, num_tokens: int) -> dict[str, Any]:
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {
        "id": f"{kind}-{context_of(request).id}",
        "object": "list",
        "model": server_of(request).shown_name(model.name),
        "usage": usage,
    }
