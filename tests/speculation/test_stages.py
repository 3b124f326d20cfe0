"""Medusa heads and MLP speculators: read as published, equal to their formulas on every backend, and drafts change no answer."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cpuspec.backends import make_backend
from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.heads import Head
from cpuspec.errors import BackendError, CheckpointError
from cpuspec.speculation.stage_context import StageContext, _gelu
from tests.backends.models import every_backend, tiny
from tests.heads import RandomHead, opened, output_of, states_of, write_head
from tests.speculation.head_runs import (
    PARAMS,
    PROMPTS,
    SETTINGS,
    SMALL,
    check_answers,
    check_company,
    llm_over,
    recorded,
)
from tests.stage_heads import make_medusa, make_mlp_speculator, medusa_rows, mlp_rows

MEDUSA: dict[str, dict[str, Any]] = {
    "original": {},
    "two blocks": {"num_layers": 2, "prefix": "medusa_head."},
    "no blocks": {"num_layers": 0},
    "the target's output": {"own_output": False},
    "vLLM": {"layout": "vllm"},
    "vLLM with biases": {"layout": "vllm", "medusa_fc_bias": True, "prefix": "medusa_heads."},
    "truncated vLLM": {"layout": "vllm", "num_drafted": 96},
}
MLP: dict[str, dict[str, Any]] = {
    "of fms": {},
    "without a prefix": {"prefix": ""},
    "other inner size": {"inner_dim": 96},
    "tied": {"tied": True, "inner_dim": 96, "num_stages": 4},
    "scaled input": {"scale_input": True},
}


@pytest.fixture(scope="module")
def heads(target: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RandomHead]:
    directory = tmp_path_factory.mktemp("heads")
    made = {f"Medusa, {kind}": make_medusa(directory / f"a{i}", target.config, **MEDUSA[kind]) for i, kind in enumerate(MEDUSA)}
    return made | {
        f"MLP, {kind}": make_mlp_speculator(directory / f"b{i}", target.config, **MLP[kind]) for i, kind in enumerate(MLP)
    }


KINDS = [*(f"Medusa, {kind}" for kind in MEDUSA), *(f"MLP, {kind}" for kind in MLP)]


def rows_of(made: RandomHead, states: np.ndarray, tokens: np.ndarray, output: np.ndarray) -> list[np.ndarray]:
    return mlp_rows(made, states, tokens) if "n_predict" in made.config else medusa_rows(made, states, output)


@every_backend(("numba", "numpy", "torch"))
@pytest.mark.parametrize("kind", KINDS)
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
    for number, wanted in enumerate(rows_of(made, normed, tokens, output_of(target))):
        states = context.advanced(number, states, tokens[:, number].tolist())
        logits = context.logits(number, states)
        assert np.abs(logits - wanted).max() < 1e-4 * np.abs(wanted).max()
    if "token_map" in made.arrays:
        assert np.array_equal(head.token_ids, made.arrays["token_map"])


def test_gelu_is_that_of_the_error_function() -> None:
    from math import erf

    x = np.linspace(-9, 9, 4001, dtype=np.float32)
    assert np.abs(_gelu(x) - [value / 2 * (1 + erf(value / 2**0.5)) for value in x.tolist()]).max() < 1e-6


def test_matrices_that_all_stages_have_are_there_once(target: Checkpoint, heads: dict[str, RandomHead]) -> None:
    shared = opened(heads["Medusa, the target's output"], target).model
    assert shared.tensors["output"] is target.tensors["embed" if target.config.tied_embeddings else "output"]
    tied = opened(heads["MLP, tied"], target)
    assert {stage.output for stage in tied.stages} == {"output"}
    assert sum(name.startswith("states.") for name in tied.model.tensors) == 2


@every_backend(("numba", "numpy", "torch"))
def test_stages_change_no_answer(target: Checkpoint, heads: dict[str, RandomHead], name: str) -> None:
    medusa, mlp = heads["Medusa, truncated vLLM"].path, heads["MLP, tied"].path
    specs = [f"{medusa}@2", f"{mlp}@2+ngram@2", f"tree:{medusa}@9", f"tree:{mlp}@9"]
    if name == "numba":  # other backends are asked for nothing else by these
        for one in (medusa, mlp):
            specs += [f"draw:{one}", f"ngram@2+{one}", f"auto,{one}"]
    check_answers(target, name, specs)


def naive_chain(target: Checkpoint, made: RandomHead, head: Head, tokens: list[int], number: int) -> list[int]:
    """By the formulas alone, from the target's state of the token before the last."""
    state = head.feature_norms[0].applied(states_of(target, tokens[:-1], head.layers)[-1:].astype(np.float32)).astype(np.float64)
    ids = head.token_ids if head.token_ids is not None else np.arange(target.config.vocab_size)
    drafted: list[int] = []
    while len(drafted) < number:
        before = np.array([[*tokens[-1:], *drafted] + [0] * len(head.stages)])[:, : len(head.stages)]
        drafted.append(int(ids[rows_of(made, state, before, output_of(target))[len(drafted)].argmax()]))
    return drafted


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_is_what_the_formulas_say(target: Checkpoint, heads: dict[str, RandomHead], kind: str) -> None:
    made = heads[kind]
    head = opened(made, target)
    with llm_over(target, str(made.path), "numpy", draft_format="file") as llm:
        notes = recorded(llm)
        llm.generate(PROMPTS, PARAMS)
        drafts = [(tokens, draft.tokens.tolist()) for tokens, draft in notes.drafts if len(draft) == len(head.stages)]
    assert len(drafts) > 30
    for tokens, drafted in drafts[::6]:
        assert drafted == naive_chain(target, made, head, tokens, len(drafted))


