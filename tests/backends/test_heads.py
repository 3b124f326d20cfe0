"""A head: a small model of its own that takes the target's hidden states, shares its embedding and output, and drafts for it."""

from dataclasses import replace

import numpy as np
import pytest

from cpuspec.backends import make_backend
from cpuspec.checkpoints import Checkpoint
from cpuspec.config import HeadConfig
from cpuspec.errors import BackendError
from cpuspec.formats import QuantTensor, get_format
from cpuspec.model.batch import F32, ForwardBatch
from cpuspec.settings import EngineConfig
from tests.backends.models import every_backend, tiny

SETTINGS = EngineConfig(threads=1, max_rows=64, kv_format="f32", keep_packed=False)
TOKENS = np.random.default_rng(0).integers(0, 300, 21).tolist()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny(tmp_path_factory, num_layers=3)


@pytest.fixture(scope="module")
def head(target: Checkpoint) -> Checkpoint:
    """The target's first layer behind a random matrix that reads embeddings and hidden states; it shares everything else."""
    c, rng = target.config, np.random.default_rng(3)
    own = {"fuse": 0.05 * rng.standard_normal((c.hidden_size, 2 * c.hidden_size))}
    own |= {name: 1 + 0.2 * rng.standard_normal(c.hidden_size) for name in ("embed_norm", "hidden_norm")}
    shared = {name: t for name, t in target.tensors.items() if not name.startswith(("layers.1.", "layers.2."))}
    encoded = {name: QuantTensor.encode(get_format("f32"), values) for name, values in own.items()}
    return replace(target, config=replace(c, num_layers=1, head=HeadConfig()), tensors={**shared, **encoded})


def _hidden(config) -> F32:
    return np.random.default_rng(7).standard_normal((len(TOKENS), config.hidden_size)).astype(np.float32)


@every_backend(("numba", "numpy", "torch"))
def test_a_head_beside_its_target_has_only_its_own_matrix(target: Checkpoint, head: Checkpoint, name: str) -> None:
    beside = make_backend(name, target, SETTINGS)
    own = make_backend(name, head, SETTINGS, beside)
    assert 0 < own.weight_bytes - own.shared_bytes <= 1.1 * 4 * 2 * head.config.hidden_size**2
    beside.close()


@every_backend()
def test_hidden_states_that_do_not_fit_are_an_error(target: Checkpoint, head: Checkpoint, name: str) -> None:
    hidden = _hidden(head.config)
    backend = make_backend(name, head, SETTINGS)
    for wrong in (hidden[:, :-1], hidden.astype(np.float64), hidden[0]):
        with pytest.raises(BackendError, match="takes hidden states float32"):
            backend.forward(ForwardBatch(TOKENS, list(range(21)), [0], [0, 21], hidden=wrong), backend.new_cache(1, 64))
    with pytest.raises(BackendError, match=r"takes hidden states float32 .*got None"):
        backend.forward(ForwardBatch(TOKENS, list(range(21)), [0], [0, 21]), backend.new_cache(1, 64))
    plain = make_backend(name, target, SETTINGS)
    with pytest.raises(BackendError, match="takes no hidden states"):
        plain.forward(ForwardBatch(TOKENS, list(range(21)), [0], [0, 21], hidden=hidden), plain.new_cache(1, 64))
