"""Prompt lookup: what followed the last occurrence of the latest tokens (github.com/apoorvumang/prompt-lookup-decoding)."""

from cpuspec.sequence import Sequence
from cpuspec.settings import LevelSpec
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.lookup import MIN_PROB, NUM_MATCHES, STRENGTH, IndexedText, draft_likely, text_of, wants_tree
from cpuspec.speculation.proposer import Proposer

DEFAULT_NUM_TOKENS = 7


class NgramProposer(Proposer):
    """Drafts the tokens that followed the last occurrence of the longest suffix of prompt and output.

    A tree merges the tokens that followed the longest occurrences, and has the likeliest paths. Each token that agrees makes the
    next one likelier (`next_probs`). The draft goes on while a path is accepted with a probability of `min_prob` or more. No token
    is drawn.
    """

    name = "ngram"

    def __init__(self, num_tokens: int = DEFAULT_NUM_TOKENS, min_prob: float = MIN_PROB, *, tree: bool = False) -> None:
        self.num_tokens = num_tokens
        self.min_prob = min_prob
        self.tree = tree
        self._texts: dict[int, IndexedText] = {}

    def begin(self, seq: Sequence, num_cached: int) -> None:
        """Index the prompt, and the prediction of the answer."""
        self._texts[seq.id] = text_of(seq)

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """A chain or a tree for each sequence."""
        drafts = []
        for seq, limit in zip(seqs, limits, strict=True):
            text, num_tokens = self._texts[seq.id], min(self.num_tokens, limit)
            text.follow(seq)
            matches = text.matches(text.latest, NUM_MATCHES if self.tree else 1, num_tokens)
            drafts.append(draft_likely([(matches, STRENGTH)], num_tokens, self.min_prob, self.name, self.tree))
        return drafts

    def end(self, seq: Sequence) -> None:
        """Forget the sequence."""
        self._texts.pop(seq.id, None)


def make_ngram(level: LevelSpec) -> NgramProposer:
    """Make it from a level of a draft spec: `ngram`, `ngram@8`, `ngram:tree@8:0.2`."""
    num_tokens, min_prob = level.num_tokens or DEFAULT_NUM_TOKENS, level.min_confidence or MIN_PROB
    return NgramProposer(num_tokens, min_prob, tree=wants_tree(level))
