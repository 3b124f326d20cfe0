"""A draft in the making, by a head or by a model in one pass: chooses its tokens from rows of logits."""

from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from cpuspec.checkpoints.heads.head import I64
from cpuspec.errors import CpuspecError
from cpuspec.model.batch import F32
from cpuspec.sampling import confidence, processed, row_to_draw
from cpuspec.sequence import Sequence
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.proposer import Floors, goes_on

# The most children of a node, nodes that are expanded at each depth, and depths of a tree. EAGLE-2 has 10 children and 5 depths for
# drafts of 60 tokens on a GPU.
CHILDREN, DEPTHS = 4, 8


@dataclass(slots=True)
class HeadPath:
    """The tokens that a head drafts for a sequence, one after the other, at most `limit`.

    token_ids: the target's id of each entry of a row; None if they are the same. draws: whether tokens are drawn; else each is the
    likeliest one. min_confidence: the draft ends with the first token whose row gives no token this probability. floors: as in
    `DraftModel.propose`; with them a draft has confidences, and also likely alternatives to its tokens if it `branches`.
    """

    token_ids: I64 | None
    seq: Sequence
    limit: int
    vocab_size: int  # of the target's rows
    min_confidence: float = 0.0
    draws: bool = False
    floors: Floors | None = None
    branches: bool = True
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)  # of the tokens, if `min_confidence` or floors need it
    others: list[list[tuple[int, float]]] = field(default_factory=list)  # for each token its alternatives with their confidences
    most: int = field(init=False)  # nodes of the draft, alternatives included

    def __post_init__(self) -> None:
        self.most = self.limit

    @property
    def is_done(self) -> bool:
        """Whether the draft has enough tokens."""
        return len(self.tokens) >= self.limit

    def choose(self, logits: F32, sure: float | None = None) -> None:
        """Choose the next token from a row [num_logits]. The request's grammar, penalties and biases apply.

        sure: the token's confidence, if the row does not give it.
        """
        seq, others = self.seq, list[tuple[int, float]]()
        draws = self.draws and not seq.params.greedy
        if draws or not seq.params.keeps_order or seq.constraint:
            legal = seq.legal(self.tokens)
            if seq.constraint and legal is None:  # nothing may follow, or only the end
                self.limit = len(self.tokens)
                return
            row = self._over_vocabulary(logits)
            try:
                if draws:
                    token = seq.draw(row_to_draw(row, seq.params, seq.history, self.tokens, legal), len(self.tokens))
                else:
                    token = int(processed(row, seq.params, seq.history, self.tokens, legal).argmax())
            except CpuspecError:  # the request forbids every token that the head knows, or the row is not finite
                self.limit = len(self.tokens)
                return
        elif self.floors is not None:
            [(token, chance), *others] = likeliest_children(logits, self.token_ids)
            sure = chance if sure is None else sure
        else:
            number = int(logits.argmax())
            token = number if self.token_ids is None else int(self.token_ids[number])
        self.tokens.append(token)
        self.others.append(others if self.branches else [])
        if self.floors is None and not self.min_confidence:
            return
        sure = confidence(logits) if sure is None else sure
        self.confidence.append(sure)
        if sure < self.min_confidence or not goes_on(self.floors or [], len(self.tokens), prod(self.confidence)):
            self.limit = len(self.tokens)

    def draft(self, name: str) -> Draft:
        """The chosen tokens. With alternatives, the likeliest nodes come first."""
        chain = Draft.chain(self.tokens, name, confidence=None if self.floors is None else self.confidence)
        alternatives = [(token, depth - 1, sure) for depth, others in enumerate(self.others) for token, sure in others]
        if not alternatives or len(chain) == self.most:
            return chain
        tokens, parents, confidence = zip(*alternatives, strict=True)
        tree = replace(
            chain,
            tokens=np.array([*chain.tokens, *tokens], np.int32),
            parents=np.array([*chain.parents, *parents], np.int32),
            confidence=np.array([*self.confidence, *confidence], np.float32),
        )
        likely = tree.likely
        return tree.only(sorted(range(len(tree)), key=lambda node: -likely[node])[: self.most])

    def _over_vocabulary(self, logits: F32) -> F32:
        """A row of the head as a row [vocab_size] over the target's tokens."""
        ids = self.token_ids
        if ids is None and len(logits) == self.vocab_size:
            return logits
        row = np.full(self.vocab_size, -np.inf, np.float32)
        if ids is None:
            row[: len(logits)] = logits
        else:
            row[ids] = logits
        return row


def likeliest_children(logits: F32, token_ids: I64 | None) -> list[tuple[int, float]]:
    """The `CHILDREN` likeliest tokens of a row and their probabilities, the likeliest first."""
    values, best = np.asarray(logits, np.float32), list[int]()
    left = values.copy()
    for _ in range(min(CHILDREN, len(left))):  # a few passes take a tenth of the time of a partition of 150,000
        best.append(int(left.argmax()))
        left[best[-1]] = -np.inf
    weights = np.exp(values - values[best[0]])
    chances = (weights[best] / weights.sum()).tolist()
    return list(zip(best if token_ids is None else token_ids[best].tolist(), chances, strict=True))
