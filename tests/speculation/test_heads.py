"""Trained heads: read as published, equal to their formulas on every backend, and drafts of theirs change no answer."""

from pathlib import Path

import numpy as np
import pytest

from cpuspec.backends import make_backend
from cpuspec.checkpoints import Checkpoint
from cpuspec.checkpoints.heads import Head, find_reader
from cpuspec.config import EngineConfig
from cpuspec.model.batch import ForwardBatch
from tests.backends.models import every_backend, tiny
from tests.heads import RandomHead, eagle1_rows, eagle3_encoded, eagle3_rows, make_eagle1, make_eagle3

SETTINGS = EngineConfig(threads=1, max_rows=64, kv_format="f32", keep_packed=False)
SMALL = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_layers": 4, "vocab_size": 320}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny(tmp_path_factory, weight_format="f32", **SMALL)


EAGLE3 = {
    "original": {},
    "speculators": {"layout": "speculators"},
    "five layers read": {"layers": (1, 2, 3, 4, 1)},
    "own embedding": {"own_embedding": True},
    "the target's output": {"own_output": False},
    "normed residual": {"layout": "speculators", "norm_before_residual": True},
    "norm before fc": {"layout": "speculators", "norm_before_fc": True},
    "norms of layers and of the output": {"layout": "speculators", "fc_norm": True, "norm_output": True},
    "two layers": {"layout": "speculators", "num_layers": 2},
    "P-EAGLE": {"layout": "speculators", "num_layers": 2, "mask_id": 300},
}


def opened(head: RandomHead, target: Checkpoint) -> Head:
    found = find_reader(head.path)
    assert found, "a reader knows the layout"
    return found[0].read(found[1], target)


def output_of(target: Checkpoint) -> np.ndarray:
    return target.tensors["embed" if target.config.tied_embeddings else "output"].dequantize()


def rows_of(backend, head: Head, tokens: list[int], hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[no-untyped-def]
    last = head.model.config.num_layers - 1
    positions = list(range(len(tokens)))
    batch = ForwardBatch(tokens, positions, [0], [0, len(tokens)], None, None, (last,), hidden.astype(np.float32))
    output = backend.forward(batch, backend.new_cache(1, 64))
    states = output.hidden[0]
    return output.logits, head.state_norm.applied(states) if head.state_norm else states


@every_backend(("numba", "numpy", "torch", "onnxruntime"))
@pytest.mark.parametrize("kind", EAGLE3)
def test_an_eagle3_head_computes_its_formulas(target: Checkpoint, tmp_path: Path, kind: str, name: str) -> None:
    made = make_eagle3(tmp_path / "head", target.config, **EAGLE3[kind])
    head = opened(made, target)
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, target.config.vocab_size, 11)
    features = rng.standard_normal((11, len(head.layers) * target.config.hidden_size))
    backend = make_backend(name, head.model, SETTINGS)
    given = features.astype(np.float32)
    for norm in head.feature_norms:
        given = norm.applied(given)
    encoded = backend.encode(given)
    wanted = eagle3_encoded(made, features)
    assert np.abs(encoded - wanted).max() < 1e-4 * np.abs(wanted).max()
    embedded = head.model.tensors["embed"].rows(tokens).astype(np.float64)
    wanted_logits, wanted_hidden = eagle3_rows(made, embedded, wanted, np.arange(11), output_of(target))
    logits, hidden = rows_of(backend, head, tokens.tolist(), encoded)
    assert np.abs(logits - wanted_logits).max() < 1e-4 * np.abs(wanted_logits).max()
    assert np.abs(hidden - wanted_hidden).max() < 1e-4 * np.abs(wanted_hidden).max()


@every_backend(("numba", "numpy", "torch", "onnxruntime"))
@pytest.mark.parametrize("bias", [False, True])
def test_an_eagle1_head_computes_its_formulas(target: Checkpoint, tmp_path: Path, bias: bool, name: str) -> None:
    made = make_eagle1(tmp_path / "head", target.config, bias=bias)
    head = opened(made, target)
    rng = np.random.default_rng(4)
    tokens, hidden = rng.integers(0, target.config.vocab_size, 11), rng.standard_normal((11, target.config.hidden_size))
    embedded = made.arrays["embed_tokens.weight"][tokens].astype(np.float64)
    wanted_logits, wanted_hidden = eagle1_rows(made, embedded, hidden, np.arange(11), output_of(target))
    logits, states = rows_of(make_backend(name, head.model, SETTINGS), head, tokens.tolist(), hidden)
    assert np.abs(logits - wanted_logits).max() < 1e-4 * np.abs(wanted_logits).max()
    assert np.abs(states - wanted_hidden).max() < 1e-4 * np.abs(wanted_hidden).max()
