"""Layers with a window keep their last rows alone in a long cache: the same bits as of a cache that keeps everything.

What the backend gives back is overwritten with NaNs here, so whatever read it would be seen.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuspec.backends import kv_memory, make_backend, numba_backend
from cpuspec.backends.kv_memory import SLACK, WindowRows, slot_bytes
from cpuspec.checkpoints import open_checkpoint
from cpuspec.errors import CacheError
from cpuspec.formats.kv import get_kv_format
from cpuspec.formats.tensor import U8
from cpuspec.kernels.kv_rows import CHUNK
from cpuspec.model.batch import F32, ForwardBatch
from cpuspec.model.cache import KVCache
from cpuspec.settings import EngineConfig
from tests.backends.models import DEPTHS, GEMMA4, PARENTS, PATHS, SMALL, TREE
from tools.make_tiny_model import make_tiny_gguf

CAPACITY, LENGTH = 1600, 1500
MODELS: dict[str, dict[str, Any]] = {
    "gemma3, 40 tokens": {**SMALL, "architecture": "gemma3", "num_layers": 2, "window": 40},
    "gemma3, 300 tokens": {**SMALL, "architecture": "gemma3", "num_layers": 2, "window": 300},
    "gpt-oss": {**SMALL, "architecture": "gpt-oss", "num_layers": 2, "window": 128, "head_dim": 32},
    "gemma4": {**GEMMA4["gemma4"], "window": 100},
}
every_model = pytest.mark.parametrize("model", MODELS)
TOKENS = np.random.default_rng(0).integers(0, 300, LENGTH).tolist()


class Caches:
    """Of one backend a cache that keeps the last rows of windows, one that keeps everything, and what the first gave back."""

    def __init__(self, path: Path, model: str, patch: pytest.MonkeyPatch, kv_format: str = "f16", num_threads: int = 1) -> None:
        made = make_tiny_gguf(path / "m.gguf", **MODELS[model] | {"context_length": CAPACITY})
        settings = EngineConfig(threads=num_threads, max_rows=128, keep_packed=False, kv_format=kv_format)
        self.backend = make_backend("numba", open_checkpoint(made), settings)
        self.cache = self.backend.new_cache(3, CAPACITY)
        patch.setattr(numba_backend, "WindowRows", lambda places, config, capacity: WindowRows(places, config, 0))
        self.whole = self.backend.new_cache(3, CAPACITY)
        patch.setattr(numba_backend, "WindowRows", WindowRows)
        self.num_given_back = 0
        patch.setattr(kv_memory, "decommit", self._give_back)

    def _give_back(self, part: U8) -> None:
        self.num_given_back += part.nbytes
        part[:] = 255

    def feed(self, cache: KVCache, tokens: list[int], slots: tuple[int, ...] = (0,), tree: bool = False) -> F32:
        """The logits of the same tokens in each slot."""
        size, starts = len(tokens), [cache.lengths[slot] for slot in slots]
        positions = [start + (int(DEPTHS[i]) if tree else i) for start in starts for i in range(size)]
        parents = np.array(PARENTS, np.int32) if tree else None
        firsts = [size * number for number in range(len(slots) + 1)]
        return self.backend.forward(ForwardBatch(tokens * len(slots), positions, list(slots), firsts, parents), cache).logits.copy()

    def check(self, tokens: list[int], slots: tuple[int, ...] = (0,), tree: bool = False) -> None:
        got, wanted = (self.feed(cache, tokens, slots, tree) for cache in (self.cache, self.whole))
        assert np.isfinite(wanted).all()
        assert np.array_equal(got, wanted)

    def read(self, length: int, slots: tuple[int, ...] = (0,), rows: int = 64) -> None:
        start = self.cache.lengths[slots[0]]
        for at in range(start, length, rows):
            self.check(TOKENS[at : min(at + rows, length)], slots)

    def truncate(self, slot: int, length: int) -> int:
        held = self.cache.truncate(slot, length)
        assert self.whole.truncate(slot, held) == held
        return held


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Caches] = []

    def make(model: str = "gemma3, 40 tokens", **how: Any) -> Caches:
        made.append(Caches(tmp_path, model, monkeypatch, **how))
        return made[-1]

    yield make
    for one in made:
        one.backend.close()


@every_model
def test_bits_are_those_of_a_cache_that_keeps_everything_and_the_bytes_stay_bounded(caches: Any, model: str) -> None:
    both = caches(model)
    sizes, window = both.cache.sizes, MODELS[model]["window"]
    ((most, row_bytes),) = sizes.windows
    assert most == window + SLACK + CHUNK < CAPACITY
    assert sizes.per_token + row_bytes == both.whole.sizes.per_token
    before = 0
    for rows, until in ((1, 3), (64, 700), (7, 800), (64, LENGTH)):
        while (length := both.cache.lengths[0]) < until:
            both.read(min(length + rows, until), rows=rows)
            now = both.cache.lengths[0]
            held = -(-now // CHUNK) * CHUNK * row_bytes - _num_gone(both.cache) * CHUNK * row_bytes
            assert held <= (min(now, most) + CHUNK + rows) * row_bytes
            before = max(before, held)
    assert both.num_given_back >= (LENGTH - most - 64) * row_bytes
    assert before > window * row_bytes


def _num_gone(cache: KVCache) -> int:
    storage = cache.storage(0)
    (number,) = storage.windows.kinds
    return int(storage.windows._places.kinds[number].first_chunk(storage.least))


@every_model
def test_rejected_drafts_and_trees_leave_the_same_bits(caches: Any, model: str) -> None:
    both, rng = caches(model, num_threads=2), np.random.default_rng(1)
    for length in range(500, LENGTH, 90):
        both.read(length, slots=(0, 2))
        for tokens in ([5], rng.integers(0, 300, 40).tolist()):
            both.check(tokens, slots=(0, 2))
            for slot in (0, 2):
                assert both.truncate(slot, length) == length
        for path in PATHS:
            both.check(TREE, tree=True)
            held = [cache.keep_path(0, length, np.array(path, np.int32)) for cache in (both.cache, both.whole)]
            assert held == [length + len(path)] * 2
            both.check([7, 8])
            assert both.truncate(0, length) == length
    assert both.truncate(0, length - SLACK + 8) == length - SLACK + 8
    both.check([5])
    assert both.num_given_back


@pytest.mark.parametrize("kv_format", ["int8", "int4", "bf16"])
def test_formats_whose_chunks_are_no_whole_pages_lose_no_row_that_is_seen(caches: Any, kv_format: str) -> None:
    both = caches(kv_format=kv_format)
    both.read(LENGTH)
    assert both.num_given_back


def test_a_slot_is_truncated_to_rows_that_are_there_or_to_nothing(caches: Any) -> None:
    both = caches()
    both.read(1000)
    least = both.cache.storage(0).least
    assert 1000 - 64 - SLACK <= least < 1000
    assert [both.cache.reachable(0, length) for length in (0, 1, least - 1, least, 999)] == [0, 0, 0, least, 999]
    both.cache.lengths[0] = least - 1  # as nothing does
    with pytest.raises(CacheError, match=f"from {least} tokens on, and it holds {least - 1}; truncate it to 0"):
        both.feed(both.cache, [5])
    both.cache.lengths[0] = 1000
    assert both.truncate(0, least - 1) == 0
    both.read(1200)  # from the beginning


@pytest.mark.parametrize(
    ("model", "length"), [*((model, 700) for model in MODELS), *(("gemma3, 300 tokens", length) for length in (10, 255, 256, 1100))]
)
def test_a_snapshot_brings_the_rows_back(caches: Any, model: str, length: int) -> None:
    both = caches(model)
    cache = both.cache
    both.read(length)
    assert cache.take_snapshot(0, length)
    both.read(LENGTH)
    blocks = [cache.read_block(0, at // CHUNK, min(CHUNK, length - at)) for at in range(0, length, CHUNK)]
    assert cache.copy(0, 1, length) == both.whole.copy(0, 1, length) == length
    both.check(TOKENS[length : length + 60], slots=(1,))
    taken = cache.snapshots(0)[length]
    assert len(taken) == cache.states.size(length) <= cache.states.num_bytes
    assert len(taken) in cache.states.sizes(CAPACITY)
    for at, block in zip(range(0, length, CHUNK), blocks, strict=True):
        cache.append_block(2, block, min(CHUNK, length - at))
    cache.restore_snapshot(2, length, taken)
    both.whole.copy(0, 2, length)
    both.check(TOKENS[length : length + 60], slots=(2,))
    assert both.truncate(0, length) == length
    both.read(min(length + 300, LENGTH))
    if length >= 700:  # a slot of which a later snapshot's rows are the only ones
        assert cache.take_snapshot(1, length + 60)
        cache.copy(1, 2, length + 60)
        assert cache.reachable(2, length) in (0, length)


def test_no_head_no_short_context_and_no_recurrent_model_gives_rows_back(tmp_path: Path) -> None:
    config = open_checkpoint(make_tiny_gguf(tmp_path / "m.gguf", **MODELS["gemma3, 40 tokens"] | {"context_length": 4096})).config
    kv_format = get_kv_format("f16")
    rows = 40 + SLACK + CHUNK
    sizes = {capacity: slot_bytes(config, kv_format, capacity) for capacity in (rows, rows + 1, 4096)}
    assert [bool(one.windows) for one in sizes.values()] == [False, True, True]
    assert sizes[rows].of(4096) == 4096 * sizes[rows].per_token
    assert sizes[4096].of(4096) == 4096 * sizes[4096].per_token + rows * sizes[4096].windows[0][1]
