import pytest

from cpuspec.speculation import chain as chain_module
from cpuspec.speculation import round as round_module
from cpuspec.speculation.drafters import head_path as head_path_module


@pytest.fixture
def exact_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are distributions already."""
    monkeypatch.setattr(round_module, "distribution", lambda row, *_: row)
    monkeypatch.setattr(head_path_module, "distribution", lambda row, *_: row)
    monkeypatch.setattr(chain_module, "confidence", lambda row, legal: max(row))
