"""Layers with a convolution or a state: each backend means what the reference means, a state is truncated by setting a length, and
compiled rows have the same bits whatever they are fed with.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from cpuspec.backends import Backend, make_backend
from cpuspec.checkpoints import Checkpoint
from cpuspec.config import EngineConfig
from cpuspec.errors import BackendError
from cpuspec.model.cache import KEPT_ROWS
from tests.backends.models import RECURRENT, every_backend, forward, tiny

TOKENS = np.random.default_rng(1).integers(0, 384, 200).tolist()
FORMATS = ("f32", "q4_0")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Checkpoint]:
    return {
        (name, weight_format): tiny(tmp_path_factory, weight_format=weight_format, **options)
        for name, options in RECURRENT.items()
        for weight_format in FORMATS
    }


def _backend(checkpoint: Checkpoint, name: str = "numba", threads: int = 1) -> Backend:
    return make_backend(name, checkpoint, EngineConfig(kv_format="f32", threads=threads, keep_packed=False))


def _fed(backend: Backend, sizes: list[int], tokens: list[int] = TOKENS) -> np.ndarray:
    cache, starts = backend.new_cache(1, 256), np.cumsum([0, *sizes])
    return np.concatenate([forward(backend, cache, {0: tokens[a:b]}).logits.copy() for a, b in pairwise(starts.tolist())])


@pytest.mark.parametrize("model", RECURRENT)
@every_backend()
def test_each_family_means_what_the_reference_means(checkpoints, model: str, name: str) -> None:  # type: ignore[no-untyped-def]
    checkpoint = checkpoints[model, "f32"]
    if name in ("onnxruntime", "openvino"):
        with pytest.raises(
            BackendError, match=r"layer 0 has a (short convolution|state of Mamba-2), which this graph cannot compute"
        ):
            _backend(checkpoint, name)
        return
    reference = make_backend("numpy", checkpoint, EngineConfig(kv_format="f32"))
    wanted, backend = _fed(reference, [150]), _backend(checkpoint, name)
    for sizes in ([150], [1, 70, 2, 64, 13]):
        assert np.abs(_fed(backend, sizes) - wanted).max() < 1e-4 * max(1, np.abs(wanted).max())
    backend.close()


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("model", RECURRENT)
def test_a_row_does_not_depend_on_its_batch_its_chunk_or_on_threads(checkpoints, model: str, weight_format: str) -> None:  # type: ignore[no-untyped-def]
    checkpoint, rng = checkpoints[model, weight_format], np.random.default_rng(2)
    one, two = _backend(checkpoint), _backend(checkpoint, threads=2)
    alone = _fed(one, [1] * 200)
    for backend, sizes in ((one, [7] * 28 + [4]), (two, [64] * 3 + [8]), (two, [200]), (two, [63, 65, 1, 71])):
        assert np.array_equal(_fed(backend, sizes), alone)
    cache = two.new_cache(4, 256)
    for _ in range(20):  # sequences that join and leave, of other lengths
        rows = {slot: TOKENS[cache.lengths[slot] :][: int(rng.integers(1, 12))] for slot in range(4) if rng.random() < 0.6}
        starts = [cache.lengths[slot] for slot in rows]
        got = forward(two, cache, rows).logits if rows else alone[:0]
        wanted = [alone[start : start + len(some)] for start, some in zip(starts, rows.values(), strict=True)]
        assert np.array_equal(got, np.concatenate([alone[:0], *wanted]))
        cache.truncate(3, 0)
    one.close()
    two.close()


def _rejected(rng: np.random.Generator) -> Iterator[tuple[int, list[int], int]]:
    """Positions, rows that go on there and end in wrong ones, and how many are right."""
    position = 0
    while position < 180:
        kept, wrong = int(rng.integers(1, 12)), int(rng.integers(0, 8))
        yield position, TOKENS[position : position + kept] + rng.integers(0, 384, wrong).tolist(), kept
        position += kept


@pytest.mark.parametrize("name", ["numba", "numpy", "torch"])
@pytest.mark.parametrize("model", RECURRENT)
def test_a_rejected_draft_leaves_nothing_behind(checkpoints, model: str, name: str) -> None:  # type: ignore[no-untyped-def]
    backend = _backend(checkpoints[model, "f32"], name)
    alone, cache = _fed(backend, [1] * 192), backend.new_cache(2, 256)
    for position, rows, kept in _rejected(np.random.default_rng(3)):
        got = forward(backend, cache, {1: rows}).logits
        wanted = alone[position : position + kept]
        assert np.abs(got[:kept] - wanted).max() < 1e-4 * np.abs(alone).max()
        assert name != "numba" or np.array_equal(got[:kept], wanted)
        assert cache.truncate(1, position + kept) == position + kept
    backend.close()


@pytest.mark.parametrize("model", RECURRENT)
def test_rows_before_a_forward_can_be_taken_back_and_a_copy_goes_on_alike(checkpoints, model: str) -> None:  # type: ignore[no-untyped-def]
    backend = _backend(checkpoints[model, "f32"])
    alone, cache = _fed(backend, [1] * 120), backend.new_cache(2, 256)
    for token in TOKENS[:100]:
        forward(backend, cache, {0: [token]})
    assert cache.truncate(0, 100 - KEPT_ROWS) == 100 - KEPT_ROWS
    assert cache.copy(0, 1, 100 - KEPT_ROWS) == 100 - KEPT_ROWS
    assert np.array_equal(forward(backend, cache, {1: TOKENS[100 - KEPT_ROWS : 120]}).logits, alone[100 - KEPT_ROWS :])
    assert np.array_equal(forward(backend, cache, {0: TOKENS[100 - KEPT_ROWS : 110]}).logits, alone[100 - KEPT_ROWS : 110])
    assert cache.truncate(0, 20) == 0, "its state is nowhere: the caller feeds the tokens again"
    assert np.array_equal(forward(backend, cache, {0: TOKENS[:30]}).logits, alone[:30])
    backend.close()


def test_a_wrong_state_would_be_seen(checkpoints) -> None:  # type: ignore[no-untyped-def]
    """A row folded once too often changes what follows: the comparisons above look at something."""
    checkpoint = checkpoints["mamba2", "f32"]
    backend = _backend(checkpoint, "numpy")
    alone, cache = _fed(backend, [40]), backend.new_cache(1, 256)
    forward(backend, cache, {0: TOKENS[:30]})
    state = cache.storage(0).states[0]
    state.begin(30)
    state.state = state.step(state.state, state.records[0])
    assert np.abs(forward(backend, cache, {0: TOKENS[30:40]}).logits - alone[30:]).max() > 1e-3
