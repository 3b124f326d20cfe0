"""A head of stages beside the states that it drafts from: what `HeadContext` is to heads with layers, without a cache.

A stage reads the verifier's state of the last token whose logits are known, so a prompt need not be read, and nothing is kept of
other tokens. The states come with the verdicts (`learn`).
"""

import math

import numpy as np

from cpuspec.backends import HeadBackend
from cpuspec.checkpoints.heads import Head
from cpuspec.checkpoints.heads.stages import ResidualStage
from cpuspec.metrics import Spent
from cpuspec.model.batch import F32
from cpuspec.model.cache import KVCache
from cpuspec.sequence import Sequence
from cpuspec.speculation.context import PromptChunk
from cpuspec.speculation.prefix_cache import PrefixCache

_GELU = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


class StageContext:
    """One head of stages. Not thread-safe: one caller at a time. capacity: tokens that a sequence may have."""

    def __init__(self, head: Head, backend: HeadBackend, capacity: int) -> None:
        self.head = head
        self.backend = backend
        self.capacity = capacity
        self.cache = KVCache(1, 1, lambda: None, lambda *_: None, lambda *_: None, 0)  # of no bytes
        self.prefixes = PrefixCache(None, self.cache, True)
        self.num_forwards = self.weight_bytes = 0  # of drafts; each reads the matrices of all stages once
        self.num_running = 0
        self.spent = Spent()  # stays empty: the matrices of stages are multiplied one by one
        self.prompt_rows, self.is_alone = backend.max_rows, True  # no prompt is read
        self._states: dict[int, tuple[int, F32]] = {}  # by sequence id: how many tokens have a state, and the last of these [1, C]

    def begin(self, seq: Sequence, num_cached: int) -> None:
        """Do nothing yet: a first state comes with the first verdict."""

    def learn(self, seq: Sequence, layers: tuple[F32, ...]) -> None:
        """Take the verifier's state of the last accepted token, as `Proposer.accept` has it."""
        (rows,) = layers
        self._states[seq.id] = len(seq.tokens) - 1, rows[-1:].copy()  # a view would keep the states of a whole prompt

    def end(self, seq: Sequence) -> None:
        """Forget a sequence."""
        self._states.pop(seq.id, None)

    def can_draft(self, seq: Sequence) -> bool:
        """Whether a stage is left for a token behind the last one: those that a drafter before it chose take stages, too."""
        return seq.id in self._states and len(self.unknown(seq)) <= len(self.head.stages)

    def unknown(self, seq: Sequence) -> list[int]:
        """The tokens without a state: the last committed one, and those that a drafter before it chose."""
        return seq.tokens[self._states[seq.id][0] :]

    def num_unfed(self, seq: Sequence) -> int:
        """A prompt need not be read."""
        return 0

    def score(self, seqs: list[Sequence], drafted: list[None], chunks: list[PromptChunk] | None = None) -> list[None]:
        """Never asked, as no prompt is read."""
        raise AssertionError("a head of stages reads no prompts")

    def states(self, seqs: list[Sequence]) -> F32:
        """The states [B, C] that the first stage reads."""
        rows = np.concatenate([self._states[seq.id][1] for seq in seqs])
        for norm in self.head.feature_norms:
            rows = norm.applied(rows)
        return rows

    def advanced(self, number: int, states: F32, tokens: list[int]) -> F32:
        """The states [B, C] that stage `number` makes its logits of. tokens [B]: before those that it drafts."""
        stage = self.head.stages[number]
        if isinstance(stage, ResidualStage):
            return states
        x = self.backend.project(states, stage.matrix) + np.float32(stage.embed_weight) * stage.embed.rows(tokens)
        x /= np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(stage.eps))
        return _gelu(x * stage.norm_weight + stage.norm_bias)

    def logits(self, number: int, states: F32) -> F32:
        """The logits [B, num_logits] of stage `number`. states: as `advanced` gave them."""
        stage = self.head.stages[number]
        for block in stage.blocks if isinstance(stage, ResidualStage) else ():
            x = self.backend.project(states, block)
            states = states + x / (1 + np.exp(-x))
        return self.backend.project(states, stage.output)


def _gelu(x: F32) -> F32:
    """x times the normal distribution's share below x, to 1e-7: Abramowitz and Stegun, formula 7.1.26."""
    y = np.abs(x) * np.float32(math.sqrt(0.5))
    t = 1 / (1 + np.float32(0.3275911) * y)
    beyond = np.zeros_like(t)
    for factor in reversed(_GELU):
        beyond = (beyond + np.float32(factor)) * t
    beyond *= np.exp(-y * y) / 2
    return x * np.where(x < 0, beyond, 1 - beyond)
