"""Tests of what samples say, against tables and definitions."""

import math
import random

import pytest

from cpuspec.evaluate.statistics import bootstrap_interval, chi_square, chi_square_tail

# Upper percentage points of chi-square, as printed in every table.
TABLE = [
    (3.841459, 1, 0.05),
    (6.634897, 1, 0.01),
    (5.991465, 2, 0.05),
    (7.814728, 3, 0.05),
    (18.307038, 10, 0.05),
    (50.892181, 30, 0.01),
    (149.449253, 100, 0.001),
]


@pytest.mark.parametrize(("statistic", "degrees", "p_value"), TABLE)
def test_the_tail_of_chi_square_is_that_of_the_tables(statistic, degrees, p_value):
    assert chi_square_tail(statistic, degrees) == pytest.approx(p_value, rel=1e-5)


def test_the_tail_has_its_ends():
    assert chi_square_tail(0, 5) == 1
    assert chi_square_tail(math.inf, 5) == 0
    assert 0 < chi_square_tail(1000, 63) < 1e-100


def test_right_probabilities_are_rarely_rejected_and_wrong_ones_are():
    rng = random.Random(1)
    right, wrong = {"a": 0.5, "b": 0.3, "c": 0.2}, {"a": 0.4, "b": 0.4, "c": 0.2}
    p_values = []
    for _ in range(400):
        draws = rng.choices("abc", (0.5, 0.3, 0.2), k=300)
        counts = {letter: draws.count(letter) for letter in "abc"}
        p_values.append(chi_square(counts, right).p_value)
        assert chi_square(counts, wrong).p_value < 0.5
    assert 0.02 < sum(p < 0.05 for p in p_values) / 400 < 0.09
    assert chi_square({"a": 500, "b": 300, "c": 200}, wrong).p_value < 1e-9


def test_small_cells_are_pooled_and_impossible_outcomes_reject():
    assert chi_square({"a": 90, "b": 6, "c": 4}, {"a": 0.9, "b": 0.04, "c": 0.06}).degrees == 1  # of c alone six are expected
    assert chi_square({"a": 90, "b": 6, "c": 4}, {"a": 0.9, "b": 0.04, "c": 0.03, "d": 0.03}).degrees == 1
    assert chi_square({"a": 99, "d": 1}, {"a": 0.9, "b": 0.1}) == (math.inf, 1, 0.0)
    assert chi_square({"a": 99, "b": 1}, {"a": 1.0, "b": 0.0}).p_value == 0


def test_one_cell_says_nothing():
    assert chi_square({"a": 100}, {"a": 1.0}) == (0.0, 0, 1.0)


def test_the_interval_of_a_geometric_mean_covers_it_as_often_as_it_says():
    rng = random.Random(2)
    covered = 0
    for _ in range(60):
        low, high = bootstrap_interval([math.exp(rng.gauss(0.5, 0.4)) for _ in range(30)])
        covered += low < math.exp(0.5) < high
    assert 48 <= covered <= 60
    values = [1.0, 2.0, 4.0]
    assert bootstrap_interval(values) == bootstrap_interval(values)
    assert bootstrap_interval([3.0, 3.0]) == pytest.approx((3, 3))
