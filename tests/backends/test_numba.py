"""The compiled backend: ids that it notes, memory that it uses again, forwards that follow at once or are stopped, its tables."""

import ctypes
import mmap
import sys
from dataclasses import replace

import numpy as np
import pytest

from cpuspec.backends import Backend, has_prompt_arithmetic, make_backend, numba_backend, packed
from cpuspec.checkpoints import Checkpoint
from cpuspec.config import Rope
from cpuspec.errors import BackendError
from cpuspec.formats import FORMATS, QuantTensor, packing
from cpuspec.kernels import isa, layout
from cpuspec.kernels.kv_rows import CHUNK
from cpuspec.model.batch import ForwardBatch, ForwardStoppedError
from cpuspec.platform import SYSTEM
from cpuspec.sampling import argmax
from cpuspec.settings import EngineConfig
from tests.backends.models import (
    CLASSES,
    GEMMA4,
    SMALLEST,
    TOKENS,
    asked_to_stop,
    computed,
    forward,
    read_until_stopped,
    reference,
    tiny,
)

needs_vnni = pytest.mark.skipif(isa.has_sixteen_registers(), reason="this processor has no AVX-512 VNNI")
ODD = {"architecture": "llama", "weight_format": "f32", "hidden_size": 50, "intermediate_size": 70, "num_heads": 3}


def _backend(checkpoint: Checkpoint, threads: int = 1) -> Backend:
    return make_backend("numba", checkpoint, EngineConfig(threads=threads, max_rows=64, kv_format="f32", keep_packed=False))


def _with_logits(checkpoint: Checkpoint, values: np.ndarray) -> Checkpoint:
    """A model whose logits after TOKENS[0] are near `values`, and the same bits where these are the same."""
    weights = np.eye(len(values), checkpoint.config.hidden_size, dtype=np.float32)

    def with_output(weights: np.ndarray) -> Checkpoint:
        output = QuantTensor.encode(FORMATS["f32"], weights)
        return replace(checkpoint, tensors={**checkpoint.tensors, "output": output})

    backend = _backend(with_output(weights))
    x = forward(backend, backend.new_cache(1, 1), {0: TOKENS[:1]}).logits[0, : checkpoint.config.hidden_size]
    backend.close()
    finite = np.isfinite(values)
    weights = np.where(finite, values, 0)[:, None] * (x / (x @ x))
    weights[~finite, 0] = values[~finite] * np.sign(x[0])
    return with_output(weights.astype(np.float32))


@pytest.mark.parametrize(
    "peaks",
    [
        {},  # nothing is as large as the zeros that pad the vocabulary
        {0: 3.0}, {300: 3.0}, {150: 3.0, 151: 3.0}, {300: 3.0, 17: 3.0, 200: 3.0},
        {5: -np.inf, 7: 2.0}, {5: np.inf}, {300: np.inf, 5: np.nan}, {299: np.nan}, {0: np.nan, 5: 3.0},
        dict.fromkeys(range(301), -np.inf),
    ],
    ids=str,
)  # fmt: skip
def test_the_noted_best_ids_are_the_argmax(tmp_path_factory, peaks: dict[int, float]) -> None:
    values = -1 - np.random.default_rng(0).random(301, np.float32)
    values[list(peaks)] = list(peaks.values())
    odd = {**ODD, "num_kv_heads": 1, "head_dim": 18, "vocab_size": 301, "tied": False, "num_layers": 1}
    model = _with_logits(tiny(tmp_path_factory, **odd), values)
    for threads in (1, 2, 3):
        backend = _backend(model, threads=threads)
        logits, best = (output := forward(backend, backend.new_cache(1, 1), {0: TOKENS[:1]})).logits, output.best
        backend.close()
        try:
            wanted = argmax(logits).tolist()
        except BackendError:
            wanted = [-1]
            with pytest.raises(BackendError, match="NaN or infinite"):
                argmax(logits, best)
        assert best == wanted
        assert (wanted == [-1]) == bool(np.isnan(values).any() or np.isinf(values.max()))
        assert peaks or (logits < 0).all()


