"""Trained draft heads, each for one target. A layout is a row of `READERS`, which recognizes it by its metadata."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cpuspec.checkpoints.checkpoint import Checkpoint
from cpuspec.checkpoints.fields import Fields
from cpuspec.checkpoints.heads.assistant import is_assistant, read_assistant
from cpuspec.checkpoints.heads.dflash import is_block_head, read_block_head
from cpuspec.checkpoints.heads.eagle import is_eagle1, is_eagle3, read_eagle1, read_eagle3
from cpuspec.checkpoints.heads.gguf import is_of_architecture, read_gguf_block, read_gguf_eagle3
from cpuspec.checkpoints.heads.head import Head, HeadFiles, HeadNorm
from cpuspec.checkpoints.heads.medusa import is_medusa, read_medusa
from cpuspec.checkpoints.heads.mlp_speculator import is_mlp_speculator, read_mlp_speculator
from cpuspec.checkpoints.heads.mtp import is_gguf_mtp, is_mtp, own_mtp, read_gguf_mtp, read_mtp

__all__ = ["READERS", "Head", "HeadFiles", "HeadNorm", "HeadReader", "find_reader", "is_named_head", "own_mtp", "reader_of"]


class HeadReader(NamedTuple):
    """How one layout is recognized, and read beside the target that it is for (CheckpointError where it does not fit)."""

    name: str
    recognizes: Callable[[HeadFiles], bool]
    read: Callable[[HeadFiles, Checkpoint], Head]


READERS = (
    HeadReader("Gemma 4's assistant", is_assistant, read_assistant),
    HeadReader("DFlash", is_block_head, read_block_head),
    HeadReader("EAGLE-3", is_eagle3, read_eagle3),
    HeadReader("EAGLE", is_eagle1, read_eagle1),
    HeadReader("multi-token prediction", is_mtp, read_mtp),
    HeadReader("Medusa", is_medusa, read_medusa),
    HeadReader("MLP speculator", is_mlp_speculator, read_mlp_speculator),
    HeadReader("EAGLE-3 as GGUF", partial(is_of_architecture, "eagle3"), read_gguf_eagle3),
    HeadReader("DFlash as GGUF", partial(is_of_architecture, "dflash"), read_gguf_block),
    HeadReader("multi-token prediction as GGUF", is_gguf_mtp, read_gguf_mtp),
)


_NAMES = re.compile(r"eagle|dflash|dspark|medusa|mtp|speculator|assistant", re.IGNORECASE)


def is_named_head(fields: Fields) -> bool:
    """Whether a config.json names a kind of head, as its model or in a field. Some kinds have names of ordinary models."""
    kinds = [fields.value(key) for key in ("model_type", "speculators_model_type")]
    return "medusa_num_heads" in fields or any(_NAMES.search(str(name)) for name in [*fields.items("architectures"), *kinds])


def reader_of(files: HeadFiles) -> HeadReader | None:
    """The reader of a head's files; None if they are no head but, for example, a whole model."""
    return next((reader for reader in READERS if reader.recognizes(files)), None)


def find_reader(path: Path, mmap: bool = True) -> tuple[HeadReader, HeadFiles] | None:
    """The reader of a head's directory or GGUF file, and its files; None if it is no head.

    Raises CheckpointError for a damaged file.
    """
    files = HeadFiles.read(path, mmap)
    reader = reader_of(files) if files else None
    return (reader, files) if files and reader else None
