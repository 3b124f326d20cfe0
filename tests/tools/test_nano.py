"""tools/nano.py says what the engine does: the same tokens, and the same with every draft."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.download import fetch
from cpuspec.checkpoints.gguf_file import read_gguf
from cpuspec.checkpoints.recipes import load_recipes
from cpuspec.engine.llm import LLM
from cpuspec.text import make_tokenizer
from tools import nano
from tools.make_tiny_model import make_tiny_gguf

PROMPT = [5, 9, 7, 5, 9, 7, 5, 9]


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nano") / "tiny.gguf"
    make_tiny_gguf(path, request.param, weight_format="q4_0")
    return path


def test_nano_gives_the_engines_greedy_tokens(tiny: Path) -> None:
    with LLM(tiny, "none", backend="numpy") as llm:
        (completion,) = llm.generate([PROMPT], max_tokens=24, temperature=0, ignore_eos=True)
    answer = nano.generate(nano.Model(read_gguf(tiny)), PROMPT, 24, 4, set())
    assert answer.tokens == PROMPT + list(completion.token_ids)


@pytest.mark.parametrize("temperature", [0, 1])
def test_no_draft_changes_a_token_of_nano(tiny: Path, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nano.Model(read_gguf(tiny))
    plain = nano.generate(model, PROMPT, 24, 0, set(), temperature, seed=3)
    right: Callable[[list[int], int], list[int]] = lambda tokens, most: plain.tokens[len(tokens) :][:most]  # noqa: E731
    forwards = []
    for drafter in (nano.look_up, right, lambda tokens, most: right(tokens, 1) + [1] * (most - 1)):
        monkeypatch.setattr(nano, "look_up", drafter)
        answer = nano.generate(model, PROMPT, 24, 4, set(), temperature, seed=3)
        assert answer.tokens == plain.tokens
        forwards.append(answer.forwards)
    assert plain.forwards == 24
    assert forwards[1] == 5  # a right draft of four tokens and one token more, each time


def test_nano_stays_a_chapter_of_300_lines() -> None:
    assert len(Path(nano.__file__).read_text().splitlines()) <= 300


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "qwen2.5-coder-1.5b-instruct"])
def test_nano_gives_the_engines_greedy_tokens_of_real_models(name: str) -> None:
    path = fetch(load_recipes()[name])
    with LLM(path, "none") as llm:
        (completion,) = llm.generate("The first five prime numbers are 2, 3,", max_tokens=12, temperature=0)
        prompt = make_tokenizer(open_checkpoint(path)).encode_prompt("The first five prime numbers are 2, 3,")
    answer = nano.generate(nano.Model(read_gguf(path)), prompt, 12, 4, set())
    assert answer.tokens == prompt + list(completion.token_ids)
