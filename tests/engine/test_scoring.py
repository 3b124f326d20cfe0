"""Scores of texts: the log-probabilities that the model's own answers report, whatever is scored together."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cpuspec import LLM, SamplingParams
from cpuspec.backends import has_prompt_arithmetic
from cpuspec.errors import ConfigError
from tests.backends.models import RECURRENT, SMALL
from tools.make_tiny_model import make_tiny_gguf


@pytest.fixture(params=["numpy", "numba"])
def llm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LLM]:
    with LLM(make_tiny_gguf(tmp_path / "tiny.gguf"), "none", request.param, threads=1, max_sequences=2) as opened:
        yield opened


def test_scores_are_the_log_probabilities_of_answers(llm: LLM) -> None:
    prompts = [list(range(3, 80)), list(range(3, 40)), [5]]
    answers = llm.generate(prompts, SamplingParams(max_tokens=9, ignore_eos=True, logprobs=3))
    whole = [prompt + answer.token_ids for prompt, answer in zip(prompts, answers, strict=True)]
    together = llm.score([*whole, whole[1]], 3)
    assert together[1] == together[3]
    for tokens, prompt, answer, scores in zip(whole, prompts, answers, together, strict=False):
        assert len(scores) == len(tokens) - 1
        (alone,) = llm.score([tokens], 3)
        # A scored text is all prompt. Where prompts have an arithmetic of their own, an answer has only its first token in it.
        same = 1 if has_prompt_arithmetic(llm.backend) else len(answer.token_ids)
        for found, wanted in ((scores[len(prompt) - 1 :][:same], answer.logprobs[:same]), (scores, alone)):
            assert [one.token_id for one in found] == [one.token_id for one in wanted]
            likely = [[one.logprob for one in scored] for scored in (found, wanted)]
            assert likely[0] == (likely[1] if llm.row_invariant else pytest.approx(likely[1], abs=1e-3))
        likely = [[one.logprob for one in scored] for scored in (scores[len(prompt) - 1 :], answer.logprobs)]
        assert likely[0] == pytest.approx(likely[1], abs=0.2)
    assert llm.score([[5]]) == [[]]
    assert llm.score([]) == []
    with pytest.raises(ConfigError, match="token ids must be in"):
        llm.score([[5, 10**6]])


@pytest.mark.parametrize("family", ["plain", "granitehybrid"])
def test_the_score_of_each_token_is_that_of_an_answer_that_begins_there(tmp_path: Path, family: str) -> None:
    model = make_tiny_gguf(tmp_path / "tiny.gguf", **(SMALL if family == "plain" else RECURRENT[family]))
    with LLM(model, "none", threads=1, max_sequences=4, max_rows=16) as llm:
        text = [*range(3, 40)]
        (scores,) = llm.score([text], 3)
        first = llm.generate([text[:size] for size in range(1, len(text))], max_tokens=1, ignore_eos=True, logprobs=3)
        assert [one.top for one in scores] == [one.logprobs[0].top for one in first]


def test_a_prompt_that_is_scored_and_answered_is_read_once(tmp_path: Path) -> None:
    prompt, params = list(range(3, 80)) * 2, SamplingParams(max_tokens=9, ignore_eos=True, logprobs=0)
    with LLM(make_tiny_gguf(tmp_path / "tiny.gguf"), "none", threads=1, max_sequences=1) as llm:
        (fresh,) = llm.generate([prompt], replace(params, cache_salt="another client"))
        job = llm.scoring_job([prompt], cache_salt="")
        while not job.is_done:
            llm.job_step(job)
        (answer,) = llm.generate([prompt], params)
        assert answer.stats.num_cached_tokens == len(prompt) - 1
        assert answer.logprobs == fresh.logprobs