@pytest.mark.parametrize("kind", ["Medusa, original", "MLP, other inner size"])
def test_a_tree_has_the_likeliest_paths(target: Checkpoint, heads: dict[str, RandomHead], kind: str) -> None:
    """Of all paths of the four likeliest tokens at each depth, as the formulas weigh them."""
    made = heads[kind]
    head = opened(made, target)
    with llm_over(target, f"tree:{made.path}@6", "numpy", draft_format="file") as llm:
        notes = recorded(llm)
        llm.generate(PROMPTS, PARAMS)
    drafts = [(tokens, draft) for tokens, draft in notes.drafts if len(draft) == 6]
    assert any(not draft.is_chain for _, draft in drafts)
    for tokens, draft in drafts[::9]:
        state = head.feature_norms[0].applied(states_of(target, tokens[:-1], head.layers)[-1:].astype(np.float32))
        likely: dict[tuple[int, ...], float] = {}
        frontier: dict[tuple[int, ...], float] = {(): 1.0}
        for depth in range(len(head.stages)):
            found: dict[tuple[int, ...], float] = {}
            for path, weight in frontier.items():
                before = np.array([[tokens[-1], *path, 0, 0, 0]])[:, : len(head.stages)]
                row = rows_of(made, state.astype(np.float64), before, output_of(target))[depth][0]
                chances = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
                found |= {(*path, int(token)): weight * chances[token] for token in np.argsort(-row)[:4]}
            likely |= found
            kept = sorted(likely, key=lambda path: -likely[path])[:6]
            frontier = {path: likely[path] for path in sorted(found.keys() & set(kept), key=lambda path: -found[path])[:4]}
        wanted = sorted(likely, key=lambda path: -likely[path])[:6]
        assert {tuple(draft.tokens_to(node)) for node in range(6)} == set(wanted)


@pytest.mark.parametrize("spec", ["{}", "tree:{}@7"])
@pytest.mark.parametrize("kind", ["Medusa, original", "MLP, tied"])
def test_a_draft_does_not_depend_on_its_batch(target: Checkpoint, heads: dict[str, RandomHead], kind: str, spec: str) -> None:
    check_company(target, spec.format(heads[kind].path))


# --------------------------------------------------------------------------------------------------------------- what does not fit


