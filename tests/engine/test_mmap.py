"""Without mmap a model outlives its files."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cpuspec import LLM, SamplingParams
from cpuspec.backends import packed
from cpuspec.backends.packed import packed_files
from cpuspec.checkpoints import open_checkpoint
from cpuspec.checkpoints.mapped import map_file
from cpuspec.errors import CheckpointError, ConfigError
from tools.make_tiny_model import make_tiny_gguf, make_tiny_hf

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(packed, "cache_dir", lambda: tmp_path / "cache")  # packed weights alone: kernels stay compiled
    monkeypatch.setattr(packed, "_SMALLEST_BYTES", 0)


@pytest.mark.parametrize("backend", ["numba", "numpy"])
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_files_may_become_shorter_under_a_model_that_is_not_mapped(tmp_path: Path, kind: str, backend: str) -> None:
    path = make_tiny_gguf(tmp_path / "m.gguf") if kind == "gguf" else make_tiny_hf(tmp_path / "m")
    with LLM(path, backend=backend, spec="none") as llm:
        wanted = llm.generate("hello", PARAMS)[0].token_ids
    with LLM(path, backend=backend, spec="none", mmap=False) as llm:
        for file in [*tmp_path.rglob("m.gguf"), *tmp_path.rglob("*.safetensors"), *(path for path, _ in packed_files())]:
            os.truncate(file, 0)
        assert llm.generate("hello", PARAMS)[0].token_ids == wanted


def test_what_is_read_is_what_is_mapped(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "m.gguf")
    mapped, read = open_checkpoint(path), open_checkpoint(path, mmap=False)
    assert all((read.tensors[name].data == tensor.data).all() for name, tensor in mapped.tensors.items())


def test_a_file_that_cannot_be_read_whole_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for path in (tmp_path / "empty", tmp_path / "missing", tmp_path):
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            map_file(path, mmap=False)


def test_mmap_is_a_choice_of_two() -> None:
    with pytest.raises(ConfigError, match="mmap must be True or False, got 'no'"):
        LLM("missing.gguf", mmap="no")  # type: ignore[arg-type]


def test_the_command_line_has_it_too(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "m.gguf")
    command = [sys.executable, "-m", "cpuspec", "generate", "--raw", "hello", "-m", str(path), "--backend", "numpy"]
    answers = [
        subprocess.run([*command, "--max-tokens", "4", *more], capture_output=True, check=True).stdout
        for more in ([], ["--no-mmap"])
    ]
    assert answers[0] == answers[1] != b""
