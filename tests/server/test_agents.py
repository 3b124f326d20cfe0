"""What agents send and how they read, over two turns of a conversation with tools: Codex, Claude Code, others that speak chat."""

import json
import threading
from functools import partial
from typing import Any

import anthropic
import openai
import pytest

from cpuspec.server import answering
from tests.conformance.test_protocols import PROTOCOLS, Answer
from tests.server.agents import (
    CALLS,
    CHAT_AGENTS,
    OTHER_REQUESTS,
    RESULTS,
    SAID,
    SCRIPT,
    SYSTEM,
    THOUGHT,
    TURNS,
    chat_body,
    claude_body,
    claude_history,
    codex_body,
    read_chat,
    read_claude,
    read_codex,
)
from tests.server.running import (
    PATIENCE_S,
    Running,
    assert_in_order,
    before_forwards,
    load,
    prompt_of,
    script_answers,
    serving,
    stream,
    templated_model,
)
from tests.server.test_tools import TEMPLATE

MODEL = partial(templated_model, template=TEMPLATE, context_length=16384)
SERVED = {"max_new_tokens": 40}
USED: list[dict[str, Any]] = [
    {"type": "tool_use", "id": "toolu_1", "name": "shell", "input": {}},
    {"type": "tool_use", "id": "toolu_2", "name": "mcp__docs__find", "input": {}},
]
# One system message, first; then user and assistant by turns, as Gemma's and Mistral's templates want it.
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('a late system message') }}{% endif %}"
    "{% if not loop.first and m.role == messages[loop.index0 - 1].role %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}"
)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    script_answers(monkeypatch, SCRIPT)


IMAGE = "image here was left out"
# What the prompt of the second turn has, in this order.
TOLD = {
    "Codex": (
        *(SYSTEM, "Ask before", "# AGENTS.md\nKeep to tabs.\n<environment_context>", "my notes?", SAID, "<tool_call>shell"),
        *("<tool_call>mcp__docs__find", *RESULTS, IMAGE, "<tool_call>apply_patch", "*** Begin Patch", "patched"),
        *("<tool_call>local_shell", '["ls", "-a"]', "notes.txt", "And in short?"),
    ),
    "Claude Code": (
        *("You are an agent.\n\n" + SYSTEM.strip(), "Today is a Sunday", "my notes?", SAID, "<tool_call>shell", RESULTS[0]),
        *(f"{RESULTS[1]}\nmcp__docs__read", IMAGE, "A file changed.", "Found it.", "a note\nAnd in short?"),
    ),
    **dict.fromkeys(
        CHAT_AGENTS, (SYSTEM, "# Now\nWhat is in my notes?", SAID, "<tool_call>shell", *RESULTS, IMAGE, "And in short?")
    ),
}


def first_turn(running: Running, agent: str) -> tuple[Answer, dict[str, Any]]:
    """What an agent reads of its first turn, and what it sends in the second."""
    name, body, history = TURNS[agent]
    reply = PROTOCOLS[name].join(stream(running, PROTOCOLS[name].path, body([])))
    return PROTOCOLS[name].read(reply), body(history(reply))


@pytest.mark.parametrize("agent", TURNS)
def test_an_agent_over_two_turns(running: Running, scripted: None, agent: str) -> None:
    found, asked = first_turn(running, agent)
    assert (found.thought, found.text.strip(), found.calls, found.end) == (THOUGHT, SAID, CALLS, "calls")
    protocol = PROTOCOLS[TURNS[agent][0]]
    again = protocol.read(protocol.join(stream(running, protocol.path, asked)))
    assert_in_order(prompt_of(running), *TOLD[agent])
    assert again.cached > again.usage[0] / 2
    if agent == "Codex":
        assert "mcp__docs__find" in prompt_of(running).split(SYSTEM)[0], "the model is told of the namespace's tools"
    if agent == "Claude Code":
        assert not any(one in prompt_of(running) for one in ("billing-header", "tokens left"))
        counted = {name: asked[name] for name in ("model", "messages", "system", "tools", "thinking", "context_management")}
        assert running.post("/v1/messages/count_tokens?beta=true", json=counted).json() == {"input_tokens": again.usage[0]}


