"""Damaged heads are refused or drafted with: directories and GGUF files of every layout. See `drive`."""

import random
import tempfile
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cpuspec.backends import make_backend
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.checkpoints.heads import find_reader, own_mtp
from cpuspec.model.batch import ForwardBatch
from cpuspec.settings import EngineConfig
from tests import block_heads, heads
from tests.fuzz.drive import check, mutate_bytes
from tests.fuzz.gguf_fields import structural_fields
from tests.fuzz.test_models import both, damage, made_files, write_files
from tools.make_tiny_model import make_tiny_gguf, make_tiny_hf, prediction_weights, random_weights, tiny_config, write_gguf

SMALL = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_layers": 4, "vocab_size": 320}
DIRECTORIES: dict[str, Any] = {
    "EAGLE-3": heads.make_eagle3,
    "EAGLE-3 of speculators": lambda path, target: heads.make_eagle3(path, target, layout="speculators", fc_norm=True),
    "P-EAGLE": lambda path, target: heads.make_eagle3(path, target, layout="speculators", num_layers=2, mask_id=300),
    "EAGLE": heads.make_eagle1,
    "DFlash": block_heads.make_block_head,
    "DSpark": lambda path, target: block_heads.make_block_head(path, target, markov="gated", confidence="markov"),
    "DFlash of speculators": lambda path, target: block_heads.make_block_head(path, target, layout="speculators", num_drafted=96),
}
FILES = dict.fromkeys(("EAGLE-3", "DFlash", "DSpark"), heads.as_gguf)
MTP = "multi-token prediction"
MTP_ALONE = "multi-token prediction in a file of its own"


@cache
def target() -> Checkpoint:
    with tempfile.TemporaryDirectory() as directory:
        return open_checkpoint(make_tiny_gguf(Path(directory) / "target.gguf", weight_format="f32", **SMALL), mmap=False)


@cache
def directory_sample(kind: str) -> dict[str, bytes]:
    def make(directory: Path) -> None:
        if kind == MTP:
            make_tiny_hf(directory, "qwen2", **SMALL)
            heads.add_mtp(directory)
        else:
            directory.rmdir()
            DIRECTORIES[kind](directory, target().config)

    return made_files(make)


@cache
def file_sample(kind: str) -> tuple[bytes, list[tuple[int, int]]]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "head.gguf"
        if kind in (MTP, MTP_ALONE):
            config = tiny_config(**{**SMALL, "num_layers": SMALL["num_layers"] + 1})
            weights, last = random_weights(config), f"layers.{SMALL['num_layers']}."
            weights = {name: one for name, one in weights.items() if kind == MTP or not name.startswith("layers.") or last in name}
            write_gguf(path, config, weights, weight_format="f32", predicting=prediction_weights(config))
        else:
            FILES[kind](DIRECTORIES[kind](Path(directory) / "head", target().config), path)
        content = path.read_bytes()
    return content, [(position, size) for _, position, size in structural_fields(content) if size]


def use(path: Path) -> None:
    """Open a head beside its target and run what can be run of it; what is no head is a model, with one of its own or none."""
    found = find_reader(path)
    if found is None:
        checkpoint = open_checkpoint(path)
        if not checkpoint.prediction_layers:
            return
        head = own_mtp(checkpoint)
    else:
        head = found[0].read(found[1], target())
    with closing(make_backend("numpy", head.model, EngineConfig(threads=1, max_rows=8))) as backend, np.errstate(all="ignore"):
        hidden_size = backend.config.hidden_size
        described = backend.config.head
        if described and described.feature_size:
            assert backend.project(np.ones((2, described.feature_size), np.float32), "encode").shape == (2, hidden_size)
        batch = ForwardBatch(
            tokens=np.array([1, 2], np.int32),
            positions=np.arange(2, dtype=np.int32),
            slots=np.zeros(1, np.int32),
            q_start=np.array([0, 2], np.int32),
            hidden=np.ones((2, hidden_size), np.float32) if backend.config.takes_hidden else None,
        )
        logits = backend.forward(batch, backend.new_cache(1, 8)).logits
        assert logits.shape == (2, backend.config.num_logits)


def head_directory(rng: random.Random, directory: Path) -> None:
    files = dict(directory_sample(rng.choice([*DIRECTORIES, MTP])))
    damage(files, rng.choice(("config", "config", "header", "header", "bytes")), rng)
    write_files(directory, files)
    use(directory)


def head_file(rng: random.Random, directory: Path) -> None:
    content, fields = file_sample(rng.choice([*FILES, MTP, MTP_ALONE]))
    end = fields[-1][0] if rng.random() < 0.5 else len(content)
    (directory / "head.gguf").write_bytes(mutate_bytes(content[:end], rng, fields) + content[end:])
    use(directory / "head.gguf")


def test_a_damaged_directory_of_a_head_is_refused_or_drafts() -> None:
    assert both(check(head_directory, 30))


def test_a_damaged_gguf_file_of_a_head_is_refused_or_drafts() -> None:
    assert both(check(head_file, 25))
