"""The search finds what trying everything finds, and says truly how far it agrees."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from cpuspec.backends import make_backend
from cpuspec.checkpoints import Checkpoint
from cpuspec.engine.own_weights import skip_layers
from cpuspec.settings import EngineConfig
from tests.backends.models import tiny
from tools.search_layer_skip import least_influential, search, top_tokens

TEXTS = [np.random.default_rng(3 + n).integers(0, 300, 30).tolist() for n in range(2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Checkpoint:
    return tiny(tmp_path_factory, num_layers=5, hidden_size=64, intermediate_size=96, num_heads=2, num_kv_heads=1, head_dim=32)


def _agreement(model: Checkpoint, skipped: tuple[int, ...]) -> float:
    backends = [make_backend("numba", one, EngineConfig(threads=1)) for one in (model, skip_layers(model, skipped))]
    choices = [[top_tokens(backend, part) for part in TEXTS] for backend in backends]
    same = np.equal(*map(np.concatenate, choices)).mean()
    for backend in backends:
        backend.close()
    return float(same)


def test_a_wide_search_finds_the_best_of_all_sets(model: Checkpoint) -> None:
    tried: list[int] = []
    found = search(model, TEXTS, 2, candidates=4, beam=10, on_progress=tried.append)
    assert tried == list(range(1, 4 + 6 + 1))
    for size, (layers, agreement) in enumerate(found, 1):
        every = {some: _agreement(model, some) for some in combinations(range(1, 5), size)}
        assert agreement == every[layers] == max(every.values())
        assert min(every.values()) < agreement


def test_the_layer_that_adds_nothing_has_the_least_influence(model: Checkpoint) -> None:
    silent = {f"layers.3.{part}": np.zeros_like(model.tensors[f"layers.3.{part}"].data) for part in ("o", "down")}
    tensors = {name: replace(t, data=silent[name]) if name in silent else t for name, t in model.tensors.items()}
    backend = make_backend("numba", replace(model, tensors=tensors), EngineConfig(threads=1))
    order = least_influential(backend, TEXTS)
    assert order[0] == 3
    assert sorted(order) == [1, 2, 3, 4]
    backend.close()
