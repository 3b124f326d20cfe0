"""Models that take turns share threads and weights, and nothing that either could notice."""

import gc
import weakref

import numpy as np
import pytest

from cpuspec.backends import BACKENDS, make_backend
from cpuspec.checkpoints import Checkpoint
from cpuspec.errors import BackendError
from cpuspec.formats import get_format
from cpuspec.quantize.cast import casts
from cpuspec.settings import EngineConfig
from tests.backends.models import cast_checkpoint, every_backend, forward, tiny

SHARING = [name for name in BACKENDS if name not in ("onnxruntime", "openvino")]  # they rearrange weights for themselves
ENGINE = EngineConfig(threads=2, max_rows=8)
TOKENS = np.random.default_rng(0).integers(0, 300, 12).tolist()


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Checkpoint:
    return tiny(tmp_path_factory, weight_format="q4_k", embed_format="q6_k")


@pytest.fixture(scope="module")
def draft(target: Checkpoint) -> Checkpoint:
    return cast_checkpoint(target, get_format("mxfp4"))


def _decode(backend, cache, tokens):
    return [forward(backend, cache, {0: [token]}).logits for token in tokens]


@every_backend()
def test_taking_turns_changes_no_bit(name: str, target: Checkpoint, draft: Checkpoint) -> None:
    alone = [make_backend(name, checkpoint, ENGINE) for checkpoint in (target, draft)]
    wanted = [_decode(backend, backend.new_cache(1, 32), TOKENS) for backend in alone]
    first = make_backend(name, target, ENGINE)
    pair = [first, make_backend(name, draft, ENGINE, first)]
    caches = [backend.new_cache(1, 32) for backend in pair]
    for step, token in enumerate(TOKENS):
        for backend, cache, rows in zip(pair, caches, wanted, strict=True):
            assert np.array_equal(forward(backend, cache, {0: [token]}).logits, rows[step])
    for backend in (*alone, *reversed(pair)):
        backend.close()


@every_backend(SHARING)
def test_what_both_checkpoints_hold_is_in_memory_once(name: str, target: Checkpoint, draft: Checkpoint) -> None:
    first = make_backend(name, target, ENGINE)
    second = make_backend(name, draft, ENGINE, first)
    ours, theirs = (one._model.weights if name == "numpy" else one.matrices for one in (second, first))
    assert ours["output"] is theirs["output"]
    assert not any(ours[matrix] is theirs[matrix] for matrix in ours if matrix.endswith(("q", "down")))
    assert second.threads == first.threads
    second.close()
    first.close()


@every_backend()
@pytest.mark.parametrize("output", ["q6_k", "bf16"])
def test_matrices_cast_at_load_are_those_of_a_cast_checkpoint(tmp_path_factory, name: str, output: str) -> None:
    source, format = tiny(tmp_path_factory, weight_format="q4_k", embed_format=output), get_format("int3_g32_asym")
    first = make_backend(name, source, ENGINE)
    at_load = make_backend(name, source, ENGINE, first, casts(source, format))
    wanted = make_backend(name, cast_checkpoint(source, format), ENGINE)
    logits = [forward(b, b.new_cache(1, 16), {0: TOKENS[:6]}).logits for b in (first, at_load, wanted)]
    assert np.array_equal(logits[1], logits[2])
    assert not np.array_equal(logits[0], logits[1])
    assert at_load.weight_bytes == wanted.weight_bytes <= first.weight_bytes
    for backend in (at_load, first, wanted):
        backend.close()


def test_a_backend_keeps_no_tensor_alive_for_those_who_might_share_it(target: Checkpoint) -> None:
    checkpoint = cast_checkpoint(target, get_format("q4_0"))
    tensor = weakref.ref(checkpoint.tensors["layers.0.q"])
    backend = make_backend("numba", checkpoint, ENGINE)
    del checkpoint
    gc.collect()
    assert tensor() is None
    backend.close()


def test_a_backend_of_another_kind_shares_nothing(target: Checkpoint) -> None:
    reference = make_backend("numpy", target, ENGINE)
    backend = make_backend("numba", target, ENGINE, reference)
    assert np.isfinite(forward(backend, backend.new_cache(1, 8), {0: TOKENS[:4]}).logits).all()
    backend.close()


def test_closing_the_second_leaves_the_first_and_closing_the_first_ends_both(target: Checkpoint, draft: Checkpoint) -> None:
    first = make_backend("numba", target, ENGINE)
    second = make_backend("numba", draft, ENGINE, first)
    second.close()
    forward(first, first.new_cache(1, 8), {0: TOKENS[:4]})
    first.close()
    for backend in (first, second):
        with pytest.raises(BackendError, match="closed"):
            forward(backend, backend.new_cache(1, 8), {0: TOKENS[:4]})
