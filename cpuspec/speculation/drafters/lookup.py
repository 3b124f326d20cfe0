"""Finds the tokens that followed earlier occurrences of the latest tokens, and how likely they are to follow again.

An index keeps, for each run of one, two and four tokens, the place where it occurred last, and for each place the one before. So a
match is found, and a drafted token is removed again, in a few steps and without numpy arrays, which take longer to make.
All lookup drafters share this file. It knows no models and draws no random numbers.
"""

import heapq
import math
from collections.abc import Iterable
from functools import cache
from itertools import count
from typing import NamedTuple

import numpy as np

from cpuspec.errors import ConfigError
from cpuspec.sequence import Sequence, shared_prefix
from cpuspec.settings import LevelSpec
from cpuspec.speculation.draft import Draft

MAX_MATCH = 24  # tokens that a match looks back
RUNS = (4, 2, 1)  # tokens of the runs that are looked up, one after the other
MAX_OCCURRENCES = 128  # of each that are looked at: most have a few, but in tables and indentation there may be thousands
NUM_MATCHES = 8  # of a text, if several continuations are weighed; more change nothing (benchmarks/DECISIONS.md#lookup-rules)
MIN_PROB = 0.1  # of a path that is worth a row of a forward, whatever the text (benchmarks/DECISIONS.md#lookup-rules)
STRENGTH = 4.0
INDEXED_AT_ONCE = 4096  # tokens, which take a few milliseconds of a step: other requests wait meanwhile
END = -1  # separates texts that follow one another


class Match(NamedTuple):
    """An earlier occurrence of the latest tokens: how many tokens agree, and the tokens that followed."""

    length: int
    following: list[int]


Evidence = tuple[list[Match], float]  # matches, the longest first, and the strength of the prior that smooths them


class _Runs:
    """For each run of `size` tokens the position where it ended last in a text. Runs are hashed, so a position may be wrong."""

    def __init__(self, size: int, tokens: list[int]) -> None:
        self.size = size
        self.before: list[int] = []  # for each position, where the run that ends there ended before, or -1
        self._latest: dict[int, int] = {}
        self.extend(tokens)

    def latest(self, tokens: list[int]) -> int:
        """Where the run that ends `tokens` ended last, or -1."""
        return self._latest.get(self._run(tokens, len(tokens) - 1), -1)

    def extend(self, tokens: list[int]) -> None:
        """Index the tokens that were added to the text, INDEXED_AT_ONCE at most."""
        latest, before = self._latest, self.before
        for end in range(len(before), min(len(tokens), len(before) + INDEXED_AT_ONCE)):
            run = self._run(tokens, end)
            before.append(latest.get(run, -1))
            latest[run] = end

    def retract(self, tokens: list[int], num_tokens: int) -> None:
        """Forget all indexed tokens but the first `num_tokens`."""
        for end in range(len(self.before) - 1, num_tokens - 1, -1):
            run, before = self._run(tokens, end), self.before.pop()
            if before < 0:
                del self._latest[run]
            else:
                self._latest[run] = before

    def _run(self, tokens: list[int], end: int) -> int:
        return tokens[end] if self.size == 1 else hash(tuple(tokens[max(end + 1 - self.size, 0) : end + 1]))


