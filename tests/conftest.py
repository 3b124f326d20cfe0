"""Fixtures and marks that all tests share."""

from collections.abc import Mapping
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test the marks of its place."""
    for mark, places in MARKS.items():
        paths = [ROOT / place for place in places]
        missing = [path for path in paths if not path.exists()]
        assert not missing, f"the mark {mark} is of files that do not exist: {missing}"
        for item in items:
            if any(item.path.is_relative_to(path) for path in paths):
                item.add_marker(mark)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, and wide tables."""
    monkeypatch.setenv("CPUSPEC_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")
