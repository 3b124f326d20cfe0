"""Requests as agents send them, turn by turn, and readers that take streams as strictly as these agents do. The texts are our own.

Sources of the fields: openai/codex (codex-rs/codex-api/src/common.rs, codex-rs/protocol/src/models.rs, codex-rs/tools) for Codex;
the types of Anthropic's Python client and issues of proxies that print what they got (ericc-ch/copilot-api 217,
ex-machina-co/opencode-anthropic-auth 174, experientiallabs/experiential 905) for Claude Code; sst/opencode
(packages/opencode/src/provider/transform.ts), RooCodeInc/Roo-Code and cline/cline (src/api/providers/openai.ts) and
microsoft/vscode-copilot-chat (src/extension/byok/node/openAIEndpoint.ts) for agents that speak chat completions.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

THOUGHT, SAID = "I look at the file first.", "Let me look."
# What the server's model is made to say: reasoning, a text, and two calls at once.
SCRIPT = (
    f"<think>\n{THOUGHT}\n</think>\n\n{SAID}\n"
    '<tool_call>\n{"name": "shell", "arguments": {"command": "cat notes.txt", "deep": {"unicode": "h\\u00e9, \\"q\\""}}}\n'
    "</tool_call>\n"
    '<tool_call>\n{"name": "mcp__docs__find", "arguments": {"query": "notes"}}\n</tool_call>'
)
CALLS = [("shell", {"command": "cat notes.txt", "deep": {"unicode": 'hé, "q"'}}), ("mcp__docs__find", {"query": "notes"})]
RESULTS = ("three notes", "nothing found")
SYSTEM = "You help with a repository.\n" + "Rule: say what you changed, and why.\n" * 12
PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": "what to run"}, "timeout_ms": {"type": "number"}},
    "required": ["command"],
    "additionalProperties": False,
}
FIND = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}


_IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}


def codex_body(history: list[dict[str, Any]]) -> dict[str, Any]:
    """A turn of Codex: the whole history comes each time, after what it tells of the machine."""
    environment = "<environment_context>\n  <cwd>/repo</cwd>\n  <shell>bash</shell>\n</environment_context>"
    return {
        "model": "tiny",
        "instructions": SYSTEM,
        "input": [
            _typed("developer", "Ask before you delete anything."),
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "# AGENTS.md\nKeep to tabs."},
                    {"type": "input_text", "text": environment},
                ],
            },
            _typed("user", "What is in my notes?"),
            *history,
        ],
        "tools": [
            {"type": "function", "name": "shell", "description": "runs it", "strict": False, "parameters": PARAMETERS},
            {
                "type": "namespace",
                "name": "mcp__docs",
                "description": "tools of a server",
                "tools": [{"type": "function", "name": "find", "description": "finds", "strict": False, "parameters": FIND}],
            },
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
            {"type": "web_search", "external_web_access": False},
            {"type": "image_generation", "output_format": "png"},
            {"type": "local_shell"},
            {"type": "tool_search", "execution": "client", "description": "finds tools", "parameters": FIND},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        **{"store": False, "stream": True, "include": ["reasoning.encrypted_content"], "service_tier": "auto"},
        "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
        "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-installation-id": "11b9"},
    }


def _typed(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def codex_history(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What Codex sends back of a response: items without ids and statuses, and the results of the calls."""
    left_out = {"message": ("id", "status"), "function_call": ("id", "status"), "reasoning": ("id", "status", "content")}
    kept = [{name: value for name, value in item.items() if name not in left_out[item["type"]]} for item in items]
    for item in kept:
        if item["type"] == "reasoning":
            item["encrypted_content"] = None
    calls = [item for item in kept if item["type"] == "function_call"]
    outputs: tuple[Any, ...] = (RESULTS[0], [{"type": "input_text", "text": RESULTS[1]}, _IMAGE])
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": output}
        for call, output in zip(calls, outputs, strict=True)
    ]
    # Of other models' turns in the same conversation: a patch, a shell command and a search.
    others = [
        {"type": "custom_tool_call", "status": "completed", "call_id": "c_3", "name": "apply_patch", "input": "*** Begin Patch"},
        {"type": "custom_tool_call_output", "call_id": "c_3", "output": "patched"},
        {"type": "local_shell_call", "call_id": "c_4", "status": "completed", "action": {"type": "exec", "command": ["ls", "-a"]}},
        {"type": "function_call_output", "call_id": "c_4", "output": "notes.txt"},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
    ]
    return [*kept, *results, *others, _typed("user", "And in short?")]


