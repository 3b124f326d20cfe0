"""Each figure against its definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuspec import metrics
from cpuspec.metrics import LevelCounters, RequestMeter

CYCLES = st.lists(
    st.integers(0, 5).flatmap(
        lambda positions: st.tuples(
            st.integers(0, positions),
            st.just(positions),
            st.integers(0, 3 if positions else 0),  # accepted, on that path, elsewhere
        )
    ),
    max_size=20,
)


@given(CYCLES)
def test_counters_and_shares_follow_their_definitions(cycles: list[tuple[int, int, int]]) -> None:
    level = LevelCounters()
    for accepted, positions, others in cycles:
        level.record(positions + others, accepted, positions)
    total = sum(accepted for accepted, _, _ in cycles)
    evaluated = sum(accepted + (accepted < positions) for accepted, positions, _ in cycles)
    proposed = sum(positions + others for _, positions, others in cycles)
    assert level.num_drafts == sum(positions > 0 for _, positions, _ in cycles)
    assert (level.num_draft_tokens, level.num_evaluated_tokens, level.num_accepted_tokens) == (proposed, evaluated, total)
    longest = max((positions for _, positions, _ in cycles), default=0)
    assert level.num_accepted_tokens_per_pos == [sum(accepted > i for accepted, _, _ in cycles) for i in range(longest)]
    assert level.mu == (total / len(cycles) if cycles else 0)
    assert level.tau == level.mu + 1
    assert level.accepted_per_proposed == (total / proposed if proposed else 0)
    assert level.accepted_per_evaluated == (total / evaluated if evaluated else 0)


def test_latencies_and_rates_are_of_the_steps_times(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 12.0, 13.0, 13.5])  # arrival, then three steps
    monkeypatch.setattr(metrics, "perf_counter", lambda: next(times))
    # A target with states, a mixture whose forwards read more or less, and a draft model.
    meter = RequestMeter(7, [10**6, 0], [5 * 10**6, 0])
    meter.begin(((10, 5 * 10**9), (20, 10**9)))
    steps = ((1, ((13, 9 * 10**9), (20, 10**9))), (3, ((14, 10**10), (22, 2 * 10**9))), (2, ((15, 12 * 10**9), (22, 2 * 10**9))))
    for num_new_tokens, reads in steps:
        meter.record_step(num_new_tokens, reads, ())
    stats = meter.stats()
    assert (stats.num_prompt_tokens, stats.num_new_tokens, stats.num_forwards) == (7, 6, 5)
    assert (stats.ttft_s, stats.decode_s, stats.tpot_s) == (2.0, 1.5, 1.5 / 5)
    assert stats.tokens_per_s == pytest.approx(5 / 1.5)
    # The first step is the prompt's; the second leaves 7 + 4 tokens and takes two drafting forwards, the third 7 + 6 and none.
    assert stats.gb_per_s == pytest.approx((1 + 0.011 + 0.005 + 1 + 2 + 0.013 + 0.005) / 1.5)
    assert stats.weight_bytes == 8 * 10**9
    assert stats.itl_s == {f"p{q}": np.percentile([1.0, 0, 0, 0.5, 0], q) for q in (50, 95, 99)}
    assert stats.step_s == {f"p{q}": np.percentile([1.0, 0.5], q) for q in (50, 95, 99)}


def test_steps_that_ran_at_once_count_as_many_and_share_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 2.0, 4.0])
    monkeypatch.setattr(metrics, "perf_counter", lambda: next(times))
    meter = RequestMeter(7, [1])
    meter.begin(((0, 0),))
    for num_steps, forwards in ((1, 1), (4, 5), (1, 6)):
        meter.record_step(num_steps, ((forwards, forwards),), (("none", 0, 0, 0),), num_steps)
    stats = meter.stats()
    assert (stats.num_new_tokens, stats.num_forwards, stats.num_forwards_saved, meter.levels["none"].num_cycles) == (6, 6, 0, 6)
    assert stats.itl_s == {f"p{q}": np.percentile([1.0, 0, 0, 0, 2.0], q) for q in (50, 95, 99)}
    assert stats.step_s == {f"p{q}": np.percentile([0.25] * 4 + [2.0], q) for q in (50, 95, 99)}


@pytest.mark.parametrize("num_steps", [0, 1])
def test_figures_that_do_not_exist_are_none(num_steps: int) -> None:
    meter = RequestMeter(1, [1])
    for step in range(num_steps):
        meter.begin(((0, 0),))
        meter.record_step(1, ((step + 1, step),), ())
    stats = meter.stats()
    assert (stats.decode_s, stats.tpot_s, stats.tokens_per_s, stats.gb_per_s) == (None,) * 4
    assert (stats.ttft_s is None) == (num_steps == 0)
    assert stats.itl_s == stats.levels == {}


def test_counts_of_two_add_up_to_those_of_all():
    first, second, both = LevelCounters(), LevelCounters(), LevelCounters()
    for counters, cycles in ((first, [(3, 2, 3), (0, 0, 0)]), (second, [(5, 5, 5), (2, 0, 2)])):
        for cycle in cycles:
            counters.record(*cycle)
            both.record(*cycle)
    assert first + second == second + first == both
    assert first + LevelCounters() == first


def test_of_a_chain_the_targets_verifications_count_as_drafted() -> None:
    meter = RequestMeter(3, [1])
    meter.begin(((0, 0),))
    meter.record_step(3, ((1, 1),), (("lookup", 5, 2, 5), ("middle", 4, 2, 4)))
    meter.record_step(1, ((2, 2),), (("middle", 3, 0, 3),))
    stats = meter.stats()
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (7, 2)
