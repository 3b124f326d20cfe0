"""Every field of every protocol: it changes what is computed or told, it is refused, or the response's header names it."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from cpuspec.server.model import Answers
from cpuspec.server.schema import Body, body_in, is_ignored
from tests.server.running import Running
from tests.server.test_bounds import ENDPOINTS as BOUNDED
from tests.server.test_bounds import with_field
from tests.server.test_tools import full_model

# A template that reads whatever a request may give it.
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }} {{ m.tool_calls }}{% endfor %}{{ tools }} {{ enable_thinking }} "
    "{{ reasoning_effort }} {{ extra }} <think> {% if add_generation_prompt %}[assistant]{% endif %}"
)
MODEL = partial(full_model, template=TEMPLATE)
LOADED = {"prefix_cache_gb": 0}
SERVED = {"pooling": "mean"}
CHAT = {"messages": [{"role": "user", "content": "the cat sat"}], "max_tokens": 3}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
FLAT = {"type": "function", "name": "find", "parameters": {"type": "object"}}
NO_ANSWERS = {"/api/pull", "/v1/load_lora_adapter", "/slots/0?action=save"}
WHOLE = {"/api/show": {"model": None}, "/api/chat": {"stream": False}, "/api/generate": {"stream": False}}
ENDPOINTS = {path: (kind, few | WHOLE.get(path, {})) for path, (kind, few) in BOUNDED.items() if path not in NO_ANSWERS}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
LONG = "a dog " * 3000
# For each field a value that asks for something, and fields that it needs beside it.
VALUES: dict[str, Any] = {
    **{"temperature": 0.7, "top_k": 3, "top_p": 0.5, "min_p": 0.2, "repetition_penalty": 1.5, "presence_penalty": 1.0, "seed": 7},
    **{"frequency_penalty": 1.0, "include_stop_str_in_output": True, "skip_special_tokens": False, "ignore_eos": True},
    **{"min_tokens": 2, "stop_token_ids": [5], "allowed_token_ids": [5, 6], "bad_words": ["a"], "logit_bias": {"5": 1}},
    **{"speculation.draft": "none", "speculation.max_draft_tokens": 2, "cache_salt": "x", "lora": [{"id": 7, "scale": 1.0}]},
    **{"model": "another", "max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2, "n_predict": 2, "n": 2},
    **{"response_format": FORMAT, "json_schema": SCHEMA, "regex": "a+", "choices": ["a", "b"], "grammar": 'root ::= "a"'},
    **{"guided_json": SCHEMA, "guided_regex": "a+", "guided_choice": ["a"], "guided_grammar": 'root ::= "a"'},
    **{"structured_outputs.json": SCHEMA, "structured_outputs.regex": "a+", "structured_outputs.choice": ["a"]},
    **{"structured_outputs.grammar": 'root ::= "a"', "structured_outputs.json_object": True, "stop": "q", "stop_sequences": ["q"]},
    **{"prompt_logprobs": 1, "tools": [TOOL], "reasoning_effort": "high", "chat_template_kwargs": {"extra": "yes"}},
    **{"continue_final_message": True, "add_generation_prompt": False, "return_progress": True, "echo": True, "best_of": 3},
    **{"suffix": "mat", "parse_special": False, "store": False, "instructions": "be brief", "previous_response_id": "resp_x"},
    **{"reasoning.effort": "high", "text.format": {"type": "json_schema", "name": "a", "schema": SCHEMA}, "background": True},
    **{"conversation": "x", "system": "be brief", "thinking.type": "disabled", "output_config.effort": "high", "thread": "x"},
    **{
        "output_config.format": {"type": "json_schema", "schema": SCHEMA},
        "output_format": {"type": "json_schema", "schema": SCHEMA},
    },
    **{"compaction": "x", "keep_alive": 60, "images": ["aGk="], "context": [5, 6], "raw": True, "template": "x", "dimensions": 8},
    **{"n_probs": 2, "return_tokens": True, "t_max_predict_ms": 1e-6, "input_extra": [{"text": "x"}], "encoding_format": "base64"},
    **{"top_n": 1, "with_pieces": True, "name": "another", "messages": [{"role": "user", "content": "a dog"}], "input": "a dog"},
    **{
        **{"content": "a dog", "tokens": [7], "input_prefix": "a dog", "input_suffix": "a dog", "query": "a dog"},
        "documents": ["a dog"],
    },
    **{"text_1": "a dog", "text_2": ["a dog"], "return_documents": True, "return_text": True, "texts": ["a"], "queries": ["a"]},
    **{"prediction.type": "other", "prediction.content": "the mat", "cpuspec.tokens": True, "stream": True, "logprobs": 1},
    **{"stream_options.include_usage": True, "stream_options.continuous_usage_stats": True, "top_logprobs": 2, "truncate": False},
    **{"tool_choice": "required", "prompt": "a dog", "add_special": False},
}
BESIDE: dict[str, dict[str, Any]] = {
    **{key: {"stream": True} for key in ("cpuspec.tokens", "return_progress", "stream_options.include_usage")},
    "stream_options.continuous_usage_stats": {"stream": True, "stream_options": {"include_usage": True}},
    **{key: {"logprobs": True} for key in ("top_logprobs", "/api/chat top_logprobs", "/api/generate top_logprobs")},
    "tool_choice": {"tools": [TOOL]},
    "/api/embed truncate": {"input": LONG},
    "prediction.content": {"prediction": {"type": "content", "content": "x"}},
    "prediction.type": {"prediction": {"type": "content", "content": "x"}},
    "/tokenize tools": {"messages": CHAT["messages"]},
    **{key: {"messages": CHAT["messages"]} for key in ("/tokenize continue_final_message", "/tokenize add_generation_prompt")},
    "/tokenize prompt": {"content": None},
    "/v1/responses tool_choice": {"tools": [FLAT]},
    "/v1/messages tool_choice": {"tools": [{"name": "find", "input_schema": {"type": "object"}}]},
    "/v1/messages/count_tokens tool_choice": {"tools": [{"name": "find", "input_schema": {"type": "object"}}]},
    "/v1/rerank texts": {"documents": None},
    "/v1/rerank return_text": {"documents": None, "texts": ["a"]},
    "/v1/score queries": {"text_1": None},
    "/v1/score documents": {"text_2": None},
    "/tokenize parse_special": {"content": "<|im_end|>"},
}
OF_ENDPOINT: dict[str, Any] = {
    "/v1/messages tools": [{"name": "find", "input_schema": {"type": "object"}}],
    "/v1/messages tool_choice": {"type": "any"},
    "/v1/responses tools": [FLAT],
    "/v1/messages/count_tokens tools": [{"name": "find", "input_schema": {"type": "object"}}],
    "/v1/messages/count_tokens tool_choice": {"type": "none"},
    "/v1/messages/count_tokens output_config.format": {"type": "other"},  # a format changes no count, and is checked
    "/v1/messages/count_tokens output_format": {"type": "other"},
    **{"/v1/chat/completions logprobs": True, "/api/chat logprobs": True, "/api/generate logprobs": True},
    **{"/api/chat stream": True, "/api/generate stream": True, "/v1/responses prompt": "x"},
    **{"/v1/responses metadata": {"a": "b"}, "/v1/responses parallel_tool_calls": False, "/api/embed input": ["a", "b"]},
    **{"/tokenize parse_special": True, "/tokenize add_special": True, "/v1/completions prompt": "a dog"},
}


def _paths(body: type[Body], where: str = "") -> Iterator[tuple[str, bool]]:
    """The names of a body's fields, and of its parts', and whether they are marked as ignored."""
    for name, one in body.model_fields.items():
        path, part = where + (one.alias or name), body_in(one.annotation)
        if part is not None and "list[" not in str(one.annotation):
            yield from _paths(part, f"{path}.")
        else:
            yield path, is_ignored(one)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the model is asked for, of each request."""
    found: list[Any] = []
    whole = Answers.__init__

    def init(self: Answers, model: Any, client: str, request_id: str, requested: Any, rng: Any) -> None:
        found.append(repr(requested))
        whole(self, model, client, request_id, requested, rng)

    monkeypatch.setattr(Answers, "__init__", init)
    return found


