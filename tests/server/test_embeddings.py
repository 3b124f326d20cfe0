"""`/v1/embeddings` through OpenAI's client and by hand, against `LLM.embed`."""

import base64
from typing import Any

import httpx
import numpy as np
import pytest

from cpuspec import LLM
from tests.server.running import Running, load, serving

TEXTS = ["the cat", "the cat sat on the mat and looked at the dog", "x"]


@pytest.fixture(scope="module")
def embedding(path: Any) -> Any:
    with serving(lambda: load(path), pooling="mean", max_prompt_tokens=100) as found:
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


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input": []}, "input has 0 texts"),
        ({"input": ["a", ""]}, "empty text"),
        ({"input": [[]]}, "empty text"),
        ({"input": ["a"] * 2049}, "2049 texts"),
        ({"input": "x " * 3000}, "characters"),
        ({"input": [5] * 200}, "the prompt has 200 tokens"),
        ({"input": [10**9]}, "prompt token ids must be in"),
        ({"input": [-1]}, "prompt token ids must be in"),
        ({"input": "a", "dimensions": 10**9}, "dimensions must be"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": {"a": 1}}, "input"),
        ({}, "input"),
    ],
)
def test_a_bad_request_says_why(embedding: Running, body: dict[str, Any], said: str) -> None:
    answer = post(embedding, **body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert said in answer.json()["error"]["message"] + str(answer.json()["error"]["param"])
    assert post(embedding, input="x").status_code == 200


def test_a_model_that_writes_makes_no_embeddings_unless_told(running: Running) -> None:
    answer = post(running, input="the cat")
    assert answer.status_code == 501
    assert "--pooling" in answer.json()["error"]["message"]
