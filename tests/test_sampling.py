"""Logits to distributions: each setting against its meaning written out, and their order."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuspec.errors import BackendError, ConfigError
from cpuspec.evaluate.statistics import chi_square
from cpuspec.sampling import (
    LogitRow,
    Noise,
    SparseRow,
    TokenHistory,
    argmax,
    dense,
    distribution,
    logprobs,
    processed,
    row_to_draw,
)
from cpuspec.settings import SamplingParams

EMPTY = TokenHistory([])


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def naive(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """Every rule, one token at a time, with full sorts."""
    x = logits.astype(np.float64)
    for token in range(len(x)):
        x[token] += params.logit_bias.get(token, 0)
        if token in prompt + output:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
    if params.temperature == 0:
        return np.eye(len(x))[int(np.argmax(x))]
    probs = softmax(x / params.temperature)
    kept = sorted(range(len(x)), key=lambda token: (-x[token], token))
    kept = [token for token in kept if probs[token] >= params.min_p * max(probs)]
    kept = kept[: params.top_k] if params.top_k else kept
    total, mass, nucleus = sum(probs[kept]), 0.0, []
    for token in kept:
        if mass < params.top_p * total:
            nucleus.append(token)
        mass += probs[token]
    out = np.zeros(len(x))
    out[nucleus] = probs[nucleus]
    return out / out.sum()


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 12, 50]),
    top_p=st.sampled_from([1.0, 0.97, 0.6, 0.11, 1e-9]),
    min_p=st.sampled_from([0.0, 0.03, 0.4, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.7, 0.6]),
    presence_penalty=st.sampled_from([0.0, 0.9, -0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.43, -0.21]),
    logit_bias=st.sampled_from([{}, {3: 1.9, 5: -np.inf}]),
)
TOKENS = st.lists(st.integers(0, 11), max_size=8)


@settings(max_examples=300)
@given(PARAMS, TOKENS, TOKENS, TOKENS, st.integers(0, 10**6))
def test_a_distribution_is_what_its_settings_say(
    params: SamplingParams, prompt: list[int], output: list[int], ahead: list[int], seed: int
) -> None:
    logits = np.random.default_rng(seed).normal(scale=2, size=12).astype(np.float32)
    history = TokenHistory(prompt)
    history.extend(output)
    probs = dense(distribution(logits, params, history, ahead))
    np.testing.assert_allclose(probs, naive(logits, params, prompt, output + ahead), atol=1e-12)
    assert abs(probs.sum() - 1) < 1e-12


@settings(max_examples=100)
@given(TOKENS, st.lists(st.lists(st.integers(0, 90), max_size=40), max_size=8), TOKENS)
def test_a_history_counts_what_was_generated_and_a_copy_its_own(
    prompt: list[int], rounds: list[list[int]], ahead: list[int]
) -> None:
    history, output = TokenHistory(prompt), list[int]()
    for new in rounds:
        drafted = history.copy()
        drafted.extend(ahead)  # which the history never sees
        history.extend(new)
        output += new
        for more in (ahead, []):
            seen, ids, counts = history.counts(more)
            assert set(seen.tolist()) == {*prompt, *output, *more}
            assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == Counter(output + more)


@pytest.mark.parametrize("settings", [{"top_k": 2}, {"top_p": 0.5}])
def test_ties_go_to_the_lower_id(settings: dict[str, float]) -> None:
    probs = distribution(np.zeros(4, np.float32), SamplingParams(temperature=1.0, **settings), EMPTY)  # type: ignore[arg-type]
    assert dense(probs).tolist() == [0.5, 0.5, 0, 0]
    assert dense(distribution(np.zeros(4, np.float32), SamplingParams(), EMPTY)).tolist() == [1, 0, 0, 0]
    many = np.repeat(np.float32([1, 3, 2]), 40)
    settings = {name: 60 if name == "top_k" else 0.9 for name in settings}
    kept = np.flatnonzero(dense(distribution(many, SamplingParams(temperature=1.0, **settings), EMPTY)))  # type: ignore[arg-type]
    assert kept.tolist() == [*range(40, 80), *range(80, 40 + len(kept))]
    assert 40 < len(kept) < 80


@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999])
def test_the_nucleus_of_a_large_vocabulary_needs_no_full_sort_and_is_the_same(top_p: float) -> None:
    logits = np.random.default_rng(1).normal(scale=3, size=20_000).astype(np.float32)
    probs = dense(distribution(logits, SamplingParams(temperature=0.8, top_p=top_p), EMPTY))
    full = softmax(logits.astype(np.float64) / 0.8)
    order = np.argsort(-full, kind="stable")
    size = int((np.cumsum(full[order]) < top_p).sum()) + 1
    assert np.flatnonzero(probs).tolist() == sorted(order[:size].tolist())


@pytest.mark.parametrize("k", [1, 40, 1024, 1025, 9000])
@pytest.mark.parametrize("spread", [1, 30, 10**6])
def test_the_best_of_a_large_vocabulary_are_those_of_a_full_sort(k: int, spread: int) -> None:
    logits = np.random.default_rng(spread).integers(0, spread, size=9001).astype(np.float32)  # few different ones: many ties
    row = distribution(logits, SamplingParams(temperature=float(spread), top_k=k), EMPTY)
    assert isinstance(row, SparseRow)
    assert row.ids.tolist() == sorted(np.argsort(-logits, kind="stable")[:k].tolist())


@pytest.mark.parametrize("settings", [{"top_k": 7}, {"top_p": 0.5}, {"min_p": 0.2}, {"temperature": 0.0}])
def test_what_is_cut_off_takes_no_room(settings: dict[str, float]) -> None:
    logits = np.random.default_rng(2).normal(size=300).astype(np.float32)
    row = distribution(logits, SamplingParams(**{"temperature": 1.0, **settings}), EMPTY)  # type: ignore[arg-type]
    assert isinstance(row, SparseRow)
    assert row.vocab_size == 300
    assert 0 < len(row.ids) < 200
    assert (row.probs > 0).all()


def test_a_row_without_cuts_is_computed_where_its_logits_were_processed_and_leaves_those_of_the_model_alone() -> None:
    logits = np.random.default_rng(2).normal(size=30).astype(np.float32)
    before = logits.copy()
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, presence_penalty=1.0)):
        history = TokenHistory([3])
        history.extend([4])
        first = dense(distribution(logits, params, history))
        np.testing.assert_array_equal(dense(distribution(logits, params, history)), first)
    np.testing.assert_array_equal(logits, before)


def sparse(row: np.ndarray) -> SparseRow:
    ids = np.flatnonzero(row)
    return SparseRow(ids, row[ids], len(row))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5e-324])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_one_bad_logit_is_a_clear_error(temperature: float, value: float) -> None:
    logits = np.zeros(8, np.float32)
    logits[3] = value
    with pytest.raises(BackendError, match="1 NaN or infinite logits of 8"):
        distribution(logits, SamplingParams(temperature=temperature), EMPTY)
    with pytest.raises(BackendError, match="NaN or infinite"):
        argmax(np.stack([np.zeros(8, np.float32), logits]))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=5e-324),
        SamplingParams(temperature=1e308),
        SamplingParams(temperature=1.0, frequency_penalty=1e6),
        SamplingParams(temperature=1.0, logit_bias={1: 1e6}),
        SamplingParams(temperature=1.0, repetition_penalty=1e3),
    ],
)
def test_extreme_settings_still_give_a_distribution(params: SamplingParams) -> None:
    history = TokenHistory([0, 1])
    history.extend([2, 2, 2])
    probs = dense(distribution(np.linspace(-3, 3, 8, dtype=np.float32), params, history))
    assert abs(probs.sum() - 1) < 1e-12
    assert (probs >= 0).all()


def test_settings_that_leave_no_token_are_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="leave no token"):
        processed(np.zeros(2, np.float32), SamplingParams(logit_bias={0: -np.inf, 1: -np.inf}), EMPTY)


@pytest.mark.parametrize("size", [6, 5000])
def test_draws_follow_their_probabilities(size: int) -> None:
    """Of one position over seeds, and of one seed over positions; dense rows draw as sparse ones do."""
    probs, places = np.zeros(size), [1, 3, size - 2]
    probs[places] = 0.1, 0.55, 0.35
    for draws in ([Noise(seed).draw(probs, 7) for seed in range(4000)], [Noise(3).draw(probs, i) for i in range(4000)]):
        assert chi_square(Counter(draws), dict(zip(places, (0.1, 0.55, 0.35), strict=True))).p_value > 1e-6
        assert chi_square(Counter(draws), dict(zip(places, (0.15, 0.5, 0.35), strict=True))).p_value < 1e-6
    assert [Noise(3).draw(sparse(5 * probs), i) for i in range(4000)] == draws


def test_draws_of_a_large_row_with_a_long_tail_follow_their_probabilities() -> None:
    """Most of whose tokens are out before their times are known."""
    probs = np.concatenate([[0.3, 0.2], np.full(99_998, 0.5 / 99_998)])
    draws = [Noise(seed).draw(probs, 0) for seed in range(1500)]
    kinds = Counter(min(token, 2) if token < 50_000 else 3 for token in draws)
    assert chi_square(kinds, {0: 0.3, 1: 0.2, 2: 0.25, 3: 0.25}).p_value > 1e-6
    whole = [Noise(seed).draw(SparseRow(np.arange(100_000), probs, 100_000), 0) for seed in range(100)]
    assert draws[:100] == whole


@pytest.mark.parametrize("size", [3, 64, 5000])
@pytest.mark.parametrize("settings", [{"temperature": 0.7}, {"temperature": 1e-9}, {"temperature": 2.0, "presence_penalty": 1.0}])
def test_a_token_drawn_from_logits_is_that_of_their_probabilities(size: int, settings: dict[str, float]) -> None:
    rng, params, history = np.random.default_rng(size), SamplingParams(**settings), TokenHistory([1])  # type: ignore[arg-type]
    for seed in range(200):
        logits = rng.normal(0, 3, size).astype(np.float32)
        legal = rng.random(size) < 0.8 if seed % 2 else None
        if legal is not None:
            legal[0] = True
        row = row_to_draw(logits, params, history, (), legal)
        assert isinstance(row, LogitRow)
        probs = distribution(logits, params, history, (), legal)
        assert np.array_equal(dense(row), dense(probs))
        assert Noise(seed).draw(row, 3) == Noise(seed).draw(probs, 3)
        assert legal is None or legal[Noise(seed).draw(row, 3)]


@pytest.mark.parametrize("other", ["position", "seed"])
def test_draws_of_different_positions_and_seeds_are_independent(other: str) -> None:
    probs = np.array([0.2, 0.5, 0.3])
    pairs = Counter(
        (Noise(seed).draw(probs, 4), Noise(seed).draw(probs, 5) if other == "position" else Noise(seed + 1).draw(probs, 4))
        for seed in range(6000)
    )
    exact = {(i, j): probs[i] * probs[j] for i in range(3) for j in range(3)}
    assert chi_square(pairs, exact).p_value > 1e-6
    assert chi_square(Counter({(i, i): count for (i, _), count in pairs.items()}), exact).p_value < 1e-6


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    for size in (4, 5000):
        probs = np.zeros(size)
        probs[1] = 1e-300
        assert {Noise(seed).draw(row, 0) for seed in range(200) for row in (probs, sparse(probs))} == {1}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_have_no_logprobs(bad: float) -> None:
    for place in range(3):
        logits = np.zeros(3, np.float32)
        logits[place] = bad
        with pytest.raises(BackendError, match="NaN or infinite"), np.errstate(invalid="ignore"):
            logprobs(logits, 0, 2)


def test_logprobs_are_of_the_raw_logits_and_alternatives_come_best_first() -> None:
    logits = np.array([0.5, 2.0, -1.0, 2.0, 0.0], np.float32)
    expected = np.log(softmax(logits.astype(np.float64)))
    got = logprobs(logits, 2, 3)
    assert got.logprob == pytest.approx(expected[2])
    assert [token for token, _ in got.top] == [1, 3, 0]
    assert [value for _, value in got.top] == pytest.approx(expected[[1, 3, 0]].tolist())
    assert logprobs(logits, 0, 0).top == ()
    assert len(logprobs(logits, 0, 99).top) == 5
