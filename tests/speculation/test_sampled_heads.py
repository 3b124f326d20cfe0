"""Sampled answers beside drafts of each kind of head are distributed as the target alone: chi-square, with a control.

Whatever is drawn is one of four tokens, which target and heads all find possible: drafts are accepted, rejected and recovered from.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from cpuspec import LLM
from cpuspec.backends import make_backend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.evaluate.statistics import ChiSquare, chi_square
from cpuspec.model.batch import ForwardBatch
from cpuspec.sampling import TokenHistory, dense, distribution
from cpuspec.settings import EngineConfig, SamplingParams
from tests.block_heads import make_block_head
from tests.heads import add_mtp, make_eagle1, make_eagle3
from tests.speculation.test_masks import pard
from tests.stage_heads import make_medusa, make_mlp_speculator
from tools.make_tiny_model import make_tiny_hf

SETTINGS = EngineConfig(threads=1, max_rows=64, kv_format="f32", keep_packed=False, draft_format="file", max_sequences=16)
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
PROMPT, DRAWN, LENGTH, NUM_SAMPLES = [7, 8, 9, 7, 8], (30, 41, 150, 222), 3, 400
LEAST_P_VALUE = 1e-5  # of one test in a hundred thousand, by chance

HEADS: dict[str, Callable[[Path, Checkpoint], object]] = {
    "EAGLE-1": lambda path, target: make_eagle1(path, target.config).path,
    "EAGLE-3": lambda path, target: make_eagle3(path, target.config, (1, 2), num_drafted=target.config.vocab_size).path,
    "P-EAGLE": lambda path, target: (
        make_eagle3(path, target.config, (1, 2), layout="speculators", num_drafted=target.config.vocab_size, mask_id=300).path
    ),
    "MTP": lambda path, target: "mtp",
    "DFlash": lambda path, target: make_block_head(path, target.config, (0, 1)).path,
    "DSpark": lambda path, target: make_block_head(path, target.config, (0, 1), markov="vanilla").path,
    "PARD": lambda path, target: pard(path, seed=3),
    "Medusa": lambda path, target: make_medusa(path, target.config).path,
    "MLP speculator": lambda path, target: make_mlp_speculator(path, target.config).path,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = make_tiny_hf(tmp_path_factory.mktemp("target") / "mimo", context_length=256, **SHAPE)
    add_mtp(directory)
    return open_checkpoint(directory)


@pytest.fixture(scope="module")
def params(target: Checkpoint) -> SamplingParams:
    others = {token: -np.inf for token in range(target.config.vocab_size) if token not in DRAWN}
    return SamplingParams(temperature=1.3, max_tokens=LENGTH + 2, ignore_eos=True, logit_bias=others)


@pytest.fixture(scope="module")
def expected(target: Checkpoint, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The target's own probability of each beginning, from scratch."""
    backend = make_backend("numba", target, SETTINGS)
    probs = {}
    rows: dict[tuple[int, ...], np.ndarray] = {}
    for string in product(DRAWN, repeat=LENGTH):
        probs[string] = 1.0
        for i, token in enumerate(string):
            if (path := string[:i]) not in rows:
                tokens, history = [*PROMPT, *path], TokenHistory(PROMPT)
                history.extend(path)
                batch = ForwardBatch(tokens, list(range(len(tokens))), [0], [0, len(tokens)], None, [len(tokens) - 1])
                rows[path] = dense(distribution(backend.forward(batch, backend.new_cache(1, 64)).logits[0], params, history))
            probs[string] *= rows[path][token]
    return probs


def compared(target: Checkpoint, spec: str, params: SamplingParams, expected: dict[tuple[int, ...], float]) -> ChiSquare:
    with LLM(target, spec, settings=SETTINGS) as llm:
        answers = llm.generate([PROMPT] * NUM_SAMPLES, [replace(params, seed=seed) for seed in range(NUM_SAMPLES)])
        assert sum(level.num_draft_tokens for level in llm.levels.values()) > NUM_SAMPLES // 2
    return chi_square(Counter(tuple(answer.token_ids[:LENGTH]) for answer in answers), expected)


@pytest.mark.parametrize("kind", HEADS)
def test_drawn_drafts_leave_the_targets_distribution(
    target: Checkpoint, params: SamplingParams, expected: dict[tuple[int, ...], float], tmp_path: Path, kind: str
) -> None:
    spec = f"draw:{HEADS[kind](tmp_path / 'head', target)}@3"
    assert compared(target, spec, params, expected).p_value > LEAST_P_VALUE


@pytest.mark.parametrize("kind", ["EAGLE-3", "Medusa", "MLP speculator"])
def test_trees_leave_the_targets_distribution(
    target: Checkpoint, params: SamplingParams, expected: dict[tuple[int, ...], float], tmp_path: Path, kind: str
) -> None:
    assert compared(target, f"tree:{HEADS[kind](tmp_path / 'head', target)}@6", params, expected).p_value > LEAST_P_VALUE


def test_answers_at_another_temperature_are_seen(
    target: Checkpoint, params: SamplingParams, expected: dict[tuple[int, ...], float]
) -> None:
    """The control."""
    assert compared(target, "ngram", replace(params, temperature=0.6), expected).p_value < LEAST_P_VALUE
