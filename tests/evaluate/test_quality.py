"""Quality figures against their definitions, on models small enough to compute them by hand."""

import numpy as np
import pytest

from cpuspec.backends import make_backend
from cpuspec.backends.numpy_backend import NumpyBackend
from cpuspec.errors import ConfigError
from cpuspec.evaluate.quality import compare_backends, logits_of
from cpuspec.settings import EngineConfig
from tests.backends.models import tiny

TOKENS = np.random.default_rng(0).integers(0, 300, 30).tolist()


@pytest.fixture(scope="module")
def backends(tmp_path_factory):
    """A model, a coarser copy of it, and the copy's compiled twin."""
    fine, coarse = (tiny(tmp_path_factory, weight_format=name) for name in ("f32", "q4_0"))
    fast = make_backend("numba", coarse, EngineConfig(max_rows=7, threads=1))
    yield NumpyBackend(fine, EngineConfig(max_rows=7)), NumpyBackend(coarse, EngineConfig(max_rows=7)), fast
    fast.close()


def test_figures_are_what_their_definitions_say(backends) -> None:
    fine, coarse, _ = backends
    quality = compare_backends(fine, coarse, TOKENS)
    probs = []
    for backend in (fine, coarse):
        logits = np.concatenate(list(logits_of(backend, TOKENS, 7))).astype(np.float64)
        probs.append(np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True))
    r, o = probs
    kl = (r * np.log(r / o)).sum(axis=1)
    rows, following = np.arange(29), TOKENS[1:]
    assert quality.num_tokens == 30
    assert quality.kl_mean == pytest.approx(kl.mean())
    assert quality.kl_max == pytest.approx(kl.max())
    assert quality.same_top == pytest.approx((r.argmax(axis=1) == o.argmax(axis=1)).mean())
    assert quality.reference_perplexity == pytest.approx(np.exp(-np.log(r[rows, following]).mean()))
    assert quality.perplexity == pytest.approx(np.exp(-np.log(o[rows, following]).mean()))
    assert quality.kl_mean > 1e-3
    tops = [np.argsort(-one, axis=1, kind="stable")[:, :10].tolist() for one in probs]
    overlaps = [len({*a} & {*b}) / 10 for a, b in zip(*tops, strict=True)]
    assert quality.top_overlap == pytest.approx(np.mean(overlaps))
    assert compare_backends(fine, fine, TOKENS).top_overlap == 1


def test_a_backend_agrees_with_itself_and_the_compiled_one_nearly(backends) -> None:
    fine, coarse, fast = backends
    assert compare_backends(coarse, coarse, TOKENS).kl_mean == 0
    assert compare_backends(coarse, fast, TOKENS).kl_mean < compare_backends(fine, coarse, TOKENS).kl_mean / 10


def test_one_token_is_not_a_text(backends) -> None:
    with pytest.raises(ConfigError, match="two tokens"):
        compare_backends(backends[0], backends[0], [1])
