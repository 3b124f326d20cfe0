"""What a proposer hands to a verifier: tokens, how they hang together, and the distributions they were drawn from."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cpuspec.model.batch import F32, I32
from cpuspec.sampling import Row

Probs = tuple[Row, ...]


class Cycle(NamedTuple):
    """One verification of one draft, for metrics."""

    source: str
    num_draft_tokens: int
    num_accepted_tokens: int
    num_positions: int  # length of the longest drafted path that begins with the accepted tokens: of a chain, all


@dataclass(frozen=True)
class Draft:
    """Proposed continuation of one sequence: a tree of n nodes, of which a chain is the common case.

    probs: for each node the row [V] that its token was drawn from, exactly, as an array or a SparseRow; None where tokens were
    chosen without a draw (each row is a point mass). Nodes with one parent are alternatives, tried in their order. Where one is
    drawn without replacement, its row is without the earlier ones, and sums to one again.
    confidence: for each node how likely its proposer thinks it is accepted once its parent is. For whoever decides how much
    to draft, never for a verifier.
    """

    tokens: I32  # [n]
    parents: I32  # [n] node of the parent, always an earlier one, -1 = the last committed token; a chain is arange(n) - 1
    probs: Probs | None
    source: str  # proposer name, for metrics
    cycles: tuple[Cycle, ...] = ()  # verifications by lower levels of a chain that went into it, in their order
    confidence: F32 | None = None  # [n]
    num_tokens: int = field(init=False)  # what `len` tells, sooner
    is_chain: bool = field(init=False)  # whether each token follows the one before

    def __post_init__(self) -> None:
        # Here and not when asked for: each round asks several times, and looks a property up anew.
        object.__setattr__(self, "num_tokens", len(self.tokens))
        # What a user made may be no array; where it is taken, that is refused.
        parents = self.parents.tolist() if isinstance(self.parents, np.ndarray) else self.parents
        object.__setattr__(self, "is_chain", parents == list(range(-1, self.num_tokens - 1)))

    @staticmethod
    def chain(tokens: Sequence[int], source: str, probs: Probs | None = None, cycles: tuple[Cycle, ...] = ()) -> "Draft":
        """A draft in which each token follows the one before."""
        return Draft(np.array(tokens, np.int32), np.array(range(-1, len(tokens) - 1), np.int32), probs, source, cycles)

    def first(self, num_tokens: int) -> "Draft":
        """Its first nodes only. Where tokens were drawn, the number must not depend on those that go."""
        if num_tokens >= len(self):
            return self
        probs = None if self.probs is None else self.probs[:num_tokens]
        confidence = None if self.confidence is None else self.confidence[:num_tokens]
        return Draft(self.tokens[:num_tokens], self.parents[:num_tokens], probs, self.source, self.cycles, confidence)

    @property
    def depths(self) -> I32:
        """How many drafted tokens lead to each node, itself included, [n]."""
        depths: list[int] = []
        for parent in self.parents.tolist():
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return np.array(depths, np.int32)

    def tokens_to(self, node: int) -> list[int]:
        """The drafted tokens from the first one to `node`; none for -1."""
        path: list[int] = []
        while node >= 0:
            path.append(int(self.tokens[node]))
            node = int(self.parents[node])
        return path[::-1]

    def num_below(self, node: int) -> int:
        """How many tokens the longest path has that goes on from `node`; -1 is where the draft begins."""
        if self.is_chain:
            return len(self) - 1 - node
        depths = {node: 0}
        for child, parent in enumerate(self.parents.tolist()):
            if parent in depths:
                depths[child] = depths[parent] + 1
        return max(depths.values())

    def verified(self, path: list[int]) -> tuple[Cycle, ...]:
        """The verifications that went into it, and its own, which accepted the nodes on the path."""
        if not self.num_tokens:
            return (*self.cycles, Cycle(self.source, 0, 0, 0))
        last = path[-1] if path else -1
        return (*self.cycles, Cycle(self.source, self.num_tokens, len(path), len(path) + self.num_below(last)))

    def __len__(self) -> int:
        return self.num_tokens
