"""Drafts of heads of stages. A stage makes one token of a chain, or one depth of a tree.

Medusa's stages (arXiv 2401.10774) all read the same hidden state. A stage of an MLP speculator (2404.19124) reads the stage before
it and the token before its own.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from cpuspec.checkpoints.heads.stages import ResidualStage
from cpuspec.model.batch import F32
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.head_path import HeadPath
from cpuspec.speculation.drafters.head_tree import HeadTree
from cpuspec.speculation.stage_context import StageContext


def draft_stage_chains(context: StageContext, paths: list[HeadPath], name: str) -> list[Draft]:
    """A chain for every path, of at most as many tokens as there are stages."""
    _run_stages(context, paths, [None] * len(paths))
    return [path.draft(name) for path in paths]


def draft_stage_trees(context: StageContext, paths: list[HeadPath], name: str) -> list[Draft]:
    """A tree of the likeliest tokens for every path, at most as deep as there are stages. Nothing is drawn."""
    trees = [HeadTree(path) for path in paths]
    _run_stages(context, paths, list(trees))
    return [tree.draft(name) for tree in trees]


@dataclass(slots=True)
class _Run:
    """A sequence that runs through the stages.

    is_shared: whether a stage has one row for all nodes of a depth, because it reads no token.
    given: the tokens that the first stages read instead of drafting. Stage len(given) - 1 drafts first.
    hidden [n, C], tokens [n]: the inputs of the next stage: of one row, or of one row for each node whose children are wanted.
    """

    path: HeadPath
    tree: HeadTree | None
    is_shared: bool
    given: list[int]
    hidden: F32
    tokens: list[int]

    @property
    def is_done(self) -> bool:
        return not self.tree.frontier if self.tree else self.path.is_done

    def advance(self, number: int, hidden: F32, logits: F32) -> None:
        """Choose tokens from the output of stage `number`: hidden states of its rows, and logits if it drafts."""
        if number < len(self.given) - 1:
            self.hidden, self.tokens = hidden, [self.given[number + 1]]
        elif self.tree is None:
            self.path.choose(logits[0])
            self.hidden, self.tokens = hidden, self.path.tokens[-1:]
        else:
            tree, before = self.tree, self.tree.frontier
            tree.grow([logits[0]] * len(before) if self.is_shared else logits)
            nodes = [tree.nodes[node] for node in tree.frontier]
            if not self.is_shared:
                self.hidden = hidden[[before.index(node.parent) for node in nodes]]
                self.tokens = [node.token for node in nodes]


def _run_stages(context: StageContext, paths: list[HeadPath], trees: list[HeadTree | None]) -> None:
    """Run each stage for all sequences together; those with enough tokens drop out."""
    context.num_forwards += 1
    context.weight_bytes += context.backend.weight_bytes
    first = context.hidden([path.seq for path in paths])
    given = [context.unknown(path.seq) for path in paths]
    is_shared = isinstance(context.head.stages[0], ResidualStage)
    runs = [
        _Run(path, tree, is_shared, tokens, first[i : i + 1], tokens[:1])
        for i, (path, tree, tokens) in enumerate(zip(paths, trees, given, strict=True))
    ]
    for number in range(len(context.head.stages)):
        runs = [run for run in runs if not run.is_done]
        if not runs:
            return
        tokens = [token for run in runs for token in run.tokens]
        hidden = context.advanced(number, np.concatenate([run.hidden for run in runs]), tokens)
        parts = [slice(start, end) for start, end in pairwise(accumulate((len(run.hidden) for run in runs), initial=0))]
        drafting = [part for run, part in zip(runs, parts, strict=True) if number >= len(run.given) - 1]
        logits = context.logits(number, np.concatenate([hidden[part] for part in drafting])) if drafting else hidden[:0]
        done = 0
        for run, part in zip(runs, parts, strict=True):
            size = part.stop - part.start if part in drafting else 0
            run.advance(number, hidden[part], logits[done : done + size])
            done += size
