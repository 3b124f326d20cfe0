"""Opens a checkpoint of any kind. The bytes decide on the kind, not the name."""

from dataclasses import replace
from pathlib import Path

from cpuspec.checkpoints.checkpoint import Checkpoint
from cpuspec.checkpoints.gguf import checkpoint_of
from cpuspec.checkpoints.gguf_parts import read_parts
from cpuspec.checkpoints.huggingface import open_huggingface
from cpuspec.checkpoints.local_models import read_manifest
from cpuspec.errors import CheckpointError


def open_checkpoint(path: str | Path, mmap: bool = True, adapts: bool = False) -> Checkpoint:
    """A GGUF file or a Hugging Face directory, checked and memory-mapped; where `mmap` is false, read into memory.

    Also a manifest of Ollama's, as `local_models.find_ollama` finds it. adapts: whether the caller applies `Checkpoint.adapters`.
    Raises CheckpointError if it is missing, damaged or not supported, or has adapters that would be left out.
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
    if (files := read_manifest(path)) is None:
        return checkpoint_of(read_parts(path, mmap))
    if files.adapters and not adapts:
        raise CheckpointError(
            f"{path} has an adapter beside its model, which is not applied here; merge both into one file: "
            f"cpuspec quantize {path} OUT.gguf --type f16"
        )
    return replace(checkpoint_of(read_parts(files.model, mmap)), adapters=files.adapters)
