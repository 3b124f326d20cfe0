"""Scores of texts: the log-probabilities that the model's own answers report, whatever is scored together."""

from pathlib import Path

import pytest

from cpuspec import LLM, SamplingParams
from cpuspec.errors import ConfigError
from tools.make_tiny_model import make_tiny_gguf


@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_scores_are_the_log_probabilities_of_answers(tmp_path: Path, backend: str) -> None:
    with LLM(make_tiny_gguf(tmp_path / "tiny.gguf"), "none", backend, threads=1, max_sequences=2) as llm:
        prompts = [list(range(3, 80)), list(range(3, 40)), [5]]
        answers = llm.generate(prompts, SamplingParams(max_tokens=9, ignore_eos=True, logprobs=3))
        whole = [prompt + answer.token_ids for prompt, answer in zip(prompts, answers, strict=True)]
        together = llm.score([*whole, whole[1]], 3)
        assert together[1] == together[3]
        for tokens, prompt, answer, scores in zip(whole, prompts, answers, together, strict=False):
            assert len(scores) == len(tokens) - 1
            (alone,) = llm.score([tokens], 3)
            for found, wanted in ((scores[len(prompt) - 1 :], answer.logprobs), (scores, alone)):
                assert [one.token_id for one in found] == [one.token_id for one in wanted]
                likely = [[one.logprob for one in scored] for scored in (found, wanted)]
                assert likely[0] == (likely[1] if llm.row_invariant else pytest.approx(likely[1], abs=1e-3))
        assert llm.score([[5]]) == [[]]
        assert llm.score([]) == []
        with pytest.raises(ConfigError, match="token ids must be in"):
            llm.score([[5, 10**6]])