def _told(running: Running, asked: list[Any], endpoint: str, body: dict[str, Any]) -> tuple[Any, list[Any]]:
    """What can be seen of a request: what the model is asked, the answer without ids and times, and how long the model stays."""
    asked.clear()
    reply = running.post(endpoint, json=body)
    assert reply.status_code < 500, reply.text
    texts = [line.removeprefix("data: ") for line in reply.text.splitlines()]
    parts = [_bare(json.loads(line)) if line.startswith("{") else line for line in texts]
    notes = {
        name: value for name, value in reply.headers.items() if name in ("content-type", "x-cpuspec-left-out", "x-cpuspec-loosened")
    }
    return reply, [list(asked), parts, notes, reply.status_code, running.model.keep_s]


_CHANGING = (
    *("id", "created", "created_at", "timings", "total_duration", "prompt_eval_duration", "eval_duration", "item_id", "call_id"),
    "completed_at",
)


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _bare(one) for name, one in value.items() if name not in _CHANGING}
    return [_bare(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_each_field_has_an_effect_or_is_named(running: Running, asked: list[Any], endpoint: str) -> None:
    kind, few = ENDPOINTS[endpoint]
    silent, known = [], {}
    for path, ignored in _paths(kind):
        own = f"{endpoint} {path}"
        if path == "add_special":
            continue  # it counts for tokenizers that begin a text with a token, and this one does not
        base = few | BESIDE.get(own, BESIDE.get(path, {}))
        value = OF_ENDPOINT.get(own, "something" if ignored else VALUES.get(path))
        assert value is not None, f"{own} has no value here that asks for something"
        if (key := json.dumps(base)) not in known:
            known[key] = _told(running, asked, endpoint, base)[1]
        reply, after = _told(running, asked, endpoint, with_field(base, path.split("."), value))
        named = path in reply.headers.get("x-cpuspec-ignored-fields", "").split(", ")
        assert named or not ignored, own
        if not named and after == known[key]:
            silent.append(path)
    assert silent == []
