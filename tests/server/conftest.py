"""A model, a server of it, and the same model offline.

A module may have a function MODEL, which makes another model in a directory, and options: LOADED of the served model, SERVED of
the server.
"""

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from cpuspec import LLM
from tests.server.running import Running, load, serving, tiny_model


@pytest.fixture(scope="module")
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return getattr(request.module, "MODEL", tiny_model)(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, path: Any, prompt_arithmetic: str) -> Iterator[Running]:
    loaded, served = (getattr(request.module, name, {}) for name in ("LOADED", "SERVED"))
    with serving(lambda: load(path, **loaded), **served) as found:
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
