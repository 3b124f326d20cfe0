"""A draft while a head, or a model in one pass, makes it: the choice of its tokens from rows of logits."""

from dataclasses import dataclass, field

import numpy as np

from cpuspec.checkpoints.heads.head import I64
from cpuspec.errors import ConfigError
from cpuspec.model.batch import F32
from cpuspec.sampling import Row, distribution, processed, sample
from cpuspec.sequence import Sequence
from cpuspec.speculation.draft import Draft

# Of a tree: children of a node, nodes that are expanded at each depth, and depths. EAGLE-2 has 10 and 5 for drafts of 60 tokens on
# a GPU.
CHILDREN, DEPTHS = 4, 8


@dataclass(slots=True)
class HeadPath:
    """The tokens that a head drafts for a sequence, one after the other, at most `limit`.

    token_ids: the target's id of each number of a row, None for the same. draws: whether tokens are drawn, and the rows declared;
    else each is the likeliest. min_confidence: the draft ends with the first token of a row that gives no token this probability.
    depths: of a tree, at most. offers: the likeliest tokens behind each path of drafted ones, where somebody wants to know.
    """

    token_ids: I64 | None
    seq: Sequence
    limit: int
    vocab_size: int  # of the target's rows
    min_confidence: float = 0.0
    draws: bool = False
    depths: int = DEPTHS
    offers: dict[tuple[int, ...], list[int]] | None = None
    tokens: list[int] = field(default_factory=list)
    probs: list[Row] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether no further token is wanted."""
        return len(self.tokens) >= self.limit

    def choose(self, logits: F32) -> None:
        """Take the next token from a row [num_logits], as the request asks: its grammar, penalties and biases apply."""
        seq = self.seq
        draws = self.draws and not seq.params.greedy
        if draws or not seq.params.keeps_order or seq.constraint:
            legal = seq.legal(self.tokens)
            if seq.constraint and legal is None:  # nothing may follow, or the end alone
                self.limit = len(self.tokens)
                return
            row = self._over_vocabulary(logits)
            try:
                if draws:
                    self.probs.append(distribution(row, seq.params, seq.history, self.tokens, legal))
                    token = sample(self.probs[-1], seq.rng)
                else:
                    token = int(processed(row, seq.params, seq.history, self.tokens, legal).argmax())
            except ConfigError:  # the request forbids every token that the head knows
                self.limit = len(self.tokens)
                return
        elif self.offers is not None:  # rows that a request changes tell nothing of the head's ranks
            offered = self.ids_of([one for one, _ in largest(logits, CHILDREN)[0]])
            self.offers[tuple(self.tokens)], token = offered, offered[0]
        else:
            [token] = self.ids_of([int(logits.argmax())])
        self.tokens.append(token)
        if self.min_confidence and 1 / np.exp(logits - logits.max()).sum() < self.min_confidence:
            self.limit = len(self.tokens)

    def ids_of(self, numbers: list[int]) -> list[int]:
        """The target's ids of numbers of a row."""
        return numbers if self.token_ids is None else self.token_ids[numbers].tolist()

    def draft(self, name: str) -> Draft:
        """What was chosen."""
        return Draft.chain(self.tokens, name, tuple(self.probs) if self.draws and not self.seq.params.greedy else None)

    def _over_vocabulary(self, logits: F32) -> F32:
        """A row of the head as a row [vocab_size] of the target's tokens."""
        ids = self.token_ids
        if ids is None and len(logits) == self.vocab_size:
            return logits
        row = np.full(self.vocab_size, -np.inf, np.float32)
        if ids is None:
            row[: len(logits)] = logits
        else:
            row[ids] = logits
        return row


def largest(logits: F32, number: int) -> tuple[list[tuple[int, float]], F32]:
    """The numbers and values of a row's largest logits, the largest first, and the row without them."""
    left = logits.copy()
    best = []
    for _ in range(min(number, len(left))):  # a few passes take a tenth of the time of a partition of 150,000
        one = int(left.argmax())
        best.append((one, left[one]))
        left[one] = -np.inf
    return best, left
