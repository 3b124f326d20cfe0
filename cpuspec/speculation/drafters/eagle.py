"""Drafts of heads that feed on their own output: EAGLE-1, -2 and -3, and multi-token prediction. A forward makes each token."""

import numpy as np

from cpuspec.model.batch import F32
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.head_path import HeadPath
from cpuspec.speculation.drafters.head_tree import HeadTree
from cpuspec.speculation.head_context import DraftedRows, HeadContext, HeadRows


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


def draft_from_one_place(context: HeadContext, paths: list[HeadPath], name: str) -> list[Draft]:
    """As `draft_chains`, of a head whose rows see the target's keys and values and no other rows, so that none is kept."""
    seqs = [path.seq for path in paths]
    going = list(zip(paths, map(context.unknown, seqs), context.last_states(seqs), strict=True))  # tokens to feed, first to last
    while going:
        drafted: list[DraftedRows | None] = [DraftedRows(tokens[:1], state) for _, tokens, state in going]
        rows, fed, going = context.score([path.seq for path, _, _ in going], drafted), going, []
        for (path, tokens, _), row in zip(fed, rows, strict=True):
            following = tokens[1:]
            if not following:
                path.choose(row.logits[-1])
                following = path.tokens[-1:]
            if not path.is_done:
                going.append((path, following, row.hidden[-1:]))
    return [path.draft(name) for path in paths]


def draft_trees(context: HeadContext, paths: list[HeadPath], name: str) -> list[Draft]:
    """A tree for every path, of the likeliest tokens, chosen without a draw."""
    trees = [_FedTree(path) for path in paths]
    going = trees
    rows = context.score([one.tree.path.seq for one in going], [None] * len(going))
    while going:
        for one, row in zip(going, rows, strict=True):
            one.grow(row)
        going = [one for one in going if one.tree.frontier]
        rows = context.score([one.tree.path.seq for one in going], [one.rows() for one in going]) if going else []
    return [one.tree.draft(name) for one in trees]


class _FedTree:
    """A tree whose frontier is fed with all nodes fed before: rows of one forward alone can follow each other as a tree."""

    def __init__(self, path: HeadPath) -> None:
        self.tree = HeadTree(path)
        self._fed: list[int] = []
        self._states: dict[int, F32] = {}  # outputs [C] of fed nodes, by node; -1 is the last committed token

    def grow(self, rows: HeadRows) -> None:
        """rows: of the root, or from a later score on of the root and all fed nodes."""
        for node, state in zip([-1, *self._fed], rows.hidden, strict=True):
            self._states[node] = state
        self.tree.grow(rows.logits[-len(self.tree.frontier) :])

    def rows(self) -> DraftedRows:
        """The rows of all fed nodes and, behind them, of the frontier."""
        self._fed += self.tree.frontier
        place = {node: row for row, node in enumerate(self._fed)}
        nodes = [self.tree.nodes[node] for node in self._fed]
        hidden = np.stack([self._states[node.parent] for node in nodes])
        return DraftedRows([node.token for node in nodes], hidden, [place.get(node.parent, -1) for node in nodes])
