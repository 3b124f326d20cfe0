"""Drafts of heads of stages: Medusa (arXiv 2401.10774), whose stages know nothing of each other, and MLP speculators (2404.19124),
whose stages read the token before theirs. A stage makes one token of a chain, or one depth of a tree.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cpuspec.checkpoints.heads.stages import ResidualStage
from cpuspec.model.batch import F32
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.head_path import HeadPath
from cpuspec.speculation.drafters.head_tree import HeadTree
from cpuspec.speculation.stage_context import StageContext


def draft_stage_chains(context: StageContext, paths: list[HeadPath], name: str) -> list[Draft]:
    """A chain for every path, as long as there are stages at most."""
    _run_stages(context, paths, [None] * len(paths))
    return [path.draft(name) for path in paths]


def draft_stage_trees(context: StageContext, paths: list[HeadPath], name: str) -> list[Draft]:
    """A tree for every path, of the likeliest tokens, chosen without a draw, as deep as there are stages at most."""
    trees = [HeadTree(path) for path in paths]
    _run_stages(context, paths, list(trees))
    return [tree.draft(name) for tree in trees]


@dataclass(slots=True)
class _Way:
    """A sequence on its way through the stages: of what its next rows are made.

    is_shared: whether one row stands for all nodes of a depth, as where no stage reads a token.
    given: tokens that the first stages read, whatever they would draft; from stage len(given) - 1 on it drafts.
    states [n, C], tokens [n]: of the next rows: one, or one for each node whose children are wanted.
    """

    path: HeadPath
    tree: HeadTree | None
    is_shared: bool
    given: list[int]
    states: F32
    tokens: list[int]

    @property
    def is_done(self) -> bool:
        return not self.tree.frontier if self.tree else self.path.is_done

    def take(self, number: int, states: F32, logits: F32) -> None:
        """What stage `number` made: states of the rows, and, where it drafts, logits."""
        if number < len(self.given) - 1:
            self.states, self.tokens = states, [self.given[number + 1]]
        elif self.tree is None:
            self.path.choose(logits[0])
            self.states, self.tokens = states, self.path.tokens[-1:]
        else:
            tree, before = self.tree, self.tree.frontier
            tree.grow([logits[0]] * len(before) if self.is_shared else logits)
            nodes = [tree.nodes[node] for node in tree.frontier]
            if not self.is_shared:
                self.states = states[[before.index(node.parent) for node in nodes]]
                self.tokens = [node.token for node in nodes]


def _run_stages(context: StageContext, paths: list[HeadPath], trees: list[HeadTree | None]) -> None:
    """Run each stage for all sequences at once; those that have enough drop out."""
    context.num_forwards += 1
    context.weight_bytes += context.backend.weight_bytes
    first = context.states([path.seq for path in paths])
    given = [context.unknown(path.seq) for path in paths]
    is_shared = isinstance(context.head.stages[0], ResidualStage)
    ways = [
        _Way(path, tree, is_shared, tokens, first[i : i + 1], tokens[:1])
        for i, (path, tree, tokens) in enumerate(zip(paths, trees, given, strict=True))
    ]
    for number in range(len(context.head.stages)):
        ways = [way for way in ways if not way.is_done]
        if not ways:
            return
        states = context.advanced(
            number, np.concatenate([way.states for way in ways]), [token for way in ways for token in way.tokens]
        )
        starts = np.cumsum([0, *(len(way.states) for way in ways)]).tolist()
        parts = [slice(start, end) for start, end in pairwise(starts)]
        drafting = [part for way, part in zip(ways, parts, strict=True) if number >= len(way.given) - 1]
        logits = context.logits(number, np.concatenate([states[part] for part in drafting])) if drafting else states[:0]
        done = 0
        for way, part in zip(ways, parts, strict=True):
            size = part.stop - part.start if part in drafting else 0
            way.take(number, states[part], logits[done : done + size])
            done += size
