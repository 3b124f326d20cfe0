"""Files of others, damaged in each way that a file may be: the reader names the file, and waits for nothing."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.recipes import find_named
from cpuspec.errors import CpuspecError
from cpuspec.quantize.imatrix import Importance, read_importance, write_importance
from cpuspec.text import make_tokenizer
from tests.checkpoints.conftest import TINIEST
from tests.checkpoints.test_recipes import GOOD
from tests.model_files import write_anew
from tests.processes import make_pipe
from tools.make_tiny_model import make_tiny_gguf, make_tiny_hf

Made = tuple[Path, Callable[[], object]]  # a file, and what reads it


def use(path: Path) -> None:
    """Read every byte that the files of a model point at."""
    checkpoint = open_checkpoint(path)
    for tensor in checkpoint.tensors.values():
        tensor.dequantize()
    make_tokenizer(checkpoint)


def alone(name: str, write: Callable[[Path], object], read: Callable[[Path], object]) -> Callable[[Path], Made]:
    def make(directory: Path) -> Made:
        path = directory / name
        write(path)
        return path, lambda: read(path)

    return make


def in_directory(name: str) -> Callable[[Path], Made]:
    def make(directory: Path) -> Made:
        model = make_tiny_hf(directory / "model", "llama", vocab_size=260, num_shards=2, **TINIEST)
        for side, text in (("generation_config.json", "{}"), ("special_tokens_map.json", "{}"), ("chat_template.jinja", "x")):
            (model / side).write_text(text)
        return model / name, lambda: use(model)

    return make


IMPORTANCE = Importance({"blk.0.q": np.ones((1, 4), np.float32)}, {"blk.0.q": np.ones(1, np.float32)})
WHOLE: dict[str, Callable[[Path], Made]] = {  # of which no beginning can be read
    "model.gguf": alone("model.gguf", lambda path: make_tiny_gguf(path, vocab_size=260, **TINIEST), use),
    **{
        name: in_directory(name)
        for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json")
    },
    "tokenizer_config.json": in_directory("tokenizer_config.json"),
}
TEXTS = ("generation_config.json", "special_tokens_map.json", "chat_template.jinja")
KINDS = {
    **WHOLE,
    **{name: in_directory(name) for name in TEXTS},
    **{
        name: alone(name, lambda path: write_importance(path, IMPORTANCE), read_importance)
        for name in ("matrix.gguf", "matrix.dat")
    },
    "recipe.toml": alone("recipe.toml", lambda path: path.write_text(GOOD), lambda path: find_named(str(path))),
}
NO_FILE: dict[str, Callable[[Path], object]] = {
    "a pipe": make_pipe,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a directory": Path.mkdir,
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a huge file": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
    "another file": lambda path: path.write_bytes(b"PK\3\4" + b"\xff" * 60),
}


def refused(path: Path, read: Callable[[], object]) -> bool:
    """Whether the file is refused by its name."""
    try:
        read()
    except CpuspecError as error:
        if path.name not in str(error):
            raise
        return True
    return False


@pytest.mark.parametrize("fault", NO_FILE)
@pytest.mark.parametrize("kind", KINDS)
def test_only_a_regular_file_of_its_kind_is_read(tmp_path: Path, kind: str, fault: str) -> None:
    """Neither a pipe that nobody writes to nor an endless device."""
    path, read = KINDS[kind](tmp_path)
    assert not refused(path, read)
    path.unlink()
    NO_FILE[fault](path)
    assert refused(path, read)


@pytest.mark.parametrize("kind", KINDS)
def test_a_link_to_a_regular_file_is_read(tmp_path: Path, kind: str) -> None:
    path, read = KINDS[kind](tmp_path)
    path.rename(tmp_path / "blob")
    path.symlink_to(tmp_path / "blob")
    assert not refused(path, read)


@pytest.mark.parametrize("kind", WHOLE)
def test_a_file_that_ends_early_is_refused_wherever_it_ends(tmp_path: Path, kind: str) -> None:
    path, read = WHOLE[kind](tmp_path)
    content = path.read_bytes()
    for end in sorted({*range(9), *range(9, len(content), max(1, len(content) // 60)), len(content) - 1}):
        write_anew(path, content[:end])
        assert refused(path, read), end
