"""A model, a server of it, and the same model offline. A module with a fixture `path` of its own has another model."""

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from cpuspec import LLM
from tests.server.running import Running, load, serving, tiny_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def running(path: Any, prompt_arithmetic: str) -> Iterator[Running]:
    with serving(lambda: load(path)) as found:
        yield found


@pytest.fixture(scope="module")
def client(running: Running) -> openai.OpenAI:
    return running.openai


@pytest.fixture(scope="module")
def theirs(running: Running) -> anthropic.Anthropic:
    return running.anthropic


@pytest.fixture(scope="module")
def llm(path: Any, prompt_arithmetic: str) -> Iterator[LLM]:
    with load(path) as offline:
        yield offline