def test_the_official_clients_accumulate_the_same(running: Running, scripted: None) -> None:
    # They may try again: a connection that has rested for the server's 5 seconds is closed, perhaps as they take it again.
    ours = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=2, timeout=PATIENCE_S)
    asked: Any = codex_body([])
    extra = {name: asked.pop(name) for name in ("client_metadata", "tools")}
    asked.pop("stream")
    with ours.responses.stream(**asked, extra_body=extra) as responses:
        response = responses.get_final_response()
    whole = ours.responses.create(**asked, extra_body=extra)
    kinds = ["reasoning", "message", "function_call", "function_call"]
    assert [item.type for item in response.output] == [item.type for item in whole.output] == kinds
    for said in (response, whole):
        called: Any = said.output[3]
        assert (called.namespace, called.name, json.loads(called.arguments)) == ("mcp__docs", "find", CALLS[1][1])

    theirs = anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=2, timeout=PATIENCE_S)
    asked = claude_body([])
    asked.pop("stream")
    asked["extra_body"] = {"temperature": asked.pop("temperature")}
    with theirs.beta.messages.stream(**asked, betas=["context-management-2025-06-27"]) as messages:
        message: Any = messages.get_final_message()
    assert [(block.name, block.input) for block in message.content[2:]] == CALLS
    assert message.stop_reason == "tool_use"

    asked = chat_body("roo", [])
    asked.pop("stream")
    with ours.chat.completions.stream(**asked) as chunks:
        completion: Any = chunks.get_final_completion()
    calls = [call.function for call in completion.choices[0].message.tool_calls]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS
    assert completion.usage.total_tokens > 0


def test_agents_find_the_server_and_its_models(running: Running) -> None:
    for path in ("/", "/health", "/ready", "/livez"):  # Claude Code looks first whether somebody answers
        reply = running.head(path)
        assert (reply.status_code, reply.content) == (200, b"")
    listed = running.get("/v1/models").json()
    assert listed["models"][0]["slug"] == "tiny"  # as Codex reads them
    (row,) = listed["data"]
    assert row["max_model_len"] == row["context_length"] == row["meta"]["n_ctx"] == running.model.llm.context_length
    assert row["meta"]["n_ctx_train"] == running.model.llm.config.context_length
    assert row["meta"]["n_params"] == running.model.llm.num_parameters > 0
    assert [one.id for one in running.anthropic.models.list(limit=1000)] == ["tiny"]
    for path in ("/api/version", "/api/tags", "/api/ps", "/v1/models?client_version=0.147.0", "/models", "/v1/models?limit=1000"):
        reply = running.get(path)
        assert reply.status_code == 200
        assert "version" in path or "tiny" in reply.text


@pytest.mark.parametrize("client", OTHER_REQUESTS)
def test_other_requests_of_clients_are_answered(running: Running, client: str) -> None:
    path, body, ignored = OTHER_REQUESTS[client]
    reply = running.post(
        path, json=body, headers={"anthropic-beta": "advanced-tool-use-2025-11-20", "api-key": "", "x-api-key": "a"}
    )
    assert reply.status_code == 200, reply.text
    assert '"error"' not in reply.text.replace('"error":null', "")
    assert not body.get("stream") or reply.text.rstrip().splitlines()[-1].startswith(("data: ", "{")), "the stream has its end"
    told = reply.headers.get("x-cpuspec-ignored-fields", "")
    assert set(filter(None, told.replace(" ", "").split(","))) == ignored
    if "notes" in json.dumps(body):
        assert "What is in my notes?" in prompt_of(running)


@pytest.mark.parametrize(
    ("route", "body", "sign"),
    [
        ("/v1/responses", codex_body([]), '"type":"keepalive"'),  # Codex counts no comments
        ("/v1/messages", claude_body([]), "event: ping"),
        ("/v1/chat/completions", chat_body("roo", []), ": keep-alive"),
    ],
)
def test_a_stream_that_is_silent_shows_that_it_lives(
    running: Running, scripted: None, monkeypatch: pytest.MonkeyPatch, route: str, body: dict[str, Any], sign: str
) -> None:
    seen, lines = threading.Event(), []
    monkeypatch.setattr(answering, "KEEP_ALIVE_S", 0.01)
    takes_long = before_forwards(running.model.llm, lambda: seen.wait(PATIENCE_S))
    with takes_long, running.client() as client, client.stream("POST", route, json=body) as reply:
        for line in reply.iter_lines():
            if sign in line:
                seen.set()
            lines += [line] if line else []
    assert seen.is_set()
    {"responses": read_codex, "messages": read_claude, "completions": read_chat}[route.rpartition("/")[2]](lines)


def test_conversations_are_put_into_turns_for_templates_that_want_them(tmp_path: Any) -> None:
    directory = templated_model(tmp_path, STRICT, context_length=16384)
    with serving(lambda: load(directory), max_new_tokens=2) as strict:
        stream(strict, "/v1/responses", codex_body([]))
        assert_in_order(
            prompt_of(strict), "[system] You help", "\n\nAsk before", "[user] # AGENTS.md", "\n\nWhat is in my notes?\n"
        )
        read_claude(stream(strict, "/v1/messages", claude_body(claude_history(USED))))
        assert_in_order(
            prompt_of(strict), "[system] You are", "[user] <system", RESULTS[0], "A file changed.", "[assistant] Found it."
        )
        reply = strict.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}] * 2, "max_tokens": 1})
        assert reply.status_code == 200, reply.text
        assert prompt_of(strict).startswith("[user] a\n\na\n")
