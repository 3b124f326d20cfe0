"""Trained heads: equal to their formulas on every backend, and their drafts are those that the formulas give."""

from collections.abc import Callable
from collections.abc import Sequence as Several
from functools import partial
from math import erf
from pathlib import Path

import numpy as np
import pytest

from cpuspec.backends import Backend, make_backend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.heads import Head, own_mtp
from cpuspec.model.batch import ForwardBatch
from cpuspec.speculation.drafters.blocks import _MIN_CHANCE
from cpuspec.speculation.stage_context import StageContext, _gelu
from tests.backends.models import every_backend
from tests.block_heads import MASK_ID, RANK, accepted_chance, block_rows, make_block_head, markov_bias
from tests.conformance.harness import SETTINGS, SMALL, llm_over, noted_drafts
from tests.heads import (
    RandomHead,
    add_mtp,
    eagle1_rows,
    eagle3_encoded,
    eagle3_rows,
    make_eagle1,
    make_eagle3,
    mtp_rows,
    opened,
    output_of,
    states_of,
)
from tests.speculation.test_head_files import with_own_layer
from tests.stage_heads import make_medusa, make_mlp_speculator, medusa_rows, mlp_rows
from tools.make_tiny_model import make_tiny_hf

Maker = Callable[..., RandomHead]
SPECULATORS = partial(make_eagle3, layout="speculators")
SCALES = {"input_embedding_scale": 0.5, "output_multiplier": 1.5, "final_logit_softcapping": 2.0}
EAGLES: dict[str, Maker] = {
    "EAGLE-1": make_eagle1,
    "EAGLE-1 without biases": partial(make_eagle1, bias=False),
    "EAGLE-3": make_eagle3,
    "EAGLE-3 of speculators": SPECULATORS,
    "five layers read": partial(make_eagle3, layers=(1, 2, 3, 4, 1)),
    "own embedding": partial(make_eagle3, own_embedding=True),
    "the target's output": partial(make_eagle3, own_output=False),
    "normed residual": partial(SPECULATORS, norm_before_residual=True),
    "norm before fc": partial(SPECULATORS, norm_before_fc=True),
    "norm before fc, said below": partial(make_eagle3, norm_before_fc=True),
    "layers counted by outputs": partial(make_eagle3, counts_outputs=True),
    "norms of layers and of the output": partial(SPECULATORS, fc_norm=True, norm_output=True),
    "two layers": partial(SPECULATORS, num_layers=2),
    "P-EAGLE": partial(SPECULATORS, num_layers=2, mask_id=300),
    "P-EAGLE, named as for vLLM": partial(make_eagle3, num_layers=2, mask_id=300, mask_name="ptd_token_id"),
}
BLOCKS: dict[str, Maker] = {
    "DFlash of z-lab": make_block_head,
    "DFlash of speculators": partial(make_block_head, layout="speculators", num_drafted=96),
    "causal DFlash": partial(make_block_head, causal=True),
    "scaled DFlash": partial(make_block_head, scales=SCALES),
    "DSpark of DeepSpec": partial(make_block_head, markov="vanilla"),
    "DSpark of speculators": partial(make_block_head, layout="speculators", markov="vanilla", num_drafted=96),
    "gated DSpark": partial(make_block_head, markov="gated"),
    "recurrent DSpark": partial(make_block_head, markov="rnn", confidence="markov"),
    "recurrent DSpark that skips its anchor": partial(
        make_block_head, layout="speculators", markov="rnn", sample_from_anchor=False
    ),
    "DSpark with confidence": partial(make_block_head, markov="vanilla", confidence="markov"),
    "DSpark with confidence of the state": partial(make_block_head, markov="vanilla", confidence="state"),
}
STAGES: dict[str, Maker] = {
    "Medusa": make_medusa,
    "Medusa, two blocks": partial(make_medusa, num_layers=2, prefix="medusa_head."),
    "Medusa, no blocks": partial(make_medusa, num_layers=0),
    "Medusa, the target's output": partial(make_medusa, own_output=False),
    "Medusa of vLLM": partial(make_medusa, layout="vllm"),
    "Medusa of vLLM with biases": partial(make_medusa, layout="vllm", medusa_fc_bias=True, prefix="medusa_heads."),
    "Medusa of vLLM, truncated": partial(make_medusa, layout="vllm", num_drafted=96),
    "MLP of fms": make_mlp_speculator,
    "MLP without a prefix": partial(make_mlp_speculator, prefix=""),
    "MLP, other inner size": partial(make_mlp_speculator, inner_dim=96),
    "MLP, tied": partial(make_mlp_speculator, tied=True, inner_dim=96, num_stages=4),
    "MLP, scaled input": partial(make_mlp_speculator, scale_input=True),
}
LENGTH = 11


