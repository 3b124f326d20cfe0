"""A tree of a head's likeliest tokens while it grows, depth by depth, without a draw: EAGLE-2 (arXiv 2406.16858, section 4).

The likeliest nodes are expanded at each depth, and of all that were found the likeliest are drafted.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from cpuspec.model.batch import F32
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.head_path import HeadPath

# Children of a node, nodes that are expanded at each depth, and depths. EAGLE-2 has 10 and 5 for drafts of 60 tokens on a GPU.
CHILDREN, DEPTHS = 4, 8


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

    def grow(self, rows: Iterable[F32]) -> None:
        """Find children of the frontier, whose rows of logits these are."""
        first = len(self.nodes)
        for node, row in zip(self.frontier, rows, strict=True):
            self._add_children(node, row)
        kept = [node for node in self._kept() if node >= first]
        self.frontier = sorted(sorted(kept, key=lambda node: -self.nodes[node].likely)[:CHILDREN])

    def draft(self, name: str) -> Draft:
        """The likeliest nodes."""
        nodes = self._kept()
        place = {-1: -1, **{node: number for number, node in enumerate(nodes)}}
        found = [self.nodes[node] for node in nodes]
        tokens, parents = [node.token for node in found], [place[node.parent] for node in found]
        confidence = np.array([node.confidence for node in found], np.float32)
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), None, name, (), confidence)

    def _kept(self) -> list[int]:
        """As many of the likeliest nodes as the draft may have. None is likelier than its parent, so parents are among them."""
        sure = [node for node, one in enumerate(self.nodes) if one.likely >= self.path.min_confidence]
        return sorted(sorted(sure, key=lambda node: -self.nodes[node].likely)[: self.path.limit])

    def _add_children(self, parent: int, logits: F32) -> None:
        likely = self.nodes[parent].likely if parent >= 0 else 1.0
        ids = self.path.token_ids
        for one, chance in likeliest(logits, CHILDREN):
            self.nodes.append(_Node(one if ids is None else int(ids[one]), parent, chance, likely * chance))


def likeliest(logits: F32, number: int) -> list[tuple[int, float]]:
    """The numbers of the likeliest tokens of a row, the likeliest first, and their probabilities."""
    left = np.array(logits, np.float32)
    best = []
    for _ in range(min(number, len(left))):  # a few passes take a tenth of the time of a partition of 150,000
        one = int(left.argmax())
        best.append((one, left[one]))
        left[one] = -np.inf
    weights = np.exp(np.array([value for _, value in best], np.float64) - best[0][1])
    total = weights.sum() + float(np.exp(left - best[0][1]).sum())
    return [(one, float(weight / total)) for (one, _), weight in zip(best, weights, strict=True)]
