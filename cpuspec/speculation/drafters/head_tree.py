"""A tree of a head's likeliest tokens while it grows, depth by depth, without a draw: EAGLE-2 (arXiv 2406.16858, section 4).

The likeliest nodes are expanded at each depth, and of all that were found the likeliest are drafted.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from cpuspec.model.batch import F32
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.head_path import CHILDREN, DEPTHS, HeadPath, likeliest_children
from cpuspec.speculation.proposer import goes_on


class _Node(NamedTuple):
    """A found token. confidence: its probability; likely: that of the path to it."""

    token: int
    parent: int  # node, -1 for the last committed token
    confidence: float
    likely: float


class HeadTree:
    """The nodes found for one sequence. frontier: those whose children are wanted next, -1 for the last committed token."""

    def __init__(self, path: HeadPath) -> None:
        self.path = path
        self.nodes: list[_Node] = []
        self.frontier = [-1]
        self._depth = 0

    def grow(self, rows: Iterable[F32]) -> None:
        """Find children of the frontier, whose rows of logits these are."""
        first = len(self.nodes)
        for node, row in zip(self.frontier, rows, strict=True):
            self._add_children(node, row)
        self._depth += 1
        kept = [node for node in self._kept() if node >= first and self._goes_on(node)] if self._depth < DEPTHS else []
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
        """As many of the likeliest nodes as the draft may have. None is likelier than its parent, so parents are among them."""
        sure = [node for node, one in enumerate(self.nodes) if one.likely >= self.path.min_confidence]
        return sorted(sorted(sure, key=lambda node: -self.nodes[node].likely)[: self.path.limit])

    def _add_children(self, parent: int, logits: F32) -> None:
        """Find the likeliest tokens behind a node; their probabilities are those of the row's softmax."""
        likely = self.nodes[parent].likely if parent >= 0 else 1.0
        self.nodes += [
            _Node(token, parent, chance, likely * chance) for token, chance in likeliest_children(logits, self.path.token_ids)
        ]

    def _goes_on(self, node: int) -> bool:
        return self.path.floors is None or goes_on(self.path.floors, self._depth, self.nodes[node].likely)
