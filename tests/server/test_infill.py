"""Filling the gap between two texts, through `/infill` and through the suffix of a plain completion."""

from pathlib import Path
from typing import Any

import pytest

from cpuspec import LLM, SamplingParams
from tests.server.running import Running, load, serving, tiny_model, with_tokens
from tests.server.test_tools import full_model
from tools.make_tiny_model import make_tiny_hf

MODEL = full_model
BODY: dict[str, Any] = {"input_prefix": "def f(", "input_suffix": "return 1", "n_predict": 8, "temperature": 0, "samplers": ["x"]}


def wanted(llm: LLM, text: str) -> Any:
    """The offline answer to the marked text."""
    tokens = [llm.tokenizer.token_id(name) for name in ("<|file_sep|>", "<|repo_name|>", "<|endoftext|>")]
    params = SamplingParams(max_tokens=8, stop_token_ids=tuple(one for one in tokens if one is not None))
    (answer,) = llm.generate([llm.tokenizer.encode(text, parse_special=True)], params)
    return answer


def test_other_files_come_first(running: Running, llm: LLM) -> None:
    text = (
        "<|repo_name|>project\n<|file_sep|>a.py\nx = 1\n<|file_sep|>file\n<|fim_prefix|>def f(<|fim_suffix|>return 1<|fim_middle|>"
    )
    reply = running.post("/infill", json=BODY | {"input_extra": [{"filename": "a.py", "text": "x = 1"}]}).json()
    assert reply["content"] == wanted(llm, text).text
    assert reply["tokens_evaluated"] == len(llm.tokenizer.encode(text, parse_special=True))


# StarCoder 2, CodeLlama, GLM-4.5.
OTHERS = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)


@pytest.mark.parametrize("marks", OTHERS)
def test_marks_of_other_families_are_known(tmp_path: Path, marks: tuple[str, ...]) -> None:
    directory = with_tokens(make_tiny_hf(tmp_path / "hf", "starcoder2", context_length=512, vocab_size=512), marks)
    prefix, suffix, middle, *others = marks
    files = f"{others[0]}project\n{others[1]}a.py\nx = 1\n{others[1]}file\n" if others else ""
    with serving(lambda: load(directory)) as running:
        reply = running.post("/infill", json=BODY | {"input_extra": [{"filename": "a.py", "text": "x = 1"}] if others else []})
        assert reply.status_code == 200, reply.text
    with LLM(str(directory)) as llm:
        answer = wanted(llm, f"{files}{prefix}def f({suffix}return 1{middle}")
    assert (reply.json()["content"], reply.json()["tokens_predicted"]) == (answer.text, len(answer.token_ids))


def test_no_text_of_a_file_becomes_a_mark(running: Running, llm: LLM) -> None:
    evil = {"input_prefix": "<|fim_middle|>", "input_suffix": "<|fim_suffix|>", "input_extra": [{"text": "<|repo_name|>"}]}
    plain = {"input_prefix": "", "input_suffix": "", "input_extra": [{"text": ""}]}
    counts = [running.post("/infill", json=BODY | body).json()["tokens_evaluated"] for body in (evil, plain)]
    texts = [llm.tokenizer.encode(text, add_special=False) for text in ("<|fim_middle|>", "<|fim_suffix|>", "<|repo_name|>")]
    assert min(map(len, texts)) > 1
    assert counts[0] == counts[1] + sum(map(len, texts))


def test_a_prompt_can_be_read_ahead(running: Running) -> None:
    reply = running.post("/infill", json=BODY | {"n_predict": 0, "input_prefix": "one two three " * 9}).json()
    assert reply["content"] == ""
    assert reply["stop"] is True


def test_a_suffix_of_a_completion_is_the_same_gap(running: Running, llm: LLM) -> None:
    body = {"prompt": "def f(", "suffix": "return 1", "max_tokens": 8, "temperature": 0}
    text = running.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert text == wanted(llm, "<|fim_prefix|>def f(<|fim_suffix|>return 1<|fim_middle|>").text
    assert running.post("/v1/completions", json=body | {"echo": True}).status_code == 400


def test_models_that_cannot_say_so(tmp_path: Any) -> None:
    path = tiny_model(tmp_path)
    with serving(lambda: load(path)) as plain:
        reply = plain.post("/infill", json=BODY)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "suffix")
        reply = plain.post("/v1/embeddings", json={"input": "a"})
        assert (reply.status_code, reply.json()["error"]["type"]) == (501, "not_supported_error")
