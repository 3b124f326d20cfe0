"""Requests as clients of llama.cpp, vLLM, Ollama and others write them: fields that nobody knows, other names, other numbers."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cpuspec import LLM, SamplingParams
from cpuspec.server import messages, responses, schema
from cpuspec.server.bodies import Body
from cpuspec.server.fields import NEUTRAL, SAME_NAMES, UNLIMITED, read
from tests.server.running import Running, events, load, serving
from tests.server.test_bounds import ENDPOINTS

SERVED = {"pooling": "mean"}
BODIES = {
    path: body
    for path, (_, body) in ENDPOINTS.items()
    if path.startswith(("/v1/", "/tokenize", "/detokenize", "/apply")) or path in ("/api/chat", "/api/generate")
    if path != "/v1/load_lora_adapter"
}
TYPES = (schema.ChatBody, schema.CompletionBody, responses.ResponsesBody, messages.MessagesBody)
ANSWERS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
# What 86 fields of other servers' clients look like, as public reports have them, with values that ask for something.
SENT: dict[str, Any] = {
    **{"cache_prompt": False, "id_slot": 3, "slot_id": 1, "n_keep": 4, "n_discard": 2, "keep_alive": "5m", "num_ctx": 8192},
    **{"num_batch": 512, "num_gpu": 99, "num_thread": 8, "use_mmap": True, "low_vram": False, "mirostat": 2, "mirostat_tau": 5.0},
    **{"mirostat_eta": 0.1, "dry_multiplier": 0.8, "dry_base": 1.75, "dry_allowed_length": 2, "dry_sequence_breakers": ["\n"]},
    **{"xtc_probability": 0.5, "xtc_threshold": 0.1, "typical_p": 0.9, "tfs_z": 0.9, "top_a": 0.2, "top_n_sigma": 1.0},
    **{"dynatemp_range": 0.5, "dynatemp_exponent": 1.0, "repeat_last_n": 64, "penalize_nl": True, "samplers": ["top_k"]},
    **{"repeat_penalty": 1.1, "n_predict": 3, "num_predict": 3, "min_tokens": 1, "min_keep": 1, "skip_special_tokens": False},
    **{"spaces_between_special_tokens": False, "include_stop_str_in_output": True, "add_special_tokens": False},
    **{"use_beam_search": True, "length_penalty": 1.2, "early_stopping": True, "truncate_prompt_tokens": 100, "priority": 1},
    **{"request_id": "a", "allowed_token_ids": [5], "bad_words": ["a"], "logits_processors": ["a"]},
    **{"return_tokens_as_token_ids": True, "return_token_ids": True, "kv_transfer_params": {}, "vllm_xargs": {}},
    **{"thinking": {"type": "disabled"}, "enable_thinking": False, "think": False, "reasoning_format": "auto"},
    **{"reasoning_budget": 0, "thinking_budget": 0, "include_reasoning": False, "chat_format": 1, "parse_tool_calls": False},
    **{"timings_per_token": True, "return_tokens": True, "post_sampling_probs": True, "response_fields": ["a"], "verbose": True},
    **{"provider": {"order": ["a"]}, "transforms": ["a"], "route": "fallback", "models": ["a"], "plugins": [{}], "usage": {}},
    **{"web_search_options": {}, "audio": {}, "documents": [{}], "mm_processor_kwargs": {}, "drop_params": True, "api_base": "x"},
    **{"options": {"num_ctx": 4096, "temperature": 0}, "extra_body": {"a": 1}, "extra_headers": {}, "timeout": 60, "tags": ["a"]},
    **{"functions": None, "function_call": None, "logit_bias": None, "stop": None, "seed": -1, "grammar": None},
}
HOLDERS = {"options", "extra_body"}  # whose own fields are ignored or not
REASONING = {"thinking", "enable_thinking", "think", "reasoning_budget", "thinking_budget"}  # means nothing to a raw prompt
IGNORED = (
    SENT.keys()
    - HOLDERS
    - {
        *("repeat_penalty", "n_predict", "num_predict", "min_tokens", "seed", "logit_bias", "stop", "grammar", "bad_words"),
        *("allowed_token_ids", "skip_special_tokens", "include_stop_str_in_output"),
        *("functions", "function_call", *REASONING),
    }
)


@pytest.fixture(scope="module")
def strict(path: Any) -> Iterator[Running]:
    with serving(lambda: load(path), pooling="mean", strict_requests=True) as found:
        yield found


def post(running: Running, endpoint: str, **fields: Any) -> httpx.Response:
    return running.post(endpoint, json=BODIES[endpoint] | fields)


@pytest.mark.parametrize("endpoint", BODIES)
def test_a_field_that_nobody_knows_is_ignored_and_named(running: Running, strict: Running, endpoint: str, caplog: Any) -> None:
    surprise = {f"surprise of {endpoint}": 1, "odd\r\nname": [1]}
    with caplog.at_level(logging.INFO, "cpuspec.server"):
        replies = [post(running, endpoint, **surprise) for _ in range(2)]
    name = f"surprise?of?{endpoint.replace('/', '?')}"
    for reply in replies:
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-cpuspec-ignored-fields"] == f"{name}, odd??name"
    assert [one.getMessage() for one in caplog.records if f'"{name}"' in one.getMessage()] == [
        json.dumps({"event": "ignored", "field": name, "path": endpoint})
    ]
    refused = post(strict, endpoint, surprise=1)
    assert refused.status_code == 400
    assert "surprise" in refused.text
    assert post(strict, endpoint).status_code == 200
    assert "x-cpuspec-ignored-fields" not in post(running, endpoint).headers


@pytest.mark.parametrize("endpoint", ["/api/chat", "/api/generate"])
def test_what_ollama_lacks_is_ignored_and_named_there_too(running: Running, endpoint: str) -> None:
    assert post(running, endpoint, n=2, tool_choice="none").headers["x-cpuspec-ignored-fields"] == "n, tool_choice"
    assert "x-cpuspec-ignored-fields" not in post(running, endpoint, n=1).headers


@pytest.mark.parametrize(("endpoint", "body"), [*zip(ANSWERS, TYPES, strict=True)])
def test_what_other_servers_clients_send_is_answered(running: Running, endpoint: str, body: type[Body]) -> None:
    for name, value in SENT.items():
        found, left = read(body.declared(), BODIES[endpoint] | {name: value})
        assert body.model_validate(found), "whatever is declared has a value that is taken"
        is_ignored = name in IGNORED
        if endpoint == "/v1/completions":
            is_ignored = (is_ignored or name in REASONING) and name != "add_special_tokens"
        assert (name in left) == is_ignored or name in HOLDERS, name
    for stream in (False, True):
        reply = post(running, endpoint, **SENT, stream=stream)
        assert reply.status_code == 200, reply.text
        assert {"keep_alive", "mirostat", "num_ctx"} <= set(reply.headers["x-cpuspec-ignored-fields"].split(", "))


@pytest.mark.parametrize("endpoint", [path for path in BODIES if path.startswith("/v1/")])
def test_a_path_without_v1_or_with_two_is_the_same(running: Running, endpoint: str) -> None:
    for path in (endpoint.removeprefix("/v1"), f"/v1{endpoint}"):
        assert running.post(path, json=BODIES[endpoint]).status_code == 200
        wrong = running.post(path, json={}).json()  # in the shape of its protocol
        assert (wrong.get("type") == "error") == ("messages" in endpoint)
    assert running.get("/models").json() == running.get("/v1/models").json()


@pytest.mark.parametrize("body", dict.fromkeys(body for body, _ in ENDPOINTS.values()))
def test_every_name_of_a_thing_counts_as_the_bodys_own(body: type[Body]) -> None:
    declared = body.declared()
    for names in SAME_NAMES:
        own = next((name for name in names if name in declared), None)
        for name in names:
            found, left = read(declared, {name: 2})
            if own is None:
                assert (found, left) == ({}, [name])
            else:
                assert (found, left) == ({name if name in declared else own: 2}, [])
    for name in declared:
        assert read(declared, {name: None}) == ({}, []), "a null is an absent field"


def test_a_value_that_changes_nothing_elsewhere_needs_no_note_and_others_do() -> None:
    for name, (neutral, *_) in NEUTRAL.items():
        assert read({}, {name: neutral}) == ({}, [])
        assert read({}, {name: neutral}, strict=True) == ({}, [name])
        assert read({}, {name: "something else"}) == ({}, [name])


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"max_tokens": -1}, {"max_tokens": UNLIMITED}),
        ({"max_tokens": -2.0}, {"max_tokens": UNLIMITED}),
        ({"n_predict": "-1"}, {"max_tokens": UNLIMITED}),
        ({"max_tokens": 8, "n_predict": 9}, {"max_tokens": 8}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_p": 0}, {"top_p": 1e-9}),
        ({"seed": -1}, {}),
        ({"seed": -7}, {"seed": (1 << 64) - 7}),
        ({"seed": 7}, {"seed": 7}),
        ({"temperature": -1}, {"temperature": -1}),  # for the settings to refuse
        ({"options": {"num_predict": 4, "temperature": 0.5}}, {"max_tokens": 4, "temperature": 0.5}),
        ({"options": {"temperature": 0.5}, "temperature": 0.1}, {"temperature": 0.1}),
        ({"extra_body": {"repeat_penalty": 1.5}}, {"repetition_penalty": 1.5}),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"think": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"enabled": False}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"thinking_budget": 0}, {"chat_template_kwargs": {"enable_thinking": False}}),
        (
            {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True, "a": 1}},
            {"chat_template_kwargs": {"enable_thinking": True, "a": 1}},
        ),
        ({"format": "json"}, {"response_format": {"type": "json_object"}}),
        ({"stream_options": {"include_usage": None}}, {"stream_options": {}}),
    ],
)
def test_chat_fields_are_read_as_their_clients_mean_them(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert read(schema.ChatBody.declared(), given) == (wanted, [])


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"max_tokens": 5.0, "top_k": 40.0, "temperature": "0.9", "seed": 3.0}, {"max_tokens": 5, "top_k": 40, "temperature": 0.9}),
        ({"n_predict": 6, "repeat_penalty": 1.3, "temperature": 0}, {"max_tokens": 6, "repetition_penalty": 1.3, "temperature": 0}),
        ({"max_tokens": 4, "top_p": 0, "temperature": 1.5, "seed": 9}, {"max_tokens": 4, "temperature": 0}),
        ({"max_tokens": 4, "temperature": 0, "logit_bias": [[44, 90]]}, {"max_tokens": 4, "logit_bias": {44: 90}}),
        ({"max_tokens": 4, "temperature": 0, "logit_bias": [["a", False]]}, None),
    ],
)
@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_numbers_as_clients_write_them_give_the_offline_answer(
    running: Running, llm: LLM, endpoint: str, fields: dict[str, Any], settings: dict[str, Any] | None
) -> None:
    own = {name: value for name, value in BODIES[endpoint].items() if name != "max_tokens"}
    choice = running.post(endpoint, json=own | {"ignore_eos": True} | fields).json()["choices"][0]
    if settings is None:
        bias = dict.fromkeys(llm.tokenizer.encode("a", add_special=False), float("-inf"))
        settings = {"max_tokens": 4, "logit_bias": bias}
    params = SamplingParams(**{"ignore_eos": True, "seed": 3} | settings)
    wanted = llm.generate("the cat", params)[0] if "prompt" in own else llm.chat(own["messages"], params)
    assert (choice["text"] if "text" in choice else choice["message"]["content"]) == wanted.text


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_each_chunk_has_the_usage_until_then_where_that_is_asked_for(running: Running, endpoint: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    limits = {"max_tokens": 6, "ignore_eos": True, "temperature": 0}
    chunks = events(post(running, endpoint, stream=True, stream_options=options, **limits).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {chunks[-1]["usage"]["prompt_tokens"]}
