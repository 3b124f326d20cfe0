"""A context that would not fit the memory is told when the model is loaded."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from cpuspec import LLM, environment
from cpuspec.engine import llm as module
from cpuspec.platform import SYSTEM, Memory
from tools.make_tiny_model import make_tiny_gguf


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_a_context_longer_than_the_memory_is_told_with_the_length_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, backend: str
) -> None:
    path = make_tiny_gguf(tmp_path / "m.gguf")
    caplog.set_level(logging.WARNING)
    with LLM(path, backend=backend, spec="none") as llm:
        [target] = llm.memory()
        length = llm.context_length
        kept = llm.context.cache.bytes_of(length)
    assert "--context-length" not in caplog.text
    usable = target.weight_bytes + kept // 2  # of which answers may take half
    monkeypatch.setattr(module, "SYSTEM", replace(SYSTEM, memory=lambda: Memory(usable, usable)))
    with LLM(path, backend=backend, spec="none"):
        assert f"as --context-length {length // 4} would have it" in caplog.text
    caplog.clear()
    with LLM(path, backend=backend, spec="none", context_length=length // 4):
        assert "--context-length" not in caplog.text


def test_prefixes_are_kept_in_what_the_weights_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gb = 10**9
    monkeypatch.setattr(environment, "SYSTEM", replace(SYSTEM, memory=lambda: Memory(16 * gb, None, 8 * gb)))
    default = environment.default_prefix_cache_bytes
    assert [default(weights * gb) for weights in (0, 1, 4, 6, 8, 9)] == [gb, gb, gb, gb // 2, 0, 0]
    monkeypatch.setattr(environment, "SYSTEM", replace(SYSTEM, memory=Memory))
    assert default(4 * gb) == gb
    asked = list[int]()
    monkeypatch.setattr(module, "default_prefix_cache_bytes", lambda weights: asked.append(weights) or 0)
    with LLM(make_tiny_gguf(tmp_path / "m.gguf"), spec="none") as llm:
        assert set(asked) == {sum(one.weight_bytes for one in llm.memory())}
