"""Drafts of heads that feed on their own output: EAGLE-1, -2 and -3, and multi-token prediction. A forward makes each token.

`draft_trees` is the dynamic tree of EAGLE-2 (arXiv 2406.16858, section 4): the likeliest nodes are expanded depth by depth, and of
all that were found the likeliest are drafted.
"""

from typing import NamedTuple

import numpy as np

from cpuspec.model.batch import F32
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.head_path import HeadPath
from cpuspec.speculation.head_context import DraftedRows, HeadContext

# Children of a node, nodes that are expanded at each depth, and depths. EAGLE-2 has 10 and 5 for drafts of 60 tokens on a GPU.
_CHILDREN, _DEPTHS = 4, 8


def draft_chains(context: HeadContext, paths: list[HeadPath], name: str) -> list[Draft]:
    """A chain for every path, all one token at a time; paths that have enough drop out."""
    going = paths
    rows = context.score([path.seq for path in going], [None] * len(going))
    while going:
        for path, row in zip(going, rows, strict=True):
            path.choose(row.logits[-1])
        states = [row.hidden[-1:] for path, row in zip(going, rows, strict=True) if not path.is_done]
        going = [path for path in going if not path.is_done]
        drafted = [
            DraftedRows(path.tokens[-1:], state, None, len(path.tokens) - 1) for path, state in zip(going, states, strict=True)
        ]
        rows = context.score([path.seq for path in going], list(drafted)) if going else []
    return [path.draft(name) for path in paths]


def draft_trees(context: HeadContext, paths: list[HeadPath], name: str) -> list[Draft]:
    """A tree for every path, of the likeliest tokens, chosen without a draw."""
    trees = [_Tree(path) for path in paths]
    going = trees
    rows = context.score([tree.path.seq for tree in going], [None] * len(going))
    for depth in range(1, _DEPTHS + 1):
        for tree, row in zip(going, rows, strict=True):
            tree.grow(row.logits, row.hidden)
        going = [tree for tree in going if tree.frontier] if depth < _DEPTHS else []
        if not going:
            break
        rows = context.score([tree.path.seq for tree in going], [tree.rows() for tree in going])
    return [tree.draft(name) for tree in trees]


class _Node(NamedTuple):
    """A found token. confidence: its probability; likely: that of the path to it."""

    token: int
    parent: int  # node, -1 for the last committed token
    depth: int
    confidence: float
    likely: float


class _Tree:
    """The nodes found for one sequence.

    frontier: those whose children are wanted next. They are fed with all that were fed before, as rows of one tree, because only
    rows of one forward can follow each other as a tree.
    """

    def __init__(self, path: HeadPath) -> None:
        self.path = path
        self.nodes: list[_Node] = []
        self.frontier = [-1]
        self._fed: list[int] = []
        self._states: dict[int, F32] = {}  # outputs [C] of fed nodes, by node; -1 is the last committed token

    def grow(self, logits: F32, hidden: F32) -> None:
        """Find children of the frontier. logits, hidden: of the root, or from a later score on of the root and all fed nodes."""
        for node, state in zip([-1, *self._fed], hidden, strict=True):
            self._states[node] = state
        first = len(self.nodes)
        for node, row in zip(self.frontier, logits[-len(self.frontier) :], strict=True):
            self._add_children(node, row)
        kept = [node for node in self._kept() if node >= first]
        self.frontier = sorted(sorted(kept, key=lambda node: -self.nodes[node].likely)[:_CHILDREN])

    def rows(self) -> DraftedRows:
        """The rows of all fed nodes and, behind them, of the frontier."""
        self._fed += self.frontier
        place = {node: row for row, node in enumerate(self._fed)}
        nodes = [self.nodes[node] for node in self._fed]
        hidden = np.stack([self._states[node.parent] for node in nodes])
        return DraftedRows([node.token for node in nodes], hidden, [place.get(node.parent, -1) for node in nodes])

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
        logits, number = np.asarray(logits, np.float64), min(_CHILDREN, len(logits))
        best = np.argpartition(logits, -number)[-number:]
        best = best[np.argsort(-logits[best], kind="stable")]
        weights = np.exp(logits[best] - logits[best[0]]) / np.exp(logits - logits[best[0]]).sum()
        depth, likely = (self.nodes[parent].depth + 1, self.nodes[parent].likely) if parent >= 0 else (1, 1.0)
        ids = self.path.token_ids
        for one, weight in zip(best.tolist(), weights.tolist(), strict=True):
            self.nodes.append(_Node(one if ids is None else int(ids[one]), parent, depth, weight, likely * weight))
