"""Models with recurrent layers answer the same however they are run: drafts, threads, batches, chunks of prompts, joins and leaves.

`python -m tests.engine.test_recurrent_ways 100` asks so many prompts, instead of a few, and prints what it compared.
"""

import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.config import EngineConfig, SamplingParams
from cpuspec.engine.llm import LLM
from cpuspec.errors import ConfigError
from tests.backends.models import RECURRENT
from tools.make_tiny_model import make_tiny_gguf

SETTINGS = EngineConfig(context_length=128, max_rows=64, keep_packed=False, prefix_cache_gb=0, head_format="file")
PREDICTS = ("qwen35", "qwen35moe", "qwen3next")

# Who drafts, threads, sequences at once, and other settings.
WAYS = [
    ("none", 2, 9, {"prompt_rows": 7}), ("none", 3, 4, {}), ("ngram", 1, 1, {}), ("ngram@7", 2, 9, {}), ("suffix", 3, 2, {}),
    ("suffix@12", 2, 5, {"prompt_rows": 1}), ("auto", 2, 6, {}), ("self:mxfp4", 1, 1, {}), ("self:mxfp4@6", 2, 9, {}),
    ("self:mxfp4@3+ngram@4", 2, 4, {}), ("ngram,self:mxfp4@12", 3, 3, {}), ("skip:1@4", 2, 8, {}), ("suffix,skip:1@3", 1, 7, {}),
    ("ngram", 2, 9, {"prefix_cache_gb": 1}),
]  # fmt: skip
OWN_WAYS = [(f"mtp@{number}", number % 3 + 1, 10 - number, {}) for number in range(1, 7)] + [("ngram@2+mtp@2", 2, 4, {})]


def _prompts(count: int) -> list[list[int]]:
    """Some repeat what they began with, and some begin alike."""
    rng, found = np.random.default_rng(0), list[list[int]]()
    for number in range(count):
        words = rng.integers(0, 300, rng.integers(1, 30)).tolist()
        found.append((words[:5] * 7, words, (found or [words])[-1][:12] + words[:4])[number % 3])
    return found


def check_ways(checkpoint: Checkpoint, num_prompts: int, predicts: bool) -> int:
    """Half of the answers are greedy and half have a seed; they have different lengths. Returns how many were compared."""
    prompts = _prompts(num_prompts)
    params = [SamplingParams(max_tokens=8 + number % 9, ignore_eos=True) for number in range(num_prompts)]
    params[1::2] = [replace(one, temperature=0.8, seed=number) for number, one in enumerate(params[1::2])]
    with LLM(checkpoint, "none", settings=replace(SETTINGS, threads=1, max_sequences=1)) as llm:
        wanted = [answer.token_ids for answer in llm.generate(prompts, params)]
    assert len({tuple(answer) for answer in wanted}) > num_prompts // 2
    compared = 0
    for draft, threads, sequences, others in [*WAYS, *(OWN_WAYS if predicts else [])]:
        settings, step = replace(SETTINGS, threads=threads, max_sequences=sequences, **others), 1  # type: ignore[arg-type]
        if "self" in draft or "skip" in draft:
            step = 2  # drafts that are drawn keep the distribution, and not the draws
        with LLM(checkpoint, draft, settings=settings) as llm:
            got = [answer.token_ids for answer in llm.generate(prompts[::step], params[::step])]
            assert got == wanted[::step], f"{draft}, {threads} threads, {sequences} sequences, {others}"
            assert draft in ("none", "auto") or sum(level.num_draft_tokens for level in llm.levels.values()), draft
        compared += len(got)
    with pytest.raises(ConfigError, match="tree"):
        LLM(checkpoint, "suffix:tree", settings=SETTINGS)
    return compared


def _checkpoint(directory: Path, model: str) -> Checkpoint:
    options = RECURRENT[model] | {"predicts": True, "num_layers": 5} if model in PREDICTS else RECURRENT[model]
    return open_checkpoint(make_tiny_gguf(directory / "tiny.gguf", weight_format="q8_0", **options))


@pytest.mark.parametrize("model", RECURRENT)
def test_answers_are_those_of_plain_decoding_in_every_way(tmp_path: Path, model: str) -> None:
    assert check_ways(_checkpoint(tmp_path, model), 8, model in PREDICTS)


if __name__ == "__main__":
    for name in RECURRENT:
        with TemporaryDirectory() as place:
            print(name, check_ways(_checkpoint(Path(place), name), int(sys.argv[1]), name in PREDICTS), "answers are the same")
