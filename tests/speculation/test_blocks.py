"""DFlash and DSpark heads: read as published, equal to their formulas on every backend, and drafts of theirs change no answer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuspec.backends import make_backend
from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.heads import Head
from cpuspec.errors import BackendError, CheckpointError, ConfigError
from cpuspec.model.batch import ForwardBatch
from cpuspec.speculation.drafters.blocks import _MIN_CHANCE
from cpuspec.speculation.drafters.heads import HeadProposer
from tests.backends.models import every_backend
from tests.block_heads import MASK_ID, RANK, accepted_chance, as_gguf, block_rows, make_block_head, markov_bias
from tests.heads import RandomHead, opened, output_of, states_of, write_head
from tests.speculation.head_runs import PARAMS, PROMPTS, SETTINGS, check_answers, llm_over

SCALES = {"input_embedding_scale": 0.5, "output_multiplier": 1.5, "final_logit_softcapping": 2.0}
KINDS: dict[str, Any] = {
    "DFlash of z-lab": {},
    "DFlash of speculators": {"layout": "speculators", "num_drafted": 96},
    "causal DFlash": {"causal": True},
    "scaled DFlash": {"scales": SCALES},
    "DSpark of DeepSpec": {"markov": "vanilla"},
    "DSpark of speculators": {"layout": "speculators", "markov": "vanilla", "num_drafted": 96},
    "gated DSpark": {"markov": "gated"},
    "recurrent DSpark": {"markov": "rnn", "confidence": "markov"},
    "recurrent DSpark that skips its anchor": {"layout": "speculators", "markov": "rnn", "sample_from_anchor": False},
    "DSpark with confidence": {"markov": "vanilla", "confidence": "markov"},
    "DSpark with confidence of the state": {"markov": "vanilla", "confidence": "state"},
}


@pytest.fixture(scope="module")
def heads(target: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RandomHead]:
    directory = tmp_path_factory.mktemp("heads")
    return {kind: make_block_head(directory / str(i), target.config, **KINDS[kind]) for i, kind in enumerate(KINDS)}


@every_backend(("numba", "numpy", "torch"))
@pytest.mark.parametrize("kind", ["DFlash of z-lab", "DFlash of speculators", "causal DFlash", "scaled DFlash"])
def test_a_block_computes_its_formulas(target: Checkpoint, heads: dict[str, RandomHead], kind: str, name: str) -> None:
    """Also where injected rows come in several parts, and beside another sequence."""
    made = heads[kind]
    head, rng = opened(made, target), np.random.default_rng(4)
    assert head.block is not None
    backend = make_backend(name, head.model, SETTINGS)
    cache = backend.new_cache(2, 64)
    features = rng.standard_normal((2, 7, len(head.layers) * target.config.hidden_size)).astype(np.float32)
    tokens = rng.integers(0, target.config.vocab_size, (2, 5))
    for first, end in ((0, 3), (3, 7)):
        count = end - first
        hidden = backend.project(features[:, first:end].reshape(2 * count, -1), "encode")
        positions = [*range(first, end)] * 2
        backend.inject(ForwardBatch([0] * 2 * count, positions, [0, 1], [0, count, 2 * count], hidden=hidden), cache)
    last = (head.model.config.num_layers - 1,)
    positions = [*range(7, 12)] * 2
    batch = ForwardBatch(tokens.reshape(-1).tolist(), positions, [0, 1], [0, 5, 10], None, None, last, None, head.block.both_ways)
    output = backend.forward(batch, cache)
    for sequence in range(2):
        embedded = head.model.tensors["embed"].rows(tokens[sequence]).astype(np.float64)
        logits, state = block_rows(made, features[sequence].astype(np.float64), embedded, output_of(target))
        rows = slice(5 * sequence, 5 * sequence + 5)
        assert np.abs(output.logits[rows] - logits).max() < 1e-4 * np.abs(logits).max()
        assert head.state_norm is not None
        assert np.abs(head.state_norm.applied(output.hidden[0][rows]) - state).max() < 1e-4 * np.abs(state).max()


@every_backend(("numba", "numpy", "torch"))
def test_a_block_changes_no_answer(target: Checkpoint, heads: dict[str, RandomHead], name: str) -> None:
    some = heads["DSpark of DeepSpec"].path
    specs = [str(made.path) for made in heads.values()]
    if name == "numba":  # other backends are asked for nothing else by these
        specs += [f"draw:{some}", f"ngram@2+{some}@3", f"auto,{some}"]
    check_answers(target, name, specs)


def naive_draft(target: Checkpoint, made: RandomHead, head: Head, tokens: list[int], number: int) -> list[int]:
    """A draft by the formulas alone, from scratch."""
    assert head.block is not None
    skipped = head.block.num_skipped
    embedded = head.model.tensors["embed"].rows([tokens[-1], *[MASK_ID] * (number - 1 + skipped)]).astype(np.float64)
    logits, states = block_rows(made, states_of(target, tokens[:-1], head.layers), embedded, output_of(target))
    ids = head.token_ids if head.token_ids is not None else np.arange(target.config.vocab_size)
    drafted, chance, memory = list[int](), 1.0, np.zeros(RANK)
    for i, (row, state) in enumerate(zip(logits, states, strict=True)):
        before = drafted[-1] if drafted else tokens[-1]
        bias = np.zeros(len(row))
        if "markov_head.markov_w1.weight" in made.arrays:
            bias, memory = markov_bias(made, before, state, memory)
        if i < skipped:
            continue
        if "confidence_head.proj.weight" in made.arrays:
            chance *= accepted_chance(made, before, state)
            if chance < _MIN_CHANCE:
                break
        if "markov_head.markov_w1.weight" in made.arrays:
            likely = np.argsort(row)[-64:]
            drafted.append(int(ids[likely[(row + bias)[likely].argmax()]]))
        else:
            drafted.append(int(ids[row.argmax()]))
    return drafted


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_is_what_the_formulas_say(target: Checkpoint, heads: dict[str, RandomHead], kind: str) -> None:
    made, drafts = heads[kind], []
    with llm_over(target, f"{made.path}@4", "numpy", draft_format="file") as llm:
        (level,) = llm.drafts
        assert isinstance(level, HeadProposer)
        propose = level.propose

        def noted(seqs, limits):  # type: ignore[no-untyped-def]
            found = propose(seqs, limits)
            drafts.extend(
                (seq.tokens[:], min(limit, 4), draft.tokens.tolist())
                for seq, limit, draft in zip(seqs, limits, found, strict=True)
                if len(draft)
            )
            return found

        level.propose = noted  # type: ignore[method-assign]
        llm.generate(PROMPTS, PARAMS)
        llm.generate([[12, 5, 6]], PARAMS)
    assert len(drafts) > 20
    head = opened(made, target)
    for tokens, number, drafted in drafts[::4]:
        assert drafted == naive_draft(target, made, head, tokens, number)


def test_a_draft_is_no_longer_than_the_block(target: Checkpoint, heads: dict[str, RandomHead]) -> None:
    for kind, most in (("DFlash of z-lab", 5), ("DSpark of DeepSpec", 6)):
        with llm_over(target, f"{heads[kind].path}@16") as llm:
            llm.generate(PROMPTS, PARAMS)
            (level,) = llm.levels.values()
            assert len(level.num_accepted_tokens_per_pos) <= most
            assert level.num_draft_tokens <= most * level.num_drafts


def test_what_is_not_computed_is_refused(target: Checkpoint, heads: dict[str, RandomHead], tmp_path: Path) -> None:
    def refused(kind: str, message: str, arrays: dict[str, np.ndarray] | None = None, **config: object) -> None:
        made = heads[kind]
        damaged = write_head(tmp_path / "damaged", {**made.config, **config}, {**made.arrays, **(arrays or {})})
        with pytest.raises(CheckpointError, match=message):
            opened(damaged, target)

    one = np.zeros((1, 1), np.float32)
    refused("DFlash of z-lab", "DFlash 2", {"layers.0.mlp_conv.base_kernel": one})
    known = {"target_layer_ids": [0, 2], "mask_token_id": 3}
    for key, value in {
        "use_swa": True,
        "attention_value_scale": 0.5,
        "output_multiplier": 0,
        "final_logit_softcapping": -1,
    }.items():
        refused("DFlash of z-lab", key, dflash_config={key: value, **known})
    refused("DFlash of z-lab", "input_embedding_scale", input_embedding_scale="a")
    refused("DFlash of z-lab", "rope_is_neox_style", rope_is_neox_style=False)
    refused("DFlash of z-lab", "block_size", block_size=1)
    refused("DFlash of z-lab", "inputs of layers", dflash_config={"target_layer_ids": [0, 9], "mask_token_id": 3})
    refused("DFlash of z-lab", "mask_token_id", dflash_config={"target_layer_ids": [0, 2], "mask_token_id": 320})
    refused("DFlash of z-lab", "numbers of 1 layers", dflash_config={"target_layer_ids": [0], "mask_token_id": 3})
    refused("DSpark of DeepSpec", "a part that is not supported", {"markov_head.other.weight": one})
    refused("recurrent DSpark", "joint_proj.weight is", {"markov_head.joint_proj.weight": one})
    refused("DSpark of DeepSpec", "markov_w1 has the shape", {"markov_head.markov_w1.weight": one})
    refused("gated DSpark", "gate_proj.weight is", {"markov_head.gate_proj.weight": one})
    refused("DSpark with confidence", "conf_proj.weight is", {"confidence_head.proj.weight": one})
    (tmp_path / "damaged" / "mask_embedding.pt").write_bytes(b"")
    refused("DFlash of z-lab", "is a pickle")


def test_specs_that_a_block_cannot_do_are_refused(target: Checkpoint, heads: dict[str, RandomHead]) -> None:
    path = heads["DFlash of z-lab"].path
    with pytest.raises(ConfigError, match="makes no trees"):
        llm_over(target, f"tree:{path}")
    with pytest.raises(BackendError, match="use numba, numpy or torch"):
        llm_over(target, f"onnxruntime:{path}")


def test_what_a_gguf_head_asks_for_is_computed_or_refused(target: Checkpoint, heads: dict[str, RandomHead], tmp_path: Path) -> None:
    made = heads["DFlash of z-lab"]
    unchanged = {"attention.value_scale": 0.0, "logit_scale": 0.0, "embedding_scale": 1.0, "rope.dimension_count": 16}
    path = as_gguf(made, tmp_path / "neutral.gguf", **{f"dflash.{key}": value for key, value in unchanged.items()})
    assert opened(RandomHead(path, {}, {}), target).model.config.embedding_scale == 1
    path = as_gguf(made, tmp_path / "scaled.gguf", **{"dflash.attention.scale": 0.5})
    assert opened(RandomHead(path, {}, {}), target).model.config.query_scale == 0.5
    for key, value in {
        "attention.value_scale": 0.5,
        "attention.sliding_window": 16,
        "attention.scale": -1.0,
        "rope.dimension_count": 8,
        "logit_scale": [1.0, 2.0],
    }.items():
        path = as_gguf(made, tmp_path / "refused.gguf", **{f"dflash.{key}": value})
        with pytest.raises(CheckpointError, match=key):
            opened(RandomHead(path, {}, {}), target)
