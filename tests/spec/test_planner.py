"""Lengths and drafters are chosen as the cost model says, and what does not help is left alone."""

from pathlib import Path

import numpy as np
import pytest

from cpuspec.backends import make_backend
from cpuspec.checkpoints import open_checkpoint
from cpuspec.config import EngineConfig, SamplingParams
from cpuspec.sequence import Sequence
from cpuspec.spec import costs as costs_module
from cpuspec.spec.costs import Costs, find_costs
from cpuspec.spec.draft import Draft
from cpuspec.spec.planner import Planner
from cpuspec.spec.proposer import NullProposer
from cpuspec.spec.verify import Verdict
from tools.make_tiny_model import make_tiny_gguf

FLAT = Costs([1, 16, 17], [1.0, 1.0, 2.0])  # sixteen rows for the price of one
STEEP = Costs([1, 2], [1.0, 2.0])  # each row costs a forward


class Text(NullProposer):
    """Drafts as long as it may, and is sure of itself."""

    name = "text"

    def __init__(self, confidence: float = 0.9, *, drawn: bool = False) -> None:
        self.confidence = confidence
        self.drawn = drawn

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        drafts = []
        for limit in limits:
            probs = tuple(np.full(8, 1 / 8) for _ in range(limit)) if self.drawn else None
            chain = Draft.chain([1] * limit, self.name, probs)
            drafts.append(
                Draft(chain.tokens, chain.parents, probs, self.name, confidence=np.full(limit, self.confidence, np.float32))
            )
        return drafts


class Model(NullProposer):
    """Stands for a chain."""

    name = "model"
    num_tokens = 16

    def __init__(self) -> None:
        self.asked: list[int] = []

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        self.asked += limits
        return [Draft.chain([1] * limit, self.name) for limit in limits]


def _sequence(number: int = 0, prompt: int = 4) -> Sequence:
    return Sequence.new(number, [0] * prompt, SamplingParams(max_tokens=100_000))


def _rounds(planner: Planner, seq: Sequence, count: int, accept: float) -> list[int]:
    """Lengths of the drafts of some rounds, of each of which that share is accepted."""
    lengths = []
    for _ in range(count):
        [draft] = planner.propose([seq], [24])
        lengths.append(len(draft))
        num_accepted = int(accept * len(draft))
        tokens = [1] * (num_accepted + 1)
        seq.extend(tokens)
        planner.accept(seq, Verdict(tokens, list(range(num_accepted))), ())
    return lengths


def test_costs_grow_between_what_was_measured_and_beyond() -> None:
    costs = Costs([1, 2, 4, 8], [1.0, 0.5, 2.0, 4.0])
    assert [costs.of(n) for n in (1, 2, 3, 4, 6, 8, 10)] == [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0]
    assert costs.per_row == 0.5


@pytest.mark.parametrize(
    "nonsense",
    ["", "[]", '{"rows": [1, 2], "seconds": [1]}', '{"rows": [2, 1], "seconds": [1, 2]}', '{"rows": [1], "seconds": ["x"]}'],
)
def test_costs_are_measured_once_and_nonsense_is_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nonsense: str
) -> None:
    monkeypatch.setenv("CPUSPEC_CACHE", str(tmp_path))
    backend = make_backend("numpy", open_checkpoint(make_tiny_gguf(tmp_path / "tiny.gguf", "qwen2")), EngineConfig(max_rows=16))
    first = find_costs(backend)
    assert first.rows == [1, 2, 3, 4, 6, 8, 9, 12, 16]
    assert all(s > 0 for s in first.seconds)
    assert find_costs(backend).seconds == first.seconds
    [kept] = tmp_path.glob("costs/*.json")
    kept.write_text(nonsense)
    calls = []
    monkeypatch.setattr(costs_module, "measure_costs", lambda backend: calls.append(backend) or FLAT)
    assert find_costs(backend) is FLAT
    assert calls == [backend]


@pytest.mark.parametrize("confidence", [0.3, 0.7, 0.95])
@pytest.mark.parametrize("slope", [0.02, 0.1, 0.4])
def test_a_draft_from_text_is_cut_where_it_promises_most(confidence: float, slope: float) -> None:
    costs = Costs([1, 2], [1.0, 1.0 + slope])
    planner, seq = Planner(costs, [Text(confidence)], []), _sequence()
    planner.begin(seq)
    [draft] = planner.propose([seq], [24])
    rates = [sum(confidence**k for k in range(n + 1)) / costs.of(n + 1) for n in range(25)]
    assert len(draft) == int(np.argmax(rates))


