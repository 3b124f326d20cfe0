"""What a row of a batch sees: its path, or the last tokens of it."""

import numpy as np
import pytest

from cpuspec.model.batch import ForwardBatch, visible


def seen_by_definition(parents: list[int], prefix: int, window: int | None) -> list[set[int]]:
    """For each row the cache indices of the prefix and of its ancestors, the last `window` of them."""
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else range(prefix)), prefix + row])
    return [set(path[-window:] if window else path) for path in paths]


@pytest.mark.parametrize("window", [None, 1, 2, 3, 7, 100])
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_a_row_sees_the_last_tokens_of_its_path(prefix: int, window: int | None) -> None:
    rng = np.random.default_rng(prefix)
    for chained in (True, False):
        parents = [row - 1 if chained else int(rng.integers(-1, row)) for row in range(9)]
        # Rows of another sequence stand before, and parents are rows of the whole batch.
        batch = ForwardBatch(
            tokens=[1] * 12,
            positions=[0] * 12,
            slots=[1, 0],
            q_start=[0, 3, 12],
            parents=None if chained else [-1, 0, 1, *(3 + parent if parent >= 0 else -1 for parent in parents)],
        )
        seen = visible(batch, 1, prefix, window)
        assert seen.shape == (9, prefix + 9)
        assert [set(np.flatnonzero(row).tolist()) for row in seen] == seen_by_definition(parents, prefix, window)
