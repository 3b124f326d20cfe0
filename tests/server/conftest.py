"""A server and the same model offline, for tests of a module that has a fixture `path`: the model's file or directory."""

from collections.abc import Iterator
from typing import Any

import pytest

from cpuspec import LLM
from tests.server.running import Running, load, serving


@pytest.fixture(scope="module")
def running(path: Any) -> Iterator[Running]:
    with serving(lambda: load(path)) as found:
        yield found


@pytest.fixture(scope="module")
def llm(path: Any) -> Iterator[LLM]:
    with load(path) as offline:
        yield offline