@pytest.fixture(scope="module")
def heads(target: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RandomHead]:
    directory = tmp_path_factory.mktemp("heads")
    return {kind: make(directory / str(i), target.config) for i, (kind, make) in enumerate((EAGLES | BLOCKS | STAGES).items())}


def rows_of(backend: Backend, head: Head, tokens: list[int], hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    last = head.model.config.num_layers - 1
    positions = list(range(len(tokens)))
    batch = ForwardBatch(tokens, positions, [0], [0, len(tokens)], None, None, (last,), hidden.astype(np.float32))
    output = backend.forward(batch, backend.new_cache(1, 64))
    states = output.hidden[0]
    return output.logits, head.state_norm.applied(states) if head.state_norm else states


def near(found: Several[np.ndarray], wanted: Several[np.ndarray]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert np.abs(one - other).max() < 1e-4 * np.abs(other).max()


# ----------------------------------------------------------------------------------------------------------------- the formulas


@every_backend(("numba", "numpy", "torch", "onnxruntime"))
@pytest.mark.parametrize("kind", EAGLES)
def test_an_eagle_head_computes_its_formulas(target: Checkpoint, heads: dict[str, RandomHead], kind: str, name: str) -> None:
    made, rng = heads[kind], np.random.default_rng(4)
    head = opened(made, target)
    tokens = rng.integers(0, target.config.vocab_size, LENGTH)
    features, rows = rng.standard_normal((LENGTH, len(head.layers) * target.config.hidden_size)), eagle1_rows
    backend, given = make_backend(name, head.model, SETTINGS), features.astype(np.float32)
    if head.method != "eagle":
        for norm in head.feature_norms:
            given = norm.applied(given)
        given, features, rows = backend.project(given, "encode"), eagle3_encoded(made, features), eagle3_rows
        near([given], [features])
    embedded = head.model.tensors["embed"].rows(tokens).astype(np.float64)
    near(rows_of(backend, head, tokens.tolist(), given), rows(made, embedded, features, output_of(target)))


@every_backend(("numba", "numpy", "torch"))
def test_a_layer_for_multi_token_prediction_computes_its_formulas(tmp_path: Path, name: str) -> None:
    directory = make_tiny_hf(tmp_path / "mimo", context_length=128, tied=False, **SMALL)
    arrays = add_mtp(directory)
    target = open_checkpoint(directory)
    head, c = own_mtp(target), target.config
    assert (head.layers, head.feature_norms) == ((3,), ())
    rng = np.random.default_rng(4)
    tokens, hidden = rng.integers(0, c.vocab_size, LENGTH), rng.standard_normal((LENGTH, c.hidden_size))
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_theta")
    config = dict(zip(names, (c.hidden_size, c.num_heads, c.num_kv_heads, c.norm_eps, c.rope_base), strict=True))
    embedded = target.tensors["embed"].rows(tokens).astype(np.float64)
    rows = rows_of(make_backend(name, head.model, SETTINGS), head, tokens.tolist(), hidden)
    near(rows, mtp_rows(RandomHead(directory, config, arrays), embedded, hidden, output_of(target)))


@every_backend(("numba", "numpy", "torch"))
@pytest.mark.parametrize("kind", list(BLOCKS)[:4])
def test_a_block_computes_its_formulas(target: Checkpoint, heads: dict[str, RandomHead], kind: str, name: str) -> None:
    """Also where injected rows come in several parts, and beside another sequence."""
    made = heads[kind]
    head, rng = opened(made, target), np.random.default_rng(4)
    assert head.block is not None
    assert head.state_norm is not None
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
        rows = slice(5 * sequence, 5 * sequence + 5)
        wanted = block_rows(made, features[sequence].astype(np.float64), embedded, output_of(target))
        near([output.logits[rows], head.state_norm.applied(output.hidden[0][rows])], wanted)


def stage_rows(made: RandomHead, states: np.ndarray, tokens: np.ndarray, output: np.ndarray) -> list[np.ndarray]:
    return mlp_rows(made, states, tokens) if "n_predict" in made.config else medusa_rows(made, states, output)


@every_backend(("numba", "numpy", "torch"))
@pytest.mark.parametrize("kind", STAGES)
def test_stages_compute_their_formulas(target: Checkpoint, heads: dict[str, RandomHead], kind: str, name: str) -> None:
    made = heads[kind]
    head, rng = opened(made, target), np.random.default_rng(4)
    context = StageContext(head, make_backend(name, head.model, SETTINGS), 64)
    raw, tokens = rng.standard_normal((5, 64)), rng.integers(0, 320, (5, len(head.stages)))
    target_norm, *others = head.feature_norms
    normed = target_norm.applied(raw.astype(np.float32)).astype(np.float64)
    states = normed.astype(np.float32)
    for norm in others:
        states = norm.applied(states)
    for number, wanted in enumerate(stage_rows(made, normed, tokens, output_of(target))):
        states = context.advanced(number, states, tokens[:, number].tolist())
        near([context.logits(number, states)], [wanted])
    if "token_map" in made.arrays:
        assert np.array_equal(head.token_ids, made.arrays["token_map"])


def test_gelu_is_that_of_the_error_function() -> None:
    x = np.linspace(-9, 9, 4001, dtype=np.float32)
    assert np.abs(_gelu(x) - [value / 2 * (1 + erf(value / 2**0.5)) for value in x.tolist()]).max() < 1e-6


# ------------------------------------------------------------------------------------------------------------------- the drafts


def naive_draft(target: Checkpoint, made: RandomHead, head: Head, tokens: list[int], number: int) -> list[int]:
    """A draft by the formulas alone, from scratch."""
    make = naive_block if head.block else naive_stages if head.stages else naive_eagle
    return make(target, made, head, tokens, number)


def drafted_ids(target: Checkpoint, head: Head) -> np.ndarray:
    return head.token_ids if head.token_ids is not None else np.arange(target.config.vocab_size)


def naive_eagle(target: Checkpoint, made: RandomHead, head: Head, tokens: list[int], number: int) -> list[int]:
    """Every row is computed again for each token."""
    state, rows = states_of(target, tokens[:-1], head.layers), eagle1_rows
    if head.method == "eagle":
        for norm in head.feature_norms:
            state = norm.applied(state.astype(np.float32)).astype(np.float64)
    else:
        state, rows = eagle3_encoded(made, state), eagle3_rows
    embed, ids, drafted = head.model.tensors["embed"], drafted_ids(target, head), list[int]()
    if head.method == "p-eagle":
        assert head.mask_features is not None
        masks = eagle3_encoded(made, head.mask_features.astype(np.float64)).repeat(number - 1, axis=0)
        embedded = embed.rows([*tokens[1:], *[head.mask_id] * (number - 1)]).astype(np.float64)
        logits, _ = rows(made, embedded, np.concatenate([state, masks]), output_of(target))
        return ids[logits[len(tokens) - 2 :].argmax(-1)].tolist()
    while len(drafted) < number:
        embedded = embed.rows([*tokens[1:], *drafted]).astype(np.float64)
        logits, hidden = rows(made, embedded, state, output_of(target))
        drafted.append(int(ids[logits[-1].argmax()]))
        state = np.concatenate([state, hidden[-1:]])
    return drafted


def naive_block(target: Checkpoint, made: RandomHead, head: Head, tokens: list[int], number: int) -> list[int]:
    assert head.block is not None
    skipped, has_markov = head.block.num_skipped, "markov_head.markov_w1.weight" in made.arrays
    embedded = head.model.tensors["embed"].rows([tokens[-1], *[MASK_ID] * (number - 1 + skipped)]).astype(np.float64)
    logits, states = block_rows(made, states_of(target, tokens[:-1], head.layers), embedded, output_of(target))
    ids, drafted, chance, memory = drafted_ids(target, head), list[int](), 1.0, np.zeros(RANK)
    for i, (row, state) in enumerate(zip(logits, states, strict=True)):
        before = drafted[-1] if drafted else tokens[-1]
        bias = np.zeros(len(row))
        if has_markov:
            bias, memory = markov_bias(made, before, state, memory)
        if i < skipped:
            continue
        if "confidence_head.proj.weight" in made.arrays:
            chance *= accepted_chance(made, before, state)
            if chance < _MIN_CHANCE:
                break
        likely = np.argsort(row)[-64:] if has_markov else np.arange(len(row))
        drafted.append(int(ids[likely[(row + bias)[likely].argmax()]]))
    return drafted


def naive_stages(target: Checkpoint, made: RandomHead, head: Head, tokens: list[int], number: int) -> list[int]:
    state, drafted = last_state(target, head, tokens), list[int]()
    while len(drafted) < min(number, len(head.stages)):
        before = np.array([[tokens[-1], *drafted] + [0] * len(head.stages)])[:, : len(head.stages)]
        row = stage_rows(made, state, before, output_of(target))[len(drafted)]
        drafted.append(int(drafted_ids(target, head)[row.argmax()]))
    return drafted


def last_state(target: Checkpoint, head: Head, tokens: list[int]) -> np.ndarray:
    """The target's state of the token before the last, behind its final norm."""
    state = states_of(target, tokens[:-1], head.layers)[-1:]
    return head.feature_norms[0].applied(state.astype(np.float32)).astype(np.float64)


@pytest.mark.parametrize("kind", ["EAGLE-1", "EAGLE-3", "P-EAGLE", *BLOCKS, *STAGES])
def test_a_draft_is_what_the_formulas_say(target: Checkpoint, heads: dict[str, RandomHead], kind: str) -> None:
    made = heads[kind]
    drafts, head = noted_drafts(target, f"{made.path}@4"), opened(made, target)
    assert len(drafts) > 20
    for tokens, limit, draft in drafts[::5]:
        assert draft.tokens.tolist() == naive_draft(target, made, head, tokens, min(limit, 4))


def test_a_draft_of_the_targets_own_layer_is_what_rows_computed_anew_say(tmp_path: Path) -> None:
    own = open_checkpoint(with_own_layer(tmp_path / "glm", "glm4moe", "gguf"))
    head = own_mtp(own)
    backend, norm = make_backend("numpy", head.model, SETTINGS), head.feature_norms[0]
    drafts = noted_drafts(own, "mtp@3")
    assert len(drafts) > 20
    for tokens, _, draft in drafts[::7]:
        string, hidden = tokens[1:], norm.applied(states_of(own, tokens[:-1], head.layers).astype(np.float32))
        for token in draft.tokens.tolist():
            logits, states = rows_of(backend, head, string, hidden)
            assert int(logits[-1].argmax()) == token
            string, hidden = [*string, token], np.concatenate([hidden, states[-1:]])


def test_a_draft_is_no_longer_than_the_block(target: Checkpoint, heads: dict[str, RandomHead]) -> None:
    for kind, most in (("DFlash of z-lab", 5), ("DSpark of DeepSpec", 6)):
        assert max(len(draft) for _, _, draft in noted_drafts(target, f"{heads[kind].path}@16")) == most


def test_the_likeliest_chain_of_a_tree_is_in_it(target: Checkpoint, heads: dict[str, RandomHead]) -> None:
    made = heads["EAGLE-3"]
    drafts = [(tokens, draft) for tokens, _, draft in noted_drafts(target, f"tree:{made.path}@12") if len(draft) == 12]
    assert any(not draft.is_chain for _, draft in drafts)
    for tokens, draft in drafts[::7]:
        chain, node = [], -1
        while children := [i for i, parent in enumerate(draft.parents.tolist()) if parent == node]:
            node = children[0]
            chain.append(int(draft.tokens[node]))
            assert draft.confidence is not None
            assert draft.confidence[node] == max(draft.confidence[children])
        assert chain == naive_draft(target, made, opened(made, target), tokens, len(chain))


@pytest.mark.parametrize("kind", ["Medusa", "MLP, other inner size"])
def test_a_tree_of_stages_has_the_likeliest_paths(target: Checkpoint, heads: dict[str, RandomHead], kind: str) -> None:
    """Of all paths of the four likeliest tokens at each depth, as the formulas weigh them."""
    made = heads[kind]
    head = opened(made, target)
    drafts = [(tokens, draft) for tokens, _, draft in noted_drafts(target, f"tree:{made.path}@6") if len(draft) == 6]
    assert any(not draft.is_chain for _, draft in drafts)
    for tokens, draft in drafts[::9]:
        state = last_state(target, head, tokens)
        likely: dict[tuple[int, ...], float] = {}
        frontier: dict[tuple[int, ...], float] = {(): 1.0}
        for depth in range(len(head.stages)):
            found: dict[tuple[int, ...], float] = {}
            for path, weight in frontier.items():
                before = np.array([[tokens[-1], *path, 0, 0, 0]])[:, : len(head.stages)]
                row = stage_rows(made, state, before, output_of(target))[depth][0]
                chances = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
                found |= {(*path, int(token)): weight * chances[token] for token in np.argsort(-row)[:4]}
            likely |= found
            kept = sorted(likely, key=lambda path: -likely[path])[:6]
            frontier = {path: likely[path] for path in sorted(found.keys() & set(kept), key=lambda path: -found[path])[:4]}
        wanted = sorted(likely, key=lambda path: -likely[path])[:6]
        assert {tuple(draft.tokens_to(node)) for node in range(6)} == set(wanted)


def test_matrices_are_cast_at_load(target: Checkpoint, heads: dict[str, RandomHead]) -> None:
    sizes = {}
    for format in ("int8", "int4", "file"):
        with llm_over(target, str(heads["EAGLE-3"].path), draft_format=format) as llm:
            memory = llm.memory()[0]
            sizes[format] = memory.weight_bytes - memory.shared_bytes
    assert sizes["int4"] < 0.7 * sizes["int8"] < 0.4 * sizes["file"]


def test_matrices_that_all_stages_have_are_there_once(target: Checkpoint, heads: dict[str, RandomHead]) -> None:
    shared = opened(heads["Medusa, the target's output"], target).model
    assert shared.tensors["output"] is target.tensors["embed" if target.config.tied_embeddings else "output"]
    tied = opened(heads["MLP, tied"], target)
    assert {stage.output for stage in tied.stages} == {"output"}
    assert sum(name.startswith("states.") for name in tied.model.tensors) == 2


def test_layers_that_are_counted_by_outputs_are_the_same(target: Checkpoint, heads: dict[str, RandomHead]) -> None:
    assert opened(heads["layers counted by outputs"], target).layers == opened(heads["EAGLE-3"], target).layers
