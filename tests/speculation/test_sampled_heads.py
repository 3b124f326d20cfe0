"""Sampled answers beside drafts of each kind of head are those of the target alone, seed by seed.

Whatever is drawn is one of four tokens, which target and heads all find possible: drafts are accepted, rejected and recovered from.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cpuspec import LLM
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.settings import EngineConfig, SamplingParams
from tests.block_heads import make_block_head
from tests.heads import add_mtp, make_eagle1, make_eagle3
from tests.speculation.test_masks import pard
from tests.stage_heads import make_medusa, make_mlp_speculator
from tools.make_tiny_model import make_tiny_hf

SETTINGS = EngineConfig(threads=1, max_rows=64, kv_format="f32", keep_packed=False, max_sequences=16)
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
PROMPT, DRAWN, LENGTH, NUM_SAMPLES = [7, 8, 9, 7, 8], (30, 41, 150, 222), 5, 200

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
TREES = ("EAGLE-3", "Medusa", "MLP speculator")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = make_tiny_hf(tmp_path_factory.mktemp("target") / "mimo", context_length=256, **SHAPE)
    add_mtp(directory)
    return open_checkpoint(directory)


@pytest.fixture(scope="module")
def params(target: Checkpoint) -> SamplingParams:
    others = {token: -np.inf for token in range(target.config.vocab_size) if token not in DRAWN}
    return SamplingParams(temperature=1.3, max_tokens=LENGTH, ignore_eos=True, logit_bias=others)


@pytest.fixture(scope="module")
def wanted(target: Checkpoint, params: SamplingParams) -> list[list[int]]:
    found = drawn(target, "none", params)
    assert len({tuple(answer) for answer in found}) > NUM_SAMPLES // 4
    return found


def drawn(target: Checkpoint, spec: str, params: SamplingParams) -> list[list[int]]:
    """An answer of each seed."""
    with LLM(target, spec, settings=SETTINGS) as llm:
        answers = llm.generate([PROMPT] * NUM_SAMPLES, [replace(params, seed=seed) for seed in range(NUM_SAMPLES)])
        levels = llm.levels.values()
        num_drafted, num_accepted = (sum(getattr(one, f"num_{what}_tokens") for one in levels) for what in ("draft", "accepted"))
        assert spec == "none" or num_drafted > NUM_SAMPLES // 2
        assert not spec.startswith("draw") or num_drafted - NUM_SAMPLES // 8 > num_accepted > NUM_SAMPLES // 8
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize(("shape", "kind"), [*(("draw:{}@3", kind) for kind in HEADS), *(("tree:{}@6", kind) for kind in TREES)])
def test_each_seed_draws_what_it_draws_without_a_head(
    target: Checkpoint, params: SamplingParams, wanted: list[list[int]], tmp_path: Path, shape: str, kind: str
) -> None:
    assert drawn(target, shape.format(HEADS[kind](tmp_path / "head", target)), params) == wanted
