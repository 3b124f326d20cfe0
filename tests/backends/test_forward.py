"""One forward, two backends: the compiled one means what the reference means, and keeps its row-invariance promise."""

import ctypes
import mmap
import sys
from dataclasses import replace

import numpy as np
import pytest

from cpuspec.backends import BACKENDS, OWN_SETTINGS, Backend, make_backend, numba_backend, packed
from cpuspec.checkpoints import Checkpoint
from cpuspec.config import Rope, RopeScaling
from cpuspec.errors import BackendError, CacheError
from cpuspec.formats import FORMATS, QuantTensor, packing
from cpuspec.kernels import layout
from cpuspec.kernels.kv_rows import CHUNK
from cpuspec.model.batch import ForwardBatch, ForwardStoppedError, Lists
from cpuspec.platform import SYSTEM
from cpuspec.sampling import argmax
from cpuspec.settings import EngineConfig
from tests.backends.models import (
    CLASSES,
    DEPTHS,
    GEMMA4,
    PARENTS,
    PATHS,
    SMALLEST,
    TOKENS,
    TREE,
    asked_to_stop,
    check_rows,
    computed,
    every_backend,
    forward,
    missing,
    read_until_stopped,
    reference,
    tiny,
)

FAMILIES = {
    "qwen2": {},
    "qwen2 untied": {"tied": False, "output_format": "q6_k"},
    "qwen3": {"architecture": "qwen3", "num_heads": 6, "num_kv_heads": 3, "head_dim": 32},
    "llama with o bias": {"architecture": "llama", "qkv_bias": True, "o_bias": True, "num_kv_heads": 4},
    "odd sizes": {
        "architecture": "llama", "weight_format": "f32", "hidden_size": 50, "intermediate_size": 70, "num_heads": 3,
        "num_kv_heads": 1, "head_dim": 18, "vocab_size": 301,
    },
    "gemma3": {"architecture": "gemma3", "head_dim": 32},
    "gemma4, values of keys": {**GEMMA4["gemma4, values of keys"], "head_dim": 32},
    "gemma4, E": {**GEMMA4["gemma4, E"], "head_dim": 32},
    "yarn": {"rope_scaling": RopeScaling("yarn", factor=4.0, original_context_length=64)},
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> Checkpoint:
    return tiny(tmp_path_factory, **FAMILIES[request.param])


# `tests/kernels` has the bits of each format's rows.
@pytest.fixture(
    scope="module", params=[name if name in CLASSES else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS]
)
def of_format(request, tmp_path_factory) -> Checkpoint:
    return tiny(tmp_path_factory, weight_format=request.param, **SMALLEST)


@pytest.fixture(scope="module", params=CLASSES)
def of_class(request, tmp_path_factory) -> Checkpoint:
    return tiny(tmp_path_factory, weight_format=request.param, **SMALLEST)


def _backend(checkpoint: Checkpoint, name: str = "numba", threads: int = 1, kv_format: str = "f32") -> Backend:
    return make_backend(name, checkpoint, EngineConfig(threads=threads, max_rows=64, kv_format=kv_format, keep_packed=False))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _kl(reference: np.ndarray, other: np.ndarray) -> float:
    r, o = _log_softmax(reference), _log_softmax(other)
    return float((np.exp(r) * (r - o)).sum(axis=-1).mean())


# Settings of a backend that change its arithmetic, and whether inputs of products are rounded to int8 with them.
ARITHMETICS: dict[str, list[tuple[dict[str, str], bool]]] = {
    "numba": [({}, True)],
    "numpy": [({"activations": "f32"}, False)],
    "torch": [({"weights": "values"}, False), ({"weights": "codes"}, False)],
    "onnxruntime": [({"activations": "f32"}, False), ({}, True)],
    "openvino": [({"activations": "f32"}, False), ({}, True)],
}
assert list(ARITHMETICS) == list(BACKENDS)


def _means_the_same(name: str, checkpoint: Checkpoint, weight_format: str) -> None:
    """With f32 inputs to what the order of f32 sums makes of logits around 1, with int8 ones to what rounding costs."""
    wanted = reference(checkpoint)
    for settings, rounds in ARITHMETICS[name]:
        got = computed(name, checkpoint, TOKENS, 16, **settings)
        assert got.shape == wanted.shape == (len(TOKENS), checkpoint.config.vocab_size)
        if not rounds or weight_format == "f32":
            assert np.abs(got - wanted).max() < 1e-4
        else:
            assert _kl(wanted, got) < 2e-3
            assert _kl(wanted, np.roll(got, 1, axis=0)) > 0.1


@every_backend()
def test_every_family_means_what_the_reference_means(family: Checkpoint, name: str) -> None:
    if not family.config.has_alike_heads and name in ("onnxruntime", "openvino"):
        with pytest.raises(BackendError, match="heads of one size in all layers"):
            make_backend(name, family, EngineConfig(threads=1))
        return
    _means_the_same(name, family, family.tensors["layers.0.q"].format.name)


@every_backend(("numba", "numpy"))
def test_every_format_means_what_the_reference_means(of_format: Checkpoint, name: str) -> None:
    _means_the_same(name, of_format, of_format.tensors["layers.0.q"].format.name)


@every_backend([name for name in BACKENDS if name not in ("numba", "numpy")])
def test_a_format_of_each_reader_means_what_the_reference_means_on_other_backends(of_class: Checkpoint, name: str) -> None:
    _means_the_same(name, of_class, of_class.tensors["layers.0.q"].format.name)


def test_a_row_of_a_family_depends_on_its_past_alone(family: Checkpoint) -> None:
    check_rows(family, threads=(2,))


def test_a_row_of_a_format_depends_on_its_past_alone(of_class: Checkpoint) -> None:
    check_rows(of_class)


@pytest.mark.parametrize("features", [2049, 3073, 3105])
def test_a_row_whose_inputs_no_number_of_threads_divides_has_the_same_bits_on_each(tmp_path_factory, features: int) -> None:
    checkpoint = tiny(tmp_path_factory, weight_format="f32", num_layers=1, intermediate_size=features)
    logits = [computed("numba", checkpoint, TOKENS[:3], 1, threads=threads) for threads in (1, 2, 3)]
    assert np.array_equal(logits[0], logits[1])
    assert np.array_equal(logits[0], logits[2])


def _after_a_tree(backend: Backend, prefix: int):
    """A cache that holds prefix and tree, and the tree's logits."""
    cache = backend.new_cache(1, 64)
    if prefix:
        forward(backend, cache, {0: TOKENS[:prefix]})
    return cache, forward(backend, cache, {0: TREE}, parents=PARENTS, positions=prefix + DEPTHS).logits


@pytest.mark.parametrize("prefix", [0, 3, 14, 16])
@every_backend()
def test_a_kept_path_is_what_feeding_it_alone_leaves(small, name: str, prefix: int) -> None:
    backend = small[name]
    for path in ([], [0], *PATHS):
        kept, _ = _after_a_tree(backend, prefix)
        kept.keep_path(0, prefix, np.array(path, np.int32))
        fed = backend.new_cache(1, 64)
        for token in TOKENS[:prefix] + [TREE[node] for node in path]:
            forward(backend, fed, {0: [token]})
        assert kept.lengths[0] == fed.lengths[0] == prefix + len(path)
        got, wanted = (forward(backend, cache, {0: TOKENS[30:33]}).logits for cache in (kept, fed))
        # Keys that a library sums in another order may be rounded the other way.
        assert np.abs(got - wanted).max() <= (0 if backend.row_invariant else 2e-3), path


@every_backend()
def test_a_path_that_is_none_is_refused(small, name: str) -> None:
    cache, _ = _after_a_tree(small[name], 3)
    for slot, length, path in ((0, 3, [7]), (0, 3, [0, 0]), (0, 3, [2, 1]), (0, 3, [-1]), (0, 11, []), (0, -1, [0]), (1, 3, [0])):
        with pytest.raises(CacheError):
            cache.keep_path(slot, length, np.array(path, np.int32))
        assert cache.lengths[0] == 10


@every_backend()
def test_logits_and_hidden_states_are_those_asked_for(tmp_path_factory, name: str) -> None:
    checkpoint = tiny(tmp_path_factory, num_layers=3)
    backend = _backend(checkpoint, name)
    everything = forward(backend, backend.new_cache(1, 64), {0: TOKENS}, hidden_layers=(0, 1, 2))
    some = forward(backend, backend.new_cache(1, 64), {0: TOKENS}, logit_rows=[44, 3], hidden_layers=(2, 0))
    assert np.allclose(some.logits, everything.logits[[44, 3]], atol=1e-4)
    assert np.array_equal(some.hidden[0], everything.hidden[2])
    assert np.array_equal(some.hidden[1], everything.hidden[0])
    assert not np.allclose(everything.hidden[0], everything.hidden[2], atol=1e-2)
    assert forward(backend, backend.new_cache(1, 64), {0: TOKENS}, logit_rows=[]).logits.shape == (0, checkpoint.config.vocab_size)
    # Outputs belong to the caller: the next forward leaves them alone.
    kept = everything.logits.copy()
    forward(backend, backend.new_cache(1, 64), {0: TOKENS[::-1]})
    assert np.array_equal(everything.logits, kept)
    backend.close()


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
    odd = {**FAMILIES["odd sizes"], "tied": False, "num_layers": 1}
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


HELD = {"the array": lambda logits: logits, "a row": lambda logits: logits[-1], "a part": lambda logits: logits[:, 3:7].T}


@pytest.mark.parametrize("vocab_size", [320, 301])  # padded to whole tiles, what is returned is a part already
@every_backend()
def test_logits_that_somebody_holds_stay_as_they_are(tmp_path_factory, name: str, vocab_size: int) -> None:
    """A backend may use an array again that nobody holds; the caller of the engine may hold what it was given, or any part."""
    backend = _backend(tiny(tmp_path_factory, num_layers=1, vocab_size=vocab_size), name)
    for part in HELD.values():
        cache, kept = backend.new_cache(1, 64), []
        for size in (1, 1, 2, 2, 1, 1):  # as many rows as before, and another number
            first = cache.lengths[0]
            mine = part(forward(backend, cache, {0: TOKENS[first : first + size]}).logits)
            kept.append((mine, mine.copy()))
        assert all(np.array_equal(mine, before) for mine, before in kept)
        assert len({before.tobytes() for _, before in kept}) == len(kept)
    backend.close()


def test_logits_that_seem_to_be_held_by_nobody_are_written_over(small, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: it is the look at who holds them that keeps them."""
    backend, cache = small["numba"], small["numba"].new_cache(1, 64)
    monkeypatch.setattr("cpuspec.backends.numba_backend.ref", lambda array: lambda: None)
    forward(backend, cache, {0: TOKENS[:1]})
    held = forward(backend, cache, {0: TOKENS[1:2]}).logits
    before = held.copy()
    forward(backend, cache, {0: TOKENS[2:3]})
    assert not np.array_equal(held, before)


@every_backend()
def test_best_ids_are_those_of_the_asked_rows_or_none(small, name: str) -> None:
    backend = small[name]
    for rows in ([44, 3, 3], list(range(16)), list(range(45)), []):
        output = forward(backend, backend.new_cache(1, 64), {0: TOKENS}, logit_rows=rows)
        assert output.best is None or output.best == argmax(output.logits).tolist()
        assert name != "numba" or output.best is not None


BAD: dict[type[Exception], list[dict]] = {
    BackendError: [
        {"tokens": [384, 1]},
        {"tokens": [-1, 1]},
        {"tokens": [1] * 65, "q_start": [0, 65], "positions": [0] * 65},
        {"tokens": [], "q_start": [0, 0], "positions": []},
        {"positions": [0]},
        {"positions": [-1, 0]},
        {"positions": [1 << 26, 0]},
        {"slots": [0, 0], "q_start": [0, 1, 2]},
        {"q_start": [0, 3]},
        {"q_start": [1, 2]},
        {"slots": [0, 1], "q_start": [0, 2, 2]},
        {"parents": [0, 0]},
        {"parents": [-1, -2]},
        {"parents": [-1]},
        {"logit_rows": [2]},
        {"logit_rows": [-1]},
        {"logit_rows": [1] * 65},
        {"hidden_layers": (2,)},
    ],
    CacheError: [
        {"slots": [2]},
        {"slots": [-1]},
        {"tokens": [1] * 30, "q_start": [0, 30], "positions": [0] * 30},
    ],
}


@every_backend()
@pytest.mark.parametrize(("error", "changes"), BAD.items(), ids=["batch", "cache"])
def test_a_batch_that_would_read_out_of_bounds_is_refused(small, name: str, error: type[Exception], changes: list[dict]) -> None:
    cache = small[name].new_cache(2, 24)
    for change in changes:
        fields = {"tokens": [1, 2], "positions": [0, 1], "slots": [0], "q_start": [0, 2], **change}
        hidden = fields.pop("hidden_layers", ())
        arrays = {key: np.array(value, np.int32) for key, value in fields.items()}
        with pytest.raises(error):
            small[name].forward(ForwardBatch(**arrays, hidden_layers=hidden), cache)
        assert not any(cache.lengths), change


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    checkpoint = tiny(tmp_path_factory)
    # With activations in int8, ONNX Runtime rounds one row otherwise than several where the processor has no VNNI.
    exact = {name: {"activations": "f32"} for name in OWN_SETTINGS["activations"][1]}
    settings = {name: EngineConfig(threads=1, max_rows=64, **exact.get(name, {})) for name in BACKENDS if not missing(name)}
    backends = {name: make_backend(name, checkpoint, one) for name, one in settings.items()}
    yield backends
    for backend in backends.values():
        backend.close()


@pytest.mark.parametrize("array", [np.array([1]), np.array([1.0], np.float32), np.array([[1]], np.int32)], ids=str)
@every_backend()
def test_arrays_of_another_type_are_refused(small, name: str, array) -> None:
    backend = small[name]
    good = np.array([0], np.int32)
    with pytest.raises(BackendError, match="int32"):
        backend.forward(ForwardBatch(array, good, good, np.array([0, 1], np.int32)), backend.new_cache(1, 8))


@every_backend()
def test_a_batch_of_lists_is_a_batch_of_arrays(small, name: str) -> None:
    """Also a tree, several sequences, chosen rows and hidden states: everything that a batch has."""
    fields = ([5, 6, 7, 8, 9], [0, 1, 1, 0, 1], [1, 0], [0, 3, 5], [-1, 0, 0, -1, 3], [4, 1, 2])
    outputs = []
    for batch in (ForwardBatch(*fields, (1,)), ForwardBatch(*(np.array(field, np.int32) for field in fields), (1,))):
        cache = small[name].new_cache(2, 24)
        outputs.append(small[name].forward(batch, cache))
        assert cache.lengths == [2, 3]
        assert batch.lists == Lists(*fields)
        arrays = (batch.tokens, batch.positions, batch.slots, batch.q_start, batch.parents, batch.logit_rows)
        for array, field in zip(arrays, fields, strict=True):
            assert array.dtype == np.int32
            assert array.tolist() == field
    assert np.array_equal(outputs[0].logits, outputs[1].logits)
    assert np.array_equal(outputs[0].hidden, outputs[1].hidden)
    assert len(np.unique(outputs[0].logits, axis=0)) == 3


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


def test_weights_from_the_disk_give_the_same_bits(of_class: Checkpoint, tmp_path, monkeypatch) -> None:
    wanted = computed("numba", of_class)
    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(packed, "_SMALLEST_BYTES", 0)
    for _ in range(2):
        assert np.array_equal(computed("numba", of_class, keep_packed=True), wanted)
        assert len(packed.packed_files()) == 1


def test_an_unknown_backend_is_a_clear_error(tmp_path_factory) -> None:
    with pytest.raises(BackendError, match="numba"):
        make_backend("cuda", tiny(tmp_path_factory), EngineConfig())


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
