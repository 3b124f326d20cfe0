"""Damaged notes beside other files, and files of importance and of logits: refused, made anew, or read. See `drive`."""

import math
import os
import random
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from cpuspec.checkpoints.download import fetch
from cpuspec.checkpoints.recipes import find_named
from cpuspec.evaluate.logits_file import LogitsFile, writing
from cpuspec.quantize.imatrix import Importance, read_importance, write_importance
from cpuspec.speculation.planner import costs
from tests.fuzz.drive import check, mutate_bytes, mutate_json
from tests.fuzz.gguf_fields import structural_fields
from tests.fuzz.test_models import both

CONTENT = b"the bytes of a model"
RECIPE = """
name = "fuzzed"
description = "a model"
architecture = "qwen2"
parameters = 1000
file = "m.gguf"
bytes = 20
sha256 = "SHA256"
licence = "Apache-2.0"

[[sources]]
kind = "huggingface"
name = "hf:some/one/m.gguf"

[[golden]]
prompt = "a"
token_ids = [1, 2, 3]

[layer_skip]
2 = [3, 4]
"""


def marker(rng: random.Random, directory: Path) -> None:
    """What says that a downloaded file was verified: damaged, the file is hashed again."""
    import hashlib

    os.environ["CPUSPEC_CACHE"] = str(directory)
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    (directory / "recipes").mkdir()
    (directory / "recipes" / "fuzzed.toml").write_text(RECIPE.replace("SHA256", sha256))
    path = directory / "models" / "fuzzed" / "m.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    seen = {"bytes": len(CONTENT), "mtime_ns": path.stat().st_mtime_ns, "sha256": sha256}
    path.with_name("m.gguf.verified").write_bytes(mutate_json(seen, rng))
    assert fetch(find_named("fuzzed")) == path


def kept_costs(rng: random.Random, directory: Path) -> None:
    """What forwards cost, as an earlier process measured it: damaged, it is measured again."""
    path = directory / "costs.json"
    kept = {"rows": [1, 2, 4], "seconds": [0.01, 0.011, 0.012], "num_bytes": [10, 12, 15], "further_s": [0, 0.0005, 0.001]}
    path.write_bytes(mutate_json(kept, rng))
    found = costs._read(path)
    if found is not None:
        found.observe(2, 0.02, 11)
        assert all(math.isfinite(found.forward_s(rows)) and found.forward_s(rows) > 0 for rows in (1, 3, 8, 100))


NAMES = [f"blk.{layer}.{part}.weight" for layer in range(2) for part in ("attn_q", "attn_k", "ffn_down")]


@cache
def importance_sample(suffix: str) -> tuple[bytes, list[tuple[int, int]]]:
    rng = np.random.default_rng(5)
    means = {name: rng.random((1 + number % 2 * 3, 24 + 8 * number), np.float32) for number, name in enumerate(NAMES)}
    counts = {name: np.arange(len(of_each), dtype=np.float32) + 1 for name, of_each in means.items()}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"sample{suffix}"
        write_importance(path, Importance(means, counts, 4, 128, "a text"))
        content = path.read_bytes()
    if suffix == ".gguf":
        return content, [(position, size) for _, position, size in structural_fields(content) if size]
    starts = [content.index(name.encode()) for name in NAMES]
    lengths = [(start + offset, 4) for start, name in zip(starts, NAMES, strict=True) for offset in (-4, len(name), len(name) + 4)]
    return content, [(0, 4), *lengths]


def importance(rng: random.Random, directory: Path) -> None:
    suffix = rng.choice((".gguf", ".dat"))
    content, fields = importance_sample(suffix)
    path = directory / f"importance{suffix}"
    path.write_bytes(mutate_bytes(content, rng, fields))
    found = read_importance(path)
    assert found.means
    assert all(np.isfinite(means).all() and (means >= 0).all() for means in found.means.values())
    assert found.chunks >= 0


@cache
def logits_sample() -> bytes:
    rng = np.random.default_rng(6)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "sample"
        with writing(path, rng.integers(0, 50, (3, 8)).tolist(), 50) as writer:
            for _ in range(3):
                writer.write(rng.standard_normal((3, 50), np.float32))
        return path.read_bytes()


def logits(rng: random.Random, directory: Path) -> None:
    path = directory / "logits"
    path.write_bytes(mutate_bytes(logits_sample(), rng, [(8, 4), (12, 4), (16, 4), (20, 4), (116, 4), (120, 4)]))
    file = LogitsFile(path)
    for window in range(len(file.windows)):
        count = file.context - 1 - file.context // 2
        rows = file.log_probs(window, 0, count)
        assert rows.shape == (count, file.vocab_size)
        assert not np.isnan(rows).any()


def test_a_damaged_importance_matrix_is_refused_or_read() -> None:
    assert both(check(importance, 40))


def test_a_damaged_file_of_logits_is_refused_or_read() -> None:
    assert both(check(logits, 40))


def test_a_damaged_note_costs_hashing_or_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(marker, 20)["answered"]
    assert check(kept_costs, 20)["answered"]
    monkeypatch.setattr("tests.fuzz.test_files.mutate_json", lambda value, rng: b"[" * 100_000)  # deeper than Python reads
    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path))
    for case in (marker, kept_costs):
        (tmp_path / case.__name__).mkdir()
        case(random.Random(0), tmp_path / case.__name__)
