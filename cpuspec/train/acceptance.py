"""How many drafted tokens of held-back samples would be accepted, by position."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


@dataclass
class Acceptance:
    """Counts of drafts of up to n tokens whose likeliest tokens are compared with those that the target chose.

    num_reached [n]: drafts whose tokens before position k were all right, and which have a token to compare at k. num_right [n]: of
    these, those whose token at k was right, too. said [n]: the sum of the confidence head's chances of the reached ones; empty
    without one.
    """

    num_reached: F64
    num_right: F64
    said: F64

    @staticmethod
    def of(right: NDArray[np.bool_], known: NDArray[np.bool_], said: NDArray[np.floating] | None = None) -> "Acceptance":
        """right, known [drafts, n]: whether a token was right, and whether there was one to compare. said: the head's chances."""
        before = np.cumprod(np.pad(right, ((0, 0), (1, 0)), constant_values=True)[:, :-1], axis=1).astype(bool)
        reached = before & np.cumprod(known, axis=1).astype(bool)
        told = np.zeros(0) if said is None else (said * reached).sum(0)
        return Acceptance(reached.sum(0).astype(float), (reached & right).sum(0).astype(float), told)

    @staticmethod
    def sum(parts: Iterable["Acceptance"]) -> "Acceptance":
        """That of all drafts; at least one part."""
        first, *others = parts
        total = Acceptance(first.num_reached.copy(), first.num_right.copy(), first.said.copy())
        for one in others:
            total.num_reached += one.num_reached
            total.num_right += one.num_right
            total.said += one.said
        return total

    @property
    def by_position(self) -> list[float]:
        """The share of reached tokens that were right."""
        return [round(float(one), 4) for one in self.num_right / np.maximum(self.num_reached, 1)]

    @property
    def said_by_position(self) -> list[float]:
        """The confidence head's mean chance of the same tokens: equal shares are calibrated."""
        return [round(float(one), 4) for one in self.said / np.maximum(self.num_reached[: len(self.said)], 1)]

    @property
    def mean_length(self) -> float:
        """Tokens of a forward of the target, its own included."""
        return round(1 + float(np.cumprod(self.num_right / np.maximum(self.num_reached, 1)).sum()), 4)