def claude_body(history: list[dict[str, Any]]) -> dict[str, Any]:
    """A turn of Claude Code. What it says of billing and of tokens that are left is another text each time."""
    turn = len(history)
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    billing = f"x-anthropic-billing-header: cc_version=2.1.280.a{turn}; cc_entrypoint=cli; cch={turn:05x};"
    left = f"\n<total_tokens>{150_000 - 1000 * turn} tokens left</total_tokens>"
    start = [
        {"type": "text", "text": "<system-reminder>\nToday is a Sunday.\n</system-reminder>"},
        {"type": "text", "text": "What is in my notes?", **mark},
    ]
    return {
        "model": "tiny",
        "max_tokens": 32000,
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": "You are an agent.", **mark},
            {"type": "text", "text": SYSTEM + left, "cache_control": {"type": "ephemeral", "scope": "global"}},
        ],
        "messages": [{"role": "user", "content": start}, *history],
        "tools": [
            {
                "name": "shell",
                "description": "runs it",
                "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema"} | PARAMETERS,
            },
            {
                **{"name": "mcp__docs__find", "description": "finds", "input_schema": FIND, "eager_input_streaming": True},
                "strict": True,
                **mark,
            },
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            {"type": "advisor_20260301", "name": "advisor", "model": "another"},
        ],
        "thinking": {"type": "adaptive"} if turn else {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": '{"device_id":"d1","account_uuid":"","session_id":"s1"}'},
        "diagnostics": {"previous_message_id": None},
        "temperature": 1,
        "stream": True,
    }


