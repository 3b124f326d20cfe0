"""`/v1/embeddings`, `/v1/rerank` and `/v1/score` as their clients send them, against `LLM.embed` and `LLM.rank`."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from cpuspec import LLM
from cpuspec.server.embeddings import cut
from tests.engine.test_ranking import DOCUMENTS, QUERY, by_matrix
from tests.server.running import Running, load, serving

TEXTS = ["the cat", "the cat sat on the mat and looked at the dog", "x"]


@pytest.fixture(scope="module")
def embedding(path: Any) -> Any:
    with serving(lambda: load(path), pooling="mean") as found:
        yield found


@pytest.fixture(scope="module")
def vectors(llm: LLM) -> Any:
    return llm.embed(TEXTS, "mean")


def post(running: Running, **body: Any) -> httpx.Response:
    return running.post("/v1/embeddings", json=body)


@pytest.mark.parametrize("encoding", ["default", "float", "base64"])
def test_the_official_client_gets_the_offline_vectors(embedding: Running, vectors: Any, llm: LLM, encoding: str) -> None:
    client = embedding.openai
    chosen: Any = {} if encoding == "default" else {"encoding_format": encoding}
    answer = client.embeddings.create(model="tiny", input=TEXTS, **chosen)
    assert (answer.object, answer.model, [row.index for row in answer.data]) == ("list", "tiny", [0, 1, 2])
    num_tokens = sum(len(llm.tokenizer.encode(text)) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)
    for row, wanted in zip(answer.data, vectors, strict=True):
        given: Any = row.embedding
        got = np.frombuffer(base64.b64decode(given), "<f4") if encoding == "base64" else np.array(given, np.float32)
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("form", ["text", "ids", "lists of ids"])
def test_one_text_and_token_ids_are_inputs_too(embedding: Running, vectors: Any, llm: LLM, form: str) -> None:
    ids = llm.tokenizer.encode(TEXTS[1])
    given = {"text": TEXTS[1], "ids": ids, "lists of ids": [ids]}[form]
    (row,) = post(embedding, input=given).json()["data"]
    np.testing.assert_array_equal(np.array(row["embedding"], np.float32), vectors[1])


def test_dimensions_shorten_a_vector(embedding: Running, llm: LLM) -> None:
    (row,) = post(embedding, input=TEXTS[1], dimensions=8).json()["data"]
    np.testing.assert_array_equal(np.array(row["embedding"], np.float32), llm.embed(TEXTS[1], "mean", 8)[0])


def test_a_model_that_writes_makes_no_embeddings_unless_told(running: Running) -> None:
    answer = post(running, input="the cat")
    assert answer.status_code == 501
    assert "--pooling" in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return by_matrix(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def ranking(ranks: Path) -> Iterator[Running]:
    with serving(lambda: load(ranks)) as found:
        yield found


@pytest.fixture(scope="module")
def scores(ranks: Path) -> Iterator[list[float]]:
    with load(ranks) as llm:
        yield llm.rank(QUERY, DOCUMENTS)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank", "/v1/reranking", "/reranking"])
def test_the_best_documents_come_first(ranking: Running, scores: list[float], path: str) -> None:
    best = sorted(range(len(DOCUMENTS)), key=lambda number: -scores[number])
    reply = ranking.post(path, json={"model": "tiny", "query": QUERY, "documents": DOCUMENTS}).json()
    assert [(one["index"], one["relevance_score"]) for one in reply["results"]] == [(one, scores[one]) for one in best]
    assert (reply["object"], reply["model"]) == ("list", "tiny")
    assert reply["usage"]["total_tokens"] == reply["usage"]["prompt_tokens"] > 0
    documents = [{"text": one, "title": "a title"} for one in DOCUMENTS]
    asked = {"query": QUERY, "documents": documents, "top_n": 2, "return_documents": True, "max_tokens_per_doc": 4096}
    two = ranking.post(path, json=asked).json()["results"]
    assert [one["index"] for one in two] == best[:2]
    assert [one["document"]["text"] for one in two] == [DOCUMENTS[one] for one in best[:2]]


def test_texts_are_ranked_in_the_form_of_tei(ranking: Running, scores: list[float]) -> None:
    found = ranking.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS, "return_text": True, "raw_scores": False}).json()
    assert {one["index"]: one["score"] for one in found} == dict(enumerate(scores))
    assert all(one["text"] == DOCUMENTS[one["index"]] for one in found)


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_pairs_are_scored(ranking: Running, scores: list[float], names: tuple[str, str]) -> None:
    for given in (QUERY, [QUERY], [QUERY] * len(DOCUMENTS)):
        reply = ranking.post("/v1/score", json={names[0]: given, names[1]: DOCUMENTS}).json()
        assert [(one["index"], one["score"]) for one in reply["data"]] == list(enumerate(scores))
    one = ranking.post("/score", json={names[0]: QUERY, names[1]: DOCUMENTS[0]}).json()["data"]
    assert [(row["object"], row["score"]) for row in one] == [("score", scores[0])]


def test_a_model_that_writes_ranks_no_texts_unless_it_embeds(running: Running, path: Path, llm: LLM) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS[:2]}
    answer = running.post("/v1/rerank", json=body)
    assert answer.status_code == 501
    assert "Qwen3-Reranker" in answer.json()["error"]["message"]
    with serving(lambda: load(path), pooling="mean") as embeds:
        found = {one["index"]: one["relevance_score"] for one in embeds.post("/v1/rerank", json=body).json()["results"]}
    query, *documents = llm.embed([QUERY, *DOCUMENTS[:2]], "mean").astype(float)
    assert found == pytest.approx({number: float(query @ one) for number, one in enumerate(documents)}, abs=1e-6)


def test_a_prompt_that_is_cut_keeps_the_tokens_that_end_it() -> None:
    assert cut([1, 2, 3, 4, 9], 3, [9]) == [1, 2, 9]
    assert cut([1, 2, 3, 4, 9], 3, [8]) == cut([1, 2, 3, 4, 9], 3, []) == [1, 2, 3]
    assert cut([1, 2, 9], 3, [9]) == [1, 2, 9]
