"""Requests that choose their drafter among what is loaded: no answer depends on it, and nothing is loaded for it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cpuspec import LLM, SamplingParams
from cpuspec.errors import ConfigError
from cpuspec.settings import EngineConfig
from tests.engine.conftest import SMALL
from tools.make_tiny_model import make_tiny_gguf

PROMPT = "the cat sat on the mat and the dog ran to the door while the cat sat on the"
SETTINGS = EngineConfig(threads=1, max_sequences=3, keep_packed=False)


@pytest.fixture(scope="module", params=["ngram,skip:1@2,self:mxfp4@4", "auto,self:mxfp4"])
def llm(request: pytest.FixtureRequest, models: Path) -> Iterator[LLM]:
    with LLM(models / "plain.gguf", request.param, settings=SETTINGS) as found:
        yield found


CHOICES = ("none", "ngram", "suffix:tree@20", "self:mxfp4", "self:mxfp4@2:0.3", "ngram@3,self:mxfp4@4", "ngram@2+self:mxfp4@3")


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_no_answer_depends_on_the_choice(llm: LLM, temperature: float) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=temperature, seed=3)
    usual = llm.generate(PROMPT, params)[0]
    chosen = [None, *CHOICES]
    answers = llm.generate([PROMPT] * len(chosen), [replace(params, draft=one) for one in chosen])
    for name, answer in zip(chosen, answers, strict=True):
        assert answer.token_ids == usual.token_ids
        assert len(answer.token_ids) == 40
        if name is not None:
            wanted = {"suffix:tree@20": {"suffix"}, "none": set()}.get(name, {"ngram", "self:mxfp4"})
            assert {source for level in answer.stats.levels for source in level.split("+")} <= wanted, name
    assert answers[chosen.index("self:mxfp4")].stats.levels["self:mxfp4"].num_draft_tokens


def test_requests_with_one_choice_share_a_proposer_that_goes_with_the_last(llm: LLM) -> None:
    before = llm.memory()
    llm.generate([PROMPT] * 5, max_tokens=8, draft="self:mxfp4", ignore_eos=True)
    assert [one.weight_bytes for one in llm.memory()] == [one.weight_bytes for one in before]
    stream = llm.stream(PROMPT, max_tokens=50, draft="suffix", ignore_eos=True)
    next(stream)
    stream.close()
    assert llm.generate(PROMPT, max_tokens=4, ignore_eos=True)[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("self:q8_0", "a request drafts with 'ngram', 'suffix'"),
        ("tests.toys:PieceTokenizer", "a request drafts with"),
        ("./evil.py:Drafter", "a request drafts with"),
        ("auto", "a request drafts with"),
        ("smollm2-135m-instruct", "a request drafts with"),
        ("self:mxfp4,self:mxfp4", "each model once"),
        ("self:mxfp4,ngram", "put it first"),
        ("ngram@0", "drafts 1 to"),
        ("ngram:bush", "ngram"),
        ("@", "wanted none, or levels"),
        ("ngram," * 1000, "a request drafts with"),
    ],
)
def test_what_is_not_loaded_is_refused_with_what_is(llm: LLM, choice: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        llm.generate(PROMPT, draft=choice)


def test_a_model_with_another_vocabulary_is_no_choice(models: Path, tmp_path: Path) -> None:
    other = make_tiny_gguf(tmp_path / "other.gguf", vocab_size=400, seed=2, **SMALL)
    with LLM(models / "plain.gguf", f"text:{other}@4", settings=SETTINGS) as llm:
        assert llm.generate(PROMPT, max_tokens=4, draft="ngram")
        with pytest.raises(ConfigError, match="a request drafts with 'ngram', 'suffix', each"):
            llm.generate(PROMPT, draft="text:other.gguf")
