"""Drafts by a model with another vocabulary. It reads the text in its own tokens, and its drafts are translated to the verifier's.

There are two ways to translate, after arXiv 2502.05202. By tokens (its TLI): the model gives a probability only to tokens that both
vocabularies have. By text (its string-level match): the drafted text is encoded again.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from cpuspec.sampling import Draws, Row
from cpuspec.sequence import Sequence
from cpuspec.speculation.chain import ChainProposer
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.vocab import SharedTokens
from cpuspec.speculation.proposer import Floors, Proposer

# The last 8 to 32 tokens are encoded again for each draft. No pre-tokenizer looks back on more text, and encoding it takes next to
# no time.
_MOST_UNCUT, _LEAST_UNCUT = 32, 8


class TranslatedProposer(Proposer):
    """Translates the drafts of a chain over another vocabulary into the verifier's tokens.

    The chain and the levels below it run on sequences of their own: the text of the verifier's tokens, split by the draft's
    tokenizer. The chain's cache has an accepted draft already, unless its text is split differently then. by_text: translate by
    text. The chain then chooses tokens greedily, because the likeliest token matches most often. Requests with a grammar, which the
    chain does not know, are always translated by text.
    """

    def __init__(self, chain: ChainProposer, shared: SharedTokens, by_text: bool) -> None:
        """Unless by_text, the chain's context gives a probability only to tokens of `shared.draft_ids`."""
        self.name, self.levels, self.context = chain.name, chain.levels, chain.context
        self.num_tokens, self.in_one_pass = chain.num_tokens, chain.in_one_pass
        self._chain = chain
        self._shared = shared
        self._by_text = by_text
        self._translations: dict[int, _Translation] = {}  # by sequence id

    def propose(self, seqs: list[Sequence], limits: list[int], floors: list[Floors] | None = None) -> list[Draft]:
        """The chain's drafts for the same texts, translated. Floors count the chain's tokens."""
        translated = list(map(self._follow, seqs))
        limits = [limit if self._translations[seq.id].can_draft else 0 for seq, limit in zip(seqs, limits, strict=True)]
        drafts = self._chain.propose(translated, limits, floors)
        by_text = [self._by_text or seq.constraint is not None for seq in seqs]
        return list(map(self._translated, drafts, limits, by_text))

    def end(self, seq: Sequence) -> None:
        """Forget the sequence. The levels below see the whole answer before."""
        if seq.id in self._translations:
            self._chain.end(self._follow(seq))
            del self._translations[seq.id]

    def _follow(self, seq: Sequence) -> Sequence:
        """The sequence in the chain's tokens."""
        if seq.id not in self._translations:
            self._translations[seq.id] = begun = _Translation.begin(seq, self._shared, self._by_text or seq.constraint is not None)
            self._chain.begin(begun.seq, 0)
        return self._translations[seq.id].follow(seq, self._shared)

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
        """For each token of `encoded`, the draft's text, the product of the confidences of the tokens that begin in it."""
        assert draft.confidence is not None
        shared, sure = self._shared, [1.0] * len(encoded)
        ends = list(accumulate(len(shared.verifier.token_bytes(token)) for token in encoded))
        begin = 0
        for token, one in zip(draft.tokens.tolist(), draft.confidence.tolist(), strict=True):
            if shared.draft.is_special(token):  # the text ends here
                if encoded and encoded[-1] == shared.partner[token]:
                    sure[-1] *= one
                break
            if (place := bisect_right(ends, begin)) < len(encoded):
                sure[place] *= one
            begin += len(shared.draft.token_bytes(token))
        return sure


@dataclass
class _VerifiersDraws:
    """Draws tokens of the draft's vocabulary with the random numbers of their partners in the verifier's.

    ahead: how many tokens longer the answer is in the verifier's tokens.
    """

    draws: Draws
    shared: SharedTokens
    ahead: int

    def draw(self, row: Row, position: int) -> int:
        """See `Draws`."""
        token = self.draws.draw(self.shared.row_for_verifier(row), position + self.ahead)
        return int(self.shared.draft_ids[self.shared.verifier_ids.searchsorted(token)])


@dataclass
class _Translation:
    """A sequence in the draft's tokens.

    seq: the prompt, and the text of the answer up to the verifier's token number `end`, which is never encoded again.
    """

    seq: Sequence
    end: int
    can_draft: bool

    @staticmethod
    def begin(seq: Sequence, shared: SharedTokens, greedy: bool) -> "_Translation":
        """The prompt."""
        ids = shared.prompt_for_draft(seq.tokens[: seq.num_prompt_tokens])
        bias = shared.bias_for_draft(seq.params.logit_bias)
        params = replace(seq.params, logit_bias=bias, temperature=0 if greedy else seq.params.temperature)
        # A request may forbid every token that could be drafted, and a text of control tokens alone may become no token.
        can_draft = list(bias.values()).count(-np.inf) < len(shared) and bool(ids)
        return _Translation(Sequence(seq.id, ids, len(ids), params, seq.seed, seq.draws), seq.num_prompt_tokens, can_draft)

    def follow(self, seq: Sequence, shared: SharedTokens) -> Sequence:
        """The text of all the sequence's tokens. Only the end of the text is encoded again."""
        if self.end > len(seq.tokens):  # the request has ended within a round's tokens
            self.end = seq.num_prompt_tokens
            del self.seq.tokens[self.seq.num_prompt_tokens :]
        while seq.num_committed - self.end > _MOST_UNCUT:
            end = self.end + _cut(seq.tokens[self.end : self.end + _MOST_UNCUT], shared)
            self.seq.extend(shared.text_for_draft(seq.tokens[self.end : end]))
            self.end = end
        other = self.seq.with_drafted(shared.text_for_draft(seq.tokens[self.end :]))
        other.draws = _VerifiersDraws(seq.draws, shared, seq.num_output_tokens - other.num_output_tokens)
        return other


def _cut(tokens: list[int], shared: SharedTokens) -> int:
    """After how many of the tokens their text is cut: before a word, as tokenizers do, or else between characters."""
    texts = [shared.verifier.token_bytes(token) for token in tokens[: len(tokens) - _LEAST_UNCUT + 1]]
    places = range(len(texts) - 1, 0, -1)
    words = (i for i in places if texts[i][:1] == b" " and not texts[i - 1][-1:].isspace())
    characters = (i for i in places if not b"\x80" <= texts[i][:1] < b"\xc0")
    return next(words, next(characters, len(texts) - 1))
