"""The ONNX graph means what the reference means, in every engine that runs it and from the files that an export writes."""

from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import onnx
import pytest

from cpuspec import backends
from cpuspec.backends import Backend, make_backend
from cpuspec.backends.numpy_backend import NumpyBackend
from cpuspec.backends.onnx_export import export_onnx
from cpuspec.backends.onnx_graph import KV_FORMATS
from cpuspec.checkpoints import Checkpoint
from cpuspec.config import Rope
from cpuspec.errors import BackendError
from cpuspec.formats.kv import get_kv_format, rounded
from cpuspec.model.rope import rope_table
from cpuspec.settings import EngineConfig
from tests.backends.models import DEPTHS, PARENTS, TOKENS, TREE, every_backend, forward, in_chunks, reference, tiny

GRAPHS = ("onnxruntime", "openvino")
F32 = EngineConfig(threads=1, max_rows=64, kv_format="f32")
EXACT = replace(F32, activations="f32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    return tiny(tmp_path_factory, weight_format="q4_k", embed_format="q6_k")


@pytest.fixture(scope="module", params=every_backend(GRAPHS).args[1])
def backend(request, checkpoint: Checkpoint):
    made = make_backend(request.param, checkpoint, EXACT)
    yield made
    made.close()


@every_backend(GRAPHS)
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_keys_and_values_are_rounded_as_the_kv_format_rounds_them(checkpoint: Checkpoint, kv_format: str, name: str) -> None:
    engine = EngineConfig(threads=1, max_rows=64, kv_format=kv_format)
    made = make_backend(name, checkpoint, replace(engine, activations="f32"))
    forward(made, cache := made.new_cache(1, 64), {0: TOKENS})
    arrays = [array[:, : len(TOKENS)] for array in cache.storage(0).arrays]
    assert all(np.array_equal(array, rounded(get_kv_format(kv_format), array)) for array in arrays)
    assert all(np.ptp(array) > 0 for array in arrays)
    got, wanted, unrounded = in_chunks(made, TOKENS, 20), reference(checkpoint, TOKENS, kv_format), reference(checkpoint)
    if name == "openvino":  # the rows of a run see each other's unrounded
        assert np.abs(got - wanted).max() < 3 * np.abs(unrounded - wanted).max() + 1e-4
    else:
        assert np.abs(got - wanted).max() < {"f32": 1e-4, "f16": 2e-3, "bf16": 2e-2}[kv_format]
        assert kv_format == "f32" or np.square(got - wanted).mean() < 0.2 * np.square(got - unrounded).mean()
    made.close()


@every_backend(GRAPHS)
@pytest.mark.parametrize("kv_format", ["int8", "int4"])
def test_a_kv_format_that_a_graph_cannot_round_to_is_refused(checkpoint: Checkpoint, name: str, kv_format: str) -> None:
    with pytest.raises(BackendError, match=f"{kv_format}; wanted one of f32, f16, bf16"):
        make_backend(name, checkpoint, EngineConfig(kv_format=kv_format))


def test_forgotten_tokens_leave_no_trace(backend: Backend) -> None:
    cache = backend.new_cache(1, 400)
    forward(backend, cache, {0: TOKENS[:20]})
    for _ in range(6):  # beyond the room of a slot's arrays, which grow and shrink again
        forward(backend, cache, {0: [7] * 60})
    cache.truncate(0, 20)
    got = np.concatenate([forward(backend, cache, {0: TOKENS[20:21]}).logits, forward(backend, cache, {0: TOKENS[21:]}).logits])
    assert np.allclose(got, in_chunks(backend, TOKENS)[20:], atol=1e-5)


def test_sequences_of_a_batch_do_not_see_each_other(backend: Backend) -> None:
    cache = backend.new_cache(3, 64)
    forward(backend, cache, {2: TOKENS[:20]})
    both = forward(backend, cache, {1: TOKENS[:9], 2: TOKENS[20:21]}, logit_rows=[9, 3, 0], hidden_layers=(1,))
    alone = [forward(backend, backend.new_cache(1, 64), {0: TOKENS[:9]}, hidden_layers=(1,)), in_chunks(backend, TOKENS[:21], 20)]
    assert np.array_equal(both.logits[0], alone[1][20])
    assert np.array_equal(both.logits[1:], alone[0].logits[[3, 0]])
    assert np.array_equal(both.hidden[0][:9], alone[0].hidden[0])


@pytest.mark.parametrize("prefix", [0, 3, 21])
def test_a_tree_row_means_its_path(checkpoint: Checkpoint, backend: Backend, prefix: int) -> None:
    logits = []
    for made in (backend, NumpyBackend(checkpoint, F32, np.float64)):
        cache = made.new_cache(1, 64)
        if prefix:
            forward(made, cache, {0: TOKENS[:prefix]})
        logits.append(forward(made, cache, {0: TREE}, parents=PARENTS, positions=prefix + DEPTHS).logits)
        cache.keep_path(0, prefix, np.array([0, 2, 6], np.int32))
        logits[-1] = np.concatenate([logits[-1], forward(made, cache, {0: TOKENS[30:33]}).logits])
    assert np.abs(logits[0] - logits[1]).max() < 1e-4
    chain = forward(backend, (cache := backend.new_cache(1, 64)), {0: TOKENS[:prefix] + TREE}).logits[prefix:]
    assert cache.lengths[0] == prefix + len(TREE)
    assert np.abs(logits[0][2:7] - chain[2:]).max() > 0.1  # which the tree is not


@every_backend(GRAPHS)
def test_positions_far_out_are_turned_as_exactly_as_the_engine_can(tmp_path_factory, name: str) -> None:
    """OpenVINO computes the sines of doubles in f32, where a position of a million has steps of 1/16."""
    checkpoint = tiny(tmp_path_factory, weight_format="f32")
    logits = []
    for made in (make_backend(name, checkpoint, F32), NumpyBackend(checkpoint, F32, np.float64)):
        cache = made.new_cache(1, 64)
        logits.append(
            forward(made, cache, {0: TOKENS[:8]}, positions=[0, 1, 99_991, 99_992, 99_995, 1_000_003, 1_000_004, 1 << 20])
        )
    assert np.abs(logits[0].logits - logits[1].logits).max() < {"onnxruntime": 1e-4, "openvino": 1e-1}[name]
    assert (
        np.abs(np.diff(rope_table(Rope(), checkpoint.config.head_dim, np.array([1 << 20, (1 << 20) + 1]))[0], axis=0)).max() > 0.1
    )


# ---------------------------------------------------------------------------------------------------------------------- exports


def _run_file(path: Path, checkpoint: Checkpoint, tokens: list[int]) -> np.ndarray:
    """Logits from the written files alone, and an empty past."""
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    c, n = checkpoint.config, len(tokens)
    past = np.zeros((c.num_kv_heads, 0, c.head_dim), np.float32)
    inputs = {
        "tokens": np.array(tokens),
        "positions": np.arange(n),
        "visible": np.tri(n, dtype=np.bool_),
        "logit_rows": np.arange(n),
    }
    inputs |= {f"past_{kind}.{i}": past for kind in ("keys", "values") for i in range(c.num_layers)}
    return session.run(["logits"], inputs)[0]


@pytest.mark.parametrize("weight_format", ["q4_k", "bf16", "int4_g64_asym"])
def test_an_export_is_the_model_in_two_files(tmp_path_factory, tmp_path: Path, weight_format: str) -> None:
    checkpoint = tiny(tmp_path_factory, weight_format=weight_format)
    num_bytes = export_onnx(checkpoint, tmp_path / "model.onnx", "f32", "f32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == num_bytes
    assert (tmp_path / "model.onnx").stat().st_size < (tmp_path / "model.onnx.data").stat().st_size
    onnx.checker.check_model(tmp_path / "model.onnx")
    got = _run_file(tmp_path / "model.onnx", checkpoint, TOKENS)
    assert np.abs(got - reference(checkpoint)).max() < 1e-4


def test_tied_matrices_are_written_once(tmp_path_factory, tmp_path: Path) -> None:
    sizes = [
        export_onnx(tiny(tmp_path_factory, weight_format="q8_0", tied=tied), tmp_path / f"{tied}.onnx") for tied in (True, False)
    ]
    assert sizes[1] - sizes[0] > 384 * 256  # codes of a byte each


def test_an_export_overwrites_nothing_and_leaves_nothing_behind(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "model.onnx.data").write_text("mine")
    with pytest.raises(BackendError, match="exists; remove it"):
        export_onnx(checkpoint, tmp_path / "model.onnx")
    for path, wanted in ((tmp_path / "model.pb", r"ends with \.onnx"), (tmp_path / "no" / "model.onnx", "cannot be written")):
        with pytest.raises(BackendError, match=wanted):
            export_onnx(checkpoint, path)
    with pytest.raises(BackendError, match="wanted one of auto, int8, f32"):
        export_onnx(checkpoint, tmp_path / "other.onnx", "int4")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx.data"]


@pytest.mark.parametrize(
    ("name", "missing", "extra"),
    [("onnxruntime", "onnx", "onnx"), ("onnxruntime", "onnxruntime", "onnx"), ("openvino", "openvino", "openvino")],
)
def test_a_missing_package_is_named_with_the_remedy(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, name: str, missing: str, extra: str
) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: None if name == missing else ModuleSpec(name, None))
    with pytest.raises(BackendError, match=rf"{missing}, which is not installed; pip install 'cpuspec\[{extra}\]'"):
        make_backend(name, checkpoint, F32)
