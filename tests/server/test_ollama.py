"""Ollama's protocol through its official client, against the answers that the Python interface gives."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ollama
import pytest

from cpuspec import LLM, SamplingParams
from cpuspec.server.server import Loader
from tests.server.running import Running, before_forwards, load, prompt_of, script_answers, serving, stream, templated_model
from tests.server.test_infill import with_fill_tokens
from tests.server.test_tools import TEMPLATE, TOOL

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the cat sat on the mat"}]
GREEDY = {"temperature": 0, "num_predict": 12}
CALL = '<tool_call>\n{"name": "get_time", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tools, reasoning and the tokens of filling in."""
    return with_fill_tokens(templated_model(tmp_path_factory.mktemp("model"), TEMPLATE, vocab_size=512))


@pytest.fixture(scope="module")
def running(path: Any, prompt_arithmetic: str) -> Iterator[Running]:
    with serving(lambda: load(path), pooling="mean") as found:
        yield found


@pytest.fixture(scope="module")
def client(running: Running) -> ollama.Client:
    return ollama.Client(running.url)


@pytest.mark.parametrize("name", ["tiny", "tiny:latest"])
def test_a_chat_is_the_offline_answer_whole_and_streamed(client: ollama.Client, llm: LLM, name: str) -> None:
    wanted = llm.chat(MESSAGES, SamplingParams(max_tokens=12))
    whole = client.chat(name, MESSAGES, options=GREEDY)
    lines = list(client.chat(name, MESSAGES, options=GREEDY, stream=True))
    assert whole.message.content == "".join(one.message.content or "" for one in lines) == wanted.text
    for last in (whole, lines[-1]):
        assert (last.done, last.done_reason, last.model) == (True, "length", "tiny")
        assert (last.prompt_eval_count, last.eval_count) == (wanted.stats.num_prompt_tokens, 12)
        assert last.total_duration == last.prompt_eval_duration + last.eval_duration  # type: ignore[operator]
    assert not any(one.done for one in lines[:-1])


def test_a_prompt_is_a_message_or_raw(client: ollama.Client, llm: LLM) -> None:
    chat = llm.chat(MESSAGES, SamplingParams(max_tokens=12))
    raw = llm.generate([MESSAGES[1]["content"]], SamplingParams(max_tokens=12))[0]
    for streams in (False, True):
        for wanted, more in ((chat, {"system": "be brief"}), (raw, {"raw": True})):
            reply: Any = client.generate("tiny", MESSAGES[1]["content"], options=GREEDY, stream=streams, **more)  # type: ignore[call-overload]
            lines = list(reply) if streams else [reply]
            assert "".join(one.response for one in lines) == wanted.text
            assert lines[-1].done


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


def test_reasoning_and_calls_are_told_apart(client: ollama.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    script_answers(monkeypatch, f"<think>\nwell\n</think>\n\nI look.\n{CALL}")
    told = [client.chat("tiny", MESSAGES, tools=[TOOL])]
    lines = list(client.chat("tiny", MESSAGES, tools=[TOOL], stream=True))
    for one in told:
        assert (one.message.thinking, one.message.content) == ("well", "I look.")
        assert one.done_reason == "stop"
    assert "".join(one.message.thinking or "" for one in lines) == "well"
    assert "".join(one.message.content or "" for one in lines) == "I look."
    for calls in (told[0].message.tool_calls, [call for one in lines for call in one.message.tool_calls or ()]):
        assert [(call.function.name, call.function.arguments) for call in calls or ()] == [("get_time", {"city": "Rome"})]


def test_a_call_that_was_cut_off_is_content(client: ollama.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    script_answers(monkeypatch, CALL[:55])
    found = client.chat("tiny", MESSAGES, tools=[TOOL]).message
    assert (found.content, found.tool_calls) == (CALL[:55], None)


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


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}])
def test_a_format_is_kept_to(client: ollama.Client, form: Any) -> None:
    reply = client.chat("tiny", MESSAGES, format=form, options={"temperature": 1, "seed": 3, "num_predict": 400})
    if reply.done_reason == "stop":
        assert isinstance(json.loads(reply.message.content or ""), dict)
    else:
        assert (reply.message.content or "").lstrip().startswith("{")


