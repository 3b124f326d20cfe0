"""DFlash and DSpark heads: read as published, equal to their formulas on every backend, and drafts of theirs change no answer."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cpuspec import LLM, SamplingParams
from cpuspec.backends import make_backend
from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.heads import Head, find_reader
from cpuspec.config import EngineConfig
from cpuspec.errors import BackendError, CheckpointError, ConfigError
from cpuspec.model.batch import ForwardBatch
from cpuspec.speculation.drafters.blocks import _MIN_CHANCE
from cpuspec.speculation.drafters.heads import HeadProposer
from tests.backends.models import every_backend, tiny
from tests.block_heads import MASK_ID, accepted_chance, as_gguf, block_rows, make_block_head, markov_bias
from tests.heads import RandomHead, write_head

SETTINGS = EngineConfig(threads=1, max_rows=64, kv_format="f32", keep_packed=False, prompt_rows=4, head_format="file")
SMALL = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_layers": 4, "vocab_size": 320}
KINDS = {
    "DFlash of z-lab": {},
    "DFlash of speculators": {"layout": "speculators", "num_drafted": 96},
    "causal DFlash": {"causal": True},
    "DSpark of DeepSpec": {"markov": "vanilla"},
    "DSpark of speculators": {"layout": "speculators", "markov": "vanilla", "num_drafted": 96},
    "gated DSpark": {"markov": "gated"},
    "DSpark with confidence": {"markov": "vanilla", "confidence": "markov"},
    "DSpark with confidence of the state": {"markov": "vanilla", "confidence": "state"},
}
PROMPTS = [[7, 8, 9], [5, 6, 7, 8, 9, 10] * 6, [11, 5, 6, 7, 5, 6]]
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny(tmp_path_factory, weight_format="f32", **SMALL)


@pytest.fixture(scope="module")
def heads(target: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RandomHead]:
    directory = tmp_path_factory.mktemp("heads")
    return {kind: make_block_head(directory / str(i), target.config, **KINDS[kind]) for i, kind in enumerate(KINDS)}


def opened(head: RandomHead, target: Checkpoint) -> Head:
    found = find_reader(head.path)
    assert found, "a reader knows the layout"
    return found[0].read(found[1], target)


def output_of(target: Checkpoint) -> np.ndarray:
    return target.tensors["embed" if target.config.tied_embeddings else "output"].dequantize()


@every_backend(("numba", "numpy", "torch"))
@pytest.mark.parametrize("kind", ["DFlash of z-lab", "DFlash of speculators", "causal DFlash"])
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


def llm_over(target: Checkpoint, spec: str, backend: str = "numba", **settings: object) -> LLM:
    return LLM(target, spec, backend, settings=replace(SETTINGS, **settings))  # type: ignore[arg-type]


@every_backend(("numba", "numpy", "torch"))
def test_a_block_changes_no_answer(target: Checkpoint, heads: dict[str, RandomHead], name: str) -> None:
    params = [PARAMS, SAMPLED, replace(PARAMS, frequency_penalty=0.7)]
    with llm_over(target, "none", name) as plain:
        wanted = [plain.generate(PROMPTS, one) for one in params]
    specs = [(str(made.path), kind) for kind, made in heads.items()]
    some = heads["DSpark of DeepSpec"].path
    for spec, about in [*specs, (f"draw:{some}", "drawn"), (f"ngram@2+{some}@3", "behind a lookup"), (f"auto,{some}", "planned")]:
        with llm_over(target, spec, name) as llm:
            for one, answers in zip(params, wanted, strict=True):
                if one.greedy or about != "drawn":
                    got = [answer.token_ids for answer in llm.generate(PROMPTS, one)]
                    assert got == [answer.token_ids for answer in answers], about
            if about != "planned":
                assert sum(level.num_draft_tokens for level in llm.levels.values()) > 20, about


def states_of(target: Checkpoint, tokens: list[int], layers: tuple[int, ...]) -> np.ndarray:
    """The target's outputs of these layers, side by side, of all tokens, from scratch."""
    backend = make_backend("numpy", target, SETTINGS)
    batch = ForwardBatch(tokens, list(range(len(tokens))), [0], [0, len(tokens)], None, [0], layers)
    return np.concatenate(backend.forward(batch, backend.new_cache(1, 64)).hidden, axis=1).astype(np.float64)


