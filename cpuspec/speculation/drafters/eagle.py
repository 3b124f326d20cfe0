"""Drafts of heads that read their own output: EAGLE-1, -2 and -3, and multi-token prediction. A forward makes each token."""

import numpy as np

from cpuspec.model.batch import F32
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.head_path import HeadPath
from cpuspec.speculation.drafters.head_tree import HeadTree
from cpuspec.speculation.head_context import DraftedRows, HeadContext, HeadRows


def draft_chains(context: HeadContext, paths: list[HeadPath], name: str) -> list[Draft]:
    """A chain for every path. All grow by one token at a time; paths with enough tokens drop out."""
    going = paths
    rows = context.score([path.seq for path in going], [None] * len(going))
    while going:
        for path, row in zip(going, rows, strict=True):
            path.choose(row.logits[-1])
        drafted: list[DraftedRows | None] = [
            DraftedRows(path.tokens[-1:], row.hidden[-1:], None, len(path.tokens) - 1)
            for path, row in zip(going, rows, strict=True)
            if not path.is_done
        ]
        going = [path for path in going if not path.is_done]
        rows = context.score([path.seq for path in going], drafted) if going else []
    return [path.draft(name) for path in paths]


def draft_from_one_place(context: HeadContext, paths: list[HeadPath], name: str) -> list[Draft]:
    """As `draft_chains`, for a head whose rows see the target's keys and values and none of the head's own rows."""
    seqs = [path.seq for path in paths]
    going = list(zip(paths, map(context.unknown, seqs), context.last_hidden(seqs), strict=True))  # tokens to feed, first to last
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
    """A tree of the likeliest tokens for every path. Nothing is drawn."""
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
    """A tree whose fed nodes are fed again with the frontier: only rows of one forward can follow each other as a tree."""

    def __init__(self, path: HeadPath) -> None:
        self.tree = HeadTree(path)
        self._fed: list[int] = []
        self._hidden: dict[int, F32] = {}  # outputs [C] by node that was fed; -1 is the last committed token

    def grow(self, rows: HeadRows) -> None:
        """Find children of the frontier. rows: of the root, and after the first score also of all fed nodes."""
        for node, state in zip([-1, *self._fed], rows.hidden, strict=True):
            self._hidden[node] = state
        self.tree.grow(rows.logits[-len(self.tree.frontier) :])

    def rows(self) -> DraftedRows:
        """The rows of all fed nodes, and then of the frontier."""
        self._fed += self.tree.frontier
        place = {node: row for row, node in enumerate(self._fed)}
        nodes = [self.tree.nodes[node] for node in self._fed]
        hidden = np.stack([self._hidden[node.parent] for node in nodes])
        return DraftedRows([node.token for node in nodes], hidden, [place.get(node.parent, -1) for node in nodes])
