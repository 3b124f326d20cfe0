"""Layers with a convolution or a state: a state is truncated by setting a length, and compiled rows have the same bits however the
rows before them came, went and were folded.
"""

from itertools import pairwise

import numpy as np
import pytest

from cpuspec.backends import Backend, make_backend
from cpuspec.checkpoints import Checkpoint
from cpuspec.errors import BackendError
from cpuspec.model.batch import ForwardBatch, ForwardStoppedError
from cpuspec.model.cache import KEPT_ROWS
from cpuspec.settings import EngineConfig
from tests.backends.models import RECURRENT, asked_to_stop, forward, tiny

LENGTH = 150
TEXTS = np.random.default_rng(1).integers(0, 384, (9, LENGTH)).tolist()
every_model = pytest.mark.parametrize("model", RECURRENT)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    return {name: tiny(tmp_path_factory, weight_format="q8_0", **options) for name, options in RECURRENT.items()}


def _backend(checkpoint: Checkpoint, name: str = "numba", threads: int = 1, kv_format: str = "f32") -> Backend:
    return make_backend(name, checkpoint, EngineConfig(kv_format=kv_format, threads=threads, keep_packed=False))


def _fed(backend: Backend, sizes: list[int], tokens: list[int] = TEXTS[0]) -> np.ndarray:
    """Logits of tokens that are fed in parts of these sizes."""
    cache, starts = backend.new_cache(1, 256), np.cumsum([0, *sizes])
    return np.concatenate([forward(backend, cache, {0: tokens[a:b]}).logits.copy() for a, b in pairwise(starts.tolist())])


@pytest.fixture(scope="module")
def decoded(checkpoints: dict[str, Checkpoint]) -> dict[str, list[np.ndarray]]:
    """Of each model the logits of each text, one token of each text at a time."""
    found = {}
    for model, checkpoint in checkpoints.items():
        backend = _backend(checkpoint)
        cache = backend.new_cache(len(TEXTS), 256)
        columns = [dict(enumerate(zip(column, strict=True))) for column in zip(*TEXTS, strict=True)]
        steps = [forward(backend, cache, rows).logits.copy() for rows in columns]
        found[model] = list(np.stack(steps, axis=1))
        backend.close()
    return found


@pytest.mark.parametrize(("model", "kv_format"), [*((model, "f32") for model in RECURRENT), ("lfm2", "int8"), ("qwen35", "int8")])
def test_bits_do_not_depend_on_drafts_or_mates(checkpoints, decoded, model: str, kv_format: str) -> None:  # type: ignore[no-untyped-def]
    """Sequences in random forwards, from 1 to 40 rows of each, of which random ones are wrong drafts and taken back."""
    backend, rng = _backend(checkpoints[model], threads=2, kv_format=kv_format), np.random.default_rng(2)
    wanted = decoded[model] if kv_format == "f32" else [_fed(backend, [LENGTH], text) for text in TEXTS]
    cache, held = backend.new_cache(len(TEXTS), 256), [0] * len(TEXTS)
    for _ in range(60):
        rows, right = {}, {}
        for slot in rng.permutation(len(TEXTS))[: rng.integers(1, 10)].tolist():
            count = int(rng.choice([1, 1, 1, 2, 5, 9, 20, 40]))
            right[slot] = TEXTS[slot][held[slot] :][:count]
            rows[slot] = right[slot] + rng.integers(0, 384, rng.choice([0, 0, 1, 4, 7]) if count < 20 else 0).tolist()
        logits = np.split(forward(backend, cache, rows).logits, np.cumsum([len(some) for some in rows.values()])[:-1])
        for slot, got in zip(rows, logits, strict=True):
            length = held[slot] + len(right[slot])
            assert np.array_equal(got[: len(right[slot])], wanted[slot][held[slot] : length])
            assert cache.truncate(slot, length) == length
            held[slot] = length
            if length > 20 and rng.random() < 0.1:  # a draft model takes back what it drafted token by token
                held[slot] = cache.truncate(slot, length - int(rng.integers(1, 8)))
            if held[slot] >= LENGTH - 8:
                cache.drop(slot)
                held[slot] = 0
    backend.close()


