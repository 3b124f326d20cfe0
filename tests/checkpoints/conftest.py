from collections.abc import Callable
from pathlib import Path

import pytest

from tests.model_files import copy_gguf
from tools.make_tiny_model import make_tiny_gguf

# So small that a test can open hundreds of copies a second.
TINIEST = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory and caches with nothing in them, and no hub that answers."""
    (tmp_path / "home").mkdir()
    for name, directory in {"HOME": "home", "USERPROFILE": "home", "CPUSPEC_CACHE": "cache", "HF_HOME": "hf"}.items():
        monkeypatch.setenv(name, str(tmp_path / directory))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    offline = ("CPUSPEC_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    for name in (*offline, "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return tmp_path


@pytest.fixture(scope="session")
def small_gguf(tmp_path_factory) -> Callable[[str], Path]:
    """A one-layer GGUF file of an architecture, written once."""
    directory = tmp_path_factory.mktemp("small")

    def make(architecture: str = "qwen2") -> Path:
        path = directory / f"{architecture}.gguf"
        return path if path.exists() else make_tiny_gguf(path, architecture, vocab_size=260, **TINIEST)

    return make


@pytest.fixture
def edited_gguf(tmp_path) -> Callable[..., Path]:
    """Copies a GGUF file with changes, as `copy_gguf` does, always to the same path."""

    def edit(source: Path, **changes) -> Path:
        return copy_gguf(source, tmp_path / "edited.gguf", **changes)

    return edit
