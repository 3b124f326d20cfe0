"""Drafts by a model with another vocabulary: it follows the text in its own tokens, and its tokens come back in the verifier's.

Two ways back, after arXiv 2502.05202. By tokens (its TLI): the model gives only such tokens a probability as both vocabularies
have, so that its rows are rows over the verifier's tokens. By text (its string-level match): whatever it writes is encoded again.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from cpuspec.model.batch import F32
from cpuspec.sampling import Draws, Row
from cpuspec.sequence import Mark, Sequence, shared_prefix
from cpuspec.speculation.chain import ChainProposer
from cpuspec.speculation.context import Context
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.vocab import SharedTokens
from cpuspec.speculation.proposer import Floors
from cpuspec.speculation.verify import Verdict

# The text behind the last cut is encoded anew for each draft: more words of context for the tokens at the end than any
# pre-tokenizer looks at, and few enough to take no time worth counting.
_MOST_UNCUT, _LEAST_UNCUT = 32, 8


class TranslatedProposer:
    """Translates the drafts of a chain over another vocabulary into the verifier's tokens.

    The chain runs on sequences of its own, and so do the levels below it. They hold the text of the verifier's tokens as the
    draft's tokenizer splits it, kept up by truncate and feed: a draft that was accepted is there already, unless its text splits
    otherwise. by_text: the tokens come back through their text, and are those that the chain chooses greedily: a mode is what
    matches most often. So it is for requests with a grammar, which the chain does not know.
    """

    def __init__(self, chain: ChainProposer, shared: SharedTokens, by_text: bool) -> None:
        """The chain's context gives other tokens than `shared.drafted` no probability, unless by_text."""
        self.name = chain.name
        self.hidden_layers: tuple[int, ...] = ()
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

    def begin(self, seq: Sequence, num_cached: int) -> None:
        """Do nothing yet: a request that never asks for a draft needs no translation."""

    def propose(self, seqs: list[Sequence], limits: list[int], floors: list[Floors] | None = None) -> list[Draft]:
        """The chain's drafts for the same texts, translated. Floors count the chain's tokens."""
        others = [self._follow(seq) for seq in seqs]
        limits = [limit if other.can_draft else 0 for other, limit in zip(others, limits, strict=True)]
        drafts = self._chain.propose([other.seq for other in others], limits, floors)
        by_text = [self._by_text or seq.constraint is not None for seq in seqs]
        return list(map(self._translated, drafts, limits, by_text))

    def accept(self, seq: Sequence, verdict: Verdict, hidden: tuple[F32, ...]) -> None:
        """Do nothing: the next draft follows the text."""

    def end(self, seq: Sequence) -> None:
        """Let the levels below see the whole answer, then forget it."""
        if seq.id in self._others:
            self._chain.end(self._follow(seq).seq)
            del self._others[seq.id]

    def _follow(self, seq: Sequence) -> "_Other":
        """The sequence in the chain's tokens, up to date."""
        if seq.id not in self._others:
            self._others[seq.id] = other = _Other.begin(seq, self._shared, self._by_text or seq.constraint is not None)
            self._chain.begin(other.seq, 0)
        other = self._others[seq.id]
        other.follow(seq, self._shared)
        return other

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

    cuts: places at which the text is cut, so that what stands before them stays encoded as it is: (tokens of the original, tokens
    here) up to there. The first is the end of the prompt.
    """

    seq: Sequence
    can_draft: bool
    cuts: list[tuple[int, int]]
    followed: Mark

    @staticmethod
    def begin(seq: Sequence, shared: SharedTokens, greedy: bool) -> "_Other":
        """The prompt."""
        ids = shared.prompt_for_draft(seq.tokens[: seq.num_prompt_tokens])
        bias = shared.bias_for_draft(seq.params.logit_bias)
        params = replace(seq.params, logit_bias=bias, temperature=0 if greedy else seq.params.temperature)
        # A request may forbid every token that could be drafted, and a text of control tokens alone may become no token.
        can_draft = list(bias.values()).count(-np.inf) < len(shared) and bool(ids)
        other = Sequence(seq.id, ids, len(ids), params, seq.seed, seq.draws)
        return _Other(other, can_draft, [(seq.num_prompt_tokens, len(ids))], Mark(seq.num_prompt_tokens, len(seq.rewinds)))

    def follow(self, seq: Sequence, shared: SharedTokens) -> None:
        """Hold the text of all the sequence's tokens. Encodes what is new, and what stands behind the last cut before it."""
        unchanged = seq.unchanged(self.followed)
        while self.cuts[-1][0] > unchanged:
            self.cuts.pop()
        start, first = self.cuts[-1]
        ids: list[int] = []
        while len(seq.tokens) - start > _MOST_UNCUT:
            end = start + _cut(seq.tokens[start : start + _MOST_UNCUT], shared)
            ids += shared.text_for_draft(seq.tokens[start:end])
            self.cuts.append((end, first + len(ids)))
            start = end
        ids += shared.text_for_draft(seq.tokens[start:])
        agreed = first + shared_prefix(self.seq.tokens[first:], ids)
        if agreed < len(self.seq.tokens):
            self.seq.rewind(agreed)
        self.seq.extend(ids[agreed - first :])
        self.seq.draws = _VerifiersDraws(seq.draws, shared, seq.num_output_tokens - self.seq.num_output_tokens)
        self.followed = seq.mark()


def _cut(tokens: list[int], shared: SharedTokens) -> int:
    """After how many of the tokens to cut their text: before a word, as every tokenizer does, else between characters."""
    texts = [shared.verifier.token_bytes(token) for token in tokens[: len(tokens) - _LEAST_UNCUT + 1]]
    places = range(len(texts) - 1, 0, -1)
    words = (i for i in places if texts[i][:1] == b" " and not texts[i - 1][-1:].isspace())
    characters = (i for i in places if not b"\x80" <= texts[i][:1] < b"\xc0")
    return next(words, next(characters, len(texts) - 1))
