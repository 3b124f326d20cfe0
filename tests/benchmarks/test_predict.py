"""Predictions are the closed form's, with the costs that were measured."""

import predict
import pytest

from cpuspec.speculation.planner.costs import Costs
from tools.make_tiny_model import make_tiny_gguf

TARGET, DRAFT, CHEAPER = Costs([1, 2], [1.0, 1.1]), Costs([1, 2], [0.2, 0.3]), Costs([1], [0.01])


@pytest.fixture
def predicted(run, tmp_path, monkeypatch):
    """Predicts for tiny models that take the seconds above; returns the result and what was saved."""
    costs = iter([TARGET, DRAFT, CHEAPER])
    monkeypatch.setattr(predict, "measure_costs", lambda backend: next(costs))
    models = [make_tiny_gguf(tmp_path / f"{name}.gguf") for name in ("target", "draft", "cheaper")]
    return lambda count, acceptance: run(predict.main, *models[:count], "--acceptance", acceptance)


def test_the_best_length_is_the_closed_forms(predicted):
    result, saved = predicted(2, "0.75")
    assert result.exit_code == 0, result.output
    [one] = saved["predictions"]
    rates = {n: sum(0.75**k for k in range(n + 1)) / (n * 0.2 + 1 + 0.1 * n) for n in range(17)}
    assert one["lengths"] == [max(rates, key=rates.__getitem__)]
    assert one["over_plain"] == pytest.approx(max(rates.values()))
    assert "| 0.75 | 1 |" in result.output


def test_a_draft_with_drafts_of_its_own_takes_less_for_a_token(predicted):
    _, saved = predicted(3, "0.8")
    one, two = saved["predictions"]
    assert [len(row["lengths"]) for row in (one, two)] == [1, 2]
    assert two["over_plain"] > one["over_plain"] > 1
    assert saved["costs"][2] == {"model": "cheaper.gguf", "rows": [1], "seconds": [0.01]}
