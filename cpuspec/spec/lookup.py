"""What followed the latest tokens wherever they occurred before, and how likely it is to follow again.

Where a suffix tree walks to the latest tokens, this scans an array of ids for them, a few microseconds for 8,000: nothing is
built, and undoing is setting a length. Shared by the proposers that draft from text alone; knows no models and draws nothing.
"""

import heapq
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from itertools import count
from typing import NamedTuple

import numpy as np

from cpuspec.config import LevelSpec
from cpuspec.errors import ConfigError
from cpuspec.model.batch import I32
from cpuspec.sequence import Mark, Sequence
from cpuspec.spec.draft import Draft

MAX_MATCH = 24  # tokens that a match looks back
# In text of one repeated token every position matches to the full depth; comparing them all would take milliseconds.
MAX_OCCURRENCES = 1024
NUM_MATCHES = 8  # in a text, where several continuations are weighed; beyond these nothing changes (benchmarks/LOG.md)
MIN_PROB = 0.1  # worth a row of a forward, with text that is drafted well and with text that is not (benchmarks/LOG.md)
STRENGTH = 4.0
NOTHING = -2  # stands before a sequence's first token
END = -1  # stands after each text where several follow one another


class Match(NamedTuple):
    """An earlier occurrence of the latest tokens: how many of them agree, and what followed."""

    length: int
    ahead: list[int]


Source = tuple[list[Match], float]  # matches, the longest first, and the strength of what they are smoothed by


class Text:
    """Token ids that grow at the end. `before` stands before the first one."""

    def __init__(self, before: int = NOTHING) -> None:
        self.tokens: list[int] = []
        self._ids = np.full(MAX_MATCH + 256, before, np.int32)  # `before` MAX_MATCH times, the tokens, room
        self._mark = Mark()  # state of the sequence that it follows

    def follow(self, seq: Sequence) -> None:
        """Hold exactly the sequence's tokens, by looking at those alone that changed since the last call."""
        del self.tokens[seq.unchanged(self._mark) :]
        self.extend(seq.tokens[len(self.tokens) :])
        self._mark = seq.mark()

    def extend(self, tokens: Tokens[int]) -> None:
        """Add tokens."""
        begin = MAX_MATCH + len(self.tokens)
        end = begin + len(tokens)
        if end > len(self._ids):
            self._ids = np.concatenate([self._ids[:begin], np.empty(end, np.int32)])
        self._ids[begin:end] = tokens
        self.tokens.extend(tokens)

    def forget(self, num_tokens: int) -> None:
        """Forget that many of the first tokens."""
        del self.tokens[:num_tokens]
        end = MAX_MATCH + len(self.tokens)
        self._ids[MAX_MATCH:end] = self._ids[MAX_MATCH + num_tokens : end + num_tokens]

    @property
    def latest(self) -> I32:
        """The last ids [MAX_MATCH], filled up in front."""
        return self._ids[len(self.tokens) : len(self.tokens) + MAX_MATCH]

    def matches(self, latest: I32, num_matches: int, num_ahead: int) -> list[Match]:
        """The `num_matches` longest occurrences of the end of `latest` [MAX_MATCH], the longest first, then the most recent.

        Each comes with `num_ahead` tokens that followed, or those before an END. One that reaches the end of the text reads on in
        what it predicts, which carries a repetition on. Only the most recent `MAX_OCCURRENCES` of the last id are looked at.
        """
        ids = self._ids[: MAX_MATCH + len(self.tokens)]
        ends = MAX_MATCH + np.flatnonzero(ids[MAX_MATCH:-1] == latest[-1])[-MAX_OCCURRENCES:]  # of occurrences
        if not len(ends):
            return []
        depth = 1
        while len(ends) > num_matches and depth < MAX_MATCH:
            agree = ids[ends - depth] == latest[-1 - depth]
            longer = ends[agree]
            if len(longer) < num_matches:
                ends = np.concatenate([ends[~agree][len(longer) - num_matches :], longer])
                break
            ends, depth = longer, depth + 1
        ends = ends[-num_matches:]
        differ = ids[ends[:, None] - np.arange(1, MAX_MATCH)] != latest[-2::-1]
        lengths = np.where(differ.any(axis=1), differ.argmax(axis=1) + 1, MAX_MATCH)
        longest = sorted(zip(lengths.tolist(), (ends + 1 - MAX_MATCH).tolist(), strict=True), reverse=True)
        return [Match(length, self._ahead(position, num_ahead)) for length, position in longest]

    def _ahead(self, position: int, num_tokens: int) -> list[int]:
        ahead = self.tokens[position : position + num_tokens]
        if END in ahead:
            return ahead[: ahead.index(END)]
        while len(ahead) < num_tokens:
            ahead += ahead[: num_tokens - len(ahead)]
        return ahead


