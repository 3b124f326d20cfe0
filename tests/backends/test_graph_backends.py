"""The ONNX graph means what the reference means, in every engine that runs it and from the files that an export writes."""

from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import onnx
import pytest

from cpuspec import backends
from cpuspec.backends import make_backend
from cpuspec.backends.numpy_backend import NumpyBackend
from cpuspec.backends.onnx_graph import KV_FORMATS, export_onnx
from cpuspec.checkpoints import Checkpoint
from cpuspec.config import Rope
from cpuspec.errors import BackendError
from cpuspec.formats.kv import get_kv_format, rounded
from cpuspec.model.rope import rope_table
from cpuspec.settings import EngineConfig
from tests.backends.models import TOKENS, every_backend, forward, in_chunks, reference, tiny

GRAPHS = ("onnxruntime", "openvino")
F32 = EngineConfig(threads=1, max_rows=64, kv_format="f32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    return tiny(tmp_path_factory, weight_format="q4_k", embed_format="q6_k")


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
