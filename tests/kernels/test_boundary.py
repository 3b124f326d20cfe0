"""Arrays and numbers that lie about their size are refused where Python calls compiled code, which would read beyond them."""

import numpy as np
import pytest

from cpuspec.backends import make_backend
from cpuspec.errors import BackendError, CacheError, FormatError
from cpuspec.formats import FORMATS
from cpuspec.kernels import fit
from cpuspec.kernels.embed import _DECODERS
from cpuspec.kernels.encode import recode
from cpuspec.settings import EngineConfig
from tests.backends.models import forward, tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):  # type: ignore[no-untyped-def]
    return tiny(tmp_path_factory)


@pytest.fixture(scope="module")
def backend(checkpoint):  # type: ignore[no-untyped-def]
    backend = make_backend("numba", checkpoint, EngineConfig(threads=1, max_rows=8))
    yield backend
    backend.close()


@pytest.mark.parametrize("shape", [(4,), (3, 1), (3, 255), (3, 257), (2, 3, 256)], ids=str)
def test_projected_rows_have_the_inputs_of_the_matrix(backend, shape: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(BackendError, match=r"output multiplies rows of 256 numbers, got an array of shape \("):
        backend.project(np.zeros(shape, np.float32), "output")
    assert backend.project(np.ones((3, 256), np.float32), "output").shape == (3, 384)


@pytest.mark.parametrize(
    "other", [{"num_layers": 1}, {"num_kv_heads": 1, "num_heads": 1}, {"seed": 3}, {"kv_format": "int4"}], ids=str
)
def test_a_forward_writes_into_caches_of_its_own_backend_only(checkpoint, backend, tmp_path_factory, other) -> None:  # type: ignore[no-untyped-def]
    settings = EngineConfig(threads=1, max_rows=8, **{key: value for key, value in other.items() if key == "kv_format"})
    changed = {key: value for key, value in other.items() if key != "kv_format"}
    stranger = make_backend("numba", tiny(tmp_path_factory, **changed) if changed else checkpoint, settings)
    cache = stranger.new_cache(1, 64)
    with pytest.raises(BackendError, match="this cache was made for another model or other settings"):
        forward(backend, cache, {0: [1, 2]})
    assert cache.lengths == [0]
    stranger.close()


@pytest.mark.parametrize(
    ("change", "length"),
    [
        (lambda block: block[:1], 64),
        (lambda block: block[:, :1], 64),
        (lambda block: np.concatenate([block, block])[:, :1], 64),  # larger than a block in the first place, smaller in the other
        (lambda block: block[:, :-1], 64),
        (lambda block: block[:2], 33),
        (lambda block: block.astype(np.float32), 64),
        (lambda block: block[0], 64),
    ],
)
def test_a_block_that_is_appended_has_room_for_its_tokens(backend, change, length: int) -> None:  # type: ignore[no-untyped-def]
    cache = backend.new_cache(2, 64)
    for start in range(0, 64, 8):
        forward(backend, cache, {0: range(start, start + 8)})
    block = cache.read_block(0, 0, 64)
    with pytest.raises(CacheError, match="tokens of a block are uint8"):
        cache.append_block(1, change(block), length)
    cache.append_block(1, block, length)
    assert cache.lengths[1] == length


@pytest.mark.parametrize("name", _DECODERS)
def test_rows_that_are_cast_hold_whole_blocks(name: str) -> None:
    source, to = FORMATS[name], FORMATS["mxfp4"]
    for data in (
        np.zeros((64, source.block_bytes * 64 + 1), np.uint8),
        np.zeros(source.block_bytes * 64, np.uint8),
        np.zeros((2, source.block_bytes * 64), np.float32),
    ):
        if data.dtype == np.uint8 and data.ndim == 2 and source.block_bytes == 1:
            continue
        with pytest.raises(FormatError, match=f"rows of {name} are uint8"):
            recode(data, source, to)


@pytest.mark.parametrize("shapes", [((4, 32), (4, 31)), ((4, 32), (3, 32)), ((32,), (32,)), ((4, 0), (4, 0))], ids=str)
def test_groups_and_weights_that_are_fitted_have_one_shape(shapes) -> None:  # type: ignore[no-untyped-def]
    groups, weights = (np.ones(shape, np.float32) for shape in shapes)
    with pytest.raises(ValueError, match="wanted"):
        fit.moved(groups, weights, [-1.0, 0.0, 1.0], [0.0], signs=False)


@pytest.mark.parametrize("capacity", [1 << 42, 1 << 60])
def test_a_cache_that_has_no_memory_says_so_and_the_next_forward_is_right(backend, capacity: int) -> None:  # type: ignore[no-untyped-def]
    cache = backend.new_cache(1, capacity)
    with pytest.raises(CacheError, match=f"no memory for a cache slot of {capacity} tokens .* smaller context_length"):
        forward(backend, cache, {0: [1]})
    assert cache.lengths == [0]
    assert forward(backend, backend.new_cache(1, 8), {0: [1]}).logits.shape == (1, 384)