@every_model
def test_rows_before_a_forward_can_be_taken_back_and_a_copy_goes_on_alike(checkpoints, decoded, model: str) -> None:  # type: ignore[no-untyped-def]
    backend, alone = _backend(checkpoints[model]), decoded[model][0]
    cache = backend.new_cache(2, 256)
    for token in TEXTS[0][:100]:
        forward(backend, cache, {0: [token]})
    kept = 100 - KEPT_ROWS
    assert cache.truncate(0, kept) == kept
    assert cache.copy(0, 1, kept) == kept
    assert np.array_equal(forward(backend, cache, {1: TEXTS[0][kept:120]}).logits, alone[kept:120])
    assert np.array_equal(forward(backend, cache, {0: TEXTS[0][kept:110]}).logits, alone[kept:110])
    assert (cache.reachable(0, 20), cache.copy(0, 1, 20), cache.truncate(0, 20), cache.lengths[0]) == (0, 0, 0, 0)
    assert np.array_equal(forward(backend, cache, {0: TEXTS[1][:30]}).logits, decoded[model][1][:30])
    backend.close()


@every_model
def test_a_forward_that_is_stopped_changes_nothing(checkpoints, decoded, model: str) -> None:  # type: ignore[no-untyped-def]
    """At any operation: a thread asks for the end all the time, and each forward ends somewhere else, or not at all."""
    backend, stops = _backend(checkpoints[model]), 0
    cache = backend.new_cache(1, 512)
    forward(backend, cache, {0: TEXTS[0][:30]})
    sizes = [250, 5, 250, 8]  # the short ones seldom take long enough
    while sizes or not stops:
        size, held = sizes.pop() if sizes else 250, cache.lengths[0]
        wrong = ForwardBatch((TEXTS[1] * 2)[:size], list(range(held, held + size)), [0], [0, size], logit_rows=[], stops_early=True)
        for _ in range(10):
            try:
                with asked_to_stop(backend):
                    backend.forward(wrong, cache)
                if cache.truncate(0, held) < held:
                    forward(backend, cache, {0: TEXTS[0][:held]})
            except ForwardStoppedError:
                stops += 1
            assert cache.lengths[0] == cache.reachable(0, held) == held
        assert np.array_equal(forward(backend, cache, {0: TEXTS[0][held : held + 5]}).logits, decoded[model][0][held : held + 5])
    backend.close()


@pytest.mark.parametrize("model", ["mamba2", "qwen35"])
def test_a_wrong_state_would_be_seen(checkpoints, decoded, model: str) -> None:  # type: ignore[no-untyped-def]
    """The comparisons above look at something: a row folded once too often, or one tile of many that covers other tokens."""
    slow = _backend(checkpoints[model], "numpy")
    alone, cache = _fed(slow, [40]), slow.new_cache(1, 256)
    forward(slow, cache, {0: TEXTS[0][:30]})
    state = cache.storage(0).states[0]
    state.begin(30)
    state.state = state.step(state.state, state.records[0])
    assert np.abs(forward(slow, cache, {0: TEXTS[0][30:40]}).logits - alone[30:]).max() > 1e-3
    backend = _backend(checkpoints[model])
    cache = backend.new_cache(1, 256)
    forward(backend, cache, {0: TEXTS[0][:60]})
    memory = cache.storage(0).recurrent
    covered = memory.buffer.view(np.int64)
    (first, *_) = np.flatnonzero(covered == memory.folded)
    covered[first] = 59  # of the 36 that it covers
    assert not np.array_equal(forward(backend, cache, {0: [TEXTS[0][60]]}).logits[0], decoded[model][0][60])
    backend.close()


def test_trees_are_refused(checkpoints) -> None:  # type: ignore[no-untyped-def]
    backend = _backend(checkpoints["lfm2"])
    with pytest.raises(BackendError, match="recurrent layer"):
        forward(backend, backend.new_cache(1, 32), {0: [1, 2]}, parents=[-1, -1])
    backend.close()
