"""Drafts of models that fill rows of a mask token: one forward each, of the model's own rows."""

import json
from pathlib import Path

import numpy as np
import pytest

from cpuspec import LLM, SamplingParams
from cpuspec.checkpoints import open_checkpoint
from cpuspec.errors import CheckpointError, ConfigError
from cpuspec.sampling import confidence
from cpuspec.sequence import Sequence
from cpuspec.speculation.context import Context
from cpuspec.speculation.drafters import head_path
from cpuspec.speculation.drafters.head_path import likeliest_children
from cpuspec.speculation.drafters.masks import MaskProposer
from tests.toys import ToyBackend
from tools.make_tiny_model import make_tiny_gguf, make_tiny_hf

MASK = 7
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
PROMPTS = ["one two one two one", "def f(x): return", "a"]


def drafting(num_tokens: int = 4, max_rows: int = 16, capacity: int = 64, **settings) -> tuple[MaskProposer, ToyBackend]:  # type: ignore[no-untyped-def]
    model = ToyBackend(3, memory=0.4, max_rows=max_rows)
    return MaskProposer(Context(model, 3, capacity), MASK, "masks", num_tokens, **settings), model


def test_a_draft_is_the_likeliest_tokens_of_the_masks_rows_in_one_forward() -> None:
    proposer, model = drafting()
    seqs = [Sequence.new(i, tokens, SamplingParams()) for i, tokens in enumerate(([0, 4, 5], [0, 6, 4, 5, 2]))]
    for seq in seqs:
        proposer.begin(seq, 0)
    for _ in range(2):  # the second draft finds the masks of the first in its cache
        before = model.num_forwards
        drafts = proposer.propose(seqs, [9, 2])
        assert model.num_forwards == before + 1
        for seq, draft, length in zip(seqs, drafts, (4, 2), strict=True):
            wanted = [int(ToyBackend(3, memory=0.4).row([*seq.tokens, *[MASK] * k]).argmax()) for k in range(length)]
            assert draft.tokens.tolist() == wanted
            seq.extend([int(draft.tokens[0]), 3])
    for seq in seqs:
        proposer.end(seq)
    assert not proposer.context.slots.taken


@pytest.mark.parametrize("draws", [False, True])
def test_with_floors_a_draft_says_how_sure_its_rows_are_and_ends_where_the_path_is_unlikely(
    monkeypatch: pytest.MonkeyPatch, draws: bool
) -> None:
    monkeypatch.setattr(head_path, "likeliest_children", lambda *row: likeliest_children(*row)[:1])  # without alternatives
    proposer, _ = drafting(8, draws=draws)
    seq = Sequence.new(0, [0, 4, 5], SamplingParams(temperature=1.0 if draws else 0.0, seed=1))
    proposer.begin(seq, 0)
    rows = [ToyBackend(3, memory=0.4).row([*seq.tokens, *[MASK] * k]) for k in range(8)]
    likely = np.cumprod(list(map(confidence, rows)))
    for least in (likely[0] * 1.01, likely[1] * 1.01, likely[4] * 1.01):
        (draft,) = proposer.propose([seq], [8], [[float(least)] * 8])
        assert len(draft) == 1 + int((likely >= least).sum())
        assert np.cumprod(draft.confidence) == pytest.approx(likely[: len(draft)], rel=1e-5)


def test_a_long_prompt_is_read_in_chunks_before_the_first_draft() -> None:
    proposer, _ = drafting(max_rows=8, capacity=128)
    seqs = [Sequence.new(i, [0, *range(1, 7)] * 8, SamplingParams()) for i in range(2)]
    for seq in seqs:
        proposer.begin(seq, 0)
    lengths = []
    for _ in range(30):
        lengths.append([len(draft) for draft in proposer.propose(seqs, [3, 3])])
    assert lengths[0] == [0, 0]
    assert lengths[-1] == [3, 3]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_gguf(tmp_path_factory.mktemp("target") / "tiny.gguf", weight_format="f32", context_length=256, **SMALL)


def pard(directory: Path, mask_id: object = MASK, key: str = "pard_token", seed: int = 0) -> Path:
    make_tiny_hf(directory, context_length=256, seed=seed, **SMALL)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, key: mask_id}))
    return directory


def test_a_model_with_the_targets_weights_drafts_the_next_token_right(target: Path, tmp_path: Path) -> None:
    with LLM(str(target), spec=str(pard(tmp_path / "pard")), threads=1) as llm:
        answer = llm.generate(PROMPTS[0], SamplingParams(max_tokens=24))[0]
        level = answer.stats.levels["pard"]
        assert level.num_drafts <= 12
        assert level.num_accepted_tokens_per_pos[0] == level.num_drafts


def test_vllms_key_names_the_mask_too(tmp_path: Path) -> None:
    assert open_checkpoint(pard(tmp_path / "model", 5, "ptd_token_id")).mask_id == 5


@pytest.mark.parametrize("mask_id", [-1, 10**6, "7", 1.5, True])
def test_a_mask_that_is_no_token_is_refused(tmp_path: Path, mask_id: object) -> None:
    with pytest.raises(CheckpointError, match="pard_token"):
        open_checkpoint(pard(tmp_path / "model", mask_id))


@pytest.mark.parametrize(("spec", "wrong"), [("ngram,{}", r"join them with \+"), ("tree:{}", "head")])
def test_what_one_pass_cannot_do_is_refused(target: Path, tmp_path: Path, spec: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        LLM(str(target), spec=spec.format(pard(tmp_path / "pard")), threads=1)


def test_rows_of_the_mask_do_not_stay_in_the_cache() -> None:
    proposer, model = drafting()
    seq = Sequence.new(0, [0, 4, 5], SamplingParams())
    proposer.begin(seq, 0)
    proposer.propose([seq], [4])
    seq.extend([MASK, MASK])  # as if the verifier had chosen them: then they may stay
    draft = proposer.propose([seq], [1])[0]
    assert draft.tokens.tolist() == [int(np.argmax(model.row(seq.tokens)))]
