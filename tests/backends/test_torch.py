"""The torch backend: the same model as the reference, in every dtype, with weights as values and as codes, recorded or not.

What all backends have in common is tested beside them; this file is about what torch alone has.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from cpuspec.backends import torch_backend, torch_weights
from cpuspec.backends.torch_backend import TorchBackend, best_ids, find_device
from cpuspec.backends.torch_cache import KV_LAYOUTS, Storage
from cpuspec.backends.torch_graphs import Outputs, Recorder
from cpuspec.backends.torch_weights import Codes
from cpuspec.checkpoints import Checkpoint
from cpuspec.errors import BackendError, CacheError
from cpuspec.formats import FORMATS, QuantTensor, get_format
from cpuspec.formats.kv import KV_FORMATS, rounded
from cpuspec.sampling import argmax
from cpuspec.settings import EngineConfig
from tests.backends.models import DEPTHS, PARENTS, TOKENS, TREE, forward, in_chunks, tiny

CPU = torch.device("cpu")
BLOCK_FORMATS = [name for name, format in FORMATS.items() if format.block_size > 1]
F32 = EngineConfig(max_rows=64, threads=1, kv_format="f32", device="cpu")


def _matrix(name: str) -> QuantTensor:
    """Values of many magnitudes."""
    values = (
        np.random.default_rng(0).standard_normal((37, 768), np.float32) * np.geomspace(1e-4, 1e2, 37, dtype=np.float32)[:, None]
    )
    return QuantTensor.encode(get_format(name), values)


# -------------------------------------------------------------------------------------------------------- weights and the cache


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_codes_have_the_values_of_the_file_bit_for_bit(name: str) -> None:
    tensor = _matrix(name)
    codes, wanted = Codes(tensor, torch.float32, CPU), tensor.dequantize()
    if tensor.format.rotated:
        wanted = tensor.format.affine.decode(tensor.format.split(tensor.data))
    assert np.array_equal(codes.values(slice(0, 37)).numpy(), wanted)
    assert np.array_equal(codes.values(slice(5, 9)).numpy(), wanted[5:9])


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_products_of_codes_are_those_of_their_values(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch_weights, "_CHUNK_VALUES", 10 * 768)  # the last of four chunks is shorter
    tensor = _matrix(name)
    codes, weights = Codes(tensor, torch.float32, CPU), tensor.dequantize()
    for rows in (0, 1, 9):
        x = np.random.default_rng(1).standard_normal((rows, 768), np.float32)
        got, wanted = codes.times(torch.from_numpy(x)).numpy(), x @ weights.T
        assert got.shape == wanted.shape
        assert (np.abs(got - wanted) <= 1e-6 * np.abs(x) @ np.abs(weights).T).all()


@pytest.mark.parametrize("name", KV_FORMATS)
@pytest.mark.parametrize("dims", [18, 64, 80])
def test_keys_and_values_are_rounded_to_the_references_bits(name: str, dims: int) -> None:
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((2, 3, 50, dims)).astype(np.float32) * np.geomspace(1e-9, 3e4, 50, dtype=np.float32)[:, None]
    rows[0, 0, :5] = 0
    rows[0, 1, 0, 3], rows[0, 1, 1, 3], rows[0, 1, 2, 3] = 1e9, np.inf, np.nan
    layout, format = KV_LAYOUTS[name], KV_FORMATS[name]
    got = layout.decode(layout.encode(torch.from_numpy(rows)), dims).numpy()
    assert np.array_equal(got, rounded(format, rows), equal_nan=True)
    assert list(KV_LAYOUTS) == list(KV_FORMATS)


@pytest.mark.parametrize("name", KV_LAYOUTS)
def test_a_slot_grows_with_what_it_holds_and_keeps_it(name: str) -> None:
    storage = Storage(KV_LAYOUTS[name], [(3, 80, 80)] * 2, 1000, CPU)
    rows = torch.from_numpy(np.random.default_rng(3).standard_normal((700, 2, 3, 80), np.float32))
    sizes = []
    for start in range(0, 700, 7):
        storage.provide(start + 7)
        sizes.append(storage.size)
        for layer in range(2):
            some = rows[start : start + 7, layer]
            storage.append(layer, torch.arange(start, start + 7), some, -some)
    assert sorted(set(sizes)) == [256, 512, 1000]
    layout = KV_LAYOUTS[name]
    for layer in range(2):
        keys, values = storage.read(layer, 700)
        wanted = layout.decode(layout.encode(rows[:, layer].transpose(0, 1)), 80)
        assert torch.equal(keys, wanted)
        assert torch.equal(values, layout.decode(layout.encode(-rows[:, layer].transpose(0, 1)), 80))


def test_a_slot_for_which_there_is_no_memory_says_what_would_help() -> None:
    storage = Storage(KV_LAYOUTS["f32"], [(1000, 1000, 1000)] * 1000, 1 << 40, CPU)
    with pytest.raises(CacheError, match="context_length"):
        storage.provide(1 << 40)
    assert storage.size == 0


# ------------------------------------------------------------------------------------------------------------------ the forward


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    return tiny(tmp_path_factory)


@pytest.mark.parametrize("weights", ["values", "codes"])
def test_fewer_bits_in_products_cost_what_they_must_and_no_more(checkpoint: Checkpoint, weights: str) -> None:
    wanted = in_chunks(TorchBackend(checkpoint, F32), TOKENS)
    loss = {}
    for dtype in ("f32", "f16", "bf16"):
        got = in_chunks(TorchBackend(checkpoint, replace(F32, dtype=dtype, weights=weights)), TOKENS)
        loss[dtype] = np.abs(got - wanted).max() / wanted.std()
    assert loss["f32"] < 1e-5 < loss["f16"] < 1e-2 < loss["bf16"] * 4 < 0.4


def test_scores_in_parts_are_scores(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TorchBackend(checkpoint, F32)
    whole = in_chunks(backend, TOKENS)
    monkeypatch.setattr(torch_backend, "_MAX_SCORES", 1000)
    assert np.abs(in_chunks(backend, TOKENS) - whole).max() < 1e-5


def test_best_ids_are_the_argmax_and_minus_one_for_what_it_refuses() -> None:
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((7, 301)).astype(np.float32)
    rows[1, [17, 200]] = 9
    rows[2, 300], rows[3, 5], rows[4] = np.nan, np.inf, -np.inf
    rows[5, :300] = -np.inf
    best = best_ids(torch.from_numpy(rows)).tolist()
    assert [best[i] for i in (2, 3, 4)] == [-1] * 3
    good = [0, 1, 5, 6]
    assert [best[i] for i in good] == argmax(rows[good]).tolist()
    for row in rows[2:5]:
        with pytest.raises(BackendError):
            argmax(row)


# ----------------------------------------------------------------------------------------------------------- recorded and replayed


def _rerun(run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], object]]:
    """What a recording does, without a GPU: the same run again, over the memory of the first."""
    outputs = list(run())

    def replay() -> None:
        outputs[:] = run()

    return outputs, replay


def _recording(checkpoint: Checkpoint) -> TorchBackend:
    backend = TorchBackend(checkpoint, F32)
    backend.recorder = Recorder(_rerun)
    return backend


@pytest.fixture
def recording(checkpoint: Checkpoint) -> TorchBackend:
    return _recording(checkpoint)


def test_replayed_forwards_are_forwards(tmp_path_factory) -> None:
    """Token by token past a span of 256, with rollbacks, trees, kept paths, other sequences between, and hidden states."""
    checkpoint = tiny(tmp_path_factory, architecture="gemma3", head_dim=32)
    plain, recording, rng = TorchBackend(checkpoint, F32), _recording(checkpoint), np.random.default_rng(6)
    caches = [backend.new_cache(2, 600) for backend in (plain, recording)]
    for turn in range(120):
        slot, kind = int(rng.integers(2)), int(rng.integers(4))
        rows = {slot: rng.integers(0, 300, 5).tolist()}
        options: dict = {"hidden_layers": (1, 0)} if turn % 3 == 0 else {"logit_rows": [4, 2]}
        if kind == 0:
            rows = {slot: TREE}
            options = {"parents": PARENTS, "positions": caches[0].lengths[slot] + DEPTHS}
        if kind == 1:
            rows = {1 - slot: [7, 8, 9], slot: [int(rng.integers(300))] * 2}
        wanted, got = (forward(b, c, rows, **options) for b, c in zip((plain, recording), caches, strict=True))
        assert np.abs(got.logits - wanted.logits).max() < 1e-4
        assert got.best == argmax(got.logits).tolist()
        for ours, theirs in zip(got.hidden, wanted.hidden, strict=True):
            assert np.abs(ours - theirs).max() < 1e-4
        length = int(caches[0].lengths[slot])
        for cache in caches:
            if kind == 0:
                cache.keep_path(slot, length - 7, np.array([0, 2, 6], np.int32))
            elif turn % 5 == 0:
                cache.truncate(slot, length - 1)
    assert max(caches[0].lengths) > 256
    assert recording.recorder is not None
    assert recording.recorder.num_replays > 40


def test_what_was_forgotten_is_not_seen_whatever_it_is(checkpoint: Checkpoint, recording: TorchBackend) -> None:
    cache = recording.new_cache(1, 300)
    forward(recording, cache, {0: TOKENS[:9]})
    storage = cache.storage(0)
    with torch.inference_mode():
        for layer in range(2):
            rows = torch.full((11, *storage.read(layer, 1)[0].shape[::2]), torch.inf)
            storage.append(layer, torch.arange(9, 20), rows, rows)
    got = [forward(recording, cache, {0: [token]}).logits[0] for token in TOKENS[9:14]]
    assert np.abs(np.array(got) - in_chunks(TorchBackend(checkpoint, F32), TOKENS[:14])[9:]).max() < 1e-4


def test_recordings_are_forgotten_with_the_memory_they_know(recording: TorchBackend) -> None:
    recorder = recording.recorder
    assert recorder is not None
    cache = recording.new_cache(1, 600)
    for token in TOKENS[:3]:
        forward(recording, cache, {0: [token]})
    assert len(recorder.recordings) == 1
    for _ in range(5):
        forward(recording, cache, {0: [1] * 64})  # grows
    assert not recorder.recordings
    for token in TOKENS[:3]:
        forward(recording, cache, {0: [token]})
    assert len(recorder.recordings) == 1
    recorder.recordings.clear()  # as a real recording, which holds no storage
    recorder.seen["something"] = None
    del cache
    assert not recorder.seen


# --------------------------------------------------------------------------------------------------------------------- settings


def test_only_a_backend_with_the_same_kind_of_weights_shares_them(checkpoint: Checkpoint) -> None:
    first = TorchBackend(checkpoint, F32)
    assert TorchBackend(checkpoint, F32, first).shared_bytes == first.weight_bytes
    for other in ({"dtype": "bf16"}, {"weights": "codes"}):
        second = TorchBackend(checkpoint, replace(F32, **other), first)
        assert second.shared_bytes == 0
        assert second.weight_bytes < first.weight_bytes


def test_devices_that_are_not_there_are_named() -> None:
    assert find_device("cpu") == CPU
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name, wanted in (
        ("abacus", "wanted auto, cpu, cuda"),
        ("meta", "not supported"),
        ("cuda:99", "device 'cuda:99' is not there"),
    ):
        with pytest.raises(BackendError, match=wanted):
            find_device(name)
