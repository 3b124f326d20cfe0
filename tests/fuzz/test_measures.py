"""Damaged files of importance and of logits are refused, or give finite numbers. See `drive`."""

import random
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from cpuspec.evaluate.logits_file import LogitsFile, writing
from cpuspec.quantize.imatrix import Importance, read_importance, write_importance
from tests.fuzz.drive import check, mutate_bytes
from tests.fuzz.gguf_fields import structural_fields
from tests.fuzz.test_models import both

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
        rows = file.rows(window).log_probs()
        assert rows.shape == (file.context - 1 - file.context // 2, file.vocab_size)
        assert not np.isnan(rows).any()


def test_a_damaged_importance_matrix_is_refused_or_read() -> None:
    assert both(check(importance, 40))


def test_a_damaged_file_of_logits_is_refused_or_read() -> None:
    assert both(check(logits, 40))
