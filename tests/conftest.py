"""Fixtures and marks that all tests share."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

# By mark, the directories and modules whose tests have it.
MARKS: Mapping[str, tuple[str, ...]] = {
    "server": ("server", "load", "ray"),
    "fuzz": ("fuzz",),
    "oracle": (
        *("backends/test_transformers.py", "checkpoints/test_quantized_oracles.py", "checkpoints/test_published_tokenizers.py"),
        *("speculation/test_head_oracles.py", "evaluate/test_harness.py"),
    ),
    "slow": ("server/test_faults.py", "server/test_prefix_cache.py", "load/test_bench_serve.py", "ray", "test_cli.py"),
}
ROOT = Path(__file__).parent
_NO_LINKS = 1314  # ERROR_PRIVILEGE_NOT_HELD


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test the marks of its place."""
    for mark, places in MARKS.items():
        paths = [ROOT / place for place in places]
        missing = [path for path in paths if not path.exists()]
        assert not missing, f"the mark {mark} is of files that do not exist: {missing}"
        for item in items:
            if any(item.path.is_relative_to(path) for path in paths):
                item.add_marker(mark)
    if os.name != "posix":
        for item in items:
            if item.get_closest_marker("posix"):
                item.add_marker(pytest.mark.skip(reason="Windows has no such files, modes, forks, limits or signals"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip a test that makes symbolic links where this user may not, as Windows' users without developer mode."""
    try:
        return (yield)
    except OSError as error:
        if getattr(error, "winerror", None) != _NO_LINKS:
            raise
        pytest.skip("this user may make no symbolic links")


pytest_runtest_setup = pytest_runtest_call  # fixtures make them as well


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, and wide tables."""
    monkeypatch.setenv("CPUSPEC_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")