def test_likelihoods_are_those_of_the_openai_protocol(client: ollama.Client, running: Running) -> None:
    body = {"messages": MESSAGES, "max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    wanted = running.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    options = {"temperature": 0, "num_predict": 5}
    for streams in (False, True):
        sent = {"model": "tiny", "messages": MESSAGES, "options": options, "logprobs": True, "top_logprobs": 2, "stream": streams}
        lines = [json.loads(line) for line in running.post("/api/chat", json=sent).text.splitlines()]
        assert [one for line in lines for one in line.get("logprobs", ())] == wanted


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
    assert client.chat("tiny").done_reason == client.generate("tiny").done_reason == "load"


def test_embeddings_are_the_offline_vectors(client: ollama.Client, llm: LLM) -> None:
    texts = ["the cat", "a dog " * 3000]
    rows = client.embed("tiny", texts).embeddings
    wanted = llm.embed([texts[0], llm.tokenizer.encode(texts[1])[: llm.context_length - 1]], "mean")
    assert rows == wanted.tolist()
    assert client.embeddings("tiny", "the cat").embedding == rows[0]
    assert client.embed("tiny", []).embeddings == []
    with pytest.raises(ollama.ResponseError, match="maximum context"):
        client.embed("tiny", texts, truncate=False)


@pytest.mark.parametrize(
    ("call", "status"),
    [
        (lambda client: client.chat("other", MESSAGES), 404),
        (lambda client: client.pull("other"), 404),
        (lambda client: client.delete("tiny"), 403),
        (lambda client: client.chat("tiny", [{"role": "user", "content": 5}]), 400),
        (lambda client: client.generate("tiny", "x", template="{{ .Prompt }}"), 400),
        (lambda client: client.chat("tiny", MESSAGES, options={"temperature": -1}), 400),
    ],
)
def test_errors_have_the_shape_that_its_clients_read(client: ollama.Client, call: Any, status: int) -> None:
    with pytest.raises((ollama.ResponseError, ValueError)) as told:
        call(client)
    if isinstance(told.value, ollama.ResponseError):
        assert told.value.status_code == status
        assert told.value.error
        assert not told.value.error.startswith("{"), "the text alone"


def test_an_error_in_a_stream_is_a_line(running: Running) -> None:
    def fails() -> None:
        raise RuntimeError

    with before_forwards(running.model.llm, fails):
        lines = stream(running, "/api/chat", {"model": "tiny", "messages": MESSAGES})
    assert json.loads(lines[-1]) == {"error": "the engine failed while it computed this answer; try again"}


@pytest.mark.parametrize("streams", [False, True])
def test_llama_servers_completion_is_the_offline_answer(running: Running, llm: LLM, streams: bool) -> None:
    (wanted,) = llm.generate(["the cat"], SamplingParams(max_tokens=9, logprobs=1))
    ids = llm.tokenizer.encode_prompt("the cat")
    for prompt in ("the cat", ids):
        body = {"prompt": prompt, "n_predict": 9, "temperature": 0, "n_probs": 1, "return_tokens": True, "stream": streams}
        text = running.post("/completion", json=body).text
        lines = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
        assert "".join(one["content"] for one in lines) == wanted.text
        assert [token for one in lines for token in one.get("tokens", ())] == wanted.token_ids
        likely = [one for line in lines for one in line["completion_probabilities"]] if not streams else []
        assert [one["logprob"] for one in likely] == [one.logprob for one in wanted.logprobs if not streams]
        assert (lines[-1]["stop"], lines[-1]["tokens_predicted"], lines[-1]["tokens_evaluated"]) == (True, 9, len(ids))


def test_the_word_that_stops_a_completion_is_told(running: Running) -> None:
    body = {"prompt": "the cat", "n_predict": 20, "temperature": 0, "ignore_eos": True}
    whole = running.post("/completion", json=body).json()
    assert (whole["stop_type"], whole["stopping_word"]) == ("limit", "")
    stop = whole["content"][4:7]
    cut = running.post("/completion", json={**body, "stop": ["~~", stop]}).json()
    assert (cut["stop_type"], cut["stopping_word"]) == ("word", stop)


def test_a_raw_prompt_and_a_gap_have_likelihoods(running: Running) -> None:
    wanted = running.post("/v1/completions", json={"prompt": "the cat", "max_tokens": 4, "temperature": 0, "logprobs": 2}).json()
    expected = wanted["choices"][0]["logprobs"]["token_logprobs"]
    for more in ({"raw": True}, {"suffix": "dog"}):
        for streams in (False, True):
            sent = {"prompt": "the cat", "options": {"temperature": 0, "num_predict": 4}, "logprobs": True, "top_logprobs": 2}
            reply = running.post("/api/generate", json={**sent, **more, "stream": streams})
            lines = [json.loads(line) for line in reply.text.splitlines()]
            found = [one for line in lines for one in line.get("logprobs", ())]
            assert len(found) == lines[-1]["eval_count"] > 0
            assert all(len(one["top_logprobs"]) == 2 for one in found)
            if "raw" in more:
                assert [one["logprob"] for one in found] == expected


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
