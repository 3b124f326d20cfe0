"""A head of stages with the hidden states that it drafts from. `HeadContext` is the same for heads with layers and a cache.

The first stage reads the verifier's hidden state of the last token that has one. So the head reads no prompt, and keeps nothing of
other tokens. Hidden states come with the verdicts (`learn`).
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
from cpuspec.speculation.slots import Slots

_GELU = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


class StageContext:
    """One head of stages. Not thread-safe: one caller at a time. capacity: the most tokens of a sequence."""

    hidden_bytes = 0

    def __init__(self, head: Head, backend: HeadBackend, capacity: int) -> None:
        self.head = head
        self.backend = backend
        self.capacity = capacity
        self.cache = KVCache(1, 1, lambda: None, lambda *_: None, lambda *_: None, 0)  # of no bytes
        self.slots = Slots(backend, self.cache)
        self.num_forwards = self.weight_bytes = 0  # of drafts; each reads the matrices of all stages once
        self.spent = Spent()  # stays empty: the matrices of stages are multiplied one by one
        self._hidden: dict[int, tuple[int, F32]] = {}  # by id: tokens with a hidden state; the last state [1, C]

    def begin(self, seq: Sequence, num_cached: int) -> None:
        """Do nothing: the first hidden state comes with the first verdict."""

    def learn(self, seq: Sequence, layers: tuple[F32, ...]) -> None:
        """Keep the verifier's hidden state of the last accepted token. layers: as `Proposer.accept` has them."""
        (rows,) = layers
        self._hidden[seq.id] = len(seq.tokens) - 1, rows[-1:].copy()  # a view would keep those of a whole prompt

    def end(self, seq: Sequence) -> None:
        """Forget a sequence."""
        self._hidden.pop(seq.id, None)

    def can_draft(self, seq: Sequence) -> bool:
        """Whether a stage is left for a token after the last one: tokens chosen by an earlier drafter use up stages."""
        return seq.id in self._hidden and len(self.unknown(seq)) <= len(self.head.stages)

    def unknown(self, seq: Sequence) -> list[int]:
        """The tokens without a hidden state: the last committed one, and those that an earlier drafter chose."""
        return seq.tokens[self._hidden[seq.id][0] :]

    def read(self, seqs: list[Sequence]) -> list[bool]:
        """True for each sequence: no prompt is read."""
        return [True] * len(seqs)

    def hidden(self, seqs: list[Sequence]) -> F32:
        """The hidden states [B, C] that the first stage reads."""
        rows = np.concatenate([self._hidden[seq.id][1] for seq in seqs])
        for norm in self.head.feature_norms:
            rows = norm.applied(rows)
        return rows

    def advanced(self, number: int, hidden: F32, tokens: list[int]) -> F32:
        """The hidden states [B, C] of stage `number`, from those of the stage before. tokens [B]: the last ones before its own."""
        stage = self.head.stages[number]
        if isinstance(stage, ResidualStage):
            return hidden
        x = self.backend.project(hidden, stage.matrix) + np.float32(stage.embed_weight) * stage.embed.rows(tokens)
        x /= np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(stage.eps))
        return _gelu(x * stage.norm_weight + stage.norm_bias)

    def logits(self, number: int, hidden: F32) -> F32:
        """The logits [B, num_logits] of stage `number`. hidden: as `advanced` gave them."""
        stage = self.head.stages[number]
        for block in stage.blocks if isinstance(stage, ResidualStage) else ():
            x = self.backend.project(hidden, block)
            hidden = hidden + x / (1 + np.exp(-x))
        return self.backend.project(hidden, stage.output)


def _gelu(x: F32) -> F32:
    """x times the normal distribution function of x, to 1e-7: Abramowitz and Stegun, formula 7.1.26."""
    y = np.abs(x) * np.float32(math.sqrt(0.5))
    t = 1 / (1 + np.float32(0.3275911) * y)
    beyond = np.zeros_like(t)
    for factor in reversed(_GELU):
        beyond = (beyond + np.float32(factor)) * t
    beyond *= np.exp(-y * y) / 2
    return x * np.where(x < 0, beyond, 1 - beyond)
