"""A small model with two layers and a chat template, opened once for a module."""

from pathlib import Path

from cpuspec import LLM
from cpuspec.checkpoints import Checkpoint, open_checkpoint
from cpuspec.settings import EngineConfig
from tools.make_tiny_model import make_tiny_gguf

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}


def tiny(directory: Path, **shape: int) -> Checkpoint:
    return open_checkpoint(make_tiny_gguf(directory / "tiny.gguf", context_length=1024, **SMALL | shape))


def loaded(checkpoint: Checkpoint, max_sequences: int = 4) -> LLM:
    return LLM(checkpoint, "none", "numba", settings=EngineConfig(threads=1, max_sequences=max_sequences, keep_packed=False))
