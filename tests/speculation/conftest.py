import pytest

from cpuspec.checkpoints import Checkpoint
from cpuspec.speculation import chain as chain_module
from cpuspec.speculation import round as round_module
from cpuspec.speculation.drafters import head_path as head_path_module
from tests.backends.models import tiny
from tests.conformance.harness import SMALL


@pytest.fixture
def exact_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are distributions already."""
    monkeypatch.setattr(round_module, "row_to_draw", lambda row, *_: row)
    monkeypatch.setattr(head_path_module, "row_to_draw", lambda row, *_: row)
    monkeypatch.setattr(chain_module, "confidence", lambda row, legal: max(row))


@pytest.fixture(scope="package")
def target(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A small model that heads are made for."""
    return tiny(tmp_path_factory, weight_format="f32", **SMALL)