def test_a_head_of_another_model_is_refused_with_what_was_got_and_wanted(
    target: Checkpoint, heads: dict[str, RandomHead], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def refused(config: Mapping[str, Any], arrays: Mapping[str, np.ndarray], message: str, to: Checkpoint = target) -> None:
        made = write_head(tmp_path / "damaged", config, arrays)
        with pytest.raises(CheckpointError, match=message):
            opened(made, to)

    wide = tiny(tmp_path_factory, weight_format="f32", **{**SMALL, "hidden_size": 96})
    small = tiny(tmp_path_factory, weight_format="f32", **{**SMALL, "vocab_size": 310})
    c, a = heads["Medusa, original"].config, heads["Medusa, original"].arrays
    refused(c, a, r"hidden size.* is 64, and that of .* is 96", wide)
    refused(c, a, "number of drafted tokens is 320, and that of .* is 310", small)
    refused({**c, "medusa_num_heads": 4}, a, r"tensor outputs\.3 \[320, 64\] is missing")
    refused({**c, "medusa_num_heads": 2}, a, r"says 2 heads, .* its tensors are of \[0, 1, 2\]")
    refused({**c, "medusa_num_heads": 1 << 40}, a, "wanted 1 to 32")
    refused({**c, "medusa_num_layers": 2}, a, "says 2 blocks a head, and its tensors are of 1")
    refused(c, {**a, "0.2.weight": a["0.1.weight"]}, "is there twice, under another name")
    refused(c, {**a, "0.0.linear.scale": a["0.0.linear.bias"]}, "has no place")
    refused(c, {**a, "1.0.linear.bias": a["1.0.linear.bias"][:-1]}, r"blocks\.1\.0_bias has the shape \[63\], wanted \[64\]")
    refused(c, {name: array for name, array in a.items() if name != "1.1.weight"}, r"outputs\.1 \[320, 64\] is missing")
    refused({**c, "logit_scale": 0.5}, a, "logit_scale is 0.5, wanted 1")
    c, a = heads["Medusa, truncated vLLM"].config, heads["Medusa, truncated vLLM"].arrays
    refused(c, {**a, "token_map": a["token_map"] + 300}, "token_map gives ids from")
    refused(c, {**a, "token_map": a["token_map"][:50]}, "number of drafted tokens is 96, and that of .* is 50")
    c, a = heads["MLP, of fms"].config, heads["MLP, of fms"].arrays
    refused(c, a, "hidden size is 64, and that of .* is 96", wide)
    refused(c, a, "vocabulary is 320, and that of .* is 310", small)
    refused({**c, "n_predict": 4}, a, r"tensor emb\.3\.weight is missing")
    refused({**c, "n_predict": -1}, a, "n_predict is -1, wanted a number from 1 to 32")
    refused({**c, "inner_dim": -5}, a, "inner_dim is -5, wanted")
    refused({**c, "inner_dim": 1 << 30}, a, "has the shape")
    refused({**c, "method": "sum_lstm"}, a, "method is 'sum_lstm', wanted sum_rnn")
    refused(c, {**a, "speculator.gate.0.weight": a["speculator.proj.0.weight"]}, "has no place in an MLP speculator")
    refused(c, {**a, "speculator.ln.1.bias": a["speculator.ln.1.bias"][:3]}, r"ln\.1\.bias is .* \[3\], wanted 64 numbers")
    refused(c, {**a, "speculator.head.2.weight": a["speculator.head.2.weight"][:9]}, r"outputs\.2 has the shape \[9, 64\]")


def test_heads_of_medusa_may_lie_in_a_file_of_their_own_and_pickles_are_never_read(
    target: Checkpoint, heads: dict[str, RandomHead], tmp_path: Path
) -> None:
    made = heads["Medusa, original"]
    (tmp_path / "config.json").write_text(json.dumps(made.config))
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(CheckpointError, match="a pickle, which can run code and is never read; convert it"):
        opened(replace(made, path=tmp_path), target)
    save_file(load_file(made.path / "model.safetensors"), tmp_path / "medusa_lm_head.safetensors")
    assert len(opened(replace(made, path=tmp_path), target).stages) == 3


def test_the_line_that_converts_a_pickle_does(target: Checkpoint, heads: dict[str, RandomHead], tmp_path: Path) -> None:
    torch, made = pytest.importorskip("torch"), heads["Medusa, two blocks"]
    (tmp_path / "config.json").write_text(json.dumps(made.config))
    torch.save({name: torch.from_numpy(array) for name, array in made.arrays.items()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError) as refused:
        opened(replace(made, path=tmp_path), target)
    line = re.search(r'python -c "(.+)"', str(refused.value))
    assert line
    subprocess.run([sys.executable, "-c", line[1]], cwd=tmp_path, check=True)
    ours, theirs = opened(replace(made, path=tmp_path), target), opened(made, target)
    for name, tensor in theirs.model.tensors.items():
        assert np.array_equal(tensor.dequantize(), ours.model.tensors[name].dequantize()), name


def test_a_graph_engine_refuses_stages(target: Checkpoint, heads: dict[str, RandomHead]) -> None:
    pytest.importorskip("onnxruntime")
    with pytest.raises(BackendError, match="use numba, numpy or torch"):
        llm_over(target, f"onnxruntime:{heads['MLP, tied'].path}")
