"""Fixtures of the command line's tests: no network, a small random model, a cache of each test's own, memory of a known speed."""

import shutil
from pathlib import Path

import pytest

from cpuspec.cli import machine, models
from cpuspec.evaluate import speed
from cpuspec.kernels import machine_code
from tests.command import small_model

KERNELS = machine_code.kernel_directory()  # of this machine, before a test has a cache of its own


@pytest.fixture(autouse=True)
def _offline(offline: None) -> None:
    """Every test is without network."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that may talk for long."""
    return small_model(tmp_path_factory.mktemp("model") / "tiny.gguf", context_length=32768)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own."""
    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def kept_kernels(cache: Path) -> None:
    """The kernels that this machine has: half a minute to compile, otherwise."""
    KERNELS.mkdir(parents=True, exist_ok=True)
    (cache / "kernels").mkdir(parents=True)
    try:
        machine_code.kernel_directory().symlink_to(KERNELS)
    except OSError:
        shutil.copytree(KERNELS, machine_code.kernel_directory())


@pytest.fixture
def bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory whose speed is known without measuring it."""
    for module in (machine, models, speed):
        monkeypatch.setattr(module, "read_bandwidth", lambda threads: 1e9 * threads)
