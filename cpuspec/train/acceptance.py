"""How many drafted tokens of held-back samples would be accepted, by position, and how sure the drafter is of them."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

F64 = NDArray[np.float64]

_SHARPNESSES = np.geomspace(0.4, 2.5, 13)  # factors of logits that are tried; the middle one is 1


@dataclass
class Acceptance:
    """Counts of drafts of up to n tokens whose likeliest tokens are compared with those that the target chose.

    num_reached [n]: drafts whose tokens before position k were all right, and which have a token to compare at k. num_right [n]: of
    these, those whose token at k was right, too. said [S, n]: the sum of the chances of the reached ones, by `chances`' factors.
    """

    num_reached: F64
    num_right: F64
    said: F64

    @staticmethod
    def of(right: NDArray[np.bool_], known: NDArray[np.bool_], said: NDArray[np.floating]) -> "Acceptance":
        """right, known [drafts, n]: whether a token was right, and whether there was one. said [S, drafts, n]: its chances."""
        before = np.cumprod(np.pad(right, ((0, 0), (1, 0)), constant_values=True)[:, :-1], axis=1).astype(bool)
        reached = before & np.cumprod(known, axis=1).astype(bool)
        return Acceptance(
            reached.sum(0).astype(float), (reached & right).sum(0).astype(float), (said * reached).sum(1, dtype=float)
        )

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
    def sharpness(self) -> float:
        """The factor of the logits with which their softmax gives reached tokens, all together, the share that was right.

        At most 2.5 and at least 0.4.
        """
        if not self.num_reached.any():
            return 1.0
        return float(np.exp(np.interp(self.num_right.sum(), self.said.sum(1), np.log(_SHARPNESSES))))

    @property
    def said_by_position(self) -> list[float]:
        """The mean chance of the same tokens, logits times the sharpness: equal shares are calibrated."""
        at = np.interp(np.log(self.sharpness), np.log(_SHARPNESSES), np.arange(len(self.said)))
        low, share = int(at), at % 1
        said = (1 - share) * self.said[low] + share * self.said[min(low + 1, len(self.said) - 1)]
        return [round(float(one), 4) for one in said / np.maximum(self.num_reached, 1)]

    @property
    def mean_length(self) -> float:
        """Tokens of a forward of the target, its own included."""
        return round(1 + float(np.cumprod(self.num_right / np.maximum(self.num_reached, 1)).sum()), 4)


def chances(logits: Tensor) -> NDArray[np.float32]:
    """The softmax of the largest of each row of logits [..., V] times each factor, [S, ...]."""
    best = logits.amax(-1)
    return torch.stack([(one * best - (one * logits).logsumexp(-1)).exp() for one in _SHARPNESSES.tolist()]).cpu().numpy()
