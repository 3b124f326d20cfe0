"""The draft that a proposer hands to a verifier: tokens, and how they follow one another."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cpuspec.model.batch import F32, I32


class Cycle(NamedTuple):
    """One verification of one draft, for metrics."""

    source: str
    num_draft_tokens: int
    num_accepted_tokens: int
    num_positions: int  # tokens of the longest drafted path that begins with the accepted ones: all tokens of a chain


@dataclass(frozen=True)
class Draft:
    """Proposed continuation of one sequence: a tree of n nodes, of which a chain is the common case.

    Nodes with the same parent are alternatives. confidence: for each node the probability, by its proposer, that it is accepted if
    its parent is. A planner may use it; a verifier never does. sources: for each node the level that drafted its token; empty if
    `source` drafted all. Both serve reports.
    """

    tokens: I32  # [n]
    parents: I32  # [n] node of the parent, always an earlier one, -1 = the last committed token; a chain is arange(n) - 1
    source: str  # proposer name, for metrics
    cycles: tuple[Cycle, ...] = ()  # earlier verifications by lower levels of a chain, in their order
    confidence: F32 | None = None  # [n]
    sources: tuple[str, ...] = ()  # [n] or empty

    @staticmethod
    def chain(
        tokens: Sequence[int],
        source: str,
        cycles: tuple[Cycle, ...] = (),
        sources: tuple[str, ...] = (),
        confidence: Sequence[float] | None = None,
    ) -> "Draft":
        """A draft in which each token follows the one before."""
        parents = np.arange(-1, len(tokens) - 1, dtype=np.int32)
        sure = None if confidence is None else np.array(confidence, np.float32)
        return Draft(np.array(tokens, np.int32), parents, source, cycles, sure, sources)

    @cached_property
    def is_chain(self) -> bool:
        """Whether each token follows the one before."""
        # A user's parents may be no array; `UserProposer` refuses these.
        return np.asarray(self.parents).tolist() == list(range(-1, len(self) - 1))

    @property
    def depths(self) -> I32:
        """For each node the number of drafted tokens up to it, itself included, [n]."""
        depths: list[int] = []
        for parent in self.parents.tolist():
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return np.array(depths, np.int32)

    def first(self, num_tokens: int) -> "Draft":
        """The draft of its first nodes."""
        if num_tokens >= len(self):
            return self
        return replace(
            self,
            tokens=self.tokens[:num_tokens],
            parents=self.parents[:num_tokens],
            confidence=None if self.confidence is None else self.confidence[:num_tokens],
            sources=self.sources[:num_tokens],
        )

    @property
    def token_sources(self) -> tuple[str, ...]:
        """For each node the level that drafted its token, [n]."""
        return self.sources or (self.source,) * len(self)

    def only(self, nodes: Sequence[int]) -> "Draft":
        """The draft of some of its nodes, in this order. Their parents must be among them."""
        place = {-1: -1, **{node: number for number, node in enumerate(nodes)}}
        return replace(
            self,
            tokens=self.tokens[nodes],
            parents=np.array([place[parent] for parent in self.parents[nodes].tolist()], np.int32),
            confidence=None if self.confidence is None else self.confidence[nodes],
            sources=tuple(self.sources[node] for node in nodes) if self.sources else (),
        )

    @property
    def likely(self) -> list[float]:
        """For each node the product of the confidences on the path to it, [n]; 1 without confidences."""
        likely: list[float] = []
        confidence = [1.0] * len(self) if self.confidence is None else self.confidence.tolist()
        for parent, sure in zip(self.parents.tolist(), confidence, strict=True):
            likely.append(sure * (likely[parent] if parent >= 0 else 1.0))
        return likely

    def tokens_to(self, node: int) -> list[int]:
        """The drafted tokens from the first one to `node`; none for -1."""
        path: list[int] = []
        while node >= 0:
            path.append(int(self.tokens[node]))
            node = int(self.parents[node])
        return path[::-1]

    def num_below(self, node: int) -> int:
        """The length of the longest path after `node`; -1 stands for the start of the draft."""
        if self.is_chain:
            return len(self) - 1 - node
        depths = {node: 0}
        for child, parent in enumerate(self.parents.tolist()):
            if parent in depths:
                depths[child] = depths[parent] + 1
        return max(depths.values())

    def verified(self, path: list[int]) -> tuple[Cycle, ...]:
        """The earlier verifications, and the draft's own, which accepted the nodes on `path`."""
        num_positions = len(path) + self.num_below(path[-1] if path else -1)
        return (*self.cycles, Cycle(self.source, len(self), len(path), num_positions))

    def __len__(self) -> int:
        return len(self.tokens)
