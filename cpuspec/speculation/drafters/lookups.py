"""Drafts of tokens that followed the latest ones before: prompt lookup (github.com/apoorvumang/prompt-lookup-decoding) and suffix
decoding (arXiv 2411.04975).
"""

from cpuspec.sequence import Sequence
from cpuspec.settings import LevelSpec
from cpuspec.speculation.draft import Draft
from cpuspec.speculation.drafters.lookup import END, MIN_PROB, NUM_MATCHES, STRENGTH, IndexedText, draft_likely, text_of, wants_tree
from cpuspec.speculation.proposer import Proposer

NUM_TOKENS = {"ngram": 7, "suffix": 15}  # of a draft by default
PAST_STRENGTH = 2 * STRENGTH  # another request's text is weaker evidence
MAX_PAST_TOKENS = 1 << 16
_MOST_SALTS = 64  # an index of a few tokens takes kilobytes, too
SHORT_MATCH = 2  # tokens; if the request has no longer match, a match before a changed token is looked for


class LookupProposer(Proposer):
    """Drafts the tokens that followed earlier occurrences of the latest tokens. No token is drawn.

    ngram: a chain continues the last occurrence of the longest suffix of prompt and output. suffix: the tokens count that most
    often followed, in the request first, and in past answers if that leaves doubt. If the request repeats an earlier passage with
    one token changed, the draft continues that passage after the changed token. An answer that ends is remembered for requests of
    the same salt, `max_past_tokens` tokens in all, of the latest 64 salts.

    The draft, a chain or a tree of the likeliest paths, goes on while a path is accepted with a probability of `min_prob` or more:
    the longer the matches and the more they agree, the longer it is (`next_probs`). num_tokens: None for that of NUM_TOKENS.
    """

    def __init__(
        self,
        name: str,
        num_tokens: int | None = None,
        min_prob: float = MIN_PROB,
        *,
        tree: bool = False,
        max_past_tokens: int = MAX_PAST_TOKENS,
    ) -> None:
        self.name = name
        self.num_tokens = num_tokens or NUM_TOKENS[name]
        self.min_prob = min_prob
        self.tree = tree
        self.max_past_tokens = max_past_tokens
        self._weighs = name == "suffix"
        self._texts: dict[int, IndexedText] = {}
        self._past: dict[str, IndexedText] = {}  # by the requests' salts, the most recently used one last

    def begin(self, seq: Sequence, num_cached: int) -> None:
        """Index the prompt, and the prediction of the answer."""
        self._texts[seq.id] = text_of(seq)

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[Draft]:
        """A chain or a tree for each sequence."""
        drafts = []
        for seq, limit in zip(seqs, limits, strict=True):
            text, num_tokens = self._texts[seq.id], min(self.num_tokens, limit)
            text.follow(seq)
            latest = text.latest
            own = text.matches(latest, NUM_MATCHES if self.tree or self._weighs else 1, num_tokens)
            evidence = [(own, STRENGTH)]
            if self._weighs:
                past = self._past[seq.salt].matches(latest, NUM_MATCHES, num_tokens) if seq.salt in self._past else []
                evidence.append((past, PAST_STRENGTH))
                if not own or own[0].length <= SHORT_MATCH:
                    evidence.append((text.matches_before_a_change(NUM_MATCHES, num_tokens), STRENGTH))
            drafts.append(draft_likely(evidence, num_tokens, self.min_prob, self.name, self.tree))
        return drafts

    def end(self, seq: Sequence) -> None:
        """Forget the sequence, and remember its answer, if past answers count."""
        if self._texts.pop(seq.id, None) is not None and self._weighs:
            past = self._past[seq.salt] = self._past.pop(seq.salt, IndexedText())
            past.extend([*seq.output, END])
            past.forget(max(0, len(past) - self.max_past_tokens))
            while len(self._past) > _MOST_SALTS or sum(map(len, self._past.values())) > self.max_past_tokens:
                del self._past[next(iter(self._past))]


def make_lookup(level: LevelSpec) -> LookupProposer:
    """Make it from a level of a draft spec: `ngram`, `suffix@8`, `ngram:tree@8:0.2`."""
    return LookupProposer(level.name, level.num_tokens, level.min_confidence or MIN_PROB, tree=wants_tree(level))