def claude_history(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What Claude Code sends back of a message, the results of its calls, and what it says beside."""
    calls = [block for block in blocks if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": RESULTS[0], "is_error": False},
        {
            "type": "tool_result",
            "tool_use_id": calls[1]["id"],
            "content": [
                {"type": "text", "text": RESULTS[1]},
                {"type": "tool_reference", "tool_name": "mcp__docs__read"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
            ],
            "cache_control": {"type": "ephemeral"},
        },
    ]
    note = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a note"}, "title": "notes.txt"}
    searched = [
        {"type": "redacted_thinking", "data": "xx"},
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
        {"type": "text", "text": "Found it."},
    ]
    return [
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": results},
        {"role": "system", "content": "<system-reminder>\nA file changed.\n</system-reminder>"},
        {"role": "assistant", "content": searched},
        {"role": "user", "content": [note, {"type": "text", "text": "And in short?", "cache_control": {"type": "ephemeral"}}]},
    ]


CHAT_TOOLS = [
    {"type": "function", "function": {"name": "shell", "description": "runs it", "parameters": PARAMETERS, "strict": False}},
    {"type": "function", "function": {"name": "mcp__docs__find", "description": "finds", "parameters": FIND}},
]
# What agents that speak chat completions send besides messages and tools.
CHAT_AGENTS: dict[str, dict[str, Any]] = {
    "cline": {"temperature": 0, "max_tokens": None, "reasoning_effort": None},
    "roo": {"temperature": 0, "tool_choice": "auto", "parallel_tool_calls": False, "max_completion_tokens": 8192},
    "aider": {
        "temperature": 0,
        "extra_body": {"reasoning": {"effort": "low"}},
        "thinking": {"type": "enabled", "budget_tokens": 2048},
    },
    "open webui": {
        **{
            **{"top_k": 40, "min_p": 0.0, "repeat_penalty": 1.1, "max_tokens": 500, "seed": 3, "stop": ["</end>"]},
            "logit_bias": {"5": -1},
        },
        **{"function_calling": "native", "reasoning_effort": "low", "chat_id": "c-1", "session_id": "s-1"},
        "user": {"name": "me", "id": "u-1", "role": "user"},
    },
}


def chat_body(agent: str, history: list[dict[str, Any]]) -> dict[str, Any]:
    """A turn of an agent that speaks chat completions: texts in parts, some with marks for caches."""
    mark = {"cache_control": {"type": "ephemeral"}}
    role = "developer" if agent == "cline" else "system"
    messages = [
        {"role": role, "content": [{"type": "text", "text": SYSTEM, **mark}]},
        {
            "role": "user",
            "name": "me",
            "content": [{"type": "text", "text": "# Now"}, {"type": "text", "text": "What is in my notes?", **mark}],
        },
        *history,
    ]
    return {
        **{"model": "tiny", "messages": messages, "stream": True, "stream_options": {"include_usage": True}},
        "tools": CHAT_TOOLS,
        **CHAT_AGENTS[agent],
    }


def chat_history(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The message as agents send it back, and the results of its calls."""
    first, second = message["tool_calls"]
    return [
        {**message, "cache_control": {"type": "ephemeral"}, "copilot_cache_control": {"type": "ephemeral"}},
        {"role": "tool", "tool_call_id": first["id"], "name": "shell", "content": RESULTS[0]},
        {"role": "tool", "tool_call_id": second["id"], "content": [{"type": "text", "text": RESULTS[1]}, {"type": "image_url"}]},
        {"role": "user", "content": [{"type": "text", "text": "And in short?"}]},
    ]


# By agent: its protocol, the body of a turn by the history, and the history by the first reply.
TURNS: dict[str, tuple[str, Callable[[list[Any]], dict[str, Any]], Callable[[dict[str, Any]], list[Any]]]] = {
    "Codex": ("responses", codex_body, lambda reply: codex_history(reply["output"])),
    "Claude Code": ("messages", claude_body, lambda reply: claude_history(reply["content"])),
    **{
        agent: ("chat completions", partial(chat_body, agent), lambda reply: chat_history(reply["choices"][0]["message"]))
        for agent in CHAT_AGENTS
    },
}
_FILL = {"temperature": 0.01, "top_p": None, "top_k": None, "num_predict": 8, "stop": ["<|endoftext|>", "\n\n"], "num_ctx": 8192}
_OPTIONS = {**_FILL, "mirostat": None, "num_thread": None, "use_mmap": None, "min_p": None, "stop": []}
_ASKED = {"role": "user", "content": "What is in my notes?"}
_CALLED = {"index": 0, "id": "call_1", "function": {"name": "shell", "arguments": {"command": "ls"}}}
_TITLE = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"], "additionalProperties": False}
# What else these clients send, and the fields that the server may pass over. Sources: openai/codex (codex-rs/lmstudio and ollama),
# anthropics/claude-code 52057 and 15862, BerriAI/litellm-docs 993, continuedev/continue (core/llm/llms: Ollama.ts, LlamaCpp.ts,
# OpenAI.ts), open-webui/open-webui (backend/open_webui/utils/payload.py), litellm's ollama_chat for Aider.
OTHER_REQUESTS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "Codex, a picture in a result": (
        "/v1/responses",
        codex_body(
            [
                {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "xx"},
                {"type": "function_call", "name": "view_image", "arguments": "{}", "call_id": "c_1"},
                {"type": "function_call_output", "call_id": "c_1", "output": [{"type": "input_text", "text": "seen"}, _IMAGE]},
            ]
        ),
        {
            *("client_metadata", "include", "prompt_cache_key", "reasoning.summary", "text.verbosity"),
            *(f"tools.{kind}" for kind in ("web_search", "image_generation", "local_shell", "tool_search")),
        },
    ),
    "Claude Code's title": (
        "/v1/messages?beta=true",
        {
            **{name: value for name, value in claude_body([]).items() if name not in ("diagnostics", "context_management")},
            **{"tools": [], "thinking": {"type": "disabled"}, "max_tokens": 24},
            "output_config": {"format": {"type": "json_schema", "schema": _TITLE}},
        },
        {"metadata"},
    ),
    "Claude Code with ENABLE_TOOL_SEARCH": (
        "/v1/messages?beta=true",
        {
            **claude_body([{"role": "user", "content": [{"type": "text", "text": "", "cache_control": {"type": "ephemeral"}}]}]),
            "tools": [
                {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
                {"name": "shell", "description": "runs it", "input_schema": PARAMETERS, "defer_loading": True},
            ],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
            "thinking": {"type": "adaptive", "display": "summarized"},
            "output_config": {"effort": "xhigh", "task_budget": {"type": "tokens", "total": 20000}},
            "cache_control": {"type": "ephemeral"},
        },
        {
            *("metadata", "cache_control", "context_management", "diagnostics", "thinking.display", "output_config.task_budget"),
            "tools.tool_search_tool_regex_20251119",
        },
    ),
    "Continue through Ollama": (
        "/api/chat",
        {"model": "tiny", "messages": [_ASKED], "options": _OPTIONS, "keep_alive": 1800, "stream": False, "tools": CHAT_TOOLS},
        {"num_ctx"},
    ),
    "Continue completes through Ollama": (
        "/api/generate",
        {"model": "tiny", "prompt": "What is in my notes?", "raw": True, "options": _FILL, "keep_alive": 1800, "stream": True},
        {"num_ctx"},
    ),
    "Open WebUI through Ollama": (
        "/api/chat",
        {
            "model": "tiny",
            "messages": [
                _ASKED,
                {"role": "assistant", "content": "", "tool_calls": [_CALLED]},
                {"role": "tool", "content": RESULTS[0], "tool_call_id": "call_1"},
                {"role": "user", "content": "And this?", "images": ["AA=="]},
            ],
            **{"stream": True, "tools": CHAT_TOOLS, "think": True, "keep_alive": "5m", "metadata": {"chat_id": "c-1"}},
            "options": {
                **{"num_predict": 8, "mirostat_eta": 0.1, "repeat_last_n": 64, "repeat_penalty": 1.1, "num_gpu": 99},
                "seed": 1,
            },
        },
        {"mirostat_eta", "repeat_last_n", "num_gpu", "metadata"},
    ),
}


def read_codex(lines: list[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The items of a stream and its last response, read as strictly as Codex and other clients do."""
    fields = {  # of the items whose text comes in these events, their types and the fields that have it
        "output_text": ("message", "text"),
        "reasoning_text": ("reasoning", "text"),
        "function_call_arguments": ("function_call", "arguments"),
        "custom_tool_call_input": ("custom_tool_call", "input"),
    }
    items: list[dict[str, Any]] = []
    active: dict[str, Any] | None = None
    parts = ""
    response: dict[str, Any] = {}
    for number, event in enumerate(_events(lines)):
        assert event["event"] == event["type"]
        assert event["sequence_number"] == number
        kind = event["type"].removeprefix("response.")
        assert ("created", "in_progress")[number] == kind if number < 2 else kind not in ("created", "in_progress")
        assert not response or number < 2, "nothing comes after the end"
        match kind:
            case "created" | "in_progress":
                assert event["response"]["status"] == "in_progress"
            case "output_item.added":
                assert active is None
                assert event["output_index"] == len(items)
                active, parts = event["item"], ""
            case "content_part.added" | "content_part.done":
                assert active is not None
                assert event["item_id"] == active["id"]
                assert event["part"]["text"] == parts
            case _ if kind.endswith((".delta", ".done")) and (what := fields.get(kind.partition(".")[0])):
                assert active is not None
                assert active["type"] == what[0]
                assert (event["item_id"], event["output_index"]) == (active["id"], len(items))
                assert what[1] != "text" or event["content_index"] == 0
                parts += event.get("delta", "")
                assert event.get(what[1], parts) == parts
            case "output_item.done":
                assert active is not None
                item = event["item"]
                assert item["id"] == active["id"]
                assert (item["content"][0] if "content" in item else item)[dict(fields.values())[item["type"]]] == parts
                items.append(item)
                active = None
            case "completed" | "incomplete":
                assert active is None
                response = event["response"]
            case "keepalive":
                pass
            case _:
                raise AssertionError(f"Codex knows no {kind}")
    assert response, "the stream ends with response.completed"
    assert response["output"] == items
    usage = response["usage"]
    numbers = [usage["input_tokens"], usage["output_tokens"], usage["total_tokens"], usage["input_tokens_details"]["cached_tokens"]]
    assert all(type(one) is int for one in [*numbers, usage["output_tokens_details"]["reasoning_tokens"]])
    return items, response


def read_claude(lines: list[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The content of a stream, and the message's end with its usage, read as strictly as Claude Code does."""
    deltas = {
        "text": ("text_delta", "text"),
        "thinking": ("thinking_delta", "thinking"),
        "tool_use": ("input_json_delta", "partial_json"),
    }
    blocks: list[dict[str, Any]] = []
    state, parts, end = "", "", {}
    for event in _events(lines):
        assert event["event"] == event["type"]
        match state, event["type"]:
            case _, "ping":
                pass
            case "", "message_start":
                message = event["message"]
                assert (message["role"], message["content"], message["stop_reason"]) == ("assistant", [], None)
                assert message["usage"]["input_tokens"] > 0
                state = "between"
            case "between", "content_block_start":
                assert event["index"] == len(blocks)
                block = event["content_block"]
                assert block[{"tool_use": "input"}.get(block["type"], block["type"])] in ("", {})
                blocks.append(block)
                state, parts = "inside", ""
            case "inside", "content_block_delta":
                assert event["index"] == len(blocks) - 1
                kind, key = deltas[blocks[-1]["type"]]
                if event["delta"]["type"] == "signature_delta":
                    assert blocks[-1]["type"] == "thinking"
                else:
                    assert event["delta"]["type"] == kind
                    parts += event["delta"][key]
            case "inside", "content_block_stop":
                assert event["index"] == len(blocks) - 1
                block = blocks[-1]
                key = {"tool_use": "input"}.get(block["type"], block["type"])
                block[key] = json.loads(parts) if key == "input" else parts
                state = "between"
            case "between", "message_delta":
                end = event
                state = "ended"
            case "ended", "message_stop":
                state = "stopped"
            case _:
                raise AssertionError(f"{event['type']} came while {state or 'nothing had begun'}")
    assert state == "stopped"
    return blocks, end


def read_chat(lines: list[str]) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """The message of a stream, why it ended and its usage, read as strictly as chat agents do."""
    assert lines[-1] == "data: [DONE]"
    message: dict[str, Any] = {"content": ""}
    reason, usage = "", {}
    for event in _events(lines[:-1]):
        assert event["object"] == "chat.completion.chunk"
        assert not usage, "the usage comes last"
        if event["usage"]:
            assert event["choices"] == []
            usage = event["usage"]
            continue
        (choice,) = event["choices"]
        assert not reason, "nothing is said behind the end"
        delta = choice["delta"]
        if "role" in delta:
            assert "role" not in message
            message["role"] = delta["role"]
        message["content"] += delta.get("content") or ""
        if delta.get("reasoning_content"):
            message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
        for call in delta.get("tool_calls") or []:
            calls = message.setdefault("tool_calls", [])
            kind, text = ("custom", "input") if "custom" in call else ("function", "arguments")
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": call["type"], kind: {"name": call[kind]["name"], text: ""}})
            assert call["index"] == len(calls) - 1, "calls come one after the other"
            calls[-1][kind][text] += call[kind].get(text) or ""
        reason = choice["finish_reason"] or ""
    assert message["role"] == "assistant"
    return message, reason, usage


def _events(lines: list[str]) -> list[dict[str, Any]]:
    """The data of events, with the event's name, where it has one, as `event`."""
    found, name = [], ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            found.append({"event": name, **json.loads(line.removeprefix("data: "))})
            name = ""
        else:
            assert not line or line.startswith(":")
    return found
