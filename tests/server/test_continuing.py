"""An assistant's message at the end of a conversation is continued: its prompt ends with it, the answer is what comes behind it."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cpuspec.server.parsing.answer import Piece, answer_parser, joined_pieces
from tests.server.running import Running, load, serving
from tests.server.test_structured import make_model

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "as it is": PLAIN,
    "trimmed": PLAIN.replace("m.content", "m.content | trim"),
    "with thinking": PLAIN.replace(
        "{{ m.content }}",
        "{% if loop.last and m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
        "{{ m.content.split('</think>')[-1] }}",
    ),
    "opens thinking": PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"),
}
MODEL = partial(make_model, template=PLAIN)
USER = {"role": "user", "content": "the cat"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}
HEAD = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module", params=TEMPLATES)
def templated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, prompt_arithmetic: str
) -> Iterator[tuple[str, Running]]:
    directory = make_model(tmp_path_factory.mktemp("model"), TEMPLATES[request.param])
    with serving(lambda: load(directory)) as found:
        yield request.param, found


def said(content: str, **more: str) -> dict[str, str]:
    return {"role": "assistant", "content": content, **more}


CLOSED = "<think>\n\n</think>\n\n"
# The last message, and the end of the prompt; by template where it matters.
ENDS: list[tuple[dict[str, str], Any]] = [
    (said("On the"), {"with thinking": f"{CLOSED}On the", "": "On the"}),
    (said("On the \n"), {"as it is": "On the \n", "opens thinking": "On the \n", "trimmed": "On the", "": f"{CLOSED}On the \n"}),
    (said("a<|im_end|>b"), {"with thinking": f"{CLOSED}a<|im_end|>b", "": "a<|im_end|>b"}),
    (said(" "), {"opens thinking": "<think>\n", "": ""}),
    (said("<think>\nI am"), {"as it is": "<think>\nI am", "trimmed": "<think>\nI am", "": "<think>\nI am"}),
    (said("", reasoning_content="I am"), {"as it is": "", "trimmed": "", "": "<think>\nI am"}),
    (
        said("So", reasoning_content="I am"),
        {"with thinking": "<think>\nI am\n</think>\n\nSo", "": "So"},
    ),
]


@pytest.mark.parametrize(("last", "wanted"), ENDS, ids=[repr(last["content"]) for last, _ in ENDS])
def test_the_prompt_ends_with_the_last_message(templated: tuple[str, Running], last: dict[str, str], wanted: Any) -> None:
    name, running = templated
    body = {"messages": [USER, last]}
    found = running.post("/apply-template", json=body).json()["prompt"]
    asked = running.post("/apply-template", json=body | {"continue_final_message": True, "add_generation_prompt": False})
    counted = running.post("/v1/messages/count_tokens", json=body) if "reasoning_content" not in last else None
    tokens = running.post("/tokenize", json=body).json()["tokens"]
    assert found == HEAD + wanted.get(name, wanted[""])
    assert asked.json()["prompt"] == found
    assert counted is None or counted.json()["input_tokens"] == len(tokens)
    control = running.model.llm.tokenizer.token_id("<|im_end|>")
    assert tokens.count(control) == 1, "a text never becomes a control token"


OTHERS: dict[str, tuple[list[Any], dict[str, bool], str]] = {
    "a turn of its own": ([USER, said("On")], {"continue_final_message": False}, "On<|im_end|>\n<|im_start|>assistant\n"),
    "a generation prompt": ([USER, said("On")], {"add_generation_prompt": True}, "On<|im_end|>\n<|im_start|>assistant\n"),
    "no generation prompt": ([USER], {"add_generation_prompt": False}, "cat<|im_end|>\n"),
    "a user's message": ([USER], {"continue_final_message": True}, "the cat"),
    "a call": ([USER, CALLED], {}, '{"name": "f", "parameters": {}}<|im_end|>\n<|im_start|>assistant\n'),
}


@pytest.mark.parametrize(("messages", "how", "end"), OTHERS.values(), ids=OTHERS)
def test_a_conversation_ends_as_it_is_asked_to(running: Running, messages: list[Any], how: dict[str, bool], end: str) -> None:
    assert running.post("/apply-template", json={"messages": messages, **how}).json()["prompt"].endswith(end)


def test_a_template_that_leaves_the_message_out_is_told_of(tmp_path: Path) -> None:
    directory = make_model(tmp_path, PLAIN.replace("{{ m.content }}", "{% if m.role == 'user' %}{{ m.content }}{% endif %}"))
    with serving(lambda: load(directory)) as running:
        reply = running.post("/v1/chat/completions", json={"messages": [USER, said("On")]})
    assert reply.status_code == 400
    assert "leaves out the last message" in reply.text


# What the prompt ends with, the answer, and its pieces.
BEGUN: list[tuple[str, str, list[Piece]]] = [
    ("Hello", " you", [Piece("content", " you")]),
    ("Hello ", "you", [Piece("content", "you")]),
    ("a <", "b", [Piece("content", "b")]),
    ("a <tool", "_box>", [Piece("content", "_box>")]),
    ("a <tool", '_call>\n{"name": "f", "arguments": {}}\n</tool_call>', [Piece("call", "f"), Piece("arguments", "{}")]),
    ('<tool_call>\n{"name": "f", "arguments": {"a', '": 1}}\n</tool_call>', [Piece("call", "f"), Piece("arguments", '{"a": 1}')]),
    ("<think>\nI ", "am</think>\n\nSo", [Piece("reasoning", "am"), Piece("content", "So")]),
    ("<think>\nI\n", "</think>So", [Piece("content", "So")]),
    ("<think>I</think>\n\nSo", " it is", [Piece("content", " it is")]),
    ("<thi", "s>", [Piece("content", "s>")]),
    ("Hello", "", []),
]


@pytest.mark.parametrize(("begun", "answer", "wanted"), BEGUN, ids=[f"{begun}|{answer}" for begun, answer, _ in BEGUN])
def test_an_answer_is_taken_apart_as_what_its_prompt_has_begun(begun: str, answer: str, wanted: list[Piece]) -> None:
    for cut in range(len(answer) + 1):
        parser = answer_parser("{{ tools }}<tool_call><think>", {"f": {}}, begun=begun)
        pieces = [*parser.push(answer[:cut]), *parser.push(answer[cut:]), *parser.finish()]
        assert joined_pieces(pieces) == wanted
