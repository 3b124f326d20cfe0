"""Fixtures and marks that all tests share."""

import os
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A machine may be busy: no example has to end within a time.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

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
# Error codes of Windows.
_REFUSED = {
    1314: "this user may make no symbolic links",
    32: "Windows replaces no file that is in use",
    1224: "Windows shortens no file that is mapped",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test the marks of its place."""
    marks: dict[Path, list[str]] = {path: [] for path in dict.fromkeys(item.path for item in items)}
    for mark, places in MARKS.items():
        paths = [ROOT / place for place in places]
        missing = [path for path in paths if not path.exists()]
        assert not missing, f"the mark {mark} is of files that do not exist: {missing}"
        for file, found in marks.items():
            if any(file.is_relative_to(path) for path in paths):
                found.append(mark)
    for item in items:
        for mark in marks[item.path]:
            item.add_marker(mark)
    if os.name != "posix":
        for item in items:
            if item.get_closest_marker("posix"):
                item.add_marker(pytest.mark.skip(reason="Windows has no such files, modes, forks, limits or signals"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip a test whose own code asks for more than Windows gives: links, or another content of a file that is mapped."""
    try:
        return (yield)
    except OSError as error:
        in_package = any(
            Path(frame.filename).is_relative_to(ROOT.parent / "cpuspec") for frame in traceback.extract_tb(error.__traceback__)
        )
        if in_package or getattr(error, "winerror", None) not in _REFUSED:
            raise
        pytest.skip(_REFUSED[error.winerror])


pytest_runtest_setup = pytest_runtest_call  # fixtures make them as well


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, and wide tables."""
    monkeypatch.setenv("CPUSPEC_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")
