"""Drafting with a trained head: the part that all methods share. A `Rule`, one for each method, makes a draft of a head's rows.

A head drafts only for the target that it was trained on, whose hidden states it reads. It chooses the likeliest tokens, as vLLM's
drafters do. Or it draws them with the request's random numbers, of which more are accepted at high temperatures.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from cpuspec.model.batch import F32
from cpuspec.sequence import Sequence
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.blocks import draft_blocks
from cpuspec.speculation.drafters.eagle import draft_chains, draft_from_one_place, draft_trees
from cpuspec.speculation.drafters.head_path import HeadPath
from cpuspec.speculation.drafters.parallel import draft_at_once
from cpuspec.speculation.drafters.stages import draft_stage_chains, draft_stage_trees
from cpuspec.speculation.head_context import HeadContext
from cpuspec.speculation.proposer import Floors, Proposer
from cpuspec.speculation.stage_context import StageContext
from cpuspec.speculation.verify import Verdict

Rule = Callable[[Any, list[HeadPath], str], list[Draft]]  # of a HeadContext, or of a StageContext for heads of stages

# How heads draft chains, by `Head.method`, and which of them can draft trees.
RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(("eagle", "eagle3", "mtp"), draft_chains),
        **dict.fromkeys(("medusa", "mlp-speculator"), draft_stage_chains),
        "p-eagle": draft_at_once,
        "block": draft_blocks,
        "assistant": draft_from_one_place,
    }
)
_TREES_OF: Mapping[Rule, Rule] = MappingProxyType({draft_chains: draft_trees, draft_stage_chains: draft_stage_trees})
TREE_RULES: Mapping[str, Rule] = MappingProxyType({name: _TREES_OF[rule] for name, rule in RULES.items() if rule in _TREES_OF})


class HeadProposer(Proposer):
    """Drafts up to `num_tokens` tokens with a head. min_confidence, draws, branches: as in `HeadPath`."""

    def __init__(
        self,
        context: HeadContext | StageContext,
        rule: Rule,
        vocab_size: int,
        name: str,
        num_tokens: int,
        min_confidence: float = 0.0,
        draws: bool = False,
        branches: bool = True,
    ) -> None:
        """vocab_size: of the target's rows of logits."""
        self.name = name
        self.hidden_layers = context.head.layers
        self.levels = (self,)
        self.context = context
        self.num_tokens = num_tokens
        self.in_one_pass = rule in (draft_at_once, draft_blocks)
        self._rule, self._vocab_size, self._min_confidence, self._draws = rule, vocab_size, min_confidence, draws
        self._branches = branches

    def begin(self, seq: Sequence, num_cached: int) -> None:
        """Follow the sequence."""
        self.context.begin(seq, num_cached)

    def propose(self, seqs: list[Sequence], limits: list[int], floors: list[Floors] | None = None) -> list[Draft]:
        """The head's drafts; empty for sequences whose prompt it has not read yet."""
        context, most = self.context, min(self.num_tokens, self.context.backend.max_rows)
        drafts = [Draft.chain([], self.name)] * len(seqs)
        # The last drafted token is never fed, so it needs no row.
        limits = [min(limit, most, context.capacity - len(seq.tokens)) for limit, seq in zip(limits, seqs, strict=True)]
        able = [i for i, seq in enumerate(seqs) if limits[i] > 0 and context.can_draft(seq)]
        drafting = [i for i, is_ready in zip(able, context.read([seqs[i] for i in able]), strict=True) if is_ready]
        paths = [
            HeadPath(
                *(context.head.token_ids, seqs[i], limits[i], self._vocab_size, self._min_confidence, self._draws),
                floors=floors[i] if floors else None,
                branches=self._branches,
            )
            for i in drafting
        ]
        for i, draft in zip(drafting, self._rule(context, paths, self.name) if paths else (), strict=True):
            drafts[i] = draft
        return drafts

    def accept(self, seq: Sequence, verdict: Verdict, hidden: tuple[F32, ...]) -> None:
        """Take the target's hidden states."""
        self.context.learn(seq, hidden)

    def end(self, seq: Sequence) -> None:
        """Free the slot."""
        self.context.end(seq)