class IndexedText:
    """Token ids that grow at the end. A long text is indexed in portions: matches come from the indexed part."""

    def __init__(self, before: Iterable[int] = ()) -> None:
        """before: tokens that come first and never change. A sequence's tokens follow them."""
        self.tokens: list[int] = list(before)
        self._num_before = len(self.tokens)
        self._num_forgotten = 0  # leading tokens
        self._runs = [_Runs(size, self.tokens) for size in RUNS]
        self._num_committed = 0  # tokens of the sequence that never change

    def __len__(self) -> int:
        return len(self.tokens) - self._num_forgotten

    def follow(self, seq: Sequence) -> None:
        """Hold exactly the sequence's tokens, after the ones that come first. Looks only at new tokens."""
        same = min(self._num_committed, len(seq.tokens))
        same += shared_prefix(self.tokens[self._num_before + same :], seq.tokens[same:])
        length = self._num_before + same
        if length < len(self.tokens):
            for runs in self._runs:
                runs.retract(self.tokens, length)
            del self.tokens[length:]
        self.extend(seq.tokens[same:])
        self._num_committed = seq.num_committed

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens."""
        self.tokens.extend(tokens)
        self._index()

    def _index(self) -> None:
        for runs in self._runs:
            runs.extend(self.tokens)

    def forget(self, num_tokens: int) -> None:
        """Forget the first `num_tokens` tokens. They are removed in large portions, because the rest is then indexed anew."""
        self._num_forgotten += num_tokens
        if 4 * self._num_forgotten > len(self.tokens):
            self.tokens, self._num_forgotten = self.tokens[self._num_forgotten :], 0
            self._runs = [_Runs(size, self.tokens) for size in RUNS]

    @property
    def latest(self) -> list[int]:
        """The last tokens, at most MAX_MATCH."""
        return self.tokens[-MAX_MATCH:]

    def matches(self, latest: list[int], num_matches: int, num_following: int) -> list[Match]:
        """The `num_matches` longest occurrences of the end of `latest`, the longest first, then the most recent.

        Each has the `num_following` tokens that followed, or those before an END. A match at the end of the text continues with
        its own prediction, so that a repetition goes on. Of each run only the most recent `MAX_OCCURRENCES` are looked at.
        """
        self._index()
        return self._matches(latest, num_matches, num_following, self._runs, 0)

    def matches_before_a_change(self, num_matches: int, num_following: int) -> list[Match]:
        """Matches of the tokens before the last one. The last one is taken for a change of the token that followed each match.

        So each match continues after that token, as a quote may go on after a changed word. Only the longest runs are looked up,
        and a match counts as no longer than they are: the next change may be near.
        """
        found = self._matches(self.tokens[-MAX_MATCH:-1], num_matches, num_following, self._runs[:1], 1)
        return [Match(RUNS[0], match.following) for match in found]

    def _matches(
        self, latest: list[int], num_matches: int, num_following: int, looked_up: list[_Runs], skipped: int
    ) -> list[Match]:
        """skipped: how many tokens after each match are left out."""
        tokens, first = self.tokens, self._num_forgotten
        last = len(tokens) - 1 - skipped  # where `latest` itself ends
        found: dict[int, int] = {}  # lengths, by where they end
        longest = MAX_MATCH  # the most tokens of a match that was not found yet
        for runs in looked_up:
            end, num_seen = runs.latest(latest), 0
            num_longest = len(found)
            while end >= first and num_longest < num_matches and num_seen < MAX_OCCURRENCES:
                if end < last and end not in found:
                    length, most = 0, min(len(latest), end + 1 - first)
                    while length < most and tokens[end - length] == latest[-1 - length]:
                        length += 1
                    if length >= runs.size:
                        found[end] = length
                        num_longest += length >= longest
                end = runs.before[end]
                num_seen += 1
            if len(found) >= num_matches:
                break
            longest = runs.size - 1
        ranked = sorted([(length, end) for end, length in found.items()], reverse=True)[:num_matches]
        return [Match(length, self._following(end + 1 + skipped, num_following)) for length, end in ranked]

    def _following(self, position: int, num_tokens: int) -> list[int]:
        following = self.tokens[position : position + num_tokens]
        if END in following:
            return following[: following.index(END)]
        while len(following) < num_tokens:
            following += following[: num_tokens - len(following)]
        return following


def text_of(seq: Sequence) -> IndexedText:
    """A text that holds the sequence, and before it the prediction of its answer, if there is one.

    The prediction follows a copy of the prompt's end, as the answer follows the prompt, so that it is drafted from the first token
    on.
    """
    prompt_end = seq.tokens[: seq.num_prompt_tokens][-MAX_MATCH:]
    text = IndexedText([*prompt_end, *seq.prediction, END] if seq.prediction else ())
    text.follow(seq)
    return text


def next_probs(evidence: Iterable[Evidence], depth: int) -> dict[int, float]:
    """The probability of each token that followed a match, `depth` tokens after it. The sum is less than one.

    A context is a run of the latest tokens. The longest one comes first. If it occurred c times, the tokens that followed share
    c / (c + strength) of the probability by their frequencies. The next shorter context divides what is left in the same way, and
    so on (the Dirichlet prior of MacKay and Peto, "A hierarchical Dirichlet language model", 1995). What one source leaves, the
    next one divides. What the last one leaves belongs to no token.
    """
    probs: dict[int, float] = {}
    mass = 1.0
    for matches, strength in evidence:
        live = [match for match in matches if len(match.following) > depth]
        counts: dict[int, int] = {}
        for num, match in enumerate(live, 1):
            token = match.following[depth]
            counts[token] = counts.get(token, 0) + 1
            # How many contexts occurred exactly `num` times: one for each length, drafted tokens included.
            num_contexts = match.length - (live[num].length if num < len(live) else -depth)
            if num_contexts:
                left = mass * (strength / (strength + num)) ** num_contexts
                for token, times in counts.items():
                    probs[token] = probs.get(token, 0.0) + (mass - left) * times / num
                mass = left
    return probs


def draft_likely(evidence: list[Evidence], num_tokens: int, min_prob: float, name: str, tree: bool = False) -> Draft:
    """The likeliest next tokens, at most `num_tokens`, while the path to a token has a probability of `min_prob` or more.

    A chain of the best next tokens, or a tree of the likeliest paths (arXiv 2411.04975, section 3), with confidences.
    """
    nodes = (_likely_tree if tree else _likely_chain)(evidence, num_tokens, min_prob)
    if not nodes:
        return _nothing(name)
    tokens, parents, confidence = zip(*nodes, strict=True)
    ids, links, sure = np.array(tokens, np.int32), np.array(parents, np.int32), np.array(confidence, np.float32)
    return Draft(ids, links, name, confidence=sure)


_Node = tuple[int, int, float]  # token, parent, probability after its parent


def _likely_chain(evidence: list[Evidence], num_tokens: int, min_prob: float) -> list[_Node]:
    nodes: list[_Node] = []
    path_prob = 1.0
    while (depth := len(nodes)) < num_tokens:
        probs = next_probs(evidence, depth)
        token = max(probs, key=probs.__getitem__, default=END)
        evidence = _narrowed(evidence, depth, token)
        following = [(token, probs.get(token, 0.0))]
        if len(probs) == 1:
            following += _agreed(evidence, depth + 1, probs[token])
        for token, prob in following[: num_tokens - depth]:
            path_prob *= prob
            if not prob or path_prob < min_prob:
                return nodes
            nodes.append((token, len(nodes) - 1, prob))
    return nodes


def _agreed(evidence: list[Evidence], depth: int, prob: float) -> list[tuple[int, float]]:
    """The tokens from `depth` on in which all matches agree, with their `next_probs`. prob: of the token before.

    Each token is one more context after which all matches agree.
    """
    left = math.prod(strength / (strength + len(matches)) for matches, strength in evidence)
    found = []
    for token, *others in zip(*(match.following[depth:] for matches, _ in evidence for match in matches), strict=False):
        if others.count(token) < len(others):
            break
        prob = 1 - (1 - prob) * left
        found.append((token, prob))
    return found


class _Leaf(NamedTuple):
    """Consecutive tokens that could be drafted next, each with its probability, and the node `parent` that they follow.

    depth: of the first token. evidence: the matches that agree with all the tokens.
    """

    tokens: list[tuple[int, float]]
    parent: int
    depth: int
    evidence: list[Evidence]


def _likely_tree(evidence: list[Evidence], num_tokens: int, min_prob: float) -> list[_Node]:
    nodes: list[_Node] = []
    leaves: list[tuple[float, int, _Leaf]] = []  # a heap, the likeliest path first
    order = count()

    def add(leaf: _Leaf, path_prob: float) -> None:
        path_prob *= leaf.tokens[0][1]
        if path_prob >= min_prob:
            heapq.heappush(leaves, (-path_prob, next(order), leaf))

    def branch(evidence: list[Evidence], depth: int, parent: int, path_prob: float) -> None:
        probs = next_probs(evidence, depth)
        for token, prob in probs.items():
            if path_prob * prob >= min_prob:
                left = _narrowed(evidence, depth, token)
                agreed = _agreed(left, depth + 1, prob) if len(probs) == 1 else []
                add(_Leaf([(token, prob), *agreed], parent, depth, left), path_prob)

    branch(evidence, 0, -1, 1.0)
    while leaves and len(nodes) < num_tokens:
        negative, _, leaf = heapq.heappop(leaves)
        (token, prob), *rest = leaf.tokens
        nodes.append((token, leaf.parent, prob))
        if rest:
            add(leaf._replace(tokens=rest, parent=len(nodes) - 1, depth=leaf.depth + 1), -negative)
        else:
            branch(leaf.evidence, leaf.depth + 1, len(nodes) - 1, -negative)
    return nodes


def _narrowed(evidence: list[Evidence], depth: int, token: int) -> list[Evidence]:
    """The matches that a token follows, `depth` tokens after them."""
    return [
        ([m for m in matches if len(m.following) > depth and m.following[depth] == token], strength)
        for matches, strength in evidence
    ]


@cache
def _nothing(name: str) -> Draft:
    return Draft(np.zeros(0, np.int32), np.zeros(0, np.int32), name, confidence=np.zeros(0, np.float32))


def wants_tree(level: LevelSpec) -> bool:
    """Whether a level of a draft spec asks for trees, its only argument. Raises ConfigError for another one."""
    if level.argument not in ("", "tree"):
        raise ConfigError(f"{level.name} takes no argument or tree, got {level.argument!r}; {level.name}@8 drafts at most 8 tokens")
    return bool(level.argument)
