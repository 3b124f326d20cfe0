"""Clients that are no part of the test extra: LiteLLM, pydantic-ai, langchain, instructor. Those not installed are skipped.

pip install litellm 'pydantic-ai-slim[openai,anthropic]' langchain-openai langchain-anthropic langchain-ollama instructor
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from tests.server.running import Running, load, prompt_of, script_answers, serving, templated_model
from tests.server.test_tools import TEMPLATE, TOOL

CALL = 'I look.\n<tool_call>\n{"name": "get_time", "arguments": {"zone": "CET"}}\n</tool_call>'
ASKED = [{"role": "user", "content": "what time is it"}]


class City(BaseModel):
    name: str
    people: int


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = templated_model(tmp_path_factory.mktemp("model"), TEMPLATE, context_length=8192)
    with serving(lambda: load(directory), max_new_tokens=60) as found:
        yield found


@pytest.mark.parametrize(
    ("provider", "path"), [("openai/tiny", "/v1"), ("anthropic/tiny", ""), ("ollama_chat/tiny", ""), ("hosted_vllm/tiny", "/v1")]
)
@pytest.mark.parametrize("stream", [False, True])
def test_litellm_calls_a_tool(running: Running, monkeypatch: pytest.MonkeyPatch, provider: str, path: str, stream: bool) -> None:
    litellm = pytest.importorskip("litellm")
    script_answers(monkeypatch, CALL)
    about = {
        "model": provider,
        "api_base": running.url + path,
        "api_key": "none",
        "messages": ASKED,
        "tools": [TOOL],
        "max_tokens": 60,
    }
    reply = litellm.completion(**about, stream=stream)
    if stream:
        reply = litellm.stream_chunk_builder(list(reply), messages=ASKED)
    message = reply.choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_time", {"zone": "CET"})
    assert (message.content or "").strip() == "I look."
    answered = [*ASKED, message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "noon sharp"}]
    litellm.completion(**about | {"messages": answered})
    assert "noon sharp" in prompt_of(running)


@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
def test_pydantic_ai_runs_a_tool(running: Running, monkeypatch: pytest.MonkeyPatch, api: str) -> None:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    made: list[str] = []
    theirs = OpenAIProvider(base_url=f"{running.url}/v1", api_key="none")
    model: Any = {
        "chat": lambda: OpenAIChatModel("tiny", provider=theirs),
        "responses": lambda: OpenAIResponsesModel("tiny", provider=theirs),
        "anthropic": lambda: AnthropicModel("tiny", provider=AnthropicProvider(base_url=running.url, api_key="none")),
    }[api]()
    agent = Agent(model, model_settings={"max_tokens": 60})

    @agent.tool_plain
    def get_time(zone: str) -> str:
        made.append(zone)
        script_answers(monkeypatch, "It is noon.")
        return "noon sharp"

    script_answers(monkeypatch, CALL)
    found = agent.run_sync("what time is it")
    assert (made, found.output.strip()) == (["CET"], "It is noon.")
    assert "noon sharp" in prompt_of(running)


@pytest.mark.parametrize("package", ["langchain_openai", "langchain_anthropic", "langchain_ollama"])
def test_langchain_calls_a_tool_and_reads_streams(running: Running, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    module = pytest.importorskip(package)
    model: Any = {
        "langchain_openai": lambda: module.ChatOpenAI(model="tiny", base_url=f"{running.url}/v1", api_key="none", max_tokens=60),
        "langchain_anthropic": lambda: module.ChatAnthropic(model="tiny", base_url=running.url, api_key="none", max_tokens=60),
        "langchain_ollama": lambda: module.ChatOllama(model="tiny", base_url=running.url, num_predict=60),
    }[package]()
    script_answers(monkeypatch, CALL)
    bound = model.bind_tools([TOOL])
    whole = bound.invoke("what time is it")
    chunks = list(bound.stream("what time is it"))
    added = chunks[0]
    for chunk in chunks[1:]:
        added += chunk
    for message in (whole, added):
        assert [(call["name"], call["args"]) for call in message.tool_calls] == [("get_time", {"zone": "CET"})]
    bound.invoke(
        [("user", "what time is it"), whole, {"role": "tool", "tool_call_id": whole.tool_calls[0]["id"], "content": "noon sharp"}]
    )
    assert "noon sharp" in prompt_of(running)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
def test_instructor_reads_an_object(running: Running, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    said = '{"name": "Rome", "people": 3}'
    script_answers(monkeypatch, f"{said}}}" if mode == "TOOLS" else said)  # it demands the call, which the server has begun
    client = instructor.from_openai(running.openai, mode=instructor.Mode[mode])
    found = client.chat.completions.create(model="tiny", messages=ASKED, response_model=City, max_retries=0, max_tokens=60)
    assert found.model_dump() == City(name="Rome", people=3).model_dump()  # its class is one that instructor made of ours
