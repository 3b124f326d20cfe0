"""A tree of a head's likeliest tokens that grows depth by depth: EAGLE-2 (arXiv 2406.16858, section 4). Nothing is drawn.

The likeliest nodes of each depth are expanded. The likeliest of all nodes are drafted.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from cpuspec.model.batch import F32
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.head_path import CHILDREN, DEPTHS, HeadPath, likeliest_children
from cpuspec.speculation.proposer import goes_on


class _Node(NamedTuple):
    """A token. confidence: its probability after its parent; likely: the probability of the path to it."""

    token: int
    parent: int  # node, -1 for the last committed token
    confidence: float
    likely: float


class HeadTree:
    """The nodes for one sequence. frontier: those whose children are wanted next; -1 is the last committed token."""

    def __init__(self, path: HeadPath) -> None:
        self.path = path
        self.nodes: list[_Node] = []
        self.frontier = [-1]
        self._depth = 0

    def grow(self, rows: Iterable[F32]) -> None:
        """Add children of the frontier. rows: of logits, one for each node of the frontier."""
        first = len(self.nodes)
        for node, row in zip(self.frontier, rows, strict=True):
            likely = self.nodes[node].likely if node >= 0 else 1.0
            self.nodes += [_Node(token, node, p, likely * p) for token, p in likeliest_children(row, self.path.token_ids)]
        self._depth += 1
        floors, last = self.path.floors or [], self._depth == DEPTHS
        kept = [one for one in self._kept() if not last and one >= first and goes_on(floors, self._depth, self.nodes[one].likely)]
        self.frontier = sorted(sorted(kept, key=lambda node: -self.nodes[node].likely)[:CHILDREN])

    def draft(self, name: str) -> Draft:
        """The likeliest nodes, the likeliest first."""
        nodes = sorted(self._kept(), key=lambda node: -self.nodes[node].likely)
        place = {-1: -1, **{node: number for number, node in enumerate(nodes)}}
        found = [self.nodes[node] for node in nodes]
        tokens, parents = [node.token for node in found], [place[node.parent] for node in found]
        confidence = np.array([node.confidence for node in found], np.float32)
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), name, (), confidence)

    def _kept(self) -> list[int]:
        """As many of the likeliest nodes as the draft may have. No node is likelier than its parent, so parents are among them."""
        sure = [node for node, one in enumerate(self.nodes) if one.likely >= self.path.min_confidence]
        return sorted(sorted(sure, key=lambda node: -self.nodes[node].likely)[: self.path.limit])