def test_logits_that_seem_to_be_held_by_nobody_are_written_over(tmp_path_factory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: it is the look at who holds them that keeps them."""
    backend = _backend(tiny(tmp_path_factory, **SMALLEST))
    cache = backend.new_cache(1, 64)
    monkeypatch.setattr("cpuspec.backends.numba_backend.ref", lambda array: lambda: None)
    forward(backend, cache, {0: TOKENS[:1]})
    held = forward(backend, cache, {0: TOKENS[1:2]}).logits
    before = held.copy()
    forward(backend, cache, {0: TOKENS[2:3]})
    assert not np.array_equal(held, before)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_forward_that_was_stopped_leaves_the_cache_as_it_was(tmp_path_factory, threads: int) -> None:
    backend = _backend(tiny(tmp_path_factory, **SMALLEST), threads=threads)
    cache, wanted = backend.new_cache(1, 64), forward(backend, backend.new_cache(1, 64), {0: TOKENS}).logits
    with asked_to_stop(backend):
        with pytest.raises(ForwardStoppedError):
            read_until_stopped(backend, cache)
        assert cache.lengths == [0]
        got = forward(backend, cache, {0: TOKENS}).logits  # a batch that does not stop early
    backend.close()
    assert np.array_equal(got, wanted)


@pytest.mark.parametrize("threads", [1, 2])
def test_forwards_that_follow_at_once_choose_the_tokens_of_forwards_one_by_one(tmp_path_factory, threads: int) -> None:
    backend = _backend(tiny(tmp_path_factory, **SMALLEST), threads=threads)

    def gained(extra_steps: int, ends: tuple[int, ...] = ()) -> tuple[list[list[int]], list[int], np.ndarray]:
        """Tokens of two sequences, up to 12 of each; how many each call gave; the last row of each."""
        cache, tokens, counts = backend.new_cache(2, 64), [TOKENS[:1], TOKENS[4:5]], list[int]()
        forward(backend, cache, {0: TOKENS[:7], 1: TOKENS[:3]})
        while (len(tokens[0]) <= 12 and not ends) or not counts:
            most = min(extra_steps, 12 - len(tokens[0]))
            last = [one[-1] for one in tokens]
            output = backend.forward(
                ForwardBatch(last, cache.lengths.copy(), [0, 1], [0, 1, 2], extra_steps=most, ends=ends), cache
            )
            for row, one in enumerate(tokens):
                one += [*(output.extra_tokens[row] if output.extra_tokens else ()), output.best[row]]
            counts.append(len(tokens[0]) - 1 - sum(counts))
            assert cache.lengths == [6 + len(tokens[0]), 2 + len(tokens[0])]
        return [one[1:] for one in tokens], counts, output.logits.copy()

    wanted, alone, row = gained(0)
    assert alone == [1] * 12
    assert len({*wanted[0], *wanted[1]}) > 2
    for extra_steps, counts in ((1, [2] * 6), (4, [5, 5, 2]), (31, [12])):
        got, number, last = gained(extra_steps)
        assert (got, number) == (wanted, counts)
        assert np.array_equal(last, row)
    end = wanted[1][5]
    first = min(one.index(end) for one in wanted if end in one)
    assert gained(31, (-5, end))[0] == [one[: first + 1] for one in wanted]
    backend.close()


def test_no_forward_follows_once_one_is_asked_to_stop(tmp_path_factory) -> None:
    backend = _backend(tiny(tmp_path_factory, **SMALLEST))
    cache = backend.new_cache(1, 1 << 14)
    with asked_to_stop(backend):
        output = backend.forward(ForwardBatch([5], [0], [0], [0, 1], extra_steps=10_000), cache)
    assert len(output.extra_tokens[0]) < 10_000
    assert cache.lengths == [1 + len(output.extra_tokens[0])]
    backend.close()


@pytest.mark.parametrize("weight_format", CLASSES)
def test_weights_from_the_disk_give_the_same_bits(tmp_path_factory, tmp_path, monkeypatch, weight_format: str) -> None:
    of_class = tiny(tmp_path_factory, weight_format=weight_format, **SMALLEST)
    wanted = computed("numba", of_class)
    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(packed, "_SMALLEST_BYTES", 0)
    for _ in range(2):
        assert np.array_equal(computed("numba", of_class, keep_packed=True), wanted)
        assert len(packed.packed_files()) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="takes the rights to pages away as Linux does")
def test_a_cache_is_touched_only_where_its_memory_was_committed(tmp_path_factory, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """As on Windows, where pages are committed as the cache grows. A fault would end the process."""
    committed = []

    def protect(address: int, num_bytes: int, rights: int) -> None:
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        size = ctypes.c_size_t(address + num_bytes - start)
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), size, rights) == 0

    def reserve(num_bytes: int) -> mmap.mmap:
        pages = mmap.mmap(-1, num_bytes)
        protect(np.frombuffer(pages, np.uint8).ctypes.data, num_bytes, 0)
        return pages

    def commit(address: int, num_bytes: int) -> None:
        protect(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        committed.append(num_bytes)

    monkeypatch.setattr(packing, "SYSTEM", replace(SYSTEM, reserved_pages=reserve, commit_pages=commit))
    backend = make_backend("numba", tiny(tmp_path_factory), EngineConfig(threads=2, max_rows=64))
    cache = backend.new_cache(4, 4 * CHUNK)
    tokens = np.random.default_rng(0).integers(0, 300, CHUNK + 20).tolist()
    for slot in (0, 3):
        logits = [forward(backend, cache, {slot: tokens[at : at + 60]}).logits[-1] for at in range(0, len(tokens), 60)]
    cache.copy(0, 1, CHUNK + 5)
    cache.append_block(2, cache.read_block(0, 0, CHUNK), CHUNK)
    for slot in (1, 2):
        rest = forward(backend, cache, {slot: tokens[cache.lengths[slot] :]}).logits
        assert np.array_equal(rest[-1], logits[-1])
    assert sum(committed) <= 8 * CHUNK * cache.bytes_per_token  # two chunks in each slot
    backend.close()


def test_cosines_and_sines_are_computed_some_positions_at_a_time(tmp_path_factory, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """A long answer does not wait for those of all positions that may come. There are two tables."""
    checkpoint = tiny(tmp_path_factory, context_length=1 << 17, **GEMMA4["gemma4"])
    computed, table = [0], numba_backend.rope_table

    def counted(rope: Rope, dims: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        computed[-1] += len(positions)
        return table(rope, dims, positions)

    monkeypatch.setattr(numba_backend, "rope_table", counted)
    backend = numba_backend.NumbaBackend(checkpoint, EngineConfig(threads=1, max_rows=32))
    for last in range(0, 70_000, 100):
        computed.append(0)
        backend._provide_rotations(last)
    assert max(computed) <= 2 * 4096 + 2 * 100
    assert sum(computed) < 2 * 75_000, "each position once"
    for n, (rope, dims) in enumerate(backend._writer.ropes):
        for at, wanted in zip(backend.program.state["rotations"][n], table(rope, dims, np.arange(70_000)), strict=True):
            got = np.ctypeslib.as_array((ctypes.c_float * wanted.size).from_address(int(at)))
            assert np.array_equal(got, wanted.reshape(-1))
    backend.close()


def test_more_kinds_of_rotations_than_kernels_know_are_a_clear_error(tmp_path_factory, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(layout, "NUM_ROTATIONS", 1)
    with pytest.raises(BackendError, match=r"rotate heads in more than 1 ways \(bases, scalings, sizes\); use --backend numpy"):
        make_backend("numba", tiny(tmp_path_factory, **GEMMA4["gemma4"]), EngineConfig(threads=1, max_rows=32))


@needs_vnni
@pytest.mark.parametrize("weight_format", ["q4_k", "q6_k", "q8_0"])
def test_activations_of_14_bits_are_ten_times_nearer_to_the_reference_than_of_8(tmp_path_factory, weight_format: str) -> None:
    """And formats without superblocks have the same bits with both."""
    checkpoint = tiny(tmp_path_factory, weight_format=weight_format, num_layers=2, intermediate_size=512)
    wanted = reference(checkpoint)
    in_8, in_14 = (computed("numba", checkpoint, activations=each, prompt_arithmetic="codes") for each in ("int8", "int14"))
    if weight_format == "q8_0":
        assert np.array_equal(in_8, in_14)
        return
    errors = [np.abs(got - wanted).mean() for got in (in_8, in_14)]
    assert errors[0] > 10 * errors[1] > 0
    assert errors[0] < 0.1 * np.abs(wanted).mean(), "the comparison sees rounding alone"


@needs_vnni
def test_a_cache_is_of_one_kind_of_activations(tmp_path_factory) -> None:
    checkpoint = tiny(tmp_path_factory, weight_format="q4_k", **SMALLEST)
    backends = [make_backend("numba", checkpoint, EngineConfig(threads=1, activations=each)) for each in ("auto", "int8", "int14")]
    assert not has_prompt_arithmetic(backends[2])
    cache = backends[0].new_cache(1, 64)
    forward(backends[1], cache, {0: TOKENS[:3]})
    with pytest.raises(BackendError, match="made for another model or other settings"):
        forward(backends[2], cache, {0: TOKENS[:3]})
    for backend in backends:
        backend.close()


def test_activations_of_14_bits_are_refused_where_they_cannot_be(tmp_path_factory, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tiny(tmp_path_factory, **SMALLEST)
    monkeypatch.setattr(isa, "has_sixteen_registers", lambda: False)
    with pytest.raises(BackendError, match=r"with activations int14 .* prompt_arithmetic is bf16; leave one of them at auto"):
        make_backend("numba", checkpoint, EngineConfig(activations="int14", prompt_arithmetic="bf16"))
    monkeypatch.setattr(isa, "has_sixteen_registers", lambda: True)
    with pytest.raises(BackendError, match=r"activations int14 needs a processor with AVX-512 VNNI, .*; leave it at auto"):
        make_backend("numba", checkpoint, EngineConfig(activations="int14"))
