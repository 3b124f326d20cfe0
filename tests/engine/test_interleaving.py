"""Real backends: prompts that are read beside streams, in chunks and from shared prefixes, change no answer."""

import numpy as np
import pytest

from cpuspec.backends import BACKENDS
from cpuspec.checkpoints import Checkpoint
from cpuspec.engine.llm import LLM
from cpuspec.settings import EngineConfig, SamplingParams
from tests.backends.models import every_backend, tiny

LONG = np.random.default_rng(1).integers(0, 300, 90).tolist()
PROMPTS = [[5, 6, 7], LONG, [*LONG[:70], 3, 4], [8, 9, 5, 6, 8]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:  # type: ignore[no-untyped-def]
    return tiny(tmp_path_factory, context_length=160, num_layers=3, predicts=True)


@pytest.mark.parametrize("spec", ["none", "suffix:tree", "ngram,self:q4_0@3", "mtp@3"])
# Graph engines round activations to int8: last bits that depend on the batch become steps of 1/127.
@every_backend([name for name in BACKENDS if name not in ("onnxruntime", "openvino")])
def test_answers_in_a_batch_are_those_that_each_prompt_gets_alone(checkpoint: Checkpoint, name: str, spec: str) -> None:
    """Two of the answers are greedy and two have a seed."""
    params = [SamplingParams(temperature=number % 2 * 0.8, seed=3, max_tokens=20) for number in range(len(PROMPTS))]

    def answers(num_at_once: int, prompt_rows: int, max_rows: int) -> list[list[int]]:
        settings = EngineConfig(num_at_once, threads=1, max_rows=max_rows, prompt_rows=prompt_rows)
        with LLM(checkpoint, spec, name, settings=settings) as llm:
            return [answer.token_ids for answer in llm.generate(PROMPTS, params)]

    alone = answers(1, 64, 256)
    for prompt_rows, max_rows in ((7, 256), (5, 16)):
        assert answers(4, prompt_rows, max_rows) == alone
