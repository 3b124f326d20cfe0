"""Opens a checkpoint of any kind. The bytes decide on the kind, not the name."""

from pathlib import Path

from cpuspec.checkpoints.checkpoint import Checkpoint
from cpuspec.checkpoints.gguf import checkpoint_of
from cpuspec.checkpoints.gguf_parts import read_parts
from cpuspec.checkpoints.huggingface import open_huggingface
from cpuspec.errors import CheckpointError


def open_checkpoint(path: str | Path, mmap: bool = True) -> Checkpoint:
    """A GGUF file or a Hugging Face directory, checked and memory-mapped; where `mmap` is false, read into memory.

    Raises CheckpointError if it is missing, damaged or not supported.
    """
    path = Path(path)
    try:
        is_directory = path.is_dir()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if is_directory:
        if not (path / "config.json").exists():
            raise CheckpointError(
                f"{path / 'config.json'} does not exist, so this is no Hugging Face model; "
                "give a model's directory, a GGUF file, or a recipe's name"
            )
        return open_huggingface(path, mmap)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} is only a part of a model; give the directory that holds it and config.json")
    return checkpoint_of(read_parts(path, mmap))
