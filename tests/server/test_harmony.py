"""gpt-oss in the server: channels, calls and what a conversation tells again, with a model that says what it is wired to say."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuspec.formats.tensor import F32
from tests.command import ok, run
from tests.conformance.test_protocols import PROTOCOLS
from tests.server.running import Running, load, serving
from tools.make_tiny_model import random_weights, tiny_config, write_huggingface

MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
TEMPLATE = (
    "{% if tools %}<|start|>developer<|message|>"
    "{% for tool in tools %}type {{ tool.function.name }}{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|start|>functions.f to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>{% elif m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}{% if '<|channel|>' in m.content %}{{ raise_exception('channels in a text') }}{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
# Besides marks; the prompt ends with the first, and an answer's later messages begin with the second, so that pairs are unique.
WORDS = ("assistant", " assistant", "analysis", "final", "commentary", " to=functions.f ", "json", "Hm.", "Yes.", '{"a": 1}')
_THOUGHT = ("<|channel|>", "analysis", "<|message|>", "Hm.", "<|end|>", "<|start|>", " assistant", "<|channel|>")
ANSWER = (*_THOUGHT, "final", "<|message|>", "Yes.", "<|return|>")
CALL = (*_THOUGHT, "commentary", " to=functions.f ", "<|constrain|>", "json", "<|message|>", '{"a": 1}', "<|call|>")


def speaker(directory: Path, script: tuple[str, ...]) -> Path:
    """A gpt-oss of one layer whose window shows it the last two tokens, and whose next token those decide."""
    config = tiny_config("gpt-oss", num_layers=1, num_kv_heads=4, window=2, tied=False, context_length=4096, vocab_size=416)
    weights, rng, size = random_weights(config), np.random.default_rng(0), config.hidden_size
    turned: F32 = np.linalg.qr(rng.standard_normal((size, size)))[0].astype(np.float32)
    for name, values in weights.items():
        values[:] = 1 if name.endswith("norm") else -1e4 if name.endswith("sinks") else 0
    weights["embed"] = rng.standard_normal(weights["embed"].shape).astype(np.float32)
    weights["layers.0.v"], weights["layers.0.o"] = turned, np.eye(size, dtype=np.float32)
    first = config.vocab_size - len(MARKS + WORDS)
    ids = {text: first + number for number, text in enumerate(MARKS + WORDS)}
    said = [ids[text] for text in ("<|start|>", "assistant", *script)]
    for last, here, after in zip(said, said[1:], said[2:], strict=False):
        weights["output"][after] += weights["embed"][here] + turned @ weights["embed"][last]
    write_huggingface(directory, config, weights)
    tokenizer = json.loads((directory / "tokenizer.json").read_text("utf-8"))
    tokenizer["model"]["vocab"] = {text: number for text, number in tokenizer["model"]["vocab"].items() if number < first}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] += [{"id": ids[text], "content": text, "special": text in MARKS, **flags} for text in ids]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaker(tmp_path_factory.mktemp("model") / "hf", ANSWER)


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = speaker(tmp_path_factory.mktemp("model") / "hf", CALL)
    with serving(lambda: load(directory)) as found:
        yield found


def ask(running: Running, **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 40, **body}
    reply = running.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()["choices"][0]
    return found


@pytest.mark.parametrize("streams", [False, True])
def test_reasoning_and_the_answer_come_apart_and_return_ends_it(running: Running, streams: bool) -> None:
    found = replace(PROTOCOLS["chat completions"], streams=streams).ask(running, "hello", temperature=0, max_tokens=40)
    assert (found.thought, found.text, found.end) == ("Hm.", "Yes.", "stop")


@pytest.mark.parametrize("choice", ["auto", {"type": "function", "function": {"name": "f"}}])
def test_a_call_ends_the_answer_and_has_its_name_and_arguments(calling: Running, choice: Any) -> None:
    """A demanded one begins behind its header."""
    found = ask(calling, tools=TOOLS, tool_choice=choice)
    (call,) = found["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {"a": 1})
    assert choice != "auto" or (found["message"]["reasoning_content"], found["finish_reason"]) == ("Hm.", "tool_calls")


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}]])
def test_a_call_of_a_tool_that_the_request_lacks_is_content(calling: Running, tools: Any) -> None:
    found = ask(calling, **({"tools": tools} if tools else {}))
    assert (found["message"]["content"], found["finish_reason"]) == ('{"a": 1}', "stop")
    assert "tool_calls" not in found["message"]


def test_stop_strings_count_in_content_only(running: Running, calling: Running) -> None:
    found = ask(running, stop=["m", "assistant"])
    assert (found["message"]["reasoning_content"], found["message"]["content"]) == ("Hm.", "Yes.")
    found = ask(running, stop=["s."])
    assert (found["message"]["content"], found["finish_reason"]) == ("Ye", "stop")
    assert ask(calling, tools=TOOLS, stop=['"a"'])["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_before_a_call_is_told_again_with_its_result(calling: Running, field: str) -> None:
    """By any of its names. A text beside it, which templates refuse, is a part of it."""
    for content, thought in ((None, "Hm."), ("I look.", "Hm.\n\nI look.")):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        history = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": content, field: "Hm.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "42"},
        ]
        prompt = calling.post("/apply-template", json={"messages": history, "tools": TOOLS}).json()["prompt"]
        assert f"<|start|>assistant<|channel|>analysis<|message|>{thought}<|end|>" in prompt
        assert '<|channel|>commentary json<|message|>{"a": 1}<|call|>' in prompt
        assert prompt.endswith('commentary<|message|>"42"<|end|><|start|>assistant')


def test_generate_writes_the_answer_on_stdout_and_reasoning_on_stderr(path: Path) -> None:
    command = ("generate", "hello", "-m", str(path), "--temperature", "0", "--threads", "1")
    found = run(*command)
    assert (found.exit_code, found.stdout) == (0, "Yes.\n")
    assert "Hm." in found.stderr
    told = json.loads(ok(*command, "--json"))
    assert (told["content"], told["reasoning"]) == ("Yes.", "Hm.")
