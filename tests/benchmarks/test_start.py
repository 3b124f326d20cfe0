"""The benchmark of starts runs what it is told to, in fresh processes, and says how a program failed."""

import sys
from pathlib import Path

import pytest
import start

from tools.make_tiny_model import make_tiny_gguf

# A program that answers with its arguments, after taking some memory.
FAKE = [sys.executable, "-c", "import sys; room = b'x' * int(sys.argv[1]); print(sys.argv[2:])"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_gguf(tmp_path_factory.mktemp("start") / "tiny.gguf")


def test_memory_is_measured_over_the_file_and_what_each_engine_keeps_of_the_context(model):
    file_bytes, cache_bytes = start.model_bytes(model, 10)
    assert file_bytes == model.stat().st_size
    assert cache_bytes["llama.cpp"] % (10 * 2 * 2) == 0
    assert cache_bytes["cpuspec"] > 0


def test_every_engine_has_its_figures(model, measured, monkeypatch):
    monkeypatch.setattr(start, "own_command", lambda path, threads: [*FAKE, "20000000", "{new}"])
    monkeypatch.setattr(start, "peer_command", lambda program, path, threads: [*FAKE, "0", "{new}"])
    saved, result = measured(start.main, model, "--llama-completion", sys.executable, "--rounds", "2")
    assert (saved["benchmark"], saved["model"], saved["file_bytes"]) == ("start", "tiny.gguf", model.stat().st_size)
    figures = saved["figures"]
    assert {name: list(by_engine) for name, by_engine in figures.items()} == {
        start.SECOND: ["cpuspec", "llama.cpp"],
        start.FIRST: ["cpuspec"],
        start.PEAK: ["cpuspec", "llama.cpp"],
        start.OVER: ["cpuspec", "llama.cpp"],
    }
    assert [len(figures[name]["cpuspec"]["rounds"]) for name in figures] == [2, 1, 2, 2]
    peak, over = figures[start.PEAK]["cpuspec"]["median"], figures[start.OVER]["cpuspec"]["median"]
    assert over == pytest.approx(1e6 * peak / (saved["file_bytes"] + saved["cache_bytes"]["cpuspec"]), rel=1e-3)
    assert peak > figures[start.PEAK]["llama.cpp"]["median"]
    assert start.PEAK in result.output
