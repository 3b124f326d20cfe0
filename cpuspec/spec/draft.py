"""What a proposer hands to a verifier: tokens, how they hang together, and the distributions they were drawn from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuspec.model.batch import I32

Probs = tuple[NDArray[Any], ...]


@dataclass(frozen=True)
class Draft:
    """Proposed continuation of one sequence: a tree of n nodes, of which a chain is the common case.

    probs: for each node the row [V] that its token was drawn from, exactly; None where tokens were chosen without
    a draw (each row is a point mass).
    """

    tokens: I32  # [n]
    parents: I32  # [n] node of the parent, -1 = the last committed token; a chain is arange(n) - 1
    probs: Probs | None
    source: str  # proposer name, for metrics

    @staticmethod
    def chain(tokens: Sequence[int], source: str, probs: Probs | None = None) -> "Draft":
        """A draft in which each token follows the one before."""
        return Draft(np.array(tokens, np.int32), np.arange(len(tokens), dtype=np.int32) - 1, probs, source)

    def __len__(self) -> int:
        return len(self.tokens)
