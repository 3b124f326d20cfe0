"""Recurrent layers on numba: a row's bits depend on its tokens alone, however the rows before it came, went and were folded."""

from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from cpuspec.backends import make_backend, stop_forward
from cpuspec.backends.numpy_backend import NumpyBackend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.config import EngineConfig, SamplingParams
from cpuspec.engine.llm import LLM
from cpuspec.errors import BackendError, ConfigError
from cpuspec.model.batch import ForwardBatch, ForwardStoppedError
from tests.backends.models import forward
from tools.make_tiny_model import make_tiny_gguf

OPTIONS = {"qwen35": {}, "qwen35moe": {"shared_size": 96}, "qwen3next": {"shared_size": 96, "tied": False}}
RNG = np.random.default_rng(0)
TEXTS = [RNG.integers(0, 300, 90).tolist() for _ in range(9)]


@pytest.fixture(scope="module", params=OPTIONS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return make_tiny_gguf(path, request.param, num_layers=4, weight_format="q8_0", **OPTIONS[request.param])


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> Checkpoint:
    return open_checkpoint(model)


def _backend(checkpoint: Checkpoint, threads: int = 1, **settings: object):  # type: ignore[no-untyped-def]
    return make_backend("numba", checkpoint, EngineConfig(threads=threads, max_rows=256, **settings))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def decoded(checkpoint: Checkpoint) -> list[np.ndarray]:
    """The logits of each text, one token at a time."""
    backend, rows = _backend(checkpoint), []
    for text in TEXTS:
        cache = backend.new_cache(1, 128)
        rows.append(np.concatenate([forward(backend, cache, {0: [token]}).logits.copy() for token in text]))
    backend.close()
    return rows


@pytest.mark.parametrize("architecture", OPTIONS)
def test_it_means_what_the_reference_means(tmp_path: Path, architecture: str) -> None:
    path = make_tiny_gguf(tmp_path / "tiny.gguf", architecture, num_layers=4, weight_format="f32", **OPTIONS[architecture])
    checkpoint = open_checkpoint(path)
    slow, fast = NumpyBackend(checkpoint, EngineConfig(max_rows=256, kv_format="f32")), _backend(checkpoint, kv_format="f32")
    wanted, got = (forward(one, one.new_cache(1, 128), {0: TEXTS[0]}).logits for one in (slow, fast))
    assert np.abs(got - wanted).max() < 5e-4
    fast.close()


@pytest.mark.parametrize("kv_format", ["f16", "int8"])
def test_bits_do_not_depend_on_chunks_drafts_threads_or_mates(
    checkpoint: Checkpoint, decoded: list[np.ndarray], kv_format: str
) -> None:
    """Nine sequences in random forwards, from 1 to 40 rows of each, of which random ones are wrong drafts and taken back."""
    for threads in (1, 3) if kv_format == "f16" else (2,):
        backend, rng = _backend(checkpoint, threads, kv_format=kv_format), np.random.default_rng(threads)
        wanted = decoded
        if kv_format != "f16":
            cache = backend.new_cache(9, 128)
            wanted = [forward(backend, cache, {slot: text}).logits.copy() for slot, text in enumerate(TEXTS)]
        cache, held = backend.new_cache(9, 128), [0] * 9
        while min(held) < 90:
            waiting = [slot for slot in range(9) if held[slot] < 90]
            rows, right = {}, {}
            for slot in rng.permutation(waiting)[: rng.integers(1, 10)].tolist():
                right[slot] = int(rng.choice([1, 1, 1, 2, 5, 9, 20, 40]))
                drafts = rng.integers(0, 300, rng.choice([0, 0, 1, 4, 7])).tolist() if right[slot] < 20 else []
                rows[slot] = TEXTS[slot][held[slot] :][: right[slot]] + drafts
                right[slot] = min(right[slot], 90 - held[slot])
            logits = forward(backend, cache, rows).logits
            first = 0
            for slot, tokens in rows.items():
                length = held[slot] + right[slot]
                assert np.array_equal(logits[first : first + right[slot]], wanted[slot][held[slot] : length])
                assert cache.truncate(slot, length) == length
                first, held[slot] = first + len(tokens), length
                if length > 20 and rng.random() < 0.1:  # a draft model takes back what it drafted token by token
                    held[slot] = cache.truncate(slot, length - int(rng.integers(1, 8)))
                if rng.random() < 0.03:
                    cache.drop(slot)
                    held[slot] = 0
        backend.close()


def test_a_slot_is_truncated_as_far_as_its_rows_go_and_else_to_nothing(checkpoint: Checkpoint, decoded: list[np.ndarray]) -> None:
    backend = _backend(checkpoint)
    cache = backend.new_cache(2, 128)
    forward(backend, cache, {0: TEXTS[0][:60]})
    assert (cache.copy(0, 1, 50), cache.reachable(0, 20), cache.copy(0, 1, 20)) == (50, 0, 0)
    assert cache.copy(0, 1, 45) == 45
    for slot, length in ((1, 45), (0, 60)):
        assert np.array_equal(forward(backend, cache, {slot: TEXTS[0][length:70]}).logits, decoded[0][length:70])
    assert (cache.truncate(0, 20), cache.lengths[0]) == (0, 0)
    assert np.array_equal(forward(backend, cache, {0: TEXTS[1][:30]}).logits, decoded[1][:30])
    assert cache.slot_bytes(0) == cache.bytes_of(70) == 70 * cache.bytes_per_token + cache.bytes_per_slot
    backend.close()


def test_a_forward_that_is_stopped_changes_nothing(checkpoint: Checkpoint, decoded: list[np.ndarray]) -> None:
    backend, stops = _backend(checkpoint), 0
    cache = backend.new_cache(1, 128)
    forward(backend, cache, {0: TEXTS[0][:30]})
    for size in (5, 40, 6, 7):
        for _ in range(20):
            held = cache.lengths[0]
            batch = ForwardBatch(
                TEXTS[1][:size], list(range(held, held + size)), [0], [0, size], logit_rows=[], stops_early=True
            )  # other tokens
            ended = Event()
            stopper = Thread(target=_stop_until, args=(backend, ended))
            stopper.start()
            try:
                backend.forward(batch, cache)
                cache.truncate(0, held)
            except ForwardStoppedError:
                stops += 1
            ended.set()
            stopper.join()
        assert np.array_equal(forward(backend, cache, {0: TEXTS[0][held : held + 5]}).logits, decoded[0][held : held + 5])
    assert stops
    backend.close()


def _stop_until(backend, ended: Event) -> None:  # type: ignore[no-untyped-def]
    while not ended.is_set():
        stop_forward(backend)


def test_a_state_that_covers_other_tokens_than_it_says_shows(checkpoint: Checkpoint, decoded: list[np.ndarray]) -> None:
    """What the comparisons of this file would miss if states hardly mattered: one tile of many is wrong."""
    backend = _backend(checkpoint)
    cache = backend.new_cache(1, 128)
    forward(backend, cache, {0: TEXTS[0][:60]})
    memory = cache.storage(0).recurrent
    at = backend._recurrent._offsets[0]["folded_at"]  # no public path leads to a wrong state
    covered = memory.block[at : at + 8].view(np.int64)
    assert covered[0] == memory.folded == 36
    covered[0] = 59
    assert not np.array_equal(forward(backend, cache, {0: [TEXTS[0][60]]}).logits[0], decoded[0][60])
    backend.close()


def test_trees_and_rows_that_see_each_other_are_refused(checkpoint: Checkpoint) -> None:
    backend = _backend(checkpoint)
    with pytest.raises(BackendError, match="recurrent layer"):
        forward(backend, backend.new_cache(1, 32), {0: [1, 2]}, parents=[-1, -1])
    backend.close()


GREEDY, SEEDED = (
    SamplingParams(max_tokens=24, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True),
)
PROMPTS = [text[:size] for text, size in zip(TEXTS, (3, 20, 50), strict=False)] + [TEXTS[2][:50] + TEXTS[3][:7], TEXTS[4][:6] * 6]


@pytest.fixture(scope="module")
def answers(model: Path) -> Callable[..., list[list[int]]]:
    def run(draft: str, params: SamplingParams, **settings: object) -> list[list[int]]:
        with LLM(model, draft, context_length=128, **settings) as llm:  # type: ignore[arg-type]
            return [completion.token_ids for completion in llm.generate(PROMPTS * 2, params)]

    return run


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_answers_are_those_without_drafts(answers: Callable[..., list[list[int]]], params: SamplingParams) -> None:
    wanted = answers("none", params, threads=1, max_sequences=1)
    assert len({tuple(one) for one in wanted}) == len(PROMPTS)
    for draft in ("ngram", "suffix", "self:mxfp4", "self:mxfp4+ngram"):
        if params is SEEDED and draft.startswith("self"):
            continue  # sampled drafts keep the distribution, and not the draws
        assert answers(draft, params, threads=2, max_sequences=4) == wanted, draft
    with pytest.raises(ConfigError, match="tree"):
        answers("suffix:tree", params)
