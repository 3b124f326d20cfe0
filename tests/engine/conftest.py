"""Tiny models that several tests open with settings of their own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cpuspec.engine.llm import LLM
from tools.make_tiny_model import make_tiny_gguf

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "context_length": 1024}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    make_tiny_gguf(directory / "plain.gguf", num_layers=2, **SMALL)
    make_tiny_gguf(directory / "predicting.gguf", num_layers=3, predicts=True, **SMALL)
    make_tiny_gguf(directory / "windows.gguf", "gemma3", num_layers=2, window=40, **SMALL)
    make_tiny_gguf(directory / "draft.gguf", seed=1, num_layers=1, **SMALL)
    return directory


@pytest.fixture
def opened(models: Path) -> Iterator[Callable[..., LLM]]:
    """Opens LLMs and closes them."""
    llms = []

    def load(spec: str = "none", model: str = "plain", **settings: Any) -> LLM:
        spec = spec.replace("DRAFT", str(models / "draft.gguf"))
        llms.append(LLM(models / f"{model}.gguf", spec, **{"threads": 1, "max_sequences": 2, **settings}))
        return llms[-1]

    yield load
    for llm in llms:
        llm.close()
