"""Greedy answers of two engines: where they part, and whether their numerics explain it."""

import numpy as np
import pytest
from same_tokens import Answer, Parting, compare

JUDGED = np.log(np.array([[0.5, 0.25, 0.25], [0.48, 0.5, 0.02]]))


def _answer(*tokens: int, off: float = 0.02) -> Answer:
    return Answer(list(tokens), [float(JUDGED[place, token]) + off for place, token in enumerate(tokens)])


def test_answers_that_are_the_same_differ_from_the_judge_by_their_errors() -> None:
    found = compare([_answer(0, 1)], [_answer(0, 1, off=-0.03)], [JUDGED])
    assert (found.num_same, found.num_tokens_compared, found.partings) == (1, 2, [])
    assert (found.our_error, found.their_error) == (pytest.approx(0.02), pytest.approx(0.03))
    assert found.largest_error == pytest.approx(0.03)
    assert found.within_numerics
    assert not compare([_answer(0, 1)], [_answer(0, 1, off=-0.3)], [JUDGED]).within_numerics


def test_answers_may_part_where_tokens_are_as_near_as_the_errors_are_large() -> None:
    near = compare([_answer(0, 1), _answer(0, 1)], [_answer(0, 0), _answer(0, 1)], [JUDGED, JUDGED])
    assert near.num_same == 1
    assert near.partings == [Parting(0, 1, 1, 0, pytest.approx(np.log(0.5 / 0.48)))]
    assert near.within_numerics
    assert not compare([_answer(0, 1)], [_answer(0, 2)], [JUDGED]).within_numerics
