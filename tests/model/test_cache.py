"""A slot's prefix in another slot: the same bits, on every backend and in every KV format that it may have."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest

from cpuspec.backends import BACKENDS, make_backend
from cpuspec.checkpoints import Checkpoint
from cpuspec.errors import CacheError
from cpuspec.formats import Format, get_format
from cpuspec.formats.kv import KV_FORMATS
from cpuspec.settings import EngineConfig
from tests.backends.models import RECURRENT, every_backend, forward, tiny
from tests.toys import ToyBackend

TOKENS = np.random.default_rng(0).integers(0, 300, 40).tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:  # type: ignore[no-untyped-def]
    return tiny(tmp_path_factory)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize(("held", "wanted"), [(300, 288), (512, 511), (272, 259), (48, 33), (16, 1)])
def test_blocks_that_were_kept_elsewhere_are_continued_with_the_same_bits(
    checkpoint: Checkpoint, kv_format: str, held: int, wanted: int
) -> None:
    """Every backend whose cache has blocks promises row invariance; `wanted` of the `held` tokens are put back."""
    tokens = np.random.default_rng(1).integers(0, 300, 520).tolist()
    backend = make_backend("numba", checkpoint, EngineConfig(threads=1, max_rows=520, kv_format=kv_format))
    cache = backend.new_cache(3, 520)
    assert cache.blocks is not None
    size, step = cache.blocks.size, cache.blocks.step
    forward(backend, cache, {0: tokens[: held // step * step]})
    lengths = [min(size, cache.lengths[0] - start) for start in range(0, cache.lengths[0], size)]
    blocks = [cache.read_block(0, number, length) for number, length in enumerate(lengths)]
    assert sum(block.nbytes for block in blocks) == cache.lengths[0] * cache.bytes_per_token
    forward(backend, cache, {2: tokens[::-1]})
    cache.truncate(2, 0)  # what was there is overwritten
    for number, block in enumerate(blocks):
        cache.append_block(2, block, min(size, wanted - number * size))
    forward(backend, cache, {1: tokens[:wanted]})
    expected = forward(backend, cache, {1: tokens[wanted : wanted + 9]}).logits.copy()
    np.testing.assert_array_equal(forward(backend, cache, {2: tokens[wanted : wanted + 9]}).logits, expected)
    cache.drop(2)
    assert (cache.lengths[2], cache.slot_bytes(2)) == (0, 0)
    with pytest.raises(CacheError, match="cannot read 16 tokens of block 0 of slot 2: it holds 0"):
        cache.read_block(2, 0, step)
    backend.close()


@pytest.mark.parametrize("family", RECURRENT)
@every_backend(["numba", "numpy", "torch"])
def test_a_snapshot_is_of_its_tokens_alone_and_is_gone_on_with(tmp_path_factory, family: str, name: str) -> None:  # type: ignore[no-untyped-def]
    """However its rows were fed and folded; the same bytes, in numba's own order, and nothing of the slot's longer past."""
    backend = make_backend(name, tiny(tmp_path_factory, **RECURRENT[family]), EngineConfig(threads=1, max_rows=64, kv_format="f32"))
    tokens, cache = np.random.default_rng(2).integers(0, 300, 160).tolist(), backend.new_cache(4, 200)
    assert cache.states is not None
    for slot, sizes in enumerate(([64, 27], [1] * 91, [30, 61, 4, 1, 1])):
        for size in sizes:
            forward(backend, cache, {slot: tokens[cache.lengths[slot] :][:size]})
        assert cache.take_snapshot(slot, 91)
    first, *others = (cache.snapshots(slot)[91] for slot in range(3))
    assert len(first) == cache.states.num_bytes
    for other in others:
        assert name != "numba" or np.array_equal(first, other)
    expected = forward(backend, cache, {2: tokens[97:120]}).logits.copy()
    for token in tokens[120:]:
        forward(backend, cache, {2: [token]})
    assert cache.copy(2, 3, 100) == 91
    got = forward(backend, cache, {3: tokens[91:120]}).logits[6:]
    assert np.array_equal(got, expected) if name == "numba" else np.allclose(got, expected, rtol=1e-3, atol=1e-4)
    assert cache.truncate(2, 96) == 91, "the slot itself goes back to it, too"
    got = forward(backend, cache, {2: tokens[91:120]}).logits[6:]
    assert np.array_equal(got, expected) if name == "numba" else np.allclose(got, expected, rtol=1e-3, atol=1e-4)
    for length, taken in ((91, first[:-1]), (90, first), (91, first.view(np.float32))):
        with pytest.raises(CacheError, match="slot 3 holds 120 tokens and takes uint8"):
            cache.restore_snapshot(3, length, taken)
    assert not cache.take_snapshot(3, 50)
    backend.close()


@every_backend(BACKENDS)
def test_a_cache_has_blocks_only_where_rows_are_invariant(checkpoint: Checkpoint, name: str) -> None:
    backend = make_backend(name, checkpoint, EngineConfig(threads=1))
    assert backend.row_invariant or backend.new_cache(1, 64).blocks is None
    backend.close()


def test_blocks_of_another_model_format_or_weights_have_another_identity(checkpoint: Checkpoint, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    def identity(checkpoint: Checkpoint, kv_format: str = "f16", casts: Mapping[str, Format] = MappingProxyType({})) -> str:
        backend = make_backend("numba", checkpoint, EngineConfig(threads=1, kv_format=kv_format), casts=casts)
        found = backend.new_cache(1, 64).identity
        backend.close()
        return found

    other, longer = tiny(tmp_path_factory, seed=9), replace(checkpoint, config=replace(checkpoint.config, rope_base=5000.0))
    cast = identity(checkpoint, casts={"layers.0.q": get_format("q8_0")})
    found = [
        identity(checkpoint),
        identity(checkpoint, "int8"),
        identity(checkpoint, "int4"),
        identity(other),
        identity(longer),
        cast,
    ]
    assert len(set(found)) == len(found)
    assert identity(checkpoint) == found[0]


def test_a_copy_of_what_a_slot_does_not_hold_is_a_clear_error() -> None:
    backend = ToyBackend(1, max_rows=64)
    cache = backend.new_cache(2, 64)
    forward(backend, cache, {0: [4, 5]})
    for source, slot, length in ((0, 1, 3), (0, 1, -1), (0, 0, 1), (1, 0, 1)):
        with pytest.raises(CacheError, match=f"cannot copy {length} tokens from slot {source}, which holds"):
            cache.copy(source, slot, length)
    with pytest.raises(CacheError, match="slot 2 does not exist"):
        cache.copy(0, 2, 1)
    assert cache.lengths == [2, 0]