def next_probs(sources: Iterable[Source], depth: int) -> dict[int, float]:
    """For each token that followed a match `depth` tokens on: how likely it is to follow again. They sum to less than one.

    Frequencies after the longest context are smoothed by those after the next shorter one, and so on: with c occurrences of a
    context, c / (c + strength) of the probability is theirs (the Dirichlet prior of MacKay and Peto, "A hierarchical Dirichlet
    language model", 1995). What one source leaves, the next one divides; what the last one leaves belongs to no token.
    """
    probs: dict[int, float] = {}
    mass = 1.0
    for matches, strength in sources:
        live = [match for match in matches if len(match.ahead) > depth]
        counts: dict[int, int] = {}
        for num, match in enumerate(live, 1):
            token = match.ahead[depth]
            counts[token] = counts.get(token, 0) + 1
            num_contexts = match.length - (live[num].length if num < len(live) else -depth)  # that occurred just `num` times
            if num_contexts:
                left = mass * (strength / (strength + num)) ** num_contexts
                for token, times in counts.items():
                    probs[token] = probs.get(token, 0.0) + (mass - left) * times / num
                mass = left
    return probs


class _Leaf(NamedTuple):
    """A token that could be drafted next, and where it would hang."""

    token: int
    parent: int
    prob: float
    depth: int
    sources: list[Source]  # the matches that its parent left


def draft_likely(sources: list[Source], num_tokens: int, min_prob: float, name: str, tree: bool = False) -> Draft:
    """The likeliest tokens ahead, at most `num_tokens`, as long as the path to a token has a probability of `min_prob`.

    A chain of the best next tokens, or a tree of the likeliest paths (arXiv 2411.04975, section 3). Point masses, with confidence.
    """
    tokens: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    leaves: list[tuple[float, int, _Leaf]] = []  # a heap, the likeliest path first
    order = count()
    node, path_prob, depth = -1, 1.0, 0
    while len(tokens) < num_tokens:
        probs = next_probs(sources, depth)
        for token in probs if tree else heapq.nlargest(1, probs, probs.__getitem__):
            if path_prob * probs[token] >= min_prob:
                leaf = _Leaf(token, node, probs[token], depth, sources)
                heapq.heappush(leaves, (-path_prob * probs[token], next(order), leaf))
        if not leaves:
            break
        negative, _, leaf = heapq.heappop(leaves)
        node, path_prob, depth = len(tokens), -negative, leaf.depth + 1
        sources = [
            ([m for m in matches if len(m.ahead) >= depth and m.ahead[leaf.depth] == leaf.token], strength)
            for matches, strength in leaf.sources
        ]
        tokens.append(leaf.token)
        parents.append(leaf.parent)
        confidence.append(leaf.prob)
    ids, hang, sure = np.array(tokens, np.int32), np.array(parents, np.int32), np.array(confidence, np.float32)
    return Draft(ids, hang, None, name, confidence=sure)


def wants_tree(level: LevelSpec) -> bool:
    """Whether a level of a draft spec asks for trees, its only argument. Raises ConfigError for another one."""
    if level.argument not in ("", "tree"):
        raise ConfigError(f"{level.name} takes no argument or tree, got {level.argument!r}; {level.name}@8 drafts at most 8 tokens")
    return bool(level.argument)
