"""`/v1/rerank` and `/v1/score` as their clients send them, against `LLM.rank`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpuspec import LLM
from tests.engine.test_ranking import DOCUMENTS, QUERY, by_matrix
from tests.server.running import Running, load, serving


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


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/rerank", {"query": "a"}, "documents is missing"),
        ("/v1/rerank", {"query": "a", "documents": []}, "no documents"),
        ("/v1/rerank", {"query": "a", "documents": [""]}, "empty text"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n is 0"),
        ("/v1/rerank", {"query": "a", "documents": ["b " * 4000]}, "the prompt has"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1 has 2 texts and text_2 has 1"),
        ("/v1/score", {"text_1": "a"}, "no documents"),
    ],
)
def test_a_bad_request_says_why(ranking: Running, path: str, body: dict[str, Any], said: str) -> None:
    answer = ranking.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert said in answer.json()["error"]["message"]


def test_a_model_that_writes_ranks_no_texts_unless_it_embeds(running: Running, path: Path, llm: LLM) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS[:2]}
    answer = running.post("/v1/rerank", json=body)
    assert answer.status_code == 501
    assert "Qwen3-Reranker" in answer.json()["error"]["message"]
    with serving(lambda: load(path), pooling="mean") as embeds:
        found = {one["index"]: one["relevance_score"] for one in embeds.post("/v1/rerank", json=body).json()["results"]}
    query, *documents = llm.embed([QUERY, *DOCUMENTS[:2]], "mean").astype(float)
    assert found == pytest.approx({number: float(query @ one) for number, one in enumerate(documents)}, abs=1e-6)