def test_drawn_tokens_are_not_cut() -> None:
    planner, seq = Planner(FLAT, [Text(0.01, drawn=True)], []), _sequence()
    [draft] = planner.propose([seq], [10])
    assert len(draft) in (0, 10)


def test_nothing_is_drafted_where_each_row_costs_a_forward() -> None:
    planner, seq = Planner(STEEP, [Text(0.99)], []), _sequence()
    assert _rounds(planner, seq, 20, 1.0) == [0] * 20
    assert planner.num_plain_rounds == 20


def test_drafts_that_are_never_accepted_come_to_an_end() -> None:
    planner, seq = Planner(Costs([1, 2], [1.0, 1.1]), [Text(0.9)], []), _sequence()
    lengths = _rounds(planner, seq, 100, 0.0)
    assert lengths[0] > 0
    assert sum(lengths[20:]) < sum(lengths[:20])
    assert sum(lengths[20:]) * 0.1 < 0.03 * 80  # rows that cost 3 % of those forwards
    assert _rounds(Planner(Costs([1, 2], [1.0, 1.1]), [Text(0.9)], []), _sequence(), 100, 1.0)[-1] > 0


def test_a_request_that_begins_expects_what_others_saw() -> None:
    planner = Planner(Costs([1, 2], [1.0, 1.1]), [Text(0.8)], [])
    lengths = []
    for number in range(4):
        seq = _sequence(number)
        lengths.append(_rounds(planner, seq, 30, 0.0))
        planner.end(seq)
    assert lengths[0][0] > lengths[-1][0]


def test_what_failed_once_is_tried_again() -> None:
    planner, seq = Planner(Costs([1, 2], [1.0, 1.1]), [Text(0.9)], []), _sequence()
    _rounds(planner, seq, 40, 0.0)
    assert _rounds(planner, seq, 100, 1.0)[-1] > 4


def test_sequences_that_share_a_forward_share_its_price() -> None:
    costs = Costs([1, 16, 17], [1.0, 1.0, 2.0])
    alone, together = Planner(costs, [Text(0.9)], []), Planner(costs, [Text(0.9)], [])
    [draft] = alone.propose([_sequence()], [24])
    drafts = together.propose([_sequence(n) for n in range(8)], [24] * 8)
    assert len(draft) == 15
    assert {len(one) for one in drafts} == {1}


@pytest.mark.parametrize(("seconds", "asked"), [(0.05, True), (0.9, False)])
def test_a_model_drafts_where_its_tokens_are_cheaper_than_what_they_save(seconds: float, asked: bool) -> None:
    model = Model()
    planner, seq = Planner(FLAT, [], [(model, Costs([1], [seconds]))]), _sequence()  # type: ignore[list-item]
    lengths = _rounds(planner, seq, 50, 1.0)
    assert (sum(lengths) > 100) == asked
    assert asked or sum(lengths) <= 2


def test_a_text_that_repeats_goes_before_a_model() -> None:
    model = Model()
    planner, seq = Planner(FLAT, [Text(0.99)], [(model, Costs([1], [0.3]))]), _sequence()  # type: ignore[list-item]
    _rounds(planner, seq, 20, 1.0)
    assert not model.asked


def test_trying_what_the_estimates_speak_against_takes_a_hundredth_of_the_time() -> None:
    model = Model()
    planner, seq = Planner(FLAT, [], [(model, Costs([1, 2], [0.4, 0.401]))]), _sequence()  # type: ignore[list-item]
    _rounds(planner, seq, 20, 0.0)  # learns that it is no good
    before = len(model.asked)
    planner.models[0].seconds_per_token = 0.4
    _rounds(planner, seq, 400, 0.0)
    tried = sum(model.asked[before:]) * 0.4
    assert 0 < tried < 0.02 * 420


def test_a_model_is_not_asked_for_an_answer_too_short_to_pay_for_its_prompt() -> None:
    lengths = []
    for max_tokens in (5, 10_000):
        model = Model()
        planner = Planner(FLAT, [], [(model, Costs([1, 2], [0.1, 0.2]))])  # type: ignore[list-item]
        seq = Sequence.new(0, [0] * 500, SamplingParams(max_tokens=max_tokens))
        [draft] = planner.propose([seq], [min(24, max_tokens - 1)])
        lengths.append(len(draft))
    assert lengths[0] == 0
    assert lengths[1] > 0
