"""Drafts by a model with another vocabulary: it follows the text in its own tokens, and its tokens come back in the verifier's.

Two ways back, after arXiv 2502.05202. By tokens (its TLI): the model gives only such tokens a probability as both vocabularies
have, so that its rows are rows over the verifier's tokens. By text (its string-level match): whatever it writes is encoded again.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from cpuspec.sampling import Draws, Row
from cpuspec.sequence import Sequence
from cpuspec.speculation.chain import ChainProposer
from cpuspec.speculation.context import Context
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.vocab import SharedTokens
from cpuspec.speculation.proposer import Floors, Proposer

# The last 8 to 32 tokens are encoded anew for each draft. That is more text than any pre-tokenizer looks back on, and takes next to
# no time.
_MOST_UNCUT, _LEAST_UNCUT = 32, 8


class TranslatedProposer(Proposer):
    """Translates the drafts of a chain over another vocabulary into the verifier's tokens.

    The chain and the levels below it run on sequences of their own, which hold the text of the verifier's tokens as the draft's
    tokenizer splits it. A draft that was accepted is in the chain's cache already, unless its text splits otherwise.
    by_text: tokens come back through their text, and the chain chooses them greedily, because the likeliest token matches most
    often. Requests with a grammar, which the chain does not know, are always drafted for like that.
    """

    def __init__(self, chain: ChainProposer, shared: SharedTokens, by_text: bool) -> None:
        """The chain's context gives other tokens than `shared.drafted` no probability, unless by_text."""
        self.name = chain.name
        self.levels = chain.levels
        self._chain = chain
        self._shared = shared
        self._by_text = by_text
        self._others: dict[int, _Other] = {}  # by sequence id

    @property
    def num_tokens(self) -> int:
        """The most tokens that the chain drafts."""
        return self._chain.num_tokens

    @property
    def in_one_pass(self) -> bool:
        """Whether a longer draft takes no more forwards."""
        return self._chain.in_one_pass

    @property
    def context(self) -> Context:
        """The model that drafts."""
        return self._chain.context

    def propose(self, seqs: list[Sequence], limits: list[int], floors: list[Floors] | None = None) -> list[Draft]:
        """The chain's drafts for the same texts, translated. Floors count the chain's tokens."""
        others = list(map(self._follow, seqs))
        limits = [limit if self._others[seq.id].can_draft else 0 for seq, limit in zip(seqs, limits, strict=True)]
        drafts = self._chain.propose(others, limits, floors)
        by_text = [self._by_text or seq.constraint is not None for seq in seqs]
        return list(map(self._translated, drafts, limits, by_text))

    def end(self, seq: Sequence) -> None:
        """Let the levels below see the whole answer, then forget it."""
        if seq.id in self._others:
            self._chain.end(self._follow(seq))
            del self._others[seq.id]

    def _follow(self, seq: Sequence) -> Sequence:
        """The sequence in the chain's tokens."""
        if seq.id not in self._others:
            self._others[seq.id] = other = _Other.begin(seq, self._shared, self._by_text or seq.constraint is not None)
            self._chain.begin(other.seq, 0)
        return self._others[seq.id].follow(seq, self._shared)

    def _translated(self, draft: Draft, limit: int, by_text: bool) -> Draft:
        """A chain's draft in the verifier's tokens, at most `limit` of them."""
        if by_text:
            encoded = self._shared.text_for_verifier(draft.tokens.tolist())
            sure = None if draft.confidence is None else self._confidence(draft, encoded)[:limit]
            return Draft.chain(encoded[:limit], self.name, draft.cycles, confidence=sure)
        tokens = self._shared.partner[draft.tokens].astype(np.int32)
        assert (tokens >= 0).all(), "a context that restricts its rows drew a token outside of them"
        return replace(draft, tokens=tokens)

    def _confidence(self, draft: Draft, encoded: list[int]) -> list[float]:
        """Of tokens that have the text of the chain's: of each the product over the chain's tokens that begin in it."""
        assert draft.confidence is not None
        shared, sure = self._shared, [1.0] * len(encoded)
        ends = list(accumulate(len(shared.verifier.token_bytes(token)) for token in encoded))
        begin = 0
        for token, one in zip(draft.tokens.tolist(), draft.confidence.tolist(), strict=True):
            if shared.draft.is_special(token):  # the text ends here, and with it what was encoded
                if encoded and encoded[-1] == shared.partner[token]:
                    sure[-1] *= one
                break
            if (place := bisect_right(ends, begin)) < len(encoded):
                sure[place] *= one
            begin += len(shared.draft.token_bytes(token))
        return sure


@dataclass
class _VerifiersDraws:
    """Draws tokens of the other vocabulary with the random numbers of their partners in the verifier's.

    ahead: how many tokens more the verifier's answer has.
    """

    draws: Draws
    shared: SharedTokens
    ahead: int

    def draw(self, row: Row, position: int) -> int:
        """See `Draws`."""
        token = self.draws.draw(self.shared.row_for_verifier(row), position + self.ahead)
        return int(self.shared.draft_ids[self.shared.verifier_ids.searchsorted(token)])


@dataclass
class _Other:
    """A sequence in the tokens of another vocabulary.

    seq: the prompt, and the text of the answer up to verifier's token number `end`, which stays encoded as it is.
    """

    seq: Sequence
    end: int
    can_draft: bool

    @staticmethod
    def begin(seq: Sequence, shared: SharedTokens, greedy: bool) -> "_Other":
        """The prompt."""
        ids = shared.prompt_for_draft(seq.tokens[: seq.num_prompt_tokens])
        bias = shared.bias_for_draft(seq.params.logit_bias)
        params = replace(seq.params, logit_bias=bias, temperature=0 if greedy else seq.params.temperature)
        # A request may forbid every token that could be drafted, and a text of control tokens alone may become no token.
        can_draft = list(bias.values()).count(-np.inf) < len(shared) and bool(ids)
        return _Other(Sequence(seq.id, ids, len(ids), params, seq.seed, seq.draws), seq.num_prompt_tokens, can_draft)

    def follow(self, seq: Sequence, shared: SharedTokens) -> Sequence:
        """The text of all the sequence's tokens. Only the end of the text is encoded anew."""
        if self.end > len(seq.tokens):  # the request has ended within a round's tokens
            self.end = seq.num_prompt_tokens
            del self.seq.tokens[self.seq.num_prompt_tokens :]
        while seq.num_committed - self.end > _MOST_UNCUT:
            end = self.end + _cut(seq.tokens[self.end : self.end + _MOST_UNCUT], shared)
            self.seq.extend(shared.text_for_draft(seq.tokens[self.end : end]))
            self.end = end
        other = self.seq.ahead(shared.text_for_draft(seq.tokens[self.end :]))
        other.draws = _VerifiersDraws(seq.draws, shared, seq.num_output_tokens - other.num_output_tokens)
        return other


def _cut(tokens: list[int], shared: SharedTokens) -> int:
    """After how many of the tokens to cut their text: before a word, as every tokenizer does, else between characters."""
    texts = [shared.verifier.token_bytes(token) for token in tokens[: len(tokens) - _LEAST_UNCUT + 1]]
    places = range(len(texts) - 1, 0, -1)
    words = (i for i in places if texts[i][:1] == b" " and not texts[i - 1][-1:].isspace())
    characters = (i for i in places if not b"\x80" <= texts[i][:1] < b"\xc0")
    return next(words, next(characters, len(texts) - 1))
