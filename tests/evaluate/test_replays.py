"""Replays find what is wrong with a recurrent layer's memory, and find nothing where nothing is."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cpuspec.backends import Backend, make_backend
from cpuspec.checkpoints import Checkpoint
from cpuspec.config import ShortConv
from cpuspec.evaluate.certify import certify
from cpuspec.evaluate.replays import Replays, check_replays
from cpuspec.model.batch import ForwardBatch, ForwardOutput
from cpuspec.model.cache import KVCache
from cpuspec.model.recurrence import RecurrentState
from cpuspec.settings import EngineConfig, SpecConfig
from tests.backends.models import RECURRENT, tiny

# Of each mixer, and of a state beside attention.
ATTENTION = {"hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
MODELS: dict[str, dict[str, Any]] = {
    "qwen35": {"architecture": "qwen35", **ATTENTION},
    **{name: {**RECURRENT[name], **ATTENTION} for name in ("lfm2", "granitehybrid", "falcon-h1")},
}
TEXTS = [np.random.default_rng(seed).integers(0, 384, 70).tolist() for seed in range(2)]
AT = 24  # tokens of a slot behind which a lie is planted


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny(tmp_path_factory, weight_format="q8_0", **MODELS[request.param])


def _folded_twice(one: RecurrentState) -> None:
    one.state = one.step(one.state, one.records[0])
    one.inputs = np.concatenate([one.inputs[:-1], one.inputs[-2:-1]])


def _skipped(one: RecurrentState) -> None:
    one.records[-1] = tuple(np.zeros_like(part) if i else np.ones_like(part) for i, part in enumerate(one.records[-1]))
    one.inputs = np.concatenate([one.inputs[:-1], 0 * one.inputs[-1:]])


# What is done to the memory of the first layer that has one, in the reference's form of it.
LIES: dict[str, Callable[[RecurrentState], None]] = {"a row folded once too often": _folded_twice, "a record skipped": _skipped}


class Lying:
    """A backend that plants a lie in each cache, before a forward on a slot of at least AT tokens, and once."""

    def __init__(self, honest: Backend, lie: Callable[[Backend, KVCache, int], bool]) -> None:
        self._honest, self._lie, self._told = honest, lie, list[KVCache]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._honest, name)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> ForwardOutput:
        for slot in batch.lists.slots:
            if cache.lengths[slot] >= AT and cache not in self._told and self._lie(self._honest, cache, slot):
                self._told.append(cache)
        return self._honest.forward(batch, cache)

    def found(self) -> Replays:
        """What replays say of it; it has lied in them."""
        found = check_replays(self, TEXTS)  # type: ignore[arg-type]
        assert len(self._told) >= 2, found
        return found


def _backend(checkpoint: Checkpoint, name: str) -> Backend:
    return make_backend(name, checkpoint, EngineConfig(threads=1, max_rows=128, keep_packed=False))


@pytest.mark.parametrize("name", ["numba", "numpy"])
def test_nothing_is_found_where_nothing_is_wrong(checkpoint: Checkpoint, name: str) -> None:
    backend = _backend(checkpoint, name)
    found = check_replays(backend, TEXTS)
    assert found.passed
    assert all(way.num_rows >= 140 for way in found.ways)
    backend.close()


@pytest.mark.parametrize("lie", LIES)
def test_a_wrong_row_of_a_state_is_found(checkpoint: Checkpoint, lie: str) -> None:
    def plant(backend: Backend, cache: KVCache, slot: int) -> bool:
        one = cache.storage(slot).states[0]
        one.begin(cache.lengths[slot])
        if one.records:
            LIES[lie](one)
        return bool(one.records)

    found = Lying(_backend(checkpoint, "numpy"), plant).found()
    assert sum(way.differs is not None for way in found.ways) >= 2, found


@pytest.mark.parametrize("moves", [1, -1], ids=["a record skipped", "a row folded once too often"])
def test_a_wrong_row_of_a_compiled_state_is_found(checkpoint: Checkpoint, moves: int) -> None:
    """The states of a layer say that they cover one token more or less than they do."""
    if isinstance(checkpoint.config.recurrent, ShortConv):
        pytest.skip("it has no matrices")

    def plant(backend: Any, cache: KVCache, slot: int) -> bool:
        memory = cache.storage(slot).recurrent
        if not 0 < memory.folded < cache.lengths[slot]:
            return False
        # No public path leads to a wrong state.
        mixer, at = checkpoint.config.recurrent, backend._recurrent._offsets[0]["folded_at"]
        memory.buffer[at : at + mixer.value_heads * mixer.value_dims // 2].view(np.int64)[:] += moves
        return True

    backend = _backend(checkpoint, "numba")
    found = Lying(backend, plant).found()
    assert sum(way.differs is not None for way in found.ways) >= 2, found
    backend.close()


@pytest.mark.parametrize("name", ["numba", "numpy"])
def test_the_memory_of_another_slot_is_found_in_each_way(checkpoint: Checkpoint, name: str) -> None:
    backend = _backend(checkpoint, name)

    def plant(backend: Backend, cache: KVCache, slot: int) -> bool:
        length = cache.lengths[slot]
        others = backend.new_cache(1, length)
        tokens = TEXTS[0][-length:]
        backend.forward(ForwardBatch(tokens, list(range(length)), [0], [0, length]), others)
        theirs, mine = others.storage(0), cache.storage(slot)
        if name == "numpy":
            inputs = theirs.states[0].inputs[-len(mine.states[0].inputs) :]
            mine.states[0] = replace(mine.states[0], state=theirs.states[0].last(), inputs=inputs)
        else:
            mine.recurrent.buffer[:], mine.recurrent.folded = theirs.recurrent.buffer, theirs.recurrent.folded
        return True

    found = Lying(backend, plant).found()
    assert all(way.differs is not None for way in found.ways), found
    backend.close()


@pytest.mark.parametrize("family", ["qwen35", "lfm2", "mamba2", "granitehybrid", "nemotron_h", "falcon-h1"])
def test_drafts_of_every_recurrent_family_are_certified(
    tmp_path_factory: pytest.TempPathFactory, family: str, prompt_arithmetic: str
) -> None:
    checkpoint = tiny(tmp_path_factory, weight_format="q8_0", vocab_size=384, **RECURRENT[family])
    made = certify(checkpoint, SpecConfig.parse("ngram"), max_tokens=12, num_samples=60, settings=EngineConfig(threads=2))
    assert made.states
    assert made.greedy.passed
    assert made.sampled.passed
    assert made.states.passed
    # The tiny model of Granite is sure of nearly every token, so a verifier that takes every draft is not seen there.
    assert made.control_rejected or family == "granitehybrid"
    assert made.sampled.num_draft_tokens > 0
    assert len(made.states.ways) == (8 if prompt_arithmetic == "bf16" else 4)


def test_a_certificate_is_refused_for_a_wrong_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    checkpoint = tiny(tmp_path_factory, vocab_size=384, **MODELS["qwen35"])
    made = certify(checkpoint, SpecConfig.parse("ngram"), max_tokens=8, num_samples=50, settings=EngineConfig(threads=1))
    assert made.states
    assert made.passed
    assert len(made.as_dict()["states"]["ways"]) == len(made.states.ways)
    (first, *others), states = made.states.ways, made.states
    for wrong in (replace(states, control_seen=False), replace(states, ways=(replace(first, differs=(0, 9)), *others))):
        assert not replace(made, states=wrong).passed
