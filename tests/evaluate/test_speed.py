"""What the speed measurements feed to a backend, and the figures against their definitions. No test reads a clock."""

import statistics
from dataclasses import replace

import numpy as np
import pytest

from cpuspec.errors import ConfigError
from cpuspec.evaluate import speed
from cpuspec.evaluate.speed import FORWARDS_PER_ROUND, Plan, measure_speed
from cpuspec.model.batch import ForwardBatch, ForwardOutput
from cpuspec.model.cache import KVCache
from tests.backends.models import tiny

PLAN = Plan(prompt_tokens=20, new_tokens=3, depths=(0, 12), rows=(1, 4), rows_depth=5, repetitions=2)


class Watched:
    """Stands for a backend: does nothing but advance the cache, and tells a clock of its own how long that took.

    A forward takes 1 s and a quarter of a second for each row.
    """

    name, row_invariant, max_rows, threads, weight_bytes = "watched", True, 8, 2, 10**9

    def __init__(self, config) -> None:
        self.config = config
        self.now_s = 0.0
        self.seen: list[tuple[int, int, int]] = []  # tokens in the slot before, rows, logits
        self.num_sequences: list[int] = []
        self.tokens: list[int] = []

    def new_cache(self, num_slots: int, capacity: int) -> KVCache:
        return KVCache(num_slots, capacity, lambda: None, lambda *_: None, lambda *_: None, 1000)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> ForwardOutput:
        batch.check(self.config, cache, self.max_rows)
        rows, slots, fed = len(batch.tokens), batch.slots, np.diff(batch.q_start)
        held = [cache.lengths[slot] for slot in slots]
        assert batch.positions.tolist() == [at for start, n in zip(held, fed, strict=True) for at in range(start, start + n)]
        num_logits = rows if batch.logit_rows is None else len(batch.logit_rows)
        self.seen.append((held[0], rows, num_logits))
        self.num_sequences.append(len(slots))
        self.tokens += batch.tokens.tolist()
        cache.advance(batch)
        self.now_s += 1 + rows / 4
        return ForwardOutput(np.zeros((num_logits, self.config.vocab_size), np.float32), weight_bytes=self.bytes_of_rows(rows))

    @staticmethod
    def bytes_of_rows(rows: int) -> int:
        """Of weights that a forward reads, as of a mixture."""
        return 10**8 * (rows + 1)

    def close(self) -> None:
        """Nothing to release."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny(tmp_path_factory, context_length=64)


@pytest.fixture
def watched(checkpoint, monkeypatch: pytest.MonkeyPatch) -> Watched:
    backend = Watched(checkpoint.config)
    bandwidths = iter([1e9, 4e9] * 10)
    monkeypatch.setattr(speed, "perf_counter", lambda: backend.now_s)
    monkeypatch.setattr(speed, "read_bandwidth", lambda threads: next(bandwidths))
    return backend


def test_every_workload_feeds_what_its_name_says_and_leaves_the_cache_as_it_was(watched: Watched) -> None:
    rounds: list[int] = []
    measure_speed(watched, PLAN, lambda what: rounds.append(len(watched.seen)) if what.startswith("round") else None)
    prompts = [(0, 8, 0), (8, 8, 0), (16, 4, 1), (12, 8, 0), (20, 8, 0), (28, 4, 1)]
    decoding = [(depth + i, 1, 1) for depth in (0, 12) for i in range(3)]
    forwards = [(5, 1, 1), (5, 4, 4)] * FORWARDS_PER_ROUND
    assert watched.seen[rounds[0] : rounds[1]] == watched.seen[rounds[1] :] == prompts + decoding + forwards


def test_sequences_that_decode_together_have_slots_of_their_own_and_one_row_each(watched: Watched) -> None:
    rounds: list[int] = []
    plan = Plan(prompt_tokens=0, new_tokens=3, depths=(5,), sequences=(1, 4), rows=(), repetitions=1)
    report = measure_speed(watched, plan, lambda what: rounds.append(len(watched.seen)) if what.startswith("round") else None)
    assert watched.seen[rounds[0] :] == [(5 + i, 1, 1) for i in range(3)] + [(5 + i, 4, 4) for i in range(3)]
    assert watched.num_sequences[rounds[0] :] == [1] * 3 + [4] * 3
    one, four = report.decode
    assert (four.name, four.tokens, four.sequences) == ("tg3 x 4 @ d5", 12, 4)
    assert four.tokens_per_s == 12 / (3 * 2.0)
    read = 3 * watched.bytes_of_rows(4) + 4 * (6 + 7 + 8) * 1000
    assert four.gb_per_s == pytest.approx(read / (3 * 2.0) / 1e9)
    assert one.sequences == 1


def test_depths_are_filled_once_and_the_warm_up_sees_every_workload(watched: Watched) -> None:
    starts: dict[str, int] = {}
    measure_speed(watched, PLAN, lambda what: starts.setdefault(what, len(watched.seen)))
    fed = [(held, rows) for held, rows, _ in watched.seen]
    assert fed[: starts["filling a cache with 12 tokens"]] == [(0, 5)]
    assert fed[starts["filling a cache with 12 tokens"] : starts["warming up"]] == [(0, 8), (8, 4)]
    first_round = fed[starts["round 1 of 2"] : starts["round 2 of 2"]]
    assert set(fed[starts["warming up"] : starts["round 1 of 2"]]) == set(first_round)
    assert first_round == fed[starts["round 2 of 2"] :]


def test_figures_are_what_their_definitions_say(watched: Watched) -> None:
    report = measure_speed(watched, PLAN)
    shallow, deep = report.prefill
    assert [one.name for one in report.prefill + report.decode] == ["pp20", "pp20 @ d12", "tg3", "tg3 @ d12"]
    assert shallow.median_s == deep.median_s == shallow.mean_s == shallow.min_s == 3 + 20 / 4
    assert shallow.tokens_per_s == shallow.mean_tokens_per_s == 20 / 8
    assert (shallow.sd_s, shallow.sd_tokens_per_s, shallow.num_samples) == (0, 0, 2)
    assert shallow.gb_per_s is shallow.bandwidth_share is None
    decode = report.decode[1]
    assert (decode.depth, decode.tokens, decode.median_s, decode.tokens_per_s) == (12, 3, 3.75, 0.8)
    assert (shallow.weight_bytes, decode.weight_bytes) == (round((9 + 9 + 5) * 1e8 / 3), 2 * 10**8)
    read_bytes = 3 * 2 * 10**8 + (13 + 14 + 15) * 1000
    assert decode.gb_per_s == pytest.approx(read_bytes / 3.75 / 1e9)
    assert report.read_bytes_per_s == 2.5e9
    assert decode.bandwidth_share == pytest.approx(read_bytes / 3.75 * statistics.median([1e-9, 0.25e-9]))
    assert [(one.rows, one.speed.median_s, one.speed.num_samples) for one in report.rows] == [(1, 1.25, 10), (4, 2.0, 10)]
    assert [one.over_one_row for one in report.rows] == [1, 2 / 1.25]
    assert report.rows[1].speed.gb_per_s == pytest.approx((5 * 10**8 + 9 * 1000) / 2 / 1e9)


def test_a_gpus_speed_is_no_share_of_the_processors_memory(watched: Watched) -> None:
    with_memory = measure_speed(watched, PLAN)
    watched.device = "cuda:0"
    report = measure_speed(watched, PLAN)
    assert report.read_bytes_per_s is report.decode[0].bandwidth_share is report.rows[0].speed.bandwidth_share is None
    assert report.decode[0].gb_per_s == with_memory.decode[0].gb_per_s
    assert None not in (with_memory.read_bytes_per_s, with_memory.decode[0].bandwidth_share)


def test_spread_and_median_are_of_all_samples(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    takes = iter([0.0, 1.0, 3.0, 8.0])  # a warm-up, then three rounds
    monkeypatch.setattr(watched, "forward", lambda batch, cache: slow(batch, cache, next(takes)))

    def slow(batch: ForwardBatch, cache: KVCache, seconds: float) -> ForwardOutput:
        cache.advance(batch)
        watched.now_s += seconds
        return ForwardOutput(np.empty((1, 1), np.float32), weight_bytes=1)

    report = measure_speed(watched, Plan(prompt_tokens=0, new_tokens=1, rows=(), repetitions=3))
    (decode,) = report.decode
    assert (decode.median_s, decode.mean_s, decode.min_s) == (3, 4, 1)
    assert decode.sd_s == pytest.approx(statistics.stdev([1, 3, 8]))
    assert decode.tokens_per_s == pytest.approx(1 / 3)
    assert decode.mean_tokens_per_s == pytest.approx((1 + 1 / 3 + 1 / 8) / 3)
    assert decode.sd_tokens_per_s == pytest.approx(statistics.stdev([1, 1 / 3, 1 / 8]))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"prompt_tokens": -1}, "prompt_tokens must be at least 0, got -1"),
        ({"depths": (0, -4)}, "depths must be at least 0"),
        ({"depths": ()}, "depths are empty"),
        ({"depths": (4, 4)}, "depths must differ"),
        ({"rows": (1, 0)}, "rows must be at least 1"),
        ({"rows": (2, 2)}, "rows must differ"),
        ({"repetitions": 0}, "repetitions must be at least 1"),
        ({"prompt_tokens": 0, "new_tokens": 0, "rows": ()}, "nothing to measure"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(changes: dict[str, object], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        replace(PLAN, **changes)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"prompt_tokens": 53}, "pp53 @ d12 needs a context of 65 tokens, the model has 64"),
        ({"depths": (62,)}, "pp20 @ d62 needs a context of 82"),
        ({"prompt_tokens": 0, "depths": (1 << 40,)}, "tg3 @ d1099511627776 needs"),
        ({"rows_depth": 61}, "4 rows @ d61 needs a context of 65"),
        ({"rows": (1, 9)}, "at most 8 rows, got 9"),
    ],
)
def test_a_plan_that_the_model_cannot_hold_is_refused_before_anything_runs(
    watched: Watched, changes: dict[str, object], wanted: str
) -> None:
    with pytest.raises(ConfigError, match=wanted):
        measure_speed(watched, replace(PLAN, **changes))
    assert watched.seen == []


def test_a_plan_that_just_fits_runs(watched: Watched) -> None:
    measure_speed(watched, replace(PLAN, prompt_tokens=52, rows_depth=60))
    assert max(held + rows for held, rows, _ in watched.seen) == 64


def test_tokens_are_random_and_those_of_the_vocabulary(watched: Watched) -> None:
    measure_speed(watched, PLAN)
    assert 0 <= min(watched.tokens) <= max(watched.tokens) < watched.config.vocab_size
    assert len(set(watched.tokens)) > len(watched.tokens) / 4
