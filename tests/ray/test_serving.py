"""The server over a cluster: every protocol, the answers of one process, conversations that come back, and nothing lost."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import anthropic
import httpx
import openai
import pytest

from cpuspec import LLM
from cpuspec.settings import EngineConfig, ServerConfig
from tests.ray.conftest import WHY
from tests.server.running import PATIENCE_S

ray = pytest.importorskip("ray", reason=WHY)
from ray import serve  # noqa: E402

import cpuspec.ray  # noqa: E402

KEY = "a key"
SETTINGS = EngineConfig(threads=1, max_sequences=16, keep_packed=False)


@pytest.fixture(scope="module")
def url(cluster: Any, second: Any, path: Path) -> Iterator[str]:
    """Two replicas, one on each machine; requests come in at the first, under a prefix."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    ray.init(address=cluster.address, log_to_driver=False)
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    found = cpuspec.ray.app(
        str(path),
        spec="ngram",
        settings=SETTINGS,
        config=ServerConfig(drain_s=5.0, max_body_bytes=100_000),
        keys=[KEY, "another"],
        num_cpus=1,
        num_replicas=2,
        ingress_resources={"front": 0.01},
    )
    serve.run(found, name="tiny", route_prefix="/tiny")
    yield f"http://127.0.0.1:{port}/tiny"
    serve.shutdown()
    ray.shutdown()


def client(url: str, **options: Any) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=PATIENCE_S, headers={"authorization": f"Bearer {KEY}"}, **options)


def talk(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Tell me a tale with the number {number}, please: {'long ' * 30}"}]


def ask(url: str, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    with client(url) as http:
        reply = http.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, "max_tokens": 8, **fields})
        assert reply.status_code == 200, reply.text
        return dict(reply.json())


def samples(url: str, name: str) -> dict[str, float]:
    """A metric's values by replica."""
    with client(url) as http:
        lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(f"{name}{{")]
    return {line.partition('replica="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_official_clients_get_the_answers_of_one_process(url: str, llm: LLM) -> None:
    wanted = llm.chat(talk(0), max_tokens=8).text
    openai_client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
    anthropic_client = anthropic.Anthropic(base_url=url, api_key=KEY)
    asked: Any = {"model": "tiny.gguf", "temperature": 0}
    chat: Any = openai_client.chat.completions
    assert chat.create(**asked, messages=talk(0), max_tokens=8).choices[0].message.content == wanted
    chunks = list(chat.create(**asked, messages=talk(0), max_tokens=8, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == wanted
    greedy: Any = {"model": "tiny.gguf", "messages": talk(0), "max_tokens": 8, "extra_body": {"temperature": 0}}
    message: Any = anthropic_client.messages.create(**greedy)
    assert message.content[0].text == wanted
    with anthropic_client.messages.stream(**greedy) as stream:
        assert stream.get_final_text() == wanted
    replied: Any = openai_client.responses.create(**asked, input=talk(0), max_output_tokens=8)
    assert replied.output_text == wanted
    events = list(openai_client.responses.create(**asked, input=talk(0), max_output_tokens=8, stream=True))
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert (
        openai_client.completions.create(**asked, prompt="once", max_tokens=8).choices[0].text
        == llm.generate("once", max_tokens=8)[0].text
    )
    assert [model.id for model in openai_client.models.list()] == ["tiny.gguf"]
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()


def test_errors_probes_and_the_page_are_those_of_the_server(url: str) -> None:
    with client(url) as http, httpx.Client(base_url=url, timeout=PATIENCE_S) as stranger:
        assert stranger.get("/livez").json() == stranger.get("/health").json() == {"status": "ok"}
        assert stranger.get("/ready").json() == {"status": "ready", "replicas": 2}
        assert stranger.get("/metrics").status_code == 401
        assert stranger.get("/health", headers={"host": "evil.example"}).status_code == 403
        assert "<html" in stranger.get("/").text
        bad = http.post("/v1/chat/completions", json={"messages": talk(0), "temperature": "hot"}, headers={"x-request-id": "mine"})
        assert (bad.status_code, bad.headers["x-request-id"]) == (400, "mine")
        assert "temperature" in bad.json()["error"]["message"]
        assert http.post("/v1/messages", content=b"x" * 200_000).json()["error"]["type"] == "request_too_large"
        assert http.post("/tokenize", json={"content": "hello"}).json()["count"] > 0
        assert http.get("/nothing").status_code == 404


def test_a_conversation_comes_back_to_the_replica_that_holds_its_cache(url: str) -> None:
    talks = [talk(number) for number in range(12)]
    for one in talks:
        said = ask(url, one)["choices"][0]["message"]["content"]
        one += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    begun = samples(url, "cpuspec:request_success_total")
    assert len(begun) == 2, "conversations are spread over the replicas"
    for one in talks:
        usage = ask(url, one)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 100
    assert sum(samples(url, "cpuspec:request_success_total").values()) == sum(begun.values()) + len(talks)


def test_a_client_that_leaves_ends_its_answer(url: str) -> None:
    body, pause = {"messages": talk(0), "stream": True, "ignore_eos": True, "max_tokens": 30_000}, threading.Event()
    with client(url) as http, http.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()  # what closes it would close the stream
        next(lines)
        while not sum(samples(url, "cpuspec:num_requests_running").values()):
            pause.wait(0.1)
    while sum(samples(url, "cpuspec:num_requests_running").values()):
        pause.wait(0.1)


def test_a_machine_that_dies_loses_no_accepted_request(url: str, cluster: Any, second: Any, llm: LLM) -> None:
    """Answers are computed elsewhere, and streams go on where they were, greedy and sampled."""
    talks = [talk(number) for number in range(16)]
    params: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
    wanted = [one.text for one in llm.chat(talks, **params)]
    begun: SimpleQueue[str] = SimpleQueue()

    def sampling(number: int) -> dict[str, Any]:
        return {"ignore_eos": True, "max_tokens": 5000, "temperature": number % 2, "seed": number}

    def streamed(number: int) -> str:
        body = {"messages": talk(100 + number), "stream": True, **sampling(number)}
        with client(url) as http, http.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = stream.iter_lines()
            begun.put(next(lines))
            *chunks, end = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert end == "[DONE]", end
        return "".join(json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks)

    def running() -> list[float]:
        return sorted(samples(url, "cpuspec:num_requests_running").values())

    with ThreadPoolExecutor(32) as threads:
        streams = []
        while not (streams and running()[0]):  # a stream on each machine
            streams.append(threads.submit(streamed, len(streams)))
            begun.get(timeout=PATIENCE_S)
        whole = [threads.submit(ask, url, one, **params) for one in talks]
        while not (sum(running()) > len(streams) + 4 and running()[0] > 1):
            threading.Event().wait(0.05)
        assert not any(one.done() for one in streams)
        cluster.remove_node(second, allow_graceful=False)
        assert [one.result()["choices"][0]["message"]["content"] for one in whole] == wanted
        texts = [one.result() for one in streams]
    assert texts == [llm.chat(talk(100 + number), **sampling(number)).text for number in range(len(streams))]
