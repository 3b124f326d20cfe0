"""Recorded answers are replayed on a clock of their own: what is right gains, what is wrong loses next to nothing."""

import pytest
from replay import replay

ROWS = [1, 2, 4, 8, 16]


@pytest.mark.parametrize(("right", "num_seqs"), [(True, 1), (True, 3), (False, 1)])
def test_a_model_that_is_right_gains_and_one_that_is_wrong_costs_little(right: bool, num_seqs: int) -> None:
    def costs(first_s: float) -> dict[str, object]:
        return {"rows": ROWS, "seconds": [first_s * (1 + 0.02 * n) for n in ROWS]}

    answers = [list(range(1000 * n, 1000 * n + 200)) for n in range(9)]
    items = [
        {
            "set": "a",
            "prompt": [-5 - n],
            "answer": answer,
            "drafts": {"m": [([t if right else 7 for t in answer[i : i + 8]], [0.9] * len(answer[i : i + 8])) for i in range(200)]},
        }
        for n, answer in enumerate(answers)
    ]
    over_plain = replay({"target": costs(0.03), "models": {"m": costs(0.003)}, "items": items}, ["m"], num_seqs)["a"]
    assert over_plain > 1.5 if right else 0.95 < over_plain < 1.02
