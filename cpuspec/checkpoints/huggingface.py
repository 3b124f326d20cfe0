"""Hugging Face directories as checkpoints."""

from pathlib import Path

from cpuspec.checkpoints.checkpoint import Checkpoint
from cpuspec.errors import CheckpointError


def open_huggingface(path: Path) -> Checkpoint:
    """Raises CheckpointError: this reader is not there yet."""
    raise CheckpointError(f"{path} is a directory; wanted a GGUF file")
