"""A model has the same bits on every instruction set of this processor: each runs in a process that is told of fewer features.

`test_bits.py` compares linear layers with a reference, on any processor. This is about the rest: norms, attention, embeddings.
"""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from llvmlite import binding

from cpuspec.backends import make_backend
from cpuspec.checkpoints import open_checkpoint
from cpuspec.kernels import isa
from cpuspec.platform import SYSTEM
from cpuspec.settings import EngineConfig
from tests.backends.models import forward
from tools.make_tiny_model import make_tiny_gguf

_V3 = ("avx", "avx2", "fma", "f16c", "sse3", "ssse3", "sse4.1", "sse4.2")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512vnni")
FEATURES = {"avx2": _V3, "avx_vnni": (*_V3, "avxvnni"), "avx512_vnni": _V4}  # by `isa.dot_isa`


def _chosen_and_digest(path: str) -> str:
    digest = hashlib.sha256()
    for kv_format in ("f16", "int4"):  # numbers, and codes behind a rotation
        backend = make_backend("numba", open_checkpoint(path), EngineConfig(threads=1, max_rows=32, kv_format=kv_format))
        cache = backend.new_cache(1, 64)
        for tokens in (range(5, 25), [3], [1, 4, 1]):  # many rows, and so few that weights are read in streams
            digest.update(np.ascontiguousarray(forward(backend, cache, {0: tokens}).logits).tobytes())
        backend.close()
    return f"{isa.dot_isa()} {digest.hexdigest()}"


def in_child(code: str, features: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run Python as on a processor of these features. Its machine code is kept beside that for this one, under another name."""
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "x86-64-v3",
        "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in features),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command, root = [sys.executable, "-c", code], Path(__file__).parents[2]
    return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)


def _in_child(path: Path, features: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return in_child(f"from tests.kernels.test_isa import _chosen_and_digest as f; print(f({str(path)!r}))", features)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Formats with nibbles, top bits, superblocks, bytes, a minimum and none."""
    path = tmp_path_factory.mktemp("isa") / "tiny.gguf"
    return make_tiny_gguf(path, "qwen3", weight_format="q4_k", output_format="q6_k", embed_format="q8_0", tied=False)


@pytest.mark.parametrize("name", ["avx2", *(pytest.param(name, marks=pytest.mark.slow) for name in FEATURES if name != "avx2")])
def test_a_model_has_the_same_bits_on_every_instruction_set(model: Path, name: str) -> None:
    if lacking := set(FEATURES[name]) - isa.features():
        pytest.skip(f"this processor lacks {', '.join(sorted(lacking))}")
    if name == isa.dot_isa() and not isa.has_tiles():
        pytest.skip(f"this processor has nothing beyond {name}")
    done = _in_child(model, FEATURES[name])
    assert done.stdout.split() == [name, _chosen_and_digest(str(model)).split()[1]], done.stderr


def test_a_processor_that_is_too_old_is_a_clear_error(model: Path) -> None:
    done = _in_child(model, ("avx", "sse4.2"))
    assert "BackendError: the numba backend needs a processor with avx2, fma, f16c" in done.stderr
    assert "--backend numpy" in done.stderr


def test_features_that_the_processor_lacks_are_refused_and_not_run(model: Path) -> None:
    host = binding.get_host_cpu_features()
    lacking = next(name for name in ("amx-tile", "avx512f", "avxifma", "xop") if not host[name])
    done = _in_child(model, (*_V3, lacking))
    assert f"BackendError: NUMBA_CPU_FEATURES names {lacking}, which this processor" in done.stderr


@pytest.mark.parametrize("hidden", ["amx-bf16", "amx-tile", "avx512f", "avx512bf16", None])
def test_bf16_tiles_are_used_only_with_every_instruction_that_fills_them(hidden: str | None, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """A virtual machine may hide one of them."""
    features = frozenset({"amx-bf16", "amx-tile", "avx512f", "avx512bf16"} - {hidden})
    monkeypatch.setattr(isa, "features", lambda: features)
    monkeypatch.setattr(isa, "SYSTEM", replace(SYSTEM, enable_tile_registers=lambda: True))
    assert isa.has_bf16_tiles.__wrapped__() == (hidden is None)
    assert isa.has_bf16_dots() == (hidden not in ("avx512f", "avx512bf16"))


ASSEMBLY = """
from cpuspec.kernels import linear, machine_code
for pair in ("q8_0 int8", "q8_0 int16", "int4_g32 int8", "f32 f32", "f16 f32", "bf16 rounded"):
    text = machine_code.assembly(linear.made(*pair.split()), 12)
    print(pair, "vpdpbusd" in text, "zmm" in text)
"""


@pytest.mark.parametrize("name", ["avx2", pytest.param("avx_vnni", marks=pytest.mark.slow)])
def test_the_kernels_of_a_mixtures_heads_are_compiled_for_processors_that_this_one_is_not(name: str) -> None:
    """They are not run here: `test_instructions.py` interprets them."""
    done = in_child(ASSEMBLY, FEATURES[name])
    lines = [line.rsplit(" ", 2) for line in done.stdout.splitlines()]
    assert len(lines) == 6, done.stderr
    for pair, dots, wide in lines:
        assert dots == str(name == "avx_vnni" and "int" in pair.split()[1]), pair
        assert wide == "False", pair