def naive_draft(target: Checkpoint, made: RandomHead, head: Head, tokens: list[int], number: int) -> list[int]:
    """A draft by the formulas alone, from scratch."""
    assert head.block is not None
    skipped = head.block.num_skipped
    embedded = head.model.tensors["embed"].rows([tokens[-1], *[MASK_ID] * (number - 1 + skipped)]).astype(np.float64)
    logits, states = block_rows(made, states_of(target, tokens[:-1], head.layers), embedded, output_of(target))
    ids = head.token_ids if head.token_ids is not None else np.arange(target.config.vocab_size)
    drafted, chance = list[int](), 1.0
    for row, state in zip(logits[skipped:], states[skipped:], strict=True):
        before = drafted[-1] if drafted else tokens[-1]
        if "confidence_head.proj.weight" in made.arrays:
            chance *= accepted_chance(made, before, state)
            if chance < _MIN_CHANCE:
                break
        if "markov_head.markov_w1.weight" in made.arrays:
            likely = np.argsort(row)[-64:]
            bias = markov_bias(made, before, state)
            drafted.append(int(ids[likely[(row + bias)[likely].argmax()]]))
        else:
            drafted.append(int(ids[row.argmax()]))
    return drafted


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_is_what_the_formulas_say(target: Checkpoint, heads: dict[str, RandomHead], kind: str) -> None:
    made, drafts = heads[kind], []
    with llm_over(target, f"{made.path}@4", "numpy") as llm:
        (level,) = llm._drafts
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
    refused("DFlash of z-lab", "use_swa", dflash_config={"use_swa": True, "target_layer_ids": [0, 2], "mask_token_id": 3})
    refused("DFlash of z-lab", "interleaved", rope_is_neox_style=False)
    refused("DFlash of z-lab", "block_size", block_size=1)
    refused("DFlash of z-lab", "inputs of layers", dflash_config={"target_layer_ids": [0, 9], "mask_token_id": 3})
    refused("DFlash of z-lab", "mask_token_id", dflash_config={"target_layer_ids": [0, 2], "mask_token_id": 320})
    refused("DFlash of z-lab", "numbers of 1 layers", dflash_config={"target_layer_ids": [0], "mask_token_id": 3})
    refused("DSpark of DeepSpec", "recurrent", {"markov_head.joint_proj.weight": one})
    refused("DSpark of DeepSpec", "markov_w1 has the shape", {"markov_head.markov_w1.weight": one})
    refused("gated DSpark", "gate_proj.weight is", {"markov_head.gate_proj.weight": one})
    refused("DSpark with confidence", "conf_proj.weight is", {"confidence_head.proj.weight": one})


def test_specs_that_a_block_cannot_do_are_refused(target: Checkpoint, heads: dict[str, RandomHead]) -> None:
    path = heads["DFlash of z-lab"].path
    with pytest.raises(ConfigError, match="makes no trees"):
        llm_over(target, f"tree:{path}")
    with pytest.raises(BackendError, match="use numba, numpy or torch"):
        llm_over(target, f"onnxruntime:{path}")


# llama.cpp's converter writes no gated Markov heads.
IN_GGUF = [kind for kind in KINDS if KINDS[kind].get("layout") != "speculators" and kind != "gated DSpark"]


@pytest.mark.parametrize("kind", IN_GGUF)
def test_a_gguf_head_is_the_head_that_it_was_made_of(
    target: Checkpoint, heads: dict[str, RandomHead], tmp_path: Path, kind: str
) -> None:
    made = heads[kind]
    ours, theirs = opened(made, target), opened(RandomHead(as_gguf(made, tmp_path / "head.gguf"), {}, {}), target)
    assert ours.block is not None
    assert theirs.block is not None
    for fact in ("method", "layers", "num_tokens", "mask_id"):
        assert getattr(theirs, fact) == getattr(ours, fact), fact
    for fact in ("size", "num_skipped", "both_ways"):
        assert getattr(theirs.block, fact) == getattr(ours.block, fact), fact
    assert theirs.model.tensors.keys() == ours.model.tensors.keys()
    for name, tensor in ours.model.tensors.items():
        assert np.array_equal(tensor.dequantize(), theirs.model.tensors[name].dequantize()), name
    assert replace(theirs.model.config, norm_eps=1e-5, architecture="qwen3") == ours.model.config
    assert (theirs.block.confidence is None) == (ours.block.confidence is None)
    if ours.block.confidence is not None:
        assert np.array_equal(theirs.block.confidence, ours.block.confidence)
        assert theirs.block.confidence_bias == ours.block.confidence_bias
    if ours.block.markov:
        assert theirs.block.markov is not None
        assert np.array_equal(theirs.block.markov.w2.dequantize(), ours.block.markov.w2.dequantize())
