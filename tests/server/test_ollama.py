"""What Ollama's protocol alone has, through its official client, against the answers of the Python interface."""

from datetime import UTC, datetime
from typing import Any

import ollama
import pytest

from cpuspec import LLM
from cpuspec.server.server import Loader
from tests.server.running import Running, load, prompt_of, serving
from tests.server.test_tools import full_model

MODEL = full_model
SERVED = {"pooling": "mean"}
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the cat sat on the mat"}]
GREEDY = {"temperature": 0, "num_predict": 12}


@pytest.fixture(scope="module")
def client(running: Running) -> ollama.Client:
    return ollama.Client(running.url)


def test_a_context_goes_on_with_the_conversation(client: ollama.Client, running: Running, llm: LLM) -> None:
    first = client.generate("tiny", "the cat", options=GREEDY)
    before = prompt_of(running)
    client.generate("tiny", "a dog", context=first.context, options=GREEDY)
    assert prompt_of(running).startswith(before)
    with pytest.raises(ollama.ResponseError, match="no tokens of this model"):
        client.generate("tiny", "a dog", context=[10**6])


def test_a_gap_is_filled(client: ollama.Client, running: Running) -> None:
    body = {"input_prefix": "the cat ", "input_suffix": "dog", "n_predict": 12, "temperature": 0}
    wanted = running.post("/infill", json=body).json()["content"]
    assert client.generate("tiny", "the cat ", suffix="dog", options=GREEDY).response == wanted


def test_a_history_of_its_spelling_reaches_the_template(client: ollama.Client, running: Running) -> None:
    function = {"name": "get_time", "arguments": {"city": "Rome"}}
    history = [
        {"role": "user", "content": "look", "images": ["aGVsbG8="]},
        {"role": "assistant", "content": "", "thinking": "well", "tool_calls": [{"function": function}]},
        {"role": "tool", "tool_name": "get_time", "content": "noon"},
    ]
    client.chat("tiny", history, options=GREEDY)
    prompt = prompt_of(running)
    assert all(one in prompt for one in ("image here was left out", '"city"', "Rome", "noon"))


def test_models_are_listed_and_described(client: ollama.Client, llm: LLM) -> None:
    (row,) = client.list().models
    assert (row.model, len(row.digest or ""), row.details.family) == ("tiny", 64, llm.config.architecture)  # type: ignore[union-attr]
    (row,) = client.ps().models
    assert (row.model, row.context_length) == ("tiny", llm.context_length)
    assert row.details.quantization_level == llm.quantization == "F32"  # type: ignore[union-attr]
    shown = client.show("tiny")
    assert {"completion", "tools", "thinking", "insert", "embedding"} == set(shown.capabilities or ())
    assert shown.modelinfo["general.parameter_count"] == llm.num_parameters > 0  # type: ignore[index]
    assert shown.template == llm.tokenizer.chat_template
    assert client.pull("tiny").status == "success"
    assert client.chat("tiny:latest").done_reason == client.generate("tiny").done_reason == "load"


def test_embeddings_are_the_offline_vectors(client: ollama.Client, llm: LLM) -> None:
    texts = ["the cat", "a dog " * 3000]
    rows = client.embed("tiny", texts).embeddings
    wanted = llm.embed([texts[0], llm.tokenizer.encode(texts[1])[: llm.context_length - 1]], "mean")
    assert rows == wanted.tolist()
    assert client.embeddings("tiny", "the cat").embedding == rows[0]
    assert client.embed("tiny", []).embeddings == []
    with pytest.raises(ollama.ResponseError, match="maximum context"):
        client.embed("tiny", texts, truncate=False)


def test_no_request_changes_which_models_there_are(client: ollama.Client) -> None:
    for call, name, status in ((client.pull, "other", 404), (client.delete, "tiny", 403)):
        with pytest.raises(ollama.ResponseError) as told:
            call(name)
        assert told.value.status_code == status
        assert not told.value.error.startswith("{"), "the text alone"


def test_an_empty_text_has_a_vector_only_among_others(client: ollama.Client) -> None:
    assert client.embed("tiny", "").embeddings == []
    found = client.embed("tiny", ["a", ""])
    assert len(found.embeddings) == 2
    assert found.total_duration > 0 == found.load_duration  # type: ignore[operator]
    assert client.embeddings("tiny", "").embedding == []


def test_who_asks_for_no_page_hears_that_ollama_is_running(running: Running) -> None:
    for method in ("GET", "HEAD"):
        reply = running.request(method, "/")
        assert (reply.status_code, reply.text) == (200, "Ollama is running" if method == "GET" else "")
    assert running.get("/", headers={"accept": "text/html,*/*"}).text.startswith("<!doctype html>")


def test_a_request_says_how_long_its_model_stays(path: Any) -> None:
    loader = Loader(lambda: load(path), 1000)
    with serving(loader.load, loaders={"tiny": loader}) as running:
        client = ollama.Client(running.url)
        for way in (client.chat, client.generate):
            assert way("tiny", keep_alive=0).done_reason == "unload"  # type: ignore[operator]
            assert not running.server.models
            assert way("tiny", keep_alive="1h30m").done_reason == "load"  # type: ignore[operator]
            assert running.model.keep_s == 5400
        expires = datetime.fromisoformat(running.get("/api/ps").json()["models"][0]["expires_at"])
        assert 5000 < (expires - datetime.now(UTC)).total_seconds() < 5401
        assert client.chat("tiny", MESSAGES, options=GREEDY, keep_alive=0).message.content, "the answer comes first"
        running.eventually(lambda: not running.server.models)
        assert client.generate("tiny", "the cat", options=GREEDY, keep_alive=-1).response
        assert running.model.unload_after_s is None
        assert running.post("/api/chat", json={"messages": MESSAGES, "keep_alive": "soon"}).status_code == 400


def test_a_client_with_a_key_of_its_own_unloads_nothing(path: Any) -> None:
    loader = Loader(lambda: load(path), 1000)
    with serving(loader.load, ("first", "second"), loaders={"tiny": loader}) as running:
        for body in ({}, {"messages": MESSAGES, "options": GREEDY}):
            own = {"authorization": "Bearer first"}
            reply = running.post("/api/chat", json={**body, "keep_alive": 0, "stream": False}, headers=own)
            assert reply.headers["x-cpuspec-ignored-fields"] == "keep_alive"
            assert running.model.keep_s is None


@pytest.mark.parametrize("keep", [1e300, "99999999999h"])
def test_a_model_may_stay_for_longer_than_dates_go(running: Running, client: ollama.Client, keep: Any) -> None:
    running.post("/api/chat", json={"keep_alive": keep})
    assert client.ps().models[0].expires_at.year == 9999  # type: ignore[union-attr]


def test_without_another_way_to_load_it_a_model_stays(running: Running, client: ollama.Client) -> None:
    assert client.generate("tiny", keep_alive=0).done_reason == "unload"
    assert running.server.models
