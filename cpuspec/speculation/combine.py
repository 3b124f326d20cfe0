"""Several drafters for one verification: the first one that drafts, or each one after the tokens of those before it."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from cpuspec.model.batch import F32
from cpuspec.sequence import Sequence
from cpuspec.speculation.constrained import legal_part
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.proposer import Proposer
from cpuspec.speculation.verify import Verdict

Rule = Callable[[tuple[Proposer, ...], list[Sequence], list[int]], list[Draft]]


class Combined(Proposer):
    """Proposers for the same verifier. `rule` makes one draft of theirs."""

    def __init__(self, proposers: tuple[Proposer, ...], rule: Rule, name: str) -> None:
        self.name = name
        self.hidden_layers = tuple(sorted({layer for proposer in proposers for layer in proposer.hidden_layers}))
        self.proposers = proposers
        self.levels = tuple(level for proposer in proposers for level in proposer.levels)
        self._rule = rule

    def begin(self, seq: Sequence, num_cached: int) -> None:
        """Call every proposer's `begin`."""
        for proposer in self.proposers:
            proposer.begin(seq, num_cached)

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """One draft for each sequence, by the rule."""
        return self._rule(self.proposers, seqs, limits)

    def accept(self, seq: Sequence, verdict: Verdict, hidden: tuple[F32, ...]) -> None:
        """Call every proposer's `accept`, each with the layers that it asked for."""
        layers = dict(zip(self.hidden_layers, hidden, strict=True))
        for proposer in self.proposers:
            proposer.accept(seq, verdict, tuple(layers[layer] for layer in proposer.hidden_layers))

    def end(self, seq: Sequence) -> None:
        """Call every proposer's `end`, also where one raises."""
        with ExitStack() as calls:
            for proposer in reversed(self.proposers):
                calls.callback(proposer.end, seq)


def first_hit(proposers: tuple[Proposer, ...], seqs: list[Sequence], limits: list[int]) -> list[Draft]:
    """For each sequence the draft of the first proposer that has one. Later ones are asked only for the sequences without."""
    drafts = list(map(legal_part, seqs, proposers[0].propose(seqs, limits)))
    for proposer in proposers[1:]:
        empty = [i for i, draft in enumerate(drafts) if not len(draft) and limits[i]]
        if empty:
            for i, draft in zip(empty, proposer.propose([seqs[i] for i in empty], [limits[i] for i in empty]), strict=True):
                drafts[i] = legal_part(seqs[i], draft)
    return drafts


def one_after_another(proposers: tuple[Proposer, ...], seqs: list[Sequence], limits: list[int]) -> list[Draft]:
    """Each proposer continues the draft of those before it. No proposer continues a tree."""
    drafts = list(map(legal_part, seqs, proposers[0].propose(seqs, limits)))
    for proposer in proposers[1:]:
        unfinished = [i for i, draft in enumerate(drafts) if draft.is_chain and len(draft) < limits[i]]
        if not unfinished:
            break
        extended = [seqs[i].with_drafted(drafts[i].tokens.tolist()) for i in unfinished]
        more = proposer.propose(extended, [limits[i] - len(drafts[i]) for i in unfinished])
        for i, draft in zip(unfinished, map(legal_part, extended, more), strict=True):
            drafts[i] = joined_drafts(drafts[i], draft)
    return drafts


def joined_drafts(first: Draft, second: Draft) -> Draft:
    """`second` after the last token of the chain `first`."""
    cycles = first.cycles + second.cycles
    if not len(first) or not len(second):
        return replace(first if len(first) else second, cycles=cycles)
    sure = first.confidence is not None and second.confidence is not None
    return Draft(
        np.concatenate([first.tokens, second.tokens]),
        np.concatenate([first.parents, second.parents + np.int32(len(first))]),
        f"{first.source}+{second.source}",
        cycles,
        np.concatenate([first.confidence, second.confidence]) if sure else None,
        first.token_sources + second.token_sources,
    )
