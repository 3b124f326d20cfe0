"""EvalPlus' own loop over an LLM, in process and through the server: the answers are those of the Python interface."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from cpuspec import LLM, SamplingParams
from cpuspec.errors import ConfigError
from cpuspec.settings import EngineConfig
from tests.server.running import load, serving, templated_model
from tests.server.test_tools import TEMPLATE
from tools.make_tiny_model import make_tiny_gguf

pytest.importorskip("evalplus", reason="evalplus is not installed; pip install evalplus")


@pytest.fixture
def problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """EvalPlus wants all of its problems: as many, of one line each; and returns their prompts."""
    prompts = [f'def f{number}(a: int) -> int:\n    """The number {number}."""\n' for number in range(164)]
    lines = [
        {"task_id": f"HumanEval/{number}", "prompt": prompt, "entry_point": f"f{number}", "canonical_solution": "    return a\n"}
        | {"base_input": [[1]], "plus_input": [[2]], "atol": 0, "contract": ""}
        for number, prompt in enumerate(prompts)
    ]
    (tmp_path / "plus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(importlib.import_module("evalplus.data.humaneval"), "HUMANEVAL_OVERRIDE_PATH", str(tmp_path / "plus.jsonl"))
    return prompts


class TheirTokenizer:
    """The one of an LLM of ours, for EvalPlus' own prompts."""

    chat_template = "the model's"

    def __init__(self, llm: LLM) -> None:
        self._tokenizer = llm.tokenizer

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=False)


def test_samples_are_the_answers_of_the_llm(problems: list[str], tmp_path: Path) -> None:
    from cpuspec.evaluate.plus import ANSWERED, ASKED, make_samples

    make_prompt = importlib.import_module("evalplus.provider.utility").make_raw_chat_prompt
    model = make_tiny_gguf(tmp_path / "tiny.gguf")
    with LLM(model, "ngram", "numpy", settings=EngineConfig(threads=1, keep_packed=False)) as llm:
        make_samples(llm, "humaneval", tmp_path / "samples.jsonl", max_tokens=4, limit=2)
        raw = [json.loads(line) for line in (tmp_path / "samples.raw.jsonl").read_text().splitlines()]
        assert [one["task_id"] for one in raw] == ["HumanEval/0", "HumanEval/1"]
        for prompt, one in zip(problems, raw, strict=False):
            theirs = make_prompt(prompt, ASKED, ANSWERED, TheirTokenizer(llm))
            assert one["solution"] == llm.generate(theirs, SamplingParams(max_tokens=4))[0].text
        make_samples(llm, "humaneval", tmp_path / "samples.jsonl", max_tokens=4, limit=2)
        assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 2, "they are there"
        with pytest.raises(ConfigError, match="samples end with"):
            make_samples(llm, "humaneval", tmp_path / "samples")


def test_evalplus_asks_the_server(tmp_path: Path) -> None:
    provider = importlib.import_module("evalplus.provider")
    directory = templated_model(tmp_path, TEMPLATE)
    with serving(lambda: load(directory), max_new_tokens=8) as running:
        asked: dict[str, Any] = {"instruction_prefix": "Write:", "response_prefix": "", "base_url": f"{running.url}/v1"}
        decoder = provider.make_model("tiny", "openai", "humaneval", **asked)
        (found,) = decoder.codegen("def f():", do_sample=False, num_samples=1)
        messages = [
            {"role": "system", "content": "You are a helpful assistant good at coding."},
            {"role": "user", "content": "Write:\n```python\ndef f():\n```"},
        ]
        assert found == running.model.llm.chat(messages, SamplingParams(max_tokens=8, temperature=0.0)).text
